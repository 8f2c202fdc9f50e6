"""Files that other programs made: convert_to_quant's (kept in this folder), and comfy-kitchen's layouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from quant_loader.checkpoint import check

MADE = Path(__file__).with_name("made_by_ctq")
LAYERS = 21
"""All the linears of the model."""


@pytest.mark.parametrize(
    ("name", "rules", "format_name"),
    [
        ("fp8", "strict", "float8_e4m3fn"),
        ("int8-convrot", "strict", "int8_tensorwise"),
        ("nvfp4", "compatible", "nvfp4"),
    ],
)
def test_ctq_files_check(command, name, rules, format_name):
    ran = command("check", "--json", "--rules", rules, MADE / f"{name}.safetensors")
    report = json.loads(ran.out)
    assert ran.code == 0
    assert report["formats"] == {format_name: LAYERS}
    shapes = {layer["name"]: tuple(layer["shape"]) for layer in report["layers"]}
    assert shapes["single_blocks.0.linear1"] == (896, 128)
    assert shapes["final_layer.linear"] == (64, 128), "without the padding of its NVFP4 scales"


def test_ctq_rotation_groups_are_read_from_its_markers():
    layers = {layer.name: layer.get("convrot_groupsize") for layer in check([MADE / "int8-convrot.safetensors"]).layers}
    assert len(layers) == LAYERS
    assert layers["double_blocks.0.img_attn.qkv"] == 64, "128 columns: the largest power of 4 that divides them"
    assert layers["double_blocks.0.img_mlp.2"] == 256


def test_ctq_padded_nvfp4_is_refused_by_strict_and_repair_says_why(command, tmp_path):
    source = MADE / "nvfp4.safetensors"
    ran = command("check", source)
    assert ran.code == 1
    assert "compatible" in ran.out
    ran = command("repair", source, tmp_path / "out.safetensors")
    assert ran.code == 1
    assert "Compatible rules accept the file as it is" in ran.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "quantizer", ["int8_scalar", "int8_row", "int8_convrot", "fp8", "mxfp8", "nvfp4", "convrot_w4a4"]
)
def test_comfy_kitchen_files_need_no_mending(command, tmp_path, quantizer):
    """Tensors as comfy-kitchen lays them out, saved by safetensors: sound, planned, and repair has nothing to do."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("comfy_kitchen")
    from quant_loader.demo import quantize

    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(1)) / 16
    tensors, metadata = quantize.quantize({"a.weight": weight.bfloat16()}, quantizer, layers=["a"])
    source = quantize.save(tmp_path / "in.safetensors", tensors, metadata)
    assert command("check", source).code == 0
    assert command("plan", source, "--device", "sm_86").code == 0
    ran = command("repair", source, tmp_path / "out.safetensors")
    assert ran.code == 1
    assert "nothing to mend" in ran.err
