"""``convert-workflow``: our loaders in place of the stock ones, everything else as it was."""

from __future__ import annotations

import copy
import json

import pytest
from quant_loader.automation.convert import REPLACEMENTS, convert_workflow
from quant_loader.automation.loader_nodes import LOADERS
from quant_loader.automation.workflows import as_workflow, model_files

API = {
    "1": {
        "class_type": "UNETLoader",
        "inputs": {"unet_name": "a.safetensors", "weight_dtype": "default"},
        "_meta": {"title": "x"},
    },
    "2": {"class_type": "CLIPLoader", "inputs": {"clip_name": ["9", 0], "type": "wan", "device": "cpu"}},
    "3": {"class_type": "KSampler", "inputs": {"model": ["1", 0], "seed": 5}},
    "4": {
        "class_type": "DualCLIPLoader",
        "inputs": {"clip_name1": "l.safetensors", "clip_name2": "t.safetensors", "type": "flux"},
    },
    "5": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "c.safetensors"}},
}


def convert(content, **options):
    before = copy.deepcopy(content)
    result = convert_workflow(as_workflow(content, "wf"), **options)
    assert content == before
    return result


def test_api_format():
    result = convert(API, rules="compatible", execution="int8")
    settings = {"rules": "compatible", "execution": "int8"}
    assert result.content["1"] == {
        "class_type": "QuantLoaderDiffusionModel",
        "inputs": {"model_name": "a.safetensors", **settings},
        "_meta": {"title": "x"},
    }
    assert result.content["2"]["inputs"] == {"clip_name1": ["9", 0], "type": "wan", **settings}
    assert result.content["3"] == API["3"]
    assert result.content["4"]["inputs"] == {
        "clip_name1": "l.safetensors",
        "clip_name2": "t.safetensors",
        "type": "flux",
        **settings,
    }
    assert result.content["5"] == {
        "class_type": "QuantLoaderCheckpoint",
        "inputs": {"ckpt_name": "c.safetensors", **settings},
    }
    assert len(result.changes) == 4
    assert len(result.warnings) == 1
    assert "device = cpu" in result.warnings[0]


EDITOR = {
    "nodes": [
        {
            "id": 1,
            "type": "UNETLoader",
            "pos": [1, 2],
            "mode": 0,
            "inputs": [
                {"name": "weight_dtype", "type": "COMBO", "widget": {"name": "weight_dtype"}, "link": None},
                {
                    "name": "unet_name",
                    "localized_name": "unet_name",
                    "type": "COMBO",
                    "widget": {"name": "unet_name"},
                    "link": 7,
                },
            ],
            "outputs": [{"name": "MODEL", "type": "MODEL", "links": [8]}],
            "properties": {"Node name for S&R": "UNETLoader", "cnr_id": "comfy-core", "ver": "0.3.50", "models": []},
            "widgets_values": ["default", "a.safetensors"],
        },
        {"id": 2, "type": "KSampler", "inputs": [{"name": "model", "link": 8}], "widgets_values": [1, "fixed"]},
        {"id": 3, "type": "PrimitiveNode", "outputs": [{"links": [7]}], "widgets_values": ["a.safetensors", "fixed"]},
        {"id": 4, "type": "sub", "widgets_values": []},
    ],
    "links": [[7, 3, 0, 1, 1, "COMBO"], [8, 1, 0, 2, 0, "MODEL"]],
    "definitions": {
        "subgraphs": [
            {
                "id": "sub",
                "nodes": [{"id": 9, "type": "CLIPLoader", "widgets_values": ["t.safetensors", "flux2", "default"]}],
                "links": [],
            }
        ]
    },
    "extra": {"ds": {"scale": 1}},
}


def test_editor_format():
    result = convert(EDITOR)
    loader, sampler, primitive, _ = result.content["nodes"]
    assert loader["type"] == "QuantLoaderDiffusionModel"
    assert loader["widgets_values"] == ["a.safetensors", "strict", "auto"]
    assert loader["inputs"] == [
        {
            "name": "model_name",
            "localized_name": "model_name",
            "type": "COMBO",
            "widget": {"name": "model_name"},
            "link": 7,
        }
    ]
    assert loader["properties"] == {"Node name for S&R": "QuantLoaderDiffusionModel", "models": []}
    assert (loader["id"], loader["pos"], loader["outputs"]) == (1, [1, 2], EDITOR["nodes"][0]["outputs"])
    assert (sampler, primitive) == (EDITOR["nodes"][1], EDITOR["nodes"][2])
    assert result.content["links"] == [[7, 3, 0, 1, 0, "COMBO"], [8, 1, 0, 2, 0, "MODEL"]]
    assert result.content["extra"] == EDITOR["extra"]
    inner = result.content["definitions"]["subgraphs"][0]["nodes"][0]
    assert inner["type"] == "QuantLoaderTextEncoder"
    assert dict(zip(LOADERS["QuantLoaderTextEncoder"].widgets, inner["widgets_values"], strict=True))["type"] == "flux2"


@pytest.mark.parametrize("content", [API, EDITOR])
def test_converted_workflow_names_the_same_files(content):
    def names(c):
        return [(r.node_id, r.folder, r.name) for r in model_files(as_workflow(c, "wf")).references]

    result = convert(content)
    assert names(result.content) == names(content)
    assert {r.rules for r in model_files(as_workflow(result.content, "wf")).references} == {"strict"}
    assert convert(result.content).changes == []


def test_every_replacement_knows_both_nodes():
    for row in REPLACEMENTS.values():
        old, new = LOADERS[row.old], LOADERS[row.new]
        assert set(old.widgets) == {*row.inputs, *row.dropped}
        assert {*row.inputs.values(), *row.implied} <= set(new.widgets)
        assert all(new.files[row.inputs[name]] == folder for name, folder in old.files.items())


def test_command(tmp_path, command):
    source, target = tmp_path / "wf.json", tmp_path / "new.json"
    source.write_text(json.dumps(API))
    ran = command("convert-workflow", source, target)
    assert ran.code == 0
    assert json.loads(target.read_text()) == convert(API).content
    assert "UNETLoader is now QuantLoaderDiffusionModel" in ran.out
    assert json.loads(command("convert-workflow", source).out) == convert(API).content
    assert command("convert-workflow", tmp_path / "none.json").code == 2
    assert command("convert-workflow", source, tmp_path / "no" / "new.json").code == 2


def test_command_replaces_nothing_unless_told_to(tmp_path, command):
    """A workflow is work: OUT may be the file that a person meant to keep, or IN itself."""
    source = tmp_path / "wf.json"
    source.write_text(json.dumps(API))
    before = source.read_text()
    for target, words in ((source, "exists already"), (tmp_path, "is a folder")):
        ran = command("convert-workflow", source, target)
        assert ran.code == 2
        assert words in ran.err
    assert source.read_text() == before
    assert command("convert-workflow", "--overwrite", source, source).code == 0
    assert json.loads(source.read_text()) == convert(API).content
    assert [path.name for path in tmp_path.iterdir()] == ["wf.json"]
