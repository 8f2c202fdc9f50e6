"""What a checkpoint says about its layers: ``*.comfy_quant`` markers and the header's ``_quantization_metadata``,
merged.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .catalogue import REDOWNLOAD, REEXPORT
from .files import Checkpoint
from .findings import Findings
from .header import MAX_CONTAINERS, Header, HeaderError, TensorInfo, has_big_integer, open_again
from .layer import same
from .report import DeclaredBy
from .words import clean, conf, show

MARKER = ".comfy_quant"
METADATA_KEY = "_quantization_metadata"
MAX_MARKER = 1 << 20
MAX_MARKERS_TOTAL = 16 << 20
MAX_DEPTH = 900
MAX_LAYERS = 10_000
"""Declared layers of one file. The largest models (mixtures of experts with a tensor for each) have about 6,000."""
_MARKER_TYPES_THAT_CRASH = frozenset(
    {"BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "F6_E2M3", "F6_E3M2"}
)


class Declaration:
    """One layer's declaration. ``where`` names its origin for messages, ``aliases`` a dialect's spelling of its
    tensors.
    """

    __slots__ = ("aliases", "by", "conf", "notes", "prefix", "where")

    def __init__(
        self,
        prefix: str,
        conf: dict[str, Any],
        by: DeclaredBy,
        where: str,
        notes: tuple[str, ...] = (),
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self.prefix = prefix
        self.conf = conf
        self.by = by
        self.where = where
        self.notes = notes
        self.aliases = aliases


@dataclass
class Declarations:
    """All declarations; ``broken`` are layers whose declaration exists but cannot be used (their tensors are not judged
    further).
    """

    layers: dict[str, Declaration] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    global_mxfp8: bool = False
    from_metadata: list[str] = field(default_factory=list)
    metadata_broken: bool = False
    legacy_prefixes: list[str] = field(default_factory=list)


@dataclass
class _BadMarker:
    prefix: str
    tensor: TensorInfo
    data: bytes
    reason: str


class _DuplicateKeys:
    """An ``object_pairs_hook`` that remembers the first key that occurred twice in one object."""

    def __init__(self) -> None:
        self.first: str | None = None

    def __call__(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs) and self.first is None:
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    self.first = key
                    break
                seen.add(key)
        return result


def too_deep(value: Any) -> bool:
    """Whether a parsed JSON value nests deeper than ``MAX_DEPTH``: what compares, copies or prints it could overflow
    the stack.
    """
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(child for child in item.values() if isinstance(child, (dict, list)))
            elif isinstance(item, list):
                below.extend(child for child in item if isinstance(child, (dict, list)))
        if not below:
            return False
        level = below
    return True


def too_many(count: int, path: str, findings: Findings) -> bool:
    """Whether a file declares more layers than are judged; recorded as a fault."""
    if count <= MAX_LAYERS:
        return False
    findings.add(
        "extra.layer.count",
        file=clean(os.path.basename(path)),
        expected=f"at most {MAX_LAYERS:,}",
        found=f"{count:,}",
    )
    return True


def collect(checkpoint: Checkpoint, findings: Findings, *, compatible: bool) -> Declarations:
    """Read every declaration, in the reference's order: per file its metadata, then its markers by name."""
    out = Declarations()
    bad: list[_BadMarker] = []
    flags: set[str] = set()
    budget = MAX_MARKERS_TOTAL
    for header in checkpoint.headers:
        where = (
            "the header" if len(checkpoint.headers) == 1 else f"the header of {clean(os.path.basename(header.path))}"
        )
        flag = header.metadata.get("quant_format", "")
        if flag:
            flags.add(flag.lower())
        text = header.metadata.get(METADATA_KEY)
        if text is not None:
            _metadata(text, where, header.path, out, findings, compatible)
        budget = _markers(header, out, bad, findings, compatible, budget)
    out.global_mxfp8 = flags == {"mxfp8"}
    _report_bad_markers(bad, out, findings, checkpoint, compatible)
    return out


