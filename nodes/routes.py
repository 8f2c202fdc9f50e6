"""Read-only HTTP routes behind the panel on the nodes: what a file is, and what would run it on this machine.

    GET /quant-loader/check?folder=&file=&rules=              the check's report and a few figures (`check_answer`)
    GET /quant-loader/plan?folder=&file=&rules=&execution=    the kernel of each group of layers, with the reason
    GET /quant-loader/ran?folder=&file=&rules=&execution=     what the layers of a loaded model did in the latest prompt
    GET /quant-loader/files                                   the checkpoint files of every folder that can be checked

A file is named as ComfyUI's own lists name it; nothing else can be reached. Files are read in worker threads, a few at
a time. A problem is answered as ``{"error": one sentence}`` with status 400, 404 or 503. Answers carry an ``ETag`` that
changes with the file, so that asking again costs a ``stat``.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

from aiohttp import web
from multidict import MultiMapping

from ..checkpoint import LayerSpec, Report, check, shard_paths
from . import files, runs
from .choices import EXECUTIONS, FOLDERS, RULES

ENDINGS = (".safetensors", ".sft", ".safetensors.index.json")
MAX_NAME = 1024
MAX_FILES = 4  # as many as a loader takes
NAMED_LAYERS = 4

# A restarted server may hold another version of the pack or other kernels: its answers are new even for an old file.
_PROCESS = secrets.token_hex(4)


class RequestError(Exception):
    """A request that cannot be answered: an HTTP status and one sentence for a person."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class Gate:
    """At most ``running`` jobs in worker threads and ``waiting`` behind them; more are turned away with 503."""

    def __init__(self, running: int = 2, waiting: int = 32) -> None:
        self._places = running + waiting
        self._slots = asyncio.Semaphore(running)

    async def run(self, job: Callable[[], Any]) -> Any:
        if self._places == 0:
            raise RequestError(503, "The server is busy checking other files. Try again in a moment.")
        self._places -= 1
        try:
            async with self._slots:
                return await asyncio.to_thread(job)
        finally:
            self._places += 1


def check_answer(folder: str, file: str, rules: str) -> dict[str, Any]:
    """The report of a listed file as JSON data, with what the panel shows beside it.

    Besides the report (``docs/report.schema.json``): ``size``, ``quantized_bytes``, ``bits_per_weight`` of the
    quantised layers (their bytes, scales included, over N x K; None without such layers), ``repairable`` (every error
    has a lossless repair) with ``repair_command``, and for a file that strict refuses ``compatible``: what the
    compatible rules say of it.
    """
    paths = _paths(folder, file)
    report = check(paths, rules=rules)  # type: ignore[arg-type]  # one of RULES: _choice saw to it
    answer: dict[str, Any] = report.to_dict()
    answer["files"] = [PurePath(path).name for path in report.files]
    weights = sum(layer.N * layer.K for layer in report.layers)
    packed = sum(layer.bytes for layer in report.layers)
    repairable = bool(report.errors) and all(fault.repairable for fault in report.errors)
    answer["folder"] = folder
    answer["file"] = file
    answer["size"] = _size(paths)
    answer["quantized_bytes"] = packed
    answer["bits_per_weight"] = round(8 * packed / weights, 2) if weights else None
    answer["repairable"] = repairable
    answer["repair_command"] = _repair_command(file) if repairable else None
    answer["compatible"] = None
    if report.verdict == "refused" and rules == "strict":
        other = check(paths, rules="compatible")
        answer["compatible"] = {"verdict": other.verdict, "summary": other.summary}
    return answer


def plan_answer(folder: str, file: str, rules: str, execution: str) -> dict[str, Any]:
    """What would run each layer of a listed file on this machine: layers with the same answer form one group.

    ``layers`` maps a layer's name to the index of its group.
    """
    report = check(_paths(folder, file), rules=rules)  # type: ignore[arg-type]
    answer: dict[str, Any] = {"folder": folder, "file": file, "execution": execution, "verdict": report.verdict}
    return answer | _planned(report, execution)


