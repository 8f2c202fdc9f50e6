"""What a packed weight looks like in a file: source bytes where the source was canonical, the canonical form elsewhere.

A layer declared by its own standard marker is written as it was read, byte for byte. A layer declared in another way
(file metadata, Quanto's map, a dialect) gets a marker, and scales of the dtype and shape that the marker's format asks
for; their values stay.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ..checkpoint import LayerSpec, check, verdict_text
from ..kernels.formats.quantize import int8_rows
from ..kernels.formats.rotation import preferred_group, rotate
from .errors import QuantLoaderError
from .packed import Declaration, as_in_file, is_packed, marker_bytes, plain_tensors
from .sidepath import SidePath

# Scales that the formats keep in float32.
_FLOAT32 = ("weight_scale_2", "weight_s_channel", "weight_codebook", "weight_correction", "input_scale")
_E4M3 = {"nvfp4": "weight_scale", "asym_w4a8_int8": "weight_s_rel"}


def packed_state(weight: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors of a packed weight by name, marker included, as the file has them."""
    weight = as_in_file(weight)
    declaration: Declaration = weight._params.declaration
    spec = declaration.spec()
    out = {f"{prefix}{suffix}": tensor for suffix, tensor in canonical(spec, plain_tensors(weight)).items()}
    out[f"{prefix}comfy_quant"] = torch.frombuffer(bytearray(_marker(declaration, spec)), dtype=torch.uint8)
    return out


