"""A real ComfyUI in a benchmark's child process: models of any width, loaded by either side and sampled.

`prepare` comes first, before anything imports ComfyUI. The sides are

- ``dense``: the 16-bit file through ComfyUI's own loader, what both others are compared with;
- ``stock``: the quantised file through ComfyUI's own loader;
- ``ours``: the quantised file through this pack, with an execution mode.
"""

from __future__ import annotations

import importlib
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from quant_loader.demo import models, quantize
from quant_loader.demo.paths import comfyui_tree
from quant_loader.kernels import Mode

DENSE = "dense"
HEAD = 128  # Flux's axes_dim sum
MODES: tuple[Mode, ...] = ("auto", "native", "int8", "exact")

#: What a loader or a sampler raises on a file it cannot handle. Anything else ends the child.
STOCK_ERRORS = (KeyError, RuntimeError, ValueError, TypeError, AttributeError)

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Size:
    """A Flux: channels, blocks of both kinds, image and text tokens."""

    hidden: int
    double: int
    single: int
    image_tokens: int
    text_tokens: int

    def __str__(self) -> str:
        return (
            f"{self.hidden} channels, {self.double} double and {self.single} single blocks, {self.image_tokens} image "
            f"and {self.text_tokens} text tokens"
        )

    @property
    def operations(self) -> float:
        """Multiplications and additions of a step's linears: 12 H^2 weights a stream and block act on every token."""
        tokens = self.image_tokens + self.text_tokens
        return 2.0 * 12 * self.hidden**2 * tokens * (self.double + self.single)


def flux_state_dict(size: Size, seed: int = 1) -> Tensors:
    """A Flux with random bfloat16 weights of unit gain, named as in the original files."""
    generator = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for name, (N, K), gain in _linears(size):
        tensors[f"{name}.weight"] = (torch.randn(N, K, generator=generator) * math.sqrt(gain / K)).bfloat16()
        tensors[f"{name}.bias"] = (0.02 * torch.randn(N, generator=generator)).bfloat16()
    norms = [f"double_blocks.{i}.{stream}_attn.norm" for i in range(size.double) for stream in ("img", "txt")]
    for norm in (*norms, *(f"single_blocks.{i}.norm" for i in range(size.single))):
        for side in ("query_norm", "key_norm"):
            tensors[f"{norm}.{side}.scale"] = torch.ones(HEAD, dtype=torch.bfloat16)
    return tensors


def _linears(size: Size) -> Iterator[tuple[str, tuple[int, int], float]]:
    """(name, (N, K), gain) of every linear."""
    H = size.hidden
    yield "img_in", (H, models.PATCH_CHANNELS), 1.0
    yield "txt_in", (H, models.CONTEXT), 1.0
    for name, width in (("time_in", models.TIME_EMBEDDING), ("vector_in", models.VECTOR)):
        yield f"{name}.in_layer", (H, width), 1.0
        yield f"{name}.out_layer", (H, H), 1.0
    yield from quantised_linears(size)
    yield "final_layer.adaLN_modulation.1", (2 * H, H), 1.0
    # The large gain lets the model, not the noise it starts from, make the picture.
    yield "final_layer.linear", (models.PATCH_CHANNELS, H), 16.0


def quantised_linears(size: Size) -> Iterator[tuple[str, tuple[int, int], float]]:
    """(name, (N, K), gain) of the linears that a quantised file packs."""
    H = size.hidden
    for i in range(size.double):
        for stream in ("img", "txt"):
            block = f"double_blocks.{i}.{stream}"
            yield f"{block}_mod.lin", (6 * H, H), 1.0
            yield f"{block}_attn.qkv", (3 * H, H), 1.0
            yield f"{block}_attn.proj", (H, H), 1.0
            yield f"{block}_mlp.0", (4 * H, H), 1.0
            yield f"{block}_mlp.2", (H, 4 * H), 1.0
    for i in range(size.single):
        yield f"single_blocks.{i}.linear1", (7 * H, H), 1.0
        yield f"single_blocks.{i}.linear2", (H, 5 * H), 1.0
        yield f"single_blocks.{i}.modulation.lin", (3 * H, H), 1.0


