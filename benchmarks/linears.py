"""The linears of `cpu.py` as a result beside the others: ours against the stock path and against a dense product.

    python -I -m quant_loader.benchmarks.linears [--quick] [--json FILE]

`cpu.py` has the measurement, and options for other shapes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

import torch
from quant_loader.benchmarks import common, cpu
from quant_loader.benchmarks.common import Cell, Plot, Result, Table, Wrong, say

SIZE, TOKENS = 3072, 512
QUICK_TOKENS = 256


def run(quick: bool) -> Result:
    """One square linear of Flux's width; `quick`: half the tokens, three repeats instead of seven."""
    tokens = QUICK_TOKENS if quick else TOKENS
    watch = cpu.Stopwatch(time.perf_counter, 3 if quick else 7)
    rows = []
    with torch.inference_mode():
        for row in cpu.measure(tokens, SIZE, SIZE, watch):
            say(f"  {cpu.line(row)}")
            if row.kernel.startswith("WRONG"):
                raise Wrong(f"{row.format}, {row.path}: off by {row.error:.2g} ({row.kernel})")
            rows.append(row)
    dense = next(row for row in rows if row.path == "bfloat16")
    lines: list[list[Cell]] = [
        [row.format, row.path, row.milliseconds, row.stock, row.bf16, row.kernel]
        for row in rows
        if row.format != "dense"
    ]
    table = Table(
        f"x [{tokens}, {SIZE}] times a weight [{SIZE}, {SIZE}], with bias",
        ["format", "path", "ms", "stock / ours", "bf16 / ours", "what ran"],
        lines,
        "Here ratios are speed-ups: above 1 ours is faster. Least of several runs of wall time, all threads. The dense "
        f"bf16 product takes {dense.milliseconds:.0f} ms. `int8`: the weight carried over to INT8 at every call; "
        "`int8 replaced`: once, as a loaded model does it; `exact`: decoded, dense product.",
    )
    served = {row.format: row for row in rows if row.path in ("auto", "int8 replaced") and row.stock is not None}
    speed_ups = {name: row.stock for name, row in served.items() if row.stock is not None}
    worst = min(speed_ups, key=lambda name: speed_ups[name])
    return Result(
        "linears",
        "How fast is one linear on this CPU, beside what the stock loader runs?",
        common.machine(),
        [table],
        {"rows": [asdict(row) for row in rows], "threads": torch.get_num_threads()},
        [
            common.at_least(
                f"slowest format of a loaded model ({worst}), stock / ours",
                1.0,
                round(speed_ups[worst], 2),
                "see the table",
                summary=True,
            )
        ],
        [
            Plot(
                "linears",
                f"One linear, {SIZE} x {SIZE}, {tokens} tokens: speed-up over the stock path",
                list(speed_ups),
                {"stock / ours": list(speed_ups.values())},
                y_label="times as fast",
                line={1.0: "stock"},
            )
        ],
    )


def main(argv: Sequence[str] | None = None) -> int:
    return common.command_line(run, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
