"""``int8_tensorwise``: int8 codes, one scale for the tensor or one an output row, optionally rotated (ConvRot).

Weight: ``W_rot[n, k] = code[n, k] * weight_scale[n]``. Linear: ``y = (Q8(x H) codes^T) * (s_row * weight_scale) +
bias`` with Q8 the row quantiser and H the rotation (identity where the layer does not say ``convrot``). Source:
comfy-kitchen ``int8_linear``; RULES section 4, "INT8".

Tensors: ``weight`` int8 [N, K]; ``weight_scale`` [] / [1] / [N] / [N, 1], any float dtype.

Every other format that is carried over to INT8 rows runs on the three bodies below.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from .. import kitchen
from ..facts import DeviceFacts
from ..operators import operator
from ..retire import run
from ..routes import (
    Execution,
    Route,
    all_of,
    always_slow,
    inputs_divisible,
    outputs_divisible,
    torch_int8_slow,
    torch_int8_units,
    triton_matmul,
)
from ..routes import kitchen as kitchen_has
from ..spec import Spec, rotation_group
from .base import Decoded, Format, Tensors, reference_int8, scaled_rows
from .products import Carried, CodeRows, add_low_rank, dense_linear, flatten, int8_linear, row_chunks
from .rotation import PREFERRED_GROUPS, rotate
from .scales import required, row_scale

#: A weight carried over to INT8 per call is decoded at once up to this size, in row chunks beyond it.
CARRY_BYTES = 128 << 20


@operator(
    "int8_linear",
    "(Tensor x, Tensor qweight, Tensor scale, Tensor? bias, int out_features, int group, str execution, "
    "str backends, Tensor? low_rank=None, Tensor? up=None) -> Tensor",
)
def _int8_linear(
    x: Tensor,
    qweight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    out_features: int,
    group: int,
    execution: str,
    backends: str,
    low_rank: Tensor | None = None,
    up: Tensor | None = None,
) -> Tensor:
    scale = row_scale(scale, qweight.shape[0])
    scale = scale[:out_features] if scale.dim() else scale
    bodies = {"torch": torch_exact} if execution == "exact" else BODIES
    if low_rank is not None and up is not None:
        bodies = {name: _beside(name, body, low_rank, up) for name, body in bodies.items()}
    return run(f"int8_linear ({execution})", backends, bodies, x, qweight[:out_features], scale, bias, group)


def _beside(name: str, body: Callable[..., Tensor], low_rank: Tensor, up: Tensor) -> Callable[..., Tensor]:
    """``body`` with ``low_rank up^T`` added: in the product's own epilogue where it has one, after it elsewhere."""
    if name == "triton":
        return lambda *args: body(*args, low_rank, up)
    return lambda *args: add_low_rank(body(*args), low_rank, up)


def codes_and_scale(qweight: Tensor, scale: Tensor) -> CodeRows:
    """Row access to int8 codes [N, K] with a scale [] or [N, 1]."""
    return lambda start, stop: (qweight[start:stop], scale[start:stop] if scale.dim() else scale)


def torch_exact(x: Tensor, qweight: Tensor, scale: Tensor, bias: Tensor | None, group: int) -> Tensor:
    """Decoded weight, dense product."""
    return dense_linear(x, qweight.shape[0], scaled_rows(qweight, scale), group, bias)


# --- bodies: int8 rows on each backend; x [..., K], qweight int8 [N, K], scale float32 [] or [N, 1] -------------------


def kitchen_int8(x: Tensor, qweight: Tensor, scale: Tensor, bias: Tensor | None, group: int) -> Tensor:
    """comfy-kitchen's int8_linear."""
    y = kitchen.int8_linear(flatten(x), qweight, scale, bias, group)
    return y.reshape(*x.shape[:-1], qweight.shape[0])


