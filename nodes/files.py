"""Model files as ComfyUI lists them: names for a combo, the path behind a name, a fingerprint of its content."""

from __future__ import annotations

import os
from pathlib import Path

import folder_paths

from ..checkpoint import shard_paths


def names(folder: str) -> list[str]:
    """File names of a model folder, sub-folders included; empty when the folder is missing or unreadable."""
    try:
        return list(folder_paths.get_filename_list(folder))
    except (OSError, KeyError):
        return []


def resolve(folder: str, name: str) -> str | None:
    """The path of a file that ComfyUI itself lists, or None. Nothing outside the model folders can be reached."""
    if name not in names(folder):
        return None
    path = folder_paths.get_full_path(folder, name)
    return None if path is None else str(path)


def fingerprint(folder: str, name: str) -> str:
    """Changes when the file (or one of its shards) does: names, sizes and modification times."""
    path = resolve(folder, name)
    if path is None:
        return f"{name}: missing"
    parts = []
    for shard in shard_paths(path):
        try:
            status = os.stat(shard)
        except OSError:
            parts.append(f"{Path(shard).name}: unreadable")
            continue
        parts.append(f"{Path(shard).name}: {status.st_size} {status.st_mtime_ns}")
    return "; ".join(parts)


def not_found(folder: str, name: str) -> str:
    """The sentence for a name that is not in the folder (any more)."""
    return (
        f"'{name}' is not in the {folder} folder (any more). Pick a file from the list, or press R to refresh the list "
        "after copying the file there."
    )
