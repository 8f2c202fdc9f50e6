"""From a file to a ComfyUI model: check, read, pack, build, verify. Nothing is left behind when a step fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..checkpoint import LayerSpec, Report, check, verdict_text
from . import host
from .errors import CheckpointRefused, ModelMismatch, QuantLoaderError

if TYPE_CHECKING:
    from ..kernels import Mode

EXECUTIONS = ("auto", "native", "int8", "exact")

# Where full checkpoints keep their VAE.
VAE_PREFIXES = ("first_stage_model.", "vae.")

Paths = Sequence[str | Path]


def checked(paths: Paths, rules: str = "strict") -> Report:
    """The report of a checkpoint that may be loaded; raises :class:`CheckpointRefused` otherwise."""
    report = check([str(p) for p in paths], rules="compatible" if rules == "compatible" else "strict")
    if report.verdict == "refused":
        raise CheckpointRefused(verdict_text(report), report)
    return report


@dataclass
class _Source:
    """Checked files, read and folded: what a loader of ComfyUI is given."""

    reports: list[Report]
    state_dicts: list[dict[str, Any]]
    metadata: dict[str, str]
    context: Any
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def report(self) -> Report:
        return self.reports[0]

    @property
    def files(self) -> list[str]:
        return [file for report in self.reports for file in report.files]

    @property
    def layers(self) -> list[LayerSpec]:
        return [layer for report in self.reports for layer in report.layers]

    def build(self, load: Callable[[], Any]) -> Any:
        """Run ComfyUI's loader, and note which layers it took apart on the way."""
        from .packed import rearranged

        with rearranged(self.context.rearranged):
            try:
                return load()
            except RuntimeError as error:
                if "loading state_dict" not in str(error):
                    raise
                names = ", ".join(Path(file).name for file in self.files)
                raise ModelMismatch(
                    f"{names} does not fit the model that ComfyUI recognised.\n{error}\nThe file was made for another "
                    "version of this model, or is damaged; download it again or convert it again from the original."
                ) from error
            except (KeyError, IndexError, UnboundLocalError, AttributeError, TypeError) as error:
                # How ComfyUI's detection of models fails where it looks for a tensor that is not there.
                raise ModelMismatch(self._unrecognised(error)) from error

    def _unrecognised(self, error: Exception) -> str:
        from .state_dict import gaps

        names = ", ".join(Path(file).name for file in self.files)
        missing = [name for sd in self.state_dicts for name in gaps(sd)]
        listed = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        why = f"the file has no {listed}, which other blocks have" if missing else f"{type(error).__name__}: {error}"
        return (
            f"ComfyUI cannot make a model of {names}: {why}. The file is incomplete, or of a kind that this ComfyUI "
            "does not know; download it again, or update ComfyUI."
        )

    def verify(self, *models: Any, among: Callable[[LayerSpec], bool] | None = None) -> None:
        """Raise when a quantised layer of the files did not become a layer of ``models``, or these lack one.

        ``among(layer)`` says which of the files' layers should be there; all without it.
        """
        from .state_dict import verify

        if self.layers:
            declared = [(report.files[0], layer) for report in self.reports for layer in report.layers]
            names = {name for sd in self.state_dicts for name in sd}
            verify([d for d in declared if among is None or among(d[1])], self.context, models, names)
        self.context.progress.finish()

    def adopt(self, patcher: Any, rebuild: Callable[..., Any], *arguments: Any) -> Any:
        """``patcher`` as one of ours where a layer is quantised; ``rebuild(*arguments)`` makes it anew when dropped."""
        from .patcher import adopt

        if self.layers:
            patcher = adopt(patcher, self.context)
            carry_over(patcher, self.context)
        patcher.cached_patcher_init = (rebuild, arguments)
        return patcher


