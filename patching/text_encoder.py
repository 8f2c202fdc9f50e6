"""ComfyUI's CLIP with one difference: after an encode, the output guards of its quantised layers are read."""

from __future__ import annotations

from typing import Any

import comfy.sd

_CLIP: Any = comfy.sd.CLIP


class QuantCLIP(_CLIP):  # type: ignore[misc]
    """Encoding has no moment of ComfyUI's that comes after it, so the methods that encode are extended."""

    def clone(self, *args: Any, **kwargs: Any) -> Any:
        return watched(super().clone(*args, **kwargs))

    def encode_from_tokens(self, *args: Any, **kwargs: Any) -> Any:
        out = super().encode_from_tokens(*args, **kwargs)
        self.patcher.read_guards()
        return out

    def encode_from_tokens_scheduled(self, *args: Any, **kwargs: Any) -> Any:
        out = super().encode_from_tokens_scheduled(*args, **kwargs)
        self.patcher.read_guards()
        return out

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        out = super().generate(*args, **kwargs)
        self.patcher.read_guards()
        return out


def watched(clip: Any) -> Any:
    """ComfyUI's ``clip``, turned into one of ours in place; its patcher must be one of ours."""
    clip.__class__ = QuantCLIP
    return clip
