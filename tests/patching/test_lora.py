"""LoRA and its relatives beside quantised weights: right, complete, free to change, and gone without a trace."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.hooks
import comfy.lora
import comfy.lora_convert
import comfy.sd
import pytest
import torch
from in_process import FORMATS, denoise, flux_inputs, relative
from quant_loader.demo import models, quantize
from quant_loader.patching.errors import QuantLoaderError
from quant_loader.patching.kernel_report import report
from quant_loader.patching.patcher import packed_modules

Tensors = dict[str, torch.Tensor]
H = models.HIDDEN

# kohya's name of every quantised layer of the tiny Flux -> its shape
KOHYA = {
    "double_blocks_0_img_attn_qkv": (3 * H, H),
    "double_blocks_0_img_mlp_0": (4 * H, H),
    "double_blocks_0_img_mlp_2": (H, 4 * H),
    "double_blocks_0_img_mod_lin": (6 * H, H),
    "single_blocks_0_linear1": (7 * H, H),
    "single_blocks_0_linear2": (H, 5 * H),
}


def _random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def kohya_lora(rank: int = 8, seed: int = 1, names: dict[str, tuple[int, int]] = KOHYA) -> Tensors:
    """A LoRA as kohya's scripts write it, about 2 % of a layer's weight."""
    out: Tensors = {}
    for index, (name, (N, K)) in enumerate(names.items()):
        out[f"lora_unet_{name}.lora_down.weight"] = _random(rank, K, seed=seed + 2 * index) / K**0.5
        out[f"lora_unet_{name}.lora_up.weight"] = _random(N, rank, seed=seed + 2 * index + 1) * 0.05
        out[f"lora_unet_{name}.alpha"] = torch.tensor(rank / 2)
    return out


def diffusers_lora(rank: int = 8, seed: int = 1) -> Tensors:
    """A LoRA with diffusers' names: to_q, to_k and to_v are parts of Flux's fused qkv."""
    out: Tensors = {}
    layers = {f"transformer_blocks.0.attn.{n}": (H, H) for n in ("to_q", "to_k", "to_v", "to_out.0", "add_k_proj")}
    layers["single_transformer_blocks.0.attn.to_q"] = (H, H)
    layers["single_transformer_blocks.0.proj_mlp"] = (4 * H, H)
    for index, (name, (N, K)) in enumerate(layers.items()):
        out[f"transformer.{name}.lora_A.weight"] = _random(rank, K, seed=seed + 2 * index) / K**0.5
        out[f"transformer.{name}.lora_B.weight"] = _random(N, rank, seed=seed + 2 * index + 1) * 0.05
    return out


def loha(seed: int = 1) -> Tensors:
    N, K = KOHYA["double_blocks_0_img_mlp_0"]
    sizes = {"hada_w1_a": (N, 4), "hada_w1_b": (4, K), "hada_w2_a": (N, 4), "hada_w2_b": (4, K)}
    name = "lora_unet_double_blocks_0_img_mlp_0"
    out = {f"{name}.{k}": _random(*s, seed=seed + i) * 0.1 for i, (k, s) in enumerate(sizes.items())}
    return {**out, f"{name}.alpha": torch.tensor(4.0)}


def lokr(seed: int = 1) -> Tensors:
    N, K = KOHYA["double_blocks_0_img_mlp_0"]
    name = "lora_unet_double_blocks_0_img_mlp_0"
    return {
        f"{name}.lokr_w1": _random(4, 4, seed=seed) * 0.1,
        f"{name}.lokr_w2": _random(N // 4, K // 4, seed=seed + 1) * 0.1,
    }


def dora(seed: int = 1) -> Tensors:
    name = "double_blocks_0_img_mlp_0"
    out = kohya_lora(seed=seed, names={name: KOHYA[name]})
    return {**out, f"lora_unet_{name}.dora_scale": _random(KOHYA[name][0], 1, seed=9).abs() + 0.5}


def difference(seed: int = 1) -> Tensors:
    name = "lora_unet_double_blocks_0_img_mlp_0"
    return {f"{name}.diff": _random(*KOHYA["double_blocks_0_img_mlp_0"], seed=seed) * 0.01}


WITHOUT_LOW_RANK = {"LoHa": loha, "LoKr": lokr, "DoRA": dora, "'diff'": difference}


def with_lora(patcher: Any, lora: Tensors, strength: float = 1.0) -> Any:
    """What the stock LoRA nodes do after reading the file."""
    return comfy.sd.load_lora_for_models(patcher, None, dict(lora), strength, 0.0)[0]


def patches_of(patcher: Any, lora: Tensors) -> dict[Any, Any]:
    key_map = comfy.lora.model_lora_keys_unet(patcher.model, {})
    return comfy.lora.load_lora(comfy.lora_convert.convert_lora(dict(lora)), key_map)


def bytes_of(patcher: Any) -> str:
    digest = hashlib.sha256()
    for key, module in sorted(packed_modules(patcher.model).items()):
        digest.update(key.encode())
        for suffix, tensor in {"": module.weight._qdata, **module.weight._params.companions()}.items():
            digest.update(suffix.encode() + tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def effect_errors(patcher: Any, loras: list[tuple[Tensors, float]]) -> dict[str, float]:
    """By layer: how far the change that LoRAs make to the layer's output is from x (strength * B A)^T in float64.

    The same input goes through the layer with and without them.
    """
    delta: dict[str, torch.Tensor] = {}
    modules = packed_modules(patcher.model)
    patched = patcher
    for lora, strength in loras:
        patched = with_lora(patched, lora, strength)
        for key, adapter in patches_of(patcher, lora).items():
            name, offset = (key, None) if isinstance(key, str) else (key[0], key[1])
            up, down, alpha = adapter.weights[:3]
            change = strength * (alpha / down.shape[0] if alpha is not None else 1.0) * up.double() @ down.double()
            full = delta.setdefault(name, torch.zeros(modules[name].weight.shape, dtype=torch.float64))
            (full if offset is None else full.narrow(*offset)).add_(change)
    inputs = {key: _random(64, modules[key].in_features, seed=3) for key in delta}
    denoise(patcher)
    with torch.no_grad():
        before = {key: modules[key](x) for key, x in inputs.items()}
        denoise(patched)
        after = {key: modules[key](x) for key, x in inputs.items()}
    return {
        key: relative(after[key].double() - before[key].double(), x.double() @ delta[key].T)
        for key, x in inputs.items()
    }


@pytest.mark.parametrize("quantizer", FORMATS)
@pytest.mark.parametrize("names", ["kohya", "diffusers"])
def test_the_effect_of_a_lora_is_exact_on_every_format(quantizer: str, names: str, load: Callable[..., Any]) -> None:
    lora = kohya_lora() if names == "kohya" else diffusers_lora()
    errors = effect_errors(load(quantizer), [(lora, 0.8)])
    assert len(errors) == (len(KOHYA) if names == "kohya" else 4)
    assert max(errors.values()) < 0.01, errors


def test_parts_of_a_fused_layer_take_the_side_path(load: Callable[..., Any]) -> None:
    patcher = load("nvfp4")
    patched = with_lora(patcher, diffusers_lora())
    patches = patched.side_patches["diffusion_model.double_blocks.0.img_attn.qkv.weight"]
    assert sorted(p[3] for p in patches) == [(0, 0, H), (0, H, H), (0, 2 * H, H)]
    assert not patched.patches
    assert all("beside the weight" in line for line in patched.lora_report()[1:])


@pytest.mark.parametrize("quantizer", ["int8_row", "int8_convrot", "nvfp4", "asym_w4a8"])
@pytest.mark.parametrize("name", WITHOUT_LOW_RANK)
def test_other_adapters_are_applied_exactly_and_named(quantizer: str, name: str, load: Callable[..., Any]) -> None:
    patcher = load(quantizer)
    lora = WITHOUT_LOW_RANK[name]()
    patched = with_lora(patcher, lora, 0.7)
    (head, line) = patched.lora_report()
    assert head == "1 patches on 1 quantised layers: 0 beside the weight, 1 on a dequantised copy"
    assert name in line
    assert "dequantised copy" in line

    key = "diffusion_model.double_blocks.0.img_mlp.0.weight"
    module = packed_modules(patcher.model)[key]
    dense = module.weight.dequantize().float()
    wanted = comfy.lora.calculate_weight(patched.side_patches[key], dense.clone(), key).double()
    assert relative(wanted, dense) > 0.001
    denoise(patched)
    x = _random(64, H, seed=3)
    with torch.no_grad():
        assert relative(module(x) - module.bias, x.double() @ wanted.T) < 1e-5


@pytest.mark.parametrize("quantizer", FORMATS)
def test_five_rounds_leave_every_byte_and_every_bit(quantizer: str, load: Callable[..., Any]) -> None:
    patcher = load(quantizer)
    stored, plain = bytes_of(patcher), denoise(patcher)
    seen = set()
    for round_number in range(5):
        patched = denoise(with_lora(patcher, kohya_lora(), 0.2 * (round_number + 1)))
        assert not torch.equal(patched, plain)
        seen.add(float(patched.double().sum()))
        assert torch.equal(denoise(patcher), plain)
        assert bytes_of(patcher) == stored
    assert len(seen) == 5


@pytest.mark.parametrize("make", [kohya_lora, diffusers_lora, *WITHOUT_LOW_RANK.values()])
def test_strength_zero_changes_no_bit(make: Callable[[], Tensors], load: Callable[..., Any]) -> None:
    patcher = load("int8_convrot")
    plain = denoise(patcher)
    idle = patcher.clone()
    idle.add_patches(patches_of(patcher, make()), 0.0)
    assert torch.equal(denoise(idle), plain)
    assert "strength 0" in idle.lora_report()[1]


def test_stacked_loras_add_up(load: Callable[..., Any]) -> None:
    loras = [(kohya_lora(seed=1), 0.6), (diffusers_lora(seed=50), -0.4), (kohya_lora(rank=4, seed=90), 1.0)]
    patcher = load("int8_convrot")
    errors = effect_errors(patcher, loras)
    assert len(errors) == 8
    assert max(errors.values()) < 0.01, errors
    stacked = patcher
    for lora, strength in loras:
        stacked = with_lora(stacked, lora, strength)
    assert stacked.lora_report()[0] == "19 patches on 8 quantised layers: 19 beside the weight"


def test_a_lora_on_smoothed_nvfp4_acts_on_the_unsmoothed_input(tmp_path: Path, base_tensors: Tensors) -> None:
    from quant_loader.patching.load import load_diffusion_model

    tensors, metadata = quantize.quantize(base_tensors, "nvfp4")
    for name in quantize.layers_to_quantize(base_tensors):
        K = base_tensors[f"{name}.weight"].shape[1]
        tensors[f"{name}.pre_quant_scale"] = _random(K, seed=7).abs() + 0.5
    patcher, _ = load_diffusion_model([quantize.save(tmp_path / "m.safetensors", tensors, metadata)])
    errors = effect_errors(patcher, [(kohya_lora(), 1.0)])
    assert max(errors.values()) < 0.01, errors


def test_a_lora_without_a_matching_key_is_an_error(load: Callable[..., Any]) -> None:
    lora = {f"lora_unet_down_blocks_0.{k}.weight": torch.zeros(4, 4) for k in ("lora_up", "lora_down")}
    with pytest.raises(QuantLoaderError, match="match none of its layers"):
        with_lora(load("int8_row"), lora)


def test_a_lora_of_another_size_is_an_error_that_names_the_layer(load: Callable[..., Any]) -> None:
    lora = kohya_lora(names={"double_blocks_0_img_mlp_0": (2 * H, H)})
    with pytest.raises(
        QuantLoaderError, match=r"512 x 256 for diffusion_model.double_blocks.0.img_mlp.0.weight.*1024 x 256"
    ):
        with_lora(load("int8_row"), lora)


@pytest.mark.parametrize(
    ("part", "tensors", "message"),
    [
        ("a LoRA", {"lora_up.weight": (H, 4), "lora_down.weight": (4, 32)}, f"{H} x 32 for .*img_in.weight.*{H} x 64"),
        ("a difference", {"diff": (2 * H, 64)}, f"{2 * H} x 64 for .*img_in.weight.*{H} x 64"),
        ("a bias", {"diff_b": (H // 2,)}, f"{H // 2} for .*img_in.bias.*{H}"),
    ],
)
def test_a_patch_of_a_plain_layer_that_does_not_fit_is_refused_too(
    part: str, tensors: dict[str, tuple[int, ...]], message: str, load: Callable[..., Any]
) -> None:
    """ComfyUI logs it while it patches, and goes on without it."""
    patcher = load("int8_row")
    lora = {f"lora_unet_img_in.{suffix}": _random(*shape, seed=3) for suffix, shape in tensors.items()}
    with pytest.raises(QuantLoaderError, match=message):
        with_lora(patcher, lora)
    assert patcher.patches == {}
    with pytest.raises(QuantLoaderError, match=message):
        sample(patcher, hook_lora(lora))


def test_the_report_counts_patches_of_plain_layers_alone(load: Callable[..., Any]) -> None:
    patched = with_lora(load("int8_row"), {"lora_unet_img_in.diff": _random(H, models.PATCH_CHANNELS, seed=4) * 0.01})
    assert patched.lora_report() == [
        "0 patches on 0 quantised layers: 0 beside the weight; 1 more on plain weights, by ComfyUI"
    ]


def test_patches_of_plain_layers_stay_comfyuis(load: Callable[..., Any]) -> None:
    """img_in is not quantised: its patch goes into the weight, and comes out of it again."""
    patcher = load("int8_row")
    plain = denoise(patcher)
    lora = {**kohya_lora(), "lora_unet_img_in.diff": _random(H, models.PATCH_CHANNELS, seed=4) * 0.01}
    lora["lora_unet_double_blocks_0_img_mlp_0.diff_b"] = _random(4 * H, seed=4) * 0.01
    patched = with_lora(patcher, lora)
    assert set(patched.patches) == {"diffusion_model.img_in.weight", "diffusion_model.double_blocks.0.img_mlp.0.bias"}
    assert "2 more on plain weights" in patched.lora_report()[0]
    assert not torch.equal(denoise(patched), plain)
    assert torch.equal(denoise(patcher), plain)


# Clones


def test_a_clone_keeps_the_lora_and_its_removal_keeps_the_clone(load: Callable[..., Any]) -> None:
    patcher = load("int8_convrot")
    patched = with_lora(patcher, kohya_lora())
    wanted = denoise(patched)
    assert torch.equal(denoise(patched.clone()), wanted)
    static = patched.clone(disable_dynamic=True)
    assert static.lora_report() == patched.lora_report()
    assert torch.equal(denoise(static), wanted)
    assert patched.clone_has_same_weights(static)
    assert not patched.clone_has_same_weights(patcher)


def test_sizes_count_the_matrices_of_a_lora(load: Callable[..., Any]) -> None:
    patcher = load("int8_row")
    base, lora = patcher.model_size(), kohya_lora()
    patched = with_lora(patcher, lora)
    values = sum(t.numel() for name, t in lora.items() if "lora_up" in name or "lora_down" in name)
    size = base + values * patcher.model.get_dtype_inference().itemsize
    assert patched.model_size() == patched.clone().model_size() == size
    assert patched.loaded_size() == 0
    denoise(patched)
    assert patched.loaded_size() == size
    patched.detach()
    assert (patched.loaded_size(), patched.model_size(), patcher.model_size()) == (0, size, base)


def test_unloading_takes_the_matrices_of_a_lora_off_the_device(load: Callable[..., Any]) -> None:
    import comfy.model_management

    patched = with_lora(load("int8_row"), kohya_lora())
    before = denoise(patched)
    sides = list(patched._side_paths.values())
    assert len(sides) > 1
    with torch.no_grad():
        for side in sides:  # in a type of their own, as on a device: what the LoRA's file holds stays
            side.prepare(torch.device("cpu"), torch.float16)
    copies = [weakref.ref(side._matrices(torch.device("cpu"), torch.float16).whole[0]) for side in sides if side.terms]
    assert all(copy() is not None for copy in copies)
    comfy.model_management.unload_all_models()
    assert all(copy() is None for copy in copies)
    assert torch.equal(denoise(patched), before)


def test_a_clone_that_takes_another_ones_place_lets_its_matrices_go(load: Callable[..., Any]) -> None:
    patcher = load("int8_row")
    first, second = with_lora(patcher, kohya_lora(seed=1)), with_lora(patcher, kohya_lora(seed=2))
    held = [side for side in (denoise(first), first._side_paths)[1].values() if side._on_device]
    assert held
    denoise(second)
    assert not any(side._on_device for side in held)


def test_a_clone_that_is_thrown_away_takes_nothing_with_it(load: Callable[..., Any]) -> None:
    import comfy.model_management

    patched = with_lora(load("int8_convrot"), kohya_lora())
    wanted = denoise(patched)
    comfy.model_management.load_models_gpu([patched])
    other = with_lora(patched, kohya_lora(seed=90))
    del other
    inputs = flux_inputs()
    patched.pre_run()
    with torch.no_grad():
        again = patched.model.apply_model(inputs.x, inputs.sigma, c_crossattn=inputs.context, y=inputs.vector)
    assert torch.equal(again, wanted)


def test_the_static_clone_of_a_dynamic_model_keeps_the_lora(
    load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamic VRAM needs a GPU to run, but not to be cloned: TorchCompileModel and hooks ask for a static clone."""
    import comfy_aimdo.host_buffer
    from quant_loader.patching.patcher import QuantModelPatcher, QuantModelPatcherDynamic

    monkeypatch.setattr(comfy_aimdo.host_buffer, "HostBuffer", lambda *args: None)
    static = load("int8_row")
    dynamic = QuantModelPatcherDynamic(static.model, torch.device("meta"), torch.device("cpu"))
    dynamic.cached_patcher_init = static.cached_patcher_init
    dynamic.add_patches(patches_of(static, kohya_lora()), 0.5)
    assert dynamic.is_dynamic()
    assert dynamic.clone().is_dynamic()
    n = dynamic.clone(disable_dynamic=True)
    assert type(n) is QuantModelPatcher
    assert n.model is not dynamic.model
    assert n.lora_report() == dynamic.lora_report()
    assert dynamic.clone().lora_report() == dynamic.lora_report()


