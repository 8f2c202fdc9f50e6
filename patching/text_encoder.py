"""ComfyUI's CLIP with one difference: after an encode, the output guards of its quantised layers are read.

And which layers an encoder's file may lack: one that ComfyUI always runs, for a result that not every model reads.
"""

from __future__ import annotations

from typing import Any

import comfy.sd
import torch

_CLIP: Any = comfy.sd.CLIP


class QuantCLIP(_CLIP):  # type: ignore[misc]
    """Encoding has no moment of ComfyUI's that comes after it, so the methods that encode are extended."""

    def clone(self, *args: Any, **kwargs: Any) -> Any:
        return _ours(super().clone(*args, **kwargs))

    def encode_from_tokens(self, *args: Any, **kwargs: Any) -> Any:
        out = super().encode_from_tokens(*args, **kwargs)
        self.patcher.read_guards(of_several=True)
        return out

    def encode_from_tokens_scheduled(self, *args: Any, **kwargs: Any) -> Any:
        out = super().encode_from_tokens_scheduled(*args, **kwargs)
        self.patcher.read_guards(of_several=True)
        return out

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        out = super().generate(*args, **kwargs)
        self.patcher.read_guards(of_several=True)
        return out


def watched(clip: Any) -> Any:
    """ComfyUI's ``clip``, turned into one of ours in place; its patcher must be one of ours."""
    excuse(clip.cond_stage_model)
    return _ours(clip)


def _ours(clip: Any) -> Any:
    clip.__class__ = QuantCLIP
    return clip


# CLIP encoders, by the names that ComfyUI gives them, whose pooled projection no model reads, although it is made; but
# for the sets of encoders that these modules of ComfyUI define.
PROJECTION_UNREAD = ("clip_l", "clip_h")
PROJECTION_READ_IN = ("comfy.text_encoders.hidream",)


def excuse(encoders: torch.nn.Module) -> None:
    """Let CLIP encoders whose pooled projection nobody reads run without one.

    CLIP multiplies its pooled output by ``text_projection`` on every call, and files of CLIP-L and CLIP-H for models
    that read the hidden states, or the pooled output as it was, leave the matrix out. What comes out of CLIP-G, and of
    CLIP-L in HiDream, goes into the picture: without the matrix it would be zeros, so there it stays an error.
    """
    read = type(encoders).__module__ in PROJECTION_READ_IN
    for name, encoder in encoders.named_children():
        projection = getattr(getattr(encoder, "transformer", None), "text_projection", None)
        unread = not getattr(encoder, "return_projected_pooled", True) or (name in PROJECTION_UNREAD and not read)
        if unread and projection is not None and hasattr(projection, "lacking"):
            projection.lacking = None
