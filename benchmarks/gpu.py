"""One prepared run on one GPU, under ten minutes: correctness, linears per format and Flux.1 shape, a sweep of tiles,
bandwidth.

    python benchmarks/gpu.py --out results.json               # on the GPU
    python benchmarks/gpu.py --dry-run                        # the same program on a CPU with tiny shapes

Sections run in this order, each within its own time limit, and the file is written after each, so a run that is cut
short keeps what it has:

1. ``correctness``: every format, execution and backend that this device can take, against the float32 reference;
   nothing is timed before it and a wrong kernel is left out of the timings. 2. ``linears``: M = 4608 and 512 on
   Flux.1's linears; each backend of each format beside bf16, comfy-kitchen's own operator and the stock path
   (comfy-kitchen or plain torch decodes the whole weight, then a 16-bit product); the roofline of the arithmetic beside
   each. 3. ``bandwidth``: row quantisers with and without ConvRot, decoders, against a copy of the same bytes. 4.
   ``sweep``: our INT8 product over tiles; the best per shape in the form that the schedule table reads.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from quant_loader import kernels
from quant_loader.checkpoint import LayerSpec
from quant_loader.kernels import triton_ops
from quant_loader.kernels.retire import KERNEL_ERRORS

FLUX = [(9216, 3072), (3072, 3072), (12288, 3072), (3072, 12288), (21504, 3072), (3072, 15360)]  # N, K
TOKENS = [4608, 512]
GOALS = {
    "int8 over bf16": 1.3,
    "int8 over comfy-kitchen": 1.0,
    "ConvRot and quantise, share of copy bandwidth": 0.6,
    "nvfp4 and fp8 through int8 over the stock dequantise path": 1.3,
}

# Dense peaks of the data sheets in TFLOP/s (bf16, int8, fp8) and memory in TB/s, by compute capability and a part of
# the name.
PEAKS = {
    "H200": (989, 1979, 1979, 4.8),
    "H100": (989, 1979, 1979, 3.35),
    "A100": (312, 624, 312, 2.0),
    "B200": (2250, 4500, 4500, 8.0),
    "RTX 3090": (71, 284, 71, 0.94),
    "RTX 4090": (165, 661, 330, 1.0),
    "RTX 5090": (210, 838, 419, 1.8),
}
# Relative error against the reference of the same arithmetic, by dtype: output rounding, and codes that differ by one.
TOLERANCE = {torch.float16: 3e-3, torch.bfloat16: 1.2e-2, torch.float32: 5e-4}


class Clock:
    """Milliseconds of a call: the median over CUDA events, or wall time in a dry run."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def __call__(self, function: Callable[[], object], budget_s: float = 0.25) -> float:
        function()
        if not self.cuda:
            start = time.perf_counter()
            function()
            return (time.perf_counter() - start) * 1e3
        function()
        torch.cuda.synchronize()
        times: list[float] = []
        stop = time.perf_counter() + budget_s
        while len(times) < 5 or (time.perf_counter() < stop and len(times) < 50):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            function()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return statistics.median(times)


