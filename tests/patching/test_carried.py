"""The ``int8`` execution: FP8, MXFP8, NVFP4 and Quanto weights become rotated INT8 rows once, while loading."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.model_management
import pytest
import torch
from in_process import FORMATS, aligned, denoise, partly_loaded, rebuilt, relative, same_bytes, with_lora
from quant_loader import kernels
from quant_loader.checkpoint import check
from quant_loader.demo import quantize
from quant_loader.patching.errors import QuantLoaderError
from quant_loader.patching.kernel_report import line, planned, report
from quant_loader.patching.load import load_diffusion_model
from quant_loader.patching.patcher import packed_modules
from quant_loader.patching.saving import save_diffusion_model

CARRIED = ("fp8", "mxfp8", "nvfp4", "quanto_int8")
# Relative output error on Gaussian data (docs/kernels.md). Quanto: its rounding of the weight, and that of W8A8.
CARRIED_ERROR = {"fp8": 0.033, "mxfp8": 0.033, "nvfp4": 0.101, "quanto_int8": (0.0095**2 + 0.016**2) ** 0.5}


@pytest.mark.parametrize("pack_inputs", [False, True], ids=["blocks", "inputs"])
@pytest.mark.parametrize("quantizer", CARRIED)
def test_rows_are_those_of_a_weight_carried_on_every_call(
    quantizer: str,
    pack_inputs: bool,
    load: Callable[..., Any],
    files: Callable[..., Path],
    base_tensors: quantize.Tensors,
) -> None:
    patcher = load(quantizer, pack_inputs, "int8", rules="compatible")
    path = files(quantizer, pack_inputs)
    source, specs = quantize.load(path)[0], {spec.name: spec for spec in check(str(path), "compatible").layers}
    assert len(packed_modules(patcher.model)) == len(specs)
    for key, module in packed_modules(patcher.model).items():
        spec = specs[key.removeprefix("diffusion_model.").removesuffix(".weight")]
        assert module.spec.format == "int8_tensorwise"
        assert module.weight._qdata.dtype == torch.int8
        x = torch.randn(32, spec.shape[1], generator=torch.Generator().manual_seed(1))
        tensors = {suffix: source[name] for suffix, name in spec.tensors.items()}
        with torch.no_grad():
            found = module(x) - module.bias
        each_time = kernels.linear(x, spec, tensors, execution="int8")
        # The same codes and scales; the bias is added and taken off again in float32.
        assert relative(found, each_time) < 1e-6, key
        wanted = x.double() @ base_tensors[f"{spec.name}.weight"].double().T
        assert relative(found, wanted) < CARRIED_ERROR[quantizer], key


@pytest.mark.parametrize("quantizer", CARRIED)
def test_sizes_are_those_of_the_rows(quantizer: str, load: Callable[..., Any]) -> None:
    carried, packed = load(quantizer, execution="int8"), load(quantizer)
    change = 0
    for key, module in packed_modules(carried.model).items():
        N, K = module.weight.shape
        assert module.weight._qdata.nbytes == N * K
        before = packed_modules(packed.model)[key].state_dict()
        change += sum(t.nbytes for t in module.state_dict().values()) - sum(t.nbytes for t in before.values())
    assert carried.model_size() == packed.model_size() + change
    denoise(carried)
    assert carried.loaded_size() == carried.model_size()


@pytest.mark.parametrize(
    ("quantizer", "execution"),
    [(q, "int8") for q in FORMATS if q not in CARRIED] + [(q, e) for q in CARRIED for e in ("auto", "native", "exact")],
)
def test_nothing_else_is_replaced(
    quantizer: str, execution: str, load: Callable[..., Any], files: Callable[..., Path]
) -> None:
    source = quantize.load(files(quantizer))[0]
    modules = packed_modules(load(quantizer, execution=execution).model)
    for spec in check(str(files(quantizer))).layers:
        module = modules[f"diffusion_model.{spec.name}.weight"]
        assert module.spec.format == spec.format
        codes = source[spec.tensors["weight"]]
        assert torch.equal(module.weight._qdata.view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.parametrize("quantizer", CARRIED)
def test_partial_loads_unloading_and_a_rebuild_give_the_same_bits(quantizer: str, load: Callable[..., Any]) -> None:
    patcher = load(quantizer, execution="int8")
    fresh = denoise(patcher)
    patcher.detach()
    assert all(torch.equal(out, fresh) for out in partly_loaded(patcher))
    comfy.model_management.unload_all_models()
    assert torch.equal(denoise(patcher), fresh)
    again = rebuilt(patcher)
    assert again.model_size() == patcher.model_size()
    assert torch.equal(denoise(again), fresh)


@pytest.mark.parametrize("quantizer", [q for q in CARRIED if q != "quanto_int8"])
def test_a_save_writes_the_file_again(
    quantizer: str,
    load: Callable[..., Any],
    files: Callable[..., Path],
    stock_save: Callable[[Any], Path],
    tmp_path: Path,
) -> None:
    patcher = load(quantizer, execution="int8")
    fresh = denoise(aligned(patcher))
    save_diffusion_model(patcher, tmp_path / "own.safetensors")
    source = quantize.load(files(quantizer))[0]
    for path in (stock_save(patcher), tmp_path / "own.safetensors"):
        assert check(str(path)).verdict == "ok"
        saved = quantize.load(path)[0]
        for spec in check(str(files(quantizer))).layers:
            for name in (*spec.tensors.values(), f"{spec.name}.comfy_quant"):
                assert same_bytes(saved[f"model.diffusion_model.{name}"], source[name]), name
        assert torch.equal(denoise(aligned(load_diffusion_model([path], execution="int8")[0])), fresh)


def test_quanto_is_saved_as_the_int8_rows_that_the_file_has(
    load: Callable[..., Any], files: Callable[..., Path], stock_save: Callable[[Any], Path]
) -> None:
    """Not as the rotated ones that run."""
    path = stock_save(load("quanto_int8", execution="int8"))
    assert check(str(path)).verdict == "ok"
    source, saved = quantize.load(files("quanto_int8"))[0], quantize.load(path)[0]
    for spec in check(str(files("quanto_int8"))).layers:
        assert torch.equal(saved[f"model.diffusion_model.{spec.name}.weight"], source[f"{spec.name}.weight._data"])
        scale = saved[f"model.diffusion_model.{spec.name}.weight_scale"]
        assert torch.equal(scale, source[f"{spec.name}.weight._scale"].float())


def test_a_save_after_the_file_changed_says_so(
    files: Callable[..., Path], stock_save: Callable[[Any], Path], tmp_path: Path
) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(files("fp8").read_bytes())
    patcher, _ = load_diffusion_model([path], execution="int8")
    os.utime(path, (1, 1))
    with pytest.raises(QuantLoaderError, match=r"m\.safetensors was changed or removed after it was loaded"):
        stock_save(patcher)
    path.unlink()
    with pytest.raises(QuantLoaderError, match=r"m\.safetensors was changed or removed after it was loaded"):
        stock_save(patcher)


@pytest.mark.parametrize("quantizer", CARRIED)
def test_loras_stay_beside_the_rows(quantizer: str, load: Callable[..., Any], tmp_path: Path) -> None:
    patcher = load(quantizer, execution="int8")
    plain, codes = denoise(patcher), {k: m.weight._qdata.clone() for k, m in packed_modules(patcher.model).items()}
    patched = with_lora(patcher)
    wanted = denoise(patched)
    assert relative(wanted, plain) > 0.01
    assert all(torch.equal(m.weight._qdata, codes[k]) for k, m in packed_modules(patcher.model).items())
    notes = save_diffusion_model(patched, tmp_path / "merged.safetensors", "merge")
    assert len(notes) == len(codes)
    merged = denoise(load_diffusion_model([tmp_path / "merged.safetensors"])[0])
    assert relative(merged, wanted) < 0.2 * relative(wanted, plain)
    assert torch.equal(denoise(patcher), plain)


@pytest.mark.parametrize(
    ("quantizer", "fmt"),
    [("fp8", "float8_e4m3fn"), ("mxfp8", "mxfp8"), ("nvfp4", "nvfp4"), ("quanto_int8", "quanto_int8")],
)
def test_the_reports_say_what_was_carried_and_what_it_costs(quantizer: str, fmt: str, load: Callable[..., Any]) -> None:
    patcher = load(quantizer, execution="int8")
    (before,) = map(line, planned(patcher))
    denoise(patcher)
    text, entry = report(patcher)
    (group,) = entry["groups"]
    assert group["format"] == fmt
    assert group["execution"] == "int8"
    assert group["calls"] == group["count"] == 13
    for sentence in (before, text):
        assert "Carried over to INT8 rows with ConvRot while loading (relative error 0.0" in sentence
