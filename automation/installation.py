"""``quant-loader check --all``: every checkpoint below the model folders of an installation."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoint import Report, check
from ..checkpoint.files import expand
from ..checkpoint.findings import Findings
from ..checkpoint.report import Rules
from .documents import shown
from .errors import RequestError

_ENDINGS = (".safetensors", ".sft")
_INDEX = ".safetensors.index.json"
_SHARD = re.compile(r"(?P<stem>.*)-[0-9]{5}-of-(?P<total>[0-9]{5}\.[^.]+)\Z", re.DOTALL)


@dataclass
class Inventory:
    """The checkpoints found. ``notes`` say which folders could not be read."""

    checkpoints: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def find_checkpoints(roots: Iterable[str | os.PathLike[str]]) -> Inventory:
    """Every checkpoint below ``roots``, sorted by path: a file, the index of a shard set, or the first shard of one
    without an index.

    Links to folders are followed, each real folder is read once, so loops end. Raises RequestError when a root is no
    folder.
    """
    found = Inventory()
    seen: set[str] = set()
    for root in roots:
        if not os.path.isdir(root):
            raise RequestError(f"There is no folder {shown(root)}.")
        for folder, names in _walk(os.fspath(root), seen, found.notes):
            found.checkpoints.extend(Path(folder, name) for name in _checkpoints(folder, names))
    found.checkpoints = sorted(dict.fromkeys(found.checkpoints))
    return found


def _walk(root: str, seen: set[str], notes: list[str]) -> Iterator[tuple[str, list[str]]]:
    pending = [root]
    while pending:
        folder = pending.pop()
        real = os.path.realpath(folder)
        if real in seen:
            continue
        seen.add(real)
        names: list[str] = []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if _is_folder(entry):
                        pending.append(entry.path)
                    else:
                        names.append(entry.name)
        except OSError as error:
            notes.append(f"{shown(folder)} cannot be read: {error.strerror or error}.")
            continue
        yield folder, names


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False  # links that lead in a circle; if it is a checkpoint by name, the check will say so


def _checkpoints(folder: str, names: list[str]) -> Iterator[str]:
    covered: set[str] = set()
    for name in names:
        if name.lower().endswith(_INDEX):
            yield name
            files, _ = expand([os.path.join(folder, name)], Findings())
            covered.update(os.path.basename(path) for path in files)
    sets: dict[tuple[str, str], str] = {}
    for name in sorted(names):
        if not name.lower().endswith(_ENDINGS) or name in covered:
            continue
        shard = _SHARD.match(name)
        if shard is None:
            yield name
        elif (shard["stem"], shard["total"]) not in sets:
            sets[shard["stem"], shard["total"]] = name
            yield name


@dataclass
class Tally:
    """The summary of an installation."""

    verdicts: Counter[str] = field(default_factory=Counter)
    formats: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    def add(self, report: Report) -> None:
        self.verdicts[report.verdict] += 1
        self.formats.update(report.formats)

    @property
    def summary(self) -> str:
        """``12 checkpoints: 9 sound, 1 refused, 2 not quantised``."""
        words = {"ok": "sound", "refused": "refused", "unquantized": "not quantised"}
        parts = [f"{self.verdicts[verdict]} {word}" for verdict, word in words.items() if self.verdicts[verdict]]
        total = sum(self.verdicts.values())
        return f"{total} {'checkpoint' if total == 1 else 'checkpoints'}" + (": " + ", ".join(parts) if parts else "")

    def to_dict(self) -> dict[str, Any]:
        """The last of the JSON lines."""
        return {
            "summary": self.summary,
            "verdicts": dict(self.verdicts),
            "formats": dict(self.formats),
            "notes": self.notes,
        }


def check_all(inventory: Inventory, rules: Rules) -> Iterator[tuple[Path, Report]]:
    """The report on each checkpoint, as it is made."""
    for path in inventory.checkpoints:
        yield path, check([path], rules=rules)
