"""The nodes without a server: their contract, the answer before queueing, what they give back."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from quant_loader.demo import models, quantize
from quant_loader.demo.paths import comfyui_tree

if str(comfyui_tree()) not in sys.path:
    sys.path.insert(0, str(comfyui_tree()))
import comfy.cli_args

comfy.cli_args.args.cpu = True  # before anything of ComfyUI looks for a device
import folder_paths  # noqa: E402
from quant_loader import nodes  # noqa: E402
from quant_loader.nodes import files, text_encoder  # noqa: E402
from quant_loader.nodes.kernel_report import QuantLoaderKernelReport  # noqa: E402

RULES, EXECUTION = ["strict", "compatible"], ["auto", "native", "int8", "exact"]

# id -> display name, (input, type), outputs; saved in people's workflows, never to change.
CONTRACT: dict[str, tuple[str, list[tuple[str, str]], list[tuple[str, str]]]] = {
    "QuantLoaderDiffusionModel": (
        "Load Quantized Diffusion Model",
        [("model_name", "COMBO"), ("rules", "COMBO"), ("execution", "COMBO")],
        [("MODEL", "MODEL"), ("STRING", "report")],
    ),
    "QuantLoaderCheckpoint": (
        "Load Quantized Checkpoint",
        [("ckpt_name", "COMBO"), ("rules", "COMBO"), ("execution", "COMBO")],
        [("MODEL", "MODEL"), ("CLIP", "CLIP"), ("VAE", "VAE"), ("STRING", "report")],
    ),
    "QuantLoaderTextEncoder": (
        "Load Quantized Text Encoder",
        [("clip_name1", "COMBO"), ("type", "COMBO"), ("rules", "COMBO"), ("execution", "COMBO")]
        + [(f"clip_name{i}", "COMBO") for i in (2, 3, 4)],
        [("CLIP", "CLIP"), ("STRING", "report")],
    ),
    "QuantLoaderControlNet": (
        "Load Quantized ControlNet",
        [("control_net_name", "COMBO"), ("rules", "COMBO"), ("execution", "COMBO")],
        [("CONTROL_NET", "CONTROL_NET"), ("STRING", "report")],
    ),
    "QuantLoaderModelPatch": (
        "Load Quantized Model Patch",
        [("name", "COMBO"), ("rules", "COMBO"), ("execution", "COMBO")],
        [("MODEL_PATCH", "MODEL_PATCH"), ("STRING", "report")],
    ),
    "QuantLoaderSave": (
        "Save Quantized Checkpoint",
        [("model", "MODEL"), ("filename_prefix", "STRING"), ("loras", "COMBO")],
        [("STRING", "path")],
    ),
    "QuantLoaderInspect": (
        "Inspect Quantized Checkpoint",
        [("folder", "COMBO"), ("file", "COMBO"), ("rules", "COMBO")],
        [("STRING", "summary"), ("STRING", "json")],
    ),
    "QuantLoaderKernelReport": ("Kernel Report", [("model", "MODEL")], [("STRING", "report")]),
}
OUTPUT_NODES = {"QuantLoaderSave", "QuantLoaderInspect", "QuantLoaderKernelReport"}
FILE_INPUTS = {
    "QuantLoaderDiffusionModel": ("diffusion_models", "model_name"),
    "QuantLoaderCheckpoint": ("checkpoints", "ckpt_name"),
    "QuantLoaderTextEncoder": ("text_encoders", "clip_name1"),
    "QuantLoaderControlNet": ("controlnet", "control_net_name"),
    "QuantLoaderModelPatch": ("model_patches", "name"),
}
BY_ID = {node.define_schema().node_id: node for node in nodes.NODES}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Model folders of this test in front of whatever ComfyUI lists; in each a sound, a broken and a shaky file."""
    root = tmp_path_factory.mktemp("models")
    tensors = models.flux_state_dict()
    packed, _ = quantize.quantize(tensors, "int8_row")
    added = []
    for kind, _ in FILE_INPUTS.values():
        folder = root / kind
        folder.mkdir()
        quantize.save(folder / "sound.safetensors", packed)
        quantize.save(folder / "broken.safetensors", quantize.zero_markers(packed, ["single_blocks.0.linear1"]))
        quantize.save(folder / "dialect.safetensors", quantize.half_scale(packed, "single_blocks.0.linear1"))
        paths = folder_paths.folder_names_and_paths[kind][0]
        paths.insert(0, str(folder))
        added.append((paths, str(folder)))
    yield root
    for paths, folder_name in added:
        paths.remove(folder_name)


