"""How an operator becomes a ``torch.library`` one, so that torch.compile sees one opaque node with a known result
shape.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "quant_loader"


def operator(name: str, schema: str) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Register the decorated function as ``quant_loader::<name>``, a pure function of plain tensors and scalars.

    ``schema`` is torch's own notation. Its first argument must be ``Tensor x`` and it must hold ``int out_features``:
    the result is always ``[*x.shape[:-1], out_features]`` of x's dtype, contiguous. That is what tracing is told.

    A process may hold two copies of this package (installed, and as a checkout in ``custom_nodes``). The second copy
    registers under a numbered name: replacing the first one's operator would break the graphs and layers that hold it.
    """
    arguments = [part.strip().rsplit(" ", 1)[-1].split("=")[0] for part in schema[1 : schema.index(") ->")].split(",")]
    position = arguments.index("out_features")

    def fake(*args: Any) -> Tensor:
        x: Tensor = args[0]
        return x.new_empty((*x.shape[:-1], args[position]))

    def register(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        public, number = name, 1
        while hasattr(getattr(torch.ops, NAMESPACE), public):
            number += 1
            public = f"{name}_{number}"

        @wraps(function)
        def body(*args: Any) -> Tensor:
            # No tokens: there is nothing to quantise, and maxima over nothing are errors.
            return fake(*args) if 0 in args[0].shape[:-1] else function(*args)

        definition = torch.library.custom_op(f"{NAMESPACE}::{public}", body, mutates_args=(), schema=schema)
        definition.register_fake(fake)
        overload: Callable[..., Tensor] = getattr(getattr(torch.ops, NAMESPACE), public).default
        return overload

    return register
