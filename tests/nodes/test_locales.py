"""The English locale says of every node what the node itself says: same inputs, same outputs, same name."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from quant_loader.demo.paths import CHECKOUT, comfyui_tree

if str(comfyui_tree()) not in sys.path:
    sys.path.insert(0, str(comfyui_tree()))
import comfy.cli_args

comfy.cli_args.args.cpu = True  # before anything of ComfyUI looks for a device
from quant_loader.nodes import NODES, inspect, routes  # noqa: E402

LOCALE: dict[str, Any] = json.loads((CHECKOUT / "locales" / "en" / "nodeDefs.json").read_text(encoding="utf-8"))
SCHEMAS = {schema.node_id: schema for schema in (node.define_schema() for node in NODES)}


def test_every_node_is_there() -> None:
    assert LOCALE.keys() == SCHEMAS.keys()


@pytest.mark.parametrize("node", sorted(SCHEMAS))
def test_a_node_and_its_words_agree(node: str) -> None:
    schema, words = SCHEMAS[node], LOCALE[node]
    assert words["display_name"] == schema.display_name
    assert sorted(words["inputs"]) == sorted(entry.id for entry in schema.inputs)
    assert [words["outputs"][str(index)]["name"] for index in range(len(schema.outputs))] == [
        output.display_name for output in schema.outputs
    ]
    assert len(words["outputs"]) == len(schema.outputs)


def test_every_folder_that_a_node_reads_can_be_asked_about() -> None:
    assert set(inspect.FOLDERS) == set(routes.FOLDERS)