def ran_answer(loads: runs.Runs, folder: str, names: tuple[str, ...], rules: str, execution: str) -> dict[str, Any]:
    """What the models did that a loader made of these files: one entry of ``parts`` each (:meth:`runs.Runs.figures`).

    ``parts`` is empty when no loader of this server made a model of them as they are now, or when ComfyUI dropped it.
    """
    parts = loads.figures(runs.Asked.now(folder, names, rules, execution))
    return {"folder": folder, "files": list(names), "rules": rules, "execution": execution, "parts": parts}


def files_answer() -> dict[str, Any]:
    """The files of every folder that can be checked, as ComfyUI lists them."""
    return {
        "folders": [
            {"folder": folder, "files": [name for name in files.names(folder) if name.endswith(ENDINGS)]}
            for folder in FOLDERS
        ]
    }


def register(routes: web.RouteTableDef, loads: runs.Runs) -> None:
    """Adds the routes to ComfyUI's table (``PromptServer.instance.routes``); called once, before the server starts.

    ``loads``: what the server's loader nodes gave away.
    """
    gate = Gate()

    async def answer(request: web.Request, job: Callable[[], tuple[str, Callable[[], dict[str, Any]]]]) -> web.Response:
        known = request.headers.get("If-None-Match")

        def work() -> tuple[str, str | None]:
            state, build = job()
            tag = f'"{hashlib.sha256(f"{_PROCESS} {state}".encode("utf-8", "surrogatepass")).hexdigest()[:32]}"'
            return tag, None if tag == known else _json(build())

        try:
            tag, text = await gate.run(work)
        except RequestError as error:
            return web.json_response({"error": str(error)}, status=error.status)
        headers = {"ETag": tag, "Cache-Control": "no-cache"}
        if text is None:
            return web.Response(status=304, headers=headers)
        return web.Response(text=text, content_type="application/json", headers=headers)

    @routes.get("/quant-loader/check")
    async def check_route(request: web.Request) -> web.Response:
        def job() -> tuple[str, Callable[[], dict[str, Any]]]:
            folder, file, rules = _target(request.query)
            return f"check {rules} {files.fingerprint(folder, file)}", lambda: check_answer(folder, file, rules)

        return await answer(request, job)

    @routes.get("/quant-loader/plan")
    async def plan_route(request: web.Request) -> web.Response:
        def job() -> tuple[str, Callable[[], dict[str, Any]]]:
            folder, file, rules = _target(request.query)
            execution = _choice(request.query, "execution", EXECUTIONS)
            state = f"plan {rules} {execution} {files.fingerprint(folder, file)}"
            return state, lambda: plan_answer(folder, file, rules, execution)

        return await answer(request, job)

    @routes.get("/quant-loader/ran")
    async def ran_route(request: web.Request) -> web.Response:
        def job() -> tuple[str, Callable[[], dict[str, Any]]]:
            folder, names, rules = _targets(request.query)
            ran = ran_answer(loads, folder, names, rules, _choice(request.query, "execution", EXECUTIONS))
            return f"ran {_json(ran)}", lambda: ran

        return await answer(request, job)

    @routes.get("/quant-loader/files")
    async def files_route(request: web.Request) -> web.Response:
        def job() -> tuple[str, Callable[[], dict[str, Any]]]:
            listed = files_answer()
            return f"files {_json(listed)}", lambda: listed

        return await answer(request, job)


def register_on_server() -> None:
    """Adds the routes to the running ComfyUI server; does nothing where the nodes are used without one."""
    from server import PromptServer

    instance = getattr(PromptServer, "instance", None)
    if instance is not None:
        loads = runs.Runs()
        instance.app[runs.RUNS] = loads
        register(instance.routes, loads)


