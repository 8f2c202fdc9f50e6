"""``quant-loader convert-workflow``: stock loaders become ours, links and widget values kept, in either format of a
workflow.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..checkpoint.words import clean
from .loader_nodes import LOADERS, NO_FILE
from .workflows import Document, subgraph_definitions, widget_names

Execution = Literal["auto", "native", "int8", "exact"]


@dataclass(frozen=True)
class Replacement:
    """A stock node and ours: ``inputs`` maps old input names to new ones, ``dropped`` are old inputs whose default
    says nothing.

    Outputs keep their slots: ours begin with the same ones. ``implied`` are settings that the old node had built in.
    """

    old: str
    new: str
    inputs: Mapping[str, str]
    dropped: Mapping[str, str] = field(default_factory=dict)
    implied: Mapping[str, str] = field(default_factory=dict)


REPLACEMENTS: dict[str, Replacement] = {
    row.old: row
    for row in (
        Replacement(
            "UNETLoader", "QuantLoaderDiffusionModel", {"unet_name": "model_name"}, {"weight_dtype": "default"}
        ),
        Replacement("CheckpointLoaderSimple", "QuantLoaderCheckpoint", {"ckpt_name": "ckpt_name"}),
        Replacement(
            "CLIPLoader", "QuantLoaderTextEncoder", {"clip_name": "clip_name1", "type": "type"}, {"device": "default"}
        ),
        Replacement(
            "DualCLIPLoader",
            "QuantLoaderTextEncoder",
            {"clip_name1": "clip_name1", "clip_name2": "clip_name2", "type": "type"},
            {"device": "default"},
        ),
        Replacement(
            "TripleCLIPLoader",
            "QuantLoaderTextEncoder",
            {f"clip_name{i}": f"clip_name{i}" for i in (1, 2, 3)},
            implied={"type": "sd3"},
        ),
        Replacement(
            "QuadrupleCLIPLoader",
            "QuantLoaderTextEncoder",
            {f"clip_name{i}": f"clip_name{i}" for i in (1, 2, 3, 4)},
            implied={"type": "hidream"},
        ),
        Replacement("ControlNetLoader", "QuantLoaderControlNet", {"control_net_name": "control_net_name"}),
        Replacement("ModelPatchLoader", "QuantLoaderModelPatch", {"name": "name"}),
    )
}
"""What is converted, by stock node type."""


@dataclass
class Conversion:
    """A converted document. ``changes`` and ``warnings`` are full sentences."""

    content: dict[str, Any]
    changes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def convert_workflow(document: Document, *, rules: str = "strict", execution: Execution = "auto") -> Conversion:
    """A copy of the workflow with our loaders in place of the stock ones; every link, id, position and unknown key
    stays.
    """
    result = Conversion(copy.deepcopy(document.content))
    settings = {"rules": rules, "execution": execution}
    if document.format == "api":
        for node_id, node in result.content.items():
            if (
                isinstance(node, dict)
                and isinstance(node.get("class_type"), str)
                and node["class_type"] in REPLACEMENTS
            ):
                _api_node(clean(str(node_id), 60), node, settings, result)
        return result
    graphs = [result.content, *subgraph_definitions(result.content).values()]
    for graph in graphs:
        nodes = graph.get("nodes")
        for node in nodes if isinstance(nodes, list) else []:
            if isinstance(node, dict) and isinstance(node.get("type"), str) and node["type"] in REPLACEMENTS:
                _editor_node(clean(str(node.get("id")), 60), node, graph, settings, result)
    return result


def _note(node_id: str, row: Replacement, values: Mapping[str, Any], result: Conversion) -> None:
    result.changes.append(f"Node {node_id}: {row.old} is now {row.new}.")
    for name, default in row.dropped.items():
        value = values.get(name, default)
        if value != default:
            why = "; its files carry their own type" if name == "weight_dtype" else ""
            setting = f"{name} = {clean(str(value), 40)}"
            result.warnings.append(f"Node {node_id}: {setting} has no counterpart in {row.new} and was left out{why}.")


def _api_node(node_id: str, node: dict[str, Any], settings: Mapping[str, str], result: Conversion) -> None:
    row = REPLACEMENTS[node["class_type"]]
    old = node.get("inputs")
    old = old if isinstance(old, dict) else {}
    known = {*row.inputs, *row.dropped}
    inputs = {
        row.inputs.get(name, name): value for name, value in old.items() if name in row.inputs or name not in known
    }
    node["class_type"] = row.new
    node["inputs"] = {**inputs, **row.implied, **settings}
    _note(node_id, row, old, result)


def _editor_node(
    node_id: str, node: dict[str, Any], graph: Mapping[str, Any], settings: Mapping[str, str], result: Conversion
) -> None:
    row = REPLACEMENTS[node["type"]]
    values = _values(node, row.old)
    new_values = {row.inputs[name]: value for name, value in values.items() if name in row.inputs}
    new_values.update(row.implied)
    new_values.update(settings)
    _note(node_id, row, values, result)
    node["type"] = row.new
    node["widgets_values"] = [new_values.get(name, NO_FILE) for name in LOADERS[row.new].widgets]
    properties = node.get("properties")
    if isinstance(properties, dict):
        properties.pop("cnr_id", None)
        properties.pop("ver", None)
        if "Node name for S&R" in properties:
            properties["Node name for S&R"] = row.new
    _rename_inputs(node, row)
    _drop_inputs(node, row, graph)


def _values(node: Mapping[str, Any], type_: str) -> dict[str, Any]:
    own = node.get("widgets_values")
    if isinstance(own, dict):
        return dict(own)
    if not isinstance(own, list):
        return {}
    listed = widget_names(node)
    names = listed if len(listed) == len(own) else list(LOADERS[type_].widgets)
    return dict(zip(names, own, strict=False))


def _rename_inputs(node: dict[str, Any], row: Replacement) -> None:
    """Inputs with a link keep their place under the new name; unlinked widget inputs are left to the editor, which
    adds its own.
    """
    inputs = node.get("inputs")
    if not isinstance(inputs, list):
        return
    for entry in inputs:
        if not isinstance(entry, dict) or entry.get("name") not in row.inputs:
            continue
        new = row.inputs[entry["name"]]
        for key in ("name", "localized_name"):
            if key in entry:
                entry[key] = new
        if isinstance(entry.get("widget"), dict):
            entry["widget"]["name"] = new


def _drop_inputs(node: dict[str, Any], row: Replacement, graph: Mapping[str, Any]) -> None:
    """Take away the widget inputs that ours lacks, unless something is linked to them; the links of those behind move
    up.
    """
    inputs = node.get("inputs")
    if not isinstance(inputs, list):
        return
    kept = [
        index
        for index, entry in enumerate(inputs)
        if not (isinstance(entry, dict) and entry.get("name") in row.dropped and entry.get("link") is None)
    ]
    if len(kept) == len(inputs):
        return
    node["inputs"] = [inputs[index] for index in kept]
    places = {old: new for new, old in enumerate(kept)}
    links = graph.get("links")
    for link in links if isinstance(links, list) else []:
        if isinstance(link, list) and len(link) >= 5 and link[3] == node.get("id") and type(link[4]) is int:
            link[4] = places.get(link[4], link[4])
        elif (
            isinstance(link, dict) and link.get("target_id") == node.get("id") and type(link.get("target_slot")) is int
        ):
            link["target_slot"] = places.get(link["target_slot"], link["target_slot"])
