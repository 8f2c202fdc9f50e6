"""``quant-loader check ADDRESS``: judge a checkpoint before it is downloaded, from its header and markers alone."""

from __future__ import annotations

import json
import re
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from ..checkpoint.checker import check_checkpoint
from ..checkpoint.declarations import MARKER, MAX_MARKER
from ..checkpoint.files import MAX_SHARDS
from ..checkpoint.findings import Findings
from ..checkpoint.header import MAX_HEADER, Header, HeaderError, RawFile, Stamp, TensorInfo, read_open
from ..checkpoint.report import Fault, Group, Report, Rules
from ..checkpoint.summary import summarise
from ..checkpoint.words import clean
from .addresses import public
from .errors import RequestError
from .spool import checkpoint_of, spooled
from .transport import RemoteBytes

FIRST = 256 << 10
"""Bytes of the first request: most headers fit."""
_INDEX_END = ".safetensors.index.json"
_PICKLES = (".ckpt", ".pt", ".pth", ".pkl", ".bin")
_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>[0-9]{5})-of-(?P<total>[0-9]{5})(?P<end>\.safetensors)\Z", re.DOTALL)
UNREAD = "extra.remote.partial"
"""The notice on every report made from an address."""


class _RemoteFile(RawFile):
    """A remote file as the header reader sees it."""

    def __init__(self, source: RemoteBytes, name: str) -> None:
        self.path = name
        self._source = source
        self._start = source.start(FIRST)
        self.stamp = Stamp(source.size, 0, 0)

    @property
    def magic(self) -> bytes:
        return self._start[:4]

    def read_at(self, offset: int, size: int) -> bytes:
        if offset + size > self.stamp.size:
            raise HeaderError(
                "crash.file", f"it ends after {self.stamp.size} bytes while {offset + size} were expected"
            )
        if offset + size <= len(self._start):
            return self._start[offset : offset + size]
        known = self._start[offset:]
        wanted = (offset + len(known), offset + size)
        return known + self._source.fetch([wanted])[wanted]

    def many(self, tensors: list[TensorInfo]) -> dict[str, bytes]:
        """The content of several tensors, by name."""
        found = {t.name: self._start[t.start : t.stop] for t in tensors if t.stop <= len(self._start)}
        rest = [t for t in tensors if t.name not in found]
        blocks = self._source.fetch((t.start, t.stop) for t in rest)
        found.update((t.name, blocks.get((t.start, t.stop), b"")) for t in rest)
        return found


def check_address(address: str, rules: Rules = "strict", *, timeout: float = 20.0, deadline: float = 300.0) -> Report:
    """The report on the checkpoint at an ``http(s)://`` or ``hf://owner/repo/path`` address.

    Header and markers are read by HTTP ranges, scales and weights are not; a notice of the report says so. An index,
    or any shard's name, stands for its set. Raises RequestError when the address cannot be read.
    """
    label = public(address)
    url, token = resolve(address)
    base = basename(url)
    if base.lower().endswith(_PICKLES):
        return _refused(label, rules, "extra.foreign.pickle", file=clean(base), found=clean(base))
    reads = _Reads(token, timeout, deadline)
    with ExitStack() as stack:
        try:
            headers = [_header(reads.open(place), basename(place), stack) for place in reads.shards(url)]
        except HeaderError as error:
            where = f"tensor {clean(error.tensor)}: " if error.tensor is not None else ""
            found = where + error.detail
            return _refused(label, rules, error.rule, file=clean(base), found=found, expected=error.expected)
        report = check_checkpoint(checkpoint_of(label, headers), rules, values=False)
    return _with_notice(report, reads)


class _Reads:
    """The files of one check, all under one time limit."""

    def __init__(self, token: str | None, timeout: float, deadline: float) -> None:
        self.token = token
        self.timeout = timeout
        self._end = time.monotonic() + deadline
        self.sources: list[RemoteBytes] = []

    def open(self, url: str) -> RemoteBytes:
        left = max(self._end - time.monotonic(), 0.1)
        self.sources.append(RemoteBytes(url, self.token, self.timeout, left))
        return self.sources[-1]

    def shards(self, url: str) -> list[str]:
        """The addresses of the checkpoint's files: what an index lists, what a shard's name promises, or the one
        file.
        """
        base = basename(url)
        if base.lower().endswith(_INDEX_END):
            return [sibling(url, name) for name in self._listed(url)]
        match = _SHARD.match(base)
        if match is None:
            return [url]
        total = int(match["total"])
        if not 1 <= int(match["number"]) <= total <= MAX_SHARDS:
            raise RequestError(f"{clean(base)} is no shard's name: its number is out of range.")
        return [sibling(url, f"{match['stem']}-{n:05d}-of-{match['total']}{match['end']}") for n in range(1, total + 1)]

    def _listed(self, url: str) -> list[str]:
        source = self.open(url)
        text = source.start(MAX_HEADER)
        if source.size > MAX_HEADER:
            raise RequestError(f"{source.name} is too large to be a shard index.")
        try:
            document: Any = json.loads(text)
        except (ValueError, RecursionError):
            raise RequestError(f"{source.name} is not JSON.") from None
        places = document.get("weight_map") if isinstance(document, dict) else None
        if not isinstance(places, dict) or not places:
            raise RequestError(f"{source.name} is no shard index: it has no weight_map.")
        names = list(dict.fromkeys(places.values()))
        if len(names) > MAX_SHARDS or not all(_is_plain_name(name) for name in names):
            raise RequestError(f"{source.name} names files outside its folder, or too many.")
        return names