def _metadata(text: str, where: str, path: str, out: Declarations, findings: Findings, compatible: bool) -> None:
    duplicates = _DuplicateKeys()
    out.metadata_broken = True
    if text.count("{") + text.count("[") > MAX_CONTAINERS:  # braces can hide from the header's own limit as escapes
        findings.add("extra.meta.size", found=f"{len(text)} characters")
        return
    try:
        document = json.loads(text, object_pairs_hook=duplicates)
        if too_deep(document):
            raise RecursionError
    except RecursionError:
        findings.add("crash.meta.recursion")
        return
    except ValueError as error:
        if has_big_integer(error):
            findings.add("crash.meta.bigint")
        else:
            findings.add(
                "meta.json",
                found="it is empty" if not text.strip() else clean(str(error), 100),
                expected="a JSON object",
            )
        return
    if not isinstance(document, dict):
        findings.add("meta.not_object", found=show(document), expected="a JSON object")
        return
    layers = document.get("layers")
    if not isinstance(layers, dict):
        findings.add(
            "meta.layers_not_object", found=show(layers) if "layers" in document else "nothing", expected="an object"
        )
        return
    if too_many(len(layers), path, findings):
        out.broken.update(layers)
        return
    out.metadata_broken = False
    if duplicates.first is not None:
        findings.add("extra.meta.duplicate_key", found=show(duplicates.first))
    shared: dict[str, dict[str, Any]] = {}  # equal entries become one object, as equal markers are: judged once
    for prefix, entry in layers.items():
        if not isinstance(entry, dict):
            findings.add("meta.entry_not_object", layer=prefix, found=show(entry), expected="an object")
            out.broken.add(prefix)
            continue
        out.from_metadata.append(prefix)
        if not any(isinstance(value, (dict, list)) for value in entry.values()):
            entry = shared.setdefault(repr(entry), entry)
        _merge(Declaration(prefix, entry, "metadata", where), out, findings, compatible)


def _markers(
    header: Header, out: Declarations, bad: list[_BadMarker], findings: Findings, compatible: bool, budget: int
) -> int:
    readable: list[TensorInfo] = []
    markers = sorted([tensor for name, tensor in header.tensors.items() if name.endswith(MARKER)])
    if too_many(len(markers), header.path, findings):
        out.broken.update(tensor.name[: -len(MARKER)] for tensor in markers)
        return budget
    for tensor in markers:
        _, dtype, _, start, stop, _ = tensor
        size = stop - start
        if dtype in _MARKER_TYPES_THAT_CRASH or size > MAX_MARKER or size > budget:
            _unreadable(tensor, out, findings)
            continue
        budget -= size
        readable.append(tensor)
    if not readable:
        return budget
    try:
        with open_again(header.path, header.stamp) as raw:
            contents = raw.read_spans([(tensor.start, tensor.stop) for tensor in readable])
    except HeaderError as error:
        findings.add_unreadable(header.path, error)
        return budget
    parsed = {data: _parse_marker(data) for data in set(contents)}
    sound = {data: result[0] for data, result in parsed.items() if isinstance(result[0], dict) and result[1] is None}
    layers = out.layers
    for tensor, data in zip(readable, contents, strict=True):
        prefix = tensor[0][: -len(MARKER)]
        if data in sound and prefix not in layers:
            layers[prefix] = Declaration(prefix, sound[data], "marker", "its marker")
        else:
            _marker(prefix, tensor, data, parsed[data], out, bad, findings, compatible)
    return budget


def _unreadable(tensor: TensorInfo, out: Declarations, findings: Findings) -> None:
    prefix = tensor.name[: -len(MARKER)]
    out.broken.add(prefix)
    if tensor.dtype in _MARKER_TYPES_THAT_CRASH:
        findings.add("crash.marker.tensor_dtype", layer=prefix, tensor=tensor.name, expected="U8", found=tensor.dtype)
        return
    findings.add(
        "extra.marker.size",
        layer=prefix,
        tensor=tensor.name,
        expected=f"at most {MAX_MARKER} bytes",
        found=f"{tensor.nbytes} bytes long",
    )


def _marker(
    prefix: str,
    tensor: TensorInfo,
    data: bytes,
    parsed: tuple[Any, str | None] | str,
    out: Declarations,
    bad: list[_BadMarker],
    findings: Findings,
    compatible: bool,
) -> None:
    if isinstance(parsed, str):
        if parsed.startswith("crash."):
            findings.add(parsed, layer=prefix, tensor=tensor.name)
            out.broken.add(prefix)
        else:
            bad.append(_BadMarker(prefix, tensor, data, parsed))
        return
    value, duplicate = parsed
    if not isinstance(value, dict):
        findings.add("marker.not_object", layer=prefix, tensor=tensor.name, expected="a JSON object", found=show(value))
        out.broken.add(prefix)
        return
    if duplicate is not None:
        findings.add("extra.marker.duplicate_key", layer=prefix, tensor=tensor.name, found=show(duplicate))
    _merge(Declaration(prefix, value, "marker", "its marker"), out, findings, compatible)


def _parse_marker(data: bytes) -> tuple[Any, str | None] | str:
    """The JSON value and its first duplicate key; or a ``crash.*`` rule id; or what is wrong, in words."""
    duplicates = _DuplicateKeys()
    try:
        value = json.loads(data, object_pairs_hook=duplicates)
        return "crash.marker.recursion" if too_deep(value) else (value, duplicates.first)
    except RecursionError:
        return "crash.marker.recursion"
    except ValueError as error:
        if has_big_integer(error):
            return "crash.marker.bigint"
        return _what_is_wrong(data, error)


