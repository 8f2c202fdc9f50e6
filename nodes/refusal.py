"""The queue-time answer of a node whose file must not be loaded."""

from __future__ import annotations

from ..checkpoint import Report, check, verdict_text
from . import files


class Refusal:
    """Text that ComfyUI shows under a refused node.

    ComfyUI writes the answer once for every argument of ``validate_inputs``. The first copy carries everything; the
    others repeat the verdict and the first layer only, so that they do not bury the first.
    """

    def __init__(self, text: str, layer: str | None = None) -> None:
        self.text = text
        self.layer = layer
        self._written = False

    def __str__(self) -> str:
        if not self._written:
            self._written = True
            return self.text
        verdict = self.text.splitlines()[0]
        return f"{verdict}\n(first: {self.layer})" if self.layer else verdict


def refusal(folder: str, name: str, rules: str) -> Refusal | None:
    """None when the file may be loaded under ``rules``; costs a read of the header."""
    path = files.resolve(folder, name)
    if path is None:
        return Refusal(files.not_found(folder, name))
    report: Report = check([path], rules="compatible" if rules == "compatible" else "strict")
    if report.verdict != "refused":
        return None
    first = next((f.layer for f in report.errors if f.layer), None)
    return Refusal(verdict_text(report), first)
