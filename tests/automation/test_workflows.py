"""Which files a workflow names: both formats, pictures, subgraphs, links; and whatever else people hand in."""

from __future__ import annotations

import json
import struct
import zlib

import pytest
from quant_loader.automation.errors import RequestError
from quant_loader.automation.workflows import MAX_NODES, as_workflow, model_files, read_workflow

API = {
    "1": {
        "class_type": "QuantLoaderDiffusionModel",
        "inputs": {"model_name": "a.safetensors", "rules": "compatible", "execution": "auto"},
    },
    "2": {"class_type": "CLIPLoader", "inputs": {"clip_name": "t5.safetensors", "type": "wan", "device": "default"}},
    "3": {"class_type": "VAELoader", "inputs": {"vae_name": "taesd"}},
    "4": {
        "class_type": "SomebodysLoader",
        "inputs": {"file": "b.gguf", "steps": 4, "text": "a cat.safetensors\nand a dog"},
    },
    "5": {"class_type": "KSampler", "inputs": {"model": ["1", 0], "seed": 1}},
}


def found(content):
    return model_files(as_workflow(content, "wf"))


def pairs(content):
    return [(r.node_id, r.folder, r.name) for r in found(content).references]


def node(id_, type_, values=None, inputs=(), **more):
    return {"id": id_, "type": type_, "widgets_values": values or [], "inputs": list(inputs), **more}


def widget(name, link=None):
    return {"name": name, "type": "COMBO", "widget": {"name": name}, "link": link}


# -- the API format --------------------------------------------------------------------------------------------------


def test_api_format():
    files = found(API)
    assert [(r.node_id, r.input, r.folder, r.name, r.rules) for r in files.references] == [
        ("1", "model_name", "diffusion_models", "a.safetensors", "compatible"),
        ("2", "clip_name", "text_encoders", "t5.safetensors", None),
    ]
    assert [(u.node_type, u.name) for u in files.unknown] == [("SomebodysLoader", "b.gguf")]


def test_body_of_a_queue_request():
    assert pairs({"prompt": API, "client_id": "x"}) == pairs(API)


def test_links_to_primitives_are_followed_and_others_are_said():
    content = {
        "1": {"class_type": "UNETLoader", "inputs": {"unet_name": ["2", 0]}},
        "2": {"class_type": "PrimitiveString", "inputs": {"value": "a.safetensors"}},
        "3": {"class_type": "UNETLoader", "inputs": {"unet_name": ["4", 0]}},
        "4": {"class_type": "Chooser", "inputs": {}},
    }
    files = found(content)
    assert [r.name for r in files.references] == ["a.safetensors"]
    assert len(files.notes) == 1
    assert "Node 3" in files.notes[0]


def test_several_encoders_and_the_unused_places():
    inputs = {
        "clip_name1": "l.safetensors",
        "clip_name2": "t5.safetensors",
        "clip_name3": "none",
        "type": "flux",
        "rules": "strict",
    }
    assert pairs({"1": {"class_type": "QuantLoaderTextEncoder", "inputs": inputs}}) == [
        ("1", "text_encoders", "l.safetensors"),
        ("1", "text_encoders", "t5.safetensors"),
    ]


def test_inspector_names_its_own_folder():
    inputs = {"folder": "vae", "file": "v.safetensors", "rules": "strict"}
    assert pairs({"1": {"class_type": "QuantLoaderInspect", "inputs": inputs}}) == [("1", "vae", "v.safetensors")]


# -- the editor's format ---------------------------------------------------------------------------------------------


def test_editor_format_muted_nodes_and_sources():
    models = {
        "models": [
            {"name": "t5.safetensors", "url": "https://example.org/t5.safetensors", "directory": "text_encoders"}
        ]
    }
    content = {
        "nodes": [
            node(1, "UNETLoader", ["a.safetensors", "default"]),
            node(2, "CLIPLoader", ["t5.safetensors", "wan", "default"], properties=models),
            node(3, "UNETLoader", ["muted.safetensors", "default"], mode=2),
            node(4, "UNETLoader", ["bypassed.safetensors", "default"], mode=4),
            node(5, "QuantLoaderCheckpoint", ["c.safetensors", "compatible", "auto"]),
            node(6, "Note", ["see a.safetensors"]),
        ],
        "links": [],
    }
    files = found(content)
    assert [(r.node_id, r.name, r.rules) for r in files.references] == [
        ("1", "a.safetensors", None),
        ("2", "t5.safetensors", None),
        ("5", "c.safetensors", "compatible"),
    ]
    assert files.sources == {"t5.safetensors": "https://example.org/t5.safetensors"}


