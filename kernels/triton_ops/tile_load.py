"""Loading a float32 tile [rows, chunks, 16] of a matrix, whatever it is stored as.

SOURCE names the storage of a row of K values:

======== ============================================================================================================
float    float16, bfloat16 or float32
e4m3     float8_e4m3fn codes; the tensor or row scale is not applied here
mxfp8    float8_e4m3fn codes times 2**(e - 127), one e8m0 byte per 32 columns, bytes in the 128x4 order
nvfp4    two e2m1 codes a byte, HIGH nibble = even column, times an e4m3 scale per 16 columns, bytes in the
         128x4 order; the tensor scale is not applied here
======== ============================================================================================================

Source of the layouts: comfy-kitchen's nvfp4 and mxfp8 layouts and cuBLAS's block-scale order.
"""
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from .device_math import e2m1_to_f32, e4m3_to_f32, e8m0_to_f32, swizzled_offset


@triton.jit
def load_tile(
    x_ptr: tl.tensor, block_scale_ptr: tl.tensor, row: tl.tensor, chunk: tl.tensor, row_mask: tl.tensor, K: tl.tensor,
    stride_row: tl.tensor, col_tiles: tl.tensor, SOURCE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Rows ``row`` [R] and 16-column chunks ``chunk`` [C] as float32 [R, C, 16]; 0 outside the matrix. Row offsets
    are 64-bit."""
    base = x_ptr + row.to(tl.int64)[:, None, None] * stride_row
    if SOURCE == "nvfp4":
        byte = chunk[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
        packed = tl.load(base + byte, mask=row_mask[:, None, None] & (byte * 2 < K), other=0).to(tl.int16)
        values = tl.join(e2m1_to_f32(packed >> 4), e2m1_to_f32(packed)).reshape(row.shape[0], chunk.shape[0], 16)
        offset = swizzled_offset(row[:, None], chunk[None, :], col_tiles)
        scale = e4m3_to_f32(
            tl.load(block_scale_ptr + offset, mask=row_mask[:, None] & (chunk[None, :] * 16 < K), other=0)
        )
        return values * scale[:, :, None]
    column = chunk[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    x = tl.load(base + column, mask=row_mask[:, None, None] & (column < K), other=0)
    if SOURCE == "float":
        return x.to(tl.float32)
    values = e4m3_to_f32(x)
    if SOURCE == "mxfp8":
        offset = swizzled_offset(row[:, None], chunk[None, :] // 2, col_tiles)
        scale = e8m0_to_f32(
            tl.load(block_scale_ptr + offset, mask=row_mask[:, None] & (chunk[None, :] * 16 < K), other=0)
        )
        values = values * scale[:, :, None]
    return values
