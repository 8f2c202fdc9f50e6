"""``float8_e4m3fn`` and ``float8_e5m2``: 8-bit float codes (N, K) and one scale for the layer, or one a row (N, 1).

W[n, k] = f8(weight[n, k]) * weight_scale[n]       activations: static with input_scale, dynamic without
"""

from __future__ import annotations

import os
from typing import Any

from ..dtypes import WIDE_FLOATS, count, decode
from ..header import HeaderError, TensorInfo, read_tensor
from ..layer import Layer, Understood, typed
from ..words import clean, dims
from .base import Format

MAX_VALUE = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
_DTYPE = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}


def _check(layer: Layer, name: str) -> Understood | None:
    weight, scale = layer.need("weight"), layer.need("weight_scale")
    if weight.dtype != _DTYPE[name]:
        layer.fault("extra.fp8.dtype", tensor=weight.name, expected=_DTYPE[name], found=weight.dtype)
    rows = weight.shape[0] if layer.is_matrix("extra.fp8.rank", weight) else 0
    rowwise = _scale(layer, "weight_scale", scale, rows)
    given = layer.tensor("input_scale")
    if given is not None:
        _input_scale(layer, given)
    if given is not None and layer.sound and layer.aliases and _is_one(layer, given):
        layer.notes.append("scale_input 1: no activation scale")
        given = None
    layer.no_rotation("FP8")
    full_precision = layer.full_precision()
    if not layer.sound:
        return None
    layer.read("weight_scale", scale, reach=MAX_VALUE[name])
    tensors = {"weight": weight.name, "weight_scale": scale.name}
    if given is not None:
        layer.read("input_scale", given)
        tensors["input_scale"] = given.name
    annotations: dict[str, Any] = {
        "activation_scheme": "dynamic" if given is None else "static",
        "full_precision_matrix_mult": full_precision,
    }
    if rowwise:
        annotations["is_rowwise"] = True
    n, k = weight.shape
    return Understood((n, k), annotations, tensors)


def _scale(layer: Layer, suffix: str, scale: TensorInfo, rows: int) -> bool:
    """Judge the weight's scale; whether it holds one value a row, which ``(N, 1)`` says beyond doubt."""
    if scale.dtype not in WIDE_FLOATS:
        layer.fault("extra.fp8.scale_dtype", tensor=scale.name, expected="F32", found=scale.dtype)
    elif scale.dtype != "F32":
        layer.remark("extra.fp8.scale_narrow", tensor=suffix, expected="F32", found=scale.dtype)
        layer.notes.append(f"{suffix} stored as {scale.dtype}")
    if scale.shape in ((), (1,)):
        return False
    if rows > 1 and scale.shape == (rows, 1):
        layer.notes.append("one scale per row")
        return True
    if layer.compatible and count(scale.shape) == 1:
        layer.dialect(f"{suffix} of shape {dims(scale.shape)} read as one value", "scale shape")
        return False
    layer.fault(
        "extra.fp8.scale_shape",
        tensor=scale.name,
        expected=f"(), (1,) or ({rows}, 1)" if rows else "() or (1,)",
        found=dims(scale.shape),
        repairable=count(scale.shape) == 1,
    )
    return False


def _input_scale(layer: Layer, given: TensorInfo) -> None:
    if given.dtype not in WIDE_FLOATS or count(given.shape) != 1:
        layer.fault("extra.fp8.input_scale", tensor=given.name, expected="one F32 value", found=typed(given))
    elif given.dtype != "F32":
        layer.remark("extra.fp8.scale_narrow", tensor="input_scale", expected="F32", found=given.dtype)


def _is_one(layer: Layer, scalar: TensorInfo) -> bool:
    """Legacy files write an activation scale of exactly one for "none"; one that may not be read is not."""
    if not layer.readable:
        return False
    try:
        return bool(decode(scalar.dtype, read_tensor(scalar))[0] == 1.0)
    except HeaderError as error:
        layer.fault("extra.file.changed", file=clean(os.path.basename(scalar.path)), found=error.detail)
        return False


def check_e4m3(layer: Layer) -> Understood | None:
    return _check(layer, "float8_e4m3fn")


def check_e5m2(layer: Layer) -> Understood | None:
    return _check(layer, "float8_e5m2")


_REQUIRED, _OPTIONAL = ("weight", "weight_scale"), ("input_scale", "bias")
E4M3FN = Format("float8_e4m3fn", _REQUIRED, _OPTIONAL, check_e4m3)
E5M2 = Format("float8_e5m2", _REQUIRED, _OPTIONAL, check_e5m2, reference=False)
