"""The example workflows: files of the graph editor with a picture each, whole and of known nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from quant_loader.demo.paths import EXAMPLE_WORKFLOWS

TEMPLATES = sorted(EXAMPLE_WORKFLOWS.glob("*.json"))
SMALL = 200_000  # bytes


def graph(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def test_there_is_one_for_each_use() -> None:
    names = {path.stem for path in TEMPLATES}
    assert {"flux-int8", "flux-nvfp4", "stable-diffusion-int8", "lora-on-quantized", "inspect-a-file"} <= names


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_is_whole(path: Path) -> None:
    picture = path.with_suffix(".jpg")
    assert picture.read_bytes()[:3] == b"\xff\xd8\xff", "a JPEG"
    assert picture.stat().st_size < SMALL
    workflow = graph(path)
    nodes = {node["id"]: node for node in workflow["nodes"]}
    assert len(nodes) == len(workflow["nodes"])
    for link, source, slot, target, socket, kind in workflow["links"]:
        assert link in nodes[source]["outputs"][slot]["links"]
        assert nodes[source]["outputs"][slot]["type"] == kind
        assert nodes[target]["inputs"][socket]["link"] == link
    assert any(node["type"].startswith("QuantLoader") for node in nodes.values())


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_nodes_do_not_lie_on_each_other(path: Path) -> None:
    boxes = [(*node["pos"], *node["size"], node["type"]) for node in graph(path)["nodes"]]
    for index, (x, y, width, height, kind) in enumerate(boxes):
        for other_x, other_y, other_width, other_height, other in boxes[index + 1 :]:
            apart = (
                x + width <= other_x
                or other_x + other_width <= x
                or y + height <= other_y
                or other_y + other_height <= y
            )
            assert apart, f"{kind} lies on {other}"
