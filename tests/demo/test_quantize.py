"""The demo's files: what a decoder written from the format's definition gets back from them."""

from __future__ import annotations

import base64
import json

import pytest
import torch
from quant_loader.demo import fixtures, models, quantize

LAYER = "double_blocks.0.img_mlp.2"

# ||W - decode(encode(W))|| / ||W|| of Gaussian weights: a uniform grid of step s has an error of s / sqrt(12), and the
# step is amax / 127 or amax / 7; amax of 256..1280 Gaussian values is 3 to 3.6 sigma. E4M3 has 3 bits of mantissa.
WEIGHT_ERROR = {
    "int8_scalar": (0.005, 0.012),
    "int8_row": (0.005, 0.012),
    "int8_convrot": (0.005, 0.012),
    "fp8": (0.02, 0.03),
    "mxfp8": (0.02, 0.03),
    "nvfp4": (0.06, 0.12),
    "convrot_w4a4": (0.09, 0.16),
    "asym_w4a8": (0.06, 0.12),
    "quanto_int8": (0.005, 0.012),
}


@pytest.fixture(scope="module")
def tensors() -> quantize.Tensors:
    return models.flux_state_dict()


def unswizzled(image: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Block scales [rows, columns] out of the 128 x 4 tile order of cuBLAS."""
    flat = image.flatten()
    tiles = -(-columns // 4)
    r = torch.arange(rows)[:, None]
    c = torch.arange(columns)[None, :]
    index = ((r // 128) * tiles + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4
    return flat[index]


def nibbles(packed: torch.Tensor, low_first: bool) -> torch.Tensor:
    """Two 4-bit codes a byte, as unsigned integers [N, K]."""
    byte = packed.view(torch.uint8)
    pair = (byte & 15, byte >> 4) if low_first else (byte >> 4, byte & 15)
    return torch.stack(pair, dim=-1).flatten(1).int()


def decode(quantizer: str, packed: quantize.Tensors) -> torch.Tensor:
    """The dense weight [N, K] in float32, by the definition of each format."""
    if quantizer == "quanto_int8":
        return packed["weight._data"].float() * packed["weight._scale"].float()
    weight = packed["weight"]
    if quantizer in ("int8_scalar", "int8_row", "fp8"):
        return weight.float() * packed["weight_scale"]
    if quantizer == "int8_convrot":
        return quantize.rotate(weight.float() * packed["weight_scale"], 256)
    if quantizer == "mxfp8":
        rows, columns = weight.shape
        exponent = unswizzled(packed["weight_scale"], rows, columns // 32).float() - 127.0
        return weight.float() * torch.exp2(exponent).repeat_interleave(32, dim=1)
    if quantizer == "nvfp4":
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        codes = nibbles(weight, low_first=False)
        values = table[codes & 7] * torch.where(codes & 8 > 0, -1.0, 1.0)
        rows, columns = values.shape
        scale = unswizzled(packed["weight_scale"].float(), rows, columns // 16) * packed["weight_scale_2"]
        return values * scale.repeat_interleave(16, dim=1)
    codes = nibbles(weight, low_first=True)
    if quantizer == "convrot_w4a4":
        signed = torch.where(codes > 7, codes - 16, codes).float()
        return quantize.rotate(signed * packed["weight_scale"][:, None], 256)
    relative = packed["weight_s_rel"].float().repeat_interleave(16, dim=1)
    in_int8 = torch.round((codes - 8) * relative).clamp(-127, 127)
    return quantize.rotate(in_int8 * packed["weight_s_channel"][:, None], 256)


@pytest.mark.parametrize("quantizer", quantize.QUANTIZERS)
def test_decoded_weight_is_as_near_as_the_format_allows(tensors, quantizer):
    dense = tensors[f"{LAYER}.weight"]
    decoded = decode(quantizer, quantize.QUANTIZERS[quantizer](dense).tensors)
    least, most = WEIGHT_ERROR[quantizer]
    assert least < float((decoded - dense.float()).norm() / dense.float().norm()) < most


def test_rotation_is_its_own_inverse():
    weight = torch.randn(3, 512, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(quantize.rotate(quantize.rotate(weight, 256), 256), weight, atol=1e-5, rtol=0)


def test_rotation_sizes_other_than_powers_of_4_are_refused():
    with pytest.raises(ValueError, match="power of 4"):
        quantize.hadamard(128)


@pytest.mark.parametrize("quantizer", quantize.QUANTIZERS)
def test_only_the_linears_of_the_blocks_are_packed(tensors, quantizer):
    out, metadata = quantize.quantize(tensors, quantizer)
    kept = {name for name in tensors if out.get(name) is tensors[name]}
    packed = {f"{layer}.weight" for layer in quantize.layers_to_quantize(tensors)}
    assert set(tensors) - kept == packed
    assert len(packed) == 13
    declared = {name.removesuffix(".comfy_quant") for name in out if name.endswith(".comfy_quant")}
    if metadata:
        declared |= set(json.loads(base64.b64decode(metadata["quantization_map_base64"])))
    assert declared == set(quantize.layers_to_quantize(tensors))


def test_input_projections_are_packed_on_request(tensors):
    more = set(quantize.layers_to_quantize(tensors, pack_inputs=True)) - set(quantize.layers_to_quantize(tensors))
    assert more == {"img_in", "txt_in", "vector_in.in_layer"}


@pytest.mark.parametrize("quantizer", quantize.QUANTIZERS)
def test_file_reads_back_as_it_was_written(tmp_path, tensors, quantizer):
    out, metadata = quantize.quantize(tensors, quantizer)
    path = quantize.save(tmp_path / "model.safetensors", out, metadata)
    again, metadata_again = quantize.load(path)
    assert metadata_again == metadata
    assert set(again) == set(out)
    assert all(
        torch.equal(again[name].view(torch.uint8), out[name].contiguous().view(torch.uint8))
        for name in out
        if out[name].dim()
    )


@pytest.mark.parametrize("name", fixtures.BROKEN)
def test_broken_files_differ_from_sound_ones_in_the_named_layers_only(tensors, name):
    broken = fixtures.BROKEN[name](tensors)
    source = {"broken-zeroed-markers.safetensors": "fp8", "broken-half-scale.safetensors": "int8_row"}
    sound, _ = quantize.quantize(tensors, source.get(name, "convrot_w4a4"))
    changed = {
        key
        for key in sound
        if broken[key].dtype != sound[key].dtype
        or broken[key].shape != sound[key].shape
        or broken[key].flatten().tolist() != sound[key].flatten().tolist()
    }
    assert changed
    assert {key.rsplit(".", 1)[0] for key in changed} <= set(fixtures.BROKEN_LAYERS)
