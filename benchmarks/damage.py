"""Damaged and mis-declared checkpoints: what `faults.py` sends through both loaders, and what can be known of each.

The model is the demo's tiny Flux with heavy-tailed weights (Student t with 5 degrees of freedom, as trained weights
have them), so that the deep check has something to look at: nothing can be known of the rotation of Gaussian weights.
Most damage is done to one layer, `LAYER`; the layer that a message has to name is `Case.layer`.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from quant_loader.demo import models, quantize
from quant_loader.demo.quantize import Tensors
from safetensors.torch import save

LAYER = "single_blocks.0.linear1"  # 1792 x 256: every picture goes through it
WIDE = "single_blocks.0.linear2"  # 256 x 1280
TWIN, OTHER_TWIN = "double_blocks.0.img_mlp.0", "double_blocks.0.txt_mlp.0"  # two layers of one shape
FORMATS = ("int8_scalar", "int8_row", "int8_convrot", "fp8", "mxfp8", "nvfp4", "convrot_w4a4")
NOT_IN_STOCK = ("asym_w4a8", "quanto_int8")  # ComfyUI 0.30 loads no file of these, however sound

Proof = Literal["header", "model", "deep", "none", "sound"]
"""What can be known of a case: the header (with markers and row scales) proves it; the file contradicts itself nowhere,
but it is not the model that it says; the deep check tells; nothing shows it; nothing is wrong."""


@dataclass
class Draft:
    """A checkpoint that is being damaged. `finish` changes the bytes of the written file."""

    tensors: Tensors
    metadata: dict[str, str]
    finish: Callable[[bytes], bytes] | None = None

    def marker(self, layer: str = LAYER) -> dict[str, object]:
        found = json.loads(bytes(self.tensors[f"{layer}.comfy_quant"].tolist()))
        assert isinstance(found, dict)
        return found

    def mark(self, marker: object, layer: str = LAYER) -> None:
        """Replaces the marker: bytes as they are, anything else as JSON."""
        text = marker if isinstance(marker, bytes) else json.dumps(marker).encode()
        self.tensors[f"{layer}.comfy_quant"] = torch.tensor(list(text), dtype=torch.uint8)

    def drop(self, suffix: str, layer: str = LAYER) -> torch.Tensor:
        return self.tensors.pop(f"{layer}.{suffix}")

    def get(self, suffix: str, layer: str = LAYER) -> torch.Tensor:
        return self.tensors[f"{layer}.{suffix}"]

    def put(self, suffix: str, tensor: torch.Tensor, layer: str = LAYER) -> None:
        self.tensors[f"{layer}.{suffix}"] = tensor

    def layers(self) -> list[str]:
        ends = (".comfy_quant", ".weight._data")
        return sorted({name.removesuffix(end) for name in self.tensors for end in ends if name.endswith(end)})

    def data(self) -> bytes:
        """The bytes of the file."""
        whole = save({k: v.contiguous() for k, v in self.tensors.items()}, metadata=self.metadata or None)
        return self.finish(whole) if self.finish else whole


Damage = Callable[[Draft], None]


@dataclass(frozen=True)
class Case:
    """One checkpoint. `layer` is None where the fault is the file's, so that no layer is to be named."""

    name: str
    base: str
    what: str
    damage: Damage = field(compare=False, repr=False)
    proof: Proof = "header"
    layer: str | None = LAYER
    shard: bool = False
    """Written as the first of two shards, of which the second is missing."""

    def file_name(self) -> str:
        return f"{self.name}{'-00001-of-00002' if self.shard else ''}.safetensors"


