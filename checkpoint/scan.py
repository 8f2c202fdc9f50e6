"""Reading a header as the usual writers write it, with numpy instead of an object for every bracket.

In a header of the usual form every entry reads

    "NAME":{"dtype":"DTYPE","shape":[DIMS],"data_offsets":[BEGIN,END]}

with the keys in this order, no escapes, and either no space at all or one after each colon and comma. Then ten quotes
belong to an entry, their positions say where everything is, and all entries are tested and taken apart at once. Each
byte is accounted for: it belongs to the fixed text (compared), to a name (which may hold anything but quotes, escapes
and control characters), to a storage description (tested once for each distinct one) or to a number. So what is
accepted here means the same to a JSON parser. A text that differs in anything, sound or not, is left to :mod:`.header`,
which parses JSON, tests entry by entry and names what is wrong.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .dtypes import BITS, nbytes

MAX_RANK = 32
_DIGITS = 15
"""Most digits of an offset that is read here: enough for a petabyte, and far from the limit of 64 bits."""
_METADATA = b'{"__metadata__":'
_QUOTES = 10
"""Quotes of an entry: around its name, its three keys and the dtype."""
_STORAGE = re.compile(
    r'(?P<dtype>[A-Z0-9_]{1,16})",(?P<gap> ?)"shape":(?P=gap)\[(?P<dims>|(?:0|[1-9][0-9]{0,19})(?:,(?P=gap)'
    r"(?:0|[1-9][0-9]{0,19}))*)\Z"
)
"""``I8","shape":[4096,4096``: what stands between ``"dtype":"`` and the bracket that closes the shape."""

_Bytes = npt.NDArray[np.uint8]
_Integers = npt.NDArray[np.int64]


class Scanned(NamedTuple):
    """The columns of a sound header: its tensors tile the data area, in any order. Offsets are relative to the area.

    A name may occur twice here.
    """

    names: list[str]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    begins: _Integers
    ends: _Integers
    metadata: dict[str, str]


class _Unusual(Exception):
    """The text is not of the usual form. It may be sound all the same."""


def scan(text: bytes, area: int, max_tensors: int) -> Scanned | None:
    """The header, when ``text`` is of the usual form and tiles a data area of ``area`` bytes."""
    try:
        text = text.rstrip(b" ")
        if text.startswith(_METADATA):
            metadata, text = _metadata(text)
        else:
            metadata, text = {}, text[1:] if text.startswith(b"{") else b""
        return _entries(text, area, max_tensors, metadata)
    except (_Unusual, UnicodeDecodeError):
        return None


def _metadata(text: bytes) -> tuple[dict[str, str], bytes]:
    """The metadata that a header begins with, and the text after it and its comma."""
    decoded = text.decode("utf-8")
    begin = len(_METADATA)
    try:
        value, end = _DECODER.raw_decode(decoded, begin + decoded.startswith(" ", begin))
    except (ValueError, RecursionError):
        raise _Unusual from None
    if type(value) is not dict or any(type(entry) is not str for entry in value.values()):
        raise _Unusual
    if not decoded.startswith(",", end):
        raise _Unusual
    return value, decoded[end + 1 :].removeprefix(" ").encode("utf-8")


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise _Unusual
    return table


_DECODER = json.JSONDecoder(object_pairs_hook=_no_key_twice)


def _entries(text: bytes, area: int, max_tensors: int, metadata: dict[str, str]) -> Scanned:
    data = np.frombuffer(text, np.uint8)
    quotes = np.nonzero(data == ord('"'))[0]
    count, odd = divmod(len(quotes), _QUOTES)
    if odd or not 0 < count <= max_tensors or not text.endswith(b"]}}"):
        raise _Unusual
    if data.min() < ord(" ") or b"\\" in text:
        raise _Unusual
    gap = b" " if text.partition(b'":')[2].startswith(b" ") else b""
    opening, middle = b'":%s{"dtype":%s"' % (gap, gap), b'],%s"data_offsets":%s[' % (gap, gap)
    closing = b"]},%s" % gap
    name = quotes[0::_QUOTES]
    open_at = quotes[1::_QUOTES]
    middle_at = quotes[8::_QUOTES] - middle.index(b'"')
    close_at = np.append(name[1:] - len(closing), len(text) - len(b"]}}"))
    if name[0] != 0:
        raise _Unusual
    _must_read(text, open_at, opening)
    _must_read(text, middle_at, middle)
    _must_read(text, close_at[:-1], closing)
    begins, ends = _offsets(text, middle_at + len(middle), close_at, len(gap))
    cuttable = text.decode("ascii") if text.isascii() else text
    described = _pieces(cuttable, open_at + len(opening), middle_at)
    known = {kind: _storage(kind, gap, area) for kind in set(described)}
    dtypes, shapes, sizes = zip(*[known[kind] for kind in described], strict=True)
    if not (np.array_equal(ends - begins, np.array(sizes, np.int64)) and _tiles(begins, ends, area)):
        raise _Unusual
    return Scanned(_pieces(cuttable, name + 1, open_at), dtypes, shapes, begins, ends, metadata)


def _windows(text: bytes, width: int, at: _Integers) -> npt.NDArray[np.void]:
    """The ``width`` bytes from each of these positions on, as items."""
    every: npt.NDArray[np.void] = np.ndarray((max(len(text) - width + 1, 0),), f"V{width}", text, strides=(1,))
    if at.size and not (at.min() >= 0 and at.max() < len(every)):
        raise _Unusual
    found: npt.NDArray[np.void] = every[at]
    return found


def _must_read(text: bytes, at: _Integers, expected: bytes) -> None:
    if _windows(text, len(expected), at).tobytes() != expected * len(at):
        raise _Unusual


def _pieces(text: str | bytes, begins: _Integers, ends: _Integers) -> list[str]:
    spans = zip(begins.tolist(), ends.tolist(), strict=True)
    if isinstance(text, str):
        return [text[begin:end] for begin, end in spans]
    return [text[begin:end].decode("utf-8") for begin, end in spans]


def _storage(described: str, gap: bytes, area: int) -> tuple[str, tuple[int, ...], int]:
    """dtype, shape and size in bytes of a sound description that fits the data area."""
    found = _STORAGE.match(described)
    if found is None or found["gap"].encode() != gap or found["dtype"] not in BITS:
        raise _Unusual
    shape = tuple(map(int, found["dims"].split(","))) if found["dims"] else ()
    size = nbytes(found["dtype"], shape) if len(shape) <= MAX_RANK else None
    if size is None or size > area:
        raise _Unusual
    return found["dtype"], shape, size


def _offsets(text: bytes, at: _Integers, stop: _Integers, gap: int) -> tuple[_Integers, _Integers]:
    """The two numbers in each ``[at, stop)``, which must hold nothing else but a comma and the usual space."""
    data = np.frombuffer(text, np.uint8)
    commas = np.nonzero(data == ord(","))[0]
    comma = commas[np.minimum(np.searchsorted(commas, at), len(commas) - 1)]
    second = comma + 1 + gap
    length = np.concatenate([comma - at, stop - second])
    width = int(length.max())
    if length.min() < 1 or width > _DIGITS or (gap and (data[comma + 1] != ord(" ")).any()):
        raise _Unusual
    last = np.concatenate([comma, stop])
    if ((data[last - length] == ord("0")) & (length > 1)).any():
        raise _Unusual
    digits = _windows(text, width, last - width).view(np.uint8).reshape(-1, width) - np.uint8(ord("0"))
    digits *= np.ascontiguousarray(np.tri(width + 1, width, -1, dtype=np.uint8)[:, ::-1]).take(length, axis=0)
    if digits.max() > 9:  # what stands before a number was made 0
        raise _Unusual
    numbers = np.zeros(len(last), np.int64)
    for column in np.ascontiguousarray(digits.T):
        numbers *= 10
        numbers += column
    return numbers[: len(at)], numbers[len(at) :]


def _tiles(begins: _Integers, ends: _Integers, area: int) -> bool:
    """Whether the ranges cover ``[0, area)`` without gap or overlap."""
    if (begins[1:] != ends[:-1]).any():
        order = np.lexsort((ends, begins))
        begins, ends = begins[order], ends[order]
    return bool(begins[0] == 0 and ends[-1] == area and (begins[1:] == ends[:-1]).all())
