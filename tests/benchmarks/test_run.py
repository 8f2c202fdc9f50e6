"""The page that `make bench` writes: its sections, its main table, the README, and a benchmark that fails."""

from __future__ import annotations

import importlib
import inspect

import pytest
from PIL import Image
from quant_loader.benchmarks import common, figures, run
from quant_loader.benchmarks.common import Goal, Plot, Result, Table

MACHINE = {"date": "2026-01-02", "cpu": "a processor", "cores": 2, "vnni": False, "python": "3.11.1"}


def a_result(name: str, measured: str = "0.5", met: bool = True, **changes) -> Result:
    goals = [
        Goal(f"time of {name}", "at most 1", measured, met, "" if met else "a reason", summary=True),
        Goal("a small thing", "at most 1", "0.1", True),
    ]
    table = Table("Times", ["what", "s"], [[name, 1.0]])
    return Result(name, f"How fast is {name}?", MACHINE, [table], goals=goals, **changes)


def a_plot(name: str) -> Plot:
    return Plot(name, "Seconds", ["int8", "nvfp4"], {"ours": [1.0, 2.0], "stock": [2.0, None]}, line={1.5: "goal"})


def test_a_page_has_a_section_a_benchmark_in_order_and_the_main_table_first():
    text = run.page({"load": a_result("load", "1.2", met=False), "check": a_result("check")}, {})
    head, checked, damaged, loaded, *_ = text.split("\n## ")
    assert checked.startswith("The cost of a check\n\nHow fast is check?")
    assert loaded.startswith("Loading\n\nHow fast is load?")
    main = head[head.index(run.BEGIN) : head.index(run.END)]
    assert "| check | time of check | at most 1 | 0.5 | met |" in main
    assert "| load | time of load | at most 1 | 1.2 | **missed** |" in main
    assert "a small thing" not in main
    assert "a small thing" in checked
    assert "*time of load*: a reason" in loaded
    assert "a processor, 2 cores without VNNI" in loaded
    assert damaged == "Damaged and mis-declared checkpoints\n\n**Not run**: `make bench NAMES=faults` adds it.\n"
    assert "| faults | not run |  |  |  |" in main


def test_a_failed_benchmark_has_a_section_and_a_line_that_say_so():
    text = run.page({"check": Result("check", "", MACHINE, [], failed="off by 3")}, {})
    assert "**Failed**: off by 3" in text
    assert "| check | the benchmark failed |  |  | **failed** |" in text


def test_the_readme_takes_the_table_between_its_comments_and_nothing_else():
    before = f"# Title\n\n{run.BEGIN}\nold\n{run.END}\n\nThe end.\n"
    after = run.between_markers(before, "| new |")
    assert after == f"# Title\n\n{run.BEGIN}\n\n| new |\n\n{run.END}\n\nThe end.\n"
    assert run.between_markers(after, "| new |") == after


@pytest.mark.parametrize("text", ["# Title\n", f"{run.BEGIN} only\n", f"{run.END}\n{run.BEGIN}\n"])
def test_a_readme_without_the_comments_stays_as_it_is(text):
    assert run.between_markers(text, "| new |") == text


@pytest.fixture
def children(monkeypatch):
    """Benchmarks of this test instead of the real ones: name -> what `run_one` answers."""
    answers: dict[str, Result] = {}
    monkeypatch.setattr(run, "run_one", lambda benchmark, quick: answers[benchmark.name])
    return answers


def test_only_the_sections_that_ran_change(tmp_path, children):
    readme = tmp_path / "README.md"
    readme.write_text(f"{run.BEGIN}\n{run.END}\n")
    children["check"], children["load"] = a_result("check", "0.1"), a_result("load", "0.2")
    assert run.main(["check", "load"], tmp_path, readme) == 0
    before = (tmp_path / "RESULTS.md").read_text()
    children["load"] = a_result("load", "0.3")
    assert run.main(["load"], tmp_path, readme) == 0
    assert (tmp_path / "RESULTS.md").read_text() == before.replace("0.2", "0.3")
    assert "| load | time of load | at most 1 | 0.3 | met |" in readme.read_text()


