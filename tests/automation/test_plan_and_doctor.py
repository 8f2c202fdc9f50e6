"""``plan`` and ``doctor``: they answer on any machine, name reasons, and give nothing personal away."""

from __future__ import annotations

import json
import sys

import pytest
from quant_loader.automation.doctor import anonymous, diagnose
from quant_loader.automation.outlook import devices, outlook
from quant_loader.checkpoint import check

LAYER = "blocks.0.attn.qkv_proj"

pytest.importorskip("torch")


@pytest.fixture
def mixed(kit):
    tensors = {f"a.{i}": {} for i in range(3)}
    parts = [kit.int8(name) for name in tensors] + [
        kit.nvfp4("b", {"format": "nvfp4"}),
        kit.fp8("c", {"format": "float8_e4m3fn"}),
    ]
    return kit.file("mixed.safetensors", {name: tensor for part in parts for name, tensor in part.items()})


def test_here(mixed, command):
    ran = command("plan", mixed)
    assert ran.code == 0
    assert "3 x int8_tensorwise" in ran.out
    assert "nvfp4 (b)" in ran.out


def test_named_cards(mixed, command):
    ran = command("plan", mixed, "--device", "sm_86", "--device", "rtx5090", "--json")
    document = json.loads(ran.out)
    ampere, blackwell = ({g["format"]: g for g in device["groups"]} for device in document["devices"])
    assert (ampere["int8_tensorwise"]["execution"], ampere["int8_tensorwise"]["count"]) == ("native", 3)
    assert (ampere["nvfp4"]["execution"], blackwell["nvfp4"]["execution"]) == ("int8", "native")
    assert "compute capability 10.0" in json.dumps(ampere["nvfp4"]["alternatives"])


@pytest.mark.parametrize("spelling", ["sm_86", "SM86", "sm8.6", "rtx3090"])
def test_spellings_of_a_card(spelling):
    assert devices([spelling])[0][1] == devices(["sm_86"])[0][1]


def test_twelve_is_two_digits():
    assert devices(["sm120"])[0][0] == "sm_120"


def test_execution_is_the_nodes_setting(mixed):
    ((_, facts),) = devices(["sm_86"])
    exact = outlook(check([mixed]).layers, facts, "exact")
    assert {group.plan.execution for group in exact} == {"exact"}


def test_exit_codes(kit, mixed, command):
    broken = kit.file("broken.safetensors", kit.int8(LAYER, b""))
    plain = kit.file("plain.safetensors", {"a.weight": kit.noise("BF16", 2, 2)})
    assert command("plan", plain).code == 0
    ran = command("plan", broken)
    assert (ran.code, LAYER in ran.out) == (1, True)
    assert command("plan", kit.folder / "none.safetensors").code == 2
    ran = command("plan", mixed, "--device", "rtx9999")
    assert ran.code == 2
    assert "rtx3090" in ran.err


def test_without_torch_it_is_one_sentence(mixed, command, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("quant_loader.kernels") or name == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delattr("quant_loader.kernels", raising=False)
    ran = command("plan", mixed)
    assert ran.code == 2
    assert "needs PyTorch" in ran.err
    assert "needs PyTorch" in command("doctor").out


def test_doctor(command):
    ran = command("doctor")
    assert ran.code == 0
    for word in ("torch", "python", "comfy-kitchen", "int8_tensorwise", "nvfp4", "mxfp8", "quanto_int8"):
        assert word in ran.out
    document = json.loads(command("doctor", "--json").out)
    assert len(document["devices"][0]["kernels"]) == 8
    assert all(kernel["reason"] for kernel in document["devices"][0]["kernels"])


def test_doctor_gives_nothing_personal_away(kit, command, monkeypatch):
    home = kit.folder / "home" / "someone-private"
    (home / "models").mkdir(parents=True)
    (home / "main.py").touch()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USER", "someone-private")
    monkeypatch.setenv("COMFYUI_PATH", str(home))
    monkeypatch.setenv("QUANT_LOADER_KERNELS", f"{home}/kernels")
    ran = command("doctor")
    assert ran.code == 0
    assert "someone-private" not in ran.out
    assert "<path>" in ran.out


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("cannot open /home/bob/lib/x.so: no such file", "cannot open <path>: no such file"),
        (r"in C:\Users\Bob\AppData\x.dll", "in <path>"),
        (r"in \\server\share\Bob", "in <path>"),
        ("~/comfy is missing", "<path> is missing"),
        ("PyTorch ROCm/HIP runtime, 3/4 done", "PyTorch ROCm/HIP runtime, 3/4 done"),
    ],
)
def test_paths_are_taken_out(text, left):
    assert anonymous(text) == left


def test_a_driver_that_fails_is_said(monkeypatch):
    def fail(_=None):
        raise RuntimeError("driver at /opt/secret is too old")

    monkeypatch.setattr("quant_loader.automation.doctor.here", fail)
    assert diagnose().problems == ("The devices could not be asked: driver at <path> is too old",)
