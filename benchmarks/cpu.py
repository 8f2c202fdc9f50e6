"""Linears on this machine's CPU, per format: ours beside a dense linear and beside the stock path (ComfyUI on
comfy-kitchen's eager backend).

    .venv/bin/python benchmarks/cpu.py                        # K = N = 3072 at 64 and 512 tokens
    .venv/bin/python benchmarks/cpu.py --tokens 1024 --shape 12288x3072 --json cpu.json

Correctness first: a path whose result is off is reported as wrong and not timed. Times are the least of several
repeats. Rows:

- ``auto``: what the dispatcher chooses here;
- ``int8``: carried over to INT8 rows at every call; ``int8 replaced``: the weight carried over once, as a loaded model
does;
- ``exact``: decoded weight, dense product.

Ratios above 1 mean that ours is faster. The goals (M = 512, a CPU with VNNI): int8 rows 1.5x bf16 and 1.5x stock; with
ConvRot bf16's speed and 1.4x stock; fp8, mxfp8, nvfp4 and convrot_w4a4 through int8 3x stock.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from quant_loader import kernels
from quant_loader.checkpoint import LayerSpec

# Against the float32 reference of the same arithmetic: summation order only.
WRONG = 1e-5


@dataclass(frozen=True)
class Row:
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


@dataclass(frozen=True)
class Stopwatch:
    """``clock``: wall time, or this process's CPU time where other programs share the machine."""

    clock: Callable[[], float]
    repeats: int

    def least(self, function: Callable[[], object]) -> float:
        """Milliseconds of the fastest of ``repeats`` calls, after one that is not counted."""
        function()
        times = []
        for _ in range(self.repeats):
            start = self.clock()
            function()
            times.append(self.clock() - start)
        return min(times) * 1e3


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


def measure(tokens: int, N: int, K: int, watch: Stopwatch) -> Iterator[Row]:
    """Every row of one shape."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, K, generator=generator)
    w = torch.randn(N, K, generator=generator) / K**0.5
    bias = torch.randn(N, generator=generator)
    fp32 = watch.least(lambda: torch.nn.functional.linear(x, w, bias))
    x16, w16, bias16 = x.bfloat16(), w.bfloat16(), bias.bfloat16()
    bf16 = watch.least(lambda: torch.nn.functional.linear(x16, w16, bias16))
    yield Row("dense", "float32", tokens, N, K, "linear", fp32, bf16 / fp32, 1.0, None, 0.0)
    yield Row("dense", "bfloat16", tokens, N, K, "linear", bf16, 1.0, fp32 / bf16, None, 0.0)
    facts = kernels.device_facts("cpu")
    for label, spec, tensors, stock in layers(w):
        stock_time = watch.least(lambda stock=stock: stock(x, bias))
        for path in ("auto", "int8", "int8 replaced", "exact"):
            declared, held = spec, tensors
            if path == "int8 replaced":
                if kernels.FORMATS[spec.format].int8_is_native:
                    continue
                rows = kernels.to_int8_rows(spec, tensors)
                declared, held = kernels.int8_rows_spec(spec, rows.group), rows.tensors()
            mode = path if path in ("auto", "exact") else "int8"
            operation = kernels.prepare(declared, facts, mode)
            truth = kernels.reference_linear(x, declared, held, bias, operation.plan.execution)
            error = float((operation(x, held, bias) - truth).norm() / truth.norm())
            if error > WRONG:
                yield Row(label, path, tokens, N, K, f"WRONG: {operation.plan.operator}", float("nan"), 0, 0, 0, error)
                continue
            spent = watch.least(lambda op=operation, held=held: op(x, held, bias))
            kernel = f"{operation.plan.execution}: {operation.plan.operator}"
            yield Row(label, path, tokens, N, K, kernel, spent, bf16 / spent, fp32 / spent, stock_time / spent, error)


HEADER = (
    "| format | path | M | N | K | ms | x bf16 | x fp32 | x stock | kernel |\n|---|---|---|---|---|---|---|---|---|---|"
)


def line(row: Row) -> str:
    """A row of the Markdown table."""
    stock = "" if row.stock is None else f"{row.stock:.2f}"
    return (
        f"| {row.format} | {row.path} | {row.tokens} | {row.N} | {row.K} | {row.milliseconds:.1f} "
        f"| {row.bf16:.2f} | {row.fp32:.2f} | {stock} | {row.kernel} |"
    )


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns 1 when a path was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 512], help="activation rows M")
    parser.add_argument("--shape", default="3072x3072", help="NxK of the weight")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, help="torch threads; all by default")
    parser.add_argument(
        "--cpu-time", action="store_true", help="count CPU time; for a machine that others use (with --threads 1)"
    )
    parser.add_argument("--json", help="write the rows to this file as well")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    N, K = map(int, options.shape.lower().split("x"))
    vnni = "VNNI" if kernels.device_facts("cpu").vnni else "no VNNI"
    machine = platform.processor() or platform.machine()
    print(f"{machine}, {torch.get_num_threads()} threads, {vnni}, torch {torch.__version__}\n")
    watch = Stopwatch(time.process_time if options.cpu_time else time.perf_counter, options.repeats)
    print(HEADER)
    rows = []
    with torch.inference_mode():
        for tokens in options.tokens:
            for row in measure(tokens, N, K, watch):
                rows.append(row)
                print(line(row), flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(
                {"threads": torch.get_num_threads(), "vnni": vnni == "VNNI", "rows": [asdict(r) for r in rows]},
                file,
                indent=1,
            )
    return int(any(row.kernel.startswith("WRONG") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
