"""The loaders of checkpoints, text encoders, ControlNets and model patches on the real server."""

from __future__ import annotations

import functools
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from quant_loader.checkpoint import check
from quant_loader.demo import fixtures, pictures, quantize, tiny_core, workflows
from quant_loader.demo.client import PromptFailed, PromptRejected, PromptRun
from quant_loader.demo.server import ComfyServer

# Relative output error of one linear on Gaussian data (docs/kernels.md), and how many follow each other with no skip
# connection beside them. Independent errors add in squares.
LINEAR_ERROR = {"int8_row": 0.015, "int8_convrot": 0.016, "nvfp4": 0.140}
DEPTH = 4


def bound(quantizer: str) -> float:
    return DEPTH**0.5 * LINEAR_ERROR[quantizer]


def link(node: str, index: int = 0) -> list[Any]:
    return [node, index]


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


def ours(kind: str, **inputs: Any) -> dict[str, Any]:
    """One of the pack's loaders under its defaults."""
    return node(kind, **{"rules": "strict", "execution": "auto", **inputs})


def sampler(model: list[Any], positive: list[Any], negative: list[Any], canvas: list[Any]) -> dict[str, Any]:
    return node(
        "KSampler",
        model=model,
        positive=positive,
        negative=negative,
        latent_image=canvas,
        seed=7,
        steps=1,
        cfg=1.0,
        sampler_name="euler",
        scheduler="simple",
        denoise=1.0,
    )


def latent_of(server: ComfyServer, run: PromptRun) -> torch.Tensor:
    (entry,) = run.files(workflows.LATENT, "latents")
    return pictures.read_latent(server.output() / entry["subfolder"] / entry["filename"])


def ran(server: ComfyServer, folder: str, file: str, **more: str) -> list[dict[str, Any]]:
    """What the layers of a loaded file did in the latest prompt, one entry for each model in it."""
    query = {"folder": folder, "file": file, "rules": "strict", "execution": "auto", **more}
    answer = server.client.get(f"/quant-loader/ran?{urllib.parse.urlencode(query)}")
    models: list[dict[str, Any]] = answer["parts"]
    return models


def refusal(server: ComfyServer, graph: dict[str, Any]) -> str:
    with pytest.raises(PromptRejected) as caught:
        server.client.queue(graph)
    return "\n".join(caught.value.details())


def break_scale(path: Path, layer: str) -> Path:
    """The file again with the scale of one layer in half precision."""
    tensors, metadata = quantize.load(path)
    return quantize.save(path.with_name(f"broken-{path.name}"), quantize.half_scale(tensors, layer), metadata)


# Text encoders

PROMPT = "a small red house by the sea"


@pytest.fixture(scope="module")
def whole(comfyui: None) -> Callable[[str], quantize.Tensors]:
    return functools.cache(lambda name: getattr(tiny_core, name)())


@dataclass(frozen=True)
class Encoder:
    """An encoder that fits a test in its real size, which ComfyUI's loaders give it.

    ``make``: a function of tiny_core. ``kind``: the type on the loader. ``block``, ``count``: where its blocks are, and
    how many. ``branches``: additions to the residual stream. ``linears``: those that follow or multiply each other in a
    branch.
    """

    make: str
    kind: str
    block: str
    count: int
    branches: int
    linears: int

    def bound(self, error: float) -> float:
        """Relative error of an encoding whose linears have the relative error ``error``.

        The n-th branch has the error of the stream that it reads and of its own k linears. A stream of branches of
        unit size then has E_n^2 = E_(n-1)^2 + k e^2 / n, which is k e^2 (1 + 1/2 + ... + 1/n).
        """
        harmonic = sum(1 / n for n in range(1, self.branches + 1))
        return float((self.linears * harmonic) ** 0.5 * error)


