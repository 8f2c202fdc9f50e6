"""The two ways a command ends without an answer."""

from __future__ import annotations


class RequestError(ValueError):
    """The request itself is wrong: no such file, not JSON, a contradiction between options. Exit code 2; the text is
    one sentence.
    """


class Refused(RuntimeError):
    """The request was understood and declined, nothing was written. Exit code 1; ``reasons`` are full sentences."""

    def __init__(self, message: str, reasons: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.reasons = reasons
