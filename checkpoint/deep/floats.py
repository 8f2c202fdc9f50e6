"""Floats beside the codes that the header check leaves unread, in full: biases, and W4A8 corrections."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..dtypes import BITS, FLOATS, decode
from ..findings import Findings
from ..header import TensorInfo
from ..report import LayerSpec
from .source import Source

_WEIGHT_ENDS = (".weight", ".weight._data")


def check_floats(spec: LayerSpec, source: Source, findings: Findings) -> None:
    """Name the tensors that hold a NaN or an infinite value: one is enough for a black picture."""
    for suffix, tensor in _beside(spec, source):
        bad = {"NaN": 0, "infinite": 0}
        for _, data in source.chunks(tensor):
            values = decode(tensor.dtype, data.data)
            if not np.isfinite(values).all():
                bad["NaN"] += int(np.isnan(values).sum())
                bad["infinite"] += int(np.isinf(values).sum())
        parts = [f"{number} {kind}" for kind, number in bad.items() if number]
        if parts:
            findings.add(
                "extra.deep.nonfinite",
                layer=spec.name,
                tensor=suffix,
                expected="finite numbers",
                found=f"{' and '.join(parts)} of {tensor.nbytes * 8 // BITS[tensor.dtype]} values",
            )


def _beside(spec: LayerSpec, source: Source) -> Iterator[tuple[str, TensorInfo]]:
    weight = spec.tensors["weight"]
    prefix = next((weight.removesuffix(end) for end in _WEIGHT_ENDS if weight.endswith(end)), weight)
    for suffix in ("bias", "weight_correction"):
        tensor = source.tensors.get(spec.tensors.get(suffix, f"{prefix}.{suffix}"))
        if tensor is not None and tensor.dtype in FLOATS:
            yield suffix, tensor
