"""Nodes of packs that are gone, and ours in their place: ComfyUI swaps them in workflows that are opened or queued.

Only nodes that are *not* installed are replaced; stock loaders always are, and stay what they are
(``quant-loader convert-workflow`` replaces those on request).
"""

from __future__ import annotations

import logging
from typing import Any

from comfy_api import latest
from comfy_api.latest import io

logger = logging.getLogger("quant_loader")

#: The retired INT8 loaders, by id: the file's old and new input names, and our node. Their files are the dialect that
#: the compatible rules read; their other inputs were for quantising on the fly.
RETIRED = (
    ("OTUNetLoaderW8A8", "unet_name", "QuantLoaderDiffusionModel", "model_name"),
    ("OTCheckpointLoaderW8A8", "ckpt_name", "QuantLoaderCheckpoint", "ckpt_name"),
)


def replacements() -> list[Any]:
    """One ``io.NodeReplace`` for each retired node; none where this ComfyUI has no such thing."""
    kind = getattr(io, "NodeReplace", None)
    if kind is None:
        return []
    return [
        kind(
            new_node_id=ours,
            old_node_id=old,
            old_widget_ids=[old_file],
            input_mapping=[
                {"new_id": our_file, "old_id": old_file},
                {"new_id": "rules", "set_value": "compatible"},
                {"new_id": "execution", "set_value": "auto"},
            ],
            output_mapping=[{"new_idx": 0, "old_idx": 0}],
        )
        for old, old_file, ours, our_file in RETIRED
    ]


async def register() -> None:
    """Tell ComfyUI; called once, when the pack is loaded."""
    found = replacements()
    if not found:
        return
    try:
        registry = latest.ComfyAPI().node_replacement
        for replacement in found:
            await registry.register(replacement)
    except (AttributeError, ImportError, TypeError) as error:
        # A convenience: another ComfyUI's way of doing it must not keep the nodes from loading.
        logger.info("Quant Loader: node replacements are not available in this ComfyUI (%s)", error)
