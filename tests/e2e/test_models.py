"""Other families than Flux on the real server, in every format, and the other loader nodes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from quant_loader.demo import pictures, quantize, tiny_core, workflows
from quant_loader.demo.server import ComfyServer

Sampled = Callable[[str, str | None], torch.Tensor]

# What stands for a prompt in each family, (width of the context, width of the pooled vector), and its empty latent.
FAMILIES: dict[str, tuple[tuple[int, int], str, dict[str, int]]] = {
    "flux2": ((1024, 0), "EmptyFlux2LatentImage", {"width": 64, "height": 64, "batch_size": 1}),
    "sd15": ((768, 0), "EmptyLatentImage", {"width": 64, "height": 64, "batch_size": 1}),
    "sd2": ((1024, 0), "EmptyLatentImage", {"width": 64, "height": 64, "batch_size": 1}),
    "sd3": ((1024, 2048), "EmptySD3LatentImage", {"width": 64, "height": 64, "batch_size": 1}),
    "wan": ((4096, 0), "EmptyHunyuanLatentVideo", {"width": 64, "height": 64, "length": 1, "batch_size": 1}),
}
# Relative output error of one linear of a format under its own arithmetic on Gaussian data (docs/kernels.md). W4A8 is
# written with a uniform grid here, not with a codebook.
LINEAR_ERROR = {
    "int8_scalar": 0.018,
    "int8_row": 0.015,
    "int8_convrot": 0.016,
    "fp8": 0.040,
    "mxfp8": 0.040,
    "nvfp4": 0.140,
    "convrot_w4a4": 0.28,
    "asym_w4a8": 0.18,
    "quanto_int8": 0.015,
}
# Linears in a row that no skip connection bridges: the input's, two of a branch, the output's. Independent errors add
# in squares.
DEPTH = 4


def run_family(server: ComfyServer, family: str, loader: dict[str, Any]) -> torch.Tensor:
    """The latent of a family after one step."""
    (width, pooled), canvas, inputs = FAMILIES[family]
    graph = workflows.text_to_image(loader, prefix="e2e/family", steps=1)
    for name in ("vae", "decode", workflows.PICTURE, workflows.REPORT):
        graph.pop(name, None)
    graph["conditioning"] = {
        "class_type": "TestConditioning",
        "inputs": {"tokens": 16, "width": width, "pooled": pooled, "seed": 5},
    }
    graph["canvas"] = {"class_type": canvas, "inputs": inputs}
    (entry,) = server.client.run(graph).files(workflows.LATENT, "latents")
    return pictures.read_latent(server.output() / entry["subfolder"] / entry["filename"])


@pytest.fixture(scope="module")
def family_tensors() -> Callable[[str], quantize.Tensors]:
    return functools.cache(lambda family: getattr(tiny_core, family)())


@pytest.fixture(scope="module")
def sampled(server: ComfyServer, comfyui: None, family_tensors: Callable[[str], quantize.Tensors]) -> Sampled:
    """The latent of a family after one step: in a format through our loader, or (None) in 16 bit through stock's."""

    @functools.cache
    def run(family: str, quantizer: str | None) -> torch.Tensor:
        tensors, folder = family_tensors(family), server.models("diffusion_models")
        if quantizer is None:
            quantize.save(folder / f"{family}-base.safetensors", tensors)
            loader = workflows.stock_loader(f"{family}-base.safetensors")
        else:
            rotated = quantizer in ("int8_convrot", "convrot_w4a4", "asym_w4a8")
            layers = tiny_core.linears(tensors, quantize.ROTATION_GROUP if rotated else 64)
            path = folder / f"{family}-{quantizer}.safetensors"
            quantize.save(path, *quantize.quantize(tensors, quantizer, layers=layers))
            # NVFP4 files of layers that are no multiple of 128 wide keep padded scales, which is a dialect of its own.
            loader = workflows.quant_loader(path.name, rules="compatible")
        return run_family(server, family, loader)

    return run


def test_a_codebook_of_w4a8_means_what_it_says(
    server: ComfyServer, family_tensors: Callable[[str], quantize.Tensors], sampled: Sampled
) -> None:
    """The uniform grid as a codebook, its codes shuffled: other bytes, the same weights, the same bits."""
    tensors, _ = quantize.quantize(
        family_tensors("flux2"),
        "asym_w4a8",
        layers=tiny_core.linears(family_tensors("flux2"), quantize.ROTATION_GROUP),
    )
    shuffled = torch.randperm(16, generator=torch.Generator().manual_seed(3))
    codebook = torch.empty(16)
    codebook[shuffled] = torch.arange(16.0) - 8
    for name in [n for n in tensors if n.endswith(".weight_s_rel")]:
        layer = name.removesuffix(".weight_s_rel")
        codes = tensors[f"{layer}.weight"].view(torch.uint8)
        low, high = shuffled[(codes & 15).long()], shuffled[(codes >> 4).long()]
        tensors[f"{layer}.weight"] = (low | high << 4).to(torch.uint8).view(torch.int8)
        tensors[f"{layer}.weight_codebook"] = codebook.clone()
    path = quantize.save(server.models("diffusion_models") / "flux2-codebook.safetensors", tensors)
    found = run_family(server, "flux2", workflows.quant_loader(path.name, rules="compatible"))
    assert torch.equal(found, sampled("flux2", "asym_w4a8"))


@pytest.mark.parametrize("quantizer", LINEAR_ERROR)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_samples_as_its_dense_model_does(family: str, quantizer: str, sampled: Sampled) -> None:
    difference = pictures.relative_difference(sampled(family, quantizer), sampled(family, None))
    assert 0 < difference < DEPTH**0.5 * LINEAR_ERROR[quantizer]


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


def test_inspect_answers_on_the_node(server: ComfyServer, sampled: Sampled) -> None:
    sampled("flux2", "int8_convrot")
    inputs = {"folder": "diffusion_models", "file": "flux2-int8_convrot.safetensors", "rules": "strict"}
    run = server.client.run({"inspect": {"class_type": "QuantLoaderInspect", "inputs": inputs}})
    assert "OK: 18 quantised layers (18 int8_tensorwise)" in run.outputs["inspect"]["quant_loader"][0]
