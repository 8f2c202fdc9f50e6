"""The static tables, the choice among their tiles, and the optional file of measured choices."""

from __future__ import annotations

import json
import logging

import pytest
from quant_loader.kernels.triton_ops import available, int8_matmul_supported, schedules
from quant_loader.kernels.triton_ops.schedules import (
    GemmSchedule,
    gemm_schedule,
    gemm_table,
    m_bucket,
    parse_tuned,
    row_schedule,
)

ARCHITECTURES = [
    "sm_80",
    "sm_86",
    "sm_89",
    "sm_90",
    "sm_100",
    "sm_103",
    "sm_120",
    "sm_121",
    "gfx942",
    "gfx1100",
    "gfx1151",
    "gfx1201",
]
# Shared memory a block may ask for, in bytes (CUDA programming guide; AMD: 64 KB of LDS).
SHARED = {
    "sm_80": 163,
    "sm_86": 99,
    "sm_89": 99,
    "sm_90": 227,
    "sm_100": 227,
    "sm_103": 227,
    "sm_120": 99,
    "sm_121": 99,
}
FLUX = [(4608, 3072, 3072), (4608, 21504, 3072), (512, 3072, 15360), (512, 12288, 3072)]


def tiles_of(arch: str) -> tuple[GemmSchedule, ...]:
    table = gemm_table(arch)
    return (*table.tiles, *table.low_rank, *table.skinny, table.unaligned)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_tiles_fit_the_architecture(arch):
    for tile in tiles_of(arch):
        sides = (tile.block_m, tile.block_n, tile.block_k, tile.num_warps)
        assert all(side & (side - 1) == 0 for side in sides)
        buffers = max(1, tile.num_stages - 1) if arch.startswith(("sm_8", "sm_12", "gfx")) else tile.num_stages
        operands = (tile.block_m + tile.block_n) * tile.block_k * tile.dots * buffers
        assert operands <= SHARED.get(arch, 64) * 1024
        if arch.startswith("sm_8"):
            assert tile.dots == 2, "one int8 dot a step spills with Triton 3.8 and 3.9"


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("low_rank", [False, True])
def test_the_choice_is_the_first_tile_that_fills_the_device(arch, low_rank):
    table = gemm_table(arch)
    ladder = table.low_rank if low_rank else table.tiles
    for M, N, K in FLUX:
        tile = gemm_schedule(arch, M, N, K, low_rank=low_rank, multiprocessors=100)
        programs = [-(-M // t.block_m) * -(-N // t.block_n) for t in ladder]
        filling = [t for t, count in zip(ladder, programs, strict=True) if count >= 100]
        assert tile == (filling[0] if filling else ladder[-1])


def test_few_rows_get_the_skinny_tiles_and_odd_columns_their_own():
    table = gemm_table("sm_90")
    assert gemm_schedule("sm_90", 1, 3072, 3072) == table.skinny[0]
    assert gemm_schedule("sm_90", 16, 3072, 3072, low_rank=True) == table.skinny[0]
    assert gemm_schedule("sm_90", 17, 3072, 3072) == table.skinny[1]
    assert gemm_schedule("sm_90", 33, 3072, 3072) in table.tiles
    assert gemm_schedule("sm_90", 4608, 3072, 3071) == table.unaligned


@pytest.mark.parametrize("K", [1, 16, 255, 256, 3072, 4096, 15360, 21504, 32768, 32769, 100000])
def test_row_tiles_stay_in_registers(K):
    schedule = row_schedule(K)
    columns = schedule.chunks * 16
    assert columns % 256 == 0, "a rotation group must not straddle two steps"
    assert columns >= min(K, schedules.ROW_STEP)
    assert schedule.rows * columns / (schedule.num_warps * 32) <= 64
    assert 4 <= schedule.num_warps <= 16


@pytest.mark.parametrize(("M", "bucket"), [(1, 1), (2, 2), (3, 4), (512, 512), (513, 1024), (4608, 8192)])
def test_buckets_are_powers_of_two(M, bucket):
    assert m_bucket(M) == bucket


def entry(**changes: object) -> dict[str, object]:
    return {"m": 8192, "n": 3072, "k": 3072, "schedule": [64, 64, 128, 1, 8, 4, 4]} | changes


def test_a_measured_choice_comes_first():
    tuned = parse_tuned({"sm_90": [entry()]})
    assert gemm_schedule("sm_90", 4608, 3072, 3072, tuned=tuned) == GemmSchedule(64, 64, 128, 1, 8, 4, 4)
    assert gemm_schedule("sm_90", 4608, 3072, 3072, low_rank=True, tuned=tuned) == gemm_table("sm_90").low_rank[0]
    assert gemm_schedule("sm_86", 4608, 3072, 3072, tuned=tuned) == gemm_table("sm_86").tiles[0]


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "expected an object"),
        ({"sm_90": {}}, "sm_90: expected a list"),
        ({"sm_90": [3]}, r"sm_90\[0\]: expected an object"),
        ({"sm_90": [entry(), entry(m="8192")]}, r"sm_90\[1\]: expected positive integers"),
        ({"sm_90": [entry(n=True)]}, "expected positive integers"),
        ({"sm_90": [entry(schedule=[64, 64, 128])]}, "schedule: expected 7 integers"),
        ({"sm_90": [entry(schedule=[96, 64, 128, 1, 8, 4, 4])]}, "powers of two"),
        ({"sm_90": [entry(schedule=[4096, 64, 128, 1, 8, 4, 4])]}, "powers of two"),
    ],
)
def test_a_bad_entry_is_named(document, words):
    with pytest.raises(ValueError, match=words):
        parse_tuned(document)


@pytest.fixture
def tuned_file(tmp_path, monkeypatch):
    path = tmp_path / "tuned.json"
    monkeypatch.setenv(schedules.TUNED_VARIABLE, str(path))
    schedules.tuned_schedules.cache_clear()
    yield path
    schedules.tuned_schedules.cache_clear()


def test_the_file_is_read_once(tuned_file):
    tuned_file.write_text(json.dumps({"gfx1100": [entry()]}))
    table = schedules.tuned_schedules()
    assert list(table) == [("gfx1100", 8192, 3072, 3072, False)]
    tuned_file.unlink()
    assert schedules.tuned_schedules() is table


@pytest.mark.parametrize("content", [None, "{", '{"sm_90": 1}'])
def test_an_unreadable_file_is_reported_and_left_out(tuned_file, content, caplog):
    if content is not None:
        tuned_file.write_text(content)
    with caplog.at_level(logging.WARNING):
        assert not schedules.tuned_schedules()
    assert "The built-in table is used" in caplog.text


@pytest.mark.parametrize(
    ("arch", "supported"),
    [
        ("sm_61", False), ("sm_75", False), ("sm_80", True), ("sm_89", True), ("sm_90a", True), ("sm_120", True),
        ("gfx1030", False), ("gfx1100", True), ("gfx1201", True), ("gfx942:sramecc+:xnack-", True),
        ("gfx906", False), ("mps", False),
    ],
)  # fmt: skip
def test_where_the_product_is_supported(arch, supported):
    assert int8_matmul_supported(arch) is supported


def test_availability_tells_the_version():
    triton = pytest.importorskip("triton")
    assert available() == (True, f"Triton {triton.__version__}")


def test_availability_without_triton(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "triton", None)
    usable, reason = available()
    assert not usable
    assert "cannot be imported" in reason


def test_availability_of_an_old_triton(monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton, "__version__", "3.1.0")
    assert available() == (False, "Triton 3.1.0 is older than 3.3")
