"""Quantisers of the tests: the formulas of each format in float64, written apart from the code under test."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from quant_loader.checkpoint import LayerSpec

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@dataclass
class Layer:
    """A quantised layer: its declaration, its tensors as in a file, and the dense weight they stand for (float64,
    unrotated).
    """

    spec: LayerSpec
    tensors: dict[str, torch.Tensor]
    dense: torch.Tensor
    notes: dict[str, Any] = field(default_factory=dict)


def kronecker_hadamard(group: int) -> torch.Tensor:
    """H(group), float64, from its definition."""
    h4 = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], dtype=torch.float64)
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < group:
        h = torch.kron(h, h4)
    return h / group**0.5


def rotated(x: torch.Tensor, group: int) -> torch.Tensor:
    """x H(group) in float64."""
    x = x.double()
    return (x.reshape(-1, group) @ kronecker_hadamard(group)).reshape(x.shape) if group else x


def round_rows(x: torch.Tensor, largest: int) -> tuple[torch.Tensor, torch.Tensor]:
    scale = (x.abs().amax(1, keepdim=True) / largest).clamp(min=1e-30).float()
    return (x / scale.double()).round().clamp(-largest, largest).to(torch.int8), scale


def tile_image(scales: torch.Tensor) -> torch.Tensor:
    """The 128 x 4 image of bytes [R, C], one scale at a time by cuBLAS's formula."""
    rows, columns = scales.shape
    tiles = -(-columns // 4)
    image = torch.zeros(-(-rows // 128) * 128 * tiles * 4, dtype=torch.uint8)
    r, c = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    image[(r // 128 * tiles + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = scales.view(torch.uint8)
    return image.reshape(-1, tiles * 4)


def int8_tensorwise(w: torch.Tensor, group: int = 0, rows: bool = True) -> Layer:
    wr = rotated(w, group)
    if rows:
        q, scale = round_rows(wr, 127)
    else:
        scale = (wr.abs().amax() / 127).float()
        q = (wr / scale.double()).round().clamp(-127, 127).to(torch.int8)
    annotations = {"convrot": True, "convrot_groupsize": group} if group else {}
    spec = LayerSpec("blocks.0.proj", "int8_tensorwise", tuple(w.shape), annotations=annotations)
    return Layer(spec, {"weight": q, "weight_scale": scale}, rotated(q.double() * scale.double(), group))


def quanto_int8(w: torch.Tensor) -> Layer:
    q, scale = round_rows(w.double(), 127)
    spec = LayerSpec("blocks.0.proj", "quanto_int8", tuple(w.shape))
    return Layer(spec, {"weight": q, "weight_scale": scale}, q.double() * scale.double())


def convrot_w4a4(w: torch.Tensor, group: int = 16, linear_dtype: str = "int4") -> Layer:
    q, scale = round_rows(rotated(w, group), 7)
    byte = (q[:, 0::2] & 0x0F) | (q[:, 1::2] << 4)
    annotations = {"convrot_groupsize": group, "linear_dtype": linear_dtype}
    spec = LayerSpec("blocks.0.proj", "convrot_w4a4", tuple(w.shape), annotations=annotations)
    return Layer(spec, {"weight": byte, "weight_scale": scale.reshape(-1)}, rotated(q.double() * scale.double(), group))


def asym_w4a8_int8(w: torch.Tensor, group: int = 16, group_size: int = 16, codebook: bool = True) -> Layer:
    """Group scales relative to the row's, then the nearest of sixteen levels."""
    N, K = w.shape
    wr = rotated(w, group)
    levels = torch.linspace(-8, 7, 16, dtype=torch.float64)
    if codebook:
        normal = torch.distributions.Normal(0.0, 1.0)
        levels = normal.icdf((torch.arange(16, dtype=torch.float64) + 0.5) / 16) * 4
        levels = levels.float().double()
    s_channel = (wr.abs().amax(1) / 127).float().clamp(min=1e-30)
    blocks = wr.reshape(N, -1, group_size)
    s_rel = blocks.abs().amax(2) / levels.abs().max() / s_channel.double()[:, None]
    s_rel = s_rel.clamp(2**-6, 448).float().to(torch.float8_e4m3fn)
    target = blocks / (s_rel.double() * s_channel.double()[:, None])[..., None]
    code = (target[..., None] - levels).abs().argmin(-1).reshape(N, K).to(torch.uint8)
    q8 = (levels[code.long()].reshape(N, -1, group_size) * s_rel.double()[..., None]).round().clamp(-127, 127)
    tensors = {
        "weight": (code[:, 0::2] | (code[:, 1::2] << 4)).view(torch.int8),
        "weight_s_rel": s_rel,
        "weight_s_channel": s_channel,
    }
    if codebook:
        tensors["weight_codebook"] = levels.float()
    annotations = {"group_size": group_size, "convrot": True, "convrot_groupsize": group, "has_codebook": codebook}
    spec = LayerSpec("blocks.0.proj", "asym_w4a8_int8", (N, K), annotations=annotations)
    return Layer(spec, tensors, rotated(q8.reshape(N, K) * s_channel.double()[:, None], group))


def float8(w: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn, rows: bool = False) -> Layer:
    largest = torch.finfo(dtype).max
    amax = w.double().abs().amax(1, keepdim=True) if rows else w.double().abs().amax()
    scale = (amax / largest).float()
    q = (w.double() / scale.double()).clamp(-largest, largest).float().to(dtype)
    name = "float8_e4m3fn" if dtype is torch.float8_e4m3fn else "float8_e5m2"
    spec = LayerSpec("blocks.0.proj", name, tuple(w.shape))
    return Layer(spec, {"weight": q, "weight_scale": scale}, q.double() * scale.double())


def mxfp8(w: torch.Tensor) -> Layer:
    N, K = w.shape
    blocks = w.double().reshape(N, K // 32, 32)
    amax = blocks.abs().amax(2).numpy()
    exponent = np.where(amax == 0, -127, np.ceil(np.log2(np.where(amax == 0, 1, amax) / 448)))
    scale = torch.from_numpy(2.0 ** np.clip(exponent, -126, 127))
    q = (blocks / scale[..., None]).clamp(-448, 448).float().to(torch.float8_e4m3fn)
    byte = torch.from_numpy(np.clip(exponent, -126, 127).astype(np.int64) + 127).to(torch.uint8)
    spec = LayerSpec("blocks.0.proj", "mxfp8", (N, K))
    tensors = {"weight": q.reshape(N, K), "weight_scale": tile_image(byte)}
    return Layer(spec, tensors, (q.double() * scale[..., None]).reshape(N, K), {"scale": scale})


def nvfp4(w: torch.Tensor, padded_rows: int = 0) -> Layer:
    """``padded_rows``: store this many zero rows more than the layer has."""
    N, K = w.shape
    stored = torch.nn.functional.pad(w.double(), (0, 0, 0, padded_rows))
    factor = (w.double().abs().amax() / (448 * 6)).float()
    blocks = stored.reshape(N + padded_rows, K // 16, 16)
    scale = (blocks.abs().amax(2) / 6 / factor.double()).clamp(max=448).float().to(torch.float8_e4m3fn)
    step = (scale.double() * factor.double())[..., None]
    target = torch.where(step == 0, torch.zeros_like(blocks), blocks / torch.where(step == 0, 1.0, step))
    distance = np.abs(np.abs(target.numpy())[..., None] - E2M1)
    code = torch.from_numpy(distance.argmin(-1)).to(torch.uint8)
    value = torch.from_numpy(E2M1)[code.long()] * torch.sign(target)
    code = (code | ((target < 0).to(torch.uint8) << 3)).reshape(N + padded_rows, K)
    tensors = {
        "weight": (code[:, 0::2] << 4) | code[:, 1::2],
        "weight_scale": tile_image(scale).view(torch.float8_e4m3fn),
        "weight_scale_2": factor,
    }
    spec = LayerSpec("blocks.0.proj", "nvfp4", (N, K))
    return Layer(spec, tensors, (value * step).reshape(N + padded_rows, K)[:N])


MAKERS = {
    "int8_tensorwise": int8_tensorwise,
    "quanto_int8": quanto_int8,
    "convrot_w4a4": convrot_w4a4,
    "asym_w4a8_int8": asym_w4a8_int8,
    "float8_e4m3fn": float8,
    "float8_e5m2": lambda w, **options: float8(w, torch.float8_e5m2, **options),
    "mxfp8": mxfp8,
    "nvfp4": nvfp4,
}


@pytest.fixture
def quantised():
    """quantised(format, w, **options) -> Layer."""

    def build(name: str, w: torch.Tensor, **options: Any) -> Layer:
        return MAKERS[name](w, **options)

    return build


@pytest.fixture
def sample():
    """sample(kind, rows, K, seed, activation=...): the three data sets of the published error bounds, float32."""

    def build(kind: str, rows: int, K: int, seed: int, *, activation: bool) -> torch.Tensor:
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(rows, K, generator=g)
        if kind == "outlier channels" and activation:
            x[:, torch.randperm(K, generator=g)[: K // 100]] *= 20
        if kind == "heavy tails":  # Student t with 3 and 5 degrees of freedom
            freedom = 3 if activation else 5
            x /= torch.randn(freedom, rows, K, generator=g).square().mean(0).sqrt()
        return x if activation else x / K**0.5

    return build


@pytest.fixture
def relative():
    """relative(y, truth) = ||y - truth|| / ||truth|| in float64."""

    def measure(y: torch.Tensor, truth: torch.Tensor) -> float:
        return float((y.double() - truth.double()).norm() / truth.double().norm())

    return measure


@pytest.fixture(autouse=True)
def _fresh_record(monkeypatch: pytest.MonkeyPatch):
    """Each test starts with no kernel retired; what a test retires does not reach the next."""
    from quant_loader.kernels import retire

    monkeypatch.setattr(retire, "_retired", {})
