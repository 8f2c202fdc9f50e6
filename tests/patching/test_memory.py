"""Offload, partial loads, unloading and rebuilding: the same bits, the true sizes, no second copy of the weights."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.utils
import pytest
import torch
from in_process import FORMATS, denoise, partly_loaded, run_as_it_is, with_lora
from quant_loader.demo import quantize
from quant_loader.patching.patcher import packed_modules

CPU = torch.device("cpu")


@pytest.mark.parametrize("quantizer", FORMATS)
@pytest.mark.parametrize("patched", [False, True], ids=["plain", "lora"])
def test_partly_loaded_models_give_the_same_bits(quantizer: str, patched: bool, load: Callable[..., Any]) -> None:
    """As under --lowvram and --novram: some or all layers stay offloaded and are cast for each call."""
    patcher = load(quantizer)
    patcher = with_lora(patcher) if patched else patcher
    fresh = denoise(patcher)
    patcher.detach()
    assert all(torch.equal(out, fresh) for out in partly_loaded(patcher))


def test_partial_unloading_and_reloading_gives_the_same_bits(load: Callable[..., Any]) -> None:
    patcher = with_lora(load("int8_convrot"))
    fresh = denoise(patcher)
    whole = patcher.loaded_size()
    assert whole == patcher.model_size()
    freed = patcher.partially_unload(CPU, whole // 2)
    assert freed >= whole // 2
    assert patcher.loaded_size() == whole - freed
    assert torch.equal(run_as_it_is(patcher), fresh)
    patcher.partially_load(CPU, 1e32)
    assert patcher.loaded_size() == whole
    assert torch.equal(run_as_it_is(patcher), fresh)


@pytest.mark.parametrize("quantizer", ["int8_convrot", "nvfp4"])
def test_unloading_everything_and_a_second_load_give_the_same_bits(quantizer: str, load: Callable[..., Any]) -> None:
    patcher = load(quantizer)
    fresh = denoise(patcher)
    comfy.model_management.unload_all_models()
    assert patcher.loaded_size() == 0
    assert torch.equal(denoise(patcher), fresh)
    assert torch.equal(denoise(load(quantizer)), fresh)


@pytest.mark.parametrize("quantizer", FORMATS)
def test_a_dropped_model_is_rebuilt_from_its_file(quantizer: str, load: Callable[..., Any]) -> None:
    patcher = load(quantizer)
    fresh = denoise(patcher)
    build, arguments = patcher.cached_patcher_init
    del patcher
    gc.collect()
    again = build(*arguments, disable_dynamic=True)
    assert type(again).__name__ == "QuantModelPatcher"
    assert torch.equal(denoise(again), fresh)


@pytest.mark.parametrize("quantizer", FORMATS)
def test_codes_stay_the_memory_mapped_ones(
    quantizer: str, files: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading copies no code and no scale: the tensors of the model are the tensors that the file reader gave."""
    from quant_loader.patching import state_dict
    from quant_loader.patching.load import load_diffusion_model

    given: dict[str, int] = {}
    read = state_dict.read

    def watched(paths: list[str], **kwargs: Any) -> Any:
        sd, metadata = read(paths, **kwargs)
        given.update({name: tensor.data_ptr() for name, tensor in sd.items()})
        return sd, metadata

    monkeypatch.setattr(state_dict, "read", watched)
    patcher, report = load_diffusion_model([files(quantizer)])
    specs = {spec.name: spec for spec in report.layers}
    denoise(patcher)
    for key, module in packed_modules(patcher.model).items():
        spec = specs[key.removeprefix("diffusion_model.").removesuffix(".weight")]
        assert module.weight._qdata.data_ptr() == given[spec.tensors["weight"]]
        for suffix, tensor in module.weight._params.companions().items():
            assert tensor.data_ptr() == given[spec.tensors[suffix]], suffix


def test_a_packed_weight_is_moved_as_it_is_never_cast(load: Callable[..., Any]) -> None:
    """Dynamic VRAM forces small layers over with a cast; ComfyUI's own would leave a dense weight behind."""
    patcher = load("nvfp4")
    key, module = next(iter(packed_modules(patcher.model).items()))
    packed = module.weight
    assert patcher.patch_weight_to_device(key, device_to=CPU) is packed
    assert patcher.patch_weight_to_device(key, device_to=CPU, return_weight=True)._layout_cls == packed._layout_cls
    patcher.patch_weight_to_device(key, device_to=CPU, force_cast=True)
    assert module.weight._layout_cls == packed._layout_cls
    assert patcher.backup.pop(key).weight is packed


