"""Load Quantized Diffusion Model: check, load, report."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from . import common, runs

FOLDER = "diffusion_models"


class QuantLoaderDiffusionModel(io.ComfyNode):  # type: ignore[misc]
    """Loads a quantised (or plain) diffusion model; refuses a broken one when the prompt is queued."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuantLoaderDiffusionModel",
            display_name="Load Quantized Diffusion Model",
            category=common.CATEGORY,
            description="Checks a quantised diffusion model (INT8, NVFP4, W4A4, W4A8, FP8, MXFP8, Quanto) before it "
            "loads, names every fault, and runs its linears on the fastest correct kernel of this machine.",
            search_aliases=["unet", *common.SEARCH],
            inputs=[common.file_input("model_name", FOLDER), common.rules_input(), common.execution_input()],
            outputs=[io.Model.Output(display_name="MODEL"), io.String.Output(display_name="report")],
        )

    @classmethod
    async def validate_inputs(cls, model_name: str | None = None, rules: str = "strict") -> Any:
        return await common.validated(FOLDER, [model_name], rules)

    @classmethod
    def fingerprint_inputs(cls, model_name: str, rules: str = "strict", execution: str = "auto") -> str:
        return common.fingerprint(FOLDER, [model_name], rules, execution)

    @classmethod
    def execute(cls, model_name: str, rules: str = "strict", execution: str = "auto") -> io.NodeOutput:
        from ..patching.load import answer, load_diffusion_model

        model, report = load_diffusion_model([common.path_of(FOLDER, model_name)], rules, execution)
        runs.handed_out(FOLDER, [model_name], rules, execution, model=model)
        text, entry = answer(report, [model], execution)
        return common.shown(model, text, entry=entry)
