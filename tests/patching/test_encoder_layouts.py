"""Encoders that cannot be tiny: files of their real layout and size, INT8 in every linear and in the table.

The files are sparse and their codes are never read, so that gigabytes cost nothing; what is proved is which model
ComfyUI recognises and that each quantised layer of the file is one of it, in its shape.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import in_process  # noqa: F401  (prepares ComfyUI before anything imports it)
import pytest
import torch
from quant_loader.checkpoint import check
from quant_loader.demo import tiny_core
from quant_loader.patching.load import load_text_encoder
from quant_loader.patching.patcher import packed_modules

MARKER = b'{"format": "int8_tensorwise"}'


class Dense(NamedTuple):
    """A tensor that is not quantised: ones in bfloat16, or `data`."""

    name: str
    shape: tuple[int, ...]
    data: bytes | None = None


class Packed(NamedTuple):
    """A weight as INT8 rows: a hole for the codes."""

    name: str
    shape: tuple[int, int]


def t5(vocabulary: int, every_block: bool) -> Iterator[Dense | Packed]:
    """T5-XXL's encoder; UMT5-XXL's has a larger vocabulary and positions in ``every_block``."""
    width, inner = 4096, 10240
    yield Packed("shared", (vocabulary, width))
    for i in range(24):
        attention, feed = f"encoder.block.{i}.layer.0", f"encoder.block.{i}.layer.1"
        for part in "qkvo":
            yield Packed(f"{attention}.SelfAttention.{part}", (width, width))
        if every_block or i == 0:
            yield Dense(f"{attention}.SelfAttention.relative_attention_bias.weight", (32, 64))
        yield Packed(f"{feed}.DenseReluDense.wi_0", (inner, width))
        yield Packed(f"{feed}.DenseReluDense.wi_1", (inner, width))
        yield Packed(f"{feed}.DenseReluDense.wo", (width, inner))
        for layer in (attention, feed):
            yield Dense(f"{layer}.layer_norm.weight", (width,))
    yield Dense("encoder.final_layer_norm.weight", (width,))
    if every_block:
        pieces = tiny_core.tokenizer()
        yield Dense("spiece_model", tuple(pieces.shape), pieces.numpy().tobytes())


def qwen25_7b() -> Iterator[Dense | Packed]:
    """The language model of Qwen2.5-VL 7B."""
    width, inner, kv = 3584, 18944, 512
    yield Packed("model.embed_tokens", (152064, width))
    for i in range(28):
        layer = f"model.layers.{i}"
        for part, rows in (("q", width), ("k", kv), ("v", kv)):
            yield Packed(f"{layer}.self_attn.{part}_proj", (rows, width))
            yield Dense(f"{layer}.self_attn.{part}_proj.bias", (rows,))
        yield Packed(f"{layer}.self_attn.o_proj", (width, width))
        for part, shape in (("gate", (inner, width)), ("up", (inner, width)), ("down", (width, inner))):
            yield Packed(f"{layer}.mlp.{part}_proj", shape)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield Dense(f"{layer}.{norm}.weight", (width,))
    yield Dense("model.norm.weight", (width,))


# Layout, the loader's type, the class that holds the encoder, and its name in it.
ENCODERS: dict[str, tuple[Any, str, str]] = {
    "t5xxl": (lambda: t5(32128, every_block=False), "ltxv", "t5xxl"),
    "umt5xxl": (lambda: t5(256384, every_block=True), "wan", "umt5xxl"),
    "qwen25_7b": (qwen25_7b, "qwen_image", "qwen25_7b"),
}


def write(path: Path, layout: Iterator[Dense | Packed]) -> Path:
    """A sparse file of these tensors."""
    pieces: list[tuple[str, str, tuple[int, ...], int, bytes]] = []
    for tensor in layout:
        if isinstance(tensor, Packed):
            rows, columns = tensor.shape
            pieces.append((f"{tensor.name}.weight", "I8", tensor.shape, rows * columns, b""))
            pieces.append((f"{tensor.name}.weight_scale", "F32", (rows, 1), 4 * rows, struct.pack("<f", 0.001) * rows))
            pieces.append((f"{tensor.name}.comfy_quant", "U8", (len(MARKER),), len(MARKER), MARKER))
        elif tensor.data is not None:
            pieces.append((tensor.name, "U8", tensor.shape, len(tensor.data), tensor.data))
        else:
            ones = torch.ones(tensor.shape, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
            pieces.append((tensor.name, "BF16", tensor.shape, len(ones), ones))
    header: dict[str, Any] = {}
    offset = 0
    for name, dtype, shape, size, _ in pieces:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for _, _, _, size, data in pieces:
            if data:
                out.write(data)
            else:
                out.seek(size, 1)
        out.truncate(8 + len(text) + offset)
    return path


@pytest.mark.parametrize("encoder", ENCODERS)
def test_every_quantised_layer_becomes_one_of_the_encoder(encoder: str, tmp_path: Path) -> None:
    layout, kind, name = ENCODERS[encoder]
    path = write(tmp_path / f"{encoder}.safetensors", layout())
    declared = {layer.name: layer.shape for layer in check(str(path)).layers}
    clip, _ = load_text_encoder([path], kind)
    assert hasattr(clip.cond_stage_model, name)
    modules = packed_modules(clip.patcher.model)
    assert {m.weight._params.declaration.name: tuple(m.weight.shape) for m in modules.values()} == declared
    assert sum(m.is_table for m in modules.values()) == 1
    assert all(key.startswith(f"{name}.transformer.") for key in modules)
