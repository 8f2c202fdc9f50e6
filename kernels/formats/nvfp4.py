"""``nvfp4``: e2m1 weights, an e4m3 scale for every 16 inputs, one float32 scale for the tensor.

Weight: ``W[n, k] = e2m1[n, k] * (e4m3[n, k div 16] * weight_scale_2)``; the HIGH nibble is the even column; the scales
sit in cuBLAS's 128 x 4 tiles. ``pre_quant_scale`` multiplies x per input channel before anything else. Native linear: x
quantised the same way with ``ts = input_scale`` where the file has one, else ``max|x| / (448 * 6)``; ``y = sum(xq bx w
bw) * (ts * weight_scale_2) + bias``. Layers that say ``full_precision_matrix_mult`` keep x as it is. Source: NVIDIA's
NVFP4; comfy-kitchen ``quantize_nvfp4`` / ``scaled_mm_nvfp4``; RULES section 4, "NVFP4".

Tensors: ``weight`` U8 [N, K / 2]; ``weight_scale`` e4m3 (or U8), K / 16 columns in tiles; ``weight_scale_2`` [] / [1];
``input_scale`` [] / [1]; ``pre_quant_scale`` [K]. Rows and columns may be padded to 16.
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
from .codes import e2m1_to_float, e4m3_to_float
from .int8 import CARRIED_ROUTES, EXACT
from .int8_rows import CARRIED_BODIES, Decoder, carried, dense_rows
from .products import Carried, FloatRows, dense_linear, flatten, product_dtype, values_linear
from .scales import check_tiled, optional, required, scalar, tiles_of, untile

BLOCK = quantize.NVFP4_BLOCK


@operator(
    "nvfp4_linear",
    "(Tensor x, Tensor qweight, Tensor block_scale, Tensor global_scale, Tensor? input_scale, "
    "Tensor? pre_quant_scale, Tensor? bias, int out_features, str execution, str backends) -> Tensor",
)
def _nvfp4_linear(
    x: Tensor,
    qweight: Tensor,
    block_scale: Tensor,
    global_scale: Tensor,
    input_scale: Tensor | None,
    pre_quant_scale: Tensor | None,
    bias: Tensor | None,
    out_features: int,
    execution: str,
    backends: str,
) -> Tensor:
    weight = canonical(qweight, block_scale, global_scale, input_scale, out_features)
    x = pad_inputs(smooth(x, pre_quant_scale), weight.K)
    argument = _carried(weight) if execution == "int8" else weight
    return run(f"nvfp4_linear ({execution})", backends, _BODIES[execution], x, argument, bias)


class Nvfp4Weight(NamedTuple):
    """``packed`` uint8 [rows, K / 2]; ``tiles`` uint8 [ceil128(rows), ceil4(K / 16)]; ``factor`` float32 []; ``static``
    the file's activation scale, float32 [], or None; ``N`` the rows that are wanted (the stored ones may be padded)."""

    packed: Tensor
    tiles: Tensor
    factor: Tensor
    static: Tensor | None
    N: int

    @property
    def K(self) -> int:  # noqa: N802
        """Stored input features."""
        return 2 * self.packed.shape[1]

    def decoded(self, *, unscaled: bool = False) -> FloatRows:
        """Row access to the dense weight; ``unscaled``: without ``factor``."""
        columns = self.K // BLOCK

        def rows(start: int, stop: int) -> Tensor:
            scale = e4m3_to_float(untile(self.tiles, start, stop, columns))
            return e2m1_to_float(self.packed[start:stop], scale if unscaled else scale * self.factor)

        return rows