def write_models(folder: Path, tensors: Tensors, formats: tuple[str, ...]) -> None:
    """The 16-bit model and its quantised versions, as `file_of` names them."""
    quantize.save(file_of(folder, DENSE), tensors)
    for fmt in formats:
        quantize.save(file_of(folder, fmt), *quantize.quantize(tensors, fmt))


def file_of(folder: Path, fmt: str) -> Path:
    return folder / f"{fmt}.safetensors"


def prepare(device: str) -> None:
    """Puts ComfyUI on the path and tells it the device, before its first import: "cpu", "cuda" or "auto"."""
    tree = str(comfyui_tree())
    if tree not in sys.path:
        sys.path.insert(0, tree)
    import comfy.cli_args

    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this PyTorch finds no CUDA device; use cpu or auto")
    comfy.cli_args.args.cpu = device == "cpu" or not torch.cuda.is_available()


def preload() -> None:
    """Imports what a server with this pack has imported when it is up, after `prepare`."""
    for module in ("server", "nodes", "comfy.sample", "quant_loader.nodes"):
        importlib.import_module(module)
    from quant_loader.patching import host

    host.preload()  # as the extension's on_load does, which needs a server for the rest of its work


def load(side: str, path: Path, execution: str = "auto") -> Any:
    """The ModelPatcher of a file."""
    if side == "ours":
        from quant_loader.patching.load import load_diffusion_model

        return load_diffusion_model([path], "strict", execution)[0]
    import comfy.sd

    return comfy.sd.load_diffusion_model(str(path))


def unload() -> None:
    """Lets go of every loaded model."""
    import comfy.model_management

    comfy.model_management.unload_all_models()
    comfy.model_management.soft_empty_cache()


@dataclass(frozen=True)
class Sampled:
    """The latent after sampling, and seconds of each step's model call by the wall clock and in CPU time."""

    latent: torch.Tensor
    wall: list[float]
    cpu: list[float]


def sample(patcher: Any, size: Size, steps: int, seed: int = 5) -> Sampled:
    """ComfyUI's own Euler sampler on noise, with the model's call timed (the device synchronised at both ends)."""
    import comfy.sample

    generator = torch.Generator().manual_seed(seed)
    rows = 1 << (math.isqrt(size.image_tokens).bit_length() - 1)
    noise = torch.randn(1, models.LATENT_CHANNELS, 2 * rows, 2 * (size.image_tokens // rows), generator=generator)
    context = torch.randn(1, size.text_tokens, models.CONTEXT, generator=generator)
    conditioning = [[context, {"pooled_output": torch.randn(1, models.VECTOR, generator=generator)}]]
    wall: list[float] = []
    cpu: list[float] = []

    def timed(apply_model: Any, call: dict[str, Any]) -> torch.Tensor:
        synchronise()
        started, started_cpu = time.perf_counter(), time.process_time()
        out: torch.Tensor = apply_model(call["input"], call["timestep"], **call["c"])
        synchronise()
        wall.append(time.perf_counter() - started)
        cpu.append(time.process_time() - started_cpu)
        return out

    watched = patcher.clone()
    watched.set_model_unet_function_wrapper(timed)
    latent = comfy.sample.sample(
        watched,
        noise,
        steps,
        1.0,
        "euler",
        "simple",
        conditioning,
        conditioning,
        torch.zeros_like(noise),
        disable_pbar=True,
        seed=seed,
    )
    return Sampled(latent.float().cpu(), wall, cpu)


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """``||a - b|| / ||b||`` in float64; infinite where a is not finite."""
    a, b = a.double(), b.double()
    error = float((a - b).norm() / b.norm())
    return error if math.isfinite(error) else math.inf
