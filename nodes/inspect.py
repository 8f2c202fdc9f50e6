"""Inspect Quantized Checkpoint: the check's answer, nothing loaded."""

from __future__ import annotations

import json
from typing import Any

from comfy_api.latest import io

from ..checkpoint import check, verdict_text
from . import common, files
from .choices import FOLDERS


def listed() -> list[str]:
    """The files of all folders, each name once."""
    return list(dict.fromkeys(name for folder in FOLDERS for name in files.names(folder)))


class QuantLoaderInspect(io.ComfyNode):  # type: ignore[misc]
    """Shows what a file is; a refused file is an answer here, not an error."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuantLoaderInspect",
            display_name="Inspect Quantized Checkpoint",
            category=common.CATEGORY,
            description="Shows what a file is: formats, layers, faults and how to mend them. Loads nothing.",
            search_aliases=["check", "verify", *common.SEARCH],
            is_output_node=True,
            inputs=[
                io.Combo.Input("folder", options=list(FOLDERS), tooltip="The model folder to look in."),
                io.Combo.Input("file", options=listed(), tooltip="The file to inspect."),
                common.rules_input(),
            ],
            outputs=[io.String.Output(display_name="summary"), io.String.Output(display_name="json")],
        )

    @classmethod
    def validate_inputs(cls, folder: str | None = None, file: str | None = None) -> Any:
        # A linked input has no value yet.
        if folder not in FOLDERS or not isinstance(file, str) or files.resolve(folder, file) is not None:
            return True
        return files.not_found(folder, file)

    @classmethod
    def fingerprint_inputs(cls, folder: str, file: str, **_: Any) -> str:
        return files.fingerprint(folder, file)

    @classmethod
    def execute(cls, folder: str, file: str, rules: str = "strict") -> io.NodeOutput:
        report = check([common.path_of(folder, file)], rules="compatible" if rules == "compatible" else "strict")
        text = verdict_text(report, max_lines=40)
        entry = {"summary": text, "groups": []}
        return common.shown(text, json.dumps(report.to_dict(), ensure_ascii=False), entry=entry)
