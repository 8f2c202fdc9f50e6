"""The documented batch script against the real server: good prompts finish, broken ones are reported by name."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from quant_loader.automation.convert import convert_workflow
from quant_loader.automation.loader_nodes import LOADERS
from quant_loader.automation.workflows import as_workflow
from quant_loader.demo import fixtures, pictures, quantize, workflows
from quant_loader.demo.client import PromptRejected
from quant_loader.demo.paths import CHECKOUT
from quant_loader.demo.server import ComfyServer

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


def comfy_program():
    return str(Path(sys.executable).with_name("comfy.exe" if os.name == "nt" else "comfy"))


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
    program = comfy_program()
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
    for nonsense in ("no such host", "127.0.0.1:99999", "http://[::1"):
        for via in ("http", "comfy"):
            arguments = [
                str(workflow),
                "--files",
                "x",
                "--server",
                nonsense,
                "--via",
                via,
                "--comfy",
                "no-such-program",
            ]
            assert batch.main(arguments) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 9


def test_a_server_needs_no_scheme(server, batch):
    assert batch.Server(server.address.removeprefix("http://")).call("/system_stats")[0] == 200


# -- workflows ---------------------------------------------------------------------------------------------------------


def widget_names(info):
    """A node's widgets in the order in which the editor stores their values."""
    order = [name for kind in ("required", "optional") for name in info["input_order"].get(kind, [])]
    inputs = {**info["input"].get("required", {}), **info["input"].get("optional", {})}
    return [
        name
        for name in order
        if isinstance(inputs[name][0], list) or inputs[name][0] in ("COMBO", "INT", "FLOAT", "STRING", "BOOLEAN")
    ]


@pytest.mark.parametrize("row", LOADERS.values(), ids=LOADERS)
def test_our_table_of_loaders_is_what_this_comfyui_says(server, row):
    info = server.client.get(f"/object_info/{row.type}")[row.type]
    assert tuple(widget_names(info)) == row.widgets


def test_converted_workflow_runs_and_makes_the_same_latent(server, render, tmp_path, reference):
    name = fixtures.file_name("int8_row")
    stock = workflows.text_to_image(workflows.stock_loader(name), "convert/run")
    result = convert_workflow(as_workflow(stock, "wf"))
    assert result.content[workflows.LOADER] == workflows.quant_loader(name)
    (entry,) = server.client.run(result.content).files(workflows.LATENT, "latents")
    ours = pictures.read_latent(server.output() / entry["subfolder"] / entry["filename"])
    _, theirs = render(workflows.stock_loader(name))
    assert pictures.relative_difference(ours, theirs) < pictures.relative_difference(ours, reference)


