"""The formats, one file each; a new format is one file and one row of this table."""

from . import asym_w4a8_int8, convrot_w4a4, float8, int8_tensorwise, mxfp8, nvfp4
from .base import Format

FORMATS: dict[str, Format] = {
    entry.name: entry
    for entry in (
        int8_tensorwise.FORMAT,
        convrot_w4a4.FORMAT,
        asym_w4a8_int8.FORMAT,
        nvfp4.FORMAT,
        float8.E4M3FN,
        float8.E5M2,
        mxfp8.FORMAT,
    )
}
"""Formats a marker or the metadata can name. Quanto declares whole files and is in ``quanto.py``."""

__all__ = ["FORMATS", "Format"]
