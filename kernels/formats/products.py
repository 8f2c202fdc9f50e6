"""Products of packed weights in plain torch, lean in memory: the weight is decoded a few thousand rows at a time.

Three shapes of linear are enough for every format:

- :func:`int8_linear`: integer codes on both sides, accumulated exactly, scaled by row x column;
- :func:`values_linear`: small float values on both sides (e4m3, e2m1 x block scale), accumulated in float32;
- :func:`dense_linear`: the weight decoded to floats, the activation as it is.

``rows(start, stop)`` is how a format hands over part of its weight; ``start`` is always a multiple of 128.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..facts import cpu_has_vnni, has_bf16
from ..retire import KERNEL_ERRORS, is_out_of_memory, is_retired, retire
from . import quantize
from .rotation import rotate

#: rows(start, stop) -> int8 codes [n, K], float32 scale [] or [n, 1]
CodeRows = Callable[[int, int], tuple[Tensor, Tensor]]
#: rows(start, stop) -> float32 [n, K]
FloatRows = Callable[[int, int], Tensor]


class Carried(NamedTuple):
    """Row access to a weight as INT8 codes: ``N`` rows, rotated by ``group`` (0: not rotated)."""

    rows: CodeRows
    N: int
    group: int


#: Temporary memory a loop over weight rows aims for. On a CPU what the caches hold: larger parts leave them, and the
#: allocator hands parts beyond 32 MiB back to the system each time.
WORKSPACE_BYTES = 64 << 20
CPU_WORKSPACE_BYTES = 8 << 20
#: The same for a weight decoded to float32 on a CPU: smaller parts slow the product of many tokens (measured).
CPU_FLOAT_BYTES = 16 << 20
#: Most weight rows decoded at a time.
MAX_ROWS = 4096
#: Most activation rows a product handles at a time on the CPU: larger int32 / float32 temporaries leave the caches
#: (measured).
CPU_TOKENS = 512
#: Integer products of int8 codes summed in float32 stay exact up to here: 1024 * 128 * 128 = 2^24.
EXACT_K = 1024


def row_chunks(N: int, bytes_per_row: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """(start, stop) pairs over N rows; every start is a multiple of 128."""
    return _chunks(N, bytes_per_row, CPU_WORKSPACE_BYTES if device.type == "cpu" else WORKSPACE_BYTES)


def float_chunks(N: int, K: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """:func:`row_chunks` for float32 parts of an [N, K] weight."""
    return _chunks(N, 4 * K, CPU_FLOAT_BYTES if device.type == "cpu" else WORKSPACE_BYTES)


def _chunks(N: int, bytes_per_row: int, workspace: int) -> Iterator[tuple[int, int]]:
    rows = max(128, min(MAX_ROWS, workspace // max(1, bytes_per_row)) // 128 * 128)
    for start in range(0, N, rows):
        yield start, min(N, start + rows)


def flatten(x: Tensor) -> Tensor:
    """``x`` as ``[M, K]``, contiguous or not."""
    return x.reshape(-1, x.shape[-1])


def _token_chunks(x: Tensor) -> Iterator[tuple[int, int]]:
    M = x.shape[0]
    most = CPU_TOKENS if x.device.type == "cpu" else 1 << 16
    # Equal parts: a short last one would be multiplied at a lower rate.
    step = -(-M // -(-M // most)) if M else 1
    for start in range(0, M, step):
        yield start, min(M, start + step)


def quantize_activation(x: Tensor, group: int, bits: int = 8) -> tuple[Tensor, Tensor]:
    """Rotate (in float32) and quantise the rows of ``x``.

    Args:
        x: ``[M, K]``, any float dtype.
        group: ConvRot group size or 0.
        bits: 8 (Q8) or 4 (codes -7..7, one a byte).

    Returns:
        int8 ``[M, K]`` and float32 ``[M, 1]``.
    """
    quantiser = quantize.int8_rows if bits == 8 else quantize.int4_rows
    chunks = list(_token_chunks(x))
    if len(chunks) <= 1:
        return quantiser(rotate(x, group))
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scale = torch.empty((x.shape[0], 1), dtype=torch.float32, device=x.device)
    for start, stop in chunks:
        codes[start:stop], scale[start:stop] = quantiser(rotate(x[start:stop], group))
    return codes, scale


def has_int_mm(device: torch.device) -> bool:
    """Whether ``torch._int_mm`` is exact and worth calling on ``device``."""
    if device.type == "cpu":
        return cpu_has_vnni()
    # ROCm devices say "cuda" too; hipBLASLt has no int8 for most of them and RDNA2 has no int8 matrix unit at all.
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (6, 1)


def _int_mm(xq: Tensor, codes: Tensor) -> Tensor:
    """int32 ``[M, n]`` of int8 ``[M, K]`` and ``[n, K]`` by ``torch._int_mm``, padded to what CUDA asks for."""
    if xq.device.type == "cpu":
        return torch._int_mm(xq, codes.t())
    M, K = xq.shape
    n = codes.shape[0]
    # cuBLASLt: more than 16 rows, K and N multiples of 8. Zeros add nothing to the sums.
    pad_m, pad_k, pad_n = max(0, 32 - M), -K % 8, -n % 8
    if pad_m or pad_k:
        xq = torch.nn.functional.pad(xq, (0, pad_k, 0, pad_m))
    if pad_n or pad_k:
        codes = torch.nn.functional.pad(codes, (0, pad_k, 0, pad_n))
    return torch._int_mm(xq.contiguous(), codes.contiguous().t())[:M, :n]


def _float_codes_mm(x32: Tensor, codes32: Tensor) -> Tensor:
    """float32 ``[M, n]`` of codes ``[M, K]`` and ``[n, K]``, both as float32.

    Every partial product over at most :data:`EXACT_K` inputs is an exact integer; only their sum is rounded.
    """
    total = x32[:, :EXACT_K] @ codes32[:, :EXACT_K].t()
    for start in range(EXACT_K, x32.shape[1], EXACT_K):
        total.addmm_(x32[:, start : start + EXACT_K], codes32[:, start : start + EXACT_K].t())
    return total


def int8_linear(x: Tensor, N: int, rows: CodeRows, group: int, bias: Tensor | None, bits: int = 8) -> Tensor:
    """``y[m, n] = (sum_k q[m, k] * code[n, k]) * s[m] * ws[n] + bias[n]`` with ``q, s`` the quantised rows of rotated
    x.

    Args:
        x: ``[..., K]``, any float dtype, any strides.
        N: output features.
        rows: the weight's codes and scales, in the rotated basis where ``group`` is not 0.
        group: ConvRot group size or 0.
        bias: ``[N]`` or None.
        bits: activation bits, 8 or 4.

    Returns:
        ``[..., N]`` of x's dtype.
    """
    x2 = flatten(x)
    M, K = x2.shape
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    if y.numel():
        xq, xs = quantize_activation(x2, group, bits)
        if not (has_int_mm(x.device) and K and _by_int_mm(y, xq, xs, N, rows, bias)):
            x32 = xq.to(torch.float32)
            for start, stop in float_chunks(N, K, x.device):
                codes, scale = rows(start, stop)
                _scale_out(y, x32, xs, codes.to(torch.float32), scale, bias, start, stop, _float_codes_mm)
    return y.reshape(*x.shape[:-1], N)


def _by_int_mm(y: Tensor, xq: Tensor, xs: Tensor, N: int, rows: CodeRows, bias: Tensor | None) -> bool:
    """Fill ``y`` by ``torch._int_mm``; False where that failed, now or before."""
    if is_retired("int_mm", "torch"):
        return False
    for start, stop in row_chunks(N, xq.shape[1], y.device):
        codes, scale = rows(start, stop)
        try:
            _scale_out(y, xq, xs, codes, scale, bias, start, stop, _int_mm)
        except KERNEL_ERRORS as error:
            if is_out_of_memory(error):
                raise
            retire("int_mm", "torch", error, "the same sums in float32")
            return False
    return True


def _scale_out(
    y: Tensor,
    xq: Tensor,
    xs: Tensor,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    start: int,
    stop: int,
    product: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Fill ``y[:, start:stop]``, some tokens at a time."""
    column_scale = scale.reshape(1, -1)
    offset = None if bias is None else bias[start:stop].to(torch.float32)
    for first, last in _token_chunks(xq):
        part = product(xq[first:last], codes).to(torch.float32).mul_(xs[first:last])
        target = y[first:last, start:stop]
        out = target if target.dtype is torch.float32 else part
        if offset is None:
            torch.mul(part, column_scale, out=out)
        else:
            torch.addcmul(offset, part, column_scale, out=out)
        if out is not target:
            target.copy_(out)


