"""Quantises a 16-bit checkpoint into the layouts that real Comfy-quantised files have, and breaks them on purpose.

Where comfy-kitchen has the quantiser it is used (int8, float8, mxfp8, nvfp4, convrot_w4a4); W4A8 and Quanto, which the
kitchen of ComfyUI 0.30 lacks, are written here from their published definitions. Nothing of Quant Loader's own code is
used, so that a file made here is an independent witness for it.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import comfy_kitchen
import torch
from comfy_kitchen.tensor import TensorWiseINT8Layout
from safetensors import safe_open
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]

ROTATION_GROUP = 256
W4A8_GROUP = 16
E4M3_MAX = 448.0
E2M1_MAX = 6.0

# Linears that stay 16-bit in quantised Flux files, and whose shapes tell ComfyUI which model this is.
INPUT_LAYERS = ("img_in", "txt_in", "vector_in.in_layer")
QUANTIZED_PREFIXES = ("double_blocks.", "single_blocks.")


@dataclass(frozen=True)
class Packed:
    """One quantised layer: tensors by suffix (`weight`, `weight_scale`, ...) and its marker, if the format has one."""

    tensors: Tensors
    marker: dict[str, object] | None


def marker_tensor(marker: dict[str, object]) -> torch.Tensor:
    """The `comfy_quant` tensor of a layer: its JSON as bytes."""
    return torch.frombuffer(bytearray(json.dumps(marker).encode()), dtype=torch.uint8)


def hadamard(size: int) -> torch.Tensor:
    """The regular Hadamard matrix of ConvRot, `[size, size]` float32, orthonormal; size is a power of 4."""
    h4 = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], dtype=torch.float32)
    matrix = h4
    while matrix.shape[0] < size:
        matrix = torch.kron(matrix, h4)
    if matrix.shape[0] != size:
        raise ValueError(f"a rotation size must be a power of 4, got {size}")
    scaled: torch.Tensor = matrix / math.sqrt(size)
    return scaled


def rotate(weight: torch.Tensor, group: int) -> torch.Tensor:
    """`weight` [N, K] with every contiguous group of input columns multiplied by the Hadamard matrix."""
    rows, columns = weight.shape
    return (weight.float().reshape(rows, columns // group, group) @ hadamard(group)).reshape(rows, columns)


def int8_scalar(weight: torch.Tensor) -> Packed:
    codes, scale = comfy_kitchen.quantize_int8_tensorwise(weight.float())
    return Packed({"weight": codes, "weight_scale": scale.float().reshape(())}, {"format": "int8_tensorwise"})


def int8_row(weight: torch.Tensor) -> Packed:
    codes, scale = comfy_kitchen.quantize_int8_rowwise(weight.float())
    return Packed({"weight": codes, "weight_scale": scale.float().reshape(-1, 1)}, {"format": "int8_tensorwise"})


def int8_convrot(weight: torch.Tensor) -> Packed:
    codes, params = TensorWiseINT8Layout.quantize(
        weight.float(), per_channel=True, convrot=True, convrot_groupsize=ROTATION_GROUP
    )
    return Packed(
        {"weight": codes, "weight_scale": params.scale.float().reshape(-1, 1)},
        {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": ROTATION_GROUP},
    )


def float8(weight: torch.Tensor) -> Packed:
    scale = weight.float().abs().max() / E4M3_MAX
    codes = comfy_kitchen.quantize_per_tensor_fp8(weight.float(), scale)
    return Packed({"weight": codes, "weight_scale": scale}, {"format": "float8_e4m3fn"})


def mxfp8(weight: torch.Tensor) -> Packed:
    codes, scale = comfy_kitchen.quantize_mxfp8(weight, pad_32x=True)
    return Packed({"weight": codes, "weight_scale": scale.view(torch.uint8)}, {"format": "mxfp8"})


def nvfp4(weight: torch.Tensor) -> Packed:
    scale_2 = weight.float().abs().max() / (E4M3_MAX * E2M1_MAX)
    codes, scale = comfy_kitchen.quantize_nvfp4(weight, scale_2, pad_16x=True)
    return Packed({"weight": codes, "weight_scale": scale, "weight_scale_2": scale_2}, {"format": "nvfp4"})


def convrot_w4a4(weight: torch.Tensor) -> Packed:
    codes, scale = comfy_kitchen.quantize_convrot_w4a4_weight(weight.float(), convrot_groupsize=ROTATION_GROUP)
    return Packed(
        {"weight": codes, "weight_scale": scale.float()},
        {"format": "convrot_w4a4", "convrot_groupsize": ROTATION_GROUP},
    )


def asym_w4a8(weight: torch.Tensor) -> Packed:
    """Unsigned 4-bit codes on a uniform grid (code - 8), E4M3 scales per 16 columns, a float32 scale per row, rotated.

    A decoder computes `q8 = clamp(round((code - 8) * s_rel), -127, 127)` and `W_rot = q8 * s_channel`, so the group
    scales are chosen such that the largest group of a row reaches 127.
    """
    rotated = rotate(weight, ROTATION_GROUP)
    rows, columns = rotated.shape
    groups = rotated.reshape(rows, columns // W4A8_GROUP, W4A8_GROUP)
    channel = (groups.abs().amax(dim=(1, 2)) / 127.0).clamp(min=1e-30)
    in_int8 = groups / channel[:, None, None]
    relative = (in_int8.abs().amax(dim=2) / 7.0).clamp(min=2.0**-6).to(torch.float8_e4m3fn)
    codes = (torch.round(in_int8 / relative.float()[..., None]).clamp(-8, 7) + 8).to(torch.uint8).reshape(rows, columns)
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return Packed(
        {"weight": packed.view(torch.int8), "weight_s_rel": relative, "weight_s_channel": channel},
        {"format": "asym_w4a8_int8", "group_size": W4A8_GROUP, "convrot": True, "convrot_groupsize": ROTATION_GROUP},
    )


def quanto_int8(weight: torch.Tensor) -> Packed:
    """Quanto's qint8: 8-bit codes and one 16-bit scale per row; declared in the file's metadata, not by a marker."""
    scale = (weight.float().abs().amax(dim=1, keepdim=True) / 127.0).clamp(min=1e-30).to(weight.dtype)
    codes = torch.round(weight.float() / scale.float()).clamp(-127, 127).to(torch.int8)
    one = torch.ones((), dtype=weight.dtype)
    tensors = {"weight._data": codes, "weight._scale": scale, "input_scale": one, "output_scale": one.clone()}
    return Packed(tensors, None)


QUANTIZERS: dict[str, Callable[[torch.Tensor], Packed]] = {
    "int8_scalar": int8_scalar,
    "int8_row": int8_row,
    "int8_convrot": int8_convrot,
    "fp8": float8,
    "mxfp8": mxfp8,
    "nvfp4": nvfp4,
    "convrot_w4a4": convrot_w4a4,
    "asym_w4a8": asym_w4a8,
    "quanto_int8": quanto_int8,
}


def layers_to_quantize(tensors: Tensors, pack_inputs: bool = False) -> list[str]:
    """The names of the linears that a quantised Flux file packs, sorted.

    With `pack_inputs` also the input projections: 4-bit packing halves their columns, which misleads a loader that
    detects the model from packed shapes.
    """
    prefixes = QUANTIZED_PREFIXES + (tuple(f"{name}." for name in INPUT_LAYERS) if pack_inputs else ())
    return sorted(
        name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if name.endswith(".weight") and tensor.dim() == 2 and name.startswith(prefixes)
    )


def quantize(
    tensors: Tensors, quantizer: str, pack_inputs: bool = False, layers: Sequence[str] | None = None
) -> tuple[Tensors, dict[str, str]]:
    """The checkpoint quantised: its tensors by name, and the file metadata that goes with them.

    `layers` overrides which linears are packed. Raises KeyError for a quantiser that is not in `QUANTIZERS`.
    """
    pack = QUANTIZERS[quantizer]
    out = dict(tensors)
    unmarked: list[str] = []
    for layer in layers_to_quantize(tensors, pack_inputs) if layers is None else layers:
        packed = pack(out.pop(f"{layer}.weight"))
        out.update({f"{layer}.{suffix}": tensor for suffix, tensor in packed.tensors.items()})
        if packed.marker is None:
            unmarked.append(layer)
        else:
            out[f"{layer}.comfy_quant"] = marker_tensor(packed.marker)
    if not unmarked:
        return out, {}
    quantization_map = {layer: {"weights": "qint8", "activations": "none"} for layer in unmarked}
    encoded = base64.b64encode(json.dumps(quantization_map).encode()).decode()
    return out, {"quantization_format": "quanto", "quantization_map_base64": encoded}


def load(path: Path) -> tuple[Tensors, dict[str, str]]:
    with safe_open(path, framework="pt") as file:
        names = list(file.keys())
        return {name: file.get_tensor(name) for name in names}, dict(file.metadata() or {})


def save(path: Path, tensors: Tensors, metadata: dict[str, str] | None = None) -> Path:
    """Writes the checkpoint under another name first: a reader never sees half a file, a mapped old one stays whole."""
    partial = path.with_name(path.name + ".partial")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, metadata=metadata or None)
    partial.replace(path)
    return path


def zero_markers(tensors: Tensors, layers: Sequence[str]) -> Tensors:
    """The markers of `layers` overwritten with zero bytes, as an interrupted download leaves them."""
    zeroed = {name: torch.zeros_like(tensors[name]) for name in (f"{layer}.comfy_quant" for layer in layers)}
    return {**tensors, **zeroed}


def half_scale(tensors: Tensors, layer: str) -> Tensors:
    """The layer's `weight_scale` as float16, as a careless whole-file cast to 16 bits leaves it."""
    name = f"{layer}.weight_scale"
    return {**tensors, name: tensors[name].half()}


def column_scale(tensors: Tensors, layer: str) -> Tensors:
    """The layer's `weight_scale` [N] reshaped to [N, 1]: right for INT8 rows, wrong for W4A4."""
    name = f"{layer}.weight_scale"
    return {**tensors, name: tensors[name].reshape(-1, 1)}