def answer(node: Any, **inputs: Any) -> Any:
    result = node.validate_inputs(**inputs)
    return asyncio.run(result) if asyncio.iscoroutine(result) else result


@pytest.mark.parametrize("node_id", CONTRACT)
def test_the_contract_of_a_node(node_id: str) -> None:
    schema = BY_ID[node_id].define_schema()
    display_name, inputs, outputs = CONTRACT[node_id]
    assert schema.display_name == display_name
    assert schema.category == "loaders/quantized"
    assert schema.description
    assert [(i.id, i.io_type) for i in schema.inputs] == inputs
    wanted = [(o if o[0] != "STRING" else ("STRING", o[1])) for o in outputs]
    assert [(o.io_type, o.display_name) for o in schema.outputs] == wanted
    assert bool(schema.is_output_node) == (node_id in OUTPUT_NODES)
    by_name = {i.id: i for i in schema.inputs}
    if "rules" in by_name:
        assert (by_name["rules"].options, by_name["rules"].default) == (RULES, "strict")
    if "execution" in by_name:
        assert (by_name["execution"].options, by_name["execution"].default) == (EXECUTION, "auto")
    if node_id == "QuantLoaderSave":
        assert by_name["loras"].options == ["leave out", "merge"]


def test_every_node_of_the_pack_has_a_contract() -> None:
    assert set(BY_ID) == set(CONTRACT)


def test_the_types_are_those_of_the_stock_clip_loaders() -> None:
    import nodes as stock

    for loader in (stock.CLIPLoader, stock.DualCLIPLoader):
        assert set(loader.INPUT_TYPES()["required"]["type"][0]) <= set(text_encoder.types())


def test_without_stock_loaders_the_types_are_still_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nodes", None)
    assert text_encoder.types() == text_encoder.TYPES


@pytest.mark.parametrize("node_id", FILE_INPUTS)
def test_a_broken_file_is_refused_before_queueing(node_id: str, folders: Path) -> None:
    folder, name = FILE_INPUTS[node_id]
    node = BY_ID[node_id]
    assert answer(node, **{name: "sound.safetensors", "rules": "strict"}) is True
    refused = answer(node, **{name: "broken.safetensors", "rules": "strict"})
    first, second = str(refused), str(refused)
    assert first.startswith("Refused: 1 fault in 1 of")
    assert "single_blocks.0.linear1" in first
    assert len(second.splitlines()) <= 2
    assert answer(node, **{name: "dialect.safetensors", "rules": "compatible"}) is True
    assert "compatible" in str(answer(node, **{name: "dialect.safetensors", "rules": "strict"}))
    assert f"is not in the {folder} folder" in str(answer(node, **{name: "gone.safetensors", "rules": "strict"}))
    # A linked file name has no value yet.
    assert answer(node, rules="strict") is True


def test_every_file_of_a_text_encoder_is_checked(folders: Path) -> None:
    node = BY_ID["QuantLoaderTextEncoder"]
    inputs = {"clip_name1": "sound.safetensors", "clip_name2": "none", "clip_name4": "broken.safetensors"}
    assert "Refused" in str(answer(node, **inputs))
    assert answer(node, **{**inputs, "clip_name4": "none"}) is True


def test_a_name_outside_the_folders_is_not_reachable(folders: Path) -> None:
    outside = f"../{folders.name}/diffusion_models/sound.safetensors"
    assert "is not in the diffusion_models folder" in str(
        answer(BY_ID["QuantLoaderDiffusionModel"], model_name=outside, rules="strict")
    )


@pytest.mark.parametrize("node_id", FILE_INPUTS)
def test_an_exchanged_file_is_loaded_anew(node_id: str, folders: Path) -> None:
    folder, name = FILE_INPUTS[node_id]
    node = BY_ID[node_id]
    path = folders / folder / "exchanged.safetensors"
    tensors, metadata = quantize.quantize(models.flux_state_dict(), "int8_row")
    quantize.save(path, tensors, metadata)
    before = node.fingerprint_inputs(**{name: path.name, "rules": "strict"})
    assert node.fingerprint_inputs(**{name: path.name, "rules": "strict"}) == before
    quantize.save(path, models.flux_state_dict())
    assert node.fingerprint_inputs(**{name: path.name, "rules": "strict"}) != before


