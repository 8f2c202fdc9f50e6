"""Sampled rows of a packed weight as numbers, up to one factor per row (no test here depends on it).

Formulas: the docstrings of the format modules.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..dtypes import E4M3, E5M2, E8M0, decode
from ..layer import padded
from ..report import LayerSpec
from .source import MAX_COLUMNS, Bytes, Matrix, Source, row_runs

E2M1 = np.array(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0], dtype=np.float32
)
BLOCK = {"nvfp4": 16, "mxfp8": 32}
PACKED = frozenset({"nvfp4", "convrot_w4a4", "asym_w4a8_int8"})
"""Two codes a byte."""
MAX_BAND = 16 << 20


@dataclass(frozen=True)
class Sample:
    """Some rows of a layer.

    ``raw`` are the stored weight bytes (R, bytes), ``values`` the codes as numbers (R, columns), block scales of W4A8
    applied. ``blocks`` holds, for NVFP4 and MXFP8, the block scales (R, columns / block) read in the declared 128x4
    tile order and read row by row.
    """

    runs: list[range]
    raw: Bytes
    values: Matrix
    blocks: tuple[Matrix, Matrix] | None = None


def take(spec: LayerSpec, source: Source) -> Sample | None:
    """Read and decode sampled rows; None for a layer too small or too wide to say anything about."""
    N, K = spec.shape
    columns = min(K, MAX_COLUMNS)
    weight = source.tensors[spec.tensors["weight"]]
    runs = row_runs(N, columns)
    row_bytes = weight.nbytes // N
    raw = source.rows(weight, runs, row_bytes, row_bytes * columns // K)
    if spec.format in BLOCK:
        blocks = _block_scales(spec, source, runs, columns)
        return Sample(runs, raw, E2M1[nibbles(raw, high_first=True)] if spec.format == "nvfp4" else E4M3[raw], blocks)
    if spec.format == "convrot_w4a4":
        codes = nibbles(raw, high_first=False).view(np.int8)
        return Sample(runs, raw, ((codes ^ 8) - 8).astype(np.float32))
    if spec.format == "asym_w4a8_int8":
        return Sample(runs, raw, _w4a8(spec, source, runs, raw))
    if spec.format.startswith("float8"):
        return Sample(runs, raw, (E5M2 if spec.format == "float8_e5m2" else E4M3)[raw])
    return Sample(runs, raw, raw.view(np.int8).astype(np.float32))


def nibbles(raw: Bytes, *, high_first: bool) -> Bytes:
    """Unpack (R, B) bytes to (R, 2B) 4-bit codes."""
    out = np.empty((raw.shape[0], raw.shape[1], 2), dtype=np.uint8)
    out[..., 0 if high_first else 1] = raw >> 4
    out[..., 1 if high_first else 0] = raw & 15
    return out.reshape(raw.shape[0], -1)


def tile_offsets(rows: int, columns: int) -> np.ndarray[tuple[int, int], np.dtype[np.intp]]:
    """Offsets of a 128-row band's first rows in the 128x4 tile order of the kernels: (rows, columns)."""
    r, c = np.arange(rows)[:, np.newaxis], np.arange(columns)[np.newaxis]
    return (c // 4) * 512 + (r % 32) * 16 + (r // 32) * 4 + c % 4


def _block_scales(spec: LayerSpec, source: Source, runs: list[range], columns: int) -> tuple[Matrix, Matrix] | None:
    N, K = spec.shape
    block = BLOCK[spec.format]
    tensor = source.tensors[spec.tensors["weight_scale"]]
    stride = padded(K // block, 4)
    band_bytes = 128 * stride
    if tensor.nbytes != padded(N, 128) * stride or band_bytes > MAX_BAND:
        return None
    count = columns // block
    offsets = tile_offsets(128, count)
    table = E4M3 if spec.format == "nvfp4" else E8M0
    bands: dict[int, Bytes] = {}
    tiled, plain = [], []
    for run in runs:
        band = run.start // 128
        if band not in bands:
            bands = {band: source.read(tensor, band * band_bytes, band_bytes)}
        data = bands[band]
        inside = slice(run.start % 128, run.start % 128 + len(run))
        tiled.append(table[data[offsets[inside]]])
        plain.append(table[data.reshape(128, stride)[inside, :count]])
    return np.concatenate(tiled), np.concatenate(plain)


def _w4a8(spec: LayerSpec, source: Source, runs: list[range], raw: Bytes) -> Matrix:
    N = spec.N
    group = int(spec.get("group_size"))
    rel = source.tensors[spec.tensors["weight_s_rel"]]
    codes = nibbles(raw, high_first=False)
    scales = E4M3[source.rows(rel, runs, rel.nbytes // N, codes.shape[1] // group)]
    if "weight_codebook" in spec.tensors:
        book = source.tensors[spec.tensors["weight_codebook"]]
        levels = decode(book.dtype, source.read(book, 0, book.nbytes).tobytes()).astype(np.float32)
    else:
        levels = np.arange(-8, 8, dtype=np.float32)
    spread = np.repeat(np.nan_to_num(scales), group, axis=1)
    grid = np.rint(levels[codes[:, : spread.shape[1]]] * spread)
    return np.asarray(np.clip(grid, -127, 127), dtype=np.float32)
