"""The check itself: files -> declarations -> rules of each format -> values -> report."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

from . import cache, declarations, dialects, foreign, runtimes
from .catalogue import DECLARE, MENDABLE, NOT_MENDABLE, REEXPORT
from .declarations import MARKER, Declaration, Declarations
from .files import Checkpoint, as_paths, load
from .findings import Findings
from .formats import FORMATS, Format, mxfp8, quanto
from .header import TensorInfo
from .layer import DENSE_SUFFIXES, SCALE_SUFFIXES, Layer, Understood, check_bias, typed
from .report import LayerSpec, Report, Rules
from .strays import stray_scales, suspicious
from .summary import summarise
from .values import Reads, check_values
from .words import clean, conf, dims, listing, show

Rename = Callable[[str], str] | Mapping[str, str] | None
Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

MARKED_DTYPES = frozenset({"F8_E4M3", "I8", "U8"})
"""A ``*.weight`` of these types means nothing without a declaration."""
_PART_SUFFIXES = frozenset({*DENSE_SUFFIXES, *SCALE_SUFFIXES})
_EMBEDDINGS = ("embed_tokens", "token_embedding", "token_embd", "word_embeddings", "wte", "shared")
"""Module names that are embedding tables in the text encoders in use: rows are looked up, not multiplied."""
_UNUSED_IS_HARMLESS = frozenset({"input_scale", "scale_input"})


def check(paths: Paths, rules: Rules = "strict", rename: Rename = None, deep: bool = False) -> Report:
    """Check one checkpoint: a file, a shard set (any shard's name or the index), or several files.

    ``rules``: "strict" is the reference's rule set made safer; "compatible" also accepts the dialects whose meaning is
    certain (``docs/dialects.md``). ``rename`` maps a layer's name in the file to its name in the model, so that two
    layers meeting under one name are a fault; the report's layers carry the new names. ``deep`` also reads block scales
    and samples of the weights.

    Every fault of every layer is reported. Never raises for anything a file contains. A repeated check of unchanged
    files (same paths, sizes and modification times) answers from memory.
    """
    if rules not in ("strict", "compatible"):
        raise ValueError(f"rules must be 'strict' or 'compatible', got {rules!r}")
    given = as_paths(paths)
    key = cache.key(given, rules, rename, deep)
    known = cache.get(key)
    if known is not None:
        return known
    loading = Findings()
    checkpoint = load(given, loading)
    report = _run(checkpoint, loading, rules, rename, deep)
    if checkpoint.headers:
        cache.put(
            key, report, {**{header.path: header.stamp for header in checkpoint.headers}, **checkpoint.index_stamps}
        )
    return report


def check_checkpoint(checkpoint: Checkpoint, rules: Rules = "strict", *, values: bool = True) -> Report:
    """As :func:`check`, on headers that a tool has read already: a remote file, or one that is yet to be written.

    ``values=False`` leaves the float scales unread; their dtypes and shapes are checked all the same.
    """
    return _run(checkpoint, Findings(), rules, None, False, values=values)


def _run(
    checkpoint: Checkpoint, loading: Findings, rules: Rules, rename: Rename, deep: bool, *, values: bool = True
) -> Report:
    findings = loading.copy()
    run = _Check(checkpoint, findings, rules == "compatible", _renamer(rename), values)
    run.everything()
    if deep and checkpoint.headers:
        from .deep import deep_check

        deep_check(checkpoint, run.specs, findings)
    hopeless = findings.dropped or findings.has("extra.layer.count")
    if rules == "strict" and findings.refused and not loading.refused and not hopeless:
        other = _Check(checkpoint, loading.copy(), True, _renamer(rename), values)
        other.everything()
        if not other.findings.refused:
            findings.add("extra.rules.compatible", remedy=_for_good(findings, other.findings))
    return _report(checkpoint, findings, rules, run)


def _for_good(strict: Findings, compatible: Findings) -> str:
    """Whether a repair can give a file that only the compatible rules accept the standard form."""
    if strict.has("nvfp4.shapes"):  # compatible accepts one kind of these
        return NOT_MENDABLE.format(what="padded NVFP4 block scales")
    if compatible.has("extra.storage.plain"):
        return NOT_MENDABLE.format(what="8-bit weights that are not quantised")
    return MENDABLE


def _unchanged(name: str) -> str:
    return name


def _renamer(rename: Rename) -> Callable[[str], str]:
    if rename is None:
        return _unchanged
    if isinstance(rename, Mapping):
        table = rename
        return lambda name: table.get(name, name)
    return rename


class _Check:
    """One run over one checkpoint."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        findings: Findings,
        compatible: bool,
        rename: Callable[[str], str],
        values: bool,
    ) -> None:
        self.values = values
        self.checkpoint = checkpoint
        self.tensors = checkpoint.tensors
        self.findings = findings
        self.compatible = compatible
        self.rename = rename
        self.specs: list[LayerSpec] = []
        self.reads = Reads()
        self.parts: dict[str, dict[str, TensorInfo]] = {}
        """Layer prefix -> suffix -> tensor, for the suffixes that quantisation uses."""
        self.other_suffixes: set[str] = set()
        self.kinds: list[_Kind] = []
        """One example of every kind of sound layer."""
        self.suspects: set[str] = set()
        """Layers that look quantised or are declared: the denominator of the summary."""

    def everything(self) -> None:
        if not self.checkpoint.headers:
            return
        self._shared_tensors()
        self._index()
        metadata = self.checkpoint.metadata
        if quanto.is_quanto(metadata):
            specs, reads, used = quanto.check(
                metadata, self.checkpoint.headers[0].path, self.tensors, self.findings, self.rename
            )
            self.specs.extend(specs)
            for read in reads:
                self.reads.add(read)
            self.suspects.update(
                name[: -len(".weight._data")] for name in self.tensors if name.endswith(".weight._data")
            )
            self._beside_quanto()
            self._orphans({}, Declarations(), used)
        else:
            self._comfy(metadata)
        if self.values:
            check_values(self.reads, self.checkpoint, self.findings)
        if not self.findings.refused and not self.findings.has("extra.dialect", "extra.dialect.file"):
            self._other_runtimes()

    # -- Comfy declarations ------------------------------------------------------------------------------------------

    def _index(self) -> None:
        parts = self.parts
        others: list[str] = []
        for name, tensor in self.tensors.items():
            prefix, dot, suffix = name.rpartition(".")
            if suffix not in _PART_SUFFIXES:
                others.append(suffix)
            elif prefix in parts:
                parts[prefix][suffix] = tensor
            elif dot:
                parts[prefix] = {suffix: tensor}
        self.other_suffixes = set(others)

    def _beside_quanto(self) -> None:
        """Layers of a Quanto file that are quantised in another way: its map declares whole files."""
        ends = {MARKER.removeprefix("."): "a comfy_quant marker"}
        for name, tensor in self.tensors.items():
            prefix, _, suffix = name.rpartition(".")
            if suffix in ends or (suffix == "weight" and tensor.dtype in MARKED_DTYPES):
                found = ends.get(suffix, f"a {tensor.dtype} weight")
                self.findings.add(
                    "extra.quanto.mixed", layer=prefix, tensor=name, expected="weight._data", found=found, variant=found
                )

    def _comfy(self, metadata: Mapping[str, str]) -> None:
        declared = declarations.collect(self.checkpoint, self.findings, compatible=self.compatible)
        has_declaration = bool(declared.layers or declared.broken or declared.global_mxfp8)
        foreigner = foreign.recognise(self.tensors, self.other_suffixes, metadata, has_declaration, self.findings)
        if self.compatible:
            dialects.apply(self.checkpoint, declared, self.findings)
        self.suspects.update(declared.layers, declared.broken)
        if declared.global_mxfp8:
            self._global_mxfp8(self._marked(), declared)
        self._missing_markers(declared)
        used = self._layers(declared)
        self._collisions(declared)
        if not foreigner:
            self._orphans(used, declared, frozenset())

    def _marked(self) -> dict[str, TensorInfo]:
        """Prefixes of all weights whose type needs a declaration, also of those that a later shard defines again, by
        name.
        """
        found = {
            prefix: parts["weight"]
            for prefix, parts in self.parts.items()
            if "weight" in parts and parts["weight"].dtype in MARKED_DTYPES
        }
        for header in self.checkpoint.headers if len(self.checkpoint.headers) > 1 else ():
            for name, tensor in header.tensors.items():
                if tensor.dtype in MARKED_DTYPES and name.endswith(".weight"):
                    found.setdefault(name[: -len(".weight")], tensor)
        return found

    def _shared_tensors(self) -> None:
        """One tensor in two shards: which one is used depends on the order of the files."""
        headers = self.checkpoint.headers
        if len(headers) < 2:
            return
        first: dict[str, TensorInfo] = {}
        for header in headers:
            for name, tensor in header.tensors.items():
                earlier = first.setdefault(name, tensor)
                if earlier is tensor:
                    continue
                where = f"{clean(os.path.basename(earlier.path))} and {clean(os.path.basename(tensor.path))}"
                if name.endswith(MARKER) and tensor.nbytes == earlier.nbytes:
                    self.findings.add(
                        "extra.shards.repeated_marker", layer=name[: -len(MARKER)], tensor=name, found=where
                    )
                else:
                    self.findings.add("extra.shards.duplicate_tensor", tensor=name, found=where)

    def _global_mxfp8(self, marked: Mapping[str, TensorInfo], declared: Declarations) -> None:
        """``quant_format: mxfp8`` in the metadata declares every 8-bit weight of the file."""
        for prefix in sorted(marked):
            weight, scale = marked[prefix], self.tensors.get(f"{prefix}.weight_scale")
            if scale is None and self.findings.incomplete:  # it may lie in the file that is missing
                declared.broken.add(prefix)
                continue
            wrong = mxfp8.global_layout_fault(weight, scale)
            written_by_kitchen = wrong is not None and mxfp8.is_padded_layout(weight, scale)
            if wrong is not None and not (self.compatible and written_by_kitchen):
                two = len(weight.shape) == 2
                self.findings.add(
                    "mxfp8.layout",
                    layer=prefix,
                    tensor=weight.name,
                    expected=f"F8_E4M3 (N, K) with U8 scales "
                    f"{dims((weight.shape[0], weight.shape[1] // 32)) if two else '(N, K/32)'}",
                    found=wrong,
                    remedy="Set rules to compatible: the scales are stored as ComfyUI stores them."
                    if written_by_kitchen
                    else REEXPORT,
                )
                if prefix not in declared.layers:
                    declared.broken.add(prefix)
            elif wrong is not None:
                understood = f"MXFP8 scales {typed(scale)} read as ComfyUI stores them" if scale else ""
                self.findings.add("extra.dialect", layer=prefix, found=understood, variant="mxfp8 scales")
            if prefix not in declared.layers and prefix not in declared.broken:
                note = ("declared by quant_format in the metadata",)
                declared.layers[prefix] = Declaration(
                    prefix, {"format": "mxfp8"}, "metadata", "the header's quant_format", note
                )
            self.suspects.add(prefix)

    def _missing_markers(self, declared: Declarations) -> None:
        bare = [prefix for prefix in self._marked() if prefix not in declared.layers and prefix not in declared.broken]
        if not bare:
            return
        if self.compatible:
            plain = dialects.plain_storage(self.parts, bare, declared)
            if plain:
                self.findings.add("extra.storage.plain", found=str(len(plain)))
                bare = sorted(set(bare) - set(plain))
        for prefix in sorted(bare):
            self.suspects.add(prefix)
            declared.broken.add(prefix)
            look = _looks_like(self.parts[prefix])
            if self.findings.counted("marker.missing", look):
                self.findings.add("marker.missing", layer=prefix, variant=look)
                continue
            weight = self.tensors[f"{prefix}.weight"]
            self.findings.add(
                "marker.missing",
                layer=prefix,
                tensor=weight.name,
                expected="a comfy_quant marker or an entry in the metadata",
                found=weight.dtype,
                look=f", though it looks like {look}" if look else "",
                variant=look,
            )

    def _layers(self, declared: Declarations) -> dict[str, Set[str]]:
        """Judge every declared layer; returns the tensor suffixes that each one's format uses.

        Layers of one kind (same declaration, same dtypes and shapes) are judged once: the verdict depends on nothing
        else.
        """
        used: dict[str, Set[str]] = {}
        kinds: dict[tuple[Any, ...], _Kind] = {}
        nothing: dict[str, TensorInfo] = {}
        all_parts, broken, rename = self.parts, declared.broken, self.rename
        specs_append = self.specs.append
        for prefix, declaration in declared.layers.items():
            if prefix in broken:
                continue
            parts = all_parts.get(prefix, nothing)
            stored = [(suffix, tensor[1], tensor[2]) for suffix, tensor in parts.items()]
            key = (id(declaration.conf), declaration.by, declaration.notes, *stored)
            kind = kinds.get(key)
            if kind is None:
                layer, understood = self._layer(declaration, parts, declared)
                if layer is None:
                    continue
                used[prefix] = layer.used
                if understood is None:
                    continue
                kind = _Kind(declaration, layer, understood, self.reads)
                self.kinds.append(kind)
                if layer.silent and declaration.aliases is None:
                    kinds[key] = kind
            used[prefix] = kind.used
            specs_append(kind.spec(prefix if rename is _unchanged else rename(prefix), parts))
            for suffix, canonical, batch in kind.reads:
                batch.layers.append(prefix)
                batch.tensors.append(parts[suffix])
                batch.suffixes.append(canonical)
        return used

    def _layer(
        self, declaration: Declaration, parts: Mapping[str, TensorInfo], declared: Declarations
    ) -> tuple[Layer | None, Understood | None]:
        prefix = declaration.prefix
        name = declaration.conf.get("format")
        known = FORMATS.get(name) if isinstance(name, str) else None
        if known is None:
            self._unknown_format(declaration)
            declared.broken.add(prefix)
            return None, None
        layer = Layer(prefix, declaration.conf, parts, self.findings, self.compatible, declaration.aliases, self.values)
        layer.notes.extend(declaration.notes)
        layer.used.update(layer.aliases.get(suffix, suffix) for suffix in (*known.required, *known.optional))
        missing = [suffix for suffix in known.required if layer.tensor(suffix) is None]
        if missing:
            self._missing(layer, known, missing)
            declared.broken.add(prefix)
            return layer, None
        weight = layer.need("weight")
        if 0 in weight.shape:
            layer.fault("extra.shape.empty", tensor=weight.name, expected="at least (1, 1)", found=dims(weight.shape))
        understood = known.check(layer)
        if len(weight.shape) == 2 and 0 not in weight.shape:
            n, k = understood.shape if understood is not None else weight.shape
            check_bias(layer.tensor("bias"), (n, k), known.row_multiple, layer.fault)
        return layer, understood if layer.sound else None

    def _missing(self, layer: Layer, known: Format, missing: list[str]) -> None:
        rule = "layer.missing_tensors" if known.reference else "extra.layer.missing_tensors"
        variant = "ghost" if "weight" in missing else ""
        if self.findings.counted(rule, variant):
            layer.fault(rule, variant=variant, format=known.name)
            return
        layer.fault(
            rule,
            expected=listing(list(known.required)),
            found=listing(missing),
            format=known.name,
            remedy=self._missing_remedy(layer.prefix, missing),
            variant=variant,
        )

    def _missing_remedy(self, prefix: str, missing: list[str]) -> str:
        if "weight" not in missing:
            return "The scales were lost in a conversion, or a shard is missing. " + REEXPORT
        for outer in dialects.MODEL_PREFIXES:
            shorter = prefix.removeprefix(outer)
            if f"{outer}{prefix}.weight" in self.tensors or (shorter != prefix and f"{shorter}.weight" in self.tensors):
                return "The declared names lack the model prefix, or have one too many: try rules = compatible."
        return (
            "The declaration names a layer that is not in the file: a shard is missing, or names were changed. "
            + REEXPORT
        )

    def _unknown_format(self, declaration: Declaration) -> None:
        value = declaration.conf.get("format")
        rule = "extra.format.absent" if value is None else "extra.format.unknown"
        variant = conf(declaration.conf) if value is None else show(value)
        if self.findings.counted(rule, variant):
            self.findings.add(rule, layer=declaration.prefix, variant=variant)
            return
        known = listing(list(FORMATS), limit=len(FORMATS))
        if value is None:
            rotated = declaration.conf.get("convrot") is True
            self.findings.add(
                "extra.format.absent",
                layer=declaration.prefix,
                expected=known,
                found=variant,
                remedy="Set rules to compatible, which reads this dialect, or " + DECLARE[0].lower() + DECLARE[1:]
                if rotated
                else REEXPORT,
                variant=variant,
            )
            return
        self.findings.add(
            "extra.format.unknown", layer=declaration.prefix, expected=known, found=variant, variant=variant
        )

    def _collisions(self, declared: Declarations) -> None:
        if self.rename is _unchanged:
            return
        targets: dict[str, str] = {}
        for prefix in declared.layers:
            target = self.rename(prefix)
            if target in targets:
                self.findings.add("map.collision", layer=target, found=f"{clean(targets[target])} and {clean(prefix)}")
            else:
                targets[target] = prefix

    def _other_runtimes(self) -> None:
        """Notices about another runtime's limits; layers of one kind meet the same ones."""
        markers = {kind.prefix: kind.marker for kind in self.kinds}
        for _, words, layer in runtimes.notices(markers, {kind.prefix: kind.stored for kind in self.kinds}):
            self.findings.add("extra.runtime", layer=layer, found=words, variant=words)
        labelled = [kind for kind in self.kinds if kind.format == "mxfp8" and kind.scale_dtype == "F8_E8M0"]
        if labelled:
            self.findings.add(
                "extra.runtime",
                layer=labelled[0].prefix,
                found="it wants MXFP8 block scales stored as U8",
                variant="e8m0",
            )

    def _orphans(self, used: Mapping[str, Set[str]], declared: Declarations, names: Set[str]) -> None:
        """Scale tensors that no declaration uses; ``names`` are those that a Quanto map does."""
        broken = declared.broken
        nothing: Set[str] = frozenset()
        for prefix, parts in self.parts.items():
            if parts.keys() <= DENSE_SUFFIXES or parts.keys() <= used.get(prefix, nothing):
                continue
            orphans = parts.keys() - used.get(prefix, nothing)
            orphans -= DENSE_SUFFIXES
            if orphans and prefix not in broken:
                orphans = {suffix for suffix in orphans if parts[suffix].name not in names}
                declaration = declared.layers.get(prefix)
                self._orphan(prefix, [suffix for suffix in SCALE_SUFFIXES if suffix in orphans], declaration)
        strays = suspicious(self.other_suffixes)
        for scale, weight in stray_scales(self.tensors, strays, names) if strays else ():
            layer = weight.name.removesuffix(".weight")
            declaration = declared.layers.get(layer)
            state = (
                f"it is declared as {show(declaration.conf.get('format'))}"
                if declaration is not None
                else f"its weight is {weight.dtype}, not declared as quantised"
            )
            suffix = scale.name.removeprefix(layer).lstrip(".")
            self.findings.add(
                "extra.scale.orphan", layer=layer, tensor=scale.name, expected=state, found=clean(suffix), variant=state
            )
        for name in self.tensors if "_data" in self.other_suffixes else ():
            if name.endswith(".weight._data") and name not in names:
                self.findings.add(
                    "extra.quanto.undeclared", layer=name[: -len(".weight._data")], tensor=name, found="weight._data"
                )

    def _orphan(self, prefix: str, orphans: list[str], declaration: Declaration | None) -> None:
        weight = self.parts[prefix].get("weight")
        if declaration is not None:
            state = f"it is declared as {show(declaration.conf.get('format'))}"
        else:
            state = (
                f"its weight is {weight.dtype}, not declared as quantised" if weight is not None else "it has no weight"
            )
        for rule, suffixes in (
            ("extra.scale.orphan", [suffix for suffix in orphans if suffix not in _UNUSED_IS_HARMLESS]),
            ("extra.scale.unused", [suffix for suffix in orphans if suffix in _UNUSED_IS_HARMLESS]),
        ):
            if suffixes:
                self.findings.add(
                    rule,
                    layer=prefix,
                    tensor=f"{prefix}.{suffixes[0]}",
                    expected=state,
                    found=listing(suffixes),
                    variant=state,
                )


