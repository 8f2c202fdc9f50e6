"""Load Quantized Diffusion Model: check, load, report."""

from __future__ import annotations

import asyncio
from typing import Any

from comfy_api.latest import io

from . import files
from .refusal import refusal

FOLDER = "diffusion_models"
RULES = ["strict", "compatible"]
EXECUTIONS = ["auto", "native", "int8", "exact"]
CATEGORY = "loaders/quantized"


def rules_input() -> Any:
    return io.Combo.Input(
        "rules",
        options=RULES,
        default="strict",
        tooltip="strict: the file must follow the format to the letter. "
        "compatible: dialects whose meaning is certain are accepted too.",
    )


def execution_input() -> Any:
    return io.Combo.Input(
        "execution",
        options=EXECUTIONS,
        default="auto",
        tooltip="auto: the fastest correct kernel for each layer. native: the format's own arithmetic. "
        "int8: carry other formats over to INT8. exact: dequantise and compute in 16 bit (slow, for comparisons).",
    )


class QuantLoaderDiffusionModel(io.ComfyNode):
    """Loads a quantised (or plain) diffusion model; refuses a broken one when the prompt is queued."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuantLoaderDiffusionModel",
            display_name="Load Quantized Diffusion Model",
            category=CATEGORY,
            description="Checks a quantised diffusion model (INT8, NVFP4, W4A4, W4A8, FP8, MXFP8, Quanto) before it "
            "loads, names every fault, and runs its linears on the fastest correct kernel of this machine.",
            search_aliases=["unet", "int8", "nvfp4", "convrot", "fp8", "mxfp8", "quanto", "quantised"],
            inputs=[
                io.Combo.Input(
                    "model_name",
                    options=files.names(FOLDER),
                    tooltip="A file in models/diffusion_models. One shard stands for all its shards.",
                ),
                rules_input(),
                execution_input(),
            ],
            outputs=[io.Model.Output(display_name="MODEL"), io.String.Output(display_name="report")],
        )

    @classmethod
    async def validate_inputs(cls, model_name: str | None = None, rules: str = "strict") -> Any:
        # A linked input has no value yet; the same check runs again at load.
        if not isinstance(model_name, str) or rules not in RULES:
            return True
        return await asyncio.to_thread(refusal, FOLDER, model_name, rules) or True

    @classmethod
    def fingerprint_inputs(cls, model_name: str, **_: Any) -> str:
        return files.fingerprint(FOLDER, model_name)

    @classmethod
    def execute(cls, model_name: str, rules: str = "strict", execution: str = "auto") -> io.NodeOutput:
        from ..patching.load import load_diffusion_model, report_text

        path = files.resolve(FOLDER, model_name)
        if path is None:
            raise FileNotFoundError(files.not_found(FOLDER, model_name))
        model, report = load_diffusion_model([path], rules, execution)
        return io.NodeOutput(model, report_text(report, model, execution))
