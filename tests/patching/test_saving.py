"""Saving: the source's bytes again through ComfyUI's own nodes; LoRAs left out or merged through ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.cli_args
import pytest
import torch
from in_process import FORMATS, aligned, denoise, relative, same_bytes, with_lora
from quant_loader.checkpoint import check
from quant_loader.demo import quantize
from quant_loader.patching.errors import QuantLoaderError
from quant_loader.patching.load import load_diffusion_model
from quant_loader.patching.patcher import packed_modules
from quant_loader.patching.saving import save_diffusion_model

PREFIX = "model.diffusion_model."


@pytest.mark.parametrize("offloaded", [False, True], ids=["loaded", "offloaded"])
@pytest.mark.parametrize("quantizer", [q for q in FORMATS if q != "quanto_int8"])
def test_model_save_writes_the_source_again(
    quantizer: str,
    offloaded: bool,
    load: Callable[..., Any],
    files: Callable[..., Path],
    stock_save: Callable[[Any], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patcher = load(quantizer)
    if offloaded:
        import comfy.model_management

        # As under --lowvram: the node loads the model, of which a part stays offloaded.
        monkeypatch.setattr(comfy.model_management, "load_models_gpu", lambda loaded: loaded[0].load("cpu", 1))
    fresh = denoise(aligned(load(quantizer))) if not offloaded else None
    path = stock_save(patcher)
    report = check(str(path))
    assert report.verdict == "ok", report.faults
    source, _ = quantize.load(files(quantizer))
    saved, _ = quantize.load(path)
    for spec in check(str(files(quantizer))).layers:
        for name in (*spec.tensors.values(), f"{spec.name}.comfy_quant"):
            assert same_bytes(saved[PREFIX + name], source[name]), name
    # ComfyUI renames the weights of Flux's norms while loading.
    assert {PREFIX + name for name in source if "_norm" not in name} <= set(saved)
    if fresh is not None:
        assert torch.equal(denoise(aligned(load_diffusion_model([path])[0])), fresh)


def test_a_layer_declared_in_metadata_gains_a_marker(
    tmp_path: Path, base_tensors: quantize.Tensors, stock_save: Callable[[Any], Path]
) -> None:
    import json

    tensors, _ = quantize.quantize(base_tensors, "int8_convrot")
    names = [n.removesuffix(".comfy_quant") for n in tensors if n.endswith(".comfy_quant")]
    conf = {n: json.loads(bytes(tensors.pop(f"{n}.comfy_quant").tolist())) for n in names}
    metadata = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": conf})}
    source = quantize.save(tmp_path / "m.safetensors", tensors, metadata)
    path = stock_save(load_diffusion_model([source])[0])
    report = check(str(path))
    assert report.verdict == "ok", report.faults
    assert {spec.declared_by for spec in report.layers} == {"marker"}
    saved, _ = quantize.load(path)
    for name in names:
        assert json.loads(bytes(saved[f"{PREFIX}{name}.comfy_quant"].tolist())) == conf[name]
        for suffix in ("weight", "weight_scale"):
            assert same_bytes(saved[f"{PREFIX}{name}.{suffix}"], tensors[f"{name}.{suffix}"])


def test_quanto_becomes_int8_rows_of_the_same_values(
    load: Callable[..., Any], files: Callable[..., Path], stock_save: Callable[[Any], Path]
) -> None:
    path = stock_save(load("quanto_int8"))
    report = check(str(path))
    assert report.verdict == "ok", report.faults
    assert dict(report.formats) == {"int8_tensorwise": len(report.layers)}
    source, saved = quantize.load(files("quanto_int8"))[0], quantize.load(path)[0]
    for spec in check(str(files("quanto_int8"))).layers:
        assert same_bytes(saved[f"{PREFIX}{spec.name}.weight"], source[f"{spec.name}.weight._data"])
        assert torch.equal(saved[f"{PREFIX}{spec.name}.weight_scale"], source[f"{spec.name}.weight._scale"].float())


def test_e8m0_scales_are_written_as_bytes(
    tmp_path: Path, base_tensors: quantize.Tensors, stock_save: Callable[[Any], Path]
) -> None:
    """U8 is what every reader takes; the bytes are the same."""
    tensors, metadata = quantize.quantize(base_tensors, "mxfp8")
    names = [n for n in tensors if n.endswith(".weight_scale")]
    tensors.update({n: tensors[n].view(torch.float8_e8m0fnu) for n in names})
    source = quantize.save(tmp_path / "m.safetensors", tensors, metadata)
    path = stock_save(load_diffusion_model([source])[0])
    assert check(str(path)).verdict == "ok"
    saved, _ = quantize.load(path)
    for name in names:
        assert saved[PREFIX + name].dtype == torch.uint8
        assert same_bytes(saved[PREFIX + name], tensors[name].view(torch.uint8))


# Two packed layers and one plain one.
PATCHED = [f"diffusion_model.{n}.weight" for n in ("double_blocks.0.img_mlp.0", "single_blocks.0.linear2", "img_in")]


def lora_on(patcher: Any) -> Any:
    return with_lora(patcher, 1.0, PATCHED, size=0.1)


def test_a_stock_save_never_loses_a_lora(load: Callable[..., Any], stock_save: Callable[[Any], Path]) -> None:
    with pytest.raises(QuantLoaderError, match=r"2 quantised layers.*QuantLoaderSave"):
        stock_save(lora_on(load("int8_row")))


def test_a_lora_of_strength_zero_is_no_loss(
    load: Callable[..., Any], files: Callable[..., Path], stock_save: Callable[[Any], Path]
) -> None:
    saved = quantize.load(stock_save(with_lora(load("int8_row"), 0.0)))[0]
    source = quantize.load(files("int8_row"))[0]
    for name in [n for n in source if f"{n.rpartition('.')[0]}.comfy_quant" in source and not n.endswith("bias")]:
        assert same_bytes(saved[f"model.diffusion_model.{name}"], source[name]), name


def test_a_model_of_a_server_with_eight_bit_weights_is_saved_with_its_values(
    load: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--fp8_e4m3fn-unet rounds plain weights to 8 bits while loading; packed ones stay as they are."""
    monkeypatch.setattr(comfy.cli_args.args, "fp8_e4m3fn_unet", True)
    patcher = load("int8_row")
    plain = patcher.model.diffusion_model.img_in.weight
    assert plain.dtype == torch.float8_e4m3fn
    module = next(iter(packed_modules(patcher.model).values()))
    assert module.weight.dequantize().dtype == torch.bfloat16
    save_diffusion_model(patcher, tmp_path / "m.safetensors")
    monkeypatch.setattr(comfy.cli_args.args, "fp8_e4m3fn_unet", False)
    assert check(str(tmp_path / "m.safetensors")).verdict == "ok"
    again, _ = load_diffusion_model([tmp_path / "m.safetensors"])
    assert torch.equal(again.model.diffusion_model.img_in.weight.float(), plain.float())
    assert torch.equal(denoise(aligned(again)), denoise(aligned(patcher)))


