"""What each way of running a format costs in accuracy: the published error bounds, against the unquantised float64
product.

Errors are ``||y - x W^T|| / ||x W^T||`` with N(0, 1) activations (or 1 % of the channels times 20, or Student t with 3
degrees of freedom) and N(0, 1 / K) weights (Student t, 5, for the heavy tails).
"""

from __future__ import annotations

import pytest
from quant_loader import kernels

KINDS = ("gauss", "outlier channels", "heavy tails")

# (format, maker's options, execution) -> bound, by kind where they differ.
BOUNDS = {
    "W8A16 int8 row": ("int8_tensorwise", {}, "exact", (0.03, 0.03, 0.03)),
    "W8A8 row": ("int8_tensorwise", {}, "native", (0.015, None, None)),
    "W8A8 tensor": ("int8_tensorwise", {"rows": False}, "native", (0.018, None, None)),
    "W8A8 ConvRot": ("int8_tensorwise", {"group": 256}, "native", (0.016, 0.016, 0.016)),
    "W4A8 ConvRot": ("convrot_w4a4", {"group": 256}, "int8", (0.18, 0.18, 0.18)),
    "W4A4 ConvRot": ("convrot_w4a4", {"group": 256}, "native", (0.28, 0.28, 0.28)),
    "NVFP4 W4A16": ("nvfp4", {}, "exact", (0.1, 0.1, 0.1)),
    "NVFP4 W4A4": ("nvfp4", {}, "native", (0.14, 0.14, 0.14)),
    "NVFP4 to int8": ("nvfp4", {}, "int8", (0.101, 0.101, 0.101)),
    "FP8 W8A16": ("float8_e4m3fn", {}, "exact", (0.029, 0.029, 0.029)),
    "FP8 W8A8": ("float8_e4m3fn", {}, "native", (0.04, 0.04, 0.04)),
    "FP8 to int8": ("float8_e4m3fn", {}, "int8", (0.033, 0.033, 0.033)),
    "MXFP8 W8A16": ("mxfp8", {}, "exact", (0.029, 0.029, 0.029)),
    "MXFP8 W8A8": ("mxfp8", {}, "native", (0.04, 0.04, 0.04)),
    "MXFP8 to int8": ("mxfp8", {}, "int8", (0.033, 0.033, 0.033)),
    "Quanto W8A16": ("quanto_int8", {}, "native", (0.03, 0.03, 0.03)),
    "Quanto to int8": ("quanto_int8", {}, "int8", (0.03, 0.03, 0.03)),
}

ROWS = {3072: 128, 15360: 64}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("K", ROWS)
def test_error_bounds(K, kind, quantised, sample, relative) -> None:
    M = N = ROWS[K]
    x = sample(kind, M, K, 1, activation=True)
    w = sample(kind, N, K, 2, activation=False)
    truth = x.double() @ w.double().t()
    layers, errors, limits = {}, {}, {}
    for label, (name, options, execution, bounds) in BOUNDS.items():
        bound = bounds[KINDS.index(kind)]
        if bound is None:
            continue
        key = (name, tuple(options.items()))
        layer = layers.setdefault(key, None) or quantised(name, w, **options)
        layers[key] = layer
        errors[label] = relative(kernels.linear(x, layer.spec, layer.tensors, execution=execution), truth)
        limits[label] = bound
    assert {label: e for label, e in errors.items() if e > limits[label]} == {}
    # The arithmetic is really the one named: a path that left the activation alone would be more precise than this.
    assert errors["FP8 W8A8"] > 1.2 * errors["FP8 W8A16"]
    assert errors["MXFP8 W8A8"] > 1.2 * errors["MXFP8 W8A16"]
    assert errors["NVFP4 W4A4"] > 1.2 * errors["NVFP4 W4A16"]
    assert errors["W4A4 ConvRot"] > 1.2 * errors["W4A8 ConvRot"]
    # Carrying over to INT8 beats the format's own arithmetic.
    assert errors["FP8 to int8"] < errors["FP8 W8A8"]
    assert errors["NVFP4 to int8"] < errors["NVFP4 W4A4"]


def test_rotation_is_what_makes_outliers_harmless(quantised, sample, relative) -> None:
    """Why a carried weight is rotated: INT8 rows without ConvRot lose four times as much on outlier channels."""
    x = sample("outlier channels", 128, 3072, 3, activation=True)
    w = sample("outlier channels", 128, 3072, 4, activation=False)
    truth = x.double() @ w.double().t()
    plain, turned = quantised("int8_tensorwise", w), quantised("int8_tensorwise", w, group=256)
    lost = relative(kernels.linear(x, plain.spec, plain.tensors), truth)
    assert lost > 2.5 * relative(kernels.linear(x, turned.spec, turned.tensors), truth)


@pytest.mark.parametrize(("codebook", "bound"), [(True, None), (False, None)])
def test_w4a8_costs_what_its_weights_cost(codebook, bound, quantised, sample, relative) -> None:
    """INT8 activations add little to 4-bit weights: within 5 % of the decoded weight's own error."""
    x = sample("gauss", 128, 3072, 5, activation=True)
    w = sample("gauss", 128, 3072, 6, activation=False)
    layer = quantised("asym_w4a8_int8", w, group=256, codebook=codebook)
    truth = x.double() @ w.double().t()
    weight_only = relative(x.double() @ layer.dense.t(), truth)
    error = relative(kernels.linear(x, layer.spec, layer.tensors), truth)
    assert weight_only < error < 1.05 * weight_only
