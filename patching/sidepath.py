"""LoRA beside a quantised layer: ``y += strength * (alpha / r) * (x A) B``, the codes untouched.

A patch that has a low-rank form is added on the activations. Every other patch of a layer (LoHa, LoKr, DoRA, OFT, a
full difference, a merge with another model) makes *all* patches of that layer run on a dequantised copy for the call,
through ComfyUI's own arithmetic and in the order in which they were added: exact, slower, and named in the report.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import comfy.lora
import torch
from comfy.weight_adapter import LoRAAdapter, WeightAdapterBase

from .fitting import misfit

# ComfyUI's patch tuple: (strength_patch, adapter or tuple, strength_model, offset or None, function or None)
Patch = tuple[float, Any, float, "tuple[int, int, int] | None", Any]

MERGE = "a merge with another model"
_NAMES = {"loha": "LoHa", "lokr": "LoKr", "oft": "OFT", "boft": "BOFT", "glora": "GLoRA"}


@dataclass(frozen=True)
class LowRank:
    """``y[..., rows] += (x[..., columns] @ down.T) * scale @ up.T`` with ``down [r, K]``, ``up [N, r]``.

    ``offset``: ComfyUI's ``(dim, start, length)`` into a fused weight: rows for dim 0, columns for dim 1.
    """

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
    scale = float(strength) * (float(alpha) / down.shape[0] if alpha is not None else 1.0)
    return LowRank(up, down, scale, (offset[0], offset[1], offset[2]) if offset is not None else None)


def patch_misfit(key: str, patch: Patch, shape: tuple[int, ...]) -> str | None:
    """Why a patch does not fit the weight ``key`` of ``shape`` ``(N, K)``; None when it does."""
    _, adapter, _, offset, _ = patch
    wanted = list(shape)
    if offset is not None:
        dim, start, length = offset[:3]
        if not 0 <= dim < len(wanted) or start < 0 or start + length > wanted[dim]:
            have = wanted[dim] if 0 <= dim < len(wanted) else f"{len(wanted)} dimensions"
            return f"it has a part for {key} at {start} to {start + length}, the model's has {have}"
        wanted[dim] = length
    return misfit(adapter, tuple(wanted), key)


def plain_misfit(key: str, patch: Patch, shape: tuple[int, ...]) -> str | None:
    """:func:`patch_misfit` for a plain weight of any dimensions, which ComfyUI patches: what it would leave out.

    A LoRA's product is reshaped to the weight, so that only rows and the number of values count. Patches that widen the
    weight (``reshape_weight``, padding), kinds with a middle matrix, and differences of convolutions, which ComfyUI
    resizes, are its own to judge.
    """
    _, adapter, _, offset, _ = patch
    if isinstance(adapter, list) or (_names(patch, "diff") and not _pads(adapter)):
        return patch_misfit(key, patch, shape) if len(shape) != 4 else None
    if not isinstance(adapter, LoRAAdapter) or adapter.weights[3] is not None or adapter.weights[5] is not None:
        return None
    if len(shape) == 2 or offset is not None:
        return patch_misfit(key, patch, shape)
    rows = shape[0] if shape else 1
    return misfit(adapter, (rows, math.prod(shape[1:])), key)


def does_nothing(patch: Patch) -> bool:
    """Whether a patch is an addition of strength 0: it then has to change no bit, whatever its kind."""
    strength, adapter, strength_model, _, _ = patch
    if strength != 0.0 or strength_model != 1.0:
        return False
    if isinstance(adapter, tuple):
        # ComfyUI's "set" replaces the weight whatever the strength is, and padding changes its shape.
        return len(adapter) != 2 or (adapter[0] in ("diff", "model_as_lora") and not _pads(adapter))
    if isinstance(adapter, LoRAAdapter):
        return adapter.weights[5] is None
    return isinstance(adapter, (WeightAdapterBase, list))


def _pads(adapter: tuple[Any, Any]) -> bool:
    return len(adapter[1]) > 1 and bool(adapter[1][1].get("pad_weight"))


class SidePath:
    """All patches of one packed weight, in order.

    ``exact`` says that the layer runs on a dequantised copy; otherwise ``terms`` are added on the activations,
    those on the whole weight by the linear itself (in its kernel's epilogue where it has one).
    """

    def __init__(self, key: str, patches: Sequence[Patch]) -> None:
        self.key = key
        self.patches = tuple(patches)
        self.active = tuple(p for p in self.patches if not does_nothing(p))
        forms = [low_rank(p) for p in self.active]
        self.exact = any(form is None for form in forms)
        self.terms: tuple[LowRank, ...] = () if self.exact else tuple(f for f in forms if f is not None)
        self._on_device: dict[tuple[torch.device, torch.dtype], _Matrices] = {}

    def same(self, patches: Sequence[Patch]) -> bool:
        """Whether this side path is the one of ``patches``: equal strengths on the very same matrices."""
        return len(patches) == len(self.patches) and all(
            a is b or (a[0] == b[0] and a[1] is b[1] and a[2:4] == b[2:4] and a[4] is b[4])
            for a, b in zip(self.patches, patches, strict=True)
        )

    def describe(self) -> str:
        """How the patches of this layer are applied, for the report."""
        count = len(self.patches)
        idle = count - len(self.active)
        note = f" ({idle} of strength 0)" if idle else ""
        if self.exact:
            kinds = sorted({kind(p) for p in self.active if low_rank(p) is None})
            verb = "has" if len(kinds) == 1 else "have"
            return f"{count} on a dequantised copy{note}: {', '.join(kinds)} {verb} no low-rank form"
        if not self.terms:
            return f"{count} without effect (strength 0)"
        return f"{count} beside the weight{note}, rank {sum(t.rank for t in self.terms)}"

    def whole(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """``(low_rank [..., R], up [N, R])`` of every term on the whole weight, for the linear to add
        ``low_rank up^T``: one pair of products for all LoRAs together. ``x`` ``[..., K]`` is the linear's own input,
        before any quantisation or smoothing. ``(None, None)`` when there is no such term."""
        joined = self._matrices(x.device, x.dtype).whole
        if joined is None:
            return None, None
        down, up, scale = joined
        # In float32: a strength such as 0.7 is no bfloat16 number.
        return (torch.nn.functional.linear(x, down) * scale).to(x.dtype), up

    def add_parts(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """``y`` ``[..., N]`` with the terms added that go into some rows or columns of a fused weight; ``y`` is written
        to."""
        for term, down, up in self._matrices(x.device, x.dtype).parts:
            assert term.offset is not None
            dim, start, length = term.offset
            part = x if dim == 0 else x[..., start : start + length]
            delta = torch.nn.functional.linear(torch.nn.functional.linear(part, down) * term.scale, up)
            (y[..., start : start + length] if dim == 0 else y).add_(delta)
        return y

    def add_rows(self, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The same for a table lookup: ``rows`` ``[*ids.shape, K]`` of the table ``W + up @ down * scale``."""
        joined = self._matrices(rows.device, rows.dtype).whole
        if joined is None:
            return rows
        down, up, scale = joined
        low_rank = (torch.nn.functional.embedding(ids, up) * scale).to(rows.dtype)
        return rows + torch.nn.functional.linear(low_rank, down.t())

    @property
    def fused(self) -> bool:
        """Whether some term goes into a part of the weight only."""
        return any(term.offset is not None for term in self.terms)

    @property
    def numel(self) -> int:
        """Values of all matrices that are multiplied beside the weight."""
        return sum(term.up.numel() + term.down.numel() for term in self.terms)

    @property
    def held(self) -> bool:
        """Whether the matrices are on a device."""
        return bool(self._on_device)

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        """Put the matrices on ``device`` before the first call."""
        self._matrices(device, dtype)

    def release(self) -> None:
        """Forget the copies on devices; the next call makes them anew."""
        self._on_device.clear()

    def patch(self, weight: torch.Tensor) -> torch.Tensor:
        """ComfyUI's own arithmetic on a dense float32 ``weight`` ``[N, K]``, which this may overwrite."""
        original = None
        if any(_names(p, "model_as_lora") for p in self.active):
            original = {self.key: [(weight.clone(),)]}
        return comfy.lora.calculate_weight(  # type: ignore[no-any-return]
            list(self.active), weight, self.key, intermediate_dtype=torch.float32, original_weights=original
        )

    def _matrices(self, device: torch.device, dtype: torch.dtype) -> _Matrices:
        cached = self._on_device.get((device, dtype))
        if cached is not None:
            return cached
        whole = [term for term in self.terms if term.offset is None]
        parts = [term for term in self.terms if term.offset is not None]

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device=device, dtype=dtype)

        joined = None
        if whole:
            scale = torch.tensor([t.scale for t in whole for _ in range(t.rank)], dtype=torch.float32, device=device)
            joined = (_joined([moved(t.down) for t in whole], 0), _joined([moved(t.up) for t in whole], 1), scale)
        made = _Matrices(joined, tuple((t, moved(t.down), moved(t.up)) for t in parts))
        if not torch.compiler.is_compiling():
            self._on_device[(device, dtype)] = made
        return made


