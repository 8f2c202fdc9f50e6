"""ComfyUI's ModelPatcher with one difference: patches of packed weights go beside the weight, not into it.

Two classes, because ComfyUI has two (static, and dynamic VRAM); the difference is in one mixin. The patches of packed
weights live in ``side_patches`` and are put on the modules while the patcher is injected, as ComfyUI installs any
forward change around a run.
"""

from __future__ import annotations

import collections
import logging
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import comfy.hooks
import comfy.model_patcher
import comfy.utils
import torch
from comfy.patcher_extension import PatcherInjection

from . import guard
from .errors import QuantLoaderError
from .packed import parameter
from .saving import packed_state
from .sidepath import MERGE, Patch, SidePath, does_nothing, kind, patch_misfit, plain_misfit

INJECTION = "quant_loader"
log = logging.getLogger("quant_loader")

_Static: Any = comfy.model_patcher.ModelPatcher
_Dynamic: Any = getattr(comfy.model_patcher, "ModelPatcherDynamic", None)

# What ComfyUI keeps in a patcher's backup while a weight is replaced.
_Backup = collections.namedtuple("_Backup", ["weight", "inplace_update"])


def packed_modules(model: torch.nn.Module) -> dict[str, Any]:
    """Weight key (``<module>.weight``) -> module, for every module that took a packed weight.

    Found once per model: a walk over all modules costs milliseconds, and torch.compile renames modules while it runs.
    """
    found: dict[str, Any] | None = model.__dict__.get("_quant_loader_packed")
    if found is None:
        found = {f"{name}.weight": m for name, m in model.named_modules() if getattr(m, "spec", None) is not None}
        model.__dict__["_quant_loader_packed"] = found
    return found


def context_of(model: torch.nn.Module) -> Any:
    """What the load of this model learned (``ops.LoadContext``); None for a model that is not ours."""
    return model.__dict__.get("_quant_loader_context")


