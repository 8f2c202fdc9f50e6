"""Child processes that find PyTorch and ComfyUI imported.

A benchmark wants dozens of fresh processes, and each takes some 17 s of processor time to import ComfyUI. `host`
imports once, in a process that computes nothing and so has one thread, and forks it for every call: a child starts with
the modules of a server that is up, this pack's among them, and with nothing loaded. What it changes is its own.

Where there is no fork, or an accelerator, whose driver does not survive one, each call imports for itself
(`common.in_child`).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import io
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from typing import IO, Any, Protocol

import torch
from quant_loader.benchmarks import common, in_process
from quant_loader.benchmarks.common import ChildFailed

MODULE = "quant_loader.benchmarks.children"
TIMEOUT = 600.0

#: A pool of threads does not survive a fork: libraries that start one when they are imported are kept from it. Each
#: child then asks PyTorch for as many threads as the benchmark has.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def can_fork() -> bool:
    """Whether a process with ComfyUI in it can be forked: on Linux, without an accelerator."""
    return sys.platform == "linux" and not torch.cuda.is_available()


class InChild(Protocol):
    """What :func:`host` and `common.in_child` have in common."""

    def __call__(self, module: str, *arguments: str, timeout: float = ...) -> dict[str, Any]: ...


@contextlib.contextmanager
def host() -> Iterator[InChild]:
    """`with host() as in_child: in_child(MODULE, *ARGUMENTS)`, any number of times, one at a time.

    The function is used as `common.in_child` and fails as that does.
    """
    if not can_fork():
        yield common.in_child
        return
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            [sys.executable, "-I", "-m", MODULE, str(torch.get_num_threads())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=printed,
            env={**os.environ, **ONE_THREAD},
            start_new_session=True,  # so that its end takes a running child along
        )
        try:
            yield functools.partial(_ask, process, printed)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def _ask(
    process: subprocess.Popen[bytes], printed: IO[bytes], module: str, *arguments: str, timeout: float = TIMEOUT
) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    order = {"module": module, "arguments": arguments, "seconds": math.ceil(timeout)}
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(order).encode() + b"\n")
        process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        printed.seek(0)
        tail = printed.read().decode(errors="replace").strip().splitlines()[-12:]
        raise ChildFailed("the process that imports ComfyUI ended:\n" + "\n".join(tail))
    answer: dict[str, Any] = json.loads(line)
    if "failed" in answer:
        raise ChildFailed(f"{module} {' '.join(arguments)} {answer['failed']}")
    found: dict[str, Any] = answer["found"]
    return found


# --- the host's side --------------------------------------------------------------------------------------------------


def run_order(order: dict[str, Any]) -> dict[str, Any]:
    """In the child: the module's `main` with the arguments; {"found": its answer} or {"failed": how it ended}."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            code = importlib.import_module(order["module"]).main(order["arguments"])
    except (Exception, SystemExit):  # noqa: BLE001 - whatever ended it is the parent's to raise
        return {"failed": "ended with an error:\n" + "\n".join(traceback.format_exc().strip().splitlines()[-12:])}
    lines = printed.getvalue().strip().splitlines()
    return {"found": json.loads(lines[-1])} if code == 0 and lines else {"failed": f"ended with {code}"}


def fork_for(order: dict[str, Any], threads: int) -> dict[str, Any]:
    """Forks a child for one call; its answer, or {"failed": ...}."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(order["seconds"])  # nothing handles it: the child ends
        torch.set_num_threads(threads)
        with os.fdopen(writer, "wb") as out:
            out.write(json.dumps(run_order(order)).encode())
        os._exit(0)  # the host's own clean-up is not the child's
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        signalled = os.WTERMSIG(status)
        late = signalled == signal.SIGALRM
        return {"failed": f"took longer than {order['seconds']} s" if late else f"ended by signal {signalled}"}
    found: dict[str, Any] = json.loads(text) if text else {"failed": "ended without an answer"}
    return found


def serve(orders: IO[bytes], answers: IO[bytes], threads: int) -> None:
    """A line of JSON for each line of JSON, until there are no more."""
    in_process.prepare("auto")
    in_process.preload()
    gc.collect()
    gc.freeze()  # a collection in a child leaves alone, and so shared, what the host holds
    for line in orders:
        answers.write(json.dumps(fork_for(json.loads(line), threads)).encode() + b"\n")
        answers.flush()


def main(argv: Sequence[str] | None = None) -> int:
    (threads,) = sys.argv[1:] if argv is None else argv
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # what ComfyUI prints is no answer
        serve(sys.stdin.buffer, answers, int(threads))
    return 0


if __name__ == "__main__":
    sys.exit(main())
