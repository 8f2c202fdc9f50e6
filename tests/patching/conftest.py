"""ComfyUI in this process, on the CPU; small models and the files made of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
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
    comfy.cli_args.args.base_directory = None


_host()
os.environ.setdefault("OMP_NUM_THREADS", "1")
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


def denoise(patcher: Any, inputs: Inputs | None = None) -> torch.Tensor:
    """Load the patcher as a sampler would, and call the model once."""
    import comfy.model_management

    inputs = inputs or flux_inputs()
    comfy.model_management.load_models_gpu([patcher])
    patcher.pre_run()
    with torch.no_grad():
        out = patcher.model.apply_model(inputs.x, inputs.sigma, c_crossattn=inputs.context, y=inputs.vector)
    patcher.cleanup()
    return out


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """``||a - b|| / ||b||`` in float64."""
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm())


@pytest.fixture(scope="session")
def base_tensors() -> dict[str, torch.Tensor]:
    return models.flux_state_dict()


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory, base_tensors: dict[str, torch.Tensor]) -> Callable[..., Path]:
    """``files(quantiser, pack_inputs=False)``: the tiny Flux as a file, made once; ``"base"`` is the 16-bit one."""
    folder = tmp_path_factory.mktemp("models")

    def path(quantizer: str, pack_inputs: bool = False) -> Path:
        target = folder / f"{quantizer}{'_inputs' if pack_inputs else ''}.safetensors"
        if not target.exists():
            if quantizer == "base":
                quantize.save(target, base_tensors)
            else:
                quantize.save(target, *quantize.quantize(base_tensors, quantizer, pack_inputs))
        return target

    return path


@pytest.fixture
def load(files: Callable[..., Path]) -> Callable[..., Any]:
    """``load(quantiser)``: a fresh ModelPatcher of ours for that file."""
    from quant_loader.patching.load import load_diffusion_model

    def loaded(quantizer: str, pack_inputs: bool = False, execution: str = "auto", rules: str = "strict") -> Any:
        return load_diffusion_model([files(quantizer, pack_inputs)], rules, execution)[0]

    return loaded


@pytest.fixture
def load_base(files: Callable[..., Path]) -> Callable[[], Any]:
    """The 16-bit model through ComfyUI's own loader."""
    import comfy.sd

    return lambda: comfy.sd.load_diffusion_model(str(files("base")))


@pytest.fixture(autouse=True)
def _unloaded() -> Any:
    """Every test starts and ends with no model loaded."""
    import comfy.model_management

    yield
    comfy.model_management.unload_all_models()