def _what_is_wrong(data: bytes, error: ValueError) -> str:
    if not data:
        return "empty"
    if not data.strip(b"\0"):
        return "zeroed"
    if not data.strip():
        return "blank"
    if (
        b"\0" in data
        and data.rstrip(b"\0")[:1] == b"{"
        and data.rstrip(b"\0")[-1:] == b"}"
        and data.count(b"\0") == len(data) - len(data.rstrip(b"\0"))
    ):
        return "padded"
    if (
        isinstance(error, json.JSONDecodeError)
        and data.lstrip()[:1] == b"{"
        and error.pos >= len(data.rstrip()) - 1
        and not data.rstrip().endswith(b"}")
    ):
        return "truncated"
    if isinstance(error, UnicodeDecodeError):
        return "not text"
    return "not JSON"


def _report_bad_markers(
    bad: list[_BadMarker], out: Declarations, findings: Findings, checkpoint: Checkpoint, compatible: bool
) -> None:
    if not bad:
        return
    lengths: dict[int, str] = {}
    for declaration in out.layers.values():
        if declaration.by == "marker":
            marker = checkpoint.tensors.get(declaration.prefix + MARKER)
            name = declaration.conf.get("format")
            if marker is not None and isinstance(name, str):
                lengths.setdefault(marker.nbytes, clean(name, 40))
    neighbour = next(iter(lengths.values()), "int8_tensorwise")
    out.broken.update(item.prefix for item in bad)
    for item in bad:
        if findings.counted("marker.json", item.reason):
            findings.add("marker.json", layer=item.prefix, variant=item.reason)
            continue
        weight = checkpoint.tensors.get(f"{item.prefix}.weight")
        if compatible and weight is not None and _unquantised(item.prefix, weight, checkpoint):
            findings.add(
                "extra.dialect",
                layer=item.prefix,
                found=f"unreadable marker ({item.reason}) ignored: the weight is {weight.dtype} and has no scales",
                variant="ignored marker",
            )
            out.broken.discard(item.prefix)
            continue
        size = len(item.data)
        found = {
            "empty": "empty",
            "zeroed": f"zeroed: {size} NUL bytes",
            "blank": f"blank: {size} spaces",
            "padded": "followed by NUL bytes",
            "truncated": f"cut short after {size} bytes",
            "not text": f"not text ({size} bytes)",
            "not JSON": f"not JSON ({size} bytes)",
        }[item.reason]
        if item.reason == "zeroed" and size in lengths:
            found += f", the same length as the {lengths[size]} marker of other layers"
        if weight is not None:
            found += f", while the weight is {weight.dtype}"
        damaged = item.reason in ("zeroed", "truncated", "not text")
        findings.add(
            "marker.json",
            layer=item.prefix,
            tensor=item.tensor.name,
            expected=f'JSON such as {{"format": "{lengths.get(size) or neighbour}"}}',
            found=found,
            remedy=REDOWNLOAD if damaged else REEXPORT,
            variant=item.reason,
        )


def _unquantised(prefix: str, weight: TensorInfo, checkpoint: Checkpoint) -> bool:
    if weight.dtype not in ("BF16", "F16", "F32", "F64"):
        return False
    scales = ("weight_scale", "weight_scale_2", "weight_s_rel", "scale_weight")
    return not any(f"{prefix}.{suffix}" in checkpoint.tensors for suffix in scales)


def _merge(new: Declaration, out: Declarations, findings: Findings, compatible: bool) -> None:
    old = out.layers.get(new.prefix)
    if old is None:
        out.layers[new.prefix] = new
        return
    if same(old.conf, new.conf):  # equal, yet 1 == True: the later object is the one in effect
        if old.by == "marker":
            new.by = "marker"
        out.layers[new.prefix] = new
        return
    if compatible and ("format" in old.conf) != ("format" in new.conf) and not set(old.conf) & set(new.conf):
        note = "declaration put together from the header and the marker"
        joined = Declaration(new.prefix, {**old.conf, **new.conf}, new.by, f"{old.where} and {new.where}", (note,))
        findings.add("extra.dialect", layer=new.prefix, found=note, variant="split")
        out.layers[new.prefix] = joined
        return
    out.broken.add(new.prefix)
    findings.add(
        "marker.conflict",
        layer=new.prefix,
        expected=conf(old.conf),
        found=conf(new.conf),
        first=old.where,
        second=new.where if new.where != old.where else "a second one",
    )
