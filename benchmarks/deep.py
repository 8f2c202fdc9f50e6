"""Hit and false-alarm rates of the deep check, and its time per file.

    python -m quant_loader.benchmarks.deep [--layers 200] [--write] [--weights FILE.npz]

makes weights of several families, quantises them correctly or with one thing wrong, writes safetensors files, runs the
whole check on them and counts warnings. ``--write`` puts the table into docs/deep-check.md.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

from ..checkpoint import check

K = 1024
ROWS = 64
TILE = 128
"""Rows of layers with block scales: one whole tile, so that their shape says nothing about the order."""
H4 = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], dtype=np.float32)
MARK = "<!-- rates: written by benchmarks/deep.py -->"
Tensors = dict[str, tuple[str, np.ndarray]]
Row = tuple[str, str, bool, str, int, int]
"""(test, class, whether an alarm is right, family, alarms, layers or files)."""


# -- families of weights ---------------------------------------------------------------------------------------------


def gaussian(rng, n, k):
    return rng.standard_normal((n, k))


def outlier_channels(rng, n, k):
    """1 % of the input channels are 20 times as strong."""
    gain = np.ones(k)
    gain[rng.choice(k, k // 100, replace=False)] = 20
    return rng.standard_normal((n, k)) * gain


def heavy_tails(rng, n, k):
    """Student t with 5 degrees of freedom."""
    return rng.standard_t(5, (n, k))


def channel_gains(rng, n, k):
    """Log-normal strengths of input channels (0.35) and rows (0.3)."""
    return (
        rng.standard_normal((n, k)) * np.exp(0.35 * rng.standard_normal(k)) * np.exp(0.3 * rng.standard_normal((n, 1)))
    )


def trained(rng, n, k):
    """All of it: a decaying low-rank part, tails (t6), channel and row strengths, 0.5 % strong channels."""
    rank = 32
    low = (rng.standard_normal((n, rank)) * np.arange(1, rank + 1) ** -0.7) @ rng.standard_normal((rank, k))
    gain = np.exp(0.25 * rng.standard_normal(k))
    gain[rng.choice(k, max(1, k // 200), replace=False)] *= 6
    return (0.6 * low + rng.standard_t(6, (n, k))) * gain * np.exp(0.4 * rng.standard_normal((n, 1)))


def low_rank(rng, n, k):
    """Rank 8 with Gaussian factors, a little noise: the same in every basis."""
    return rng.standard_normal((n, 8)) @ rng.standard_normal((8, k)) + 0.3 * rng.standard_normal((n, k))


def fresh(rng, n, k):
    """Uniform, as linears are initialised."""
    return rng.uniform(-1, 1, (n, k))


def smooth(rng, n, k):
    """Filters that vary smoothly over the inputs."""
    width = float(rng.uniform(1, 6))
    reach = int(3 * width)
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
    noise = rng.standard_normal((n, k + 2 * reach))
    rows = np.stack([np.convolve(row, kernel, "valid") for row in noise])
    return rows / rows.std() + 0.1 * rng.standard_normal((n, k))


def head_gains(rng, n, k):
    """Attention heads of different strength, a tenth of the channels dead."""
    gain = np.repeat(np.exp(0.5 * rng.standard_normal(-(-k // 64))), 64)[:k]
    gain[rng.random(k) < 0.1] *= 1e-3
    return rng.standard_normal((n, k)) * gain


FAMILIES: dict[str, Callable[..., np.ndarray]] = {
    "Gaussian": gaussian,
    "low rank": low_rank,
    "smooth": smooth,
    "outlier channels": outlier_channels,
    "heavy tails (t5)": heavy_tails,
    "channel gains": channel_gains,
    "trained-like": trained,
    "head gains": head_gains,
    "fresh (uniform)": fresh,
}


# -- quantisers ------------------------------------------------------------------------------------------------------


def rotate(w: np.ndarray, g: int) -> np.ndarray:
    if g == 1:
        return w
    h = np.ones((1, 1), dtype=np.float32)
    while len(h) < g:
        h = np.kron(h, H4)
    return ((w.reshape(-1, g) @ h) / np.sqrt(g)).reshape(w.shape)


def _e4m3_levels() -> np.ndarray:
    exponent, mantissa = np.divmod(np.arange(0x7F), 8)
    return np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))


E4M3_LEVELS = _e4m3_levels()
E2M1_LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def nearest(levels: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Index of the nearest level, ties to the even code."""
    i = np.clip(np.searchsorted(levels, x), 1, len(levels) - 1)
    low, high = x - levels[i - 1], levels[i] - x
    return np.where((low < high) | ((low == high) & (i % 2 == 1)), i - 1, i)


