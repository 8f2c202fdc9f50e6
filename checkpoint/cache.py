"""Remembering reports, so that the check at queue time and the one at load cost nothing while the files stay the same.

A report is kept under what was asked, with the size, modification time and inode of every file that was read for it;
any difference on disk forgets it. Reports that depend on files which were *not* there are never kept.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from threading import Lock
from typing import Any

from .header import Stamp
from .report import Report

CAPACITY = 32
_DEPENDS_ON_ABSENT = ("extra.shards.missing", "extra.file.")

_lock = Lock()
_entries: OrderedDict[Hashable, tuple[Report, dict[str, Stamp]]] = OrderedDict()


def key(given: list[str], rules: str, rename: Any, deep: bool) -> Hashable | None:
    """What identifies a request; None when it cannot be remembered."""
    if isinstance(rename, Mapping):
        rename = tuple(sorted(rename.items()))
    elif not isinstance(rename, Hashable):
        return None
    return (tuple(os.path.abspath(path) for path in given), tuple(given), rules, rename, deep)


def _stamp(path: str) -> Stamp | None:
    try:
        info = os.stat(path)
    except (OSError, ValueError):
        return None
    return Stamp(info.st_size, info.st_mtime_ns, info.st_ino)


def get(key: Hashable | None) -> Report | None:
    """The remembered report, if every file is as it was."""
    if key is None:
        return None
    with _lock:
        entry = _entries.get(key)
    if entry is None:
        return None
    report, stamps = entry
    if any(_stamp(path) != stamp for path, stamp in stamps.items()):
        with _lock:
            _entries.pop(key, None)
        return None
    with _lock:
        if key in _entries:
            _entries.move_to_end(key)
    return report


def put(key: Hashable | None, report: Report, stamps: dict[str, Stamp]) -> None:
    """Remember a report with the files that it was made from."""
    if key is None or set(report.files) - set(stamps):
        return
    if any(fault.rule.startswith(_DEPENDS_ON_ABSENT) for fault in report.faults):
        return
    with _lock:
        _entries[key] = (report, stamps)
        _entries.move_to_end(key)
        while len(_entries) > CAPACITY:
            _entries.popitem(last=False)


def clear() -> None:
    """Forget everything."""
    with _lock:
        _entries.clear()