def triton_int8(
    x: Tensor,
    qweight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    group: int,
    low_rank: Tensor | None = None,
    up: Tensor | None = None,
) -> Tensor:
    """Our row quantiser and our product, with ``low_rank [..., R] up^T [R, N]`` in its epilogue if given."""
    from ..triton_ops.int8_gemm import int8_matmul
    from ..triton_ops.row_quantizer import quantize_rows

    x2 = _rows_adjacent(x)
    codes, s_row = quantize_rows(x2, rotation=group or 1, qmax=127)
    y = int8_matmul(
        codes,
        qweight.contiguous(),
        s_row,
        scale.reshape(-1),
        bias,
        out_dtype=x.dtype,
        low_rank=None if low_rank is None else _rows_adjacent(low_rank),
        up=up,
    )
    return y.reshape(*x.shape[:-1], qweight.shape[0])


def torch_int8(x: Tensor, qweight: Tensor, scale: Tensor, bias: Tensor | None, group: int) -> Tensor:
    """Plain torch."""
    return int8_linear(x, qweight.shape[0], codes_and_scale(qweight, scale), group, bias)


def _rows_adjacent(x: Tensor) -> Tensor:
    """``[M, K]`` whose rows are adjacent in memory, as our kernels read them."""
    x2 = flatten(x)
    return x2 if x2.stride(-1) == 1 else x2.contiguous()


def triton_codes(x: Tensor, N: int, rows: CodeRows, bias: Tensor | None, group: int, *, bits: int = 8) -> Tensor:
    """Our kernels on a weight whose codes come from ``rows``, some thousand at a time."""
    from ..triton_ops.int8_gemm import int8_matmul
    from ..triton_ops.row_quantizer import quantize_rows

    x2 = _rows_adjacent(x)
    y = torch.empty((x2.shape[0], N), dtype=x.dtype, device=x.device)
    if y.numel():
        codes, s_row = quantize_rows(x2, rotation=group or 1, qmax=127 if bits == 8 else 7)
        for start, stop in row_chunks(N, x2.shape[1], x.device):
            part, scale = rows(start, stop)
            int8_matmul(
                codes,
                part.contiguous(),
                s_row,
                scale.reshape(-1),
                None if bias is None else bias[start:stop],
                out_dtype=x.dtype,
                out=y[:, start:stop],
            )
    return y.reshape(*x.shape[:-1], N)


BODIES: dict[str, Callable[..., Tensor]] = {"kitchen": kitchen_int8, "triton": triton_int8, "torch": torch_int8}


