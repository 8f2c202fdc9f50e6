"""Tiny models of other families, made of ComfyUI's own model classes with random weights; ComfyUI must be importable.

Sizes are the smallest whose state dict ComfyUI still recognises as the family. Each function returns a state dict under
the names of a diffusion model file.
"""

from __future__ import annotations

import math
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]


def randomised(module: torch.nn.Module, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """The state dict of `module` with random weights that keep activations near unit size.

    Matrices and kernels get a variance of 1 / fan-in, norms ones, everything else small values.
    """
    generator = torch.Generator().manual_seed(seed)
    out: Tensors = {}
    for name, tensor in module.state_dict().items():
        shape = tuple(tensor.shape)
        if name.endswith("norm.weight") or (len(shape) == 1 and name.endswith("weight")):
            value = torch.ones(shape)
        elif len(shape) >= 2:
            value = torch.randn(shape, generator=generator) / math.sqrt(math.prod(shape[1:]))
        else:
            value = 0.02 * torch.randn(shape, generator=generator)
        out[name] = value.to(dtype)
    return out


def _built(model_class: Any, seed: int, **config: Any) -> Tensors:
    import comfy.ops

    operations = comfy.ops.disable_weight_init
    return randomised(model_class(**config, dtype=torch.bfloat16, device="cpu", operations=operations), seed)


def flux2(seed: int = 3) -> Tensors:
    """Flux 2: global modulation, no biases, 128 latent channels; one double and one single block."""
    from comfy.ldm.flux.model import Flux

    return _built(
        Flux,
        seed,
        in_channels=128,
        out_channels=128,
        vec_in_dim=None,
        context_in_dim=1024,
        hidden_size=256,
        mlp_ratio=3.0,
        num_heads=2,
        depth=1,
        depth_single_blocks=1,
        axes_dim=[32, 32, 32, 32],
        theta=2000,
        patch_size=1,
        qkv_bias=False,
        guidance_embed=False,
        txt_ids_dims=[3],
        global_modulation=True,
        mlp_silu_act=True,
        ops_bias=False,
    )


def _unet(seed: int, context_dim: int, linear: bool, heads: dict[str, int]) -> Tensors:
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    return _built(
        UNetModel,
        seed,
        image_size=32,
        in_channels=4,
        out_channels=4,
        model_channels=320,
        num_res_blocks=[1, 1],
        channel_mult=(1, 1),
        transformer_depth=[1, 0],
        transformer_depth_middle=-2,
        transformer_depth_output=[1, 1, 0, 0],
        context_dim=context_dim,
        use_spatial_transformer=True,
        use_linear_in_transformer=linear,
        **heads,
    )


def sdxl_layout() -> Tensors:
    """The names and shapes of a whole SDXL UNet, on the meta device: it has no tiny form."""
    import comfy.ops
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    unet = UNetModel(
        image_size=32,
        in_channels=4,
        out_channels=4,
        model_channels=320,
        num_res_blocks=[2, 2, 2],
        channel_mult=(1, 2, 4),
        transformer_depth=[0, 0, 2, 2, 10, 10],
        transformer_depth_middle=10,
        transformer_depth_output=[0, 0, 0, 2, 2, 2, 10, 10, 10],
        context_dim=2048,
        adm_in_channels=2816,
        num_classes="sequential",
        use_spatial_transformer=True,
        use_linear_in_transformer=True,
        num_head_channels=64,
        num_heads=-1,
        dtype=torch.bfloat16,
        device="meta",
        operations=comfy.ops.disable_weight_init,
    )
    layout: Tensors = unet.state_dict()
    return layout


def sd15(seed: int = 4) -> Tensors:
    """Stable Diffusion 1.5: 768 wide contexts, 1 x 1 convolutions around its attention."""
    return _unet(seed, 768, False, {"num_heads": 8})


def sd2(seed: int = 5) -> Tensors:
    """Stable Diffusion 2: 1024 wide contexts, linears around its attention."""
    return _unet(seed, 1024, True, {"num_head_channels": 64, "num_heads": -1})


def sd3(seed: int = 6) -> Tensors:
    """Stable Diffusion 3: joint blocks, 4 x 64 wide."""
    from comfy.ldm.modules.diffusionmodules.mmdit import MMDiT

    return _built(
        MMDiT,
        seed,
        input_size=None,
        in_channels=16,
        out_channels=16,
        depth=4,
        adm_in_channels=2048,
        pos_embed_max_size=16,
        num_patches=256,
        context_embedder_config={"target": "torch.nn.Linear", "params": {"in_features": 1024, "out_features": 256}},
        context_size=1024,
    )


def wan(seed: int = 7) -> Tensors:
    """Wan 2.1, text to video: one block."""
    from comfy.ldm.wan.model import WanModel

    return _built(WanModel, seed, dim=256, ffn_dim=512, num_heads=2, num_layers=1, text_dim=4096)


def flux_controlnet(seed: int = 8) -> Tensors:
    """An XLabs ControlNet for Flux: one double block and its output projection."""
    from comfy.ldm.flux.controlnet import ControlNetFlux

    tensors = _built(
        ControlNetFlux,
        seed,
        in_channels=16,
        out_channels=16,
        vec_in_dim=64,
        context_in_dim=1024,
        hidden_size=256,
        mlp_ratio=4.0,
        num_heads=2,
        depth=1,
        depth_single_blocks=0,
        axes_dim=[16, 56, 56],
        theta=10000,
        patch_size=2,
        qkv_bias=True,
        guidance_embed=False,
        txt_ids_dims=[],
    )
    return {name.replace("_norm.weight", "_norm.scale"): tensor for name, tensor in tensors.items()}


def uni3c(seed: int = 9) -> Tensors:
    """A Uni3C control model for Wan, which ComfyUI keeps among its model patches; one block."""
    from comfy.ldm.wan.uni3c import WanUni3CControlnet

    return _built(
        WanUni3CControlnet,
        seed,
        in_channels=36,
        conv_out_dim=256,
        dim=256,
        ffn_dim=512,
        num_layers=1,
        time_embed_dim=256,
        out_proj_dim=256,
        add_channels=7,
        mid_channels=64,
    )


# Text encoders. ComfyUI reads their sizes from configurations of its own; the options make it build tiny ones.

CLIP_L_OPTIONS: dict[str, Any] = {
    "model_config": {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "projection_dim": 256,
    }
}
T5_OPTIONS: dict[str, Any] = {
    "t5base_model_config": {"d_model": 256, "d_ff": 512, "d_kv": 64, "num_heads": 4, "num_layers": 2}
}


def clip_l(seed: int = 10) -> Tensors:
    """CLIP-L's text model with two layers, 256 wide, and the full vocabulary."""
    return _clip_l(seed, **CLIP_L_OPTIONS["model_config"])


def t5_base(seed: int = 11) -> Tensors:
    """T5's encoder with two layers, 256 wide, and the full vocabulary."""
    return _t5(seed, **T5_OPTIONS["t5base_model_config"])


def clip_l_whole(seed: int = 12) -> Tensors:
    """CLIP-L's text model in its real size (123 M weights): loader nodes take no options for a tiny one."""
    return _clip_l(seed, hidden_size=768, intermediate_size=3072, num_attention_heads=12, num_hidden_layers=12)


def t5_base_repeated(seed: int = 18) -> Tensors:
    """T5's encoder in the real size of its base version, of which two blocks are made; see :func:`repeated`."""
    return _t5(seed, d_model=768, d_ff=3072, d_kv=64, num_heads=12, num_layers=2)


def umt5_base_repeated(seed: int = 19) -> Tensors:
    """UMT5's encoder (ACE-Step) in the real size of its base version, of which two blocks are made, with a tokenizer.

    The real vocabulary has 256,384 rows.
    """
    more = {"model_type": "umt5", "is_gated_act": True, "dense_act_fn": "gelu_pytorch_tanh", "vocab_size": 256384}
    tensors = _t5(seed, d_model=768, d_ff=2048, d_kv=64, num_heads=12, num_layers=2, **more)
    return {**tensors, "spiece_model": tokenizer()}


def qwen3_06b_repeated(seed: int = 20) -> Tensors:
    """Qwen3 0.6B in its real size, of which two layers are made; see :func:`repeated`."""
    from comfy.text_encoders.llama import Qwen3_06B

    return _encoder(Qwen3_06B, {"num_hidden_layers": 2}, seed)


def repeated(tensors: Tensors, block: str, count: int) -> Tensors:
    """`tensors` with `count` blocks in all: further ones are copies of the second, `<block>.1.`.

    Real sizes are fixed by ComfyUI for encoders of a loader node; random weights for each block would take minutes.
    """
    second = f"{block}.1."
    copies = {
        f"{block}.{index}.{name.removeprefix(second)}": tensor.clone()
        for index in range(2, count)
        for name, tensor in tensors.items()
        if name.startswith(second)
    }
    return {**tensors, **copies}


def tokenizer() -> torch.Tensor:
    """A SentencePiece model of single letters, as the bytes that encoder files carry (`spiece_model`)."""
    import io

    from sentencepiece import SentencePieceTrainer

    written = io.BytesIO()
    letters = ["abcdefghijklmnopqrstuvwxyz " * 4] * 4
    SentencePieceTrainer.train(
        sentence_iterator=iter(letters),
        model_writer=written,
        model_type="char",
        vocab_size=32,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return torch.frombuffer(bytearray(written.getvalue()), dtype=torch.uint8)


def _clip_l(seed: int, **sizes: Any) -> Tensors:
    from comfy.clip_model import CLIPTextModel

    config = {"max_position_embeddings": 77, "vocab_size": 49408, "hidden_act": "quick_gelu", "eos_token_id": 49407}
    return _encoder(CLIPTextModel, {**config, **sizes}, seed)


def _t5(seed: int, **sizes: Any) -> Tensors:
    from comfy.text_encoders.t5 import T5

    config = {"dense_act_fn": "relu", "is_gated_act": False, "model_type": "t5", "vocab_size": 32128}
    tensors = _encoder(T5, {**config, **sizes}, seed)
    for name in [n for n in tensors if n.endswith(".SelfAttention.q.weight")]:
        tensors[name] *= sizes["d_kv"] ** -0.5  # T5 keeps the scale of its attention in this weight
    return tensors


def _encoder(model_class: Any, config: dict[str, Any], seed: int) -> Tensors:
    import comfy.ops

    return randomised(model_class(config, torch.bfloat16, "cpu", comfy.ops.disable_weight_init), seed)


# Autoencoders


def kl_vae(seed: int = 14) -> Tensors:
    """Stable Diffusion's autoencoder with a decoder of a quarter of the width, under the names that diffusers gives.

    There the query, key, value and output of its two attention layers are linears, which a quantiser can pack;
    ComfyUI turns them into 1 x 1 convolutions.
    """
    from comfy.diffusers_convert import vae_conversion_map
    from comfy.ldm.models.autoencoder import AutoencoderKL

    encoder = {
        "double_z": True,
        "z_channels": 4,
        "resolution": 256,
        "in_channels": 3,
        "out_ch": 3,
        "ch": 128,
        "ch_mult": [1, 2, 4, 4],
        "num_res_blocks": 2,
        "attn_resolutions": [],
        "dropout": 0.0,
    }
    vae = AutoencoderKL(ddconfig=encoder, decoder_ddconfig={**encoder, "ch": 32}, embed_dim=4)
    attention = {"norm": "group_norm", "q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0"}
    out: Tensors = {}
    for key, value in randomised(vae, seed).items():
        name, tensor = key, value
        if ".attn_1." in name:
            prefix, part, kind = name.rsplit(".", 2)
            name = f"{prefix}.{attention[part]}.{kind}"
            tensor = tensor.flatten(1) if tensor.dim() == 4 else tensor
        for ours, theirs in vae_conversion_map:
            name = name.replace(ours, theirs)
        out[name] = tensor
    # Small: the decoder's output is a picture in -1..1, and random weights would saturate it.
    out["decoder.conv_out.weight"] *= 0.1
    return out


def video_taesd(seed: int = 15) -> Tensors:
    """The tiny autoencoder for Wan's latents (TAEHV)."""
    from comfy.taesd.taehv import TAEHV

    tensors = randomised(TAEHV(latent_channels=16), seed)
    # Its blocks add to what they are given, without a norm between them.
    return {name: tensor * 0.5 if tensor.dim() == 4 else tensor for name, tensor in tensors.items()}


def linears(tensors: Tensors, multiple: int = 1, smallest: int = 64) -> list[str]:
    """The names of all matrices that a quantiser for groups of `multiple` input columns can pack, sorted."""
    return sorted(
        name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if name.endswith(".weight")
        and tensor.dim() == 2
        and min(tensor.shape) >= smallest
        and tensor.shape[1] % multiple == 0
        and "embed" not in name
        and "shared" not in name
    )