def base_tensors(seed: int = 1) -> Tensors:
    """The 16-bit model: each quantisable weight redrawn from a Student t with 5 degrees, at the same spread."""
    tensors = models.flux_state_dict(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for layer in quantize.layers_to_quantize(tensors):
        weight = tensors[f"{layer}.weight"]
        normal = torch.randn(weight.shape, generator=generator)
        chi = torch.randn(5, *weight.shape, generator=generator).square().sum(0)
        student = normal / (chi / 5).sqrt() * math.sqrt(3 / 5)
        tensors[f"{layer}.weight"] = (student * weight.float().std()).to(weight.dtype)
    return tensors


class Library:
    """The sound files of every format, quantised once; `draft` hands out copies to damage."""

    def __init__(self) -> None:
        self.reference = base_tensors()
        self._sound: dict[str, tuple[Tensors, dict[str, str]]] = {}

    def sound(self, base: str) -> tuple[Tensors, dict[str, str]]:
        if base not in self._sound:
            packed_inputs = base.endswith("+inputs")
            self._sound[base] = quantize.quantize(
                self.reference, base.removesuffix("+inputs"), pack_inputs=packed_inputs
            )
        return self._sound[base]

    def draft(self, case: Case) -> Draft:
        """The damaged checkpoint. Its tensors are shared with the sound one: damage replaces, never writes into."""
        tensors, metadata = self.sound(case.base)
        draft = Draft(dict(tensors), dict(metadata))
        case.damage(draft)
        return draft

    def write(self, case: Case, folder: Path) -> Path:
        path = folder / case.file_name()
        path.write_bytes(self.draft(case).data())
        return path


# --- damage to markers ------------------------------------------------------------------------------------------------


def marker_missing(draft: Draft) -> None:
    draft.drop("comfy_quant")


def markers_all_missing(draft: Draft) -> None:
    for layer in draft.layers():
        draft.drop("comfy_quant", layer)


def marker_zeroed(draft: Draft) -> None:
    draft.put("comfy_quant", torch.zeros_like(draft.get("comfy_quant")))


def marker_truncated(draft: Draft) -> None:
    draft.put("comfy_quant", draft.get("comfy_quant")[:-6].clone())


def marker_text(draft: Draft) -> None:
    draft.mark(b"quantised with love")


def marker_empty(draft: Draft) -> None:
    draft.put("comfy_quant", torch.zeros(0, dtype=torch.uint8))


def marker_list(draft: Draft) -> None:
    draft.mark([draft.marker()])


def marker_unknown_format(draft: Draft) -> None:
    draft.mark({**draft.marker(), "format": "int3_blockwise"})


def marker_without_format(draft: Draft) -> None:
    draft.mark({key: value for key, value in draft.marker().items() if key != "format"})


def marker_of_nowhere(draft: Draft) -> None:
    """The markers' layers were renamed, their tensors were not."""
    draft.put("comfy_quant", draft.drop("comfy_quant"), "single_blocks.7.linear1")


def changed(**changes: object) -> Damage:
    """The marker with keys changed; None takes a key away."""

    def damage(draft: Draft) -> None:
        marker = {**draft.marker(), **changes}
        draft.mark({key: value for key, value in marker.items() if value is not None})

    return damage


def everywhere(damage_one: Callable[[Draft, str], None]) -> Damage:
    def damage(draft: Draft) -> None:
        for layer in draft.layers():
            damage_one(draft, layer)

    return damage


def all_changed(**changes: object) -> Damage:
    """As `changed`, in every layer."""

    def one(draft: Draft, layer: str) -> None:
        marker = {**draft.marker(layer), **changes}
        draft.mark({key: value for key, value in marker.items() if value is not None}, layer)

    return everywhere(one)


def contradicted(**changes: object) -> Damage:
    """The file's metadata declares the layer too, and otherwise."""

    def damage(draft: Draft) -> None:
        declared = {LAYER: {**draft.marker(), **changes}}
        draft.metadata["_quantization_metadata"] = json.dumps({"format_version": "1.0", "layers": declared})

    return damage


def only_metadata(draft: Draft) -> None:
    """Sound: declared in the metadata instead of by markers."""
    layers = {layer: draft.marker(layer) for layer in draft.layers()}
    markers_all_missing(draft)
    draft.metadata["_quantization_metadata"] = json.dumps({"format_version": "1.0", "layers": layers})


def metadata(text: str) -> Damage:
    def damage(draft: Draft) -> None:
        only_metadata(draft)
        draft.metadata["_quantization_metadata"] = text

    return damage


def metadata_cut(draft: Draft) -> None:
    only_metadata(draft)
    draft.metadata["_quantization_metadata"] = draft.metadata["_quantization_metadata"][:-40]


def metadata_incomplete(draft: Draft) -> None:
    only_metadata(draft)
    declared = json.loads(draft.metadata["_quantization_metadata"])
    del declared["layers"][LAYER]
    draft.metadata["_quantization_metadata"] = json.dumps(declared)


# --- damage to tensors ------------------------------------------------------------------------------------------------


def missing(suffix: str) -> Damage:
    def damage(draft: Draft) -> None:
        draft.drop(suffix)

    return damage


def cast(suffix: str, dtype: torch.dtype) -> Damage:
    def damage(draft: Draft) -> None:
        draft.put(suffix, draft.get(suffix).to(dtype))

    return damage


def viewed(suffix: str, dtype: torch.dtype) -> Damage:
    """The same bytes under another dtype."""

    def damage(draft: Draft) -> None:
        draft.put(suffix, draft.get(suffix).view(dtype))

    return damage


def shaped(suffix: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    def damage(draft: Draft) -> None:
        draft.put(suffix, change(draft.get(suffix)).clone())

    return damage


def value(suffix: str, number: float) -> Damage:
    """The first half of a tensor (of a single value: all of it) set to a number."""

    def damage(draft: Draft) -> None:
        tensor = draft.get(suffix).clone()
        flat = tensor.reshape(-1)
        flat[: (flat.numel() + 1) // 2] = torch.tensor(number).to(tensor.dtype)
        draft.put(suffix, flat.reshape(tensor.shape))

    return damage


def byte(suffix: str, code: int) -> Damage:
    """64 bytes of a tensor set."""

    def damage(draft: Draft) -> None:
        tensor = draft.get(suffix)
        raw = tensor.clone().view(torch.uint8).reshape(-1)
        raw[raw.numel() // 3 :][:64] = code
        draft.put(suffix, raw.view(tensor.dtype).reshape(tensor.shape))

    return damage


def sign_bits(suffix: str) -> Damage:
    """The top bit of every byte set."""

    def damage(draft: Draft) -> None:
        tensor = draft.get(suffix)
        draft.put(suffix, (tensor.view(torch.uint8) | 0x80).view(tensor.dtype))

    return damage


def absent(draft: Draft) -> None:
    """Nothing of the layer is in the file."""
    draft.tensors = {name: tensor for name, tensor in draft.tensors.items() if not name.startswith(f"{LAYER}.")}


def inverted(suffix: str) -> Damage:
    def damage(draft: Draft) -> None:
        draft.put(suffix, draft.get(suffix).float().reciprocal())

    return damage


def negated(suffix: str) -> Damage:
    def damage(draft: Draft) -> None:
        draft.put(suffix, -draft.get(suffix))

    return damage


def added(suffix: str, tensor: torch.Tensor, layer: str = LAYER) -> Damage:
    def damage(draft: Draft) -> None:
        draft.put(suffix, tensor, layer)

    return damage


def exchanged(suffix: str) -> Damage:
    """A tensor of two layers of one shape exchanged."""

    def damage(draft: Draft) -> None:
        one, other = draft.get(suffix, TWIN), draft.get(suffix, OTHER_TWIN)
        draft.put(suffix, other, TWIN)
        draft.put(suffix, one, OTHER_TWIN)

    return damage


def reversed_rows(suffix: str) -> Damage:
    return shaped(suffix, lambda tensor: tensor.flip(0))


def other_nibbles(draft: Draft) -> None:
    """The two codes of every byte exchanged, in all layers: the other convention of packing."""
    for layer in draft.layers():
        weight = draft.get("weight", layer)
        codes = weight.view(torch.uint8)
        draft.put("weight", ((codes << 4) | (codes >> 4)).view(weight.dtype), layer)


def row_by_row(draft: Draft) -> None:
    """Block scales of all layers in plain row order instead of 128 x 4 tiles."""
    for layer in draft.layers():
        scale = draft.get("weight_scale", layer)
        rows, columns = scale.shape
        tiles = scale.view(torch.uint8).reshape(rows // 128, columns // 4, 32, 4, 4)
        plain = tiles.permute(0, 3, 2, 1, 4).reshape(rows, columns)
        draft.put("weight_scale", plain.contiguous().view(scale.dtype), layer)


def hole(draft: Draft) -> None:
    """128 KiB of zeros in a weight, where a download lost a block; it ends in the middle of a row."""
    weight = draft.get("weight", WIDE)
    raw = weight.clone().view(torch.uint8).reshape(-1)
    raw[raw.numel() // 4 + 77 :][: 1 << 17] = 0
    draft.put("weight", raw.view(weight.dtype).reshape(weight.shape), WIDE)


def six_bits(draft: Draft) -> None:
    """The weight packed as 6-bit codes (three bytes for four) under the 4-bit format's name."""
    weight = draft.get("weight")
    rows, half = weight.shape
    draft.put("weight", torch.zeros(rows, half * 3 // 2, dtype=weight.dtype))


# --- damage to the file -----------------------------------------------------------------------------------------------


def on_bytes(change: Callable[[bytes], bytes]) -> Damage:
    def damage(draft: Draft) -> None:
        draft.finish = change

    return damage


def on_header(change: Callable[[dict[str, dict[str, object]]], None]) -> Damage:
    """The header edited; the payload stays."""

    def edit(whole: bytes) -> bytes:
        (length,) = struct.unpack("<Q", whole[:8])
        header = json.loads(whole[8 : 8 + length])
        change(header)
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text + whole[8 + length :]

    return on_bytes(edit)


def _overlap(header: dict[str, dict[str, object]]) -> None:
    """Two layers of one shape read the same bytes."""
    header[f"{TWIN}.weight"]["data_offsets"] = header[f"{OTHER_TWIN}.weight"]["data_offsets"]


def _swap_offsets(header: dict[str, dict[str, object]]) -> None:
    one, other = header[f"{TWIN}.weight"], header[f"{OTHER_TWIN}.weight"]
    one["data_offsets"], other["data_offsets"] = other["data_offsets"], one["data_offsets"]


def _forget(header: dict[str, dict[str, object]]) -> None:
    del header[f"{LAYER}.weight"]


def _shift(header: dict[str, dict[str, object]]) -> None:
    offsets = header[f"{LAYER}.weight"]["data_offsets"]
    assert isinstance(offsets, list)
    header[f"{LAYER}.weight"]["data_offsets"] = [offset + 8 for offset in offsets]


def listed_twice(whole: bytes) -> bytes:
    """A weight listed twice: first with the bytes of another layer of that size, then with its own."""
    (length,) = struct.unpack("<Q", whole[:8])
    text = whole[8 : 8 + length].rstrip()
    twin = json.dumps(json.loads(text)[f"{OTHER_TWIN}.weight"], separators=(",", ":"))
    text = f'{{"{TWIN}.weight":{twin},'.encode() + text[1:]
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + whole[8 + length :]


def first_half(draft: Draft) -> None:
    """What a first shard holds: everything but the single block."""
    draft.tensors = {name: tensor for name, tensor in draft.tensors.items() if not name.startswith("single_blocks.")}


# --- the list ---------------------------------------------------------------------------------------------------------


def _markers(base: str) -> Iterator[Case]:
    """What happens to markers of every format."""
    for name, what, damage in (
        ("marker-missing", "no marker", marker_missing),
        ("markers-all-missing", "no marker in the whole file", markers_all_missing),
        ("marker-zeroed", "marker overwritten with zeros", marker_zeroed),
        ("marker-truncated", "marker cut short", marker_truncated),
        ("marker-text", "marker is not JSON", marker_text),
        ("marker-empty", "marker of no bytes", marker_empty),
        ("marker-list", "marker is a list", marker_list),
        ("format-unknown", "unknown format name", marker_unknown_format),
        ("format-missing", "marker without a format", marker_without_format),
        ("marker-elsewhere", "marker of a layer that does not exist", marker_of_nowhere),
    ):
        yield Case(f"{base}-{name}", base, what, damage)
    yield Case(
        f"{base}-metadata-disagrees",
        base,
        "metadata and marker disagree",
        contradicted(format="float8_e4m3fn" if base != "fp8" else "int8_tensorwise"),
    )


def _another_format() -> Iterator[Case]:
    """A layer under the name of another known format."""
    for base, other in (
        ("int8_row", "float8_e4m3fn"),
        ("int8_row", "mxfp8"),
        ("int8_scalar", "convrot_w4a4"),
        ("int8_convrot", "nvfp4"),
        ("fp8", "int8_tensorwise"),
        ("fp8", "mxfp8"),
        ("fp8", "nvfp4"),
        ("mxfp8", "float8_e4m3fn"),
        ("mxfp8", "int8_tensorwise"),
        ("nvfp4", "int8_tensorwise"),
        ("nvfp4", "mxfp8"),
        ("convrot_w4a4", "int8_tensorwise"),
        ("convrot_w4a4", "nvfp4"),
    ):
        yield Case(f"{base}-declared-{other}", base, f"declared as {other}", changed(format=other))


def _scales() -> Iterator[Case]:
    """Scales: absent, of another type or shape, with values that no quantiser writes."""
    required = {
        "int8_scalar": ("weight_scale",),
        "int8_row": ("weight_scale",),
        "int8_convrot": ("weight_scale",),
        "fp8": ("weight_scale",),
        "mxfp8": ("weight_scale",),
        "nvfp4": ("weight_scale", "weight_scale_2"),
        "convrot_w4a4": ("weight_scale",),
    }
    for base, suffixes in required.items():
        for suffix in suffixes:
            yield Case(f"{base}-{suffix}-missing", base, f"no {suffix}", missing(suffix))
    floats = dict.fromkeys(("int8_scalar", "int8_row", "int8_convrot", "fp8", "convrot_w4a4"), "weight_scale")
    floats["nvfp4"] = "weight_scale_2"
    for base, suffix in floats.items():
        for name, number in (("nan", math.nan), ("infinite", math.inf), ("zero", 0.0), ("negative", -0.01)):
            yield Case(f"{base}-{suffix}-{name}", base, f"{suffix} {name}", value(suffix, number))
        if base != "fp8":
            yield Case(f"{base}-{suffix}-f16", base, f"{suffix} in F16", cast(suffix, torch.float16))
    yield Case("fp8-weight_scale-f16", "fp8", "weight_scale in F16", cast("weight_scale", torch.float16), "sound")
    yield Case("int8_row-weight_scale-flat", "int8_row", "row scale [N]", shaped("weight_scale", lambda s: s[:, 0]))
    yield Case("int8_row-weight_scale-row", "int8_row", "row scale [1, N]", shaped("weight_scale", lambda s: s.t()))
    yield Case("int8_row-weight_scale-short", "int8_row", "a row scale short", shaped("weight_scale", lambda s: s[:-1]))
    yield Case("int8_convrot-scale-negated", "int8_convrot", "all row scales negative", negated("weight_scale"))
    yield Case("int8_scalar-weight_scale-1", "int8_scalar", "scale [1]", shaped("weight_scale", lambda s: s.reshape(1)))
    yield Case(
        "convrot_w4a4-weight_scale-column",
        "convrot_w4a4",
        "scale [N, 1]",
        shaped("weight_scale", lambda s: s.reshape(-1, 1)),
    )
    yield Case(
        "nvfp4-weight_scale-short", "nvfp4", "block scales of half K", shaped("weight_scale", lambda s: s[:, 8:])
    )
    yield Case("nvfp4-weight_scale-transposed", "nvfp4", "block scales transposed", shaped("weight_scale", torch.t))
    yield Case("nvfp4-weight_scale-bytes", "nvfp4", "block scales as U8", viewed("weight_scale", torch.uint8))
    yield Case("nvfp4-scale_2-rows", "nvfp4", "one scale_2 a row", shaped("weight_scale_2", lambda s: s.repeat(1792)))
    yield Case(
        "mxfp8-weight_scale-short", "mxfp8", "block scales of half K", shaped("weight_scale", lambda s: s[:, 4:])
    )
    yield Case("mxfp8-weight_scale-f32", "mxfp8", "block scales as F32", cast("weight_scale", torch.float32))
    yield Case(
        "fp8-weight_scale-row",
        "fp8",
        "the scale repeated for every row",
        shaped("weight_scale", lambda s: s.repeat(1792, 1)),
        "sound",
    )
    yield Case("fp8-input_scale-nan", "fp8", "input_scale NaN", added("input_scale", torch.tensor(math.nan)))
    yield Case("fp8-input_scale-zero", "fp8", "input_scale 0", added("input_scale", torch.tensor(0.0)))
    yield Case("nvfp4-input_scale-negative", "nvfp4", "input_scale negative", added("input_scale", torch.tensor(-1.0)))
    yield Case("int8_row-scale-unused", "int8_row", "a scale that nothing uses", added("scale_weight", torch.ones(1)))
    yield Case("fp8-scale-unused", "fp8", "a second scale that nothing uses", added("weight_scale_2", torch.ones(())))
    yield Case(
        "nvfp4-scale-of-plain-layer",
        "nvfp4",
        "scale of a layer in 16 bit",
        added("weight_scale", torch.tensor(0.01), "img_in"),
        layer="img_in",
    )


def _weights() -> Iterator[Case]:
    """Weights of another type or shape than their declaration."""
    for base in ("int8_row", "int8_convrot", "fp8", "mxfp8", "nvfp4", "convrot_w4a4"):
        yield Case(f"{base}-weight-transposed", base, "weight transposed", shaped("weight", torch.t))
        yield Case(f"{base}-weight-rank3", base, "weight [1, N, K]", shaped("weight", lambda w: w[None]))
        yield Case(f"{base}-weight-missing", base, "no weight", missing("weight"))
    for base in ("int8_scalar", "int8_row", "int8_convrot", "convrot_w4a4"):
        yield Case(f"{base}-weight-u8", base, "weight as U8", viewed("weight", torch.uint8))
        yield Case(f"{base}-weight-bf16", base, "codes as BF16", cast("weight", torch.bfloat16))
    yield Case("int8_scalar-weight-transposed", "int8_scalar", "weight transposed", shaped("weight", torch.t))
    yield Case("fp8-weight-short", "fp8", "weight a row short", shaped("weight", lambda w: w[:-1]))
    for base in ("int8_row", "fp8", "nvfp4", "convrot_w4a4"):
        yield Case(f"{base}-bias-short", base, "the bias of fewer rows", shaped("bias", lambda b: b[:-64]))
        yield Case(f"{base}-bias-codes", base, "the bias as I8", cast("bias", torch.int8))
    for base in ("int8_scalar", "fp8"):
        half = shaped("weight", lambda w: w[:, :128])
        yield Case(f"{base}-weight-half", base, "half the columns", half, "model")
    for base in FORMATS:
        yield Case(f"{base}-absent", base, "nothing of the layer in the file", absent, "model")
    yield Case("nvfp4-weight-i8", "nvfp4", "weight as I8", viewed("weight", torch.int8))
    yield Case("fp8-weight-e5m2", "fp8", "weight as F8_E5M2", viewed("weight", torch.float8_e5m2))
    yield Case("fp8-weight-bytes", "fp8", "weight as U8", viewed("weight", torch.uint8))
    yield Case("mxfp8-weight-bytes", "mxfp8", "weight as U8", viewed("weight", torch.uint8))
    yield Case("int8_row-weight-short", "int8_row", "weight a row short", shaped("weight", lambda w: w[:-1]))
    yield Case("nvfp4-weight-half", "nvfp4", "half the columns", shaped("weight", lambda w: w[:, :64]))
    yield Case("convrot_w4a4-weight-half", "convrot_w4a4", "half the columns", shaped("weight", lambda w: w[:, :64]))


def _rotation() -> Iterator[Case]:
    """Rotation: sizes that cannot be, and sizes that can but are not what was done."""
    for name, size in (("100", 100), ("0", 0), ("negative", -256), ("text", "two hundred"), ("1024", 1024)):
        what = f"rotation group {size}"
        yield Case(f"int8_convrot-group-{name}", "int8_convrot", what, changed(convrot_groupsize=size))
        yield Case(f"convrot_w4a4-group-{name}", "convrot_w4a4", what, changed(convrot_groupsize=size))
    yield Case("convrot_w4a4-group-32", "convrot_w4a4", "rotation group 32", changed(convrot_groupsize=32))
    yield Case("convrot_w4a4-linear_dtype", "convrot_w4a4", "linear_dtype int2", changed(linear_dtype="int2"))
    yield Case(
        "int8_convrot-params-contradict",
        "int8_convrot",
        "nested params contradict the marker",
        changed(params={"convrot": False, "convrot_groupsize": 16}),
    )
    yield Case(
        "int8_convrot-no-flag",
        "int8_convrot",
        "rotated weights without the flag",
        all_changed(convrot=None, convrot_groupsize=None),
        "deep",
    )
    yield Case(
        "int8_row-flag-added",
        "int8_row",
        "declared rotated, but is not",
        all_changed(convrot=True, convrot_groupsize=256),
        "deep",
    )
    for size in (16, 64):
        yield Case(
            f"int8_convrot-group-{size}",
            "int8_convrot",
            f"rotated by 256, declared {size}",
            all_changed(convrot_groupsize=size),
            "deep",
        )
        yield Case(
            f"convrot_w4a4-group-{size}",
            "convrot_w4a4",
            f"rotated by 256, declared {size}",
            all_changed(convrot_groupsize=size),
            "deep",
        )


def _values() -> Iterator[Case]:
    """Damage to values that only a look at weights, biases and block scales can see, or nothing can."""
    yield Case("nvfp4-row-by-row", "nvfp4", "block scales not in tiles", row_by_row, "deep", layer=None)
    yield Case("mxfp8-row-by-row", "mxfp8", "block scales not in tiles", row_by_row, "deep", layer=None)
    yield Case("nvfp4-block-nan", "nvfp4", "NaN among the block scales", byte("weight_scale", 0x7F), "deep")
    yield Case("nvfp4-block-negative", "nvfp4", "negative block scales", sign_bits("weight_scale"), "deep")
    yield Case("mxfp8-block-nan", "mxfp8", "NaN among the block scales", byte("weight_scale", 0xFF), "deep")
    yield Case("fp8-bias-nan", "fp8", "NaN in the bias", value("bias", math.nan), "deep")
    yield Case("int8_row-hole", "int8_row", "128 KiB of zeros in the weight", hole, "deep", layer=WIDE)
    yield Case("fp8-hole", "fp8", "128 KiB of zeros in the weight", hole, "deep", layer=WIDE)
    yield Case("nvfp4-nibbles", "nvfp4", "the two codes of a byte exchanged", other_nibbles, "none", layer=None)
    yield Case("w4a4-nibbles", "convrot_w4a4", "the two codes of a byte exchanged", other_nibbles, "none", layer=None)
    yield Case("nvfp4-scale_2-inverted", "nvfp4", "reciprocal of weight_scale_2", inverted("weight_scale_2"), "none")
    yield Case("fp8-scale-inverted", "fp8", "reciprocal of the scale", inverted("weight_scale"), "none")
    yield Case("int8_row-scale-inverted", "int8_row", "reciprocals of the scales", inverted("weight_scale"), "none")
    yield Case(
        "int8_row-scales-exchanged", "int8_row", "scales of two layers exchanged", exchanged("weight_scale"), "none"
    )
    yield Case("int8_row-scales-reversed", "int8_row", "row scales in reverse", reversed_rows("weight_scale"), "none")
    yield Case(
        "fp8-weights-exchanged", "fp8", "weights of two layers exchanged", exchanged("weight"), "none", layer=None
    )
    yield Case(
        "int8-offsets-exchanged", "int8_row", "byte ranges of two layers exchanged", on_header(_swap_offsets), "none"
    )


def _files() -> Iterator[Case]:
    """The file itself."""
    for name, what, damage in (
        ("cut", "cut in the middle", on_bytes(lambda data: data[: len(data) // 2])),
        ("cut-by-one", "the last byte missing", on_bytes(lambda data: data[:-1])),
        ("cut-in-header", "cut in the header", on_bytes(lambda data: data[:500])),
        ("trailing", "bytes behind the end", on_bytes(lambda data: data + bytes(64))),
        ("empty", "an empty file", on_bytes(lambda _: b"")),
        ("page", "an error page", on_bytes(lambda _: b"<!DOCTYPE html><html>404</html>" * 50)),
        ("pickle", "a pickle", on_bytes(lambda data: b"PK\x03\x04" + data)),
        ("length", "a header length beyond the file", on_bytes(lambda data: struct.pack("<Q", 1 << 40) + data[8:])),
        ("not-utf8", "a header that is not UTF-8", on_bytes(lambda data: data[:9] + b"\xff\xfe" + data[11:])),
        ("overlap", "two tensors in the same bytes", on_header(_overlap)),
        ("gap", "a tensor missing from the header", on_header(_forget)),
        ("shifted", "byte ranges shifted", on_header(_shift)),
        ("twice", "a tensor listed twice", on_bytes(listed_twice)),
        ("metadata-text", "metadata that is not JSON", metadata("quantised")),
        ("metadata-list", "metadata that is a list", metadata("[]")),
        ("metadata-empty", "metadata without layers", metadata("{}")),
        ("metadata-cut", "metadata cut short", metadata_cut),
    ):
        yield Case(f"file-{name}", "int8_row", what, damage, layer=None)
    yield Case("file-metadata-incomplete", "fp8", "metadata that forgets a layer", metadata_incomplete)
    for base in ("int8_convrot", "nvfp4"):
        yield Case(f"shard-missing-{base}", base, "the second shard is missing", first_half, layer=None, shard=True)


def _sound() -> Iterator[Case]:
    """Nothing wrong: a loader that refuses these is no use."""
    for base in FORMATS:
        yield Case(f"sound-{base}", base, "a sound file", lambda _: None, "sound", None)
    yield Case("sound-metadata-only", "fp8", "declared in the metadata", only_metadata, "sound", None)
    yield Case("sound-w4a4-default-group", "convrot_w4a4", "group size left to its default 256",
               all_changed(convrot_groupsize=None), "sound", None)  # fmt: skip
    yield Case("sound-inputs-int8", "int8_row+inputs", "input layers quantised too", lambda _: None, "sound", None)
    yield Case("sound-inputs-nvfp4", "nvfp4+inputs", "input layers packed too", lambda _: None, "sound", None)


def _not_in_stock() -> Iterator[Case]:
    """Formats that the stock loader of ComfyUI 0.30 does not know: for ours only."""
    w4a8, quanto = NOT_IN_STOCK
    for base in NOT_IN_STOCK:
        yield Case(f"sound-{base}", base, "a sound file", lambda _: None, "sound", None)
    yield from _markers(w4a8)
    for suffix in ("weight_s_rel", "weight_s_channel"):
        yield Case(f"{w4a8}-{suffix}-missing", w4a8, f"no {suffix}", missing(suffix))
    for name, number in (("nan", math.nan), ("zero", 0.0), ("negative", -1.0)):
        yield Case(
            f"{w4a8}-weight_s_channel-{name}", w4a8, f"weight_s_channel {name}", value("weight_s_channel", number)
        )
    yield Case(f"{w4a8}-six-bits", w4a8, "6-bit weights under the 4-bit name", six_bits)
    yield Case(f"{w4a8}-group", w4a8, "group size 64 instead of 16", changed(group_size=64))
    yield Case(f"{w4a8}-group-0", w4a8, "group size 0", changed(group_size=0))
    yield Case(f"{w4a8}-rotation-16", w4a8, "rotated by 256, declared 16", all_changed(convrot_groupsize=16), "deep")
    yield Case(f"{w4a8}-nibbles", w4a8, "the two codes of a byte exchanged", other_nibbles, "none", layer=None)
    yield Case(f"{quanto}-scale-missing", quanto, "no scale", missing("weight._scale"))
    yield Case(f"{quanto}-data-missing", quanto, "no codes", missing("weight._data"))
    yield Case(f"{quanto}-scale-flat", quanto, "scale [N]", shaped("weight._scale", lambda s: s[:, 0]))
    yield Case(f"{quanto}-scale-nan", quanto, "scale NaN", value("weight._scale", math.nan))
    yield Case(f"{quanto}-data-u8", quanto, "codes as U8", viewed("weight._data", torch.uint8))
    yield Case(f"{quanto}-input_scale-2", quanto, "input_scale 2", added("input_scale", torch.tensor(2.0)))
    yield Case(f"{quanto}-dense-too", quanto, "dense weight too", added("weight", torch.zeros(1792, 256)))

    def no_map(draft: Draft) -> None:
        del draft.metadata["quantization_map_base64"]

    def cut_map(draft: Draft) -> None:
        draft.metadata["quantization_map_base64"] = draft.metadata["quantization_map_base64"][:-31]

    yield Case(f"{quanto}-map-missing", quanto, "no quantization map", no_map, layer=None)
    yield Case(f"{quanto}-map-cut", quanto, "quantization map cut short", cut_map, layer=None)


def stock_cases() -> list[Case]:
    """Every case of a format that both loaders know."""
    return [
        *(case for base in FORMATS for case in _markers(base)),
        *_another_format(),
        *_scales(),
        *_weights(),
        *_rotation(),
        *_values(),
        *_files(),
        *_sound(),
    ]


def further_cases() -> list[Case]:
    """Cases of formats that only this pack loads."""
    return list(_not_in_stock())