ENCODERS = {
    "clip_l": Encoder("clip_l_whole", "stable_diffusion", "text_model.encoder.layers", 12, 24, 2),
    "t5_base": Encoder("t5_base_repeated", "stable_audio", "encoder.block", 12, 24, 2),
    "umt5_base": Encoder("umt5_base_repeated", "ace", "encoder.block", 12, 24, 3),
    "qwen3_06b": Encoder("qwen3_06b_repeated", "stable_diffusion", "model.layers", 28, 56, 3),
}
TABLES = ("shared", "model.embed_tokens", "text_model.embeddings.token_embedding")


@pytest.fixture(scope="module")
def put_encoder(server: ComfyServer, whole: Callable[[str], quantize.Tensors]) -> Callable[[str, str], str]:
    """The name of an encoder's file with quantised linears and an INT8 table; each is written once."""

    @functools.cache
    def put(name: str, quantizer: str) -> str:
        encoder = ENCODERS[name]
        tensors = whole(encoder.make)
        packed, metadata = quantize.quantize(tensors, quantizer, layers=tiny_core.linears(tensors, 64))
        table = next(t for t in TABLES if f"{t}.weight" in tensors)
        rows = quantize.int8_row(packed.pop(f"{table}.weight"))
        packed.update({f"{table}.{suffix}": tensor for suffix, tensor in rows.tensors.items()})
        packed[f"{table}.comfy_quant"] = quantize.marker_tensor({"format": "int8_tensorwise"})
        if encoder.make.endswith("_repeated"):
            packed = tiny_core.repeated(packed, encoder.block, encoder.count)
        return quantize.save(server.models("text_encoders") / f"{name}-{quantizer}.safetensors", packed, metadata).name

    return put


@pytest.fixture(scope="module")
def encoder_file(put_encoder: Callable[[str, str], str]) -> str:
    """CLIP-L with INT8 linears."""
    return put_encoder("clip_l", "int8_row")


def encoded(server: ComfyServer, loader: dict[str, Any], name: str) -> quantize.Tensors:
    server.client.run(
        {
            "loader": loader,
            "encode": node("CLIPTextEncode", clip=link("loader"), text=PROMPT),
            "save": node("TestSaveConditioning", conditioning=link("encode"), name=name),
        }
    )
    return quantize.load(server.output() / f"{name}.safetensors")[0]


# What an execution adds to the dequantised weight: 8-bit rows and activations, or FP4 activations, whose error is that
# of W4A4 without that of the weight (0.100).
ADDED_ERROR = {
    ("int8_row", "auto"): LINEAR_ERROR["int8_row"],
    ("nvfp4", "native"): (LINEAR_ERROR["nvfp4"] ** 2 - 0.100**2) ** 0.5,
    ("nvfp4", "int8"): LINEAR_ERROR["int8_convrot"],
}


@pytest.fixture(scope="module")
def dequantised(server: ComfyServer, put_encoder: Callable[[str, str], str]) -> Callable[[str, str], quantize.Tensors]:
    """The conditioning of an encoder's file under the exact execution; each is made once."""

    @functools.cache
    def run(name: str, quantizer: str) -> quantize.Tensors:
        inputs = {"clip_name1": put_encoder(name, quantizer), "type": ENCODERS[name].kind}
        return encoded(server, ours("QuantLoaderTextEncoder", **inputs, execution="exact"), "exact")

    return run


