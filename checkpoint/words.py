"""Turning what a hostile file says into short, printable words."""

from __future__ import annotations

import json
from typing import Any

MAX_WORD = 120


def clean(text: str, limit: int = MAX_WORD) -> str:
    """``text`` on one line, printable, at most ``limit`` characters (the middle is cut: both ends of a layer name tell
    something).
    """
    if len(text) > limit:
        keep = (limit - 1) // 2
        text = f"{text[:keep]}…{text[-keep:]}"
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def cut(text: str, width: int) -> str:
    """A sentence on one line, its end cut at a word when it is too long."""
    text = clean(text, 10 * width)
    if len(text) <= width:
        return text
    head = text[: width - 1]
    return head[: head.rfind(" ")].rstrip(" ,;:(") + "…" if " " in head[width // 2 :] else head + "…"


def name_of(layer: str) -> str:
    """How a layer is called in a message."""
    return clean(layer) or "(root)"


def show(value: Any) -> str:
    """A JSON value from the file, shallow and bounded."""
    if isinstance(value, str):
        return clean(json.dumps(value if len(value) <= 60 else value[:59] + "…", ensure_ascii=False), 80)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return (
            str(value)
            if value.bit_length() <= 64
            else f"a number of about {value.bit_length() * 30103 // 100000 + 1} digits"
        )
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return conf(value) if value else "{}"
    return type(value).__name__


def conf(declaration: dict[str, Any]) -> str:
    """A declaration such as ``{"format": "nvfp4"}``, its first keys, one level deep."""
    parts = []
    for key, value in list(declaration.items())[:6]:
        inner = "{…}" if isinstance(value, dict) else "[…]" if isinstance(value, list) else show(value)
        parts.append(f"{json.dumps(clean(key, 40), ensure_ascii=False)}: {inner}")
    if len(declaration) > 6:
        parts.append("…")
    return "{" + ", ".join(parts) + "}"


def dims(shape: tuple[int, ...]) -> str:
    """A shape as text."""
    return "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"


def listing(items: list[str], limit: int = 4) -> str:
    """``a, b and c``, cut after ``limit``."""
    shown = [clean(item) for item in items[:limit]]
    rest = len(items) - len(shown)
    if rest > 0:
        return ", ".join(shown) + f" and {rest} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else "".join(shown)
