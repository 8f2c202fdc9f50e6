"""FP8, MXFP8 and NVFP4 weights to float: what the exact mode multiplies.

    W[n, k] = e4m3(code[n, k]) * scale                                      fp8: scale of the tensor or of row n
    W[n, k] = e4m3(code[n, k]) * 2**(e[n, k // 32] - 127)                   mxfp8: e8m0 bytes, 128x4 order
    W[n, k] = e2m1(code[n, k]) * e4m3(b[n, k // 16]) * tensor_scale         nvfp4: e4m3 bytes, high nibble = even k

The product is formed in float32 and rounded once, in one pass where eager code takes 3 to 11 kernels. Source:
comfy-kitchen's fp8, mxfp8 and nvfp4 layouts.
"""
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import FLOAT_DTYPES, block_scales, check_bytes, check_scalar, check_vector, on_device_of, row_range
from .tile_load import load_tile

ROWS, CHUNKS, WARPS = 4, 64, 4


@triton.jit(do_not_specialize=["row_start", "rows"])
def decode_kernel(
    w_ptr: tl.tensor, block_scale_ptr: tl.tensor, scale_ptr: tl.tensor, out_ptr: tl.tensor, row_start: tl.tensor,
    rows: tl.tensor,
    K: tl.tensor, stride_w: tl.tensor, col_tiles: tl.tensor, SOURCE: tl.constexpr, SCALE: tl.constexpr,
    ROWS: tl.constexpr, CHUNKS: tl.constexpr,
) -> None:  # fmt: skip
    """ROWS rows, CHUNKS * 16 columns of out [rows, K]. SCALE: "none", "tensor" or "row", what scale_ptr is."""
    local_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = local_row < rows
    row = row_start + local_row
    chunk = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
    w = load_tile(w_ptr, block_scale_ptr, row, chunk, row_mask, K, stride_w, col_tiles, SOURCE)
    if SCALE == "tensor":
        w = w * tl.load(scale_ptr)
    if SCALE == "row":
        w = w * tl.load(scale_ptr + row, mask=row_mask, other=0.0)[:, None, None]
    column = chunk[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    target = out_ptr + local_row.to(tl.int64)[:, None, None] * K + column
    tl.store(target, w.to(out_ptr.dtype.element_ty), mask=row_mask[:, None, None] & (column < K))


def _launch(
    w: torch.Tensor, K: int, rows: tuple[int, int], dtype: torch.dtype, *, source: str,
    block_scale: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"dtype: expected float16, bfloat16 or float32, found {dtype}")
    count = rows[1] - rows[0]
    out = torch.empty((count, K), dtype=dtype, device=w.device)
    if count == 0 or K == 0:
        return out
    use = "none" if scale is None else ("tensor" if scale.numel() == 1 else "row")
    with on_device_of(w):
        decode_kernel[(triton.cdiv(count, ROWS), triton.cdiv(K, CHUNKS * 16))](
            w, w if block_scale is None else block_scale, w if scale is None else scale, out, rows[0], count,
            K, w.stride(0), triton.cdiv(K, 128 if source == "mxfp8" else 64), SOURCE=source, SCALE=use,
            ROWS=ROWS, CHUNKS=CHUNKS, num_warps=WARPS,
        )  # fmt: skip
    return out


def decode_fp8(weight: torch.Tensor, scale: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """weight float8_e4m3fn (or its bytes) [N, K], scale float32 of one or N elements -> [N, K] in dtype."""
    weight = check_bytes("weight", weight)
    N, K = weight.shape
    return _launch(weight, K, (0, N), dtype, source="e4m3", scale=check_vector("scale", scale, (1, N), weight.device))


def decode_mxfp8(
    weight: torch.Tensor, scale: torch.Tensor, *, columns: int, dtype: torch.dtype, rows: tuple[int, int] | None = None
) -> torch.Tensor:
    """weight float8_e4m3fn [>= N, >= columns], scale bytes in the 128x4 order, one per 32 columns -> [n, columns] in
    dtype for ``rows`` (start, stop), all by default."""
    weight = check_bytes("weight", weight)
    rows = row_range(rows, weight, columns, codes_per_byte=1)
    return _launch(
        weight,
        columns,
        rows,
        dtype,
        source="mxfp8",
        block_scale=block_scales(scale, rows[1], columns, 32, weight.device),
    )


def decode_nvfp4(
    weight: torch.Tensor, scale: torch.Tensor, tensor_scale: torch.Tensor, *, columns: int, dtype: torch.dtype,
    rows: tuple[int, int] | None = None,
) -> torch.Tensor:  # fmt: skip
    """weight uint8 [>= N, >= columns / 2] (high nibble = even column), scale e4m3 bytes in the 128x4 order, one per
    16 columns, tensor_scale float32 of one element -> [n, columns] in dtype for ``rows`` (start, stop), all by
    default."""
    weight = check_bytes("weight", weight)
    rows = row_range(rows, weight, columns, codes_per_byte=2)
    return _launch(
        weight, columns, rows, dtype, source="nvfp4", block_scale=block_scales(scale, rows[1], columns, 16,
        weight.device),
        scale=check_scalar("tensor_scale", tensor_scale, weight.device),
    )  # fmt: skip
