"""The float scales of at most N or K entries a layer, read and judged: non-finite, zero or negative, implausible.

Tensors are read in batches into one small buffer and a whole batch is judged by its extremes; only a batch with
something wrong in it is taken apart tensor by tensor.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

import numpy as np

from .dtypes import BITS, FLOATS, Floats, decode
from .files import Checkpoint
from .findings import Findings
from .header import Header, HeaderError, RawFile, TensorInfo, open_again
from .layer import Read

IMPLAUSIBLE = 1000.0
"""No known network has a weight of this magnitude."""
MAX_VALUES_BYTES = 256 << 20
CHUNK = 1 << 20
BATCH = 1 << 18
"""Bytes judged together: they stay in the processor's second-level cache between reading and judging."""


class Batch:
    """Float tensors that are judged by one measure (see :class:`.layer.Read`), as columns: there are thousands."""

    def __init__(self, dtype: str, signed: bool, reach: float, exactly_one: bool) -> None:
        self.dtype = dtype
        self.signed = signed
        self.reach = reach
        self.exactly_one = exactly_one
        self.layers: list[str] = []
        self.tensors: list[TensorInfo] = []
        self.suffixes: list[str] = []

    def read(self, number: int) -> Read:
        """One of the tensors, for a closer look."""
        measure = (self.signed, self.reach, self.exactly_one)
        return Read(self.layers[number], self.tensors[number], self.suffixes[number], *measure)

    def within(self, path: str) -> Batch:
        """Only the tensors of one file."""
        part = Batch(self.dtype, self.signed, self.reach, self.exactly_one)
        for layer, tensor, suffix in zip(self.layers, self.tensors, self.suffixes, strict=True):
            if tensor.path == path:
                part.layers.append(layer)
                part.tensors.append(tensor)
                part.suffixes.append(suffix)
        return part


class Reads:
    """The tensors whose values a check looks at."""

    def __init__(self) -> None:
        self.batches: dict[tuple[str, bool, float, bool], Batch] = {}

    def batch_for(self, read: Read) -> Batch | None:
        """Where tensors like this one belong; None for what has no values to judge (empty, or no float)."""
        _, tensor, _, signed, reach, exactly_one = read
        if tensor.dtype not in FLOATS or tensor.nbytes == 0:
            return None
        key = (tensor.dtype, signed, reach, exactly_one)
        if key not in self.batches:
            self.batches[key] = Batch(*key)
        return self.batches[key]

    def add(self, read: Read) -> None:
        batch = self.batch_for(read)
        if batch is not None:
            batch.layers.append(read.layer)
            batch.tensors.append(read.tensor)
            batch.suffixes.append(read.suffix)


def check_values(reads: Reads, checkpoint: Checkpoint, findings: Findings) -> None:
    """Read every tensor of ``reads`` once, file by file."""
    total = sum([tensor[4] - tensor[3] for batch in reads.batches.values() for tensor in batch.tensors])
    if total > MAX_VALUES_BYTES:
        findings.add("extra.scale.count", found=f"{total >> 20} MiB", expected=f"{MAX_VALUES_BYTES >> 20} MiB")
        return
    batches = [reads.batches[key] for key in sorted(reads.batches)]
    buffer = memoryview(bytearray(min(BATCH, total)))
    if len(checkpoint.headers) == 1:
        _judge_file(checkpoint.headers[0], batches, buffer, findings)
        return
    for header in sorted(checkpoint.headers, key=lambda header: header.path):
        _judge_file(header, [batch.within(header.path) for batch in batches], buffer, findings)


def _judge_file(header: Header, batches: list[Batch], buffer: memoryview, findings: Findings) -> None:
    if not any(batch.tensors for batch in batches):
        return
    try:
        with open_again(header.path, header.stamp) as raw:
            for batch in batches:
                _judge_batch(raw, batch, buffer, findings)
    except HeaderError as error:
        findings.add_unreadable(header.path, error)


def _judge_batch(raw: RawFile, batch: Batch, buffer: memoryview, findings: Findings) -> None:
    """What fits the buffer together is judged together."""
    spans = [(start, stop) for _, _, _, start, stop, _ in batch.tensors]
    filled = [0, *accumulate([stop - start for start, stop in spans])]
    first = 0
    while first < len(spans):
        last = bisect_right(filled, filled[first] + len(buffer), first) - 1
        if last == first:
            _judge_alone(raw, batch.read(first), findings)
            last += 1
        else:
            data = buffer[: filled[last] - filled[first]]
            raw.read_into(data, spans[first:last])
            _judge_together(raw, batch, range(first, last), data, findings)
        first = last


