"""``float8_e4m3fn`` and ``float8_e5m2``: one byte a weight, one scale for the tensor or one an output row.

Weight: ``W = e4m3 * weight_scale`` (no scale tensor: 1). Native linear: ``xq = e4m3(clamp(x / s, -448, 448))``, ``y =
xq codes^T * (s * weight_scale) + bias`` with ``s = input_scale`` where the file has one, else ``max|x| / 448``.
(ComfyUI uses ``s = 1`` there, which clips activations beyond 448 and rounds small ones away.) Layers that say
``full_precision_matrix_mult`` keep x as it is. For e5m2 weights the activation is e4m3 as well, always with the dynamic
scale: the finer grid, and the pair that hardware multiplies. Source: RULES section 4, "FP8"; torch ``scaled_mm``.

Tensors: ``weight`` float8 (or U8) [N, K]; ``weight_scale`` [] / [1] / [N] / [N, 1]; ``input_scale`` [] / [1].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..facts import DeviceFacts
from ..operators import operator
from ..retire import run
from ..routes import Execution, Route, all_of, always_slow, carried_routes, inputs_divisible, outputs_divisible
from ..spec import Spec
from . import quantize
from .base import Decoded, Format, Tensors, scaled_rows
from .codes import as_float8, float8_to_float
from .int8 import CARRIED_ROUTES, EXACT
from .int8_rows import CARRIED_BODIES, Decoder, Transcoder, carried, dense_rows
from .products import Carried, FloatRows, dense_linear, flatten, product_dtype, values_linear
from .scales import optional, required, row_scale, scalar

_CODES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@operator(
    "fp8_linear",
    "(Tensor x, Tensor qweight, Tensor? scale, Tensor? input_scale, Tensor? bias, int out_features, "
    "str codes, str execution, str backends) -> Tensor",
)
def _fp8_linear(
    x: Tensor,
    qweight: Tensor,
    scale: Tensor | None,
    input_scale: Tensor | None,
    bias: Tensor | None,
    out_features: int,
    codes: str,
    execution: str,
    backends: str,
) -> Tensor:
    weight = canonical(qweight, scale, input_scale, codes, out_features)
    argument = _carried(weight) if execution == "int8" else weight
    return run(f"fp8_linear ({execution})", backends, _BODIES[execution], x, argument, bias)


class Fp8Weight(NamedTuple):
    """``codes`` float8 [N, K]; ``scale`` float32 [] or [N, 1]; ``static`` the file's activation scale, float32 [], or
    None.
    """

    codes: Tensor
    scale: Tensor
    static: Tensor | None

    @property
    def N(self) -> int:  # noqa: N802
        """Output features."""
        return self.codes.shape[0]

    @property
    def K(self) -> int:  # noqa: N802
        """Input features."""
        return self.codes.shape[1]

    def decoded(self) -> FloatRows:
        """Row access to the dense weight."""
        return scaled_rows(self.codes, self.scale)


def canonical(
    qweight: Tensor, scale: Tensor | None, input_scale: Tensor | None, codes: str, out_features: int | None = None
) -> Fp8Weight:
    """The weight from the file's tensors; a missing scale means 1."""
    weight = as_float8(qweight, _CODES[codes])
    if scale is None:
        factor = torch.ones((), dtype=torch.float32, device=qweight.device)
    else:
        factor = row_scale(scale, qweight.shape[0])
    # An e5m2 layer's own scale was made for e5m2 activations; the activations here are e4m3.
    static = None if input_scale is None or codes == "e5m2" else scalar(input_scale)
    return Fp8Weight(weight[:out_features], factor[:out_features] if factor.dim() else factor, static)


def _torch_exact(x: Tensor, w: Fp8Weight, bias: Tensor | None) -> Tensor:
    def by_triton(start: int, stop: int, dtype: torch.dtype) -> Tensor:
        from ..triton_ops.block_decode import decode_fp8

        return decode_fp8(w.codes[start:stop], w.scale[start:stop] if w.scale.dim() else w.scale, dtype=dtype)

    faster: dict[str, Decoder] = {"triton": by_triton} if w.codes.dtype is torch.float8_e4m3fn else {}
    return dense_linear(x, w.N, dense_rows("fp8", x.device, product_dtype(x), w.decoded(), faster), 0, bias)


def _torch_native(x: Tensor, w: Fp8Weight, bias: Tensor | None) -> Tensor:
    s = quantize.fp8_scale(x) if w.static is None else w.static
    ladder = "scaled_mm,float32" if _has_scaled_mm(x, w) else "float32"
    return run("fp8 product", ladder, {"scaled_mm": _scaled_mm, "float32": _emulated}, x, s, w, bias)


def _emulated(x: Tensor, s: Tensor, w: Fp8Weight, bias: Tensor | None) -> Tensor:
    values = quantize.fp8(flatten(x), s).to(torch.float32)
    scale = s * w.scale.reshape(1, -1)
    return values_linear(x, values, w.N, lambda start, stop: float8_to_float(w.codes[start:stop]), scale, bias)


