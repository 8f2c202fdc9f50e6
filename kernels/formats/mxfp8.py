"""``mxfp8``: e4m3 weights with one power-of-two scale for every 32 inputs.

Weight: ``W[n, k] = e4m3[n, k] * 2^(e[n, k div 32] - 127)``; e = 0 decodes to 0. Native linear: x quantised the same
way, block by block, and ``y = sum(xq * 2^(ex - 127) * W) + bias``; an ``input_scale`` is ignored. Layers that say
``full_precision_matrix_mult`` keep x as it is. Source: OCP microscaling formats; comfy-kitchen ``quantize_mxfp8`` /
``scaled_mm_mxfp8``; RULES section 4, "MXFP8".

Tensors: ``weight`` float8_e4m3fn (or U8) [N, K]; ``weight_scale`` E8M0 (or U8), K / 32 columns in 128 x 4 tiles.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import kitchen
from ..facts import DeviceFacts
from ..operators import operator
from ..retire import run
from ..routes import Execution, Route, all_of, always_slow, carried, inputs_divisible, nvidia, outputs_divisible
from ..routes import kitchen as kitchen_has
from ..spec import Spec
from . import quantize
from .base import Decoded, Format, Tensors, pad_inputs
from .int8 import (
    CARRIED_ROUTES,
    EXACT,
    kitchen_codes,
    triton_codes,
)
from .int8_rows import carry
from .products import FloatRows, dense_linear, flatten, int8_linear, values_linear
from .rotation import preferred_group
from .scales import as_float8, check_tiled, e8m0_to_float, required, untile

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
    codes, tiles = canonical("", qweight, block_scale)
    x = pad_inputs(x, codes.shape[1])
    return run(f"mxfp8_linear ({execution})", backends, _BODIES[execution], x, codes[:out_features], tiles, bias)


def canonical(layer: str, qweight: Tensor, block_scale: Tensor) -> tuple[Tensor, Tensor]:
    """(float8_e4m3fn [N, K], uint8 scale tiles [ceil128(N), ceil4(K / 32)])."""
    codes = as_float8(qweight)
    return codes, check_tiled(layer, block_scale.view(torch.uint8), codes.shape[0], codes.shape[1] // BLOCK)


def _decoded(codes: Tensor, tiles: Tensor) -> FloatRows:
    columns = codes.shape[1] // BLOCK

    def rows(start: int, stop: int) -> Tensor:
        scale = e8m0_to_float(untile(tiles, start, stop, columns))
        blocks = codes[start:stop].to(torch.float32).reshape(stop - start, columns, BLOCK)
        return blocks.mul_(scale[..., None]).reshape(stop - start, -1)

    return rows


def _activation(x2: Tensor) -> Tensor:
    """The quantised activation as float32 values, block scales applied."""
    values, scale = quantize.mxfp8_values(x2)
    return values.reshape(x2.shape[0], -1, BLOCK).mul_(scale[..., None]).reshape(x2.shape)


def _torch_exact(x: Tensor, codes: Tensor, tiles: Tensor, bias: Tensor | None) -> Tensor:
    return dense_linear(x, codes.shape[0], _decoded(codes, tiles), 0, bias)


def _torch_native(x: Tensor, codes: Tensor, tiles: Tensor, bias: Tensor | None) -> Tensor:
    return values_linear(x, _activation(flatten(x)), codes.shape[0], _decoded(codes, tiles), None, bias)


def _kitchen_native(x: Tensor, codes: Tensor, tiles: Tensor, bias: Tensor | None) -> Tensor:
    x2 = flatten(x)
    xq, x_scale = kitchen.quantize_mxfp8(x2)
    y = _scaled_mm(xq, x_scale, codes, tiles, torch.bfloat16 if x.dtype is torch.float32 else x.dtype)[: x2.shape[0]]
    y = y if bias is None else y + bias.to(y.dtype)
    return y.to(x.dtype).reshape(*x.shape[:-1], codes.shape[0])


def _triton_native(x: Tensor, codes: Tensor, tiles: Tensor, bias: Tensor | None) -> Tensor:
    from ..triton_ops.float_quantizer import quantize_mxfp8

    xq, x_scale = quantize_mxfp8(flatten(x))
    y = _scaled_mm(xq, x_scale, codes, tiles, torch.bfloat16 if x.dtype is torch.float32 else x.dtype)
    y = y if bias is None else y + bias.to(y.dtype)
    return y.to(x.dtype).reshape(*x.shape[:-1], codes.shape[0])


def _scaled_mm(xq: Tensor, x_scale: Tensor, codes: Tensor, tiles: Tensor, dtype: torch.dtype) -> Tensor:
    from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

    y: Tensor = scaled_mm(
        xq,
        codes.t(),
        scale_a=x_scale.view(torch.float8_e8m0fnu).reshape(-1),
        scale_b=tiles.view(torch.float8_e8m0fnu).reshape(-1),
        scale_recipe_a=ScalingType.BlockWise1x32,
        scale_recipe_b=ScalingType.BlockWise1x32,
        swizzle_a=SwizzleType.SWIZZLE_32_4_4,
        swizzle_b=SwizzleType.SWIZZLE_32_4_4,
        output_dtype=dtype,
    )
    return y


def _torch_int8(x: Tensor, codes: Tensor, tiles: Tensor, bias: Tensor | None) -> Tensor:
    group = preferred_group(codes.shape[1])
    return int8_linear(x, codes.shape[0], carry(_decoded(codes, tiles), group), group, bias)


def _kitchen_int8(x: Tensor, codes: Tensor, tiles: Tensor, bias: Tensor | None) -> Tensor:
    group = preferred_group(codes.shape[1])
    return kitchen_codes(x, codes.shape[0], carry(_decoded(codes, tiles), group), bias, group)


def _triton_int8(x: Tensor, codes: Tensor, tiles: Tensor, bias: Tensor | None) -> Tensor:
    from ..triton_ops.transcode import mxfp8_to_int8

    K = codes.shape[1]
    group = preferred_group(K)

    def rows(start: int, stop: int) -> tuple[Tensor, Tensor]:
        part, factor = mxfp8_to_int8(codes, tiles, columns=K, rotation=group, rows=(start, stop))
        return part, factor.reshape(-1, 1)

    return triton_codes(x, codes.shape[0], rows, bias, group)


_BODIES: dict[str, dict[str, Callable[..., Tensor]]] = {
    "native": {"kitchen": _kitchen_native, "triton": _triton_native, "torch": _torch_native},
    "int8": {"kitchen": _kitchen_int8, "triton": _triton_int8, "torch": _torch_int8},
    "exact": {"torch": _torch_exact},
}


def block_scaled_mm(_spec: Spec, facts: DeviceFacts) -> str | None:
    """torch's block-scaled ``scaled_mm``."""
    if facts.torch < (2, 10):
        return f"PyTorch {'.'.join(map(str, facts.torch))} has no block-scaled product; 2.10 is needed."
    return None


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
        Route(
            "native",
            "torch",
            "float32 products of MXFP8 values",
            "The MXFP8 arithmetic is carried out in float32.",
            slow=always_slow,
        ),
        *carried(_CARRIED, *CARRIED_ROUTES),
        EXACT,
    )

    def decoded(self, spec: Spec, tensors: Tensors) -> Decoded:
        codes, tiles = canonical(spec.name, required(spec, tensors, "weight"), required(spec, tensors, "weight_scale"))
        return Decoded(_decoded(codes, tiles), *codes.shape)

    def reference_native(self, x: Tensor, spec: Spec, tensors: Tensors) -> Tensor:
        return _activation(x) @ self.dequantize(spec, tensors).t()

    def linear(
        self, x: Tensor, spec: Spec, tensors: Tensors, bias: Tensor | None, execution: Execution, backends: str
    ) -> Tensor:
        weight, scale = required(spec, tensors, "weight"), required(spec, tensors, "weight_scale")
        return _mxfp8_linear(x, weight, scale, bias, spec.shape[0], execution, backends)