def canonical(spec: LayerSpec, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``tensors`` (by suffix) in the dtypes and shapes of the strict rules; what has them already is passed through."""
    out = dict(tensors)
    for suffix in _FLOAT32:
        if suffix in out:
            out[suffix] = out[suffix].to(torch.float32)
    viewed = _E4M3.get(spec.format)
    if viewed is not None and out[viewed].dtype == torch.uint8:
        out[viewed] = out[viewed].view(torch.float8_e4m3fn)
    if spec.format in ("int8_tensorwise", "quanto_int8", "convrot_w4a4", "float8_e4m3fn", "float8_e5m2"):
        scale = out["weight_scale"].to(torch.float32)
        if spec.format == "convrot_w4a4":
            scale = scale.reshape(-1)
        elif spec.format in ("int8_tensorwise", "quanto_int8"):
            rows = spec.get("is_rowwise", scale.numel() != 1)
            scale = scale.reshape(-1, 1) if rows else scale.reshape(())
        out["weight_scale"] = scale
    return out


def _marker(declaration: Declaration, spec: LayerSpec) -> bytes:
    """The source's marker where it says everything by itself, in the standard form; a new one elsewhere."""
    try:
        conf = json.loads(declaration.marker)
    except ValueError:
        return marker_bytes(spec)
    standard = declaration.declared_by == "marker" and isinstance(conf, dict) and conf.get("format") == spec.format
    return declaration.marker if standard and "params" not in conf else marker_bytes(spec)


def merged_state(name: str, weight: Any, side: SidePath, dtype: torch.dtype, prefix: str) -> dict[str, torch.Tensor]:
    """A packed weight with its patches merged, quantised again as INT8 rows with ConvRot, or dense in ``dtype``.

    INT8 rows hold every format's values closely (relative error 0.009); a rotation needs inputs divisible by 16, and
    rows that cannot be rotated stay in 16 bit. Smoothing is folded into the merged weight.
    """
    dense = side.patch(weight.dequantize().to(torch.float32))
    N, K = dense.shape
    group = preferred_group(K)
    if not group:
        return {f"{prefix}weight": dense.to(dtype)}
    codes, scale = int8_rows(rotate(dense, group))
    spec = LayerSpec(name, "int8_tensorwise", (N, K), annotations={"convrot": True, "convrot_groupsize": group})
    marker = torch.frombuffer(bytearray(marker_bytes(spec)), dtype=torch.uint8)
    return {f"{prefix}weight": codes, f"{prefix}weight_scale": scale.reshape(-1, 1), f"{prefix}comfy_quant": marker}


def save_diffusion_model(patcher: Any, path: str | Path, loras: str = "leave out") -> list[str]:
    """Write the diffusion model of ``patcher`` as one safetensors file, checked, under its name only when complete.

    ``loras``: ``leave out`` writes the model as it was loaded, ``merge`` with every patch merged. Returns sentences on
    what was done to layers that carry patches. Any model that ComfyUI holds can be saved, quantised or not.

    Raises:
        QuantLoaderError: nothing can be written there, or the result would not pass the check.
    """
    import comfy.model_management

    if loras not in ("leave out", "merge"):
        raise ValueError(f"loras must be 'leave out' or 'merge', found {loras!r}")
    bare = patcher.clone()
    side_patches = {key: list(patches) for key, patches in getattr(bare, "side_patches", {}).items()}
    if side_patches:
        bare.forget_side_patches()
    if loras == "leave out":
        bare.patches = {}
        bare.patches_uuid = uuid.uuid4()
        side_patches = {}
    comfy.model_management.load_models_gpu([bare])
    unet = bare.model_state_dict_for_saving(bare.model.diffusion_model, "diffusion_model.")
    notes = _merge(bare.model, unet, side_patches)
    sd = bare.model.state_dict_for_saving(unet)
    # Lazily cast weights (offloaded layers with patches) are computed when they are asked for.
    tensors = {name: _storable(name, tensor.to("cpu"), sd).contiguous() for name, tensor in sd.items()}
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_written(path, error) from error
    try:
        save_file(tensors, partial, metadata={"format": "pt"})
        report = check(str(partial), rules="compatible")
        if report.verdict == "refused":
            raise QuantLoaderError(
                f"The model was not saved, because the file would be refused: {verdict_text(report)}"
            )
        os.replace(partial, path)
    except OSError as error:
        raise _not_written(path, error) from error
    finally:
        partial.unlink(missing_ok=True)
    return notes


def _storable(name: str, tensor: torch.Tensor, sd: Mapping[str, Any]) -> torch.Tensor:
    """A plain weight that the server was told to keep in 8 bits as bfloat16, which holds its values: in a file, 8 bits
    without a scale would be taken for codes.
    """
    eight_bits = tensor.is_floating_point() and tensor.element_size() == 1
    packed = f"{name.rpartition('.')[0]}.comfy_quant" in sd
    return tensor.to(torch.bfloat16) if eight_bits and not packed else tensor


def _not_written(path: Path, error: OSError) -> QuantLoaderError:
    return QuantLoaderError(f"{path.name} could not be written to {path.parent}: {error.strerror or error}.")


def _merge(model: Any, unet: dict[str, Any], side_patches: Mapping[str, list[Any]]) -> list[str]:
    """Replace the tensors of patched layers in ``unet`` (names without ``diffusion_model.``) by merged ones."""
    import comfy.utils

    notes: list[str] = []
    for key, patches in sorted(side_patches.items()):
        weight = as_in_file(comfy.utils.get_attr(model, key))
        name = key.removeprefix("diffusion_model.").removesuffix(".weight")
        declaration = weight._params.declaration
        side = SidePath(key, patches)
        if not side.active:
            continue
        merged = merged_state(name, weight, side, _stored_dtype(weight), f"{name}.")
        for old in [n for n in unet if n.startswith(f"{name}.") and n != f"{name}.bias"]:
            del unet[old]
        unet.update(merged)
        kind = "INT8 rows with ConvRot" if f"{name}.comfy_quant" in merged else "16 bit (inputs not divisible by 16)"
        notes.append(f"{name}: {len(patches)} patches merged, {declaration.format} written as {kind}")
    return notes


def _stored_dtype(weight: Any) -> torch.dtype:
    assert is_packed(weight)
    dtype: torch.dtype = weight._params.orig_dtype
    return dtype if dtype in (torch.float16, torch.bfloat16) else torch.bfloat16
