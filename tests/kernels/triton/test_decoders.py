"""Decoders of 4- and 8-bit weights against table look-ups in float64: w4_decode and block_decode."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from quant_loader.kernels.triton_ops.block_decode import decode_fp8, decode_mxfp8, decode_nvfp4
from quant_loader.kernels.triton_ops.w4_decode import decode_int4, decode_w4a8

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
# One rounding of the float32 product to the output dtype; the interpreter truncates to bfloat16.
ROUNDING = {torch.float32: 2**-22, torch.float16: 2**-10, torch.bfloat16: 2**-7}
SHAPES = [(1, 32), (6, 544), (5, 3072)]
TALL = (261, 96)  # more than one tile of scale rows


def bytes_of(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def e4m3(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.float8_e4m3fn).float().double()


def finite_e4m3(*shape: int, seed: int) -> torch.Tensor:
    codes = bytes_of(*shape, seed=seed)
    return torch.where((codes & 0x7F) == 0x7F, codes & 0x80, codes)


def nibbles_high_first(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack([packed >> 4, packed & 0xF], -1).reshape(packed.shape[0], -1).long()


def nibbles_low_first(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack([packed & 0xF, packed >> 4], -1).reshape(packed.shape[0], -1).long()


def check_close(out: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    assert out.dtype == dtype
    torch.testing.assert_close(out.cpu().double(), exact, rtol=ROUNDING[dtype], atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nvfp4(shape, dtype, swizzled, device):
    check_nvfp4(shape, dtype, swizzled, device)


def test_nvfp4_of_many_rows(large_tiles, swizzled, device):
    check_nvfp4(TALL, torch.float16, swizzled, device)


def check_nvfp4(shape, dtype, swizzled, device) -> None:
    N, K = shape
    packed = bytes_of(N, K // 2, seed=N)
    scales = torch.randint(0x20, 0x60, (N, K // 16), generator=torch.Generator().manual_seed(K), dtype=torch.uint8)
    exact = E2M1[nibbles_high_first(packed)] * e4m3(scales).repeat_interleave(16, 1) * 0.0625
    tensor_scale = torch.tensor(0.0625, device=device)
    image = swizzled(scales).to(device)
    out = decode_nvfp4(packed.to(device), image, tensor_scale, columns=K, dtype=dtype)
    check_close(out, exact, dtype)
    start, stop = N // 3, N - N // 4
    part = decode_nvfp4(packed.to(device), image, tensor_scale, columns=K, dtype=dtype, rows=(start, stop))
    assert torch.equal(part, out[start:stop])


def test_nvfp4_of_a_padded_weight(swizzled, device):
    packed = bytes_of(16, 32, seed=1)
    scales = torch.full((16, 4), 0x38, dtype=torch.uint8)  # 1.0
    exact = E2M1[nibbles_high_first(packed)][:, :50]
    out = decode_nvfp4(
        packed.to(device), swizzled(scales).view(torch.float8_e4m3fn).to(device), torch.ones(1, device=device),
        columns=50, dtype=torch.float32, rows=(0, 13),
    )  # fmt: skip
    check_close(out, exact[:13], torch.float32)


def test_nvfp4_subnormal_and_nan_scales(swizzled, device):
    packed = bytes_of(2, 64, seed=2)
    scales = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [0x7F, 0xFF, 0x7E, 0x81, 8, 9, 10, 0x38]], dtype=torch.uint8)
    exact = E2M1[nibbles_high_first(packed)] * e4m3(scales).repeat_interleave(16, 1)
    out = decode_nvfp4(
        packed.to(device), swizzled(scales).to(device), torch.ones(1, device=device), columns=128, dtype=torch.float32
    )
    check_close(out, exact, torch.float32)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mxfp8(shape, dtype, swizzled, device):
    check_mxfp8(shape, dtype, swizzled, device)


def test_mxfp8_of_many_rows(large_tiles, swizzled, device):
    check_mxfp8(TALL, torch.float16, swizzled, device)


def check_mxfp8(shape, dtype, swizzled, device) -> None:
    N, K = shape
    codes = finite_e4m3(N, K, seed=N)
    exponents = torch.randint(121, 130, (N, K // 32), generator=torch.Generator().manual_seed(K), dtype=torch.uint8)
    exact = e4m3(codes) * torch.exp2(exponents.double() - 127).repeat_interleave(32, 1)
    out = decode_mxfp8(codes.to(device), swizzled(exponents).to(device), columns=K, dtype=dtype)
    check_close(out, exact, dtype)
    part = decode_mxfp8(codes.to(device), swizzled(exponents).to(device), columns=K, dtype=dtype, rows=(N // 2, N))
    assert torch.equal(part, out[N // 2 :])


def test_mxfp8_scale_byte_0_is_zero_and_255_is_nan(swizzled, device):
    codes = torch.full((1, 96), 0x38, dtype=torch.uint8)
    image = swizzled(torch.tensor([[0, 255, 127]], dtype=torch.uint8)).to(device)
    out = decode_mxfp8(codes.to(device), image, columns=96, dtype=torch.float32).cpu()
    assert (out[0, :32] == 0).all()
    assert torch.isnan(out[0, 32:64]).all()
    assert (out[0, 64:] == 1).all()


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_fp8_every_code(dtype, per_row, device):
    codes = torch.arange(256, dtype=torch.uint8).repeat(3, 1)
    scale = torch.tensor([0.25, 1.0, 3.0]) if per_row else torch.tensor(0.125)
    exact = e4m3(codes) * scale.double().reshape(-1, 1)
    out = decode_fp8(codes.view(torch.float8_e4m3fn).to(device), scale.to(device), dtype=dtype)
    check_close(out, exact, dtype)


@pytest.mark.parametrize("shape", [(1, 2), (3, 66), (17, 3072), (9, 1000)], ids=str)
def test_int4(shape, device):
    packed = bytes_of(shape[0], shape[1] // 2, seed=3)
    codes = nibbles_low_first(packed)
    expected = torch.where(codes > 7, codes - 16, codes).to(torch.int8)
    for stored in (packed, packed.view(torch.int8)):
        assert torch.equal(decode_int4(stored.to(device)).cpu(), expected)


@pytest.mark.parametrize("group_size", [4, 8, 16, 32])
@pytest.mark.parametrize("with_codebook", [True, False])
@pytest.mark.parametrize("shape", [(1, 32), (6, 1056), (33, 256)], ids=str)
def test_w4a8(shape, with_codebook, group_size, device):
    N, K = shape
    packed = bytes_of(N, K // 2, seed=K)
    scale = torch.randint(
        0x28, 0x68, (N, K // group_size), generator=torch.Generator().manual_seed(4), dtype=torch.uint8
    )
    codebook = torch.linspace(-8, 7.5, 16).sort().values if with_codebook else None
    codes = nibbles_low_first(packed)
    values = codebook.double()[codes] if with_codebook else codes.double() - 8
    # Products of a codebook value with at most 8 significant bits and an e4m3 scale are exact in float32, so ties are
    # ties.
    expected = (
        (values.float() * e4m3(scale).float().repeat_interleave(group_size, 1)).round().clamp(-127, 127).to(torch.int8)
    )
    out = decode_w4a8(
        packed.to(device), scale.view(torch.float8_e4m3fn).to(device), codebook.to(device) if with_codebook else None,
        group_size=group_size,
    )  # fmt: skip
    assert torch.equal(out.cpu(), expected)


def test_strided_rows(device):
    packed = bytes_of(5, 64, seed=9).to(device)
    assert torch.equal(decode_int4(packed[:, 16:48]), decode_int4(packed[:, 16:48].contiguous()))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda w: decode_nvfp4(w, w, torch.ones(1), columns=129, dtype=torch.float16), "columns: expected 0 to 128"),
        (
            lambda w: decode_nvfp4(w, w, torch.ones(1), columns=128, dtype=torch.float16, rows=(2, 5)),
            "rows: expected a range inside",
        ),
        (
            lambda w: decode_nvfp4(w, w, torch.ones(1), columns=128, dtype=torch.float16),
            "scale: expected at least 1024 bytes",
        ),
        (lambda w: decode_mxfp8(w, w.float(), columns=64, dtype=torch.float16), "scale: expected 8-bit codes"),
        (lambda w: decode_fp8(w, torch.ones(3), dtype=torch.float16), "scale: expected 1 or 4 elements"),
        (lambda w: decode_fp8(w, torch.ones(4), dtype=torch.int8), "dtype: expected float16"),
        (lambda w: decode_w4a8(w, w, group_size=6), "group_size: expected a multiple of 4"),
        (lambda w: decode_w4a8(w, w, group_size=16), r"scale: expected shape \(4, 8\)"),
        (lambda w: decode_w4a8(w, w[:, :8], torch.ones(15), group_size=16), "codebook: expected 16 elements"),
    ],
)
def test_refusals_name_the_argument(call, words):
    with pytest.raises(ValueError, match=words):
        call(torch.zeros(4, 64, dtype=torch.uint8))
