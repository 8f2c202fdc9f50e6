"""One set of tests, two ways to run a kernel.

With TRITON_INTERPRET=1 in the environment the tests run in Triton's interpreter on CPU tensors; test_interpreter.py
starts such a session, since Triton reads the variable at import and the ahead-of-time builds need it unset. In an
ordinary session the same tests are marked gpu.
"""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = ["test_interpreter.py", "test_aot.py", "test_schedules.py"] if INTERPRETED else []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", ["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)])


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA or ROCm device")


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory a kernel forgot to write reads as NaN, or as a code no quantiser emits."""
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        x = empty(*args, **kwargs)
        return x.fill_(float("nan") if x.is_floating_point() else (-128 if x.dtype == torch.int8 else 0xFF))

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture
def large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter a program costs the same whatever its tile, so tests of many rows take many rows a program."""
    if INTERPRETED:
        from quant_loader.kernels.triton_ops import block_decode, float_quantizer, schedules, w4_decode

        monkeypatch.setattr(schedules, "ROW_TILE", 1 << 16)
        for module in (block_decode, float_quantizer, w4_decode):
            monkeypatch.setattr(module, "ROWS", 64)


@pytest.fixture
def hadamard():
    """hadamard(g) = H(g), float64, from its definition: Kronecker powers of H4 over sqrt(g)."""

    def build(group: int) -> torch.Tensor:
        h4 = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], dtype=torch.float64)
        h = torch.ones(1, 1, dtype=torch.float64)
        while h.shape[0] < group:
            h = torch.kron(h, h4)
        return h / group**0.5

    return build


@pytest.fixture
def rotated(hadamard):
    """rotated(x, g): x H(g) per group, float64 on the CPU."""

    def rotate(x: torch.Tensor, group: int) -> torch.Tensor:
        x = x.detach().cpu().double()
        return x if group == 1 else (x.reshape(x.shape[0], -1, group) @ hadamard(group)).reshape(x.shape)

    return rotate


@pytest.fixture
def swizzled():
    """swizzled(scales [R, C] of bytes): the 128x4 image, one scale at a time by the formula in cuBLAS's
    documentation."""

    def build(scales: torch.Tensor) -> torch.Tensor:
        rows, columns = scales.shape
        tiles = -(-columns // 4)
        image = torch.zeros(-(-rows // 128) * 128 * tiles * 4, dtype=torch.uint8)
        r = torch.arange(rows)[:, None]
        c = torch.arange(columns)[None, :]
        image[(r // 128 * tiles + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = scales
        return image.reshape(-1, tiles * 4)

    return build


@pytest.fixture
def weights():
    """weights(kind, rows, K, seed): the data sets of the published error bounds, float32 on the CPU."""

    def build(kind: str, rows: int, K: int, seed: int, *, activation: bool) -> torch.Tensor:
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(rows, K, generator=g)
        if kind == "outlier channels" and activation:
            x[:, torch.randperm(K, generator=g)[: K // 100]] *= 20
        if kind == "heavy tail":  # Student t, 3 and 5 degrees of freedom: a Gaussian over the root of a mean of squares
            freedom = 3 if activation else 5
            x /= torch.randn(freedom, rows, K, generator=g).square().mean(0).sqrt()
        return x if activation else x / K**0.5

    return build
