"""What the benchmarks share: results, tables, goals, stopwatches, the machine, the command line.

How a benchmark is written. Each is a module of this folder with

    def run(quick: bool) -> Result          # measures and returns; prints only progress, through `say`
    def main(argv: Sequence[str] | None = None) -> int:
        return common.command_line(run, __doc__, argv)

    if __name__ == "__main__":
        sys.exit(main())

and is run by `python -I -m quant_loader.benchmarks.NAME [--quick] [--json FILE]`, or with all the others by
`quant_loader.benchmarks.run`, which knows it by its entry in `run.BENCHMARKS`. Import with the full name
(`from quant_loader.benchmarks import common`), so that both ways work.

- Check the results before timing them: `Wrong` is raised, and the benchmark fails, when they are off.
- Ratios are ours / stock of a cost (time, bytes, error): at most 1 is good. A column that means something else says so
  in its heading, and every table's `note` says which way its ratios go.
- Times are medians of alternating runs (`compare`): by the wall clock, or in CPU time (`time.process_time`) of what
  runs on one core. State which in the note.
- Memory is a high-water mark of a process, so each measurement has its own: `in_child` runs
  `python -I -m MODULE ARGUMENTS...` and returns the JSON on the last line that it prints. `children.host` does the same
  with ComfyUI imported beforehand, once.
- A goal (`at_most`, `at_least`, `Goal`) carries its target, what was measured and whether it was met. A missed one
  needs an `explanation`: what was profiled, what moved the number, which measurement shows that it cannot be met. Only
  goals with `summary=True` reach the main table of RESULTS.md and the README: one or two a benchmark.
- A `Plot` is data; `figures.py` draws it as PNG. Nothing else imports matplotlib.
- `quick` keeps the question and the checks, and takes fewer repeats and smaller sizes: `make bench` runs every
  benchmark quick, and all of them within 15 minutes on two cores.
- Files go into a temporary folder that is removed afterwards. Results carry no path, host or user name.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from quant_loader.demo.paths import CHECKOUT, comfyui_tree

Cell = str | int | float | bool | None
Clock = Callable[[], float]


class Wrong(RuntimeError):
    """A result is not what it has to be, so its cost means nothing; the message says which and by how much."""


def say(text: str) -> None:
    """Progress, on standard error: standard output carries the tables."""
    print(text, file=sys.stderr, flush=True)


def scrubbed(text: str) -> str:
    """Text without the folders of this machine: of a path, the file's name stays."""
    return re.sub(r"(?:/[\w.+-]+){2,}/", "", text.replace(str(CHECKOUT), "."))


# --- results ----------------------------------------------------------------------------------------------------------


