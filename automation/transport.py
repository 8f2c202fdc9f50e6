"""Reading parts of one file over HTTP: ranges only, checked, retried, within a time limit. Standard library.

A server that ignores ``Range`` would send the whole file; its answer is dropped before the body is read. (General
file-system layers read such a body to the end, which for a checkpoint means 20 GB in memory; hence this small
client.)
"""

from __future__ import annotations

import http.client
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from email.message import Message
from typing import IO
from urllib.parse import urlsplit

from .addresses import public
from .errors import RequestError

Range = tuple[int, int]
"""First byte and the byte after the last."""

MAX_TOTAL = 64 << 20
"""Most bytes that one check fetches."""
MAX_REQUESTS = 4000
JOIN_GAP = 64 << 10
"""Ranges closer than this are fetched together: a request costs more than 64 KB."""
MAX_JOINED = 8 << 20
TRIES = 4
PAUSE = 0.2
"""Seconds before the second try; doubled for each further one."""
WORKERS = 8
_PIECE = 64 << 10
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})\Z")
_LATER = frozenset({408, 425, 429, 500, 502, 503, 504})


class _Again(Exception):
    """This attempt failed in a way that another may not."""


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects between http and https; the token stays with the host it was meant for; never from https to
    http.
    """

    max_redirections = 8

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> urllib.request.Request | None:
        old, new = urlsplit(req.full_url), urlsplit(newurl)
        if new.scheme not in ("http", "https") or (old.scheme == "https" and new.scheme == "http"):
            raise RequestError(f"{public(req.full_url)} redirects to {public(newurl)}, which is not followed.")
        following = super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]
        if following is not None and (old.hostname, old.port) != (new.hostname, new.port):
            following.remove_header("Authorization")
        return following


@dataclass
class RemoteBytes:
    """One file at ``address``. ``token`` goes to the address's own host only. Thread-safe.

    ``timeout`` bounds every wait for the network, ``deadline`` the whole, both in seconds.
    """

    address: str
    token: str | None = None
    timeout: float = 20.0
    deadline: float = 300.0
    size: int = field(default=-1, init=False)
    fetched: int = field(default=0, init=False)
    requests: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._opener = urllib.request.build_opener(_SafeRedirects)
        self._end = time.monotonic() + self.deadline
        self._lock = threading.Lock()
        self._final: str | None = None
        self._tag: str | None = None

    @property
    def name(self) -> str:
        """The address as messages show it: no user, password or query."""
        return public(self.address)

    def start(self, count: int) -> bytes:
        """The first ``count`` bytes (or all of a shorter file); learns the file's size."""
        return self._retried((0, count))

    def fetch(self, ranges: Iterable[Range]) -> dict[Range, bytes]:
        """Every range's bytes. Close ones travel together, several requests at a time. Raises RequestError."""
        wanted = [r for r in dict.fromkeys(ranges) if r[1] > r[0]]
        joined = join(wanted)
        if len(joined) > MAX_REQUESTS or sum(stop - start for start, stop in joined) + self.fetched > MAX_TOTAL:
            raise RequestError(
                f"{self.name} spreads its declarations over too much of the file to be read remotely; "
                "download it and check it here."
            )
        with ThreadPoolExecutor(WORKERS) as pool:
            blocks = dict(zip(joined, pool.map(self._retried, joined), strict=True))
        found: dict[Range, bytes] = {}
        for start, stop in wanted:
            first = next(block for block in blocks if block[0] <= start and stop <= block[1])
            found[start, stop] = blocks[first][start - first[0] : stop - first[0]]
        return found

    def _retried(self, wanted: Range) -> bytes:
        reason = ""
        for attempt in range(TRIES):
            if attempt:
                time.sleep(min(PAUSE * 2 ** (attempt - 1), max(self._end - time.monotonic(), 0.0)))
            if time.monotonic() >= self._end:
                raise RequestError(
                    f"{self.name} did not answer within {self.deadline:.0f} s{f' ({reason})' if reason else ''}."
                )
            try:
                return self._once(wanted)
            except _Again as error:
                reason = str(error)
                self._final = None  # a signed address may have run out: start from the given one
        raise RequestError(f"{self.name} could not be read: {reason}, {TRIES} times in a row.")

    def _once(self, wanted: Range) -> bytes:
        start, stop = wanted
        final = self._final
        request = urllib.request.Request(final or self.address)
        request.add_header("Range", f"bytes={start}-{stop - 1}")
        request.add_header("Accept-Encoding", "identity")
        request.add_header("User-Agent", "quant-loader")
        if self.token is not None and final is None:
            request.add_header("Authorization", f"Bearer {self.token}")
        with self._lock:
            self.requests += 1
        try:
            with self._opener.open(request, timeout=self.timeout) as response:
                self._accept(response, wanted)
                data = self._body(response, min(stop, self.size) - start)
                self._final = response.geturl() if response.geturl() != self.address else None
        except urllib.error.HTTPError as error:
            with error:
                raise self._refusal(error) from None
        except urllib.error.URLError as error:
            raise _Again(_words(error.reason)) from error
        except (OSError, http.client.HTTPException) as error:
            raise _Again(_words(error)) from error
        except RequestError:
            raise
        except ValueError as error:  # a host name or a redirect that urllib cannot take apart
            raise RequestError(f"{self.name} is no address that can be opened, or it redirects to none.") from error
        with self._lock:
            self.fetched += len(data)
        return data

    def _accept(self, response: http.client.HTTPResponse, wanted: Range) -> None:
        """Judge the answer by its head alone; nothing of the body is read yet."""
        if response.status != 206:
            raise RequestError(
                f"{self.name}: the server does not send parts of a file (no range requests), so a check would "
                f"download all of it; "
                "download the file and check it here."
            )
        headers = response.headers
        if headers.get("Content-Encoding", "identity").lower() != "identity":
            raise RequestError(f"{self.name}: the server compresses its answers, so parts of the file cannot be read.")
        match = _CONTENT_RANGE.match(headers.get("Content-Range", ""))
        if match is None:
            raise _Again("the server did not say which part it sent")
        first, last, size = (int(part) for part in match.groups())
        if first != wanted[0] or last != min(wanted[1], size) - 1:
            raise _Again("the server sent another part than was asked for")
        tag = headers.get("ETag")
        with self._lock:
            if self.size < 0:
                self.size, self._tag = size, tag
            if size != self.size or (tag is not None and self._tag is not None and tag != self._tag):
                raise RequestError(f"{self.name} changed while it was being read; try again.")

    def _body(self, response: http.client.HTTPResponse, count: int) -> bytes:
        parts: list[bytes] = []
        left = count
        while left:
            if time.monotonic() >= self._end:
                raise RequestError(f"{self.name} is too slow: the check was given up after {self.deadline:.0f} s.")
            part = response.read1(min(left, _PIECE))
            if not part:
                raise _Again("the connection was cut")
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def _refusal(self, error: urllib.error.HTTPError) -> Exception:
        if error.code in _LATER or (error.code == 403 and self._final is not None):
            return _Again(f"the server answered {error.code}")
        if error.code == 404:
            return RequestError(f"There is no file at {self.name} (404).")
        if error.code in (401, 403):
            return RequestError(
                f"{self.name} needs a permission that this request lacks ({error.code}); for a gated model accept "
                f"its terms and set HF_TOKEN."
            )
        if error.code == 416:
            return RequestError(f"{self.name} is empty.")
        return RequestError(f"{self.name}: the server answered {error.code}.")


def join(ranges: Iterable[Range]) -> list[Range]:
    """Sorted ranges with close neighbours merged, each at most ``MAX_JOINED`` bytes unless it came larger."""
    joined: list[Range] = []
    for start, stop in sorted(ranges):
        if joined and start - joined[-1][1] <= JOIN_GAP and stop - joined[-1][0] <= MAX_JOINED:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        elif joined and stop <= joined[-1][1]:
            continue
        else:
            joined.append((start, stop))
    return joined


def _words(reason: object) -> str:
    if isinstance(reason, TimeoutError):
        return "no answer in time"
    if isinstance(reason, http.client.IncompleteRead):
        return "the connection was cut"
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror.lower()
    return type(reason).__name__ if isinstance(reason, Exception) else str(reason)
