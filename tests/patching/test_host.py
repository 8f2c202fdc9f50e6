"""A ComfyUI that lacks what the pack builds on gets one sentence, and a server pays for imports when it starts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from quant_loader.demo.paths import comfyui_tree
from quant_loader.patching import host
from quant_loader.patching.errors import HostError
from quant_loader.patching.load import load_diffusion_model


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A name that this ComfyUI lacks, as a later one may."""
    import comfy.sd

    monkeypatch.delattr(comfy.sd, "load_diffusion_model_state_dict")
    host.missing.cache_clear()
    yield "comfy.sd.load_diffusion_model_state_dict"
    host.missing.cache_clear()


def test_a_missing_name_is_told_before_the_file_is_read(gone: str, files: Callable[..., Path]) -> None:
    with pytest.raises(HostError) as told:
        load_diffusion_model([files("int8_row")])
    sentence = str(told.value)
    assert gone in sentence
    assert "Update ComfyUI" in sentence


def test_a_missing_method_is_told_by_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    import comfy.model_patcher

    assert "ModelPatcher.pre_run" in host.NEEDED["comfy.model_patcher"]
    monkeypatch.delattr(comfy.model_patcher.ModelPatcher, "pre_run")
    host.missing.cache_clear()
    try:
        assert host.missing() == ("comfy.model_patcher.ModelPatcher.pre_run",)
    finally:
        host.missing.cache_clear()


def test_a_missing_module_is_told_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(host.NEEDED, "comfy.no_such_module", ("anything",))
    host.missing.cache_clear()
    try:
        assert host.missing() == ("comfy.no_such_module (No module named 'comfy.no_such_module')",)
    finally:
        host.missing.cache_clear()


def test_preload_leaves_an_unfit_host_alone(gone: str, caplog: pytest.LogCaptureFixture) -> None:
    host.preload()
    assert not caplog.records


def test_a_module_that_does_not_fit_keeps_the_nodes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "quant_loader.patching.ops", None)  # Python's own way to fail an import
    host.preload()
    (record,) = caplog.records
    assert "Quant Loader does not fit this ComfyUI" in record.getMessage()
    assert "quant_loader.patching.ops" in record.getMessage()


def test_after_preload_a_load_imports_nothing_more() -> None:
    code = f"""
import sys
sys.path.insert(0, {str(comfyui_tree())!r})
import comfy.cli_args
comfy.cli_args.args.cpu = True
from quant_loader.patching import host
host.preload()
before = set(sys.modules)
import quant_loader.patching.load, quant_loader.patching.ops, quant_loader.patching.patcher
import quant_loader.patching.state_dict, quant_loader.patching.kernel_report
print("imported later:", sorted(set(sys.modules) - before))
"""
    answer = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert answer.stdout.splitlines()[-1:] == ["imported later: []"], answer.stderr
