"""What a device and the software around it can do, as plain data: the dispatcher's only input besides the layer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import metadata
from typing import Literal

import torch

#: ``0``: none of this pack's own GPU kernels. ``1`` (default): where comfy-kitchen has none. ``first``: before
#: comfy-kitchen's.
ENVIRONMENT_VARIABLE = "QUANT_LOADER_KERNELS"

OwnKernels = Literal["off", "on", "first"]
Maker = Literal["nvidia", "amd", "cpu", "mps", "other"]
Version = tuple[int, ...]

#: comfy-kitchen's operators that a linear can run on.
_KITCHEN_LINEAR = ("int8_linear", "convrot_w4a4_linear", "w4a8_int8_linear", "scaled_mm_nvfp4")
_KITCHEN_HELPERS = (
    "quantize_nvfp4",
    "quantize_mxfp8",
    "dequantize_nvfp4",
    "dequantize_per_tensor_fp8",
    "quantize_int8_convrot_weight",
)


@dataclass(frozen=True)
class DeviceFacts:
    """Facts about one device; versions are tuples, None where the software is not there.

    ``device`` is torch's device type ("cuda" for AMD cards too). ``kitchen_operators`` holds ``"backend.operator"`` for
    every comfy-kitchen backend that is loaded and not disabled and has a real kernel (its "eager" backend is left out:
    it is plain torch). ``memory`` is the device's in bytes, 0 where unknown. ``vnni``: a CPU with exact byte products;
    ``bf16``: a device with units for bfloat16 products.
    """

    device: str = "cpu"
    name: str = "CPU"
    capability: tuple[int, int] | None = None
    arch: str | None = None
    memory: int = 0
    torch: Version = (2, 7)
    torch_cuda: Version | None = None
    hip: Version | None = None
    kitchen: str | None = None
    kitchen_backends: frozenset[str] = frozenset()
    kitchen_operators: frozenset[str] = frozenset()
    kitchen_problem: str = ""
    triton: Version | None = None
    vnni: bool = False
    bf16: bool = True
    own_kernels: OwnKernels = "on"

    @property
    def maker(self) -> Maker:
        """Whose device this is, as far as kernels are concerned."""
        if self.device == "cuda":
            return "amd" if self.arch is not None or self.hip is not None else "nvidia"
        if self.device == "cpu":
            return "cpu"
        return "mps" if self.device == "mps" else "other"

    @property
    def sm(self) -> tuple[int, int]:
        """The CUDA compute capability, (0, 0) on anything else."""
        return self.capability if self.maker == "nvidia" and self.capability is not None else (0, 0)

    @property
    def amd_matrix_units(self) -> bool:
        """RDNA3 and later, or CDNA: cards with int8 matrix instructions. RDNA1 and 2 have none and must never get an
        int8 dot.
        """
        arch = self.arch or ""
        return arch.startswith(("gfx11", "gfx12")) or arch in _CDNA

    @property
    def int4_units(self) -> bool:
        """Cards whose tensor cores multiply 4-bit integers: Turing RTX, Ampere and Ada."""
        return (self.sm == (7, 5) and not self.without_tensor_cores) or self.sm[0] == 8

    @property
    def without_tensor_cores(self) -> bool:
        """The GTX 16 series: Turing's capability number, none of its tensor cores."""
        return "GTX 16" in self.name or self.name.endswith(("MX450", "MX550"))


#: The first compute capability with bfloat16 units.
_BF16_SM = (8, 0)
_CDNA = frozenset({"gfx908", "gfx90a", "gfx940", "gfx941", "gfx942", "gfx950"})


def parse_version(text: str | None) -> Version | None:
    """The leading numbers of a version: ``"13.0"`` -> (13, 0), ``"2.14.1+cu130"`` -> (2, 14, 1); None for None or no
    number.
    """
    numbers: list[int] = []
    for part in (text or "").replace("+", ".").split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers) or None


def own_kernels(environment: Mapping[str, str] | None = None) -> OwnKernels:
    """How the user wants this pack's own GPU kernels, from ``QUANT_LOADER_KERNELS``."""
    value = (os.environ if environment is None else environment).get(ENVIRONMENT_VARIABLE, "1").strip().lower()
    if value in ("0", "off", "false", "no"):
        return "off"
    return "first" if value == "first" else "on"


