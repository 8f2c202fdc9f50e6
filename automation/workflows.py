"""Which model files a workflow names.

A workflow is one of: the API format (node id -> ``class_type``, ``inputs``), the editor's format (``nodes``,
``links``, ``definitions``), a body of ``POST /prompt``, or a PNG made by ComfyUI (its ``prompt`` entry is the API
format of what ran). Nothing of ComfyUI is needed to read them. What a link computes at run time is unknown here and
said so; constants behind primitives, reroutes and subgraph inputs are followed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..checkpoint.words import clean
from .documents import is_png, parse_json, png_texts, read_bytes, shown
from .errors import RequestError
from .loader_nodes import LOADERS, NO_FILE, LoaderNode, looks_like_model

MAX_NODES = 20_000
"""Most nodes we visit, subgraph instances counted each time."""
MAX_NESTING = 32
MUTED, BYPASSED = 2, 4
SUBGRAPH_INPUT = -10
"""The id by which links inside a subgraph name its inputs."""

Format = Literal["api", "editor"]


@dataclass(frozen=True)
class FileReference:
    """One model file that a node names. ``rules`` is the node's own setting, None for stock nodes, which have none.

    ``node_id`` is the id of the API format: inside subgraph instances ``outer:inner``.
    """

    node_id: str
    node_type: str
    input: str
    folder: str
    name: str
    rules: str | None = None


@dataclass(frozen=True)
class UnknownFile:
    """A widget of an unknown node that looks like a model file."""

    node_id: str
    node_type: str
    name: str


@dataclass(frozen=True)
class Document:
    """A parsed workflow: ``content`` is the API dictionary or the editor's document."""

    source: str
    format: Format
    content: dict[str, Any]


@dataclass
class WorkflowFiles:
    """What :func:`model_files` found. ``notes`` are full sentences; ``sources`` maps a file name to the address that
    the workflow gives.
    """

    references: list[FileReference] = field(default_factory=list)
    unknown: list[UnknownFile] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)


def read_workflow(path: str | os.PathLike[str]) -> Document:
    """The workflow in a JSON file or a PNG. Raises RequestError with one sentence."""
    data = read_bytes(path)
    name = shown(path)
    if not is_png(data):
        return as_workflow(parse_json(data, name), name)
    texts = png_texts(data, name)
    for keyword in ("prompt", "workflow"):
        if texts.get(keyword):
            return as_workflow(parse_json(texts[keyword], f"the {keyword} entry of {name}"), name)
    raise RequestError(f"{name} holds no workflow: the picture was saved without metadata, or not by ComfyUI.")


def as_workflow(content: Any, source: str) -> Document:
    """Tell the formats apart. Raises RequestError."""
    if isinstance(content, dict):
        if isinstance(content.get("nodes"), list):
            return Document(source, "editor", content)
        if _is_api(content):
            return Document(source, "api", content)
        inner = content.get("prompt")
        if isinstance(inner, dict) and _is_api(inner):
            return Document(source, "api", inner)
        inner = content.get("workflow")
        if isinstance(inner, dict) and isinstance(inner.get("nodes"), list):
            return Document(source, "editor", inner)
    raise RequestError(
        f"{source} is no ComfyUI workflow: expected nodes with a class_type (API format) or a list of nodes (the "
        f"editor's format)."
    )


def _is_api(content: Mapping[str, Any]) -> bool:
    nodes = [value for value in content.values() if isinstance(value, dict)]
    return any(isinstance(node.get("class_type"), str) for node in nodes)


def model_files(document: Document) -> WorkflowFiles:
    """Every model file that the workflow names, in its order. Raises RequestError for a document that cannot be
    followed.
    """
    found = WorkflowFiles()
    if document.format == "api":
        _api(document.content, found)
    else:
        _Editor(document.content, document.source, found).run()
    _sources(document.content, found.sources)
    return found


# -- one node --------------------------------------------------------------------------------------------------------


