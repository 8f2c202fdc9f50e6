"""Load Quantized Text Encoder: one to four files, as the stock CLIP loaders take them."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from . import common, runs

FOLDER = "text_encoders"
NAMES = ("clip_name1", "clip_name2", "clip_name3", "clip_name4")

# The types of ComfyUI 0.30's CLIP loaders, for the case that they cannot be asked.
# fmt: off
TYPES = [
    "stable_diffusion", "stable_cascade", "sd3", "stable_audio", "mochi", "ltxv", "pixart", "cosmos", "lumina2",
    "wan", "hidream", "chroma", "ace", "omnigen2", "qwen_image", "hunyuan_image", "flux2", "ovis", "longcat_image",
    "cogvideox", "lens", "pixeldit", "ideogram4", "boogu", "krea2", "joyimage", "mage", "minimax", "sdxl", "flux",
    "hunyuan_video", "hunyuan_video_15", "kandinsky5", "kandinsky5_image", "newbie",
]
# fmt: on


def types() -> list[str]:
    """The type names of the stock CLIPLoader and DualCLIPLoader of this ComfyUI, in their order."""
    try:
        import nodes as stock

        loaders = (stock.CLIPLoader, stock.DualCLIPLoader)
        listed = [name for loader in loaders for name in loader.INPUT_TYPES()["required"]["type"][0]]
    except (ImportError, AttributeError, KeyError, IndexError, TypeError, OSError):
        listed = TYPES
    return list(dict.fromkeys(str(name) for name in listed))


class QuantLoaderTextEncoder(io.ComfyNode):  # type: ignore[misc]
    """Loads text encoders whose quantised linears run quantised; ComfyUI's own loaders dequantise them."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuantLoaderTextEncoder",
            display_name="Load Quantized Text Encoder",
            category=common.CATEGORY,
            description="Checks and loads one to four quantised text encoders whose linears really run quantised.",
            search_aliases=["clip", "t5", *common.SEARCH],
            inputs=[
                common.file_input(NAMES[0], FOLDER),
                io.Combo.Input(
                    "type",
                    options=types(),
                    default="stable_diffusion",
                    tooltip="Which model the text encoder belongs to, as in ComfyUI's own loader.",
                ),
                common.rules_input(),
                common.execution_input(),
                *(common.file_input(name, FOLDER, optional=True) for name in NAMES[1:]),
            ],
            outputs=[io.Clip.Output(display_name="CLIP"), io.String.Output(display_name="report")],
        )

    @classmethod
    async def validate_inputs(
        cls,
        clip_name1: str | None = None,
        clip_name2: str | None = None,
        clip_name3: str | None = None,
        clip_name4: str | None = None,
        rules: str = "strict",
    ) -> Any:
        return await common.validated(FOLDER, [clip_name1, clip_name2, clip_name3, clip_name4], rules)

    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> str:
        names = [inputs.get(name) for name in NAMES]
        return common.fingerprint(FOLDER, names, inputs.get("rules", "strict"), inputs.get("execution", "auto"))

    @classmethod
    def execute(
        cls,
        clip_name1: str,
        type: str,
        rules: str = "strict",
        execution: str = "auto",
        clip_name2: str = common.NO_FILE,
        clip_name3: str = common.NO_FILE,
        clip_name4: str = common.NO_FILE,
    ) -> io.NodeOutput:
        import folder_paths

        from ..patching.load import answer, load_text_encoder

        names = [name for name in (clip_name1, clip_name2, clip_name3, clip_name4) if common.chosen(name)]
        paths = [common.path_of(FOLDER, name) for name in names]
        embeddings = folder_paths.get_folder_paths("embeddings")
        clip, reports = load_text_encoder(paths, type, rules, execution, embeddings)
        runs.handed_out(FOLDER, names, rules, execution, text_encoder=clip.patcher)
        text, entry = answer(reports, [clip.patcher], execution)
        return common.shown(clip, text, entry=entry)
