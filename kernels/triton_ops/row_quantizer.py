"""INT8 rows: one float32 scale per row, codes rounded half to even, optionally rotated (ConvRot) first.

    x_rot = x H(g)            per group of g columns (rotation g = 16, 64, 256; 1: no rotation), float32
    s[m]  = max(max_k |x_rot[m, k]| / qmax, floor)          floor 1e-30 for qmax 127, 1e-10 / 7 for qmax 7
    q     = clamp(round(x_rot / s), -qmax, qmax)            with a static s: clamp(round(x_rot / s), -128, 127)

Source: comfy-kitchen's int8 and convrot_w4a4 layouts (row quantiser, rotation and the floors), computed in float32
throughout where its eager code divides in the activation's dtype; x / s is x * (1 / s), within one unit of the last
place of the quotient. A row stays in registers between its maximum and its codes, up to 32,768 columns; wider rows
are read twice. A NaN or an infinity in a row makes that row's scale NaN or infinite, so that the product shows it as
a dense linear's would.
"""
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .device_math import reversed_chunk, rotate_groups, round_to_int, row_absmax
from .launch import check_matrix, check_rotation, check_scalar, on_device_of
from .schedules import row_schedule
from .tile_load import load_tile

SCALE_FLOOR = {127: 1e-30, 7: 1e-10 / 7}


