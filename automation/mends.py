"""The lossless mends, each by itself: dialect spellings, scale shapes and types, markers and metadata.

A mend changes the draft only where the meaning of the file stays exactly what it was, or what the person declared.
None of them decides whether the result is sound: the strict check does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..checkpoint.declarations import MARKER, METADATA_KEY, Declaration, Declarations, too_deep
from ..checkpoint.dtypes import WIDE_FLOATS, count, decode
from ..checkpoint.layer import NESTED_KEYS
from ..checkpoint.report import LayerSpec
from ..checkpoint.words import clean, name_of, show
from ..checkpoint.words import conf as conf_text
from .draft import (
    MARKER_COMPLETED,
    MARKER_DROPPED,
    MARKER_WRITTEN,
    METADATA_CHANGED,
    RELABELLED,
    RENAMED,
    RESHAPED,
    TENSOR_DROPPED,
    WIDENED,
    Draft,
    Piece,
    tensor_text,
    typed,
)

SCALAR, ROWS, COLUMN = "()", "(N,)", "(N, 1)"

_SCALES: dict[str, dict[str, tuple[str, ...]]] = {
    "int8_tensorwise": {"weight_scale": (SCALAR, COLUMN)},
    "convrot_w4a4": {"weight_scale": (ROWS,)},
    "asym_w4a8_int8": {"weight_s_channel": (ROWS,), "weight_codebook": (), "weight_correction": ()},
    "nvfp4": {"weight_scale_2": (SCALAR,)},
    "float8_e4m3fn": {"weight_scale": (SCALAR,), "input_scale": (SCALAR,)},
    "float8_e5m2": {"weight_scale": (SCALAR,), "input_scale": (SCALAR,)},
}
"""Format -> scale tensor -> the standard shapes it may have; all of these scales are F32 in a standard file."""

_MAX_SECTIONS = 32
"""Deepest section of a layer name that a ``scaled_fp8`` flag may stand for."""

_BYTE_SCALES = {"nvfp4": "weight_scale", "asym_w4a8_int8": "weight_s_rel"}
"""Block scales that some writers store as plain U8: the same bytes are F8_E4M3."""


def scales(draft: Draft, prefix: str, format_name: str) -> None:
    """Scales of one layer in their standard shape and type: only where no value changes and only one reading is
    possible.
    """
    labelled = _BYTE_SCALES.get(format_name)
    if labelled is not None:
        piece = draft.pieces.get(f"{prefix}.{labelled}")
        if piece is not None and piece.dtype == "U8":
            draft.relabel(piece.name, dtype="F8_E4M3")
            draft.note(RELABELLED, prefix, f"{tensor_text(piece.name)}: U8 relabelled F8_E4M3 (the same bytes)")
    weight = draft.pieces.get(f"{prefix}.weight")
    rows = weight.shape[0] if weight is not None and len(weight.shape) == 2 else None
    for suffix, shapes in _SCALES.get(format_name, {}).items():
        piece = draft.pieces.get(f"{prefix}.{suffix}")
        if piece is None:
            continue
        if shapes and rows is not None:
            piece = _reshape(draft, prefix, piece, shapes, rows)
        _widen(draft, prefix, piece)


def _reshape(draft: Draft, prefix: str, piece: Piece, shapes: tuple[str, ...], rows: int) -> Piece:
    wanted = standard_shape(piece.shape, shapes, rows)
    if wanted is None or wanted == piece.shape:
        return piece
    draft.relabel(piece.name, shape=wanted)
    draft.note(
        RESHAPED,
        prefix,
        f"{tensor_text(piece.name)}: {typed(piece.dtype, piece.shape)} reshaped to "
        f"{typed(piece.dtype, wanted)[len(piece.dtype) + 1 :]}",
    )
    return draft.pieces[piece.name]


def standard_shape(shape: tuple[int, ...], allowed: tuple[str, ...], rows: int) -> tuple[int, ...] | None:
    """The one standard shape that holds the same values in the same order, or None. ``(1, N)`` may mean columns and
    stays.
    """
    table = {SCALAR: (), ROWS: (rows,), COLUMN: (rows, 1)}
    if any(shape == table[name] for name in allowed) or (SCALAR in allowed and COLUMN not in allowed and shape == (1,)):
        return shape
    if SCALAR in allowed and count(shape) == 1:
        return ()
    for name in (ROWS, COLUMN):
        if name in allowed and shape in ((rows,), (rows, 1)):
            return table[name]
    return None


def _widen(draft: Draft, prefix: str, piece: Piece) -> None:
    if piece.dtype == "F32" or piece.dtype not in WIDE_FLOATS:
        return
    data = widened(piece.dtype, draft.bytes_of(piece)) if piece.nbytes <= 64 << 20 else None
    if data is not None and draft.put(piece.name, "F32", piece.shape, data):
        draft.note(WIDENED, prefix, f"{tensor_text(piece.name)}: {piece.dtype} widened to F32 (exact)")


def widened(dtype: str, data: bytes) -> bytes | None:
    """The same values as F32, or None when F32 cannot hold every one of them."""
    values = decode(dtype, data)
    with np.errstate(over="ignore"):
        wide = values.astype("<f4")
    if dtype == "F64" and not np.array_equal(wide.astype("<f8"), values, equal_nan=True):
        return None
    return wide.tobytes()


def legacy_names(draft: Draft, declaration: Declaration) -> None:
    """A dialect's tensor names (``scale_weight``) become the standard ones; an input scale of exactly 1 means none
    there.
    """
    for canonical, spelling in (declaration.aliases or {}).items():
        old, new = f"{declaration.prefix}.{spelling}", f"{declaration.prefix}.{canonical}"
        piece = draft.pieces.get(old)
        if piece is None:
            continue
        if spelling == "scale_input" and _is_one(draft, piece):
            del draft.pieces[old]
            draft.note(
                TENSOR_DROPPED, declaration.prefix, f"{tensor_text(old)}: 1.0 means no input scale in this dialect"
            )
        elif draft.rename(old, new):
            draft.note(RENAMED, declaration.prefix, f"{tensor_text(old)} renamed {tensor_text(canonical)}")


def _is_one(draft: Draft, piece: Piece) -> bool:
    if piece.dtype not in WIDE_FLOATS or count(piece.shape) != 1:
        return False
    return float(decode(piece.dtype, draft.bytes_of(piece))[0]) == 1.0


def drop_legacy_flags(draft: Draft, declared: Declarations) -> None:
    """The ``scaled_fp8`` tensors, once every layer under them has a marker of its own."""
    flags = [n for n in draft.pieces if n == "scaled_fp8" or n.endswith(".scaled_fp8")]
    if not flags or any(n.endswith(".scale_weight") for n in draft.pieces):
        return
    sections = {""}
    for prefix in declared.layers:
        parts = prefix.split(".")
        sections.update(".".join(parts[:depth]) + "." for depth in range(1, min(len(parts), _MAX_SECTIONS)))
    for name in flags:
        if name[: -len("scaled_fp8")] in sections:
            del draft.pieces[name]
            draft.note(TENSOR_DROPPED, None, f"{tensor_text(name)}: its layers have markers now")


def complete(conf: Mapping[str, Any], spec: LayerSpec | None) -> dict[str, Any]:
    """The declaration in the flat standard form: nested ``params`` raised, settings in their plain JSON kind. Other
    keys stay.
    """
    flat = dict(conf)
    nested = conf.get("params")
    nested = nested if isinstance(nested, Mapping) else {}
    for key in NESTED_KEYS:
        if key not in flat and key in nested:
            flat[key] = nested[key]
        if spec is not None and key in flat and spec.get(key) is not None:
            flat[key] = spec.get(key)
    return flat


def marker_bytes(conf: Mapping[str, Any]) -> bytes:
    """A marker as Comfy-Org's files hold it: ``json.dumps`` spacing, UTF-8."""
    return json.dumps(conf).encode("utf-8")


