"""What the loader nodes share: their inputs, the check before queueing, the answer after loading."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from comfy_api.latest import io

from . import files, runs
from .choices import EXECUTIONS, RULES
from .refusal import refusal

CATEGORY = "loaders/quantized"
SEARCH = ["int8", "nvfp4", "convrot", "fp8", "mxfp8", "quanto", "quantised", "quantized"]
NO_FILE = "none"


def file_input(name: str, folder: str, optional: bool = False) -> Any:
    """A combo with the files of a model folder; an optional one may be left at ``none``."""
    tooltip = f"A file in models/{folder}. One shard stands for all its shards."
    if optional:
        return io.Combo.Input(
            name, options=[NO_FILE, *files.names(folder)], default=NO_FILE, optional=True, tooltip=tooltip
        )
    return io.Combo.Input(name, options=files.names(folder), tooltip=tooltip)


def rules_input() -> Any:
    return io.Combo.Input(
        "rules",
        options=list(RULES),
        default="strict",
        tooltip="strict: the file must follow the format to the letter. "
        "compatible: dialects whose meaning is certain are accepted too.",
    )


def execution_input() -> Any:
    return io.Combo.Input(
        "execution",
        options=list(EXECUTIONS),
        default="auto",
        tooltip="auto: the fastest correct kernel for each layer. native: the format's own arithmetic. "
        "int8: carry other formats over to INT8. exact: dequantise and compute in 16 bit (slow, for comparisons).",
    )


def chosen(name: Any) -> bool:
    """Whether a file input holds the name of a file (a linked input has no value yet when a prompt is checked)."""
    return isinstance(name, str) and name not in ("", NO_FILE)


async def validated(folder: str, names: list[Any], rules: Any) -> Any:
    """The answer of ``validate_inputs``: True, or the first refusal among the chosen files."""
    if rules not in RULES:
        return True
    for name in names:
        if chosen(name):
            refused = await asyncio.to_thread(refusal, folder, name, rules)
            if refused is not None:
                return refused
    return True


def fingerprint(folder: str, names: Sequence[Any], rules: Any, execution: Any) -> str:
    """The answer of ``fingerprint_inputs`` for the chosen files: it changes when one of them does.

    ComfyUI asks once at the start of every prompt, so this is where the figures of a run begin anew, whether the node
    is executed or answered from the cache.
    """
    asked = runs.Asked.now(folder, [name for name in names if chosen(name)], rules, execution)
    runs.begin(asked)
    return asked.content


def path_of(folder: str, name: str) -> str:
    """The path of a listed file; raises with a sentence when it is gone."""
    path = files.resolve(folder, name)
    if path is None:
        raise FileNotFoundError(files.not_found(folder, name))
    return path


def shown(*outputs: Any, entry: dict[str, Any]) -> io.NodeOutput:
    """A node's outputs, with ``entry`` for the panel on the node."""
    return io.NodeOutput(*outputs, ui={"quant_loader": [json.dumps(entry, ensure_ascii=False)]})
