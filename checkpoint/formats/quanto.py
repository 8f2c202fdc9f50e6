"""Quanto INT8 (``qint8``): declared by the file's metadata, not by markers.

W[n, k] = weight._data[n, k] * weight._scale[n, 0]          weight-only; input_scale and output_scale must be 1
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping
from typing import Any

from ..declarations import too_deep, too_many
from ..findings import Findings
from ..header import TensorInfo, has_big_integer
from ..layer import Read, check_bias, look, typed
from ..report import LayerSpec
from ..words import clean, dims, listing, show

NAME = "quanto_int8"
_DATA = ".weight._data"
_SCALE = ".weight._scale"
_REQUIRED = (_DATA, _SCALE, ".input_scale", ".output_scale")
_FLOATS = ("BF16", "F16", "F32")


def is_quanto(metadata: Mapping[str, str]) -> bool:
    """Only the exact word counts, as in the reference."""
    return metadata.get("quantization_format") == "quanto"


def check(
    metadata: Mapping[str, str],
    path: str,
    tensors: Mapping[str, TensorInfo],
    findings: Findings,
    rename: Callable[[str], str],
) -> tuple[list[LayerSpec], list[Read], set[str]]:
    """The layers of a Quanto file, the scales to look at, and the tensors that its map uses."""
    entries = _read_map(metadata, path, findings)
    used = {name for name in tensors if name.endswith((_DATA, _SCALE))}
    if entries is None:
        return [], [], used
    packed = {name[: -len(_DATA)] for name in tensors if name.endswith(_DATA)}
    for prefix in sorted(packed - set(entries)):
        findings.add(
            "quanto.prefix_mismatch",
            layer=prefix,
            expected="an entry in the map",
            found="has packed tensors but no entry in the map",
        )
    for prefix in sorted(set(entries) - packed):
        findings.add(
            "quanto.prefix_mismatch",
            layer=prefix,
            expected="packed tensors",
            found="is in the map but has no packed weight in the file",
        )
    specs: list[LayerSpec] = []
    reads: list[Read] = []
    renamed: dict[str, str] = {}
    for prefix, entry in entries.items():
        used.update(f"{prefix}{suffix}" for suffix in _REQUIRED)
        if prefix not in packed:
            continue
        spec = _layer(prefix, entry, tensors, findings, reads)
        target = rename(prefix)
        if target in renamed:
            findings.add("quanto.collision", layer=target, found=f"{clean(renamed[target])} and {clean(prefix)}")
        else:
            renamed[target] = prefix
        if spec is not None:
            specs.append(LayerSpec(target, NAME, spec[0], spec[1], "quanto_map", {}, (), spec[2]))
    return specs, reads, used


def _read_map(metadata: Mapping[str, str], path: str, findings: Findings) -> dict[str, dict[str, Any]] | None:
    text = metadata.get("quantization_map_base64")
    if text is None:
        findings.add(
            "quanto.map_missing", expected="quantization_map_base64 in the metadata", found=listing(sorted(metadata))
        )
        return None
    try:
        raw = base64.b64decode(text.encode("ascii"), validate=True).decode("utf-8")
        document = json.loads(raw)
        if too_deep(document):
            raise RecursionError
    except RecursionError:
        findings.add("crash.quanto.recursion")
        return None
    except (binascii.Error, UnicodeError):
        findings.add("quanto.map_base64", found="it is not base64 of UTF-8 text")
        return None
    except ValueError as error:
        findings.add(
            "quanto.map_base64",
            found="it holds a number with thousands of digits" if has_big_integer(error) else "it is not JSON",
        )
        return None
    if not isinstance(document, dict) or not document:
        findings.add("quanto.map_empty", found=show(document), expected="an object")
        return None
    if too_many(len(document), path, findings):
        return None
    bad = [prefix for prefix, entry in document.items() if not isinstance(entry, dict)]
    for prefix in bad:
        findings.add("quanto.map_entries", layer=prefix, found=show(document[prefix]), expected="an object")
    return {prefix: entry for prefix, entry in document.items() if isinstance(entry, dict)}


def _layer(
    prefix: str, entry: dict[str, Any], tensors: Mapping[str, TensorInfo], findings: Findings, reads: list[Read]
) -> tuple[tuple[int, int], int, dict[str, str]] | None:
    sound = True

    def fault(rule: str, **words: Any) -> None:
        nonlocal sound
        sound = False
        findings.add(rule, layer=prefix, **words)

    if entry.get("weights") != "qint8":
        fault("quanto.weights_type", expected='"qint8"', found=show(entry.get("weights")))
    if entry.get("activations") != "none":
        fault("quanto.activations_type", expected='"none"', found=show(entry.get("activations")))
    missing = [suffix for suffix in _REQUIRED if prefix + suffix not in tensors]
    if missing:
        fault(
            "quanto.missing_tensors",
            expected=", ".join(s[1:] for s in _REQUIRED),
            found=", ".join(s[1:] for s in missing),
        )
    if f"{prefix}.weight" in tensors:
        fault(
            "quanto.dense_and_packed",
            tensor=f"{prefix}.weight",
            expected="weight._data alone",
            found="weight and weight._data",
        )
    data, scale = tensors.get(prefix + _DATA), tensors.get(prefix + _SCALE)
    if data is not None and (data.dtype != "I8" or len(data.shape) != 2):
        fault(
            "quanto.data",
            tensor=data.name,
            expected="I8 with 2 dimensions",
            found=data.dtype,
            shape=dims(data.shape),
            look=look(data.shape),
        )
        data = None
    if data is not None and 0 in data.shape:
        fault("extra.shape.empty", tensor=data.name, expected="at least (1, 1)", found=dims(data.shape))
    if data is not None and scale is not None and (scale.dtype not in _FLOATS or scale.shape != (data.shape[0], 1)):
        fault("quanto.scale", tensor=scale.name, expected=dims((data.shape[0], 1)), found=typed(scale))
    elif data is not None and scale is not None:
        reads.append(Read(prefix, scale, "weight._scale", reach=127.0))
    if data is not None:
        check_bias(tensors.get(f"{prefix}.bias"), (data.shape[0], data.shape[1]), 1, fault)
    for suffix in (".input_scale", ".output_scale"):
        aux = tensors.get(prefix + suffix)
        if aux is None:
            continue
        if aux.dtype not in _FLOATS or aux.shape != ():
            fault("quanto.aux_scale", tensor=suffix[1:], expected="a float scalar", found=typed(aux))
        else:
            reads.append(Read(prefix, aux, suffix[1:], exactly_one=True))
    if not sound or data is None or scale is None:
        return None
    size = sum(tensors[prefix + suffix].nbytes for suffix in _REQUIRED)
    n, k = data.shape
    return (n, k), size, {"weight": data.name, "weight_scale": scale.name}