@pytest.mark.parametrize("quantizer", ["int8_row", "nvfp4"])
def test_loras_left_out_are_left_out_everywhere(
    quantizer: str, tmp_path: Path, load: Callable[..., Any], files: Callable[..., Path]
) -> None:
    patcher = load(quantizer)
    fresh, patched = denoise(aligned(patcher)), lora_on(patcher)
    with_lora = denoise(patched)
    path = tmp_path / "out" / "model.safetensors"
    assert save_diffusion_model(patched, path) == []
    assert [p.name for p in path.parent.iterdir()] == ["model.safetensors"]
    assert torch.equal(denoise(aligned(load_diffusion_model([path])[0])), fresh)
    source, saved = quantize.load(files(quantizer))[0], quantize.load(path)[0]
    for spec in check(str(files(quantizer))).layers:
        assert all(same_bytes(saved[PREFIX + n], source[n]) for n in spec.tensors.values())
    assert torch.equal(denoise(patched), with_lora)


@pytest.mark.parametrize("quantizer", ["int8_row", "int8_convrot", "nvfp4", "fp8"])
def test_merged_loras_are_in_the_file(quantizer: str, tmp_path: Path, load: Callable[..., Any]) -> None:
    patcher = load(quantizer)
    patched = lora_on(patcher)
    wanted, plain = denoise(patched), denoise(patcher)
    notes = save_diffusion_model(patched, tmp_path / "merged.safetensors", "merge")
    assert [note.split(":")[0] for note in notes] == ["double_blocks.0.img_mlp.0", "single_blocks.0.linear2"]
    assert all("written as INT8 rows with ConvRot" in note for note in notes)
    report = check(str(tmp_path / "merged.safetensors"))
    assert report.verdict == "ok", report.faults
    merged, _ = load_diffusion_model([tmp_path / "merged.safetensors"])
    assert not merged.side_patches
    assert relative(denoise(merged), wanted) < 0.2 * relative(plain, wanted)


def test_a_folder_that_cannot_be_written_is_said_in_a_sentence(tmp_path: Path, load: Callable[..., Any]) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(QuantLoaderError, match="could not be written"):
        save_diffusion_model(load("int8_row"), tmp_path / "file" / "model.safetensors")


# A whole checkpoint is saved in tests/e2e/test_loaders.py; here is what ComfyUI does to the encoders of some families.


def encoder_state(quantised: bool) -> dict[str, torch.Tensor]:
    """One layer of Stable Diffusion 2's text encoder as ComfyUI holds it; a checkpoint keeps q, k and v as one."""
    out: dict[str, torch.Tensor] = {}
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj", "mlp.fc1"):
        weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
        layer = f"clip_h.transformer.text_model.encoder.layers.0.{name}"
        out[f"{layer}.bias"] = torch.zeros(64, dtype=torch.bfloat16)
        if not quantised:
            out[f"{layer}.weight"] = weight
            continue
        packed = quantize.int8_row(weight)
        out.update({f"{layer}.{suffix}": tensor for suffix, tensor in packed.tensors.items()})
        out[f"{layer}.comfy_quant"] = quantize.marker_tensor(packed.marker)
    return out


def test_an_encoder_that_comfyui_would_tear_apart_is_not_saved(tmp_path: Path) -> None:
    """Stable Diffusion 2 concatenates q, k and v when it saves, which would leave their scales behind."""
    from quant_loader.demo import tiny_core

    tensors = tiny_core.sd2()
    path = quantize.save(
        tmp_path / "sd2.safetensors", *quantize.quantize(tensors, "int8_row", layers=tiny_core.linears(tensors, 64))
    )
    patcher, answer = load_diffusion_model([path])
    with pytest.raises(QuantLoaderError, match=r"rearranges the text encoder.*Save the diffusion model alone"):
        patcher.state_dict_for_saving(encoder_state(True))
    saved = patcher.state_dict_for_saving(encoder_state(False))
    assert sum(name.endswith(".comfy_quant") for name in saved) == len(answer.layers)
    assert saved["cond_stage_model.model.transformer.resblocks.0.attn.in_proj_weight"].shape == (192, 64)
