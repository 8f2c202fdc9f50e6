"""A file that is exchanged on disk between two prompts is checked and loaded anew; one that stays is not."""

from __future__ import annotations

import pytest
import torch
from quant_loader.demo import fixtures, quantize, workflows
from quant_loader.demo.client import PromptRejected
from quant_loader.demo.pictures import relative_difference

NAME = "exchanged.safetensors"
SEED = 21


@pytest.fixture
def put(server, tensors):
    """Puts the model, quantised in some way, into the place of NAME."""
    path = server.models("diffusion_models") / NAME

    def replace(quantizer: str) -> None:
        quantize.save(path, *quantize.quantize(tensors, quantizer))

    yield replace
    path.unlink()


def test_exchanged_file_is_loaded_anew(render, put):
    loader = workflows.quant_loader(NAME)
    put("int8_row")
    first, int8 = render(loader, seed=SEED)
    put("nvfp4")
    second, nvfp4 = render(loader, seed=SEED)
    direct, expected = render(workflows.quant_loader(fixtures.file_name("nvfp4")), seed=SEED)
    assert workflows.LOADER in first.executed
    assert workflows.LOADER in second.executed
    assert workflows.LOADER in direct.executed
    assert torch.equal(nvfp4, expected)
    assert relative_difference(nvfp4, int8) > 0.005


def test_unchanged_file_is_not_loaded_again(render, put):
    put("int8_row")
    render(workflows.quant_loader(NAME), seed=SEED)
    again, _ = render(workflows.quant_loader(NAME), seed=SEED + 1)
    assert workflows.LOADER in again.cached
    assert workflows.LOADER not in again.executed


def test_file_broken_between_two_prompts_is_refused(server, render, put, tensors, work_done):
    put("int8_row")
    render(workflows.quant_loader(NAME), seed=SEED)
    quantize.save(server.models("diffusion_models") / NAME, fixtures.half_precision_scale(tensors))
    before = work_done()
    with pytest.raises(PromptRejected) as caught:
        server.client.queue(workflows.text_to_image(workflows.quant_loader(NAME), prefix="e2e/x", seed=SEED + 2))
    assert fixtures.BROKEN_LAYERS[0] in caught.value.details()[0]
    assert work_done() == before
