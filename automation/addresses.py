"""Telling addresses from files, and showing them without what must not be shown."""

from __future__ import annotations

from urllib.parse import urlsplit, urlunsplit

SCHEMES = ("http", "https", "hf")


def is_address(text: str) -> bool:
    """Whether ``text`` is an address that ``check`` reads over the network."""
    return text.partition("://")[0].lower() in SCHEMES and "://" in text


def public(address: str) -> str:
    """The address without user, password and query: those may hold a token."""
    parts = urlsplit(address)
    host = parts.hostname or ""
    port = f":{parts.port}" if parts.port is not None else ""
    return urlunsplit((parts.scheme, host + port, parts.path, "", ""))
