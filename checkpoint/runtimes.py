"""What another runtime would say to a sound file: the later stages of the reference (resolve, config, bind), as notices
only.

Two versions of sglang's diffusion runtime are modelled: ``seed`` (0.5.19, whose inspector our strict rules follow) and
``latest`` (0.5.23). Its limits are not ours: mixed formats, plain INT8 linears and unrotated W4A8 markers are fine
here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .layer import coerced_int
from .words import clean, show

Profile = Literal["seed", "latest"]
VERSIONS: dict[Profile, str] = {"seed": "0.5.19", "latest": "0.5.23"}
_GROUPS = (16, 64, 256)
_INT8, _W4A4, _W4A8, _FP8, _NVFP4, _MXFP8 = (
    "int8_tensorwise",
    "convrot_w4a4",
    "asym_w4a8_int8",
    "float8_e4m3fn",
    "nvfp4",
    "mxfp8",
)
_RESOLVED: dict[frozenset[str], str] = {
    frozenset(): "none",
    frozenset({_INT8}): "int8",
    frozenset({_W4A8}): "w4a8",
    frozenset({_W4A8, _INT8}): "w4a8",
    frozenset({_W4A4}): "w4a4",
    frozenset({_W4A4, _INT8}): "w4a4",
    frozenset({_FP8}): "fp8",
    frozenset({_NVFP4}): "nvfp4",
    frozenset({_NVFP4, _INT8}): "nvfp4",
    frozenset({_MXFP8}): "mxfp8",
}


@dataclass(frozen=True)
class Platform:
    """A device kind (``cuda``, ``mps``, ``cpu``, ...) and its CUDA compute capability as ten times major.minor, if
    known.
    """

    kind: str = "cuda"
    cc: int | None = 100


@dataclass(frozen=True)
class Outcome:
    """How far a file gets: ``resolved`` names the runtime's scheme, ``rule`` the refusal (None: it loads), ``layer``
    where.
    """

    resolved: str
    stage: Literal["resolve", "config", "bind"] | None = None
    rule: str | None = None
    layer: str | None = None
    reason: str = ""


def later_stages(
    markers: Mapping[str, Mapping[str, Any]],
    weight_shapes: Mapping[str, Sequence[int]],
    platform: Platform = Platform(),
    profile: Profile = "seed",
) -> Outcome:
    """Run the later stages on accepted markers (layer -> declaration with the reference's underscored annotations).

    ``weight_shapes`` are the stored weights, packed where the format packs.
    """
    formats = frozenset(str(marker.get("format")) for marker in markers.values())
    resolved = _RESOLVED.get(formats)
    if resolved is None:
        return Outcome(
            "unsupported",
            "resolve",
            "resolve.unsupported",
            None,
            f"it does not mix {', '.join(sorted(clean(f, 40) for f in formats))}",
        )
    outcome = _device(resolved, platform)
    if outcome is not None:
        return outcome
    for name, marker in markers.items():
        found = _config(resolved, marker, profile)
        if found is not None:
            return Outcome(resolved, "config", found[0], name, found[1])
    for name, marker in markers.items():
        found = _bind(resolved, marker, weight_shapes.get(name, ()), platform, profile)
        if found is not None:
            return Outcome(resolved, "bind", found[0], name, found[1])
    return Outcome(resolved)


def _device(resolved: str, platform: Platform) -> Outcome | None:
    if platform.kind == "mps" and resolved in ("w4a4", "w4a8", "mxfp8"):
        return Outcome(resolved, "config", f"cfg.{resolved}.mps", None, f"it does not run {resolved} on Apple GPUs")
    least = {"w4a4": 75, "w4a8": 80}.get(resolved)
    if least is not None and platform.kind == "cuda" and platform.cc is not None and platform.cc < least:
        reason = f"it runs {resolved} from compute capability {least / 10} only"
        return Outcome(resolved, "config", f"cfg.{resolved}.capability", None, reason)
    return None


def _is_embedding(marker: Mapping[str, Any]) -> bool:
    return not marker.get("convrot")


def _config(resolved: str, marker: Mapping[str, Any], profile: Profile) -> tuple[str, str] | None:
    kind = marker.get("format")
    if kind == _INT8 and resolved in ("int8", "w4a4"):
        return _int8(marker, profile)
    if kind == _W4A4:
        value = str(marker.get("linear_dtype", "int4"))
        if value not in ("int4", "int8"):
            return "cfg.w4a4.linear_dtype", f"it does not know linear_dtype {show(value)}"
    if resolved == "w4a8":
        if kind == _W4A8:
            if marker.get("convrot") is not True:
                return "cfg.w4a8.convrot_flag", "it wants convrot: true in W4A8 declarations (ComfyUI never writes it)"
        elif (profile == "seed" and not marker.get("_is_tensorwise_scalar")) or (
            profile == "latest" and not _is_embedding(marker)
        ):
            return "cfg.w4a8.companion", "it runs INT8 layers beside W4A8 ones only as embedding tables"
    if resolved == "nvfp4":
        if kind == _NVFP4:
            if profile == "seed" and marker.get("full_precision_matrix_mult") is not True:
                return "cfg.nvfp4.full_precision", "it wants full_precision_matrix_mult: true in NVFP4 declarations"
            if profile == "latest" and marker.get("convrot"):
                return "cfg.nvfp4.convrot", "it does not rotate NVFP4 layers"
        elif (profile == "seed" and not marker.get("_is_rowwise")) or (
            profile == "latest" and not _is_embedding(marker)
        ):
            return "cfg.nvfp4.companion", "it runs INT8 layers beside NVFP4 ones only as embedding tables"
    return None


def _int8(marker: Mapping[str, Any], profile: Profile) -> tuple[str, str] | None:
    if profile == "latest" and _is_embedding(marker):
        return None
    if marker.get("convrot") is not True:
        return "cfg.int8.convrot_flag", "it runs INT8 layers only with ConvRot"
    size = marker.get("convrot_groupsize")
    if isinstance(size, (list, dict)) or size not in _GROUPS:
        return "cfg.int8.groupsize", "it wants convrot_groupsize 16, 64 or 256 written out in every INT8 declaration"
    return None


def _bind(
    resolved: str, marker: Mapping[str, Any], shape: Sequence[int], platform: Platform, profile: Profile
) -> tuple[str, str] | None:
    kind = marker.get("format")
    if len(shape) != 2:
        return None
    if kind == _INT8 and marker.get("convrot") is True and resolved in ("int8", "w4a4"):
        size = coerced_int(marker.get("convrot_groupsize"))
        if size and shape[1] % size:
            return "bind.int8.input_size", f"{shape[1]} inputs are no multiple of the rotation group {size}"
    if kind == _W4A8:
        return _bind_w4a8(marker, 2 * shape[1])
    dynamic = kind == _NVFP4 and profile == "latest" and marker.get("full_precision_matrix_mult") is not True
    if dynamic and (platform.kind != "cuda" or platform.cc is None or platform.cc < 100):
        return "bind.nvfp4.capability", "it runs NVFP4 with quantised activations from compute capability 10.0 only"
    return None


def _bind_w4a8(marker: Mapping[str, Any], k: int) -> tuple[str, str] | None:
    group, rotation = coerced_int(marker.get("group_size", 16)), coerced_int(marker.get("convrot_groupsize", 256))
    if rotation is None or group is None:
        return "crash.bind.groupsize", "it crashes on a rotation size that is no number"
    if group < 4 or (16 % group and group % 16) or k % 16 or k % group:
        return "bind.w4a8.input_size", f"{k} inputs do not fit groups of {group}"
    if rotation == 0:
        return "crash.bind.w4a8", "it divides by the rotation size 0"
    if k % rotation:
        return "bind.w4a8.input_size", f"{k} inputs do not fit rotation groups of {rotation}"
    return None


def notices(
    markers: Mapping[str, Mapping[str, Any]], weight_shapes: Mapping[str, Sequence[int]]
) -> list[tuple[str, str, str | None]]:
    """``(rule, words, layer)`` for every version that would refuse the file on a current GPU; one entry when both say
    the same.
    """
    seed = later_stages(markers, weight_shapes, profile="seed")
    latest = later_stages(markers, weight_shapes, profile="latest")
    if seed.rule is not None and seed.rule == latest.rule:
        return [(seed.rule, f"{seed.reason} ({seed.rule})", latest.layer)]
    found = []
    for outcome, version, other in ((seed, VERSIONS["seed"], latest), (latest, VERSIONS["latest"], seed)):
        if outcome.rule is not None:
            also = ", the other version accepts it" if other.rule is None else ""
            found.append((outcome.rule, f"version {version}: {outcome.reason} ({outcome.rule}{also})", outcome.layer))
    return found
