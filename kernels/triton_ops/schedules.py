"""Tile sizes: a static table per architecture, M bucket and shape, never tuned at run time.

The tiles were chosen among those that build without register spills for their architecture (`aot` checks each of
them). An optional file of measured choices, named by the environment variable QUANT_LOADER_SCHEDULES or lying beside
this module as ``tuned.json``, comes first:

    {"sm_90": [{"m": 4096, "n": 3072, "k": 3072, "low_rank": false, "schedule": [128, 256, 128, 1, 8, 8, 3]}]}

``m`` is the bucket, the power of two at or above M; ``schedule`` is the fields of `GemmSchedule` in order.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

LOG = logging.getLogger(__name__)
TUNED_VARIABLE = "QUANT_LOADER_SCHEDULES"
MAX_TUNED_BYTES = 1 << 20


class RowSchedule(NamedTuple):
    """A program of a row kernel: this many rows, chunks of 16 columns a step, warps."""

    rows: int
    chunks: int
    num_warps: int


# A row kernel keeps its tile in registers: 32 float32 values a thread up to 16,384 columns, then 64. Rows beyond are
# read in steps.
ROW_TILE = 4096
MAX_ROW_TILE = 32768
ROW_STEP = 8192


def row_schedule(K: int) -> RowSchedule:
    """The schedule of a kernel that reduces over rows of K columns: whole rows, several when they are short."""
    columns = ROW_STEP if K > MAX_ROW_TILE else max(256, 1 << (K - 1).bit_length())
    rows = max(1, ROW_TILE // columns)
    return RowSchedule(rows, columns // 16, max(4, min(16, rows * columns // 1024)))


class GemmSchedule(NamedTuple):
    """A tile of the INT8 product: its sides, dots per loop step, row tiles per L2 group, warps, pipeline stages."""

    block_m: int
    block_n: int
    block_k: int
    dots: int
    group_m: int
    num_warps: int
    num_stages: int


class GemmTable(NamedTuple):
    """The tiles of one family of architectures.

    tiles and low_rank (the variant with a low-rank epilogue, which holds more in registers) are ordered from the most
    efficient to the one that fills a GPU with the least work; skinny serves M <= 16 and M <= 32; unaligned any K that
    is not a multiple of 16, whose loads are a byte at a time.
    """

    tiles: tuple[GemmSchedule, ...]
    low_rank: tuple[GemmSchedule, ...]
    skinny: tuple[GemmSchedule, GemmSchedule]
    unaligned: GemmSchedule


S = GemmSchedule
_SM80 = GemmTable(
    tiles=(
        S(128, 256, 64, 2, 8, 8, 3),
        S(128, 128, 64, 2, 8, 8, 3),
        S(64, 128, 64, 2, 8, 4, 3),
        S(64, 64, 64, 2, 8, 4, 3),
    ),
    low_rank=(S(128, 128, 64, 2, 8, 8, 3), S(64, 64, 64, 2, 8, 4, 3)),
    skinny=(S(16, 64, 128, 2, 8, 4, 3), S(32, 64, 128, 2, 8, 4, 3)),
    unaligned=S(32, 64, 32, 2, 8, 4, 2),
)
_SM86 = _SM80._replace(  # 100 KB of shared memory, and twice the arithmetic per byte of it
    tiles=(S(128, 256, 64, 2, 8, 8, 2), *_SM80.tiles[1:]),
)
_SM90 = GemmTable(
    tiles=(
        S(128, 256, 128, 1, 8, 8, 3),
        S(128, 128, 128, 1, 8, 8, 3),
        S(64, 128, 128, 1, 8, 4, 4),
        S(64, 64, 128, 1, 8, 4, 4),
    ),
    low_rank=(S(128, 128, 128, 1, 8, 8, 3), S(64, 64, 128, 1, 8, 4, 4)),
    skinny=(S(16, 64, 256, 1, 8, 4, 3), S(32, 64, 128, 1, 8, 4, 4)),
    unaligned=S(32, 64, 64, 1, 8, 4, 2),
)
_SM100 = GemmTable(  # accumulators live in tensor memory; a 256-wide tile spills in the epilogue
    tiles=(S(128, 128, 128, 1, 8, 8, 3), S(128, 64, 128, 1, 8, 4, 3), S(64, 64, 128, 1, 8, 4, 3)),
    low_rank=(S(128, 128, 128, 1, 8, 8, 3), S(64, 64, 128, 1, 8, 4, 3)),
    skinny=(S(16, 64, 128, 1, 8, 4, 4), S(32, 64, 128, 1, 8, 4, 4)),
    unaligned=S(32, 64, 64, 1, 8, 4, 2),
)
_SM120 = GemmTable(
    tiles=(S(128, 256, 128, 1, 8, 8, 2), S(128, 128, 64, 1, 8, 8, 3), S(64, 64, 128, 1, 8, 4, 3)),
    low_rank=(S(128, 128, 64, 1, 8, 8, 3), S(64, 64, 128, 1, 8, 4, 3)),
    skinny=(S(16, 64, 128, 1, 8, 4, 4), S(32, 64, 128, 1, 8, 4, 3)),
    unaligned=S(32, 64, 64, 1, 8, 4, 2),
)
_RDNA = GemmTable(
    tiles=(S(128, 128, 64, 1, 8, 8, 2), S(128, 64, 64, 1, 8, 4, 2), S(64, 64, 64, 1, 8, 4, 2)),
    low_rank=(S(128, 64, 64, 1, 8, 8, 2), S(64, 64, 64, 1, 8, 4, 2)),
    skinny=(S(16, 64, 64, 1, 8, 2, 2), S(32, 64, 64, 1, 8, 4, 2)),
    unaligned=S(32, 64, 32, 1, 8, 4, 2),
)
_CDNA = _RDNA._replace(skinny=(S(32, 64, 64, 1, 8, 4, 2), S(32, 64, 64, 1, 8, 4, 2)))
del S


def gemm_table(arch: str) -> GemmTable:
    """The table for "sm_86" or "gfx1100" style names; an unknown architecture gets its nearest older relative's."""
    if arch.startswith("gfx"):
        return _CDNA if arch.startswith("gfx9") else _RDNA
    number = int(arch.removeprefix("sm_"))
    for least, table in ((120, _SM120), (100, _SM100), (90, _SM90), (86, _SM86)):
        if number >= least:
            return table
    return _SM80


