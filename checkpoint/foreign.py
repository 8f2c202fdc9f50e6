"""Recognising other tools' formats by their tensors and metadata, so that they are refused by name."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Set
from typing import Any

from .findings import Findings
from .header import TensorInfo
from .words import clean, show

_SVDQUANT = ("wscales", "smooth_factor", "proj_down", "proj_up", "smooth", "smooth_orig", "lora_down", "lora_up")


_TELLING = frozenset({"qweight", "weight_packed", "input_global_scale", "absmax", "SCB"})


def recognise(
    tensors: Mapping[str, TensorInfo],
    suffixes: Set[str],
    metadata: Mapping[str, str],
    declared: bool,
    findings: Findings,
) -> bool:
    """Report foreign formats. True when the tensors are certainly another tool's.

    ``suffixes`` are the last parts of all tensor names; ``declared``: the file has Comfy declarations.
    """
    telling = bool(suffixes & _TELLING) or any(suffix.startswith("bitsandbytes__") for suffix in suffixes)
    if telling and _by_tensors(Counter(name.rsplit(".", 1)[-1] for name in tensors), metadata, findings):
        return True
    if not declared:
        _configured(metadata, findings)
    return False


def _by_tensors(ends: Counter[str], metadata: Mapping[str, str], findings: Findings) -> bool:
    if ends["qweight"] and (ends["wscales"] or "svdquant" in metadata.get("quantization_config", "").lower()):
        extra = [end for end in _SVDQUANT if ends[end]]
        findings.add(
            "extra.foreign.svdquant", found=f"{ends['qweight']} layers with qweight and {', '.join(extra[:3])}"
        )
        return True
    if ends["qweight"] and (ends["qzeros"] or ends["scales"]):
        findings.add(
            "extra.foreign.gptq",
            found=f"{ends['qweight']} layers with qweight, {'qzeros' if ends['qzeros'] else 'scales'}",
        )
        return True
    states = sum(count for end, count in ends.items() if end.startswith(("bitsandbytes__nf4", "bitsandbytes__fp4")))
    if states or (ends["absmax"] and ends["quant_map"]) or ends["SCB"]:
        findings.add(
            "extra.foreign.bitsandbytes",
            found=f"{max(states, ends['absmax'], ends['SCB'])} layers with its quantisation state",
        )
        return True
    if ends["weight_packed"] and (ends["weight_global_scale"] or ends["weight_shape"] or ends["weight_scale"]):
        tool = "compressed-tensors" if ends["weight_shape"] else "FastVideo or compressed-tensors"
        findings.add("extra.foreign.compressed", found=f"{tool}: {ends['weight_packed']} layers with weight_packed")
        return True
    if ends["input_global_scale"] and ends["alpha"]:
        findings.add(
            "extra.foreign.compressed",
            found=f"LightX2V: {ends['input_global_scale']} layers with input_global_scale and alpha",
        )
        return True
    return False


def _configured(metadata: Mapping[str, str], findings: Findings) -> None:
    """A ``quantization_config`` in the metadata of a file that has no Comfy declaration."""
    text = metadata.get("quantization_config")
    if text is None:
        return
    try:
        config: Any = json.loads(text)
    except (ValueError, RecursionError):
        return
    if not isinstance(config, dict):
        return
    method = config.get("quant_method") or config.get("method") or config.get("producer")
    algorithm = config.get("quant_algo") or config.get("weight_dtype") or ""
    words = f"{show(method)} {show(algorithm)}" if algorithm else show(method)
    if "modelopt" in json.dumps(method).lower():
        findings.add("extra.foreign.modelopt", found=f"quantization_config says {clean(words)}")
    elif method is not None:
        findings.add("extra.foreign.declared", found=clean(words))
