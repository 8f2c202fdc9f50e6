"""Device functions that several kernels share: rotation, rounding, the 4- and 8-bit float codes, the 128x4 scale order.

Only integer and float32 arithmetic: no PTX, no libdevice and no fp8 type, so that each builds for every architecture
from sm_75 on and for AMD, and runs in Triton's interpreter. bfloat16 is only ever loaded, stored and cast, never
computed with.
"""
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

# 1.5 * 2**23: adding it to a float32 below 2**22 in magnitude leaves the value, rounded half to even, in the low bits
# of the sum.
ROUND_MAGIC = tl.constexpr(12582912.0)
ROUND_MAGIC_BITS = tl.constexpr(0x4B400000)


@triton.jit
def round_to_int(x: tl.tensor) -> tl.tensor:
    """float32 -> int32, half to even, for |x| < 2**22. NaN gives an unspecified integer, never a trap."""
    return (x + ROUND_MAGIC).to(tl.int32, bitcast=True) - ROUND_MAGIC_BITS


@triton.jit
def row_absmax(x: tl.tensor) -> tl.tensor:
    """Largest magnitude over the last axis of a float32 tensor; NaN wins over everything, as in torch.

    The bits of non-negative floats are ordered like integers and NaN lies above infinity, so an integer maximum
    propagates it.
    """
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(bits, axis=-1).to(tl.float32, bitcast=True)


@triton.jit
def _hadamard4_last(x: tl.tensor) -> tl.tensor:
    """x [R, 4] @ H4, H4 = [[1,1,1,-1],[1,1,-1,1],[1,-1,1,1],[-1,1,1,1]]: out_i = (x0 + x1 + x2 + x3) - 2 x_(3-i)."""
    rows: tl.constexpr = x.shape[0]
    even, odd = tl.split(x.reshape(rows, 2, 2))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    total = (x0 + x1) + (x2 + x3)
    even = tl.join(total - 2 * x3, total - 2 * x1)
    odd = tl.join(total - 2 * x2, total - 2 * x0)
    return tl.join(even, odd).reshape(rows, 4)


@triton.jit
def rotate_groups(x: tl.tensor, ROTATION: tl.constexpr) -> tl.tensor:
    """ConvRot of a float32 tile [rows, chunks, 16]; ROTATION 1, 16, 64 or 256 consecutive elements of a row form a
    group.

    H(g) = H4 (x) ... (x) H4 / sqrt(g), one factor per base-4 digit of the position in the group, so a digit at a time
    costs 7/4 operations per element where a g-wide product costs 2 g. The two low digits lie inside one thread (a
    chunk is 16 elements). The digits above them number the chunks of a group and lie across threads; there H4 = ones
    - 2 P, P reversing the digit, is split as (ones - 2 I) P: the caller applies P for nothing by loading the chunks
    of a group in reversed order (`reversed_chunk`), and ones - 2 I needs no permutation.
    """
    rows: tl.constexpr = x.shape[0]
    chunks: tl.constexpr = x.shape[1]
    n: tl.constexpr = rows * chunks
    if ROTATION > 1:
        x = _hadamard4_last(x.reshape(n * 4, 4))
        x = x.reshape(n, 4, 4).trans(0, 2, 1)
        x = _hadamard4_last(x.reshape(n * 4, 4))
        x = x.reshape(n, 4, 4).trans(0, 2, 1)
    if ROTATION == 16:
        x = x * 0.25
    if ROTATION == 64:
        x = x.reshape(n // 4, 4, 16)
        x = (tl.sum(x, axis=1, keep_dims=True) - 2 * x) * 0.125
    if ROTATION == 256:
        x = x.reshape(n // 16, 4, 4, 16)
        x = tl.sum(x, axis=2, keep_dims=True) - 2 * x
        x = (tl.sum(x, axis=1, keep_dims=True) - 2 * x) * 0.0625
    return x.reshape(rows, chunks, 16)


@triton.jit
def reversed_chunk(chunk: tl.tensor, ROTATION: tl.constexpr) -> tl.tensor:
    """Index of the 16-element chunk to load in the place of ``chunk`` ahead of `rotate_groups`."""
    return chunk ^ (ROTATION // 16 - 1) if ROTATION > 16 else chunk


@triton.jit
def e4m3_to_f32(byte: tl.tensor) -> tl.tensor:
    """float8_e4m3fn codes (uint8) -> float32: fields of a float16 of 2**-8 the value, subnormals included."""
    b = byte.to(tl.int16)
    half = (((b & 0x80) << 8) | ((b & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return tl.where((b & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)


@triton.jit
def e2m1_to_f32(nibble: tl.tensor) -> tl.tensor:
    """float4_e2m1 codes (low four bits of an int16) -> float32: fields of a float16 of 2**-14 the value."""
    half = (((nibble & 0x8) << 12) | ((nibble & 0x7) << 9)).to(tl.float16, bitcast=True)
    return half.to(tl.float32) * 16384.0


@triton.jit
def e8m0_to_f32(byte: tl.tensor) -> tl.tensor:
    """Power-of-two scale bytes: 2**(e - 127). 0 decodes to 0.0 as in ComfyUI, 255 is NaN as in the OCP MX format."""
    value = (byte.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return tl.where(byte == 255, float("nan"), value)


@triton.jit
def swizzled_offset(row: tl.tensor, col: tl.tensor, col_tiles: tl.tensor) -> tl.tensor:
    """Where cuBLAS's 128x4 block order keeps scale (row, col); col_tiles = ceil(columns of scales / 4)."""
    tile = (row // 128) * col_tiles + col // 4
    return tile * 512 + (row % 32) * 16 + ((row % 128) // 32) * 4 + col % 4


@triton.jit
def f32_to_e4m3(x: tl.tensor) -> tl.tensor:
    """float32 -> float8_e4m3fn codes (uint8), half to even, clamped to +-448; NaN gives 0x7F."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(tl.abs(x), 448.0)
    m = magnitude.to(tl.int32, bitcast=True)
    normal = ((m + 0x7FFFF + ((m >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    code = tl.where(magnitude < 0.015625, round_to_int(magnitude * 512.0), normal)  # below 2**-6: steps of 2**-9
    code = tl.where(x != x, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def f32_to_e2m1(x: tl.tensor) -> tl.tensor:
    """float32 -> float4_e2m1 codes (low four bits of an int32), half to even, clamped to +-6."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(tl.abs(x), 6.0)
    fine = round_to_int(magnitude * 2.0)  # codes 0 to 4, steps of a half
    middle = round_to_int(magnitude) + 2  # codes 4 to 6, steps of one
    coarse = round_to_int(magnitude * 0.5) + 4  # codes 6 and 7, steps of two
    code = tl.where(magnitude < 2.0, fine, tl.where(magnitude < 4.0, middle, coarse))
    return code | ((bits >> 28) & 0x8)