def quantised(name: str, w: torch.Tensor) -> tuple[LayerSpec, dict[str, torch.Tensor]]:
    """A layer of format ``name`` from a float32 weight on any device, by the formulas of the formats in plain torch."""
    from quant_loader.kernels.formats import quantize
    from quant_loader.kernels.formats.rotation import rotate

    N, K = w.shape
    group = next(g for g in (256, 64, 16) if K % g == 0)
    annotations: dict[str, Any] = {}
    if name == "int8_tensorwise":
        codes, scale = quantize.int8_rows(rotate(w, group))
        tensors = {"weight": codes, "weight_scale": scale}
        annotations = {"convrot": True, "convrot_groupsize": group}
    elif name == "int8 row":
        codes, scale = quantize.int8_rows(w)
        name, tensors = "int8_tensorwise", {"weight": codes, "weight_scale": scale}
    elif name == "convrot_w4a4":
        codes, scale = quantize.int4_rows(rotate(w, group))
        tensors = {"weight": (codes[:, 0::2] & 15) | (codes[:, 1::2] << 4), "weight_scale": scale.reshape(-1)}
        annotations = {"convrot_groupsize": group}
    elif name == "asym_w4a8_int8":
        codes, scale = quantize.int4_rows(rotate(w, group))
        unsigned = (codes + 8).view(torch.uint8)
        ones = torch.full((N, K // 16), 16.0, device=w.device).to(torch.float8_e4m3fn)
        tensors = {"weight": (unsigned[:, 0::2] | (unsigned[:, 1::2] << 4)).view(torch.int8), "weight_s_rel": ones}
        tensors["weight_s_channel"] = scale.reshape(-1) / 16
        annotations = {"convrot_groupsize": group, "group_size": 16}
    elif name == "float8_e4m3fn":
        scale = w.abs().amax() / 448
        tensors = {"weight": (w / scale).to(torch.float8_e4m3fn), "weight_scale": scale}
    elif name == "mxfp8":
        blocks = w.reshape(N, K // 32, 32)
        exponent = torch.ceil(torch.log2(blocks.abs().amax(2) / 448)).clamp(-126, 127)
        codes8 = (blocks / torch.exp2(exponent)[..., None]).to(torch.float8_e4m3fn).reshape(N, K)
        tensors = {"weight": codes8, "weight_scale": tiled((exponent + 127).to(torch.uint8))}
    else:
        factor = w.abs().amax() / (448 * 6)
        values, scale = quantize.nvfp4_values(w, factor)
        code = torch.bucketize(values.abs(), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=w.device))
        code = (code | (values < 0).to(code.dtype) << 3).to(torch.uint8)
        tensors = {"weight": (code[:, 0::2] << 4) | code[:, 1::2], "weight_scale_2": factor}
        tensors["weight_scale"] = tiled(scale.to(torch.float8_e4m3fn).view(torch.uint8))
    return LayerSpec("layer", name, (N, K), annotations=annotations), tensors


def tiled(scale: torch.Tensor) -> torch.Tensor:
    """The 128 x 4 image of scale bytes [N, C]."""
    N, C = scale.shape
    rows, columns = -(-N // 128) * 128, -(-C // 4) * 4
    plain = torch.nn.functional.pad(scale, (0, columns - C, 0, rows - N))
    return plain.reshape(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4).reshape(rows, columns).contiguous()


FORMATS = ["int8_tensorwise", "int8 row", "convrot_w4a4", "asym_w4a8_int8", "float8_e4m3fn", "mxfp8", "nvfp4"]


def routes(spec: LayerSpec, facts: kernels.DeviceFacts) -> Iterator[tuple[str, str]]:
    """(execution, backend) of every way that fits this layer on this device."""
    for execution, backend in itertools.product(("native", "int8", "exact"), ("kitchen", "triton", "torch")):
        try:
            found = kernels.plan(spec, facts, execution, backend)
        except ValueError:
            continue
        if found.execution == execution or (execution == "int8" and kernels.FORMATS[spec.format].int8_is_native):
            if execution == "int8" and found.execution == "native":
                continue
            yield execution, backend


def correctness(
    device: torch.device, facts: kernels.DeviceFacts, shapes: list[tuple[int, int, int]]
) -> list[dict[str, Any]]:
    """Every route against the reference, at every shape and dtype."""
    rows = []
    for (M, N, K), name in itertools.product(shapes, FORMATS):
        w = torch.randn(N, K, device=device) / K**0.5
        spec, tensors = quantised(name, w)
        for dtype, (execution, backend) in itertools.product(TOLERANCE, list(routes(spec, facts))):
            x = torch.randn(M, K, device=device).to(dtype)
            bias = torch.randn(N, device=device).to(dtype)
            row: dict[str, Any] = {"format": name, "execution": execution, "backend": backend, "M": M, "N": N, "K": K}
            row["dtype"] = str(dtype).removeprefix("torch.")
            try:
                y = kernels.linear(x, spec, tensors, bias, backend, execution)
                truth = kernels.reference_linear(x, spec, tensors, bias, execution)
                row["error"] = float((y.float() - truth).norm() / truth.norm())
                row["fine"] = bool(row["error"] <= TOLERANCE[dtype] and torch.isfinite(y).all())
            except KERNEL_ERRORS as error:
                row |= {"error": None, "fine": False, "raised": f"{type(error).__name__}: {error}"[:300]}
            rows.append(row)
    return rows


def roofline(
    name: str, execution: str, M: int, N: int, K: int, peak: tuple[float, float, float, float] | None
) -> float | None:
    """The least possible milliseconds at the data sheet's peaks, or None for a card that is not in the table."""
    if peak is None:
        return None
    bf16, int8, fp8, memory = peak
    rate = {"exact": bf16, "int8": int8}.get(execution, fp8 if name.startswith(("float8", "mxfp8")) else int8)
    bits = {"convrot_w4a4": 4, "asym_w4a8_int8": 4.5, "nvfp4": 4.5}.get(name, 8)
    traffic = 2 * M * K + 2 * M * N + N * K * bits / 8
    return max(2 * M * N * K / (rate * 1e12), traffic / (memory * 1e12)) * 1e3


def stock_linear(name: str, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> Callable[..., torch.Tensor] | None:
    """What ComfyUI does with the format where it has no native kernel: decode the weight, then a 16-bit product."""
    import comfy_kitchen as ck

    weight = tensors["weight"]
    if name == "float8_e4m3fn":
        return lambda x, b: torch.nn.functional.linear(
            x, ck.dequantize_per_tensor_fp8(weight, tensors["weight_scale"], dtype), b
        )
    if name == "mxfp8":
        scale = tensors["weight_scale"].view(torch.float8_e8m0fnu)
        return lambda x, b: torch.nn.functional.linear(x, ck.dequantize_mxfp8(weight, scale, dtype), b)
    if name == "nvfp4":
        scale = tensors["weight_scale"].view(torch.float8_e4m3fn)
        factor = tensors["weight_scale_2"]
        return lambda x, b: torch.nn.functional.linear(x, ck.dequantize_nvfp4(weight, factor, scale, dtype), b)
    return None


def linears(
    device: torch.device,
    facts: kernels.DeviceFacts,
    tokens: list[int],
    shapes: list[tuple[int, int]],
    wrong: set[tuple[str, str, str]],
    deadline: float,
) -> list[dict[str, Any]]:
    """Times of every correct route; ``wrong``: (format, execution, backend) to leave out."""
    clock, rows = Clock(device), []
    peak = next((peaks for part, peaks in PEAKS.items() if part in facts.name), None)
    dtype = torch.bfloat16
    for M, (N, K) in itertools.product(tokens, shapes):
        x = torch.randn(M, K, device=device, dtype=dtype)
        bias = torch.randn(N, device=device, dtype=dtype)
        w = torch.randn(N, K, device=device) / K**0.5
        w16 = w.to(dtype)
        dense = clock(lambda x=x, w16=w16, bias=bias: torch.nn.functional.linear(x, w16, bias))
        shape = {"M": M, "N": N, "K": K}
        rows.append({"format": "bf16", "execution": "dense", "backend": "torch", **shape, "ms": dense,
                     "roofline_ms": roofline("bf16", "exact", M, N, K, peak)})  # fmt: skip
        for name in FORMATS:
            if time.monotonic() > deadline:
                rows.append({"format": name, **shape, "skipped": "the section's time is up"})
                continue
            spec, tensors = quantised(name, w)
            stock = stock_linear(name, tensors, dtype)
            stock_ms = None if stock is None else clock(lambda x=x, b=bias, f=stock: f(x, b))
            candidates = [(execution, backend, spec, tensors) for execution, backend in routes(spec, facts)]
            if not kernels.FORMATS[spec.format].has_int8_codes:
                held = kernels.to_int8_rows(spec, tensors)
                declared = kernels.int8_rows_spec(spec, held.group)
                candidates += [
                    ("int8 replaced", b, declared, held.tensors()) for e, b in routes(declared, facts) if e == "native"
                ]
            for execution, backend, declared, held_tensors in candidates:
                if (name, execution, backend) in wrong:
                    continue
                mode = {"int8 replaced": "native"}.get(execution, execution)
                row: dict[str, Any] = {"format": name, "execution": execution, "backend": backend, **shape}
                try:
                    operation = kernels.PreparedLinear(declared, kernels.plan(declared, facts, mode, backend))
                    row["ms"] = clock(lambda op=operation, t=held_tensors, x=x, b=bias: op(x, t, b))
                except KERNEL_ERRORS as error:
                    rows.append(row | {"raised": f"{type(error).__name__}: {error}"[:300]})
                    continue
                row["over_bf16"] = dense / row["ms"]
                row["over_stock"] = None if stock_ms is None else stock_ms / row["ms"]
                arithmetic = "int8" if execution == "int8 replaced" else execution
                row["roofline_ms"] = roofline(name, arithmetic, M, N, K, peak)
                rows.append(row)
    return rows


def bandwidth(device: torch.device, facts: kernels.DeviceFacts, tokens: int, widths: list[int]) -> list[dict[str, Any]]:
    """Bytes per second of the quantisers beside a copy: read 2, written 1 a value."""
    if triton_ops.available().usable is False or facts.own_kernels == "off":
        return [{"skipped": triton_ops.available().reason}]
    from quant_loader.kernels.triton_ops.row_quantizer import quantize_rows

    clock, rows = Clock(device), []
    for K in widths:
        x = torch.randn(tokens, K, device=device, dtype=torch.bfloat16)
        target = torch.empty_like(x)
        copied = 4 * x.numel() / clock(lambda t=target, x=x: t.copy_(x))
        for rotation in (1, 256 if K % 256 == 0 else 16):
            row: dict[str, Any] = {"kernel": "quantize_rows", "rotation": rotation, "M": tokens, "K": K}
            try:
                spent = clock(lambda x=x, r=rotation: quantize_rows(x, rotation=r))
            except KERNEL_ERRORS as error:
                rows.append(row | {"raised": f"{type(error).__name__}: {error}"[:300]})
                continue
            rows.append(
                row | {"ms": spent, "GB_per_s": 3 * x.numel() / spent / 1e6, "of_copy": 3 * x.numel() / spent / copied}
            )
    return rows


def sweep(
    device: torch.device, tokens: list[int], shapes: list[tuple[int, int]], deadline: float
) -> list[dict[str, Any]]:
    """Our INT8 product over tiles: the best ones, in the form of the tuned schedule file."""
    from quant_loader.kernels.triton_ops.int8_gemm import int8_matmul
    from quant_loader.kernels.triton_ops.schedules import GemmSchedule, m_bucket

    clock, rows = Clock(device), []
    tiles = [
        GemmSchedule(m, n, k, dots, 8, warps, stages)
        for (m, n), k, dots, warps, stages in itertools.product(
            ((128, 256), (128, 128), (64, 256), (64, 128), (256, 128)), (64, 128), (1, 2), (4, 8), (2, 3, 4)
        )
    ]
    for M, (N, K) in itertools.product(tokens, shapes):
        a = torch.randint(-127, 128, (M, K), device=device, dtype=torch.int8)
        b = torch.randint(-127, 128, (N, K), device=device, dtype=torch.int8)
        scale_a, scale_b = torch.rand(M, device=device), torch.rand(N, device=device)
        timed: list[tuple[float, GemmSchedule]] = []
        for tile in tiles:
            if time.monotonic() > deadline:
                break
            try:
                call = lambda t=tile, a=a, b=b, sa=scale_a, sb=scale_b: int8_matmul(  # noqa: E731
                    a, b, sa, sb, out_dtype=torch.bfloat16, schedule=t
                )
                timed.append((clock(call, 0.05), tile))
            except KERNEL_ERRORS:
                continue
        timed.sort(key=lambda pair: pair[0])
        entry: dict[str, Any] = {"m": m_bucket(M), "n": N, "k": K, "low_rank": False}
        if timed:
            rows.append(entry | {"schedule": list(timed[0][1]), "ms": timed[0][0], "tried": len(timed),
                                 "next": [[ms, list(t)] for ms, t in timed[1:4]]})  # fmt: skip
    return rows


def print_tables(results: dict[str, Any]) -> None:
    """What matters of the results, as Markdown."""
    wrong = [row for row in results.get("correctness", []) if not row["fine"]]
    print(f"\n{len(results.get('correctness', []))} correctness checks, {len(wrong)} failed")
    for row in wrong:
        print(
            "  ", {key: row[key] for key in ("format", "execution", "backend", "dtype", "error")}, row.get("raised", "")
        )
    print("\n| format | execution | backend | M | N | K | ms | x bf16 | x stock | of roofline |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in results.get("linears", []):
        if "ms" not in row:
            continue
        share = f"{row['roofline_ms'] / row['ms']:.2f}" if row.get("roofline_ms") else ""
        ratios = [f"{row[key]:.2f}" if row.get(key) else "" for key in ("over_bf16", "over_stock")]
        place = f"{row['M']} | {row['N']} | {row['K']}"
        way = f"{row['format']} | {row['execution']} | {row['backend']}"
        print(f"| {way} | {place} | {row['ms']:.3f} | {' | '.join(ratios)} | {share} |")
    for section in ("bandwidth", "sweep"):
        print(f"\n{section}")
        for row in results.get(section, []):
            print("  ", row)


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns 1 when a kernel was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="JSON file to write")
    parser.add_argument("--minutes", type=float, default=9.0, help="time for the whole run")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU, to see that the program works")
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print("No CUDA or ROCm device here; --dry-run runs the program on the CPU with tiny shapes.")
        return 2
    device = torch.device("cpu" if options.dry_run else "cuda")
    facts = kernels.device_facts(device)
    begin, limit = time.monotonic(), options.minutes * 60
    shapes = [(256, 128)] if options.dry_run else FLUX
    tokens = [17] if options.dry_run else TOKENS
    checks = [(9, 48, 128)] if options.dry_run else [(17, 208, 256), (512, 3072, 3072), (64, 3072, 15360)]
    results: dict[str, Any] = {
        "device": facts.name,
        "capability": facts.capability,
        "arch": facts.arch,
        "torch": torch.__version__,
        "kitchen": facts.kitchen,
        "kitchen_backends": sorted(facts.kitchen_backends),
        "triton": facts.triton,
        "goals": GOALS,
    }
    torch.manual_seed(0)

    def section(name: str, rows: list[dict[str, Any]]) -> None:
        results[name] = rows
        results["retired"] = {" ".join(key): reason for key, reason in kernels.retired().items()}
        results["seconds"] = time.monotonic() - begin
        options.out.write_text(json.dumps(results, indent=1), encoding="utf-8")
        print(f"{name}: {len(rows)} rows, {results['seconds']:.0f} s", flush=True)

    with torch.inference_mode():
        section("correctness", correctness(device, facts, checks))
        wrong = {(r["format"], r["execution"], r["backend"]) for r in results["correctness"] if not r["fine"]}
        section("linears", linears(device, facts, tokens, shapes, wrong, begin + 0.6 * limit))
        if not options.dry_run:
            section("bandwidth", bandwidth(device, facts, tokens[0], [3072, 12288, 15360]))
            section("sweep", sweep(device, tokens, shapes, begin + 0.95 * limit))
    print_tables(results)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