@pytest.mark.parametrize(
    ("name", "quantizer", "execution"),
    [(name, *kind) for name in ENCODERS for kind in ADDED_ERROR if kind[1] != "int8" or name == "t5_base"],
)
def test_a_text_encoder_runs_quantised(
    name: str,
    quantizer: str,
    execution: str,
    server: ComfyServer,
    put_encoder: Callable[[str, str], str],
    dequantised: Callable[[str, str], quantize.Tensors],
) -> None:
    """Its conditioning is that of the same file dequantised, but for the error of the arithmetic that it asks for."""
    encoder, file = ENCODERS[name], put_encoder(name, quantizer)
    exact = dequantised(name, quantizer)
    loader = ours("QuantLoaderTextEncoder", clip_name1=file, type=encoder.kind, execution=execution)
    found = encoded(server, loader, "quantised")
    assert set(exact) == ({"context", "pooled"} if name == "clip_l" else {"context"})
    for part, tensor in exact.items():
        difference = pictures.relative_difference(found[part], tensor)
        assert 0 < difference < encoder.bound(ADDED_ERROR[quantizer, execution]), part
    (model,) = ran(server, "text_encoders", file, execution=execution)
    declared = check(str(server.models("text_encoders") / file)).layers
    assert model["ran"] == model["layers"] == len(declared)
    assert model["dequantised"] == 0
    # The table is read by rows; everything else multiplies quantised inputs.
    kinds = {group["execution"]: group["count"] for group in model["groups"] if group["operator"] != "row lookup"}
    assert kinds == {"native" if execution == "auto" else execution: len(declared) - 1}


def test_a_broken_text_encoder_is_refused_by_name(server: ComfyServer, encoder_file: str) -> None:
    layer = "text_model.encoder.layers.3.mlp.fc1"
    path = break_scale(server.models("text_encoders") / encoder_file, layer)
    loader = ours("QuantLoaderTextEncoder", clip_name1=path.name, type="stable_diffusion")
    text = refusal(
        server,
        {
            "loader": loader,
            "encode": node("CLIPTextEncode", clip=link("loader"), text=PROMPT),
            "save": node("TestSaveConditioning", conditioning=link("encode"), name="broken"),
        },
    )
    assert layer in text


# ControlNets


def controlled(server: ComfyServer, loader: dict[str, Any]) -> torch.Tensor:
    """The latent of the 16-bit tiny Flux under a ControlNet."""
    graph = workflows.text_to_image(workflows.stock_loader(fixtures.REFERENCE), prefix="e2e/control", size=64, steps=1)
    del graph["decode"], graph[workflows.PICTURE]
    graph["net"] = loader
    graph["hint"] = node("EmptyImage", width=64, height=64, batch_size=1, color=0xC08040)
    graph["control"] = node(
        "ControlNetApplyAdvanced",
        positive=link("conditioning"),
        negative=link("conditioning"),
        control_net=link("net"),
        image=link("hint"),
        strength=1.0,
        start_percent=0.0,
        end_percent=1.0,
    )
    graph[workflows.SAMPLER]["inputs"] |= {"positive": link("control", 0), "negative": link("control", 1)}
    return latent_of(server, server.client.run(graph))


@pytest.fixture(scope="module")
def controlnet_file(server: ComfyServer, comfyui: None) -> str:
    tensors = tiny_core.flux_controlnet()
    folder = server.models("controlnet")
    quantize.save(folder / "control-base.safetensors", tensors)
    layers = tiny_core.linears(tensors, 64)
    return quantize.save(
        folder / "control-int8_row.safetensors", *quantize.quantize(tensors, "int8_row", layers=layers)
    ).name


def test_a_controlnet_controls_as_its_16_bit_original(server: ComfyServer, controlnet_file: str) -> None:
    graph = workflows.text_to_image(workflows.stock_loader(fixtures.REFERENCE), prefix="e2e/control", size=64, steps=1)
    free = latent_of(server, server.client.run(graph))
    base = controlled(server, node("ControlNetLoader", control_net_name="control-base.safetensors"))
    found = controlled(server, ours("QuantLoaderControlNet", control_net_name=controlnet_file))
    effect = pictures.relative_difference(base, free)
    difference = pictures.relative_difference(found, base)
    (model,) = ran(server, "controlnet", controlnet_file)
    assert 0 < difference < bound("int8_row") * effect
    assert model["ran"] == model["layers"]
    # ComfyUI's own loader takes the codes for values: what comes out is unlike the original, or no number at all.
    stock = controlled(server, node("ControlNetLoader", control_net_name=controlnet_file))
    assert not pictures.relative_difference(stock, base) < 1.0


