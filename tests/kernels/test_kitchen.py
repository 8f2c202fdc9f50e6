"""Against comfy-kitchen: its quantisers and operators as a second opinion, and our calls into it on its CPU backend."""

from __future__ import annotations

import pytest
import torch
from quant_loader import kernels
from quant_loader.checkpoint import LayerSpec
from quant_loader.kernels import kitchen
from quant_loader.kernels.formats import quantize

ck = pytest.importorskip("comfy_kitchen")


@pytest.fixture
def on_cpu(monkeypatch):
    """Our calls go to comfy-kitchen's eager backend, which checks its arguments as the GPU ones do."""
    from comfy_kitchen.registry import registry

    called = []

    def implementation(name, kwargs):
        called.append(name)
        return registry.get_implementation(name, backend="eager", kwargs=kwargs)

    monkeypatch.setattr(kitchen, "_implementation", implementation)
    return called


def prepared_for(device, layer, execution="auto"):
    operation = kernels.prepare(layer.spec, kernels.DEVICES[device], execution)
    assert operation.plan.backend == "kitchen"
    return operation


@pytest.mark.parametrize("options", [{}, {"rows": False}, {"group": 64}, {"group": 256}])
@pytest.mark.parametrize("tokens", [(1,), (2, 9)])
def test_int8_linear(options, tokens, on_cpu, quantised, relative) -> None:
    torch.manual_seed(0)
    layer = quantised("int8_tensorwise", torch.randn(48, 256) / 16, **options)
    x, bias = torch.randn(*tokens, 256), torch.randn(48)
    operation = prepared_for("rtx3090", layer)
    y = operation(x, layer.tensors, bias)
    assert on_cpu == ["int8_linear"]
    assert operation.stats == {"kitchen": 1}
    assert y.shape == (*tokens, 48)
    assert relative(y, kernels.reference_linear(x, layer.spec, layer.tensors, bias)) < 1e-6


def test_w4a4_linear(on_cpu, quantised, relative) -> None:
    torch.manual_seed(1)
    layer = quantised("convrot_w4a4", torch.randn(48, 256) / 16, group=256)
    x, bias = torch.randn(9, 256), torch.randn(48)
    operation = prepared_for("rtx3090", layer)
    y = operation(x, layer.tensors, bias)
    assert on_cpu == ["convrot_w4a4_linear"]
    assert relative(y, kernels.reference_linear(x, layer.spec, layer.tensors, bias)) < 1e-6


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "float8_e4m3fn", "quanto_int8"])
def test_carried_weights(name, on_cpu, quantised, relative) -> None:
    torch.manual_seed(2)
    layer = quantised(name, torch.randn(48, 256) / 16)
    x, bias = torch.randn(9, 256), torch.randn(48)
    operation = prepared_for("rtx3090", layer, "int8")
    y = operation(x, layer.tensors, bias)
    assert on_cpu == ["int8_linear"]
    assert operation.stats == {"kitchen": 1}
    assert relative(y, kernels.reference_linear(x, layer.spec, layer.tensors, bias, "int8")) < 1e-6


def test_carried_weights_in_chunks(on_cpu, quantised, relative, monkeypatch) -> None:
    from quant_loader.kernels.formats import int8

    monkeypatch.setattr(int8, "CARRY_BYTES", 128 * 256)
    torch.manual_seed(3)
    layer = quantised("nvfp4", torch.randn(304, 256) / 16)
    x, bias = torch.randn(9, 256), torch.randn(304)
    y = prepared_for("rtx3090", layer)(x, layer.tensors, bias)
    assert on_cpu == ["int8_linear"] * 3
    assert relative(y, kernels.reference_linear(x, layer.spec, layer.tensors, bias, "int8")) < 1e-6


def test_nvfp4_decoded_by_kitchen(on_cpu, quantised, relative) -> None:
    from quant_loader.kernels.formats import nvfp4

    torch.manual_seed(4)
    layer = quantised("nvfp4", torch.randn(150, 64), padded_rows=10)
    weight = layer_weight(layer)
    dense = nvfp4._kitchen_decode(weight, 128, 150, torch.float32)
    assert on_cpu == ["dequantize_nvfp4"]
    assert relative(dense, layer.dense[128:150]) < 1e-6
    codes, scale = kitchen.quantize_int8_convrot_weight(dense, 16)
    ours, ours_scale = quantize.int8_rows(kernels.formats.rotation.rotate(dense, 16))
    assert (codes.int() - ours.int()).abs().max() <= 1
    torch.testing.assert_close(scale, ours_scale)


def layer_weight(layer):
    from quant_loader.kernels.formats import nvfp4

    return nvfp4.canonical(
        layer.tensors["weight"], layer.tensors["weight_scale"], layer.tensors["weight_scale_2"], None
    )


def test_nvfp4_activation_is_kitchens(relative) -> None:
    torch.manual_seed(5)
    x = torch.randn(33, 128) * 3
    scale = quantize.nvfp4_scale(x)
    values, block_scale = quantize.nvfp4_values(x, scale)
    codes, tiles = ck.quantize_nvfp4(x, scale, pad_16x=True)
    theirs = ck.dequantize_nvfp4(codes, scale, tiles, torch.float32)[:33]
    ours = (values.reshape(33, 8, 16) * block_scale[..., None] * scale).reshape(33, 128)
    assert relative(ours, theirs) < 1e-6


def test_mxfp8_activation_is_kitchens() -> None:
    torch.manual_seed(6)
    x = torch.randn(64, 128) * torch.logspace(-3, 3, 64)[:, None]
    x[3, :32] = 0
    values, scale = quantize.mxfp8_values(x)
    codes, tiles = ck.quantize_mxfp8(x)
    theirs = ck.dequantize_mxfp8(codes, tiles, torch.float32)
    assert torch.equal((values.reshape(64, 4, 32) * scale[..., None]).reshape(64, 128), theirs)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "int8_tensorwise", "convrot_w4a4"])
def test_files_that_kitchen_writes(name, relative) -> None:
    """Weights as ComfyUI saves them decode to what comfy-kitchen decodes."""
    torch.manual_seed(7)
    w = torch.randn(96, 256)
    annotations = {}
    if name == "nvfp4":
        factor = w.abs().amax() / (448 * 6)
        codes, tiles = ck.quantize_nvfp4(w, factor)
        theirs = ck.dequantize_nvfp4(codes, factor, tiles, torch.float32)
        tensors = {"weight": codes, "weight_scale": tiles, "weight_scale_2": factor}
    elif name == "mxfp8":
        codes, tiles = ck.quantize_mxfp8(w)
        theirs = ck.dequantize_mxfp8(codes, tiles, torch.float32)
        tensors = {"weight": codes, "weight_scale": tiles}
    elif name == "int8_tensorwise":
        codes, scale = ck.quantize_int8_rowwise(w)
        theirs = ck.dequantize_int8_simple(codes, scale)
        tensors = {"weight": codes, "weight_scale": scale}
    else:
        codes, scale = ck.quantize_convrot_w4a4_weight(w)
        theirs = ck.dequantize_convrot_w4a4_weight(codes, scale, output_dtype=torch.float32)
        tensors = {"weight": codes, "weight_scale": scale}
        annotations = {"convrot_groupsize": 256}
    spec = LayerSpec("blocks.0.proj", name, (96, 256), annotations=annotations)
    assert relative(kernels.dequantize(spec, tensors), theirs) < 1e-6
