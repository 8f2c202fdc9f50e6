"""Carrying a weight over to INT8 rows: once, into tensors of an int8_tensorwise layer, or per call in row chunks."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from quant_loader import kernels

CARRIED = ["nvfp4", "mxfp8", "float8_e4m3fn", "float8_e5m2", "quanto_int8"]
OWN_CODES = [
    ("int8_tensorwise", {}, 0),
    ("int8_tensorwise", {"group": 64}, 64),
    ("convrot_w4a4", {"group": 64}, 64),
    ("asym_w4a8_int8", {"group": 16}, 16),
]


@pytest.mark.parametrize(("K", "group"), [(256, 256), (192, 64), (96, 16)])
@pytest.mark.parametrize("name", CARRIED)
def test_a_replaced_weight_runs_as_the_int8_execution_did(name, K, group, quantised) -> None:
    torch.manual_seed(0)
    layer = quantised(name, torch.randn(40, K) / K**0.5)
    rows = kernels.to_int8_rows(layer.spec, layer.tensors)
    assert rows.group == group
    assert rows.qweight.shape == (40, K)
    assert rows.qweight.dtype == torch.int8
    assert rows.scale.shape == (40, 1)
    replaced = kernels.int8_rows_spec(layer.spec, rows.group)
    assert replaced.format == "int8_tensorwise"
    assert replaced.name == layer.spec.name
    x, bias = torch.randn(5, K), torch.randn(40)
    per_call = kernels.linear(x, layer.spec, layer.tensors, bias, execution="int8")
    assert torch.equal(kernels.linear(x, replaced, rows.tensors(), bias), per_call)


@pytest.mark.parametrize("name", CARRIED)
def test_carrying_over_costs_one_int8_rounding(name, quantised, relative) -> None:
    """Row codes of a rotated Gaussian weight are worth 0.0085: the squared errors add."""
    torch.manual_seed(1)
    layer = quantised(name, torch.randn(64, 1024))
    rows = kernels.to_int8_rows(layer.spec, layer.tensors)
    dense = kernels.dequantize(kernels.int8_rows_spec(layer.spec, rows.group), rows.tensors())
    assert relative(dense, layer.dense) < 0.01


@pytest.mark.parametrize(("name", "options", "group"), OWN_CODES)
def test_own_codes_are_taken_as_they_are(name, options, group, quantised, relative) -> None:
    torch.manual_seed(2)
    layer = quantised(name, torch.randn(40, 128), **options)
    rows = kernels.to_int8_rows(layer.spec, layer.tensors)
    assert rows.group == group
    dense = kernels.dequantize(kernels.int8_rows_spec(layer.spec, rows.group), rows.tensors())
    assert relative(dense, layer.dense) < 1e-6


def test_w4a8_with_a_correction(quantised, relative) -> None:
    torch.manual_seed(3)
    layer = quantised("asym_w4a8_int8", torch.randn(40, 128), codebook=False)
    tensors = {**layer.tensors, "weight_correction": torch.randn(8, 40) * 0.1}
    truth = kernels.dequantize(layer.spec, tensors)
    rows = kernels.to_int8_rows(layer.spec, tensors)
    dense = kernels.dequantize(kernels.int8_rows_spec(layer.spec, rows.group), rows.tensors())
    assert relative(dense, truth) < 0.01
    x = torch.randn(5, 128)
    for execution in ("native", "int8", "exact"):
        assert relative(kernels.linear(x, layer.spec, tensors, execution=execution), x @ truth.t()) < 1e-6


def test_only_the_rows_of_the_model(quantised) -> None:
    layer = quantised("nvfp4", torch.randn(20, 64), padded_rows=12)
    rows = kernels.to_int8_rows(layer.spec, layer.tensors)
    assert rows.qweight.shape == (20, 64)


def test_chunks_do_not_show(quantised, monkeypatch) -> None:
    from quant_loader.kernels.formats import products

    torch.manual_seed(4)
    layer = quantised("nvfp4", torch.randn(300, 64))
    whole = kernels.to_int8_rows(layer.spec, layer.tensors)
    monkeypatch.setattr(products, "MAX_ROWS", 128)
    parts = kernels.to_int8_rows(layer.spec, layer.tensors)
    assert torch.equal(whole.qweight, parts.qweight)
    assert torch.equal(whole.scale, parts.scale)


def test_layers_share_the_operator_of_int8(quantised) -> None:
    layer = quantised("float8_e4m3fn", torch.randn(32, 64))
    replaced = kernels.int8_rows_spec(layer.spec, 64)
    for device in ("rtx3090", "rtx3090-cu12", "cpu-vnni"):
        assert kernels.plan(replaced, kernels.DEVICES[device]).execution == "native"
    assert dataclasses.asdict(layer.spec)["format"] == "float8_e4m3fn"
