"""``int8_tensorwise``: I8 codes (N, K), one F32 scale for the layer () or per output row (N, 1), optionally
ConvRot-rotated.

y[m, n] = (sum_k q8(x_rot)[m, k] * weight[n, k]) * scale_x[m] * weight_scale[n]        (x_rot = x without convrot)
"""

from __future__ import annotations

from typing import Any

from ..catalogue import REEXPORT, REPAIR
from ..header import TensorInfo
from ..layer import Layer, Understood, is_power_of_four, look, narrow
from ..words import dims, show
from .base import Format

DEFAULT_GROUP = 256
_MATHS = "powers of 4 (16, 64 and 256 are in use)"


def check(layer: Layer) -> Understood | None:
    weight, scale = layer.need("weight"), layer.need("weight_scale")
    row = _scale_kind(layer, weight, scale)
    annotations: dict[str, Any] = {}
    if row is not None:
        annotations["is_rowwise" if row else "is_tensorwise_scalar"] = True
    rotation = _rotation(layer, weight)
    annotations.update(rotation)
    if not layer.sound or len(weight.shape) != 2:
        return None
    layer.read("weight_scale", scale, reach=127.0)
    n, k = weight.shape
    return Understood((n, k), annotations, {"weight": weight.name, "weight_scale": scale.name})


def _scale_kind(layer: Layer, weight: TensorInfo, scale: TensorInfo) -> bool | None:
    """True for a row scale, False for one scale; None after a fault."""
    if weight.dtype == "I8" and scale.dtype == "F32" and scale.shape == ():
        return False if layer.is_matrix("int8.scalar.rank", weight) else None
    one = len(weight.shape) == 2 and scale.shape in ((1,), (1, 1))
    rows = len(weight.shape) == 2 and scale.shape == (weight.shape[0],)
    fits = one or rows or (len(weight.shape) == 2 and scale.shape in ((), (weight.shape[0], 1)))
    lossless = weight.dtype == "I8" and narrow(scale) and fits
    if weight.dtype != "I8" or scale.dtype != "F32":
        if not (layer.compatible and lossless):
            layer.fault(
                "int8.dtype",
                tensor=scale.name if weight.dtype == "I8" else weight.name,
                expected="I8 and F32",
                found=f"{weight.dtype} and {scale.dtype}",
                remedy=f"{REPAIR}: the scale is stored as F32 again; or set rules to compatible."
                if lossless
                else "The layer is not quantised: drop its marker, or quantise it; markers may have been written to "
                "the wrong layers.",
                repairable=lossless,
                variant=f"{weight.dtype}/{scale.dtype}",
            )
            if weight.dtype != "I8" or fits:
                return None
        else:
            layer.dialect(f"{scale.dtype} scales read as F32", "scale dtype")
        if scale.shape == () and len(weight.shape) == 2:
            return False
    if len(weight.shape) == 2 and scale.shape == (weight.shape[0], 1):
        return True
    if layer.compatible and (one or rows):
        layer.dialect(
            f"scale of shape {dims(scale.shape)} read as "
            f"{'one scale for the layer' if one else 'one scale per output row'}",
            "scale shape",
        )
        return rows and not one
    reshapes = one or rows
    layer.fault(
        "int8.rowwise.shapes",
        tensor=scale.name,
        expected="(N, K) and (N, 1) or ()",
        found=f"{dims(weight.shape)} and {dims(scale.shape)}",
        look=look(weight.shape),
        remedy=f"{REPAIR}, which reshapes the scale; or set rules to compatible."
        if reshapes
        else "The shape (1, N) may mean rows or columns: export the layer again."
        if len(weight.shape) == 2 and scale.shape == (1, weight.shape[0])
        else REEXPORT,
        repairable=reshapes,
        variant="reshapes" if reshapes else "",
    )
    return None


def _rotation(layer: Layer, weight: TensorInfo) -> dict[str, Any]:
    rotated = layer.flag("convrot")
    if rotated is None:
        return {}
    effective: dict[str, Any] = {"convrot": rotated}
    found: dict[str, Any] = {"convrot": rotated}
    if rotated:
        if layer.setting("convrot_groupsize") is None and "convrot_groupsize" not in layer.conf:
            layer.notes.append(f"no convrot_groupsize: {DEFAULT_GROUP} assumed")
        size = layer.whole_number("convrot_groupsize", DEFAULT_GROUP)
        if size is not None:
            effective["convrot_groupsize"] = found["convrot_groupsize"] = size
            if not is_power_of_four(size):
                layer.fault("extra.int8.groupsize", expected=_MATHS, found=show(size))
            elif len(weight.shape) == 2 and weight.shape[1] % size:
                layer.fault("extra.int8.input_size", expected=show(size), found=str(weight.shape[1]))
    layer.nested_params(effective)
    return found


FORMAT = Format("int8_tensorwise", ("weight", "weight_scale"), ("bias",), check)
