"""``quant-loader repair``: mend what is lossless, write a new file that passes the strict check, or write nothing.

The source is opened for reading only. The mends are planned on the header, the result is judged by the strict rules
before a byte is copied and again after the copy; weights are copied as they are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from ..checkpoint import check, declarations, dialects
from ..checkpoint.checker import MARKED_DTYPES, check_checkpoint
from ..checkpoint.declarations import MARKER, MAX_MARKER, METADATA_KEY, Declaration, Declarations
from ..checkpoint.dtypes import WIDE_FLOATS
from ..checkpoint.files import Checkpoint
from ..checkpoint.findings import Findings
from ..checkpoint.formats import quanto
from ..checkpoint.header import TensorInfo
from ..checkpoint.report import Report
from ..checkpoint.words import clean, name_of
from . import mends
from .declare import UserDeclaration
from .documents import shown
from .draft import Change, Draft
from .errors import Refused, RequestError
from .source import open_source
from .spool import checkpoint_of, spooled
from .writing import Progress, beside, check_target, in_file_order, write_pieces

Keep = Literal["marker", "header"]
_LEGACY_SPELLINGS = {"weight_scale": "scale_weight", "input_scale": "scale_input"}


@dataclass(frozen=True)
class Outcome:
    """What a repair did, or would do when ``written`` is False. ``size`` is the new file's, in bytes (0 for a dry
    run).
    """

    changes: tuple[Change, ...]
    report: Report
    written: bool
    size: int


def repair(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    declared: Sequence[UserDeclaration] = (),
    *,
    keep: Keep | None = None,
    dry_run: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Outcome:
    """Write a mended copy of ``source`` to ``target``.

    ``declared`` speaks for layers without a usable declaration; ``keep`` decides between a marker and header metadata
    that contradict each other. Raises RequestError for a request that cannot be meant, Refused (nothing written) when
    the file cannot be mended without loss; the new file appears under its name only when it is complete and passes
    the strict check.
    """
    path = check_target(target, source, overwrite=overwrite)
    with open_source(source) as (raw, header, trailing):
        draft = Draft.of(raw, header, trailing)
        _plan(draft, declared, keep)
        report = judge(draft, shown(source))
        if report.verdict == "refused":
            raise Refused(
                f"{shown(source)} cannot be mended without loss; nothing was written.", _reasons(draft, report)
            )
        if not draft.changes:
            raise Refused(
                f"{shown(source)} passes the strict check as it is: there is nothing to mend, and nothing was written."
            )
        if dry_run:
            return Outcome(tuple(draft.changes), report, False, 0)
        with beside(path) as partial:
            size = write_pieces(partial, raw, in_file_order(draft.pieces.values()), draft.metadata, progress)
            final = check([partial], rules="strict")
            if final.verdict == "refused":
                raise Refused(
                    "The new file did not pass the strict check; nothing was kept.",
                    tuple(f.message for f in final.errors[:10]),
                )
            _unchanged(source, raw.stamp)
            check_target(target, source, overwrite=overwrite)
            try:
                os.replace(partial, path)
            except OSError as error:
                raise Refused(
                    f"{shown(target)} could not be put in place: {error.strerror or error}; nothing was kept."
                ) from error
    return Outcome(tuple(draft.changes), final, True, size)


def judge(draft: Draft, label: str, rules: Literal["strict", "compatible"] = "strict") -> Report:
    """The report on the file that the draft would become, its small scales included."""
    with _imagined(draft, label) as checkpoint:
        return check_checkpoint(checkpoint, rules)


@contextmanager
def _imagined(draft: Draft, label: str) -> Iterator[Checkpoint]:
    """The draft as a checkpoint that the checker can read."""
    with spooled(label) as spool:
        for piece in draft.pieces.values():
            wanted = piece.name.endswith(MARKER) or (piece.dtype in WIDE_FLOATS and _is_scale(piece.name))
            if wanted and piece.nbytes <= MAX_MARKER:
                spool.add(piece.name, draft.bytes_of(piece))
        yield checkpoint_of(label, [spool.finish(draft.tensors().values(), draft.metadata)])


def _is_scale(name: str) -> bool:
    return "scale" in name.rpartition(".")[2] or name.endswith(
        (".weight_s_channel", ".weight_codebook", ".weight_correction")
    )


def _unchanged(source: str | os.PathLike[str], stamp: object) -> None:
    info = os.stat(source)
    if (info.st_size, info.st_mtime_ns) != (getattr(stamp, "size", None), getattr(stamp, "mtime_ns", None)):
        raise Refused(f"{shown(source)} changed while it was being copied; nothing was kept.")


def _reasons(draft: Draft, report: Report) -> tuple[str, ...]:
    reasons = [f"{group.message} {group.fix}" for group in report.groups if group.severity == "error"]
    if judge(draft, report.files[0], "compatible").verdict != "refused":
        reasons.append("Compatible rules accept the file as it is: set rules to compatible instead.")
    return tuple(reasons)


# -- the plan --------------------------------------------------------------------------------------------------------


def _plan(draft: Draft, declared: Sequence[UserDeclaration], keep: Keep | None) -> None:
    if draft.trailing:
        draft.note(mends.TRAILING_DROPPED, None, f"{draft.trailing} bytes after the last tensor dropped")
    if quanto.is_quanto(draft.metadata):
        if declared:
            raise RequestError("The file is declared by Quanto's own map; --declare does not apply to it.")
        return
    _padded_markers(draft)
    if keep is not None:
        _settle_conflicts(draft, keep)
    if declared:
        _apply_declarations(draft, declared)
    _standard_form(draft)


@dataclass(frozen=True)
class _Said:
    """What the draft says: every declaration as compatible rules read it, and the raw halves they came from."""

    all: Declarations
    markers: Mapping[str, Any]
    """Layer -> JSON value of its marker; absent when there is none or it cannot be read."""
    entries: Mapping[str, Any]
    """Layer as named there -> entry of ``_quantization_metadata``."""
    reports: tuple[Report, Report]
    """Strict and compatible."""


def _said(draft: Draft) -> _Said:
    with _imagined(draft, draft.raw.path) as checkpoint:
        findings = Findings()
        said = declarations.collect(checkpoint, findings, compatible=True)
        dialects.apply(checkpoint, said, findings)
        reports = (check_checkpoint(checkpoint, "strict"), check_checkpoint(checkpoint, "compatible"))
    return _Said(said, dict(_raw_markers(draft)), _raw_entries(draft), reports)


def _raw_markers(draft: Draft) -> Iterator[tuple[str, Any]]:
    for name, piece in draft.pieces.items():
        if name.endswith(MARKER) and piece.nbytes <= MAX_MARKER:
            value = _json(draft.bytes_of(piece))
            if value is not None:
                yield name[: -len(MARKER)], value


def _raw_entries(draft: Draft) -> dict[str, Any]:
    document = _json(draft.metadata.get(METADATA_KEY, ""))
    layers = document.get("layers") if isinstance(document, dict) else None
    return layers if isinstance(layers, dict) else {}


def _json(text: str | bytes) -> Any:
    """The value, or None where there is no readable JSON of reasonable depth."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return None if declarations.too_deep(value) else value


