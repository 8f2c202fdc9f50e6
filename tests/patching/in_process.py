"""ComfyUI in this process, on the CPU: importing this module prepares it; then what the tests of this folder share."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
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


def run_as_it_is(patcher: Any, inputs: Inputs | None = None) -> torch.Tensor:
    """One call without loading anything first."""
    inputs = inputs or flux_inputs()
    with torch.no_grad():
        return patcher.model.apply_model(inputs.x, inputs.sigma, c_crossattn=inputs.context, y=inputs.vector)


def with_lora(patcher: Any, strength: float = 0.7, layers: Collection[str] | None = None, size: float = 0.05) -> Any:
    """A clone with random LoRA matrices of rank 4 on its packed layers, or on the weights ``layers``, packed or not."""
    import comfy.utils
    from comfy.weight_adapter import LoRAAdapter
    from quant_loader.patching.patcher import packed_modules

    generator = torch.Generator().manual_seed(2)
    patches = {}
    for key in packed_modules(patcher.model) if layers is None else layers:
        N, K = comfy.utils.get_attr(patcher.model, key).shape
        up, down = torch.randn(N, 4, generator=generator) * size, torch.randn(4, K, generator=generator) / K**0.5
        patches[key] = LoRAAdapter(set(), (up, down, 4.0, None, None, None))
    patched = patcher.clone()
    patched.add_patches(patches, strength)
    return patched


def partly_loaded(patcher: Any) -> Iterator[torch.Tensor]:
    """What the model computes with half of its bytes on the device, and with none: as under --lowvram and --novram."""
    device = torch.device("cpu")
    for budget in (patcher.model_size() // 2, 1):
        patcher.load(device, lowvram_model_memory=budget)
        patcher.inject_model()
        assert patcher.model.model_lowvram
        assert patcher.loaded_size() < patcher.model_size()
        yield run_as_it_is(patcher)
        patcher.detach()
        assert patcher.loaded_size() == 0


def rebuilt(patcher: Any) -> Any:
    """The model built again as ComfyUI does it for one that was dropped."""
    build, arguments = patcher.cached_patcher_init
    return build(*arguments, disable_dynamic=True)


def aligned(patcher: Any) -> Any:
    """``patcher`` with its plain weights at addresses of torch's choice instead of where their file has them.

    The last bits of a product with one row depend on how its weight is aligned (MKL on AMD), which must not tell two
    files with the same tensors apart.
    """
    for module in patcher.model.modules():
        if getattr(module, "spec", None) is None:
            for key, parameter in module.named_parameters(recurse=False):
                setattr(module, key, torch.nn.Parameter(parameter.detach().clone(), requires_grad=False))
    return patcher


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in dtype, shape and every byte."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (a, b)))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """``||a - b|| / ||b||`` in float64."""
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm())