class _Matrices(NamedTuple):
    """Terms on one device: those on the whole weight as one ``(down [R, K], up [N, R], scale float32 [R])``, those on a
    part of it each for itself."""

    whole: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    parts: tuple[tuple[LowRank, torch.Tensor, torch.Tensor], ...]


def _joined(matrices: list[torch.Tensor], dim: int) -> torch.Tensor:
    """One matrix; the very tensor where there is nothing to join."""
    return matrices[0] if len(matrices) == 1 else torch.cat(matrices, dim)


def _names(patch: Patch, kind_of_tuple: str) -> bool:
    adapter = patch[1]
    return isinstance(adapter, tuple) and len(adapter) == 2 and adapter[0] == kind_of_tuple


def kind(patch: Patch) -> str:
    """What a patch is called in the report."""
    adapter = patch[1]
    if isinstance(adapter, list) or patch[2] != 1.0:
        return MERGE
    if isinstance(adapter, LoRAAdapter):
        if adapter.weights[4] is not None:
            return "DoRA"
        if adapter.weights[3] is not None or adapter.weights[5] is not None:
            return "LoRA with a middle or reshaping part"
        return "LoRA"
    name = getattr(adapter, "name", None)
    if name:
        return _NAMES.get(name, str(name))
    if isinstance(adapter, tuple) and len(adapter) == 2 and isinstance(adapter[0], str):
        return f"a '{adapter[0]}' patch"
    return "a full difference"
