"""Every format renders in a real ComfyUI, and differs from the 16-bit picture by what the format costs, not more."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from quant_loader.demo import fixtures, workflows
from quant_loader.demo.pictures import relative_difference


@pytest.mark.parametrize("quantizer", fixtures.EXPECTATIONS)
def test_latent_is_as_far_from_16_bit_as_the_format_costs(rendered, reference, quantizer):
    expected = fixtures.EXPECTATIONS[quantizer]
    run, latent = rendered(quantizer)
    difference = relative_difference(latent, reference)
    assert expected.least <= difference <= expected.most
    assert workflows.SAMPLER in run.executed


@pytest.mark.parametrize("quantizer", fixtures.EXPECTATIONS)
def test_report_names_format_and_layer_count(rendered, tensors, quantizer):
    run, _ = rendered(quantizer)
    (report,) = run.outputs[workflows.REPORT]["text"]
    assert fixtures.EXPECTATIONS[quantizer].format in report
    assert str(len(fixtures.quantize.layers_to_quantize(tensors))) in report


def test_picture_is_a_picture(rendered, server):
    run, _ = rendered("int8_convrot")
    (entry,) = run.files(workflows.PICTURE)
    picture = Image.open(server.output() / entry["subfolder"] / entry["filename"])
    assert picture.size == (workflows.SIZE, workflows.SIZE)
    assert all(low < high for low, high in picture.convert("RGB").getextrema())


def test_unquantized_file_loads_as_the_stock_loader_loads_it(render, reference):
    _, latent = render(workflows.quant_loader(fixtures.REFERENCE))
    assert torch.equal(latent, reference)


def test_exact_execution_differs_by_the_weights_alone(render, reference):
    """Dequantised products leave the activations alone: they are nearer to the 16-bit model than the format's own."""
    loader = workflows.quant_loader(fixtures.file_name("convrot_w4a4"), execution="exact")
    exact = relative_difference(render(loader)[1], reference)
    native_loader = workflows.quant_loader(fixtures.file_name("convrot_w4a4"), execution="native")
    native = relative_difference(render(native_loader)[1], reference)
    assert 0 < exact < native
