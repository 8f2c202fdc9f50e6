"""From the paths a user gives to the files of one checkpoint: single files, shard sets by name, shard indices."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .catalogue import CUT_TRAILING
from .findings import Findings
from .header import MAX_HEADER, Header, HeaderError, Stamp, TensorInfo, open_raw, read_header
from .words import clean, listing, show

MAX_SHARDS = 2000
_SHARD = re.compile(r"(?P<stem>.*?)-(?P<number>[0-9]{5})-of-(?P<total>[0-9]{5})(?P<ext>\.[^.]+)\Z", re.DOTALL)
_PICKLE_EXT = (".ckpt", ".pt", ".pth", ".pkl", ".pickle", ".bin")
_INDEX_END = ".index.json"
_PICKLE_MAGIC = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


@dataclass
class Checkpoint:
    """The sound files of one checkpoint.

    ``tensors`` maps a name to its (last) definition; ``order`` holds each file's tensors on their own. A tensor's file
    is its ``path``.
    """

    paths: tuple[str, ...]
    headers: list[Header] = field(default_factory=list)
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    index_stamps: dict[str, Stamp] = field(default_factory=dict)

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of all files, later ones winning."""
        merged: dict[str, str] = {}
        for header in self.headers:
            merged.update(header.metadata)
        return merged


def as_paths(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[str]:
    """One path or several, as text."""
    if isinstance(paths, (str, os.PathLike)):
        return [os.fspath(paths)]
    return [os.fspath(path) for path in paths]


@dataclass(frozen=True)
class Index:
    """A shard index: tensor -> path of the shard that should hold it."""

    placed: dict[str, str]
    stamp: Stamp


def expand(given: list[str], findings: Findings) -> tuple[list[str], dict[str, Index]]:
    """The files to read, in order, and the shard indices among the given paths.

    An index stands for its shards; a shard's name stands for the whole set in its folder. What is missing, doubled or
    unusable becomes a fault.
    """
    files: list[str] = []
    indices: dict[str, Index] = {}
    for path in given:
        if path.endswith(_INDEX_END):
            index = _read_index(path, findings)
            if index is not None:
                indices[path] = index
                files.extend(dict.fromkeys(index.placed.values()))
        else:
            files.append(path)
    unique: dict[str, str] = {}
    for path in files:
        key = _identity(path)
        if key in unique:
            findings.add("extra.shards.duplicate_file", found=clean(os.path.basename(path)))
        unique.setdefault(key, path)
    paths = _complete_sets(list(unique.values()), findings)
    for index in indices.values():
        paths = _without_missing(paths, set(index.placed.values()), findings)
    return paths, indices


def _identity(path: str) -> str:
    """What is equal for two spellings of one path."""
    return os.path.normcase(os.path.abspath(path))


def shard_paths(path: str | os.PathLike[str]) -> list[str]:
    """The files of the checkpoint that ``path`` names: itself, a shard's siblings that are there, an index's shards."""
    return expand([os.fspath(path)], Findings())[0]


def _complete_sets(paths: list[str], findings: Findings) -> list[str]:
    """Add the shards that a shard's name promises; name those that are not there.

    A set of which nothing is there is no set: the given names stay, and reading them says that there is no such file.
    """
    siblings: list[str] = []
    absent: set[str] = set()
    done: set[tuple[str, str, str]] = set()
    room = MAX_SHARDS  # of all sets together: an index can name a set in every line
    for path in paths:
        folder, base = os.path.split(path)
        match = _SHARD.match(base)
        if match is None:
            continue
        total = int(match["total"])
        key = (_identity(folder), match["stem"], match["total"] + match["ext"])
        if key in done:
            continue
        done.add(key)
        numbered = 1 <= int(match["number"]) <= total
        if not numbered or total > room:
            if os.path.exists(path):
                why = "its number is out of range" if not numbered else f"more than {MAX_SHARDS} files"
                findings.add("extra.shards.missing", found=f"the set that {clean(base)} belongs to ({why})")
            continue
        room -= total
        names = [f"{match['stem']}-{number:05d}-of-{match['total']}{match['ext']}" for number in range(1, total + 1)]
        there = [name for name in names if os.path.exists(os.path.join(folder, name))]
        if not there:
            continue
        siblings.extend(os.path.join(folder, name) for name in there)
        if len(there) < total:
            missing = sorted(set(names).difference(there))
            findings.add("extra.shards.missing", found=listing(missing), expected=f"{total} files")
            absent.update(_identity(os.path.join(folder, name)) for name in missing)
    given = {_identity(path): path for path in paths}
    complete = [path for key, path in given.items() if key not in absent]
    complete.extend(path for path in siblings if _identity(path) not in given)
    return complete


def _without_missing(paths: list[str], promised: set[str], findings: Findings) -> list[str]:
    """``paths`` without those of a shard index that are not there, which are named."""
    missing = [path for path in paths if path in promised and not os.path.exists(path)]
    if not missing:
        return paths
    names = sorted(os.path.basename(path) for path in missing)
    findings.add("extra.shards.missing", found=listing(names), expected=f"{len(promised)} files")
    return [path for path in paths if path not in promised or os.path.exists(path)]


def _read_index(path: str, findings: Findings) -> Index | None:
    def bad(found: str) -> None:
        findings.add("extra.shards.index", file=clean(os.path.basename(path)), found=found)

    try:
        with open_raw(path) as raw:
            if raw.stamp.size > MAX_HEADER:
                bad("it is far too large")
                return None
            text = raw.read_at(0, raw.stamp.size)
            stamp = raw.stamp
    except HeaderError as error:
        findings.add(error.rule, file=clean(os.path.basename(path)), found=error.detail, expected=error.expected)
        return None
    doubled: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if len(result) != len(items):
            doubled.extend(key for key, times in Counter(key for key, _ in items).items() if times > 1)
        return result

    try:
        document: Any = json.loads(text, object_pairs_hook=pairs)
    except (ValueError, RecursionError):
        bad("it is not JSON")
        return None
    if doubled:
        bad(f"it says two things of {listing([clean(key) for key in doubled])}")
        return None
    weight_map = document.get("weight_map") if isinstance(document, Mapping) else None
    if not isinstance(weight_map, Mapping) or not weight_map:
        bad("it has no weight_map")
        return None
    folder = os.path.dirname(path)
    placed: dict[str, str] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str):
            bad(f"it names no file for {clean(tensor)}, but {show(shard)}")
            return None
        if shard == os.path.basename(path):
            bad(f"it names itself as the file of {clean(tensor)}")
            return None
        if not shard or os.path.basename(shard) != shard or "\\" in shard or "\0" in shard or shard == "..":
            bad("it names a file outside its folder")
            return None
        placed[tensor] = os.path.join(folder, shard)
    if len(set(placed.values())) > MAX_SHARDS:
        bad(f"it names more than {MAX_SHARDS} files")
        return None
    return Index(placed, stamp)