def cell(value: Cell) -> str:
    """A table cell: floats with three significant digits, yes and no, nothing for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.3g}".rstrip(".")
    if isinstance(value, int):
        return f"{value:,}"
    return value.replace("|", "\\|").replace("\n", " ")


@dataclass
class Table:
    """Rows under columns. `note` says which way ratios go, how often was measured, and on what.

    A `collapsed` table is folded away on a page: for long lists.
    """

    title: str
    columns: list[str]
    rows: list[list[Cell]]
    note: str = ""
    collapsed: bool = False

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"table {self.title!r}: {len(self.columns)} columns, but a row of {len(row)}: {row}")

    def markdown(self) -> str:
        """The table in Markdown, title above and note below."""
        numeric = [
            all(not isinstance(row[i], (str, bool)) for row in self.rows) and bool(self.rows)
            for i in range(len(self.columns))
        ]
        lines = [
            "| " + " | ".join(cell(column) for column in self.columns) + " |",
            "|" + "|".join("--:" if right else "---" for right in numeric) + "|",
            *("| " + " | ".join(map(cell, row)) + " |" for row in self.rows),
        ]
        body = "\n".join(lines) + (f"\n\n{self.note}" if self.note else "")
        if self.collapsed:
            return f"<details><summary>{self.title}</summary>\n\n{body}\n\n</details>"
        return (f"**{self.title}**\n\n" if self.title else "") + body


@dataclass
class Goal:
    """What a benchmark wants to show. `explanation` is required reading where `met` is False."""

    name: str
    target: str
    measured: str
    met: bool
    explanation: str = ""
    summary: bool = False


def at_most(name: str, limit: float, measured: float, explanation: str = "", summary: bool = False) -> Goal:
    """`measured` is to be at most `limit`; the explanation is kept only where it is not."""
    met = measured <= limit
    return Goal(name, f"at most {cell(limit)}", cell(measured), met, "" if met else explanation, summary)


def at_least(name: str, limit: float, measured: float, explanation: str = "", summary: bool = False) -> Goal:
    """`measured` is to be at least `limit`; the explanation is kept only where it is not."""
    met = measured >= limit
    return Goal(name, f"at least {cell(limit)}", cell(measured), met, "" if met else explanation, summary)


@dataclass
class Plot:
    """One picture: `series` of values over the common `x`, drawn as grouped bars or as lines with markers.

    A value of None leaves a gap. `line` draws a horizontal line with a label there (`{1.0: "stock"}`).
    """

    name: str
    title: str
    x: list[str] | list[float]
    series: dict[str, list[float | None]]
    x_label: str = ""
    y_label: str = ""
    kind: str = "bars"
    log_x: bool = False
    log_y: bool = False
    line: dict[float, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in ("bars", "stacked", "lines"):
            raise ValueError(f"plot {self.name!r}: kind must be bars, stacked or lines, not {self.kind!r}")
        for label, values in self.series.items():
            if len(values) != len(self.x):
                raise ValueError(f"plot {self.name!r}: {len(self.x)} positions, but {len(values)} values of {label!r}")


@dataclass
class Result:
    """What a benchmark found. `data` is the raw measurements, for the JSON file only.

    `failed` says why there are none, when it could not run to its end; `run.py` writes that.
    """

    name: str
    question: str
    machine: dict[str, Cell]
    tables: list[Table]
    data: dict[str, object] = field(default_factory=dict)
    goals: list[Goal] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    failed: str = ""

    def plot_file(self, plot: Plot) -> str:
        """The name of the PNG of one of the plots."""
        return f"{self.name}.png" if plot.name == self.name else f"{self.name}-{plot.name}.png"

    def to_dict(self) -> dict[str, object]:
        """Plain data; numbers that JSON does not know (NaN, infinity) as text."""
        plain = _plain(asdict(self))
        assert isinstance(plain, dict)
        return plain

    def write_json(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> Result:
    """The result that `Result.write_json` wrote."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    return Result(
        raw["name"],
        raw["question"],
        raw["machine"],
        [Table(**table) for table in raw["tables"]],
        raw["data"],
        [Goal(**goal) for goal in raw["goals"]],
        [Plot(**{**plot, "line": {float(at): text for at, text in plot["line"].items()}}) for plot in raw["plots"]],
        raw["failed"],
    )


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


# --- stopwatches ------------------------------------------------------------------------------------------------------


def median_of(
    function: Callable[[], object], repeats: int = 5, clock: Clock = time.process_time, warm_up: int = 1
) -> float:
    """Seconds: the median of `repeats` calls after `warm_up` that are not counted; CPU time by default."""
    return statistics.median(compare({"": function}, repeats, clock, warm_up)[""])


def compare(
    functions: Mapping[str, Callable[[], object]],
    repeats: int = 5,
    clock: Clock = time.perf_counter,
    warm_up: int = 1,
) -> dict[str, list[float]]:
    """Seconds of each call by name, the functions in turn and every other round backwards, so that drift hits all."""
    for _ in range(warm_up):
        for function in functions.values():
            function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(repeats):
        names = list(functions) if turn % 2 == 0 else list(functions)[::-1]
        for name in names:
            started = clock()
            functions[name]()
            times[name].append(clock() - started)
    return times


def peak_resident() -> int:
    """The most bytes that this process ever had in memory, mapped file pages included.

    Linux: VmHWM of /proc/self/status, which starts anew with each program; `getrusage` elsewhere, whose mark can be
    inherited from the parent.
    """
    status = Path("/proc/self/status")
    if status.exists():
        found = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(encoding="ascii", errors="replace"), re.MULTILINE)
        if found:
            return int(found[1]) * 1024
    if os.name == "nt":
        import psutil  # a requirement of ComfyUI

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(most if sys.platform == "darwin" else most * 1024)


