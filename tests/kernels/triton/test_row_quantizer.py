"""quantize_rows and quantize_rows_static against the formula in float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from quant_loader.kernels.triton_ops.row_quantizer import quantize_rows, quantize_rows_static

# Half a step of rounding, and what float32 leaves of a 256-term rotation relative to the row's maximum: about 127 *
# 16 * 2**-24.
STEP = 0.5 + 1e-3
SHAPES = [
    (1, 16, 16),
    (3, 48, 16),
    (5, 192, 64),
    (2, 256, 256),
    (7, 768, 256),
    (17, 1280, 256),
    (2, 3072, 256),
    (1, 15360, 256),
]
PLAIN_SHAPES = [(1, 1), (5, 123), (3, 1000), (65, 16), (2, 4100)]


def activation(M: int, K: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    g = torch.Generator().manual_seed(M * 31 + K)
    x = torch.randn(M, K, generator=g) * torch.logspace(-3, 3, M)[:, None]
    return x.to(dtype).to(device)


def check_codes(q: torch.Tensor, scale: torch.Tensor, exact: torch.Tensor, qmax: int) -> None:
    q, scale = q.cpu().double(), scale.cpu().double()
    assert q.shape == exact.shape
    assert scale.shape == exact.shape[:1]
    torch.testing.assert_close(scale, exact.abs().amax(1) / qmax, rtol=1e-5, atol=0)
    assert ((q - exact / scale[:, None]).abs() <= STEP).all()
    assert (q.abs().amax(1) == qmax).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rotated_rows(shape, dtype, rotated, device):
    M, K, group = shape
    x = activation(M, K, dtype, device)
    q, scale = quantize_rows(x, rotation=group)
    assert (q.dtype, scale.dtype) == (torch.int8, torch.float32)
    check_codes(q, scale, rotated(x, group), 127)


@pytest.mark.parametrize("qmax", [127, 7])
@pytest.mark.parametrize("shape", PLAIN_SHAPES, ids=str)
def test_plain_rows(shape, qmax, device):
    x = activation(*shape, torch.float32, device)
    q, scale = quantize_rows(x, qmax=qmax)
    check_codes(q, scale, x.cpu().double(), qmax)


def test_four_bit_codes_of_a_rotated_row(rotated, device):
    x = activation(6, 512, torch.float16, device)
    q, scale = quantize_rows(x, rotation=256, qmax=7)
    check_codes(q, scale, rotated(x, 256), 7)


@pytest.mark.parametrize("group", [1, 256])
def test_rows_wider_than_the_registers_hold(group, rotated, device):
    x = activation(2, 32768 + 512, torch.float16, device)
    q, scale = quantize_rows(x, rotation=group)
    check_codes(q, scale, rotated(x, group), 127)


def test_halves_round_to_even(device):
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]], device=device)
    q, scale = quantize_rows(x)
    assert scale.tolist() == [1.0]
    assert q.tolist() == [[127, 0, 2, 2, 0, -2, -2, 126]]


@pytest.mark.parametrize(("qmax", "floor"), [(127, 1e-30), (7, 1e-10 / 7)])
def test_rows_of_zeros_get_the_floor(qmax, floor, device):
    q, scale = quantize_rows(torch.zeros(3, 64, device=device), qmax=qmax)
    torch.testing.assert_close(scale.cpu(), torch.full((3,), floor), rtol=1e-6, atol=0)
    assert not q.any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("group", [1, 16])
def test_a_non_finite_value_shows_in_its_row_only(group, bad, rotated, device):
    x = activation(4, 64, torch.float32, device)
    x[2, 5] = bad
    q, scale = quantize_rows(x, rotation=group)
    assert not torch.isfinite(scale[2])
    keep = [0, 1, 3]
    check_codes(q[keep], scale[keep], rotated(x[keep], group), 127)


@pytest.mark.parametrize("group", [1, 64])
def test_static_scale_clamps(group, rotated, device):
    x = activation(5, 320, torch.float32, device)
    scale = torch.tensor(0.04, device=device)
    q = quantize_rows_static(x, scale, rotation=group).cpu().double()
    wanted = (rotated(x, group) / 0.04).clamp(-128, 127)
    assert ((q - wanted).abs() <= STEP).all()
    assert {q.min().item(), q.max().item()} == {-128.0, 127.0}


def test_strided_and_transposed_input(device):
    x = activation(9, 128, torch.float16, device)
    q, scale = quantize_rows(x, rotation=64)
    wide = torch.cat([x, x], 1)[:, 128:]
    for view in (wide, x.t().contiguous().t()):
        q_view, scale_view = quantize_rows(view, rotation=64)
        assert torch.equal(q_view, q)
        assert torch.equal(scale_view, scale)


def test_no_rows(device):
    q, scale = quantize_rows(torch.zeros(0, 256, device=device), rotation=256)
    assert q.shape == (0, 256)
    assert scale.shape == (0,)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4608, 3072), (512, 15360), (70, 21504)], ids=str)
def test_model_shapes_on_a_device(shape, rotated):
    x = activation(*shape, torch.bfloat16, "cuda")
    q, scale = quantize_rows(x, rotation=256)
    check_codes(q, scale, rotated(x, 256), 127)


@pytest.mark.parametrize(
    ("x", "options", "words"),
    [
        (torch.zeros(3), {}, "x: expected 2 dimensions"),
        (torch.zeros(3, 4, dtype=torch.int8), {}, "x: expected one of torch.float16"),
        (torch.zeros(3, 100), {"rotation": 16}, "rotation: expected a divisor of K = 100"),
        (torch.zeros(3, 128), {"rotation": 128}, "rotation: expected 1, 16, 64 or 256, found 128"),
        (torch.zeros(3, 128), {"qmax": 15}, "qmax: expected 127 or 7"),
    ],
)
def test_refusals_name_the_argument(x, options, words):
    with pytest.raises(ValueError, match=words):
        quantize_rows(x, **options)


@pytest.mark.gpu
def test_rows_beyond_two_to_the_31_elements(rotated):
    if torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("needs 16 GB of free device memory")
    x = torch.zeros(140_000, 16_384, dtype=torch.bfloat16, device="cuda")
    x[-3:] = torch.randn(3, 16_384, device="cuda").bfloat16()
    q, scale = quantize_rows(x, rotation=256)
    check_codes(q[-3:], scale[-3:], rotated(x[-3:], 256), 127)
    assert not q[:-3].any()
