"""What a check costs, beside a JSON parse of the same header and a walk with the safetensors library, in the same run.

    python -I -m quant_loader.benchmarks.check [--quick] [--json FILE]

The files are sparse ConvRot INT8 checkpoints of 4096 x 4096 layers with three tensors each (weight, row scale, marker):
520 layers are 1,560 tensors and 8.7 GB. Two layouts: `by type`, as the safetensors library writes files (all scales,
then all weights, then all markers), and `by layer`, as streaming writers do, where every marker and every scale has a
place of its own between the weights. Every check reads the header, all markers and all row scales, from a file whose
pages are in memory, and its verdict is tested. A cold file is one whose pages were dropped first (`posix_fadvise`):
what it takes depends on the disk, so it is a wall-clock time.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from quant_loader.benchmarks import common
from quant_loader.benchmarks.common import Cell, Goal, Plot, Result, Table, Wrong, median_of, say
from quant_loader.checkpoint import cache, check

MARKER = json.dumps({"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256}).encode()
NAMES = ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")
SIZE = 4096
LAYERS = (33, 130, 520, 2080, 6666)
STANDARD = 520
ROUNDS, QUICK_ROUNDS = 60, 15
MILLISECONDS = 15.0
LINEAR = 1.3

Layout = Literal["by type", "by layer"]


@dataclass(frozen=True)
class Piece:
    """One tensor of a file: how it is stored, and its content where it is not left a hole."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    content: bytes = b""


def pieces(layers: int) -> Iterator[Piece]:
    """The tensors of a checkpoint of so many layers, layer by layer."""
    scales = struct.pack("<f", 0.004) * SIZE
    for i in range(layers):
        prefix = f"blocks.{i // len(NAMES)}.{NAMES[i % len(NAMES)]}"
        yield Piece(f"{prefix}.weight", "I8", (SIZE, SIZE), SIZE * SIZE)
        yield Piece(f"{prefix}.weight_scale", "F32", (SIZE, 1), 4 * SIZE, scales)
        yield Piece(f"{prefix}.comfy_quant", "U8", (len(MARKER),), len(MARKER), MARKER)


