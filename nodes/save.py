"""Save Quantized Checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import folder_paths
from comfy_api.latest import io

from . import common

LORAS = ["leave out", "merge"]


class QuantLoaderSave(io.ComfyNode):  # type: ignore[misc]
    """Writes a diffusion model as it was loaded, with its LoRAs left out or merged."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuantLoaderSave",
            display_name="Save Quantized Checkpoint",
            category=common.CATEGORY,
            description="Saves a quantised model as it is: weights, scales and markers unchanged.",
            search_aliases=["save", "export", *common.SEARCH],
            is_output_node=True,
            inputs=[
                io.Model.Input("model", tooltip="The model to save."),
                io.String.Input(
                    "filename_prefix",
                    default="diffusion_models/QuantLoader",
                    tooltip="Where to save below the output folder.",
                ),
                io.Combo.Input(
                    "loras",
                    options=LORAS,
                    default=LORAS[0],
                    tooltip="leave out: the quantised weights as they are. "
                    "merge: LoRAs are merged into the weights and quantised again.",
                ),
            ],
            outputs=[io.String.Output(display_name="path")],
        )

    @classmethod
    def execute(cls, model: Any, filename_prefix: str, loras: str = LORAS[0]) -> io.NodeOutput:
        from ..patching.saving import save_diffusion_model

        folder, name, counter, *_ = folder_paths.get_save_image_path(
            filename_prefix, folder_paths.get_output_directory()
        )
        path = Path(folder) / f"{name}_{counter:05}_.safetensors"
        notes = save_diffusion_model(model, path, loras)
        return common.shown(str(path), entry={"summary": "\n".join([f"Saved {path.name}.", *notes]), "groups": []})
