"""Every rule of the catalogue: a file that breaks it, and one that nearly does.

An example is ``(tensors, markers, metadata)`` or a function of the folder that returns what to check. ``L`` makes the
tensors of a sound layer ``a`` of each format.
"""

from __future__ import annotations

import base64
import json
import os
import string

import pytest
from quant_loader.checkpoint import RULES, check, open_checkpoint
from quant_loader.checkpoint import findings as findings_module
from quant_loader.checkpoint import values as values_module
from quant_loader.checkpoint.checker import check_checkpoint

from .test_deep import EXAMPLES as DEEP_EXAMPLES

I8 = {"a": {"format": "int8_tensorwise"}}
ROT = {"a": {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 64}}
A4 = {"a": {"format": "convrot_w4a4", "convrot_groupsize": 256}}
A8 = {"a": {"format": "asym_w4a8_int8", "group_size": 16, "convrot_groupsize": 256}}
FP4 = {"a": {"format": "nvfp4"}}
FP8 = {"a": {"format": "float8_e4m3fn"}}
E5M2 = {"a": {"format": "float8_e5m2"}}
MX = {"a": {"format": "mxfp8"}}
DEEP = b'{"format": "int8_tensorwise", "x": ' + b"[" * 2000 + b"]" * 2000 + b"}"
SHALLOW = DEEP.replace(b"[" * 2000, b"[" * 500).replace(b"]" * 2000, b"]" * 500)
BIG = b'{"format": "int8_tensorwise", "x": ' + b"9" * 4301 + b"}"
NOT_SO_BIG = BIG.replace(b"9" * 4301, b"9" * 4300)
PLAIN = {"norm.weight": ("BF16", [8])}


def meta(text) -> dict[str, str]:
    return {"_quantization_metadata": text if isinstance(text, str) else json.dumps(text)}


def with_keys(markers, **keys):
    return {layer: {**value, **keys} for layer, value in markers.items()}


def quanto(t, entries=None, **changes):
    entries = {"a": {"weights": "qint8", "activations": "none"}} if entries is None else entries
    return t.layers.quanto(**changes), {}, t.quanto_metadata(entries)


def sound_quanto(t):
    return quanto(t)


def raw(header, data=b""):
    return lambda t, folder: t.write_raw(folder / "m.safetensors", header, data)


def named(name, content=b"anything"):
    def make(t, folder):
        (folder / name).write_bytes(content)
        return str(folder / name)

    return make


def folder_with(name):
    def make(t, folder):
        (folder / name).mkdir()
        return str(folder / name)

    return make


