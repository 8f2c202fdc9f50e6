"""Reading the header of one safetensors file, which is hostile until proved sound.

Layout of the format: 8 bytes little-endian header length, the JSON header, then the data area. Every tensor names its
dtype, shape and byte range in the data area; the ranges must tile the area exactly. All limits here bound time and
memory before any object is built from the file's content; a refusal is a :class:`HeaderError`, never another exception.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple, NoReturn, cast

from .dtypes import BITS
from .scan import MAX_RANK, scan

MAX_HEADER = 16 << 20
"""Largest header we read, in bytes. The largest published checkpoints stay under 1 MB."""
FORMAT_MAX_HEADER = 100_000_000
"""The limit of the safetensors format itself."""
MAX_TENSORS = 50_000
"""More tensors than any checkpoint has (the largest published ones have about 5,000)."""
_NEAR = 4096
"""Bytes that cost less to read and drop than a second read costs."""
_ONE_READ = 1 << 20
MAX_CONTAINERS = 200_000
MAX_COMMAS = 500_000
"""What a header of ``MAX_TENSORS`` tensors needs, counted in the raw text before any object is built from it."""
_MAX_DIM = 1 << 64
_METADATA = "__metadata__"


class TensorInfo(NamedTuple):
    """One tensor of a file: ``start`` and ``stop`` are absolute byte offsets in ``path``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    path: str

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


_tensor = cast(Callable[[tuple[Any, ...]], TensorInfo], partial(tuple.__new__, TensorInfo))
"""As ``TensorInfo._make``, in C: headers have thousands."""


class HeaderError(ValueError):
    """The file cannot be used. ``rule`` is the catalogue's rule id; ``detail`` says what is wrong, in plain words;
    ``trailing``: nothing is wrong but the bytes after the last tensor.
    """

    def __init__(
        self,
        rule: str,
        detail: str,
        *,
        tensor: str | None = None,
        expected: str | None = None,
        trailing: bool = False,
    ) -> None:
        super().__init__(detail)
        self.rule = rule
        self.detail = detail
        self.tensor = tensor
        self.expected = expected
        self.trailing = trailing


@dataclass(frozen=True)
class Stamp:
    """What identifies one state of a file: the cache's key, and the proof that it did not change while it was read."""

    size: int
    mtime_ns: int
    inode: int


@dataclass(frozen=True)
class Header:
    """A sound header."""

    path: str
    stamp: Stamp
    data_start: int
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    duplicates: tuple[str, ...] = field(default=())


_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


