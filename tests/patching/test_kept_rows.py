"""INT8 rows kept beside the weights: the ``auto`` execution where a CPU's INT8 units run what it would carry over.

``load_on_vnni`` tells the load that the CPU has VNNI, whether it has or not: the sums are exact either way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.model_management
import pytest
import torch
from in_process import FORMATS, denoise, partly_loaded, same_bytes, with_lora
from quant_loader import kernels
from quant_loader.demo import quantize
from quant_loader.patching import kept_rows
from quant_loader.patching.kernel_report import line, planned, report
from quant_loader.patching.patcher import context_of, packed_modules

CPU = torch.device("cpu")
KEPT = ("fp8", "mxfp8", "nvfp4")


@pytest.fixture
def load_on_vnni(load: Callable[..., Any]) -> Callable[..., Any]:
    def loaded(*args: Any, **kwargs: Any) -> Any:
        patcher = load(*args, **kwargs)
        context = context_of(patcher.model)
        context._facts[CPU] = dataclasses.replace(kernels.device_facts(CPU), vnni=True)
        context._plans.clear()
        for module in packed_modules(patcher.model).values():
            module._operators.clear()
        return patcher

    return loaded


def rows_of(patcher: Any) -> dict[str, Any]:
    return {key: module.kept for key, module in packed_modules(patcher.model).items() if module.kept is not None}


def row_bytes(patcher: Any) -> int:
    """One byte a weight and a float32 a row."""
    return sum(N * K + 4 * N for N, K in (m.weight.shape for m in packed_modules(patcher.model).values()))


@pytest.mark.parametrize("quantizer", KEPT)
def test_the_result_is_that_of_a_weight_carried_over_while_loading(
    quantizer: str, load: Callable[..., Any], load_on_vnni: Callable[..., Any], files: Callable[..., Path]
) -> None:
    patcher = load_on_vnni(quantizer)
    assert not rows_of(patcher)  # the load does not pay for them
    found = denoise(patcher)
    assert len(rows_of(patcher)) == len(packed_modules(patcher.model))
    assert torch.equal(found, denoise(load(quantizer, execution="int8")))
    assert torch.equal(found, denoise(patcher))
    source = quantize.load(files(quantizer))[0]
    saved = patcher.model_state_dict_for_saving()
    for name, tensor in source.items():
        if f"{name.rpartition('.')[0]}.comfy_quant" not in source or name.endswith("bias"):
            continue
        assert same_bytes(saved[f"diffusion_model.{name}"], tensor), name


@pytest.mark.parametrize("quantizer", [q for q in FORMATS if q not in (*KEPT, "quanto_int8")])
def test_codes_that_fit_into_int8_are_not_copied(quantizer: str, load_on_vnni: Callable[..., Any]) -> None:
    patcher = load_on_vnni(quantizer)
    denoise(patcher)
    assert not rows_of(patcher)


@pytest.mark.parametrize("execution", ["native", "exact", "int8"])
def test_other_executions_keep_none(execution: str, load_on_vnni: Callable[..., Any]) -> None:
    patcher = load_on_vnni("fp8", execution=execution)
    denoise(patcher)
    assert not rows_of(patcher)


@pytest.mark.parametrize("quantizer", KEPT)
def test_sizes_count_the_rows_while_they_are_there(quantizer: str, load_on_vnni: Callable[..., Any]) -> None:
    patcher = load_on_vnni(quantizer)
    before = patcher.model_size()
    fresh = denoise(patcher)
    with_rows = before + row_bytes(patcher)
    assert patcher.model_size() == patcher.loaded_size() == with_rows
    assert patcher.clone().model_size() == with_rows
    patcher.detach()
    assert not rows_of(patcher)
    assert (patcher.model_size(), patcher.loaded_size()) == (before, 0)
    assert torch.equal(denoise(patcher), fresh)
    patcher.detach()
    assert all(torch.equal(out, fresh) for out in partly_loaded(patcher))


def test_without_memory_they_are_made_on_every_call(
    load_on_vnni: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = denoise(load_on_vnni("nvfp4"))
    patcher = load_on_vnni("nvfp4")
    with monkeypatch.context() as little_memory:
        little_memory.setattr(kept_rows, "RESERVE", 1.0)
        assert torch.equal(denoise(patcher), wanted)
        assert not rows_of(patcher)
    text = report(patcher)[0]
    assert "Made again on every call: to keep the rows would leave less than an eighth" in text
    assert torch.equal(denoise(patcher), wanted)  # there is memory again
    assert rows_of(patcher)


def test_loras_come_and_go_beside_the_same_rows(load_on_vnni: Callable[..., Any]) -> None:
    patcher = load_on_vnni("fp8")
    plain, rows = denoise(patcher), rows_of(patcher)
    for strength in (0.7, 0.3):
        patched = with_lora(patcher, strength)
        assert not torch.equal(denoise(patched), plain)
        assert all(kept is rows[key] for key, kept in rows_of(patched).items())
    assert torch.equal(denoise(patcher), plain)
    assert all(kept is rows[key] for key, kept in rows_of(patcher).items())


def test_a_wait_for_them_can_be_cancelled(load_on_vnni: Callable[..., Any]) -> None:
    patcher = load_on_vnni("fp8")
    comfy.model_management.interrupt_current_processing()
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        denoise(patcher)
    assert not rows_of(patcher)


def test_the_report_says_so(load_on_vnni: Callable[..., Any]) -> None:
    patcher = load_on_vnni("nvfp4")
    (before,) = map(line, planned(patcher))
    assert before.endswith("The INT8 rows are kept from the first call on.")
    denoise(patcher)
    text, entry = report(patcher)
    (group,) = entry["groups"]
    assert (group["format"], group["execution"]) == ("nvfp4", "int8")
    assert group["calls"] == group["count"] == 13
    assert "ConvRot at the first call, and kept beside it (relative error 0.096; the format's own" in text
