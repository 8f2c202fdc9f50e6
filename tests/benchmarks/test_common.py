"""What the benchmarks share: tables, goals, results that survive their file, stopwatches, child processes."""

from __future__ import annotations

import getpass
import json
import math
import platform
import subprocess
import sys

import pytest
from quant_loader.benchmarks import common
from quant_loader.benchmarks.common import ChildFailed, Plot, Result, Table, Wrong
from quant_loader.demo.paths import CHECKOUT


def a_result(**changes) -> Result:
    given = {
        "name": "check",
        "question": "How long?",
        "machine": {"date": "2026-01-02", "cpu": "a processor", "cores": 2},
        "tables": [Table("Times", ["what", "ours / stock"], [["load", 0.5]], "At most 1 is good.")],
        "data": {"rows": [1.0, math.nan, {"deep": (math.inf, 2)}]},
        "goals": [common.at_most("time", 1.0, 0.5, summary=True), common.at_least("speed", 2.0, 1.5, "why not")],
        "plots": [Plot("check", "Times", ["a", "b"], {"ours": [1.0, None]}, line={1.0: "stock"})],
    }
    return Result(**{**given, **changes})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (True, "yes"),
        (12345, "12,345"),
        (12345.6, "12,346"),
        (0.5, "0.500"),
        (123.4, "123"),
        (0.00123, "0.00123"),
        (math.nan, "nan"),
        ("a|b\nc", "a\\|b c"),
    ],
)
def test_cells(value, text):
    assert common.cell(value) == text


def test_a_table_is_markdown_with_numbers_to_the_right():
    table = Table("Times", ["what", "s"], [["load", 1.5], ["check", 0.25]], "A note.")
    assert table.markdown().splitlines() == [
        "**Times**",
        "",
        "| what | s |",
        "|---|--:|",
        "| load | 1.50 |",
        "| check | 0.250 |",
        "",
        "A note.",
    ]


def test_a_collapsed_table_is_folded_away_whole():
    text = Table("Cases", ["case"], [["one"]], collapsed=True).markdown()
    assert text.startswith("<details><summary>Cases</summary>\n\n| case |")
    assert text.endswith("</details>")


def test_a_row_of_another_length_is_refused():
    with pytest.raises(ValueError, match="2 columns, but a row of 1"):
        Table("Times", ["what", "s"], [["load"]])


def test_a_plot_whose_values_do_not_fit_its_positions_is_refused():
    with pytest.raises(ValueError, match="2 positions, but 1 values"):
        Plot("check", "", ["a", "b"], {"ours": [1.0]})
    with pytest.raises(ValueError, match="kind"):
        Plot("check", "", ["a"], {"ours": [1.0]}, kind="pie")


def test_goals_say_whether_they_are_met_and_explain_only_what_is_missed():
    assert common.at_most("time", 1.0, 1.0, "why not") == common.Goal("time", "at most 1.00", "1.00", True)
    missed = common.at_most("time", 1.0, 1.2, "why not")
    assert (missed.met, missed.explanation) == (False, "why not")
    assert common.at_least("speed", 1.3, 1.31, "why not").met
    text = common.goals_table([missed]).markdown()
    assert "**missed**" in text
    assert "*time*: why not" in text


def test_a_result_survives_its_file(tmp_path):
    result = a_result()
    result.write_json(tmp_path / "check.json")
    read = common.read_json(tmp_path / "check.json")
    assert read.tables == result.tables
    assert read.goals == result.goals
    assert read.plots == result.plots
    assert read.data == {"rows": [1.0, "nan", {"deep": ["inf", 2]}]}


def test_the_machine_is_described_without_naming_it():
    facts = common.machine()
    assert {"cpu", "cores", "vnni", "memory_gib", "python", "torch", "comfyui", "comfy-kitchen", "date"} <= set(facts)
    assert facts["python"] == platform.python_version()
    text = json.dumps(facts)
    for private in (platform.node(), str(CHECKOUT)):
        assert private not in text
    assert getpass.getuser() not in facts.values()


def test_a_message_tells_nothing_of_the_folders_here():
    text = f"no file {CHECKOUT}/benchmarks/x.py in /home/somebody/models/y.safetensors"
    assert common.scrubbed(text) == "no file ./benchmarks/x.py in y.safetensors"


def test_stopwatches_count_what_was_asked_for():
    calls = []
    ticks = iter([0.0, 5.0, 10.0, 11.0, 20.0, 23.0])
    assert common.median_of(lambda: calls.append(1), repeats=3, clock=lambda: next(ticks)) == 3.0
    assert len(calls) == 4  # one that is not counted


def test_comparisons_take_turns():
    order = []
    sides = {"ours": lambda: order.append("ours"), "stock": lambda: order.append("stock")}
    times = common.compare(sides, repeats=2)
    assert order == ["ours", "stock", "ours", "stock", "stock", "ours"]
    assert {name: len(spent) for name, spent in times.items()} == {"ours": 2, "stock": 2}


def test_peak_memory_grows_with_what_was_held():
    """In a process of its own: this one's mark may be far above what it holds now."""
    code = (
        "from quant_loader.benchmarks import common\n"
        "before = common.peak_resident(); held = bytearray(64 << 20); print(before, common.peak_resident())"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert before > 1 << 20
    assert after - before >= 32 << 20


def test_a_child_answers_with_its_last_line(tmp_path):
    # json.tool prints the object that it reads
    path = tmp_path / "answer.json"
    path.write_text('{"seconds": 1.5}')
    assert common.in_child("json.tool", "--no-indent", str(path)) == {"seconds": 1.5}


def test_a_child_that_fails_is_told_with_its_last_words(tmp_path):
    path = tmp_path / "answer.json"
    path.write_text("nonsense")
    with pytest.raises(ChildFailed, match=r"json\.tool .*ended with 1:[\s\S]*Expecting value"):
        common.in_child("json.tool", str(path))


def test_a_child_that_hangs_is_ended():
    with pytest.raises(ChildFailed, match="longer than"):
        common.in_child("http.server", "0", timeout=1.0)


def test_the_command_line_prints_writes_and_fails_on_wrong_results(tmp_path, capsys):
    path = tmp_path / "out.json"
    sizes = []

    def run(quick: bool) -> Result:
        sizes.append(quick)
        return a_result()

    assert common.command_line(run, "A benchmark.", ["--quick", "--json", str(path)]) == 0
    assert sizes == [True]
    assert common.read_json(path).name == "check"
    assert "| load | 0.500 |" in capsys.readouterr().out

    def wrong(quick: bool) -> Result:
        raise Wrong("off by 3")

    assert common.command_line(wrong, "A benchmark.", []) == 1
    assert "failed: off by 3" in capsys.readouterr().err
