"""``check --workflow`` and the folders it looks in."""

from __future__ import annotations

import json

import pytest
from quant_loader.automation.errors import RequestError
from quant_loader.automation.model_folders import model_folders

LAYER = "blocks.0.attn.qkv_proj"


@pytest.fixture
def models(kit):
    """A models folder with one file of each fate."""
    kit.file("models/diffusion_models/sound.safetensors", kit.int8(LAYER))
    kit.file("models/unet/old place/dialect.safetensors", kit.int8(LAYER, {"convrot": True}))
    kit.file("models/diffusion_models/broken.safetensors", kit.int8(LAYER, b"\0" * 40))
    kit.file("models/clip/plain.safetensors", {"a.weight": kit.noise("BF16", 4, 4)})
    (kit.folder / "models/vae").mkdir()
    (kit.folder / "models/vae/old.pt").write_bytes(b"PK\x03\x04")
    return kit.folder / "models"


@pytest.fixture
def workflow(kit):
    """Writes an API workflow with one loader for each (class, input, name, more inputs)."""

    def write(*loaders):
        nodes = {
            str(i): {"class_type": c, "inputs": {name: value, **more}}
            for i, (c, name, value, more) in enumerate(loaders, 1)
        }
        path = kit.folder / "wf.json"
        path.write_text(json.dumps(nodes))
        return path

    return write


def stock(name):
    return ("UNETLoader", "unet_name", name, {"weight_dtype": "default"})


def ours(name, rules="strict"):
    return ("QuantLoaderDiffusionModel", "model_name", name, {"rules": rules})


def test_sound_workflow(workflow, models, command):
    path = workflow(
        ours("sound.safetensors"),
        ("CLIPLoader", "clip_name", "plain.safetensors", {}),
        ("VAELoader", "vae_name", "old.pt", {}),
    )
    ran = command("check", "--workflow", path, "--models", models)
    assert ran.code == 0
    assert "OK: 3 model files (1 sound, 1 not quantised, 1 not checked)" in ran.out


@pytest.mark.parametrize(
    ("loader", "code"),
    [
        (ours("broken.safetensors"), 1),
        (stock("broken.safetensors"), 1),
        (ours("gone.safetensors"), 1),
        (ours("old place/dialect.safetensors"), 1),
        (ours("old place/dialect.safetensors", "compatible"), 0),
        (stock("old place/dialect.safetensors"), 0),
        (stock("old place\\dialect.safetensors"), 0),
    ],
)
def test_each_node_is_judged_by_its_own_rules(workflow, models, command, loader, code):
    assert command("check", "--workflow", workflow(loader), "--models", models).code == code


def test_rules_option_is_for_stock_nodes(workflow, models, command):
    path = workflow(stock("old place/dialect.safetensors"))
    assert command("check", "--workflow", path, "--models", models, "--rules", "strict").code == 1


def test_json(workflow, models, command):
    path = workflow(ours("sound.safetensors"), stock("gone.safetensors"), ("Other", "x", "z.gguf", {}))
    ran = command("check", "--workflow", path, "--models", models, "--json")
    document = json.loads(ran.out)
    assert (ran.code, document["schema"], document["verdict"]) == (1, 1, "refused")
    sound, gone = document["models"]
    assert sound["report"]["formats"] == {"int8_tensorwise": 1}
    assert (gone["status"], gone["report"], gone["path"]) == ("missing", None, None)
    assert document["unknown"] == [{"node_id": "3", "node_type": "Other", "name": "z.gguf"}]


def test_missing_file_says_where_the_workflow_gets_it(kit, models, command):
    url = "https://example.org/gone.safetensors"
    properties = {"models": [{"name": "gone.safetensors", "url": url, "directory": "diffusion_models"}]}
    content = {
        "nodes": [
            {"id": 1, "type": "UNETLoader", "widgets_values": ["gone.safetensors", "default"], "properties": properties}
        ]
    }
    path = kit.folder / "wf.json"
    path.write_text(json.dumps(content))
    assert url in command("check", "--workflow", path, "--models", models).out


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "/etc/passwd",
        "a/../../secret.safetensors",
        "C:\\x.safetensors",
        "..\\secret.safetensors",
        "nul\0.safetensors",
    ],
)
def test_names_never_leave_the_folders(kit, workflow, models, command, name):
    kit.file("models/secret.safetensors", kit.int8(LAYER))
    ran = command("check", "--workflow", workflow(ours(name)), "--models", models)
    assert ran.code == 1
    assert "Missing" in ran.out


def test_bad_requests(kit, workflow, models, command):
    good = workflow(ours("sound.safetensors"))
    bad = kit.folder / "bad.json"
    bad.write_text("{")
    for arguments in (
        ["--workflow", bad, "--models", models],
        ["--workflow", kit.folder / "none.json", "--models", models],
        ["--workflow", good, "--models", kit.folder / "nowhere"],
        ["--workflow", good, "--models", models, "--extra-model-paths", kit.folder / "none.yaml"],
        ["--workflow", good, "--models", models, "--extra-model-paths", bad],
        ["--workflow", good, good, "--models", models],
        ["--workflow", good, "--all", models],
        [],
    ):
        ran = command("check", *arguments)
        assert ran.code == 2, arguments
        assert ran.err


# -- folders ---------------------------------------------------------------------------------------------------------


def test_extra_model_paths(kit, models):
    pytest.importorskip("yaml")
    kit.file("elsewhere/unets/extra.safetensors", kit.int8(LAYER))
    kit.file("first/sound.safetensors", kit.int8(LAYER))
    yaml = kit.folder / "extra_model_paths.yaml"
    yaml.write_text(
        "a:\n  base_path: elsewhere\n  unet: |\n    nothing\n    unets\n"
        "b:\n  is_default: true\n  diffusion_models: first\nc:\n"
    )
    folders = model_folders(str(models), [str(yaml)])
    assert folders.find("diffusion_models", "extra.safetensors") == kit.folder / "elsewhere/unets/extra.safetensors"
    assert folders.find("unet", "extra.safetensors") is not None
    assert folders.find("diffusion_models", "sound.safetensors") == kit.folder / "first/sound.safetensors"
    assert folders.find("vae", "sound.safetensors") is None


def test_installation_folder_brings_its_own_extra_paths(kit, models):
    pytest.importorskip("yaml")
    (kit.folder / "main.py").touch()
    kit.file("shared/x.safetensors", kit.int8(LAYER))
    (kit.folder / "extra_model_paths.yaml").write_text("a:\n  checkpoints: shared\n")
    folders = model_folders(str(kit.folder))
    assert folders.models == models
    assert folders.find("checkpoints", "x.safetensors") is not None


def test_comfyui_path_is_the_default(kit, models, monkeypatch):
    (kit.folder / "main.py").touch()
    monkeypatch.setenv("COMFYUI_PATH", str(kit.folder))
    assert model_folders(None).models == models
    monkeypatch.delenv("COMFYUI_PATH")
    with pytest.raises(RequestError, match="--models"):
        model_folders(None)


@pytest.mark.parametrize(
    "text", ["a: [1", "- a", "a: 3", "a:\n  base_path: [1]\n  vae: x", "a:\n  vae: 7", "x: &x [*x]", "\0"]
)
def test_bad_yaml_is_one_sentence(kit, models, text):
    pytest.importorskip("yaml")
    yaml = kit.folder / "paths.yaml"
    yaml.write_text(text)
    with pytest.raises(RequestError) as error:
        model_folders(str(models), [str(yaml)])
    assert "\n" not in str(error.value)