def _has_scaled_mm(x: Tensor, w: Fp8Weight) -> bool:
    if x.device.type != "cuda" or torch.version.hip is not None or not x.numel():
        return False
    return torch.cuda.get_device_capability(x.device) >= (8, 9) and w.K % 16 == 0 and w.N % 16 == 0


def _scaled_mm(x: Tensor, s: Tensor, w: Fp8Weight, bias: Tensor | None) -> Tensor:
    """The FP8 tensor cores, through torch."""
    out_dtype = x.dtype if x.dtype in (torch.bfloat16, torch.float16) else torch.float32
    # Row scales are applied to the product: torch's row-wise recipe gives bfloat16 only and wants a scale per token
    # too.
    rowwise = w.scale.dim() > 0
    fused = bias if bias is not None and not rowwise and out_dtype != torch.float32 else None
    y = torch._scaled_mm(
        quantize.fp8(flatten(x), s),
        w.codes.contiguous().t(),
        scale_a=s,
        scale_b=torch.ones_like(s) if rowwise else w.scale,
        bias=None if fused is None else fused.to(out_dtype),
        out_dtype=torch.float32 if rowwise else out_dtype,
        use_fast_accum=False,
    )
    if rowwise:
        y = y * w.scale.reshape(1, -1)
    if bias is not None and fused is None:
        y = y + bias.to(y.dtype)
    return y.to(x.dtype).reshape(*x.shape[:-1], w.N)


def _carried(w: Fp8Weight) -> Carried:
    def by_triton(start: int, stop: int, group: int) -> tuple[Tensor, Tensor]:
        from ..triton_ops.transcode import fp8_to_int8

        return fp8_to_int8(w.codes[start:stop], w.scale[start:stop] if w.scale.dim() else w.scale, rotation=group or 1)

    faster: dict[str, Transcoder] = {"triton": by_triton} if w.codes.dtype is torch.float8_e4m3fn else {}
    return carried("fp8", w.codes.device, w.N, w.K, w.decoded(), faster)


_BODIES: dict[str, dict[str, Callable[..., Tensor]]] = {
    "native": {"torch": _torch_native},
    "int8": CARRIED_BODIES,
    "exact": {"torch": _torch_exact},
}


def _fp8_units(_spec: Spec, facts: DeviceFacts) -> str | None:
    if facts.maker != "nvidia" or facts.sm < (8, 9):
        return (
            f"{facts.name} has no FP8 units that PyTorch reaches (NVIDIA cards have them from compute capability 8.9)."
        )
    return None


_NATIVE = Route(
    "native",
    "torch",
    "scaled_mm",
    "PyTorch's scaled_mm runs on this card's FP8 units.",
    all_of(_fp8_units, inputs_divisible(16, "scaled_mm"), outputs_divisible(16, "scaled_mm")),
)
_EMULATED = Route(
    "native",
    "torch",
    "float32 products of FP8 values",
    "The FP8 arithmetic is carried out in float32.",
    slow=always_slow,
)
_CARRIED = "The weight is carried over to INT8 rows with ConvRot, more precise than FP8 activations."


class Fp8(Format):
    """``float8_e4m3fn`` (codes "e4m3") or ``float8_e5m2`` (codes "e5m2")."""

    operator = "fp8_linear"
    routes = (_NATIVE, _EMULATED, *carried_routes(_CARRIED, *CARRIED_ROUTES), EXACT)

    def __init__(self, name: str, codes: str) -> None:
        self.name = name
        self.codes = codes

    def _weight(self, spec: Spec, tensors: Tensors) -> Fp8Weight:
        qweight, scale = required(spec, tensors, "weight"), optional(tensors, "weight_scale")
        return canonical(qweight, scale, optional(tensors, "input_scale"), self.codes)

    def decoded(self, spec: Spec, tensors: Tensors) -> Decoded:
        w = self._weight(spec, tensors)
        return Decoded(w.decoded(), w.N, w.K)

    def carried(self, spec: Spec, tensors: Tensors) -> Carried:
        return _carried(self._weight(spec, tensors))

    def reference_native(self, x: Tensor, spec: Spec, tensors: Tensors) -> Tensor:
        w = self._weight(spec, tensors)
        s = quantize.fp8_scale(x) if w.static is None else w.static
        product = quantize.fp8(x, s).to(torch.float32) @ w.codes.to(torch.float32).t()
        return product * (s * w.scale).reshape(1, -1)

    def linear(
        self, x: Tensor, spec: Spec, tensors: Tensors, bias: Tensor | None, execution: Execution, backends: str
    ) -> Tensor:
        weight = required(spec, tensors, "weight")
        scale, static = optional(tensors, "weight_scale"), optional(tensors, "input_scale")
        return _fp8_linear(x, weight, scale, static, bias, spec.shape[0], self.codes, execution, backends)

    def embedding(self, index: Tensor, spec: Spec, tensors: Tensors) -> Tensor:
        w = self._weight(spec, tensors)
        # Looked up as bytes: devices have no gather kernel for 8-bit floats.
        rows = torch.nn.functional.embedding(index, w.codes.view(torch.uint8)).view(w.codes.dtype).to(torch.float32)
        return rows * (torch.nn.functional.embedding(index, w.scale) if w.scale.dim() else w.scale)