def resident() -> dict[str, int]:
    """Bytes in memory now, by kind (Linux): `anonymous` memory of the process's own, and mapped `file` pages."""
    status = Path("/proc/self/status")
    if not status.exists():
        return {}
    text = status.read_text(encoding="ascii", errors="replace")
    found = {kind: re.search(rf"^Rss{kind}:\s+(\d+) kB", text, re.MULTILINE) for kind in ("Anon", "File")}
    names = {"Anon": "anonymous", "File": "file"}
    return {names[kind]: int(match[1]) * 1024 for kind, match in found.items() if match}


class ChildFailed(RuntimeError):
    """A child process ended with an error or ran too long; the message carries the end of what it printed."""


def in_child(module: str, *arguments: str, timeout: float = 600.0) -> dict[str, Any]:
    """Runs `python -I -m MODULE ARGUMENTS...` and returns the JSON object on the last line of its output."""
    command = [sys.executable, "-I", "-m", module, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired as late:
        raise ChildFailed(f"{module} {' '.join(arguments)} took longer than {timeout:.0f} s") from late
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        answer = json.loads(lines[-1])
        if isinstance(answer, dict):
            return answer
    tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-12:])
    raise ChildFailed(f"{module} {' '.join(arguments)} ended with {done.returncode}:\n{tail}")


# --- the machine ------------------------------------------------------------------------------------------------------


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
        if found:
            return found[1].strip()
    if sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or platform.machine()
    return platform.processor() or platform.machine()


def _memory_gigabytes() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None


def _comfyui_version() -> str | None:
    path = comfyui_tree() / "comfyui_version.py"
    if not path.is_file():
        return None
    found = re.search(r'__version__\s*=\s*"([^"]+)"', path.read_text(encoding="utf-8"))
    return found[1] if found else None


def machine() -> dict[str, Cell]:
    """What the numbers depend on. No host name, no user, no path."""
    import torch
    from quant_loader import kernels

    cuda = torch.cuda.is_available()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "cpu": _cpu_model(),
        "cores": cores,
        "vnni": kernels.device_facts("cpu").vnni,
        "memory_gib": _memory_gigabytes(),
        "device": torch.cuda.get_device_name() if cuda else "none: everything ran on the CPU",
        "os": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        "torch": _version("torch"),
        "comfyui": _comfyui_version(),
        "comfy-kitchen": _version("comfy-kitchen"),
        "safetensors": _version("safetensors"),
        "quant-loader": _version("quant-loader"),
    }


# --- the command line -------------------------------------------------------------------------------------------------


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="fewer repeats and smaller sizes, the same question")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the result there as well")
    return made


def goals_table(goals: Sequence[Goal]) -> Table:
    """The goals with what became of them."""
    rows: list[list[Cell]] = [[g.name, g.target, g.measured, "met" if g.met else "**missed**"] for g in goals]
    missed = "\n\n".join(f"*{g.name}*: {g.explanation}" for g in goals if not g.met and g.explanation)
    return Table("Goals", ["goal", "target", "measured", ""], rows, missed)


def finish(measure: Callable[[], Result], options: argparse.Namespace) -> int:
    """Measures, prints the tables, writes the JSON. Returns the exit code: 1 when results were wrong.

    For benchmarks with options of their own on top of `parser`.
    """
    try:
        result = measure()
    except (Wrong, ChildFailed) as problem:
        say(f"failed: {problem}")
        return 1
    if options.json:
        result.write_json(options.json)
    print(result.question, end="\n\n")
    print(", ".join(f"{key} {cell(value)}" for key, value in result.machine.items()), end="\n\n")
    for table in (*result.tables, *([goals_table(result.goals)] if result.goals else [])):
        print(table.markdown(), end="\n\n")
    return 0


def command_line(run: Callable[[bool], Result], description: str | None, argv: Sequence[str] | None = None) -> int:
    """The `main` of a benchmark: `finish` with the options that all have."""
    options = parser(description).parse_args(argv)
    return finish(lambda: run(options.quick), options)
