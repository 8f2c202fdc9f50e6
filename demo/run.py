"""`make demo` and `make serve`: tiny quantised models through a real ComfyUI server.

`python -I -m quant_loader.demo.run` renders every format through `comfy run`, compares each with the 16-bit picture,
shows what the server answers to broken files, and exits 1 when anything is not as it should be. With `--serve` it
leaves the server up instead, with the models and the workflow ready in the editor.
"""

from __future__ import annotations

import argparse
import errno
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch

from . import fixtures, pictures, workflows
from .comfy_cli import ComfyCli, ComfyRunError
from .editor import to_editor
from .paths import CACHE, CHECKOUT, OUTPUT
from .server import ComfyServer, ServerError

Say = Callable[[str], None]
SHOWN_BROKEN = ("broken-zeroed-markers.safetensors", "broken-half-scale.safetensors")
HEADER = ("file", "verdict", "formats", "kernel", "difference", "allowed", "seconds", "picture")
SERVE_PORT = 8188


@dataclass
class Rendered:
    """What one file gave: picture and latent, the loader's report, seconds of the prompt, and what is wrong with it."""

    file: str
    picture: Path | None = None
    latent: torch.Tensor | None = None
    report: str = ""
    seconds: float = 0.0
    difference: float | None = None
    problem: str = ""


def say(text: str = "") -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def end_on_signal(number: int, _frame: FrameType | None) -> NoReturn:
    """Turns a request to end into an exit that still stops the server."""
    raise SystemExit(128 + number)


def served_file(server: ComfyServer, entry: dict[str, str]) -> Path:
    return server.output() / entry["subfolder"] / entry["filename"]


def render(cli: ComfyCli, server: ComfyServer, loader: dict[str, Any], name: str) -> Rendered:
    """Runs the workflow for one file through `comfy run`, and copies its picture to `demo-output`."""
    result = Rendered(name)
    stem = name.removesuffix(".safetensors")
    workflow = workflows.text_to_image(loader, prefix=stem)
    try:
        answer = cli.run(workflow, server.base / "workflow.json", server.port)
    except ComfyRunError as error:
        server.ensure_alive()
        result.problem = rejection(error) or str(error)
        return result
    outputs = server.client.get(f"/history/{answer['prompt_id']}")[answer["prompt_id"]]["outputs"]
    result.seconds = float(answer["elapsed_seconds"])
    result.latent = pictures.read_latent(served_file(server, outputs[workflows.LATENT]["latents"][0]))
    result.picture = OUTPUT / f"{stem}.png"
    shutil.copyfile(served_file(server, outputs[workflows.PICTURE]["images"][0]), result.picture)
    result.report = "".join(outputs.get(workflows.REPORT, {}).get("text", []))
    return result


def rejection(error: ComfyRunError) -> str:
    """The text of the server's `node_errors`, all of it; empty when the server did not refuse the prompt."""
    texts = [
        str(entry.get("details") or entry.get("message"))
        for node in error.node_errors.values()
        for entry in node.get("errors", [])
    ]
    return "\n".join(texts)


def kernels_of(report: str) -> str:
    """The kernels that the loader's report plans, without the reasons."""
    found = re.findall(r"^\d+ x [^:]+: ([^:]+)", report, re.MULTILINE)
    return ", ".join(dict.fromkeys(found)) or "-"


def formats_of(report: str) -> str:
    found = re.findall(r"^(\d+) layers (\S+)$", report, re.MULTILINE)
    return ", ".join(f"{count} x {name}" for count, name in found) or "-"


def judge(result: Rendered, reference: torch.Tensor, expected: fixtures.Expectation) -> None:
    """Fills in the difference, and the problem when it is out of bounds."""
    if result.latent is None:
        return
    result.difference = pictures.relative_difference(result.latent, reference)
    if not result.difference <= expected.most:  # also catches NaN
        result.problem = f"the latent differs by {result.difference:.4f}, more than {expected.most}"
    elif result.difference < expected.least:
        result.problem = f"the latent differs by {result.difference:.6f} only: these layers did not run quantised"


def row_of(result: Rendered, expected: fixtures.Expectation) -> tuple[str, ...]:
    verdict = "FAILED" if result.problem else "ok"
    difference = "-" if result.difference is None else f"{result.difference:.4f}"
    picture = "-" if result.picture is None else str(result.picture.relative_to(CHECKOUT))
    allowed = f"{expected.least:.4f}..{expected.most:.2f}"
    seconds = f"{result.seconds:.1f}"
    report = result.report
    return result.file, verdict, formats_of(report), kernels_of(report), difference, allowed, seconds, picture


def write_models(server: ComfyServer, quantizers: Sequence[str], broken: Sequence[str]) -> None:
    folder = server.models("diffusion_models")
    tensors = fixtures.write_reference(folder, server.models("vae"))
    say(f"  {fixtures.REFERENCE}  {size_of(folder / fixtures.REFERENCE)}  (the 16-bit reference)")
    for quantizer in quantizers:
        path = fixtures.write_quantized(folder, tensors, quantizer)
        say(f"  {path.name}  {size_of(path)}")
    for name in broken:
        path = fixtures.write_broken(folder, tensors, name)
        say(f"  {path.name}  {size_of(path)}  (damaged on purpose)")


