"""What a format module provides: one :class:`Format` row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..layer import Layer, Understood


@dataclass(frozen=True)
class Format:
    """A quantisation format of one layer.

    ``required`` and ``optional`` are canonical tensor suffixes; a missing required one is a fault before ``check``
    runs. ``reference`` tells whether the reference inspector checks this format (its rule ids carry no ``extra.``
    then). ``check`` returns what it understood, or None after recording at least one error. ``row_multiple``: writers
    pad the rows of the weight to this multiple, so that the bias may be shorter by less than it.
    """

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    check: Callable[[Layer], Understood | None]
    reference: bool = True
    row_multiple: int = 1
