"""`linear` against the reference over shapes, dtypes, strides and executions."""

from __future__ import annotations

import pytest
import torch
from quant_loader import kernels

# Our output against the reference on the same quantised operands: the bounds of the kernels' specification, section 4.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}

# (N, K): nothing is a multiple of anything unless the format demands it.
WEIRD = {
    "int8_tensorwise": [(5, 123), (1, 1), (33, 1025)],
    "quanto_int8": [(5, 123), (33, 1025)],
    "float8_e4m3fn": [(5, 123), (1, 1), (33, 1025)],
    "float8_e5m2": [(5, 123)],
    "mxfp8": [(5, 96), (130, 160)],
    "nvfp4": [(5, 48), (130, 80)],
    "convrot_w4a4": [(5, 48), (33, 1040)],
    "asym_w4a8_int8": [(5, 48), (33, 1040)],
}
CASES = [(name, shape) for name, shapes in WEIRD.items() for shape in shapes]


def executions(spec) -> list[str]:
    """Those that this layer can really take (a weight that no rotation divides runs exact instead of int8)."""
    return ["auto", "native", "int8", "exact"]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("name", "shape"), CASES)
def test_every_token_count(name, shape, dtype, quantised, relative) -> None:
    N, K = shape
    torch.manual_seed(N * K)
    layer = quantised(name, torch.randn(N, K) / K**0.5)
    bias = torch.randn(N).to(dtype)
    for leading in [(), (0,), (1,), (2,), (16,), (17,), (2, 3), (1, 0, 3)]:
        x = torch.randn(*leading, K).to(dtype)
        for execution in executions(layer.spec):
            chosen = kernels.plan(layer.spec, kernels.device_facts("cpu"), execution)
            y = kernels.linear(x, layer.spec, layer.tensors, bias, execution=execution)
            truth = kernels.reference_linear(x, layer.spec, layer.tensors, bias, chosen.execution)
            assert y.shape == (*leading, N)
            assert y.dtype == dtype
            assert y.is_contiguous()
            if y.numel():
                assert relative(y, truth) <= TOLERANCE[dtype], (leading, execution)


@pytest.mark.parametrize("name", WEIRD)
def test_many_tokens(name, quantised, relative) -> None:
    torch.manual_seed(1)
    layer = quantised(name, torch.randn(24, 256) / 16)
    x = torch.randn(4608, 256)
    for execution in ("native", "int8", "exact"):
        y = kernels.linear(x, layer.spec, layer.tensors, execution=execution)
        chosen = kernels.plan(layer.spec, kernels.device_facts("cpu"), execution)
        assert relative(y, kernels.reference_linear(x, layer.spec, layer.tensors, None, chosen.execution)) <= 1e-6


@pytest.mark.parametrize("name", WEIRD)
def test_more_rows_than_one_chunk(name, quantised, relative, monkeypatch) -> None:
    """A weight decoded in several row chunks, the last of them short, is the weight."""
    from quant_loader.kernels.formats import products

    monkeypatch.setattr(products, "MAX_ROWS", 128)
    torch.manual_seed(2)
    layer = quantised(name, torch.randn(300, 64) / 8)
    x, bias = torch.randn(7, 64), torch.randn(300)
    for execution in ("native", "int8", "exact"):
        y = kernels.linear(x, layer.spec, layer.tensors, bias, execution=execution)
        chosen = kernels.plan(layer.spec, kernels.device_facts("cpu"), execution)
        truth = kernels.reference_linear(x, layer.spec, layer.tensors, bias, chosen.execution)
        assert relative(y, truth) <= 1e-6, execution


@pytest.mark.parametrize("name", WEIRD)
def test_any_strides(name, quantised) -> None:
    torch.manual_seed(3)
    layer = quantised(name, torch.randn(24, 64) / 8)
    wide = torch.randn(64, 2, 9, 3)
    x = wide.permute(2, 3, 1, 0)[:, 1:, 0]
    assert not x.is_contiguous()
    for execution in ("native", "int8", "exact"):
        strided = kernels.linear(x, layer.spec, layer.tensors, execution=execution)
        assert torch.equal(strided, kernels.linear(x.contiguous(), layer.spec, layer.tensors, execution=execution))


@pytest.mark.parametrize("execution", ["native", "int8", "exact"])
@pytest.mark.parametrize("name", WEIRD)
def test_overflow_is_that_of_a_dense_linear(name, execution, quantised) -> None:
    """Results beyond float16 become infinities of the right sign, never wrapped or clamped numbers."""
    torch.manual_seed(4)
    layer = quantised(name, torch.randn(24, 64))
    x = torch.full((3, 64), 6e4, dtype=torch.float16)
    x[1] = 1e-3
    y = kernels.linear(x, layer.spec, layer.tensors, execution=execution)
    truth = kernels.reference_linear(x, layer.spec, layer.tensors, None, execution)
    beyond = truth.abs() > 70000
    assert beyond.any()
    assert torch.equal(y[beyond].float(), torch.copysign(torch.full_like(truth, float("inf")), truth)[beyond])
    assert torch.isfinite(y[truth.abs() < 60000]).all()


