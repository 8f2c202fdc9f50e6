"""Quant Loader: loads Comfy-quantised checkpoints in ComfyUI. Entry point only; every import of ComfyUI is deferred."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from comfy_api.latest import ComfyExtension

__version__ = "0.1.0"
WEB_DIRECTORY = "./web"
__all__ = ["WEB_DIRECTORY", "__version__", "comfy_entrypoint"]


async def comfy_entrypoint() -> ComfyExtension:
    """Called by ComfyUI once at start; returns the nodes and registers the routes."""
    from .nodes import QuantLoaderExtension

    return QuantLoaderExtension()