@triton.jit
def _rotated_tile(
    x_ptr: tl.tensor, block_scale_ptr: tl.tensor, row: tl.tensor, first_chunk: tl.tensor, row_mask: tl.tensor,
    K: tl.tensor,
    stride_x: tl.tensor, col_tiles: tl.tensor, SOURCE: tl.constexpr, ROTATION: tl.constexpr, CHUNKS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    chunk = first_chunk + reversed_chunk(tl.arange(0, CHUNKS), ROTATION)
    return rotate_groups(
        load_tile(x_ptr, block_scale_ptr, row, chunk, row_mask, K, stride_x, col_tiles, SOURCE), ROTATION
    )


@triton.jit
def _store_codes(
    q_ptr: tl.tensor, x: tl.tensor, inverse: tl.tensor, local_row: tl.tensor, first_chunk: tl.tensor,
    row_mask: tl.tensor,
    K: tl.tensor, CLAMP: tl.constexpr, CHUNKS: tl.constexpr,
) -> None:  # fmt: skip
    scaled = x * inverse[:, None, None]
    if CLAMP:  # with the row's own scale nothing lies outside
        scaled = tl.minimum(tl.maximum(scaled, -128.0), 127.0)
    column = (first_chunk + tl.arange(0, CHUNKS))[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    target = q_ptr + local_row.to(tl.int64)[:, None, None] * K + column
    tl.store(target, round_to_int(scaled).to(tl.int8), mask=row_mask[:, None, None] & (column < K))


@triton.jit(do_not_specialize=["row_start", "rows"])
def quantize_rows_kernel(
    x_ptr: tl.tensor, block_scale_ptr: tl.tensor, scale_in_ptr: tl.tensor, q_ptr: tl.tensor, scale_ptr: tl.tensor,
    row_start: tl.tensor, rows: tl.tensor, K: tl.tensor, stride_x: tl.tensor, col_tiles: tl.tensor, floor: tl.tensor,
    SOURCE: tl.constexpr, ROTATION: tl.constexpr, QMAX: tl.constexpr, SCALE_IN: tl.constexpr,
    ROWS: tl.constexpr, CHUNKS: tl.constexpr, ONE_PASS: tl.constexpr,
) -> None:  # fmt: skip
    """ROWS rows of x from row_start on; a step takes CHUNKS * 16 columns, the whole row when ONE_PASS.

    SCALE_IN says what scale_in_ptr is: "none"; "static", the quantiser's own scale; "tensor" or "row", the scale of a
    stored weight, which only multiplies the row scale that comes out. SOURCE: see `tile_load`.
    """
    local_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = local_row < rows
    row = row_start + local_row
    steps = 1 if ONE_PASS else tl.cdiv(K, CHUNKS * 16)
    x = _rotated_tile(x_ptr, block_scale_ptr, row, 0, row_mask, K, stride_x, col_tiles, SOURCE, ROTATION, CHUNKS)

    if SCALE_IN == "static":
        inverse = tl.full((ROWS,), 1.0, tl.float32) / tl.load(scale_in_ptr)
    else:
        absmax = row_absmax(x.reshape(ROWS, CHUNKS * 16))
        if not ONE_PASS:
            for step in range(1, steps):
                y = _rotated_tile(
                    x_ptr,
                    block_scale_ptr,
                    row,
                    step * CHUNKS,
                    row_mask,
                    K,
                    stride_x,
                    col_tiles,
                    SOURCE,
                    ROTATION,
                    CHUNKS,
                )
                absmax = row_absmax(tl.join(absmax, row_absmax(y.reshape(ROWS, CHUNKS * 16))))
        scale = tl.div_rn(absmax, tl.full((ROWS,), QMAX, tl.float32))
        scale = tl.where(scale < floor, floor, scale)  # not a maximum: NaN stays
        inverse = 1.0 / scale
        if SCALE_IN == "tensor":
            scale = scale * tl.load(scale_in_ptr)
        if SCALE_IN == "row":
            scale = scale * tl.load(scale_in_ptr + row, mask=row_mask, other=1.0)
        tl.store(scale_ptr + local_row, scale, mask=row_mask)

    CLAMP: tl.constexpr = SCALE_IN == "static"
    _store_codes(q_ptr, x, inverse, local_row, 0, row_mask, K, CLAMP, CHUNKS)
    if not ONE_PASS:
        for step in range(1, steps):
            y = _rotated_tile(
                x_ptr, block_scale_ptr, row, step * CHUNKS, row_mask, K, stride_x, col_tiles, SOURCE, ROTATION, CHUNKS
            )
            _store_codes(q_ptr, y, inverse, local_row, step * CHUNKS, row_mask, K, CLAMP, CHUNKS)


def launch_row_quantizer(
    x: torch.Tensor, K: int, rows: tuple[int, int], *, source: str, rotation: int, qmax: int = 127,
    scale_in: torch.Tensor | None = None,
    scale_use: str = "none", block_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Allocates and launches `quantize_rows_kernel` over rows[0] to rows[1]; (q int8 [n, K], scale float32 [n])."""
    start, stop = rows
    count = stop - start
    q = torch.empty((count, K), dtype=torch.int8, device=x.device)
    scale = torch.empty(0 if scale_use == "static" else count, dtype=torch.float32, device=x.device)
    if count == 0 or K == 0:
        return q, scale.fill_(SCALE_FLOOR[qmax])
    schedule = row_schedule(K)
    with on_device_of(x):
        quantize_rows_kernel[(triton.cdiv(count, schedule.rows),)](
            x, x if block_scale is None else block_scale, x if scale_in is None else scale_in, q, scale,
            start, count, K, x.stride(0), triton.cdiv(triton.cdiv(K, 32 if source == "mxfp8" else 16), 4),
            SCALE_FLOOR[qmax],
            SOURCE=source, ROTATION=rotation, QMAX=qmax, SCALE_IN=scale_use,
            ROWS=schedule.rows, CHUNKS=schedule.chunks, ONE_PASS=schedule.chunks * 16 >= K,
            num_warps=schedule.num_warps,
        )  # fmt: skip
    return q, scale


def quantize_rows(x: torch.Tensor, *, rotation: int = 1, qmax: int = 127) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates (rotation 16, 64, 256; 1: not) and quantises each row of x [M, K] with its own scale.

    Returns (q int8 [M, K], scale float32 [M]). qmax 127, or 7 for the codes of W4A4 activations. K must be a multiple
    of rotation.
    """
    x = check_matrix("x", x)
    check_rotation(rotation, x.shape[1])
    if qmax not in SCALE_FLOOR:
        raise ValueError(f"qmax: expected 127 or 7, found {qmax}")
    return launch_row_quantizer(x, x.shape[1], (0, x.shape[0]), source="float", rotation=rotation, qmax=qmax)


def quantize_rows_static(x: torch.Tensor, scale: torch.Tensor, *, rotation: int = 1) -> torch.Tensor:
    """q int8 [M, K] = clamp(round(x_rot / scale), -128, 127) with the file's scale: float32, one element, on x's
    device."""
    x = check_matrix("x", x)
    check_rotation(rotation, x.shape[1])
    scale = check_scalar("scale", scale, x.device)
    rows = (0, x.shape[0])
    return launch_row_quantizer(
        x, x.shape[1], rows, source="float", rotation=rotation, scale_in=scale, scale_use="static"
    )[0]