def _target(query: MultiMapping[str]) -> tuple[str, str, str]:
    """(folder, file, rules) of a request, each one checked."""
    folder, (file, *_), rules = _targets(query)
    return folder, file, rules


def _targets(query: MultiMapping[str]) -> tuple[str, tuple[str, ...], str]:
    """The same for a request that may name several files."""
    folder = _choice(query, "folder", FOLDERS, default=None)
    rules = _choice(query, "rules", RULES)
    names = tuple(query.getall("file", []))
    if not names or len(names) > MAX_FILES or any(not name or len(name) > MAX_NAME for name in names):
        raise RequestError(400, "The request names no file: file=... is missing, or longer than a file name can be.")
    listed = files.names(folder)
    for name in names:
        if name not in listed:
            raise RequestError(404, files.not_found(folder, _printable(name)))
    return folder, names, rules


def _choice(query: Mapping[str, str], key: str, values: tuple[str, ...], default: str | None = "") -> str:
    """A parameter that must be one of ``values``; absent, it is the first of them (with ``default=None``: an error)."""
    value = query.get(key, values[0] if default is not None else "")
    if value not in values:
        raise RequestError(400, f"{key} must be one of {', '.join(values)}; found {_printable(value)!r}.")
    return value


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text[:120])


def _paths(folder: str, file: str) -> list[str]:
    path = files.resolve(folder, file)
    if path is None:
        raise RequestError(404, files.not_found(folder, _printable(file)))
    return [path]


def _size(paths: list[str]) -> int:
    """Bytes on disk of the checkpoint with all its shards; one that is missing counts 0 (the report names it)."""
    return sum(_bytes_of(shard) for path in paths for shard in shard_paths(path))


def _bytes_of(path: str | os.PathLike[str]) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _repair_command(file: str) -> str:
    """The command that mends the file, to be run where the file lies (``file`` may name a sub-folder)."""
    source = PurePath(file.replace("\\", "/"))
    return f'quant-loader repair "{source}" "{source.with_name(f"{source.stem}-repaired{source.suffix}")}"'


def _planned(report: Report, execution: str) -> dict[str, Any]:
    """Groups of layers by what would run them on ComfyUI's device."""
    if report.verdict != "ok":
        return {"device": None, "groups": [], "layers": {}}
    # Deferred: the check must answer even where torch or a kernel library is broken.
    import comfy.model_management

    from ..kernels import device_facts

    facts = device_facts(comfy.model_management.get_torch_device())
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    layers: dict[str, int] = {}
    seen: dict[str, tuple[Any, ...]] = {}
    for layer in report.layers:
        kind = f"{layer.format} {layer.shape} {sorted(layer.annotations.items())!r}"
        if kind not in seen:
            seen[kind] = _plan_of(layer, facts, execution)
        key = seen[kind]
        if key not in groups:
            fields = ("format", "backend", "operator", "execution", "reason", "slow")
            groups[key] = dict(zip(fields, key, strict=True)) | {"count": 0, "layers": [], "index": len(groups)}
        group = groups[key]
        group["count"] += 1
        if len(group["layers"]) < NAMED_LAYERS:
            group["layers"].append(layer.name)
        layers[layer.name] = group["index"]
    return {"device": facts.name, "groups": list(groups.values()), "layers": layers}


def _plan_of(layer: LayerSpec, facts: Any, execution: str) -> tuple[Any, ...]:
    """(format, backend, operator, execution, reason, slow); a layer that nothing can run says so in its reason."""
    from ..kernels import plan

    try:
        chosen = plan(layer, facts, execution)  # type: ignore[arg-type]
    except ValueError as error:
        return layer.format, "none", "", "", str(error), True
    return layer.format, chosen.backend, chosen.operator, chosen.execution, chosen.reason, chosen.slow


def _json(answer: dict[str, Any]) -> str:
    """JSON text that a browser can parse: a NaN or an infinity of a hostile file becomes a word."""
    try:
        return json.dumps(answer, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(answer), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
