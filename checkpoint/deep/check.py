"""The order of the deep tests over one checkpoint, and the words of their warnings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..files import Checkpoint
from ..findings import Findings
from ..header import HeaderError
from ..report import LayerSpec
from . import layout, nibbles, rotation
from .decode import PACKED, Sample, take
from .floats import check_floats
from .ranges import check_codes
from .scales import check_block_scales
from .source import Source
from .zeros import check_zero_rows, check_zeros

SECONDS = 30.0
"""What the deep check may take; layers that do not fit are counted in a notice."""


def deep_check(
    checkpoint: Checkpoint, specs: Sequence[LayerSpec], findings: Findings, seconds: float = SECONDS
) -> None:
    """Look into the payload of layers that the header check found sound; adds ``extra.deep.*`` to ``findings``.

    Reads block scales, biases and corrections in full, 512-byte probes all over the weights, and about 2**17 weights
    a layer. Never raises for anything a file contains.
    """
    evidence = {name: nibbles.Evidence() for name in PACKED}
    done = 0
    with Source(checkpoint, seconds) as source:
        try:
            damaged = check_zeros(specs, source, findings)
            witnesses = nibbles.Witnesses(checkpoint.tensors.values())
            for spec in _spread(specs):
                if source.expired:
                    break
                _layer(spec, source, findings, witnesses, evidence, damaged)
                done += 1
        except HeaderError as error:
            findings.add_unreadable(checkpoint.paths[0], error)
            return
    for name, found in evidence.items():
        if found.contradicts:
            _nibble_order(name, found, findings)
    if done < len(specs):
        findings.add("extra.deep.partial", found=f"{done} of {len(specs)}", expected=f"{seconds:g} seconds")


def _spread(specs: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Every eighth layer first, then the others: when time runs out, all parts of the network have been looked at."""
    return [spec for first in range(8) for spec in specs[first::8]]


def _layer(
    spec: LayerSpec,
    source: Source,
    findings: Findings,
    witnesses: nibbles.Witnesses,
    evidence: dict[str, nibbles.Evidence],
    damaged: set[str],
) -> None:
    check_floats(spec, source, findings)
    if spec.name in damaged or not check_block_scales(spec, source, findings):
        return
    sample = take(spec, source)
    if sample is None or not check_codes(spec, sample, findings):
        return
    check_zero_rows(spec, sample.runs, sample.raw, source, findings)
    with np.errstate(over="ignore"):
        _rotation(spec, sample, findings)
        wrong = layout.contradiction(spec, sample)
        if wrong is not None:
            _scale_layout(spec, wrong, findings)
        else:
            nibbles.add_evidence(spec, sample, source, witnesses, evidence)


def _basis(size: int) -> str:
    return "not rotated" if size == 1 else f"rotated in groups of {size}"


def _rotation(spec: LayerSpec, sample: Sample, findings: Findings) -> None:
    declared = rotation.declared_size(spec)
    found = rotation.contradiction(sample.values, declared) if declared is not None else None
    if found is None:
        return
    rule = "extra.deep.rotation" if 1 in (found.declared, found.better) else "extra.deep.rotation_size"
    findings.add(
        rule,
        layer=spec.name,
        tensor="weight",
        expected=_basis(found.declared),
        found=_basis(found.better),
        c_declared=f"{found.c_declared:+.3f}",
        c_better=f"{found.c_better:+.3f}",
        rows=str(found.rows),
        variant=f"{found.declared}/{found.better}",
    )


def _scale_layout(spec: LayerSpec, wrong: layout.Spread, findings: Findings) -> None:
    findings.add(
        "extra.deep.scale_layout",
        layer=spec.name,
        tensor="weight_scale",
        expected="128x4 tiles",
        found="row by row",
        declared=f"{wrong.declared:.2f}",
        plain=f"{wrong.row_major:.2f}",
        balance_declared=f"{wrong.balance_declared:+.2f}",
        balance_plain=f"{wrong.balance_row_major:+.2f}",
        blocks=str(wrong.blocks),
        variant=spec.format,
    )


def _nibble_order(format_name: str, found: nibbles.Evidence, findings: Findings) -> None:
    high = format_name == "nvfp4"
    findings.add(
        "extra.deep.nibble_order",
        expected=f"the {'high' if high else 'low'} half of each byte first",
        found=f"the {'low' if high else 'high'} half first",
        format=format_name,
        against=str(found.against),
        count=str(len(found.scores)),
        total=f"{-found.total:.1f}",
        variant=format_name,
    )
