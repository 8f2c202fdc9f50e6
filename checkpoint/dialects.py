"""What ``rules = compatible`` understands beyond the standard declarations, and why each is certain
(``docs/dialects.md``).
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from .declarations import Declaration, Declarations
from .dtypes import count
from .files import Checkpoint
from .findings import Findings
from .header import TensorInfo
from .layer import DENSE_SUFFIXES
from .words import clean

MODEL_PREFIXES = (
    "model.diffusion_model.",
    "diffusion_model.",
    "model.",
    "transformer.",
    "net.",
    "unet.",
    "text_encoders.",
    "cond_stage_model.",
    "first_stage_model.",
    "vae.",
)
"""Outer prefixes that savers put before a model's own layer names."""

_LEGACY_NAMES = {"weight_scale": "scale_weight", "input_scale": "scale_input"}
_MAX_SECTIONS = 64
"""Sections of a layer name that are looked at: hostile names have thousands."""
FP8_DTYPES = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}


def apply(checkpoint: Checkpoint, declared: Declarations, findings: Findings) -> None:
    """Rewrite ``declared`` in place."""
    declared.legacy_prefixes = legacy_prefixes(checkpoint.tensors)
    _metadata_prefix(checkpoint.tensors, declared, findings)
    _legacy_scaled_fp8(checkpoint.tensors, declared, findings)
    _int8_fast(checkpoint.tensors, declared, findings)


def _metadata_prefix(tensors: Mapping[str, TensorInfo], declared: Declarations, findings: Findings) -> None:
    """Metadata names without (or with) the model prefix: certain when one prefix, the same for all, gives every one its
    weight.
    """
    lost = [
        prefix for prefix in declared.from_metadata if prefix in declared.layers and f"{prefix}.weight" not in tensors
    ]
    if not lost:
        return
    choices: dict[str, list[str]] = {}
    for outer in MODEL_PREFIXES:
        if all(f"{outer}{prefix}.weight" in tensors for prefix in lost):
            choices[f"adding {outer}"] = [outer + prefix for prefix in lost]
        if all(prefix.startswith(outer) and f"{prefix[len(outer) :]}.weight" in tensors for prefix in lost):
            choices[f"removing {outer}"] = [prefix[len(outer) :] for prefix in lost]
    if len(choices) != 1:
        return
    how, targets = next(iter(choices.items()))
    if any(target in declared.layers or target in declared.broken for target in targets):
        return
    note = f"metadata names matched {len(lost)}/{len(lost)} after {how}"
    for prefix, target in zip(lost, targets, strict=True):
        old = declared.layers.pop(prefix)
        declared.layers[target] = Declaration(target, old.conf, old.by, old.where, (*old.notes, note))
    findings.add("extra.dialect.file", found=note[0].upper() + note[1:].removesuffix("."), variant="prefix")


def legacy_prefixes(tensors: Mapping[str, TensorInfo]) -> list[str]:
    """What stands before every ``scaled_fp8`` tensor: the parts of the file that are legacy scaled FP8."""
    name = "scaled_fp8"
    return [flag.removesuffix(name) for flag in tensors if flag == name or flag.endswith(f".{name}")]


def _legacy_scaled_fp8(tensors: Mapping[str, TensorInfo], declared: Declarations, findings: Findings) -> None:
    """A ``scaled_fp8`` tensor declares every F8 layer below it that has a ``scale_weight``; two elements ask for full
    precision.
    """
    outers = set(declared.legacy_prefixes)
    if not outers:
        return
    found: dict[str, int] = {}
    for name in tensors:
        if not name.endswith(".scale_weight"):
            continue
        prefix = name.removesuffix(".scale_weight")
        weight = tensors.get(f"{prefix}.weight")
        outer = _section_of(prefix, outers)
        if outer is None or weight is None or weight.dtype not in FP8_DTYPES:
            continue
        if prefix in declared.layers or prefix in declared.broken:
            continue
        conf: dict[str, object] = {"format": FP8_DTYPES[weight.dtype]}
        if count(tensors[f"{outer}scaled_fp8"].shape) == 2:
            conf["full_precision_matrix_mult"] = True
        where = f"the tensor {clean(outer)}scaled_fp8"
        notes = ("legacy scaled_fp8 file",)
        declared.layers[prefix] = Declaration(prefix, conf, "inferred", where, notes, _LEGACY_NAMES)
        found[outer] = found.get(outer, 0) + 1
    for layers in found.values():
        findings.add(
            "extra.dialect.file",
            found=f"Legacy scaled_fp8 file: {layers} layers with scale_weight",
            variant="scaled_fp8",
        )


def _section_of(prefix: str, outers: Set[str]) -> str | None:
    """The innermost of ``outers`` (``""``, or ending in a dot) that the layer lies in."""
    end = len(prefix)
    for _ in range(_MAX_SECTIONS):
        end = prefix.rfind(".", 0, end)
        if end < 0:
            break
        if prefix[: end + 1] in outers:
            return prefix[: end + 1]
    return "" if "" in outers else None


def _int8_fast(tensors: Mapping[str, TensorInfo], declared: Declarations, findings: Findings) -> None:
    """Markers that say only ``convrot``: the dialect of a retired loader, which had one format and one group size."""
    for prefix, declaration in declared.layers.items():
        conf = declaration.conf
        if "format" in conf or conf.get("convrot") is not True or set(conf) - {"convrot", "convrot_groupsize"}:
            continue
        weight, scale = tensors.get(f"{prefix}.weight"), tensors.get(f"{prefix}.weight_scale")
        if weight is None or scale is None or weight.dtype != "I8" or len(weight.shape) != 2:
            continue
        note = "marker without format, as the retired INT8-Fast loader wrote them: int8_tensorwise with ConvRot 256"
        declaration.conf = {"format": "int8_tensorwise", "convrot_groupsize": 256, **conf}
        declaration.notes = (*declaration.notes, note)
        findings.add("extra.dialect", layer=prefix, found=note, variant="int8-fast")


def plain_storage(parts: Mapping[str, Mapping[str, TensorInfo]], bare: list[str], declared: Declarations) -> list[str]:
    """Which of the undeclared (``bare``) 8-bit weights are floats used as plain storage.

    Either the file has no scale and no declaration anywhere, and nothing but F8 among the weights in question; or a
    weight of a legacy ``scaled_fp8`` part has no scale of its own: that tool stored one for every weight that it had
    scaled.
    """
    if any(declaration.aliases is _LEGACY_NAMES for declaration in declared.layers.values()):
        outers = set(declared.legacy_prefixes)
        return [name for name in bare if _section_of(name, outers) is not None and _lone_f8(parts[name])]
    if (
        declared.layers
        or declared.broken
        or declared.metadata_broken
        or declared.global_mxfp8
        or declared.legacy_prefixes
    ):
        return []
    if any(parts[name]["weight"].dtype not in FP8_DTYPES for name in bare) or any(
        own.keys() - DENSE_SUFFIXES for own in parts.values()
    ):
        return []
    return bare


def _lone_f8(parts: Mapping[str, TensorInfo]) -> bool:
    return parts.keys() <= DENSE_SUFFIXES and parts["weight"].dtype in FP8_DTYPES
