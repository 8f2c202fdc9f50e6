"""Which kernels have failed in this process, and which ran: the record behind "reported once, retired, replaced"."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TypeVar

import torch

Result = TypeVar("Result")

logger = logging.getLogger("quant_loader")


def _triton_errors() -> tuple[type[Exception], ...]:
    try:
        from triton.errors import TritonError
    except ImportError:
        return ()
    return (TritonError,)


#: What a kernel raises when it cannot build, load or launch. Running out of memory is none of these: it is the user's
#: to know.
KERNEL_ERRORS: tuple[type[Exception], ...] = (
    RuntimeError,
    ValueError,
    TypeError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    *_triton_errors(),
)

_lock = threading.Lock()
_retired: dict[tuple[str, str], str] = {}
_calls: Counter[tuple[str, str]] = Counter()


def is_retired(operator: str, backend: str) -> bool:
    """Whether this kernel failed before in this process."""
    return (operator, backend) in _retired


def retired() -> dict[tuple[str, str], str]:
    """(operator, backend) -> why, of every kernel retired in this process."""
    with _lock:
        return dict(_retired)


def calls() -> dict[tuple[str, str], int]:
    """(operator, backend) -> how often it ran in this process, compiled graphs included."""
    with _lock:
        return dict(_calls)


def retire(operator: str, backend: str, error: Exception, successor: str) -> None:
    """Take a kernel out of use for the process and say so, once."""
    reason = f"{type(error).__name__}: {str(error).strip() or 'no message'}".splitlines()[0]
    with _lock:
        known = (operator, backend) in _retired
        _retired[(operator, backend)] = reason
    if not known:
        logger.warning(
            "The %s kernel for %s failed on this machine and will not be used again until ComfyUI restarts (%s). "
            "From now on it is replaced by %s; pictures stay correct, speed may change.",
            backend,
            operator,
            reason,
            successor,
        )


def is_out_of_memory(error: Exception) -> bool:
    """Out of memory, under whichever name: it says nothing about the kernel."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()


def run(operator: str, backends: str, bodies: Mapping[str, Callable[..., Result]], *args: object) -> Result:
    """Call the first of ``backends`` (comma separated, best first) that is not retired; one that raises is retired.

    A single backend is what a caller insists on, and the last one has no successor: their errors are raised.
    """
    names = backends.split(",")
    for name, successor in pairwise(names):
        if is_retired(operator, name):
            continue
        try:
            result = bodies[name](*args)
        except KERNEL_ERRORS as error:
            if is_out_of_memory(error):
                raise
            retire(operator, name, error, f"the {successor} one")
            continue
        _count(operator, name)
        return result
    result = bodies[names[-1]](*args)
    _count(operator, names[-1])
    return result


def _count(operator: str, backend: str) -> None:
    with _lock:
        _calls[(operator, backend)] += 1
