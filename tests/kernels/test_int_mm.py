"""INT8 products on a CPU: the sums are exact integers, by byte products (VNNI) where the CPU has them, else in float32.

The activations are integers of the codes' range with a full-scale entry in every row, so that they are their own codes
(scale 1), and the sums can be compared bit for bit with int64.
"""

from __future__ import annotations

import pytest
import torch
from quant_loader.checkpoint import LayerSpec
from quant_loader.kernels import device_facts, plan
from quant_loader.kernels.formats import products

CPU = torch.device("cpu")
# Shapes as they come: no rows, one, odd ones, more than a chunk of tokens; K and N multiples of nothing.
SHAPES = [
    (0, 64, 32),
    (1, 1, 1),
    (1, 3072, 257),
    (2, 3, 5),
    (16, 17, 257),
    (17, 1000, 5),
    (300, 1025, 129),
    (1100, 64, 3000),
]
PATHS = [
    pytest.param(
        True,
        id="byte products",
        marks=pytest.mark.skipif(not device_facts(CPU).vnni, reason="this CPU has no VNNI; it takes the other path"),
    ),
    pytest.param(False, id="float32 products"),
]


def integers(rows: int, columns: int, kind: str, seed: int) -> torch.Tensor:
    """int64 codes: ``Gaussian``, or ``saturating``: every entry -127 or 127, in runs that sum up."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "Gaussian":
        return (torch.randn(rows, columns, generator=generator) * 40).round().clamp(-127, 127).to(torch.int64)
    signs = torch.randint(0, 2, (rows, 1), generator=generator) * 2 - 1
    return (127 * signs).expand(rows, columns).contiguous()


def the_linear(x: torch.Tensor, codes: torch.Tensor, group: int = 0) -> torch.Tensor:
    N = codes.shape[0]
    one = torch.ones(N, 1)
    return products.int8_linear(x, N, lambda a, b: (codes[a:b].to(torch.int8), one[a:b]), group, None)


@pytest.mark.parametrize("by_bytes", PATHS)
@pytest.mark.parametrize("kind", ["Gaussian", "saturating"])
@pytest.mark.parametrize(("M", "K", "N"), SHAPES)
def test_sums_are_those_of_int64(
    M: int, K: int, N: int, kind: str, by_bytes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    int_mm = torch._int_mm
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: calls.append(len(a)) or int_mm(a, b))
    monkeypatch.setattr(products, "has_int_mm", lambda _: by_bytes)
    x, codes = integers(M, K, kind, 1), integers(N, K, kind, 2)
    x[:, :1] = 127  # full scale: the codes are x itself
    y = the_linear(x.to(torch.float32), codes)
    sums = x @ codes.t()
    assert y.shape == (M, N)
    # Below 2^24 float32 holds every integer. Above, byte products round the sum once, and float32 products once for
    # every 1,024 inputs, by half of 2^-23 of a partial sum each.
    if by_bytes or K * 127 * 127 < 2**24:
        assert torch.equal(y, sums.to(torch.float32))
    else:
        assert ((y.double() - sums.double()).abs() <= -(-K // 1024) * 2.0**-23 * K * 127 * 127).all()
    assert bool(calls) == (by_bytes and M > 0)
    assert sum(calls) in (0, M * len(list(products.row_chunks(N, K, CPU))))


@pytest.mark.parametrize("by_bytes", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_strides_and_leading_dimensions_change_nothing(
    by_bytes: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "has_int_mm", lambda _: by_bytes)
    x = torch.randn(256, 5, 7, generator=torch.Generator().manual_seed(3)).to(dtype)
    codes = integers(33, 256, "Gaussian", 4)
    turned = x.permute(2, 1, 0)  # [7, 5, 256], the last dimension not contiguous
    for group in (0, 64, 256):
        wanted = the_linear(turned.contiguous().reshape(35, 256), codes, group).reshape(7, 5, 33)
        assert torch.equal(the_linear(turned, codes, group), wanted)
        every_second = torch.stack([x, x], -1)[..., 0].permute(2, 1, 0)
        assert torch.equal(the_linear(every_second, codes, group), wanted)


def test_the_plan_says_which_products_run() -> None:
    spec = LayerSpec("layer", "int8_tensorwise", (64, 64))
    operator = plan(spec, device_facts(CPU)).operator
    assert operator == ("torch._int_mm" if device_facts(CPU).vnni else "float32 products of the codes")
