"""Block scales in full: no quantiser writes a NaN or negative one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..findings import Findings
from ..layer import padded
from ..report import LayerSpec
from .decode import BLOCK
from .source import Bytes, Source

ENOUGH = 256 << 10
_SUFFIX = {"nvfp4": "weight_scale", "mxfp8": "weight_scale", "asym_w4a8_int8": "weight_s_rel"}
_NAMED = 4


def check_block_scales(spec: LayerSpec, source: Source, findings: Findings) -> bool:
    """Judge every block scale of a layer; False after a fault."""
    suffix = _SUFFIX.get(spec.format)
    if suffix is None:
        return True
    tensor = source.tensors[spec.tensors[suffix]]
    e8m0 = spec.format == "mxfp8"
    first_bad = 0xFF if e8m0 else 0x7F  # E4M3: 0x7F is NaN, 0x80 and above negative
    counts = {"NaN": 0, "negative": 0}
    rows: set[int] = set()
    for start, data in source.chunks(tensor):
        if int(data.max()) < first_bad:
            continue
        nan = (data == 0xFF) if e8m0 else (data & 0x7F) == 0x7F
        negative = np.zeros_like(nan) if e8m0 else (data > 0x80) & ~nan
        bad = np.flatnonzero(nan | negative)
        row, real = _rows(spec, bad + start)
        counts["NaN"] += int(nan[bad][real].sum())
        counts["negative"] += int(negative[bad][real].sum())
        if len(rows) < _NAMED:
            rows.update(int(r) for r in np.unique(row[real])[:_NAMED])
    parts = [f"{counts[kind]} {kind}" for kind in counts if counts[kind]]
    if not parts:
        return True
    total = spec.N * (spec.K // (BLOCK.get(spec.format) or int(spec.get("group_size"))))
    listed = ", ".join(map(str, sorted(rows)[:_NAMED]))
    findings.add(
        "extra.deep.block_scale",
        layer=spec.name,
        tensor=suffix,
        expected="finite numbers, none below zero",
        found=f"{' and '.join(parts)} of {total} (rows {listed}{', …' if sum(counts.values()) > len(rows) else ''})",
    )
    return False


def _rows(spec: LayerSpec, offsets: npt.NDArray[np.intp]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
    """Row of each byte offset of the scale tensor, and whether it is a block's scale (not padding)."""
    N, K = spec.shape
    if spec.format not in BLOCK:
        row = offsets // (K // int(spec.get("group_size")))
        return row, np.ones(row.shape, dtype=np.bool_)
    columns = K // BLOCK[spec.format]
    tiles = padded(columns, 4) // 4
    tile, inside = offsets // 512, offsets % 512
    row = (tile // tiles) * 128 + inside // 16 + (inside % 16) // 4 * 32
    column = (tile % tiles) * 4 + inside % 4
    return row, (row < N) & (column < columns)


def scales_of_rows(spec: LayerSpec, source: Source, rows: range) -> Bytes:
    """Block scales of the 128-row bands, or of the rows, that ``rows`` lies in: the first of them, as many as tell."""
    tensor = source.tensors[spec.tensors[_SUFFIX[spec.format]]]
    if spec.format in BLOCK:
        step = 128 * padded(spec.K // BLOCK[spec.format], 4)
        first, last = rows.start // 128, (rows.stop - 1) // 128
    else:
        step = tensor.nbytes // spec.N
        first, last = rows.start, rows.stop - 1
    begin, end = min(first * step, tensor.nbytes), min((last + 1) * step, tensor.nbytes)
    return source.read(tensor, begin, min(end - begin, ENOUGH))
