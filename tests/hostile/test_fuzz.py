"""Property tests on hostile files: the check never raises, its report is consistent, and it refuses what safetensors
refuses.

A fixed number of examples runs in the suite; ``QUANT_LOADER_FUZZ_SECONDS`` runs fresh ones for that long. An input
that broke something goes to ``inputs/`` and stays there.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, note, settings
from quant_loader.checkpoint import RULES, cache, check, verdict_text
from safetensors import SafetensorError, safe_open

from .strategies import SECONDS, files, noise

INPUTS = sorted((Path(__file__).parent / "inputs").glob("*.bin"))

DAMAGED = {"crash.file", "extra.foreign.gguf", "extra.foreign.pickle"}


def sound_report(path: str) -> None:
    """What must hold for every file."""
    for rules in ("strict", "compatible"):
        started = time.process_time()
        report = check(path, rules=rules)
        assert time.process_time() - started < 2.0
        json.dumps(report.to_dict(), allow_nan=False).encode("ascii")
        text = verdict_text(report)
        assert len(text.split("\n")) <= 6
        assert text.isprintable() or "\n" in text
        assert (report.verdict == "refused") == bool(report.errors)
        assert all(fault.rule in RULES and fault.message and "{" not in fault.fix for fault in report.faults)
        if report.verdict == "ok":
            assert report.layers
            assert all(layer.N > 0 and layer.K > 0 for layer in report.layers)
    again = check(path, rules="compatible")
    assert again == report


def opens_with_safetensors(path: str) -> bool:
    try:
        with safe_open(path, framework="numpy") as opened:
            opened.keys()
    except (SafetensorError, OSError):
        return False
    return True


def examine(blob: bytes, folder: Path) -> None:
    path = folder / f"fuzz-{os.getpid()}.safetensors"
    path.write_bytes(blob)
    cache.clear()
    sound_report(str(path))
    refusals = {fault.rule for fault in check(str(path)).errors}
    if opens_with_safetensors(str(path)):
        assert "crash.file" not in refusals
    else:
        assert refusals & DAMAGED


def run(strategy, folder: Path) -> None:
    @settings(suppress_health_check=list(HealthCheck))
    @given(strategy)
    def once(blob):
        note(f"file: {blob!r}"[:2000])
        examine(blob, folder)

    once()
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        once()


def test_nearly_sound_files(tmp_path):
    run(files(), tmp_path)


def test_noise(tmp_path):
    run(noise, tmp_path)


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: path.name)
def test_inputs_that_once_broke_something(path, tmp_path):
    examine(path.read_bytes(), tmp_path)
