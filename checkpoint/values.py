"""The float scales of at most N or K entries a layer, read and judged: non-finite, zero or negative, implausible."""

from __future__ import annotations

import os
from collections.abc import Iterable

import numpy as np

from .dtypes import BITS, decode, is_float
from .files import Checkpoint
from .findings import Findings
from .header import HeaderError, RawFile, open_raw
from .layer import Read
from .words import clean

IMPLAUSIBLE = 1000.0
"""No known network has a weight of this magnitude."""
MAX_VALUES_BYTES = 256 << 20
CHUNK = 8 << 20


def check_values(reads: Iterable[Read], checkpoint: Checkpoint, findings: Findings) -> None:
    """Read every tensor of ``reads`` once, file by file in file order."""
    by_path: dict[str, list[Read]] = {}
    total = 0
    for read in reads:
        by_path.setdefault(read.tensor.path, []).append(read)
        total += read.tensor.nbytes
    if total > MAX_VALUES_BYTES:
        findings.add("extra.scale.count", found=f"{total >> 20} MiB", expected=f"{MAX_VALUES_BYTES >> 20} MiB")
        return
    stamps = {header.path: header.stamp for header in checkpoint.headers}
    for path, wanted in by_path.items():
        wanted.sort(key=lambda read: read.tensor.start)
        try:
            with open_raw(path) as raw:
                if raw.stamp != stamps[path]:
                    raise HeaderError("extra.file.changed", "its size or date is not what it was a moment ago")
                for read in wanted:
                    _judge(raw, read, findings)
        except HeaderError as error:
            rule = "extra.file.changed" if error.rule == "crash.file" else error.rule
            findings.add(rule, file=clean(os.path.basename(path)), found=error.detail)


def _judge(raw: RawFile, read: Read, findings: Findings) -> None:
    tensor = read.tensor
    if tensor.nbytes == 0 or not is_float(tensor.dtype):
        return
    low, high = np.inf, -np.inf
    step = CHUNK
    for start in range(tensor.start, tensor.stop, step):
        values = decode(tensor.dtype, raw.read_at(start, min(step, tensor.stop - start)))
        low, high = min(low, float(values.min())), max(high, float(values.max()))
        if not (np.isfinite(low) and np.isfinite(high)) or np.isnan(values).any():
            low = np.nan
            break
    if np.isfinite(low) and np.isfinite(high):
        if read.exactly_one:
            if low != 1.0 or high != 1.0:
                findings.add("extra.quanto.aux_not_one", layer=read.layer, tensor=read.suffix, expected="1", found=f"{low:g}")
            return
        if read.signed or low > 0.0:
            _plausible(read, high, findings)
            return
    _name_rows(raw, read, findings)


def _plausible(read: Read, high: float, findings: Findings) -> None:
    reach = read.reach * high
    if reach > IMPLAUSIBLE and high != 1.0:
        findings.add(
            "extra.scale.implausible", layer=read.layer, tensor=read.suffix, expected=f"{reach:.3g}", found=f"up to {high:.3g}"
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
        seen += values.size
    scalar = tensor.nbytes * 8 == BITS[tensor.dtype]
    for rule, kinds_of_rule in (("extra.scale.nonfinite", ("nan", "inf")), ("extra.scale.not_positive", ("low",))):
        parts = [_describe(kind, counts[kind], rows[kind], seen, scalar) for kind in kinds_of_rule if counts[kind]]
        if parts:
            findings.add(
                rule,
                layer=read.layer,
                tensor=read.suffix,
                expected="finite numbers" if rule.endswith("nonfinite") else "positive numbers",
                found=" and ".join(parts),
            )


def _describe(kind: str, count: int, rows: list[int], total: int, scalar: bool) -> str:
    word = {"nan": "NaN", "inf": "an infinite value", "low": "a zero or negative value"}[kind]
    if scalar:
        return word
    listed = ", ".join(map(str, rows)) + (", …" if count > len(rows) else "")
    if count == 1:
        return f"{word} in row {listed}"
    return f"{count} of {total} values {'NaN' if kind == 'nan' else 'infinite' if kind == 'inf' else 'zero or negative'} (rows {listed})"
