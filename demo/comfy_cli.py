"""Runs workflows through `comfy run`, with a configuration of its own: the user's comfy-cli stays as it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .client import Workflow


class ComfyRunError(RuntimeError):
    """`comfy run` failed; `error` is the error object of its JSON answer."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(" - ".join(str(error[key]) for key in ("message", "hint") if error.get(key)) or str(error))
        self.error = error

    @property
    def node_errors(self) -> dict[str, Any]:
        """What the server answered about each node when it refused the prompt, by node id; empty for other failures.

        comfy-cli hands the server's object on as a list whose entries hold their `node_id`.
        """
        details = self.error.get("details")
        errors = details.get("node_errors") if isinstance(details, dict) else None
        if isinstance(errors, list):
            return {str(entry.get("node_id", position)): entry for position, entry in enumerate(errors)}
        return errors if isinstance(errors, dict) else {}


@dataclass(frozen=True)
class ComfyCli:
    """comfy-cli of this environment, with its home folder at `home`."""

    home: Path

    def call(self, *arguments: str, timeout: float = 300.0) -> subprocess.CompletedProcess[str]:
        """Runs `comfy` with these arguments, output captured, no terminal, no telemetry, no look for updates."""
        self.home.mkdir(parents=True, exist_ok=True)
        home = str(self.home)
        private = {
            "HOME": home,
            "USERPROFILE": home,
            "XDG_CACHE_HOME": str(self.home / "cache"),
            "DO_NOT_TRACK": "1",
            "COMFY_NO_UPDATE_CHECK": "1",
            "PYTHONIOENCODING": "utf-8",
        }
        name = "comfy.exe" if os.name == "nt" else "comfy"
        return subprocess.run(
            [str(Path(sys.executable).with_name(name)), "--skip-prompt", *arguments],
            env={**os.environ, **private},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            timeout=timeout,
            check=False,
        )

    def disable_tracking(self) -> None:
        """Turns telemetry off in this private configuration, before anything is run with it."""
        done = self.call("tracking", "disable")
        if done.returncode != 0:
            raise ComfyRunError({"message": f"comfy tracking disable failed: {(done.stderr or done.stdout).strip()}"})

    def run(self, workflow: Workflow, file: Path, port: int, timeout: int = 240) -> dict[str, Any]:
        """Writes the workflow to `file`, runs it to its end and returns the `data` of comfy-cli's answer.

        Raises ComfyRunError when the server refuses the prompt or a node fails.
        """
        file.write_text(json.dumps(workflow, indent=2), encoding="utf-8")
        arguments = ["--json", "run", "--workflow", str(file), "--host", "127.0.0.1", "--port", str(port), "--wait"]
        done = self.call(*arguments, "--timeout", str(timeout), timeout=timeout + 60)
        try:
            answer = json.loads(done.stdout)
        except json.JSONDecodeError as error:
            said = (done.stderr or done.stdout).strip()
            raise ComfyRunError({"message": f"comfy run gave no answer (exit {done.returncode}): {said}"}) from error
        if not answer.get("ok"):
            raise ComfyRunError(answer.get("error") or {"message": f"comfy run failed (exit {done.returncode})"})
        return dict(answer["data"])