# Hooks: LoRAs of one conditioning, with a strength that changes while sampling


def sample(patcher: Any, hooks: Any | None = None, steps: int = 4) -> torch.Tensor:
    """Four steps of ComfyUI's own sampler; ``hooks`` sit on the positive conditioning, as Set CLIP Hooks puts them."""
    import comfy.sample

    inputs = flux_inputs()
    cond = {"pooled_output": inputs.vector}
    positive = [[inputs.context, {**cond, **({"hooks": hooks} if hooks is not None else {})}]]
    negative = [[inputs.context * 0.5, dict(cond)]]
    latent = torch.zeros_like(inputs.x)
    return comfy.sample.sample(
        patcher, inputs.x, steps, 2.0, "euler", "simple", positive, negative, latent, disable_pbar=True, seed=1
    )


def hook_lora(lora: Tensors, strength: float = 1.0, keyframes: list[tuple[float, float]] | None = None) -> Any:
    hooks = comfy.hooks.create_hook_lora(dict(lora), strength, 0.0)
    if keyframes:
        group = comfy.hooks.HookKeyframeGroup()
        for start, value in keyframes:
            group.add(comfy.hooks.HookKeyframe(strength=value, start_percent=start))
        hooks.set_keyframes_on_hooks(group)
    return hooks


