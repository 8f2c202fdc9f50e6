"""``quant-loader plan``: which kernel would run each layer of a file, here or on a named card, and why."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..checkpoint.report import LayerSpec
from ..checkpoint.words import clean, listing
from .errors import RequestError

if TYPE_CHECKING:
    from ..kernels import DeviceFacts, Mode, Plan


@dataclass(frozen=True)
class PlannedGroup:
    """Layers of one format with the same answer of the dispatcher. ``plan`` is None when ``problem`` says why not."""

    format: str
    layers: tuple[str, ...]
    plan: Plan | None
    problem: str = ""

    def to_dict(self) -> dict[str, Any]:
        plan = self.plan
        document: dict[str, Any] = {"format": self.format, "count": len(self.layers), "layers": list(self.layers)}
        if plan is None:
            return {**document, "problem": self.problem}
        return {
            **document,
            "backend": plan.backend,
            "operator": plan.operator,
            "execution": plan.execution,
            "reason": plan.reason,
            "slow": plan.slow,
            "fallbacks": list(plan.fallbacks),
            "alternatives": [
                {"backend": a.backend, "operator": a.operator, "execution": a.execution, "reason": a.reason}
                for a in plan.alternatives
            ],
        }

    def lines(self, alternatives: int = 3) -> list[str]:
        """For people: what runs, why, and what was passed over."""
        count = len(self.layers)
        title = f"{count} x {self.format}" if count > 1 else f"{self.format} ({clean(self.layers[0])})"
        if self.plan is None:
            return [f"{title}: cannot run", f"    {self.problem}"]
        plan = self.plan
        slow = ", slower here than 16-bit" if plan.slow else ""
        lines = [f"{title}: {plan.execution} on {plan.backend} ({plan.operator}){slow}", f"    {plan.reason}"]
        lines.extend(
            f"    passed over: {other.execution} on {other.backend} ({other.operator}): {other.reason}"
            for other in plan.alternatives[:alternatives]
        )
        return lines


def devices(names: Sequence[str]) -> list[tuple[str, DeviceFacts]]:
    """The devices to plan for: those named, else this machine's. Raises RequestError for an unknown name or without
    PyTorch.
    """
    kernels = load_kernels()
    if not names:
        return here()
    found = []
    for name in names:
        key = re.sub(r"\Asm_?(\d+)\.?(\d)", r"sm_\1\2", name.lower())  # sm86, sm_86 and sm_8.6 are one
        if key not in kernels.DEVICES:
            raise RequestError(f"{clean(name)} is no known device; known are {listing(sorted(kernels.DEVICES), 99)}.")
        found.append((key, kernels.DEVICES[key]))
    return found


def here() -> list[tuple[str, DeviceFacts]]:
    """This machine's devices, the one that ComfyUI would use first."""
    kernels = load_kernels()
    import torch

    if torch.cuda.is_available():
        names = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    elif getattr(torch.backends, "mps", None) is not None and torch.backends.mps.is_available():
        names = ["mps"]
    else:
        names = ["cpu"]
    return [(name, kernels.device_facts(name)) for name in names]


def load_kernels() -> Any:
    """The kernels room, which needs PyTorch. Raises RequestError."""
    try:
        return importlib.import_module("..kernels", __package__)
    except (ImportError, OSError) as error:
        raise RequestError(
            f"This needs PyTorch, which cannot be loaded here ({type(error).__name__}): {clean(str(error))}."
        ) from error


def outlook(layers: Iterable[LayerSpec], facts: DeviceFacts, execution: Mode = "auto") -> list[PlannedGroup]:
    """What would run ``layers`` on a device, grouped by equal answers in the order of the file."""
    kernels = load_kernels()
    groups: dict[tuple[Any, ...], tuple[list[str], Plan | None, str]] = {}
    for layer in layers:
        try:
            plan, problem = kernels.plan(layer, facts, execution), ""
        except ValueError as error:
            plan, problem = None, clean(str(error), 300)
        key = (layer.format, plan, problem if plan is None else "")
        groups.setdefault(key, ([], plan, problem))[0].append(layer.name)
    return [PlannedGroup(key[0], tuple(names), plan, problem) for key, (names, plan, problem) in groups.items()]
