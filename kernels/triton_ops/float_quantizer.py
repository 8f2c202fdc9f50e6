"""Activations to FP8, MXFP8 and NVFP4: codes, and block scale bytes in cuBLAS's 128x4 order, in one pass over memory.

    fp8      q = e4m3(clamp(x / scale, +-448))
    mxfp8    e = ceil(log2(max|x| / 448)) per 32 columns, stored e + 127, at least 0;  q = e4m3(clamp(x / 2**e, +-448))
    nvfp4    b = e4m3(min(max|x| / 6 / tensor_scale, 448)) per 16 columns;
             q = e2m1(clamp(x / (tensor_scale * b), +-6)), the even column in the HIGH nibble;
             a block of scale 0 has codes 0

All in float32, half to even. Source: comfy-kitchen's quantize_per_tensor_fp8, quantize_mxfp8 and quantize_nvfp4,
whose eager forms move 19, 53 and 195 bytes an element. x / s is x * (1 / s).
"""
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .device_math import e4m3_to_f32, f32_to_e2m1, f32_to_e4m3, row_absmax, swizzled_offset
from .launch import check_matrix, check_scalar, on_device_of
from .tile_load import load_tile

ROWS, CHUNKS, WARPS = 4, 64, 4


@triton.jit(do_not_specialize=["M"])
def quantize_float_kernel(
    x_ptr: tl.tensor, scale_in_ptr: tl.tensor, q_ptr: tl.tensor, block_scale_ptr: tl.tensor, M: tl.tensor, K: tl.tensor,
    stride_x: tl.tensor, stride_q: tl.tensor, col_tiles: tl.tensor, FORMAT: tl.constexpr, ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:  # fmt: skip
    """ROWS rows, CHUNKS * 16 columns. Columns from K to the padded width quantise as zeros; q and the scale image are
    padded."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = row < M
    chunk = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
    x = load_tile(x_ptr, x_ptr, row, chunk, row_mask, K, stride_x, 0, "float")
    q_row = q_ptr + row.to(tl.int64)[:, None, None] * stride_q

    if FORMAT == "nvfp4":
        tensor_scale = tl.load(scale_in_ptr)
        absmax = row_absmax(x)
        block_code = f32_to_e4m3(tl.div_rn(tl.div_rn(absmax, tl.full(absmax.shape, 6.0, tl.float32)), tensor_scale))
        total = tensor_scale * e4m3_to_f32(block_code)
        inverse = tl.where(total == 0.0, 0.0, 1.0 / total)
        code = f32_to_e2m1(x * inverse[:, :, None])
        high, low = tl.split(code.reshape(ROWS, CHUNKS, 8, 2))
        byte = chunk[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
        tl.store(q_row + byte, ((high << 4) | low).to(tl.uint8), mask=row_mask[:, None, None] & (byte < stride_q))
        offset = swizzled_offset(row[:, None], chunk[None, :], col_tiles)
        tl.store(block_scale_ptr + offset, block_code, mask=row_mask[:, None] & (chunk[None, :] * 8 < stride_q))
    else:
        if FORMAT == "mxfp8":
            absmax = row_absmax(x.reshape(ROWS, CHUNKS // 2, 32))
            bits = tl.div_rn(absmax, tl.full(absmax.shape, 448.0, tl.float32)).to(tl.int32, bitcast=True)
            exponent = tl.minimum((bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32), 254)
            inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
            block = tl.program_id(1) * (CHUNKS // 2) + tl.arange(0, CHUNKS // 2)
            offset = swizzled_offset(row[:, None], block[None, :], col_tiles)
            mask = row_mask[:, None] & (block[None, :] * 32 < stride_q)
            tl.store(block_scale_ptr + offset, exponent.to(tl.uint8), mask=mask)
            x = (x.reshape(ROWS, CHUNKS // 2, 32) * inverse[:, :, None]).reshape(ROWS, CHUNKS, 16)
        else:
            x = x * (1.0 / tl.load(scale_in_ptr))
        column = chunk[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
        tl.store(q_row + column, f32_to_e4m3(x), mask=row_mask[:, None, None] & (column < stride_q))


def _launch(x: torch.Tensor, q: torch.Tensor, image: torch.Tensor, scale: torch.Tensor, format_name: str) -> None:
    """x [M, K] into q [>= M, >= K codes] and the zeroed scale image; rows of q past M are the caller's."""
    M, K = x.shape
    if q.numel() == 0:
        return
    width = q.shape[1] * (2 if format_name == "nvfp4" else 1)
    with on_device_of(x):
        quantize_float_kernel[(triton.cdiv(M, ROWS), triton.cdiv(width, CHUNKS * 16))](
            x, scale, q, image, M, K, x.stride(0), q.stride(0), image.shape[1] // 4,
            FORMAT=format_name, ROWS=ROWS, CHUNKS=CHUNKS, num_warps=WARPS,
        )  # fmt: skip


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _scale_image(x: torch.Tensor, rows: int, scale_columns: int) -> torch.Tensor:
    return torch.zeros((_up(rows, 128), _up(scale_columns, 4)), dtype=torch.uint8, device=x.device)


def quantize_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x [M, K] float, scale float32 of one element on the device -> float8_e4m3fn [M, K]."""
    x = check_matrix("x", x)
    q = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    _launch(x, q, q[:0, :0], check_scalar("scale", scale, x.device), "fp8")
    return q.view(torch.float8_e4m3fn)


def quantize_mxfp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] float -> (float8_e4m3fn [Mp, Kp], scale bytes uint8 [ceil128(Mp), ceil4(Kp / 32)] in the 128x4 order);
    Mp, Kp: rounded up to 32, padding zero."""
    x = check_matrix("x", x)
    M, K = x.shape
    Mp, Kp = _up(M, 32), _up(K, 32)
    q = torch.empty((Mp, Kp), dtype=torch.uint8, device=x.device)
    q[M:].zero_()
    image = _scale_image(x, Mp, Kp // 32)
    _launch(x, q, image, image, "mxfp8")
    return q.view(torch.float8_e4m3fn), image


def quantize_nvfp4(x: torch.Tensor, tensor_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] float, tensor_scale float32 of one element on the device, above 0 -> (codes uint8 [Mp, Kp / 2], scale
    bytes uint8 [ceil128(Mp), ceil4(Kp / 16)] in the 128x4 order); Mp, Kp: rounded up to 16, padding zero.

    tensor_scale is the file's input_scale or max|x| / (448 * 6), at least the smallest normal float32.
    """
    x = check_matrix("x", x)
    M, K = x.shape
    Mp, Kp = _up(M, 16), _up(K, 16)
    q = torch.empty((Mp, Kp // 2), dtype=torch.uint8, device=x.device)
    q[M:].zero_()
    image = _scale_image(x, Mp, Kp // 16)
    _launch(x, q, image, check_scalar("tensor_scale", tensor_scale, x.device), "nvfp4")
    return q, image