def _padded_markers(draft: Draft) -> None:
    """A marker whose complete JSON is followed by NUL bytes says the same without them."""
    for name, piece in list(draft.pieces.items()):
        if not name.endswith(MARKER) or not 0 < piece.nbytes <= MAX_MARKER:
            continue
        data = draft.bytes_of(piece)
        text = data.rstrip(b"\0")
        if len(text) < len(data) and isinstance(_json(text), dict) and draft.put(name, "U8", (len(text),), text):
            layer = name[: -len(MARKER)]
            draft.note(
                mends.MARKER_COMPLETED,
                layer,
                f"{name_of(layer)}: {len(data) - len(text)} NUL bytes after the marker's JSON dropped",
            )


def _settle_conflicts(draft: Draft, keep: Keep) -> None:
    """The person says which half of a contradiction is right; the other is made to agree."""
    said = _said(draft)
    if said.all.metadata_broken and keep == "marker":
        mends.drop_metadata(draft, METADATA_KEY, "it cannot be read, and the markers were chosen")
        return
    entries = dict(said.entries)
    settled = [p for p in said.all.broken if isinstance(said.markers.get(p), dict) and isinstance(entries.get(p), dict)]
    for prefix in settled:
        if keep == "header":
            mends.set_marker(draft, prefix, entries[prefix], said.markers[prefix], "the header was chosen")
        else:
            entries[prefix] = said.markers[prefix]
    if keep == "marker" and settled:
        mends.set_metadata_layers(
            draft, entries, f"{len(settled)} entries now say what the markers say: {', '.join(settled[:3])}"
        )


