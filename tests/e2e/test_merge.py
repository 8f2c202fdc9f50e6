"""Stock merging nodes on the real server: two models of ours, and one of ours with one that ComfyUI loaded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from quant_loader.demo import fixtures, models, pictures, quantize, workflows
from quant_loader.demo.client import PromptFailed
from quant_loader.demo.server import ComfyServer

# The nodes, and their inputs beside the two models.
NODES: dict[str, dict[str, float]] = {
    "ModelMergeSimple": {"ratio": 0.4},
    "ModelMergeBlocks": {"input": 0.4, "middle": 0.5, "out": 0.6},
    "ModelMergeSubtract": {"multiplier": 0.8},
    "ModelMergeAdd": {},
}
BASE = ("stock", "base")
PAIRS = {
    "ours-ours": (("ours", "int8_row"), ("ours", "nvfp4")),
    "ours-stock": (("ours", "int8_convrot"), BASE),
    "stock-ours": (BASE, ("ours", "nvfp4")),
    "stock_int8-ours": (("stock", "int8_row"), ("ours", "fp8")),
}
Merged = Callable[..., torch.Tensor]


@pytest.fixture(scope="module")
def other(server: ComfyServer) -> quantize.Tensors:
    """Another model of the same family, with matrices half as large: the sum of two full ones doubles what attention
    weighs, and with it every error. Its files are written beside the first one's."""
    tensors = {n: t * 0.5 if t.dim() == 2 else t for n, t in models.flux_state_dict(seed=21).items()}
    folder = server.models("diffusion_models")
    quantize.save(folder / "other-base.safetensors", tensors)
    for quantizer in ("int8_row", "nvfp4", "fp8"):
        quantize.save(folder / f"other-{quantizer}.safetensors", *quantize.quantize(tensors, quantizer))
    return tensors


def loader(whose: str, quantizer: str, second: bool) -> dict[str, Any]:
    if second:
        name = f"other-{quantizer}.safetensors"
    else:
        name = fixtures.REFERENCE if quantizer == "base" else fixtures.file_name(quantizer)
    return workflows.quant_loader(name) if whose == "ours" else workflows.stock_loader(name)


@pytest.fixture(scope="module")
def merged(server: ComfyServer, other: quantize.Tensors) -> Merged:
    """``merged(node, first, second)``: the latent of two models merged; of ``first`` alone without a node."""

    @functools.cache
    def run(kind: str | None, first: tuple[str, str], second: tuple[str, str] = BASE) -> torch.Tensor:
        graph = workflows.text_to_image(loader(*first, second=False), prefix="e2e/merge", size=64, steps=1)
        for name in ("vae", "decode", workflows.PICTURE, workflows.REPORT):
            graph.pop(name, None)
        if kind is not None:
            graph["second"] = loader(*second, second=True)
            inputs = {"model1": [workflows.LOADER, 0], "model2": ["second", 0], **NODES[kind]}
            graph["merge"] = {"class_type": kind, "inputs": inputs}
            graph[workflows.SAMPLER]["inputs"]["model"] = ["merge", 0]
        (entry,) = server.client.run(graph).files(workflows.LATENT, "latents")
        return pictures.read_latent(server.output() / entry["subfolder"] / entry["filename"])

    return run


@pytest.mark.parametrize("kind", NODES)
@pytest.mark.parametrize("pair", PAIRS)
def test_a_merge_is_that_of_the_16_bit_models(pair: str, kind: str, merged: Merged) -> None:
    """Within the error of the two formats, which is far less than what the second model changes."""
    wanted = merged(kind, BASE, BASE)
    found = merged(kind, *PAIRS[pair])
    errors = [fixtures.EXPECTATIONS[quantizer].most for _, quantizer in PAIRS[pair] if quantizer != "base"]
    if PAIRS[pair][0] == ("stock", "int8_row"):
        # ComfyUI rounds the result to INT8 again.
        errors.append(fixtures.EXPECTATIONS["int8_row"].most)
    bound = sum(error**2 for error in errors) ** 0.5
    difference = pictures.relative_difference(found, wanted)
    effect = pictures.relative_difference(wanted, merged(None, BASE))
    assert 0 < difference < bound < effect


def test_what_comfyui_cannot_hand_over_stops_at_the_node(merged: Merged) -> None:
    """ComfyUI's own patcher of an INT8 file looks for scales as parameters of the model, and has none to merge from."""
    with pytest.raises(PromptFailed, match="ModelMergeSimple failed"):
        merged("ModelMergeSimple", ("ours", "nvfp4"), ("stock", "int8_row"))