def test_listing_survives_a_folder_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(folder: str) -> list[str]:
        raise PermissionError(folder)

    monkeypatch.setattr(folder_paths, "get_filename_list", unreadable)
    assert files.names("diffusion_models") == []
    for node in nodes.NODES:
        assert node.define_schema().node_id in CONTRACT


def test_loading_gives_a_model_a_report_and_an_entry_for_the_panel(folders: Path) -> None:
    output = BY_ID["QuantLoaderDiffusionModel"].execute("sound.safetensors", "strict", "auto")
    model, report = output.args
    assert type(model).__name__ == "QuantModelPatcher"
    assert report.startswith("OK: 13 quantised layers (13 int8_tensorwise)")
    assert "execution: auto" in report
    (entry,) = map(json.loads, output.ui["quant_loader"])
    assert entry["summary"].startswith("OK: 13")
    assert sum(group["count"] for group in entry["groups"]) == 13
    assert all(group["reason"] for group in entry["groups"])


@pytest.mark.parametrize("node_id", FILE_INPUTS)
def test_a_broken_file_is_refused_at_load_as_well(node_id: str, folders: Path) -> None:
    from quant_loader.patching.errors import CheckpointRefused

    _, name = FILE_INPUTS[node_id]
    more = {"type": "flux"} if node_id == "QuantLoaderTextEncoder" else {}
    with pytest.raises(CheckpointRefused, match=r"single_blocks\.0\.linear1"):
        BY_ID[node_id].execute(**{name: "broken.safetensors", **more})


def test_inspect_answers_for_a_broken_file(folders: Path) -> None:
    output = BY_ID["QuantLoaderInspect"].execute("controlnet", "broken.safetensors", "strict")
    summary, text = output.args
    assert summary.startswith("Refused")
    assert json.loads(text)["verdict"] == "refused"
    assert "is not in the vae folder" in str(
        answer(BY_ID["QuantLoaderInspect"], folder="vae", file="broken.safetensors")
    )


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """The Kernel Report node in a prompt where nothing else runs."""
    from types import SimpleNamespace

    def run(model: Any) -> Any:
        monkeypatch.setattr(QuantLoaderKernelReport, "hidden", SimpleNamespace(prompt={}, unique_id="1"), raising=False)
        return asyncio.run(QuantLoaderKernelReport.execute(model))

    return run


def test_the_kernel_report_counts_what_ran(folders: Path, quiet: Callable[[Any], Any]) -> None:
    model = BY_ID["QuantLoaderDiffusionModel"].execute("sound.safetensors").args[0]
    (before,) = quiet(model).args
    assert "Nothing ran" in before
    sys.path.insert(0, str(Path(__file__).parents[1] / "patching"))
    from in_process import denoise

    denoise(model)
    output = quiet(model)
    (text,) = output.args
    assert text.startswith("13 quantised layers, 13 calls.")
    assert "13 x int8_tensorwise: torch" in text
    (entry,) = map(json.loads, output.ui["quant_loader"])
    assert [(group["count"], group["calls"]) for group in entry["groups"]] == [(13, 13)]


def test_the_kernel_report_waits_for_the_other_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """ComfyUI may start it before the sampler: it gives way until nothing else runs."""
    import comfy_execution.progress as progress
    from quant_loader.nodes.kernel_report import rest_of_the_prompt

    registry = progress.ProgressRegistry(prompt_id="p", dynprompt=None)
    monkeypatch.setattr(progress, "global_progress_registry", registry)
    done = []

    async def sampler() -> None:
        await asyncio.sleep(0.1)
        registry.start_progress("sampler")
        await asyncio.sleep(0.5)
        done.append("sampler")
        registry.finish_progress("sampler")

    async def both() -> list[str]:
        registry.start_progress("report")
        work = asyncio.create_task(sampler())
        await rest_of_the_prompt({"report": {"class_type": "QuantLoaderKernelReport"}}, "report")
        seen = list(done)
        await work
        return seen

    assert asyncio.run(both()) == ["sampler"]


def test_a_model_that_is_not_quantised_says_so(folders: Path, quiet: Callable[[Any], Any]) -> None:
    quantize.save(folders / "diffusion_models" / "plain.safetensors", models.flux_state_dict())
    model = BY_ID["QuantLoaderDiffusionModel"].execute("plain.safetensors").args[0]
    (text,) = quiet(model).args
    assert text.startswith("No quantised layer")
