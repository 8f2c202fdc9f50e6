"""From a file to a ComfyUI model: check, read, pack, build, verify. Nothing is left behind when a step fails."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import LayerSpec, Report, check, verdict_text
from . import host
from .errors import CheckpointRefused, ModelMismatch, QuantLoaderError

log = logging.getLogger("quant_loader")

EXECUTIONS = ("auto", "native", "int8", "exact")


def checked(paths: Sequence[str | Path], rules: str = "strict") -> Report:
    """The report of a checkpoint that may be loaded; raises :class:`CheckpointRefused` otherwise."""
    report = check([str(p) for p in paths], rules=rules)
    if report.verdict == "refused":
        raise CheckpointRefused(verdict_text(report), report)
    return report


def load_diffusion_model(
    paths: Sequence[str | Path], rules: str = "strict", execution: str = "auto", disable_dynamic: bool = False
) -> tuple[Any, Report]:
    """A ModelPatcher for the diffusion model in ``paths`` (one file, or all shards), and the report of its check.

    Raises :class:`CheckpointRefused` before any weight is read, :class:`ModelMismatch` when the file's layers are not
    the model's, :class:`HostError` when this ComfyUI is too old.
    """
    host.require()
    report = checked(paths, rules)
    import comfy.sd

    from .ops import LoadContext, operations
    from .patcher import adopt

    paths = [str(p) for p in paths]
    sd, metadata = read(paths)
    options: dict[str, Any] = {}
    context = LoadContext(execution)
    if report.verdict != "unquantized":
        sd = fold(sd, report.layers)
        options["custom_operations"] = operations(context)
        metadata = {k: v for k, v in metadata.items() if k not in QUANTISATION_KEYS}
    patcher = comfy.sd.load_diffusion_model_state_dict(
        sd, model_options=options, metadata=metadata, disable_dynamic=disable_dynamic
    )
    if patcher is None:
        raise QuantLoaderError(
            f"ComfyUI does not know the model in {Path(paths[0]).name}: none of its model families has these layers. "
            "Is it a diffusion model (and not a text encoder, VAE or LoRA), and is this ComfyUI new enough for it?"
        )
    if report.verdict != "unquantized":
        verify(report.layers, context, paths)
        patcher = adopt(patcher)
    patcher.cached_patcher_init = (reload_diffusion_model, (paths, rules, execution))
    return patcher, report


def reload_diffusion_model(
    paths: Sequence[str], rules: str, execution: str, disable_dynamic: bool = False
) -> Any:
    """What ComfyUI calls to build a dropped model again; the file is checked again, since it may have changed."""
    return load_diffusion_model(paths, rules, execution, disable_dynamic)[0]


# File metadata that speaks of the quantisation; the model's own detection must not act on it a second time.
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


def fold(sd: dict[str, torch.Tensor], layers: Sequence[LayerSpec]) -> dict[str, Any]:
    """``sd`` with every quantised layer's tensors folded into one packed ``<name>.weight`` of logical shape.

    Architecture detection then sees logical shapes, and no scale or marker is left over for ComfyUI to drop.
    """
    from .packed import pack

    out: dict[str, Any] = dict(sd)
    dtype = _float_dtype(out, layers)
    for spec in layers:
        tensors = {suffix: out.pop(name) for suffix, name in spec.tensors.items() if name in out}
        marker = out.pop(f"{_stem(spec)}.comfy_quant", None)
        raw = bytes(marker.contiguous().view(torch.uint8).numpy().tobytes()) if marker is not None else None
        out[f"{spec.name}.weight"] = pack(spec, tensors, dtype, raw)
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


def verify(layers: Sequence[LayerSpec], context: Any, paths: Sequence[str]) -> None:
    """Every declared layer must have become a layer of the model, with its shape; all exceptions at once."""
    problems = list(context.mismatches)
    mismatched = {text.split(":", 1)[0] for text in problems}
    missing = [s.name for s in layers if s.name not in context.consumed and s.name not in mismatched]
    problems += [f"{name}: the model has no such layer" for name in missing]
    if problems:
        shown = "\n".join(f"- {p}" for p in problems[:8])
        more = f"\n(and {len(problems) - 8} more)" if len(problems) > 8 else ""
        raise ModelMismatch(
            f"{Path(paths[0]).name} does not fit the model that ComfyUI recognised in it: "
            f"{len(problems)} of {len(layers)} quantised layers disagree.\n{shown}{more}\n"
            "The file was made for another version of this model, or with a tool that renamed or repacked layers; "
            "download it again or convert it again from the original."
        )
    for name, why in context.dequantised.items():
        log.info("Quant Loader: %s: %s", name, why)


def report_text(report: Report, patcher: Any, execution: str) -> str:
    """What a load is answered with on the node's STRING output."""
    from .kernel_report import plan_lines

    lines = [report.summary]
    lines += [f"{count} layers {fmt}" for fmt, count in sorted(report.formats.items())]
    if report.verdict != "unquantized":
        lines += [f"execution: {execution}", *plan_lines(patcher)]
    lines += [f"{f.severity}: {f.message}" for f in report.faults if f.severity != "error"][:20]
    return "\n".join(lines)


def report_json(report: Report) -> str:
    """The check's report as JSON text."""
    return json.dumps(report.to_dict(), ensure_ascii=False)
