"""The values of scales: which tensors are read, what is refused, and that every row is named."""

from __future__ import annotations

import math

import numpy as np
import pytest
from quant_loader.checkpoint import check, dtypes, values

I8 = {"a": {"format": "int8_tensorwise"}}
FP4 = {"a": {"format": "nvfp4"}}
A8 = {"a": {"format": "asym_w4a8_int8", "convrot_groupsize": 256}}
QUANTO = {"a": {"weights": "qint8", "activations": "none"}}


def rows(tools, values, dtype="F32"):
    return b"".join(tools.number(dtype, value) for value in values)


def faults(report):
    return [(fault.rule, fault.tensor) for fault in report.errors]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 3, 7])
def test_non_finite_rows(file, tools, bad, where):
    data = rows(tools, [bad if row == where else 0.01 for row in range(8)])
    report = check(file(tools.layers.int8(weight_scale=("F32", [8, 1], data)), markers=I8))
    assert faults(report) == [("extra.scale.nonfinite", "weight_scale")]
    assert f"row {where};" in report.errors[0].message


@pytest.mark.parametrize("bad", [0.0, -0.0, -1e-30])
def test_zero_and_negative_rows(file, tools, bad):
    data = rows(tools, [0.01, bad] * 4)
    report = check(file(tools.layers.int8(weight_scale=("F32", [8, 1], data)), markers=I8))
    assert faults(report) == [("extra.scale.not_positive", "weight_scale")]
    assert "4 of 8 values zero or negative (rows 1, 3, 5, 7)" in report.errors[0].message


def test_both_kinds_in_one_tensor(file, tools):
    data = rows(tools, [math.nan, 0.0, math.inf, *[0.01] * 5])
    report = check(file(tools.layers.int8(weight_scale=("F32", [8, 1], data)), markers=I8))
    assert [rule for rule, _ in faults(report)] == ["extra.scale.nonfinite", "extra.scale.not_positive"]
    assert "NaN in row 0 and an infinite value in row 2" in report.errors[0].message


READ = {
    "int8 scalar": (lambda L, d: L.int8(weight_scale=("F32", [], d)), I8, 1),
    "w4a4 rows": (lambda L, d: L.w4a4(weight_scale=("F32", [8], d)), {"a": {"format": "convrot_w4a4"}}, 8),
    "w4a8 channel": (lambda L, d: L.w4a8(weight_s_channel=("F32", [8], d)), A8, 8),
    "w4a8 codebook": (lambda L, d: L.w4a8(weight_codebook=("F32", [16], d)), A8, 16),
    "nvfp4 global": (lambda L, d: L.nvfp4(weight_scale_2=("F32", [1], d)), FP4, 1),
    "nvfp4 input": (lambda L, d: L.nvfp4(input_scale=("F32", [], d)), FP4, 1),
    "nvfp4 pre_quant": (lambda L, d: L.nvfp4(pre_quant_scale=("F32", [64], d)), FP4, 64),
    "fp8": (lambda L, d: L.fp8(weight_scale=("F32", [], d)), {"a": {"format": "float8_e4m3fn"}}, 1),
    "fp8 input": (lambda L, d: L.fp8(input_scale=("F32", [], d)), {"a": {"format": "float8_e4m3fn"}}, 1),
    "e5m2": (
        lambda L, d: L.fp8(weight=("F8_E5M2", [16, 32]), weight_scale=("F32", [], d)),
        {"a": {"format": "float8_e5m2"}},
        1,
    ),
}
SIGNED = {"w4a8 codebook", "nvfp4 pre_quant"}


