"""Seconds a sampling step: ours, the stock loader and the 16-bit model, every format and execution mode.

    python -I -m quant_loader.benchmarks.sample [--quick] [--json FILE] [--device auto] [--hidden 1536] [--steps 4]
        [--formats fp8,nvfp4] [--cpu-time]

A Flux with random weights is written in 16 bits and in every format, and sampled by ComfyUI's own Euler sampler
without guidance. Each side (stock with the 16-bit model; ours with every mode) has a process of its own a round; they
change their order from round to round. Timed is the model's call in each step, by the wall clock (or in CPU time on a
machine that others use), after one step by itself that is not counted. A model whose one step takes longer than `SLOW`
seconds is left at that, and the step counts. Rounds after the first repeat stock and the default mode, whose ratio is a
goal.

First the results: the latent of every run is compared with the 16-bit model's. A stock result that is not what the
format's precision explains is reported as wrong and has no time; one of ours fails the benchmark.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quant_loader.benchmarks import children, common, in_process
from quant_loader.benchmarks.common import Cell, Goal, Plot, Result, Table, Wrong, say
from quant_loader.benchmarks.in_process import DENSE, MODES, Size

MODULE = "quant_loader.benchmarks.sample"
SIDES = ("stock", "ours")

QUICK = Size(768, 1, 1, 512, 64)
# A CPU without VNNI takes a minute for a step of stock's int8 in this width.
QUICK_VNNI = Size(1536, 1, 1, 512, 64)
FULL = Size(1536, 1, 2, 1024, 128)
FORMATS = ("int8_row", "int8_convrot", "fp8", "mxfp8", "nvfp4", "convrot_w4a4", "asym_w4a8", "quanto_int8")
INT8 = ("int8_row", "int8_convrot")
THROUGH_INT8 = ("fp8", "mxfp8", "nvfp4", "convrot_w4a4")

# Seconds: a step that takes longer is measured once.
SLOW = 3.0

# Largest relative L2 difference of the latent to the 16-bit model's, for two blocks: half of the error bound of one
# layer's output with its activations quantised as well. A latent keeps much of the noise: 0.25 to 0.6 of a layer's
# error were measured. The blocks' errors are independent, so that their squares add up. INT8 without rotation has the
# bound for heavy tails; W4A8's uniform grid, of 0.087 error, that of NVFP4.
MOST = {
    "int8_row": 0.015,
    "int8_convrot": 0.008,
    "fp8": 0.020,
    "mxfp8": 0.020,
    "nvfp4": 0.070,
    "convrot_w4a4": 0.140,
    "asym_w4a8": 0.070,
    "quanto_int8": 0.015,
}


#: After one step a latent has kept less of the noise than after three: 1.4 times their error was measured.
ONE_STEP = 1.5


def cases_of(side: str, formats: Sequence[str]) -> list[tuple[str, str]]:
    """(format, mode) of everything that a side runs; the 16-bit model first, in the process of the stock loader."""
    if side == "stock":
        return [(DENSE, ""), *((fmt, "") for fmt in formats)]
    return [(fmt, mode) for fmt in formats for mode in MODES]


def label(fmt: str, mode: str) -> str:
    return f"{fmt} {mode}".strip()


# --- one side, in a process of its own --------------------------------------------------------------------------------


def one_side(side: str, folder: Path, size: Size, steps: int, device: str, cases: list[tuple[str, str]]) -> Any:
    """Samples every case; the 16-bit model's latents stay in `folder` for the others to be compared with."""
    in_process.prepare(device)
    import torch
    from safetensors.torch import load_file, save_file

    truth_file = folder / "latents.safetensors"
    answers: dict[str, Any] = {}
    for fmt, mode in cases:
        try:
            patcher = in_process.load(side, in_process.file_of(folder, fmt), mode or "auto")
            first = sampled = in_process.sample(patcher, size, 1)
            if first.wall[0] < SLOW or fmt == DENSE:
                sampled = in_process.sample(patcher, size, steps)
        except in_process.STOCK_ERRORS as error:
            if side != "stock":
                raise
            answers[label(fmt, mode)] = {"failed": f"{type(error).__name__}: {error}"[:200]}
            continue
        if fmt == DENSE:
            save_file({str(len(run.wall)): run.latent for run in (first, sampled)}, truth_file)
        answers[label(fmt, mode)] = {
            "steps": len(sampled.wall),
            "wall": sampled.wall,
            "cpu": sampled.cpu,
            "error": in_process.relative(sampled.latent, load_file(truth_file)[str(len(sampled.wall))]),
            "kernel": kernels_of(patcher) if side == "ours" else "",
        }
        del patcher
        in_process.unload()
    return {"cases": answers, "threads": torch.get_num_threads()}