class _Kind:
    """What all layers of one kind have in common."""

    def __init__(self, declaration: Declaration, layer: Layer, understood: Understood, reads: Reads) -> None:
        self.prefix = declaration.prefix
        self.format = str(declaration.conf["format"])
        self.marker = {**declaration.conf, **{f"_{key}": value for key, value in understood.annotations.items()}}
        self.stored = layer.need("weight").shape
        scale = layer.parts.get("weight_scale")
        self.scale_dtype = scale.dtype if scale is not None else ""
        self.used = layer.used
        self.reads = [
            (read.tensor.name.rpartition(".")[2], read.suffix, batch)
            for read in layer.reads
            if (batch := reads.batch_for(read)) is not None
        ]
        self.suffixes = [(canonical, name.rpartition(".")[2]) for canonical, name in understood.tensors.items()]
        self.example = LayerSpec(
            name=declaration.prefix,
            format=self.format,
            shape=understood.shape,
            bytes=sum(layer.parts[suffix].nbytes for _, suffix in self.suffixes),
            declared_by=declaration.by,
            annotations=_annotations(declaration.conf, understood.annotations),
            notes=tuple(layer.notes),
            tensors=understood.tensors,
        )

    def spec(self, name: str, parts: Mapping[str, TensorInfo]) -> LayerSpec:
        """The layer of this name; its tensors have the kind's dtypes and shapes."""
        tensors = {canonical: parts[suffix][0] for canonical, suffix in self.suffixes}
        notes = self.example.notes
        if name.endswith(_EMBEDDINGS):
            notes = (*notes, "embedding table")
        return self.example.alike(name, tensors, notes)


