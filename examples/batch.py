#!/usr/bin/env python3
"""Run one workflow over several model files and seeds, through ComfyUI's HTTP API or through comfy-cli.

    python batch.py workflow.json --files a.safetensors b.safetensors --seeds 1 2 3 4
    python batch.py workflow.json --files a.safetensors --via comfy --server http://127.0.0.1:8188

The workflow is in API format ("Export (API)" in the editor's menu). A stock "Load Diffusion Model" becomes "Load
Quantized Diffusion Model", which refuses a broken file when it is queued; such prompts are reported by name and the
others run on. Standard library only; copy it and change it.

Exit code: 0 every prompt finished, 1 some did not, 2 nothing could be run (no server, no workflow).
"""

from __future__ import annotations

import argparse
import copy
import http.client
import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

Workflow = dict[str, dict[str, Any]]

OURS, STOCK = "QuantLoaderDiffusionModel", "UNETLoader"


class NothingToRun(Exception):
    """The request cannot be carried out at all; exit code 2."""


class Result(NamedTuple):
    """One prompt: ``problem`` is empty when it finished, ``outputs`` are the files it wrote."""

    file: str
    seed: int
    problem: str
    outputs: list[str]


# -- the workflow ------------------------------------------------------------------------------------------------------


def read_workflow(path: Path) -> Workflow:
    """The nodes of an API-format file."""
    try:
        nodes = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NothingToRun(f"{path} cannot be used: {error}") from error
    if not isinstance(nodes, dict) or not all(isinstance(n, dict) and "class_type" in n for n in nodes.values()):
        raise NothingToRun(f"{path} is not in API format: use Export (API) in ComfyUI's menu")
    return nodes


def with_our_loader(workflow: Workflow, rules: str, execution: str) -> Workflow:
    """The workflow with stock diffusion model loaders replaced by ours; links stay, for the ids stay."""
    workflow = copy.deepcopy(workflow)
    for node in workflow.values():
        if node["class_type"] == STOCK:
            node["class_type"] = OURS
            node["inputs"] = {"model_name": node["inputs"].get("unet_name")}
        if node["class_type"] == OURS:
            node["inputs"].update(rules=rules, execution=execution)
    if not any(node["class_type"] == OURS for node in workflow.values()):
        raise NothingToRun(f"the workflow has neither {STOCK} nor {OURS}")
    return workflow


def variant(workflow: Workflow, file: str, seed: int) -> Workflow:
    """The workflow with another model file and seed."""
    workflow = copy.deepcopy(workflow)
    for node in workflow.values():
        inputs = node["inputs"]
        if node["class_type"] == OURS:
            inputs["model_name"] = file
        for name in ("seed", "noise_seed"):
            if isinstance(inputs.get(name), int):
                inputs[name] = seed
    return workflow


def refusals(node_errors: Any) -> str:
    """What the server says about each node, in one text. Our loader's details begin with the verdict.

    The server maps node ids to their errors; comfy-cli hands on a list whose entries hold their ``node_id``.
    """
    if isinstance(node_errors, list):
        node_errors = {str(node.get("node_id", place)): node for place, node in enumerate(node_errors)}
    lines = [
        f"node {node_id} ({node.get('class_type', '?')}): {error.get('details') or error.get('message', '')}"
        for node_id, node in node_errors.items()
        for error in node.get("errors", [])
    ]
    return "\n".join(dict.fromkeys(lines)) or "the server refused the prompt"


# -- through the HTTP API ----------------------------------------------------------------------------------------------


def with_scheme(address: str) -> str:
    """``127.0.0.1:8188`` is what people type."""
    return address if "://" in address else f"http://{address}"


