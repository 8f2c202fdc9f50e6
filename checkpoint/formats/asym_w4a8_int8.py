"""``asym_w4a8_int8``: two unsigned 4-bit codes a byte (low nibble = even column), I8 (N, K/2), expanded on an INT8
grid; rotated.

    q8[n, k] = clamp(round(v[code] * weight_s_rel[n, k // G]), -127, 127)      v = weight_codebook, or code - 8 without
    one W_rot    = q8 * weight_s_channel[n]  (+ weight_correction[k // G, n])

``weight_s_rel`` F8_E4M3 (N, K/G), ``weight_s_channel`` F32 (N,), ``weight_codebook`` F32 (16,), ``weight_correction``
F32 (K/G, N).
"""

from __future__ import annotations

from ..catalogue import REEXPORT, REPAIR
from ..header import TensorInfo
from ..layer import Layer, Understood, coerced_int, is_power_of_four, narrow, typed
from ..words import dims, show
from .base import Format

DEFAULT_GROUP = 16
DEFAULT_ROTATION = 256
_MATHS = "powers of 4 (16, 64 and 256 are in use)"
_GROUP_MATHS = "a divisor of 16 or a multiple of 16, at least 4, that divides the inputs (a multiple of 16)"


def check(layer: Layer) -> Understood | None:
    weight, rel, channel = layer.need("weight"), layer.need("weight_s_rel"), layer.need("weight_s_channel")
    group = _group_size(layer)
    _dtypes(layer, weight, rel, channel)
    if not layer.is_matrix("w4a8.rank", weight):
        return None
    n, k = weight.shape[0], 2 * weight.shape[1]
    codebook, correction = layer.tensor("weight_codebook"), layer.tensor("weight_correction")
    if codebook is not None and (codebook.dtype, codebook.shape) != ("F32", (16,)):
        layer.fault("w4a8.codebook", tensor=codebook.name, expected="F32 (16,)", found=typed(codebook))
    if group is not None:
        _shapes(layer, weight, rel, channel, group)
        want = (k // group, n)
        if correction is not None and (correction.dtype, correction.shape) != ("F32", want):
            layer.fault("w4a8.correction", tensor=correction.name, expected=dims(want), found=typed(correction))
    rotation = _rotation(layer, k)
    plain = layer.whole_number("group_size", DEFAULT_GROUP) if group is not None else None
    if plain is not None and (k % 16 or k % plain or (16 % plain and plain % 16)):
        layer.fault("extra.w4a8.group", expected=_GROUP_MATHS, found=show(plain), inputs=str(k))
    layer.nested_params({"convrot": True, "group_size": plain, "convrot_groupsize": rotation}, ("convrot",))
    if not layer.sound or plain is None or rotation is None:
        return None
    layer.read("weight_s_channel", channel, reach=127.0)
    tensors = {"weight": weight.name, "weight_s_rel": rel.name, "weight_s_channel": channel.name}
    if codebook is None:
        layer.notes.append("no codebook: uniform codes")
    else:
        layer.read("weight_codebook", codebook, signed=True)
        tensors["weight_codebook"] = codebook.name
    if correction is not None:
        tensors["weight_correction"] = correction.name
    annotations = {
        "group_size": plain,
        "convrot_groupsize": rotation,
        "has_codebook": codebook is not None,
        "has_correction": correction is not None,
    }
    return Understood((n, k), annotations, tensors)


def _group_size(layer: Layer) -> int | None:
    value = layer.setting("group_size", DEFAULT_GROUP)
    number = coerced_int(value)
    if number is None:
        layer.fault("crash.w4a8.group_size", expected="a whole number of at least 4", found=show(value))
        return None
    if number < 4:
        layer.fault("w4a8.group_size", expected="a whole number of at least 4", found=show(value))
        return None
    return number


def _dtypes(layer: Layer, weight: TensorInfo, rel: TensorInfo, channel: TensorInfo) -> None:
    if weight.dtype != "I8" or rel.dtype != "F8_E4M3":
        as_bytes = weight.dtype == "I8" and rel.dtype == "U8"
        if layer.compatible and as_bytes:
            layer.dialect("U8 group scales read as F8_E4M3 bytes", "scale dtype")
        else:
            layer.fault(
                "w4a8.dtype",
                tensor=rel.name if weight.dtype == "I8" else weight.name,
                expected="I8 and F8_E4M3",
                found=f"{weight.dtype} and {rel.dtype}",
                remedy=f"{REPAIR}: the same bytes are labelled F8_E4M3; or set rules to compatible."
                if as_bytes
                else REEXPORT,
                repairable=as_bytes,
            )
    if channel.dtype != "F32":
        if layer.compatible and narrow(channel):
            layer.dialect(f"{channel.dtype} row scales read as F32", "scale dtype")
        else:
            layer.fault(
                "w4a8.channel_dtype",
                tensor=channel.name,
                expected="F32",
                found=channel.dtype,
                remedy=f"{REPAIR}: the scale is stored as F32 again; or set rules to compatible."
                if narrow(channel)
                else REEXPORT,
                repairable=narrow(channel),
            )


def _shapes(layer: Layer, weight: TensorInfo, rel: TensorInfo, channel: TensorInfo, group: int) -> None:
    n, cols = weight.shape
    k = 2 * cols
    if rel.shape == (n, k // group) and channel.shape == (n,):
        return
    layer.fault(
        "w4a8.shapes",
        tensor=rel.name if rel.shape != (n, k // group) else channel.name,
        expected=f"(N, K/2), (N, K/{group}) and (N,)",
        found=f"weight {dims(weight.shape)}, weight_s_rel {dims(rel.shape)}, weight_s_channel {dims(channel.shape)}",
    )
    if len(rel.shape) == 2 and rel.shape[0] == n and 4 * cols == 3 * rel.shape[1] * group:
        layer.fault(
            "extra.w4a8.six_bit",
            tensor=weight.name,
            expected=f"rows of K/2 = {rel.shape[1] * group // 2} bytes",
            found=f"rows of {cols} bytes for {rel.shape[1] * group} inputs",
        )


def _rotation(layer: Layer, k: int) -> int | None:
    layer.always_rotated("asym_w4a8_int8")
    value = layer.setting("convrot_groupsize", DEFAULT_ROTATION)
    if "convrot_groupsize" not in layer.conf and value == DEFAULT_ROTATION:
        layer.notes.append(f"no convrot_groupsize: {DEFAULT_ROTATION} assumed")
    size = layer.whole_number("convrot_groupsize", DEFAULT_ROTATION)
    if size is None:
        return None
    if not is_power_of_four(size):
        layer.fault("extra.w4a8.rotation", expected=_MATHS, found=show(size))
        return None
    if k % size:
        layer.fault("extra.w4a8.input_size", expected=str(size), found=str(k))
        return None
    return size


FORMAT = Format(
    "asym_w4a8_int8",
    ("weight", "weight_s_rel", "weight_s_channel"),
    ("weight_codebook", "weight_correction", "bias"),
    check,
)
