"""The element types a safetensors header may name, and how the float ones are decoded with numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

BITS: dict[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""Bits per element, by the dtype string of the safetensors format."""

WIDE_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Float types a scale may be stored in without losing its range."""

Floats = npt.NDArray[np.floating[Any]]


def _small_float_table(exponent_bits: int, mantissa_bits: int, *, infinities: bool) -> npt.NDArray[np.float32]:
    """All 256 values of an 8-bit float (sign, exponent, mantissa), IEEE style or the OCP "FN" style without
    infinities.
    """
    codes = np.arange(256, dtype=np.int32)
    sign = np.where(codes & 0x80, -1.0, 1.0)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = codes & ((1 << mantissa_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    normal = np.ldexp(1.0 + mantissa / (1 << mantissa_bits), exponent - bias)
    subnormal = np.ldexp(mantissa / (1 << mantissa_bits), 1 - bias)
    values = sign * np.where(exponent == 0, subnormal, normal)
    top = exponent == (1 << exponent_bits) - 1
    if infinities:
        values = np.where(top, np.where(mantissa == 0, sign * np.inf, np.nan), values)
    else:
        values = np.where(top & (mantissa == (1 << mantissa_bits) - 1), np.nan, values)
    return values.astype(np.float32)


def _e8m0_table() -> npt.NDArray[np.float32]:
    """2^(e - 127); 255 is NaN. Code 0 stands for the smallest scale (MXFP8 decoders treat the block as zero)."""
    values = np.ldexp(np.ones(256), np.arange(256) - 127)
    values[255] = np.nan
    return values.astype(np.float32)


E4M3 = _small_float_table(4, 3, infinities=False)
E5M2 = _small_float_table(5, 2, infinities=True)
E8M0 = _e8m0_table()

_TABLES = {"F8_E4M3": E4M3, "F8_E5M2": E5M2, "F8_E8M0": E8M0}
_PLAIN = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}


FLOATS = frozenset({*_PLAIN, "BF16", *_TABLES})
"""What :func:`decode` knows."""


def decode(dtype: str, data: bytes | bytearray | memoryview) -> Floats:
    """Values of a float tensor's bytes as a 1-D array (float32, or float64 for F64; F16 stays F16)."""
    if dtype in _PLAIN:
        return np.frombuffer(data, dtype=_PLAIN[dtype])
    if dtype == "BF16":
        return (np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
    return _TABLES[dtype][np.frombuffer(data, dtype=np.uint8)]


def nbytes(dtype: str, shape: tuple[int, ...]) -> int | None:
    """Bytes of a tensor; None when they are no whole number, or when the element count overflows 64 bits on the way."""
    elements = 1
    for dim in shape:
        elements *= dim
        if dim >= 1 << 64 or elements >= 1 << 64:
            return None
    bits = elements * BITS[dtype]
    return None if bits & 7 else bits >> 3


def count(shape: tuple[int, ...]) -> int:
    """Number of elements."""
    total = 1
    for dim in shape:
        total *= dim
    return total
