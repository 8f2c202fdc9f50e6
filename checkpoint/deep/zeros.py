"""Regions of zero bytes that a damaged download leaves: a preallocated file whose missing pieces were never written.

Probes of 512 bytes are laid evenly over the weights and block scales; neighbouring probes that hold only zeros make a
region, whose two ends are then found to the byte. A region counts only where the file itself contradicts it, for
zeros can be honest: pruned rows, unused vocabulary, layers that start at zero.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..dtypes import FLOATS, count, decode
from ..findings import Findings
from ..header import TensorInfo
from ..report import LayerSpec
from ..words import clean
from .decode import BLOCK
from .scales import scales_of_rows
from .source import Bytes, Rows, Source

PROBE = 512
MAX_PROBES = 8192
"""Per checkpoint."""
MIN_STRIDE = 32 << 10
MIN_REGION = 64 << 10
INSIDE_ROW = 256
"""Zeros must reach this many bytes into a row that has others before they count as cut off inside it."""
CHUNK = 64 << 10
MAX_REGIONS = 64
MAX_GAP = 1 << 20
ORDINARY = 30.0
"""A row scale within this factor of the layer's median is ordinary. (Writers give all-zero rows a tiny scale, or 1.)"""
TINY = 1e-8
MAX_ROW_SCALES = 64 << 20
_ROW_SCALES = {"int8_tensorwise": "weight_scale", "quanto_int8": "weight_scale", "convrot_w4a4": "weight_scale"}


@dataclass(frozen=True)
class Region:
    """Zero bytes from ``start`` to ``stop`` (absolute) of one file, over ``tensors``."""

    path: str
    start: int
    stop: int
    tensors: tuple[TensorInfo, ...]

    def part(self, tensor: TensorInfo) -> tuple[int, int]:
        """The region's part of a tensor's data, relative to the tensor."""
        return max(self.start, tensor.start) - tensor.start, min(self.stop, tensor.stop) - tensor.start


def check_zeros(specs: Iterable[LayerSpec], source: Source, findings: Findings) -> set[str]:
    """Names of the layers in damaged regions."""
    owners: dict[str, LayerSpec] = {}
    for spec in specs:
        for suffix in ("weight", "weight_scale", "weight_s_rel"):
            if suffix in spec.tensors:
                owners[spec.tensors[suffix]] = spec
    targets = [
        tensor
        for tensor in source.tensors.values()
        if tensor.nbytes >= MIN_REGION and (tensor.name in owners or len(tensor.shape) >= 2)
    ]
    damaged: set[str] = set()
    for number, region in enumerate(_regions(targets, source)):
        if number >= MAX_REGIONS or source.expired:
            break
        why = _contradiction(region, owners, source)
        if why is None:
            continue
        rule = "extra.deep.zeros" if why[0] else "extra.deep.zero_weight"
        where = f"from byte {region.start} of {clean(os.path.basename(region.path))}, {why[1]}"
        found = f"{_size(region.stop - region.start)} of zero bytes {where}"
        tensors = {owners[t.name].name: t.name for t in reversed(region.tensors) if t.name in owners}
        for layer, tensor in reversed(tensors.items()):
            findings.add(rule, layer=layer, tensor=tensor, expected="weights", found=found)
        if not tensors:
            findings.add(rule, tensor=region.tensors[0].name, expected="weights", found=found)
        damaged.update(tensors)
    return damaged


def _size(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.1f} MiB" if nbytes >= 1 << 20 else f"{nbytes / 1024:.0f} KiB"


