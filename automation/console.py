"""Output for terminals, pipes and logs: any encoding, no control characters from files, progress only where a person
looks.
"""

from __future__ import annotations

import os
import sys
from typing import TextIO


def printable(text: str, stream: TextIO) -> str:
    """``text`` as ``stream`` can show it; line breaks stay, other control characters become ``?``."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    shown = "".join(char if char.isprintable() or char == "\n" else "?" for char in text)
    return shown.encode(encoding, "replace").decode(encoding)


def say(text: str) -> None:
    """A line of the answer."""
    sys.stdout.write(printable(text, sys.stdout) + "\n")


def complain(command: str, text: str) -> None:
    """Why there is no answer."""
    sys.stderr.write(printable(f"quant-loader {command}: {text}", sys.stderr) + "\n")


def is_closed() -> bool:
    """Whether the process was started without a standard output."""
    return sys.stdout is None


def abandon() -> None:
    """What is still buffered for a standard output that failed goes nowhere: Python would try again at exit."""
    if sys.stdout is not sys.__stdout__ or sys.__stdout__ is None:
        return  # not the process's own: nothing is flushed at exit
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.__stdout__.fileno())
    os.close(nowhere)


class Progress:
    """One line that rewrites itself, on standard error and only if that is a terminal."""

    def __init__(self) -> None:
        self._on = sys.stderr.isatty()
        self._last = ""

    def show(self, text: str) -> None:
        if self._on and text != self._last:
            sys.stderr.write(f"\r\x1b[K{printable(text, sys.stderr)[:110]}")
            sys.stderr.flush()
            self._last = text

    def clear(self) -> None:
        if self._on and self._last:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._last = ""
