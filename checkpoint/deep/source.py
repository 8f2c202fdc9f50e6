"""Bounded reads of the payload: positioned, until a deadline, from files unchanged since their header was read."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt

from ..files import Checkpoint
from ..header import RawFile, TensorInfo, open_again

Bytes = npt.NDArray[np.uint8]
Matrix = npt.NDArray[np.float32]
Rows = npt.NDArray[np.intp]

MAX_OPEN = 16
CHUNK = 4 << 20
RUN = 16
"""Sampled rows come in aligned runs of this many: few reads, and never across two 128-row tiles of block scales."""
VALUES = 1 << 17
"""Values looked at per layer."""
MAX_COLUMNS = 1 << 15


class Source:
    """The files of one checkpoint, opened as needed."""

    def __init__(self, checkpoint: Checkpoint, seconds: float) -> None:
        self.tensors = checkpoint.tensors
        self._stamps = {header.path: header.stamp for header in checkpoint.headers}
        self._open: dict[str, tuple[ExitStack, RawFile]] = {}
        self._deadline = time.monotonic() + seconds

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: Any) -> None:
        for stack, _raw in self._open.values():
            stack.close()
        self._open.clear()

    @property
    def expired(self) -> bool:
        return time.monotonic() >= self._deadline

    def _file(self, path: str) -> RawFile:
        if path not in self._open:
            if len(self._open) >= MAX_OPEN:
                oldest = next(iter(self._open))
                self._open.pop(oldest)[0].close()
            stack = ExitStack()
            self._open[path] = (stack, stack.enter_context(open_again(path, self._stamps[path])))
        return self._open[path][1]

    def at(self, path: str, offset: int, size: int) -> Bytes:
        """``size`` bytes at an absolute offset of a file."""
        return np.frombuffer(self._file(path).read_at(offset, size), dtype=np.uint8)

    def read(self, tensor: TensorInfo, offset: int, size: int) -> Bytes:
        """``size`` bytes of a tensor's data, from ``offset`` on."""
        return self.at(tensor.path, tensor.start + offset, size)

    def chunks(self, tensor: TensorInfo) -> Iterator[tuple[int, Bytes]]:
        """A tensor's data piece by piece, each with its offset, until the deadline."""
        for start in range(0, tensor.nbytes, CHUNK):
            if self.expired:
                break
            yield start, self.read(tensor, start, min(CHUNK, tensor.nbytes - start))

    def rows(self, tensor: TensorInfo, runs: Sequence[range], row_bytes: int, width: int) -> Bytes:
        """The first ``width`` bytes of each row of ``runs``: (rows, width)."""
        parts = []
        for run in runs:
            if width == row_bytes:
                parts.append(self.read(tensor, run.start * row_bytes, len(run) * row_bytes).reshape(len(run), width))
            else:
                parts.extend(self.read(tensor, row * row_bytes, width)[np.newaxis] for row in run)
        return np.concatenate(parts)


def row_runs(N: int, columns: int) -> list[range]:
    """Rows to look at: aligned runs of 16, evenly spread over the layer, about 2**17 values in all."""
    want = max(2, min(VALUES // max(columns, 1) // RUN, 32))
    total = -(-N // RUN)
    picks = np.unique(np.linspace(0, total - 1, min(want, total)).astype(np.intp))
    return [range(int(p) * RUN, min(int(p) * RUN + RUN, N)) for p in picks]
