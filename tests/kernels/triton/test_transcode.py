"""Weights carried to INT8 rows: each step against float64, and the whole linear against the published error bounds."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from quant_loader.kernels.triton_ops.float_quantizer import quantize_fp8, quantize_mxfp8, quantize_nvfp4
from quant_loader.kernels.triton_ops.int8_gemm import int8_matmul
from quant_loader.kernels.triton_ops.row_quantizer import quantize_rows
from quant_loader.kernels.triton_ops.transcode import fp8_to_int8, mxfp8_to_int8, nvfp4_to_int8

# Half a step of rounding, and what float32 leaves of decoding and of a 256-term rotation.
STEP = 0.5 + 1e-3


def weight(N: int, K: int, device: str) -> torch.Tensor:
    return (torch.randn(N, K, generator=torch.Generator().manual_seed(N + K)) / K**0.5).to(device)


def check_rows(q: torch.Tensor, scale: torch.Tensor, exact: torch.Tensor) -> None:
    q, scale = q.cpu().double(), scale.cpu().double()
    torch.testing.assert_close(scale, exact.abs().amax(1) / 127, rtol=1e-5, atol=0)
    assert q.shape == exact.shape
    assert ((q - exact / scale[:, None]).abs() <= STEP).all()


def absmax(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(x.float(), float("inf"))


ROTATIONS = [1, 16, 64, 256]
SHAPES = [(5, 256), (3, 1280)]
TALL = (261, 256)  # more than one tile of scale rows


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("per_row", [False, True])
def test_fp8(per_row, rotation, rotated, device):
    stored = (weight(19, 768, device) * 4000).to(torch.float8_e4m3fn)
    scale = torch.rand(19, device=device) + 0.5 if per_row else torch.tensor([0.02], device=device)
    q, row_scale = fp8_to_int8(stored, scale, rotation=rotation)
    check_rows(q, row_scale, rotated(stored.cpu().float().double() * scale.cpu().double().reshape(-1, 1), rotation))


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mxfp8(shape, rotation, rotated, swizzled, device):
    check_mxfp8(shape, rotation, rotated, swizzled, device)


def test_mxfp8_of_many_rows(large_tiles, rotated, swizzled, device):
    check_mxfp8(TALL, 256, rotated, swizzled, device)


def check_mxfp8(shape, rotation, rotated, swizzled, device) -> None:
    N, K = shape
    codes = (weight(N, K, device) * 4000).to(torch.float8_e4m3fn)
    exponents = torch.randint(121, 130, (N, K // 32), generator=torch.Generator().manual_seed(K), dtype=torch.uint8)
    exact = codes.cpu().float().double() * torch.exp2(exponents.double() - 127).repeat_interleave(32, 1)
    image = swizzled(exponents).to(device)
    q, scale = mxfp8_to_int8(codes, image, columns=K, rotation=rotation)
    check_rows(q, scale, rotated(exact, rotation))
    part, part_scale = mxfp8_to_int8(codes, image, columns=K, rotation=rotation, rows=(N // 2, N))
    assert torch.equal(part, q[N // 2 :])
    assert torch.equal(part_scale, scale[N // 2 :])


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nvfp4(shape, rotation, rotated, swizzled, device):
    check_nvfp4(shape, rotation, rotated, swizzled, device)


def test_nvfp4_of_many_rows(large_tiles, rotated, swizzled, device):
    check_nvfp4(TALL, 256, rotated, swizzled, device)


def check_nvfp4(shape, rotation, rotated, swizzled, device) -> None:
    N, K = shape
    g = torch.Generator().manual_seed(N + K)
    packed = torch.randint(0, 256, (N, K // 2), generator=g, dtype=torch.uint8)
    scales = torch.randint(0x20, 0x60, (N, K // 16), generator=g, dtype=torch.uint8)
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    exact = levels[torch.stack([packed >> 4, packed & 0xF], -1).reshape(N, K).long()]
    exact *= scales.view(torch.float8_e4m3fn).float().double().repeat_interleave(16, 1) * 0.0625
    stored, image, tensor_scale = packed.to(device), swizzled(scales).to(device), torch.tensor(0.0625, device=device)
    q, scale = nvfp4_to_int8(stored, image, tensor_scale, columns=K, rotation=rotation)
    check_rows(q, scale, rotated(exact, rotation))
    part, part_scale = nvfp4_to_int8(stored, image, tensor_scale, columns=K, rotation=rotation, rows=(N // 2, N))
    assert torch.equal(part, q[N // 2 :])
    assert torch.equal(part_scale, scale[N // 2 :])


def test_a_nan_in_the_weight_shows_in_its_row_only(device):
    stored = weight(4, 256, device).to(torch.float8_e4m3fn).view(torch.uint8)
    stored[1, 17] = 0x7F
    _, scale = fp8_to_int8(stored, torch.ones(1, device=device))
    assert torch.isnan(scale).tolist() == [False, True, False, False]


# Output error of the INT8 linear against the unquantised float64 product: what each storage costs, plus what INT8
# with ConvRot adds.
BOUNDS = {"none": 0.016, "fp8": 0.033, "mxfp8": 0.033, "nvfp4": 0.101}


def carry(storage: str, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    N, K = w.shape
    if storage == "fp8":
        scale = absmax(w) / 448
        return fp8_to_int8(quantize_fp8(w, scale), scale)
    if storage == "mxfp8":
        stored, image = quantize_mxfp8(w)
        return mxfp8_to_int8(stored, image, columns=K, rows=(0, N))
    if storage == "nvfp4":
        scale = absmax(w) / (448 * 6)
        stored, image = quantize_nvfp4(w, scale)
        return nvfp4_to_int8(stored, image, scale, columns=K, rows=(0, N))
    return quantize_rows(w, rotation=256)


@pytest.mark.parametrize("kind", ["gaussian", "outlier channels", "heavy tail"])
@pytest.mark.parametrize("storage", BOUNDS)
def test_error_of_the_linear(storage, kind, large_tiles, weights, device):
    M = N = 48 if device == "cpu" else 512
    x = weights(kind, M, 3072, 11, activation=True)
    w = weights(kind, N, 3072, 12, activation=False)
    q, scale = carry(storage, w.to(device))
    q_x, scale_x = quantize_rows(x.to(device), rotation=256)
    y = int8_matmul(q_x, q, scale_x, scale, out_dtype=torch.float32).cpu().double()
    exact = x.double() @ w.double().T
    assert (y - exact).norm() / exact.norm() <= BOUNDS[storage]


@pytest.mark.gpu
@pytest.mark.parametrize("storage", BOUNDS)
def test_error_of_the_linear_at_15360_columns(storage, weights):
    x = weights("heavy tail", 512, 15360, 13, activation=True)
    w = weights("heavy tail", 512, 15360, 14, activation=False)
    q, scale = carry(storage, w.cuda())
    q_x, scale_x = quantize_rows(x.cuda(), rotation=256)
    y = int8_matmul(q_x, q, scale_x, scale, out_dtype=torch.float32).cpu().double()
    exact = x.double() @ w.double().T
    assert (y - exact).norm() / exact.norm() <= BOUNDS[storage]
