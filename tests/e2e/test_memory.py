"""What a server lets go of and loads again gives the same picture, bit for bit.

`--lowvram`, `--novram` and dynamic VRAM do nothing on a CPU: ComfyUI switches them off there. Partial loads are tested
in process (tests/patching/test_memory.py), dynamic VRAM where there is a CUDA device.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from quant_loader.demo import fixtures, workflows
from quant_loader.demo.client import PromptRun
from quant_loader.demo.server import ComfyServer

Render = Callable[..., tuple[PromptRun, torch.Tensor]]


def free(server: ComfyServer, **what: bool) -> None:
    """POST /free, and wait until the worker, which looks at its flags between prompts, has had the time to act."""
    status, _ = server.client.post("/free", what)
    assert status == 200
    time.sleep(0.5)


@pytest.mark.parametrize("execution", ["auto", "int8"])
@pytest.mark.parametrize("quantizer", ["int8_convrot", "fp8", "nvfp4", "convrot_w4a4"])
def test_a_freed_model_gives_the_same_picture(
    quantizer: str, execution: str, server: ComfyServer, render: Render
) -> None:
    loader = workflows.quant_loader(fixtures.file_name(quantizer), execution=execution)
    first = render(loader, seed=21)[1]
    free(server, unload_models=True)
    # Another size, so that ComfyUI samples again with the loader's cached model, which has to be loaded anew.
    render(loader, seed=21, size=128)
    free(server, unload_models=True, free_memory=True)
    run, again = render(loader, seed=21)
    assert workflows.LOADER in run.executed
    assert workflows.SAMPLER in run.executed
    assert torch.equal(again, first)
