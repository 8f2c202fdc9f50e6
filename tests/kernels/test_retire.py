"""A kernel that fails is reported once, retired for the process, and the next one takes over."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch
from quant_loader import kernels
from quant_loader.kernels.formats import int8
from quant_loader.kernels.retire import run


@pytest.fixture
def layer(quantised):
    torch.manual_seed(0)
    return quantised("int8_tensorwise", torch.randn(24, 64))


@pytest.fixture
def pretend(monkeypatch):
    """pretend(kitchen=body, triton=body): an operation planned for a card, its GPU bodies replaced."""

    def build(spec, **bodies):
        for backend, body in bodies.items():
            monkeypatch.setitem(int8.BODIES, backend, body)
        operation = kernels.prepare(spec, kernels.DEVICES["rtx3090"])
        assert operation.plan.backends == "kitchen,triton,torch"
        return operation

    return build


@pytest.fixture
def wide(quantised):
    """A layer whose shape comfy-kitchen's kernel takes."""
    torch.manual_seed(0)
    return quantised("int8_tensorwise", torch.randn(32, 64))


def broken(*_args):
    raise RuntimeError("no kernel image is available for execution on the device\nsecond line")


def test_the_next_kernel_takes_over(wide, pretend, caplog) -> None:
    calls = []

    def works(*args):
        calls.append("triton")
        return int8.torch_int8(*args)

    operation = pretend(wide.spec, kitchen=broken, triton=works)
    x = torch.randn(3, 64)
    truth = kernels.reference_linear(x, wide.spec, wide.tensors)
    with caplog.at_level(logging.WARNING):
        results = [operation(x, wide.tensors) for _ in range(3)]
    for y in results:
        torch.testing.assert_close(y, truth)
    assert calls == ["triton"] * 3
    assert operation.stats == {"triton": 3}
    assert operation.backend == "triton"
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "kitchen" in said[0]
    assert "no kernel image is available" in said[0]
    assert "second line" not in said[0]
    assert kernels.retired() == {
        ("int8_linear (native)", "kitchen"): "RuntimeError: no kernel image is available for execution on the device"
    }


def test_retired_for_every_layer(wide, pretend, quantised) -> None:
    attempts = []

    def failing(*args):
        attempts.append(1)
        broken()

    first = pretend(wide.spec, kitchen=failing, triton=failing)
    first(torch.randn(3, 64), wide.tensors)
    assert first.stats == {"torch": 1}
    other = quantised("int8_tensorwise", torch.randn(32, 64))
    second = kernels.prepare(other.spec, kernels.DEVICES["rtx3090"])
    second(torch.randn(3, 64), other.tensors)
    assert len(attempts) == 2  # each kernel once, then never again
    assert second.stats == {"torch": 1}


def test_the_other_execution_is_not_retired(wide, pretend) -> None:
    operation = pretend(wide.spec, kitchen=broken, triton=broken)
    operation(torch.randn(3, 64), wide.tensors)
    exact = kernels.prepare(wide.spec, kernels.DEVICES["rtx3090"], "exact")
    exact(torch.randn(3, 64), wide.tensors)
    assert exact.stats == {"torch": 1}


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: out of memory")]
)
def test_out_of_memory_is_not_the_kernels_fault(error, wide, pretend) -> None:
    def exhausted(*_args):
        raise error

    operation = pretend(wide.spec, kitchen=exhausted)
    with pytest.raises(type(error), match="out of memory"):
        operation(torch.randn(3, 64), wide.tensors)
    assert kernels.retired() == {}


def test_an_interrupt_is_no_kernel_failure(wide, pretend) -> None:
    def interrupted(*_args):
        raise KeyboardInterrupt

    operation = pretend(wide.spec, kitchen=interrupted)
    with pytest.raises(KeyboardInterrupt):
        operation(torch.randn(3, 64), wide.tensors)
    assert kernels.retired() == {}


def test_the_last_kernel_has_no_successor() -> None:
    with pytest.raises(RuntimeError, match="no kernel image"):
        run("x", "a,torch", {"a": broken, "torch": broken})
    assert kernels.retired() == {("x", "a"): "RuntimeError: no kernel image is available for execution on the device"}


def test_a_named_backend_is_not_replaced() -> None:
    with pytest.raises(RuntimeError, match="no kernel image"):
        run("x", "a", {"a": broken, "torch": lambda: torch.ones(1)})
    assert kernels.retired() == {}


def test_int_mm_that_fails_gives_way_to_float_products(quantised, monkeypatch, caplog) -> None:
    from quant_loader.kernels.formats import products

    layer = quantised("int8_tensorwise", torch.randn(300, 64))
    monkeypatch.setattr(products, "has_int_mm", lambda device: True)
    monkeypatch.setattr(torch, "_int_mm", broken)
    x = torch.randn(3, 64)
    y = kernels.linear(x, layer.spec, layer.tensors, backend="torch")
    torch.testing.assert_close(y, kernels.reference_linear(x, layer.spec, layer.tensors))
    assert ("int_mm", "torch") in kernels.retired()
    assert len(caplog.records) == 1


def test_inside_a_compiled_graph(wide, pretend) -> None:
    operation = pretend(wide.spec, kitchen=broken, triton=int8.torch_int8)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: operation(x, wide.tensors), fullgraph=True, backend="eager")
    x = torch.randn(3, 64)
    torch.testing.assert_close(compiled(x), kernels.reference_linear(x, wide.spec, wide.tensors))
    assert ("int8_linear (native)", "kitchen") in kernels.retired()
    torch._dynamo.reset()


def test_a_plan_does_not_change_when_a_kernel_is_retired(wide, pretend) -> None:
    operation = pretend(wide.spec, kitchen=broken, triton=int8.torch_int8)
    before = dataclasses.asdict(operation.plan)
    operation(torch.randn(3, 64), wide.tensors)
    assert dataclasses.asdict(operation.plan) == before
