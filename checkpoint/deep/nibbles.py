"""Are the two 4-bit codes of a byte in the declared order?

The other order exchanges the inputs 2j and 2j+1 everywhere, which no property of single blocks or rows shows. (It
commutes with H(g) as well: un-rotating first changes nothing.) Only something that ties input channels to an order
shows it:

* a witness: another tensor of the same block with one value per input channel (a norm's gain, the previous layer's
  bias or row scales, the layer's own pre_quant_scale) whose size goes with the energy of the weight's columns. The
  means over pairs of channels do not depend on the nibble order and tell how strongly the two go together; the
  differences within pairs must then go together with the same sign;
* neighbours: weights that vary smoothly over the inputs (filters over pixels or frequencies). Correlations at even
  distances do not depend on the nibble order and tell how fast they fall; then 2j+1 and 2j+2 must hang together more
  than 2j and 2j+3.

Without either, nothing can be known. A tool packs all layers one way, so the evidence of all layers of one format is
added up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..dtypes import WIDE_FLOATS, count, decode
from ..header import TensorInfo
from ..report import LayerSpec
from .decode import PACKED, Sample
from .rotation import declared_size, rotate
from .source import Matrix, Source

Vector = npt.NDArray[np.float64]

MIN_CHANNELS = 128
MAX_CHANNELS = 1 << 18
MAX_WITNESSES = 16
Z_RELATION = 6.0
"""Least significance of the relation that does not depend on the order, before it counts."""
Z = 6.0
MAJORITY = 0.8


@dataclass
class Evidence:
    """Signed significances of the layers of one format: positive for the declared order."""

    scores: list[float] = field(default_factory=list)

    @property
    def total(self) -> float:
        return float(np.sum(self.scores) / np.sqrt(len(self.scores))) if self.scores else 0.0

    @property
    def against(self) -> int:
        return sum(score < 0 for score in self.scores)

    @property
    def contradicts(self) -> bool:
        return self.total <= -Z and self.against >= MAJORITY * len(self.scores)


class Witnesses:
    """Float tensors with one value per channel, by block of the network and length."""

    def __init__(self, tensors: Iterable[TensorInfo]) -> None:
        self._found: dict[tuple[str, int], list[TensorInfo]] = {}
        for tensor in tensors:
            length = count(tensor.shape)
            if tensor.dtype in WIDE_FLOATS and MIN_CHANNELS <= length <= MAX_CHANNELS and max(tensor.shape) == length:
                known = self._found.setdefault((_scope(tensor.name), length), [])
                if len(known) < MAX_WITNESSES:
                    known.append(tensor)

    def of(self, spec: LayerSpec) -> list[TensorInfo]:
        """Candidates for a layer's input channels; not its own scales and bias, which describe its outputs."""
        weight = spec.tensors["weight"]
        own = {*spec.tensors.values(), f"{weight.removesuffix('weight')}bias"} - {spec.tensors.get("pre_quant_scale")}
        return [t for t in self._found.get((_scope(weight), spec.K), ()) if t.name not in own]


def _scope(name: str) -> str:
    """``model.blocks.3.mlp.fc1.bias`` -> ``model.blocks.3``: the first numbered part ends it."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return ""


def add_evidence(
    spec: LayerSpec, sample: Sample, source: Source, witnesses: Witnesses, found: Mapping[str, Evidence]
) -> None:
    """What this layer says about the order of its format's nibbles, added to ``found``."""
    values = _dense(spec, sample)
    if values is None:
        return
    evidence = found[spec.format]
    energies = np.square(values, dtype=np.float64).sum(axis=0)
    strongest, score = Z_RELATION, None
    for tensor in witnesses.of(spec):
        stored = decode(tensor.dtype, source.read(tensor, 0, tensor.nbytes).tobytes())
        relation, within = pair_scores(energies, np.abs(stored[: len(energies)].astype(np.float64)))
        if abs(relation) > strongest and abs(within) > 0.25 * abs(relation):
            strongest, score = abs(relation), within * np.sign(relation)
    if score is not None:
        evidence.scores.append(float(score))
    neighbours = neighbour_score(values)
    if neighbours is not None:
        evidence.scores.append(neighbours)


def _dense(spec: LayerSpec, sample: Sample) -> Matrix | None:
    """Rows in the basis of the network's own channels, each with mean square 1."""
    if spec.format not in PACKED:
        return None
    values = np.nan_to_num(sample.values)
    if spec.format == "nvfp4":
        if sample.blocks is None:
            return None
        scales = np.repeat(np.nan_to_num(sample.blocks[0]), 16, axis=1)
        values = values[:, : scales.shape[1]] * scales
    else:
        size = declared_size(spec)
        if size is None or values.shape[1] % size:
            return None
        values = rotate(values, size)
    values = values[:, : values.shape[1] // 2 * 2]
    rms = np.sqrt(np.square(values).mean(axis=1))
    values = values[rms > 0] / rms[rms > 0][:, np.newaxis]
    return values if len(values) >= 16 and values.shape[1] >= MIN_CHANNELS else None


def pair_scores(energies: Vector, witness: Vector) -> tuple[float, float]:
    """Rank correlations, in standard deviations: of pair means, which no nibble order changes, and within pairs."""
    u, v = _centred_ranks(energies), _centred_ranks(witness)
    if u is None or v is None:
        return 0.0, 0.0
    between = _correlation(u[0::2] + u[1::2], v[0::2] + v[1::2])
    within = _correlation(u[0::2] - u[1::2], v[0::2] - v[1::2])
    scale = np.sqrt(len(u) / 2 - 1)
    return float(between * scale), float(within * scale)


def _centred_ranks(x: Vector) -> Vector | None:
    """Ranks (ties share theirs), centred; None for vectors that are mostly one value or not finite."""
    if not np.all(np.isfinite(x)):
        return None
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    if counts.max() > len(x) // 4:
        return None
    middle = np.cumsum(counts) - (counts + 1) / 2
    ranks = middle[inverse] - (len(x) - 1) / 2
    return np.asarray(ranks, dtype=np.float64)


def _correlation(a: Vector, b: Vector) -> float:
    a, b = a - a.mean(), b - b.mean()
    norm = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / norm if norm > 0 else 0.0


def neighbour_score(values: Matrix) -> float | None:
    """Signed significance from smoothness over the inputs.

    None unless the correlations at distances 2, 4 and 6 are positive and fall, and the difference is as large as they
    let expect.
    """
    at = {lag: float(np.mean(values[:, :-lag] * values[:, lag:])) for lag in (2, 4, 6)}
    if not (at[2] > 0.1 and 0.95 * at[2] > at[4] > at[6] > 0.0):
        return None
    fall = np.sqrt(at[4] / at[2])
    expected = min(at[2] / fall, 1.0) - at[2] * fall
    a, b, c, d = values[:, 0:-3:2], values[:, 1:-2:2], values[:, 2:-1:2], values[:, 3::2]
    difference = b * c - a * d
    mean = float(difference.mean())
    if abs(mean) < 0.5 * expected:
        return None
    errors = [
        float(part.std()) / np.sqrt(len(part)) for part in (difference.mean(axis=1), _blocks(difference.mean(axis=0)))
    ]
    return float(mean / max(*errors, 1e-12))


def _blocks(x: Matrix) -> Matrix:
    """Means over blocks of 16."""
    return np.asarray(x[: len(x) // 16 * 16].reshape(-1, 16).mean(axis=1), dtype=np.float32)
