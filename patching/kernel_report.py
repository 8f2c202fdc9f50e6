"""What would run and what ran: one line a group of layers with the same answer."""

from __future__ import annotations

from collections import Counter
from typing import Any

from .patcher import packed_modules


def plan_lines(patcher: Any) -> list[str]:
    """The kernel that each group of layers will run on the patcher's device, with the reason."""
    groups: Counter[tuple[str, str, str, str]] = Counter()
    for module in packed_modules(patcher.model).values():
        plan = module.operator(patcher.load_device).plan
        groups[(module.spec.format, plan.backend, plan.operator, plan.reason)] += 1
    return [
        f"{count} x {fmt}: {backend} ({operator}): {reason}"
        for (fmt, backend, operator, reason), count in sorted(groups.items())
    ]
