"""Rounding to each number format. Formulas: reference rules, section 4; rounding is half to even throughout."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
NVFP4_BLOCK = 16
MXFP8_BLOCK = 32


def _row_absmax(x: Tensor) -> Tensor:
    # Without |x| in memory; NaN propagates.
    return torch.maximum(x.amax(dim=-1, keepdim=True), -x.amin(dim=-1, keepdim=True))


def int8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Q8, one scale a row: ``s = max(max|x| / 127, 1e-30)``, ``q = round(x / s)``, which is within -127..127 by itself.

    Args:
        x: float32 ``[M, K]``.

    Returns:
        int8 ``[M, K]`` and float32 ``[M, 1]``.
    """
    if x.shape[-1] == 0:
        return x.to(torch.int8), x.new_full((x.shape[0], 1), 1e-30)
    scale = (_row_absmax(x) / 127.0).clamp_(min=1e-30)
    return (x / scale).round_().to(torch.int8), scale


def int4_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Signed 4 bit, one scale a row: ``s = max(max|x|, 1e-10) / 7``, ``q = clamp(round(x / s), -7, 7)``, one code a
    byte.

    Args:
        x: float32 ``[M, K]``.

    Returns:
        int8 ``[M, K]`` with values -7..7, and float32 ``[M, 1]``.
    """
    if x.shape[-1] == 0:
        return x.to(torch.int8), x.new_full((x.shape[0], 1), 1e-10 / 7.0)
    scale = _row_absmax(x).clamp_(min=1e-10) / 7.0
    return (x / scale).round_().to(torch.int8), scale


def _absmax(x: Tensor) -> Tensor:
    # One pass over x, no |x| in memory; NaN propagates.
    largest: Tensor = torch.linalg.vector_norm(x, ord=float("inf"))
    return largest.to(torch.float32)


def fp8_scale(x: Tensor) -> Tensor:
    """The dynamic per-tensor scale of FP8 activations, ``max|x| / 448``, float32 ``[]`` (never 0)."""
    if x.numel() == 0:
        return torch.ones((), dtype=torch.float32, device=x.device)
    return (_absmax(x) / E4M3_MAX).clamp(min=torch.finfo(torch.float32).tiny)


def fp8(x: Tensor, scale: Tensor) -> Tensor:
    """``e4m3(clamp(x / scale, -448, 448))``: float8_e4m3fn of x's shape. ``scale``: float32 ``[]``."""
    return (x.to(torch.float32) / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def nvfp4_scale(x: Tensor) -> Tensor:
    """The dynamic per-tensor scale of NVFP4 activations, ``max|x| / (448 * 6)``, float32 ``[]`` (never 0)."""
    if x.numel() == 0:
        return torch.ones((), dtype=torch.float32, device=x.device)
    return (_absmax(x) / (E4M3_MAX * E2M1_MAX)).clamp(min=torch.finfo(torch.float32).tiny)


def round_e2m1(x: Tensor) -> Tensor:
    """The nearest e2m1 value (ties to the even code), float32 in, float32 out, saturating at 6."""
    magnitude = x.abs().clamp(max=E2M1_MAX)
    # The spacing is 0.5 below 2, 1 from 2 to 4 and 2 above; torch.round is half to even, and even codes are the even
    # multiples.
    step = torch.where(magnitude < 2.0, 0.5, torch.where(magnitude < 4.0, 1.0, 2.0))
    return torch.copysign((magnitude / step).round_() * step, x)


def nvfp4_values(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """NVFP4 activations: the e2m1 values and the block scales, both as float32.

    ``b = e4m3(min(max|block| / 6 / scale, 448))``, ``v = e2m1(clamp(x / (scale * b), -6, 6))``; a block whose ``b`` is
    0 gives 0.

    Args:
        x: float ``[M, K]``, K a multiple of 16.
        scale: float32 ``[]``.

    Returns:
        float32 ``[M, K]`` values and float32 ``[M, K / 16]`` block scales (without ``scale``).
    """
    M, K = x.shape
    blocks = x.to(torch.float32).reshape(M, K // NVFP4_BLOCK, NVFP4_BLOCK)
    amax = blocks.abs().amax(dim=-1)
    block_scale = (amax / E2M1_MAX / scale).clamp_(max=E4M3_MAX).to(torch.float8_e4m3fn).to(torch.float32)
    step = (block_scale * scale)[..., None]
    safe = torch.where(step == 0, 1.0, step)
    values = torch.where(step == 0, 0.0, round_e2m1(blocks / safe))
    return values.reshape(M, K), block_scale


def mxfp8_values(x: Tensor) -> tuple[Tensor, Tensor]:
    """MXFP8 activations: the e4m3 values and the power-of-two block scales, both as float32.

    ``e = clamp(ceil(log2(max|block| / 448)) + 127, 0, 254)``, ``v = e4m3(clamp(x / 2^(e - 127), -448, 448))``; an
    all-zero block gives 0.

    Args:
        x: float ``[M, K]``, K a multiple of 32.

    Returns:
        float32 ``[M, K]`` values and float32 ``[M, K / 32]`` scales.
    """
    M, K = x.shape
    blocks = x.to(torch.float32).reshape(M, K // MXFP8_BLOCK, MXFP8_BLOCK)
    amax = blocks.abs().amax(dim=-1)
    # frexp gives amax / 448 = m * 2^e with m in [0.5, 1): ceil(log2) is e, or e - 1 where m is exactly 0.5. Exact,
    # unlike log2.
    mantissa, exponent = torch.frexp((amax / E4M3_MAX).clamp_(min=2.0**-127))
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-127, 127)
    scale = torch.ldexp(torch.ones_like(amax), exponent)
    values = (blocks / scale[..., None]).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(torch.float32)
    scale = torch.where(amax == 0, 0.0, scale)
    return values.reshape(M, K), scale
