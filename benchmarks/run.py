"""Runs the benchmarks and writes RESULTS.md, with the raw results and the plots beside it.

    python -I -m quant_loader.benchmarks.run [NAMES...] [--full] [--no-readme]

Each benchmark runs in a process of its own with a time limit. Its result goes to `results/NAME.json`, its plots to
`plots/`; RESULTS.md is put together from all results there are, so that a benchmark which did not run this time keeps
its section. One that fails, or never ran, has a section that says so; a failure makes the exit code 1. The main table
is also put into README.md, between `<!-- bench:begin -->` and `<!-- bench:end -->`, where it has those lines.

A folder in `results/` is the record of another machine: copy the JSON files of a run there, and its goals get a table
at the end of RESULTS.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quant_loader.benchmarks import common
from quant_loader.benchmarks.common import Cell, Result, Table, say
from quant_loader.demo.paths import CHECKOUT

FOLDER = Path(__file__).resolve().parent
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
FULL_FACTOR = 6
"""How much longer a benchmark may take with --full."""


@dataclass(frozen=True)
class Benchmark:
    """A module of this folder, its heading in RESULTS.md, and how many seconds it may take with --quick."""

    name: str
    heading: str
    limit: int

    @property
    def module(self) -> str:
        return f"quant_loader.benchmarks.{self.name}"


BENCHMARKS = (
    Benchmark("check", "The cost of a check", 180),
    Benchmark("faults", "Damaged and mis-declared checkpoints", 600),
    Benchmark("load", "Loading", 600),
    Benchmark("sample", "Sampling", 420),
    Benchmark("lora", "LoRAs", 300),
    Benchmark("quality", "Quality", 300),
    Benchmark("cpu", "Single linears on the CPU", 300),
)


# --- running ----------------------------------------------------------------------------------------------------------


def failed(name: str, reason: str) -> Result:
    return Result(name, "", common.machine(), [], failed=common.scrubbed(reason))


def stop(child: subprocess.Popen[str]) -> None:
    """Interrupts a benchmark, so that it can stop its server and remove its files; ends it where it does not."""
    if os.name == "nt":
        child.terminate()
    else:
        child.send_signal(signal.SIGINT)
    try:
        child.communicate(timeout=30.0)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()


def run_one(benchmark: Benchmark, quick: bool) -> Result:
    """Runs a benchmark in a child process; its result, or one that says how it failed."""
    limit = benchmark.limit * (1 if quick else FULL_FACTOR)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        path = Path(folder) / "result.json"
        command = [sys.executable, "-I", "-m", benchmark.module, "--json", str(path), *(["--quick"] if quick else [])]
        # Whatever the child leaves behind when it is stopped goes with the folder.
        environment = {**os.environ, "TMPDIR": folder, "TEMP": folder}
        child = subprocess.Popen(command, env=environment, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        try:
            _, errors = child.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            stop(child)
            return failed(benchmark.name, f"took longer than {limit} s")
        except BaseException:
            stop(child)
            raise
        if child.returncode == 0 and path.exists():
            return common.read_json(path)
        lines = [line for line in errors.strip().splitlines() if line.strip()]
        return failed(benchmark.name, lines[-1] if lines else f"ended with {child.returncode}")


# --- the page ---------------------------------------------------------------------------------------------------------


def main_table(results: Mapping[str, Result]) -> Table:
    """A line for each goal that stands for its benchmark, and for each benchmark that failed or never ran."""
    rows: list[list[Cell]] = []
    for benchmark in BENCHMARKS:
        result = results.get(benchmark.name)
        if result is None:
            rows.append([benchmark.name, "not run", "", "", ""])
        elif result.failed:
            rows.append([result.name, "the benchmark failed", "", "", "**failed**"])
        else:
            rows += [
                [result.name, goal.name, goal.target, goal.measured, "met" if goal.met else "**missed**"]
                for goal in result.goals
                if goal.summary
            ]
    return Table("", ["benchmark", "measured", "goal", "here", ""], rows)


def machine_line(machine: Mapping[str, Cell]) -> str:
    """The machine and the versions in one sentence."""
    vnni = "with VNNI" if machine.get("vnni") else "without VNNI"
    versions = ("python", "torch", "comfyui", "comfy-kitchen", "safetensors", "quant-loader")
    named = ", ".join(f"{name} {machine[name]}" for name in versions if machine.get(name))
    return (
        f"{machine.get('date')}: {machine.get('cpu')}, {machine.get('cores')} cores {vnni}, "
        f"{machine.get('memory_gib')} GiB; GPU {machine.get('device')}; {machine.get('os')}; {named}."
    )


def section(benchmark: Benchmark, result: Result | None, plots: Sequence[str]) -> str:
    """The part of the page for one benchmark."""
    command = f"`python -I -m {benchmark.module}`"
    parts = [f"## {benchmark.heading}"]
    if result is None:
        parts.append(f"**Not run**: `make bench NAMES={benchmark.name}` adds it.")
        return "\n\n".join(parts)
    if result.failed:
        parts.append(f"**Failed**: {result.failed}\n\n{command}, {machine_line(result.machine)}")
        return "\n\n".join(parts)
    parts.append(result.question)
    leading, others = result.tables[:1], result.tables[1:]
    leading += [common.goals_table(result.goals)] if result.goals else []
    parts += [table.markdown() for table in leading]
    parts += [f"![{benchmark.heading}](plots/{name})" for name in plots]
    parts += [table.markdown() for table in others]
    parts.append(f"{command} · [raw](results/{result.name}.json) · {machine_line(result.machine)}")
    return "\n\n".join(parts)


def record_of_another(name: str, results: Mapping[str, Result]) -> str:
    """Every goal of a run on another machine, and which benchmarks its record holds."""
    rows: list[list[Cell]] = [
        [result.name, *row] for result in results.values() for row in common.goals_table(result.goals).rows
    ]
    missed = [common.goals_table(result.goals).note for result in results.values()]
    raw = ", ".join(f"[{benchmark}](results/{name}/{benchmark}.json)" for benchmark in results)
    absent = [benchmark.name for benchmark in BENCHMARKS if benchmark.name not in results]
    source = f"Raw: {raw}" + (f"; not in this record: {', '.join(absent)}" if absent else "")
    table = Table(name, ["benchmark", "goal", "target", "measured", ""], rows, "\n\n".join(filter(None, missed)))
    return f"{table.markdown()}\n\n{source} · {machine_line(next(iter(results.values())).machine)}"


def page(
    results: Mapping[str, Result],
    plots: Mapping[str, Sequence[str]],
    others: Mapping[str, Mapping[str, Result]] | None = None,
) -> str:
    """RESULTS.md: this machine's results and plots by benchmark, and the records of other machines by name."""
    head = (
        "# Results\n\nWritten by `make bench` (`python -I -m quant_loader.benchmarks.run`), which measures on the "
        "machine it runs on. Ratios are ours / stock of a cost, so that at most 1 is good, unless a heading says "
        "otherwise. Each section names its machine, versions and date. Where a goal is missed, the section says why."
    )
    parts = [head, f"{BEGIN}\n\n{main_table(results).markdown()}\n\n{END}"]
    parts += [section(one, results.get(one.name), plots.get(one.name, ())) for one in BENCHMARKS]
    if others:
        parts += ["## Other machines", *(record_of_another(name, record) for name, record in others.items())]
    return "\n\n".join(parts) + "\n"


