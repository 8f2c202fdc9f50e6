"""Carrying a weight over to INT8 rows with ConvRot: the ``int8`` execution of formats that have no hardware here.

``W -> W H -> Q8 rows``. The rotation spreads outliers, so the second rounding costs little: FP8 0.0265 -> 0.0291 and
NVFP4 0.0952 -> 0.0959 relative output error, against 0.037 and 0.134 for their own arithmetic with quantised
activations (measured).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..spec import Spec
from . import quantize
from .products import CodeRows, FloatRows, row_chunks
from .rotation import rotate

AnySpec = TypeVar("AnySpec", bound=Spec)


class Int8Rows(NamedTuple):
    """A weight as INT8 rows: ``qweight`` int8 [N, K], ``scale`` float32 [N, 1], ``group`` the ConvRot group size (0:
    not rotated).
    """

    qweight: Tensor
    scale: Tensor
    group: int

    def tensors(self) -> dict[str, Tensor]:
        """As the tensors of an ``int8_tensorwise`` layer."""
        return {"weight": self.qweight, "weight_scale": self.scale}


def carry(rows: FloatRows, group: int) -> CodeRows:
    """Row access to the INT8 codes of a weight given by its decoded rows (unrotated)."""
    return lambda start, stop: quantize.int8_rows(rotate(rows(start, stop), group))


def gather(N: int, K: int, rows: CodeRows, device: torch.device) -> tuple[Tensor, Tensor]:
    """All of ``rows`` as (int8 [N, K], float32 [N, 1]), a few thousand rows in float at a time."""
    qweight = torch.empty((N, K), dtype=torch.int8, device=device)
    scale = torch.empty((N, 1), dtype=torch.float32, device=device)
    for start, stop in row_chunks(N, 4 * K):
        qweight[start:stop], scale[start:stop] = rows(start, stop)
    return qweight, scale


def int8_rows_spec(spec: AnySpec, group: int) -> AnySpec:
    """The declaration of ``spec``'s weight after it became :class:`Int8Rows`: an ``int8_tensorwise`` layer."""
    changes: dict[str, Any] = {"format": "int8_tensorwise", "annotations": {"is_rowwise": True}}
    if group:
        changes["annotations"] |= {"convrot": True, "convrot_groupsize": group}
    return replace(spec, **changes)  # type: ignore[type-var]