def size_of(path: Path) -> str:
    return f"{path.stat().st_size / 1e6:.1f} MB"


def start(server: ComfyServer) -> None:
    say("Starting ComfyUI ...")
    started = time.monotonic()
    server.start()
    say(f"  {server.address} after {time.monotonic() - started:.0f} s")


def refuse_broken(cli: ComfyCli, server: ComfyServer) -> int:
    """Queues the broken files, shows what the server answers; returns how many were not refused."""
    accepted = 0
    for name in SHOWN_BROKEN:
        say(f"\n{name}:")
        workflow = workflows.text_to_image(workflows.quant_loader(name), prefix="broken")
        try:
            cli.run(workflow, server.base / "workflow.json", server.port)
        except ComfyRunError as error:
            text = rejection(error)
            if not text:
                accepted += 1
                text = f"FAILED: not refused when it was queued, but later: {error}"
        else:
            accepted += 1
            text = "FAILED: the server rendered a broken file"
        say("\n".join(f"  | {line}" for line in text.splitlines()))
    return accepted


def demo(port: int | None) -> int:
    """Renders all formats and returns the exit status."""
    started = time.monotonic()
    OUTPUT.mkdir(exist_ok=True)
    server = ComfyServer(CACHE / "demo", port)
    server.check_port()
    shutil.rmtree(server.output(), ignore_errors=True)
    say("Making the tiny models (random weights) ...")
    write_models(server, list(fixtures.EXPECTATIONS), SHOWN_BROKEN)
    cli = ComfyCli(server.base / "comfy-cli")
    cli.disable_tracking()
    with server.stopped_on_exit():
        start(server)
        say("Rendering through `comfy run` ...")
        reference = render(cli, server, workflows.stock_loader(fixtures.REFERENCE), fixtures.REFERENCE)
        if reference.latent is None or reference.picture is None:
            raise ServerError(f"The 16-bit model did not render with ComfyUI's own loader: {reference.problem}")
        say(f"  {reference.file}  {reference.seconds:.1f} s")
        results = {}
        for quantizer, expected in fixtures.EXPECTATIONS.items():
            name = fixtures.file_name(quantizer)
            results[quantizer] = render(cli, server, workflows.quant_loader(name), name)
            judge(results[quantizer], reference.latent, expected)
            say(f"  {name}  {results[quantizer].seconds:.1f} s {results[quantizer].problem}")
        rows = [row_of(result, fixtures.EXPECTATIONS[quantizer]) for quantizer, result in results.items()]
        say(f"\nDifference: relative L2 of the latent after {workflows.STEPS} steps, to the 16-bit model.\n")
        say(pictures.table(HEADER, rows))
        shown = [(quantizer, result.picture) for quantizer, result in results.items() if result.picture is not None]
        sheet = OUTPUT / "contact-sheet.png"
        pictures.contact_sheet(reference.picture, shown, sheet)
        say(f"\nAll pictures beside the 16-bit one: {sheet.relative_to(CHECKOUT)}")
        say("\nWhat the server answers when a broken file is queued (nothing is loaded, the sampler never starts):")
        accepted = refuse_broken(cli, server)
    failed = [result for result in results.values() if result.problem]
    for result in failed:
        say(f"\nFAILED {result.file}: {result.problem}")
    say(f"\nDone in {time.monotonic() - started:.0f} s.")
    return 1 if failed or accepted else 0


def serve(port: int) -> int:
    """Leaves a server up until it is interrupted."""
    server = ComfyServer(CACHE / "serve", port)
    server.check_port()
    write_models(server, list(fixtures.EXPECTATIONS), list(fixtures.BROKEN))
    with server.stopped_on_exit():
        start(server)
        workflow = workflows.text_to_image(workflows.quant_loader(fixtures.file_name("nvfp4")), prefix="tiny-flux")
        saved = server.base / "user" / "default" / "workflows"
        saved.mkdir(parents=True, exist_ok=True)
        to_editor(workflow, server.client.get("/object_info"), saved / "tiny-flux.json")
        say(f"\nOpen {server.address} and pick tiny-flux in the Workflows tab (W). Ctrl-C stops the server.")
        while True:
            time.sleep(1.0)
            server.ensure_alive()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Renders tiny quantised models through a real ComfyUI server.")
    parser.add_argument("--serve", action="store_true", help="leave the server up instead of rendering")
    parser.add_argument("--port", type=int, default=None, help="port of the server (demo: any free one; serve: 8188)")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, end_on_signal)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, end_on_signal)
    try:
        return serve(options.port or SERVE_PORT) if options.serve else demo(options.port)
    except ServerError as error:
        say(str(error))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        say(f"The disk that holds {CHECKOUT} is full; free about 1 GB and run the same command again.")
    except KeyboardInterrupt:
        say("Stopped.")
    return 1


if __name__ == "__main__":
    sys.exit(main())