def test_a_hook_lora_acts_on_its_conditioning_only(load: Callable[..., Any]) -> None:
    patcher = load("int8_convrot")
    # Conditionings with hooks are not batched with others, so the reference has a hook too: one without strength.
    plain = sample(patcher, hook_lora(kohya_lora(), 0.0))
    hooked = sample(patcher, hook_lora(kohya_lora()))
    everywhere = sample(with_lora(patcher, kohya_lora()))
    assert relative(hooked, plain) > 0.01
    assert relative(hooked, everywhere) > 0.01
    assert relative(sample(patcher), plain) < 0.01
    assert torch.equal(sample(patcher, hook_lora(kohya_lora(), 0.0)), plain)


def test_the_report_tells_of_the_hooks_of_the_last_run(load: Callable[..., Any]) -> None:
    patcher = load("int8_convrot")
    sample(patcher, hook_lora(kohya_lora()))
    text = report(patcher)[0]
    count = len({key for key in kohya_lora() if key.endswith("lora_up.weight")})
    assert f"LoRAs of hooks on {count} quantised layers in the last run:" in text
    assert text.count("1 beside the weight, rank ") == count
    sample(patcher, hook_lora(loha()))
    assert "1 on a dequantised copy: LoHa has no low-rank form" in report(patcher)[0]
    sample(patcher)
    assert "hooks" not in report(patcher)[0]


