"""Writing a safetensors file as a stream: bounded memory, under another name first, never half a file under the final
name.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
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


def check_target(target: str | os.PathLike[str], source: str | os.PathLike[str], *, overwrite: bool) -> Path:
    """The target as a path. Raises RequestError when nothing can be written there or it is the source itself."""
    path = Path(target)
    try:
        if path.is_dir():
            raise RequestError(f"{shown(target)} is a folder; give the name of the new file.")
        if not path.parent.is_dir():
            raise RequestError(f"There is no folder {shown(path.parent)}; make it first.")
        if path.exists() and os.path.samefile(path, source):
            raise RequestError("The new file must not be the old one: the source is never touched.")
        if not overwrite and os.path.lexists(path):
            raise RequestError(f"{shown(target)} exists already; give another name, or --overwrite.")
    except ValueError as error:
        raise RequestError(f"{shown(target)} is no file name: {error}.") from error
    except OSError as error:
        raise RequestError(f"{shown(target)} cannot be used: {error.strerror or error}.") from error
    if not path.name.lower().endswith((".safetensors", ".sft")):
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
    partial = target.with_name(f".{target.name[:180]}.{os.getpid()}.partial")
    try:
        os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    except OSError as error:
        raise RequestError(f"Nothing can be written to {shown(target.parent)}: {error.strerror or error}.") from error
    try:
        yield partial
    finally:
        partial.unlink(missing_ok=True)


def write_pieces(
    partial: Path, raw: RawFile, pieces: list[Piece], metadata: dict[str, str], progress: Progress | None = None
) -> int:
    """Write the file to ``partial`` and flush it to the disk; returns its size. Raises Refused when the disk or the
    source fails.
    """
    head = header_bytes(pieces, metadata)
    total = len(head) + sum(piece.nbytes for piece in pieces)
    free = shutil.disk_usage(partial.parent).free
    if free < total:
        raise Refused(f"The disk has {_size(free)} left and the new file needs {_size(total)}; free some space first.")
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
        full = " (the disk is full)" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise Refused(f"Writing the new file failed: {error.strerror or error}{full}; nothing was kept.") from error
    except HeaderError as error:
        raise Refused(f"Reading the source failed: {error.detail}; nothing was kept.") from error
    return total


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