@pytest.mark.parametrize("name", READ)
def test_every_small_scale_is_read(file, tools, name):
    make, markers, count = READ[name]
    good = [0.01] * count
    assert check(file(make(tools.layers, rows(tools, good)), markers=markers)).verdict == "ok"
    for bad, rule in (
        (math.nan, "extra.scale.nonfinite"),
        (-1.0, "extra.scale.not_positive"),
        (0.0, "extra.scale.not_positive"),
    ):
        report = check(file(make(tools.layers, rows(tools, [*good[:-1], bad])), markers=markers))
        allowed = name in SIGNED and not math.isnan(bad)
        assert [fault.rule for fault in report.errors] == ([] if allowed else [rule])


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_quanto_scales(file, tools, dtype):
    data = rows(tools, [0.01] * 7 + [math.nan], dtype)
    tensors = tools.layers.quanto(**{"weight._scale": (dtype, [8, 1], data)})
    report = check(file(tensors, metadata=tools.quanto_metadata(QUANTO)))
    assert faults(report) == [("extra.scale.nonfinite", "weight._scale")]


def test_block_scales_and_weights_are_not_read(file, tools):
    """Only the opt-in deep check looks at them."""
    tensors = tools.layers.nvfp4(
        weight_scale=("F8_E4M3", [128, 4], b"\x7f" * 512), weight=("U8", [128, 32], b"\xff" * 4096)
    )
    assert check(file(tensors, markers=FP4)).verdict == "ok"


@pytest.mark.parametrize(
    ("make", "markers", "limit"),
    [
        (lambda L, d: L.int8(weight_scale=("F32", [], d)), I8, 1000 / 127),
        (lambda L, d: L.nvfp4(weight_scale_2=("F32", [], d)), FP4, 1000 / (6 * 448)),
        (lambda L, d: L.fp8(weight_scale=("F32", [], d)), {"a": {"format": "float8_e4m3fn"}}, 1000 / 448),
    ],
)
def test_implausible_scales_are_a_warning(file, tools, make, markers, limit):
    for factor, warned in ((0.99, False), (1.01, True)):
        report = check(file(make(tools.layers, tools.number("F32", limit * factor)), markers=markers))
        assert report.verdict == "ok"
        assert ("extra.scale.implausible" in {fault.rule for fault in report.faults}) is warned


def test_more_tensors_than_one_buffer_holds(file, tools, monkeypatch):
    monkeypatch.setattr(values, "CHUNK", 64)
    monkeypatch.setattr(values, "BATCH", 64)
    tensors, markers = {}, {}
    for i in range(40):
        data = rows(tools, [math.nan if (i, row) == (33, 5) else 0.01 for row in range(i + 1)])
        tensors |= tools.layers.int8(f"l{i}", n=i + 1, weight_scale=("F32", [i + 1, 1], data))
        markers[f"l{i}"] = I8["a"]
    report = check(file(tensors, markers=markers))
    assert [(fault.layer, fault.rule) for fault in report.errors] == [("l33", "extra.scale.nonfinite")]
    assert "row 5" in report.errors[0].message


@pytest.mark.parametrize(
    ("dtype", "reference"),
    [
        ("F8_E4M3", "float8_e4m3fn"),
        ("F8_E5M2", "float8_e5m2"),
    ],
)
def test_8_bit_floats_decode_as_torch_does(dtype, reference):
    torch = pytest.importorskip("torch")
    codes = bytes(range(256))
    expected = torch.frombuffer(bytearray(codes), dtype=getattr(torch, reference)).float().numpy()
    np.testing.assert_array_equal(dtypes.decode(dtype, codes), expected)


def test_e8m0_decodes_to_powers_of_two():
    decoded = dtypes.decode("F8_E8M0", bytes(range(256)))
    assert np.isnan(decoded[255])
    assert [decoded[126], decoded[127], decoded[128]] == [0.5, 1.0, 2.0]


def test_bf16_decodes_to_the_upper_half_of_f32(tools):
    numbers = [1.0, -2.5, 3.0e38, 1e-38, 0.0]
    decoded = dtypes.decode("BF16", rows(tools, numbers, "BF16"))
    np.testing.assert_allclose(decoded, numbers, rtol=2**-8)
