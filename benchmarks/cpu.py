"""Linears on this machine's CPU, per format: ours beside a dense linear and beside the stock path (ComfyUI on
comfy-kitchen's eager backend).

    python -I -m quant_loader.benchmarks.cpu [--quick] [--json FILE] [--tokens 64 512] [--shape 3072x3072] [--cpu-time]

Results are checked: one of ours that is off fails the benchmark, a stock result that is off has no time in the table.
Times are medians of repeated calls, all paths of a format and its stock path in turn. A stock product of seconds
(without VNNI, int8 takes a minute) is timed once, on `STOCK_ROWS` of the activation rows, and the time multiplied.
Rows:

- ``auto``: what a loaded model runs here by default; a weight that is carried over to INT8 rows is so once;
- ``int8``: the same with the ``int8`` execution;
- ``int8 each call``: carried over at every call, as where memory is short;
- ``exact``: decoded weight, dense product.

The goals (M = 512, a CPU with VNNI): int8 rows 1.5x bf16 and 1.5x stock; with ConvRot bf16's speed and 1.4x stock; fp8,
mxfp8, nvfp4 and convrot_w4a4 through int8 3x stock. A CPU without VNNI has no exact byte products, so the same factors
are listed for the default path, with what stands in the way.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from quant_loader import kernels
from quant_loader.benchmarks import common
from quant_loader.benchmarks.common import Cell, Goal, Plot, Result, Table, Wrong, say
from quant_loader.checkpoint import LayerSpec

# Ours, against the float32 reference of the same arithmetic: summation order only.
WRONG = 1e-5
# Stock, against the product of the decoded weight: the rounding of activations to 8 bits, or (convrot_w4a4) to 4.
STOCK_WRONG = {"convrot_w4a4": 0.2}
STOCK_WRONG_ELSE = 0.02

TOKENS = 512  # of the goals
SLOW = 3.0  # seconds: a stock call that is not repeated, nor made on more than STOCK_ROWS rows
STOCK_ROWS = 64
INT8_CARRIED = ("float8_e4m3fn", "mxfp8", "nvfp4", "convrot_w4a4")


@dataclass(frozen=True)
class Row:
    """One path. ``bf16``, ``fp32`` and ``stock`` are speed-ups, their time over ours; ``stock`` is None where wrong.

    ``stock_rows``: the activation rows on which stock was timed.
    """

    format: str
    path: str
    tokens: int
    N: int
    K: int
    kernel: str
    milliseconds: float
    bf16: float
    fp32: float
    stock: float | None
    error: float
    stock_error: float | None = None
    stock_rows: int | None = None

    @property
    def stock_milliseconds(self) -> float | None:
        return None if self.stock is None else self.stock * self.milliseconds


@dataclass(frozen=True)
class Stopwatch:
    """``clock``: wall time, or this process's CPU time where other programs share the machine."""

    clock: Callable[[], float]
    repeats: int

    def milliseconds(self, function: Callable[[], object]) -> float:
        """Of one call."""
        begun = self.clock()
        function()
        return (self.clock() - begun) * 1e3

    def in_turn(self, functions: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        """Milliseconds of each function, the median of calls in turn, so that drift hits all: ``repeats`` rounds after
        one that is not counted, but no more than three where a function takes more than a second on average."""
        for function in functions.values():
            function()
        times: dict[str, list[float]] = {name: [] for name in functions}
        started = self.clock()
        for turn in range(self.repeats):
            for name, function in functions.items():
                times[name].append(self.milliseconds(function))
            if turn >= 2 and self.clock() - started > 3 * len(functions):
                break
        return {name: statistics.median(values) for name, values in times.items()}

    def median(self, function: Callable[[], object]) -> float:
        """:meth:`in_turn` for one function."""
        return self.in_turn({"": function})[""]


def layers(w: torch.Tensor) -> Iterator[tuple[str, LayerSpec, dict[str, torch.Tensor], Callable[..., torch.Tensor]]]:
    """(label, declaration, tensors, stock linear) of every format that comfy-kitchen can write."""
    import comfy_kitchen as ck

    N, K = w.shape

    def spec(name: str, **annotations: object) -> LayerSpec:
        return LayerSpec("layer", name, (N, K), annotations=annotations)

    def dequantising(dequantise: Callable[[], torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda x, bias: torch.nn.functional.linear(x, dequantise(), bias)

    codes, scale = ck.quantize_int8_rowwise(w)
    yield (
        "int8 row",
        spec("int8_tensorwise"),
        {"weight": codes, "weight_scale": scale},
        lambda x, bias: ck.int8_linear(x, codes, scale, bias, x.dtype),
    )
    from comfy_kitchen.backends.eager.quantization import quantize_int8_convrot_weight

    turned, turned_scale = quantize_int8_convrot_weight(w, 256)
    yield (
        "int8 ConvRot",
        spec("int8_tensorwise", convrot=True, convrot_groupsize=256),
        {"weight": turned, "weight_scale": turned_scale},
        lambda x, bias: ck.int8_linear(x, turned, turned_scale, bias, x.dtype, True, 256),
    )
    packed, row_scale = ck.quantize_convrot_w4a4_weight(w)
    yield (
        "convrot_w4a4",
        spec("convrot_w4a4", convrot_groupsize=256),
        {"weight": packed, "weight_scale": row_scale},
        lambda x, bias: ck.convrot_w4a4_linear(x, packed, row_scale, bias),
    )
    fp8_scale = w.abs().amax() / 448
    fp8 = (w / fp8_scale).to(torch.float8_e4m3fn)
    yield (
        "float8_e4m3fn",
        spec("float8_e4m3fn"),
        {"weight": fp8, "weight_scale": fp8_scale},
        dequantising(lambda: ck.dequantize_per_tensor_fp8(fp8, fp8_scale, w.dtype)),
    )
    mx, tiles = ck.quantize_mxfp8(w)
    yield (
        "mxfp8",
        spec("mxfp8"),
        {"weight": mx, "weight_scale": tiles},
        dequantising(lambda: ck.dequantize_mxfp8(mx, tiles, w.dtype)),
    )
    factor = w.abs().amax() / (448 * 6)
    fp4, fp4_tiles = ck.quantize_nvfp4(w, factor)
    yield (
        "nvfp4",
        spec("nvfp4"),
        {"weight": fp4, "weight_scale": fp4_tiles, "weight_scale_2": factor},
        dequantising(lambda: ck.dequantize_nvfp4(fp4, factor, fp4_tiles, w.dtype)),
    )


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def measure(tokens: int, N: int, K: int, watch: Stopwatch) -> Iterator[Row]:
    """Every row of one shape. Raises Wrong where one of ours is off."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, K, generator=generator)
    w = torch.randn(N, K, generator=generator) / K**0.5
    bias = torch.randn(N, generator=generator)
    fp32 = watch.median(lambda: torch.nn.functional.linear(x, w, bias))
    x16, w16, bias16 = x.bfloat16(), w.bfloat16(), bias.bfloat16()
    bf16 = watch.median(lambda: torch.nn.functional.linear(x16, w16, bias16))
    yield Row("dense", "float32", tokens, N, K, "linear", fp32, bf16 / fp32, 1.0, None, 0.0)
    yield Row("dense", "bfloat16", tokens, N, K, "linear", bf16, 1.0, fp32 / bf16, None, 0.0)
    facts = kernels.device_facts("cpu")
    for label, spec, tensors, stock in layers(w):
        exact = kernels.reference_linear(x, spec, tensors, bias, "exact")
        functions: dict[str, Callable[[], object]] = {
            "float32": partial(torch.nn.functional.linear, x, w, bias),
            "bfloat16": partial(torch.nn.functional.linear, x16, w16, bias16),
        }
        stock_rows = min(tokens, STOCK_ROWS)
        begun = watch.clock()
        result = stock(x[:stock_rows], bias)
        stock_time = (watch.clock() - begun) * 1e3 * tokens / stock_rows
        fast = stock_time < 1e3 * SLOW
        if fast:
            stock_rows, result = tokens, stock(x, bias)
        stock_error = relative(result, exact[:stock_rows])
        right = stock_error <= STOCK_WRONG.get(label, STOCK_WRONG_ELSE)
        if right and fast:
            functions["stock"] = partial(stock, x, bias)
        truths = {"exact": exact}
        ran: dict[str, tuple[str, float]] = {}
        for path in ("auto", "int8", "int8 each call", "exact"):
            declared, held = spec, tensors
            mode: kernels.Mode = "auto" if path == "auto" else "exact" if path == "exact" else "int8"
            operation = kernels.prepare(spec, facts, mode)
            execution = operation.plan.execution
            is_carried = execution == "int8" and not kernels.FORMATS[spec.format].has_int8_codes
            if path == "int8 each call" and not is_carried:
                continue
            if execution not in truths:
                truths[execution] = kernels.reference_linear(x, spec, tensors, bias, execution)
            if is_carried and path != "int8 each call":
                rows = kernels.to_int8_rows(spec, tensors)
                declared, held = kernels.int8_rows_spec(spec, rows.group), rows.tensors()
                operation = kernels.prepare(declared, facts)
            error = relative(operation(x, held, bias), truths[execution])
            if not error <= WRONG:
                raise Wrong(f"{label}, {path}, M = {tokens}: {operation.plan.operator} is off by {error:.2g}")
            functions[path] = partial(operation, x, held, bias)
            ran[path] = f"{execution}: {operation.plan.operator}", error
        medians = watch.in_turn(functions)
        compared = medians.get("stock", stock_time) if right else None
        for path, (kernel, error) in ran.items():
            spent = medians[path]
            yield Row(
                label,
                path,
                tokens,
                N,
                K,
                kernel,
                spent,
                medians["bfloat16"] / spent,
                medians["float32"] / spent,
                None if compared is None else compared / spent,
                error,
                stock_error,
                stock_rows,
            )


def stock_cell(row: Row) -> Cell:
    """Stock's milliseconds, with what they are multiplied from; why there are none; nothing for a dense linear."""
    if row.stock_error is None:
        return None
    if row.stock_milliseconds is None:
        return f"wrong, off by {row.stock_error:.2g}"
    if row.stock_rows == row.tokens:
        return row.stock_milliseconds
    return f"{common.cell(row.stock_milliseconds)} ({row.stock_rows} rows x {row.tokens / (row.stock_rows or 1):g})"


def table(rows: Sequence[Row], tokens: int, note: str) -> Table:
    cells: list[list[Cell]] = [
        [
            row.format,
            row.path,
            row.milliseconds,
            stock_cell(row),
            1 / row.stock if row.stock else None,
            1 / row.bf16,
            1 / row.fp32,
            row.kernel,
        ]
        for row in rows
        if row.tokens == tokens
    ]
    columns = ["format", "path", "ms", "stock, ms", "ours / stock", "ours / bf16", "ours / float32", "what ran"]
    return Table(f"M = {tokens}, K = {rows[0].K}, N = {rows[0].N}", columns, cells, note)


def int_mm_milliseconds(N: int, K: int) -> float:
    """One ``torch._int_mm`` of 64 tokens, what int8 on this CPU costs when it is not emulated in float32."""
    codes = torch.randint(-127, 128, (N, K), dtype=torch.int8)
    x = torch.randint(-127, 128, (64, K), dtype=torch.int8)
    started = time.perf_counter()
    torch._int_mm(x, codes.t())
    return (time.perf_counter() - started) * 1e3


def goals_of(rows: Sequence[Row], vnni: bool, int_mm: float) -> list[Goal]:
    """The factors at `TOKENS`: stock / ours and bf16 / ours, so more is better."""
    here = {(row.format, row.path): row for row in rows if row.tokens == TOKENS}
    if not here:
        return []
    default = {fmt: here[fmt, "auto"] for fmt in ("int8 row", "int8 ConvRot", *INT8_CARRIED)}
    without = "" if vnni else " (this CPU has no VNNI)"
    wanted: list[tuple[str, float, float, str]] = []
    for fmt, to_bf16, to_stock in (("int8 row", 1.5, 1.5), ("int8 ConvRot", 1.0, 1.4)):
        row = default[fmt]
        wanted.append((f"{fmt}, times bf16's speed", to_bf16, row.bf16, ""))
        if row.stock:
            wanted.append((f"{fmt}, times stock's speed", to_stock, row.stock, ""))
    for fmt in INT8_CARRIED:
        row = default[fmt]
        if row.stock:
            share = f" Over a float32 linear, stock takes {row.stock / row.fp32:.2f} and ours {1 / row.fp32:.2f}."
            wanted.append((f"{fmt}, times stock's speed", 3.0, row.stock, share))
    small = next((r for r in rows if (r.format, r.path, r.tokens) == ("dense", "float32", 64)), None)
    beside = f", {int_mm / small.milliseconds:.0f} times a float32 product" if small else ""
    why = (
        "The goal is one of CPUs with VNNI. This one lacks VPDPBUSD, the exact byte product, so int8 sums run as "
        "float32 products, at about the speed of a float32 linear. torch._int_mm at M = 64 takes "
        f"{int_mm:.0f} ms here{beside}. (Stock's int8 takes longer still: it copies the weight transposed for that "
        "product, and in this layout PyTorch falls back to a plain loop.)"
    )
    goals = [
        common.at_least(f"M = {TOKENS}: {name}{without}", limit, round(factor, 2), "" if vnni else why + share)
        for name, limit, factor, share in wanted
    ]
    slowest = min((r for r in default.values() if r.stock), key=lambda r: r.stock or 0.0)
    assert slowest.stock is not None
    goals.append(
        common.at_least(
            f"M = {TOKENS}: default path, times stock's speed, worst format ({slowest.format})",
            1.0,
            round(slowest.stock, 2),
            summary=True,
        )
    )
    return goals


def run(
    quick: bool,
    tokens: Sequence[int] = (),
    shape: tuple[int, int] = (3072, 3072),
    repeats: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> Result:
    """`quick`: 64 and 512 tokens, up to nine calls a path; else 1024 tokens as well, up to fifteen."""
    N, K = shape
    tokens = tuple(tokens) or ((64, 512) if quick else (64, 512, 1024))
    watch = Stopwatch(clock, repeats or (9 if quick else 15))
    rows: list[Row] = []
    with torch.inference_mode():
        for M in tokens:
            rows += measure(M, N, K, watch)
            say(f"  M = {M}: {sum(row.tokens == M for row in rows)} paths")
        vnni = bool(kernels.device_facts("cpu").vnni)
        int_mm = 0.0 if vnni else int_mm_milliseconds(N, K)
    threads = torch.get_num_threads()
    measured = "CPU" if clock is time.process_time else "wall"
    note = (
        f"Ratios are ours / stock, / bfloat16 and / float32: at most 1 is good. Medians of the {measured} time of "
        f"repeated calls, float32 in and out, {threads} threads, {'VNNI' if vnni else 'no VNNI'}."
    )
    largest = [row for row in rows if row.tokens == tokens[-1] and row.path == "auto"]
    return Result(
        "cpu",
        "How fast is one linear on the CPU, beside dense products and the stock path?",
        {**common.machine(), "threads": threads},
        [table(rows, M, note) for M in tokens],
        {"rows": [asdict(row) for row in rows], "int_mm_milliseconds": int_mm},
        goals_of(rows, vnni, int_mm),
        [
            Plot(
                "cpu",
                f"One linear, M = {tokens[-1]}, K = {K}, N = {N}, default path",
                [row.format for row in largest],
                {
                    "ours": [row.milliseconds for row in largest],
                    "stock": [row.stock_milliseconds for row in largest],
                    "float32": [row.fp32 * row.milliseconds for row in largest],
                },
                y_label="milliseconds",
                log_y=True,
            )
        ],
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[], help="activation rows M")
    parser.add_argument("--shape", default="3072x3072", help="NxK of the weight")
    parser.add_argument("--repeats", type=int, default=0, help="most calls of a path")
    parser.add_argument("--threads", type=int, help="torch threads; all by default")
    parser.add_argument(
        "--cpu-time", action="store_true", help="count CPU time; for a machine that others use (with --threads 1)"
    )
    options = parser.parse_args(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    N, K = map(int, options.shape.lower().split("x"))
    clock = time.process_time if options.cpu_time else time.perf_counter
    return common.finish(lambda: run(options.quick, options.tokens, (N, K), options.repeats, clock), options)


if __name__ == "__main__":
    sys.exit(main())
