"""Load Quantized Checkpoint: model, CLIP and VAE of one file."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from . import common, runs

FOLDER = "checkpoints"


class QuantLoaderCheckpoint(io.ComfyNode):  # type: ignore[misc]
    """Loads a full checkpoint whose model, text encoder or VAE is quantised."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuantLoaderCheckpoint",
            display_name="Load Quantized Checkpoint",
            category=common.CATEGORY,
            description="Checks a quantised checkpoint with model, CLIP and VAE in one file, and loads all three.",
            search_aliases=["checkpoint", *common.SEARCH],
            inputs=[common.file_input("ckpt_name", FOLDER), common.rules_input(), common.execution_input()],
            outputs=[
                io.Model.Output(display_name="MODEL"),
                io.Clip.Output(display_name="CLIP"),
                io.Vae.Output(display_name="VAE"),
                io.String.Output(display_name="report"),
            ],
        )

    @classmethod
    async def validate_inputs(cls, ckpt_name: str | None = None, rules: str = "strict") -> Any:
        return await common.validated(FOLDER, [ckpt_name], rules)

    @classmethod
    def fingerprint_inputs(cls, ckpt_name: str, rules: str = "strict", execution: str = "auto") -> str:
        return common.fingerprint(FOLDER, [ckpt_name], rules, execution)

    @classmethod
    def execute(cls, ckpt_name: str, rules: str = "strict", execution: str = "auto") -> io.NodeOutput:
        import folder_paths

        from ..patching.load import answer, load_checkpoint

        embeddings = folder_paths.get_folder_paths("embeddings")
        path = common.path_of(FOLDER, ckpt_name)
        model, clip, vae, report = load_checkpoint([path], rules, execution, embeddings)
        encoder = getattr(clip, "patcher", None)
        runs.handed_out(FOLDER, [ckpt_name], rules, execution, model=model, text_encoder=encoder)
        text, entry = answer(report, [model, encoder], execution)
        return common.shown(model, clip, vae, text, entry=entry)