def _is_plain_name(name: object) -> bool:
    return isinstance(name, str) and bool(name) and not set(name) & set("/\\\0?#") and name not in (".", "..")


def _header(source: RemoteBytes, base: str, stack: ExitStack) -> Header:
    """The header of one remote file, its markers laid into a local spool. Raises HeaderError, RequestError."""
    remote = _RemoteFile(source, base)
    if remote.magic == b"GGUF":
        raise HeaderError("extra.foreign.gguf", clean(base))
    header = read_open(remote)
    spool = stack.enter_context(spooled(base))
    markers = [t for t in header.tensors.values() if t.name.endswith(MARKER) and 0 < t.nbytes <= MAX_MARKER]
    for name, data in remote.many(markers).items():
        spool.add(name, data)
    local = spool.finish(header.tensors.values(), header.metadata)
    return replace(local, duplicates=header.duplicates)


def _refused(label: str, rules: Rules, rule: str, *, file: str, found: str, expected: str | None = None) -> Report:
    """The report on a file whose header cannot be used."""
    findings = Findings()
    findings.add(rule, file=file, found=found, expected=expected)
    verdict, summary = summarise(findings, {}, set())
    return Report((label,), rules, verdict, summary, {}, (), findings.faults(), findings.groups())


def _with_notice(report: Report, reads: _Reads) -> Report:
    fetched = sum(source.fetched for source in reads.sources)
    requests = sum(source.requests for source in reads.sources)
    size = sum(source.size for source in reads.sources)
    message = (
        f"Read over the network: header and markers only, {fetched / 1024:.0f} KB of {size / (1 << 20):.1f} MB in "
        f"{requests} requests. "
        "Scales were not read, so damage to their values would not be seen."
    )
    fix = "After the download, check the file again."
    fault = Fault(UNREAD, "notice", message, fix)
    group = Group(UNREAD, "notice", 1, (), message, fix)
    return replace(report, faults=(*report.faults, fault), groups=(*report.groups, group))


# -- addresses -------------------------------------------------------------------------------------------------------


def resolve(address: str) -> tuple[str, str | None]:
    """The http(s) address to read and the token to send there. Raises RequestError.

    The token (``HF_TOKEN``, or what ``hf auth login`` stored) is used for the hub's own host only.
    """
    parts = urlsplit(address)
    if parts.scheme.lower() != "hf":
        if not parts.hostname:
            raise RequestError(f"{public(address)} is no address: it has no host.")
        hub = _hub_endpoint()
        if hub is not None and (parts.scheme, parts.netloc) == urlsplit(hub)[:2]:
            return urlunsplit(parts._replace(path=parts.path.replace("/blob/", "/resolve/", 1))), _token()
        return address, None
    try:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        raise RequestError(
            "hf:// addresses need the package huggingface_hub: pip install 'quant-loader[remote]'."
        ) from None
    names = unquote(parts.netloc + parts.path).strip("/").split("/")
    if len(names) < 3 or not all(names):
        raise RequestError(f"{public(address)} must name a file: hf://owner/repo/path/file.safetensors.")
    repo, _, revision = names[1].partition("@")
    try:
        url = hf_hub_url(f"{names[0]}/{repo}", "/".join(names[2:]), revision=revision or None)
    except (HFValidationError, ValueError) as error:
        raise RequestError(f"{public(address)} is no address of the hub: {clean(str(error), 120)}.") from error
    return url, _token()


def _hub_endpoint() -> str | None:
    """Where hf:// addresses lead; None without huggingface_hub."""
    try:
        from huggingface_hub import constants
    except ImportError:
        return None
    return str(constants.ENDPOINT)


def _token() -> str | None:
    from huggingface_hub import get_token

    return get_token()


def basename(url: str) -> str:
    """The file's name in an address."""
    return unquote(urlsplit(url).path.rpartition("/")[2])


def sibling(url: str, name: str) -> str:
    """The address of another file in the same folder, query kept."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path=parts.path.rpartition("/")[0] + "/" + quote(name)))