def test_widgets_by_name_and_in_another_order():
    content = {
        "nodes": [
            {
                "id": 1,
                "type": "UNETLoader",
                "widgets_values": {"weight_dtype": "default", "unet_name": "a.safetensors"},
            },
            node(2, "UNETLoader", ["default", "b.safetensors"], [widget("weight_dtype"), widget("unet_name")]),
        ]
    }
    assert [name for _, _, name in pairs(content)] == ["a.safetensors", "b.safetensors"]


def test_primitive_through_reroutes():
    content = {
        "nodes": [
            node(1, "PrimitiveNode", ["a.safetensors", "fixed"]),
            node(2, "Reroute", inputs=[{"name": "", "link": 10}]),
            node(3, "UNETLoader", ["stale.safetensors", "default"], [widget("unet_name", 11)]),
            node(4, "UNETLoader", ["kept.safetensors", "default"], [widget("unet_name", 99)]),
            node(5, "UNETLoader", ["unknowable.safetensors", "default"], [widget("unet_name", 12)]),
            node(6, "Chooser"),
        ],
        "links": [[10, 1, 0, 2, 0, "COMBO"], [11, 2, 0, 3, 0, "COMBO"], [12, 6, 0, 5, 0, "COMBO"]],
    }
    files = found(content)
    assert [r.name for r in files.references] == ["a.safetensors", "kept.safetensors"]
    assert "Node 5" in files.notes[0]


def subgraph(nodes, inputs=(), links=(), id_="sub"):
    return {"id": id_, "nodes": list(nodes), "inputs": list(inputs), "links": list(links)}


def promoted(own="inner.safetensors"):
    """A subgraph with a loader whose file name is an input of the subgraph."""
    return subgraph(
        [node(7, "UNETLoader", [own, "default"], [widget("unet_name", 3)])],
        [{"name": "model", "type": "COMBO", "linkIds": [3]}],
        [{"id": 3, "origin_id": -10, "origin_slot": 0, "target_id": 7, "target_slot": 0, "type": "COMBO"}],
    )


@pytest.mark.parametrize(
    ("instance", "name"),
    [
        (node(1, "sub", ["host.safetensors"]), "host.safetensors"),
        (node(1, "sub", ["host.safetensors"], properties={"proxyWidgets": [["-1", "model"]]}), "host.safetensors"),
        (node(1, "sub", [], properties={"proxyWidgets": [["7", "unet_name"]]}), "inner.safetensors"),
        (node(1, "sub", []), "inner.safetensors"),
        (node(1, "sub", ["stale"], [{"name": "model", "link": 5}]), "linked.safetensors"),
    ],
    ids=["positional", "proxy", "inner proxy", "default", "linked"],
)
def test_subgraph_values(instance, name):
    content = {
        "nodes": [instance, node(2, "PrimitiveNode", ["linked.safetensors"])],
        "links": [[5, 2, 0, 1, 0, "COMBO"]],
        "definitions": {"subgraphs": [promoted()]},
    }
    assert pairs(content) == [("1:7", "diffusion_models", name)]


def test_each_instance_has_its_own_file_and_nesting_is_followed():
    outer = subgraph(
        [node(5, "sub", [], [{"name": "model", "link": 9}])], [{"name": "file", "linkIds": [9]}], id_="outer"
    )
    outer["links"] = [{"id": 9, "origin_id": -10, "origin_slot": 0, "target_id": 5, "target_slot": 0}]
    content = {
        "nodes": [
            node(1, "outer", ["x.safetensors"], properties={"proxyWidgets": [["-1", "file"]]}),
            node(2, "sub", ["y.safetensors"]),
            node(3, "sub", ["z.safetensors"], mode=4),
        ],
        "definitions": {"subgraphs": [promoted(), outer, subgraph([node(1, "UNETLoader", ["never"])], id_="unused")]},
    }
    assert pairs(content) == [
        ("1:5:7", "diffusion_models", "x.safetensors"),
        ("2:7", "diffusion_models", "y.safetensors"),
    ]


def test_subgraph_that_contains_itself_is_an_error():
    content = {"nodes": [node(1, "sub")], "definitions": {"subgraphs": [subgraph([node(2, "sub")])]}}
    with pytest.raises(RequestError, match="contains itself"):
        found(content)


def test_subgraphs_that_multiply_are_bounded():
    levels = [subgraph([node(i, f"s{level + 1}") for i in range(20)], id_=f"s{level}") for level in range(12)]
    with pytest.raises(RequestError, match=str(MAX_NODES)):
        found({"nodes": [node(1, "s0")], "definitions": {"subgraphs": [*levels, subgraph([], id_="s12")]}})


