"""The file that a repair will write: tensors, metadata, and every change with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..checkpoint.dtypes import BITS, count
from ..checkpoint.header import Header, RawFile, TensorInfo
from ..checkpoint.words import clean

MAX_CHANGED = 256 << 20
"""Most bytes of small tensors that a repair rewrites in memory."""


class Piece(NamedTuple):
    """One tensor of the new file: ``data`` is new content, else the source's bytes ``start`` to ``stop`` are copied."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    data: bytes | None = None

    @property
    def nbytes(self) -> int:
        return self.stop - self.start if self.data is None else len(self.data)

    def info(self, path: str) -> TensorInfo:
        """As the checker knows tensors; offsets of new content are sizes only."""
        if self.data is None:
            return TensorInfo(self.name, self.dtype, self.shape, self.start, self.stop, path)
        return TensorInfo(self.name, self.dtype, self.shape, 0, len(self.data), path)


class Change(NamedTuple):
    """``kind`` is one of the lossless mends (``docs/automation.md``), ``text`` says what was done to what."""

    kind: str
    layer: str | None
    text: str


@dataclass
class Draft:
    """Starts as the source; mends change it. ``raw`` stays open for reading."""

    raw: RawFile
    pieces: dict[str, Piece]
    metadata: dict[str, str]
    changes: list[Change] = field(default_factory=list)
    trailing: int = 0
    rewritten: int = 0

    @classmethod
    def of(cls, raw: RawFile, header: Header, trailing: int) -> Draft:
        pieces = {t.name: Piece(t.name, t.dtype, t.shape, t.start, t.stop) for t in header.tensors.values()}
        return cls(raw, pieces, dict(header.metadata), trailing=trailing)

    def note(self, kind: str, layer: str | None, text: str) -> None:
        self.changes.append(Change(kind, layer, text))

    def bytes_of(self, piece: Piece) -> bytes:
        """The content of a small tensor."""
        return piece.data if piece.data is not None else self.raw.read_at(piece.start, piece.stop - piece.start)

    def put(self, name: str, dtype: str, shape: tuple[int, ...], data: bytes) -> bool:
        """Give a tensor new content; False when that would take more memory than a repair may use."""
        if self.rewritten + len(data) > MAX_CHANGED or len(data) * 8 != count(shape) * BITS[dtype]:
            return False
        self.rewritten += len(data)
        self.pieces[name] = Piece(name, dtype, shape, 0, len(data), data)
        return True

    def relabel(self, name: str, *, dtype: str | None = None, shape: tuple[int, ...] | None = None) -> None:
        """Another dtype or shape for the same bytes."""
        piece = self.pieces[name]
        self.pieces[name] = piece._replace(dtype=dtype or piece.dtype, shape=piece.shape if shape is None else shape)

    def rename(self, old: str, new: str) -> bool:
        """Another name for the same tensor; False when the name is taken."""
        if new in self.pieces:
            return False
        self.pieces[new] = self.pieces.pop(old)._replace(name=new)
        return True

    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: piece.info(self.raw.path) for name, piece in self.pieces.items()}


def typed(dtype: str, shape: tuple[int, ...]) -> str:
    """``F32 (8, 1)`` in a change."""
    return f"{dtype} ({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def tensor_text(name: str) -> str:
    return clean(name, 160)
