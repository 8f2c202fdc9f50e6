"""Dynamic VRAM, where ComfyUI streams weights as views into one buffer: the same bits, the true sizes, LoRAs kept."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
LIMIT = 2 << 30  # bytes that ComfyUI may use of the device

needs_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def facts(path: Path, execution: str, headroom: int) -> dict[str, Any]:
    command = [sys.executable, "-P", str(HERE / "dynamic_vram.py"), str(path), execution, str(headroom)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def same_everywhere(found: dict[str, Any]) -> None:
    assert found["finite"]
    assert found["size"] == found["bytes"]
    assert found["loaded after unloading"] == 0
    assert found["lora changes"]
    assert found["static patcher"] == "QuantModelPatcher"
    states = ("again", "after a partial unload", "after unloading all", "loaded anew", "without the lora")
    assert {state: found[state] for state in states} == dict.fromkeys(states, True)
    assert found["lora kept by the static clone"]


@pytest.mark.gpu
@needs_device
@pytest.mark.parametrize(
    ("quantizer", "execution"),
    [("int8_row", "auto"), ("int8_convrot", "auto"), ("nvfp4", "auto"), ("fp8", "int8"), ("convrot_w4a4", "auto")],
)
@pytest.mark.parametrize("small", [False, True], ids=["whole", "small"])
def test_every_way_of_loading_gives_the_same_bits(
    quantizer: str, execution: str, small: bool, files: Callable[..., Path]
) -> None:
    free, _ = torch.cuda.mem_get_info()
    found = facts(files(quantizer), execution, max(0, free - LIMIT) if small else 0)
    if not found["dynamic"]:
        pytest.skip("comfy-aimdo does not work on this device, so ComfyUI has no dynamic VRAM here")
    assert found["patcher"] == "QuantModelPatcherDynamic"
    same_everywhere(found)


def test_the_script_of_these_tests_without_a_device(files: Callable[..., Path]) -> None:
    """On the CPU ComfyUI's patcher is the static one; everything else is the same."""
    found = facts(files("fp8"), "int8", -1)
    assert found["patcher"] == "QuantModelPatcher"
    same_everywhere(found)