@cache
def _distribution(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _triton_version() -> Version | None:
    try:
        import triton
    except ImportError:
        return None
    return parse_version(triton.__version__)


def _kitchen() -> tuple[str | None, frozenset[str], frozenset[str], str]:
    """(version, backends, operators, problem) of the comfy-kitchen in this process, as ComfyUI left it configured."""
    try:
        from comfy_kitchen.registry import registry
    except ImportError:
        return None, frozenset(), frozenset(), ""
    version = _distribution("comfy-kitchen") or "0"
    backends: set[str] = set()
    operators: set[str] = set()
    problems: list[str] = []
    for name, status in registry.list_backends().items():
        if name == "eager":
            continue
        if status["available"] and not status["disabled"]:
            backends.add(name)
            operators.update(f"{name}.{operator}" for operator in status["capabilities"])
        elif status["unavailable_reason"]:
            problems.append(f"{name}: {status['unavailable_reason']}")
    return version, frozenset(backends), frozenset(operators), "; ".join(problems)


def cpu_has_vnni() -> bool:
    """Whether this CPU multiplies bytes exactly (VNNI). Without it ``torch._int_mm`` saturates and is wrong."""
    probe = getattr(torch.cpu, "_is_vnni_supported", None)
    return bool(probe is not None and probe())


def has_bf16(device: torch.device) -> bool:
    """Whether ``device`` has units for bfloat16 products: not so NVIDIA cards before Ampere, and CPUs without
    AVX512-BF16 or AMX, which take several times as long as for float32.
    """
    if device.type == "cpu":
        names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        return any(bool(probe()) for probe in (getattr(torch.cpu, name, None) for name in names) if probe is not None)
    if device.type == "cuda" and torch.version.hip is None:
        return torch.cuda.get_device_capability(device) >= _BF16_SM
    return True


def device_facts(device: torch.device | str) -> DeviceFacts:
    """Collect the facts about ``device``. Runs no kernel and allocates nothing on the device."""
    device = torch.device(device)
    kitchen, backends, operators, problem = _kitchen()
    facts = DeviceFacts(
        device=device.type,
        name=device.type.upper(),
        torch=parse_version(torch.__version__) or (2,),
        torch_cuda=parse_version(torch.version.cuda),
        hip=parse_version(torch.version.hip),
        kitchen=kitchen,
        kitchen_backends=backends,
        kitchen_operators=operators,
        kitchen_problem=problem,
        triton=_triton_version(),
        own_kernels=own_kernels(),
    )
    if device.type == "cpu":
        return replace(facts, vnni=cpu_has_vnni(), bf16=has_bf16(device))
    if device.type == "cuda" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(device)
        arch = properties.gcnArchName.split(":")[0] if torch.version.hip is not None else None
        return replace(
            facts,
            name=properties.name,
            capability=None if arch else (properties.major, properties.minor),
            arch=arch,
            memory=properties.total_memory,
            bf16=has_bf16(device),
        )
    return facts


# --- named devices: what `quant-loader plan --device` and the tests ask about without owning the card -----------------


def kitchen_operators_for(
    kitchen: str, capability: tuple[int, int] | None, torch_cuda: Version | None, arch: str | None
) -> frozenset[str]:
    """What comfy-kitchen ``kitchen`` would offer a card, as ComfyUI configures it: its Triton backend off, and its CUDA
    backend only with a PyTorch built for CUDA 13 or newer."""
    version = parse_version(kitchen) or (0,)
    linear = [name for name in _KITCHEN_LINEAR if name != "w4a8_int8_linear" or version >= _KITCHEN_W4A8]
    if arch is not None:
        if not arch.startswith(("gfx11", "gfx12")):
            return frozenset()
        # The HIP backend has neither FP4 nor MXFP8 kernels.
        names = [name for name in linear if name != "scaled_mm_nvfp4"]
        return frozenset(
            f"hip.{name}" for name in (*names, "dequantize_per_tensor_fp8", "quantize_int8_convrot_weight")
        )
    if capability is None or torch_cuda is None or torch_cuda < (13,):
        return frozenset()
    return frozenset(f"cuda.{name}" for name in (*linear, *_KITCHEN_HELPERS))


_KITCHEN_W4A8 = (0, 2, 34)

_GIB = 1 << 30


def _nvidia(name: str, sm: tuple[int, int], gib: int, cuda: Version = (13, 0), kitchen: str = "0.2.26") -> DeviceFacts:
    operators = kitchen_operators_for(kitchen, sm, cuda, None)
    return DeviceFacts(
        device="cuda",
        name=name,
        capability=sm,
        memory=gib * _GIB,
        torch=(2, 14, 1),
        torch_cuda=cuda,
        kitchen=kitchen,
        kitchen_backends=frozenset({"cuda"} if operators else ()),
        kitchen_operators=operators,
        triton=(3, 8, 0),
        bf16=sm >= _BF16_SM,
    )


def _amd(name: str, arch: str, gib: int, kitchen: str = "0.2.26") -> DeviceFacts:
    operators = kitchen_operators_for(kitchen, None, None, arch)
    return DeviceFacts(
        device="cuda",
        name=name,
        arch=arch,
        memory=gib * _GIB,
        torch=(2, 14, 1),
        hip=(7, 2),
        kitchen=kitchen,
        kitchen_backends=frozenset({"hip"} if operators else ()),
        kitchen_operators=operators,
        triton=(3, 8, 0),
    )


def _devices() -> dict[str, DeviceFacts]:
    cards = {
        "gtx1080": ("GeForce GTX 1080", (6, 1), 8),
        "gtx1660": ("GeForce GTX 1660 Ti", (7, 5), 6),
        "rtx2080": ("GeForce RTX 2080 Ti", (7, 5), 11),
        "a100": ("A100-SXM4-80GB", (8, 0), 80),
        "rtx3090": ("GeForce RTX 3090", (8, 6), 24),
        "rtx4090": ("GeForce RTX 4090", (8, 9), 24),
        "h200": ("H200", (9, 0), 141),
        "b200": ("B200", (10, 0), 180),
        "rtx5090": ("GeForce RTX 5090", (12, 0), 32),
    }
    devices: dict[str, DeviceFacts] = {}
    for key, (name, sm, gib) in cards.items():
        # CUDA 13 dropped the cards before Turing.
        devices[key] = _nvidia(name, sm, gib, cuda=(13, 0) if sm >= (7, 5) else (12, 6))
        devices[f"{key}-cu12"] = _nvidia(name, sm, gib, cuda=(12, 8) if sm >= (7, 5) else (12, 6))
    devices |= {
        "rx6800": _amd("Radeon RX 6800 XT", "gfx1030", 16),
        "rx7900": _amd("Radeon RX 7900 XTX", "gfx1100", 24),
        "strix-halo": _amd("Radeon 8060S", "gfx1151", 96),
        "rx9070": _amd("Radeon RX 9070 XT", "gfx1201", 16),
    }
    plain = partial(DeviceFacts, torch=(2, 14, 1), kitchen="0.2.26", triton=None)
    devices |= {
        "mps": plain(device="mps", name="Apple GPU"),
        "cpu": plain(device="cpu", name="CPU", bf16=False),
        "cpu-vnni": plain(device="cpu", name="CPU", vnni=True, bf16=False),
    }
    aliases = {
        "sm_61": "gtx1080",
        "sm_75": "rtx2080",
        "sm_80": "a100",
        "sm_86": "rtx3090",
        "sm_89": "rtx4090",
        "sm_90": "h200",
        "sm_100": "b200",
        "sm_120": "rtx5090",
    }
    devices |= {alias + suffix: devices[key + suffix] for alias, key in aliases.items() for suffix in ("", "-cu12")}
    return devices | {
        "gfx1030": devices["rx6800"],
        "gfx1100": devices["rx7900"],
        "gfx1151": devices["strix-halo"],
        "gfx1201": devices["rx9070"],
    }


#: Named cards, by product ("rtx3090", "rtx3090-cu12") and by architecture ("sm_86", "sm_86-cu12", "gfx1100"), plus
#: "cpu", "cpu-vnni", "mps".
DEVICES: dict[str, DeviceFacts] = _devices()
