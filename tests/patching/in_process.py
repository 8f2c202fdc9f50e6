"""ComfyUI in this process, on the CPU: importing this module prepares it; then what the tests of this folder share."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from quant_loader.demo import models, quantize
from quant_loader.demo.paths import comfyui_tree


def _host() -> None:
    """Put ComfyUI on the path and pin it to the CPU: both must happen before its first import."""
    tree = comfyui_tree()
    if not (tree / "comfy" / "model_patcher.py").is_file():
        raise pytest.UsageError(
            f"There is no ComfyUI at {tree}. Run 'make setup', or point COMFYUI_PATH to a checkout: "
            "these tests load models through ComfyUI's own code."
        )
    if str(tree) not in sys.path:
        sys.path.insert(0, str(tree))
    import comfy.cli_args

    comfy.cli_args.args.cpu = True


_host()
torch.set_num_threads(1)

FORMATS = tuple(quantize.QUANTIZERS)


@dataclass(frozen=True)
class Inputs:
    """One denoiser call of a tiny Flux."""

    x: torch.Tensor
    sigma: torch.Tensor
    context: torch.Tensor
    vector: torch.Tensor


def flux_inputs(seed: int = 5, batch: int = 1) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    return Inputs(
        torch.randn(batch, models.LATENT_CHANNELS, 8, 8, generator=generator),
        torch.full((batch,), 0.6),
        torch.randn(batch, 77, models.CONTEXT, generator=generator),
        torch.randn(batch, models.VECTOR, generator=generator),
    )


def denoise(patcher: Any, inputs: Inputs | None = None, **options: Any) -> torch.Tensor:
    """Load the patcher as a sampler would, and call the model once."""
    import comfy.model_management

    inputs = inputs or flux_inputs()
    comfy.model_management.load_models_gpu([patcher])
    patcher.pre_run()
    with torch.no_grad():
        out = patcher.model.apply_model(inputs.x, inputs.sigma, c_crossattn=inputs.context, y=inputs.vector, **options)
    patcher.cleanup()
    return out


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """``||a - b|| / ||b||`` in float64."""
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm())
