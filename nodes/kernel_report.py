"""Kernel Report: what ran, how often, and why."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from comfy_api.latest import io

from . import common

QUIET_POLLS = 4
POLL_SECONDS = 0.05


async def rest_of_the_prompt(prompt: dict[str, Any], node_id: str | None) -> None:
    """Return when nothing else of the running prompt can go on without this node.

    Nothing but the model connects this node with the sampler, so ComfyUI may start it first. While it waits, ComfyUI
    runs the other nodes; the prompt is quiet when no other node is running and none has finished for a few polls.
    """
    from comfy_execution.progress import NodeState, get_progress_state

    reports = {i for i, node in prompt.items() if node.get("class_type") == "QuantLoaderKernelReport"} | {node_id}
    before: dict[str, Any] = {}
    quiet = 0
    while quiet < QUIET_POLLS:
        await asyncio.sleep(POLL_SECONDS)
        states = {i: entry["state"] for i, entry in get_progress_state().nodes.items() if i not in reports}
        still = states == before and NodeState.Running not in states.values()
        quiet, before = (quiet + 1 if still else 0), states


class QuantLoaderKernelReport(io.ComfyNode):  # type: ignore[misc]
    """Reads the counters of a model's layers; placed after a sampler, it says what that run used."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuantLoaderKernelReport",
            display_name="Kernel Report",
            category=common.CATEGORY,
            description="Shows, after a run, which kernel each layer ran on, how often, and why.",
            search_aliases=["kernel", "backend", *common.SEARCH],
            is_output_node=True,
            not_idempotent=True,
            hidden=[io.Hidden.prompt, io.Hidden.unique_id],
            inputs=[io.Model.Input("model", tooltip="The model to report on; run it first.")],
            outputs=[io.String.Output(display_name="report")],
        )

    @classmethod
    def fingerprint_inputs(cls, **_: Any) -> float:
        # The counters change with every run: never answered from the cache.
        return float("nan")

    @classmethod
    async def execute(cls, model: Any) -> io.NodeOutput:
        from ..patching.kernel_report import report

        await rest_of_the_prompt(cls.hidden.prompt or {}, cls.hidden.unique_id)
        text, entry = report(model)
        return io.NodeOutput(text, ui={"text": [text], "quant_loader": [json.dumps(entry, ensure_ascii=False)]})