def test_scheduled_loras_follow_their_keyframes(load: Callable[..., Any]) -> None:
    patcher = load("nvfp4")
    plain, full = (sample(patcher, hook_lora(kohya_lora(), strength)) for strength in (0.0, 1.0))
    assert torch.equal(sample(patcher, hook_lora(kohya_lora(), keyframes=[(0.0, 0.0)])), plain)
    assert torch.equal(sample(patcher, hook_lora(kohya_lora(), keyframes=[(0.0, 1.0)])), full)
    ramp = sample(patcher, hook_lora(kohya_lora(), keyframes=[(0.0, 0.0), (0.5, 1.0)]))
    assert 0 < relative(ramp, plain) < relative(full, plain)
    assert torch.equal(sample(patcher, hook_lora(kohya_lora(), 0.0)), plain)


def test_a_hook_comes_on_top_of_the_models_own_lora(load: Callable[..., Any]) -> None:
    patcher = load("int8_row")
    first, second = kohya_lora(seed=1), loha()
    own = with_lora(patcher, first)
    plain, hooked = (sample(own, hook_lora(second, strength)) for strength in (0.0, 1.0))
    assert relative(hooked, plain) > 1e-4
    assert torch.equal(sample(own, hook_lora(second, 0.0)), plain)


# Merging


