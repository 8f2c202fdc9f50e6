"""Which private parts of ComfyUI this pack uses, and whether this ComfyUI has them.

Every other module of this room takes ComfyUI's names from here or imports them after :func:`require`.
"""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any

from .errors import HostError

log = logging.getLogger("quant_loader")

# module -> names used from it. A name that is missing is reported with its module, not as an AttributeError in a run.
NEEDED: dict[str, tuple[str, ...]] = {
    "comfy.ops": ("manual_cast", "cast_bias_weight", "uncast_bias_weight", "run_every_op"),
    "comfy.quant_ops": ("QuantizedTensor", "QuantizedLayout", "register_layout_class"),
    "comfy.model_patcher": (
        "CoreModelPatcher",
        "ModelPatcher.add_hook_patches",
        "ModelPatcher.add_patches",
        "ModelPatcher.cleanup",
        "ModelPatcher.clone",
        "ModelPatcher.clone_has_same_weights",
        "ModelPatcher.detach",
        "ModelPatcher.get_key_patches",
        "ModelPatcher.load",
        "ModelPatcher.loaded_size",
        "ModelPatcher.model_size",
        "ModelPatcher.model_state_dict",
        "ModelPatcher.model_state_dict_for_saving",
        "ModelPatcher.patch_cached_hook_weights",
        "ModelPatcher.patch_hook_weight_to_device",
        "ModelPatcher.patch_weight_to_device",
        "ModelPatcher.pre_run",
        "ModelPatcher.set_injections",
        "ModelPatcher.state_dict_for_saving",
        "ModelPatcher.unpatch_hooks",
        "ModelPatcher.use_ejected",
    ),
    "comfy.patcher_extension": ("PatcherInjection",),
    "comfy.sd": (
        "CLIP",
        "CLIPType",
        "load_diffusion_model_state_dict",
        "load_state_dict_guess_config",
        "load_text_encoder_state_dicts",
    ),
    "comfy.hooks": ("EnumHookMode",),
    "comfy.controlnet": ("load_controlnet_state_dict",),
    "comfy.model_detection": ("model_config_from_unet", "unet_prefix_from_state_dict"),
    "comfy.utils": ("load_torch_file", "get_attr", "set_attr", "ProgressBar.update", "ProgressBar.update_absolute"),
    "comfy.lora": ("calculate_weight",),
    "comfy.weight_adapter": ("LoRAAdapter", "WeightAdapterBase"),
    "comfy.model_management": (
        "get_free_memory",
        "get_total_memory",
        "get_torch_device",
        "load_models_gpu",
        "module_size",
        "text_encoder_offload_device",
        "throw_exception_if_processing_interrupted",
    ),
}


def _has(module: Any, name: str) -> bool:
    """Whether a module has ``name``, which may be a class and one of its methods."""
    owner, _, attribute = name.partition(".")
    return hasattr(module, owner) and (not attribute or hasattr(getattr(module, owner), attribute))


@functools.cache
def missing() -> tuple[str, ...]:
    """The needed names this host lacks, as ``module.name``."""
    out: list[str] = []
    for module, names in NEEDED.items():
        try:
            loaded = importlib.import_module(module)
        except ImportError as error:
            out.append(f"{module} ({error})")
            continue
        out += [f"{module}.{name}" for name in names if not _has(loaded, name)]
    return tuple(out)


def require() -> None:
    """Raise :class:`HostError` with one sentence when this ComfyUI cannot carry the pack."""
    gone = missing()
    if gone:
        raise HostError(
            f"This ComfyUI ({version()}) lacks {', '.join(gone)}, which Quant Loader builds on; "
            "it needs ComfyUI 0.30 or later with the comfy-kitchen that ComfyUI asks for. "
            "Update ComfyUI, or load the model with ComfyUI's own loader."
        )


def preload() -> None:
    """Import what a load needs, so that the first load of a server does not pay for it.

    A ComfyUI that this pack does not fit is left alone: its nodes are listed, and the first load says what is missing.
    """
    if missing():
        return
    try:
        for module in ("load", "ops", "state_dict", "patcher", "kernel_report", "progress"):
            importlib.import_module(f".{module}", __package__)
        # Versions of installed packages are looked up once in a process, from their files.
        importlib.import_module("..kernels", __package__).device_facts("cpu")
    except (ImportError, AttributeError, TypeError) as error:
        log.warning("Quant Loader does not fit this ComfyUI (%s): %s. Its loaders will fail.", version(), error)


def version() -> str:
    """ComfyUI's version, or ``unknown``."""
    try:
        return str(importlib.import_module("comfyui_version").__version__)
    except (ImportError, AttributeError):
        return "unknown"


def optional(module: str, name: str) -> Any | None:
    """``module.name`` when this host has it."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
