"""The reference and every execution of `linear` against golden vectors: numbers that another implementation of the
rules made.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from quant_loader import kernels
from quant_loader.checkpoint import LayerSpec

GOLDEN = np.load(Path(__file__).parent / "data" / "golden.npz")

# float32 rounding: the products have up to 512 terms, so two orders of summation differ by a few units of 2^-24 of the
# row's norm.
FLOAT32 = 2e-6


def group_names(prefix: str) -> list[str]:
    return sorted({key.rsplit(":", 1)[0] for key in GOLDEN.files if key.startswith(prefix + "/")})


def get(name: str, tensor: str) -> torch.Tensor:
    return torch.from_numpy(GOLDEN[f"{name}:{tensor}"])


def number(name: str, tensor: str) -> int:
    return int(GOLDEN[f"{name}:{tensor}"])


def relative(y: torch.Tensor, truth: torch.Tensor) -> float:
    return float((y.double() - truth.double()).norm() / truth.double().norm())


def assert_both(x, spec, tensors, bias, truth, execution="native") -> None:
    """The reference and the torch path agree with ``truth``."""
    assert relative(kernels.reference_linear(x, spec, tensors, bias), truth) < FLOAT32
    y = kernels.linear(x, spec, tensors, bias, backend="torch", execution=execution)
    assert y.dtype == x.dtype
    assert y.shape == truth.shape
    assert relative(y, truth) < FLOAT32


@pytest.mark.parametrize("name", group_names("int8"))
def test_int8(name: str) -> None:
    group = number(name, "group")
    annotations = {"convrot": True, "convrot_groupsize": group} if group else {}
    w = get(name, "w")
    spec = LayerSpec("blocks.0.proj", "int8_tensorwise", tuple(w.shape), annotations=annotations)
    tensors = {"weight": w, "weight_scale": get(name, "ws")}
    assert_both(get(name, "x"), spec, tensors, get(name, "b"), get(name, "y"))


@pytest.mark.parametrize("linear_dtype", ["int4", "int8"])
@pytest.mark.parametrize("name", group_names("w4a4"))
def test_w4a4(name: str, linear_dtype: str) -> None:
    q = get(name, "q")
    annotations = {"convrot_groupsize": number(name, "group"), "linear_dtype": linear_dtype}
    spec = LayerSpec("blocks.0.proj", "convrot_w4a4", (q.shape[0], 2 * q.shape[1]), annotations=annotations)
    tensors = {"weight": q, "weight_scale": get(name, "s")}
    truth = get(name, "y" if linear_dtype == "int4" else "y_int8")
    assert_both(get(name, "x"), spec, tensors, get(name, "b"), truth)


@pytest.mark.parametrize("name", group_names("w4a4"))
def test_w4a4_int8_execution_is_the_format_with_int8_activations(name: str) -> None:
    q = get(name, "q")
    annotations = {"convrot_groupsize": number(name, "group"), "linear_dtype": "int4"}
    spec = LayerSpec("blocks.0.proj", "convrot_w4a4", (q.shape[0], 2 * q.shape[1]), annotations=annotations)
    y = kernels.linear(
        get(name, "x"), spec, {"weight": q, "weight_scale": get(name, "s")}, get(name, "b"), execution="int8"
    )
    assert relative(y, get(name, "y_int8")) < FLOAT32


@pytest.mark.parametrize("name", group_names("w4a8"))
def test_w4a8(name: str) -> None:
    q = get(name, "q")
    annotations = {"group_size": number(name, "group"), "convrot": True, "convrot_groupsize": number(name, "rot")}
    tensors = {"weight": q, "weight_s_rel": get(name, "s_rel"), "weight_s_channel": get(name, "s_channel")}
    for optional in ("codebook", "correction"):
        if f"{name}:{optional}" in GOLDEN.files:
            tensors[f"weight_{optional}"] = get(name, optional)
            annotations[f"has_{optional}"] = True
    spec = LayerSpec("blocks.0.proj", "asym_w4a8_int8", (q.shape[0], 2 * q.shape[1]), annotations=annotations)
    assert_both(get(name, "x"), spec, tensors, get(name, "b"), get(name, "y"))
    dense = kernels.dequantize(spec, tensors)
    assert relative(dense, get(name, "dq")) < FLOAT32


@pytest.mark.parametrize("name", group_names("nvfp4"))
def test_nvfp4(name: str) -> None:
    packed = get(name, "packed")
    tensors = {"weight": packed, "weight_scale": get(name, "scale_image"), "weight_scale_2": get(name, "scale2")}
    annotations = {"full_precision_matrix_mult": True}
    spec = LayerSpec("blocks.0.proj", "nvfp4", (packed.shape[0], 2 * packed.shape[1]), annotations=annotations)
    assert relative(kernels.dequantize(spec, tensors), get(name, "dq")) < FLOAT32
    assert_both(get(name, "x"), spec, tensors, None, get(name, "y"), execution="auto")
    smoothed = {**tensors, "pre_quant_scale": get(name, "pre")}
    assert_both(get(name, "x"), spec, smoothed, None, get(name, "y_pre"), execution="auto")


@pytest.mark.parametrize("name", group_names("mxfp8"))
def test_mxfp8_dequantised(name: str) -> None:
    w = get(name, "w")
    spec = LayerSpec("blocks.0.proj", "mxfp8", tuple(w.shape))
    tensors = {"weight": w, "weight_scale": get(name, "scale_image")}
    assert relative(kernels.dequantize(spec, tensors), get(name, "dq")) < FLOAT32
    as_float = {
        "weight": w.view(torch.float8_e4m3fn),
        "weight_scale": get(name, "scale_image").view(torch.float8_e8m0fnu),
    }
    assert torch.equal(kernels.dequantize(spec, as_float), kernels.dequantize(spec, tensors))


def test_every_golden_format_is_used() -> None:
    assert {key.split("/")[0] for key in GOLDEN.files} == {"int8", "w4a4", "w4a8", "nvfp4", "mxfp8"}
