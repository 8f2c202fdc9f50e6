"""Activations to FP8, MXFP8 and NVFP4 codes, against the formulas in float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from quant_loader.kernels.triton_ops.float_quantizer import quantize_fp8, quantize_mxfp8, quantize_nvfp4

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().double()
# A value this close to the middle of two levels, in units of itself, may go either way: x / s is x * (1 / s) in
# float32.
SLACK = 2**-21
SHAPES = [(1, 32), (5, 123), (6, 1000), (2, 3072)]
TALL = (261, 96)  # more than one tile of scale rows


def activation(M: int, K: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(M * K)) * torch.logspace(-2, 2, K)
    return x.to(dtype).to(device)


def check_nearest(codes: torch.Tensor, exact: torch.Tensor, levels: torch.Tensor, sign_bit: int) -> None:
    """codes (any int) decode to a level nearest to exact, up to SLACK; exact is clamped to the levels' range first."""
    magnitude = codes.long() & (sign_bit - 1)
    decoded = levels[magnitude] * torch.where((codes.long() & sign_bit) != 0, -1.0, 1.0)
    exact = exact.clamp(-levels[-1], levels[-1])
    best = (exact.abs().unsqueeze(-1) - levels).abs().amin(-1)
    assert ((decoded - exact).abs() <= best + exact.abs() * SLACK).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fp8(shape, dtype, device):
    x = activation(*shape, dtype, device)
    scale = torch.tensor(0.37, device=device)
    q = quantize_fp8(x, scale)
    assert (q.dtype, q.shape) == (torch.float8_e4m3fn, x.shape)
    check_nearest(q.cpu().view(torch.uint8), x.cpu().double() / scale.cpu().double(), E4M3, 0x80)


def test_fp8_rounds_like_torch(device):
    every_half = torch.arange(0x3C00, 0x7C00, dtype=torch.int16).view(torch.float16).float()
    x = torch.cat([every_half, -every_half, torch.arange(0, 0x3C00, dtype=torch.int16).view(torch.float16).float()])[
        None
    ]
    wanted = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    q = quantize_fp8(x.to(device), torch.ones(1, device=device)).cpu()
    assert torch.equal(q.view(torch.uint8), wanted.view(torch.uint8))


def test_fp8_non_finite(device):
    x = torch.tensor([[float("nan"), float("inf"), float("-inf"), 0.0]], device=device)
    q = quantize_fp8(x, torch.ones(1, device=device)).cpu().view(torch.uint8)
    assert q[0, 0] & 0x7F == 0x7F
    assert q[0, 1:].tolist() == [0x7E, 0xFE, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mxfp8(shape, dtype, swizzled, device):
    check_mxfp8(shape, dtype, swizzled, device)


def test_mxfp8_of_many_rows(large_tiles, swizzled, device):
    check_mxfp8(TALL, torch.float16, swizzled, device)


def check_mxfp8(shape, dtype, swizzled, device) -> None:
    M, K = shape
    x = activation(M, K, dtype, device)
    q, image = quantize_mxfp8(x)
    Mp, Kp = -(-M // 32) * 32, -(-K // 32) * 32
    assert (q.dtype, tuple(q.shape)) == (torch.float8_e4m3fn, (Mp, Kp))
    exact = torch.zeros(Mp, Kp, dtype=torch.float64)
    exact[:M, :K] = x.cpu().double()
    peak = exact.reshape(Mp, -1, 32).abs().amax(-1)
    exponent = torch.where(peak > 0, torch.ceil(torch.log2(peak / 448)) + 127, 0).clamp(0, 254)
    assert torch.equal(image.cpu(), swizzled(exponent.to(torch.uint8)))
    unit = torch.exp2(exponent - 127).repeat_interleave(32, 1)
    check_nearest(q.cpu().view(torch.uint8), exact / unit, E4M3, 0x80)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nvfp4(shape, dtype, swizzled, device):
    check_nvfp4(shape, dtype, swizzled, device)


def test_nvfp4_of_many_rows(large_tiles, swizzled, device):
    check_nvfp4(TALL, torch.float16, swizzled, device)


def check_nvfp4(shape, dtype, swizzled, device) -> None:
    M, K = shape
    x = activation(M, K, dtype, device)
    tensor_scale = torch.linalg.vector_norm(x.float(), float("inf")) / (448 * 6)
    q, image = quantize_nvfp4(x, tensor_scale)
    Mp, Kp = -(-M // 16) * 16, -(-K // 16) * 16
    assert (q.dtype, tuple(q.shape)) == (torch.uint8, (Mp, Kp // 2))
    exact = torch.zeros(Mp, Kp, dtype=torch.float64)
    exact[:M, :K] = x.cpu().double()
    scale = tensor_scale.cpu()
    block = (exact.reshape(Mp, -1, 16).abs().amax(-1).float() / 6 / scale).clamp(max=448).to(torch.float8_e4m3fn)
    assert torch.equal(image.cpu(), swizzled(block.view(torch.uint8)))
    unit = (block.float().double() * scale.double()).repeat_interleave(16, 1)
    codes = torch.stack([q.cpu() >> 4, q.cpu() & 0xF], -1).reshape(Mp, Kp)
    assert not (codes[unit == 0] & 7).any()
    unit[unit == 0] = float("inf")
    check_nearest(codes, exact / unit, E2M1, 8)


def test_nvfp4_ties_go_to_the_even_code(device):
    x = torch.tensor(
        [[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -6.0]],
        device=device,
    )
    q, image = quantize_nvfp4(x, torch.tensor(1.0, device=device))
    assert image.cpu()[0, 0] == 0x38  # 1.0
    codes = torch.stack([q.cpu()[0] >> 4, q.cpu()[0] & 0xF], -1).flatten()
    assert (codes & 7).tolist() == [0, 2, 2, 4, 4, 6, 6, 7] * 2


def test_no_rows(device):
    x = torch.zeros(0, 64, device=device)
    assert quantize_fp8(x, torch.ones(1, device=device)).shape == (0, 64)
    assert quantize_mxfp8(x)[0].shape == (0, 64)
    assert quantize_nvfp4(x, torch.ones(1, device=device))[0].shape == (0, 32)


@pytest.mark.parametrize("quantize", [quantize_fp8, quantize_nvfp4])
def test_refusals_name_the_argument(quantize):
    with pytest.raises(ValueError, match="x: expected 2 dimensions"):
        quantize(torch.zeros(3), torch.ones(1))
    with pytest.raises(ValueError, match="scale: expected one element"):
        quantize(torch.zeros(3, 32), torch.ones(2))
