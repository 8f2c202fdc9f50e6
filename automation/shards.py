"""A checkpoint of several files that is to be mended: which files, under which new names, and its new index."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.files import expand
from ..checkpoint.findings import Findings
from ..checkpoint.words import clean, listing
from .documents import parse_json, read_bytes, shown
from .draft import Part, Piece
from .errors import Refused, RequestError

INDEX_END = ".safetensors.index.json"
_SHARD = re.compile(r"(?P<stem>.+)-[0-9]{5}-of-[0-9]{5}(?P<end>\.(?:safetensors|sft))\Z", re.DOTALL)
_NOT_THERE = frozenset({"extra.file.not_found", "extra.file.special", "extra.file.unreadable"})


@dataclass(frozen=True)
class Source:
    """The files of a checkpoint in order, and the index that goes with them (None: there is none)."""

    paths: tuple[str, ...]
    index: str | None = None
    is_set: bool = False


@dataclass(frozen=True)
class Target:
    """Where each file goes, and the index; in the order of :class:`Source`."""

    paths: tuple[Path, ...]
    index: Path | None = None

    @property
    def all(self) -> tuple[Path, ...]:
        return self.paths if self.index is None else (*self.paths, self.index)


def find_source(given: str | os.PathLike[str]) -> Source:
    """The checkpoint that ``given`` names: one file, any shard of a set, or the set's index.

    Raises RequestError when there is no such file, Refused when the set is incomplete or its index cannot be used.
    """
    name = os.fspath(given)
    shard = _SHARD.match(os.path.basename(name))
    if not name.endswith(INDEX_END) and shard is None:
        return Source((name,))
    if shard is not None and not os.path.lexists(name):
        raise RequestError(f"{shown(given)} cannot be opened: no such file.")
    index: str | None = name
    if shard is not None:
        beside = os.path.join(os.path.dirname(name), shard["stem"] + INDEX_END)
        index = beside if os.path.exists(beside) else None
    findings = Findings()
    paths, _ = expand([index or name], findings)
    if findings.refused:
        faults = findings.faults()
        if faults[0].rule in _NOT_THERE:
            raise RequestError(faults[0].message)
        raise Refused(
            f"{shown(given)} cannot be mended; nothing was written.", tuple(f"{f.message} {f.fix}" for f in faults)
        )
    missing = [os.path.basename(path) for path in paths if not os.path.lexists(path)]
    if missing:
        raise Refused(f"{shown(given)} cannot be mended, since {listing(missing)} is missing; nothing was written.")
    if shard is not None and not any(_same(name, path) for path in paths):
        raise Refused(f"{shown(given)} is not in the index beside it, {shown(os.path.basename(index or ''))}.")
    return Source(tuple(sorted(paths)), index, is_set=len(paths) > 1 or index is not None)


def _same(one: str, other: str) -> bool:
    return os.path.normcase(os.path.abspath(one)) == os.path.normcase(os.path.abspath(other))


def find_target(given: str | os.PathLike[str], source: Source) -> Target:
    """The new names. A set goes into a folder under its old names, or to an index and shards named after it.

    Raises RequestError. Whether anything is in the way is for ``writing.check_target``.
    """
    path = Path(given)
    if not source.is_set:
        return Target((path,))
    try:
        is_folder = path.is_dir()
    except (OSError, ValueError) as error:
        raise RequestError(f"{shown(given)} is no file name: {error}.") from error
    if is_folder:
        names = [os.path.basename(old) for old in source.paths]
        index = os.path.basename(source.index) if source.index is not None else None
        return Target(tuple(path / name for name in names), path / index if index is not None else None)
    if not path.name.endswith(INDEX_END) or path.name == INDEX_END:
        raise RequestError(
            f"The source is a set of {len(source.paths)} files: OUT must be a folder that exists, or a name that ends "
            f"in {INDEX_END}; got {shown(given)}."
        )
    stem, total = path.name[: -len(INDEX_END)], len(source.paths)
    return Target(
        tuple(path.with_name(f"{stem}-{n:05d}-of-{total:05d}.safetensors") for n in range(1, total + 1)), path
    )


def read_index(path: str) -> dict[str, Any]:
    """An index that ``find_source`` has judged: a JSON object with a ``weight_map``."""
    document = parse_json(read_bytes(path), shown(path))
    if not isinstance(document, dict) or not isinstance(document.get("weight_map"), dict):
        raise Refused(f"{shown(path)} changed while it was being read; nothing was written.")
    return document


def misplaced(document: Mapping[str, Any], parts: Sequence[Part]) -> tuple[str, ...]:
    """What the index says wrongly of the shards, in sentences: that is damage, or two releases in one folder."""
    names = {os.path.basename(part.raw.path): part.names for part in parts}
    faults = []
    for tensor, shard in document["weight_map"].items():
        if tensor not in names.get(shard, ()):
            actual = next((f"in {clean(name)}" for name, held in names.items() if tensor in held), "in no shard")
            faults.append(f"The index places tensor {clean(tensor, 160)} in {clean(str(shard))}, but it is {actual}.")
    return tuple(faults)


def index_text(document: Mapping[str, Any], pieces: Mapping[str, Piece], target: Target) -> str:
    """The new index: every tensor with its new file, the total of their bytes, everything else as it was."""
    metadata = document.get("metadata")
    total = sum(piece.nbytes for piece in pieces.values())
    new = {
        **document,
        "metadata": {**(metadata if isinstance(metadata, dict) else {}), "total_size": total},
        "weight_map": {name: target.paths[piece.part].name for name, piece in sorted(pieces.items())},
    }
    return json.dumps(new, indent=2) + "\n"
