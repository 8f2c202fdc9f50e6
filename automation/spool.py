"""A checkpoint that exists only in part: its header in memory, the few small tensors that a check reads in a
temporary file.

The check opens files by path. Remote checkpoints and planned repairs have none, so markers and row scales are laid
into one small file and the header's entries point there; weights keep sizes only and are never read.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from ..checkpoint.files import Checkpoint
from ..checkpoint.header import Header, Stamp, TensorInfo

MAX_SPOOL = 300 << 20
"""Most bytes of small tensors that a spool takes; far more than any network's row scales."""


class Spool:
    """The small tensors of one file. Use :func:`spooled`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = open(path, "xb")  # noqa: SIM115  closed by finish
        self._places: dict[str, tuple[int, int]] = {}
        self._end = 0

    def add(self, name: str, data: bytes) -> None:
        """Keep the content of tensor ``name``. Beyond ``MAX_SPOOL`` bytes nothing more is kept."""
        if self._end + len(data) > MAX_SPOOL:
            return
        self._file.write(data)
        self._places[name] = (self._end, self._end + len(data))
        self._end += len(data)

    def finish(self, tensors: Iterable[TensorInfo], metadata: Mapping[str, str]) -> Header:
        """The header of the imagined file: kept tensors lie in the spool, the others nowhere."""
        self._file.close()
        info = os.stat(self._path)
        table = {}
        for tensor in tensors:
            start, stop = self._places.get(tensor.name, (tensor.start, tensor.stop))
            table[tensor.name] = tensor._replace(start=start, stop=stop, path=self._path)
        return Header(self._path, Stamp(info.st_size, info.st_mtime_ns, info.st_ino), 0, table, dict(metadata))

    def close(self) -> None:
        self._file.close()


@contextmanager
def spooled(name: str) -> Iterator[Spool]:
    """A spool whose file is called ``name`` (messages show it), gone at the end."""
    with tempfile.TemporaryDirectory(prefix="quant-loader-") as folder:
        safe = os.path.basename(name.replace("\\", "/")).replace("\0", "") or "checkpoint.safetensors"
        if os.name == "nt":  # a file made elsewhere, or an address, may have a name that Windows cannot give
            safe = re.sub(r'[<>:"|?*\x00-\x1f]', "_", safe)
        short = os.fsencode(safe)[-200:].decode("utf-8", "ignore")  # names need not be UTF-8, the spool's is
        spool = Spool(os.path.join(folder, short or "checkpoint.safetensors"))
        try:
            yield spool
        finally:
            spool.close()


def checkpoint_of(label: str, headers: list[Header]) -> Checkpoint:
    """The checkpoint that these headers make, reported under ``label``."""
    checkpoint = Checkpoint((label,), headers)
    for header in headers:
        checkpoint.tensors.update(header.tensors)
    return checkpoint
