"""Load Quantized Model Patch."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from . import common, runs

FOLDER = "model_patches"


class QuantLoaderModelPatch(io.ComfyNode):  # type: ignore[misc]
    """Loads a quantised model patch (the ControlNets and adapters in models/model_patches)."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuantLoaderModelPatch",
            display_name="Load Quantized Model Patch",
            category=common.CATEGORY,
            description="Checks and loads a quantised model patch.",
            search_aliases=["model patch", *common.SEARCH],
            inputs=[common.file_input("name", FOLDER), common.rules_input(), common.execution_input()],
            outputs=[io.ModelPatch.Output(display_name="MODEL_PATCH"), io.String.Output(display_name="report")],
        )

    @classmethod
    async def validate_inputs(cls, name: str | None = None, rules: str = "strict") -> Any:
        return await common.validated(FOLDER, [name], rules)

    @classmethod
    def fingerprint_inputs(cls, name: str, rules: str = "strict", execution: str = "auto") -> str:
        return common.fingerprint(FOLDER, [name], rules, execution)

    @classmethod
    def execute(cls, name: str, rules: str = "strict", execution: str = "auto") -> io.NodeOutput:
        from ..patching.load import answer, load_model_patch

        patch, report = load_model_patch([common.path_of(FOLDER, name)], rules, execution)
        runs.handed_out(FOLDER, [name], rules, execution, model_patch=patch)
        text, entry = answer(report, [patch], execution)
        return common.shown(patch, text, entry=entry)
