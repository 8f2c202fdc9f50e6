"""Load Quantized ControlNet."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from . import common, runs

FOLDER = "controlnet"


class QuantLoaderControlNet(io.ComfyNode):  # type: ignore[misc]
    """Loads a quantised ControlNet; ComfyUI's own loader reads its codes as values."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuantLoaderControlNet",
            display_name="Load Quantized ControlNet",
            category=common.CATEGORY,
            description="Checks and loads a quantised ControlNet.",
            search_aliases=["controlnet", "t2i adapter", *common.SEARCH],
            inputs=[common.file_input("control_net_name", FOLDER), common.rules_input(), common.execution_input()],
            outputs=[io.ControlNet.Output(display_name="CONTROL_NET"), io.String.Output(display_name="report")],
        )

    @classmethod
    async def validate_inputs(cls, control_net_name: str | None = None, rules: str = "strict") -> Any:
        return await common.validated(FOLDER, [control_net_name], rules)

    @classmethod
    def fingerprint_inputs(cls, control_net_name: str, rules: str = "strict", execution: str = "auto") -> str:
        return common.fingerprint(FOLDER, [control_net_name], rules, execution)

    @classmethod
    def execute(cls, control_net_name: str, rules: str = "strict", execution: str = "auto") -> io.NodeOutput:
        from ..patching.load import answer, load_controlnet

        controlnet, report = load_controlnet([common.path_of(FOLDER, control_net_name)], rules, execution)
        patcher = getattr(controlnet, "control_model_wrapped", None)
        runs.handed_out(FOLDER, [control_net_name], rules, execution, control_net=patcher)
        text, entry = answer(report, [patcher], execution)
        return common.shown(controlnet, text, entry=entry)
