"""What ran, as the loader's panel asks for it: figures of the latest prompt, of models that are only weakly held."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aiohttp import web
from quant_loader.demo import models, quantize
from quant_loader.demo.paths import comfyui_tree

if str(comfyui_tree()) not in sys.path:
    sys.path.insert(0, str(comfyui_tree()))
import comfy.cli_args

comfy.cli_args.args.cpu = True  # before anything of ComfyUI looks for a device
import folder_paths  # noqa: E402
from quant_loader.nodes import common, routes, runs  # noqa: E402
from quant_loader.nodes.diffusion_model import QuantLoaderDiffusionModel  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1] / "patching"))
from in_process import denoise  # noqa: E402

FOLDER, FILE, PLAIN = "diffusion_models", "runs-sound.safetensors", "runs-plain.safetensors"
LAYERS = 13


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("runs")
    tensors = models.flux_state_dict()
    quantize.save(folder / FILE, quantize.quantize(tensors, "int8_row")[0])
    quantize.save(folder / PLAIN, tensors)
    paths = folder_paths.folder_names_and_paths[FOLDER][0]
    paths.insert(0, str(folder))
    yield folder
    paths.remove(str(folder))


@pytest.fixture
def loads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> runs.Runs:
    """A server that has our routes, as the nodes find it."""
    server = SimpleNamespace(app=web.Application(), routes=web.RouteTableDef())
    monkeypatch.setitem(sys.modules, "server", SimpleNamespace(PromptServer=SimpleNamespace(instance=server)))
    routes.register_on_server()
    found = runs.of_server()
    assert found is not None
    return found


def begin_prompt(rules: str = "strict", execution: str = "auto") -> None:
    """What ComfyUI does with every loader of a prompt, cached or not."""
    QuantLoaderDiffusionModel.fingerprint_inputs(FILE, rules=rules, execution=execution)


def load(execution: str = "auto") -> Any:
    return QuantLoaderDiffusionModel.execute(FILE, "strict", execution).args[0]


def ran(loads: runs.Runs, execution: str = "auto") -> list[dict[str, Any]]:
    return routes.ran_answer(loads, FOLDER, (FILE,), "strict", execution)["parts"]


def test_figures_are_those_of_the_latest_prompt(loads: runs.Runs) -> None:
    begin_prompt()
    assert ran(loads) == [], "nothing was loaded yet"
    model = load()
    (before,) = ran(loads)
    assert (before["layers"], before["ran"], before["calls"], before["groups"]) == (LAYERS, 0, 0, [])
    denoise(model)
    denoise(model)
    (first,) = ran(loads)
    assert (first["part"], first["device"]) == ("model", "CPU")
    assert (first["layers"], first["ran"], first["calls"], first["dequantised"]) == (LAYERS, LAYERS, 2 * LAYERS, 0)
    assert [(group["count"], group["calls"], group["slow"]) for group in first["groups"]] == [
        (LAYERS, 2 * LAYERS, False)
    ]
    # The second prompt: the loader is answered from the cache, its model runs once.
    begin_prompt()
    denoise(model.clone())
    (second,) = ran(loads)
    assert (second["ran"], second["calls"]) == (LAYERS, LAYERS), "a clone counts for its model"
    # The third: everything is answered from the cache, so the second is still the latest run.
    begin_prompt()
    assert ran(loads) == [second]


def test_decoded_layers_are_named_with_the_reason(loads: runs.Runs) -> None:
    model = load("exact")
    denoise(model)
    (figures,) = ran(loads, "exact")
    assert figures["dequantised"] == figures["ran"] == LAYERS
    (group,) = figures["groups"]
    assert group["execution"] == "exact"
    assert len(group["layers"]) == runs.NAMED_LAYERS
    assert "double_blocks.0.img_attn.proj" in group["layers"], "as the file names it"
    assert group["reason"]
    assert ran(loads) == [], "another execution is another load"


def test_a_model_is_not_kept_alive(loads: runs.Runs) -> None:
    import comfy.model_management

    model = load()
    assert ran(loads) != []
    comfy.model_management.unload_all_models()
    del model
    gc.collect()
    assert ran(loads) == []


def test_the_number_of_loads_is_bounded() -> None:
    def asked(number: int) -> runs.Asked:
        return runs.Asked(FOLDER, (str(number),), "", "strict", "auto")

    held = [torch.nn.Module() for _ in range(5)]
    loads = runs.Runs(limit=3)
    for number, module in enumerate(held):
        module.__dict__["_quant_loader_packed"] = {}
        module.__dict__["_quant_loader_context"] = SimpleNamespace(dequantised={"layer": "why"}, sentences=list)
        patcher = SimpleNamespace(model=module, load_device=torch.device("cpu"))
        loads.handed_out(asked(number), model=patcher, text_encoder=None)
    kept = [number for number in range(5) if loads.figures(asked(number))]
    assert kept == [2, 3, 4]
    assert len(loads) == 3
    del held, module, patcher
    gc.collect()
    loads.handed_out(asked(5), model=None)
    assert len(loads) == 0, "what is gone leaves no entry behind"


def test_texts_are_bounded() -> None:
    module = torch.nn.Module()
    module.__dict__["_quant_loader_packed"] = {}
    reasons = {f"layer {number} " + "x" * 5000: f"reason {number} " + "y" * 5000 for number in range(500)}
    module.__dict__["_quant_loader_context"] = SimpleNamespace(
        dequantised=reasons, sentences=lambda: ["z" * 5000] * 500
    )
    loads = runs.Runs()
    asked = runs.Asked.now(FOLDER, [FILE], "strict", "auto")
    loads.handed_out(asked, model=SimpleNamespace(model=module, load_device=torch.device("cpu")))
    (figures,) = loads.figures(asked)
    assert (figures["layers"], figures["dequantised"]) == (500, 500)
    texts = 2 * runs.MAX_SENTENCES + runs.MAX_SENTENCES  # a reason and one name each, and the warnings
    assert len(json.dumps(figures)) < texts * (runs.MAX_TEXT + 100)


def test_a_changed_file_has_not_run_yet(loads: runs.Runs, folder: Path) -> None:
    model = load()
    denoise(model)
    assert ran(loads) != []
    os.utime(folder / FILE, ns=(1, 1))
    assert ran(loads) == []
    begin_prompt()
    denoise(model)
    assert ran(loads) == [], "the model of the file as it was"


def test_a_plain_model_has_no_figures(loads: runs.Runs) -> None:
    model = QuantLoaderDiffusionModel.execute(PLAIN).args[0]
    assert routes.ran_answer(loads, FOLDER, (PLAIN,), "strict", "auto")["parts"] == []
    assert model is not None


def test_without_a_server_the_nodes_work_as_well(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "server", None)
    assert runs.of_server() is None
    begin_prompt()
    assert load() is not None


def test_a_fingerprint_names_every_chosen_file(loads: runs.Runs) -> None:
    both = common.fingerprint(FOLDER, [FILE, None, "none", PLAIN], "strict", "auto")
    assert both.count("; ") == 1
    assert FILE in both
    assert PLAIN in both