@pytest.mark.parametrize("execution", ["native", "int8", "exact"])
@pytest.mark.parametrize("name", WEIRD)
def test_a_row_of_zeros_gives_the_bias(name, execution, quantised) -> None:
    torch.manual_seed(5)
    layer = quantised(name, torch.randn(24, 64))
    bias = torch.randn(24)
    y = kernels.linear(torch.zeros(2, 64), layer.spec, layer.tensors, bias, execution=execution)
    assert torch.equal(y, bias.expand(2, 24))


@pytest.mark.parametrize("execution", ["native", "int8", "exact"])
@pytest.mark.parametrize("name", WEIRD)
def test_nan_in_a_row_stays_in_its_row_and_shows(name, execution, quantised) -> None:
    torch.manual_seed(6)
    layer = quantised(name, torch.randn(24, 64))
    x = torch.randn(3, 64)
    x[1, 5] = float("nan")
    y = kernels.linear(x, layer.spec, layer.tensors, execution=execution)
    assert y[1].isnan().any()
    if not (execution == "native" and layer.spec.format in ("nvfp4", "float8_e4m3fn", "float8_e5m2")):
        assert torch.isfinite(y[[0, 2]]).all()  # the named formats share one activation scale


@pytest.mark.parametrize("name", ["int8_tensorwise", "nvfp4", "mxfp8", "float8_e4m3fn"])
def test_fewer_outputs_than_stored_rows(name, quantised, relative) -> None:
    """A model may have fewer outputs than the padded weight of the file: the first N rows count."""
    torch.manual_seed(7)
    options = {"padded_rows": 6} if name == "nvfp4" else {}
    layer = quantised(name, torch.randn(26, 64) / 8, **options)
    cut = type(layer.spec)(**{**layer.spec.__dict__, "shape": (21, 64)})
    x, bias = torch.randn(5, 64), torch.randn(26)
    for execution in ("native", "int8", "exact"):
        whole = kernels.linear(x, layer.spec, layer.tensors, bias, execution=execution)
        part = kernels.linear(x, cut, layer.tensors, bias[:21], execution=execution)
        assert part.shape == (5, 21)
        assert relative(part, whole[:, :21]) <= 1e-6


def test_inputs_padded_in_the_file(quantised, relative) -> None:
    """An NVFP4 weight whose columns were padded to a block takes the model's own, fewer inputs."""
    torch.manual_seed(8)
    w = torch.randn(16, 64) / 8
    w[:, 57:] = 0
    layer = quantised("nvfp4", w)
    x = torch.randn(5, 57)
    for execution in ("native", "int8", "exact"):
        y = kernels.linear(x, layer.spec, layer.tensors, execution=execution)
        whole = kernels.linear(torch.nn.functional.pad(x, (0, 7)), layer.spec, layer.tensors, execution=execution)
        assert relative(y, whole) <= 1e-6


@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_bias_of_another_dtype(bias_dtype, quantised, relative) -> None:
    torch.manual_seed(9)
    layer = quantised("int8_tensorwise", torch.randn(24, 64))
    x, bias = torch.randn(5, 64, dtype=torch.float16), torch.randn(24, dtype=bias_dtype)
    for execution in ("native", "exact"):
        y = kernels.linear(x, layer.spec, layer.tensors, bias, execution=execution)
        assert y.dtype == torch.float16
        truth = kernels.reference_linear(x, layer.spec, layer.tensors, bias, execution)
        assert relative(y, truth) <= 2e-3


@pytest.mark.parametrize("execution", ["auto", "exact"])
@pytest.mark.parametrize("name", sorted(kernels.FORMATS))
def test_a_low_rank_side_path(name, execution, quantised, relative) -> None:
    """``low_rank up^T`` is added whichever body runs, and nothing of the inputs is written to."""
    torch.manual_seed(6)
    layer = quantised(name, torch.randn(48, 256) / 16)
    x, bias = torch.randn(3, 7, 256), torch.randn(48)
    low_rank, up = torch.randn(3, 7, 5), torch.randn(48, 5)
    copies = [t.clone() for t in (x, bias, low_rank, up)]
    operation = kernels.prepare(layer.spec, kernels.device_facts("cpu"), execution)
    plain = operation(x, layer.tensors, bias)
    y = operation(x, layer.tensors, bias, low_rank, up)
    assert relative(y, plain + low_rank @ up.t()) < 1e-6
    assert all(torch.equal(a, b) for a, b in zip((x, bias, low_rank, up), copies, strict=True))
    assert operation(x[:, :0], layer.tensors, bias, low_rank[:, :0], up).shape == (3, 0, 48)
