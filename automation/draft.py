"""What a repair will write, one file or a set of shards: tensors, metadata, and every change with its reason."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..checkpoint.declarations import MARKER, MAX_MARKER
from ..checkpoint.dtypes import BITS, count
from ..checkpoint.header import Header, RawFile, TensorInfo
from ..checkpoint.words import clean
from .documents import shown
from .errors import Refused

RENAMED, RESHAPED, WIDENED, RELABELLED = "renamed", "reshaped", "widened", "relabelled"
MARKER_WRITTEN, MARKER_COMPLETED, MARKER_DROPPED = "marker written", "marker completed", "marker dropped"
METADATA_CHANGED, TRAILING_DROPPED, TENSOR_DROPPED = "metadata changed", "trailing bytes dropped", "tensor dropped"
INDEX_COMPLETED = "index completed"

KINDS = (
    *(RENAMED, RESHAPED, WIDENED, RELABELLED),
    *(MARKER_WRITTEN, MARKER_COMPLETED, MARKER_DROPPED),
    *(METADATA_CHANGED, TRAILING_DROPPED, TENSOR_DROPPED, INDEX_COMPLETED),
)
"""What a repair can do, each described in ``docs/automation.md``."""

MAX_CHANGED = 256 << 20
"""Most bytes of small tensors that a repair rewrites in memory."""


class Piece(NamedTuple):
    """One tensor of the new checkpoint: ``data`` is new content, else bytes ``start`` to ``stop`` of the source's file
    number ``part`` are copied. It is written to the new file of the same number.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    data: bytes | None = None
    part: int = 0

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
class Part:
    """One file: the source's, open for reading, the metadata of the new one, and the bytes after its last tensor."""

    raw: RawFile
    metadata: dict[str, str]
    trailing: int
    names: frozenset[str]
    """Of the source's tensors."""


@dataclass
class Draft:
    """Starts as the source; mends change it. The files of ``parts`` stay open for reading."""

    parts: list[Part]
    pieces: dict[str, Piece]
    changes: list[Change] = field(default_factory=list)
    rewritten: int = 0

    @classmethod
    def of(cls, sources: Iterable[tuple[RawFile, Header, int]]) -> Draft:
        """The draft of files as they are. Raises Refused when two of them hold tensors of one name and other content
        than a repeated marker.
        """
        draft = cls([], {})
        for number, (raw, header, trailing) in enumerate(sources):
            draft.parts.append(Part(raw, dict(header.metadata), trailing, frozenset(header.tensors)))
            for t in header.tensors.values():
                piece = Piece(t.name, t.dtype, t.shape, t.start, t.stop, None, number)
                draft.pieces[t.name] = draft._one_of(draft.pieces.get(t.name), piece)
        return draft

    def _one_of(self, first: Piece | None, second: Piece) -> Piece:
        if first is None:
            return second
        repeated = second.name.endswith(MARKER) and first.nbytes == second.nbytes <= MAX_MARKER
        if not repeated or self.bytes_of(first) != self.bytes_of(second):
            places = " and ".join(shown(os.path.basename(self.parts[piece.part].raw.path)) for piece in (first, second))
            raise Refused(f"Tensor {tensor_text(second.name)} is in {places}: which one is meant cannot be known.")
        weight = self.pieces.get(second.name[: -len(MARKER)] + ".weight")
        kept = second if weight is not None and weight.part == second.part else first
        self.note(MARKER_DROPPED, second.name[: -len(MARKER)], f"{tensor_text(second.name)}: repeated in another shard")
        return kept

    @property
    def metadata(self) -> Mapping[str, str]:
        """The metadata of all files, later ones winning, as the checker reads it."""
        return {key: value for part in self.parts for key, value in part.metadata.items()}

    def by_part(self) -> list[list[Piece]]:
        """The tensors of each file."""
        found: list[list[Piece]] = [[] for _ in self.parts]
        for piece in self.pieces.values():
            found[piece.part].append(piece)
        return found

    def note(self, kind: str, layer: str | None, text: str) -> None:
        self.changes.append(Change(kind, layer, text))

    def bytes_of(self, piece: Piece) -> bytes:
        """The content of a small tensor."""
        if piece.data is not None:
            return piece.data
        return self.parts[piece.part].raw.read_at(piece.start, piece.stop - piece.start)

    def put(self, name: str, dtype: str, shape: tuple[int, ...], data: bytes) -> bool:
        """Give a tensor new content; False when that would take more memory than a repair may use."""
        if self.rewritten + len(data) > MAX_CHANGED or len(data) * 8 != count(shape) * BITS[dtype]:
            return False
        self.rewritten += len(data)
        home = self.pieces.get(name) or self.pieces.get(f"{name.rpartition('.')[0]}.weight")
        self.pieces[name] = Piece(name, dtype, shape, 0, len(data), data, home.part if home is not None else 0)
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
        return {name: piece.info(self.parts[piece.part].raw.path) for name, piece in self.pieces.items()}


def typed(dtype: str, shape: tuple[int, ...]) -> str:
    """``F32 (8, 1)`` in a change."""
    return f"{dtype} ({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def tensor_text(name: str) -> str:
    return clean(name, 160)
