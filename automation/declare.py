"""``--declare``: what a person says about layers whose declaration is missing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ..checkpoint.formats import FORMATS
from ..checkpoint.header import TensorInfo
from ..checkpoint.words import clean, listing
from .errors import RequestError

_SETTINGS: dict[str, tuple[type, ...]] = {
    "convrot": (bool,),
    "convrot_groupsize": (int,),
    "group_size": (int,),
    "linear_dtype": (str,),
    "full_precision_matrix_mult": (bool,),
}

_DTYPES: dict[str, tuple[str, ...]] = {
    "int8_tensorwise": ("I8",),
    "convrot_w4a4": ("I8",),
    "asym_w4a8_int8": ("I8",),
    "nvfp4": ("U8",),
    "float8_e4m3fn": ("F8_E4M3",),
    "float8_e5m2": ("F8_E5M2",),
    "mxfp8": ("F8_E4M3",),
}
"""The weight's dtype by format: a declaration for a whole file reaches only the layers that can have it."""

_BLOCK_SCALES = ("U8", "F8_E8M0")


@dataclass(frozen=True)
class UserDeclaration:
    """``conf`` is the declaration as a marker holds it; ``pattern`` names layers (shell wildcards), None means every
    fitting one.
    """

    conf: dict[str, Any]
    pattern: str | None = None

    @property
    def format(self) -> str:
        return str(self.conf["format"])

    def names(self, prefix: str) -> bool:
        """Whether the person named this very layer."""
        return self.pattern is not None and fnmatchcase(prefix, self.pattern)

    def fits(self, prefix: str, tensors: Mapping[str, TensorInfo]) -> bool:
        """Whether the layer's tensors can be of this format."""
        if self.pattern is not None and not fnmatchcase(prefix, self.pattern):
            return False
        weight = tensors.get(f"{prefix}.weight")
        if weight is None or weight.dtype not in _DTYPES[self.format]:
            return False
        if any(f"{prefix}.{suffix}" not in tensors for suffix in FORMATS[self.format].required):
            return False
        if weight.dtype == "F8_E4M3":
            return (tensors[f"{prefix}.weight_scale"].dtype in _BLOCK_SCALES) == (self.format == "mxfp8")
        return True


def parse_declaration(text: str) -> UserDeclaration:
    """``FORMAT``, ``FORMAT,key=value,...``, a JSON object, or any of these after ``LAYER=`` (wildcards allowed).
    Raises RequestError.

    Examples: ``nvfp4`` · ``int8_tensorwise,convrot=true,convrot_groupsize=256`` · ``blocks.*.mlp.*=float8_e4m3fn``
    """
    pattern: str | None = None
    body = text.strip()
    head = body.split(",", 1)[0]
    if not body.startswith("{") and "=" in head:
        pattern, body = body.split("=", 1)
        pattern, body = pattern.strip(), body.strip()
    conf = _json(body) if body.startswith("{") else _plain(body)
    known = conf.get("format")
    if known not in FORMATS:
        raise RequestError(
            f"--declare {clean(text)}: {clean(str(known))} is no known format; known are "
            f"{listing(list(FORMATS), len(FORMATS))}."
        )
    for key, value in conf.items():
        kinds = _SETTINGS.get(key, (str,) if key == "format" else None)
        if kinds is None:
            raise RequestError(
                f"--declare {clean(text)}: there is no setting {clean(key)}; settings are "
                f"{listing(list(_SETTINGS), 9)}."
            )
        if type(value) not in kinds:
            raise RequestError(
                f"--declare {clean(text)}: {key} must be {_kind(kinds[0])}, got {clean(json.dumps(value))}."
            )
    return UserDeclaration(conf, pattern)


def _kind(kind: type) -> str:
    return {bool: "true or false", int: "a whole number", str: "a word"}[kind]


def _json(body: str) -> dict[str, Any]:
    try:
        conf = json.loads(body)
    except (ValueError, RecursionError):
        raise RequestError(f"--declare {clean(body)} is not JSON.") from None
    if not isinstance(conf, dict):
        raise RequestError(f"--declare {clean(body)} must be a JSON object.")
    return conf


def _plain(body: str) -> dict[str, Any]:
    name, *settings = body.split(",")
    conf: dict[str, Any] = {"format": name.strip()}
    for setting in settings:
        key, found, value = setting.partition("=")
        if not found:
            raise RequestError(f"--declare {clean(body)}: write settings as key=value, got {clean(setting)}.")
        conf[key.strip()] = _value(value.strip())
    return conf


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else text
