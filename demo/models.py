"""Tiny random-weight models that stock ComfyUI detects: a Flux transformer and a TAESD autoencoder.

The transformer has the tensor names and the proportions of Flux (hidden size 256, one double and one single block), so
that loaders, samplers and quantisers treat it as the real thing; its pictures are abstract. ComfyUI is not needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN = 256  # two heads of 128 (Flux's axes_dim sum), and one full ConvRot group
MLP = 4 * HIDDEN
LATENT_CHANNELS = 16
PATCH_CHANNELS = 4 * LATENT_CHANNELS  # Flux folds 2 x 2 latent pixels into one token
CONTEXT = 1024  # what the stock node LotusConditioning emits
VECTOR = 64
TIME_EMBEDDING = 256
TAESD_WIDTH = 64


def flux_state_dict(seed: int = 1, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """A Flux (schnell layout: no guidance input) with 1 + 1 blocks and random weights, named as in the original files.

    Weights are Gaussian with a variance of `gain` / in_features, which keeps activations near unit size.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}

    def linear(name: str, out_features: int, in_features: int, gain: float = 1.0) -> None:
        weight = torch.randn(out_features, in_features, generator=generator) * math.sqrt(gain / in_features)
        tensors[f"{name}.weight"] = weight.to(dtype)
        tensors[f"{name}.bias"] = (0.02 * torch.randn(out_features, generator=generator)).to(dtype)

    def attention_norm(name: str) -> None:
        for side in ("query_norm", "key_norm"):
            tensors[f"{name}.{side}.scale"] = torch.ones(HIDDEN // 2, dtype=dtype)

    linear("img_in", HIDDEN, PATCH_CHANNELS)
    linear("txt_in", HIDDEN, CONTEXT)
    for name, width in (("time_in", TIME_EMBEDDING), ("vector_in", VECTOR)):
        linear(f"{name}.in_layer", HIDDEN, width)
        linear(f"{name}.out_layer", HIDDEN, HIDDEN)
    for stream in ("img", "txt"):
        block = f"double_blocks.0.{stream}"
        linear(f"{block}_mod.lin", 6 * HIDDEN, HIDDEN)
        linear(f"{block}_attn.qkv", 3 * HIDDEN, HIDDEN)
        attention_norm(f"{block}_attn.norm")
        linear(f"{block}_attn.proj", HIDDEN, HIDDEN)
        linear(f"{block}_mlp.0", MLP, HIDDEN)
        linear(f"{block}_mlp.2", HIDDEN, MLP)
    linear("single_blocks.0.linear1", 3 * HIDDEN + MLP, HIDDEN)
    linear("single_blocks.0.linear2", HIDDEN, HIDDEN + MLP)
    attention_norm("single_blocks.0.norm")
    linear("single_blocks.0.modulation.lin", 3 * HIDDEN, HIDDEN)
    linear("final_layer.adaLN_modulation.1", 2 * HIDDEN, HIDDEN)
    # The large gain lets the model, not the noise it starts from, make the picture.
    linear("final_layer.linear", PATCH_CHANNELS, HIDDEN, gain=16.0)
    return tensors


def taesd_state_dict(seed: int = 2) -> dict[str, torch.Tensor]:
    """A TAESD autoencoder for 16 latent channels with random weights (float16), as ComfyUI's VAELoader reads it.

    Every 3 x 3 convolution mixes channels at random and blurs, which turns latents into soft clouds of colour: a
    difference between two pictures is easier to see there than in noise.
    """
    generator = torch.Generator().manual_seed(seed)
    binomial = torch.tensor([1.0, 2.0, 1.0]) / 4.0
    blur = torch.outer(binomial, binomial)
    tensors: dict[str, torch.Tensor] = {}

    def conv(name: str, out_channels: int, in_channels: int, bias: bool = True, gain: float = 2.0) -> None:
        mixing = torch.randn(out_channels, in_channels, 1, 1, generator=generator) * math.sqrt(gain / in_channels)
        tensors[f"{name}.weight"] = (mixing * blur).half()
        if bias:
            tensors[f"{name}.bias"] = torch.zeros(out_channels, dtype=torch.float16)

    def block(name: str) -> None:
        for index in (0, 2, 4):
            conv(f"{name}.conv.{index}", TAESD_WIDTH, TAESD_WIDTH, gain=0.5)

    def three_blocks(prefix: str, first: int) -> Iterator[str]:
        return (f"{prefix}.{first + offset}" for offset in range(3))

    conv("taesd_encoder.0", TAESD_WIDTH, 3)
    block("taesd_encoder.1")
    for first in (2, 6, 10):
        conv(f"taesd_encoder.{first}", TAESD_WIDTH, TAESD_WIDTH, bias=False)
        for name in three_blocks("taesd_encoder", first + 1):
            block(name)
    conv("taesd_encoder.14", LATENT_CHANNELS, TAESD_WIDTH)

    conv("taesd_decoder.1", TAESD_WIDTH, LATENT_CHANNELS)
    for first in (3, 8, 13):
        for name in three_blocks("taesd_decoder", first):
            block(name)
        conv(f"taesd_decoder.{first + 4}", TAESD_WIDTH, TAESD_WIDTH, bias=False)
    block("taesd_decoder.18")
    # Small: the decoder's output is a picture in 0..1, and random weights would saturate it.
    conv("taesd_decoder.19", 3, TAESD_WIDTH, gain=0.08)
    tensors["taesd_decoder.19.bias"] += 0.5
    tensors["vae_scale"] = torch.tensor(1.0)
    tensors["vae_shift"] = torch.tensor(0.0)
    return tensors


def write_taesd(path: Path, seed: int = 2) -> None:
    save_file(taesd_state_dict(seed), path)
