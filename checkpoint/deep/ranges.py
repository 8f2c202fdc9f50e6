"""Codes outside what the format's quantisers write, in the sampled rows."""

from __future__ import annotations

import numpy as np

from ..findings import Findings
from ..report import LayerSpec
from .decode import Sample, nibbles


def check_codes(spec: LayerSpec, sample: Sample, findings: Findings) -> bool:
    """False when codes are no numbers."""
    rows = len(sample.raw)
    if spec.format in ("float8_e4m3fn", "float8_e5m2", "mxfp8"):
        kinds = {"NaN": int(np.isnan(sample.values).sum()), "infinite": int(np.isinf(sample.values).sum())}
        parts = [f"{number} {kind}" for kind, number in kinds.items() if number]
        if parts:
            found = f"{' and '.join(parts)} of {sample.values.size} sampled codes"
            findings.add("extra.deep.code_nan", layer=spec.name, tensor="weight", expected="numbers", found=found)
        return not parts
    if spec.format in ("int8_tensorwise", "quanto_int8"):
        least = int((sample.raw == 0x80).sum())
        if least:
            found = f"{least} of {sample.raw.size} sampled codes"
            findings.add("extra.deep.int8_min", layer=spec.name, tensor="weight", expected="-127 to 127", found=found)
    elif spec.format == "convrot_w4a4":
        codes = nibbles(sample.raw, high_first=False)
        least = int((codes == 8).sum())
        if least:
            found = f"{least} of {codes.size} codes in {rows} sampled rows"
            findings.add("extra.deep.int4_min", layer=spec.name, tensor="weight", expected="-7 to 7", found=found)
    return True
