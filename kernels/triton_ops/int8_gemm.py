"""INT8 matrix product with the whole epilogue of a quantised linear, low-rank side path included.

    out[m, n] = (sum_k a[m, k] b[n, k]) * scale_a[m] * scale_b[n] + strength * sum_r low_rank[m, r] up[n, r] + bias[n]

a and b are int8 with K adjacent in memory (a weight as stored), the sum is int32 and exact for K <= 131,071, the
epilogue is float32 and the result is rounded once, to out_dtype: overflow becomes infinity there, as in a dense
linear. Source: the int8_tensorwise linear of comfy-kitchen, and LoRA for the low-rank term (y += strength * (x down^T)
up^T), which is added here because a separate pass would read and write ``out`` once more.

Programs are numbered so that GROUP_M row tiles are finished before the next column tile starts, which keeps their
operands in L2. On sm_80 to sm_89 a loop step holds two dots (DOTS): with one, Triton 3.8 and 3.9 prefetch int8
operands through single-byte registers and spill. Tile corners are 64-bit, offsets inside a tile 32-bit, so no matrix
is too large.
"""
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import FLOAT_DTYPES, check_matrix, check_vector, device_arch, on_device_of
from .schedules import GemmSchedule, gemm_schedule, tuned_schedules

MAX_K = 2**31 // 128**2 - 1
RANK_STEP = 32


