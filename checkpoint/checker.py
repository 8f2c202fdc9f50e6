"""The check itself: files -> declarations -> rules of each format -> values -> report."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from . import declarations, dialects, foreign
from .catalogue import DECLARE, REEXPORT
from .declarations import MARKER, Declaration, Declarations
from .files import Checkpoint, as_paths, load
from .findings import Findings
from .formats import FORMATS, mxfp8, quanto
from .header import TensorInfo
from .layer import SCALE_SUFFIXES, Layer, Read
from .report import LayerSpec, Report, Rules
from .summary import summarise
from .values import check_values
from .words import clean, conf, dims, listing, show

Rename = Callable[[str], str] | Mapping[str, str] | None
Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

MARKED_DTYPES = frozenset({"F8_E4M3", "I8", "U8"})
"""A ``*.weight`` of these types means nothing without a declaration."""
_UNUSED_IS_HARMLESS = frozenset({"input_scale", "scale_input"})


def check(paths: Paths, rules: Rules = "strict", rename: Rename = None, deep: bool = False) -> Report:
    """Check one checkpoint: a file, a shard set (any shard's name or the index), or several files.

    ``rename`` maps a layer's name in the file to its name in the model, so that two layers meeting under one name are a fault; the
    report's layers carry the new names. Every fault of every layer is reported. Never raises for anything a file contains.
    """
    findings = Findings()
    checkpoint = load(as_paths(paths), findings)
    run = _Check(checkpoint, findings, rules == "compatible", _renamer(rename))
    run.everything()
    if deep and checkpoint.headers:
        from .deep import deep_check

        deep_check(checkpoint, run.specs, findings)
    return _report(checkpoint, findings, rules, run)


def _renamer(rename: Rename) -> Callable[[str], str]:
    if rename is None:
        return lambda name: name
    if isinstance(rename, Mapping):
        table = rename
        return lambda name: table.get(name, name)
    return rename


class _Check:
    """One run over one checkpoint."""

    def __init__(self, checkpoint: Checkpoint, findings: Findings, compatible: bool, rename: Callable[[str], str]) -> None:
        self.checkpoint = checkpoint
        self.tensors = checkpoint.tensors
        self.findings = findings
        self.compatible = compatible
        self.rename = rename
        self.specs: list[LayerSpec] = []
        self.reads: list[Read] = []
        self.suspects: set[str] = set()
        """Layers that look quantised or are declared: the denominator of the summary."""

    def everything(self) -> None:
        if not self.checkpoint.headers:
            return
        self._shared_tensors()
        metadata = self.checkpoint.metadata
        if quanto.is_quanto(metadata):
            specs, reads, used = quanto.check(metadata, self.tensors, self.findings, self.rename)
            self.specs.extend(specs)
            self.reads.extend(reads)
            self.suspects.update(name[: -len(".weight._data")] for name in self.tensors if name.endswith(".weight._data"))
            self._orphans({}, set(), used)
        else:
            self._comfy(metadata)
        check_values(self.reads, self.checkpoint, self.findings)

    # -- Comfy declarations ------------------------------------------------------------------------------------------

    def _comfy(self, metadata: Mapping[str, str]) -> None:
        declared = declarations.collect(self.checkpoint, self.findings, compatible=self.compatible)
        has_declaration = bool(declared.layers or declared.broken or declared.global_mxfp8)
        foreigner = foreign.recognise(self.tensors, metadata, has_declaration, self.findings)
        if self.compatible:
            dialects.apply(self.checkpoint, declared, self.findings)
        self.suspects.update(declared.layers, declared.broken)
        marked = [name for name, tensor in self._all_definitions() if tensor.dtype in MARKED_DTYPES and name.endswith(".weight")]
        marked = sorted(set(marked))
        if declared.global_mxfp8:
            self._global_mxfp8(marked, declared)
        self._missing_markers(marked, declared, foreigner)
        layers = self._layers(declared)
        self._collisions(declared)
        if not foreigner:
            self._orphans(layers, declared.broken, set())

    def _all_definitions(self) -> Iterable[tuple[str, TensorInfo]]:
        """Every tensor of every file, also those that a later shard defines again."""
        if len(self.checkpoint.headers) == 1:
            return self.tensors.items()
        return (item for header in self.checkpoint.headers for item in header.tensors.items())

    def _shared_tensors(self) -> None:
        """One tensor in two shards: which one is used depends on the order of the files."""
        headers = self.checkpoint.headers
        if len(headers) < 2:
            return
        first: dict[str, str] = {}
        for header in headers:
            for name, tensor in header.tensors.items():
                if name not in first:
                    first[name] = header.path
                    continue
                where = f"{clean(os.path.basename(first[name]))} and {clean(os.path.basename(header.path))}"
                if name.endswith(MARKER) and tensor.nbytes == self._defined_in(first[name], name).nbytes:
                    self.findings.add("extra.shards.repeated_marker", layer=name[: -len(MARKER)], tensor=name, found=where)
                else:
                    self.findings.add("extra.shards.duplicate_tensor", tensor=name, found=where)

    def _defined_in(self, path: str, name: str) -> TensorInfo:
        return next(header.tensors[name] for header in self.checkpoint.headers if header.path == path)

    def _global_mxfp8(self, marked: list[str], declared: Declarations) -> None:
        """``quant_format: mxfp8`` in the metadata declares every 8-bit weight of the file."""
        for name in marked:
            prefix = name[: -len(".weight")]
            weight, scale = self.tensors[name], self.tensors.get(f"{prefix}.weight_scale")
            if weight.dtype not in MARKED_DTYPES:
                weight = next(tensor for n, tensor in self._all_definitions() if n == name and tensor.dtype in MARKED_DTYPES)
            wrong = mxfp8.global_layout_fault(weight, scale)
            written_by_kitchen = wrong is not None and mxfp8.is_padded_layout(weight, scale)
            if wrong is not None and not (self.compatible and written_by_kitchen):
                n, k = (weight.shape[0], weight.shape[1] // 32) if len(weight.shape) == 2 else (0, 0)
                self.findings.add(
                    "mxfp8.layout",
                    layer=prefix,
                    tensor=name,
                    expected=f"F8_E4M3 (N, K) with U8 scales {dims((n, k)) if n else '(N, K/32)'}",
                    found=wrong,
                    remedy="Set rules to compatible: the scales are stored as ComfyUI stores them." if written_by_kitchen else REEXPORT,
                )
                if prefix not in declared.layers:
                    declared.broken.add(prefix)
            if prefix not in declared.layers and prefix not in declared.broken:
                note = ["declared by quant_format in the metadata"]
                declared.layers[prefix] = Declaration(prefix, {"format": "mxfp8"}, "metadata", "the header's quant_format", note)
            self.suspects.add(prefix)

    def _missing_markers(self, marked: list[str], declared: Declarations, foreigner: bool) -> None:
        if self.compatible:
            plain = dialects.plain_storage(self.tensors, declared)
            if plain:
                self.findings.add("extra.storage.plain", found=str(len(plain)))
                return
        for name in marked:
            prefix = name[: -len(".weight")]
            if prefix in declared.layers or prefix in declared.broken:
                continue
            self.suspects.add(prefix)
            dtype = self.tensors[name].dtype
            look = _looks_like(prefix, self.tensors)
            self.findings.add(
                "marker.missing",
                layer=prefix,
                tensor=name,
                expected="a comfy_quant marker or an entry in the metadata",
                found=dtype,
                look=f", though it looks like {look}" if look else "",
                variant=look,
            )
            declared.broken.add(prefix)

    def _layers(self, declared: Declarations) -> dict[str, Layer]:
        layers: dict[str, Layer] = {}
        tensors, findings = self.tensors, self.findings
        for prefix, declaration in declared.layers.items():
            if prefix in declared.broken:
                continue
            name = declaration.conf.get("format")
            known = FORMATS.get(name) if isinstance(name, str) else None
            if known is None:
                self._unknown_format(declaration)
                declared.broken.add(prefix)
                continue
            layer = Layer(
                prefix, declaration.conf, declaration.by, tensors, findings, self.compatible, declaration.aliases, list(declaration.notes)
            )
            layers[prefix] = layer
            missing = [suffix for suffix in known.required if layer.tensor(suffix) is None]
            if missing:
                rule = "layer.missing_tensors" if known.reference else "extra.layer.missing_tensors"
                layer.fault(
                    rule,
                    expected=listing(list(known.required)),
                    found=listing(missing),
                    format=known.name,
                    remedy=self._missing_remedy(prefix, missing),
                    variant="ghost" if "weight" in missing else "",
                )
                declared.broken.add(prefix)
                continue
            weight = layer.need("weight")
            if 0 in weight.shape:
                layer.fault("extra.shape.empty", tensor=weight.name, expected="at least (1, 1)", found=dims(weight.shape))
            understood = known.check(layer)
            if understood is None or not layer.sound:
                continue
            self.reads.extend(layer.reads)
            self.specs.append(
                LayerSpec(
                    name=self.rename(prefix),
                    format=known.name,
                    shape=understood.shape,
                    bytes=sum(tensors[tensor].nbytes for tensor in understood.tensors.values()),
                    declared_by=declaration.by,
                    annotations=_annotations(declaration.conf, understood.annotations),
                    notes=tuple(layer.notes),
                    tensors=understood.tensors,
                )
            )
        return layers

    def _missing_remedy(self, prefix: str, missing: list[str]) -> str:
        if "weight" not in missing:
            return "The scales were lost in a conversion, or a shard is missing. " + REEXPORT
        for outer in dialects.MODEL_PREFIXES:
            if f"{outer}{prefix}.weight" in self.tensors or (prefix.startswith(outer) and f"{prefix[len(outer) :]}.weight" in self.tensors):
                return "The declared names lack the model prefix, or have one too many: try rules = compatible."
        return "The declaration names a layer that is not in the file: a shard is missing, or the names were changed. " + REEXPORT

    def _unknown_format(self, declaration: Declaration) -> None:
        known = listing(list(FORMATS), limit=len(FORMATS))
        value = declaration.conf.get("format")
        if value is None:
            rotated = declaration.conf.get("convrot") is True
            self.findings.add(
                "extra.format.absent",
                layer=declaration.prefix,
                expected=known,
                found=conf(declaration.conf),
                remedy="Set rules to compatible, which reads this dialect, or " + DECLARE[0].lower() + DECLARE[1:] if rotated else REEXPORT,
                variant=conf(declaration.conf),
            )
            return
        self.findings.add("extra.format.unknown", layer=declaration.prefix, expected=known, found=show(value), variant=show(value))

    def _collisions(self, declared: Declarations) -> None:
        targets: dict[str, str] = {}
        for prefix in declared.layers:
            target = self.rename(prefix)
            if target in targets:
                self.findings.add("map.collision", layer=target, found=f"{clean(targets[target])} and {clean(prefix)}")
            else:
                targets[target] = prefix

    def _orphans(self, layers: Mapping[str, Layer], broken: set[str], used: set[str]) -> None:
        """Scale tensors that no declaration uses."""
        suffixes = SCALE_SUFFIXES
        found: dict[str, list[str]] = {}
        for name in self.tensors:
            prefix, dot, suffix = name.rpartition(".")
            if not dot or suffix not in suffixes or name in used or prefix in broken:
                continue
            layer = layers.get(prefix)
            if layer is None or suffix not in layer.used:
                found.setdefault(prefix, []).append(suffix)
        for prefix, orphans in found.items():
            weight = self.tensors.get(f"{prefix}.weight")
            layer = layers.get(prefix)
            state = f"it is declared as {layer.conf.get('format')}" if layer else f"its weight is {weight.dtype}" if weight else "it has no weight"
            harmful = [suffix for suffix in orphans if suffix not in _UNUSED_IS_HARMLESS]
            harmless = [suffix for suffix in orphans if suffix in _UNUSED_IS_HARMLESS]
            if harmful:
                self.findings.add(
                    "extra.scale.orphan", layer=prefix, tensor=f"{prefix}.{harmful[0]}", expected=state, found=listing(harmful), variant=state
                )
            if harmless:
                self.findings.add(
                    "extra.scale.unused", layer=prefix, tensor=f"{prefix}.{harmless[0]}", expected=state, found=listing(harmless), variant=state
                )
        packed = [name for name in self.tensors if name.endswith(".weight._data") and name not in used]
        for name in packed:
            self.findings.add("extra.quanto.undeclared", layer=name[: -len(".weight._data")], tensor=name, found="weight._data")


def _annotations(declaration: Mapping[str, Any], derived: dict[str, Any]) -> dict[str, Any]:
    """Derived values, and beside them the declaration's own keys that are safe to carry along (short scalars).

    The reference marks derived keys with an underscore and a file can spoof them: those never replace or contradict a derived value.
    """
    kept: dict[str, Any] = {}
    for key, value in declaration.items():
        if key == "format" or len(key) > 64 or len(kept) >= 32 or (key.startswith("_") and key.lstrip("_") in derived):
            continue
        if isinstance(value, bool) or (isinstance(value, str) and len(value) <= 200):
            kept[key] = value
        elif (isinstance(value, int) and value.bit_length() < 64) or (isinstance(value, float) and abs(value) < 1e300):
            kept[key] = value
    kept.update(derived)
    return kept


def _looks_like(prefix: str, tensors: Mapping[str, TensorInfo]) -> str:
    """What an undeclared weight looks like; a description for the reader, never a decision."""
    weight = tensors[f"{prefix}.weight"]
    scale = tensors.get(f"{prefix}.weight_scale")
    if len(weight.shape) != 2:
        return ""
    n, cols = weight.shape
    if f"{prefix}.scale_weight" in tensors and weight.dtype == "F8_E4M3":
        return "legacy scaled FP8 (F8_E4M3 with scale_weight)"
    if f"{prefix}.weight_s_rel" in tensors and weight.dtype == "I8":
        return "asym_w4a8_int8 (packed I8 with group scales)"
    if scale is None:
        return ""
    if weight.dtype == "U8" and f"{prefix}.weight_scale_2" in tensors and scale.dtype in ("F8_E4M3", "U8"):
        return "nvfp4 (packed U8, 16-wide E4M3 block scales, a global scale)"
    if weight.dtype == "F8_E4M3" and scale.dtype in ("U8", "F8_E8M0") and len(scale.shape) == 2:
        return "mxfp8 (F8_E4M3 with 32-wide power-of-two scales)"
    if weight.dtype == "F8_E4M3":
        return f"FP8 with {'one scale' if scale.nbytes <= 4 else 'row or block scales'}"
    if weight.dtype == "I8" and scale.dtype == "F32" and scale.shape in ((n, 1), ()):
        return f"int8 with {'row scales' if scale.shape else 'one scale'}, rotated or not"
    if weight.dtype == "I8" and scale.shape == (n,):
        return "int8 or packed W4A4 with row scales"
    del cols
    return ""


def _report(checkpoint: Checkpoint, findings: Findings, rules: Rules, run: _Check) -> Report:
    if findings.dropped:
        findings.add("extra.file.too_many_faults", found=str(findings.dropped))
    formats: dict[str, int] = {}
    for spec in run.specs:
        formats[spec.format] = formats.get(spec.format, 0) + 1
    verdict, summary = summarise(findings, formats, run.suspects)
    return Report(
        files=checkpoint.paths,
        rules=rules,
        verdict=verdict,
        summary=summary,
        formats=formats,
        layers=tuple(run.specs),
        faults=findings.faults(),
        groups=findings.groups(),
    )


