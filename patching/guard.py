"""Watches quantised layers for outputs that can only mean damage: not finite, or one and the same value everywhere.

Only the first row of each output is looked at: a damaged weight or scale spoils a column of every row. The extremes
stay on the device as tensors and are read once, after the run; ``QUANT_LOADER_GUARDS=0`` turns it off.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable
from typing import Any

import torch

log = logging.getLogger("quant_loader")

ENABLED = os.environ.get("QUANT_LOADER_GUARDS", "1") != "0"


class OutputGuard:
    """Running minimum and maximum of one layer's outputs (NaN spreads through both)."""

    def __init__(self) -> None:
        self.extremes: tuple[torch.Tensor, torch.Tensor] | None = None
        self.reported = False

    def observe(self, y: torch.Tensor) -> None:
        """Take note of an output ``[..., N]``; no synchronisation with the device."""
        if y.numel() == 0 or torch.compiler.is_compiling():
            return
        lowest, highest = torch.aminmax(y.reshape(-1, y.shape[-1])[0])
        if self.extremes is not None and self.extremes[0].device == y.device:
            lowest = torch.minimum(self.extremes[0].to(lowest.dtype), lowest)
            highest = torch.maximum(self.extremes[1].to(highest.dtype), highest)
        self.extremes = (lowest, highest)


def read(modules: Iterable[Any]) -> list[str]:
    """Sentences about the layers that misbehaved since the last read; each layer speaks once. One synchronisation."""
    seen = [(m, m.guard) for m in modules if m.guard.extremes is not None and not m.guard.reported]
    if not seen:
        return []
    # One transfer per device, not one per layer.
    values = [torch.stack([g.extremes[0].float(), g.extremes[1].float()]) for _, g in seen]
    devices = {v.device for v in values}
    by_device = {d: iter(torch.stack([v for v in values if v.device == d]).tolist()) for d in devices}
    sentences: list[str] = []
    for (module, guard), value in zip(seen, values, strict=True):
        lowest, highest = next(by_device[value.device])
        guard.extremes = None
        problem = _problem(lowest, highest, module.out_features)
        if lowest == highest == 0.0 and module.bias is None:
            continue  # what any layer without a bias makes of an input of zeros, such as an empty conditioning
        if problem is None:
            continue
        guard.reported = True
        first = "take the LoRAs off to see whether one of them is the cause; " if module.side_path is not None else ""
        sentences.append(
            f"Layer {module.spec.name} ({module.file_format}) gave {problem}. The picture is not to be trusted: {first}"
            "check the file with 'quant-loader check --deep', and try execution 'exact' to tell a bad file from a bad "
            "kernel."
        )
    for sentence in sentences:
        log.warning("Quant Loader: %s", sentence)
    return sentences


def _problem(lowest: float, highest: float, out_features: int) -> str | None:
    if not (math.isfinite(lowest) and math.isfinite(highest)):
        return "an output that is not finite (NaN or infinity)"
    if lowest == highest and out_features > 1:
        return f"the same value ({lowest:g}) for every output"
    return None
