"""Opening a file that is to be mended: as strict as a check, but surplus bytes at the end are allowed and counted."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from ..checkpoint.header import MAX_HEADER, Header, HeaderError, RawFile, Stamp, open_raw, read_open
from .documents import shown
from .errors import Refused, RequestError


class _Clipped(RawFile):
    """The same file as if it ended at ``size``."""

    def __init__(self, inner: RawFile, size: int) -> None:
        self._inner = inner
        self.path = inner.path
        self.stamp = Stamp(size, inner.stamp.mtime_ns, inner.stamp.inode)

    def read_at(self, offset: int, size: int) -> bytes:
        return self._inner.read_at(offset, size)


@contextmanager
def open_source(path: str | os.PathLike[str]) -> Iterator[tuple[RawFile, Header, int]]:
    """The open file, its header, and how many bytes follow its last tensor.

    Raises RequestError when there is no such file, Refused when its header cannot be used.
    """
    name = os.fspath(path)
    try:
        with open_raw(name) as raw:
            header, trailing = _header(raw)
            yield raw, header, trailing
    except HeaderError as error:
        if error.rule in ("extra.file.not_found", "extra.file.special", "extra.file.unreadable"):
            raise RequestError(f"{shown(path)} cannot be opened: {error.detail}.") from error
        where = f"tensor {error.tensor}: " if error.tensor else ""
        raise Refused(f"{shown(path)} cannot be mended: {shown(where + error.detail)}.") from error


def _header(raw: RawFile) -> tuple[Header, int]:
    try:
        return read_open(raw), 0
    except HeaderError as error:
        end = _end_of_data(raw) if error.rule == "crash.file" else None
        if end is None or not 8 < end < raw.stamp.size:
            raise
    header = read_open(_Clipped(raw, end))
    return replace(header, stamp=raw.stamp), raw.stamp.size - end


def _end_of_data(raw: RawFile) -> int | None:
    """Where the last tensor ends by the header's own account; None when the header does not say."""
    length = int.from_bytes(raw.read_at(0, 8), "little") if raw.stamp.size >= 8 else 0
    if not 0 < length <= min(MAX_HEADER, raw.stamp.size - 8):
        return None
    try:
        document = json.loads(raw.read_at(8, length))
        ends = [entry["data_offsets"][1] for name, entry in document.items() if name != "__metadata__"]
    except (ValueError, RecursionError, TypeError, KeyError, IndexError, AttributeError):
        return None
    if not ends or not all(type(end) is int and 0 <= end < 1 << 63 for end in ends):
        return None
    return 8 + length + int(max(ends))