def values_linear(x: Tensor, xv: Tensor, N: int, rows: FloatRows, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """``y = (xv rows^T) * scale + bias`` in float32.

    Args:
        x: the activation the shape and dtype of the result come from, ``[..., K]``.
        xv: its quantised values, float32 ``[M, K']``.
        N: output features.
        rows: the weight's values, float32 ``[n, K']``.
        scale: float32 ``[1, 1]`` or ``[1, N]``, or None for 1.
        bias: ``[N]`` or None.
    """
    M = xv.shape[0]
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    if y.numel():
        for start, stop in float_chunks(N, xv.shape[1], x.device):
            part = xv @ rows(start, stop).t()
            if scale is not None:
                part *= scale[:, start:stop] if scale.shape[1] > 1 else scale
            if bias is not None:
                part += bias[start:stop].to(torch.float32)
            y[:, start:stop] = part
    return y.reshape(*x.shape[:-1], N)


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype a dense product of ``x`` is fastest in without losing range: its own where the device has units for it
    (no CPU has any for float16), else float32.
    """
    if x.dtype is torch.bfloat16:
        return x.dtype if has_bf16(x.device) else torch.float32
    if x.dtype is torch.float16:
        return x.dtype if x.device.type != "cpu" else torch.float32
    return torch.float32


def dense_linear(x: Tensor, N: int, rows: FloatRows, group: int, bias: Tensor | None) -> Tensor:
    """``y = rotate(x) rows^T + bias``: the weight decoded, the activation not quantised.

    A rotated weight stays rotated and x is rotated instead (in float32): M * K * group operations, not N * K * group.

    Args:
        x: ``[..., K]``.
        N: output features.
        rows: the decoded weight, float32 ``[n, K]``, in the rotated basis where ``group`` is not 0.
        group: ConvRot group size or 0.
        bias: ``[N]`` or None.

    Returns:
        ``[..., N]`` of x's dtype.
    """
    dtype = product_dtype(x)
    x2 = (rotate(flatten(x), group) if group else flatten(x)).to(dtype)
    offset = None if bias is None else bias[:N].to(dtype)
    chunks = list(float_chunks(N, x2.shape[1], x.device))
    if len(chunks) <= 1:
        y = torch.nn.functional.linear(x2, rows(0, N).to(dtype), offset).to(x.dtype)
    else:
        y = torch.empty((x2.shape[0], N), dtype=x.dtype, device=x.device)
        for start, stop in chunks:
            weight = rows(start, stop).to(dtype)
            target = y[:, start:stop]
            if target.dtype is not dtype:
                target.copy_(torch.nn.functional.linear(x2, weight, None if offset is None else offset[start:stop]))
            elif offset is None:
                torch.mm(x2, weight.t(), out=target)
            else:
                torch.addmm(offset[start:stop], x2, weight.t(), out=target)
            del weight  # its memory is the next part's
    return y.reshape(*x.shape[:-1], N)


def add_low_rank(y: Tensor, low_rank: Tensor, up: Tensor) -> Tensor:
    """``y + low_rank up^T`` in one pass over ``y`` ``[..., N]``, which is written to; ``low_rank [..., R]``, ``up [N,
    R]``.
    """
    return flatten(y).addmm_(flatten(low_rank), up.t()).reshape(y.shape)