def test_a_failure_is_the_exit_code_and_the_others_still_run(tmp_path, children):
    children["check"] = Result("check", "", MACHINE, [], failed="off by 3")
    children["load"] = a_result("load")
    readme = tmp_path / "README.md"
    readme.write_text(f"{run.BEGIN}\n{run.END}\n")
    assert run.main(["check", "load", "--no-readme"], tmp_path, readme) == 1
    text = (tmp_path / "RESULTS.md").read_text()
    assert "**Failed**: off by 3" in text
    assert "How fast is load?" in text
    assert readme.read_text() == f"{run.BEGIN}\n{run.END}\n"


def test_a_name_that_is_no_benchmark_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        run.main(["chekc"], tmp_path)
    assert stopped.value.code == 2
    assert "no benchmark chekc" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "limit", "reason"),
    [
        ("no_such_module", 60, "No module named"),
        ("common", 0, "took longer than 0 s"),
    ],
)
def test_a_child_that_ends_badly_is_a_failed_result(name, limit, reason):
    result = run.run_one(run.Benchmark(name, "A benchmark", limit), quick=True)
    assert reason in result.failed


@pytest.mark.parametrize("benchmark", run.BENCHMARKS, ids=lambda benchmark: benchmark.name)
def test_a_benchmark_follows_the_convention(benchmark, capsys):
    module = importlib.import_module(benchmark.module)
    assert next(iter(inspect.signature(module.run).parameters)) == "quick"
    with pytest.raises(SystemExit) as stopped:
        module.main(["--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert "--quick" in shown
    assert "--json" in shown


@pytest.mark.parametrize("kind", ["bars", "stacked", "lines"])
def test_plots_are_small_pictures_on_white(tmp_path, kind):
    plot = a_plot("check")
    plot.kind = kind
    if kind == "lines":
        plot.x, plot.log_x, plot.log_y = [100.0, 1000.0], True, True
    (path,) = figures.write(a_result("check", plots=[plot]), tmp_path)
    assert path.name == "check.png"
    picture = Image.open(path).convert("RGB")
    assert picture.getpixel((2, 2)) == (255, 255, 255)
    assert len(picture.getcolors(1 << 16)) > 3  # something is drawn
    assert path.stat().st_size < 30_000


def test_a_plot_is_on_the_page_once_it_is_drawn(tmp_path, children):
    children["check"] = a_result("check", plots=[a_plot("check"), a_plot("growth")])
    assert run.main(["check", "--no-readme"], tmp_path) == 0
    text = (tmp_path / "RESULTS.md").read_text()
    for name in ("check.png", "check-growth.png"):
        assert f"(plots/{name})" in text
        assert (tmp_path / "plots" / name).is_file()
    assert common.read_json(tmp_path / "results" / "check.json").plots == children["check"].plots


def test_a_folder_of_results_is_the_record_of_another_machine(tmp_path):
    other = tmp_path / "results" / "a-desk"
    other.mkdir(parents=True)
    (tmp_path / "results" / "empty").mkdir()
    a_result("load", "1.2", met=False).write_json(other / "load.json")
    assert run.main(["--no-run"], tmp_path, tmp_path / "README.md") == 0
    before, after = (tmp_path / "RESULTS.md").read_text(encoding="utf-8").split("## Other machines")
    assert "| load | not run |  |  |  |" in before
    assert after.count("**a-desk**") == 1
    assert "empty" not in after
    assert "| load | time of load | at most 1 | 1.2 | **missed** |" in after
    assert "*time of load*: a reason" in after
    assert "[load](results/a-desk/load.json); not in this record: check, faults" in after
    assert "a processor, 2 cores without VNNI" in after