def _foreign_file(path: str) -> str | None:
    """A rule id when the path is a kind of file we refuse by name, without reading more than its first bytes."""
    lower = path.lower()
    if lower.endswith(_PICKLE_EXT):
        return "extra.foreign.pickle"
    try:
        with open_raw(path) as raw:
            magic = raw.read_at(0, min(8, raw.stamp.size))
    except HeaderError:
        return None  # read_header will say why
    if magic.startswith(b"GGUF") or lower.endswith(".gguf"):
        return "extra.foreign.gguf"
    if magic.startswith(_PICKLE_MAGIC) and not _plausible_length(magic):
        return "extra.foreign.pickle"
    return None


def _plausible_length(magic: bytes) -> bool:
    """Whether the first eight bytes can be a header length (``PK..`` and pickle opcodes cannot, but a length of 640
    looks like one).
    """
    return len(magic) == 8 and magic[4:] == b"\0\0\0\0"


def load(given: list[str], findings: Findings) -> Checkpoint:
    """Read the headers of all files; every unusable one becomes a fault."""
    paths, indices = expand(given, findings)
    checkpoint = Checkpoint(tuple(paths), index_stamps={path: index.stamp for path, index in indices.items()})
    for path in paths:
        base = clean(os.path.basename(path) or path) or "an empty path"
        rule = _foreign_file(path)
        if rule is not None and not (rule == "extra.foreign.pickle" and not os.path.exists(path)):
            findings.add(rule, file=base, found=base)
            continue
        try:
            header = read_header(path)
        except HeaderError as error:
            if error.rule == "crash.file" and not path.lower().endswith((".safetensors", ".sft")):
                findings.add(
                    "extra.file.not_checkpoint", file=base, found=f"it does not end in .safetensors and {error.detail}"
                )
                continue
            where = f"tensor {clean(error.tensor)}: " if error.tensor is not None else ""
            findings.add(
                error.rule,
                file=base,
                tensor=error.tensor,
                found=where + error.detail,
                expected=error.expected,
                repairable=error.trailing or None,
                remedy=CUT_TRAILING if error.trailing else "",
                variant="trailing" if error.trailing else "",
            )
            continue
        checkpoint.headers.append(header)
        for name in header.duplicates:
            findings.add("extra.file.duplicate_key", file=base, tensor=name, found=clean(name))
    findings.incomplete = len(checkpoint.headers) < len(paths) or findings.has(
        "extra.shards.missing", "extra.shards.index"
    )
    if len(checkpoint.headers) == 1:
        checkpoint.tensors = checkpoint.headers[0].tensors
    else:
        for header in checkpoint.headers:
            checkpoint.tensors.update(header.tensors)
    for index in indices.values():
        _compare_index(index.placed, checkpoint, findings)
    return checkpoint


def _compare_index(placed: dict[str, str], checkpoint: Checkpoint, findings: Findings) -> None:
    read = {header.path: header.tensors for header in checkpoint.headers}
    for tensor, path in placed.items():
        holder = read.get(path)
        if holder is None or tensor in holder:
            continue
        actual = checkpoint.tensors.get(tensor)
        findings.add(
            "extra.shards.index_tensor",
            tensor=tensor,
            expected=clean(os.path.basename(path)),
            found=f"in {clean(os.path.basename(actual.path))}" if actual else "in no shard",
        )


def open_checkpoint(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> Checkpoint:
    """The files of one checkpoint, for loaders and tools. Raises :class:`HeaderError` for the first file that cannot be
    used.
    """
    findings = Findings()
    checkpoint = load(as_paths(paths), findings)
    if findings.refused:
        first = findings.faults()[0]
        raise HeaderError(first.rule, first.message, tensor=first.tensor, expected=first.expected)
    return checkpoint