def canonical(
    qweight: Tensor,
    block_scale: Tensor,
    global_scale: Tensor,
    input_scale: Tensor | None,
    out_features: int | None = None,
) -> Nvfp4Weight:
    """The weight from the file's tensors."""
    packed = qweight.view(torch.uint8)
    tiles = tiles_of(block_scale, packed.shape[0], 2 * packed.shape[1] // BLOCK)
    static = None if input_scale is None else scalar(input_scale)
    return Nvfp4Weight(packed, tiles, scalar(global_scale), static, out_features or packed.shape[0])


def smooth(x: Tensor, pre_quant_scale: Tensor | None) -> Tensor:
    """``x * pre_quant_scale`` in x's dtype."""
    return x if pre_quant_scale is None else x * pre_quant_scale.to(x.dtype)


def _torch_exact(x: Tensor, w: Nvfp4Weight, bias: Tensor | None) -> Tensor:
    def by_triton(start: int, stop: int, dtype: torch.dtype) -> Tensor:
        from ..triton_ops.block_decode import decode_nvfp4

        return decode_nvfp4(w.packed, w.tiles, w.factor, columns=w.K, dtype=dtype, rows=(start, stop))

    def by_kitchen(start: int, stop: int, dtype: torch.dtype) -> Tensor:
        return _kitchen_decode(w, start, stop, dtype)

    faster: dict[str, Decoder] = {"triton": by_triton, "kitchen": by_kitchen}
    return dense_linear(x, w.N, dense_rows("nvfp4", x.device, product_dtype(x), w.decoded(), faster), 0, bias)


def _activation(x2: Tensor, ts: Tensor) -> Tensor:
    """The quantised activation as float32 values, block scales applied but not ``ts``."""
    values, block_scale = quantize.nvfp4_values(x2, ts)
    return values.reshape(x2.shape[0], x2.shape[1] // BLOCK, BLOCK).mul_(block_scale[..., None]).reshape(x2.shape)


def _torch_native(x: Tensor, w: Nvfp4Weight, bias: Tensor | None) -> Tensor:
    ts = quantize.nvfp4_scale(x) if w.static is None else w.static
    return values_linear(
        x, _activation(flatten(x), ts), w.N, w.decoded(unscaled=True), (ts * w.factor).reshape(1, 1), bias
    )


def _kitchen_native(x: Tensor, w: Nvfp4Weight, bias: Tensor | None) -> Tensor:
    x2 = flatten(x) if x.dtype in (torch.float16, torch.bfloat16) else flatten(x).to(torch.bfloat16)
    ts = quantize.nvfp4_scale(x2) if w.static is None else w.static
    padded = (
        bias
        if bias is None or w.packed.shape[0] == w.N
        else torch.nn.functional.pad(bias, (0, w.packed.shape[0] - w.N))
    )
    y = kitchen.nvfp4_linear(x2, w.packed, w.tiles, w.factor, ts, padded)[:, : w.N]
    return y.to(x.dtype).contiguous().reshape(*x.shape[:-1], w.N)


def _triton_native(x: Tensor, w: Nvfp4Weight, bias: Tensor | None) -> Tensor:
    from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

    from ..triton_ops.float_quantizer import quantize_nvfp4

    x2 = flatten(x)
    ts = quantize.nvfp4_scale(x2) if w.static is None else w.static
    xq, x_scale = quantize_nvfp4(x2, ts)
    y: Tensor = scaled_mm(
        xq.view(torch.float4_e2m1fn_x2),
        w.packed.view(torch.float4_e2m1fn_x2).t(),
        scale_a=[x_scale.view(torch.float8_e4m3fn).reshape(-1), ts],
        scale_b=[w.tiles.view(torch.float8_e4m3fn).reshape(-1), w.factor],
        scale_recipe_a=[ScalingType.BlockWise1x16, ScalingType.TensorWise],
        scale_recipe_b=[ScalingType.BlockWise1x16, ScalingType.TensorWise],
        swizzle_a=[SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE],
        swizzle_b=[SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE],
        output_dtype=torch.bfloat16 if x.dtype is torch.float32 else x.dtype,
    )[: x2.shape[0], : w.N]
    y = y if bias is None else y + bias.to(y.dtype)
    return y.to(x.dtype).contiguous().reshape(*x.shape[:-1], w.N)


def _carried(w: Nvfp4Weight) -> Carried:
    def by_triton(start: int, stop: int, group: int) -> tuple[Tensor, Tensor]:
        from ..triton_ops.transcode import nvfp4_to_int8

        return nvfp4_to_int8(w.packed, w.tiles, w.factor, columns=w.K, rotation=group or 1, rows=(start, stop))

    def by_kitchen(start: int, stop: int, group: int) -> tuple[Tensor, Tensor]:
        # float16: the product of an e2m1 and an e4m3 value fits its mantissa, not bfloat16's.
        codes, scale = kitchen.quantize_int8_convrot_weight(_kitchen_decode(w, start, stop, torch.float16), group)
        return codes, scale

    return carried("nvfp4", w.packed.device, w.N, w.K, w.decoded(), {"triton": by_triton, "kitchen": by_kitchen})


def _kitchen_decode(w: Nvfp4Weight, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    # comfy-kitchen decodes 16 rows at a time; start is a multiple of 128, as the tiles are.
    last = -(-stop // 16) * 16
    tiles = w.tiles[start : -(-last // 128) * 128]
    return kitchen.dequantize_nvfp4(w.packed[start:last], tiles, w.factor, dtype)[: stop - start]


_BODIES: dict[str, dict[str, Callable[..., Tensor]]] = {
    "native": {"kitchen": _kitchen_native, "triton": _triton_native, "torch": _torch_native},
    "int8": CARRIED_BODIES,
    "exact": {"torch": _torch_exact},
}

_UNITS = all_of(
    nvidia((10, 0), "FP4 arithmetic"),
    inputs_divisible(32, "the FP4 product"),
    outputs_divisible(8, "the FP4 product"),
)
_CARRIED = "The weight is carried over to INT8 rows with ConvRot, more precise than FP4 activations."


class Nvfp4(Format):
    """``nvfp4``."""

    name = "nvfp4"
    operator = "nvfp4_linear"
    routes = (
        Route(
            "native",
            "kitchen",
            "scaled_mm_nvfp4",
            "comfy-kitchen's scaled_mm_nvfp4 runs on this card's FP4 units.",
            all_of(kitchen_has("scaled_mm_nvfp4", "quantize_nvfp4"), _UNITS),
        ),
        Route(
            "native",
            "triton",
            "scaled_mm",
            "PyTorch's block-scaled product runs on this card's FP4 units; our kernel quantises.",
            all_of(own_triton, block_scaled_mm, _UNITS),
        ),
        Route(
            "native",
            "torch",
            "float32 products of FP4 values",
            "The FP4 arithmetic is carried out in float32.",
            slow=always_slow,
        ),
        *carried_routes(_CARRIED, *CARRIED_ROUTES),
        EXACT,
    )

    def _stored(self, spec: Spec, tensors: Tensors) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        weight, scale = required(spec, tensors, "weight"), required(spec, tensors, "weight_scale")
        check_tiled(spec.name, scale, weight.shape[0], 2 * weight.shape[1] // BLOCK)
        return weight, scale, required(spec, tensors, "weight_scale_2"), optional(tensors, "input_scale")

    def _weight(self, spec: Spec, tensors: Tensors) -> Nvfp4Weight:
        return canonical(*self._stored(spec, tensors))

    def decoded(self, spec: Spec, tensors: Tensors) -> Decoded:
        w = self._weight(spec, tensors)
        return Decoded(w.decoded(), w.N, w.K)

    def carried(self, spec: Spec, tensors: Tensors) -> Carried:
        return _carried(self._weight(spec, tensors))

    def input(self, x: Tensor, tensors: Tensors) -> Tensor:
        return smooth(x, optional(tensors, "pre_quant_scale"))

    def reference_native(self, x: Tensor, spec: Spec, tensors: Tensors) -> Tensor:
        static = self._weight(spec, tensors).static
        ts = quantize.nvfp4_scale(x) if static is None else static
        return (_activation(x, ts) @ self.dequantize(spec, tensors).t()) * ts

    def linear(
        self, x: Tensor, spec: Spec, tensors: Tensors, bias: Tensor | None, execution: Execution, backends: str
    ) -> Tensor:
        stored, smoothing = self._stored(spec, tensors), optional(tensors, "pre_quant_scale")
        return _nvfp4_linear(x, *stored, smoothing, bias, spec.shape[0], execution, backends)