# -- declarations by the person --------------------------------------------------------------------------------------


def _apply_declarations(draft: Draft, declared: Sequence[UserDeclaration]) -> None:
    said = _said(draft)
    used: set[int] = set()
    tensors = dict(draft.tensors())
    for name, tensor in list(tensors.items()):
        for canonical, spelling in _LEGACY_SPELLINGS.items():
            if name.endswith(f".{spelling}"):
                tensors.setdefault(name[: -len(spelling)] + canonical, tensor)
    for prefix in _candidates(draft, said):
        conf = _declaration_for(prefix, draft, tensors, said, declared, used)
        if conf is not None:
            mends.set_marker(draft, prefix, conf, said.markers.get(prefix), "declared by you")
    for index, entry in enumerate(declared):
        if index not in used:
            where = f" named {clean(entry.pattern)}" if entry.pattern is not None else ""
            raise RequestError(
                f"--declare {entry.format}: no layer{where} lacks a declaration and has the tensors of this format."
            )


def _candidates(draft: Draft, said: _Said) -> Iterator[str]:
    """Layers that could do with a declaration: none, one without a format, or one that cannot be read."""
    for name, piece in list(draft.pieces.items()):
        if not name.endswith(".weight") or piece.dtype not in (*MARKED_DTYPES, "F8_E5M2"):
            continue
        prefix = name[: -len(".weight")]
        current = said.all.layers.get(prefix)
        if current is None or (prefix not in said.all.broken and "format" not in current.conf):
            yield prefix


def _declaration_for(
    prefix: str,
    draft: Draft,
    tensors: Mapping[str, TensorInfo],
    said: _Said,
    declared: Sequence[UserDeclaration],
    used: set[int],
) -> dict[str, Any] | None:
    marker = draft.pieces.get(prefix + MARKER)
    unreadable = prefix in said.all.broken and marker is not None and marker.nbytes > 0
    renames = Declaration(prefix, {}, "inferred", "", (), _LEGACY_SPELLINGS)
    fitting = [
        (i, d) for i, d in enumerate(declared) if d.fits(prefix, tensors) and (d.names(prefix) or not unreadable)
    ]
    named = [(i, d) for i, d in fitting if d.names(prefix)]
    chosen = named or fitting
    if not chosen:
        return None
    if any(d.conf != chosen[0][1].conf for _, d in chosen):
        raise RequestError(
            f"Layer {name_of(prefix)} fits several --declare options; say which by --declare LAYER=FORMAT."
        )
    used.update(i for i, _ in chosen)
    mends.legacy_names(draft, renames)
    conf = chosen[0][1].conf
    old = said.markers.get(prefix)
    old = old if isinstance(old, dict) and not unreadable else {}
    for key in old.keys() & conf.keys():
        if old[key] != conf[key]:
            raise RequestError(
                f"Layer {name_of(prefix)}: its marker says {key} {json.dumps(old[key])[:60]}, --declare says "
                f"{json.dumps(conf[key])}."
            )
    return {"format": conf["format"], **old, **conf}


# -- the standard form -----------------------------------------------------------------------------------------------


