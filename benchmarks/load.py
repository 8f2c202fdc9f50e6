"""Loading a checkpoint of a gigabyte and more: time and memory from the start of the node until the model is ready.

    python -I -m quant_loader.benchmarks.load [--quick] [--json FILE] [--formats int8_row,nvfp4] [--repeats 5]

A Flux-shaped checkpoint is written for each format (random codes, plausible scales), loaded by ComfyUI's UNETLoader and
by this pack's loader, and removed. Each load has a process of its own, in which ComfyUI and both loaders are imported
but nothing has been loaded (`children.host`); the two sides take turns. *Ready* is: the node has returned (our check
included), ComfyUI has put the model on its device, and every page of every weight has been read once, so that nothing
lazy is left over. *Warm*: the file is in the page cache. *Cold*: the kernel was told to drop the file's pages
(`posix_fadvise` DONTNEED) before the load.
Peak memory is the high-water mark of resident memory above what the process had before the node started; mapped pages
of the file count.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import math
import os
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from quant_loader.benchmarks import children, common, in_process
from quant_loader.benchmarks.children import InChild
from quant_loader.benchmarks.common import Cell, Plot, Result, Table, Wrong, say
from quant_loader.demo import models

MODULE = "quant_loader.benchmarks.load"
HIDDEN = 1536
SIDES = ("ours", "stock")
FORMATS = ("int8_scalar", "int8_row", "int8_convrot", "fp8", "mxfp8", "nvfp4", "convrot_w4a4")
FOUR_BITS = ("nvfp4", "convrot_w4a4")
BLOCK = 16 << 20
CLOSE = 0.05
PROBES = ("double_blocks.0.img_attn.proj", "single_blocks.18.linear2")

# Largest relative error of one linear. Ours: against the float32 reference of the same arithmetic, where only the order
# of summation differs. Stock: against the exact product, from which it differs by the rounding of activations.
OURS_WRONG = 1e-5
STOCK_WRONG = {"convrot_w4a4": 0.2}
STOCK_WRONG_ELSE = 0.02


# --- the checkpoint ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """A tensor to write: `low` to `high` are the bytes that its random codes take, or `data` is what it holds."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes | None = None
    mask: int = 0xFF
    base: int = 0

    @property
    def nbytes(self) -> int:
        size = {"F32": 4, "BF16": 2}.get(self.dtype, 1)
        return math.prod(self.shape) * size


def linears(fmt: str) -> Iterator[tuple[str, int, int, bool]]:
    """(name, N, K, quantised) of every linear: Flux with 1536 channels, as deep as makes a gigabyte."""
    deep = 2 if fmt in FOUR_BITS else 1
    yield "img_in", HIDDEN, models.PATCH_CHANNELS, False
    yield "txt_in", HIDDEN, models.CONTEXT, False
    for name, width in (("time_in", models.TIME_EMBEDDING), ("vector_in", models.VECTOR)):
        yield f"{name}.in_layer", HIDDEN, width, False
        yield f"{name}.out_layer", HIDDEN, HIDDEN, False
    for i in range(5 * deep):
        for stream in ("img", "txt"):
            block = f"double_blocks.{i}.{stream}"
            yield f"{block}_mod.lin", 6 * HIDDEN, HIDDEN, True
            yield f"{block}_attn.qkv", 3 * HIDDEN, HIDDEN, True
            yield f"{block}_attn.proj", HIDDEN, HIDDEN, True
            yield f"{block}_mlp.0", 4 * HIDDEN, HIDDEN, True
            yield f"{block}_mlp.2", HIDDEN, 4 * HIDDEN, True
    for i in range(19 * deep):
        yield f"single_blocks.{i}.linear1", 7 * HIDDEN, HIDDEN, True
        yield f"single_blocks.{i}.linear2", HIDDEN, 5 * HIDDEN, True
        yield f"single_blocks.{i}.modulation.lin", 3 * HIDDEN, HIDDEN, True
    yield "final_layer.adaLN_modulation.1", 2 * HIDDEN, HIDDEN, False
    yield "final_layer.linear", models.PATCH_CHANNELS, HIDDEN, False


def bfloat16(values: np.ndarray[Any, np.dtype[np.float32]]) -> bytes:
    """Truncated to the upper half of each float."""
    return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()