class _SidePatches:
    """The mixin: everything that differs from ComfyUI's patcher.

    ``side_patches``: weight key -> patches in the order they were added. ``hook_side_patches``: those of the hooks that
    are active right now; they come after the model's own. ``side_uuid`` changes with every change of ``side_patches``
    and is shared by clones that have the same ones.
    """

    model: Any
    side_patches: dict[str, list[Patch]]
    hook_side_patches: dict[str, list[Patch]]
    side_uuid: uuid.UUID | None

    def _init_side(self) -> None:
        self.side_patches = {}
        self.side_uuid = None
        self.hook_side_patches = {}
        self._side_paths: dict[str, SidePath] = {}
        self.set_injections(INJECTION, [PatcherInjection(inject=_inject, eject=_eject)])  # type: ignore[attr-defined]

    # Adding

    def add_patches(self, patches: Any, strength_patch: float = 1.0, strength_model: float = 1.0) -> list[Any]:
        """As ComfyUI's, with patches of packed weights kept apart. An empty set (nothing matched) is an error."""
        if not patches:
            raise QuantLoaderError(
                "A patch set without a single patch reached this model: the LoRA's keys match none of its layers. "
                "Check that the LoRA was made for this model family."
            )
        beside, into = self._divided(patches)
        added = self._entries(beside, strength_patch, strength_model)
        self._check_plain(into)
        with self.use_ejected():  # type: ignore[attr-defined]
            for key, entry in added:
                self.side_patches.setdefault(key, []).append(entry)
            if added:
                self.side_uuid = uuid.uuid4()
                self.patches_uuid = uuid.uuid4()
        applied = super().add_patches(into, strength_patch, strength_model) if into else []  # type: ignore[misc]
        return [*applied, *beside]

    def add_hook_patches(
        self, hook: Any, patches: Any, strength_patch: float = 1.0, strength_model: float = 1.0
    ) -> list[Any]:
        """As ComfyUI's, which keeps the patches of a hook by weight key; ours are checked for their shape first."""
        if not patches:
            # No error: a hook LoRA may be for the text encoder alone.
            log.warning("Quant Loader: no key of a hook LoRA matches a layer of %s.", type(self.model).__name__)
        beside, into = self._divided(patches or {})
        self._entries(beside, strength_patch, strength_model)
        self._check_plain(into)
        return super().add_hook_patches(hook, patches or {}, strength_patch, strength_model)  # type: ignore[misc,no-any-return]

    def _divided(self, patches: Mapping[Any, Any]) -> tuple[dict[Any, Any], dict[Any, Any]]:
        packed = packed_modules(self.model)
        beside: dict[Any, Any] = {}
        into: dict[Any, Any] = {}
        for key, patch in patches.items():
            (beside if _weight_key(key) in packed else into)[key] = patch
        return beside, into

    def _entries(
        self, patches: Mapping[Any, Any], strength_patch: float, strength_model: float
    ) -> list[tuple[str, Patch]]:
        """ComfyUI's patch tuples by weight key; raises when one does not fit its layer."""
        packed = packed_modules(self.model)
        out: list[tuple[str, Patch]] = []
        for key, patch in patches.items():
            weight_key = _weight_key(key)
            offset = key[1] if not isinstance(key, str) else None
            function = key[2] if not isinstance(key, str) and len(key) > 2 else None
            entry: Patch = (strength_patch, patch, strength_model, offset, function)
            _refuse_misfit(entry, patch_misfit(weight_key, entry, tuple(packed[weight_key].weight.shape)))
            out.append((weight_key, entry))
        return out

    def _check_plain(self, patches: Mapping[Any, Any]) -> None:
        """Raise when a patch cannot fit its plain weight: ComfyUI would log that and go on without it."""
        for key, patch in patches.items():
            weight_key = _weight_key(key)
            try:
                shape = tuple(comfy.utils.get_attr(self.model, weight_key).shape)
            except AttributeError:
                continue  # no weight of this model, so that ComfyUI leaves the patch out
            offset = None if isinstance(key, str) else key[1]
            entry: Patch = (1.0, patch, 1.0, offset, None)
            _refuse_misfit(entry, plain_misfit(weight_key, entry, shape))

    # Running

    def _install(self) -> None:
        """Put this patcher's side paths on the modules; modules without patches get none."""
        for key, module in packed_modules(self.model).items():
            patches = [*self.side_patches.get(key, ()), *self.hook_side_patches.get(key, ())]
            module.side_path = self._side_path(key, patches) if patches else None
        self.model.__dict__["_quant_loader_owner"] = id(self)

    def _remove(self) -> None:
        # A clone that is thrown away must not take the side paths of the one that runs.
        if self.model.__dict__.get("_quant_loader_owner") != id(self):
            return
        for module in packed_modules(self.model).values():
            module.side_path = None
        self.model.__dict__["_quant_loader_owner"] = None

    def _side_path(self, key: str, patches: Sequence[Patch]) -> SidePath:
        """The same object as last time while the patches are the same: it keeps its matrices on the device."""
        known = self._side_paths.get(key)
        if known is None or not known.same(patches):
            known = self._side_paths[key] = SidePath(key, patches)
        return known

    def pre_run(self) -> None:
        """Called by ComfyUI before sampling: make sure that no other clone's side paths are on the modules."""
        if self.is_injected and self.model.__dict__.get("_quant_loader_owner") != id(self):  # type: ignore[attr-defined]
            self._install()
        context_of(self.model).hooked.clear()
        if is_compiled(self):
            # What a layer makes at its first call is made now: a graph would make it again on every call.
            for module in packed_modules(self.model).values():
                module.prepare(self.load_device, self.model.get_dtype_inference())  # type: ignore[attr-defined]
        super().pre_run()  # type: ignore[misc]

    def cleanup(self) -> None:
        """Called by ComfyUI after a run: the moment to read the output guards."""
        super().cleanup()  # type: ignore[misc]
        self.read_guards()

    def detach(self, unpatch_all: bool = True) -> Any:
        """As ComfyUI's, which unloads the model with it; the matrices of the LoRAs leave the device as well.

        So do INT8 rows kept beside the weights, but for ``unpatch_all=False``: another clone of the model is next.
        """
        model = super().detach(unpatch_all)  # type: ignore[misc]
        for side in self._side_paths.values():
            side.release()
        if unpatch_all:
            for module in packed_modules(self.model).values():
                module.kept = None
        return model

    # Sizes, as ComfyUI asks for them: what is kept beside the weights takes memory as well.

    def model_size(self) -> int:
        return int(super().model_size()) + self._size_beside()  # type: ignore[misc]

    def loaded_size(self) -> int:
        return int(super().loaded_size()) + self._size_beside(held=True)  # type: ignore[misc]

    def load(self, *args: Any, **kwargs: Any) -> None:
        """As ComfyUI's, which takes model_size() for what it has loaded whole; what is beside is counted apart."""
        super().load(*args, **kwargs)  # type: ignore[misc]
        weights = int(super().model_size())  # type: ignore[misc]
        self.model.model_loaded_weight_memory = min(self.model.model_loaded_weight_memory, weights)

    def _size_beside(self, held: bool = False) -> int:
        """Bytes of INT8 rows kept beside the weights and of the LoRAs' matrices as the first run puts them on the
        device (``held``: only those that are there).
        """
        rows: int = sum(m.kept.nbytes for m in packed_modules(self.model).values() if m.kept is not None)
        if not self.side_patches:
            return rows
        sides = (self._side_path(key, patches) for key, patches in self.side_patches.items())
        values = sum(side.numel for side in sides if side.held or not held)
        if not values:
            return rows
        if hasattr(self.model, "get_dtype_inference"):
            dtype: torch.dtype = self.model.get_dtype_inference()
        else:  # an encoder, which computes in the dtype of its weights
            dtype = next(iter(packed_modules(self.model).values())).module_dtype
        return rows + values * dtype.itemsize

    def read_guards(self, of_several: bool = False) -> list[str]:
        """What the output guards noticed since the last call, kept in the context. One device synchronisation.

        A layer that ran without fault takes back what was said of it; where the call was one ``of_several`` (prompts
        are encoded one by one), only if other patches were on the layer then.
        """
        noticed = guard.read({k: m for k, m in packed_modules(self.model).items() if not m.is_table})
        guarded = context_of(self.model).guarded
        for key, sentence in noticed.items():
            if sentence:
                guarded[key] = (sentence, self.side_uuid)
            elif key in guarded and not (of_several and guarded[key][1] == self.side_uuid):
                del guarded[key]
        return [sentence for sentence in noticed.values() if sentence]

    # Weights

    def patch_weight_to_device(
        self,
        key: str,
        device_to: Any = None,
        inplace_update: bool = False,
        return_weight: bool = False,
        force_cast: bool = False,
    ) -> Any:
        """As ComfyUI's for plain weights. A packed one is moved as it is: ComfyUI's would dequantise it to cast it."""
        if key not in packed_modules(self.model):
            return super().patch_weight_to_device(key, device_to, inplace_update, return_weight, force_cast)  # type: ignore[misc]
        weight = comfy.utils.get_attr(self.model, key)
        if not (force_cast or return_weight):
            return weight
        moved = weight if device_to is None else weight.to(device=device_to)
        if return_weight:
            return moved
        if key not in self.backup:  # type: ignore[attr-defined]
            self.backup[key] = _Backup(weight, False)  # type: ignore[attr-defined]
        comfy.utils.set_attr(self.model, key, parameter(moved))
        return None

    def get_key_patches(self, filter_prefix: str | None = None) -> dict[str, Any]:
        """As ComfyUI's, with the side patches in their place, so that merging nodes see them."""
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
            for suffix in module.extra_state_suffixes():
                sd.pop(stem + suffix, None)
        return sd

    # Hooks: ComfyUI patches the weight for the conditioning that is about to run; we set the side path instead. All
    # three are called by patch_hooks, which has ejected the model and injects it again afterwards.

    def patch_hook_weight_to_device(
        self, hooks: Any, combined_patches: dict[str, Any], key: str, original_weights: Any, memory_counter: Any
    ) -> None:
        if key not in packed_modules(self.model):
            super().patch_hook_weight_to_device(hooks, combined_patches, key, original_weights, memory_counter)  # type: ignore[misc]
            return
        if key not in combined_patches:
            return
        self._hook(key, list(combined_patches[key]))
        if self.hook_mode == comfy.hooks.EnumHookMode.MaxSpeed:  # type: ignore[attr-defined]
            # In the other mode ComfyUI keeps nothing: what it finds here it takes for all that these hooks patch.
            self.cached_hook_patches.setdefault(hooks, {})[key] = (self.hook_side_patches[key], None)  # type: ignore[attr-defined]

    def patch_cached_hook_weights(self, cached_weights: dict[str, Any], key: str, memory_counter: Any) -> None:
        if key not in packed_modules(self.model):
            super().patch_cached_hook_weights(cached_weights=cached_weights, key=key, memory_counter=memory_counter)  # type: ignore[misc]
            return
        self._hook(key, cached_weights[key][0])

    def _hook(self, key: str, patches: list[Patch]) -> None:
        self.hook_side_patches[key] = patches
        context_of(self.model).hooked[key] = SidePath(key, patches).describe()

    def unpatch_hooks(self, whitelist_keys_set: set[str] | None = None) -> None:
        with self.use_ejected():  # type: ignore[attr-defined]
            if whitelist_keys_set:
                for key in whitelist_keys_set & self.hook_side_patches.keys():
                    del self.hook_side_patches[key]
            else:
                self.hook_side_patches.clear()
            super().unpatch_hooks(whitelist_keys_set)  # type: ignore[misc]

    # Copies

    def clone(self, disable_dynamic: bool = False, *args: Any, **kwargs: Any) -> Any:
        n = super().clone(disable_dynamic, *args, **kwargs)  # type: ignore[misc]
        if not isinstance(n, _SidePatches):
            # ComfyUI made one of its own: the compiled or hooked clone of a dynamic model must be static.
            n = adopt(n, context_of(n.model))
        # ComfyUI hands model_size() on, which counts what is kept beside the weights as well.
        n.size = self.size  # type: ignore[attr-defined]
        n.side_patches = {k: v[:] for k, v in self.side_patches.items()}
        n.side_uuid = self.side_uuid
        n.hook_side_patches = {k: v[:] for k, v in self.hook_side_patches.items()}
        if n.model is self.model:
            # The matrices that are on the device already serve the clone as well.
            n._side_paths = dict(self._side_paths)
        return n

    def clone_has_same_weights(self, clone: Any, *args: Any, **kwargs: Any) -> bool:
        if self.side_uuid != getattr(clone, "side_uuid", None):
            return False
        return bool(super().clone_has_same_weights(clone, *args, **kwargs))  # type: ignore[misc]

    # Saving

    def forget_side_patches(self) -> None:
        """Take all LoRAs off the quantised layers of this clone."""
        with self.use_ejected():  # type: ignore[attr-defined]
            self.side_patches.clear()
            self.side_uuid = None

    def model_state_dict_for_saving(self, model: Any = None, prefix: str = "") -> dict[str, Any]:
        """The bytes of the file again; refused while a LoRA sits beside the weights, which this would lose."""
        carrying = [key for key, patches in self.side_patches.items() if not all(map(does_nothing, patches))]
        if carrying:
            encoder = getattr(self, "is_clip", False)
            raise QuantLoaderError(
                f"This {'text encoder' if encoder else 'model'} carries patches (LoRAs or merges) on "
                f"{len(carrying)} quantised layers, and a stock save would lose them. Use the node 'Save "
                "Quantized Checkpoint' (QuantLoaderSave) for the diffusion model, which can leave them out or merge "
                "them, or take what is saved from before the patches."
            )
        model = self.model if model is None else model
        packed: dict[str, Any] = {}
        names: set[str] = set()
        for key, module in packed_modules(self.model).items():
            if key.startswith(prefix):
                stem = key[len(prefix) : -len("weight")]
                packed.update(packed_state(module.weight, stem))
                names.update(f"{stem}{suffix}" for suffix in ("weight", *module.extra_state_suffixes()))
        out: dict[str, Any] = super().model_state_dict_for_saving(_Without(model, names), prefix)  # type: ignore[misc]
        return {**out, **packed}

    def state_dict_for_saving(self, *args: Any, **kwargs: Any) -> Any:
        """As ComfyUI's; it rearranges some families' weights, which must not tear codes from their scales."""
        given = [sd for sd in (*args[:1], kwargs.get("clip_state_dict")) if sd]
        wanted = len(packed_modules(self.model)) + sum(n.endswith(".comfy_quant") for sd in given for n in sd)
        out = super().state_dict_for_saving(*args, **kwargs)  # type: ignore[misc]
        markers = [name for name in out if name.endswith(".comfy_quant")]
        lost = [name for name in markers if f"{name.removesuffix('comfy_quant')}weight" not in out]
        if lost or len(markers) != wanted:
            raise QuantLoaderError(
                "ComfyUI rearranges the text encoder of this model family when it saves a checkpoint, and cannot do so "
                f"with quantised layers ({len(lost) or wanted - len(markers)} would lose their scales). Save the "
                "diffusion model alone (ModelSave), and keep the encoder's own file."
            )
        return out

    # Telling

    def lora_report(self) -> list[str]:
        """How many patches sit on quantised layers and how they are applied, then one line a layer."""
        sides = {key: SidePath(key, patches) for key, patches in sorted(self.side_patches.items())}
        plain: dict[str, list[Any]] = self.patches  # type: ignore[attr-defined]
        if not sides and not plain:
            return []
        count = sum(len(side.patches) for side in sides.values())
        exact = sum(len(side.patches) for side in sides.values() if side.exact)
        head = f"{count} patches on {len(sides)} quantised layers: {count - exact} beside the weight"
        if exact:
            head += f", {exact} on a dequantised copy"
        into = sum(len(patches) for patches in plain.values())
        if into:
            head += f"; {into} more on plain weights, by ComfyUI"
        return [head, *(f"{key}: {side.describe()}" for key, side in sides.items())]

    def hook_report(self) -> list[str]:
        """The LoRAs of hooks on quantised layers in the last run, one line a layer: hooks come with a conditioning and
        are gone after the run.
        """
        hooked = context_of(self.model).hooked
        if not hooked:
            return []
        return [
            f"LoRAs of hooks on {len(hooked)} quantised layers in the last run:",
            *(f"{key}: {how}" for key, how in sorted(hooked.items())),
        ]


