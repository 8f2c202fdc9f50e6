"""The file's tensors as a state dict whose quantised layers are single packed tensors, and the check afterwards."""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..checkpoint import LayerSpec
from .errors import ModelMismatch

if TYPE_CHECKING:
    from .ops import Given, LoadContext

log = logging.getLogger("quant_loader")

_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.)")
_FIRST_NUMBER = re.compile(r"(?<=\.)[0-9]{1,9}(?=\.)")

QUANTISATION_KEYS = frozenset(
    {"_quantization_metadata", "quant_format", "quantization_format", "quantization_map_base64"}
)


def read(paths: Sequence[str]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """All tensors of all files, memory-mapped by ComfyUI's own reader, and the metadata."""
    import comfy.utils

    sd: dict[str, torch.Tensor] = {}
    metadata: dict[str, str] = {}
    for path in paths:
        try:
            tensors, meta = comfy.utils.load_torch_file(path, return_metadata=True)
        except KeyError as error:
            # ComfyUI's dynamic-VRAM reader has a table of dtypes; E8M0 scales are not in 0.30's.
            log.info("Quant Loader: reading %s through safetensors (dtype %s)", Path(path).name, error)
            tensors, meta = _read_plain(path)
        sd.update(tensors)
        metadata.update(meta or {})
    return sd, metadata


def _read_plain(path: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    import safetensors

    with safetensors.safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


def fold(
    sd: dict[str, torch.Tensor],
    layers: Sequence[LayerSpec],
    dense: Callable[[str], bool] | None = None,
    step: Callable[[], None] | None = None,
    files: Sequence[str] = (),
) -> dict[str, Any]:
    """``sd`` with every quantised layer's tensors folded into one packed ``<name>.weight`` of logical shape.

    Architecture detection then sees logical shapes, and no scale or marker is left over for ComfyUI to drop.
    ``dense(name)`` says which layers to hand over dequantised, because what loads them knows no packed weights;
    ``step`` is called before each layer. ``files`` are those that the tensors come from.
    """
    from .packed import FileState, Source, pack

    states = tuple(FileState.of(path) for path in files)

    out: dict[str, Any] = dict(sd)
    dtype = _float_dtype(out, layers)
    for spec in layers:
        if step is not None:
            step()
        tensors = {suffix: out.pop(name) for suffix, name in spec.tensors.items() if name in out}
        marker = out.pop(f"{_stem(spec)}.comfy_quant", None)
        raw = bytes(marker.contiguous().view(torch.uint8).numpy().tobytes()) if marker is not None else None
        packed = pack(spec, tensors, dtype, raw, source=Source(states, tuple(spec.tensors.items())))
        out[f"{spec.name}.weight"] = packed.dequantize() if dense is not None and dense(spec.name) else packed
        if spec.format == "quanto_int8":
            for suffix in ("input_scale", "output_scale"):
                out.pop(f"{_stem(spec)}.{suffix}", None)
    for name in [n for n in out if n.endswith(".comfy_quant") or n.rsplit(".", 1)[-1] == "scaled_fp8"]:
        del out[name]
    return out


def _stem(spec: LayerSpec) -> str:
    """The layer's name in the file, whatever it is called in the model."""
    weight = spec.tensors["weight"]
    for ending in (".weight._data", ".weight"):
        if weight.endswith(ending):
            return weight[: -len(ending)]
    return spec.name


def _float_dtype(sd: dict[str, torch.Tensor], layers: Sequence[LayerSpec]) -> torch.dtype:
    """The 16-bit dtype the file's author used for what is not quantised; bfloat16 when nothing says otherwise."""
    quantised = {name for spec in layers for name in spec.tensors.values()}
    count = {torch.bfloat16: 0, torch.float16: 0}
    for name, tensor in sd.items():
        if name not in quantised and tensor.dtype in count:
            count[tensor.dtype] += tensor.numel()
    return torch.float16 if count[torch.float16] > count[torch.bfloat16] else torch.bfloat16


def without_quantisation(metadata: dict[str, str]) -> dict[str, str]:
    """The file's metadata for ComfyUI's model detection, which must not act on the quantisation a second time."""
    return {k: v for k, v in metadata.items() if k not in QUANTISATION_KEYS}


def gaps(names: Iterable[str]) -> list[str]:
    """Tensors that one block of a model lacks, where half of its blocks or more have them, by name."""
    stacks: defaultdict[str, defaultdict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in names:
        found = _FIRST_NUMBER.search(name)
        if found is not None:
            stacks[name[: found.start()]][int(found[0])].add(name[found.end() :])
    missing: list[str] = []
    for stack, blocks in stacks.items():
        usual = {
            rest for rest, times in Counter(r for b in blocks.values() for r in b).items() if 2 * times >= len(blocks)
        }
        for number, present in sorted(blocks.items()):
            missing += [f"{stack}{number}{rest}" for rest in sorted(usual - present)]
    return missing


def _note_bare(models: Sequence[Any], context: LoadContext, names: Collection[str]) -> None:
    """Note which parameters of modules that are none of the operations class are in the file (``names``).

    Their names are known where every packed layer of the part of the model that they belong to is called as in the
    file.
    """
    for model in models:
        packed: list[tuple[str, str]] = []
        bare: list[tuple[str, Any, list[str]]] = []
        for path, module in model.named_modules():
            held = module.__dict__
            if held.get("spec") is not None:
                packed.append((path, module.weight._params.declaration.name))
            elif "given" not in held and (own := [n for n, p in module._parameters.items() if p is not None]):
                bare.append((path, module, own))
        if not bare:
            continue
        renamed = [path for path, name in packed if not path.endswith(name)]
        for root in {path.removesuffix(name) for path, name in packed if path.endswith(name)}:
            if any(path.startswith(root) for path in renamed):
                continue
            for path, module, own in bare:
                if path.startswith(root):
                    context.note(module, f"{path[len(root) :]}.", own, names)


def _absent(models: Sequence[Any]) -> list[str]:
    """A sentence for each layer that lacks what another block of the same model has: something reads it.

    A layer without such a sibling may be one that nothing reads; a linear says so itself when it is called.
    """
    sentences: list[str] = []
    for model in models:
        given: dict[str, Given] = {n: m.__dict__["given"] for n, m in model.named_modules() if "given" in m.__dict__}
        present = {_NUMBER.sub("#", f"{name}.{p}") for name, found in given.items() for p in found.present}
        bearers = Counter(found.prefix for found in given.values())
        for name, found in sorted(given.items()):
            parts = [p for p in found.absent if _NUMBER.sub("#", f"{name}.{p}") in present]
            if parts:
                # Two encoders may have a layer of this name; their own names come first in the model.
                encoder = f"{name.split('.', 1)[0]}: " if bearers[found.prefix] > 1 else ""
                layer = found.prefix.removesuffix(".")
                sentences.append(f"{encoder}{layer}: the file has no {' and no '.join(parts)} for it")
    return sentences


def _unset(models: Sequence[Any]) -> list[str]:
    """Parameters that the file lacks, but for weights of linears: some are made for a result that no model reads, and
    one that is read says so when it is called.
    """
    return [
        f"{name}.{part}"
        for model in models
        for name, module in model.named_modules()
        for part in module.__dict__.get("given", ("", (), ()))[2]
        if part != "weight" or not hasattr(module, "has_bias")
    ]


def verify(
    declared: Sequence[tuple[str, LayerSpec]],
    context: LoadContext,
    models: Sequence[Any],
    names: Collection[str] = frozenset(),
) -> None:
    """Every declared layer must have become a layer of the model, with its shape; all exceptions at once.

    ``declared``: the first file of a layer's checkpoint, and the layer. ``models``: the modules that were built.
    ``names``: of the tensors that the model was made of.

    Raises:
        ModelMismatch: names up to eight layers that disagree, with the file where there are several.
    """
    files = list(dict.fromkeys(file for file, _ in declared))

    def named(file: str, name: str) -> str:
        return f"{Path(file).name}: {name}" if len(files) > 1 else name

    problems = [f"{named(*key)}: {sentence}" for key, sentence in context.mismatches.items()]
    for file, spec in declared:
        key = (file, spec.name)
        if key in context.consumed or key in context.mismatches:
            continue
        if key in context.rearranged:
            context.dequantised[spec.name] = "ComfyUI rearranges this layer while loading; dequantised"
        else:
            problems.append(f"{named(*key)}: the model has no such layer")
    _note_bare(models, context, names)
    absent = _absent(models) if context.incomplete else []
    problems += absent
    of = "" if absent else f"of {len(declared)} quantised "
    if problems:
        disagree = "layer disagrees" if len(problems) == 1 and not of else "layers disagree"
        shown = "\n".join(f"- {p}" for p in problems[:8])
        more = f"\n(and {len(problems) - 8} more)" if len(problems) > 8 else ""
        fit = "does not fit" if len(files) == 1 else "do not fit"
        raise ModelMismatch(
            f"{', '.join(Path(file).name for file in files)} {fit} the model that ComfyUI recognised: "
            f"{len(problems)} {of}{disagree}.\n{shown}{more}\n"
            "The file is incomplete, was made for another version of this model, or with a tool that renamed or "
            "repacked layers; download it again or convert it again from the original."
        )
    unset = _unset(models) if context.incomplete else []
    if unset:
        more = f" and {len(unset) - 4} more" if len(unset) > 4 else ""
        sentence = (
            f"The file has no {', '.join(unset[:4])}{more}, which the model that ComfyUI recognised has; they are left "
            "at zero or unset. If the picture is wrong or the run stops, this is why: download the file again."
        )
        context.warnings.append(sentence)
        log.warning("Quant Loader: %s", sentence)
    for name, why in context.dequantised.items():
        log.info("Quant Loader: %s: %s", name, why)