def test_a_broken_controlnet_is_refused_by_name(server: ComfyServer, controlnet_file: str) -> None:
    layer = "double_blocks.0.img_mlp.0"
    path = break_scale(server.models("controlnet") / controlnet_file, layer)
    with pytest.raises(PromptRejected) as caught:
        controlled(server, ours("QuantLoaderControlNet", control_net_name=path.name))
    assert layer in "\n".join(caught.value.details())


# Model patches


def patched(server: ComfyServer, loader: dict[str, Any] | None) -> torch.Tensor:
    """The latent of the 16-bit tiny Wan with a Uni3C model patch, or without one."""
    graph = {
        "model": workflows.stock_loader("wan-16-bit.safetensors"),
        "conditioning": node("TestConditioning", tokens=16, width=4096, pooled=0, seed=5),
        "canvas": node("EmptyHunyuanLatentVideo", width=64, height=64, length=1, batch_size=1),
        workflows.SAMPLER: sampler(link("model"), link("conditioning"), link("conditioning"), link("canvas")),
        workflows.LATENT: node("SaveLatent", samples=link(workflows.SAMPLER), filename_prefix="e2e/patch"),
    }
    if loader is not None:
        graph["patch"] = loader
        graph["vae"] = node("VAELoader", vae_name="video-taesd.safetensors")
        graph["hint"] = node("EmptyImage", width=64, height=64, batch_size=1, color=0xC08040)
        graph["apply"] = node(
            "WanUni3CControlnetApply",
            model=link("model"),
            model_patch=link("patch"),
            vae=link("vae"),
            render_video=link("hint"),
            strength=1.0,
            start_percent=0.0,
            end_percent=1.0,
        )
        graph[workflows.SAMPLER]["inputs"]["model"] = link("apply")
    return latent_of(server, server.client.run(graph))


@pytest.fixture(scope="module")
def patch_file(server: ComfyServer, comfyui: None) -> str:
    quantize.save(server.models("diffusion_models") / "wan-16-bit.safetensors", tiny_core.wan())
    quantize.save(server.models("vae") / "video-taesd.safetensors", tiny_core.video_taesd())
    tensors, folder = tiny_core.uni3c(), server.models("model_patches")
    quantize.save(folder / "uni3c-base.safetensors", tensors)
    layers = tiny_core.linears(tensors, quantize.ROTATION_GROUP)
    return quantize.save(
        folder / "uni3c-int8_convrot.safetensors", *quantize.quantize(tensors, "int8_convrot", layers=layers)
    ).name


def test_a_model_patch_patches_as_its_16_bit_original(server: ComfyServer, patch_file: str) -> None:
    free = patched(server, None)
    base = patched(server, node("ModelPatchLoader", name="uni3c-base.safetensors"))
    found = patched(server, ours("QuantLoaderModelPatch", name=patch_file))
    effect = pictures.relative_difference(base, free)
    difference = pictures.relative_difference(found, base)
    (model,) = ran(server, "model_patches", patch_file)
    assert 0 < difference < bound("int8_convrot") * effect
    assert model["ran"] == model["layers"]


def test_a_broken_model_patch_is_refused_by_name(server: ComfyServer, patch_file: str) -> None:
    layer = "controlnet_blocks.0.ffn.0"
    path = break_scale(server.models("model_patches") / patch_file, layer)
    with pytest.raises(PromptRejected) as caught:
        patched(server, ours("QuantLoaderModelPatch", name=path.name))
    assert layer in "\n".join(caught.value.details())


# One file with everything


