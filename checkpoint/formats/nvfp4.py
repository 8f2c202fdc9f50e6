"""``nvfp4``: two E2M1 codes a byte (HIGH nibble = even column), U8 (N, K/2); an E4M3 scale per 16 inputs; one F32
global scale.

    W[n, k] = e2m1(code[n, k]) * (e4m3(weight_scale[n, k // 16]) * weight_scale_2)

The block scales are stored in the 128x4 tile order of the kernels, padded to (ceil128(N), ceil4(K/16)).
"""

from __future__ import annotations

from typing import Any

from ..catalogue import REEXPORT, REPAIR
from ..dtypes import WIDE_FLOATS, count
from ..header import TensorInfo
from ..layer import Layer, Understood, padded, typed
from ..words import dims
from .base import Format

BLOCK = 16
_E2M1_MAX = 6.0
_E4M3_MAX = 448.0


def check(layer: Layer) -> Understood | None:
    weight, scale, scale_2 = layer.need("weight"), layer.need("weight_scale"), layer.need("weight_scale_2")
    if weight.dtype != "U8" or scale.dtype != "F8_E4M3":
        as_bytes = weight.dtype == "U8" and scale.dtype == "U8"
        if layer.compatible and as_bytes:
            layer.dialect("U8 block scales read as F8_E4M3 bytes", "scale dtype")
        else:
            layer.fault(
                "nvfp4.dtype",
                tensor=scale.name if weight.dtype == "U8" else weight.name,
                expected="U8 and F8_E4M3",
                found=f"{weight.dtype} and {scale.dtype}",
                remedy=f"{REPAIR}: the same bytes are labelled F8_E4M3; or set rules to compatible."
                if as_bytes
                else REEXPORT,
                repairable=as_bytes,
            )
    _global_scale(layer, scale_2)
    if not layer.is_matrix("nvfp4.rank", weight):
        return None
    n, k = weight.shape[0], 2 * weight.shape[1]
    _block_scales(layer, n, k, scale, weight)
    pre = layer.tensor("pre_quant_scale")
    if pre is not None and (pre.dtype not in ("BF16", "F16", "F32") or pre.shape != (k,)):
        layer.fault("nvfp4.pre_quant_scale", tensor=pre.name, expected=dims((k,)), found=typed(pre))
    given = layer.tensor("input_scale")
    if given is not None and (given.dtype not in WIDE_FLOATS or count(given.shape) != 1):
        layer.fault("extra.nvfp4.input_scale", tensor=given.name, expected="one float value", found=typed(given))
    layer.no_rotation("nvfp4")
    full_precision = layer.full_precision()
    if not layer.sound:
        return None
    layer.read("weight_scale_2", scale_2, reach=_E2M1_MAX * _E4M3_MAX)
    tensors = {"weight": weight.name, "weight_scale": scale.name, "weight_scale_2": scale_2.name}
    if pre is not None:
        layer.read("pre_quant_scale", pre, signed=True)
        tensors["pre_quant_scale"] = pre.name
    if given is not None:
        layer.read("input_scale", given)
        tensors["input_scale"] = given.name
    annotations: dict[str, Any] = {
        "has_pre_quant_scale": pre is not None,
        "has_input_scale": given is not None,
        "full_precision_matrix_mult": full_precision,
    }
    return Understood((n, k), annotations, tensors)


def _global_scale(layer: Layer, scale_2: TensorInfo) -> None:
    if scale_2.dtype == "F32" and scale_2.shape in ((), (1,)):
        return
    lossless = scale_2.dtype in WIDE_FLOATS and count(scale_2.shape) == 1
    if layer.compatible and lossless:
        layer.dialect(f"weight_scale_2 {typed(scale_2)} read as one F32 value", "global scale")
        return
    layer.fault(
        "nvfp4.scale_2",
        tensor=scale_2.name,
        expected="F32 () or (1,)",
        found=typed(scale_2),
        remedy=f"{REPAIR}; or set rules to compatible." if lossless else REEXPORT,
        repairable=lossless,
    )


def _block_scales(layer: Layer, n: int, k: int, scale: TensorInfo, weight: TensorInfo) -> None:
    tiled = (padded(n, 128), padded(k // BLOCK, 4))
    exact = (n, k // BLOCK)
    if k % BLOCK == 0 and scale.shape == exact:
        if exact != tiled:
            layer.fault("extra.nvfp4.scale_layout", tensor=scale.name, expected=f"{dims(tiled)}", found=dims(exact))
        return
    padding = k % BLOCK == 0 and scale.shape == tiled
    if layer.compatible and padding:
        layer.dialect(f"block scales {dims(tiled)} read as the padded 128x4 tiles of {dims(exact)}", "padded scales")
        return
    layer.fault(
        "nvfp4.shapes",
        tensor=scale.name if k % BLOCK == 0 else weight.name,
        expected=f"(N, K/2) and (N, K/16) = {dims(exact)}" if k % BLOCK == 0 else "K to be a multiple of 16",
        found=f"{dims(weight.shape)} and {dims(scale.shape)}",
        remedy="Set rules to compatible: the scales are padded as ComfyUI pads them. Other runtimes refuse them."
        if padding
        else REEXPORT,
        variant="padded" if padding else "",
    )


FORMAT = Format(
    "nvfp4",
    ("weight", "weight_scale", "weight_scale_2"),
    ("pre_quant_scale", "input_scale", "bias"),
    check,
    row_multiple=16,
)
