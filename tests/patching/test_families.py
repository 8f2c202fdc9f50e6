"""Other families than Flux, full checkpoints, text encoders, ControlNets, model patches: tiny ones, really run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.sd
import pytest
import torch
from in_process import flux_inputs, relative
from quant_loader.demo import quantize, tiny_core
from quant_loader.patching import load as loading
from quant_loader.patching.kernel_report import report
from quant_loader.patching.patcher import packed_modules

# The error of one linear (see test_formats), and how many follow each other at most in these models.
LINEAR_ERROR = {"int8_convrot": 0.016, "int8_row": 0.05, "nvfp4": 0.100, "fp8": 0.029}
DEPTH = 16

LATENTS: dict[str, tuple[tuple[int, ...], int, int]] = {
    # family: latent shape, width of the context, width of the pooled vector (0: none)
    "flux2": ((1, 128, 4, 4), 1024, 0),
    "sd15": ((1, 4, 8, 8), 768, 0),
    "sd2": ((1, 4, 8, 8), 1024, 0),
    "sd3": ((1, 16, 8, 8), 1024, 2048),
    "wan": ((1, 16, 1, 8, 8), 4096, 0),
}


def run(patcher: Any, family: str) -> torch.Tensor:
    shape, context, vector = LATENTS[family]
    generator = torch.Generator().manual_seed(5)
    more = {"y": torch.randn(1, vector, generator=generator)} if vector else {}
    x, cross = torch.randn(shape, generator=generator), torch.randn(1, 16, context, generator=generator)
    sigma = patcher.model.model_sampling.sigma_max * torch.full((1,), 0.6)
    comfy.model_management.load_models_gpu([patcher])
    patcher.pre_run()
    with torch.no_grad():
        out = patcher.model.apply_model(x, sigma, c_crossattn=cross, **more)
    patcher.cleanup()
    return out


@functools.cache
def tensors_of(family: str) -> quantize.Tensors:
    return getattr(tiny_core, family)()


def packed_file(tmp_path: Path, tensors: quantize.Tensors, quantizer: str, name: str = "m") -> Path:
    multiple = quantize.ROTATION_GROUP if quantizer == "int8_convrot" else 64
    layers = tiny_core.linears(tensors, multiple)
    assert layers
    return quantize.save(tmp_path / f"{name}.safetensors", *quantize.quantize(tensors, quantizer, layers=layers))


@pytest.mark.parametrize("quantizer", ["int8_convrot", "nvfp4"])
@pytest.mark.parametrize("family", LATENTS)
def test_a_family_loads_and_computes_what_its_dense_model_does(family: str, quantizer: str, tmp_path: Path) -> None:
    tensors = tensors_of(family)
    # NVFP4 files may pad scales, which is a dialect of its own.
    patcher, _ = loading.load_diffusion_model([packed_file(tmp_path, tensors, quantizer)], "compatible")
    base = comfy.sd.load_diffusion_model_state_dict(dict(tensors))
    assert type(patcher.model) is type(base.model)
    assert patcher.model.model_config.unet_config == base.model.model_config.unet_config
    assert patcher.model_size() < base.model_size()
    difference = relative(run(patcher, family), run(base, family))
    assert 0 < difference < DEPTH**0.5 * LINEAR_ERROR[quantizer]
    text, entry = report(patcher)
    assert sum(group["count"] for group in entry["groups"]) == len(packed_modules(patcher.model))
    assert all(group["calls"] for group in entry["groups"]), text


def test_scaled_fp8_of_the_old_kind(
    tmp_path: Path, base_tensors: quantize.Tensors, load_base: Callable[[], Any]
) -> None:
    """Wan and UMT5 files with a scaled_fp8 tensor; two elements in it ask for full precision products."""
    from in_process import denoise

    base = denoise(load_base())
    new, _ = quantize.quantize(base_tensors, "fp8")
    for elements in (0, 2):
        tensors = {"scaled_fp8": torch.zeros(elements, dtype=torch.float8_e4m3fn)}
        for name, tensor in new.items():
            if not name.endswith(".comfy_quant"):
                tensors[name.replace(".weight_scale", ".scale_weight")] = tensor
        path = quantize.save(tmp_path / f"old{elements}.safetensors", tensors)
        patcher, _ = loading.load_diffusion_model([path], "compatible")
        modules = packed_modules(patcher.model).values()
        assert len(modules) == 13
        assert {bool(m.spec.get("full_precision_matrix_mult", False)) for m in modules} == {elements == 2}
        assert relative(denoise(patcher), base) < DEPTH**0.5 * LINEAR_ERROR["fp8"]


def test_the_correction_of_w4a8_is_applied(tmp_path: Path, base_tensors: quantize.Tensors) -> None:
    """ComfyUI drops weight_correction. W_rot = q8 * s_channel + correction[k // group, n]."""
    name, group = "double_blocks.0.img_mlp.0", quantize.W4A8_GROUP
    tensors, metadata = quantize.quantize(base_tensors, "asym_w4a8")
    N, K = base_tensors[f"{name}.weight"].shape
    correction = torch.randn(K // group, N, generator=torch.Generator().manual_seed(3)) * 0.01
    tensors[f"{name}.weight_correction"] = correction
    patcher, _ = loading.load_diffusion_model([quantize.save(tmp_path / "m.safetensors", tensors, metadata)])
    plain, _ = loading.load_diffusion_model(
        [quantize.save(tmp_path / "plain.safetensors", *quantize.quantize(base_tensors, "asym_w4a8"))]
    )
    key = f"diffusion_model.{name}.weight"
    x = torch.randn(64, K, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        difference = packed_modules(patcher.model)[key](x) - packed_modules(plain.model)[key](x)
    rotated = quantize.rotate(x, quantize.ROTATION_GROUP).double()
    wanted = rotated @ correction.double().repeat_interleave(group, 0)
    # The difference of two quantised products, of which each has the error of 8-bit activations on the whole weight.
    assert relative(difference, wanted) < 0.25
    assert relative(difference, torch.zeros_like(wanted) + 1e-9) > 1


# Text encoders


def encoder_file(tmp_path: Path, make: Callable[[], quantize.Tensors], quantizer: str | None) -> Path:
    tensors = make()
    if quantizer is None:
        return quantize.save(tmp_path / "base.safetensors", tensors)
    layers = tiny_core.linears(tensors, 64)
    table = next(n for n in tensors if n in ("shared.weight", "text_model.embeddings.token_embedding.weight"))
    out, _ = quantize.quantize(tensors, quantizer, layers=layers)
    rows = quantize.int8_row(out.pop(table))
    stem = table.removesuffix(".weight")
    out.update({f"{stem}.{suffix}": tensor for suffix, tensor in rows.tensors.items()})
    out[f"{stem}.comfy_quant"] = quantize.marker_tensor(rows.marker)
    return quantize.save(tmp_path / f"{quantizer}.safetensors", out)


ENCODERS: dict[str, tuple[Callable[[], quantize.Tensors], str, dict[str, Any]]] = {
    "clip_l": (tiny_core.clip_l, "stable_diffusion", tiny_core.CLIP_L_OPTIONS),
    "t5": (tiny_core.t5_base, "stable_audio", tiny_core.T5_OPTIONS),
}


def encode(clip: Any, text: str = "a small red house by the sea") -> torch.Tensor:
    return clip.encode_from_tokens(clip.tokenize(text))


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("quantizer", ["int8_row", "nvfp4"])
def test_a_text_encoder_really_runs_quantised(encoder: str, quantizer: str, tmp_path: Path) -> None:
    make, kind, options = ENCODERS[encoder]

    def load(path: Path, execution: str = "auto") -> Any:
        return loading.load_text_encoder([path], kind, "strict", execution, model_options=options)[0]

    clip = load(encoder_file(tmp_path, make, quantizer))
    text, entry = report(clip.patcher)
    assert all(group["calls"] == 0 for group in entry["groups"])
    out = encode(clip)
    base = comfy.sd.load_clip(
        [str(encoder_file(tmp_path, make, None))], clip_type=comfy.sd.CLIPType[kind.upper()], model_options=options
    )
    assert 0 < relative(out, encode(base)) < DEPTH**0.5 * LINEAR_ERROR[quantizer]
    dequantised = load(encoder_file(tmp_path, make, quantizer), "exact")
    assert relative(out, encode(dequantised)) < DEPTH**0.5 * LINEAR_ERROR[quantizer]
    text, entry = report(clip.patcher)
    ran = {group["operator"]: group["calls"] for group in entry["groups"]}
    assert ran.pop("row lookup") == 1, text
    assert sum(ran.values()) >= 12


def test_a_lora_on_a_text_encoder(tmp_path: Path) -> None:
    make, kind, options = ENCODERS["clip_l"]
    path = encoder_file(tmp_path, make, "int8_row")
    clip, _ = loading.load_text_encoder([path], kind, model_options=options)
    plain = encode(clip)
    generator = torch.Generator().manual_seed(1)
    name = "lora_te_text_model_encoder_layers_0_mlp_fc1"
    lora = {
        f"{name}.lora_down.weight": torch.randn(4, 256, generator=generator) / 16,
        f"{name}.lora_up.weight": torch.randn(1024, 4, generator=generator) * 0.2,
        f"{name}.alpha": torch.tensor(4.0),
    }
    _, patched = comfy.sd.load_lora_for_models(None, clip, lora, 0.0, 1.0)
    assert type(patched).__name__ == "QuantCLIP"
    assert patched.patcher.lora_report()[0].startswith("1 patches on 1 quantised layers: 1 beside the weight")
    assert relative(encode(patched), plain) > 0.005
    assert torch.equal(encode(clip), plain)


def test_a_lora_on_a_quantised_table(tmp_path: Path) -> None:
    from comfy.weight_adapter import LoRAAdapter

    make, kind, options = ENCODERS["t5"]
    clip, _ = loading.load_text_encoder([encoder_file(tmp_path, make, "int8_row")], kind, model_options=options)
    (key,) = [k for k, m in packed_modules(clip.patcher.model).items() if m.is_table]
    module = packed_modules(clip.patcher.model)[key]
    generator = torch.Generator().manual_seed(1)
    up, down = torch.randn(32128, 4, generator=generator) * 0.1, torch.randn(4, 256, generator=generator)
    ids = torch.tensor([[0, 5, 32127]])
    plain = module(ids)
    patched = clip.clone()
    patched.add_patches({key: LoRAAdapter(set(), (up, down, 4.0, None, None, None))}, 0.5)
    encode(patched)
    assert relative(module(ids) - plain, 0.5 * up[ids].double() @ down.double()) < 2e-3  # rows in 16 bit
    exact = clip.clone()
    exact.add_patches({key: ("diff", (up @ down,))}, 0.5)
    encode(exact)
    assert relative(module(ids) - plain, 0.5 * up[ids].double() @ down.double()) < 2e-3


def test_guards_of_a_text_encoder_speak_after_an_encode(tmp_path: Path) -> None:
    import dataclasses

    make, kind, options = ENCODERS["clip_l"]
    clip, _ = loading.load_text_encoder([encoder_file(tmp_path, make, "int8_row")], kind, model_options=options)
    module = next(m for m in packed_modules(clip.patcher.model).values() if not m.is_table)
    params = dataclasses.replace(module.weight._params, weight_scale=module.weight._params.weight_scale * float("nan"))
    weight = module.weight
    module.weight = torch.nn.Parameter(type(weight)(weight._qdata, weight._layout_cls, params), False)
    encode(clip)
    assert any(module.spec.name in sentence for sentence in module.context.sentences())
    # Prompts are encoded one by one: a good one does not take back what was said of another.
    module.weight = torch.nn.Parameter(weight, False)
    encode(clip)
    assert any(module.spec.name in sentence for sentence in module.context.sentences())
    # With other patches on the layer it does.
    key = next(k for k, m in packed_modules(clip.patcher.model).items() if m is module)
    patched = clip.clone()
    patched.add_patches({key: ("diff", (torch.zeros(*module.weight.shape),))}, 0.5)
    encode(patched)
    assert module.context.sentences() == []


def test_a_dropped_text_encoder_is_rebuilt(tmp_path: Path) -> None:
    make, kind, options = ENCODERS["t5"]
    clip, _ = loading.load_text_encoder([encoder_file(tmp_path, make, "int8_row")], kind, model_options=options)
    build, arguments = clip.patcher.cached_patcher_init
    rebuilt = build(*arguments, disable_dynamic=True)
    assert type(rebuilt).__name__ == "QuantModelPatcher"
    assert rebuilt.model_size() == clip.patcher.model_size()


# One file with everything


@pytest.fixture
def checkpoint_file(tmp_path: Path) -> Path:
    """A Stable Diffusion 1.5 checkpoint whose UNet is quantised; the VAE is that family's, small and dense."""
    unet = quantize.quantize(tensors_of("sd15"), "int8_row", layers=tiny_core.linears(tensors_of("sd15")))[0]
    return quantize.save(tmp_path / "full.safetensors", {f"model.diffusion_model.{n}": t for n, t in unet.items()})


def test_a_checkpoint_gives_its_model(checkpoint_file: Path) -> None:
    model, clip, vae, answer = loading.load_checkpoint([checkpoint_file], output_vae=False)
    assert clip is None
    assert vae is None
    assert answer.verdict == "ok"
    base = comfy.sd.load_diffusion_model_state_dict(dict(tensors_of("sd15")))
    assert relative(run(model, "sd15"), run(base, "sd15")) < DEPTH**0.5 * LINEAR_ERROR["int8_row"]
    build, arguments = model.cached_patcher_init
    assert torch.equal(run(build(*arguments, disable_dynamic=True), "sd15"), run(model, "sd15"))


def test_a_diffusion_model_alone_is_no_checkpoint(tmp_path: Path) -> None:
    from quant_loader.patching.errors import QuantLoaderError

    tensors = {"a.weight": torch.randn(64, 64).to(torch.bfloat16)}
    path = quantize.save(tmp_path / "m.safetensors", *quantize.quantize(tensors, "int8_row", layers=["a"]))
    with pytest.raises(QuantLoaderError, match="no full checkpoint"):
        loading.load_checkpoint([path])
    with pytest.raises(QuantLoaderError, match="does not know the model"):
        loading.load_diffusion_model([path])
    with pytest.raises(QuantLoaderError, match="no ControlNet"):
        loading.load_controlnet([path])
    with pytest.raises(QuantLoaderError, match="no model patch"):
        loading.load_model_patch([path])


# ControlNets and model patches


@pytest.mark.parametrize("quantizer", ["int8_convrot", "nvfp4"])
def test_a_controlnet_controls_as_its_dense_one(quantizer: str, tmp_path: Path) -> None:
    import comfy.controlnet

    tensors = tiny_core.flux_controlnet()
    controlnet, answer = loading.load_controlnet([packed_file(tmp_path, tensors, quantizer)])
    base = comfy.controlnet.load_controlnet_state_dict(dict(tensors))
    inputs = flux_inputs()

    def control(net: Any) -> torch.Tensor:
        comfy.model_management.load_models_gpu(net.get_models())
        with torch.no_grad():
            out = net.control_model(
                inputs.x,
                hint=inputs.x[:, :3].repeat(1, 1, 8, 8),
                timesteps=inputs.sigma,
                context=inputs.context,
                y=inputs.vector,
            )
        return out["input"][0]

    assert 0 < relative(control(controlnet), control(base)) < DEPTH**0.5 * LINEAR_ERROR[quantizer]
    text, entry = report(controlnet.control_model_wrapped)
    assert sum(group["count"] for group in entry["groups"]) == len(answer.layers), text
    assert torch.equal(control(controlnet.copy()), control(controlnet))


def test_a_model_patch_is_built_by_comfyui_on_our_linears(tmp_path: Path) -> None:
    tensors = tiny_core.uni3c()
    path = packed_file(tmp_path, tensors, "int8_convrot")
    patch, answer = loading.load_model_patch([path])
    modules = packed_modules(patch.model)
    assert type(patch.model).__name__ == "WanUni3CControlnet"
    assert len(modules) == len(answer.layers) == len(tiny_core.linears(tensors, 256))
    for key, module in modules.items():
        weight = tensors[key].double()
        x = torch.randn(64, weight.shape[1], generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            y = module(x) - module.bias
        assert relative(y, x.double() @ weight.T) < LINEAR_ERROR["int8_convrot"], key


# Too large to be tiny: what detection sees, on tensors without memory

META: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {
    # A layout's keys that ComfyUI's detection reads, with the real shapes; one projection of each is 4-bit packed.
    "lumina2": (
        "cap_embedder.1",
        {
            "cap_embedder.1.weight": (2304, 2304),
            "cap_embedder.0.weight": (2304,),
            "noise_refiner.0.attention.k_norm.weight": (96,),
            "x_embedder.weight": (2304, 64),
            "layers.25.attention.qkv.weight": (3840, 2304),
            "layers.0.attention.qkv.weight": (3840, 2304),
        },
    ),
    # Z-Image has Lumina's keys and another width.
    "z_image": (
        "cap_embedder.1",
        {
            "cap_embedder.1.weight": (3840, 2560),
            "cap_embedder.0.weight": (2560,),
            "cap_pad_token": (1, 3840),
            "noise_refiner.0.attention.k_norm.weight": (128,),
            "x_embedder.weight": (3840, 64),
            "layers.28.ffn_norm1.weight": (3840,),
            **{f"layers.{i}.attention.qkv.weight": (11520, 3840) for i in range(30)},
        },
    ),
    "qwen_image": (
        "img_in",
        {
            "txt_norm.weight": (3584,),
            "img_in.weight": (3072, 64),
            "txt_in.weight": (3072, 3584),
            "transformer_blocks.0.attn.to_q.weight": (3072, 3072),
            "proj_out.weight": (64, 3072),
        },
    ),
    "ltxv": (
        "transformer_blocks.0.attn2.to_k",
        {
            "adaln_single.emb.timestep_embedder.linear_1.bias": (2048,),
            "transformer_blocks.0.attn2.to_k.weight": (2048, 2048),
            "transformer_blocks.27.attn2.to_k.weight": (2048, 2048),
        },
    ),
}


@pytest.mark.parametrize("family", [*META, "sdxl"])
def test_detection_reads_logical_shapes_of_a_packed_projection(family: str) -> None:
    from comfy.model_detection import detect_unet_config
    from quant_loader.checkpoint import LayerSpec
    from quant_loader.patching.state_dict import fold

    if family == "sdxl":
        name, dense = "input_blocks.4.1.transformer_blocks.0.attn2.to_k", tiny_core.sdxl_layout()
    else:
        name, shapes = META[family]
        dense = {key: torch.empty(shape, dtype=torch.bfloat16, device="meta") for key, shape in shapes.items()}
    wanted = detect_unet_config(dict(dense), "")
    N, K = dense[f"{name}.weight"].shape
    packed: dict[str, Any] = {key: value for key, value in dense.items() if key != f"{name}.weight"}
    packed[f"{name}.weight"] = torch.empty(N, K // 2, dtype=torch.uint8, device="meta")
    packed[f"{name}.weight_scale"] = torch.empty(N, K // 16, dtype=torch.float8_e4m3fn, device="meta")
    packed[f"{name}.weight_scale_2"] = torch.empty((), device="meta")
    suffixes = ("weight", "weight_scale", "weight_scale_2")
    spec = LayerSpec(name, "nvfp4", (N, K), tensors={s: f"{name}.{s}" for s in suffixes})
    assert wanted is not None
    assert detect_unet_config(fold(packed, [spec]), "") == wanted
    misled = detect_unet_config({k: v for k, v in packed.items() if not k.endswith(("_scale", "_scale_2"))}, "")
    assert misled != wanted
