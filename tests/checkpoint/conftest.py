"""Writers of small safetensors files: exact bytes, standard library only, no writer of the package under test."""

from __future__ import annotations

import base64
import gzip
import json
import struct
from pathlib import Path

import pytest
from quant_loader.checkpoint import cache

DATA = Path(__file__).parent / "data"
BITS = {"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8}
BITS |= {"F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32}
BITS |= {"F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64}
FLOATS = ("F64", "F32", "F16", "BF16")
SCALE_ENDS = ("_scale", "_scale_2", "_s_channel", "_codebook", ".scale_weight", ".scale_input")


def size_of(dtype: str, shape: list[int]) -> int:
    count = 1
    for dim in shape:
        count *= dim
    return count * BITS[dtype] // 8


def number(dtype: str, value: float) -> bytes:
    """One element of this dtype."""
    if dtype == "BF16":
        bits = struct.unpack("<I", struct.pack("<f", value))[0]
        return struct.pack("<H", (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)
    if dtype in FLOATS:
        return struct.pack({"F64": "<d", "F32": "<f", "F16": "<e"}[dtype], value)
    return int(value).to_bytes(BITS[dtype] // 8, "little", signed=value < 0)


def marker_bytes(value) -> bytes:
    return value if isinstance(value, bytes) else json.dumps(value).encode()


def write(path, tensors, metadata=None, markers=None, fill=None, tail=b"", cut=0, header_length=None):
    """Write ``tensors`` (name -> (dtype, shape) or (dtype, shape, bytes)) and ``markers`` (layer -> JSON or bytes).

    Without bytes a float scale is 1 (or ``fill[name]``) and everything else zero. ``tail`` and ``cut`` damage the
    file's end.
    """
    header = {} if metadata is None else {"__metadata__": {k: _text(v) for k, v in metadata.items()}}
    everything = dict(tensors)
    for layer, value in (markers or {}).items():
        data = marker_bytes(value)
        everything[f"{layer}.comfy_quant"] = ("U8", [len(data)], data)
    chunks, offset = [], 0
    for name, (dtype, shape, *data) in everything.items():
        size = size_of(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        given = (fill or {}).get(name)
        if data:
            payload = data[0]
        elif given is not None or (name.endswith(SCALE_ENDS) and dtype in FLOATS):
            payload = number(dtype, 1.0 if given is None else given) * (size * 8 // BITS[dtype])
        else:
            payload = bytes(size)
        assert len(payload) == size, (name, len(payload), size)
        chunks.append(payload)
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    blob = struct.pack("<Q", len(text) if header_length is None else header_length) + text + b"".join(chunks) + tail
    path.write_bytes(blob[: len(blob) - cut] if cut else blob)
    return str(path)


def _text(value) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def write_raw(path, header: str | bytes, data: bytes = b"") -> str:
    """A file with this verbatim header."""
    text = header if isinstance(header, bytes) else header.encode("utf-8", "surrogatepass")
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return str(path)


# -- layers ----------------------------------------------------------------------------------------------------------

CONVROT = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 64}


def padded(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


class Layers:
    """Tensors of one sound layer per format; keyword arguments change single tensors (None removes one)."""

    @staticmethod
    def _with(prefix, parts, changes):
        parts.update(changes)
        return {f"{prefix}.{key}": value for key, value in parts.items() if value is not None}

    def int8(self, prefix="a", n=8, k=64, **changes):
        return self._with(prefix, {"weight": ("I8", [n, k]), "weight_scale": ("F32", [n, 1])}, changes)

    def w4a4(self, prefix="a", n=8, k=256, **changes):
        return self._with(prefix, {"weight": ("I8", [n, k // 2]), "weight_scale": ("F32", [n])}, changes)

    def w4a8(self, prefix="a", n=8, k=256, group=16, **changes):
        parts = {
            "weight": ("I8", [n, k // 2]),
            "weight_s_rel": ("F8_E4M3", [n, k // group]),
            "weight_s_channel": ("F32", [n]),
        }
        return self._with(prefix, parts, changes)

    def nvfp4(self, prefix="a", n=128, k=64, **changes):
        parts = {
            "weight": ("U8", [n, k // 2]),
            "weight_scale": ("F8_E4M3", [padded(n, 128), padded(k // 16, 4)]),
            "weight_scale_2": ("F32", []),
        }
        return self._with(prefix, parts, changes)

    def fp8(self, prefix="a", n=16, k=32, **changes):
        return self._with(prefix, {"weight": ("F8_E4M3", [n, k]), "weight_scale": ("F32", [])}, changes)

    def mxfp8(self, prefix="a", n=128, k=128, **changes):
        scale = ("U8", [padded(n, 128), padded(k // 32, 4)])
        return self._with(prefix, {"weight": ("F8_E4M3", [n, k]), "weight_scale": scale}, changes)

    def quanto(self, prefix="a", n=8, k=16, **changes):
        parts = {
            "weight._data": ("I8", [n, k]),
            "weight._scale": ("BF16", [n, 1]),
            "input_scale": ("BF16", [], number("BF16", 1.0)),
            "output_scale": ("BF16", [], number("BF16", 1.0)),
        }
        return self._with(prefix, parts, changes)


def quanto_metadata(entries) -> dict[str, str]:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return {"quantization_format": "quanto", "quantization_map_base64": base64.b64encode(text).decode()}


# -- conformance cases -----------------------------------------------------------------------------------------------


def load_cases(name: str) -> list[dict]:
    with gzip.open(DATA / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _expanded(value) -> str:
    text = value["raw"]
    for token, parts in value.get("expand", {}).items():
        text = text.replace(token, "".join(part * count for part, count in parts))
    return text


def _case_marker(value):
    """A case's marker as (dtype, shape, bytes)."""
    special = isinstance(value, dict) and ("raw" in value or "raw_hex" in value)
    if not special:
        data = json.dumps(value, ensure_ascii=False).encode()
        return "U8", [len(data)], data
    data = (
        bytes.fromhex(value["raw_hex"])
        if "raw_hex" in value
        else _expanded(value).encode(value.get("encoding", "utf-8"))
    )
    dtype = value.get("dtype", "U8")
    return dtype, value.get("shape", [len(data) * 8 // BITS[dtype]]), data


def write_case(case: dict, folder: Path) -> list[str]:
    """The files of a conformance case."""
    folder.mkdir(parents=True, exist_ok=True)
    paths, total = [], len(case["files"])
    for number_of, spec in enumerate(case["files"], start=1):
        name = "model.safetensors" if total == 1 else f"model-{number_of:05d}-of-{total:05d}.safetensors"
        path = folder / name
        paths.append(str(path))
        if "hex" in spec:
            path.write_bytes(bytes.fromhex(spec["hex"]))
            continue
        metadata = spec.get("metadata")
        if metadata is not None:
            metadata = {
                key: _expanded(value) if isinstance(value, dict) and "raw" in value else value
                for key, value in metadata.items()
            }
        if number_of == 1 and "quanto_map" in case:
            entries = case["quanto_map"]
            raw = isinstance(entries, dict) and "raw" in entries
            text = _expanded(entries) if raw else json.dumps(entries, ensure_ascii=False)
            metadata = {**quanto_metadata(text.encode()), **(metadata or {})}
        if "header_raw" in spec:
            write_raw(path, spec["header_raw"], bytes(spec.get("data_len", 0)))
        else:
            fill = {}
            for tensor, (dtype, _) in spec.get("tensors", {}).items():
                if tensor in spec.get("fill", {}):
                    fill[tensor] = spec["fill"][tensor]
                elif dtype in FLOATS and tensor.endswith(
                    (*SCALE_ENDS, ".input_scale", ".output_scale", ".pre_quant_scale")
                ):
                    fill[tensor] = 1.0
            markers = {f"{layer}.comfy_quant": _case_marker(value) for layer, value in spec.get("markers", {}).items()}
            write(path, {**spec.get("tensors", {}), **markers}, metadata, fill=fill)
        if "truncate" in spec:
            path.write_bytes(path.read_bytes()[: spec["truncate"]])
    return paths


def renamer(case: dict):
    """The ``rename`` that a case's mapper asks for."""
    mapper = case.get("mapper")
    if mapper is None:
        return None
    if "strip" in mapper:
        return lambda name: name.removeprefix(mapper["strip"])
    return mapper["table"]


class Tools:
    """What the tests of this folder use, in one fixture."""

    write = staticmethod(write)
    write_raw = staticmethod(write_raw)
    number = staticmethod(number)
    quanto_metadata = staticmethod(quanto_metadata)
    write_case = staticmethod(write_case)
    renamer = staticmethod(renamer)
    layers = Layers()
    CONVROT = CONVROT


@pytest.fixture
def tools() -> Tools:
    return Tools()


@pytest.fixture
def file(tmp_path):
    """``file(tensors, ...)`` writes ``tmp_path/model.safetensors`` and returns its path."""

    def make(tensors, name="model.safetensors", **options):
        return write(tmp_path / name, tensors, **options)

    return make


@pytest.fixture(autouse=True)
def _fresh_cache():
    cache.clear()
    yield
    cache.clear()


def _sound(case: dict) -> bool:
    expect = case["expect"]
    return expect["verdict"] == "accept" and expect["stage"] == "comfy" and len(case["files"]) == 1


def pytest_generate_tests(metafunc):
    """``conformance_case``, ``sound_case`` (one file, Comfy markers, accepted) and ``platform_case`` run over the
    stored cases.
    """
    for argument, name in (("conformance_case", "cases"), ("sound_case", "cases"), ("platform_case", "platform_cases")):
        if argument in metafunc.fixturenames:
            cases = load_cases(name)
            if argument == "sound_case":
                cases = [case for case in cases if _sound(case)]
            metafunc.parametrize(argument, cases, ids=[case["id"] for case in cases])
