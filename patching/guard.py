"""Watches quantised layers for outputs that can only mean damage: not finite, or one and the same value everywhere.

Only the first row of each output is looked at: a damaged weight or scale spoils a column of every row. The extremes
stay on the device as tensors and are read once, after the run; ``QUANT_LOADER_GUARDS=0`` turns it off. What is said of
a layer stands until it has run without fault.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from typing import Any

import torch

log = logging.getLogger("quant_loader")

ENABLED = os.environ.get("QUANT_LOADER_GUARDS", "1") != "0"


class OutputGuard:
    """Running minimum and maximum of one layer's outputs (NaN spreads through both)."""

    def __init__(self) -> None:
        self.extremes: tuple[torch.Tensor, torch.Tensor] | None = None
        self.logged = False

    def observe(self, y: torch.Tensor) -> None:
        """Take note of an output ``[..., N]``; no synchronisation with the device."""
        if y.numel() == 0 or torch.compiler.is_compiling():
            return
        lowest, highest = torch.aminmax(y.reshape(-1, y.shape[-1])[0])
        if self.extremes is not None and self.extremes[0].device == y.device:
            lowest = torch.minimum(self.extremes[0].to(lowest.dtype), lowest)
            highest = torch.maximum(self.extremes[1].to(highest.dtype), highest)
        self.extremes = (lowest, highest)


def read(modules: Mapping[str, Any]) -> dict[str, str]:
    """What the layers that ran since the last read did, by their names in ``modules``: a sentence for each that
    misbehaved, an empty one for each that did not. A layer is logged once. One synchronisation a device.
    """
    seen = [(name, m, m.guard) for name, m in modules.items() if m.guard.extremes is not None]
    if not seen:
        return {}
    # One transfer per device, not one per layer.
    values = [torch.stack([g.extremes[0].float(), g.extremes[1].float()]) for _, _, g in seen]
    devices = {v.device for v in values}
    by_device = {d: iter(torch.stack([v for v in values if v.device == d]).tolist()) for d in devices}
    sentences: dict[str, str] = {}
    for (name, module, guard), value in zip(seen, values, strict=True):
        lowest, highest = next(by_device[value.device])
        guard.extremes = None
        problem = _problem(lowest, highest, module.out_features)
        if lowest == highest == 0.0 and module.bias is None:
            problem = None  # any layer without a bias makes that of an input of zeros, such as an empty conditioning
        if problem is None:
            sentences[name] = ""
            continue
        first = "take the LoRAs off to see whether one of them is the cause; " if module.side_path is not None else ""
        sentences[name] = (
            f"Layer {module.spec.name} ({module.file_format}) gave {problem}. The picture is not to be trusted: {first}"
            "check the file with 'quant-loader check --deep', and try execution 'exact' to tell a bad file from a bad "
            "kernel."
        )
        if not guard.logged:
            log.warning("Quant Loader: %s", sentences[name])
        guard.logged = True
    return sentences


def _problem(lowest: float, highest: float, out_features: int) -> str | None:
    if not (math.isfinite(lowest) and math.isfinite(highest)):
        return "an output that is not finite (NaN or infinity)"
    if lowest == highest and out_features > 1:
        return f"the same value ({lowest:g}) for every output"
    return None