class _Without:
    """A model whose state dict lacks some names; everything else is the model's."""

    def __init__(self, model: Any, names: set[str]) -> None:
        self._model, self._names = model, names

    def state_dict(self) -> dict[str, Any]:
        return {k: v for k, v in self._model.state_dict().items() if k not in self._names}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _refuse_misfit(entry: Patch, misfit: str | None) -> None:
    if misfit is not None:
        raise QuantLoaderError(
            f"This {'merge' if kind(entry) == MERGE else 'LoRA'} does not fit the model: {misfit}. It was made for "
            "another model, or for another size of this one."
        )


def is_compiled(patcher: Any) -> bool:
    """Whether ComfyUI's node has put torch.compile around the model."""
    return "torch_compile_kwargs" in patcher.model_options


def _weight_key(key: Any) -> str:
    return str(key if isinstance(key, str) else key[0])


def _inject(patcher: Any) -> None:
    patcher._install()


def _eject(patcher: Any) -> None:
    patcher._remove()


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


def adopt(patcher: Any, context: Any) -> Any:
    """ComfyUI's ``patcher``, turned into one of ours in place: it may be among the loaded models already.

    ``context``: what the load learned, kept with the model for the reports.
    """
    dynamic = _Dynamic is not None and isinstance(patcher, _Dynamic)
    patcher.__class__ = QuantModelPatcherDynamic if dynamic else QuantModelPatcher
    patcher._init_side()
    patcher.model.__dict__["_quant_loader_context"] = context
    return patcher