def kernels_of(patcher: Any) -> str:
    """What ran in the packed layers: `execution: operator`, the most frequent first."""
    from quant_loader.patching.kernel_report import ran

    groups = sorted(ran(patcher), key=lambda group: -group["calls"])
    return ", ".join(dict.fromkeys(f"{group['execution']}: {group['operator']}" for group in groups[:2]))


# --- all sides --------------------------------------------------------------------------------------------------------


def measure(size: Size, formats: Sequence[str], steps: int, rounds: int, device: str) -> dict[str, Any]:
    """Every round of every side: {"cases": {side: {label: {wall, cpu, error, ...}}}, "threads": n}."""
    found: dict[str, dict[str, Any]] = {side: {} for side in SIDES}
    threads = 0
    with tempfile.TemporaryDirectory(prefix="sample-") as name, children.host() as in_child:
        folder = Path(name)
        in_process.write_models(folder, in_process.flux_state_dict(size), tuple(formats))
        for turn in range(rounds):
            for side in SIDES if turn % 2 == 0 else reversed(SIDES):
                cases = [case for case in cases_of(side, formats) if due(case, turn, found[side].get(label(*case)))]
                if not cases:
                    continue
                order = {"side": side, "size": vars(size), "steps": steps, "device": device, "cases": cases}
                answer: Any = in_child(MODULE, "--one", json.dumps(order), "--folder", str(folder), timeout=3600)
                threads = answer["threads"]
                for key, case in answer["cases"].items():
                    kept = found[side].setdefault(key, {**case, "wall": [], "cpu": []})
                    for clock in ("wall", "cpu"):
                        kept[clock] += case.get(clock, [])
                say(f"  round {turn + 1}, {side}: {len(answer['cases'])} runs")
    return {"cases": found, "threads": threads}


def due(case: tuple[str, str], turn: int, known: dict[str, Any] | None) -> bool:
    """Whether a case runs in this round: all do in the first, then those of a goal that are neither slow nor wrong."""
    if turn == 0:
        return True
    return known is not None and case[1] in ("", "auto") and "failed" not in known and min(known["wall"]) < SLOW


def most_of(key: str, case: dict[str, Any], size: Size) -> float:
    """Largest error of the latent of a case."""
    depth = math.sqrt((size.double + size.single) / 2)
    return MOST[key.split()[0]] * depth * (ONE_STEP if case["steps"] == 1 else 1.0)


def check(found: dict[str, Any], size: Size) -> dict[str, str]:
    """Raises Wrong where ours is off; label -> what is wrong with the stock result."""
    wrong: dict[str, str] = {}
    for key, case in found["ours"].items():
        most = most_of(key, case, size)
        if not case["error"] <= most:
            raise Wrong(
                f"{key}: the latent is {case['error']:.3g} away from the 16-bit model's, expected {most:.3g} at most"
            )
    for key, case in found["stock"].items():
        if key == DENSE:
            continue
        if "failed" in case:
            wrong[key] = case["failed"]
        elif not case["error"] <= most_of(key, case, size):
            wrong[key] = (
                "latent not finite" if float(case["error"]) == float("inf") else f"latent off by {case['error']:.2g}"
            )
    return wrong


def seconds(case: dict[str, Any] | None, clock: str) -> float | None:
    return statistics.median(case[clock]) if case and case.get(clock) else None


