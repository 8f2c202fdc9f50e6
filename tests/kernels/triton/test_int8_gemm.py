"""int8_matmul against the same product in float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from quant_loader.kernels.triton_ops.int8_gemm import MAX_K, int8_matmul
from quant_loader.kernels.triton_ops.schedules import GemmSchedule, gemm_table

# The result is rounded once, to out_dtype: half a unit of the last place on a device, a whole one in the
# interpreter's bfloat16.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SHAPES = [
    (1, 1, 1),
    (1, 64, 128),
    (2, 33, 16),
    (5, 123, 123),
    (16, 48, 272),
    (17, 130, 64),
    (33, 65, 160),
    (129, 72, 144),
]


def operands(M: int, N: int, K: int, device: str):
    g = torch.Generator().manual_seed(M * 7919 + N * 31 + K)
    a = torch.randint(-127, 128, (M, K), generator=g, dtype=torch.int8)
    b = torch.randint(-127, 128, (N, K), generator=g, dtype=torch.int8)
    scale_a = torch.rand(M, generator=g) / K**0.5 / 70
    scale_b = torch.rand(N, generator=g) / 70
    return [t.to(device) for t in (a, b, scale_a, scale_b, torch.randn(N, generator=g))]


def expected(a, b, scale_a, scale_b, bias=None, low_rank=None, up=None, strength=1.0):
    a, b, scale_a, scale_b = (t.cpu().double() for t in (a, b, scale_a, scale_b))
    y = (a @ b.T) * scale_a.reshape(-1, 1) * scale_b.reshape(1, -1)
    if low_rank is not None:
        y += strength * low_rank.cpu().double() @ up.cpu().double().T
    return y if bias is None else y + bias.cpu().double()


def error(y: torch.Tensor, reference: torch.Tensor) -> float:
    assert y.shape == reference.shape
    return ((y.cpu().double() - reference).norm() / reference.norm()).item()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product_with_row_scales_and_bias(shape, dtype, device):
    a, b, scale_a, scale_b, bias = operands(*shape, device)
    y = int8_matmul(a, b, scale_a, scale_b, bias.to(dtype), out_dtype=dtype)
    assert y.dtype == dtype
    assert error(y, expected(a, b, scale_a, scale_b, bias.to(dtype))) < TOLERANCE[dtype]


@pytest.mark.parametrize("ones", ["a", "b", "both"])
def test_scales_of_one_element(ones, device):
    a, b, scale_a, scale_b, _ = operands(20, 40, 96, device)
    scale_a = scale_a[:1] if ones in ("a", "both") else scale_a
    scale_b = scale_b[0] if ones in ("b", "both") else scale_b
    y = int8_matmul(a, b, scale_a, scale_b, out_dtype=torch.float32)
    assert error(y, expected(a, b, scale_a, scale_b)) < 1e-6


@pytest.mark.parametrize("rank", [1, 16, 40])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("M", [3, 70])
def test_low_rank_side_path(M, dtype, rank, device):
    a, b, scale_a, scale_b, bias = operands(M, 90, 144, device)
    low_rank = torch.randn(M, rank, device=device).to(dtype)
    up = (torch.randn(90, rank, device=device) / rank).to(dtype)
    y = int8_matmul(a, b, scale_a, scale_b, bias, out_dtype=torch.float32, low_rank=low_rank, up=up, strength=0.75)
    # low_rank * strength is rounded to the operand's dtype ahead of a float16 product.
    bound = 1e-3 if dtype == torch.float16 else 1e-6
    assert error(y, expected(a, b, scale_a, scale_b, bias, low_rank, up, 0.75)) < bound


@pytest.mark.gpu
def test_low_rank_in_bfloat16():
    a, b, scale_a, scale_b, _ = operands(300, 400, 512, "cuda")
    low_rank = torch.randn(300, 32, device="cuda", dtype=torch.bfloat16)
    up = torch.randn(400, 32, device="cuda", dtype=torch.bfloat16)
    y = int8_matmul(a, b, scale_a, scale_b, out_dtype=torch.float32, low_rank=low_rank, up=up)
    assert error(y, expected(a, b, scale_a, scale_b, None, low_rank, up)) < 1e-5


def test_extreme_codes_are_summed_exactly(device):
    a = torch.full((3, 4096), -128, dtype=torch.int8, device=device)
    b = torch.full((5, 4096), -128, dtype=torch.int8, device=device)
    one = torch.ones(1, device=device)
    y = int8_matmul(a, b, one, one, out_dtype=torch.float32)
    assert torch.equal(y.cpu(), torch.full((3, 5), 4096 * 128.0**2))


def test_overflow_is_infinite_and_nan_stays(device):
    a, b, scale_a, scale_b, _ = operands(4, 8, 64, device)
    a[:] = 127
    b[:] = 127
    scale_a[:] = 1.0
    scale_a[2] = float("nan")
    scale_b[:] = 1.0
    y = int8_matmul(a, b, scale_a, scale_b, out_dtype=torch.float16).cpu()
    assert torch.isinf(y[[0, 1, 3]]).all()
    assert torch.isnan(y[2]).all()


def test_strided_rows_and_a_column_slice_as_output(device):
    a, b, scale_a, scale_b, bias = operands(19, 70, 128, device)
    wide_a = torch.cat([a, a], 1)[:, 128:]
    wide_b = torch.cat([b, b], 1)[:, :128]
    wide = torch.full((19, 100), 7.0, device=device)
    y = int8_matmul(wide_a, wide_b, scale_a, scale_b, bias, out_dtype=torch.float32, out=wide[:, 20:90])
    assert error(y, expected(a, b, scale_a, scale_b, bias)) < 1e-6
    assert (wide[:, :20] == 7).all()
    assert (wide[:, 90:] == 7).all()
    transposed = a.t().contiguous().t()
    assert torch.equal(int8_matmul(transposed, b, scale_a, scale_b, bias, out_dtype=torch.float32), y)


@pytest.mark.parametrize("side", [0, 3])
def test_nothing_to_do(side, device):
    a = torch.zeros(0, 16, dtype=torch.int8, device=device)
    b = torch.zeros(side, 16, dtype=torch.int8, device=device)
    y = int8_matmul(a, b, torch.ones(1, device=device), torch.ones(1, device=device), out_dtype=torch.float16)
    assert y.shape == (0, side)


def every_tile() -> list[GemmSchedule]:
    """The distinct tiles of all tables: pipelining and warps mean nothing to the arithmetic."""
    tables = [gemm_table(arch) for arch in ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "gfx1100", "gfx942")]
    schedules = [s for table in tables for s in (*table.tiles, *table.low_rank, *table.skinny, table.unaligned)]
    return list({schedule[:4]: schedule for schedule in schedules}.values())


@pytest.mark.parametrize("schedule", every_tile(), ids=lambda s: "x".join(map(str, s[:4])))
def test_every_tile_of_the_table_computes_the_product(schedule, device):
    """On a device of another architecture the tile is still a legal program, if a slow one."""
    if device == "cuda" and not fits(schedule):
        schedule = schedule._replace(num_stages=1)
    a, b, scale_a, scale_b, bias = operands(schedule.block_m + 3, 70, 144, device)
    y = int8_matmul(a, b, scale_a, scale_b, bias, out_dtype=torch.float32, schedule=schedule)
    assert error(y, expected(a, b, scale_a, scale_b, bias)) < 1e-6


def fits(schedule: GemmSchedule) -> bool:
    """Whether the pipeline's operand tiles fit this device's shared memory."""
    stage = (schedule.block_m + schedule.block_n) * schedule.block_k * schedule.dots
    limit = getattr(torch.cuda.get_device_properties(0), "shared_memory_per_block_optin", 65536)
    return stage * schedule.num_stages <= limit


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(4608, 3072, 3072), (512, 9216, 3072), (100, 3072, 15360), (1, 18432, 3072)], ids=str
)
def test_model_shapes_on_a_device(shape):
    a, b, scale_a, scale_b, bias = operands(*shape, "cuda")
    y = int8_matmul(a, b, scale_a, scale_b, bias, out_dtype=torch.bfloat16)
    exact = torch._int_mm(torch.nn.functional.pad(a, (0, 0, 0, max(0, 32 - shape[0]))), b.t())[: shape[0]]
    reference = exact.double() * scale_a.double()[:, None] * scale_b.double() + bias.double()
    assert error(y, reference.cpu()) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"b": torch.zeros(3, 15, dtype=torch.int8)}, r"b: expected \[N, 16\]"),
        ({"a": torch.zeros(2, 16)}, "a: expected one of torch.int8, found torch.float32"),
        ({"a": torch.zeros(2, 2, 16, dtype=torch.int8)}, "a: expected 2 dimensions"),
        ({"scale_a": torch.ones(5)}, "scale_a: expected 2 or 1 elements"),
        ({"bias": torch.ones(2)}, "bias: expected 3 elements"),
        ({"out_dtype": torch.int8}, "out_dtype: expected float16"),
        ({"low_rank": torch.ones(2, 4)}, "low_rank, up: expected both"),
        ({"low_rank": torch.ones(2, 4), "up": torch.ones(3, 5)}, r"low_rank, up: expected \[2, R\]"),
        ({"out": torch.ones(2, 4)}, r"out: expected \[2, 3\]"),
        (
            {"a": torch.zeros(2, MAX_K + 1, dtype=torch.int8), "b": torch.zeros(3, MAX_K + 1, dtype=torch.int8)},
            "at most 131071",
        ),
    ],
)
def test_refusals_name_the_argument(change, words):
    arguments = {
        "a": torch.zeros(2, 16, dtype=torch.int8),
        "b": torch.zeros(3, 16, dtype=torch.int8),
        "scale_a": torch.ones(2),
        "scale_b": torch.ones(3),
        "out_dtype": torch.float32,
    }
    with pytest.raises(ValueError, match=words):
        int8_matmul(**(arguments | change))


@pytest.mark.gpu
def test_operands_and_result_beyond_two_to_the_31():
    if torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("needs 16 GB of free device memory")
    M, N, K = 140_000, 16_384, 16_384
    a = torch.zeros(M, K, dtype=torch.int8, device="cuda")
    b = torch.randint(-127, 128, (N, K), dtype=torch.int8, device="cuda")
    a[-40:] = torch.randint(-127, 128, (40, K), dtype=torch.int8, device="cuda")
    scale = torch.full((1,), 2.0**-14, device="cuda")
    y = int8_matmul(a, b, scale, scale, out_dtype=torch.float16)
    exact = torch._int_mm(a[-40:], b.t()).double() * 2.0**-28
    assert error(y[-40:], exact.cpu()) < TOLERANCE[torch.float16]
    assert not y[:-40].any()
