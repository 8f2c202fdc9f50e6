"""ComfyUI's ModelPatcher with one difference: patches of packed linears go beside the weight, not into it.

Two classes, because ComfyUI has two (static, and dynamic VRAM); the difference is in one mixin. The patches of packed
weights live in ``side_patches`` and are installed on the modules while the patcher is injected, as ComfyUI installs
any forward change around a run.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

import comfy.model_management
import comfy.model_patcher
import comfy.utils
import torch
from comfy.patcher_extension import PatcherInjection

from . import guard
from .errors import QuantLoaderError
from .packed import is_packed
from .sidepath import SidePath

INJECTION = "quant_loader"

_Static: Any = comfy.model_patcher.ModelPatcher
_Dynamic: Any = getattr(comfy.model_patcher, "ModelPatcherDynamic", None)


def packed_modules(model: torch.nn.Module) -> dict[str, Any]:
    """Weight key (``<module>.weight``) -> module, for every module whose weight is packed."""
    return {
        f"{name}.weight": module for name, module in model.named_modules() if is_packed(getattr(module, "weight", None))
    }


class _SidePatches:
    """The mixin: everything that differs from ComfyUI's patcher."""

    model: Any
    side_patches: dict[str, list[Any]]
    # Patches of hooks that are active right now; they come after the model's own.
    hook_side_patches: dict[str, list[Any]]

    # Changes with every change of side_patches, and is shared by clones that have the same ones.
    side_uuid: uuid.UUID | None

    def _init_side(self) -> None:
        self.side_patches = {}
        self.side_uuid = None
        self.hook_side_patches = {}
        self.set_injections(INJECTION, [PatcherInjection(inject=_inject, eject=_eject)])  # type: ignore[attr-defined]

    def add_patches(self, patches: Any, strength_patch: float = 1.0, strength_model: float = 1.0) -> list[Any]:
        """As ComfyUI's, with patches of packed weights kept apart. An empty set (nothing matched) is an error."""
        if not patches:
            raise QuantLoaderError(
                "A patch set without a single patch reached this model: the LoRA's keys match none of its layers. "
                "Check that the LoRA was made for this model family."
            )
        packed = packed_modules(self.model)
        beside, into = {}, {}
        for key, patch in patches.items():
            (beside if _weight_key(key) in packed else into)[key] = patch
        with self.use_ejected():  # type: ignore[attr-defined]
            for key, patch in beside.items():
                weight_key = _weight_key(key)
                offset = key[1] if not isinstance(key, str) else None
                function = key[2] if not isinstance(key, str) and len(key) > 2 else None
                entry = (strength_patch, patch, strength_model, offset, function)
                misfit = SidePath(weight_key, [entry]).check(tuple(packed[weight_key].weight.shape))
                if misfit is not None:
                    raise QuantLoaderError(
                        f"This LoRA does not fit the model: {misfit}. It was made for another model, or for another "
                        "size of this one."
                    )
                self.side_patches.setdefault(weight_key, []).append(entry)
        if beside:
            self.side_uuid = uuid.uuid4()
        applied = super().add_patches(into, strength_patch, strength_model) if into else []  # type: ignore[misc]
        self.patches_uuid = uuid.uuid4()
        return [*applied, *beside]

    def get_key_patches(self, filter_prefix: str | None = None) -> dict[str, Any]:
        """As ComfyUI's, with the side patches in their place, so that merging and saving nodes see them."""
        out: dict[str, Any] = super().get_key_patches(filter_prefix)  # type: ignore[misc]
        for key, patches in self.side_patches.items():
            if key in out:
                out[key] = out[key] + patches
        return out

    def model_state_dict(self, filter_prefix: str | None = None) -> dict[str, Any]:
        """The model's parameters by name. Scales and markers belong to their weight and are not parameters."""
        sd: dict[str, Any] = super().model_state_dict(filter_prefix)  # type: ignore[misc]
        for key, module in packed_modules(self.model).items():
            if key not in sd:
                continue
            sd[key] = module.weight
            stem = key[: -len("weight")]
            for suffix in (*module.weight._params.companions(), "comfy_quant"):
                sd.pop(stem + suffix, None)
        return sd

    # Hooks: ComfyUI patches the weight for the conditioning that is about to run; we set the side path instead.

    def patch_hook_weight_to_device(
        self, hooks: Any, combined_patches: dict[str, Any], key: str, original_weights: Any, memory_counter: Any
    ) -> None:
        if key not in packed_modules(self.model):
            super().patch_hook_weight_to_device(hooks, combined_patches, key, original_weights, memory_counter)  # type: ignore[misc]
            return
        if key not in combined_patches:
            return
        original_weights.pop(key, None)
        self.hook_side_patches[key] = list(combined_patches[key])
        self.cached_hook_patches.setdefault(hooks, {})[key] = (self.hook_side_patches[key], None)  # type: ignore[attr-defined]
        self._install([key])

    def patch_cached_hook_weights(self, cached_weights: dict[str, Any], key: str, memory_counter: Any) -> None:
        if key not in packed_modules(self.model):
            super().patch_cached_hook_weights(cached_weights=cached_weights, key=key, memory_counter=memory_counter)  # type: ignore[misc]
            return
        self.hook_side_patches[key] = cached_weights[key][0]
        self._install([key])

    def unpatch_hooks(self, whitelist_keys_set: set[str] | None = None) -> None:
        gone = [k for k in self.hook_side_patches if whitelist_keys_set is None or k in whitelist_keys_set]
        for key in gone:
            del self.hook_side_patches[key]
        self._install(gone)
        super().unpatch_hooks(whitelist_keys_set)  # type: ignore[misc]

    def _install(self, keys: Iterable[str]) -> None:
        """Put the current side path of each key on its module (or take it away)."""
        packed = packed_modules(self.model)
        for key in keys:
            if key not in packed:
                continue
            patches = [*self.side_patches.get(key, ()), *self.hook_side_patches.get(key, ())]
            packed[key].side_path = SidePath(key, patches) if patches else None

    def clone(self, disable_dynamic: bool = False, **kwargs: Any) -> Any:
        n = super().clone(disable_dynamic=disable_dynamic, **kwargs)  # type: ignore[misc]
        if not isinstance(n, _SidePatches):
            # ComfyUI made one of its own: the compiled or hooked clone of a dynamic model must be static.
            n = _adopt(n)
        n.side_patches = {k: v[:] for k, v in self.side_patches.items()}
        n.side_uuid = self.side_uuid
        return n

    def clone_has_same_weights(self, clone: Any, *args: Any, **kwargs: Any) -> bool:
        if self.side_uuid != getattr(clone, "side_uuid", None):
            return False
        return bool(super().clone_has_same_weights(clone, *args, **kwargs))  # type: ignore[misc]

    def cleanup(self) -> None:
        """Called by ComfyUI after a run: the moment to read the output guards."""
        super().cleanup()  # type: ignore[misc]
        modules = [m for m in packed_modules(self.model).values() if hasattr(m, "out_features")]
        for sentence in guard.read(modules):
            modules[0].context.warnings.append(sentence)

    def state_dict_for_saving(self, *args: Any, **kwargs: Any) -> Any:
        """The bytes of the file again; refused while a LoRA sits beside the weights, which this would lose."""
        if self.side_patches:
            raise QuantLoaderError(
                f"This model carries LoRA patches on {len(self.side_patches)} quantised layers, and a stock save would "
                "lose them. Use the node 'Save Quantized Checkpoint' (QuantLoaderSave), which can leave them out or "
                "merge them, or remove the LoRA before saving."
            )
        return super().state_dict_for_saving(*args, **kwargs)  # type: ignore[misc]

    def lora_report(self) -> list[str]:
        """One line a patched layer: how many patches, and how they are applied."""
        return [f"{key}: {SidePath(key, patches).describe()}" for key, patches in sorted(self.side_patches.items())]


