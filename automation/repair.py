"""``quant-loader repair``: mend what is lossless, write new files that pass the strict check, or write nothing.

A set of shards is one checkpoint: all of it is written or none. The source is opened for reading only. The mends are
planned on the headers, the result is judged by the strict rules before a byte is copied and again after the copy;
weights are copied as they are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
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
from .draft import INDEX_COMPLETED, MARKER_COMPLETED, TRAILING_DROPPED, Change, Draft
from .errors import Refused, RequestError
from .shards import INDEX_END, Source, Target, find_source, find_target, index_text, misplaced, read_index
from .source import open_source
from .spool import checkpoint_of, spooled
from .writing import (
    Progress,
    beside,
    check_target,
    header_bytes,
    in_file_order,
    in_place,
    require_room,
    write_pieces,
    write_small,
)

Keep = Literal["marker", "header"]
_LOSSY = "{} cannot be mended without loss; nothing was written."
_LEGACY_SPELLINGS = {"weight_scale": "scale_weight", "input_scale": "scale_input"}


@dataclass(frozen=True)
class Outcome:
    """What a repair did, or would do when ``written`` is False. ``size`` is that of the new file or files, in
    bytes (0 for a dry run).
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

    A shard or an index as ``source`` stands for its whole set, which goes into the folder ``target`` or under the
    index name ``target``. ``declared`` speaks for layers without a usable declaration; ``keep`` decides between a
    marker and header metadata that contradict each other. Raises RequestError for a request that cannot be meant,
    Refused (nothing written) when the checkpoint cannot be mended without loss; new files appear under their names
    only when all are complete and pass the strict check.
    """
    old = find_source(source)
    new = find_target(target, old)
    _targets_are_free(old, new, overwrite)
    with ExitStack() as stack:
        draft = Draft.of([stack.enter_context(open_source(path)) for path in old.paths])
        index = read_index(old.index) if old.index is not None else None
        _plan_index(draft, index, source)
        _plan(draft, declared, keep)
        report = judge(draft, shown(source))
        if report.verdict == "refused":
            raise Refused(_LOSSY.format(shown(source)), _reasons(draft, report))
        if not draft.changes:
            raise Refused(
                f"{shown(source)} passes the strict check as it is: there is nothing to mend, and nothing was written."
            )
        if dry_run:
            return Outcome(tuple(draft.changes), report, False, 0)
        partials = [stack.enter_context(beside(path)) for path in new.all]
        size = _write(draft, partials, progress)
        if index is not None:
            write_small(partials[-1], index_text(index, draft.pieces, new))
        _passes(check(partials[: len(new.paths)], rules="strict"))
        for part in draft.parts:
            _unchanged(part.raw.path, part.raw.stamp)
        _targets_are_free(old, new, overwrite)
        with in_place(list(zip(partials, new.all, strict=True))):
            final = check([new.index or new.paths[0]], rules="strict")
            _passes(final)
    return Outcome(tuple(draft.changes), final, True, size)


def _targets_are_free(old: Source, new: Target, overwrite: bool) -> None:
    for path in new.paths:
        check_target(path, old.paths, overwrite=overwrite)
    if new.index is not None and old.index is not None:
        check_target(new.index, [*old.paths, old.index], overwrite=overwrite, ending=INDEX_END)


def _plan_index(draft: Draft, index: Mapping[str, Any] | None, source: str | os.PathLike[str]) -> None:
    """An index is written anew; one that contradicts the shards is refused."""
    if index is None:
        return
    damage = misplaced(index, draft.parts)
    if damage:
        raise Refused(_LOSSY.format(shown(source)), damage[:10])
    if any(not part.names <= index["weight_map"].keys() for part in draft.parts):
        draft.note(INDEX_COMPLETED, None, "the index now lists every tensor of the shards")


def _write(draft: Draft, partials: Sequence[Path], progress: Progress | None) -> int:
    """Write every file of the draft under its first name; returns their size in bytes."""
    ordered = [in_file_order(pieces) for pieces in draft.by_part()]
    heads = [header_bytes(pieces, part.metadata) for pieces, part in zip(ordered, draft.parts, strict=True)]
    size = sum(map(len, heads)) + sum(piece.nbytes for piece in draft.pieces.values())
    require_room(partials[0].parent, size)
    done = 0
    for number, part in enumerate(draft.parts):
        counted = None if progress is None else _offset(progress, done, size)
        done += write_pieces(partials[number], part.raw, heads[number], ordered[number], counted)
    return size


def _offset(progress: Progress, done: int, total: int) -> Progress:
    """The progress of one file as that of the whole."""
    return lambda here, _: progress(done + here, total)


def _passes(report: Report) -> None:
    if report.verdict == "refused":
        raise Refused(
            "What was written did not pass the strict check; nothing was kept.",
            tuple(f.message for f in report.errors[:10]),
        )


def judge(draft: Draft, label: str, rules: Literal["strict", "compatible"] = "strict") -> Report:
    """The report on the file that the draft would become, its small scales included."""
    with _imagined(draft, label) as checkpoint:
        return check_checkpoint(checkpoint, rules)


@contextmanager
def _imagined(draft: Draft, label: str) -> Iterator[Checkpoint]:
    """The draft as a checkpoint that the checker can read."""
    headers = []
    with ExitStack() as stack:
        for part, pieces in zip(draft.parts, draft.by_part(), strict=True):
            spool = stack.enter_context(spooled(label if len(draft.parts) == 1 else part.raw.path))
            for piece in pieces:
                wanted = piece.name.endswith(MARKER) or (piece.dtype in WIDE_FLOATS and _is_scale(piece.name))
                if wanted and piece.nbytes <= MAX_MARKER:
                    spool.add(piece.name, draft.bytes_of(piece))
            headers.append(spool.finish([piece.info(part.raw.path) for piece in pieces], part.metadata))
        yield checkpoint_of(label, headers)


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
    for part in draft.parts:
        if part.trailing:
            where = f" of {shown(os.path.basename(part.raw.path))}" if len(draft.parts) > 1 else ""
            draft.note(TRAILING_DROPPED, None, f"{part.trailing} bytes after the last tensor{where} dropped")
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
    with _imagined(draft, draft.parts[0].raw.path) as checkpoint:
        findings = Findings()
        said = declarations.collect(checkpoint, findings, compatible=True)
        dialects.apply(checkpoint, said, findings)
        reports = (check_checkpoint(checkpoint, "strict"), check_checkpoint(checkpoint, "compatible"))
    return _Said(said, dict(_raw_markers(draft)), _raw_entries(draft), reports)


def _raw_markers(draft: Draft) -> Iterator[tuple[str, Any]]:
    for name, piece in draft.pieces.items():
        if name.endswith(MARKER) and piece.nbytes <= MAX_MARKER:
            value = mends.readable(draft.bytes_of(piece))
            if value is not None:
                yield name[: -len(MARKER)], value


def _raw_entries(draft: Draft) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in draft.parts:
        document = mends.readable(part.metadata.get(METADATA_KEY, ""))
        layers = document.get("layers") if isinstance(document, dict) else None
        found.update(layers if isinstance(layers, dict) else {})
    return found


def _padded_markers(draft: Draft) -> None:
    """A marker whose complete JSON is followed by NUL bytes says the same without them."""
    for name, piece in list(draft.pieces.items()):
        if not name.endswith(MARKER) or not 0 < piece.nbytes <= MAX_MARKER:
            continue
        data = draft.bytes_of(piece)
        text = data.rstrip(b"\0")
        if (
            len(text) < len(data)
            and isinstance(mends.readable(text), dict)
            and draft.put(name, "U8", (len(text),), text)
        ):
            layer = name[: -len(MARKER)]
            draft.note(
                MARKER_COMPLETED,
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
