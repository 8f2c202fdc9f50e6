"""LoRA beside a quantised linear: ``y += strength * (alpha / r) * (x A) B``, the codes untouched.

A patch that has a low-rank form is added on the activations. Every other patch of a layer (LoHa, LoKr, DoRA, OFT, a
full difference, a merge with another model) makes *all* patches of that layer run on a dequantised copy for the call,
through ComfyUI's own arithmetic and in the order in which they were added: exact, slower, and named in the report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import comfy.lora
import torch
from comfy.weight_adapter import LoRAAdapter

# ComfyUI's patch tuple: (strength_patch, adapter or tuple, strength_model, offset or None, function or None)
Patch = tuple[float, Any, float, "tuple[int, int, int] | None", Any]


@dataclass(frozen=True)
class LowRank:
    """``y[..., rows] += x[..., cols] @ down.T @ up.T * scale`` with ``down [r, K]``, ``up [N, r]``."""

    up: torch.Tensor
    down: torch.Tensor
    scale: float
    offset: tuple[int, int, int] | None

    @property
    def rank(self) -> int:
        return int(self.down.shape[0])


def low_rank(patch: Patch) -> LowRank | None:
    """The low-rank form of one of ComfyUI's patches, or None when it has none."""
    strength, adapter, strength_model, offset, function = patch
    if strength_model != 1.0 or function is not None or not isinstance(adapter, LoRAAdapter):
        return None
    up, down, alpha, mid, dora_scale, reshape = adapter.weights
    if mid is not None or dora_scale is not None or reshape is not None:
        return None
    up, down = up.flatten(start_dim=1), down.flatten(start_dim=1)
    if up.shape[1] != down.shape[0]:
        return None
    scale = strength * (float(alpha) / down.shape[0] if alpha is not None else 1.0)
    return LowRank(up, down, scale, tuple(offset) if offset is not None else None)  # type: ignore[arg-type]


class SidePath:
    """All patches of one linear, in order.

    ``exact`` says that the layer runs on a dequantised copy; otherwise ``terms`` are added on the activations.
    """

    def __init__(self, key: str, patches: Sequence[Patch]) -> None:
        self.key = key
        self.patches = tuple(patches)
        forms = [low_rank(p) for p in self.patches]
        self.exact = any(form is None for form in forms)
        self.terms: tuple[LowRank, ...] = () if self.exact else tuple(f for f in forms if f is not None and f.scale)
        self._on_device: dict[tuple[torch.device, torch.dtype], tuple[tuple[torch.Tensor, torch.Tensor], ...]] = {}

    def describe(self) -> str:
        """How the patches of this layer are applied, for the report."""
        if self.exact:
            kinds = sorted({_kind(p) for p in self.patches})
            return f"{len(self.patches)} on a dequantised copy ({', '.join(kinds)} has no low-rank form)"
        return f"{len(self.patches)} beside the weight, rank {sum(t.rank for t in self.terms)}"

    def check(self, shape: tuple[int, int]) -> str | None:
        """Why a term does not fit a linear of ``shape`` ``(N, K)``; None when all do."""
        for term in self.terms:
            N, K = shape
            if term.offset is not None:
                dim, _, length = term.offset
                N, K = (length, K) if dim == 0 else (N, length)
            if tuple(term.up.shape[:1]) != (N,) or tuple(term.down.shape[1:]) != (K,):
                found = f"{term.up.shape[0]} x {term.down.shape[1]}"
                return f"the LoRA has {found} for {self.key}, the model's layer is {N} x {K}"
        return None

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """``y`` with every term added. ``x`` is the linear's input before any quantisation or smoothing."""
        for term, (down, up) in zip(self.terms, self._matrices(x.device, x.dtype), strict=True):
            if term.offset is None:
                y = y + torch.nn.functional.linear(torch.nn.functional.linear(x, down), up)
                continue
            dim, start, length = term.offset
            if dim == 0:
                delta = torch.nn.functional.linear(torch.nn.functional.linear(x, down), up)
                y = torch.cat((y[..., :start], y[..., start : start + length] + delta, y[..., start + length :]), -1)
            else:
                part = x[..., start : start + length]
                y = y + torch.nn.functional.linear(torch.nn.functional.linear(part, down), up)
        return y

    def patch(self, weight: torch.Tensor) -> torch.Tensor:
        """ComfyUI's own arithmetic on a dense float32 ``weight`` ``[N, K]``, which this may overwrite."""
        return comfy.lora.calculate_weight(list(self.patches), weight, self.key, intermediate_dtype=torch.float32)

    def _matrices(self, device: torch.device, dtype: torch.dtype) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        cached = self._on_device.get((device, dtype))
        if cached is not None:
            return cached
        made = tuple(
            (
                term.down.to(device=device, dtype=dtype),
                # The scale is folded in while still in float32: strength changes then cost nothing per call.
                (term.up.to(device=device, dtype=torch.float32) * term.scale).to(dtype),
            )
            for term in self.terms
        )
        if not torch.compiler.is_compiling():
            self._on_device[(device, dtype)] = made
        return made

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move the matrices to the device before a run, so that a compiled graph finds them there."""
        self._matrices(device, dtype)


def _kind(patch: Patch) -> str:
    adapter = patch[1]
    if isinstance(adapter, LoRAAdapter):
        if patch[2] != 1.0:
            return "a merge with another model"
        return "DoRA" if adapter.weights[4] is not None else "LoRA with a middle or reshape part"
    name = getattr(adapter, "name", None)
    if name:
        return {"loha": "LoHa", "lokr": "LoKr", "oft": "OFT", "boft": "BOFT", "glora": "GLoRA"}.get(name, str(name))
    if isinstance(adapter, tuple) and len(adapter) == 2 and isinstance(adapter[0], str):
        return f"a '{adapter[0]}' patch"
    return "a merge with another model" if isinstance(adapter, list) else "a full difference"