def carry_over(patcher: Any, context: Any) -> None:
    """Under the ``int8`` execution, replace the weights that the kernels would carry over to INT8 on every call.

    The work is done once, a layer at a time on the patcher's device; the sizes that ComfyUI asks for afterwards are
    those of the INT8 rows. Partial loads, unloading and a rebuild deal with them as with any packed weight: the file is
    read again, and the same rows come out.
    """
    if context.execution != "int8":
        return
    from .patcher import packed_modules
    from .progress import Progress

    modules = [m for m in packed_modules(patcher.model).values() if m.carries(patcher.load_device)]
    if not modules:
        return
    if patcher.loaded_size() > 0:
        # ComfyUI put the model on its device already, and keeps count of bytes that are about to change.
        patcher.detach()
    progress = Progress(len(modules))
    for module in modules:
        progress.step()
        module.carry_over(patcher.load_device)
    patcher.size = 0
    progress.finish()


def _open(
    checkpoints: Sequence[Paths], rules: str, execution: str, dense: Callable[[str], bool] | None = None
) -> _Source:
    """Check every checkpoint, then read all of them. ``dense(name)``: layers to hand over dequantised."""
    host.require()
    reports = [checked(paths, rules) for paths in checkpoints]
    from .ops import LoadContext, operations
    from .progress import Progress
    from .state_dict import fold, read, without_quantisation

    progress = Progress(2 * sum(len(report.layers) for report in reports))
    mode = cast("Mode", execution if execution in EXECUTIONS else "auto")
    source = _Source(reports, [], {}, LoadContext(mode, progress))
    for report in reports:
        sd, metadata = read(list(report.files))
        source.metadata.update(without_quantisation(metadata) if report.layers else metadata)
        source.state_dicts.append(fold(sd, report.layers, dense, progress.step, report.files) if report.layers else sd)
    if source.layers:
        source.options["custom_operations"] = operations(source.context)
    return source


# Diffusion models


def load_diffusion_model(
    paths: Paths, rules: str = "strict", execution: str = "auto", disable_dynamic: bool = False
) -> tuple[Any, Report]:
    """A ModelPatcher for the diffusion model in ``paths`` (one file, or all shards), and the report of its check.

    Raises :class:`CheckpointRefused` before any weight is read, :class:`ModelMismatch` when the file's layers are not
    the model's, :class:`HostError` when this ComfyUI is too old.
    """
    source = _open([paths], rules, execution)
    import comfy.sd

    patcher = source.build(
        lambda: comfy.sd.load_diffusion_model_state_dict(
            source.state_dicts[0],
            model_options=source.options,
            metadata=source.metadata,
            disable_dynamic=disable_dynamic,
        )
    )
    if patcher is None:
        raise QuantLoaderError(
            f"ComfyUI does not know the model in {Path(source.files[0]).name}: none of its model families has these "
            "layers. Is it a diffusion model (and not a text encoder, VAE or LoRA), and is this ComfyUI new enough?"
        )
    source.verify(patcher.model)
    patcher = source.adopt(patcher, reload_diffusion_model, source.files, rules, execution)
    return patcher, source.report


def reload_diffusion_model(paths: Paths, rules: str, execution: str, disable_dynamic: bool = False) -> Any:
    """What ComfyUI calls to build a dropped model again; the file is checked again, since it may have changed."""
    return load_diffusion_model(paths, rules, execution, disable_dynamic)[0]


# Text encoders