@pytest.mark.parametrize("other", ["base", "int8_convrot"])
def test_merging_with_another_model_is_exact(
    other: str, load: Callable[..., Any], load_base: Callable[[], Any]
) -> None:
    from comfy_extras.nodes_model_merging import ModelMergeSimple

    patcher = load("int8_row")
    second = load_base() if other == "base" else load(other)
    (merged,) = ModelMergeSimple().merge(patcher, second, 0.3)
    assert "a merge with another model" in merged.lora_report()[1]
    key = "diffusion_model.double_blocks.0.img_mlp.0.weight"
    module = packed_modules(patcher.model)[key]
    mine = module.weight.dequantize().double()
    theirs = second.get_key_patches()[key][0]
    theirs = theirs[1](theirs[0].detach()).double()
    denoise(merged)
    x = _random(64, H, seed=3)
    with torch.no_grad():
        assert relative(module(x) - module.bias, x.double() @ (0.3 * mine + 0.7 * theirs).T) < 1e-5


def test_a_quantised_model_merges_into_a_plain_one(load: Callable[..., Any], load_base: Callable[[], Any]) -> None:
    from comfy_extras.nodes_model_merging import ModelMergeSimple

    base = load_base()
    plain = denoise(base)
    (merged,) = ModelMergeSimple().merge(base, load("int8_convrot"), 0.5)
    # Half of a model that differs by quantisation only.
    assert 0 < relative(denoise(merged), plain) < 0.02


