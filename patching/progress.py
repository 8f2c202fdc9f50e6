"""The progress of a load, shown on the node, and the place where pressing Cancel takes effect."""

from __future__ import annotations

import comfy.model_management
import comfy.utils


class Progress:
    """Counts steps of a load; each step may raise ComfyUI's interrupt."""

    def __init__(self, total: int) -> None:
        self._bar = comfy.utils.ProgressBar(max(total, 1))

    def step(self) -> None:
        """One layer further."""
        comfy.model_management.throw_exception_if_processing_interrupted()
        self._bar.update(1)

    def finish(self) -> None:
        """All of it, whatever number of steps it took."""
        self._bar.update_absolute(self._bar.total)