def load_text_encoder(
    paths: Paths,
    clip_type: str,
    rules: str = "strict",
    execution: str = "auto",
    embedding_directory: Any = None,
    disable_dynamic: bool = False,
    model_options: dict[str, Any] | None = None,
) -> tuple[Any, list[Report]]:
    """A CLIP of one to four encoder files (each one a checkpoint of its own), and a report per file.

    ``clip_type`` is a name of the stock CLIP loaders (``flux``, ``sd3``, ...). Quantised linears run on our kernels;
    ComfyUI's own loader dequantises them on every call. ``model_options`` as ComfyUI's ``load_clip`` takes them.
    """
    source = _open([[p] for p in paths], rules, execution)
    import comfy.model_management
    import comfy.sd

    # The encoder is built on the CPU: our patcher takes over before ComfyUI puts it on a device.
    offload = comfy.model_management.text_encoder_offload_device()
    options = {"initial_device": offload, **(model_options or {}), **source.options}
    kind = getattr(comfy.sd.CLIPType, clip_type.upper(), comfy.sd.CLIPType.STABLE_DIFFUSION)
    clip = source.build(
        lambda: comfy.sd.load_text_encoder_state_dicts(
            source.state_dicts,
            embedding_directory=embedding_directory,
            clip_type=kind,
            model_options=options,
            disable_dynamic=disable_dynamic,
        )
    )
    source.verify(clip.cond_stage_model)
    arguments = ([str(p) for p in paths], clip_type, rules, execution, embedding_directory, model_options)
    clip.patcher = source.adopt(clip.patcher, reload_text_encoder, *arguments)
    if source.layers:
        from .text_encoder import watched

        clip = watched(clip)
    return clip, source.reports


def reload_text_encoder(
    paths: Paths,
    clip_type: str,
    rules: str,
    execution: str,
    embedding_directory: Any,
    model_options: dict[str, Any] | None,
    disable_dynamic: bool = False,
) -> Any:
    """What ComfyUI calls to build a dropped text encoder again."""
    clip, _ = load_text_encoder(paths, clip_type, rules, execution, embedding_directory, disable_dynamic, model_options)
    return clip.patcher


# Full checkpoints


