"""A workflow that the editor saved, converted by the command, opened in the editor again: nothing is lost, and it runs.

The workflow is the frontend's own file of stock nodes, not one written by us.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from quant_loader.demo import fixtures, workflows
from quant_loader.demo.server import ComfyServer

FILE = fixtures.file_name("int8_convrot")
OURS = workflows.OUR_NODE

# What the editor would queue, and what a person would miss: unknown nodes, links by the names of their ends.
SEEN = """async () => {
  const { output } = await app.graphToPrompt();
  const all = [app.graph, ...(app.graph.subgraphs?.values() ?? [])].flatMap((graph) =>
    graph.nodes.map((node) => ({ graph, node })));
  const unknown = all.filter(({ node }) => node.has_errors || node.type === null).map(({ node }) => node.type);
  const links = all.flatMap(({ graph, node }) => node.inputs.filter((input) => input.link != null).map((input) => {
    const link = graph.getLink ? graph.getLink(input.link) : graph.links[input.link];
    const from = graph.getNodeById(link.origin_id);
    const start = from ? `${from.outputs[link.origin_slot].name} of ${from.id}` : 'outside';
    return `${start} -> ${input.name} of ${node.id}`;
  }));
  return { output, unknown, links: links.sort() };
}"""


@pytest.fixture(scope="module")
def page(open_editor: Callable[..., Any], server: ComfyServer) -> Iterator[Any]:
    """One renderer is enough: what a file means does not depend on how it is drawn."""
    editor = open_editor(server, "classic")
    yield editor
    editor.page.context.close()


@pytest.fixture
def editor(page: Any) -> Iterator[Any]:
    page.clear()
    page.errors.clear()
    yield page
    assert page.errors == [], "the page raised errors"


@pytest.fixture
def saved(editor: Any) -> dict[str, Any]:
    """The demo's workflow around ComfyUI's own loader, as the editor saves it; every node has been moved by hand."""
    editor.load(workflows.text_to_image(workflows.stock_loader(FILE), prefix="browser/converted", seed=11, steps=1))
    document = editor.page.evaluate(
        """() => {
          app.graph.nodes.forEach((node, index) => { node.pos = [40 + 400 * (index % 4), 60 + 300 * (index >> 2)]; });
          return app.graph.serialize();
        }"""
    )
    assert any(node["type"] == "UNETLoader" for node in document["nodes"])
    return dict(document)


@pytest.fixture
def converted(tmp_path: Path) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Runs the command on a saved workflow; returns what it wrote."""

    def run(document: dict[str, Any]) -> dict[str, Any]:
        source, target = tmp_path / "old.json", tmp_path / "new.json"
        source.write_text(json.dumps(document), encoding="utf-8")
        program = str(Path(sys.executable).with_name("quant-loader"))
        words = [program, "convert-workflow", str(source), str(target), "--rules", "compatible"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert "UNETLoader is now QuantLoaderDiffusionModel" in done.stdout
        return dict(json.loads(target.read_text(encoding="utf-8")))

    return run


def opened(editor: Any, document: dict[str, Any]) -> dict[str, Any]:
    editor.page.evaluate("async (document) => { await app.loadGraphData(document); }", document)
    return dict(editor.page.evaluate(SEEN))


def as_ours(output: dict[str, Any]) -> dict[str, Any]:
    """What the queue should get instead: the stock loader's prompt with our node in its place."""
    expected = json.loads(json.dumps(output))
    for node in expected.values():
        node.pop("_meta", None)
        if node["class_type"] == "UNETLoader":
            node["class_type"] = OURS
            node["inputs"] = {"model_name": FILE, "rules": "compatible", "execution": "auto"}
    return dict(expected)


def without_titles(output: dict[str, Any]) -> dict[str, Any]:
    return {name: {k: v for k, v in node.items() if k != "_meta"} for name, node in output.items()}


def finished(server: ComfyServer, editor: Any) -> dict[str, Any]:
    """The server's record of the prompt that the editor's Run button queues."""
    before = set(server.client.get("/history"))
    editor.run()
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        new = {name: run for name, run in server.client.get("/history").items() if name not in before}
        if new:
            return dict(new.popitem()[1])
        time.sleep(0.5)
    raise TimeoutError("nothing was run")


def test_a_converted_workflow_opens_and_runs(
    editor: Any, server: ComfyServer, saved: dict[str, Any], converted: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    before = opened(editor, saved)
    assert before["unknown"] == []
    document = converted(saved)
    after = opened(editor, document)
    assert after["unknown"] == []
    assert after["links"] == before["links"]
    assert without_titles(after["output"]) == as_ours(before["output"]), "every link and widget value as it was"
    places = {node["id"]: node["pos"] for node in saved["nodes"]}
    assert {node["id"]: node["pos"] for node in document["nodes"]} == places
    editor.verdict("ok")
    editor.shot("converted")
    run = finished(server, editor)
    assert run["status"]["status_str"] == "success"
    assert any("latents" in output for output in run["outputs"].values())


def test_a_loader_inside_a_subgraph_is_converted(
    editor: Any, server: ComfyServer, saved: dict[str, Any], converted: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """The editor itself folds the loader and the sampler into a subgraph before it saves."""
    opened(editor, saved)
    folded = editor.page.evaluate(
        """() => {
          const inside = app.graph.nodes.filter((node) => ['UNETLoader', 'KSampler'].includes(node.type));
          app.graph.convertToSubgraph(new Set(inside));
          return app.graph.serialize();
        }"""
    )
    (definition,) = folded["definitions"]["subgraphs"]
    assert {node["type"] for node in definition["nodes"]} == {"UNETLoader", "KSampler"}
    before = opened(editor, folded)
    after = opened(editor, converted(folded))
    assert after["unknown"] == []
    assert after["links"] == before["links"]
    assert without_titles(after["output"]) == as_ours(before["output"])
    assert finished(server, editor)["status"]["status_str"] == "success"