def test_raw_codes_of_another_model_are_refused(load: Callable[..., Any]) -> None:
    patcher = load("int8_row")
    key = "diffusion_model.double_blocks.0.img_mlp.0.weight"
    codes = packed_modules(patcher.model)[key].weight._qdata
    with pytest.raises(QuantLoaderError, match="raw codes"):
        patcher.clone().add_patches({key: ("model_as_lora", (codes,))})


WRONG_SIZES = {
    "loha": lambda: {"hada_w1_a": (1024, 4), "hada_w1_b": (4, 128), "hada_w2_a": (1024, 4), "hada_w2_b": (4, 128)},
    "lokr": lambda: {"lokr_w1": (8, 8), "lokr_w2": (100, 32)},
    "oft": lambda: {"oft_blocks": (8, 100, 100)},
    "glora": lambda: {"a1.weight": (4, 128), "a2.weight": (128, 4), "b1.weight": (4, 128), "b2.weight": (1024, 4)},
    "ranks": lambda: {"lora_up.weight": (1024, 4), "lora_down.weight": (5, 256)},
    "no rank": lambda: {"lora_up.weight": (1024, 0), "lora_down.weight": (0, 256)},
    "magnitudes": lambda: {"lora_up.weight": (1024, 4), "lora_down.weight": (4, 256), "dora_scale": (77, 1)},
    "one-dimensional": lambda: {"lora_up.weight": (1024,), "lora_down.weight": (256,)},
    "one-dimensional magnitudes": lambda: {
        "lora_up.weight": (1024, 4),
        "lora_down.weight": (4, 256),
        "dora_scale": (1024,),
    },
    "boft without alpha": lambda: {"oft_blocks": (2, 8, 128, 128)},
    "glora of another input": lambda: {
        "a1.weight": (4, 256),
        "a2.weight": (128, 4),
        "b1.weight": (4, 256),
        "b2.weight": (1024, 4),
    },
    "set": lambda: {"set_weight": (1024, 128)},
    "reshape": lambda: {"lora_up.weight": (1024, 4), "lora_down.weight": (4, 512), "reshape_weight": (2,)},
}


