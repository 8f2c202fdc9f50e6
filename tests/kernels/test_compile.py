"""torch.compile: one graph per layer and format for several token counts, nothing left behind for eager calls."""

from __future__ import annotations

import pytest
import torch
from quant_loader import kernels

FORMATS = [
    ("int8_tensorwise", {}),
    ("int8_tensorwise", {"group": 16}),
    ("quanto_int8", {}),
    ("convrot_w4a4", {}),
    ("asym_w4a8_int8", {}),
    ("nvfp4", {}),
    ("mxfp8", {}),
    ("float8_e4m3fn", {}),
    ("float8_e5m2", {}),
]


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("execution", ["auto", "native", "int8", "exact"])
@pytest.mark.parametrize(("name", "options"), FORMATS)
def test_fullgraph(name, options, execution, quantised) -> None:
    torch.manual_seed(0)
    layer = quantised(name, torch.randn(24, 64), **options)
    bias = torch.randn(24)
    operation = kernels.prepare(layer.spec, kernels.device_facts("cpu"), execution)
    graphs = 0

    def count(graph, inputs):
        nonlocal graphs
        graphs += 1
        return graph.forward

    def block(x, tensors, bias):
        return torch.nn.functional.silu(operation(x, tensors, bias)) * 2

    x = torch.randn(3, 64)
    before = block(x, layer.tensors, bias)
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=count)
    for tokens in (3, 5, 16, 17):
        x = torch.randn(tokens, 64)
        assert torch.equal(compiled(x, layer.tensors, bias), block(x, layer.tensors, bias))
    assert graphs == 1
    torch.manual_seed(0)
    quantised(name, torch.randn(24, 64), **options)
    torch.randn(24)
    assert torch.equal(block(torch.randn(3, 64), layer.tensors, bias), before)


def test_functionalised(quantised) -> None:
    """Through AOTAutograd, as the default compiler does, on a block of several formats."""
    torch.manual_seed(1)
    first = quantised("convrot_w4a4", torch.randn(64, 64) / 8)
    second = quantised("asym_w4a8_int8", torch.randn(64, 64) / 8)
    third = quantised("nvfp4", torch.randn(64, 64) / 8)
    facts = kernels.device_facts("cpu")
    operations = [kernels.prepare(layer.spec, facts) for layer in (first, second, third)]

    def block(x):
        for operation, layer in zip(operations, (first, second, third), strict=True):
            x = torch.nn.functional.gelu(operation(x, layer.tensors)) + x
        return x

    x = torch.randn(2, 5, 64)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), block(x))


@pytest.mark.parametrize("name", ["int8_tensorwise", "nvfp4"])
def test_a_low_rank_side_path(name, quantised) -> None:
    torch.manual_seed(2)
    layer = quantised(name, torch.randn(24, 64))
    operation = kernels.prepare(layer.spec, kernels.device_facts("cpu"))
    up = torch.randn(24, 4)

    def block(x, down):
        return operation(x, layer.tensors, None, torch.nn.functional.linear(x, down), up)

    x, down = torch.randn(3, 64), torch.randn(4, 64)
    assert torch.equal(torch.compile(block, fullgraph=True, backend="aot_eager")(x, down), block(x, down))


@pytest.mark.parametrize(("name", "options"), FORMATS)
def test_operator_contract(name, options, quantised) -> None:
    """torch's own check of an operator: schema, fake result, no aliasing, dynamic shapes."""
    layer = quantised(name, torch.randn(24, 64), **options)
    # As bytes: torch's check compares tensors before and after, which it cannot do with 8-bit floats.
    tensors = {k: t.view(torch.uint8) if t.dtype.itemsize == 1 else t for k, t in layer.tensors.items()}
    tensors["weight"] = tensors["weight"].view(torch.int8) if "int8" in name else tensors["weight"]
    captured = []

    class Capture(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.namespace == "quant_loader":
                captured.append((function, args))
            return function(*args, **(kwargs or {}))

    with Capture():
        kernels.linear(torch.randn(2, 3, 64), layer.spec, tensors, torch.randn(24), execution="native")
    assert len(captured) == 1
    function, args = captured[0]
    result = torch.library.opcheck(function, args, test_utils=("test_schema", "test_faketensor"))
    assert set(result.values()) == {"SUCCESS"}


def test_counting_stays_outside_graphs(quantised) -> None:
    """``stats`` counts eager calls; the operator itself counts those of compiled graphs."""
    layer = quantised("int8_tensorwise", torch.randn(24, 64))
    operation = kernels.prepare(layer.spec, kernels.device_facts("cpu"))
    operator = ("int8_linear (native)", "torch")
    compiled = torch.compile(lambda x: operation(x, layer.tensors), fullgraph=True, backend="eager")
    before = kernels.calls().get(operator, 0)
    for _ in range(3):
        compiled(torch.randn(2, 64))
    assert operation.stats == {}
    assert kernels.calls()[operator] == before + 3
    operation(torch.randn(2, 64), layer.tensors)
    assert operation.stats == {"torch": 1}