def load_checkpoint(
    paths: Paths,
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

    def in_vae(name: str) -> bool:
        return name.startswith(VAE_PREFIXES)

    source = _open([paths], rules, execution, dense=in_vae)
    import comfy.model_detection
    import comfy.sd

    (sd,) = source.state_dicts
    prefix = comfy.model_detection.unet_prefix_from_state_dict(sd)
    if comfy.model_detection.model_config_from_unet(sd, prefix, metadata=source.metadata) is None:
        raise QuantLoaderError(
            f"{Path(source.files[0]).name} is no full checkpoint that ComfyUI knows: no model family has these layers. "
            "If it holds a diffusion model alone, move it to models/diffusion_models and use "
            "Load Quantized Diffusion Model."
        )
    model, clip, vae, _ = source.build(
        lambda: comfy.sd.load_state_dict_guess_config(
            sd,
            output_vae=output_vae,
            output_clip=output_clip,
            embedding_directory=embedding_directory,
            model_options=dict(source.options),
            te_model_options=dict(source.options),
            metadata=source.metadata,
            disable_dynamic=disable_dynamic,
        )
    )
    for spec in source.layers:
        if in_vae(spec.name):
            source.context.dequantised[spec.name] = "part of the VAE; dequantised while loading"
    if clip is None:
        # An encoder that was not asked for leaves its layers where they are; that is no fault of the file.
        source.verify(model.model, among=lambda spec: spec.name.startswith(prefix) and not in_vae(spec.name))
    else:
        source.verify(model.model, clip.cond_stage_model, among=lambda spec: not in_vae(spec.name))
    arguments = (source.files, rules, execution, embedding_directory)
    model = source.adopt(model, reload_checkpoint_model, *arguments)
    if clip is not None:
        clip.patcher = source.adopt(clip.patcher, reload_checkpoint_clip, *arguments)
        if source.layers:
            from .text_encoder import watched

            clip = watched(clip)
    if vae is not None and getattr(vae, "patcher", None) is not None:
        vae.patcher.cached_patcher_init = (reload_checkpoint_vae, arguments)
    return model, clip, vae, source.report


def reload_checkpoint_model(
    paths: Paths, rules: str, execution: str, embedding_directory: Any, disable_dynamic: bool = False
) -> Any:
    """What ComfyUI calls to build a dropped model again."""
    return load_checkpoint(paths, rules, execution, embedding_directory, False, False, disable_dynamic)[0]


def reload_checkpoint_clip(
    paths: Paths, rules: str, execution: str, embedding_directory: Any, disable_dynamic: bool = False
) -> Any:
    """What ComfyUI calls to build a dropped text encoder again."""
    return load_checkpoint(paths, rules, execution, embedding_directory, False, True, disable_dynamic)[1].patcher


def reload_checkpoint_vae(
    paths: Paths, rules: str, execution: str, embedding_directory: Any, disable_dynamic: bool = False
) -> Any:
    """What ComfyUI calls to build a dropped VAE again."""
    return load_checkpoint(paths, rules, execution, embedding_directory, True, False, disable_dynamic)[2].patcher


# ControlNets and model patches


def load_controlnet(paths: Paths, rules: str = "strict", execution: str = "auto") -> tuple[Any, Report]:
    """A ControlNet (or T2I adapter) and the report of its check."""
    source = _open([paths], rules, execution)
    import comfy.controlnet

    options = dict(source.options)
    name = Path(source.files[0])
    if name.stem.endswith(("_shuffle", "_shuffle_fp16")):
        options["global_average_pooling"] = True
    controlnet = source.build(
        lambda: comfy.controlnet.load_controlnet_state_dict(source.state_dicts[0], model_options=options)
    )
    if controlnet is None:
        raise QuantLoaderError(
            f"{name.name} holds no ControlNet or T2I adapter that ComfyUI knows. "
            "Is it in the right folder, and is this ComfyUI new enough for it?"
        )
    wrapped = getattr(controlnet, "control_model_wrapped", None)
    source.verify(*([wrapped.model] if wrapped is not None else []))
    if wrapped is not None and source.layers:
        from .patcher import adopt

        controlnet.control_model_wrapped = adopt(wrapped, source.context)
        carry_over(wrapped, source.context)
    return controlnet, source.report


def load_model_patch(paths: Paths, rules: str = "strict", execution: str = "auto") -> tuple[Any, Report]:
    """A model patch (the ControlNets and adapters that ComfyUI keeps in models/model_patches) and its report."""
    source = _open([paths], rules, execution)
    from .model_patch import build

    patcher = source.build(lambda: build(source.files[0], source.state_dicts[0], source.metadata, source.options))
    source.verify(patcher.model)
    patcher = source.adopt(patcher, reload_model_patch, source.files, rules, execution)
    return patcher, source.report


def reload_model_patch(paths: Paths, rules: str, execution: str, disable_dynamic: bool = False) -> Any:
    """What ComfyUI calls to build a dropped model patch again."""
    return load_model_patch(paths, rules, execution)[0]


# What a load is answered with


def answer(reports: Report | Sequence[Report], patchers: Sequence[Any], execution: str) -> tuple[str, dict[str, Any]]:
    """A loader's ``report`` output, and the entry for the panel on its node.

    The text: the check, the kernels planned, what was understood or dequantised. The entry: a summary, and the groups
    of layers with the kernel planned for each. ``patchers``: everything that was loaded (None for what the file lacks).
    """
    from .kernel_report import dequantised_lines, line, planned, warnings_of

    reports = [reports] if isinstance(reports, Report) else list(reports)
    patchers = [patcher for patcher in patchers if patcher is not None]
    groups: list[dict[str, Any]] = []
    lines: list[str] = []
    for report in reports:
        lines.append(f"{Path(report.files[0]).name}: {report.summary}" if len(reports) > 1 else report.summary)
        lines += [f"{count} layers {fmt}" for fmt, count in sorted(report.formats.items())]
        lines += [f"{fault.severity}: {fault.message}" for fault in report.faults if fault.severity != "error"][:20]
    if patchers and any(report.layers for report in reports):
        groups = planned(*patchers)
        lines += [f"execution: {execution}", *map(line, groups), *dequantised_lines(*patchers)]
    warnings = warnings_of(*patchers)
    lines += [f"warning: {sentence}" for sentence in warnings]
    summary = " ".join([*(report.summary for report in reports), *warnings])
    return "\n".join(lines), {"summary": summary, "groups": groups}
