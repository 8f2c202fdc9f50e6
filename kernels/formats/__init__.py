"""One file per format: its reference maths, its operator and what can run it."""

from __future__ import annotations

from ..spec import Spec
from .base import Format
from .fp8 import Fp8
from .int8 import Int8
from .mxfp8 import Mxfp8
from .nvfp4 import Nvfp4
from .quanto import Quanto
from .w4a4 import W4A4
from .w4a8 import W4A8

#: Every format by the name that layers declare.
FORMATS: dict[str, Format] = {
    fmt.name: fmt
    for fmt in (
        Int8(),
        W4A4(),
        W4A8(),
        Nvfp4(),
        Fp8("float8_e4m3fn", "e4m3"),
        Fp8("float8_e5m2", "e5m2"),
        Mxfp8(),
        Quanto(),
    )
}


def format_of(spec: Spec) -> Format:
    """The format of a layer.

    Raises:
        ValueError: no such format here.
    """
    fmt = FORMATS.get(spec.format)
    if fmt is None:
        raise ValueError(f"layer {spec.name}: unknown format {spec.format!r}; known are {', '.join(sorted(FORMATS))}")
    return fmt
