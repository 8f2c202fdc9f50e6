"""Small checkpoint files written byte by byte, independent of the code under test; and the command line."""

from __future__ import annotations

import json
import math
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
ODD = "'" if os.name == "nt" else "\n"
"""A character that a file name may hold and that a line of output must not."""
CONVROT = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256}


@pytest.fixture(autouse=True, scope="session")
def _interrupts_are_heard():
    """A background job of a shell starts with SIGINT ignored, and its children inherit that; these tests send it."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class T(NamedTuple):
    """A tensor of a file: dtype string, shape, bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def noise(dtype: str, *shape: int, seed: int = 1) -> T:
    """Arbitrary finite content."""
    count = math.prod(shape)
    random = np.random.default_rng(seed)
    if dtype == "F32":
        return T(dtype, shape, random.uniform(-0.5, 0.5, count).astype("<f4").tobytes())
    if dtype == "BF16":
        return T(
            dtype, shape, (random.uniform(-0.5, 0.5, count).astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
        )
    if dtype == "F8_E4M3":
        return T(dtype, shape, random.choice([0x28, 0x30, 0x34, 0xB0], count).astype(np.uint8).tobytes())
    return T(dtype, shape, random.integers(1, 127, count).astype(np.uint8).tobytes())


def scale(dtype: str, *shape: int, value: float = 0.004) -> T:
    """Positive scales, all different, that the 16-bit types hold exactly as they are written."""
    count = math.prod(shape)
    values = (value * (1 + np.arange(count) / 64)).astype("<f4")
    if dtype == "F32":
        return T(dtype, shape, values.tobytes())
    if dtype == "F64":
        return T(dtype, shape, values.astype("<f8").tobytes())
    if dtype == "F16":
        return T(dtype, shape, values.astype("<f2").tobytes())
    return T(dtype, shape, (values.view("<u4") >> 16).astype("<u2").tobytes())


def marker(conf: dict | bytes) -> T:
    data = conf if isinstance(conf, bytes) else json.dumps(conf).encode()
    return T("U8", (len(data),), data)


def int8(
    layer: str, conf: dict | bytes | None = CONVROT, weight_scale: T | None = None, N: int = 256, K: int = 256
) -> dict[str, T]:
    tensors = {f"{layer}.weight": noise("I8", N, K), f"{layer}.weight_scale": weight_scale or scale("F32", N, 1)}
    return tensors if conf is None else {**tensors, f"{layer}.comfy_quant": marker(conf)}


def nvfp4(layer: str, conf: dict | None = None, N: int = 128, K: int = 64) -> dict[str, T]:
    tensors = {
        f"{layer}.weight": noise("U8", N, K // 2),
        f"{layer}.weight_scale": noise("F8_E4M3", N, K // 16),
        f"{layer}.weight_scale_2": scale("F32", value=0.01),
    }
    return tensors if conf is None else {**tensors, f"{layer}.comfy_quant": marker(conf)}


def fp8(layer: str, conf: dict | bytes | None = None, suffix: str = "weight_scale", dtype: str = "F32") -> dict[str, T]:
    tensors = {f"{layer}.weight": noise("F8_E4M3", 64, 64), f"{layer}.{suffix}": scale(dtype, value=0.001)}
    return tensors if conf is None else {**tensors, f"{layer}.comfy_quant": marker(conf)}


def metadata(layers: dict, **more: str) -> dict[str, str]:
    return {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers}), **more}


class Written(NamedTuple):
    """A file read back: header entries and content by tensor."""

    metadata: dict[str, str]
    tensors: dict[str, T]


def read(path: Path) -> Written:
    """The content of a sound file, read with a few lines of its own."""
    raw = path.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + size])
    meta = header.pop("__metadata__", {})
    start = 8 + size
    tensors = {
        name: T(
            entry["dtype"],
            tuple(entry["shape"]),
            raw[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]],
        )
        for name, entry in header.items()
    }
    assert sum(len(tensor.data) for tensor in tensors.values()) == len(raw) - start
    return Written(meta, tensors)


def write(
    path: Path, tensors: dict[str, T], meta: dict[str, str] | None = None, tail: bytes = b"", cut: int = 0
) -> Path:
    header: dict[str, object] = {"__metadata__": meta} if meta else {}
    offset = 0
    for name, tensor in tensors.items():
        assert len(tensor.data) == math.prod(tensor.shape) * BYTES[tensor.dtype], name
        header[name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [offset, offset + len(tensor.data)],
        }
        offset += len(tensor.data)
    text = json.dumps(header, separators=(",", ":")).encode()
    raw = struct.pack("<Q", len(text)) + text + b"".join(tensor.data for tensor in tensors.values()) + tail
    path.write_bytes(raw[: len(raw) - cut])
    return path


class Kit(NamedTuple):
    """Everything above, for tests (the import mode of the suite has no shared modules)."""

    folder: Path
    odd: str
    T: type[T]
    convrot: dict
    noise: Callable[..., T]
    scale: Callable[..., T]
    marker: Callable[..., T]
    int8: Callable[..., dict[str, T]]
    nvfp4: Callable[..., dict[str, T]]
    fp8: Callable[..., dict[str, T]]
    metadata: Callable[..., dict[str, str]]
    read: Callable[[Path], Written]

    def file(self, name: str, tensors: dict[str, T], meta: dict[str, str] | None = None, **damage: object) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return write(path, tensors, meta, **damage)


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return Kit(tmp_path, ODD, T, CONVROT, noise, scale, marker, int8, nvfp4, fp8, metadata, read)


class Ran(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs `quant-loader` in this process; asserts that no traceback was printed."""
    from quant_loader.cli import main

    def run(*arguments: object) -> Ran:
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        return Ran(code, captured.out, captured.err)

    return run


@pytest.fixture
def shell() -> Callable[..., Ran]:
    """Runs `quant-loader` as a process of its own."""

    def run(*arguments: object, **options: object) -> Ran:
        done = subprocess.run(
            [sys.executable, "-m", "quant_loader.cli", *map(str, arguments)],
            capture_output=True,
            encoding="utf-8",
            timeout=60,
            check=False,
            **options,
        )
        assert "Traceback" not in done.stdout + done.stderr, done.stderr
        return Ran(done.returncode, done.stdout, done.stderr)

    return run
