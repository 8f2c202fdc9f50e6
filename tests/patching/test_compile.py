"""torch.compile sees one opaque operator per quantised linear, with or without a LoRA beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from in_process import FORMATS, denoise
from quant_loader import kernels
from quant_loader.patching.patcher import packed_modules

NAME = "diffusion_model.double_blocks.0.img_mlp.0.weight"


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def lora_on(patcher: Any) -> Any:
    from comfy.weight_adapter import LoRAAdapter

    generator = torch.Generator().manual_seed(2)
    up, down = torch.randn(1024, 8, generator=generator) * 0.05, torch.randn(8, 256, generator=generator) * 0.06
    patched = patcher.clone()
    patched.add_patches({NAME: LoRAAdapter(set(), (up, down, 8.0, None, None, None))}, 0.7)
    return patched


def linears_run() -> int:
    """How many linears ran in this process, compiled ones included; decoding a weight for one counts separately."""
    return sum(count for (operator, _), count in kernels.calls().items() if "_linear" in operator)


@pytest.mark.parametrize("quantizer", FORMATS)
def test_a_linear_is_one_graph_and_computes_the_same(quantizer: str, load: Callable[..., Any]) -> None:
    patcher = load(quantizer)
    module = packed_modules(patcher.model)[NAME]
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(3))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        plain = module(x)
        before = linears_run()
        assert torch.equal(compiled(x), plain)
        assert linears_run() == before + 1
        patched = lora_on(patcher)
        denoise(patched)
        beside = module(x)
        assert not torch.equal(beside, plain)
        assert torch.equal(compiled(x), beside)
        denoise(patcher)
        assert torch.equal(compiled(x), plain)


def test_torch_compile_model_keeps_the_picture_and_the_lora(load: Callable[..., Any]) -> None:
    """As ComfyUI's TorchCompileModel node does it, for one block and with a backend that needs no C++ compiler."""
    from comfy.patcher_extension import WrappersMP
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    def run(patcher: Any) -> torch.Tensor:
        options = patcher.model_options["transformer_options"].copy()
        options["wrappers"] = {WrappersMP.APPLY_MODEL: patcher.wrappers[WrappersMP.APPLY_MODEL]}
        return denoise(patcher, transformer_options=options)

    patcher = load("int8_convrot")
    patched = lora_on(patcher)
    plain, beside = denoise(patcher), denoise(patched)
    torch._dynamo.utils.counters.clear()
    for source, wanted in ((patcher, plain), (patched, beside)):
        compiled = source.clone(disable_dynamic=True)
        set_torch_compile_wrapper(model=compiled, backend="aot_eager", keys=["diffusion_model.single_blocks.0"])
        assert torch.equal(run(compiled), wanted)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert torch.equal(denoise(patcher), plain)


def test_the_matrices_of_a_lora_are_on_the_device_before_a_graph_is_made(load: Callable[..., Any]) -> None:
    """Made inside a graph they would be moved on every call."""
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    compiled = lora_on(load("int8_row")).clone(disable_dynamic=True)
    set_torch_compile_wrapper(model=compiled, backend="aot_eager", keys=["diffusion_model.single_blocks.0"])
    module = packed_modules(compiled.model)[NAME]
    with compiled.use_ejected(skip_and_inject_on_exit_only=True):
        compiled.patch_model(load_weights=False)
    compiled.pre_run()
    made = dict(module.side_path._on_device)
    assert list(made) == [(compiled.load_device, compiled.model.get_dtype_inference())]
    torch.compile(module, backend="aot_eager", fullgraph=True)(
        torch.zeros(2, 256, dtype=compiled.model.get_dtype_inference())
    )
    assert module.side_path._on_device == made
    assert all(module.side_path._on_device[key] is matrices for key, matrices in made.items())
    compiled.cleanup()
