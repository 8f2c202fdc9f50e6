"""Which nodes name model files: widgets in the order of the editor's ``widgets_values``, and the model folder of
each.

The stock rows follow ComfyUI 0.30 (``nodes.py`` and ``comfy_extras``). A node that is missing here is no error: it is
listed as unknown when one of its widgets looks like a model file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MODEL_ENDINGS = (".safetensors", ".sft", ".gguf", ".ckpt", ".pt", ".pt2", ".pth", ".bin", ".pkl")
"""File endings that ComfyUI lists as models."""


@dataclass(frozen=True)
class LoaderNode:
    """One node type that loads model files.

    ``widgets``: every widget, in the editor's order. ``files``: widget -> folder kind, as ``folder_paths`` names it;
    our inspector's folder is itself a widget (``folder_widget``). ``built_in``: names that stand for no file.
    """

    type: str
    widgets: tuple[str, ...]
    files: Mapping[str, str]
    ours: bool = False
    built_in: tuple[str, ...] = ()
    folder_widget: str | None = None


def _stock(
    type_: str, folder: str, *widgets: str, more: Mapping[str, str] | None = None, built_in: tuple[str, ...] = ()
) -> LoaderNode:
    return LoaderNode(type_, widgets, {widgets[0]: folder, **(more or {})}, built_in=built_in)


def _clip(type_: str, count: int, *rest: str) -> LoaderNode:
    names = ("clip_name",) if count == 1 else tuple(f"clip_name{i}" for i in range(1, count + 1))
    return LoaderNode(type_, (*names, *rest), dict.fromkeys(names, "text_encoders"))


def _ours(type_: str, files: Mapping[str, str], *widgets: str) -> LoaderNode:
    return LoaderNode(type_, widgets, files, ours=True)


_TAESD = ("taesd", "taesdxl", "taesd3", "taef1", "taef2", "pixel_space")

NO_FILE = "none"
"""What our text encoder node stores for a place that is not used."""

OUR_ENCODER_NAMES = ("clip_name1", "clip_name2", "clip_name3", "clip_name4")

LOADERS: dict[str, LoaderNode] = {
    row.type: row
    for row in (
        _ours("QuantLoaderDiffusionModel", {"model_name": "diffusion_models"}, "model_name", "rules", "execution"),
        _ours("QuantLoaderCheckpoint", {"ckpt_name": "checkpoints"}, "ckpt_name", "rules", "execution"),
        _ours(
            "QuantLoaderTextEncoder",
            dict.fromkeys(OUR_ENCODER_NAMES, "text_encoders"),
            "clip_name1",
            "type",
            "rules",
            "execution",
            "clip_name2",
            "clip_name3",
            "clip_name4",
        ),
        _ours("QuantLoaderControlNet", {"control_net_name": "controlnet"}, "control_net_name", "rules", "execution"),
        _ours("QuantLoaderModelPatch", {"name": "model_patches"}, "name", "rules", "execution"),
        LoaderNode("QuantLoaderInspect", ("folder", "file", "rules"), {"file": ""}, ours=True, folder_widget="folder"),
        _stock("UNETLoader", "diffusion_models", "unet_name", "weight_dtype"),
        _stock("CheckpointLoaderSimple", "checkpoints", "ckpt_name"),
        LoaderNode("CheckpointLoader", ("config_name", "ckpt_name"), {"ckpt_name": "checkpoints"}),
        _stock("unCLIPCheckpointLoader", "checkpoints", "ckpt_name"),
        _stock("ImageOnlyCheckpointLoader", "checkpoints", "ckpt_name"),
        _clip("CLIPLoader", 1, "type", "device"),
        _clip("DualCLIPLoader", 2, "type", "device"),
        _clip("TripleCLIPLoader", 3),
        _clip("QuadrupleCLIPLoader", 4),
        _stock(
            "LTXAVTextEncoderLoader",
            "text_encoders",
            "text_encoder",
            "ckpt_name",
            "device",
            more={"ckpt_name": "checkpoints"},
        ),
        _stock("LTXVAudioVAELoader", "checkpoints", "ckpt_name"),
        _stock("VAELoader", "vae", "vae_name", built_in=_TAESD),
        _stock("ControlNetLoader", "controlnet", "control_net_name"),
        _stock("DiffControlNetLoader", "controlnet", "control_net_name"),
        _stock("ModelPatchLoader", "model_patches", "name"),
        _stock("LoraLoader", "loras", "lora_name", "strength_model", "strength_clip"),
        _stock("LoraLoaderModelOnly", "loras", "lora_name", "strength_model"),
        _stock("LoraLoaderBypass", "loras", "lora_name", "strength_model", "strength_clip"),
        _stock("LoraLoaderBypassModelOnly", "loras", "lora_name", "strength_model"),
        _stock("CLIPVisionLoader", "clip_vision", "clip_name"),
        _stock("StyleModelLoader", "style_models", "style_model_name"),
        _stock("GLIGENLoader", "gligen", "gligen_name"),
        _stock("HypernetworkLoader", "hypernetworks", "hypernetwork_name", "strength"),
        _stock("UpscaleModelLoader", "upscale_models", "model_name"),
        _stock("LatentUpscaleModelLoader", "latent_upscale_models", "model_name"),
        _stock("AudioEncoderLoader", "audio_encoders", "audio_encoder_name"),
    )
}
"""The known nodes, by type."""


def looks_like_model(value: object) -> bool:
    """Whether a widget value of an unknown node is probably a model file's name."""
    return isinstance(value, str) and len(value) < 1024 and "\n" not in value and value.lower().endswith(MODEL_ENDINGS)
