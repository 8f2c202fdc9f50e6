"""Stock LoRA nodes on quantised models, on the real server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quant_loader.demo import fixtures, models, pictures, quantize, workflows
from quant_loader.demo.client import PromptFailed, PromptRun
from quant_loader.demo.server import ComfyServer

H = models.HIDDEN
Rendered = Callable[[str], tuple[PromptRun, torch.Tensor]]
WithLoras = Callable[..., tuple[PromptRun, torch.Tensor]]


def kohya(seed: int) -> quantize.Tensors:
    layers = {"double_blocks_0_img_mlp_0": (4 * H, H), "single_blocks_0_linear2": (H, 5 * H)}
    return _lora({f"lora_unet_{n}": s for n, s in layers.items()}, "lora_down.weight", "lora_up.weight", seed)


def diffusers(seed: int) -> quantize.Tensors:
    """to_q, to_k and to_v of Flux: parts of the fused qkv."""
    names = [f"transformer.transformer_blocks.0.attn.to_{part}" for part in "qkv"]
    return _lora(dict.fromkeys(names, (H, H)), "lora_A.weight", "lora_B.weight", seed)


def _lora(layers: dict[str, tuple[int, int]], down: str, up: str, seed: int, rank: int = 8) -> quantize.Tensors:
    generator = torch.Generator().manual_seed(seed)
    out: quantize.Tensors = {}
    for name, (N, K) in layers.items():
        out[f"{name}.{down}"] = torch.randn(rank, K, generator=generator) / K**0.5
        out[f"{name}.{up}"] = torch.randn(N, rank, generator=generator) * 0.2
    return out


@pytest.fixture(scope="module")
def lora_files(server: ComfyServer) -> Path:
    folder = server.models("loras")
    quantize.save(folder / "kohya.safetensors", kohya(1))
    quantize.save(folder / "diffusers.safetensors", diffusers(2))
    quantize.save(
        folder / "foreign.safetensors", _lora({"lora_unet_nowhere": (H, H)}, "lora_down.weight", "lora_up.weight", 3)
    )
    return folder


@pytest.fixture(scope="module")
def with_loras(server: ComfyServer, lora_files: Path) -> WithLoras:
    """Renders with stock LoRA nodes between loader and sampler, and a Kernel Report on the model that is sampled."""

    def run(loader: dict[str, Any], loras: list[tuple[str, float]]) -> tuple[PromptRun, torch.Tensor]:
        graph = workflows.text_to_image(loader, prefix="e2e/lora")
        model: list[Any] = [workflows.LOADER, 0]
        for index, (name, strength) in enumerate(loras):
            inputs = {"model": model, "lora_name": f"{name}.safetensors", "strength_model": strength}
            graph[f"lora{index}"] = {"class_type": "LoraLoaderModelOnly", "inputs": inputs}
            model = [f"lora{index}", 0]
        graph[workflows.SAMPLER]["inputs"]["model"] = model
        graph["kernels"] = {"class_type": "QuantLoaderKernelReport", "inputs": {"model": model}}
        done = server.client.run(graph)
        (entry,) = done.files(workflows.LATENT, "latents")
        return done, pictures.read_latent(server.output() / entry["subfolder"] / entry["filename"])

    return run


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("quantizer", fixtures.EXPECTATIONS)
@pytest.mark.parametrize("name", ["kohya", "diffusers"])
def test_a_lora_changes_the_picture_and_its_removal_restores_it(
    quantizer: str, name: str, with_loras: WithLoras, rendered: Rendered, reference: torch.Tensor
) -> None:
    loader = workflows.quant_loader(fixtures.file_name(quantizer))
    plain = rendered(quantizer)[1]
    run, patched = with_loras(loader, [(name, 1.0)])
    dense = with_loras(workflows.stock_loader(fixtures.REFERENCE), [(name, 1.0)])[1]
    # With the LoRA the quantised model is as close to the dense one with it as without: the LoRA itself adds no error.
    assert relative(patched, plain) > 0.01
    assert relative(patched, dense) < 1.5 * fixtures.EXPECTATIONS[quantizer].most
    assert torch.equal(with_loras(loader, [])[1], plain)
    (text,) = run.outputs["kernels"]["text"]
    count, layers = (2, 2) if name == "kohya" else (3, 1)
    assert f"{count} patches on {layers} quantised layers: {count} beside the weight" in text


def test_strengths_change_freely_and_zero_is_no_lora(with_loras: WithLoras, rendered: Rendered) -> None:
    loader = workflows.quant_loader(fixtures.file_name("int8_convrot"))
    plain = rendered("int8_convrot")[1]
    half = with_loras(loader, [("kohya", 0.5)])[1]
    assert torch.equal(with_loras(loader, [("kohya", 0.0)])[1], plain)
    stacked = with_loras(loader, [("kohya", 0.25), ("diffusers", 1.0), ("kohya", 0.25)])[1]
    assert relative(stacked, half) > 1e-3
    assert torch.equal(with_loras(loader, [("kohya", 0.5)])[1], half)
    assert torch.equal(with_loras(loader, [])[1], plain)


def test_a_lora_of_another_model_stops_with_a_sentence(with_loras: WithLoras) -> None:
    with pytest.raises(PromptFailed, match="match none of its layers"):
        with_loras(workflows.quant_loader(fixtures.file_name("nvfp4")), [("foreign", 1.0)])


def test_the_kernel_report_is_about_the_run_it_is_part_of(with_loras: WithLoras) -> None:
    """Nothing connects it with the sampler; it waits for it, and counts the calls of every layer."""
    run, _ = with_loras(workflows.quant_loader(fixtures.file_name("int8_row"), execution="exact"), [])
    (text,) = run.outputs["kernels"]["text"]
    assert text.startswith(f"13 quantised layers, {13 * workflows.STEPS} calls."), text


def test_a_hook_lora_on_the_conditioning_is_the_same_lora(
    server: ComfyServer, lora_files: Path, with_loras: WithLoras, rendered: Rendered
) -> None:
    """Stock hook nodes: the LoRA comes with the conditioning. All of the conditioning has it here."""
    loader = workflows.quant_loader(fixtures.file_name("int8_convrot"))
    wanted = with_loras(loader, [("kohya", 0.8)])[1]
    graph = workflows.text_to_image(loader, prefix="e2e/hook")
    graph["hook"] = {
        "class_type": "CreateHookLoraModelOnly",
        "inputs": {"lora_name": "kohya.safetensors", "strength_model": 0.8},
    }
    graph["hooked"] = {
        "class_type": "ConditioningSetProperties",
        "inputs": {
            "cond_NEW": ["conditioning", 0],
            "strength": 1.0,
            "set_cond_area": "default",
            "hooks": ["hook", 0],
        },
    }
    for side in ("positive", "negative"):
        graph[workflows.SAMPLER]["inputs"][side] = ["hooked", 0]
    graph["kernels"] = {"class_type": "QuantLoaderKernelReport", "inputs": {"model": [workflows.LOADER, 0]}}
    done = server.client.run(graph)
    (entry,) = done.files(workflows.LATENT, "latents")
    found = pictures.read_latent(server.output() / entry["subfolder"] / entry["filename"])
    assert torch.equal(found, wanted)
    assert relative(found, rendered("int8_convrot")[1]) > 0.01
    text = done.outputs["kernels"]["text"][0]
    assert "LoRAs of hooks on 2 quantised layers in the last run:" in text
    assert text.count("1 beside the weight, rank 8") == 2