def packed(fmt: str, name: str, rows: int, columns: int) -> Iterator[Piece]:
    """The tensors of one quantised layer; weights of about unit gain."""
    gain = 1 / math.sqrt(columns)
    rng = np.random.default_rng(len(name))

    def floats(shape: tuple[int, ...], typical: float) -> bytes:
        return (typical * rng.uniform(0.8, 1.25, shape)).astype("<f4").tobytes()

    marker: dict[str, object]
    if fmt.startswith("int8"):
        marker = {"format": "int8_tensorwise"}
        if fmt == "int8_convrot":
            marker |= {"convrot": True, "convrot_groupsize": 256}
        shape = () if fmt == "int8_scalar" else (rows, 1)
        yield Piece(f"{name}.weight", "I8", (rows, columns))
        yield Piece(f"{name}.weight_scale", "F32", shape, floats(shape, gain / 74))  # codes of a uniform spread
    elif fmt == "fp8":
        marker = {"format": "float8_e4m3fn"}
        yield Piece(f"{name}.weight", "F8_E4M3", (rows, columns), mask=0xBF)  # exponents up to 7: below 2, no NaN
        yield Piece(f"{name}.weight_scale", "F32", (), floats((), gain / 0.5))
    elif fmt == "mxfp8":
        marker = {"format": "mxfp8"}
        yield Piece(f"{name}.weight", "F8_E4M3", (rows, columns), mask=0xBF)
        yield Piece(f"{name}.weight_scale", "U8", (rows, columns // 32), mask=0x03, base=121)
    elif fmt == "nvfp4":
        marker = {"format": "nvfp4"}
        yield Piece(f"{name}.weight", "U8", (rows, columns // 2))
        yield Piece(f"{name}.weight_scale", "F8_E4M3", (rows, columns // 16), mask=0x07, base=0x38)  # 1 to 2
        yield Piece(f"{name}.weight_scale_2", "F32", (), floats((), gain / 4.5))
    else:
        marker = {"format": "convrot_w4a4", "convrot_groupsize": 256}
        yield Piece(f"{name}.weight", "I8", (rows, columns // 2))
        yield Piece(f"{name}.weight_scale", "F32", (rows,), floats((rows,), gain / 4.6))
    text = json.dumps(marker).encode()
    yield Piece(f"{name}.comfy_quant", "U8", (len(text),), text)


def pieces(fmt: str) -> Iterator[Piece]:
    """Every tensor of the checkpoint."""
    rng = np.random.default_rng(7)

    def dense(name: str, shape: tuple[int, ...], spread: float) -> Piece:
        return Piece(name, "BF16", shape, bfloat16(spread * rng.standard_normal(shape, dtype=np.float32)))

    for name, rows, columns, quantised in linears(fmt):
        if quantised:
            yield from packed(fmt, name, rows, columns)
        else:
            yield dense(f"{name}.weight", (rows, columns), 1 / math.sqrt(columns))
        yield dense(f"{name}.bias", (rows,), 0.02)
        if name.endswith(("_attn.qkv", "linear1")):
            block = f"{name.removesuffix('.qkv')}.norm" if name.endswith("qkv") else f"{name.rsplit('.', 1)[0]}.norm"
            for side in ("query_norm", "key_norm"):
                yield Piece(f"{block}.{side}.scale", "BF16", (128,), bfloat16(np.ones(128, np.float32)))


def write(path: Path, fmt: str) -> int:
    """Streams the checkpoint to a file; returns its size. Codes repeat one random block, so memory stays small."""
    listed = list(pieces(fmt))
    header: dict[str, object] = {}
    offset = 0
    for piece in listed:
        header[piece.name] = {
            "dtype": piece.dtype,
            "shape": list(piece.shape),
            "data_offsets": [offset, offset + piece.nbytes],
        }
        offset += piece.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    noise = np.frombuffer(np.random.default_rng(3).bytes(BLOCK), np.uint8)
    kinds = {(piece.mask, piece.base) for piece in listed if piece.data is None}
    codes = {(mask, base): ((noise & mask) + base).astype(np.uint8).data for mask, base in kinds}
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for piece in listed:
            if piece.data is not None:
                out.write(piece.data)
                continue
            for start in range(0, piece.nbytes, BLOCK):
                out.write(codes[piece.mask, piece.base][: min(BLOCK, piece.nbytes - start)])
        out.flush()
        os.fsync(out.fileno())
    return path.stat().st_size


def drop_pages(path: Path) -> bool:
    """Asks the kernel to forget the cached pages of a file; False where it cannot be asked."""
    if not hasattr(os, "posix_fadvise"):
        return False
    with path.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


# --- one load, in a process of its own --------------------------------------------------------------------------------


def prepare_comfyui(folder: Path) -> None:
    """Imports ComfyUI with `folder` as its folder of diffusion models; on the CPU where there is no accelerator."""
    in_process.prepare("auto")
    in_process.preload()
    import folder_paths

    folder_paths.folder_names_and_paths["diffusion_models"] = ([str(folder)], {".safetensors"})


def loader(side: str, name: str) -> Callable[[], Any]:
    """The node's own function."""
    if side == "stock":
        import nodes

        return lambda: nodes.UNETLoader().load_unet(name, "default")[0]
    from quant_loader import comfy_entrypoint

    listed = asyncio.run(asyncio.run(comfy_entrypoint()).get_node_list())
    (node,) = (node for node in listed if node.__name__ == "QuantLoaderDiffusionModel")
    return lambda: node.execute(name).args[0]


def tensors_of(weight: Any) -> Iterator[Any]:
    """The plain tensors in a parameter: of a packed one, its codes and scales."""
    if hasattr(weight, "__tensor_flatten__") and type(weight).__name__ not in ("Tensor", "Parameter"):
        for attribute in weight.__tensor_flatten__()[0]:
            yield from tensors_of(getattr(weight, attribute))
    else:
        yield weight


def touch(model: Any) -> int:
    """Reads one byte of every page of every weight; returns their bytes."""
    import torch

    total = 0
    for parameter in model.state_dict(keep_vars=True).values():
        for tensor in tensors_of(parameter):
            if tensor.device.type == "cpu" and tensor.numel() and tensor.is_contiguous():
                raw = tensor.detach().reshape(-1).view(torch.uint8)
                int(raw[::4096].sum())
                total += raw.numel()
    return total


def reset_peak() -> None:
    """Starts the high-water mark of resident memory anew, where Linux lets us; it is high from the imports else."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def read_from_disk() -> int | None:
    """Bytes that this process has had read from storage so far (Linux)."""
    try:
        text = Path("/proc/self/io").read_text(encoding="ascii")
    except OSError:
        return None
    return int(next(line for line in text.splitlines() if line.startswith("read_bytes:")).split()[1])


def one_load(side: str, path: Path, twice: bool) -> dict[str, object]:
    """Loads and says what it cost; then ``twice`` for the cost without what only the first load of a process does."""
    prepare_comfyui(path.parent)
    import comfy.model_management
    import torch
    from quant_loader.checkpoint import cache

    load = loader(side, path.name)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    reset_peak()
    before = common.resident()
    started_with = sum(before.values()) or common.peak_resident()
    disk = read_from_disk()
    wall, cpu = time.perf_counter(), time.process_time()
    patcher = load()
    node = time.perf_counter() - wall
    comfy.model_management.load_models_gpu([patcher])
    held = touch(patcher.model.diffusion_model)
    if cuda:
        torch.cuda.synchronize()
    ready, ready_cpu = time.perf_counter() - wall, time.process_time() - cpu
    after = common.resident()
    disk_after = read_from_disk()
    answer: dict[str, object] = {
        "node_seconds": node,
        "seconds": ready,
        "cpu_seconds": ready_cpu,
        "peak_bytes": common.peak_resident() - started_with,
        "anonymous_bytes": after.get("anonymous", 0) - before.get("anonymous", 0),
        "read_bytes": None if disk is None or disk_after is None else disk_after - disk,
        "weight_bytes": held,
        "device_bytes": torch.cuda.max_memory_allocated() if cuda else 0,
    }
    if not twice:
        return answer
    comfy.model_management.unload_all_models()
    del patcher
    gc.collect()
    cache.clear()
    wall, cpu = time.perf_counter(), time.process_time()
    patcher = load()
    comfy.model_management.load_models_gpu([patcher])
    touch(patcher.model.diffusion_model)
    if cuda:
        torch.cuda.synchronize()
    answer["again_seconds"], answer["again_cpu_seconds"] = time.perf_counter() - wall, time.process_time() - cpu
    return answer


def errors_of(side: str, path: Path) -> dict[str, float]:
    """Loads; relative error of each probed linear of the model on random activations (see `OURS_WRONG`)."""
    prepare_comfyui(path.parent)
    import comfy.model_management
    import torch
    from quant_loader import kernels
    from quant_loader.checkpoint import check
    from safetensors import safe_open

    patcher = loader(side, path.name)()
    comfy.model_management.load_models_gpu([patcher])
    specs = {layer.name: layer for layer in check([path]).layers}
    errors = {}
    for name in PROBES:
        spec = specs[name]
        with safe_open(path, framework="pt") as file:
            tensors = {suffix: file.get_tensor(stored) for suffix, stored in spec.tensors.items()}
            bias = file.get_tensor(f"{name}.bias").float()
        x = torch.randn(4, spec.K, generator=torch.Generator().manual_seed(11))
        module = patcher.model.diffusion_model.get_submodule(name)
        plan = kernels.prepare(spec, kernels.device_facts("cpu"), "auto").plan
        with torch.inference_mode():
            truth = kernels.reference_linear(x, spec, tensors, bias, plan.execution if side == "ours" else "exact")
            y = module(x.to(patcher.load_device)).float().cpu()
        errors[name] = in_process.relative(y, truth)
    return errors


# --- all loads --------------------------------------------------------------------------------------------------------


def verify(errors: dict[str, Any], side: str, fmt: str) -> None:
    """Raises Wrong when the loaded model computes something else than the file says."""
    most = OURS_WRONG if side == "ours" else STOCK_WRONG.get(fmt, STOCK_WRONG_ELSE)
    for name, error in errors.items():
        if not error <= most:
            raise Wrong(f"{fmt}, {side}: {name} of the loaded model is off by {error:.2g}, expected {most} at most")


def loads_of(in_child: InChild, path: Path, fmt: str, repeats: int, cold_repeats: int) -> dict[str, Any]:
    """Every load of one file: state -> side -> answers, after a load of each side whose result is checked.

    Warm loads of a format whose sides are within :data:`CLOSE` of each other are repeated three times as often. Without
    a way to drop pages, what would have been the cold loads are neither cold nor counted.
    """

    def child(what: str, side: str) -> dict[str, Any]:
        return in_child(MODULE, what, side, "--path", str(path))

    found: dict[str, Any] = {"size": path.stat().st_size, "errors": {side: child("--verify", side) for side in SIDES}}
    for side in SIDES:
        verify(found["errors"][side], side, fmt)
    for state, times in (("cold", cold_repeats), ("warm", repeats)):
        answers: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
        counted = True
        for turn in range(3 * times):
            if turn == times and (state == "cold" or abs(ratio(answers, "seconds") - 1) > CLOSE):
                break
            for side in SIDES if turn % 2 == 0 else reversed(SIDES):
                if state == "cold":
                    counted = drop_pages(path)
                answers[side].append(child("--one" if state == "cold" else "--twice", side))
        found[state] = answers if counted else {side: [] for side in SIDES}
        if found[state]["ours"]:
            costs = ((s, median(answers[s], "seconds"), median(answers[s], "peak_bytes") / 1e9) for s in SIDES)
            say(f"  {fmt} {state}: " + ", ".join(f"{side} {spent:.2f} s {peak:.2f} GB" for side, spent, peak in costs))
    return found


def median(answers: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.median(float(answer[key]) for answer in answers)


def ratio(answers: dict[str, list[dict[str, Any]]], key: str) -> float:
    return median(answers["ours"], key) / median(answers["stock"], key)


def table(found: dict[str, Any]) -> Table:
    rows: list[list[Cell]] = []
    device = any(answer["device_bytes"] for one in found.values() for answer in one["warm"]["ours"])
    for fmt, one in found.items():
        for state in ("warm", "cold"):
            answers = one[state]
            if not answers["ours"]:
                continue
            row: list[Cell] = [fmt, one["size"] / 1e9, state]
            row += [median(answers[side], "seconds") for side in SIDES]
            row += [ratio(answers, "seconds"), ratio(answers, "again_seconds") if state == "warm" else None]
            for key in ("peak_bytes", "device_bytes") if device else ("peak_bytes",):
                row += [*(median(answers[side], key) / 1e9 for side in SIDES), ratio(answers, key)]
            rows.append(row)
    columns = ["format", "GB", "cache", "ours, s", "stock, s", "ours / stock", "second load, ours / stock"]
    columns += ["ours, peak GB", "stock, peak GB", "peak, ours / stock"]
    if device:
        columns += ["ours, device GB", "stock, device GB", "device, ours / stock"]
    loads = {state: sorted({len(one[state]["ours"]) for one in found.values()}) for state in ("warm", "cold")}
    counts = {state: " to ".join(map(str, dict.fromkeys((n[0], n[-1])))) for state, n in loads.items()}
    return Table(
        "From node start to ready",
        columns,
        rows,
        f"Ratios are ours / stock: at most 1 is good. Medians of fresh processes in turn, {counts['warm']} a side warm "
        f"and {counts['cold']} cold. Ready: node returned (our check included), model on its device, every page of "
        "every weight read. The first load of a process; *second load*: the same file again in the same process. Peak: "
        "resident memory above that before the node, mapped file pages included. Cold: the file's pages dropped with "
        "posix_fadvise(DONTNEED); a disk may still have a cache of its own. Before any is timed, a load of each side "
        "is checked: two linears of the model against the float32 product of what the file holds.",
    )


def measure(formats: Sequence[str], repeats: int, cold_repeats: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="load-") as folder, children.host() as in_child:
        for fmt in formats:
            path = Path(folder) / f"flux-{fmt}.safetensors"
            say(f"  {fmt}: {write(path, fmt) / 1e9:.2f} GB written")
            found[fmt] = loads_of(in_child, path, fmt, repeats, cold_repeats)
            path.unlink()
    return found


def explanation(answers: dict[str, list[dict[str, Any]]], key: str) -> str:
    """What the measurements say of a goal that is missed: how far apart, how much scatter, what a second load costs."""
    apart = median(answers["ours"], key) - median(answers["stock"], key)
    values = [float(answer[key]) for answer in answers["stock"]]
    scatter = max(values) - min(values)
    if key == "peak_bytes":
        return f"{apart / 1e6:.0f} MB apart; the stock loads differ by {scatter / 1e6:.0f} MB among themselves."
    again = median(answers["ours"], "again_seconds") - median(answers["stock"], "again_seconds")
    return (
        f"{apart * 1e3:.0f} ms apart in the first load of a process and {again * 1e3:.0f} ms in the second; the stock "
        f"loads differ by {scatter * 1e3:.0f} ms among themselves."
    )


def run(quick: bool, formats: Sequence[str] = (), repeats: int = 0) -> Result:
    """Every format; `quick`: five warm loads a side and two cold ones, else nine and five."""
    chosen = list(formats or FORMATS)
    found = measure(chosen, repeats or (5 if quick else 9), 2 if quick else 5)
    goals = []
    for key, label in (("seconds", "time to load, ours / stock"), ("peak_bytes", "peak memory, ours / stock")):
        ratios = {fmt: ratio(one["warm"], key) for fmt, one in found.items()}
        worst = max(ratios, key=lambda fmt: ratios[fmt])
        goals.append(
            common.at_most(
                f"{label}, warm, worst format ({worst})",
                1.0,
                round(ratios[worst], 2),
                explanation(found[worst]["warm"], key),
                summary=True,
            )
        )
    times = {
        side: [median(found[fmt]["warm"][side], "seconds") if fmt in found else None for fmt in chosen]
        for side in SIDES
    }
    return Result(
        "load",
        "What does loading a gigabyte cost, check included, beside the stock node?",
        common.machine(),
        [table(found)],
        {"formats": found},
        goals,
        [
            Plot(
                "load",
                "From node start to ready, 1.1 GB, warm",
                list(chosen),
                {"ours": times["ours"], "stock": times["stock"]},
                y_label="seconds",
            )
        ],
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--formats", type=lambda text: text.split(","), default=[], help=", ".join(FORMATS))
    parser.add_argument("--repeats", type=int, default=0, help="warm loads a side")
    parser.add_argument("--one", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--twice", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--verify", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    side = options.one or options.twice or options.verify
    if side:
        answer = errors_of(side, options.path) if options.verify else one_load(side, options.path, bool(options.twice))
        print(json.dumps(answer))
        return 0
    return common.finish(lambda: run(options.quick, options.formats, options.repeats), options)


if __name__ == "__main__":
    sys.exit(main())