def set_marker(draft: Draft, prefix: str, conf: Mapping[str, Any], was: object, why: str) -> None:
    """Write or replace a layer's marker. ``was`` is the old content for the message, None when there was none."""
    name = prefix + MARKER
    data = marker_bytes(conf)
    if not draft.put(name, "U8", (len(data),), data):
        return
    if was is None:
        draft.note(MARKER_WRITTEN, prefix, f"{name_of(prefix)}: marker {conf_text(dict(conf))} written ({why})")
    else:
        draft.note(
            MARKER_COMPLETED, prefix, f"{name_of(prefix)}: marker {show(was)} is now {conf_text(dict(conf))} ({why})"
        )


def drop_marker(draft: Draft, prefix: str, why: str) -> None:
    del draft.pieces[prefix + MARKER]
    draft.note(MARKER_DROPPED, prefix, f"{name_of(prefix)}: marker dropped ({why})")


def readable(text: str | bytes) -> Any:
    """The JSON value, or None where there is none of reasonable depth."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return None if too_deep(value) else value


def set_metadata_layers(draft: Draft, layers: Mapping[str, Any], why: str) -> None:
    """Rewrite the layers of ``_quantization_metadata``; its other keys stay. Of a set, every shard that has a table
    gets the whole one.
    """
    for part in draft.parts:
        document = readable(part.metadata.get(METADATA_KEY, ""))
        if isinstance(document, dict):
            document["layers"] = dict(layers)
            part.metadata[METADATA_KEY] = json.dumps(document)
    draft.note(METADATA_CHANGED, None, f"_quantization_metadata: {clean(why, 300)}")


def drop_metadata(draft: Draft, key: str, why: str) -> None:
    for part in draft.parts:
        part.metadata.pop(key, None)
    draft.note(METADATA_CHANGED, None, f"{tensor_text(key)} removed from the metadata ({why})")
