"""``mxfp8``: e4m3 weights with one power-of-two scale for every 32 inputs.

Weight: ``W[n, k] = e4m3[n, k] * 2^(e[n, k div 32] - 127)``; e = 0 decodes to 0. Native linear: x quantised the same
way, block by block, and ``y = sum(xq * 2^(ex - 127) * W) + bias``; an ``input_scale`` is ignored. Layers that say
``full_precision_matrix_mult`` keep x as it is. Source: OCP microscaling formats; comfy-kitchen ``quantize_mxfp8`` /
``scaled_mm_mxfp8``; RULES section 4, "MXFP8".

Tensors: ``weight`` float8_e4m3fn (or U8) [N, K]; ``weight_scale`` E8M0 (or U8), K / 32 columns in 128 x 4 tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .. import kitchen
from ..operators import operator
from ..retire import run
from ..routes import (
    Execution,
    Route,
    all_of,
    always_slow,
    block_scaled_mm,
    carried_routes,
    inputs_divisible,
    nvidia,
    outputs_divisible,
    own_triton,
)
from ..routes import kitchen as kitchen_has
from ..spec import Spec
from . import quantize
from .base import Decoded, Format, Tensors, pad_inputs
from .codes import as_float8, e8m0_to_float, float8_to_float
from .int8 import CARRIED_ROUTES, EXACT
from .int8_rows import CARRIED_BODIES, carried, dense_rows
from .products import Carried, FloatRows, dense_linear, flatten, product_dtype, values_linear
from .scales import check_tiled, required, tiles_of, untile

BLOCK = quantize.MXFP8_BLOCK


@operator(
    "mxfp8_linear",
    "(Tensor x, Tensor qweight, Tensor block_scale, Tensor? bias, int out_features, str execution, "
    "str backends) -> Tensor",
)
def _mxfp8_linear(
    x: Tensor,
    qweight: Tensor,
    block_scale: Tensor,
    bias: Tensor | None,
    out_features: int,
    execution: str,
    backends: str,
) -> Tensor:
    weight = canonical(qweight, block_scale, out_features)
    argument = _carried(weight) if execution == "int8" else weight
    return run(f"mxfp8_linear ({execution})", backends, _BODIES[execution], pad_inputs(x, weight.K), argument, bias)


class Mxfp8Weight(NamedTuple):
    """``codes`` float8_e4m3fn [rows, K]; ``tiles`` uint8 [ceil128(rows), ceil4(K / 32)]; ``N`` the rows that are
    wanted.
    """

    codes: Tensor
    tiles: Tensor
    N: int

    @property
    def K(self) -> int:  # noqa: N802
        """Stored input features."""
        return self.codes.shape[1]

    def decoded(self) -> FloatRows:
        """Row access to the dense weight."""
        columns = self.K // BLOCK
        return lambda start, stop: float8_to_float(
            self.codes[start:stop], e8m0_to_float(untile(self.tiles, start, stop, columns))
        )


def canonical(qweight: Tensor, block_scale: Tensor, out_features: int | None = None) -> Mxfp8Weight:
    """The weight from the file's tensors."""
    codes = as_float8(qweight)
    tiles = tiles_of(block_scale, codes.shape[0], codes.shape[1] // BLOCK)
    return Mxfp8Weight(codes, tiles, codes.shape[0] if out_features is None else out_features)


def _activation(x2: Tensor) -> Tensor:
    """The quantised activation as float32 values, block scales applied."""
    values, scale = quantize.mxfp8_values(x2)
    return values.reshape(x2.shape[0], x2.shape[1] // BLOCK, BLOCK).mul_(scale[..., None]).reshape(x2.shape)


def _torch_exact(x: Tensor, w: Mxfp8Weight, bias: Tensor | None) -> Tensor:
    def by_triton(start: int, stop: int, dtype: torch.dtype) -> Tensor:
        from ..triton_ops.block_decode import decode_mxfp8

        return decode_mxfp8(w.codes, w.tiles, columns=w.K, dtype=dtype, rows=(start, stop))

    rows = dense_rows("mxfp8", x.device, product_dtype(x), w.decoded(), {"triton": by_triton})
    return dense_linear(x, w.N, rows, 0, bias)


def _torch_native(x: Tensor, w: Mxfp8Weight, bias: Tensor | None) -> Tensor:
    return values_linear(x, _activation(flatten(x)), w.N, w.decoded(), None, bias)


def _kitchen_native(x: Tensor, w: Mxfp8Weight, bias: Tensor | None) -> Tensor:
    return _scaled_mm(x, *kitchen.quantize_mxfp8(flatten(x)), w, bias)


def _triton_native(x: Tensor, w: Mxfp8Weight, bias: Tensor | None) -> Tensor:
    from ..triton_ops.float_quantizer import quantize_mxfp8

    return _scaled_mm(x, *quantize_mxfp8(flatten(x)), w, bias)


def _scaled_mm(x: Tensor, xq: Tensor, x_scale: Tensor, w: Mxfp8Weight, bias: Tensor | None) -> Tensor:
    """torch's block-scaled product; xq [M', K] and its scale tiles may be padded beyond x's rows."""
    from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

    y: Tensor = scaled_mm(
        xq,
        w.codes.t(),
        scale_a=x_scale.view(torch.float8_e8m0fnu).reshape(-1),
        scale_b=w.tiles.view(torch.float8_e8m0fnu).reshape(-1),
        scale_recipe_a=ScalingType.BlockWise1x32,
        scale_recipe_b=ScalingType.BlockWise1x32,
        swizzle_a=SwizzleType.SWIZZLE_32_4_4,
        swizzle_b=SwizzleType.SWIZZLE_32_4_4,
        output_dtype=torch.bfloat16 if x.dtype is torch.float32 else x.dtype,
    )
    y = y[: x.numel() // x.shape[-1], : w.N]
    y = y if bias is None else y + bias.to(y.dtype)
    return y.to(x.dtype).contiguous().reshape(*x.shape[:-1], w.N)


def _carried(w: Mxfp8Weight) -> Carried:
    def by_triton(start: int, stop: int, group: int) -> tuple[Tensor, Tensor]:
        from ..triton_ops.transcode import mxfp8_to_int8

        return mxfp8_to_int8(w.codes, w.tiles, columns=w.K, rotation=group or 1, rows=(start, stop))

    return carried("mxfp8", w.codes.device, w.N, w.K, w.decoded(), {"triton": by_triton})


_BODIES: dict[str, dict[str, Callable[..., Tensor]]] = {
    "native": {"kitchen": _kitchen_native, "triton": _triton_native, "torch": _torch_native},
    "int8": CARRIED_BODIES,
    "exact": {"torch": _torch_exact},
}


_UNITS = all_of(
    nvidia((10, 0), "MXFP8 arithmetic"),
    block_scaled_mm,
    inputs_divisible(32, "the MXFP8 product"),
    outputs_divisible(16, "the MXFP8 product"),
)
_WHY = "PyTorch's block-scaled product runs on this card's MXFP8 units"
_CARRIED = "The weight is carried over to INT8 rows with ConvRot, more precise than MXFP8 activations."


class Mxfp8(Format):
    """``mxfp8``."""

    name = "mxfp8"
    operator = "mxfp8_linear"
    routes = (
        Route(
            "native",
            "kitchen",
            "scaled_mm",
            f"{_WHY}; comfy-kitchen quantises.",
            all_of(kitchen_has("quantize_mxfp8"), _UNITS),
        ),
        Route("native", "triton", "scaled_mm", f"{_WHY}; our kernel quantises.", all_of(own_triton, _UNITS)),
        Route(
            "native",
            "torch",
            "float32 products of MXFP8 values",
            "The MXFP8 arithmetic is carried out in float32.",
            slow=always_slow,
        ),
        *carried_routes(_CARRIED, *CARRIED_ROUTES),
        EXACT,
    )

    def _stored(self, spec: Spec, tensors: Tensors) -> tuple[Tensor, Tensor]:
        weight, scale = required(spec, tensors, "weight"), required(spec, tensors, "weight_scale")
        check_tiled(spec.name, scale, weight.shape[0], weight.shape[1] // BLOCK)
        return weight, scale

    def _weight(self, spec: Spec, tensors: Tensors) -> Mxfp8Weight:
        return canonical(*self._stored(spec, tensors))

    def decoded(self, spec: Spec, tensors: Tensors) -> Decoded:
        w = self._weight(spec, tensors)
        return Decoded(w.decoded(), w.N, w.K)

    def carried(self, spec: Spec, tensors: Tensors) -> Carried:
        return _carried(self._weight(spec, tensors))

    def reference_native(self, x: Tensor, spec: Spec, tensors: Tensors) -> Tensor:
        return _activation(x) @ self.dequantize(spec, tensors).t()

    def linear(
        self, x: Tensor, spec: Spec, tensors: Tensors, bias: Tensor | None, execution: Execution, backends: str
    ) -> Tensor:
        weight, scale = self._stored(spec, tensors)
        return _mxfp8_linear(x, weight, scale, bias, spec.shape[0], execution, backends)
