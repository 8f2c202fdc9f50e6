"""Strategies for hostile checkpoints: everything from nearly sound files to noise."""

from __future__ import annotations

import json
import os
import struct

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

SECONDS = float(os.environ.get("QUANT_LOADER_FUZZ_SECONDS", "0"))
"""Longer runs: ``QUANT_LOADER_FUZZ_SECONDS=600 pytest tests/hostile``."""

settings.register_profile("suite", max_examples=150, deadline=None, derandomize=True, database=None)
settings.register_profile(
    "long", max_examples=400, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile("long" if SECONDS else "suite")

BITS = {
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "BF16": 16,
    "F16": 16,
    "F32": 32,
    "F64": 64,
    "I64": 64,
    "F4": 4,
}
LAYERS = ["a", "blocks.0.attn.qkv", "model.diffusion_model.a", "", "a.b", "é", "x" * 300, "a.comfy_quant"]
SUFFIXES = ["weight", "weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale", "weight_s_rel"]
SUFFIXES += ["weight_s_channel", "weight_codebook", "weight_correction", "scale_weight", "scale_input", "bias"]
SUFFIXES += ["weight._data", "weight._scale", "output_scale", "qweight", "wscales", "weight_packed"]
FORMATS = ["int8_tensorwise", "convrot_w4a4", "asym_w4a8_int8", "nvfp4", "float8_e4m3fn", "float8_e5m2", "mxfp8"]
FORMATS += ["int9", None, 3, []]
KEYS = ["format", "convrot", "convrot_groupsize", "group_size", "linear_dtype", "full_precision_matrix_mult"]
KEYS += ["params", "_is_rowwise", "x"]

dims = st.sampled_from([0, 1, 2, 3, 4, 8, 16, 32, 64, 128])
odd_numbers = st.sampled_from(
    [0, -1, 1, 4, 15, 16, 64, 64.0, 64.9, 128, 256, 2**63, 10**400, float("nan"), float("inf"), 1e300]
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    odd_numbers,
    st.sampled_from(["", "64", "int4", "int8", "fp8", "\ud800", "\0", "٦٤"]),
    st.text(max_size=8),
)
json_values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
confs = st.fixed_dictionaries({}, optional={"format": st.sampled_from(FORMATS), **dict.fromkeys(KEYS[1:], json_values)})
marker_texts = st.one_of(
    confs.map(lambda value: json.dumps(value).encode()),
    json_values.map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=40),
    st.integers(0, 40).map(bytes),
    st.integers(1, 3000).map(lambda depth: b'{"format":' + b"[" * depth + b"]" * depth + b"}"),
)


def size_of(dtype: str, shape: list[int]) -> int:
    bits = BITS[dtype]
    for dim in shape:
        bits *= dim
    return -(-bits // 8)


@st.composite
def headers(draw):
    """A header whose entries tile the data area, with its data; layers of every format, right or wrong."""
    header: dict[str, object] = {}
    chunks: list[bytes] = []
    offset = 0

    def add(name, dtype, shape, data=None):
        nonlocal offset
        size = size_of(dtype, shape) if data is None else len(data)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        chunks.append(draw(st.sampled_from([b"\0", b"\x3c", b"\xff", b"\x7f"])) * size if data is None else data)
        offset += size

    if draw(st.booleans()):
        layers = draw(st.dictionaries(st.sampled_from(LAYERS), confs, max_size=3))
        metadata = {"_quantization_metadata": json.dumps({"layers": layers})}
        keys = st.sampled_from(
            [
                "quant_format",
                "quantization_format",
                "quantization_map_base64",
                "quantization_config",
                "_quantization_metadata",
            ]
        )
        texts = st.sampled_from(
            ["mxfp8", "quanto", "e30=", '{"quant_method": "modelopt"}', "{", "[]", "null", '{"layers": 1}']
        )
        metadata |= draw(st.dictionaries(keys, texts | st.text(max_size=20), max_size=2))
        header["__metadata__"] = metadata
    for layer in draw(st.lists(st.sampled_from(LAYERS), min_size=1, max_size=3, unique=True)):
        n, k = draw(dims), draw(dims)
        for suffix in draw(st.lists(st.sampled_from(SUFFIXES), min_size=1, max_size=5, unique=True)):
            dtype = draw(st.sampled_from(list(BITS)))
            shape = draw(
                st.sampled_from(
                    [[], [1], [n], [n, 1], [n, k], [n, k // 2], [n, k // 16], [16], [k], [128, 4], [n, k, 3, 3]]
                )
            )
            add(f"{layer}.{suffix}", dtype, shape)
        if draw(st.booleans()):
            data = draw(marker_texts)
            add(f"{layer}.comfy_quant", "U8", [len(data)], data)
    return header, b"".join(chunks)


@st.composite
def files(draw):
    """The bytes of a file: a built header, sometimes with an entry replaced by nonsense, sometimes damaged bytes."""
    header, data = draw(headers())
    if draw(st.integers(0, 3)) == 0:
        name = draw(st.sampled_from(list(header)))
        header[name] = draw(
            st.one_of(
                json_values,
                st.fixed_dictionaries({"dtype": scalars, "shape": json_values, "data_offsets": json_values}),
            )
        )
    text = json.dumps(header).encode()
    text += b" " * draw(st.integers(0, 8))
    blob = bytearray(struct.pack("<Q", len(text)) + text + data)
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 3]))):
        where = draw(st.integers(0, len(blob) - 1))
        kind = draw(st.integers(0, 3))
        if kind == 0:
            blob[where] = draw(st.integers(0, 255))
        elif kind == 1:
            del blob[where:]
        elif kind == 2:
            blob[where:where] = draw(st.binary(max_size=9))
        else:
            blob[:8] = struct.pack(
                "<Q", draw(st.sampled_from([0, 1, 7, len(text) - 1, len(text) + 1, 2**31, 2**62, 2**64 - 1]))
            )
        if not blob:
            break
    return bytes(blob)


noise = st.binary(max_size=200) | st.binary(max_size=200).map(lambda data: struct.pack("<Q", len(data)) + data)