class Unset:
    """A widget that the file gives no value for."""


class Linked:
    """A value that another node computes at run time."""


UNSET, LINKED = Unset(), Linked()


def _collect(found: WorkflowFiles, node_id: str, row: LoaderNode, values: Mapping[str, Any]) -> None:
    rules = values.get("rules") if row.ours else None
    rules = rules if rules in ("strict", "compatible") else ("strict" if row.ours else None)
    for widget, folder in row.files.items():
        value = values.get(widget, UNSET)
        if isinstance(value, Linked):
            found.notes.append(
                f"Node {node_id} ({row.type}): {widget} comes from another node and is known only when it runs."
            )
            continue
        if not isinstance(value, str) or not value or value.lower() == NO_FILE or value in row.built_in:
            continue
        if row.folder_widget is not None:
            chosen = values.get(row.folder_widget)
            folder = chosen if isinstance(chosen, str) else ""
        found.references.append(FileReference(node_id, row.type, widget, folder, value, rules))


def _collect_unknown(found: WorkflowFiles, node_id: str, type_: str, values: Iterator[Any]) -> None:
    found.unknown.extend(UnknownFile(node_id, type_, value) for value in values if looks_like_model(value))


def _sources(content: Any, sources: dict[str, str]) -> None:
    """The addresses in ``properties.models`` of the editor's nodes."""
    groups = [content]
    definitions = content.get("definitions")
    if isinstance(definitions, dict) and isinstance(definitions.get("subgraphs"), list):
        groups.extend(definitions["subgraphs"])
    for group in groups:
        for node in _list(group.get("nodes")) if isinstance(group, dict) else []:
            properties = node.get("properties") if isinstance(node, dict) else None
            models = properties.get("models") if isinstance(properties, dict) else None
            for model in _list(models):
                if isinstance(model, dict) and isinstance(model.get("name"), str) and isinstance(model.get("url"), str):
                    sources.setdefault(model["name"], clean(model["url"], 300))


# -- the API format --------------------------------------------------------------------------------------------------


def _api(nodes: Mapping[str, Any], found: WorkflowFiles) -> None:
    for node_id, node in nodes.items():
        if not isinstance(node, dict):
            continue
        inputs = node.get("inputs")
        inputs = inputs if isinstance(inputs, dict) else {}
        type_ = node.get("class_type")
        row = LOADERS.get(type_) if isinstance(type_, str) else None
        values = {key: _api_value(value, nodes) for key, value in inputs.items()}
        if row is not None:
            _collect(found, clean(str(node_id), 60), row, values)
        else:
            _collect_unknown(found, clean(str(node_id), 60), clean(str(type_), 60), iter(values.values()))


def _api_value(value: Any, nodes: Mapping[str, Any]) -> Any:
    """An input's constant; a link to a primitive is followed."""
    if not (isinstance(value, list) and len(value) == 2 and isinstance(value[0], (str, int))):
        return value
    source = nodes.get(str(value[0]))
    if isinstance(source, dict) and str(source.get("class_type", "")).startswith("Primitive"):
        inputs = source.get("inputs")
        constant = inputs.get("value") if isinstance(inputs, dict) else None
        if isinstance(constant, str):
            return constant
    return LINKED


# -- the editor's format ---------------------------------------------------------------------------------------------


@dataclass
class _Scope:
    """One graph: the workflow itself or one instance of a subgraph. ``outside`` holds the values of the instance's
    inputs.
    """

    nodes: dict[str, dict[str, Any]]
    links: dict[Any, tuple[str, int]]
    input_names: list[str]
    outside: dict[str, Any]
    prefix: str