VAE_LINEARS = [
    f"first_stage_model.{half}.mid_block.attentions.0.{part}"
    for half in ("encoder", "decoder")
    for part in ("to_q", "to_k", "to_v", "to_out.0")
]
LAYERS = {
    "model": "model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn1.to_q",
    "clip": "cond_stage_model.transformer.text_model.encoder.layers.3.mlp.fc1",
    "vae": VAE_LINEARS[4],
}


@pytest.fixture(scope="module")
def checkpoint_file(server: ComfyServer, whole: Callable[[str], quantize.Tensors]) -> str:
    """Stable Diffusion 1.5 in one file (a tiny UNet, a whole CLIP, an autoencoder), 16-bit and with INT8 linears."""
    clip = {name: tensor for name, tensor in whole("clip_l_whole").items() if name != "text_projection.weight"}
    parts = {
        "model.diffusion_model.": tiny_core.sd15(),
        "cond_stage_model.transformer.": clip,
        "first_stage_model.": tiny_core.kl_vae(),
    }
    tensors = {f"{prefix}{name}": tensor for prefix, part in parts.items() for name, tensor in part.items()}
    folder = server.models("checkpoints")
    quantize.save(folder / "full-base.safetensors", tensors)
    packed, metadata = quantize.quantize(tensors, "int8_row", layers=tiny_core.linears(tensors, 64))
    return quantize.save(folder / "full-int8_row.safetensors", packed, metadata).name


def rendering(loader: dict[str, Any]) -> dict[str, Any]:
    return {
        "loader": loader,
        "prompt": node("CLIPTextEncode", clip=link("loader", 1), text=PROMPT),
        "canvas": node("EmptyLatentImage", width=64, height=64, batch_size=1),
        workflows.SAMPLER: sampler(link("loader", 0), link("prompt"), link("prompt"), link("canvas")),
        workflows.LATENT: node("SaveLatent", samples=link(workflows.SAMPLER), filename_prefix="e2e/full"),
        "decode": node("VAEDecode", samples=link(workflows.SAMPLER), vae=link("loader", 2)),
        workflows.PICTURE: node("SaveImage", images=link("decode"), filename_prefix="e2e/full"),
    }


def picture_of(server: ComfyServer, run: PromptRun) -> torch.Tensor:
    (entry,) = run.files(workflows.PICTURE)
    with Image.open(server.output() / entry["subfolder"] / entry["filename"]) as picture:
        return torch.frombuffer(bytearray(picture.convert("RGB").tobytes()), dtype=torch.uint8).float()


def test_a_checkpoint_renders_as_its_16_bit_original(server: ComfyServer, checkpoint_file: str) -> None:
    file = server.models("checkpoints") / checkpoint_file
    base = server.client.run(rendering(node("CheckpointLoaderSimple", ckpt_name="full-base.safetensors")))
    found = server.client.run(rendering(ours("QuantLoaderCheckpoint", ckpt_name=checkpoint_file)))
    assert 0 < pictures.relative_difference(latent_of(server, found), latent_of(server, base)) < bound("int8_row")
    # In grey levels: the error of the format on what the picture varies by, and the rounding to 8 bit of both.
    picture, reference = picture_of(server, found), picture_of(server, base)
    assert reference.std() > 3
    assert (picture - reference).square().mean().sqrt() < bound("int8_row") * reference.std() + 0.5
    model, clip = ran(server, "checkpoints", checkpoint_file)
    assert (model["part"], clip["part"]) == ("model", "text_encoder")
    assert model["ran"] + clip["ran"] + len(VAE_LINEARS) == len(check(str(file)).layers)
    # ComfyUI builds the autoencoder of convolutions alone; its packed linears are said to be dequantised.
    (group,) = model["loaded_dequantised"]
    assert group["count"] == len(VAE_LINEARS)
    assert "VAE" in group["reason"]


