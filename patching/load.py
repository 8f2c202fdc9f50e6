"""From a file to a ComfyUI model: check, read, pack, build, verify. Nothing is left behind when a step fails."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..checkpoint import Report, check, verdict_text
from . import host
from .errors import CheckpointRefused, QuantLoaderError

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
    from .progress import Progress
    from .state_dict import fold, read, verify, without_quantisation

    paths = list(report.files)
    sd, metadata = read(paths)
    options: dict[str, Any] = {}
    progress = Progress(2 * len(report.layers))
    context = LoadContext(execution, progress)
    if report.verdict != "unquantized":
        sd = fold(sd, report.layers, step=progress.step)
        options["custom_operations"] = operations(context)
        metadata = without_quantisation(metadata)
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
    progress.finish()
    patcher.cached_patcher_init = (reload_diffusion_model, (paths, rules, execution))
    return patcher, report


def reload_diffusion_model(paths: Sequence[str], rules: str, execution: str, disable_dynamic: bool = False) -> Any:
    """What ComfyUI calls to build a dropped model again; the file is checked again, since it may have changed."""
    return load_diffusion_model(paths, rules, execution, disable_dynamic)[0]


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


def load_text_encoder(
    paths: Sequence[str | Path],
    clip_type: str,
    rules: str = "strict",
    execution: str = "auto",
    embedding_directory: Any = None,
    disable_dynamic: bool = False,
) -> tuple[Any, list[Report]]:
    """A CLIP of one to four encoder files (each one a checkpoint of its own), and a report per file.

    ``clip_type`` is a name of the stock CLIP loaders (``flux``, ``sd3``, ...). Quantised linears run on our kernels;
    ComfyUI's own loader dequantises them on every call.
    """
    host.require()
    reports = [checked([p], rules) for p in paths]
    import comfy.model_management
    import comfy.sd

    from .ops import LoadContext, operations
    from .patcher import adopt
    from .state_dict import fold, read, verify

    kind = getattr(comfy.sd.CLIPType, clip_type.upper(), comfy.sd.CLIPType.STABLE_DIFFUSION)
    context = LoadContext(execution)
    layers = [layer for report in reports for layer in report.layers]
    state_dicts = [fold(read(list(report.files))[0], report.layers) for report in reports]
    # The encoder is built on the CPU: our patcher takes over before ComfyUI puts it on a device.
    options: dict[str, Any] = {"initial_device": comfy.model_management.text_encoder_offload_device()}
    if layers:
        options["custom_operations"] = operations(context)
    clip = comfy.sd.load_text_encoder_state_dicts(
        state_dicts,
        embedding_directory=embedding_directory,
        clip_type=kind,
        model_options=options,
        disable_dynamic=disable_dynamic,
    )
    files = [file for report in reports for file in report.files]
    if layers:
        verify(layers, context, files)
        clip.patcher = adopt(clip.patcher)
    arguments = ([str(p) for p in paths], clip_type, rules, execution, embedding_directory)
    clip.patcher.cached_patcher_init = (reload_text_encoder, arguments)
    return clip, reports


def reload_text_encoder(
    paths: Sequence[str],
    clip_type: str,
    rules: str,
    execution: str,
    embedding_directory: Any,
    disable_dynamic: bool = False,
) -> Any:
    """What ComfyUI calls to build a dropped text encoder again."""
    return load_text_encoder(paths, clip_type, rules, execution, embedding_directory, disable_dynamic)[0].patcher


def load_checkpoint(
    paths: Sequence[str | Path],
    rules: str = "strict",
    execution: str = "auto",
    embedding_directory: Any = None,
    output_vae: bool = True,
    output_clip: bool = True,
    disable_dynamic: bool = False,
) -> tuple[Any, Any, Any, Report]:
    """Model, CLIP, VAE and report of a full checkpoint; what the file does not hold is None.

    The VAE's quantised layers are dequantised while loading: it is small, and ComfyUI builds it without custom
    operations.
    """
    host.require()
    report = checked(paths, rules)
    import comfy.model_detection
    import comfy.sd

    from .ops import LoadContext, operations
    from .patcher import adopt
    from .state_dict import fold, read, verify, without_quantisation

    files = list(report.files)
    sd, metadata = read(files)
    context = LoadContext(execution)
    vae_layers = [s for s in report.layers if s.name.startswith(VAE_PREFIXES)]
    packed_layers = [s for s in report.layers if not s.name.startswith(VAE_PREFIXES)]
    model_options: dict[str, Any] = {}
    te_options: dict[str, Any] = {}
    if report.verdict != "unquantized":
        sd = fold(sd, report.layers, dense=lambda name: name.startswith(VAE_PREFIXES))
        metadata = without_quantisation(metadata)
        model_options = {"custom_operations": operations(context)}
        te_options = {"custom_operations": operations(context)}
        for spec in vae_layers:
            context.dequantised[spec.name] = "part of the VAE; dequantised while loading"
    prefix = comfy.model_detection.unet_prefix_from_state_dict(sd)
    if comfy.model_detection.model_config_from_unet(sd, prefix, metadata=metadata) is None:
        raise QuantLoaderError(
            f"{Path(files[0]).name} is no full checkpoint that ComfyUI knows: no model family has these layers. "
            "If it holds a diffusion model alone, move it to models/diffusion_models and use "
            "Load Quantized Diffusion Model."
        )
    model, clip, vae, _ = comfy.sd.load_state_dict_guess_config(
        sd,
        output_vae=output_vae,
        output_clip=output_clip,
        embedding_directory=embedding_directory,
        model_options=model_options,
        te_model_options=te_options,
        metadata=metadata,
        disable_dynamic=disable_dynamic,
    )
    if packed_layers:
        # An encoder that was not asked for leaves its layers unconsumed; that is no fault of the file.
        wanted = (
            packed_layers
            if output_clip and clip is not None
            else [s for s in packed_layers if s.name.startswith(prefix)]
        )
        verify(wanted, context, files)
        model = adopt(model)
        if clip is not None:
            clip.patcher = adopt(clip.patcher)
    arguments = (files, rules, execution, embedding_directory)
    model.cached_patcher_init = (reload_checkpoint_model, arguments)
    if clip is not None:
        clip.patcher.cached_patcher_init = (reload_checkpoint_clip, arguments)
    if vae is not None and getattr(vae, "patcher", None) is not None:
        vae.patcher.cached_patcher_init = (reload_checkpoint_vae, arguments)
    return model, clip, vae, report


# Where full checkpoints keep their VAE.
VAE_PREFIXES = ("first_stage_model.", "vae.")


def reload_checkpoint_model(
    paths: Sequence[str], rules: str, execution: str, embedding_directory: Any, disable_dynamic: bool = False
) -> Any:
    """What ComfyUI calls to build a dropped model again."""
    return load_checkpoint(paths, rules, execution, embedding_directory, False, False, disable_dynamic)[0]


def reload_checkpoint_clip(
    paths: Sequence[str], rules: str, execution: str, embedding_directory: Any, disable_dynamic: bool = False
) -> Any:
    """What ComfyUI calls to build a dropped text encoder again."""
    return load_checkpoint(paths, rules, execution, embedding_directory, False, True, disable_dynamic)[1].patcher


def reload_checkpoint_vae(
    paths: Sequence[str], rules: str, execution: str, embedding_directory: Any, disable_dynamic: bool = False
) -> Any:
    """What ComfyUI calls to build a dropped VAE again."""
    return load_checkpoint(paths, rules, execution, embedding_directory, True, False, disable_dynamic)[2].patcher


def load_controlnet(paths: Sequence[str | Path], rules: str = "strict", execution: str = "auto") -> tuple[Any, Report]:
    """A ControlNet (or T2I adapter) and the report of its check."""
    host.require()
    report = checked(paths, rules)
    import comfy.controlnet

    from .ops import LoadContext, operations
    from .patcher import adopt
    from .state_dict import fold, read, verify

    files = list(report.files)
    sd, _ = read(files)
    context = LoadContext(execution)
    options: dict[str, Any] = {}
    if report.verdict != "unquantized":
        sd = fold(sd, report.layers)
        options["custom_operations"] = operations(context)
    if Path(files[0]).stem.endswith(("_shuffle", "_shuffle_fp16")):
        options["global_average_pooling"] = True
    controlnet = comfy.controlnet.load_controlnet_state_dict(sd, model_options=options)
    if controlnet is None:
        raise QuantLoaderError(
            f"{Path(files[0]).name} holds no ControlNet or T2I adapter that ComfyUI knows. "
            "Is it in the right folder, and is this ComfyUI new enough for it?"
        )
    if report.verdict != "unquantized":
        verify(report.layers, context, files)
        wrapped = getattr(controlnet, "control_model_wrapped", None)
        if wrapped is not None:
            controlnet.control_model_wrapped = adopt(wrapped)
    return controlnet, report
