"""What a check costs, beside a plain JSON parse of the header and a walk with the safetensors library, in the same run.

    python benchmarks/check.py [--layers 520] [--size 4096]

The file is sparse: a ConvRot INT8 checkpoint with three tensors a layer (weight, row scale, marker); 520 layers of
4096 x 4096 are 1,560 tensors and 8.7 GB. Times are CPU times on one core from a warm file, the best and the median of
many runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from quant_loader.checkpoint import cache, check

MARKER = json.dumps({"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256}).encode()
NAMES = ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")


def write(path: Path, layers: int, size: int) -> int:
    """A sparse checkpoint; returns the length of its header in bytes."""
    header: dict[str, dict[str, object]] = {}
    pieces: list[tuple[int, bytes]] = []
    offset = 0
    scales = struct.pack("<f", 0.004) * size
    for i in range(layers):
        prefix = f"blocks.{i // 4}.{NAMES[i % 4]}"
        for suffix, dtype, shape, length, data in (
            ("weight", "I8", [size, size], size * size, b""),
            ("weight_scale", "F32", [size, 1], 4 * size, scales),
            ("comfy_quant", "U8", [len(MARKER)], len(MARKER), MARKER),
        ):
            header[f"{prefix}.{suffix}"] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + length]}
            pieces.append((offset, data))
            offset += length
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        start = out.tell()
        out.truncate(start + offset)
        for where, data in pieces:
            out.seek(start + where)
            out.write(data)
    return len(text)


def measure(work: Callable[[], object], repeat: int = 40) -> tuple[float, float]:
    """Best and median CPU time in milliseconds."""
    times = []
    for _ in range(repeat):
        started = time.process_time()
        work()
        times.append((time.process_time() - started) * 1e3)
    return min(times), statistics.median(times)


def parse_header(path: Path, length: int) -> object:
    with path.open("rb") as opened:
        opened.seek(8)
        return json.loads(opened.read(length))


def walk(path: Path) -> int:
    """Open with safetensors and read every tensor's dtype and shape."""
    from safetensors import safe_open

    count = 0
    with safe_open(path, framework="numpy") as opened:
        for name in opened.keys():  # noqa: SIM118 - not a mapping
            part = opened.get_slice(name)
            count += len(part.get_shape()) + len(part.get_dtype())
    return count


def fresh_check(path: Path) -> None:
    cache.clear()
    assert check(path).verdict == "ok"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=520)
    parser.add_argument("--size", type=int, default=4096)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sparse.safetensors"
        print("tensors  payload     check (best, median)   repeated   JSON parse   safetensors walk   [ms]")
        for layers in sorted({arguments.layers // 4, arguments.layers // 2, arguments.layers}):
            length = write(path, layers, arguments.size)
            payload = path.stat().st_size
            best, median = measure(lambda: fresh_check(path))
            check(path)
            again, _ = measure(lambda: check(path))
            parse, _ = measure(lambda length=length: parse_header(path, length))
            walked, _ = measure(lambda: walk(path))
            size = f"{3 * layers:7} {payload / 1e9:7.2f} GB"
            print(f"{size} {best:12.2f} {median:9.2f} {again:10.3f} {parse:12.2f} {walked:18.2f}")


if __name__ == "__main__":
    main()