def test_check_of_the_picture_that_the_server_wrote(server, render):
    """The PNG's own workflow names the file; checking it needs nothing else."""
    run, _ = render(workflows.quant_loader(fixtures.file_name("nvfp4")))
    (entry,) = run.files(workflows.PICTURE)
    picture = server.output() / entry["subfolder"] / entry["filename"]
    program = str(Path(sys.executable).with_name("quant-loader"))
    command = [program, "check", "--workflow", str(picture), "--models", str(server.base / "models")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0
    assert fixtures.file_name("nvfp4") in done.stdout


def test_a_retired_packs_loader_is_replaced_by_ours(server):
    """A workflow of people whose INT8 loader pack is gone: the server puts our node in its place."""
    assert server.client.get("/node_replacements")["OTUNetLoaderW8A8"][0]["new_node_id"] == workflows.OUR_NODE
    old = {
        "class_type": "OTUNetLoaderW8A8",
        "inputs": {"unet_name": fixtures.file_name("int8_convrot"), "weight_dtype": "default", "model_type": "flux2"},
        "_meta": {"title": "Load Diffusion Model INT8"},
    }
    run = server.client.run(workflows.text_to_image(old, "replaced/run"))
    assert workflows.SAMPLER in run.executed


# -- repair, then render -----------------------------------------------------------------------------------------------


def without_format(tensors):
    """A retired loader's markers: {"convrot": true} and nothing else."""
    marker = quantize.marker_tensor({"convrot": True})
    return {n: marker.clone() if n.endswith(".comfy_quant") else t for n, t in tensors.items()}, {}


def flat_double_scales(tensors):
    """Row scales of shape [N] instead of [N, 1], in double precision."""
    return {n: t.reshape(-1).double() if n.endswith(".weight_scale") else t for n, t in tensors.items()}, {}


def legacy_spelling(tensors):
    """The fp8 files of before the markers: scale_weight, and one scaled_fp8 tensor for the whole file."""
    renamed = {
        n.replace(".weight_scale", ".scale_weight"): t for n, t in tensors.items() if not n.endswith(".comfy_quant")
    }
    return {**renamed, "scaled_fp8": torch.zeros(0, dtype=torch.float8_e4m3fn)}, {}


def metadata_without_prefix(tensors):
    """Declared in the header under names that lack the prefix of the tensors."""
    layers = {
        name.removesuffix(".comfy_quant"): {"format": "nvfp4"} for name in tensors if name.endswith(".comfy_quant")
    }
    kept = {f"model.diffusion_model.{n}": t for n, t in tensors.items() if not n.endswith(".comfy_quant")}
    return kept, {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}


def column_scales(tensors):
    """W4A4 scales of shape [N, 1] instead of [N], in a file with bytes after its end."""
    return {n: t.reshape(-1, 1) if n.endswith(".weight_scale") else t for n, t in tensors.items()}, {}


BREAKS = {
    "int8_convrot": without_format,
    "int8_row": flat_double_scales,
    "fp8": legacy_spelling,
    "nvfp4": metadata_without_prefix,
    "convrot_w4a4": column_scales,
}


def excerpt(command, output):
    """What the documents show of an answer: a check's verdict, a repair's first change and its end."""
    lines = output.splitlines()
    if command == "check":
        return [lines[1]]
    changes, last = lines[:-1], lines[-1]
    more = [f"  ... and {len(changes) - 1} more"] if len(changes) > 1 else []
    return [changes[0], *more, last]


@pytest.mark.parametrize("quantizer", BREAKS)
def test_repaired_file_renders_as_the_unbroken_one(server, tensors, render, rendered, quantizer):
    """Broken, refused, mended by the command, and then the very same picture."""
    folder = server.models("diffusion_models")
    broken, mended = folder / f"needs-repair-{quantizer}.safetensors", folder / f"repaired-{quantizer}.safetensors"
    quantize.save(broken, *BREAKS[quantizer](quantize.quantize(tensors, quantizer)[0]))
    with broken.open("ab") as file:
        file.write(b"\0" * 512 if quantizer == "convrot_w4a4" else b"")
    mended.unlink(missing_ok=True)
    program = str(Path(sys.executable).with_name("quant-loader"))
    commands = [["check", broken.name], ["repair", broken.name, mended.name], ["check", mended.name]]
    codes, transcript = [], []
    for command in commands:
        done = subprocess.run(
            [program, *command],
            cwd=folder,
            env={**os.environ, "COLUMNS": "100"},  # as wide as the page, whatever terminal the tests run in
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        transcript += [
            f"$ quant-loader {' '.join(command)}",
            *excerpt(command[0], done.stdout),
            f"-> {done.returncode}",
        ]
        codes.append(done.returncode)
    print("\n".join(transcript))
    assert codes == [1, 0, 0]
    documented = (CHECKOUT / "docs" / "automation.md").read_text(encoding="utf-8")
    assert "".join(f"    {line}\n" for line in transcript) in documented, "docs/automation.md shows this run"
    with pytest.raises(PromptRejected):
        render(workflows.quant_loader(broken.name))
    _, latent = render(workflows.quant_loader(mended.name))
    assert torch.equal(latent, rendered(quantizer)[1])


# -- the registry's archive --------------------------------------------------------------------------------------------


def test_archive_installs_into_a_clean_comfyui(tmp_path, cli):
    """The archive that the registry would serve, unpacked into an empty ComfyUI: our nodes are there."""
    copy = tmp_path / "checkout"
    names = (".git", ".venv", ".cache", "__pycache__", "demo-output", "node_modules", "*.egg-info", ".*_cache")
    shutil.copytree(CHECKOUT, copy, ignore=shutil.ignore_patterns(*names))
    private = {"HOME": str(cli.home), "USERPROFILE": str(cli.home), "XDG_CACHE_HOME": str(cli.home / "cache")}
    pack = [comfy_program(), "--skip-prompt", "node", "pack"]
    subprocess.run(pack, cwd=copy, env={**os.environ, **private}, stdin=subprocess.DEVNULL, timeout=120, check=True)
    clean = ComfyServer(tmp_path / "clean", with_pack=False)
    with zipfile.ZipFile(copy / "node.zip") as archive:
        archive.extractall(clean.base / "custom_nodes" / "quant-loader")
    with clean:
        ours = [name for name in clean.client.get("/object_info") if name.startswith("QuantLoader")]
        assert "IMPORT FAILED" not in clean.log()
        assert any("quant_loader.js" in path for path in clean.client.get("/extensions"))
    assert "QuantLoaderDiffusionModel" in ours