class _Editor:
    """Walks the editor's document, entering each subgraph instance with the values that it gives to its inputs."""

    def __init__(self, content: dict[str, Any], source: str, found: WorkflowFiles) -> None:
        self.content = content
        self.source = source
        self.found = found
        self.visited = 0
        self.definitions = subgraph_definitions(content)

    def run(self) -> None:
        self._walk(self._scope(self.content, {}, ""), ())

    def _scope(self, graph: Mapping[str, Any], outside: dict[str, Any], prefix: str) -> _Scope:
        nodes = {
            str(node["id"]): node
            for node in _list(graph.get("nodes"))
            if isinstance(node, dict) and isinstance(node.get("id"), (int, str))
        }
        links: dict[Any, tuple[str, int]] = {}
        for link in _list(graph.get("links")):
            entry = link_ends(link)
            if entry is not None:
                links[entry[0]] = entry[1:]
        names = [str(entry.get("name", "")) if isinstance(entry, dict) else "" for entry in _list(graph.get("inputs"))]
        return _Scope(nodes, links, names, outside, prefix)

    def _walk(self, scope: _Scope, stack: tuple[str, ...]) -> None:
        for node_id, node in scope.nodes.items():
            self.visited += 1
            if self.visited > MAX_NODES:
                raise RequestError(
                    f"{self.source} unfolds to more than {MAX_NODES} nodes: its subgraphs contain each other too often."
                )
            if node.get("mode") in (MUTED, BYPASSED):
                continue
            type_ = node.get("type")
            if not isinstance(type_, str):
                continue
            full_id = scope.prefix + clean(node_id, 60)
            definition = self.definitions.get(type_)
            if definition is not None:
                if type_ in stack or len(stack) >= MAX_NESTING:
                    raise RequestError(f"{self.source} has a subgraph that contains itself (node {full_id}).")
                outside = self._instance_values(node, definition, scope)
                self._walk(self._scope(definition, outside, full_id + ":"), (*stack, type_))
                continue
            row = LOADERS.get(type_)
            if row is not None:
                values = {name: self._widget(node, name, index, scope) for index, name in enumerate(row.widgets)}
                _collect(self.found, full_id, row, values)
            else:
                _collect_unknown(self.found, full_id, clean(type_, 60), own_values(node))

    def _instance_values(self, node: dict[str, Any], definition: dict[str, Any], scope: _Scope) -> dict[str, Any]:
        """What an instance gives to the inputs of its subgraph: links first, then its own widgets."""
        values: dict[str, Any] = {}
        own = node.get("widgets_values")
        names = promoted_names(node, definition)
        if isinstance(own, list):
            values.update(zip(names, own, strict=False))
        elif isinstance(own, dict):
            values.update((name, own[name]) for name in names if name in own)
        for entry in _list(node.get("inputs")):
            if isinstance(entry, dict) and entry.get("link") is not None:
                value = self._trace(entry["link"], scope)
                if not isinstance(value, Unset):
                    values[str(entry.get("name", ""))] = value
        return values

    def _widget(self, node: dict[str, Any], name: str, index: int, scope: _Scope) -> Any:
        """The value of a widget: what is linked to it, else the node's own."""
        names = widget_names(node)
        for entry in _list(node.get("inputs")):
            if isinstance(entry, dict) and entry.get("name") == name and entry.get("link") is not None:
                value = self._trace(entry["link"], scope)
                if not isinstance(value, Unset):
                    return value
        own = node.get("widgets_values")
        if isinstance(own, dict):
            return own.get(name, UNSET)
        if isinstance(own, list):
            if len(names) == len(own) and name in names:
                index = names.index(name)
            return own[index] if index < len(own) else UNSET
        return UNSET

    def _trace(self, link: Any, scope: _Scope) -> Any:
        """The constant behind a link, through reroutes; Linked when another node computes it, Unset when nothing is
        there.
        """
        for _ in range(MAX_NESTING):
            origin = scope.links.get(link) if isinstance(link, (int, str)) else None
            if origin is None:
                return UNSET
            origin_id, slot = origin
            if origin_id == str(SUBGRAPH_INPUT):
                if not 0 <= slot < len(scope.input_names):
                    return UNSET
                return scope.outside.get(scope.input_names[slot], UNSET)
            source = scope.nodes.get(origin_id)
            if source is None:
                return UNSET
            type_ = str(source.get("type", ""))
            if type_.startswith("Primitive"):
                return next(own_values(source), UNSET)
            if type_ != "Reroute":
                return LINKED
            entries = [entry for entry in _list(source.get("inputs")) if isinstance(entry, dict)]
            link = entries[0].get("link") if entries else None
        return LINKED


