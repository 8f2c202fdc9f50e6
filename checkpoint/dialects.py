"""What ``rules = compatible`` understands beyond the standard declarations, and why each is certain
(``docs/dialects.md``).
"""

from __future__ import annotations

from collections.abc import Mapping

from .declarations import Declaration, Declarations
from .files import Checkpoint
from .findings import Findings
from .header import TensorInfo
from .layer import SCALE_SUFFIXES
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

FP8_DTYPES = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}


def apply(checkpoint: Checkpoint, declared: Declarations, findings: Findings) -> None:
    """Rewrite ``declared`` in place."""
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


def _legacy_scaled_fp8(tensors: Mapping[str, TensorInfo], declared: Declarations, findings: Findings) -> None:
    """A ``scaled_fp8`` tensor declares every F8 layer below it that has a ``scale_weight``; two elements ask for full
    precision.
    """
    flags = [name for name in tensors if name == "scaled_fp8" or name.endswith(".scaled_fp8")]
    for flag in flags:
        outer = flag[: -len("scaled_fp8")]
        elements = 1
        for dim in tensors[flag].shape:
            elements *= dim
        found = 0
        for name, scale in tensors.items():
            if not name.startswith(outer) or not name.endswith(".scale_weight"):
                continue
            prefix = name[: -len(".scale_weight")]
            weight = tensors.get(f"{prefix}.weight")
            if (
                weight is None
                or weight.dtype not in FP8_DTYPES
                or prefix in declared.layers
                or prefix in declared.broken
            ):
                continue
            conf: dict[str, object] = {"format": FP8_DTYPES[weight.dtype]}
            if elements == 2:
                conf["full_precision_matrix_mult"] = True
            declared.layers[prefix] = Declaration(
                prefix,
                conf,
                "inferred",
                f"the tensor {clean(flag)}",
                ("legacy scaled_fp8 file",),
                {"weight_scale": "scale_weight", "input_scale": "scale_input"},
            )
            found += 1
            del scale
        if found:
            findings.add(
                "extra.dialect.file",
                found=f"Legacy scaled_fp8 file: {found} layers with scale_weight",
                variant="scaled_fp8",
            )


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


def plain_storage(tensors: Mapping[str, TensorInfo], declared: Declarations) -> list[str]:
    """F8 weights of a file that has neither a scale nor a declaration anywhere: 8-bit floats as plain storage."""
    if declared.layers or declared.broken or declared.metadata_broken or declared.global_mxfp8:
        return []
    weights = [
        name for name, tensor in tensors.items() if name.endswith(".weight") and tensor.dtype in ("F8_E4M3", "I8", "U8")
    ]
    if not weights or any(tensors[name].dtype != "F8_E4M3" for name in weights):
        return []
    ends = tuple(f".{suffix}" for suffix in SCALE_SUFFIXES) + ("scaled_fp8",)
    return [] if any(name.endswith(ends) for name in tensors) else weights
