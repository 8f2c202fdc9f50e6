"""What the kernels need to know of a layer: the plain data that ``checkpoint`` makes, by shape and not by import."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Spec(Protocol):
    """The part of ``checkpoint.report.LayerSpec`` that the maths reads.

    ``shape`` is the logical ``(N, K)`` = (out_features, in_features); ``get(key, default)`` is an annotation of the
    layer.
    """

    @property
    def name(self) -> str: ...
    @property
    def format(self) -> str: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def annotations(self) -> Mapping[str, Any]: ...
    def get(self, key: str, default: Any = None) -> Any: ...


def rotation_group(spec: Spec, *, always: bool) -> int:
    """The layer's ConvRot group size, 0 where its weight is not rotated.

    ``always``: the format is rotated by definition (W4A4, W4A8); otherwise the layer must say ``convrot``.
    """
    if not always and not spec.get("convrot", False):
        return 0
    return int(spec.get("convrot_groupsize", 256))