@pytest.mark.parametrize("name", WRONG_SIZES)
def test_a_patch_of_any_kind_and_another_size_is_refused_by_layer(name: str, load: Callable[..., Any]) -> None:
    """ComfyUI would log it and go on without."""
    layer = "diffusion_model.double_blocks.0.img_mlp.0" if name == "set" else "lora_unet_double_blocks_0_img_mlp_0"
    lora = {f"{layer}.{part}": _random(*shape, seed=3) for part, shape in WRONG_SIZES[name]().items()}
    if name == "reshape":
        lora[f"{layer}.reshape_weight"] = torch.tensor([1024, 512])
    patcher = load("int8_row")
    with pytest.raises(QuantLoaderError, match=r"does not fit the model: .*double_blocks\.0\.img_mlp\.0\.weight"):
        with_lora(patcher, lora)


RIGHT_SIZES = {
    "loha": {"hada_w1_a": (1024, 4), "hada_w1_b": (4, 256), "hada_w2_a": (1024, 4), "hada_w2_b": (4, 256)},
    "lokr": {"lokr_w1_a": (8, 2), "lokr_w1_b": (2, 8), "lokr_w2": (128, 32)},
    "oft": {"oft_blocks": (8, 128, 128)},
    "boft": {"oft_blocks": (2, 8, 128, 128)},
    "glora": {"a1.weight": (4, 256), "a2.weight": (256, 4), "b1.weight": (4, 256), "b2.weight": (1024, 4)},
    "glora, new": {"a1.weight": (256, 4), "a2.weight": (4, 256), "b1.weight": (1024, 4), "b2.weight": (4, 256)},
    "dora": {"lora_up.weight": (1024, 4), "lora_down.weight": (4, 256), "dora_scale": (1024, 1)},
}