def over(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b


def times_of(found: dict[str, Any], wrong: dict[str, str], clock: str) -> dict[str, dict[str, float | None]]:
    """label of ours -> seconds a step of ours, stock (None where wrong) and 16-bit."""
    dense = seconds(found["stock"][DENSE], clock)
    return {
        key: {
            "ours": seconds(case, clock),
            "stock": None if key.split()[0] in wrong else seconds(found["stock"].get(key.split()[0]), clock),
            DENSE: dense,
        }
        for key, case in found["ours"].items()
    }


def table(found: dict[str, Any], times: dict[str, dict[str, float | None]], wrong: dict[str, str], note: str) -> Table:
    rows: list[list[Cell]] = []
    for key, t in times.items():
        fmt, mode = key.split()
        stock = found["stock"].get(fmt, {})
        ours = found["ours"][key]
        rows.append(
            [
                fmt,
                mode,
                t["ours"],
                f"wrong: {wrong[fmt]}" if fmt in wrong else t["stock"],
                t[DENSE],
                over(t["ours"], t["stock"]),
                over(t["ours"], t[DENSE]),
                ours["error"],
                None if fmt in wrong else stock.get("error"),
                ours["kernel"],
            ]
        )
    columns = ["format", "mode", "ours, s", "stock, s", "16-bit, s", "ours / stock", "ours / 16-bit", "our error"]
    return Table("Seconds a step", [*columns, "stock error", "what ran"], rows, note)


def goals_of(times: dict[str, dict[str, float | None]], vnni: bool, on_cpu: bool) -> list[Goal]:
    """The default execution against stock; factors are stock / ours, so more is better."""
    auto = {key.split()[0]: t for key, t in times.items() if key.endswith(" auto")}
    speed = {fmt: factor for fmt, t in auto.items() if (factor := over(t["stock"], t["ours"])) is not None}
    goals = []
    if speed:
        worst = min(speed, key=lambda fmt: speed[fmt])
        goals.append(
            common.at_least(
                f"sampling in the default mode, times stock's speed, worst format ({worst})",
                1.0,
                round(speed[worst], 2),
                summary=True,
            )
        )
    if not on_cpu:
        return goals
    for formats, limit, name in ((INT8, 1.3, "int8"), (THROUGH_INT8, 2.5, "fp8, mxfp8, nvfp4, convrot_w4a4")):
        measured = {fmt: speed[fmt] for fmt in formats if fmt in speed}
        if not measured:
            continue
        worst = min(measured, key=lambda fmt: measured[fmt])
        why = ""
        if not vnni:
            shares = {fmt: [over(auto[fmt][side], auto[fmt][DENSE]) or 0.0 for side in SIDES] for fmt in measured}
            told = ", ".join(f"{fmt} {stock:.2f} and {ours:.2f}" for fmt, (stock, ours) in shares.items())
            why = (
                "The goal is one of CPUs with VNNI, which this one is not: its byte products (VPMADDUBSW) saturate at "
                "16 bits, so exact int8 sums run as float32 products, at about the speed of the 16-bit model's own "
                f"(which runs in float32 on this CPU). Steps of stock and of ours over the 16-bit model's: {told}."
            )
        goals.append(
            common.at_least(
                f"{name} on a CPU with VNNI, times stock's speed, worst ({worst})",
                limit,
                round(measured[worst], 2),
                why,
            )
        )
    return goals


def size_of(quick: bool) -> Size:
    """The model that this machine samples."""
    return (QUICK_VNNI if common.machine()["vnni"] else QUICK) if quick else FULL


def run(
    quick: bool,
    formats: Sequence[str] = FORMATS,
    size: Size | None = None,
    steps: int = 0,
    rounds: int = 0,
    device: str = "auto",
    clock: str = "wall",
) -> Result:
    """`quick`: 768 channels (1536 on a CPU with VNNI), three steps, two rounds; else 1536 channels, a block more, four
    steps, three rounds.
    """
    size = size or size_of(quick)
    measured = measure(size, formats, steps or (3 if quick else 4), rounds or (2 if quick else 3), device)
    found, threads = measured["cases"], measured["threads"]
    wrong = check(found, size)
    times = times_of(found, wrong, clock)
    machine = common.machine()
    on_cpu = device == "cpu" or str(machine["device"]).startswith("none")
    ran_on = f"{threads} threads, {'VNNI' if machine['vnni'] else 'no VNNI'}" if on_cpu else str(machine["device"])
    note = (
        f"A Flux of {size}: {size.operations / 1e9:.0f} GFLOP a step in linears. {ran_on}. Ratios are ours / stock "
        f"and ours / 16-bit: at most 1 is good. Medians of steps in {'CPU' if clock == 'cpu' else 'wall'} time, sides "
        "in turn in processes of their own. Errors: relative L2 of the latent against the 16-bit model's."
    )
    auto = [key for key in times if key.endswith(" auto")]
    return Result(
        "sample",
        "How long does a sampling step take, beside the stock loader and the 16-bit model?",
        {**machine, "threads": threads},
        [table(found, times, wrong, note)],
        {"size": vars(size), "clock": clock, "cases": found, "wrong": wrong},
        goals_of(times, bool(machine["vnni"]), on_cpu),
        [
            Plot(
                "sample",
                f"Seconds a step, default mode ({ran_on})",
                [key.split()[0] for key in auto],
                {
                    "ours": [times[key]["ours"] for key in auto],
                    "stock": [times[key]["stock"] for key in auto],
                    "16-bit": [times[key][DENSE] for key in auto],
                },
                y_label="seconds",
                log_y=True,
            )
        ],
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--formats", type=lambda text: text.split(","), default=FORMATS, help=", ".join(FORMATS))
    parser.add_argument("--hidden", type=int, default=0, help="channels, a multiple of 256")
    parser.add_argument("--tokens", type=int, default=0, help="image tokens")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--cpu-time", action="store_true", help="for a machine that others use (OMP_NUM_THREADS=1)")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one:
        order = options.one
        cases = [(fmt, mode) for fmt, mode in order["cases"]]
        size = Size(**order["size"])
        print(json.dumps(one_side(order["side"], options.folder, size, order["steps"], order["device"], cases)))
        return 0
    base = size_of(options.quick)
    size = Size(
        options.hidden or base.hidden, base.double, base.single, options.tokens or base.image_tokens, base.text_tokens
    )
    clock = "cpu" if options.cpu_time else "wall"
    return common.finish(
        lambda: run(options.quick, options.formats, size, options.steps, options.rounds, options.device, clock),
        options,
    )


if __name__ == "__main__":
    sys.exit(main())
