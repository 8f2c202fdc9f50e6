"""Benchmarks of sampling, LoRAs, quality and CPU linears: tiny runs, and what their tables and goals say of them."""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import json
import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from quant_loader import kernels
from quant_loader.benchmarks import children, cpu, in_process, lora, quality, sample
from quant_loader.benchmarks.common import Table, Wrong
from quant_loader.benchmarks.in_process import DENSE, Size

TINY = Size(256, 1, 1, 64, 16)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What benchmarks run in a child process runs here: importing ComfyUI once is what costs the time."""

    def here(module: str, *arguments: str, timeout: float = 0.0) -> Any:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            assert importlib.import_module(module).main(arguments) == 0
        return json.loads(printed.getvalue().splitlines()[-1])

    monkeypatch.setattr(children, "host", lambda: contextlib.nullcontext(here))


def column(table: Table, name: str) -> list[Any]:
    return [row[table.columns.index(name)] for row in table.rows]


# --- sampling ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("in_this_process")
def test_a_small_model_is_sampled_by_every_side() -> None:
    result = sample.run(True, ("fp8", "asym_w4a8"), TINY, steps=3, rounds=1, device="cpu")
    cases: Any = result.data["cases"]
    (table,) = result.tables
    assert list(zip(column(table, "format"), column(table, "mode"), strict=True)) == [
        (fmt, mode) for fmt in ("fp8", "asym_w4a8") for mode in in_process.MODES
    ]
    ours, stock = cases["ours"]["fp8 auto"], cases["stock"]["fp8"]
    assert len(ours["wall"]) == len(stock["wall"]) == 3  # the step before them is not counted
    ratio = statistics.median(ours["wall"]) / statistics.median(stock["wall"])
    assert column(table, "ours / stock")[0] == pytest.approx(ratio)
    assert 0.001 < ours["error"] < sample.MOST["fp8"]
    assert cases["stock"][DENSE]["error"] == 0.0
    # What stock cannot load has no time, and the reason stands in its place.
    assert "asym_w4a8_int8" in column(table, "stock, s")[4]
    assert column(table, "ours / stock")[4:] == [None] * 4
    factor = next(goal for goal in result.goals if "worst format (fp8)" in goal.name)
    assert float(factor.measured) == pytest.approx(1 / ratio, abs=0.01)


def case(error: float) -> dict[str, Any]:
    return {"steps": 3, "wall": [1.0], "cpu": [1.0], "error": error, "kernel": ""}


def test_a_wrong_latent_of_stock_is_reported_and_has_no_time() -> None:
    found = {"ours": {"fp8 auto": case(0.01)}, "stock": {DENSE: case(0.0), "fp8": case(0.5)}}
    wrong = sample.check(found, sample.QUICK)
    assert wrong == {"fp8": "latent off by 0.5"}
    times = sample.times_of(found, wrong, "wall")
    assert times["fp8 auto"]["stock"] is None
    assert column(sample.table(found, times, wrong, ""), "stock, s") == ["wrong: latent off by 0.5"]
    assert sample.goals_of(times, vnni=True, on_cpu=True) == []


def test_later_rounds_repeat_what_a_goal_compares_and_is_neither_slow_nor_wrong() -> None:
    slow = {**case(0.01), "wall": [sample.SLOW + 1.0]}
    assert all(sample.due(("fp8", mode), 0, None) for mode in in_process.MODES)
    assert [sample.due(("fp8", mode), 1, case(0.01)) for mode in ("", "auto", "int8")] == [True, True, False]
    assert not sample.due(("int8_row", ""), 1, slow)
    assert not sample.due(("asym_w4a8", ""), 1, {"failed": "KeyError"})


@pytest.mark.parametrize("error", [0.5, math.nan, math.inf])
def test_a_wrong_latent_of_ours_fails_the_benchmark(error: float) -> None:
    with pytest.raises(Wrong, match="fp8 auto"):
        sample.check({"ours": {"fp8 auto": case(error)}, "stock": {}}, sample.QUICK)


def test_the_goals_of_sampling_name_the_worst_format() -> None:
    times: dict[str, dict[str, float | None]] = {
        "int8_row auto": {"ours": 1.0, "stock": 1.2, DENSE: 1.0},
        "fp8 auto": {"ours": 1.0, "stock": 0.9, DENSE: 0.5},
        "fp8 exact": {"ours": 9.0, "stock": 0.9, DENSE: 0.5},
    }
    never, int8, others = sample.goals_of(times, vnni=False, on_cpu=True)
    assert "(fp8)" in never.name
    assert (never.measured, never.met) == ("0.900", False)
    assert (int8.measured, int8.met) == ("1.20", False)
    assert "fp8 1.80 and 2.00" in others.explanation


# --- LoRAs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [4, 128])
def test_a_random_lora_has_the_size_it_is_meant_to_have(rank: int) -> None:
    size = Size(512, 1, 1, 64, 16)
    made = lora.kohya_lora(size, rank, seed=1)
    identities = {name: torch.eye(K) for name, (_, K), _ in in_process.quantised_linears(size)}
    for name, change in lora.effects([made], identities, 1.0):
        K, N = change.shape
        # A weight of variance 1 / K has the norm sqrt(N); of rank 4, the norms of A and B vary by a tenth each.
        assert float(change.norm()) / N**0.5 == pytest.approx(lora.EFFECT, rel=0.2), (name, K)


@pytest.mark.usefixtures("in_this_process")
def test_a_lora_is_measured_on_both_sides() -> None:
    found = lora.measure(TINY, ("fp8",), ((4, 1), (4, 2)), 1, "cpu")
    for stack in ("4 x 1", "4 x 2"):
        ours, stock = found["ours"]["fp8"][stack], found["stock"]["fp8"][stack]
        assert ours["changed_percent"] == 0.0 < stock["changed_percent"]
        assert ours["worst_error"] < 0.01 < stock["error"]
    table = lora.table(found, TINY)
    ratios = [one["step"] / found["stock"]["fp8"][stack]["step"] for stack, one in found["ours"]["fp8"].items()]
    assert column(table, "step with, ours / stock") == ratios


# --- quality ----------------------------------------------------------------------------------------------------------


def test_layer_errors_are_under_the_bounds_and_stock_is_beside_them() -> None:
    found = quality.layer_errors(1024, rows=64)
    assert {mode for _, mode in found} == {*in_process.MODES, "stock"}
    for (label, mode), one in found.items():
        for kind in quality.KINDS:
            bound = one["bounds"].get(kind)
            assert one[kind] > 0.001
            assert bound is None or one[kind] <= bound, (label, mode, kind)
    # INT8 without rotation suffers from outliers; ConvRot does not.
    assert found["int8 row", "native"]["outlier channels"] > 2.5 * found["int8 ConvRot", "native"]["outlier channels"]


def test_a_layer_above_its_bound_fails_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(quality.BOUNDS, ("nvfp4", "native"), 0.01)
    with pytest.raises(Wrong, match=r"nvfp4, native, Gaussian, K = 1024: error 0\.1"):
        quality.layer_errors(1024, rows=64)


def test_psnr() -> None:
    a = torch.zeros(3, 4)
    assert quality.psnr(a, a) == math.inf
    assert quality.psnr(a, a + 0.1) == pytest.approx(20.0, abs=1e-4)


@pytest.mark.usefixtures("in_this_process")
def test_pictures_of_both_sides() -> None:
    found = quality.pictures(("int8_convrot", "quanto_int8"), "cpu")
    table = quality.picture_table(found)
    assert column(table, "latent, ours")[0] == found["ours"]["int8_convrot auto"]["latent"]
    assert 30.0 < column(table, "PSNR, ours, dB")[0] < 80.0
    assert column(table, "latent, stock")[4] == "wrong picture"  # what stock makes of a Quanto file


# --- linears on the CPU -----------------------------------------------------------------------------------------------


def test_the_table_of_linears_says_what_was_measured() -> None:
    result = cpu.run(True, (cpu.TOKENS,), (256, 256), repeats=2)
    (table,) = result.tables
    rows: Any = result.data["rows"]
    assert column(table, "ms") == [row["milliseconds"] for row in rows]
    for row, ratio, stock in zip(rows, column(table, "ours / stock"), column(table, "stock, ms"), strict=True):
        if row["format"] != "dense":
            assert ratio == pytest.approx(row["milliseconds"] / stock)
            assert row["error"] <= cpu.WRONG
    names = [goal.name for goal in result.goals]
    assert len(names) == 2 + 2 + 4 + 1
    if not kernels.device_facts("cpu").vnni:
        assert all("VPDPBUSD" in goal.explanation for goal in result.goals[:-1] if not goal.met)


def test_a_slow_stock_product_is_timed_on_some_rows_and_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "SLOW", 0.0)
    with torch.inference_mode():
        rows = list(cpu.measure(256, 256, 256, cpu.Stopwatch(itertools.count(0.0, 0.001).__next__, 1)))
    row = next(row for row in rows if row.format == "int8 row")
    # By this clock every call takes a millisecond: four times that of 64 rows, a quarter of 256.
    assert row.stock_milliseconds == pytest.approx(4.0)
    assert cpu.stock_cell(row) == "4.00 (64 rows x 4)"
    assert 0.0 < (row.stock_error or 0.0) < cpu.STOCK_WRONG_ELSE


def test_functions_are_timed_in_turn_and_slow_ones_less_often() -> None:
    now = 0.0
    calls: list[str] = []

    def takes(name: str, seconds: float) -> Callable[[], None]:
        def call() -> None:
            nonlocal now
            now += seconds
            calls.append(name)

        return call

    watch = cpu.Stopwatch(lambda: now, 5)
    fast = watch.in_turn({"a": takes("a", 0.05), "b": takes("b", 0.1)})
    assert fast == pytest.approx({"a": 50.0, "b": 100.0})
    assert calls == ["a", "b"] * 6
    calls.clear()
    assert watch.median(takes("slow", 4.0)) == pytest.approx(4000.0)
    assert calls == ["slow"] * 4
