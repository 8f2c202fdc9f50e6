"""V3 nodes: read inputs, call the rooms, show the result."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from ..patching import host
from . import replacements, routes
from .checkpoint import QuantLoaderCheckpoint
from .controlnet import QuantLoaderControlNet
from .diffusion_model import QuantLoaderDiffusionModel
from .inspect import QuantLoaderInspect
from .kernel_report import QuantLoaderKernelReport
from .model_patch import QuantLoaderModelPatch
from .save import QuantLoaderSave
from .text_encoder import QuantLoaderTextEncoder

NODES: list[type[io.ComfyNode]] = [
    QuantLoaderDiffusionModel,
    QuantLoaderCheckpoint,
    QuantLoaderTextEncoder,
    QuantLoaderControlNet,
    QuantLoaderModelPatch,
    QuantLoaderSave,
    QuantLoaderInspect,
    QuantLoaderKernelReport,
]


class QuantLoaderExtension(ComfyExtension):  # type: ignore[misc]
    """What ComfyUI asks for the pack's nodes."""

    async def on_load(self) -> None:
        routes.register_on_server()
        host.preload()
        await replacements.register()

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return NODES
