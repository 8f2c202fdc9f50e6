"""Codes of one byte or less, read as numbers: 8-bit floats, e2m1 and int4 nibbles.

On a CPU they are decoded with vector instructions on the bits, a piece at a time so that what lies between two steps
stays in the caches; a table lookup, which PyTorch runs on one thread, is no faster even there (measured). Bytes and
words are little-endian, as on every machine PyTorch runs on.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

#: Weights decoded at a time on a CPU: 1 MiB as float32 (measured: less costs more in calls than it saves in memory
#: traffic).
PIECE = 1 << 18


def _pieces(raw: Tensor, dtype: torch.dtype, codes: int = 1) -> Iterator[tuple[int, int, Tensor]]:
    """(start, stop, rows ``start:stop`` of ``raw`` as the wider ``dtype``) over the rows of bytes of ``codes`` weights
    each; one part where the device is no CPU. The parts share their memory: each is gone when the next one comes.
    """
    rows, columns = raw.shape
    step = max(1, min(rows, PIECE // max(1, codes * columns) if raw.device.type == "cpu" else rows))
    scratch = torch.empty((step, columns), dtype=dtype, device=raw.device)
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        yield start, stop, scratch[: stop - start].copy_(raw[start:stop])


def as_float8(tensor: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """``tensor`` read as an 8-bit float ``dtype``: files also store these bytes as U8 or I8."""
    return tensor.view(dtype) if tensor.dtype in (torch.uint8, torch.int8) else tensor


def float8_to_float(codes: Tensor, scale: Tensor | None = None) -> Tensor:
    """float32 values of float8_e4m3fn or float8_e5m2 codes, times ``scale``.

    On the CPU by way of float16's bits, a third of the time of torch's own conversion (measured): e5m2 is float16's
    upper byte, and e4m3 shifted by 7 is a float16 that is 2^8 too small.

    Args:
        codes: ``[..., K]``.
        scale: None for 1, float32 ``[]``, or ``[rows, C]`` for codes ``[rows, K]``: one for every K / C columns.
    """
    if codes.device.type != "cpu":
        values = codes.to(torch.float32)
        if scale is not None:
            _multiply(values.reshape(-1, codes.shape[-1]), (scale,), 0, values.shape[0])
        return values
    raw = codes.view(torch.int8).reshape(-1, codes.shape[-1])
    e4m3 = codes.dtype is torch.float8_e4m3fn
    factors = _factors(256.0 if e4m3 else 1.0, scale)
    values = torch.empty(raw.shape, dtype=torch.float32)
    for start, stop, bits in _pieces(raw, torch.int16):
        if e4m3:
            # Weights hardly ever hold a NaN, and finding the two extreme bytes costs a tenth of masking every element.
            not_a_number = (bits & 0x7F) == 0x7F if _may_hold_e4m3_nan(raw[start:stop]) else None
            bits <<= 7
            bits &= ~0x4000  # the second copy of the sign
            if not_a_number is not None:
                bits.masked_fill_(not_a_number, 0x7E00)
        else:
            bits <<= 8
        _multiply(values[start:stop].copy_(bits.view(torch.float16)), factors, start, stop)
    return values.reshape(codes.shape)


def _may_hold_e4m3_nan(raw: Tensor) -> bool:
    """Whether an int8 is 0x7F or 0xFF, e4m3's two NaNs: the largest signed and the largest unsigned byte."""
    if not raw.numel():
        return False
    return int(raw.amax()) == 0x7F or int(raw.view(torch.uint8).amax()) == 0xFF


def _factors(power: float, scale: Tensor | None) -> tuple[Tensor, ...]:
    """What ``power * scale`` multiplies by: their product, which is exact as ``power`` is a power of two, or both in
    turn where it could overflow.
    """
    if scale is None:
        return (torch.tensor(power),)
    if scale.numel() and bool(scale.abs().amax() > 2.0**100):
        return torch.tensor(power, device=scale.device), scale
    return (scale * power,)


def _multiply(values: Tensor, factors: tuple[Tensor, ...], start: int, stop: int) -> None:
    """``values [stop - start, K]``, in place, times rows ``start:stop`` of each factor (``[]`` or ``[rows, C]``)."""
    for factor in factors:
        if factor.dim():
            part = factor[start:stop]
            values.view(*part.shape, -1).mul_(part[..., None])
        else:
            values.mul_(factor)


def e4m3_to_float(tensor: Tensor) -> Tensor:
    """float32 values of e4m3 bytes (float8_e4m3fn, or U8 holding them)."""
    return float8_to_float(as_float8(tensor))


def e8m0_to_float(tensor: Tensor) -> Tensor:
    """``2^(e - 127)`` of E8M0 bytes (U8 or float8_e8m0fnu), float32; e = 0 decodes to 0, as comfy-kitchen does."""
    exponent = tensor.view(torch.uint8).to(torch.int32)
    # 2^(e-127) as a float32 has the exponent field e; e = 0 is then +0.0 and e = 255 (E8M0's NaN) is infinity, made NaN
    # here.
    value = (exponent << 23).view(torch.float32)
    return torch.where(exponent == 255, torch.nan, value)


def e2m1_to_float(packed: Tensor, scale: Tensor | None = None) -> Tensor:
    """float32 values ``[rows, 2 * columns]`` of packed e2m1 bytes ``[rows, columns]``, the even column in the high
    nibble, times ``scale`` as in :func:`float8_to_float`.
    """
    raw = packed.view(torch.uint8)
    rows, columns = raw.shape
    # A float16 with e2m1's sign, two exponent bits and mantissa bit in place is 2^14 too small.
    factors = _factors(2.0**14, scale)
    values = torch.empty((rows, 2 * columns), dtype=torch.float32, device=packed.device)
    for start, stop, pair in _pieces(raw, torch.int32, 2):
        pair *= (1 << 28) + (1 << 8)  # the low nibble to the top of the upper half, the high one to that of the lower
        bits = pair.view(torch.int16)
        bits >>= 3
        bits &= ~0x71FF  # the other nibble, and copies of the sign
        _multiply(values[start:stop].copy_(bits.view(torch.float16)), factors, start, stop)
    return values


def unpack_nibbles(packed: Tensor, *, high_first: bool) -> Tensor:
    """uint8 codes 0..15 ``[rows, 2 * columns]`` of packed bytes ``[rows, columns]`` (U8 or I8).

    ``high_first``: the even column is in the high nibble (NVFP4), else in the low one (W4A4, W4A8).
    """
    byte = packed.view(torch.uint8)
    low, high = byte & 0x0F, byte >> 4
    pair = (high, low) if high_first else (low, high)
    return torch.stack(pair, dim=-1).reshape(byte.shape[0], 2 * byte.shape[1])


def unpack_int4(packed: Tensor) -> Tensor:
    """int8 codes -8..7 ``[rows, 2 * columns]`` of two's-complement nibbles, the low nibble being the even column."""
    raw = packed.view(torch.int8)
    # Both codes side by side in an int16: the shifts extend the signs, and no interleaving copy is needed.
    pairs = torch.empty(raw.shape, dtype=torch.int16, device=packed.device)
    for start, stop, wide in _pieces(raw, torch.int16, 2):
        low = wide << 12
        low >>= 12
        low &= 0xFF
        wide <<= 4
        wide &= ~0xFF
        torch.bitwise_or(low, wide, out=pairs[start:stop])
    return pairs.view(torch.int8)