def _weight_key(key: Any) -> str:
    return str(key if isinstance(key, str) else key[0])


def _inject(patcher: Any) -> None:
    patcher._install([*patcher.side_patches, *patcher.hook_side_patches])


def _eject(patcher: Any) -> None:
    for module in packed_modules(patcher.model).values():
        module.side_path = None


class QuantModelPatcher(_SidePatches, _Static):  # type: ignore[misc]
    """For models that ComfyUI loads whole or in parts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._init_side()


if _Dynamic is not None:

    class QuantModelPatcherDynamic(_SidePatches, _Dynamic):  # type: ignore[misc]
        """For dynamic VRAM; never made for a CPU load device, where ComfyUI's own class turns into a static one."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._init_side()


def adopt(patcher: Any) -> Any:
    """Our patcher over the model that ComfyUI's ``patcher`` holds, static or dynamic as that one is."""
    dynamic = _Dynamic is not None and isinstance(patcher, _Dynamic)
    cls = QuantModelPatcherDynamic if dynamic else QuantModelPatcher
    ours = cls(patcher.model, patcher.load_device, patcher.offload_device, patcher.model_size())
    ours.__dict__.update(patcher.__dict__)
    ours._init_side()
    return ours


def _adopt(stock: Any) -> Any:
    """``stock`` (a plain static ModelPatcher that ComfyUI just made) as one of ours, its state kept."""
    stock.__class__ = QuantModelPatcher
    stock._init_side()
    return stock