def _standard_form(draft: Draft) -> None:
    """Every declaration complete and in agreement, every tensor under its standard name, every scale in its standard
    shape and type.
    """
    said = _said(draft)
    strict, compatible = said.reports
    sound = {spec.name for spec in strict.layers}
    specs = {spec.name: spec for spec in compatible.layers}
    entries = dict(said.entries)
    moved = _rename_entries(said, entries)
    touched: list[str] = []
    for prefix, declaration in said.all.layers.items():
        if prefix in said.all.broken:
            continue
        mends.legacy_names(draft, declaration)
        name = declaration.conf.get("format")
        if isinstance(name, str):
            mends.scales(draft, prefix, name)
        if prefix in sound or not isinstance(name, str):
            continue
        _declare_fully(draft, said, declaration, mends.complete(declaration.conf, specs.get(prefix)), entries, touched)
    if moved or touched:
        words = [
            *([f"{moved} names given the model's prefix"] if moved else []),
            *([f"entries completed: {', '.join(touched[:3])}"] if touched else []),
        ]
        mends.set_metadata_layers(draft, entries, "; ".join(words))
    for name in [n for n in draft.pieces if n.endswith(MARKER)]:
        prefix = name[: -len(MARKER)]
        if prefix not in said.all.layers and prefix not in said.all.broken:
            mends.drop_marker(draft, prefix, "it cannot be read, and the layer is not quantised")
    _own_mxfp8_markers(draft, said)
    mends.drop_legacy_flags(draft, said.all)


def _declare_fully(
    draft: Draft,
    said: _Said,
    declaration: Declaration,
    conf: Mapping[str, Any],
    entries: dict[str, Any],
    touched: list[str],
) -> None:
    """Bring a layer's marker and metadata entry to ``conf``; write a marker where it has neither."""
    prefix = declaration.prefix
    marker, entry = said.markers.get(prefix), entries.get(prefix)
    why = "; ".join(declaration.notes) or "nested and loosely typed settings in the standard form"
    if marker is not None and not _identical(marker, conf):
        mends.set_marker(draft, prefix, conf, marker, why)
    if entry is not None and not _identical(entry, conf):
        entries[prefix] = dict(conf)
        touched.append(prefix)
    if marker is None and entry is None:
        mends.set_marker(draft, prefix, conf, None, why)


def _identical(a: Any, b: Any) -> bool:
    """Equality with JSON's kinds kept apart (1, 1.0 and true are three things)."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def _rename_entries(said: _Said, entries: dict[str, Any]) -> int:
    """Metadata names get the prefix (or lose it) under which compatible rules found their tensors; returns how many."""
    lost = [name for name in said.all.from_metadata if name not in said.all.layers and name not in said.all.broken]
    found = {p for p, d in said.all.layers.items() if d.by == "metadata" and p not in said.entries}
    renames: dict[str, str] = {}
    for name in lost:
        for outer in dialects.MODEL_PREFIXES:
            shorter = name[len(outer) :] if name.startswith(outer) else ""
            if outer + name in found or shorter in found:
                renames[name] = outer + name if outer + name in found else shorter
                break
    for name, target in renames.items():
        entries[target] = entries.pop(name)
    return len(renames)


def _own_mxfp8_markers(draft: Draft, said: _Said) -> None:
    """``quant_format: mxfp8`` claims one scale layout for the whole file; where it is another one, each layer's own
    marker says so.
    """
    strict, compatible = said.reports
    if not said.all.global_mxfp8 or not any(fault.rule == "mxfp8.layout" for fault in strict.errors):
        return
    layers = [spec for spec in compatible.layers if spec.format == "mxfp8"]
    if not layers or compatible.verdict == "refused":
        return
    for spec in layers:
        if spec.name not in said.all.layers:
            mends.set_marker(draft, spec.name, {"format": "mxfp8"}, None, "declared by quant_format in the metadata")
    mends.drop_metadata(draft, "quant_format", "its layers have markers now")