@triton.jit(do_not_specialize=["M"])
def int8_gemm_kernel(
    a_ptr: tl.tensor, b_ptr: tl.tensor, scale_a_ptr: tl.tensor, scale_b_ptr: tl.tensor, bias_ptr: tl.tensor,
    low_rank_ptr: tl.tensor, up_ptr: tl.tensor, out_ptr: tl.tensor,
    M: tl.tensor, N: tl.tensor, K: tl.tensor, R: tl.tensor, stride_a: tl.tensor, stride_b: tl.tensor,
    stride_low_rank: tl.tensor, stride_up: tl.tensor, stride_out: tl.tensor, strength: tl.tensor,
    ROW_SCALE_A: tl.constexpr, ROW_SCALE_B: tl.constexpr, BIAS: tl.constexpr, LOW_RANK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DOTS: tl.constexpr, GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr, RANK_STEP: tl.constexpr,
) -> None:  # fmt: skip
    """One BLOCK_M x BLOCK_N tile of out. EVEN_K: K is a multiple of BLOCK_K * DOTS, no mask in the loop."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    group = pid // (GROUP_M * tiles_n)
    group_rows = min(tiles_m - group * GROUP_M, GROUP_M)
    in_group = pid % (GROUP_M * tiles_n)
    tile_m = group * GROUP_M + in_group % group_rows
    tile_n = in_group // group_rows

    m0 = tile_m * BLOCK_M
    n0 = tile_n * BLOCK_N
    # Rows past the edge repeat the last one: loads need no row mask, and the store drops the copies.
    m = tl.minimum(tl.arange(0, BLOCK_M), M - 1 - m0)
    n = tl.minimum(tl.arange(0, BLOCK_N), N - 1 - n0)
    k = tl.arange(0, BLOCK_K)
    a_tile = a_ptr + m0.to(tl.int64) * stride_a + m[:, None] * stride_a + k[None, :]
    b_tile = b_ptr + n0.to(tl.int64) * stride_b + n[None, :] * stride_b + k[:, None]

    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    for k0 in range(0, K, BLOCK_K * DOTS):
        for dot in tl.static_range(DOTS):
            if EVEN_K:
                a = tl.load(a_tile + dot * BLOCK_K)
                b = tl.load(b_tile + dot * BLOCK_K)
            else:
                left = K - k0 - dot * BLOCK_K
                a = tl.load(a_tile + dot * BLOCK_K, mask=k[None, :] < left, other=0)
                b = tl.load(b_tile + dot * BLOCK_K, mask=k[:, None] < left, other=0)
            acc = tl.dot(a, b, acc, out_dtype=tl.int32)
        a_tile += BLOCK_K * DOTS
        b_tile += BLOCK_K * DOTS

    out = acc.to(tl.float32)
    out = out * (tl.load(scale_a_ptr + m0 + m)[:, None] if ROW_SCALE_A else tl.load(scale_a_ptr))
    out = out * (tl.load(scale_b_ptr + n0 + n)[None, :] if ROW_SCALE_B else tl.load(scale_b_ptr))
    if LOW_RANK:
        r = tl.arange(0, RANK_STEP)
        low_rank_tile = low_rank_ptr + m0.to(tl.int64) * stride_low_rank + m[:, None] * stride_low_rank + r[None, :]
        up_tile = up_ptr + n0.to(tl.int64) * stride_up + n[None, :] * stride_up + r[:, None]
        for r0 in range(0, R, RANK_STEP):
            low_rank = tl.load(low_rank_tile + r0, mask=r[None, :] < R - r0, other=0.0)
            low_rank = (low_rank.to(tl.float32) * strength).to(up_ptr.dtype.element_ty)
            up = tl.load(up_tile + r0, mask=r[:, None] < R - r0, other=0.0)
            out = tl.dot(low_rank, up, out)
    if BIAS:
        out += tl.load(bias_ptr + n0 + n).to(tl.float32)[None, :]

    out_m = tl.arange(0, BLOCK_M)
    out_n = tl.arange(0, BLOCK_N)
    out_tile = out_ptr + m0.to(tl.int64) * stride_out + n0 + out_m[:, None] * stride_out + out_n[None, :]
    mask = (out_m[:, None] < M - m0) & (out_n[None, :] < N - n0)
    tl.store(out_tile, out.to(out_ptr.dtype.element_ty), mask=mask)


def int8_matmul(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, bias: torch.Tensor | None = None, *,
    out_dtype: torch.dtype, low_rank: torch.Tensor | None = None, up: torch.Tensor | None = None, strength: float = 1.0,
    out: torch.Tensor | None = None, schedule: GemmSchedule | None = None,
) -> torch.Tensor:  # fmt: skip
    """a int8 [M, K] times b int8 [N, K] transposed, scaled, plus the low-rank side path, plus bias [N]; [M, N] in
    out_dtype.

    scale_a: [M] or one element, scale_b: [N] or one element, float32 on the device. low_rank [M, R] and up [N, R]
    come together, both float16 or both bfloat16 for the fused epilogue; any other pair of float dtypes is added after
    the product. ``out`` may be a slice of columns of a wider matrix. ValueError says which argument does not fit.
    """
    a = check_matrix("a", a, (torch.int8,))
    b = check_matrix("b", b, (torch.int8,))
    M, K = a.shape
    N = b.shape[0]
    if b.shape[1] != K:
        raise ValueError(f"b: expected [N, {K}] to match a {tuple(a.shape)}, found {tuple(b.shape)}")
    if K > MAX_K:
        raise ValueError(f"a: expected at most {MAX_K} columns (the int32 sum is exact up to there), found {K}")
    if out_dtype not in FLOAT_DTYPES:
        raise ValueError(f"out_dtype: expected float16, bfloat16 or float32, found {out_dtype}")
    scale_a = check_vector("scale_a", scale_a, (M, 1), a.device)
    scale_b = check_vector("scale_b", scale_b, (N, 1), a.device)
    if bias is not None:
        if bias.numel() != N or bias.device != a.device:
            raise ValueError(f"bias: expected {N} elements on {a.device}, found {tuple(bias.shape)} on {bias.device}")
        bias = bias.reshape(-1).contiguous()
    if (low_rank is None) != (up is None):
        raise ValueError("low_rank, up: expected both or neither")
    if low_rank is not None and up is not None:
        low_rank = check_matrix("low_rank", low_rank)
        up = check_matrix("up", up)
        if low_rank.shape[0] != M or up.shape[0] != N or low_rank.shape[1] != up.shape[1]:
            raise ValueError(
                f"low_rank, up: expected [{M}, R] and [{N}, R], found {tuple(low_rank.shape)} and {tuple(up.shape)}"
            )
    if out is None:
        out = torch.empty((M, N), dtype=out_dtype, device=a.device)
    elif out.shape != (M, N) or out.dtype != out_dtype or (N > 1 and out.stride(1) != 1):
        raise ValueError(
            f"out: expected [{M}, {N}] {out_dtype} with adjacent columns, found {tuple(out.shape)} {out.dtype}"
        )
    if M == 0 or N == 0:
        return out

    side = (a, a)  # pointers the kernel does not read
    fused = False
    if low_rank is not None and up is not None and low_rank.dtype == up.dtype != torch.float32:
        side = (low_rank, up)
        fused = True
    arch, multiprocessors = device_arch(a.device)
    if schedule is None:
        schedule = gemm_schedule(
            arch, M, N, K, low_rank=fused, multiprocessors=multiprocessors, tuned=tuned_schedules()
        )
    with on_device_of(a):
        int8_gemm_kernel[(triton.cdiv(M, schedule.block_m) * triton.cdiv(N, schedule.block_n),)](
            a, b, scale_a, scale_b, scale_b if bias is None else bias, *side, out,
            M, N, K, side[0].shape[1], a.stride(0), b.stride(0), side[0].stride(0), side[1].stride(0), out.stride(0),
            strength,
            ROW_SCALE_A=scale_a.numel() == M, ROW_SCALE_B=scale_b.numel() == N, BIAS=bias is not None, LOW_RANK=fused,
            BLOCK_M=schedule.block_m, BLOCK_N=schedule.block_n, BLOCK_K=schedule.block_k, DOTS=schedule.dots,
            GROUP_M=schedule.group_m, EVEN_K=K % (schedule.block_k * schedule.dots) == 0, RANK_STEP=RANK_STEP,
            num_warps=schedule.num_warps, num_stages=schedule.num_stages,
        )  # fmt: skip
    if low_rank is not None and up is not None and not fused:
        out += (low_rank @ up.to(low_rank.dtype).t()).mul_(strength).to(out_dtype)
    return out