def subgraph_definitions(content: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The subgraphs of an editor document by id."""
    definitions = content.get("definitions")
    listed = definitions.get("subgraphs") if isinstance(definitions, dict) else None
    return {
        entry["id"]: entry for entry in _list(listed) if isinstance(entry, dict) and isinstance(entry.get("id"), str)
    }


def link_ends(link: Any) -> tuple[Any, str, int] | None:
    """(link id, origin node id, origin slot) of a link in either of its two spellings."""
    if isinstance(link, list) and len(link) >= 5:
        link_id, origin, slot = link[0], link[1], link[2]
    elif isinstance(link, dict):
        link_id, origin, slot = link.get("id"), link.get("origin_id"), link.get("origin_slot")
    else:
        return None
    if not isinstance(link_id, (int, str)) or not isinstance(origin, (int, str)) or not isinstance(slot, int):
        return None
    return link_id, str(origin), slot


def widget_names(node: Mapping[str, Any]) -> list[str]:
    """The names of the node's widgets, where the file lists them as inputs (frontends since 1.16 list all, older ones
    the converted).
    """
    return [
        str(entry["name"])
        for entry in _list(node.get("inputs"))
        if isinstance(entry, dict) and isinstance(entry.get("widget"), dict) and "name" in entry
    ]


def promoted_names(node: Mapping[str, Any], definition: Mapping[str, Any]) -> list[str]:
    """The subgraph inputs whose values an instance's ``widgets_values`` hold, in order.

    Frontends with ``proxyWidgets`` list them there (``-1`` names an input, another id an inner widget that keeps its
    own value); later ones store one value for each input of the definition that ends in a widget.
    """
    properties = node.get("properties")
    proxies = properties.get("proxyWidgets") if isinstance(properties, dict) else None
    if isinstance(proxies, list) and proxies:
        pairs = [pair for pair in proxies if isinstance(pair, list) and len(pair) >= 2]
        return [str(pair[1]) if str(pair[0]) == "-1" else "" for pair in pairs]
    inner = {str(entry.get("id")): entry for entry in _list(definition.get("nodes")) if isinstance(entry, dict)}
    targets: dict[Any, Any] = {}
    for link in _list(definition.get("links")):
        if isinstance(link, dict) and isinstance(link.get("id"), (int, str)):
            targets[link["id"]] = (str(link.get("target_id")), link.get("target_slot"))
    with_widget = set(widget_names(node))
    names = []
    for entry in _list(definition.get("inputs")):
        if not isinstance(entry, dict):
            continue
        name = str(entry.get("name", ""))
        if name in with_widget or _ends_in_widget(entry, targets, inner):
            names.append(name)
    return names


def _ends_in_widget(entry: Mapping[str, Any], targets: Mapping[Any, Any], inner: Mapping[str, Any]) -> bool:
    for link_id in _list(entry.get("linkIds")):
        if not isinstance(link_id, (int, str)) or link_id not in targets:
            continue
        node_id, slot = targets[link_id]
        inputs = _list(inner.get(node_id, {}).get("inputs"))
        if isinstance(slot, int) and 0 <= slot < len(inputs) and isinstance(inputs[slot], dict):
            return isinstance(inputs[slot].get("widget"), dict)
    return False


def own_values(node: Mapping[str, Any]) -> Iterator[Any]:
    """The values of a node's own widgets."""
    own = node.get("widgets_values")
    if isinstance(own, dict):
        yield from own.values()
    elif isinstance(own, list):
        yield from own


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
