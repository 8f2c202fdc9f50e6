"""``convrot_w4a4``: two signed 4-bit codes a byte (low nibble = even column), I8 (N, K/2); one F32 scale per output row
(N,); rotated.

W_rot[n, k] = code[n, k] * weight_scale[n]
"""

from __future__ import annotations

from ..catalogue import REEXPORT, REPAIR
from ..layer import Layer, Understood, coerced_int, look, narrow
from ..words import dims, show
from .base import Format

GROUPS = (16, 64, 256)
DEFAULT_GROUP = 256
LINEAR_DTYPES = ("int4", "int8")


def check(layer: Layer) -> Understood | None:
    weight, scale = layer.need("weight"), layer.need("weight_scale")
    lossless = weight.dtype == "I8" and narrow(scale)
    if weight.dtype != "I8" or scale.dtype != "F32":
        if layer.compatible and lossless:
            layer.dialect(f"{scale.dtype} scales read as F32", "scale dtype")
        else:
            layer.fault(
                "w4a4.dtype",
                tensor=scale.name if weight.dtype == "I8" else weight.name,
                expected="I8 and F32",
                found=f"{weight.dtype} and {scale.dtype}",
                remedy=f"{REPAIR}: the scale is stored as F32 again; or set rules to compatible."
                if lossless
                else REEXPORT,
                repairable=lossless,
            )
    shapes_fit = len(weight.shape) == 2 and scale.shape == (weight.shape[0],)
    if not shapes_fit:
        reshapes = len(weight.shape) == 2 and scale.shape == (weight.shape[0], 1)
        if layer.compatible and reshapes:
            layer.dialect(f"scale of shape {dims(scale.shape)} read as one scale per output row", "scale shape")
        else:
            layer.fault(
                "w4a4.shapes",
                tensor=scale.name,
                expected="(N, K/2) and (N,)",
                found=f"{dims(weight.shape)} and {dims(scale.shape)}",
                look=look(weight.shape) if len(weight.shape) != 2 else "",
                remedy=f"{REPAIR}: a scale of shape (out, 1) reshapes losslessly."
                if reshapes
                else "Export the layer again.",
                repairable=reshapes,
            )
    size = _group_size(layer)
    linear_dtype = layer.setting("linear_dtype", "int4")
    if linear_dtype not in LINEAR_DTYPES:
        layer.fault("extra.w4a4.linear_dtype", expected='"int4" or "int8"', found=show(linear_dtype))
    layer.always_rotated("convrot_w4a4")
    if size is not None and len(weight.shape) == 2:
        k = 2 * weight.shape[1]
        if k % 64 or k % size:
            layer.fault("w4a4.input_size", expected=f"64 and of the rotation group {size}", found=str(k))
    layer.nested_params({"convrot": True, "convrot_groupsize": size, "linear_dtype": linear_dtype}, ("convrot",))
    if not layer.sound or size is None:
        return None
    layer.read("weight_scale", scale, reach=8.0)
    n, cols = weight.shape
    return Understood(
        (n, 2 * cols),
        {"convrot_groupsize": size, "linear_dtype": linear_dtype},
        {"weight": weight.name, "weight_scale": scale.name},
    )


def _group_size(layer: Layer) -> int | None:
    value = layer.setting("convrot_groupsize", DEFAULT_GROUP)
    if "convrot_groupsize" not in layer.conf and value == DEFAULT_GROUP:
        layer.notes.append(f"no convrot_groupsize: {DEFAULT_GROUP} assumed")
    number = coerced_int(value)
    expected = "16, 64 or 256"
    if number is None:
        layer.fault("crash.w4a4.groupsize", expected=expected, found=show(value))
        return None
    if number not in GROUPS:
        layer.fault("w4a4.groupsize", expected=expected, found=show(value))
        return None
    return layer.whole_number("convrot_groupsize", DEFAULT_GROUP)


FORMAT = Format("convrot_w4a4", ("weight", "weight_scale"), ("bias",), check)
