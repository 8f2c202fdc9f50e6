"""Tile sizes: a static table per architecture and size, never tuned at run time."""

from __future__ import annotations

from typing import NamedTuple


class RowSchedule(NamedTuple):
    """A program of a row kernel: this many rows, chunks of 16 columns a step, warps."""

    rows: int
    chunks: int
    num_warps: int


# A row kernel keeps its tile in registers: 32 float32 values a thread up to 16,384, then 64.
ROW_TILE = 4096
MAX_ROW_TILE = 32768


def row_schedule(K: int) -> RowSchedule:
    """The schedule of a kernel that reduces over rows of K columns: whole rows, several when they are short."""
    columns = min(MAX_ROW_TILE, max(256, 1 << (K - 1).bit_length()))
    rows = max(1, ROW_TILE // columns)
    return RowSchedule(rows, columns // 16, max(4, min(16, rows * columns // 1024)))
