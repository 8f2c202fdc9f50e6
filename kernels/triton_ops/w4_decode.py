"""4-bit weights to the INT8 codes that `int8_matmul` takes.

    convrot_w4a4     code[n, k] = two's complement nibble, low nibble = even k            the row scale stays outside
    asym_w4a8_int8   code[n, k] = clamp(round(v * e4m3(scale[n, k // G])), -127, 127), half to even
                     v = codebook[c], or c - 8 without one; c = unsigned nibble, low nibble = even k; the channel
                     scale stays outside

Source: comfy-kitchen's convrot_w4a4 and w4a8 layouts. A weight is decoded in chunks of rows just ahead of its
product, so that the codes are read back from L2: at the token counts of diffusion that costs 1.5 bytes a weight,
under 2 % of the product, where decoding inside the product would repeat the work for every row tile of the
activation.
"""
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .device_math import e4m3_to_f32, round_to_int
from .launch import check_bytes, check_vector, on_device_of

ROWS, BYTES, WARPS = 4, 512, 4


@triton.jit(do_not_specialize=["N"])
def w4_decode_kernel(
    w_ptr: tl.tensor, scale_ptr: tl.tensor, codebook_ptr: tl.tensor, out_ptr: tl.tensor, N: tl.tensor,
    half_k: tl.tensor,
    stride_w: tl.tensor, stride_scale: tl.tensor, GROUPED: tl.constexpr, CODEBOOK: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, BYTES: tl.constexpr,
) -> None:  # fmt: skip
    """ROWS rows, BYTES packed bytes of each. GROUPED: unsigned codes with group scales; else signed nibbles."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    byte = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    mask = (row[:, None] < N) & (byte[None, :] < half_k)
    row = row.to(tl.int64)[:, None]
    packed = tl.load(w_ptr + row * stride_w + byte[None, :], mask=mask, other=0)
    if GROUPED:
        even = (packed & 0xF).to(tl.int32)
        odd = (packed >> 4).to(tl.int32)
        if CODEBOOK:
            even_value = tl.load(codebook_ptr + even)
            odd_value = tl.load(codebook_ptr + odd)
        else:
            even_value = (even - 8).to(tl.float32)
            odd_value = (odd - 8).to(tl.float32)
        # G is a multiple of 4, so both columns of a byte lie in one group.
        group = byte[None, :] * 2 // GROUP
        scale = e4m3_to_f32(tl.load(scale_ptr + row * stride_scale + group, mask=mask, other=0))
        even = round_to_int(tl.minimum(tl.maximum(even_value * scale, -127.0), 127.0)).to(tl.int8)
        odd = round_to_int(tl.minimum(tl.maximum(odd_value * scale, -127.0), 127.0)).to(tl.int8)
    else:
        signed = packed.to(tl.int8, bitcast=True)
        even = (signed << 4) >> 4
        odd = signed >> 4
    column = tl.program_id(1) * (BYTES * 2) + tl.arange(0, BYTES * 2)
    target = out_ptr + row * (half_k * 2) + column[None, :]
    out_mask = (row < N) & (column[None, :] < half_k * 2)
    tl.store(target, tl.join(even, odd).reshape(ROWS, BYTES * 2), mask=out_mask)


def _launch(
    weight: torch.Tensor, scale: torch.Tensor | None, codebook: torch.Tensor | None, group_size: int
) -> torch.Tensor:
    N, half_k = weight.shape
    out = torch.empty((N, half_k * 2), dtype=torch.int8, device=weight.device)
    if out.numel() == 0:
        return out
    with on_device_of(weight):
        w4_decode_kernel[(triton.cdiv(N, ROWS), triton.cdiv(half_k, BYTES))](
            weight, weight if scale is None else scale, weight if codebook is None else codebook, out, N, half_k,
            weight.stride(0), 0 if scale is None else scale.stride(0), GROUPED=scale is not None,
            CODEBOOK=codebook is not None,
            GROUP=group_size, ROWS=ROWS, BYTES=BYTES, num_warps=WARPS,
        )  # fmt: skip
    return out


def decode_int4(weight: torch.Tensor) -> torch.Tensor:
    """weight int8 or uint8 [N, K / 2], two signed nibbles a byte (convrot_w4a4) -> int8 [N, K], codes -8 to 7."""
    return _launch(check_bytes("weight", weight), None, None, 16)


def decode_w4a8(
    weight: torch.Tensor, scale: torch.Tensor, codebook: torch.Tensor | None = None, *, group_size: int = 16
) -> torch.Tensor:
    """weight uint8 [N, K / 2] of unsigned codes, scale float8_e4m3fn (or its bytes) [N, K / group_size], codebook
    float32 [16] or None (uniform: c - 8) -> int8 [N, K], the codes of the channel-scaled INT8 weight. group_size: a
    multiple of 4 that divides K."""
    weight = check_bytes("weight", weight)
    scale = check_bytes("scale", scale)
    N, K = weight.shape[0], weight.shape[1] * 2
    if group_size < 4 or group_size % 4 or K % group_size:
        raise ValueError(f"group_size: expected a multiple of 4 that divides K = {K}, found {group_size}")
    if tuple(scale.shape) != (N, K // group_size):
        raise ValueError(f"scale: expected shape {(N, K // group_size)}, found {tuple(scale.shape)}")
    if codebook is not None:
        codebook = check_vector("codebook", codebook, (16,), weight.device)
    return _launch(weight, scale, codebook, group_size)