@pytest.mark.parametrize("junk", [None, 7, "x", [], {}, [[]], {"a": 1}])
def test_junk_anywhere_is_passed_over(junk):
    """Every field of every level replaced by something of the wrong kind: no exception, and the sound node is found."""
    sound = node(9, "UNETLoader", ["a.safetensors", "default"])
    for key in ("id", "type", "mode", "inputs", "widgets_values", "properties"):
        content = {
            "nodes": [{**node(1, "UNETLoader", ["x", "y"], [widget("unet_name", 1)]), key: junk}, junk, sound],
            "links": junk,
        }
        assert "a.safetensors" in [r.name for r in found(content).references], key
    for key in ("nodes", "inputs", "links"):
        content = {
            "nodes": [node(1, "sub", ["h"]), sound],
            "definitions": {"subgraphs": [{**promoted(), key: junk}, junk]},
            "links": [junk],
        }
        assert "a.safetensors" in [r.name for r in found(content).references], key
    for definitions in (junk, {"subgraphs": junk}):
        assert "a.safetensors" in [r.name for r in found({"nodes": [sound], "definitions": definitions}).references]
    api = {
        "1": {"class_type": "UNETLoader", "inputs": junk},
        "2": {"class_type": junk, "inputs": {"a": junk}},
        "3": API["1"],
        "4": junk,
    }
    assert [r.name for r in found(api).references] == ["a.safetensors"]


# -- reading files ---------------------------------------------------------------------------------------------------


def chunk(kind, body):
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(*chunks):
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", bytes(13)) + b"".join(chunks) + chunk(b"IEND", b"")


TEXT = json.dumps(API).encode()


@pytest.mark.parametrize(
    "entry",
    [
        chunk(b"tEXt", b"prompt\0" + TEXT),
        chunk(b"zTXt", b"prompt\0\0" + zlib.compress(TEXT)),
        chunk(b"iTXt", b"prompt\0\0\0\0\0" + TEXT),
        chunk(b"iTXt", b"prompt\0\1\0en\0Aufforderung\0" + zlib.compress(TEXT)),
    ],
    ids=["tEXt", "zTXt", "iTXt", "compressed iTXt"],
)
def test_workflow_in_a_picture(tmp_path, entry):
    path = tmp_path / "picture.png"
    path.write_bytes(png(chunk(b"tEXt", b"workflow\0{}"), entry))
    assert [r.name for r in model_files(read_workflow(path)).references] == ["a.safetensors", "t5.safetensors"]


def test_picture_with_the_editor_workflow_only(tmp_path):
    content = {"nodes": [node(1, "UNETLoader", ["a.safetensors", "default"])]}
    path = tmp_path / "picture.png"
    path.write_bytes(png(chunk(b"tEXt", b"workflow\0" + json.dumps(content).encode())))
    assert read_workflow(path).format == "editor"


BOMB = zlib.compress(bytes(65 << 20))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe{", "not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[]", "no ComfyUI workflow"),
        (b"{}", "no ComfyUI workflow"),
        (b'{"a": {"b": 1}}', "no ComfyUI workflow"),
        (b"null", "no ComfyUI workflow"),
        (png(), "holds no workflow"),
        (png(chunk(b"tEXt", b"prompt\0{")), "not JSON"),
        (png(chunk(b"tEXt", b"prompt\0" + TEXT))[:200], "damaged PNG"),
        (png(chunk(b"zTXt", b"prompt\0\0garbage")), "damaged PNG"),
        (png(chunk(b"zTXt", b"prompt\0\0" + BOMB)), "more than"),
    ],
    ids=range(13),
)
def test_files_that_are_no_workflow(kit, data, words):
    path = kit.folder / f"in{kit.odd}vited.json"
    path.write_bytes(data)
    with pytest.raises(RequestError, match=words) as error:
        read_workflow(path)
    assert "\n" not in str(error.value)


def test_missing_and_special_files(tmp_path):
    for path in (tmp_path / "none.json", tmp_path, tmp_path / "none.json" / "x", "nul\0.json"):
        with pytest.raises(RequestError, match="cannot be read"):
            read_workflow(path)


def test_huge_file_is_not_read(tmp_path):
    path = tmp_path / "huge.json"
    with path.open("wb") as file:
        file.truncate(65 << 20)
    with pytest.raises(RequestError, match="too large"):
        read_workflow(path)
