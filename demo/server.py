"""A real ComfyUI server as a context manager: own folders, this pack in `custom_nodes`, always stopped.

    with ComfyServer(base) as server:
        server.client.run(workflow)

The ComfyUI source tree is only read: every folder that the server writes to lies under `base`.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from .client import ComfyClient
from .paths import CACHE, CHECKOUT, comfyui_tree

PACK_FOLDER = "quant-loader"
LOG_TAIL_LINES = 25
FAILED_IMPORT = re.compile(r"IMPORT FAILED|Cannot import|Error while calling comfy_entrypoint")
PACK_COPY_IGNORES = (".git", ".venv", ".cache", "demo-output", "__pycache__", "*.egg-info", "node_modules")


class ServerError(RuntimeError):
    """The server could not be started, or ended before it was asked to; the message says why."""


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def port_in_use(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


class ComfyServer:
    """One ComfyUI server process with its folders under `base`.

    Args:
        base: folder for models, input, output, temp, user and custom_nodes; made when missing, kept afterwards.
        port: the port to listen on, or None for any free one.
        cpu: run on the CPU in float32, as every machine can; False lets ComfyUI choose the device.
        with_pack: put this checkout into `custom_nodes`.
        extra_arguments: further arguments for ComfyUI's main.py.

    Raises ServerError from `start` when the port is taken, the tree is missing or the server does not come up.
    """

    def __init__(
        self,
        base: Path,
        port: int | None = None,
        cpu: bool = True,
        with_pack: bool = True,
        extra_arguments: tuple[str, ...] = (),
        start_timeout: float = 240.0,
    ) -> None:
        self.base = base.resolve()
        self.port = port if port is not None else free_port()
        self.cpu = cpu
        self.with_pack = with_pack
        self.extra_arguments = extra_arguments
        self.start_timeout = start_timeout
        self.client = ComfyClient("127.0.0.1", self.port)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log_path(self) -> Path:
        return self.base / "server.log"

    def models(self, kind: str) -> Path:
        """The folder for models of this kind (`diffusion_models`, `vae`, ...), made when missing."""
        folder = self.base / "models" / kind
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def output(self) -> Path:
        return self.base / "output"

    def log(self) -> str:
        """Everything the server has printed since it started."""
        return self.log_path.read_text(encoding="utf-8", errors="replace") if self.log_path.exists() else ""

    def check_port(self) -> None:
        """Raises ServerError when something else listens on the server's port."""
        if port_in_use(self.port):
            raise ServerError(
                f"Port {self.port} is already in use by another program; choose another one with PORT=<number>."
            )

    def start(self) -> None:
        """Starts the server and returns when it answers."""
        self.check_port()
        tree = comfyui_tree()
        if not (tree / "main.py").is_file():
            raise ServerError(
                f"No ComfyUI at {tree}: run demo/setup_env.py, or set COMFYUI_PATH to a ComfyUI checkout."
            )
        for name in ("input", "output", "temp", "user", "custom_nodes", "models"):
            (self.base / name).mkdir(parents=True, exist_ok=True)
        if self.with_pack:
            self._place_pack()
        self._process = self._launch(tree)
        try:
            self._wait_until_up()
            self._check_pack()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stops the server; does nothing when it is not running."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()  # the lifeline of supervise.py
        try:
            process.wait(20.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def ensure_alive(self) -> None:
        """Raises ServerError with the end of the log when the server has died."""
        if self._process is not None and self._process.poll() is not None:
            raise ServerError(f"The ComfyUI server ended by itself. The last lines it printed:\n{self._log_tail()}")

    @contextmanager
    def stopped_on_exit(self) -> Iterator[None]:
        """Whatever happens inside, the server is stopped afterwards; it is the caller who starts it."""
        try:
            yield
        finally:
            self.stop()

    def __enter__(self) -> ComfyServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _place_pack(self) -> None:
        link = self.base / "custom_nodes" / PACK_FOLDER
        if link.is_symlink():
            link.unlink()
        elif link.exists():
            shutil.rmtree(link)
        try:
            link.symlink_to(CHECKOUT, target_is_directory=True)
        except OSError:  # Windows without the privilege to make links
            shutil.copytree(CHECKOUT, link, ignore=shutil.ignore_patterns(*PACK_COPY_IGNORES))

    def _launch(self, tree: Path) -> subprocess.Popen[bytes]:
        supervisor = [sys.executable, "-I", str(Path(__file__).with_name("supervise.py"))]
        server = [sys.executable, str(tree / "main.py"), "--port", str(self.port), "--base-directory", str(self.base)]
        options = ["--disable-auto-launch", "--disable-api-nodes", "--database-url", "sqlite:///:memory:"]
        device = ["--cpu"] if self.cpu else []
        environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "PYTHONIOENCODING": "utf-8",
        }
        if CACHE not in tree.parents:
            environment["PYTHONDONTWRITEBYTECODE"] = "1"  # leave no trace in somebody's own ComfyUI checkout
        with self.log_path.open("wb") as log:
            return subprocess.Popen(
                [*supervisor, *server, *options, *device, *self.extra_arguments],
                cwd=self.base,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches us; we stop the server
            )

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + self.start_timeout
        while not self.client.is_up():
            self.ensure_alive()
            if time.monotonic() > deadline:
                raise ServerError(
                    f"The ComfyUI server did not answer within {self.start_timeout:.0f} s. "
                    f"The last lines it printed:\n{self._log_tail()}"
                )
            time.sleep(0.25)
        self.ensure_alive()  # a foreign server that took the port in between would have answered

    def _check_pack(self) -> None:
        """ComfyUI starts without a pack that fails to import, and only its log says so."""
        complaints = [line for line in self.log().splitlines() if PACK_FOLDER in line and FAILED_IMPORT.search(line)]
        if self.with_pack and complaints:
            raise ServerError("ComfyUI could not import Quant Loader:\n" + "\n".join(complaints))

    def _log_tail(self) -> str:
        return "\n".join(self.log().splitlines()[-LOG_TAIL_LINES:])