def m_bucket(M: int) -> int:
    """The power of two at or above M: what the tuned table is keyed by."""
    return 1 << max(0, M - 1).bit_length()


def gemm_schedule(
    arch: str, M: int, N: int, K: int, *, low_rank: bool = False, multiprocessors: int = 1,
    tuned: Mapping[Key, GemmSchedule] | None = None,
) -> GemmSchedule:  # fmt: skip
    """The schedule for out [M, N] over K. Among the tiles the first one that gives every multiprocessor a program;
    pure."""
    table = gemm_table(arch)
    if K % 16:
        return table.unaligned
    if tuned:
        measured = tuned.get((arch, m_bucket(M), N, K, low_rank))
        if measured is not None:
            return measured
    if M <= 32:
        return table.skinny[M > 16]
    tiles = table.low_rank if low_rank else table.tiles
    for tile in tiles:
        if -(-M // tile.block_m) * -(-N // tile.block_n) >= multiprocessors:
            return tile
    return tiles[-1]


Key = tuple[str, int, int, int, bool]


def parse_tuned(document: object) -> dict[Key, GemmSchedule]:
    """The tuned table from its JSON document; ValueError naming the entry when one does not hold what the module
    describes."""
    if not isinstance(document, dict):
        raise ValueError("expected an object keyed by architecture")
    table: dict[Key, GemmSchedule] = {}
    for arch, entries in document.items():
        if not isinstance(entries, list):
            raise ValueError(f"{arch}: expected a list of entries")
        for i, entry in enumerate(entries):
            where = f"{arch}[{i}]"
            if not isinstance(entry, dict):
                raise ValueError(f"{where}: expected an object")
            m, n, k = (entry.get(name, 0) for name in ("m", "n", "k"))
            fields = entry.get("schedule")
            if not isinstance(fields, list) or len(fields) != len(GemmSchedule._fields):
                raise ValueError(f"{where}: schedule: expected {len(GemmSchedule._fields)} integers")
            if not all(type(value) is int and 0 < value < 2**31 for value in (m, n, k, *fields)):
                raise ValueError(f"{where}: expected positive integers")
            schedule = GemmSchedule(*fields)
            blocks = (schedule.block_m, schedule.block_n, schedule.block_k, schedule.num_warps)
            if any(value & (value - 1) for value in blocks) or max(blocks) > 512 or min(blocks[:3]) < 16:
                raise ValueError(
                    f"{where}: expected blocks that are powers of two from 16 to 512, found {list(blocks)}"
                )
            table[(str(arch), m, n, k, bool(entry.get("low_rank", False)))] = schedule
    return table


@lru_cache(maxsize=1)
def tuned_schedules() -> Mapping[Key, GemmSchedule]:
    """The tuned table of this installation, empty when there is none; an unreadable one is reported once and left
    out."""
    named = os.environ.get(TUNED_VARIABLE)
    path = Path(named) if named else Path(__file__).with_name("tuned.json")
    if not named and not path.is_file():
        return {}
    try:
        if path.stat().st_size > MAX_TUNED_BYTES:
            raise ValueError(f"expected at most {MAX_TUNED_BYTES} bytes")
        return parse_tuned(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        LOG.warning("Quant Loader: kernel schedules in %s are ignored: %s. The built-in table is used.", path, error)
        return {}
