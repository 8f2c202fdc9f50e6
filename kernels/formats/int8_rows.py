"""Carrying a weight over to INT8 rows with ConvRot: the ``int8`` execution of formats that have no hardware here.

``W -> W H -> Q8 rows``. The rotation spreads outliers, so the second rounding costs little: FP8 0.0265 -> 0.0291 and
NVFP4 0.0952 -> 0.0959 relative output error, against 0.037 and 0.134 for their own arithmetic with quantised
activations (measured).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import triton_ops
from ..facts import own_kernels
from ..retire import run
from ..spec import Spec
from . import quantize
from .int8 import kitchen_codes, triton_codes
from .products import Carried, FloatRows, int8_linear, row_chunks
from .rotation import preferred_group, rotate

AnySpec = TypeVar("AnySpec", bound=Spec)
#: decode(start, stop, group) -> int8 [n, K], float32 [n] or [n, 1]
Transcoder = Callable[[int, int, int], tuple[Tensor, Tensor]]
#: decode(start, stop, dtype) -> [n, K]
Decoder = Callable[[int, int, torch.dtype], Tensor]


class Int8Rows(NamedTuple):
    """A weight as INT8 rows: ``qweight`` int8 [N, K], ``scale`` float32 [N, 1], ``group`` the ConvRot group size (0:
    not rotated)."""

    qweight: Tensor
    scale: Tensor
    group: int

    def tensors(self) -> dict[str, Tensor]:
        """As the tensors of an ``int8_tensorwise`` layer."""
        return {"weight": self.qweight, "weight_scale": self.scale}


def int8_rows_spec(spec: AnySpec, group: int) -> AnySpec:
    """The declaration of ``spec``'s weight after it became :class:`Int8Rows`: an ``int8_tensorwise`` layer."""
    changes: dict[str, Any] = {"format": "int8_tensorwise", "annotations": {"is_rowwise": True}}
    if group:
        changes["annotations"] |= {"convrot": True, "convrot_groupsize": group}
    return replace(spec, **changes)  # type: ignore[type-var]


def decoders(device: torch.device) -> tuple[str, ...]:
    """Whose element-wise kernels decode weights on ``device``, best first, ending in torch."""
    if device.type != "cuda":
        return ("torch",)
    ours = own_kernels() != "off" and triton_ops.available().usable
    old = torch.version.hip is None and torch.cuda.get_device_capability(device) < (7, 5)
    kitchen = () if torch.version.hip is not None else ("kitchen",)
    return (*(("triton",) if ours and not old else ()), *kitchen, "torch")


def carried(
    name: str, device: torch.device, N: int, K: int, decoded: FloatRows, transcoders: Mapping[str, Transcoder]
) -> Carried:
    """A weight's INT8 rows, by the fastest decoder there is.

    Args:
        name: what is decoded, for the report of a kernel that fails.
        device: where the weight is.
        N: rows wanted.
        K: stored columns.
        decoded: row access to the dense weight, the way that always works.
        transcoders: faster ways by backend.
    """
    group = preferred_group(K)

    def plain(start: int, stop: int, group: int) -> tuple[Tensor, Tensor]:
        return quantize.int8_rows(rotate(decoded(start, stop), group))

    bodies = {**transcoders, "torch": plain}
    ladder = ",".join(backend for backend in decoders(device) if backend in bodies)

    def rows(start: int, stop: int) -> tuple[Tensor, Tensor]:
        codes, scale = run(f"{name} to int8", ladder, bodies, start, stop, group)
        return codes, scale.reshape(-1, 1)

    return Carried(rows, N, group)


def dense_rows(
    name: str, device: torch.device, dtype: torch.dtype, decoded: FloatRows, others: Mapping[str, Decoder]
) -> FloatRows:
    """Row access to the dense weight in ``dtype``, by the fastest decoder there is (float32 from the plain one)."""

    def plain(start: int, stop: int, _dtype: torch.dtype) -> Tensor:
        return decoded(start, stop)

    bodies = {**others, "torch": plain}
    ladder = ",".join(backend for backend in decoders(device) if backend in bodies)
    return lambda start, stop: run(f"{name} decode", ladder, bodies, start, stop, dtype)


def kitchen_carried(x: Tensor, weight: Carried, bias: Tensor | None) -> Tensor:
    """comfy-kitchen's int8_linear on a carried weight."""
    return kitchen_codes(x, weight.N, weight.rows, bias, weight.group)


def triton_carried(x: Tensor, weight: Carried, bias: Tensor | None) -> Tensor:
    """Our product on a carried weight."""
    return triton_codes(x, weight.N, weight.rows, bias, weight.group)


def torch_carried(x: Tensor, weight: Carried, bias: Tensor | None) -> Tensor:
    """Plain torch on a carried weight."""
    return int8_linear(x, weight.N, weight.rows, weight.group, bias)


#: The ``int8`` execution of every carried format.
CARRIED_BODIES: dict[str, Callable[..., Tensor]] = {
    "kitchen": kitchen_carried,
    "triton": triton_carried,
    "torch": torch_carried,
}


def gather(weight: Carried, K: int, device: torch.device) -> Int8Rows:
    """All rows of a carried weight of ``K`` stored columns, a few thousand at a time."""
    qweight = torch.empty((weight.N, K), dtype=torch.int8, device=device)
    scale = torch.empty((weight.N, 1), dtype=torch.float32, device=device)
    for start, stop in row_chunks(weight.N, 4 * K, device):
        qweight[start:stop], scale[start:stop] = weight.rows(start, stop)
    return Int8Rows(qweight, scale, weight.group)
