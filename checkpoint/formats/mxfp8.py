"""``mxfp8``: E4M3 codes (N, K) and one power-of-two scale per 32 inputs, stored as E8M0 bytes (U8 or F8_E8M0).

    W[n, k] = e4m3(weight[n, k]) * 2^(weight_scale[n, k // 32] - 127)

The block scales are stored in the 128x4 tile order of the kernels, padded to (ceil128(N), ceil4(K/32)).
"""

from __future__ import annotations

from typing import Any

from ..header import TensorInfo
from ..layer import Layer, Understood, padded, typed
from ..words import dims
from .base import Format

BLOCK = 32


def check(layer: Layer) -> Understood | None:
    weight, scale = layer.need("weight"), layer.need("weight_scale")
    if weight.dtype != "F8_E4M3" or scale.dtype not in ("U8", "F8_E8M0"):
        layer.fault(
            "extra.mxfp8.dtype",
            tensor=scale.name if weight.dtype == "F8_E4M3" else weight.name,
            expected="F8_E4M3 weights and U8 or F8_E8M0 block scales",
            found=f"{weight.dtype} and {scale.dtype}",
        )
    if not layer.is_matrix("extra.mxfp8.rank", weight):
        return None
    n, k = weight.shape
    exact, tiled = (n, k // BLOCK), (padded(n, 128), padded(k // BLOCK, 4))
    if k % BLOCK or scale.shape not in (exact, tiled):
        layer.fault(
            "extra.mxfp8.shapes",
            tensor=scale.name,
            expected=f"K a multiple of 32 and scales of shape {dims(tiled)}",
            found=f"{dims(weight.shape)} and {dims(scale.shape)}",
        )
    elif scale.shape != tiled:
        layer.fault("extra.mxfp8.scale_layout", tensor=scale.name, expected=dims(tiled), found=dims(scale.shape))
    layer.no_rotation("MXFP8")
    full_precision = layer.full_precision()
    if not layer.sound:
        return None
    annotations: dict[str, Any] = {"full_precision_matrix_mult": full_precision}
    return Understood((n, k), annotations, {"weight": weight.name, "weight_scale": scale.name})


def global_layout_fault(weight: TensorInfo, scale: TensorInfo | None) -> str | None:
    """Rule ``mxfp8.layout`` for one weight of a file whose metadata declares MXFP8 for all: what is wrong, or None."""
    if weight.dtype != "F8_E4M3" or len(weight.shape) != 2 or weight.shape[1] % BLOCK:
        return f"{typed(weight)}"
    if scale is None:
        return f"{typed(weight)} without a weight_scale"
    n, k = weight.shape
    if scale.dtype != "U8" or scale.shape != (n, k // BLOCK):
        return f"{typed(weight)} with scales {typed(scale)}"
    return None


def is_padded_layout(weight: TensorInfo, scale: TensorInfo | None) -> bool:
    """Whether a layer that ``mxfp8.layout`` refuses is the form that comfy-kitchen writes: padded tiles, or F8_E8M0
    labels.
    """
    if scale is None or weight.dtype != "F8_E4M3" or len(weight.shape) != 2 or weight.shape[1] % BLOCK:
        return False
    n, k = weight.shape
    return scale.dtype in ("U8", "F8_E8M0") and scale.shape in (
        (n, k // BLOCK),
        (padded(n, 128), padded(k // BLOCK, 4)),
    )


FORMAT = Format("mxfp8", ("weight", "weight_scale"), ("bias",), check, reference=False, row_multiple=32)
