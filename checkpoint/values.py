"""The float scales of at most N or K entries a layer, read and judged: non-finite, zero or negative, implausible.

Tensors are read in batches into one small buffer and a whole batch is judged by its extremes; only a batch with
something wrong in it is taken apart tensor by tensor.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import groupby

import numpy as np

from .dtypes import BITS, decode, is_float
from .files import Checkpoint
from .findings import Findings
from .header import HeaderError, RawFile, Stamp, open_raw
from .layer import Read
from .words import clean

IMPLAUSIBLE = 1000.0
"""No known network has a weight of this magnitude."""
MAX_VALUES_BYTES = 256 << 20
CHUNK = 1 << 20


def check_values(reads: Iterable[Read], checkpoint: Checkpoint, findings: Findings) -> None:
    """Read every tensor of ``reads`` once, file by file in file order."""
    groups: dict[tuple[str, str, bool, bool], list[Read]] = {}
    total = 0
    for read in reads:
        _, dtype, _, start, stop, path = read.tensor
        if stop > start and is_float(dtype):
            total += stop - start
            key = (path, dtype, read.signed, read.exactly_one)
            if key in groups:
                groups[key].append(read)
            else:
                groups[key] = [read]
    if total > MAX_VALUES_BYTES:
        findings.add("extra.scale.count", found=f"{total >> 20} MiB", expected=f"{MAX_VALUES_BYTES >> 20} MiB")
        return
    stamps = {header.path: header.stamp for header in checkpoint.headers}
    buffer = memoryview(bytearray(min(CHUNK, total)))
    for path, keys in groupby(sorted(groups), key=lambda key: key[0]):
        _judge_file(path, stamps[path], [groups[key] for key in keys], buffer, findings)


def _judge_file(path: str, stamp: Stamp, batches: list[list[Read]], buffer: memoryview, findings: Findings) -> None:
    try:
        with open_raw(path) as raw:
            if raw.stamp != stamp:
                raise HeaderError("extra.file.changed", "its size or date is not what it was a moment ago")
            for batch in batches:
                _judge_batch(raw, batch, buffer, findings)
    except HeaderError as error:
        rule = "extra.file.changed" if error.rule == "crash.file" else error.rule
        findings.add(rule, file=clean(os.path.basename(path)), found=error.detail)


def _judge_batch(raw: RawFile, batch: list[Read], buffer: memoryview, findings: Findings) -> None:
    """Judge tensors of one dtype and kind. What fits the buffer together is read together."""
    pending: list[Read] = []
    filled = 0
    room = len(buffer)
    for read in batch:
        _, _, _, start, stop, _ = read.tensor
        size = stop - start
        if filled + size > room and pending:
            _judge_together(raw, pending, buffer[:filled], findings)
            pending, filled = [], 0
        if size > room:
            _judge_alone(raw, read, findings)
            continue
        raw.read_into(start, buffer[filled : filled + size])
        filled += size
        pending.append(read)
    if pending:
        _judge_together(raw, pending, buffer[:filled], findings)


def _judge_together(raw: RawFile, reads: list[Read], data: memoryview, findings: Findings) -> None:
    values = decode(reads[0].tensor.dtype, data)
    low, high = float(values.min()), float(values.max())  # NaN if any value is
    if high < np.inf and low > (-np.inf if reads[0].signed else 0.0):
        if reads[0].exactly_one:
            if low == high == 1.0:
                return
        elif high * max([read.reach for read in reads]) <= IMPLAUSIBLE:
            return
    for read in reads:
        _judge_alone(raw, read, findings)


def _judge_alone(raw: RawFile, read: Read, findings: Findings) -> None:
    tensor = read.tensor
    low, high = np.inf, -np.inf
    for start in range(tensor.start, tensor.stop, CHUNK):
        values = decode(tensor.dtype, raw.read_at(start, min(CHUNK, tensor.stop - start)))
        smallest, largest = float(values.min()), float(values.max())
        if not (np.isfinite(smallest) and np.isfinite(largest)):
            low = np.nan
            break
        low, high = min(low, smallest), max(high, largest)
    if np.isnan(low) or not (read.signed or read.exactly_one or low > 0.0):
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
        values = decode(tensor.dtype, raw.read_at(start, min(CHUNK, tensor.stop - start)))
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
