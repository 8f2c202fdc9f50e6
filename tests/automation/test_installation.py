"""``check --all``: what counts as a checkpoint, loops, unreadable folders, the summary."""

from __future__ import annotations

import json
import os

import pytest
from quant_loader.automation.installation import find_checkpoints

LAYER = "blocks.0.attn.qkv_proj"


@pytest.fixture
def models(kit):
    kit.file("models/diffusion_models/a.safetensors", kit.int8(LAYER))
    kit.file(f"models/diffusion_models/b{kit.odd}b.safetensors", kit.int8(LAYER, b""))
    kit.file("models/loras/c.sft", {"x.weight": kit.noise("BF16", 2, 2)})
    (kit.folder / "models/vae").mkdir()
    (kit.folder / "models/vae/v.pt").write_bytes(b"PK")
    (kit.folder / "models/put_models_here").touch()
    return kit.folder / "models"


def test_text(models, command):
    ran = command("check", "--all", models)
    assert ran.code == 1
    lines = ran.out.splitlines()
    assert lines[-1] == "3 checkpoints: 1 sound, 1 refused, 1 not quantised"
    assert sum(line.startswith(("sound ", "REFUSED ", "not quantised ")) for line in lines) == 3
    assert LAYER in ran.out


def test_json_lines(models, command):
    ran = command("check", "--all", models, "--json")
    *reports, summary = [json.loads(line) for line in ran.out.splitlines()]
    assert sorted(report["verdict"] for report in reports) == ["ok", "refused", "unquantized"]
    assert all(report["schema"] == 1 and report["path"] for report in reports)
    assert summary["verdicts"] == {"ok": 1, "refused": 1, "unquantized": 1}
    assert summary["formats"] == {"int8_tensorwise": 1}


def test_rules(kit, command):
    kit.file("models/a.safetensors", kit.int8(LAYER, {"convrot": True}))
    assert command("check", "--all", kit.folder / "models").code == 1
    assert command("check", "--all", kit.folder / "models", "--rules", "compatible").code == 0


def test_shard_sets_are_one_checkpoint(kit, command):
    parts = [("a", kit.int8("a")), ("b", kit.int8("b"))]
    for folder in ("with index", "by name"):
        for number, (_, tensors) in enumerate(parts, 1):
            kit.file(f"{folder}/m-{number:05d}-of-00002.safetensors", tensors)
    places = {
        name: f"m-{number:05d}-of-00002.safetensors" for number, (_, tensors) in enumerate(parts, 1) for name in tensors
    }
    (kit.folder / "with index/m.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert [path.name for path in find_checkpoints([kit.folder]).checkpoints] == [
        "m-00001-of-00002.safetensors",
        "m.safetensors.index.json",
    ]
    ran = command("check", "--all", kit.folder, "--json")
    assert ran.code == 0
    assert json.loads(ran.out.splitlines()[-1])["formats"] == {"int8_tensorwise": 4}


@pytest.mark.skipif(os.name == "nt", reason="needs the right to make links")
def test_loops_end_and_links_are_followed(kit, models, command):
    (models / "loras" / "up").symlink_to(models)
    (models / "loras" / "self").symlink_to(models / "loras" / "self")
    (models / "loop.safetensors").symlink_to(models / "loop.safetensors")
    kit.file("other disk/d.safetensors", kit.int8(LAYER))
    (models / "linked").symlink_to(kit.folder / "other disk")
    ran = command("check", "--all", models)
    assert ran.out.splitlines()[-1] == "5 checkpoints: 2 sound, 2 refused, 1 not quantised"


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root reads every folder")
def test_unreadable_folder_is_a_note(models, command):
    (models / "loras").chmod(0)
    ran = command("check", "--all", models)
    (models / "loras").chmod(0o755)
    assert "loras cannot be read" in ran.out


def test_folder_that_vanishes_is_a_note(models, monkeypatch):
    real = os.scandir

    def scandir(path):
        if str(path).endswith("loras"):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    found = find_checkpoints([models])
    assert len(found.checkpoints) == 2
    assert "loras cannot be read: Permission denied" in found.notes[0]


def test_no_such_folder(kit, command):
    ran = command("check", "--all", kit.folder / "none")
    assert ran.code == 2
    assert "no folder" in ran.err
