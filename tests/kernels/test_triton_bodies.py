"""The dispatcher's Triton route on this machine: each format through our kernels, run by Triton's interpreter.

Triton reads TRITON_INTERPRET when it is imported, so the ordinary session starts a second one on this file. On a
machine with a GPU the same layers run compiled in tests marked gpu.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from quant_loader import kernels

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
FORMATS = [
    ("int8_tensorwise", {}, "auto"),
    ("int8_tensorwise", {"rows": False}, "auto"),
    ("int8_tensorwise", {"group": 16}, "auto"),
    ("int8_tensorwise", {"group": 256}, "auto"),
    ("convrot_w4a4", {"group": 64}, "auto"),
    ("convrot_w4a4", {"group": 64}, "native"),
    ("asym_w4a8_int8", {"group": 64}, "auto"),
    ("asym_w4a8_int8", {"group": 256, "codebook": False, "group_size": 64}, "auto"),
    ("nvfp4", {}, "int8"),
    ("mxfp8", {}, "int8"),
    ("float8_e4m3fn", {}, "int8"),
    ("float8_e4m3fn", {"rows": True}, "int8"),
    ("float8_e5m2", {}, "int8"),
    ("quanto_int8", {}, "int8"),
]

if not INTERPRETED:

    def test_in_the_interpreter() -> None:
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        environment.pop("PYTEST_ADDOPTS", None)  # the count below needs the summary line
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
        result = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, check=False)
        assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
        assert f"{len(FORMATS) + 9} passed" in result.stdout


@pytest.fixture(params=["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA or ROCm device")
    if INTERPRETED:
        from quant_loader.kernels.formats import int8_rows

        monkeypatch.setattr(int8_rows, "decoders", lambda device: ("triton", "torch"))
    return request.param


def ladder_of_triton(layer, execution):
    operation = kernels.prepare(layer.spec, kernels.DEVICES["rtx3090-cu12"], execution)
    assert operation.plan.backend == "triton"
    return operation


CASES = [(*case, torch.float32) for case in FORMATS] + [
    (*FORMATS[3], dtype) for dtype in (torch.float16, torch.bfloat16)
]


@pytest.mark.parametrize(("name", "options", "execution", "dtype"), CASES)
def test_formats(name, options, execution, dtype, device, quantised, relative) -> None:
    torch.manual_seed(0)
    layer = quantised(name, torch.randn(40, 256) / 16, **options)
    tensors = {key: tensor.to(device) for key, tensor in layer.tensors.items()}
    x, bias = torch.randn(2, 5, 256).to(dtype).to(device), torch.randn(40).to(device)
    operation = ladder_of_triton(layer, execution)
    y = operation(x, tensors, bias)
    assert kernels.retired() == {}
    assert operation.stats == {"triton": 1}
    assert y.dtype == dtype
    truth = kernels.reference_linear(x, layer.spec, tensors, bias, operation.plan.execution)
    # Codes of a fused rotation may differ by one from the reference's; the interpreter truncates bfloat16.
    assert relative(y.cpu(), truth.cpu()) < {torch.float32: 2e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_low_rank_side_path_in_the_epilogue(dtype, device, quantised, relative, monkeypatch) -> None:
    """One launch: the side path is not added after the product. float32 has no fused form and is added after it."""
    from quant_loader.kernels.triton_ops import int8_gemm

    torch.manual_seed(3)
    layer = quantised("int8_tensorwise", torch.randn(40, 256) / 16, group=64)
    tensors = {key: tensor.to(device) for key, tensor in layer.tensors.items()}
    x, bias = torch.randn(2, 5, 256).to(dtype).to(device), torch.randn(40).to(device)
    low_rank, up = torch.randn(2, 5, 24).to(dtype).to(device), torch.randn(40, 24).to(dtype).to(device)
    passed = []
    product = int8_gemm.int8_matmul
    monkeypatch.setattr(int8_gemm, "int8_matmul", lambda *a, **k: passed.append(k["low_rank"]) or product(*a, **k))
    operation = ladder_of_triton(layer, "auto")
    y = operation(x, tensors, bias, low_rank, up)
    assert kernels.retired() == {}
    assert len(passed) == 1
    assert passed[0].shape == (10, 24)
    truth = kernels.reference_linear(x, layer.spec, tensors, bias) + low_rank.float() @ up.float().t()
    assert relative(y.cpu(), truth.cpu()) < {torch.float32: 2e-4, torch.float16: 2e-3}[dtype]


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "float8_e4m3fn"])
def test_exact_decodes_with_our_kernels(name, device, quantised, relative, monkeypatch) -> None:
    torch.manual_seed(1)
    layer = quantised(name, torch.randn(150, 64) / 8)
    tensors = {key: tensor.to(device) for key, tensor in layer.tensors.items()}
    x = torch.randn(5, 64, device=device)
    before = kernels.calls()
    y = kernels.prepare(layer.spec, kernels.DEVICES["rtx3090-cu12"], "exact")(x, tensors)
    assert kernels.retired() == {}
    decoder = (f"{'fp8' if name == 'float8_e4m3fn' else name} decode", "triton")
    assert kernels.calls()[decoder] == before.get(decoder, 0) + 1
    assert relative(y.cpu(), kernels.reference_linear(x, layer.spec, tensors, None, "exact").cpu()) < 1e-6


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8"])
def test_quantisers_for_the_block_scaled_products(name, device, relative) -> None:
    """What our quantiser hands to torch's product is what the reference multiplies."""
    from quant_loader.kernels.formats import codes, quantize, scales
    from quant_loader.kernels.triton_ops import float_quantizer

    torch.manual_seed(2)
    x = torch.randn(33, 128, device=device)
    if name == "nvfp4":
        scale = quantize.nvfp4_scale(x)
        packed, image = float_quantizer.quantize_nvfp4(x, scale)
        values = codes.e2m1_to_float(packed)[:33]
        block_scale = codes.e4m3_to_float(scales.untile(image, 0, 33, 8))
        expected, expected_scale = quantize.nvfp4_values(x, scale)
    else:
        float8, image = float_quantizer.quantize_mxfp8(x)
        values = float8[:33].float()
        block_scale = codes.e8m0_to_float(scales.untile(image, 0, 33, 4))
        expected, expected_scale = quantize.mxfp8_values(x)
    assert torch.equal(block_scale, expected_scale)
    assert relative(values, expected) < 1e-3
