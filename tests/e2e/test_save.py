"""Saving quantised models on the real server: stock ModelSave, and the pack's own node for models with LoRAs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quant_loader.checkpoint import check
from quant_loader.demo import fixtures, models, quantize, workflows
from quant_loader.demo.client import PromptFailed, PromptRun
from quant_loader.demo.pictures import relative_difference
from quant_loader.demo.server import ComfyServer

PREFIX = "model.diffusion_model."

# Largest difference of the latents of two files with the same tensors: float32 sums in another order. On some CPUs the
# order depends on where in its file a plain weight starts. Activations stay unrounded (``exact``): with codes, a last
# bit can become a step of 1/127.
ROUNDING = 1e-5
Render = Callable[..., tuple[PromptRun, torch.Tensor]]


@pytest.fixture
def exactly(render: Render) -> Callable[[str], torch.Tensor]:
    """The latent of a file of ``models/diffusion_models`` under the ``exact`` execution."""
    return lambda name: render(workflows.quant_loader(name, execution="exact"))[1]


@pytest.fixture(scope="module")
def lora(server: ComfyServer) -> str:
    generator = torch.Generator().manual_seed(4)
    N, K = 4 * models.HIDDEN, models.HIDDEN
    tensors = {
        "lora_unet_double_blocks_0_img_mlp_0.lora_down.weight": torch.randn(8, K, generator=generator) / K**0.5,
        "lora_unet_double_blocks_0_img_mlp_0.lora_up.weight": torch.randn(N, 8, generator=generator) * 0.3,
    }
    quantize.save(server.models("loras") / "save.safetensors", tensors)
    return "save.safetensors"


def graph(quantizer: str, saver: str, lora: str | None = None, **inputs: Any) -> dict[str, Any]:
    loader = workflows.quant_loader(fixtures.file_name(quantizer))
    nodes: dict[str, Any] = {"loader": loader}
    model = ["loader", 0]
    if lora is not None:
        nodes["lora"] = {
            "class_type": "LoraLoaderModelOnly",
            "inputs": {"model": model, "lora_name": lora, "strength_model": 1.0},
        }
        model = ["lora", 0]
    nodes["save"] = {"class_type": saver, "inputs": {"model": model, **inputs}}
    return nodes


def saved(server: ComfyServer, folder: str) -> Path:
    (path,) = (server.output() / folder).glob("*.safetensors")
    return path


@pytest.mark.parametrize("quantizer", fixtures.EXPECTATIONS)
def test_model_save_writes_the_source_again(
    quantizer: str, server: ComfyServer, exactly: Callable[[str], torch.Tensor]
) -> None:
    folder = f"stock-{quantizer}"
    server.client.run(graph(quantizer, "ModelSave", filename_prefix=f"{folder}/model"))
    path = saved(server, folder)
    assert check(str(path)).verdict == "ok"
    source, _ = quantize.load(server.models("diffusion_models") / fixtures.file_name(quantizer))
    again, _ = quantize.load(path)
    for name in [n for n in source if n.endswith(".comfy_quant")]:
        layer = name.removesuffix(".comfy_quant")
        for key in [n for n in source if n.startswith(f"{layer}.") and not n.endswith(".bias")]:
            assert torch.equal(
                again[PREFIX + key].reshape(-1).view(torch.uint8), source[key].reshape(-1).view(torch.uint8)
            ), key
    target = server.models("diffusion_models") / f"{folder}.safetensors"
    target.write_bytes(path.read_bytes())
    assert relative_difference(exactly(target.name), exactly(fixtures.file_name(quantizer))) < ROUNDING


def test_a_stock_save_with_a_lora_names_the_node_that_can(server: ComfyServer, lora: str) -> None:
    with pytest.raises(PromptFailed, match="QuantLoaderSave"):
        server.client.run(graph("int8_row", "ModelSave", lora, filename_prefix="lost/model"))
    assert not list((server.output()).glob("lost/*"))


@pytest.mark.parametrize("loras", ["leave out", "merge"])
def test_the_packs_own_save(loras: str, server: ComfyServer, lora: str, exactly: Callable[[str], torch.Tensor]) -> None:
    folder = f"own-{loras.replace(' ', '-')}"
    run = server.client.run(graph("int8_convrot", "QuantLoaderSave", lora, filename_prefix=f"{folder}/m", loras=loras))
    path = saved(server, folder)
    assert check(str(path)).verdict == "ok"
    assert path.name in run.outputs["save"]["quant_loader"][0]
    assert ("double_blocks.0.img_mlp.0" in run.outputs["save"]["quant_loader"][0]) == (loras == "merge")
    target = server.models("diffusion_models") / f"{folder}.safetensors"
    target.write_bytes(path.read_bytes())
    difference = relative_difference(exactly(target.name), exactly(fixtures.file_name("int8_convrot")))
    assert difference < ROUNDING if loras == "leave out" else difference > 0.01