@pytest.mark.parametrize("name", RIGHT_SIZES)
def test_a_patch_of_any_kind_and_the_right_size_acts(name: str, load: Callable[..., Any]) -> None:
    parts = {part: _random(*shape, seed=3) * 0.1 for part, shape in RIGHT_SIZES[name].items()}
    if name == "boft":
        parts["alpha"] = torch.tensor(1.0)
    patcher = load("int8_row")
    plain = denoise(patcher)
    lora = {f"lora_unet_double_blocks_0_img_mlp_0.{part}": tensor for part, tensor in parts.items()}
    assert relative(denoise(with_lora(patcher, lora)), plain) > 1e-6
    assert torch.equal(denoise(patcher), plain)


def test_a_merge_with_a_model_of_another_width_is_refused(load: Callable[..., Any]) -> None:
    patcher = load("int8_row")
    other = [(torch.zeros(1024, 128), lambda weight, inplace=False: weight)]
    with pytest.raises(QuantLoaderError, match=r"This merge does not fit the model: it has 1024 x 128 for"):
        patcher.clone().add_patches({"diffusion_model.double_blocks.0.img_mlp.0.weight": other}, 0.5, 0.5)


def test_hooks_that_keep_nothing_follow_their_strength(load: Callable[..., Any]) -> None:
    """Text encoders patch their hooks anew for every encode (MinVram): the strength of the moment counts, also on
    plain layers."""
    import comfy.model_management

    lora = {**kohya_lora(), "lora_unet_img_in.lora_up.weight": _random(H, 4, seed=7)}
    lora["lora_unet_img_in.lora_down.weight"] = _random(4, models.PATCH_CHANNELS, seed=8)
    patcher = load("int8_row").clone()
    patcher.set_hook_mode(comfy.hooks.EnumHookMode.MinVram)
    hooks = hook_lora(lora)
    patcher.register_all_hook_patches(hooks, comfy.hooks.create_target_dict(comfy.hooks.EnumWeightTarget.Model))
    comfy.model_management.load_models_gpu([patcher])

    def outputs(strength: float) -> tuple[torch.Tensor, torch.Tensor]:
        for hook in hooks.hooks:
            hook.hook_keyframe._current_keyframe = comfy.hooks.HookKeyframe(strength=strength)
        patcher.patch_hooks(None)
        patcher.patch_hooks(hooks)
        with torch.no_grad():
            model = patcher.model.diffusion_model
            return (
                model.img_in(torch.ones(1, models.PATCH_CHANNELS)),
                model.double_blocks[0].img_mlp[0](torch.ones(1, H)),
            )

    plain, full = outputs(0.0), outputs(1.0)
    assert all(not torch.equal(a, b) for a, b in zip(plain, full, strict=True))
    for strength, wanted in ((0.0, plain), (1.0, full), (0.0, plain)):
        assert all(torch.equal(a, b) for a, b in zip(outputs(strength), wanted, strict=True))


def test_eight_bit_floats_of_another_model_are_codes_too(load: Callable[..., Any]) -> None:
    codes = torch.zeros(1024, 256).to(torch.float8_e4m3fn)
    with pytest.raises(QuantLoaderError, match="raw codes"):
        load("int8_row").add_patches({"diffusion_model.double_blocks.0.img_mlp.0.weight": ("model_as_lora", (codes,))})