def shards(*parts, total=None, index=None, give=None):
    """Shards of one set; ``index`` maps tensors to shard numbers, ``give`` are the numbers handed to the check."""

    def make(t, folder):
        of = total or len(parts)
        names = [f"m-{number:05d}-of-{of:05d}.safetensors" for number in range(1, of + 1)]
        for name, (tensors, metadata, markers) in zip(names, parts, strict=False):
            t.write(folder / name, tensors, metadata, markers)
        if index is not None:
            placed = {tensor: names[number - 1] for tensor, number in index.items()}
            (folder / "m.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
            return str(folder / "m.safetensors.index.json")
        return [str(folder / names[number - 1]) for number in (give or [1])]

    return make


def index_file(text):
    def make(t, folder):
        t.write(folder / "m.safetensors", PLAIN)
        (folder / "m.safetensors.index.json").write_text(text)
        return str(folder / "m.safetensors.index.json")

    return make


HALF = {"x.weight": ("BF16", [8])}, None, None
OTHER = {"y.weight": ("BF16", [8])}, None, None
ENTRY = '"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'
OVER = '{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,5]}}'


def same_name(name):
    return name.removeprefix("model.")


EXAMPLES = {
    "crash.file": (raw(OVER, b"\0" * 5), raw("{" + ENTRY + "}", b"\0" * 4)),
    "extra.file.not_found": (lambda t, folder: str(folder / "none.safetensors"), (PLAIN, {}, {})),
    "extra.file.special": (folder_with("d.safetensors"), (PLAIN, {}, {})),
    "extra.file.unreadable": (lambda t, folder: "a\0b.safetensors", (PLAIN, {}, {})),
    "extra.file.not_checkpoint": (named("notes.txt"), named("notes.safetensors")),
    "extra.file.header_size": (raw("{}" + " " * (16 << 20)), raw("{}" + " " * ((16 << 20) - 16))),
    "extra.file.duplicate_key": (
        raw("{" + ENTRY + "," + ENTRY + "}", b"\0" * 4),
        raw("{" + ENTRY + "," + ENTRY.replace('"a"', '"b"').replace("[0,4]", "[4,8]") + "}", b"\0" * 8),
    ),
    "extra.shards.index": (
        index_file('{"weight_map": {}}'),
        index_file('{"weight_map": {"norm.weight": "m.safetensors"}}'),
    ),
    "extra.shards.missing": (shards(HALF, OTHER, total=3), shards(HALF, OTHER)),
    "extra.shards.duplicate_file": (shards(HALF, OTHER, give=[1, 1]), shards(HALF, OTHER, give=[1, 2])),
    "extra.shards.duplicate_tensor": (shards(HALF, HALF), shards(HALF, OTHER)),
    "extra.shards.repeated_marker": (
        lambda t, folder: shards((t.layers.int8(), None, I8), (PLAIN, None, I8))(t, folder),
        lambda t, folder: shards((t.layers.int8(), None, I8), (PLAIN, None, None))(t, folder),
    ),
    "extra.shards.index_tensor": (
        shards(HALF, OTHER, index={"x.weight": 2, "y.weight": 2}),
        shards(HALF, OTHER, index={"x.weight": 1, "y.weight": 2}),
    ),
    "extra.foreign.pickle": (named("m.ckpt"), (PLAIN, {}, {})),
    "extra.foreign.gguf": (named("m.gguf", b"GGUF" + bytes(20)), named("m.safetensors", b"GGU" + bytes(20))),
    "extra.foreign.svdquant": (
        ({"a.qweight": ("I8", [8, 8]), "a.wscales": ("BF16", [1, 8]), "a.smooth_factor": ("BF16", [8])}, {}, {}),
        ({"a.qweights": ("I8", [8, 8]), "a.wscales": ("BF16", [1, 8])}, {}, {}),
    ),
    "extra.foreign.modelopt": (
        lambda t: (t.layers.nvfp4(), {}, {"quantization_config": '{"quant_method": "modelopt"}'}),
        lambda t: (t.layers.nvfp4(), FP4, {"quantization_config": '{"quant_method": "modelopt"}'}),
    ),
    "extra.foreign.bitsandbytes": (
        ({"a.weight": ("U8", [32, 1]), "a.weight.absmax": ("F32", [1]), "a.weight.quant_map": ("F32", [16])}, {}, {}),
        ({"a.weight": ("BF16", [32, 1]), "a.weight.absmax": ("F32", [1])}, {}, {}),
    ),
    "extra.foreign.gptq": (
        ({"a.qweight": ("I32", [8, 8]), "a.qzeros": ("I32", [1, 8]), "a.scales": ("F16", [1, 8])}, {}, {}),
        ({"a.qweight": ("I32", [8, 8])}, {}, {}),
    ),
    "extra.foreign.compressed": (
        ({"a.weight_packed": ("U8", [8, 8]), "a.weight_global_scale": ("F32", [1])}, {}, {}),
        ({"a.weight_packed": ("U8", [8, 8])}, {}, {}),
    ),
    "extra.foreign.declared": (
        lambda t: (t.layers.fp8(), {}, {"quantization_config": '{"quant_method": "torchao"}'}),
        lambda t: (t.layers.fp8(), FP8, {"quantization_config": '{"quant_method": "torchao"}'}),
    ),
    "meta.json": (lambda t: (PLAIN, {}, meta("{")), lambda t: (PLAIN, {}, meta('{"layers": {}}'))),
    "meta.not_object": (lambda t: (PLAIN, {}, meta("[]")), lambda t: (PLAIN, {}, meta("{}"))),
    "meta.layers_not_object": (lambda t: (PLAIN, {}, meta("{}")), lambda t: (PLAIN, {}, meta('{"layers": {}}'))),
    "meta.entry_not_object": (
        lambda t: (t.layers.int8(), {}, meta({"layers": {"a": "int8_tensorwise"}})),
        lambda t: (t.layers.int8(), {}, meta({"layers": I8})),
    ),
    "crash.meta.recursion": (
        lambda t: (PLAIN, {}, meta('{"layers": ' + "[" * 2000 + "]" * 2000 + "}")),
        lambda t: (PLAIN, {}, meta('{"layers": ' + "[" * 500 + "]" * 500 + "}")),
    ),
    "crash.meta.bigint": (
        lambda t: (PLAIN, {}, meta('{"layers": {}, "x": ' + "9" * 4301 + "}")),
        lambda t: (PLAIN, {}, meta('{"layers": {}, "x": ' + "9" * 4300 + "}")),
    ),
    "extra.meta.size": (
        raw('{"__metadata__":{"_quantization_metadata":"' + "\\u005b" * 200_001 + '"}}'),
        raw('{"__metadata__":{"_quantization_metadata":"' + "\\u005b" * 199_999 + '"}}'),
    ),
    "extra.meta.duplicate_key": (
        lambda t: (t.layers.int8(), {}, meta('{"layers": {"a": {"format": "nvfp4", "format": "int8_tensorwise"}}}')),
        lambda t: (t.layers.int8(), {}, meta({"layers": I8})),
    ),
    "marker.json": (lambda t: (t.layers.int8(), {"a": b"{"}, {}), lambda t: (t.layers.int8(), {"a": b"[]"}, {})),
    "marker.not_object": (lambda t: (t.layers.int8(), {"a": b"[]"}, {}), lambda t: (t.layers.int8(), {"a": b"{}"}, {})),
    "crash.marker.tensor_dtype": (
        lambda t: ({**t.layers.int8(), "a.comfy_quant": ("F8_E4M3", [29], json.dumps(I8["a"]).encode())}, {}, {}),
        lambda t: ({**t.layers.int8(), "a.comfy_quant": ("I8", [29], json.dumps(I8["a"]).encode())}, {}, {}),
    ),
    "crash.marker.recursion": (
        lambda t: (t.layers.int8(), {"a": DEEP}, {}),
        lambda t: (t.layers.int8(), {"a": SHALLOW}, {}),
    ),
    "crash.marker.bigint": (
        lambda t: (t.layers.int8(), {"a": BIG}, {}),
        lambda t: (t.layers.int8(), {"a": NOT_SO_BIG}, {}),
    ),
    "marker.conflict": (
        lambda t: (t.layers.int8(), ROT, meta({"layers": I8})),
        lambda t: (t.layers.int8(), I8, meta({"layers": I8})),
    ),
    "marker.missing": (
        lambda t: ({"a.weight": ("I8", [8, 8])}, {}, {}),
        lambda t: ({"a.weight": ("I16", [8, 8])}, {}, {}),
    ),
    "extra.marker.duplicate_key": (
        lambda t: (t.layers.int8(), {"a": b'{"format": "nvfp4", "format": "int8_tensorwise"}'}, {}),
        lambda t: (t.layers.int8(), {"a": b'{"Format": "nvfp4", "format": "int8_tensorwise"}'}, {}),
    ),
    "extra.marker.size": (
        lambda t: (t.layers.int8(), {"a": json.dumps(I8["a"]).encode().ljust((1 << 20) + 1)}, {}),
        lambda t: (t.layers.int8(), {"a": json.dumps(I8["a"]).encode().ljust(1 << 20)}, {}),
    ),
    "extra.format.unknown": (
        lambda t: (t.layers.int8(), {"a": {"format": "INT8_TENSORWISE"}}, {}),
        lambda t: (t.layers.int8(), I8, {}),
    ),
    "extra.format.absent": (
        lambda t: (t.layers.int8(), {"a": {"convrot": True}}, {}),
        lambda t: (t.layers.int8(), I8, {}),
    ),
    "extra.params.contradict": (
        lambda t: (t.layers.int8(), with_keys(ROT, params={"convrot_groupsize": 16}), {}),
        lambda t: (t.layers.int8(), with_keys(ROT, params={"convrot_groupsize": 64, "group_size": 1}), {}),
    ),
    "extra.value.type": (
        lambda t: (t.layers.int8(), with_keys(ROT, convrot_groupsize="64"), {}),
        lambda t: (t.layers.int8(), with_keys(ROT, convrot_groupsize=64.0), {}),
    ),
    "extra.flag.type": (
        lambda t: (t.layers.fp8(), with_keys(FP8, full_precision_matrix_mult=1), {}),
        lambda t: (t.layers.fp8(), with_keys(FP8, full_precision_matrix_mult=None), {}),
    ),
    "extra.convrot.unsupported": (
        lambda t: (t.layers.fp8(), with_keys(FP8, convrot=True), {}),
        lambda t: (t.layers.fp8(), with_keys(FP8, convrot=False), {}),
    ),
    "layer.missing_tensors": (
        lambda t: (t.layers.nvfp4(weight_scale_2=None), FP4, {}),
        lambda t: (t.layers.nvfp4(), FP4, {}),
    ),
    "extra.layer.missing_tensors": (lambda t: (PLAIN, MX, {}), lambda t: (PLAIN, FP8, {})),
    "extra.layer.count": (
        lambda t: (PLAIN, {}, meta({"layers": {f"l{i}": {} for i in range(10_001)}})),
        lambda t: (PLAIN, {}, meta({"layers": {f"l{i}": {} for i in range(10_000)}})),
    ),
    "extra.scale.orphan": (
        lambda t: (t.layers.int8(pre_quant_scale=("F32", [64])), I8, {}),
        lambda t: (t.layers.nvfp4(pre_quant_scale=("F32", [64])), FP4, {}),
    ),
    "extra.scale.unused": (
        lambda t: (t.layers.int8(input_scale=("F32", [])), I8, {}),
        lambda t: (t.layers.fp8(input_scale=("F32", [], t.number("F32", 0.1))), FP8, {}),
    ),
    "map.collision": (
        lambda t: ({**t.layers.int8("a"), **t.layers.int8("model.a")}, {"a": I8["a"], "model.a": I8["a"]}, {}),
        lambda t: ({**t.layers.int8("a"), **t.layers.int8("model.b")}, {"a": I8["a"], "model.b": I8["a"]}, {}),
    ),
    "extra.shape.empty": (lambda t: (t.layers.int8(k=0), I8, {}), lambda t: (t.layers.int8(k=1), I8, {})),
    "extra.bias.shape": (
        lambda t: (t.layers.fp8(bias=("BF16", [15])), FP8, {}),
        lambda t: (t.layers.fp8(bias=("BF16", [16])), FP8, {}),
    ),
    "extra.bias.dtype": (
        lambda t: (t.layers.int8(bias=("I8", [8])), I8, {}),
        lambda t: (t.layers.int8(bias=("F8_E4M3", [8])), I8, {}),
    ),
    "extra.scale.nonfinite": (
        lambda t: (t.layers.int8(weight_scale=("F32", [], t.number("F32", float("inf")))), I8, {}),
        lambda t: (t.layers.int8(weight_scale=("F32", [], t.number("F32", 3e38))), I8, {}),
    ),
    "extra.scale.not_positive": (
        lambda t: (t.layers.int8(weight_scale=("F32", [], t.number("F32", 0.0))), I8, {}),
        lambda t: (t.layers.int8(weight_scale=("F32", [], t.number("F32", 1e-45))), I8, {}),
    ),
    "extra.scale.implausible": (
        lambda t: (t.layers.int8(weight_scale=("F32", [], t.number("F32", 7.9))), I8, {}),
        lambda t: (t.layers.int8(weight_scale=("F32", [], t.number("F32", 7.8))), I8, {}),
    ),
    "extra.fp8.dtype": (lambda t: (t.layers.fp8(), E5M2, {}), lambda t: (t.layers.fp8(), FP8, {})),
    "extra.fp8.rank": (
        lambda t: (t.layers.fp8(weight=("F8_E4M3", [8, 4, 3, 3])), FP8, {}),
        lambda t: (t.layers.fp8(weight=("F8_E4M3", [8, 36])), FP8, {}),
    ),
    "extra.fp8.scale_shape": (
        lambda t: (t.layers.fp8(weight_scale=("F32", [16])), FP8, {}),
        lambda t: (t.layers.fp8(weight_scale=("F32", [16, 1], t.number("F32", 0.01) * 16)), FP8, {}),
    ),
    "extra.fp8.scale_dtype": (
        lambda t: (t.layers.fp8(weight_scale=("I32", [])), FP8, {}),
        lambda t: (t.layers.fp8(weight_scale=("BF16", [])), FP8, {}),
    ),
    "extra.fp8.scale_narrow": (
        lambda t: (t.layers.fp8(weight_scale=("F16", [])), FP8, {}),
        lambda t: (t.layers.fp8(), FP8, {}),
    ),
    "extra.fp8.input_scale": (
        lambda t: (t.layers.fp8(input_scale=("F32", [2], t.number("F32", 1.0) * 2)), FP8, {}),
        lambda t: (t.layers.fp8(input_scale=("F32", [1], t.number("F32", 1.0))), FP8, {}),
    ),
    "mxfp8.layout": (
        lambda t: (t.layers.mxfp8(k=96), {}, {"quant_format": "MXFP8"}),
        lambda t: (t.layers.mxfp8(), {}, {"quant_format": "MXFP8"}),
    ),
    "extra.mxfp8.dtype": (
        lambda t: (t.layers.mxfp8(weight_scale=("I8", [128, 4])), MX, {}),
        lambda t: (t.layers.mxfp8(weight_scale=("F8_E8M0", [128, 4])), MX, {}),
    ),
    "extra.mxfp8.rank": (
        lambda t: (t.layers.mxfp8(weight=("F8_E4M3", [128, 128, 1])), MX, {}),
        lambda t: (t.layers.mxfp8(), MX, {}),
    ),
    "extra.mxfp8.shapes": (
        lambda t: (t.layers.mxfp8(weight_scale=("U8", [4, 128])), MX, {}),
        lambda t: (t.layers.mxfp8(), MX, {}),
    ),
    "extra.mxfp8.scale_layout": (
        lambda t: (t.layers.mxfp8(n=127, weight_scale=("U8", [127, 4])), MX, {}),
        lambda t: (t.layers.mxfp8(n=127), MX, {}),
    ),
    "int8.scalar.rank": (
        lambda t: (t.layers.int8(weight=("I8", [8, 4, 3, 3]), weight_scale=("F32", [])), I8, {}),
        lambda t: (t.layers.int8(weight=("I8", [8, 36]), weight_scale=("F32", [])), I8, {}),
    ),
    "int8.dtype": (
        lambda t: (t.layers.int8(weight_scale=("BF16", [8, 1])), I8, {}),
        lambda t: (t.layers.int8(), I8, {}),
    ),
    "int8.rowwise.shapes": (
        lambda t: (t.layers.int8(weight_scale=("F32", [8])), I8, {}),
        lambda t: (t.layers.int8(weight_scale=("F32", [])), I8, {}),
    ),
    "extra.int8.groupsize": (
        lambda t: (t.layers.int8(k=128), with_keys(ROT, convrot_groupsize=128), {}),
        lambda t: (t.layers.int8(k=128), with_keys(ROT, convrot_groupsize=64), {}),
    ),
    "extra.int8.input_size": (
        lambda t: (t.layers.int8(k=96), ROT, {}),
        lambda t: (t.layers.int8(k=128), ROT, {}),
    ),
    "w4a4.dtype": (
        lambda t: (t.layers.w4a4(weight=("U8", [8, 128])), A4, {}),
        lambda t: (t.layers.w4a4(), A4, {}),
    ),
    "w4a4.shapes": (
        lambda t: (t.layers.w4a4(weight_scale=("F32", [8, 1])), A4, {}),
        lambda t: (t.layers.w4a4(), A4, {}),
    ),
    "crash.w4a4.groupsize": (
        lambda t: (t.layers.w4a4(), with_keys(A4, convrot_groupsize=None), {}),
        lambda t: (t.layers.w4a4(), with_keys(A4, convrot_groupsize="256"), {}),
    ),
    "w4a4.groupsize": (
        lambda t: (t.layers.w4a4(), with_keys(A4, convrot_groupsize=128), {}),
        lambda t: (t.layers.w4a4(), with_keys(A4, convrot_groupsize=64), {}),
    ),
    "w4a4.input_size": (
        lambda t: (t.layers.w4a4(k=320), A4, {}),
        lambda t: (t.layers.w4a4(k=320), with_keys(A4, convrot_groupsize=64), {}),
    ),
    "extra.w4a4.linear_dtype": (
        lambda t: (t.layers.w4a4(), with_keys(A4, linear_dtype="fp8"), {}),
        lambda t: (t.layers.w4a4(), with_keys(A4, linear_dtype="int8"), {}),
    ),
    "crash.w4a8.group_size": (
        lambda t: (t.layers.w4a8(), with_keys(A8, group_size=[]), {}),
        lambda t: (t.layers.w4a8(), with_keys(A8, group_size="16"), {}),
    ),
    "w4a8.group_size": (
        lambda t: (t.layers.w4a8(group=3), with_keys(A8, group_size=3), {}),
        lambda t: (t.layers.w4a8(group=4), with_keys(A8, group_size=4), {}),
    ),
    "w4a8.dtype": (
        lambda t: (t.layers.w4a8(weight_s_rel=("F8_E5M2", [8, 16])), A8, {}),
        lambda t: (t.layers.w4a8(), A8, {}),
    ),
    "w4a8.channel_dtype": (
        lambda t: (t.layers.w4a8(weight_s_channel=("F16", [8])), A8, {}),
        lambda t: (t.layers.w4a8(), A8, {}),
    ),
    "w4a8.rank": (
        lambda t: (t.layers.w4a8(weight=("I8", [8, 128, 1])), A8, {}),
        lambda t: (t.layers.w4a8(), A8, {}),
    ),
    "w4a8.shapes": (
        lambda t: (t.layers.w4a8(weight_s_rel=("F8_E4M3", [8, 8])), A8, {}),
        lambda t: (t.layers.w4a8(group=32), with_keys(A8, group_size=32), {}),
    ),
    "extra.w4a8.six_bit": (
        lambda t: (t.layers.w4a8(weight=("I8", [8, 192])), A8, {}),
        lambda t: (t.layers.w4a8(weight=("I8", [8, 193])), A8, {}),
    ),
    "w4a8.codebook": (
        lambda t: (t.layers.w4a8(weight_codebook=("F32", [15])), A8, {}),
        lambda t: (t.layers.w4a8(weight_codebook=("F32", [16])), A8, {}),
    ),
    "w4a8.correction": (
        lambda t: (t.layers.w4a8(weight_correction=("F32", [8, 16])), A8, {}),
        lambda t: (t.layers.w4a8(weight_correction=("F32", [16, 8])), A8, {}),
    ),
    "extra.w4a8.group": (
        lambda t: (t.layers.w4a8(k=256, group=5, weight_s_rel=("F8_E4M3", [8, 51])), with_keys(A8, group_size=5), {}),
        lambda t: (t.layers.w4a8(group=8), with_keys(A8, group_size=8), {}),
    ),
    "extra.w4a8.rotation": (
        lambda t: (t.layers.w4a8(), with_keys(A8, convrot_groupsize=128), {}),
        lambda t: (t.layers.w4a8(), with_keys(A8, convrot_groupsize=64), {}),
    ),
    "extra.w4a8.input_size": (
        lambda t: (t.layers.w4a8(k=128), A8, {}),
        lambda t: (t.layers.w4a8(k=512), A8, {}),
    ),
    "nvfp4.dtype": (
        lambda t: (t.layers.nvfp4(weight=("I8", [128, 32])), FP4, {}),
        lambda t: (t.layers.nvfp4(), FP4, {}),
    ),
    "nvfp4.scale_2": (
        lambda t: (t.layers.nvfp4(weight_scale_2=("F32", [1, 1])), FP4, {}),
        lambda t: (t.layers.nvfp4(weight_scale_2=("F32", [1])), FP4, {}),
    ),
    "nvfp4.rank": (
        lambda t: (t.layers.nvfp4(weight=("U8", [128, 8, 2, 2])), FP4, {}),
        lambda t: (t.layers.nvfp4(), FP4, {}),
    ),
    "nvfp4.shapes": (lambda t: (t.layers.nvfp4(n=127), FP4, {}), lambda t: (t.layers.nvfp4(n=128), FP4, {})),
    "nvfp4.pre_quant_scale": (
        lambda t: (t.layers.nvfp4(pre_quant_scale=("F32", [32])), FP4, {}),
        lambda t: (t.layers.nvfp4(pre_quant_scale=("F16", [64])), FP4, {}),
    ),
    "extra.nvfp4.scale_layout": (
        lambda t: (t.layers.nvfp4(n=64, weight_scale=("F8_E4M3", [64, 4])), FP4, {}),
        lambda t: (t.layers.nvfp4(n=256), FP4, {}),
    ),
    "extra.nvfp4.input_scale": (
        lambda t: (t.layers.nvfp4(input_scale=("U8", [])), FP4, {}),
        lambda t: (t.layers.nvfp4(input_scale=("F32", [], t.number("F32", 0.1))), FP4, {}),
    ),
    "quanto.map_missing": (
        lambda t: (t.layers.quanto(), {}, {"quantization_format": "quanto"}),
        sound_quanto,
    ),
    "quanto.map_base64": (
        lambda t: (t.layers.quanto(), {}, {"quantization_format": "quanto", "quantization_map_base64": "e3 0="}),
        sound_quanto,
    ),
    "quanto.map_empty": (lambda t: quanto(t, {}), sound_quanto),
    "quanto.map_entries": (lambda t: quanto(t, {"a": "qint8"}), sound_quanto),
    "crash.quanto.recursion": (
        lambda t: quanto(t, b'{"a": ' + b"[" * 2000 + b"]" * 2000 + b"}"),
        lambda t: quanto(t, b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}"),
    ),
    "quanto.prefix_mismatch": (lambda t: quanto(t, {"b": {"weights": "qint8", "activations": "none"}}), sound_quanto),
    "quanto.weights_type": (lambda t: quanto(t, {"a": {"weights": "qint4", "activations": "none"}}), sound_quanto),
    "quanto.activations_type": (lambda t: quanto(t, {"a": {"weights": "qint8", "activations": None}}), sound_quanto),
    "quanto.missing_tensors": (lambda t: quanto(t, output_scale=None), sound_quanto),
    "quanto.dense_and_packed": (lambda t: quanto(t, weight=("BF16", [8, 16])), sound_quanto),
    "extra.quanto.mixed": (
        lambda t: quanto(t, **{"other.weight": ("I8", [8, 16])}),
        lambda t: quanto(t, **{"other.weight": ("BF16", [8, 16])}),
    ),
    "quanto.data": (lambda t: quanto(t, **{"weight._data": ("U8", [8, 16])}), sound_quanto),
    "quanto.scale": (lambda t: quanto(t, **{"weight._scale": ("BF16", [8])}), sound_quanto),
    "quanto.aux_scale": (lambda t: quanto(t, input_scale=("BF16", [1])), sound_quanto),
    "quanto.collision": (
        lambda t: (
            {**t.layers.quanto("a"), **t.layers.quanto("model.a")},
            {},
            t.quanto_metadata({name: {"weights": "qint8", "activations": "none"} for name in ("a", "model.a")}),
        ),
        sound_quanto,
    ),
    "extra.quanto.aux_not_one": (
        lambda t: quanto(t, input_scale=("F32", [], t.number("F32", 0.5))),
        lambda t: quanto(t, input_scale=("F32", [], t.number("F32", 1.0))),
    ),
    "extra.quanto.undeclared": (lambda t: (t.layers.quanto(), {}, {"quantization_format": "Quanto"}), sound_quanto),
    "extra.runtime": (
        lambda t: (t.layers.int8(), I8, {}),
        lambda t: (t.layers.int8(), ROT, {}),
    ),
    "extra.rules.compatible": (
        lambda t: (t.layers.int8(weight_scale=("F32", [8])), I8, {}),
        lambda t: (t.layers.int8(weight_scale=("F32", [1, 8])), I8, {}),
    ),
}
COMPATIBLE = {
    "extra.dialect": (
        lambda t: (t.layers.int8(weight_scale=("F32", [8])), I8, {}),
        lambda t: (t.layers.int8(), I8, {}),
    ),
    "extra.dialect.file": (
        lambda t: (t.layers.int8("model.a"), {}, meta({"layers": I8})),
        lambda t: (t.layers.int8("unheard.of.a"), {}, meta({"layers": I8})),
    ),
    "extra.storage.plain": (
        ({"a.weight": ("F8_E4M3", [8, 8])}, {}, {}),
        ({"a.weight": ("F8_E4M3", [8, 8]), "b.weight_scale": ("F32", [])}, {}, {}),
    ),
}


def rules_of(example, tools, folder, rules="strict"):
    if callable(example) and example.__code__.co_argcount == 2:
        paths = example(tools, folder)
    else:
        tensors, markers, metadata = example(tools) if callable(example) else example
        paths = tools.write(folder / "model.safetensors", tensors, metadata=metadata or None, markers=markers)
    return {fault.rule for fault in check(paths, rules=rules, rename=same_name).faults}


@pytest.mark.parametrize("rule", EXAMPLES)
def test_breaking_and_nearly_breaking(rule, tools, tmp_path):
    breaking, near = EXAMPLES[rule]
    (tmp_path / "breaking").mkdir()
    (tmp_path / "near").mkdir()
    assert rule in rules_of(breaking, tools, tmp_path / "breaking")
    assert rule not in rules_of(near, tools, tmp_path / "near")


@pytest.mark.parametrize("rule", COMPATIBLE)
def test_what_compatible_understands(rule, tools, tmp_path):
    breaking, near = COMPATIBLE[rule]
    (tmp_path / "breaking").mkdir()
    (tmp_path / "near").mkdir()
    assert rule in rules_of(breaking, tools, tmp_path / "breaking", "compatible")
    assert rule not in rules_of(breaking, tools, tmp_path / "breaking", "strict")
    assert rule not in rules_of(near, tools, tmp_path / "near", "compatible")


def undeclared(count):
    return lambda t: ({f"{i}.weight": ("I8", [1, 1]) for i in range(count)}, {}, {})


def row_scales(count):
    return lambda t: (t.layers.int8(n=count), I8, {})


def while_read(happens):
    """An example whose file meets ``happens`` after its header was read and before its scales are."""

    def make(t, folder, monkeypatch):
        original = values_module._judge_file

        def judge(header, *rest):
            happens(header.path)
            original(header, *rest)

        monkeypatch.setattr(values_module, "_judge_file", judge)
        return row_scales(8)(t)

    return make


def shrink(path):
    os.truncate(path, os.path.getsize(path) - 40)


def be_looked_at(path):
    """Somebody reads the file: its time of access changes, nothing else."""
    info = os.stat(path)
    os.utime(path, ns=(info.st_atime_ns + 10**9, info.st_mtime_ns))


STAGED = {
    "extra.file.changed": (while_read(shrink), while_read(be_looked_at)),
    "extra.file.too_many_faults": (undeclared(4), undeclared(3)),
    "extra.scale.count": (row_scales(9), row_scales(8)),
}
"""Rules that take more than a file: a limit made small, or something that happens during the check."""


@pytest.mark.parametrize("rule", STAGED)
@pytest.mark.parametrize("which", ["breaking", "near"])
def test_limits_and_changes_on_disk(rule, which, tools, tmp_path, monkeypatch):
    monkeypatch.setattr(findings_module, "MAX_FAULTS", 3)
    monkeypatch.setattr(values_module, "MAX_VALUES_BYTES", 32)
    example = STAGED[rule][which == "near"]
    if example.__code__.co_argcount == 3:
        staged = example(tools, tmp_path, monkeypatch)
        found = rules_of(staged, tools, tmp_path)
    else:
        found = rules_of(example, tools, tmp_path)
    assert (rule in found) is (which == "breaking")
    assert found - {rule, "marker.missing", "extra.runtime"} == set()


def test_a_fault_that_is_not_listed_is_counted(tools, tmp_path, monkeypatch):
    monkeypatch.setattr(findings_module, "MAX_FAULTS", 3)
    tensors, _, _ = undeclared(4)(tools)
    assert check(tools.write(tmp_path / "four.safetensors", tensors)).groups[0].count == 4


def test_every_rule_has_a_file_that_breaks_it_and_one_that_nearly_does():
    assert set(EXAMPLES) | set(COMPATIBLE) | set(STAGED) | set(DEEP_EXAMPLES) == set(RULES)
    assert all(len(pair) == 2 for table in (EXAMPLES, COMPATIBLE, STAGED, DEEP_EXAMPLES) for pair in table.values())


def test_templates_use_known_words_only():
    """Every template must be fillable from the words that the checker passes (found by the examples above, if not
    here).
    """
    for rule in RULES.values():
        for template in (rule.message, rule.fix):
            for _, field, _, _ in string.Formatter().parse(template):
                assert field is None or field.isidentifier(), (rule.id, field)


@pytest.mark.parametrize(
    "rule", [rule for rule in RULES.values() if rule.severity == "error"], ids=lambda rule: rule.id
)
def test_every_error_says_what_to_do(rule):
    assert rule.fix.strip()
    assert rule.message.endswith((".", "{look}."))
    assert rule.title


def test_quanto_map_is_strict_base64(tools, tmp_path):
    good = json.dumps({"a": {"weights": "qint8", "activations": "none"}}).encode()
    url_safe = base64.urlsafe_b64encode(good + b" " * 2 + b"\xff").decode()
    metadata = {"quantization_format": "quanto", "quantization_map_base64": url_safe}
    path = tools.write(tmp_path / "m.safetensors", tools.layers.quanto(), metadata=metadata)
    assert {fault.rule for fault in check(path).errors} == {"quanto.map_base64"}


@pytest.mark.parametrize(
    ("made", "declared", "stored"),
    [("int8", I8, 8), ("w4a4", A4, 8), ("w4a8", A8, 8), ("fp8", FP8, 16), ("nvfp4", FP4, 128), ("mxfp8", MX, 128)],
)
def test_a_bias_has_one_number_a_row_in_every_format(tools, tmp_path, made, declared, stored):
    """A block format may have been padded in rows, by less than its multiple; no other has."""
    padding = {"nvfp4": 16, "mxfp8": 32}.get(made, 1)
    for length, sound in ((stored, True), (stored + 1, False), (stored - padding + 1, True), (stored - padding, False)):
        path = tools.write(
            tmp_path / f"{length}.safetensors", getattr(tools.layers, made)(bias=("F32", [length])), None, declared
        )
        report = check(path)
        assert [fault.rule for fault in report.faults if fault.severity == "error"] == (
            [] if sound else ["extra.bias.shape"]
        ), (length, report.faults)


def test_a_bias_tells_that_a_weight_is_transposed(tools, tmp_path):
    (fault,) = check(tools.write(tmp_path / "m.safetensors", tools.layers.fp8(bias=("BF16", [32])), None, FP8)).faults
    assert (fault.layer, fault.tensor, fault.expected, fault.found) == ("a", "a.bias", "(16,)", "(32,)")
    assert fault.message == (
        "Layer a: its bias is (32,); a weight of (16, 32) needs a bias of (16,): the weight may be stored transposed."
    )


def test_a_quanto_bias_has_one_number_a_row(tools, tmp_path):
    tensors, _, metadata = quanto(tools, bias=("BF16", [16]))
    (fault,) = check(tools.write(tmp_path / "m.safetensors", tensors, metadata)).faults
    assert fault.rule == "extra.bias.shape"
    assert "transposed" in fault.message


def test_a_bias_is_judged_beside_other_faults(tools, tmp_path):
    tensors = tools.layers.int8(weight_scale=("BF16", [8, 1]), bias=("F32", [9]))
    report = check(tools.write(tmp_path / "m.safetensors", tensors, None, I8))
    assert {fault.rule for fault in report.errors} == {"int8.dtype", "extra.bias.shape"}


@pytest.mark.parametrize(("made", "declared", "n"), [("nvfp4", FP4, 120), ("mxfp8", MX, 112)])
def test_rows_that_are_not_padded_have_a_bias_each(tools, tmp_path, made, declared, n):
    """A bias that is longer than the weight tells that rows are lost, however small the difference."""
    for length, sound in ((n, True), (128, False), (n - 1, False)):
        tensors = getattr(tools.layers, made)(n=n, bias=("F32", [length]))
        report = check(tools.write(tmp_path / f"{length}.safetensors", tensors, None, declared), rules="compatible")
        assert [fault.rule for fault in report.errors] == ([] if sound else ["extra.bias.shape"]), length


def test_a_bias_of_a_plain_layer_is_the_models_business(tools, tmp_path):
    tensors = {**tools.layers.int8(), "b.weight": ("BF16", [4, 4]), "b.bias": ("BF16", [3])}
    assert check(tools.write(tmp_path / "m.safetensors", tensors, None, I8)).verdict == "ok"


STRAYS = (
    "a.weight_scale_inv",
    "a.weight.scale",
    "a.weight_scales",
    "a.scale",
    "a.scales",
    "a.absmax",
    "a.weight_zero_point",
    "a.zero_point",
)


@pytest.mark.parametrize("rules", ["strict", "compatible"])
@pytest.mark.parametrize("name", STRAYS)
def test_a_scale_by_any_other_name_is_not_lost(tools, tmp_path, name, rules):
    """Beside a weight that is declared, one that is not, and one that no format here takes."""
    scale = ("F32", [16, 1], tools.number("F32", 0.01) * 16)
    for number, (tensors, markers) in enumerate(
        (
            ({**tools.layers.fp8(), name: scale}, FP8),
            ({"a.weight": ("F8_E4M3", [16, 32]), name: scale}, None),
            ({"a.weight": ("F8_E5M2", [16, 32]), name: scale}, None),
        )
    ):
        report = check(tools.write(tmp_path / f"{number}.safetensors", tensors, None, markers), rules=rules)
        assert ("extra.scale.orphan", "a", name) in {(f.rule, f.layer, f.tensor) for f in report.errors}, report.faults


@pytest.mark.parametrize(
    ("weight", "scale"),
    [
        ("experts.gate_up_proj", "experts.gate_up_proj_scale"),
        ("experts.w13", "experts.w13_weight_scale"),
        ("mlp.experts.down_proj_blocks", "mlp.experts.down_proj_scales"),
        ("experts.w2_weight", "experts.w2_weight_scale_inv"),
    ],
)
def test_scaled_weights_without_the_usual_name_are_refused(tools, tmp_path, weight, scale):
    tensors = {weight: ("U8", [4, 16, 32]), scale: ("F32", [4, 16], tools.number("F32", 0.01) * 64)}
    (fault,) = check(tools.write(tmp_path / "m.safetensors", tensors)).errors
    assert (fault.rule, fault.layer, fault.tensor) == ("extra.scale.orphan", weight.removesuffix(".weight"), scale)


def test_what_is_called_scale_beside_plain_weights_is_the_models_own(tools, tmp_path):
    tensors = {
        **tools.layers.int8(),
        "norm.scale": ("BF16", [8]),
        "query_norm.scale": ("F8_E5M2", [8]),
        "b.weight": ("BF16", [8, 8]),
        "b.scale": ("BF16", [8]),
        "block.scale_shift_table": ("BF16", [6, 8]),
        "logit_scale": ("F32", []),
        "a.input_quantizer_scale": ("F32", []),
    }
    assert check(tools.write(tmp_path / "m.safetensors", tensors, None, I8)).verdict == "ok"


@pytest.mark.parametrize("declared", [A4, A8], ids=["w4a4", "w4a8"])
@pytest.mark.parametrize("said", [{"convrot": False}, {"convrot": 0}, {"params": {"convrot": False}}], ids=str)
@pytest.mark.parametrize("rules", ["strict", "compatible"])
def test_formats_that_are_always_rotated_cannot_be_declared_unrotated(tools, tmp_path, declared, said, rules):
    tensors = tools.layers.w4a4() if declared is A4 else tools.layers.w4a8()
    report = check(tools.write(tmp_path / "m.safetensors", tensors, None, with_keys(declared, **said)), rules=rules)
    assert {fault.layer for fault in report.errors} == {"a"}


def test_a_nested_null_is_as_good_as_nothing(tools, tmp_path):
    for rules in ("strict", "compatible"):
        for number, (tensors, declared) in enumerate(((tools.layers.int8(), I8), (tools.layers.mxfp8(), MX))):
            nested = with_keys(declared, params={"convrot": None})
            path = tools.write(tmp_path / f"{number}.safetensors", tensors, None, nested)
            assert check(path, rules=rules).verdict == "ok"


@pytest.mark.parametrize(("value", "rule"), [(1e-60, "extra.scale.not_positive"), (1e60, "extra.scale.nonfinite")])
def test_a_64_bit_scale_is_judged_as_the_32_bit_number_that_is_used(tools, tmp_path, value, rule):
    tensors = tools.layers.fp8(weight_scale=("F64", [], tools.number("F64", value)))
    assert rule in {fault.rule for fault in check(tools.write(tmp_path / "m.safetensors", tensors, None, FP8)).errors}


def test_the_layers_of_a_file_are_counted_before_they_are_judged(tools, tmp_path):
    """Markers and Quanto maps as well; what is not judged is not called undeclared."""
    many = {f"l{i}": {"weights": "qint8", "activations": "none"} for i in range(10_001)}
    markers = tools.write(
        tmp_path / "markers.safetensors",
        {
            f"{name}.{part}": held
            for name in many
            for part, held in (("weight", ("I8", [1, 4])), ("bias", ("F32", [1])))
        },
        None,
        {key: {"format": "int8_tensorwise"} for key in many},
    )
    mapped = tools.write(tmp_path / "map.safetensors", tools.layers.quanto(), tools.quanto_metadata(many))
    for path in (markers, mapped):
        (fault,) = check(path).errors
        assert (fault.rule, fault.expected, fault.found) == ("extra.layer.count", "at most 10,000", "10,001")


def test_the_names_of_tensors_are_said_in_a_group_without_layers(tools, tmp_path):
    for shard in (1, 2):
        tensors = {f"norm{i}.weight": ("BF16", [4]) for i in range(6)}
        tools.write(tmp_path / f"m-0000{shard}-of-00002.safetensors", tensors)
    (group,) = check(tmp_path / "m-00001-of-00002.safetensors").groups
    assert group.count == 6
    assert group.message.endswith("The same in norm1.weight, norm2.weight, norm3.weight and 2 more.")


def test_optional_tensors_are_no_orphans_of_a_faulty_layer(tools, tmp_path):
    tensors = tools.layers.nvfp4(weight=("U8", [128, 8, 4]), pre_quant_scale=("F32", [64]), input_scale=("F32", []))
    assert {fault.rule for fault in check(tools.write(tmp_path / "m.safetensors", tensors, None, FP4)).faults} == {
        "nvfp4.rank"
    }


def test_a_scale_of_wrong_type_and_shape_has_both_faults_and_no_repair(tools, tmp_path):
    tensors = tools.layers.int8(weight_scale=("F16", [9, 1]))
    faults = check(tools.write(tmp_path / "m.safetensors", tensors, None, I8)).errors
    assert [fault.rule for fault in faults] == ["int8.dtype", "int8.rowwise.shapes"]
    assert not any(fault.repairable for fault in faults)


def test_a_number_written_as_text_is_said_to_be_understood(tools, tmp_path):
    declared = with_keys(A4, convrot_groupsize="256")
    path = tools.write(tmp_path / "m.safetensors", tools.layers.w4a4(), None, declared)
    report = check(path, rules="compatible")
    assert report.verdict == "ok"
    assert [(fault.rule, fault.found) for fault in report.faults] == [
        ("extra.dialect", 'convrot_groupsize "256" read as 256')
    ]


def test_no_depth_of_nesting_is_an_exception(tools, tmp_path):
    """The parsers give up at depths of their own, which depend on how deep the caller is."""
    for depth in range(900, 1001):
        header = '{"a":' * depth + "1" + "}" * depth
        (fault,) = check(tools.write_raw(tmp_path / "m.safetensors", header)).faults
        assert fault.rule == "crash.file", depth


def test_a_legacy_file_that_shrinks_after_its_header_was_read(tools, tmp_path):
    """Its activation scales are looked at while layers are judged."""
    tensors = {
        "scaled_fp8": ("F8_E4M3", [2]),
        "a.weight": ("F8_E4M3", [8, 64]),
        "a.scale_weight": ("F32", [1]),
        "a.scale_input": ("F32", [1]),
    }
    checkpoint = open_checkpoint(tools.write(tmp_path / "m.safetensors", tensors))
    os.truncate(tmp_path / "m.safetensors", 100)
    assert "extra.file.changed" in {fault.rule for fault in check_checkpoint(checkpoint, rules="compatible").errors}
    unread = check_checkpoint(checkpoint, rules="compatible", values=False)
    assert unread.verdict == "ok"