def _regions(targets: list[TensorInfo], source: Source) -> Iterator[Region]:
    total = sum(tensor.nbytes for tensor in targets)
    stride = max(MIN_STRIDE, -(-total // MAX_PROBES))
    run: list[tuple[int, TensorInfo]] = []
    for tensor in sorted(targets, key=lambda tensor: (tensor.path, tensor.start)):
        if run and run[-1][1] is not tensor and not _joined(run[-1][1], tensor, source):
            yield from _refined(run, stride, source)
            run = []
        for offset in [*range(0, tensor.nbytes - PROBE, stride), tensor.nbytes - PROBE]:
            if source.expired:
                return
            if source.read(tensor, offset, PROBE).any():
                if run:
                    yield from _refined(run, stride, source)
                    run = []
            else:
                run.append((tensor.start + offset, tensor))
    if run:
        yield from _refined(run, stride, source)


def _joined(before: TensorInfo, after: TensorInfo, source: Source) -> bool:
    """Whether a hole may reach from one tensor to the next: nothing but zeros between them."""
    gap = after.start - before.stop
    if before.path != after.path or gap > MAX_GAP:
        return False
    return gap <= 0 or not source.at(before.path, before.stop, gap).any()


def _refined(run: list[tuple[int, TensorInfo]], stride: int, source: Source) -> Iterator[Region]:
    """The region around neighbouring zero probes, its ends found to the byte within the first and last tensor."""
    (first, head), (last, tail) = run[0], run[-1]
    start, stop = first, last + PROBE
    floor, ceiling = max(head.start, first - stride), min(tail.stop, stop + stride)
    while start > floor:
        size = min(CHUNK, start - floor)
        data = source.at(head.path, start - size, size)
        nonzero = np.flatnonzero(data)
        if nonzero.size:
            start -= size - int(nonzero[-1]) - 1
            break
        start -= size
    while stop < ceiling:
        size = min(CHUNK, ceiling - stop)
        nonzero = np.flatnonzero(source.at(tail.path, stop, size))
        if nonzero.size:
            stop += int(nonzero[0])
            break
        stop += size
    if stop - start >= MIN_REGION:
        yield Region(head.path, start, stop, tuple(dict.fromkeys(tensor for _, tensor in run)))


def _contradiction(region: Region, owners: Mapping[str, LayerSpec], source: Source) -> tuple[bool, str] | None:
    """(certain, why) when the file itself says that these bytes should not be zero."""
    partial = [tensor for tensor in region.tensors if region.part(tensor) != (0, tensor.nbytes)]
    if len(partial) > 1:
        return True, "across the border of two tensors"
    doubt: tuple[bool, str] | None = None
    for tensor in region.tensors:
        low, high = region.part(tensor)
        spec = owners.get(tensor.name)
        if spec is not None and spec.tensors["weight"] != tensor.name:
            if tensor.name != spec.tensors.get(_ROW_SCALES.get(spec.format, "")) and _codes_in_use(
                spec, tensor, low, high, source
            ):
                return True, "block scales of weights that are not zero"
            continue
        row = tensor.nbytes // count(tensor.shape[:-1])
        if high - low >= MIN_REGION and ((low % row and row - low % row >= INSIDE_ROW) or high % row >= INSIDE_ROW):
            return (
                (True, "which begin or end inside a row of weights")
                if spec is not None
                else (False, "which begin or end inside a row")
            )
        if spec is None:
            continue
        rows = range(-(-low // row), high // row)
        if len(rows) and _scales_in_use(spec, rows, source):
            return True, f"where the scales of rows {rows.start} to {rows.stop - 1} say that the weights are not zero"
        if len(rows) == spec.N and _shared_in_use(spec, source):
            doubt = (False, "a whole weight, whose scale says that it should not be zero")
    return doubt


def _scales_in_use(spec: LayerSpec, rows: range, source: Source) -> bool:
    """Whether row or block scales of rows whose codes are all zero say otherwise."""
    if spec.format in BLOCK or spec.format == "asym_w4a8_int8":
        scales = scales_of_rows(spec, source, rows)
        whole = len(rows) >= 128 or spec.format not in BLOCK  # a band holds the scales of 128 rows, zero ones or not
        return bool((scales != 0).mean() > (0.5 if whole else 1.0 - 0.5 * len(rows) / 128))
    suffix = _ROW_SCALES.get(spec.format)
    return suffix is not None and bool(_ordinary(spec, suffix, np.arange(rows.start, rows.stop), source).mean() > 0.5)


def _ordinary(spec: LayerSpec, suffix: str, rows: Rows, source: Source) -> npt.NDArray[np.bool_]:
    """Which of these rows have a scale like the other rows'; none where all rows share one."""
    tensor = source.tensors[spec.tensors[suffix]]
    nothing = np.zeros(len(rows), dtype=np.bool_)
    if tensor.dtype not in FLOATS or tensor.nbytes > MAX_ROW_SCALES:
        return nothing
    scales = decode(tensor.dtype, source.read(tensor, 0, tensor.nbytes).tobytes()).astype(np.float64)
    if scales.size != spec.N or scales.min() == scales.max():
        return nothing
    others = np.delete(scales, rows)
    middle = float(np.median(others if others.size else scales))
    mine = scales[rows]
    return np.asarray((mine > middle / ORDINARY) & (mine < middle * ORDINARY) & (mine > TINY) & (mine != 1.0))


def _shared_in_use(spec: LayerSpec, source: Source) -> bool:
    """Whether the scale of an all-zero weight is neither of the values that writers give to zeros."""
    tensor = source.tensors.get(spec.tensors.get("weight_scale", ""))
    if tensor is None or tensor.nbytes > MAX_ROW_SCALES or tensor.dtype not in FLOATS:
        return False
    scales = decode(tensor.dtype, source.read(tensor, 0, tensor.nbytes).tobytes())
    return TINY < float(np.median(scales)) < 1.0


def _codes_in_use(spec: LayerSpec, scale: TensorInfo, low: int, high: int, source: Source) -> bool:
    """Whether the weights behind zero block scales are not zero themselves, in a sample of rows."""
    weight = source.tensors[spec.tensors["weight"]]
    row_bytes = weight.nbytes // spec.N
    first = min(int(low / scale.nbytes * spec.N) + 128, spec.N - 1)
    last = max(first + 1, min(int(high / scale.nbytes * spec.N) - 128, spec.N))
    size = min(CHUNK, (last - first) * row_bytes)
    return bool((source.read(weight, first * row_bytes, size) != 0).mean() > 0.25)


def check_zero_rows(
    spec: LayerSpec,
    runs: list[range],
    raw: Bytes,
    source: Source,
    findings: Findings,
) -> None:
    """Sampled rows without any code beside a row scale that was computed from their largest one."""
    suffix = _ROW_SCALES.get(spec.format)
    if suffix is None:
        return
    zero = ~raw.any(axis=1)
    if not zero.any():
        return
    numbers = np.concatenate([np.arange(run.start, run.stop) for run in runs])
    numbers, sampled = numbers[zero], len(numbers)
    wrong = numbers[_ordinary(spec, suffix, numbers, source)]
    if wrong.size:
        listed = ", ".join(map(str, wrong[:4])) + (", …" if wrong.size > 4 else "")
        found = f"{wrong.size} of {sampled} sampled rows hold only zeros though their scales do not (rows {listed})"
        findings.add("extra.deep.zeros", layer=spec.name, tensor="weight", expected="weights", found=found)
