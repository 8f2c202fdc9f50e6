"""Is a weight rotated as its layer says, and in groups of that size?

Trained weights are structured in the basis they were trained in: some input channels are stronger than others, values
have heavier (or, freshly initialised, lighter) tails than a Gaussian. A rotation over g channels mixes g of them with
equal weight, which divides the excess kurtosis of independent values by g (a sum of many tends to a Gaussian). So the
basis in which the values are farthest from Gaussian is the true one. For each candidate (as stored; after undoing
H(16), H(64), H(256)) the figure is

    c = mean over units of  log( mean(x^4) / mean(x^2)^2 )  -  its expectation for a Gaussian

where a unit is one row times one block of the largest candidate size: every candidate keeps a unit's energy, so row
scales, strong rows and strong blocks cancel. Coarse rounding alone makes stored codes look structured (most of them
zero): what it would do to a Gaussian of the unit's size is taken off, with the weight 1/g that a rotation leaves of
it. Isotropic weights (Gaussian, low rank with Gaussian factors) have c near 0 in every basis: nothing can be known
and nothing is said.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import erf, sqrt

import numpy as np

from ..report import LayerSpec
from .source import Matrix

CANDIDATES = (1, 16, 64, 256)
"""Rotation sizes in use; 1 stands for no rotation."""
FLOOR = 0.1
"""Least |c| of the better candidate."""
RATIO = 0.7
"""Largest |c| of the declared basis, as a part of the better one's."""
Z = 6.0
SERIAL = 0.05
"""Neighbouring inputs that hang together (smooth filters) make other bases look structured: nothing is said then."""
MIN_UNITS = 48
RESOLUTION = 0.25
"""Least root mean square of a unit in code steps."""


@dataclass(frozen=True)
class Contradiction:
    """Figures of a warning: two rotation sizes (1: none), c read with each, and how many rows were looked at."""

    declared: int
    better: int
    c_declared: float
    c_better: float
    rows: int


def declared_size(spec: LayerSpec) -> int | None:
    """The rotation size a layer declares; 1 for none; None for formats whose weights are not integers on a grid."""
    if spec.format in ("convrot_w4a4", "asym_w4a8_int8"):
        return int(spec.get("convrot_groupsize"))
    if spec.format == "int8_tensorwise":
        return int(spec.get("convrot_groupsize")) if spec.get("convrot") else 1
    return 1 if spec.format == "quanto_int8" else None


@cache
def hadamard(g: int) -> Matrix:
    """H(g) = H4 (x) H4 (x) ... / sqrt(g), symmetric and its own inverse."""
    h4 = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], dtype=np.float32)
    matrix = np.ones((1, 1), dtype=np.float32)
    while matrix.shape[0] < g:
        matrix = np.kron(matrix, h4).astype(np.float32)
    return np.asarray(matrix / np.sqrt(g), dtype=np.float32)


def rotate(values: Matrix, g: int) -> Matrix:
    """Apply H(g) to contiguous groups of g columns."""
    if g == 1:
        return values
    return np.asarray((values.reshape(-1, g) @ hadamard(g)).reshape(values.shape), dtype=np.float32)


def contradiction(values: Matrix, declared: int) -> Contradiction | None:
    """The better candidate when the declared one is clearly not the basis of these weights; None otherwise."""
    columns = values.shape[1] // 16 * 16
    sizes = [g for g in CANDIDATES if columns % g == 0]
    if declared not in sizes:
        if declared > 256 or columns % declared:
            return None
        sizes.append(declared)
    unit = max(sizes)
    if unit < 16:
        return None
    x = values[:, :columns].reshape(-1, unit)
    energy = np.einsum("ij,ij->i", x, x) / unit
    keep = energy >= RESOLUTION**2
    if int(keep.sum()) < MIN_UNITS:
        return None
    rounding = _rounding(np.sqrt(energy[keep]))
    x = x[keep] / np.sqrt(energy[keep])[:, np.newaxis]
    blocks = np.broadcast_to(np.arange(columns // unit), (values.shape[0], columns // unit)).reshape(-1)[keep]
    logs = {g: _log_fourth_moment(rotate(x, g)) - np.log1p(rounding / g) for g in sizes}
    expected = _gaussian(unit)
    figures = {g: float(log.mean()) - expected for g, log in logs.items()}
    better = max(figures, key=lambda g: abs(figures[g]))
    c_declared, c_better = abs(figures[declared]), abs(figures[better])
    if better == declared or c_better < FLOOR or c_declared > RATIO * c_better:
        return None
    signs = np.sign(figures[better]), np.sign(figures[declared])
    difference = signs[0] * (logs[better] - expected) - signs[1] * (logs[declared] - expected)
    if c_better - c_declared < Z * _standard_error(x, blocks, difference):
        return None
    if max(_serial(rotate(x, declared)), _serial(rotate(x, better))) > SERIAL:
        return None
    return Contradiction(declared, better, figures[declared], figures[better], values.shape[0])


def _log_fourth_moment(x: Matrix) -> Matrix:
    """log mean(x^4) of units whose mean square is 1."""
    squares = x * x
    return np.asarray(np.log(np.einsum("ij,ij->i", squares, squares) / x.shape[1]), dtype=np.float32)


@cache
def _rounding_table() -> tuple[Matrix, Matrix]:
    """Excess kurtosis over 3 of a Gaussian rounded to integers, by the root mean square after rounding."""
    sigma = np.geomspace(0.15, 4.0, 200)
    codes = np.arange(1, 33)
    edges = np.array([[erf((k + half) / (s * sqrt(2.0))) for k in codes for half in (-0.5, 0.5)] for s in sigma])
    weights = edges[:, 1::2] - edges[:, 0::2]  # of +k and -k together
    second, fourth = weights @ codes**2.0, weights @ codes**4.0
    return np.sqrt(second).astype(np.float32), (fourth / second**2 / 3.0 - 1.0).astype(np.float32)


def _rounding(rms: Matrix) -> Matrix:
    return np.interp(rms, *_rounding_table()).astype(np.float32)


def _gaussian(n: int) -> float:
    """Expectation of the log fourth moment of n Gaussian values, normalised to mean square 1 (second order)."""
    mean = 3.0 * n / (n + 2)
    variance = 24.0 * n * (n - 2) * (n - 3) / ((n + 1) ** 2 * (n + 3) * (n + 5))
    return float(np.log(mean) - variance / (2 * mean * mean))


def _standard_error(x: Matrix, blocks: np.ndarray[tuple[int], np.dtype[np.intp]], difference: Matrix) -> float:
    """Of the mean difference between two candidates.

    Rows that resemble each other (low rank) are no independent evidence: their log fourth moments correlate as the
    fourth power of the rows' own correlation, summed here within each block.
    """
    total = 0.0
    for block in np.unique(blocks):
        rows = x[blocks == block]
        gram = (rows @ rows.T) / rows.shape[1]
        total += float(np.square(np.square(gram)).sum())
    spread = float(difference.std())
    return spread * sqrt(total) / len(difference)


def _serial(x: Matrix) -> float:
    """Mean squared correlation of a unit's values with their next three neighbours, beyond what chance gives."""
    n = int(x.shape[1])
    lags = [np.einsum("ij,ij->i", x[:, :-lag], x[:, lag:]) / n for lag in (1, 2, 3)]
    strongest = max(float(np.square(lag).mean()) for lag in lags)
    return strongest - 1.0 / n
