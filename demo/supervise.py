"""Runs a command until it ends or until the process that asked for it is gone: `supervise.py COMMAND...`.

Standard input is a lifeline: whoever started the command holds its other end, and the system closes that end even
when the holder is killed. So a ComfyUI server never outlives the demo or the test run that started it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading

GRACE_SECONDS = 10.0


def stop(process: subprocess.Popen[bytes]) -> None:
    """Asks the process to end, and ends it when it has not within the grace period."""
    process.terminate()
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def main(command: list[str]) -> int:
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def watch_lifeline() -> None:
        while os.read(0, 4096):  # empty once the other end is closed
            pass
        stop(process)

    threading.Thread(target=watch_lifeline, daemon=True).start()
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            stop(process)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
