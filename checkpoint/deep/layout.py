"""Are the block scales of NVFP4 and MXFP8 in the order that the kernels read?

A quantiser divides each block by its largest value, so a block with a large scale has small codes beside its largest
one: code size and scale balance. Read in the right order, the energies of the decoded blocks differ little and code
size falls with the scale; read in a wrong order, each block gets another block's scale. Two figures, over blocks with
rows and columns of blocks centred: the variance of log(rms of the codes * scale), and the correlation of log(rms of
the codes) with log(scale). They need no structure in the weights: plain Gaussian ones do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..report import LayerSpec
from .decode import BLOCK, Sample
from .source import Matrix

RATIO = 0.7
"""Largest variance read row by row, as a part of the variance as declared."""
BALANCE = -0.15
"""Correlation read row by row that counts, in both halves of the rows, when the declared order has none."""
Z = 8.0
MIN_BLOCKS = 256


@dataclass(frozen=True)
class Spread:
    """Figures of a warning, each in the declared order and row by row.

    Standard deviation of the decoded blocks' sizes in powers of two, and correlation of code size and scale.
    """

    declared: float
    row_major: float
    balance_declared: float
    balance_row_major: float
    blocks: int


def contradiction(spec: LayerSpec, sample: Sample) -> Spread | None:
    """The figures when the row-by-row order fits clearly better than the declared one; None otherwise."""
    if sample.blocks is None:
        return None
    size = BLOCK[spec.format]
    count = sample.blocks[0].shape[1]
    codes = np.nan_to_num(sample.values[:, : count * size]).reshape(len(sample.values), count, size)
    rms = np.sqrt(np.square(codes).mean(axis=2))
    tiled, plain = sample.blocks
    with np.errstate(invalid="ignore"):
        usable = (rms > 0) & (tiled > 0) & (plain > 0)
    blocks = int(usable.sum())
    if blocks < max(MIN_BLOCKS, usable.size // 4):
        return None
    half = len(rms) // 2
    figures = []
    for rows in (slice(None, half), slice(half, None)):
        mask = usable[rows]
        codes_of, tiled_of, plain_of = (
            _centred(np.log2(np.where(mask, x[rows], 1.0)), mask) for x in (rms, tiled, plain)
        )
        figures.append(
            [
                (float((codes_of + scale)[mask].var()), _correlation(codes_of[mask], scale[mask]))
                for scale in (tiled_of, plain_of)
            ]
        )
    scatter = all(plain_[0] < RATIO * tiled_[0] for tiled_, plain_ in figures)
    balance = all(
        plain_[1] < BALANCE and -plain_[1] * np.sqrt(blocks / 2) > Z and tiled_[1] > 0.3 * plain_[1]
        for tiled_, plain_ in figures
    )
    if not (scatter or balance):
        return None
    means = np.array(figures).mean(axis=0)
    return Spread(
        float(np.sqrt(means[0, 0])), float(np.sqrt(means[1, 0])), float(means[0, 1]), float(means[1, 1]), blocks
    )


def _centred(y: Matrix, mask: np.ndarray[tuple[int, int], np.dtype[np.bool_]]) -> Matrix:
    """Rows and columns centred over the blocks of ``mask``; the others are zero."""
    y = np.where(mask, y, 0.0)
    for axis in (1, 0, 1, 0):
        seen = np.maximum(mask.sum(axis=axis, keepdims=True), 1)
        y = np.where(mask, y - y.sum(axis=axis, keepdims=True) / seen, 0.0)
    return y


def _correlation(a: Matrix, b: Matrix) -> float:
    norm = float(np.sqrt(np.square(a).sum() * np.square(b).sum()))
    return float((a * b).sum()) / norm if norm > 1e-9 else 0.0