def kitchen_codes(x: Tensor, N: int, rows: CodeRows, bias: Tensor | None, group: int) -> Tensor:
    """comfy-kitchen's int8_linear on a weight whose codes come from ``rows``.

    Each call quantises x again, so the chunks are as large as :data:`CARRY_BYTES` allows.
    """
    x2 = flatten(x).contiguous()
    step = max(128, CARRY_BYTES // max(1, x2.shape[1]) // 128 * 128)
    if step >= N:
        codes, scale = rows(0, N)
        return kitchen.int8_linear(x2, codes, scale, bias, group).reshape(*x.shape[:-1], N)
    y = torch.empty((x2.shape[0], N), dtype=x.dtype, device=x.device)
    for start in range(0, N, step):
        stop = min(N, start + step)
        codes, scale = rows(start, stop)
        y[:, start:stop] = kitchen.int8_linear(x2, codes, scale, None if bias is None else bias[start:stop], group)
    return y.reshape(*x.shape[:-1], N)


# --- routes -----------------------------------------------------------------------------------------------------------


def _group(spec: Spec) -> int:
    if spec.format == "int8_tensorwise":
        return rotation_group(spec, always=False)
    # W4A4 and W4A8 are always rotated; what is carried over rotates by a size of our choice.
    return rotation_group(spec, always=True) if spec.format in ("convrot_w4a4", "asym_w4a8_int8") else 0


def kitchen_shapes(spec: Spec, facts: DeviceFacts) -> str | None:
    """What comfy-kitchen's INT8 kernels are built for: 16-byte rows, 8 output columns, its three rotation sizes."""
    if _group(spec) not in (0, *PREFERRED_GROUPS):
        return f"comfy-kitchen rotates in groups of 16, 64 or 256; this layer says {_group(spec)}."
    what = "comfy-kitchen's int8 kernel"
    return inputs_divisible(16, what)(spec, facts) or outputs_divisible(8, what)(spec, facts)


def our_rotation(spec: Spec, _facts: DeviceFacts) -> str | None:
    """Our row quantiser rotates in groups of 16, 64 and 256."""
    if _group(spec) in (0, *PREFERRED_GROUPS):
        return None
    return f"our kernels rotate in groups of 16, 64 or 256; this layer says {_group(spec)}."


KITCHEN_INT8 = Route(
    "native",
    "kitchen",
    "int8_linear",
    "comfy-kitchen's int8_linear runs on this card's INT8 units.",
    all_of(kitchen_has("int8_linear"), kitchen_shapes),
)
TRITON_INT8 = Route(
    "native",
    "triton",
    "int8_matmul",
    "This pack's own Triton kernel runs on this card's INT8 units.",
    all_of(triton_matmul, our_rotation),
)
TORCH_INT8 = Route(
    "native",
    "torch",
    "torch._int_mm",
    "PyTorch's int8 product runs on this device's INT8 units.",
    torch_int8_units,
    torch_int8_slow,
)
TORCH_FLOAT_CODES = Route(
    "native",
    "torch",
    "float32 products of the codes",
    "This device has no exact int8 instructions, so the codes are multiplied as float32, as fast as any linear.",
    slow=torch_int8_slow,
)
EXACT = Route(
    "exact",
    "torch",
    "decoded weight, dense product",
    "The weight is decoded a few thousand rows at a time and multiplied in the model's own precision.",
)

#: For weights that are carried over first: without int8 units that detour costs time and gains nothing.
CARRIED_ROUTES = (KITCHEN_INT8, TRITON_INT8, TORCH_INT8, replace(TORCH_FLOAT_CODES, slow=always_slow))


class Int8(Format):
    """``int8_tensorwise``."""

    name = "int8_tensorwise"
    int8_is_native = True
    has_int8_codes = True
    operator = "int8_linear"
    routes = (KITCHEN_INT8, TRITON_INT8, TORCH_INT8, TORCH_FLOAT_CODES, EXACT)

    def _parts(self, spec: Spec, tensors: Tensors) -> tuple[Tensor, Tensor]:
        qweight = required(spec, tensors, "weight")
        return qweight, row_scale(required(spec, tensors, "weight_scale"), qweight.shape[0])

    def decoded(self, spec: Spec, tensors: Tensors) -> Decoded:
        qweight, scale = self._parts(spec, tensors)
        return Decoded(
            scaled_rows(qweight, scale), qweight.shape[0], qweight.shape[1], rotation_group(spec, always=False)
        )

    def carried(self, spec: Spec, tensors: Tensors) -> Carried:
        qweight, scale = self._parts(spec, tensors)
        return Carried(codes_and_scale(qweight, scale), qweight.shape[0], rotation_group(spec, always=False))

    def reference_native(self, x: Tensor, spec: Spec, tensors: Tensors) -> Tensor:
        return reference_int8(x, *self._parts(spec, tensors), rotation_group(spec, always=False))

    def linear(
        self, x: Tensor, spec: Spec, tensors: Tensors, bias: Tensor | None, execution: Execution, backends: str
    ) -> Tensor:
        return _int8_linear(x, *self._arguments(spec, tensors, bias), execution, backends)

    def linear_beside(
        self,
        x: Tensor,
        spec: Spec,
        tensors: Tensors,
        bias: Tensor | None,
        execution: Execution,
        backends: str,
        low_rank: Tensor,
        up: Tensor,
    ) -> Tensor:
        return _int8_linear(x, *self._arguments(spec, tensors, bias), execution, backends, low_rank, up)

    def _arguments(
        self, spec: Spec, tensors: Tensors, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, int, int]:
        qweight, scale = required(spec, tensors, "weight"), required(spec, tensors, "weight_scale")
        return qweight, scale, bias, spec.shape[0], rotation_group(spec, always=False)

    def embedding(self, index: Tensor, spec: Spec, tensors: Tensors) -> Tensor:
        qweight, scale = self._parts(spec, tensors)
        rows = torch.nn.functional.embedding(index, qweight).to(torch.float32)
        rows = rows * (torch.nn.functional.embedding(index, scale) if scale.dim() else scale)
        return rotate(rows, rotation_group(spec, always=False))
