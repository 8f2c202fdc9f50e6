"""Small models, the files made of them, and patchers loaded from those files."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import in_process  # noqa: F401  (prepares ComfyUI before anything imports it)
from quant_loader.demo import models, quantize


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


@pytest.fixture
def stock_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Path]:
    """ComfyUI's ModelSave node, writing into a folder of the test."""
    import folder_paths

    monkeypatch.setattr(folder_paths, "output_directory", str(tmp_path / "output"))
    from comfy_extras.nodes_model_merging import ModelSave

    def save(patcher: Any) -> Path:
        ModelSave().save(patcher, "saved/model")
        (path,) = (tmp_path / "output" / "saved").iterdir()
        return path

    return save


@pytest.fixture(autouse=True)
def _unloaded() -> Any:
    """Every test starts and ends with no model loaded."""
    import comfy.model_management

    yield
    comfy.model_management.unload_all_models()