def between_markers(text: str, content: str) -> str:
    """`text` with what stands between the two comments replaced; unchanged where it does not have both, in order."""
    start, stop = text.find(BEGIN), text.find(END)
    if start < 0 or stop < start:
        return text
    return f"{text[: start + len(BEGIN)]}\n\n{content}\n\n{text[stop:]}"


def stored(folder: Path) -> dict[str, Result]:
    """The results on disk, by name."""
    names = [benchmark.name for benchmark in BENCHMARKS]
    return {name: common.read_json(folder / f"{name}.json") for name in names if (folder / f"{name}.json").is_file()}


def stored_of_others(folder: Path) -> dict[str, dict[str, Result]]:
    """The records of other machines: what each folder beside the results holds, by the folder's name."""
    records = {path.name: stored(path) for path in sorted(folder.iterdir()) if path.is_dir()} if folder.is_dir() else {}
    return {name: record for name, record in records.items() if record}


def keep(result: Result, folder: Path) -> None:
    """Writes a result and its plots under the folder."""
    (folder / "results").mkdir(exist_ok=True)
    result.write_json(folder / "results" / f"{result.name}.json")
    if result.plots:
        if importlib.util.find_spec("matplotlib") is None:
            say("  matplotlib is not installed: plots stay as they are (pip install 'quant-loader[bench]')")
            return
        from quant_loader.benchmarks import figures

        figures.write(result, folder / "plots")


def plot_files(result: Result, folder: Path) -> list[str]:
    """The names of the plots of a result that have been drawn."""
    names = [result.plot_file(plot) for plot in result.plots]
    return [name for name in names if (folder / "plots" / name).is_file()]


def write_pages(folder: Path, readme: Path | None) -> None:
    """RESULTS.md from the results on disk, and its main table into the README."""
    results = stored(folder / "results")
    drawn = {name: plot_files(result, folder) for name, result in results.items()}
    text = page(results, drawn, stored_of_others(folder / "results"))
    (folder / "RESULTS.md").write_text(text, encoding="utf-8")
    if readme is not None and readme.is_file():
        before = readme.read_text(encoding="utf-8")
        after = between_markers(before, main_table(results).markdown())
        if after != before:
            readme.write_text(after, encoding="utf-8")


def main(argv: Sequence[str] | None = None, folder: Path = FOLDER, readme: Path = CHECKOUT / "README.md") -> int:
    """Command line; 1 when a benchmark failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [benchmark.name for benchmark in BENCHMARKS]
    parser.add_argument("names", nargs="*", metavar="NAMES", help=f"some of {', '.join(known)}; all by default")
    parser.add_argument("--full", action="store_true", help="every benchmark at its full size")
    parser.add_argument("--no-readme", action="store_true", help="leave README.md as it is")
    parser.add_argument("--no-run", action="store_true", help="only write the pages again from the stored results")
    options = parser.parse_args(argv)
    unknown = sorted(set(options.names) - set(known))
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(known)}")
    failures = 0
    started = time.monotonic()
    for benchmark in BENCHMARKS:
        if options.no_run or benchmark.name not in (options.names or known):
            continue
        say(f"{benchmark.name}: {benchmark.heading}")
        begun = time.monotonic()
        result = run_one(benchmark, quick=not options.full)
        keep(result, folder)
        failures += bool(result.failed)
        missed = [goal.name for goal in result.goals if not goal.met]
        verdict = result.failed or (f"missed: {'; '.join(missed)}" if missed else "every goal met")
        say(f"  {time.monotonic() - begun:.0f} s, {verdict}")
    write_pages(folder, None if options.no_readme else readme)
    say(f"{(time.monotonic() - started) / 60:.1f} min; {folder.name}/RESULTS.md written")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
