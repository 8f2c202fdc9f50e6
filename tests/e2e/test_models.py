"""Other families than Flux on the real server, and the other loader nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from quant_loader.demo import pictures, quantize, tiny_core, workflows
from quant_loader.demo.paths import comfyui_tree
from quant_loader.demo.server import ComfyServer

Sampled = Callable[[str, dict[str, Any]], torch.Tensor]

# Families whose conditioning the stock node LotusConditioning can stand in for (1024 wide), and their empty latents.
FAMILIES = {
    "flux2": {"class_type": "EmptyFlux2LatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}},
    "sd2": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}},
}
# Relative difference of the latents after two steps; the tiny models' linears follow each other 16 deep at most.
MOST = {"int8_convrot": 0.07, "nvfp4": 0.40, "fp8": 0.12}


@pytest.fixture(scope="module")
def family_files(server: ComfyServer) -> dict[str, quantize.Tensors]:
    import sys

    if str(comfyui_tree()) not in sys.path:
        sys.path.insert(0, str(comfyui_tree()))
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    folder = server.models("diffusion_models")
    made = {family: getattr(tiny_core, family)() for family in FAMILIES}
    for family, tensors in made.items():
        quantize.save(folder / f"{family}-base.safetensors", tensors)
        for quantizer in MOST:
            multiple = quantize.ROTATION_GROUP if quantizer == "int8_convrot" else 64
            layers = tiny_core.linears(tensors, multiple)
            quantize.save(
                folder / f"{family}-{quantizer}.safetensors", *quantize.quantize(tensors, quantizer, layers=layers)
            )
    return made


@pytest.fixture(scope="module")
def sampled(server: ComfyServer, family_files: dict[str, quantize.Tensors]) -> Sampled:
    def run(family: str, loader: dict[str, Any]) -> torch.Tensor:
        graph = workflows.text_to_image(loader, prefix="e2e/family", size=64)
        for name in ("vae", "decode", workflows.PICTURE, workflows.REPORT):
            graph.pop(name, None)
        graph["canvas"] = FAMILIES[family]
        done = server.client.run(graph)
        (entry,) = done.files(workflows.LATENT, "latents")
        return pictures.read_latent(server.output() / entry["subfolder"] / entry["filename"])

    return run


@pytest.mark.parametrize("quantizer", MOST)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_samples_as_its_dense_model_does(family: str, quantizer: str, sampled: Sampled) -> None:
    base = sampled(family, workflows.stock_loader(f"{family}-base.safetensors")).double()
    # NVFP4 files of layers that are no multiple of 128 wide keep padded scales, which is a dialect of its own.
    ours = sampled(family, workflows.quant_loader(f"{family}-{quantizer}.safetensors", rules="compatible")).double()
    assert 0 < float((ours - base).norm() / base.norm()) < MOST[quantizer]


def test_every_node_is_listed_with_its_inputs(server: ComfyServer) -> None:
    listed = server.client.get("/object_info")
    ids = {name for name in listed if name.startswith("QuantLoader")}
    assert ids == {
        "QuantLoaderDiffusionModel",
        "QuantLoaderCheckpoint",
        "QuantLoaderTextEncoder",
        "QuantLoaderControlNet",
        "QuantLoaderModelPatch",
        "QuantLoaderSave",
        "QuantLoaderInspect",
        "QuantLoaderKernelReport",
    }
    stock = (
        listed["CLIPLoader"]["input"]["required"]["type"][0] + listed["DualCLIPLoader"]["input"]["required"]["type"][0]
    )
    kind, options = listed["QuantLoaderTextEncoder"]["input"]["required"]["type"]
    names = options["options"] if kind == "COMBO" else kind
    assert set(stock) <= set(names)


def test_inspect_answers_on_the_node(server: ComfyServer, family_files: dict[str, quantize.Tensors]) -> None:
    inputs = {"folder": "diffusion_models", "file": "flux2-int8_convrot.safetensors", "rules": "strict"}
    run = server.client.run({"inspect": {"class_type": "QuantLoaderInspect", "inputs": inputs}})
    assert "OK: 18 quantised layers (18 int8_tensorwise)" in run.outputs["inspect"]["quant_loader"][0]
