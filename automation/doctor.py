"""``quant-loader doctor``: what a bug report needs to know about this machine, without paths or names of the person's.

Versions, devices, and for every format which kernel would run a typical layer and why no better one does.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from ..checkpoint.report import LayerSpec
from ..checkpoint.words import clean
from .errors import RequestError
from .model_folders import installation
from .outlook import PlannedGroup, here, load_kernels, outlook

PACKAGES = (
    "quant-loader",
    "torch",
    "comfy-kitchen",
    "triton",
    "triton-windows",
    "safetensors",
    "numpy",
    "comfyui-frontend-package",
    "huggingface_hub",
)
VARIABLES = ("QUANT_LOADER_KERNELS", "QUANT_LOADER_GUARDS")
"""Our own switches; other variables are the person's."""

_TYPICAL: dict[str, dict[str, Any]] = {
    "int8_tensorwise": {"is_rowwise": True, "convrot": True, "convrot_groupsize": 256},
    "convrot_w4a4": {"convrot_groupsize": 256, "linear_dtype": "int4"},
    "asym_w4a8_int8": {"group_size": 16, "convrot_groupsize": 256, "has_codebook": False, "has_correction": False},
    "nvfp4": {"has_pre_quant_scale": False, "has_input_scale": False},
    "float8_e4m3fn": {"activation_scheme": "dynamic"},
    "float8_e5m2": {"activation_scheme": "dynamic"},
    "mxfp8": {},
    "quanto_int8": {},
}
"""A typical layer of each format."""
_SHAPE = (3072, 3072)

_PATH = re.compile(r"(?<![\w./\\])(?:[A-Za-z]:[\\/]|~?[\\/])[^\s'\"<>|:;,)]+")


@dataclass(frozen=True)
class Device:
    """One device and what it would run. ``facts`` are words: name, capability, memory, backends."""

    name: str
    facts: tuple[str, ...]
    kernels: tuple[PlannedGroup, ...]


@dataclass(frozen=True)
class Diagnosis:
    """``versions`` and ``settings`` by name; ``problems`` are sentences about what could not be found out."""

    versions: dict[str, str]
    settings: dict[str, str]
    devices: tuple[Device, ...]
    problems: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "versions": self.versions,
            "settings": self.settings,
            "devices": [
                {
                    "name": d.name,
                    "facts": list(d.facts),
                    "kernels": [
                        {k: v for k, v in g.to_dict().items() if k not in ("layers", "count")} for g in d.kernels
                    ],
                }
                for d in self.devices
            ],
            "problems": list(self.problems),
        }

    def text(self) -> str:
        """The form to paste into a bug report."""
        lines = ["Quant Loader doctor", "", *(f"{name:<26} {version}" for name, version in self.versions.items())]
        lines += [f"{name:<26} {value}" for name, value in self.settings.items()]
        for device in self.devices:
            lines += ["", f"{device.name}: {'; '.join(device.facts)}"]
            for group in device.kernels:
                lines += [f"  {line}" for line in group.lines()]
        lines += ["", *self.problems] if self.problems else []
        return "\n".join(lines)


def diagnose() -> Diagnosis:
    """Look at this machine. Never raises for what is missing: that is the answer."""
    versions = {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    versions.update((name, version) for name in PACKAGES if (version := _version(name)) is not None)
    comfyui = _comfyui_version()
    if comfyui is not None:
        versions["ComfyUI"] = comfyui
    settings = {name: anonymous(os.environ[name]) for name in VARIABLES if name in os.environ}
    problems: list[str] = []
    found: list[Device] = []
    try:
        kernels = load_kernels()
        found = [_device(name, facts, tuple(kernels.FORMATS)) for name, facts in here()]
    except RequestError as error:
        problems.append(anonymous(str(error)))
    except RuntimeError as error:  # a driver that PyTorch cannot talk to
        problems.append(anonymous(f"The devices could not be asked: {error}"))
    return Diagnosis(versions, settings, tuple(found), tuple(problems))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _comfyui_version() -> str | None:
    """The version of the ComfyUI around this process or this pack."""
    loaded = sys.modules.get("comfyui_version")
    if loaded is not None:
        return str(getattr(loaded, "__version__", "unknown"))
    root = installation()
    if root is None:
        return None
    try:
        text = (root / "comfyui_version.py").read_text(encoding="utf-8")[:10_000]
    except (OSError, UnicodeDecodeError):
        return "found, version unknown"
    match = re.search(r"__version__\s*=\s*\"([\w.+-]{1,40})\"", text)
    return match[1] if match else "found, version unknown"


def _device(name: str, facts: Any, formats: tuple[str, ...]) -> Device:
    words = [clean(facts.name)]
    if facts.capability is not None:
        words.append(f"compute capability {facts.capability[0]}.{facts.capability[1]}")
    if facts.arch is not None:
        words.append(facts.arch)
    if facts.memory:
        words.append(f"{facts.memory / (1 << 30):.0f} GB")
    if facts.device == "cuda":
        toolkit = facts.hip if facts.arch is not None else facts.torch_cuda
        version = ".".join(map(str, toolkit or ("unknown",)))
        words.append(f"PyTorch built for {'ROCm' if facts.arch is not None else 'CUDA'} {version}")
    if facts.device == "cpu":
        words.append("VNNI" if facts.vnni else "no VNNI")
    words.append(
        f"own Triton kernels {facts.own_kernels}" + ("" if facts.triton is not None else ", Triton not installed")
    )
    backends = ", ".join(sorted(facts.kitchen_backends)) or "none"
    words.append(f"comfy-kitchen backends: {backends}" if facts.kitchen is not None else "comfy-kitchen not installed")
    if facts.kitchen_problem:
        words.append(anonymous(facts.kitchen_problem))
    specs = [LayerSpec(f"typical {fmt}", fmt, _SHAPE, annotations=_TYPICAL.get(fmt, {})) for fmt in formats]
    return Device(name, tuple(words), tuple(outlook(specs, facts)))


def anonymous(text: str) -> str:
    """``text`` without paths, one line."""
    return clean(_PATH.sub("<path>", " ".join(text.split())), 300)