def write(path: Path, layers: int, layout: Layout) -> int:
    """A sparse checkpoint; returns the length of its header in bytes."""
    ordered = list(pieces(layers))
    if layout == "by type":
        ordered.sort(key=lambda piece: (("F32", "I8", "U8").index(piece.dtype), piece.name))
    header: dict[str, dict[str, object]] = {}
    offset = 0
    for piece in ordered:
        end = offset + piece.nbytes
        header[piece.name] = {"dtype": piece.dtype, "shape": piece.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for piece in ordered:
            if piece.content:
                out.write(piece.content)
            else:
                out.seek(piece.nbytes, os.SEEK_CUR)
        out.truncate(8 + len(text) + offset)
    return len(text)


def parse_header(path: Path, length: int) -> object:
    """Only the JSON of the header, as `json` reads it."""
    with path.open("rb") as opened:
        opened.seek(8)
        return json.loads(opened.read(length))


def read_small(path: Path, length: int) -> int:
    """Only the reads: every marker and every row scale by its place, nothing looked at. Returns the bytes."""
    with path.open("rb") as opened:
        opened.seek(8)
        entries = json.loads(opened.read(length)).values()
    spans = [entry["data_offsets"] for entry in entries if entry["dtype"] != "I8"]
    start, total = 8 + length, 0
    with path.open("rb", buffering=0) as opened:
        for begin, end in spans:
            opened.seek(start + begin)
            total += len(opened.read(end - begin))
    return total


def walk(path: Path) -> int:
    """Open with safetensors and ask for every tensor's dtype and shape."""
    from safetensors import safe_open

    count = 0
    with safe_open(path, framework="numpy") as opened:
        for name in opened.keys():  # noqa: SIM118 - not a mapping
            part = opened.get_slice(name)
            count += len(part.get_shape()) + len(part.get_dtype())
    return count


def fresh_check(path: Path, layers: int) -> None:
    """A check that remembers nothing. Raises `Wrong` when it does not find every layer sound."""
    cache.clear()
    report = check(path)
    if report.verdict != "ok" or len(report.layers) != layers:
        raise Wrong(f"the check of {layers} sound layers says: {report.summary}")


def dropped_from_memory(path: Path) -> bool:
    """Write the file back and drop its pages; False where the system has no such call."""
    if not hasattr(os, "posix_fadvise"):
        return False
    with path.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def cold_check(path: Path, layers: int, rounds: int) -> float | None:
    """Seconds by the wall clock of a check of a file that is not in memory, the median; None where that cannot be."""
    times = []
    for _ in range(rounds):
        if not dropped_from_memory(path):
            return None
        cache.clear()
        started = time.perf_counter()
        fresh_check(path, layers)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


@dataclass(frozen=True)
class Cost:
    """Milliseconds for one file: medians of processor time, but for the cold file."""

    layers: int
    layout: Layout
    gigabytes: float
    check: float
    parse: float
    walk: float
    reads: float
    repeated: float
    cold: float | None

    @property
    def tensors(self) -> int:
        return 3 * self.layers


def measure(folder: Path, layers: int, layout: Layout, rounds: int) -> Cost:
    path = folder / f"{layers}-{layout.replace(' ', '-')}.safetensors"
    length = write(path, layers, layout)
    fresh_check(path, layers)
    functions: dict[str, Callable[[], object]] = {
        "check": lambda: fresh_check(path, layers),
        "parse": lambda: parse_header(path, length),
        "walk": lambda: walk(path),
        "reads": lambda: read_small(path, length),
    }
    gc.collect()
    times = common.compare(functions, rounds, clock=time.process_time)
    check(path)
    repeated = median_of(lambda: check(path), rounds)
    cold = cold_check(path, layers, max(3, rounds // 10))
    size = path.stat().st_size
    path.unlink()
    medians = {name: 1e3 * statistics.median(values) for name, values in times.items()}
    medians["reads"] -= medians["parse"]
    return Cost(
        layers, layout, size / 1e9, **medians, repeated=1e3 * repeated, cold=None if cold is None else 1e3 * cold
    )


def growth_of(folder: Path, few: int, many: int, rounds: int) -> float:
    """Processor time a tensor of ``many`` layers over that of ``few``, by type: medians of checks in turn, so that a
    machine whose speed changes says nothing.
    """
    paths = {layers: folder / f"{layers}.safetensors" for layers in (few, many)}
    for layers, path in paths.items():
        write(path, layers, "by type")
    functions: dict[str, Callable[[], object]] = {
        str(layers): partial(fresh_check, path, layers) for layers, path in paths.items()
    }
    times = {
        int(layers): statistics.median(values) / int(layers)
        for layers, values in common.compare(functions, rounds, clock=time.process_time).items()
    }
    return times[many] / times[few]


def cost_table(costs: Sequence[Cost]) -> Table:
    rows: list[list[Cell]] = [
        [
            cost.tensors,
            f"{cost.gigabytes:.2f} GB",
            cost.layout,
            cost.check,
            cost.parse,
            cost.check / cost.parse,
            cost.walk,
            cost.check / cost.walk,
            cost.reads,
            1e3 * cost.check / cost.tensors,
            cost.repeated,
            cost.cold,
        ]
        for cost in costs
    ]
    columns = ["tensors", "size", "layout", "check, ms", "JSON parse, ms", "check / parse", "safetensors walk, ms"]
    columns += ["check / walk", "reads alone, ms", "check a tensor, us", "checked again, ms", "cold file, ms"]
    note = (
        "Medians of the processor time of alternating runs on a warm file, row scales included; the cold file by the "
        "wall clock. Ratios are check / other: smaller is better. The parse only reads the header's JSON and the walk "
        "only opens the file; neither judges anything nor reads a scale. Reads alone: the markers and row scales, one "
        "by one, not looked at. The garbage collector runs as it does in any program."
    )
    return Table("The cost of a check", columns, rows, note)


def goals(costs: Sequence[Cost], growth: float) -> list[Goal]:
    standard = {cost.layout: cost for cost in costs if cost.layers == STANDARD}
    explanations = {
        layout: f"the JSON parse of the header took {cost.parse:.1f} ms in the same run, and reading every marker and "
        f"row scale by itself {cost.reads:.1f} ms. Reading the header with numpy, neighbours in one read and fewer "
        "objects a tensor brought the check from 6.8 times the parse to "
        f"{cost.check / cost.parse:.1f}; the rest is spread over one Python step a tensor and a layer"
        for layout, cost in standard.items()
    }
    found = [
        common.at_most(
            f"{3 * STANDARD:,} tensors, {standard[layout].gigabytes:.1f} GB, {layout}: ms",
            MILLISECONDS,
            standard[layout].check,
            explanations[layout],
            summary=layout == "by type",
        )
        for layout in ("by type", "by layer")
    ]
    name = f"time a tensor, {3 * LAYERS[-1]:,} tensors / {3 * STANDARD:,}, checked in turn"
    found.append(common.at_most(name, LINEAR, growth, "the processor's caches hold the smaller file's tables only"))
    return found


def run(quick: bool) -> Result:
    """Files of 100 to 20,000 tensors in both layouts."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    costs = []
    with tempfile.TemporaryDirectory() as folder:
        for layers in LAYERS:
            layouts: tuple[Layout, ...] = ("by type", "by layer")
            for layout in layouts:
                say(f"{3 * layers} tensors, {layout}")
                costs.append(measure(Path(folder), layers, layout, rounds if layers <= STANDARD else rounds // 3))
        growth = growth_of(Path(folder), STANDARD, LAYERS[-1], rounds)
    by_type = [cost for cost in costs if cost.layout == "by type"]
    plot = Plot(
        "check",
        "A check grows with the number of tensors",
        [float(cost.tensors) for cost in by_type],
        {
            "check": [cost.check for cost in by_type],
            "JSON parse": [cost.parse for cost in by_type],
            "safetensors walk": [cost.walk for cost in by_type],
        },
        "tensors",
        "ms of processor time",
        kind="lines",
        log_x=True,
        log_y=True,
    )
    return Result(
        name="check",
        question="What does a check of a warm file cost, and does it grow with the number of tensors only?",
        machine=common.machine(),
        tables=[cost_table(costs)],
        data={"costs": [vars(cost) for cost in costs], "growth": growth},
        goals=goals(costs, growth),
        plots=[plot],
    )


def main(argv: Sequence[str] | None = None) -> int:
    return common.command_line(run, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
