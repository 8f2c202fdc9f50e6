"""One real ComfyUI server for all end-to-end tests, with this pack in its custom_nodes."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from quant_loader.demo import fixtures, pictures, quantize, workflows
from quant_loader.demo.client import PromptRun
from quant_loader.demo.comfy_cli import ComfyCli
from quant_loader.demo.paths import comfyui_tree
from quant_loader.demo.server import ComfyServer

Render = Callable[..., tuple[PromptRun, torch.Tensor]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.timeout(600))  # the first test waits for the server to come up


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("comfyui")


@pytest.fixture(scope="session")
def unstarted(base: Path) -> ComfyServer:
    nodes = base / "custom_nodes"
    nodes.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(__file__).with_name("support_nodes.py"), nodes / "quant_loader_test_support.py")
    return ComfyServer(base)


@pytest.fixture(scope="session")
def tensors(unstarted: ComfyServer) -> quantize.Tensors:
    """The 16-bit model's tensors; the reference and every quantised and broken file are written beside it."""
    folder = unstarted.models("diffusion_models")
    tensors = fixtures.write_reference(folder, unstarted.models("vae"))
    for quantizer in fixtures.EXPECTATIONS:
        fixtures.write_quantized(folder, tensors, quantizer)
    for name in fixtures.BROKEN:
        fixtures.write_broken(folder, tensors, name)
    return tensors


@pytest.fixture(scope="session")
def unusable(unstarted: ComfyServer) -> list[str]:
    """Names in the model folder that no header can be read from, as such folders have them in real life."""
    folder = unstarted.models("diffusion_models")
    (folder / "empty.safetensors").write_bytes(b"")
    (folder / "page-not-found.safetensors").write_bytes(b"<!DOCTYPE html><html>404</html>")
    (folder / "cut-short.safetensors").write_bytes((1 << 20).to_bytes(8, "little") + b'{"a": ')
    (folder / "huge-header.safetensors").write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    (folder / "a-folder.safetensors").mkdir()
    names = ["empty", "page-not-found", "cut-short", "huge-header"]
    if os.name != "nt":
        (folder / "gone.safetensors").symlink_to(folder / "nowhere.safetensors")
        locked = folder / "locked.safetensors"
        locked.write_bytes(b"")
        locked.chmod(0)
        names += ["locked"]
    return [f"{name}.safetensors" for name in names]


@pytest.fixture(scope="session")
def server(unstarted: ComfyServer, tensors: quantize.Tensors, unusable: list[str]) -> Iterator[ComfyServer]:
    with unstarted:
        yield unstarted


@pytest.fixture(scope="session")
def comfyui() -> None:
    """ComfyUI's own model classes in this process, on the CPU, for making tiny models (demo.tiny_core)."""
    tree = str(comfyui_tree())
    if tree not in sys.path:
        sys.path.insert(0, tree)
    import comfy.cli_args

    comfy.cli_args.args.cpu = True


@pytest.fixture(scope="session")
def cli(base: Path) -> ComfyCli:
    cli = ComfyCli(base / "comfy-cli")
    cli.disable_tracking()
    return cli


@pytest.fixture(scope="session")
def render(server: ComfyServer) -> Render:
    """Runs the text-to-image workflow with a loader; returns the run and the latent it saved."""

    def run(loader: dict[str, Any], **options: Any) -> tuple[PromptRun, torch.Tensor]:
        done = server.client.run(workflows.text_to_image(loader, prefix="e2e/run", **options))
        (entry,) = done.files(workflows.LATENT, "latents")
        return done, pictures.read_latent(server.output() / entry["subfolder"] / entry["filename"])

    return run


@pytest.fixture(scope="session")
def rendered(render: Render) -> Callable[[str], tuple[PromptRun, torch.Tensor]]:
    """The run and the latent of a quantised file under the node's defaults; each file is run once."""
    return functools.cache(lambda quantizer: render(workflows.quant_loader(fixtures.file_name(quantizer))))


@pytest.fixture(scope="session")
def reference(render: Render) -> torch.Tensor:
    """The latent of the 16-bit model, loaded by ComfyUI's own node."""
    return render(workflows.stock_loader(fixtures.REFERENCE))[1]


@pytest.fixture
def work_done(server: ComfyServer) -> Callable[[], str]:
    """What the server did since the test began: prompts queued, models loaded; empty when it did nothing."""
    log_before, history_before = len(server.log()), set(server.client.get("/history"))

    def done() -> str:
        queue = server.client.get("/queue")
        queued = [*queue["queue_running"], *queue["queue_pending"]]
        finished = set(server.client.get("/history")) - history_before
        loads = [line for line in server.log()[log_before:].splitlines() if "Requested to load" in line]
        return "; ".join(map(str, [*queued, *finished, *loads]))

    return done
