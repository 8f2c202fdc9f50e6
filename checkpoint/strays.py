"""Scales under names that no format here has (``weight_scale_inv``, ``w13_weight_scale``, ``weight.scale``): whatever
they mean, an 8-bit weight beside them is not the number that its bytes say.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Set

from .dtypes import BITS
from .header import TensorInfo
from .layer import SCALE_SUFFIXES

_ENDS = re.compile(
    r"[._]?(?:weight[._])?(?:scales?|scaling|scale_2|scales?_inv|inv_scales?|absmax|zero_points?|zeros)\Z"
)
_HARMLESS = ("input", "activation", "act_")
"""What a name begins with that scales activations, which are scaled as they come."""
_MAX_NAME = 4096


def suspicious(suffixes: Collection[str]) -> frozenset[str]:
    """Which of these last parts of tensor names are scales by their name, and none that a format here knows."""
    return frozenset(
        suffix
        for suffix in suffixes
        if suffix not in SCALE_SUFFIXES
        and len(suffix) < _MAX_NAME
        and not suffix.startswith(_HARMLESS)
        and _ENDS.search(suffix)
    )


def stray_scales(
    tensors: Mapping[str, TensorInfo], suffixes: Set[str], known: Set[str]
) -> Iterator[tuple[TensorInfo, TensorInfo]]:
    """``(scale, weight)`` of every tensor with one of these last parts, other than ``known``, that belongs to a weight
    of 8 bits or fewer.

    A weight may stand beside its scale, carry the name to which the scale adds its own, or be called ``_blocks``.
    """
    for name, tensor in tensors.items():
        prefix, _, suffix = name.rpartition(".")
        if suffix not in suffixes or name in known:
            continue
        stem = _ENDS.sub("", name)
        for candidate in (f"{stem}.weight", stem, f"{stem}_weight", f"{stem}_blocks", f"{prefix}.weight", prefix):
            weight = tensors.get(candidate)
            if weight is not None and BITS[weight.dtype] <= 8 and weight.dtype != "BOOL":
                yield tensor, weight
                break
