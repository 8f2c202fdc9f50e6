"""V3 nodes: read inputs, call the rooms, show the result."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from . import routes
from .diffusion_model import QuantLoaderDiffusionModel


class QuantLoaderExtension(ComfyExtension):
    """What ComfyUI asks for the pack's nodes."""

    async def on_load(self) -> None:
        routes.register_on_server()

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [QuantLoaderDiffusionModel]
