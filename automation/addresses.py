"""Telling addresses from files, and showing them without what must not be shown."""

from __future__ import annotations

import re
from urllib.parse import urlsplit, urlunsplit

from .errors import RequestError

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{1,20}\Z")
SCHEMES = ("http", "https", "hf")


def is_address(text: str) -> bool:
    """Whether ``text`` is an address that ``check`` reads over the network."""
    return text.partition("://")[0].lower() in SCHEMES and "://" in text


def foreign_scheme(text: str) -> str | None:
    """The scheme of an address that nothing here reads (``ftp``), None for what may be a file's name."""
    scheme, found, _ = text.partition("://")
    return scheme if found and _SCHEME.match(scheme) and not is_address(text) else None


def public(address: str) -> str:
    """The address without user, password and query: those may hold a token. Raises RequestError when it is none."""
    try:
        parts = urlsplit(address)
        host = parts.hostname or ""
        port = f":{parts.port}" if parts.port is not None else ""
    except ValueError as error:  # its text may quote the part with the password
        raise RequestError(
            "The address cannot be read: a bracket or the port number is wrong. Expected https://host/path/file."
        ) from error
    return urlunsplit((parts.scheme, host + port, parts.path, "", ""))
