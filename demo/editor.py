"""Turns a workflow in API format into the file format of ComfyUI's graph editor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .client import Workflow

WIDGET_TYPES = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
NODE_WIDTH, COLUMN_WIDTH, GAP = 340, 400, 50
TITLE_HEIGHT, LINE_HEIGHT, TEXT_HEIGHT = 50, 26, 130
PANEL_HEIGHTS = {
    "QuantLoaderDiffusionModel": 340,
    "PreviewAny": 200,
    "SaveImage": 300,
}  # what a node shows below its inputs


def declared_inputs(info: dict[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """The inputs of a node class in their order: name -> (type, options). A combo's type may be its list of values."""
    inputs: dict[str, tuple[str, dict[str, Any]]] = {}
    for group in ("required", "optional"):
        for name, declaration in info["input"].get(group, {}).items():
            kind = "COMBO" if isinstance(declaration[0], list) else str(declaration[0])
            inputs[name] = (kind, declaration[1] if len(declaration) > 1 else {})
    return inputs


def is_link(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)


def depth(workflow: Workflow, node: str) -> int:
    """How many nodes stand before this one on its longest path."""
    sources = [value[0] for value in workflow[node]["inputs"].values() if is_link(value)]
    return 1 + max((depth(workflow, source) for source in sources), default=-1)


def height_of(class_type: str, info: dict[str, Any]) -> int:
    """About how tall the editor draws a node, in its units."""
    inputs = declared_inputs(info)
    texts = sum(bool(options.get("multiline")) for _, options in inputs.values())
    lines = len(inputs) + len(info["output"])
    return TITLE_HEIGHT + LINE_HEIGHT * lines + TEXT_HEIGHT * texts + PANEL_HEIGHTS.get(class_type, 0)


def to_graph(workflow: Workflow, object_info: dict[str, Any]) -> dict[str, Any]:
    """The graph of a workflow; `object_info` is what the server's /object_info answers.

    Raises KeyError for a node class that the server does not have.
    """
    ids = {name: number for number, name in enumerate(workflow, start=1)}
    links: list[list[Any]] = []
    outgoing: dict[tuple[str, int], list[int]] = {}
    nodes: list[dict[str, Any]] = []
    filled: dict[int, int] = {}
    for name, node in workflow.items():
        info = object_info[node["class_type"]]
        sockets: list[dict[str, Any]] = []
        values: list[Any] = []
        for key, (kind, options) in declared_inputs(info).items():
            value = node["inputs"].get(key, options.get("default"))
            if is_link(value):
                link = len(links) + 1
                source, slot = value
                source_kind = object_info[workflow[source]["class_type"]]["output"][slot]
                links.append([link, ids[source], slot, ids[name], len(sockets), source_kind])
                outgoing.setdefault((source, slot), []).append(link)
                sockets.append({"name": key, "type": kind, "link": link})
            elif kind in WIDGET_TYPES:
                values.append(value)
                if options.get("control_after_generate"):
                    values.append("fixed")
            else:
                sockets.append({"name": key, "type": kind, "link": None})
        column = depth(workflow, name)
        top = filled.get(column, 80)
        height = height_of(node["class_type"], info)
        filled[column] = top + height + GAP
        nodes.append(
            {
                "id": ids[name],
                "type": node["class_type"],
                "pos": [60 + COLUMN_WIDTH * column, top],
                "size": [NODE_WIDTH, height],
                "flags": {},
                "order": column,
                "mode": 0,
                "inputs": sockets,
                "outputs": [],
                "properties": {"Node name for S&R": node["class_type"]},
                "widgets_values": values,
            }
        )
    for name, graph_node in zip(workflow, nodes, strict=True):
        info = object_info[workflow[name]["class_type"]]
        graph_node["outputs"] = [
            {"name": label, "type": kind, "links": outgoing.get((name, slot), [])}
            for slot, (kind, label) in enumerate(zip(info["output"], info["output_name"], strict=True))
        ]
    return {
        "last_node_id": len(nodes),
        "last_link_id": len(links),
        "nodes": nodes,
        "links": links,
        "groups": [],
        "config": {},
        "extra": {},
        "version": 0.4,
    }


def to_editor(workflow: Workflow, object_info: dict[str, Any], path: Path) -> None:
    """Writes the workflow so that the editor opens it."""
    path.write_text(json.dumps(to_graph(workflow, object_info), indent=2) + "\n", encoding="utf-8")
