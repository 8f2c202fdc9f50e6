"""Reading the small files that people hand us: JSON and the JSON inside a PNG, within bounds."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..checkpoint.header import HeaderError, open_raw
from ..checkpoint.words import clean
from .errors import RequestError

MAX_DOCUMENT = 64 << 20
"""Largest workflow we read, in bytes. The largest published ones stay under 2 MB."""

_PNG = b"\x89PNG\r\n\x1a\n"
_MAX_CHUNKS = 100_000


def shown(path: str | os.PathLike[str]) -> str:
    """A path in a message: printable and on one line."""
    return clean(os.fspath(path), 200)


def read_bytes(path: str | os.PathLike[str], limit: int = MAX_DOCUMENT) -> bytes:
    """The content of a regular file of at most ``limit`` bytes. Raises RequestError."""
    try:
        with open_raw(os.fspath(path)) as raw:
            if raw.stamp.size > limit:
                raise RequestError(
                    f"{shown(path)} is too large to be a workflow: {raw.stamp.size} bytes; expected at most {limit}."
                )
            return raw.read_at(0, raw.stamp.size)
    except HeaderError as error:
        raise RequestError(f"{shown(path)} cannot be read: {error.detail}.") from error


def parse_json(text: bytes | str, what: str) -> Any:
    """JSON as ComfyUI writes it (NaN included). ``what`` names the source in the RequestError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise RequestError(f"{what} is nested too deeply to be a workflow.") from None
    except ValueError as error:
        raise RequestError(f"{what} is not JSON: {clean(str(error), 120)}.") from error


def write_text(path: str | os.PathLike[str], text: str, *, overwrite: bool = False) -> None:
    """Write a small text file beside its name and rename it, so that a reader never sees half of it. Raises
    RequestError, also when there is something of this name and ``overwrite`` is not set.
    """
    target = Path(path)
    try:
        if os.path.isdir(target):
            raise RequestError(f"{shown(path)} is a folder; give the name of the new file.")
        if not overwrite and os.path.lexists(target):
            raise RequestError(f"{shown(path)} exists already; give another name, or --overwrite.")
        partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
        try:
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)
    except RequestError:
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise RequestError(f"{shown(path)} cannot be written: {reason}.") from error


def is_png(data: bytes) -> bool:
    return data.startswith(_PNG)


def png_texts(data: bytes, what: str) -> dict[str, bytes]:
    """The text entries of a PNG by keyword (``prompt`` and ``workflow`` in ComfyUI's pictures), UTF-8. Raises
    RequestError.
    """
    texts: dict[str, bytes] = {}
    for kind, body in _chunks(data, what):
        if kind in (b"tEXt", b"zTXt", b"iTXt"):
            entry = _text(kind, body, what)
            if entry is not None:
                texts.setdefault(*entry)
    return texts


def _chunks(data: bytes, what: str) -> Iterator[tuple[bytes, bytes]]:
    position = len(_PNG)
    for _ in range(_MAX_CHUNKS):
        if position + 8 > len(data):
            return
        size = int.from_bytes(data[position : position + 4], "big")
        kind = data[position + 4 : position + 8]
        if position + 12 + size > len(data):
            raise RequestError(f"{what} is a damaged PNG: it ends inside a {clean(kind.decode('latin-1'))} chunk.")
        yield kind, data[position + 8 : position + 8 + size]
        if kind == b"IEND":
            return
        position += 12 + size


def _text(kind: bytes, body: bytes, what: str) -> tuple[str, bytes] | None:
    keyword, found, rest = body.partition(b"\0")
    if not found:
        return None
    name = keyword.decode("latin-1")
    if kind == b"tEXt":
        return name, rest.decode("latin-1").encode("utf-8")
    if kind == b"zTXt":
        return name, _inflate(rest[1:], what).decode("latin-1").encode("utf-8")
    if len(rest) < 2:
        return None
    compressed = rest[0] == 1
    text = rest[2:].split(b"\0", 2)  # language, translated keyword, text
    if len(text) < 3:
        return None
    return name, _inflate(text[2], what) if compressed else text[2]


def _inflate(data: bytes, what: str) -> bytes:
    try:
        engine = zlib.decompressobj()
        text = engine.decompress(data, MAX_DOCUMENT)
    except zlib.error as error:
        raise RequestError(f"{what} is a damaged PNG: its text cannot be unpacked.") from error
    if engine.unconsumed_tail:
        raise RequestError(f"{what} holds a text of more than {MAX_DOCUMENT} bytes.")
    return text