class RawFile:
    """Positioned reads from one open regular file."""

    def __init__(self, fd: int, path: str, stamp: Stamp) -> None:
        self._fd = fd
        self.path = path
        self.stamp = stamp

    def read_at(self, offset: int, size: int) -> bytes:
        """Exactly ``size`` bytes at ``offset``; :class:`HeaderError` when the file ends before."""
        try:
            data = _pread(self._fd, size, offset)
            if len(data) != size:
                data = self._read_on(data, offset, size)
        except OSError as error:
            raise HeaderError("crash.file", f"reading it failed: {error.strerror or error}") from error
        if len(data) != size:
            raise HeaderError(
                "crash.file", f"it ended after {offset + len(data)} bytes while {offset + size} were expected"
            )
        return data

    def read_spans(self, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes of every ``(start, stop)``, in this order. Spans close together in the file come from one read."""
        found: list[bytes] = [b""] * len(spans)
        together: list[int] = []
        first, last = 0, -_NEAR
        for number in sorted(range(len(spans)), key=spans.__getitem__):
            start, stop = spans[number]
            if start - last < _NEAR and stop - first <= _ONE_READ:
                together.append(number)
                last = max(last, stop)
                continue
            if together:
                self._cut(first, last, together, spans, found)
            together = [number]
            first, last = start, stop
        if together:
            self._cut(first, last, together, spans, found)
        return found

    def _cut(
        self, first: int, last: int, numbers: list[int], spans: Sequence[tuple[int, int]], found: list[bytes]
    ) -> None:
        data = self.read_at(first, last - first)
        if len(numbers) == 1:
            found[numbers[0]] = data
            return
        for number in numbers:
            start, stop = spans[number]
            found[number] = data[start - first : stop - first]

    def read_into(self, target: memoryview, spans: Iterable[tuple[int, int]]) -> None:
        """Fill ``target`` with the bytes of every ``(start, stop)``; neighbours in the file come from one read."""
        at = first = last = 0
        for start, stop in spans:
            if start != last:
                at += self._fill(target[at : at + last - first], first)
                first = start
            last = stop
        self._fill(target[at : at + last - first], first)

    def _fill(self, target: memoryview, offset: int) -> int:
        size = len(target)
        if size == 0:
            return 0
        try:
            got = _preadv(self._fd, (target,), offset) if _preadv is not None else 0
        except OSError as error:
            raise HeaderError("crash.file", f"reading it failed: {error.strerror or error}") from error
        if got != size:  # no preadv here; or cut short, by a signal or by the end of the file
            target[:] = self.read_at(offset, size)
        return size

    def _read_on(self, data: bytes, offset: int, size: int) -> bytes:
        while 0 < len(data) < size:  # the kernel caps one read at 2 GiB, and a signal may cut it short
            more = _pread(self._fd, size - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data


def _seek_and_read(fd: int, size: int, offset: int) -> bytes:
    os.lseek(fd, offset, os.SEEK_SET)
    return os.read(fd, size)


_pread: Callable[[int, int, int], bytes] = getattr(os, "pread", _seek_and_read)  # Windows has no positioned read
_preadv: Callable[[int, tuple[memoryview, ...], int], int] | None = getattr(os, "preadv", None)


@contextmanager
def open_raw(path: str) -> Iterator[RawFile]:
    """Open a regular file for positioned reads. Never blocks on a pipe or a device."""
    try:
        fd = os.open(path, _OPEN_FLAGS)
    except FileNotFoundError:
        raise HeaderError("extra.file.not_found", "there is no such file") from None
    except IsADirectoryError:
        raise HeaderError("extra.file.special", "it is a folder") from None
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENXIO, errno.ENODEV):
            raise HeaderError("extra.file.special", "it is not a regular file (a pipe, socket or device)") from None
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise HeaderError("extra.file.unreadable", f"opening it failed: {reason}") from error
    try:
        info = os.fstat(fd)
        if stat.S_ISDIR(info.st_mode):
            raise HeaderError("extra.file.special", "it is a folder")
        if not stat.S_ISREG(info.st_mode):
            raise HeaderError("extra.file.special", "it is not a regular file (a pipe, socket or device)")
        yield RawFile(fd, path, Stamp(info.st_size, info.st_mtime_ns, info.st_ino))
    finally:
        os.close(fd)


@contextmanager
def open_again(path: str, stamp: Stamp) -> Iterator[RawFile]:
    """As :func:`open_raw`, for a file that must still be the one whose header was read."""
    with open_raw(path) as raw:
        if raw.stamp != stamp:
            raise HeaderError("extra.file.changed", "its size or date is not what it was a moment ago")
        yield raw


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read and validate the header of one safetensors file.

    Raises :class:`HeaderError` (with the catalogue's rule id) when the file is missing, special, damaged or hostile.
    """
    name = os.fspath(path)
    with open_raw(name) as raw:
        return read_open(raw)


def read_tensor(tensor: TensorInfo) -> bytes:
    """The raw bytes of one tensor, for the small ones a tool needs. Raises :class:`HeaderError` when the file
    changed.
    """
    with open_raw(tensor.path) as raw:
        return raw.read_at(tensor.start, tensor.nbytes)


def _damaged(detail: str, tensor: str | None = None) -> NoReturn:
    raise HeaderError("crash.file", detail, tensor=tensor)


def read_open(raw: RawFile) -> Header:
    """As :func:`read_header`, from an open source: only its ``path``, ``stamp`` and ``read_at`` are used."""
    size = raw.stamp.size
    if size < 8:
        _damaged("it is empty" if size == 0 else f"it is only {size} bytes long")
    length = int.from_bytes(raw.read_at(0, 8), "little")
    start = 8 + length
    if start > size or length > FORMAT_MAX_HEADER:
        _damaged(
            f"it claims a header of {length} bytes in a file of {size} bytes: it is no safetensors file, or a "
            f"download was cut short"
        )
    if length > MAX_HEADER:
        raise HeaderError(
            "extra.file.header_size", f"a header of {length} bytes", expected=f"at most {MAX_HEADER} bytes"
        )
    text = raw.read_at(8, length)
    if length > MAX_CONTAINERS and (
        text.count(b"{") + text.count(b"[") > MAX_CONTAINERS or text.count(b",") > MAX_COMMAS
    ):
        raise HeaderError(
            "extra.file.header_size",
            "a header with far too many entries",
            expected=f"at most {MAX_TENSORS} tensors",
        )
    return _scanned(raw, text, start) or _parsed(raw, text, start)


def _scanned(raw: RawFile, text: bytes, start: int) -> Header | None:
    """The header when its text is of the usual form and sound."""
    found = scan(text, raw.stamp.size - start, MAX_TENSORS)
    if found is None:
        return None
    starts, stops = (found.begins + start).tolist(), (found.ends + start).tolist()
    rows = zip(found.names, found.dtypes, found.shapes, starts, stops, repeat(raw.path))
    tensors = dict(zip(found.names, map(_tensor, rows), strict=True))
    if len(tensors) != len(found.names) or _METADATA in tensors:  # a name occurs twice
        return None
    return Header(raw.path, raw.stamp, start, tensors, found.metadata)


def _parsed(raw: RawFile, text: bytes, start: int) -> Header:
    """The header of any sound text; what is wrong with any other."""
    document = _parse(text)
    if len(document) > MAX_TENSORS:
        raise HeaderError(
            "extra.file.header_size", f"a header of {len(document)} tensors", expected=f"at most {MAX_TENSORS} tensors"
        )
    duplicates: tuple[str, ...] = ()
    metadata = _metadata(document.pop(_METADATA, None))
    if any(text.count(field) != len(document) for field in (b'"dtype"', b'"shape"', b'"data_offsets"')):
        duplicates = _duplicates(text)
    tensors = _tensors(document, start, raw.stamp.size, raw.path)
    return Header(raw.path, raw.stamp, start, tensors, metadata, duplicates)


def _constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def has_big_integer(error: ValueError) -> bool:
    """Whether a JSON error is Python's limit on the digits of an integer (4,300), not bad JSON."""
    return not isinstance(error, (json.JSONDecodeError, UnicodeDecodeError)) and "digits" in str(error)


def _parse(text: bytes) -> dict[str, Any]:
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError as error:
        _damaged(f"the header is not UTF-8 text (byte {error.start})")
    try:
        document = json.loads(decoded, parse_constant=_constant)
    except RecursionError:
        _damaged("the header is nested too deeply")
    except ValueError as error:
        why = "it holds a number with thousands of digits" if has_big_integer(error) else error
        _damaged(f"the header is not JSON ({why})"[:200])
    if not isinstance(document, dict):
        _damaged("the header is not a JSON object")
    if "\\u" in decoded:
        _no_lone_surrogates(document)
    return document


def _no_lone_surrogates(document: dict[str, Any]) -> None:
    """JSON escapes can spell half a surrogate pair, which is no text: such a name could not be printed or stored."""
    try:
        for name in document:
            name.encode("utf-8")
    except UnicodeEncodeError:
        _damaged("a tensor name is not valid text")


def _duplicates(text: bytes) -> tuple[str, ...]:
    """Tensor names that occur twice (JSON keeps the last without a word). A doubled field inside an entry is damage."""
    found: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if len(result) != len(items):
            if "dtype" in result:
                _damaged("an entry of the header has a field twice")
            seen: set[str] = set()
            for key, value in items:
                if key in seen and isinstance(value, dict):
                    found.append(key)
                seen.add(key)
        return result

    try:
        json.loads(text.decode("utf-8"), object_pairs_hook=pairs)
    except RecursionError:  # a hook needs more of the stack than :func:`_parse` did
        _damaged("the header is nested too deeply")
    return tuple(dict.fromkeys(found))


def _metadata(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(entry, str) for entry in value.values()):
        _damaged("the file's metadata is not a table of texts")
    return value


def _tensors(document: dict[str, Any], data_start: int, size: int, path: str) -> dict[str, TensorInfo]:
    area = size - data_start
    bits_of = BITS
    tensors: dict[str, TensorInfo] = {}
    in_order = True
    previous = 0
    for name, entry in document.items():
        try:
            dtype = entry["dtype"]
            shape = entry["shape"]
            begin, end = entry["data_offsets"]
        except (TypeError, KeyError, ValueError, IndexError):
            _damaged("its entry is incomplete (dtype, shape and data_offsets are needed)", name)
        bits = bits_of.get(dtype) if type(dtype) is str else None
        if bits is None:
            _damaged(f"unknown dtype {dtype[:40]!r}" if type(dtype) is str else "its dtype is no text", name)
        if type(shape) is not list or type(begin) is not int or type(end) is not int or len(shape) > MAX_RANK:
            _damaged("its shape or data_offsets are not lists of whole numbers", name)
        elements = 1
        for dim in shape:
            if type(dim) is not int or not 0 <= dim < _MAX_DIM:
                _damaged("its shape is not a list of whole numbers", name)
            elements *= dim
            if elements >= _MAX_DIM:
                _damaged("its shape overflows", name)
        if not 0 <= begin <= end <= area:
            _damaged(
                f"its data lies at bytes {str(begin)[:24]} to {str(end)[:24]} of a data area of {area} bytes: the "
                f"file is cut short or damaged",
                name,
            )
        bits *= elements
        if bits & 7 or bits >> 3 != end - begin:
            _damaged(f"{dtype} {shape} needs {bits / 8:g} bytes, but its data has {end - begin}"[:300], name)
        if begin != previous:
            in_order = False
        previous = end
        tensors[name] = TensorInfo(name, dtype, tuple(shape), data_start + begin, data_start + end, path)
    if not in_order:
        previous = 0
        for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.stop)):
            begin = tensor.start - data_start
            if begin != previous:
                what = "overlaps another tensor" if begin < previous else "leaves a gap"
                _damaged(f"its data {what} at byte {min(begin, previous)}", tensor.name)
            previous = tensor.stop - data_start
    if previous != area:
        raise HeaderError(
            "crash.file",
            f"{area - previous} bytes follow the last tensor: the file is damaged or was written by a broken tool",
            trailing=bool(tensors),
        )
    return tensors