def _as_used(dtype: str, data: bytes | memoryview) -> Floats:
    """The values in the precision that they are used in: a 64-bit scale may be infinite or zero there."""
    values = decode(dtype, data)
    if values.dtype != np.float64:
        return values
    with np.errstate(over="ignore", under="ignore"):
        return values.astype(np.float32)


def _judge_together(raw: RawFile, batch: Batch, numbers: range, data: memoryview, findings: Findings) -> None:
    """``data`` holds the content of the batch's tensors with these numbers."""
    values = _as_used(batch.dtype, data)
    low, high = float(values.min()), float(values.max())  # NaN if any value is
    if high < np.inf and low > (-np.inf if batch.signed else 0.0):
        if batch.exactly_one:
            if low == high == 1.0:
                return
        elif high * batch.reach <= IMPLAUSIBLE:
            return
    for number in numbers:
        _judge_alone(raw, batch.read(number), findings)


def _judge_alone(raw: RawFile, read: Read, findings: Findings) -> None:
    tensor = read.tensor
    low, high = np.inf, -np.inf
    for start in range(tensor.start, tensor.stop, CHUNK):
        values = _as_used(tensor.dtype, raw.read_at(start, min(CHUNK, tensor.stop - start)))
        smallest, largest = float(values.min()), float(values.max())
        if not (np.isfinite(smallest) and np.isfinite(largest)):
            low = np.nan
            break
        low, high = min(low, smallest), max(high, largest)
    if np.isnan(low) or not (read.signed or read.exactly_one or low > 0.0):
        rule = "extra.scale.nonfinite" if np.isnan(low) else "extra.scale.not_positive"
        if findings.counted(rule):
            findings.add(rule, layer=read.layer)
        else:
            _name_rows(raw, read, findings)
    elif read.exactly_one:
        if not low == high == 1.0:
            findings.add(
                "extra.quanto.aux_not_one", layer=read.layer, tensor=read.suffix, expected="1", found=f"{low:g}"
            )
    elif read.reach * high > IMPLAUSIBLE and high != 1.0:  # a scale of exactly 1 says nothing: plain storage
        findings.add(
            "extra.scale.implausible",
            layer=read.layer,
            tensor=read.suffix,
            expected=f"{read.reach * high:.3g}",
            found=f"{high:.3g}" if low == high else f"up to {high:.3g}",
        )


def _name_rows(raw: RawFile, read: Read, findings: Findings) -> None:
    """Second pass over a tensor with bad values: which entries, and what they hold."""
    tensor = read.tensor
    counts = {"nan": 0, "inf": 0, "low": 0}
    rows: dict[str, list[int]] = {"nan": [], "inf": [], "low": []}
    seen = 0
    for start in range(tensor.start, tensor.stop, CHUNK):
        values = _as_used(tensor.dtype, raw.read_at(start, min(CHUNK, tensor.stop - start)))
        kinds = {"nan": np.isnan(values), "inf": np.isinf(values)}
        if not read.signed:
            kinds["low"] = np.isfinite(values) & (values <= 0)
        for kind, mask in kinds.items():
            where = np.flatnonzero(mask)
            counts[kind] += int(where.size)
            rows[kind].extend(int(i) + seen for i in where[: 4 - len(rows[kind])])
        seen += int(values.size)
    scalar = tensor.nbytes * 8 == BITS[tensor.dtype]
    for rule, expected, kinds_of_rule in (
        ("extra.scale.nonfinite", "finite numbers", ("nan", "inf")),
        ("extra.scale.not_positive", "positive numbers", ("low",)),
    ):
        parts = [_describe(kind, counts[kind], rows[kind], seen, scalar) for kind in kinds_of_rule if counts[kind]]
        if parts:
            findings.add(rule, layer=read.layer, tensor=read.suffix, expected=expected, found=" and ".join(parts))


def _describe(kind: str, count: int, rows: list[int], total: int, scalar: bool) -> str:
    one, many = {
        "nan": ("NaN", "NaN"),
        "inf": ("an infinite value", "infinite"),
        "low": ("a zero or negative value", "zero or negative"),
    }[kind]
    if scalar:
        return one
    listed = ", ".join(map(str, rows)) + (", …" if count > len(rows) else "")
    return f"{one} in row {listed}" if count == 1 else f"{count} of {total} values {many} (rows {listed})"