class Server:
    """ComfyUI's HTTP API."""

    def __init__(self, address: str) -> None:
        self.address = with_scheme(address).rstrip("/")

    def call(self, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and JSON of a GET, or of a POST when there is a body."""
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.loads(response.read() or b"{}")
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read() or b"{}")
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise NothingToRun(f"{self.address} does not answer as ComfyUI does: {error}") from error

    def queue(self, workflow: Workflow) -> tuple[str, str]:
        """(prompt id, what is wrong with it). A prompt with ``node_errors`` is not left to run half."""
        status, answer = self.call("/prompt", {"prompt": workflow, "client_id": uuid.uuid4().hex})
        if status != 200:
            problem = refusals(answer.get("node_errors") or {})
            message = answer.get("error", {}).get("message", "")
            return "", problem if answer.get("node_errors") else message or problem
        if answer.get("node_errors"):  # other outputs of the graph are valid, so it was queued all the same
            self.cancel(answer["prompt_id"])
            return "", refusals(answer["node_errors"])
        return answer["prompt_id"], ""

    def cancel(self, prompt_id: str) -> None:
        self.call("/queue", {"delete": [prompt_id]})
        self.call("/interrupt", {"prompt_id": prompt_id})

    def finished(self, prompt_id: str) -> tuple[str, list[str]] | None:
        """(problem, written files) of a prompt that has ended, None while it runs."""
        entry = self.call(f"/history/{prompt_id}")[1].get(prompt_id)
        if entry is None:
            return None
        files = [
            "/".join(filter(None, (item.get("subfolder"), item["filename"])))
            for output in entry.get("outputs", {}).values()
            for items in output.values()
            if isinstance(items, list)
            for item in items
            if isinstance(item, dict) and item.get("type") == "output" and "filename" in item
        ]
        status = entry.get("status", {})
        if status.get("status_str") == "success":
            return "", files
        for kind, data in status.get("messages", []):
            if kind == "execution_error":
                return f"node {data.get('node_id')} ({data.get('node_type')}): {data.get('exception_message')}", files
        return "it was interrupted", files


def run_http(jobs: list[tuple[str, int, Workflow]], server: Server, timeout: float) -> list[Result]:
    """Queue everything, then wait. ``timeout``: seconds without any prompt ending before the rest is given up."""
    results: dict[int, Result] = {}
    running: dict[int, str] = {}
    for index, (file, seed, workflow) in enumerate(jobs):
        prompt_id, problem = server.queue(workflow)
        if problem:
            results[index] = Result(file, seed, problem, [])
        else:
            running[index] = prompt_id
    last = time.monotonic()
    while running:
        ended = {index: answer for index, prompt in running.items() if (answer := server.finished(prompt)) is not None}
        for index, (problem, files) in ended.items():
            del running[index]
            results[index] = Result(*jobs[index][:2], problem, files)
            last = time.monotonic()
        if running and time.monotonic() - last > timeout:
            for index, prompt_id in running.items():
                server.cancel(prompt_id)
                results[index] = Result(*jobs[index][:2], f"no prompt ended for {timeout:.0f} s: given up", [])
            break
        if not ended:
            time.sleep(0.2)
    return [results[index] for index in sorted(results)]


# -- through comfy-cli -------------------------------------------------------------------------------------------------


def run_comfy(jobs: list[tuple[str, int, Workflow]], address: str, timeout: float, comfy: str) -> list[Result]:
    """One ``comfy run --wait`` for each prompt, one after the other."""
    try:
        parts = urlsplit(with_scheme(address))
        host, port = parts.hostname or "127.0.0.1", parts.port or 8188
    except ValueError as error:
        raise NothingToRun(f"{address} is no address of a server: {error}") from error
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for file, seed, workflow in jobs:
            path = Path(folder, "workflow.json")
            path.write_text(json.dumps(workflow), encoding="utf-8")
            where = ["--host", host, "--port", str(port)]
            command = [comfy, "--skip-prompt", "--json", "run", "--workflow", str(path), *where, "--wait"]
            results.append(Result(file, seed, *_comfy_run([*command, "--timeout", str(int(timeout))], timeout + 60)))
    return results


def _comfy_run(command: list[str], limit: float) -> tuple[str, list[str]]:
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", stdin=subprocess.DEVNULL, timeout=limit, check=False
        )
        answer = json.loads(done.stdout)
    except FileNotFoundError as error:
        raise NothingToRun("comfy-cli is not installed: pip install comfy-cli") from error
    except (ValueError, subprocess.TimeoutExpired) as error:
        return f"comfy run gave no answer: {error}", []
    if answer.get("ok"):
        return "", [str(item) for item in (answer.get("data") or {}).get("outputs") or []]
    error = answer.get("error") or {}
    details = error.get("details")
    node_errors = details.get("node_errors") if isinstance(details, dict) else None
    return refusals(node_errors) if node_errors else str(error.get("message", "comfy run failed")), []


# -- the command -------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run one workflow over several quantised models and seeds.")
    parser.add_argument("workflow", type=Path, help="the workflow in API format")
    parser.add_argument("--files", nargs="+", required=True, help="names as the loader lists them")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--server", default="http://127.0.0.1:8188")
    parser.add_argument("--via", choices=("http", "comfy"), default="http")
    parser.add_argument("--comfy", default="comfy", help="the comfy-cli program")
    parser.add_argument("--rules", choices=("strict", "compatible"), default="strict")
    parser.add_argument("--execution", choices=("auto", "native", "int8", "exact"), default="auto")
    parser.add_argument("--timeout", type=float, default=600, help="seconds without progress before giving up")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    options = parser.parse_args(argv)
    try:
        workflow = with_our_loader(read_workflow(options.workflow), options.rules, options.execution)
        jobs = [(file, seed, variant(workflow, file, seed)) for file in options.files for seed in options.seeds]
        if options.via == "http":
            results = run_http(jobs, Server(options.server), options.timeout)
        else:
            results = run_comfy(jobs, options.server, options.timeout, options.comfy)
    except NothingToRun as error:
        print(error, file=sys.stderr)
        return 2
    failed = [result for result in results if result.problem]
    if options.json:
        print(json.dumps([result._asdict() for result in results], indent=2))
    else:
        for result in results:
            state = "FAILED" if result.problem else "done"
            print(f"{state:<7} {result.file} seed {result.seed}  {' '.join(result.outputs)}")
            for line in result.problem.splitlines():
                print(f"        {line}")
        print(f"{len(results) - len(failed)} of {len(results)} prompts finished")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
