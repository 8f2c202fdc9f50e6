"""The errors a user can meet while loading or running; each message is a complete sentence with the way out."""

from __future__ import annotations

from ..checkpoint import Report


class QuantLoaderError(RuntimeError):
    """Base of every error this pack raises on purpose."""


class HostError(QuantLoaderError):
    """This ComfyUI or comfy-kitchen lacks something the pack builds on."""


class CheckpointRefused(QuantLoaderError):
    """The check found errors; ``report`` has all of them."""

    def __init__(self, text: str, report: Report) -> None:
        super().__init__(text)
        self.report = report


class ModelMismatch(QuantLoaderError):
    """The file is sound, but the model ComfyUI built from it does not have these layers or these shapes."""