def test_the_report_of_a_checkpoint_says_what_runs_model_and_encoder(server: ComfyServer, checkpoint_file: str) -> None:
    graph = {
        "loader": ours("QuantLoaderCheckpoint", ckpt_name=checkpoint_file),
        "report": node("PreviewAny", source=link("loader", 3)),
    }
    text = server.client.run(graph).outputs["report"]["text"][0]
    declared = check(str(server.models("checkpoints") / checkpoint_file)).layers
    counts = [int(line.split(" x ")[0]) for line in text.splitlines() if " x int8_tensorwise: " in line]
    assert sum(counts) == len(declared) - len(VAE_LINEARS)


@pytest.mark.parametrize("part", LAYERS)
def test_a_broken_checkpoint_is_refused_by_name(part: str, server: ComfyServer, checkpoint_file: str) -> None:
    path = break_scale(server.models("checkpoints") / checkpoint_file, LAYERS[part])
    assert LAYERS[part] in refusal(server, rendering(ours("QuantLoaderCheckpoint", ckpt_name=path.name)))


def test_a_stock_checkpoint_save_writes_the_source_again(server: ComfyServer, checkpoint_file: str) -> None:
    """Model and CLIP byte for byte; the VAE, which ComfyUI builds without packed weights, in 16 bit."""
    graph = {
        "loader": ours("QuantLoaderCheckpoint", ckpt_name=checkpoint_file),
        "save": node(
            "CheckpointSave",
            model=link("loader", 0),
            clip=link("loader", 1),
            vae=link("loader", 2),
            filename_prefix="checkpoint/again",
        ),
    }
    server.client.run(graph)
    (path,) = (server.output() / "checkpoint").glob("*.safetensors")
    assert check(str(path)).verdict == "ok"
    source, _ = quantize.load(server.models("checkpoints") / checkpoint_file)
    again, _ = quantize.load(path)
    for marker in [n for n in source if n.endswith(".comfy_quant") and not n.startswith("first_stage_model.")]:
        layer = marker.removesuffix(".comfy_quant")
        for key in [n for n in source if n.startswith(f"{layer}.") and not n.endswith(".bias")]:
            assert again[key].dtype == source[key].dtype, key
            assert again[key].shape == source[key].shape, key
            assert torch.equal(again[key].reshape(-1).view(torch.uint8), source[key].reshape(-1).view(torch.uint8)), key
    assert not [n for n in again if n.startswith("first_stage_model.") and n.endswith(".comfy_quant")]


@pytest.mark.parametrize("strengths", [(1.0, 0.0), (0.0, 1.0)], ids=["model", "clip"])
def test_a_stock_checkpoint_save_with_a_lora_stops_with_the_way_out(
    strengths: tuple[float, float], server: ComfyServer, checkpoint_file: str
) -> None:
    generator = torch.Generator().manual_seed(1)
    lora: quantize.Tensors = {}
    for name, N, K in (
        ("lora_unet_input_blocks_1_1_transformer_blocks_0_attn1_to_q", 320, 320),
        ("lora_te_text_model_encoder_layers_0_mlp_fc1", 3072, 768),
    ):
        lora[f"{name}.lora_down.weight"] = torch.randn(4, K, generator=generator) / K**0.5
        lora[f"{name}.lora_up.weight"] = torch.randn(N, 4, generator=generator)
    quantize.save(server.models("loras") / "full.safetensors", lora)
    model, clip = strengths
    graph = {
        "loader": ours("QuantLoaderCheckpoint", ckpt_name=checkpoint_file),
        "lora": node(
            "LoraLoader",
            model=link("loader", 0),
            clip=link("loader", 1),
            lora_name="full.safetensors",
            strength_model=model,
            strength_clip=clip,
        ),
        "save": node(
            "CheckpointSave",
            model=link("lora", 0),
            clip=link("lora", 1),
            vae=link("loader", 2),
            filename_prefix="lost/full",
        ),
    }
    with pytest.raises(PromptFailed, match="QuantLoaderSave"):
        server.client.run(graph)
    assert not list(server.output().glob("lost/full*"))