def test_an_offload_buffer_holds_a_packed_weight(load: Callable[..., Any]) -> None:
    """ComfyUI streams offloaded layers through one byte buffer, as views into it."""
    import comfy.memory_management
    from quant_loader.patching.packed import plain_tensors

    patcher = load("nvfp4")
    module = next(iter(packed_modules(patcher.model).values()))
    weight = module.weight.detach()
    buffer = torch.empty(comfy.memory_management.vram_aligned_size([weight]), dtype=torch.uint8)
    (view,) = comfy.memory_management.interpret_gathered_like([weight], buffer)
    view.copy_(weight)
    for suffix, tensor in plain_tensors(weight).items():
        copied = plain_tensors(view)[suffix]
        assert copied.untyped_storage().data_ptr() == buffer.data_ptr()
        assert torch.equal(copied.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), suffix
    x = torch.randn(3, module.in_features, generator=torch.Generator().manual_seed(1))
    assert torch.equal(module._linear(x, view, None), module._linear(x, weight, None))


def test_a_weight_wrapper_gets_the_dense_weight(load: Callable[..., Any]) -> None:
    """Nodes may wrap a weight (add_weight_wrapper): they see dense values and theirs are used."""
    patcher = load("int8_convrot")
    plain = denoise(patcher)
    key = "diffusion_model.double_blocks.0.img_mlp.2.weight"
    wrapped = patcher.clone()
    wrapped.add_weight_wrapper(key, lambda weight: weight * 0.0)
    module = packed_modules(patcher.model)[key]
    wrapped.load(CPU, lowvram_model_memory=1)
    x = torch.randn(3, module.in_features, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(module(x), module.bias.expand(3, -1))
    wrapped.detach()
    assert torch.equal(denoise(patcher), plain)


# Loading itself


def test_loading_shows_progress_and_can_be_interrupted(
    files: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from quant_loader.patching.load import load_diffusion_model

    steps: list[tuple[int, int]] = []
    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_ENABLED", True)
    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", lambda value, total, *_, **__: steps.append((value, total)))
    load_diffusion_model([files("int8_row")])
    assert steps[-1][0] == steps[-1][1] > 10
    assert [value for value, _ in steps] == sorted(value for value, _ in steps)

    before = len(comfy.model_management.current_loaded_models)
    comfy.model_management.interrupt_current_processing(True)
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        load_diffusion_model([files("int8_row")])
    assert len(comfy.model_management.current_loaded_models) == before
    load_diffusion_model([files("int8_row")])


def test_a_failed_load_leaves_nothing(tmp_path: Path, base_tensors: quantize.Tensors, load: Callable[..., Any]) -> None:
    """Not the tensors, not a model among the loaded ones, not a change to the model that is loaded."""
    from quant_loader.patching.errors import ModelMismatch
    from quant_loader.patching.load import load_diffusion_model

    patcher = load("int8_row")
    fresh = denoise(patcher)
    tensors = {**base_tensors, "double_blocks.0.img_mlp.7.weight": torch.randn(64, 64).to(torch.bfloat16)}
    path = quantize.save(tmp_path / "m.safetensors", *quantize.quantize(tensors, "int8_row"))
    gc.collect()
    alive = sum(isinstance(o, torch.Tensor) for o in gc.get_objects())
    loaded = list(comfy.model_management.current_loaded_models)
    with pytest.raises(ModelMismatch) as failure:
        load_diffusion_model([path])
    del failure
    gc.collect()
    assert sum(isinstance(o, torch.Tensor) for o in gc.get_objects()) <= alive + 8
    assert list(comfy.model_management.current_loaded_models) == loaded
    assert torch.equal(denoise(patcher), fresh)


@pytest.mark.parametrize("quantizer", ["int8_convrot", "nvfp4"])
def test_a_copy_of_a_layer_runs_by_itself(quantizer: str, load: Callable[..., Any]) -> None:
    """As ComfyUI copies ControlNets for several GPUs."""
    block = load(quantizer).model.diffusion_model.single_blocks[0]
    copied = copy.deepcopy(block)
    assert copied.linear1 is not block.linear1
    assert copied.linear1.weight._qdata.data_ptr() == block.linear1.weight._qdata.data_ptr()
    x = torch.randn(3, block.linear1.in_features, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = block.linear1(x)
        block.linear1.bias.zero_()
        assert torch.equal(copied.linear1(x), wanted)
