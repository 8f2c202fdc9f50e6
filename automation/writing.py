"""Writing safetensors files as a stream: bounded memory, under other names first, never half a checkpoint under the
final names.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ..checkpoint.dtypes import BITS
from ..checkpoint.header import HeaderError, RawFile
from .documents import shown
from .draft import Piece
from .errors import Refused, RequestError

CHUNK = 8 << 20
Progress = Callable[[int, int], None]
"""Called with (bytes written, bytes in all)."""


def check_target(
    target: str | os.PathLike[str],
    sources: Sequence[str | os.PathLike[str]],
    *,
    overwrite: bool,
    ending: str | tuple[str, ...] = (".safetensors", ".sft"),
) -> Path:
    """The target as a path. Raises RequestError when nothing can be written there or it is one of the sources."""
    path = Path(target)
    try:
        if path.is_dir():
            raise RequestError(f"{shown(target)} is a folder; give the name of the new file.")
        if not path.parent.is_dir():
            raise RequestError(f"There is no folder {shown(path.parent)}; make it first.")
        if path.exists() and any(os.path.exists(source) and os.path.samefile(path, source) for source in sources):
            raise RequestError("The new file must not be the old one: the source is never touched.")
        if not overwrite and os.path.lexists(path):
            raise RequestError(f"{shown(target)} exists already; give another name, or --overwrite.")
    except ValueError as error:
        raise RequestError(f"{shown(target)} is no file name: {error}.") from error
    except OSError as error:
        raise RequestError(f"{shown(target)} cannot be used: {error.strerror or error}.") from error
    if not path.name.lower().endswith(ending):
        raise RequestError(f"{shown(target)} must end in .safetensors, else ComfyUI does not list it.")
    return path


def in_file_order(pieces: Iterable[Piece]) -> list[Piece]:
    """Tensors by falling element size, otherwise as they came: every tensor is then aligned, as readers that map the
    file want.
    """
    return sorted(pieces, key=lambda piece: -BITS[piece.dtype])


def header_bytes(pieces: list[Piece], metadata: dict[str, str]) -> bytes:
    """Length and JSON header, padded with spaces to a multiple of 8 bytes."""
    table: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for piece in pieces:
        table[piece.name] = {
            "dtype": piece.dtype,
            "shape": list(piece.shape),
            "data_offsets": [offset, offset + piece.nbytes],
        }
        offset += piece.nbytes
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@contextmanager
def beside(target: Path) -> Iterator[Path]:
    """A new empty file beside ``target``, removed at the end however that comes unless it was renamed."""
    partial = target.with_name(f".{target.name[-180:]}.{os.getpid()}.partial")
    try:
        os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    except OSError as error:
        raise RequestError(f"Nothing can be written to {shown(target.parent)}: {error.strerror or error}.") from error
    try:
        yield partial
    finally:
        partial.unlink(missing_ok=True)


def require_room(folder: Path, total: int) -> None:
    """Raises Refused when the disk has no room for ``total`` bytes."""
    free = shutil.disk_usage(folder).free
    if free < total:
        raise Refused(
            f"The disk has {_size(free)} left and what is to be written needs {_size(total)}; free some space first."
        )


@contextmanager
def in_place(moves: Sequence[tuple[Path, Path]]) -> Iterator[None]:
    """Rename every finished file to its final name. Unless all of that and the block after it succeed, what was
    renamed is removed again and what it replaced put back. Raises Refused when a rename fails.
    """
    kept: list[tuple[Path, Path]] = []
    placed: list[Path] = []
    try:
        for partial, path in moves:
            if os.path.lexists(path):
                old = partial.with_suffix(".old")
                kept.append((old, path))  # noted first: an interrupt may come between any two of these
                os.replace(path, old)
            placed.append(path)
            os.replace(partial, path)
        yield
    except BaseException as error:
        held = {path for old, path in kept if not os.path.lexists(old)}  # never moved away: still what was there
        for path in placed:
            if path not in held:
                path.unlink(missing_ok=True)
        for old, path in kept:
            if path not in held:
                os.replace(old, path)
        if isinstance(error, OSError):
            where = shown(moves[len(placed) - 1][1] if placed else moves[0][1])
            raise Refused(f"{where} could not be put in place: {error.strerror or error}; nothing was kept.") from error
        raise
    for old, _ in kept:
        old.unlink(missing_ok=True)


def write_small(partial: Path, text: str) -> None:
    """Write a small text file and flush it to the disk. Raises Refused when the disk fails."""
    try:
        with partial.open("w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
    except OSError as error:
        raise _failed(error) from error


def write_pieces(
    partial: Path, raw: RawFile, head: bytes, pieces: list[Piece], progress: Progress | None = None
) -> int:
    """Write a file to ``partial`` and flush it to the disk; returns its size. ``head`` is its :func:`header_bytes`.
    Raises Refused when the disk or the source fails.
    """
    total = len(head) + sum(piece.nbytes for piece in pieces)
    try:
        with partial.open("r+b", buffering=0) as out:
            done = _put(out, head)
            for piece in pieces:
                for block in _blocks(raw, piece):
                    done += _put(out, block)
                    if progress is not None:
                        progress(done, total)
            os.fsync(out.fileno())
    except OSError as error:
        raise _failed(error) from error
    except HeaderError as error:
        raise Refused(f"Reading the source failed: {error.detail}; nothing was kept.") from error
    return total


def _failed(error: OSError) -> Refused:
    full = " (the disk is full)" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return Refused(f"Writing the new file failed: {error.strerror or error}{full}; nothing was kept.")


def _put(out: BinaryIO, data: bytes) -> int:
    view = memoryview(data)
    while view:
        view = view[out.write(view) :]
    return len(data)


def _blocks(raw: RawFile, piece: Piece) -> Iterator[bytes]:
    if piece.data is not None:
        yield piece.data
        return
    for start in range(piece.start, piece.stop, CHUNK):
        yield raw.read_at(start, min(CHUNK, piece.stop - start))


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GB" if count >= 1 << 30 else f"{count / (1 << 20):.1f} MB"
