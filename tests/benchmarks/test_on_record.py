"""The results that are committed: one of each benchmark, complete, and what the pages quote."""

from __future__ import annotations

import datetime

import pytest
from quant_loader.benchmarks import run
from quant_loader.benchmarks.common import Result
from quant_loader.demo.paths import CHECKOUT

RECORD = run.stored(run.FOLDER / "results")
OTHERS = run.stored_of_others(run.FOLDER / "results")
RESULTS = [*RECORD.values(), *(result for record in OTHERS.values() for result in record.values())]
# Benchmarks whose tables hold times, and those that count or compare values.
TIMED = ("check", "load", "sample", "lora", "cpu")
VERSIONS = ("python", "torch", "comfyui", "comfy-kitchen", "safetensors", "quant-loader")


def identity(result: Result) -> str:
    return f"{result.name} on {result.machine['cpu']}"


def test_every_benchmark_is_on_record() -> None:
    assert list(RECORD) == [benchmark.name for benchmark in run.BENCHMARKS]
    assert not any(result.failed for result in RESULTS)


@pytest.mark.parametrize("result", RESULTS, ids=identity)
def test_a_result_names_machine_versions_and_date(result: Result) -> None:
    machine = result.machine
    assert datetime.date.fromisoformat(str(machine["date"]))
    assert machine["cpu"]
    assert machine["cores"]
    assert all(machine[key] for key in VERSIONS)


@pytest.mark.parametrize("result", [result for result in RESULTS if result.name in TIMED], ids=identity)
def test_times_are_medians_with_ratios(result: Result) -> None:
    for table in result.tables:
        assert any(" / " in column for column in table.columns)
        assert "edians" in table.note


def test_a_missed_goal_is_explained() -> None:
    for result in RESULTS:
        assert result.goals
        assert all(goal.met or goal.explanation for goal in result.goals)


def test_the_pages_quote_the_record() -> None:
    drawn = {name: run.plot_files(result, run.FOLDER) for name, result in RECORD.items()}
    assert (run.FOLDER / "RESULTS.md").read_text(encoding="utf-8") == run.page(RECORD, drawn, OTHERS)
    assert all(drawn[name] for name, result in RECORD.items() if result.plots)
    readme = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    assert run.between_markers(readme, run.main_table(RECORD).markdown()) == readme
