"""The documented batch script against the real server: good prompts finish, broken ones are reported by name."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
from quant_loader.demo import fixtures, workflows
from quant_loader.demo.paths import CHECKOUT

FILES = ["int8_row", "int8_convrot", "fp8", "nvfp4"]
BROKEN = "broken-zeroed-markers.safetensors"


@pytest.fixture(scope="module")
def batch():
    """The example script as a module."""
    spec = importlib.util.spec_from_file_location("quant_loader_batch_example", CHECKOUT / "examples" / "batch.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def workflow(tmp_path):
    """The stock workflow that a person exported: UNETLoader and all."""
    path = tmp_path / "workflow.json"
    path.write_text(
        json.dumps(workflows.text_to_image(workflows.stock_loader("any.safetensors"), "batch/run", size=64, steps=1))
    )
    return path


def names():
    return [fixtures.file_name(quantizer) for quantizer in FILES]


def test_twenty_prompts_over_five_files_one_of_them_broken(server, batch, workflow, capsys):
    files = [*names()[:2], BROKEN, *names()[2:]]
    arguments = [
        str(workflow),
        "--files",
        *files,
        "--seeds",
        "1",
        "2",
        "3",
        "4",
        "--server",
        server.address,
        "--timeout",
        "60",
    ]
    code = batch.main([*arguments, "--json"])
    results = json.loads(capsys.readouterr().out)
    assert code == 1
    assert len(results) == 20
    assert {r["file"] for r in results if r["problem"]} == {BROKEN}
    broken = [r for r in results if r["problem"]]
    assert len(broken) == 4
    for result in broken:
        assert "Refused" in result["problem"].splitlines()[0]
        assert fixtures.BROKEN_LAYERS[0] in result["problem"]
    good = [r for r in results if not r["problem"]]
    assert len({output for r in good for output in r["outputs"]}) == 32  # a picture and a latent each
    assert all((server.output() / output).is_file() for r in good for output in r["outputs"])
    queue = server.client.get("/queue")
    assert not queue["queue_running"]
    assert not queue["queue_pending"]


def test_through_comfy_cli(server, batch, workflow, cli, monkeypatch, capsys):
    for name in ("HOME", "USERPROFILE"):  # where `cli` keeps its own settings: no telemetry, and nobody's are touched
        monkeypatch.setenv(name, str(cli.home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cli.home / "cache"))
    program = str(Path(sys.executable).with_name("comfy.exe" if os.name == "nt" else "comfy"))
    files = [names()[0], BROKEN]
    code = batch.main(
        [str(workflow), "--files", *files, "--server", server.address, "--via", "comfy", "--comfy", program]
    )
    out = capsys.readouterr().out
    assert code == 1
    assert f"done    {names()[0]} seed 1" in out
    assert f"FAILED  {BROKEN} seed 1" in out
    assert "Refused" in out
    assert "1 of 2 prompts finished" in out


def test_all_good_is_zero(server, batch, workflow, capsys):
    assert batch.main([str(workflow), "--files", names()[0], "--server", server.address]) == 0
    assert "1 of 1 prompts finished" in capsys.readouterr().out


def test_nothing_to_run_is_two(server, batch, workflow, tmp_path, capsys):
    assert batch.main([str(workflow), "--files", "x", "--server", "http://127.0.0.1:9"]) == 2
    assert batch.main([str(tmp_path / "none.json"), "--files", "x", "--server", server.address]) == 2
    (tmp_path / "editor.json").write_text('{"nodes": []}')
    assert batch.main([str(tmp_path / "editor.json"), "--files", "x", "--server", server.address]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 3