def _annotations(declaration: Mapping[str, Any], derived: dict[str, Any]) -> dict[str, Any]:
    """Derived values, and beside them the declaration's own keys that are safe to carry along (short scalars).

    The reference marks derived keys with an underscore and a file can spoof them: those never replace or contradict a
    derived value.
    """
    kept: dict[str, Any] = {}
    for key, value in declaration.items():
        if key == "format" or len(key) > 64 or len(kept) >= 32 or (key.startswith("_") and key.lstrip("_") in derived):
            continue
        if (
            isinstance(value, bool)
            or (isinstance(value, str) and len(value) <= 200)
            or (isinstance(value, int) and value.bit_length() < 64)
            or (isinstance(value, float) and abs(value) < 1e300)
        ):
            kept[key] = value
    kept.update(derived)
    return kept


def _looks_like(parts: Mapping[str, TensorInfo]) -> str:
    """What an undeclared weight looks like; a description for the reader, never a decision."""
    weight, scale = parts["weight"], parts.get("weight_scale")
    if len(weight.shape) != 2:
        return ""
    if "scale_weight" in parts and weight.dtype == "F8_E4M3":
        return "legacy scaled FP8 (F8_E4M3 with scale_weight)"
    if "weight_s_rel" in parts and weight.dtype == "I8":
        return "asym_w4a8_int8 (packed I8 with group scales)"
    if scale is None:
        return ""
    if weight.dtype == "U8" and "weight_scale_2" in parts and scale.dtype in ("F8_E4M3", "U8"):
        return "nvfp4 (packed U8, 16-wide E4M3 block scales, a global scale)"
    if weight.dtype == "F8_E4M3" and scale.dtype in ("U8", "F8_E8M0") and len(scale.shape) == 2:
        return "mxfp8 (F8_E4M3 with 32-wide power-of-two scales)"
    if weight.dtype == "F8_E4M3":
        return f"FP8 with {'one scale' if scale.nbytes <= 4 else 'row or block scales'}"
    if weight.dtype == "I8" and scale.dtype == "F32" and scale.shape in ((weight.shape[0], 1), ()):
        return f"int8 with {'row scales' if scale.shape else 'one scale'}, rotated or not"
    if weight.dtype == "I8" and scale.shape == (weight.shape[0],):
        return "int8 or packed W4A4 with row scales"
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