def pack(codes: np.ndarray, high_first: bool) -> np.ndarray:
    codes = codes.astype(np.uint8) & 15
    even, odd = codes[:, 0::2], codes[:, 1::2]
    return (even << 4 | odd) if high_first else (odd << 4 | even)


def tile(scales: np.ndarray) -> np.ndarray:
    """The 128x4 order of the kernels: (tiles of rows, 4, 32, tiles of columns, 4) -> (.., .., 32, 4, 4)."""
    n, c = -(-len(scales) // 128) * 128, -(-scales.shape[1] // 4) * 4
    padded = np.zeros((n, c), dtype=np.uint8)
    padded[: len(scales), : scales.shape[1]] = scales
    return padded.reshape(n // 128, 4, 32, c // 4, 4).transpose(0, 3, 2, 1, 4).reshape(n, c)


def marker(**conf) -> tuple[str, np.ndarray]:
    return "U8", np.frombuffer(json.dumps(conf).encode(), dtype=np.uint8)


def int8(name: str, w: np.ndarray, true: int, declared: int) -> Tensors:
    w = rotate(w, true)
    scale = np.abs(w).max(axis=1, keepdims=True) / 127
    conf = {"convrot": True, "convrot_groupsize": declared} if declared > 1 else {}
    return {
        f"{name}.weight": ("I8", np.clip(np.rint(w / scale), -127, 127).astype(np.int8)),
        f"{name}.weight_scale": ("F32", scale.astype(np.float32)),
        f"{name}.comfy_quant": marker(format="int8_tensorwise", **conf),
    }


def w4a4(name: str, w: np.ndarray, true: int, declared: int, swapped: bool = False) -> Tensors:
    w = rotate(w, true)
    scale = np.abs(w).max(axis=1) / 7
    codes = np.clip(np.rint(w / scale[:, np.newaxis]), -7, 7).astype(np.int8)
    return {
        f"{name}.weight": ("I8", pack(codes, swapped).view(np.int8)),
        f"{name}.weight_scale": ("F32", scale.astype(np.float32)),
        f"{name}.comfy_quant": marker(format="convrot_w4a4", convrot_groupsize=declared),
    }


def w4a8(name: str, w: np.ndarray, true: int, declared: int, swapped: bool = False) -> Tensors:
    w = rotate(w, true)
    channel = np.abs(w).max(axis=1, keepdims=True) / 127
    groups = (w / channel).reshape(len(w), -1, 16)
    rel = nearest(E4M3_LEVELS, np.abs(groups).max(axis=2) / 7)
    codes = np.clip(np.rint(groups / np.maximum(E4M3_LEVELS[rel], 2.0**-9)[..., np.newaxis]), -8, 7) + 8
    return {
        f"{name}.weight": ("I8", pack(codes.reshape(w.shape), swapped).view(np.int8)),
        f"{name}.weight_s_rel": ("F8_E4M3", rel.astype(np.uint8)),
        f"{name}.weight_s_channel": ("F32", channel[:, 0].astype(np.float32)),
        f"{name}.comfy_quant": marker(format="asym_w4a8_int8", group_size=16, convrot_groupsize=declared),
    }


def nvfp4(name: str, w: np.ndarray, swapped: bool = False, tiled: bool = True) -> Tensors:
    total = np.abs(w).max() / (448 * 6)
    groups = w.reshape(len(w), -1, 16)
    scales = nearest(E4M3_LEVELS, np.minimum(np.abs(groups).max(axis=2) / 6 / total, 448))
    codes = nearest(E2M1_LEVELS, np.abs(groups) / (total * np.maximum(E4M3_LEVELS[scales], 2.0**-9))[..., np.newaxis])
    codes = (codes | (8 * (groups < 0))).reshape(w.shape)
    scales = scales.astype(np.uint8)
    return {
        f"{name}.weight": ("U8", pack(codes, not swapped)),
        f"{name}.weight_scale": ("F8_E4M3", tile(scales) if tiled else scales),
        f"{name}.weight_scale_2": ("F32", np.array(total, dtype=np.float32)),
        f"{name}.comfy_quant": marker(format="nvfp4"),
    }


def mxfp8(name: str, w: np.ndarray, tiled: bool = True) -> Tensors:
    groups = w.reshape(len(w), -1, 32)
    exponent = np.ceil(np.log2(np.abs(groups).max(axis=2) / 448))
    codes = nearest(E4M3_LEVELS, np.abs(groups) / np.exp2(exponent)[..., np.newaxis])
    codes = (codes | (128 * (groups < 0))).reshape(w.shape)
    scales = (exponent + 127).astype(np.uint8)
    return {
        f"{name}.weight": ("F8_E4M3", codes.astype(np.uint8)),
        f"{name}.weight_scale": ("U8", tile(scales) if tiled else scales),
        f"{name}.comfy_quant": marker(format="mxfp8"),
    }


# -- files -----------------------------------------------------------------------------------------------------------


def save(path: Path, tensors: Mapping[str, tuple[str, np.ndarray]]) -> None:
    header, offset = {}, 0
    for name, (dtype, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(data.shape), "data_offsets": [offset, offset + data.nbytes]}
        offset += data.nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, data in tensors.values():
            file.write(np.ascontiguousarray(data).tobytes())


def alarms(path: Path, tensors: Tensors) -> list[tuple[str, str | None]]:
    """(rule, layer) of every deep fault, errors and warnings."""
    save(path, tensors)
    report = check(path, deep=True)
    wrong = [fault for fault in report.errors if not fault.rule.startswith("extra.deep.")]
    if wrong:
        raise AssertionError(f"the made file is not sound: {wrong[0].message}")
    return [
        (fault.rule, fault.layer)
        for fault in report.faults
        if fault.rule.startswith("extra.deep.") and fault.severity != "notice"
    ]


Case = tuple[str, str, bool, Callable[[str, np.ndarray], Tensors]]
"""(what is tested, the class, whether an alarm is right, quantiser)."""


def rotation_cases() -> Iterable[Case]:
    for what, make in (("INT8", int8), ("W4A4", w4a4), ("W4A8", w4a8)):
        declarable = {int8: (1, 64, 256), w4a4: (16, 64, 256), w4a8: (256,)}[make]
        for declared in declarable:
            for true in (1, 16, 64, 256):
                redundant = (declared, true) == (1, 16) or declared == 16 or (declared == 64 and make is w4a4)
                if redundant and true != declared:
                    continue
                said, fact = (size if size > 1 else "not rotated" for size in (declared, true))
                words = f"{what}, declared {said}, is {fact}"
                yield (
                    "rotation",
                    words,
                    true != declared,
                    lambda name, w, make=make, true=true, declared=declared: make(name, w, true, declared),
                )


def layout_cases() -> Iterable[Case]:
    for what, make in (("NVFP4", nvfp4), ("MXFP8", mxfp8)):
        for tiled in (True, False):
            words = f"{what}, scales {'in tiles' if tiled else 'row by row'}"
            yield "scale layout", words, not tiled, lambda name, w, make=make, tiled=tiled: make(name, w, tiled=tiled)


def run_layers(layers: int, rng: np.random.Generator, families: Mapping[str, Callable[..., np.ndarray]]) -> list[Row]:
    rows = []
    cases = [*rotation_cases(), *layout_cases()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        for family, draw in families.items():
            weights = [0.02 * draw(rng, TILE, K).astype(np.float32) for _ in range(layers)]
            for test, words, wrong, make in cases:
                hits = 0
                for start in range(0, layers, 50):
                    tensors: Tensors = {}
                    for i, w in enumerate(weights[start : start + 50]):
                        tensors.update(make(f"blocks.{i}.linear", w if test == "scale layout" else w[:ROWS]))
                    hits += len({layer for _rule, layer in alarms(path, tensors)})
                rows.append((test, words, wrong, family, hits, layers))
            print(f"{family}: done", file=sys.stderr, flush=True)
    return rows


def nibble_file(rng: np.random.Generator, kind: str, format_name: str, swapped: bool) -> Tensors:
    """Three layers with what may witness the order of their input channels."""
    tensors: Tensors = {}
    for i in range(3):
        base = f"blocks.{i}"
        w = 0.02 * (smooth if kind == "smooth inputs" else trained)(rng, TILE if format_name == "NVFP4" else ROWS, K)
        if kind.startswith("norm"):
            strength = 0.3 if kind.endswith("clear") else 0.12
            shared = rng.standard_normal(K)
            w = w * np.exp(strength * shared)
            gain = np.exp(-0.2 * shared + 0.2 * rng.standard_normal(K))
            tensors[f"{base}.norm.weight"] = ("F32", gain.astype(np.float32))
        else:
            tensors[f"{base}.norm.weight"] = ("F32", np.exp(0.2 * rng.standard_normal(K)).astype(np.float32))
        make = {
            "NVFP4": nvfp4,
            "W4A4": lambda name, w, swapped: w4a4(name, w, 256, 256, swapped),
            "W4A8": lambda name, w, swapped: w4a8(name, w, 256, 256, swapped),
        }[format_name]
        if kind.startswith("norm"):
            w = w.astype(np.float32)
        tensors.update(make(f"{base}.linear", w.astype(np.float32), swapped=swapped))
    return tensors


def run_nibbles(files: int, rng: np.random.Generator) -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        for format_name in ("NVFP4", "W4A4", "W4A8"):
            for swapped in (False, True):
                for kind in ("no witness", "norm gains, weak", "norm gains, clear", "smooth inputs"):
                    hits = 0
                    for _ in range(files):
                        hits += bool(alarms(path, nibble_file(rng, kind, format_name, swapped)))
                    words = f"{format_name}, {'exchanged' if swapped else 'in order'}"
                    rows.append(("nibble order", words, swapped, kind, hits, files))
            print(f"{format_name}: done", file=sys.stderr, flush=True)
    return rows


def run_given(path: Path) -> list[Row]:
    """The weights of an .npz file (name -> (N, K)), as many as a class can take."""
    rows = []
    weights = [w.astype(np.float32) + 1e-9 for w in np.load(path).values() if w.ndim == 2]
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "model.safetensors"
        for test, words, wrong, make in [*rotation_cases(), *layout_cases()]:
            numbers = [int(part) for part in words.replace(",", " ").split() if part.isdigit()]
            step = 128 if test == "scale layout" else max(64 if words.startswith("W4A4") else 16, *numbers, 0)
            least = TILE if test == "scale layout" else 1
            usable = [w for w in weights if w.shape[1] % step == 0 and len(w) >= least]
            tensors: Tensors = {}
            for i, w in enumerate(usable):
                tensors.update(make(f"blocks.{i}.linear", w[: len(w) // TILE * TILE] if test == "scale layout" else w))
            if usable:
                hits = len({layer for _rule, layer in alarms(made, tensors)})
                rows.append((test, words, wrong, "given", hits, len(usable)))
    return rows


# -- the table -------------------------------------------------------------------------------------------------------


UNITS = {
    "rotation": f"layers of {ROWS} x {K}",
    "scale layout": f"layers of {TILE} x {K}",
    "nibble order": "files of 3 layers",
}


def table(rows: list[Row]) -> str:
    lines = []
    for test in dict.fromkeys(row[0] for row in rows):
        mine = [row for row in rows if row[0] == test]
        families = list(dict.fromkeys(row[3] for row in mine))
        unit = UNITS[test]
        lines += [f"### {test[0].upper()}{test[1:]}: alarms in % of {mine[0][5]} {unit} per class and family", ""]
        for wrong, title in ((False, "sound (false alarms)"), (True, "wrong (hits)")):
            lines += [f"| {title} | " + " | ".join(families) + " |", "|---|" + "---|" * len(families)]
            for words in dict.fromkeys(row[1] for row in mine if row[2] is wrong):
                cells = {row[3]: 100 * row[4] / row[5] for row in mine if row[1] == words}
                shown = [f"{cells[family]:.1f}".removesuffix(".0") for family in families]
                lines.append(f"| {words} | {' | '.join(shown)} |")
            lines.append("")
        sound = [row for row in mine if not row[2]]
        lines += [f"False alarms: {sum(r[4] for r in sound)} of {sum(r[5] for r in sound)}.", ""]
    return "\n".join(lines).strip()


def seconds_per_file(rng: np.random.Generator) -> str:
    """Processor time on a file of real proportions: 24 blocks of an INT8 and an NVFP4 layer."""
    w = 0.02 * rng.standard_normal((3072, 3072)).astype(np.float32)
    parts = {**int8("a", w, 1, 1), **nvfp4("b", w)}
    tensors = {f"blocks.{i}.{name}": tensor for i in range(24) for name, tensor in parts.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save(path, tensors)
        size = path.stat().st_size
        times = []
        for deep in (False, True):
            started = time.process_time()
            check(path, deep=deep)
            times.append(1000 * (time.process_time() - started))
    return (
        f"{size / 1e6:.0f} MB, 48 layers of 3072 x 3072 (INT8 and NVFP4), warm file: "
        f"{times[1]:.0f} ms of processor time, {times[0]:.0f} ms without `--deep`."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=200, help="layers per class and family")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="put the table into docs/deep-check.md")
    parser.add_argument("--weights", type=Path, help="an .npz file of weight matrices to use in place of the families")
    args = parser.parse_args()
    if args.weights:
        for _test, words, wrong, _family, hits, layers in run_given(args.weights):
            print(f"| {words} | {'hits' if wrong else 'false alarms'} | {hits} of {layers} |")
        return
    rng = np.random.default_rng(args.seed)
    speed = seconds_per_file(rng)
    rows = run_layers(args.layers, rng, FAMILIES) + run_nibbles(args.layers, rng)
    text = f"{table(rows)}\n\n### Time\n\n{speed}"
    print(text)
    if args.write:
        page = Path(__file__).resolve().parent.parent / "docs" / "deep-check.md"
        head, _, rest = page.read_text(encoding="utf-8").partition(MARK)
        _, _, tail = rest.partition(MARK)
        page.write_text(f"{head}{MARK}\n\n{text}\n\n{MARK}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
