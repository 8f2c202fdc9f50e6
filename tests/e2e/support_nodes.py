"""Nodes that the tests put into the server's custom_nodes: no stock node makes or saves what these do."""

from __future__ import annotations

import os

import folder_paths
import torch
from safetensors.torch import save_file


class TestConditioning:
    """A random conditioning ``[1, tokens, width]``, with a pooled vector ``[1, pooled]`` where that is not 0."""

    CATEGORY = "tests"
    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "make"

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802 - ComfyUI's name
        inputs = {name: ("INT", {"default": 0}) for name in ("tokens", "width", "pooled", "seed")}
        return {"required": inputs}

    def make(self, tokens, width, pooled, seed):
        generator = torch.Generator().manual_seed(seed)
        context = torch.randn(1, tokens, width, generator=generator)
        more = {"pooled_output": torch.randn(1, pooled, generator=generator)} if pooled else {}
        return ([[context, more]],)


class TestSaveConditioning:
    """Writes what a text encoder gave, as tensors ``context`` and ``pooled``, to a file below the output folder."""

    CATEGORY = "tests"
    RETURN_TYPES = ()
    OUTPUT_NODE = True
    FUNCTION = "save"

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802 - ComfyUI's name
        return {"required": {"conditioning": ("CONDITIONING",), "name": ("STRING", {"default": "conditioning"})}}

    def save(self, conditioning, name):
        ((context, more),) = conditioning
        tensors = {"context": context.contiguous()}
        if more.get("pooled_output") is not None:
            tensors["pooled"] = more["pooled_output"].contiguous()
        save_file(tensors, os.path.join(folder_paths.get_output_directory(), f"{name}.safetensors"))
        return {}


NODE_CLASS_MAPPINGS = {"TestConditioning": TestConditioning, "TestSaveConditioning": TestSaveConditioning}
