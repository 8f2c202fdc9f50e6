"""A small client of ComfyUI's HTTP API: queue a prompt, wait for it, read what it did."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
import uuid
from dataclasses import dataclass, field
from typing import Any

import websocket

Workflow = dict[str, dict[str, Any]]


class PromptRejected(RuntimeError):
    """The server refused to queue a prompt (HTTP 400)."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        super().__init__(f"the server answered {status}: {body.get('error', {}).get('message', body)}")
        self.status = status
        self.body = body

    @property
    def node_errors(self) -> dict[str, Any]:
        """What the server said about each node: node id -> {"class_type", "errors": [{"message", "details", ...}]}."""
        errors = self.body.get("node_errors")
        return errors if isinstance(errors, dict) else {}

    def details(self) -> list[str]:
        """The `details` text of every error of every node, in the server's order."""
        return [error.get("details", "") for node in self.node_errors.values() for error in node.get("errors", [])]


class PromptFailed(RuntimeError):
    """A queued prompt ended with an exception in a node."""

    def __init__(self, run: PromptRun) -> None:
        error = run.error or {}
        super().__init__(f"{error.get('node_type', 'the prompt')} failed: {error.get('exception_message', 'unknown')}")
        self.run = run


@dataclass
class PromptRun:
    """What one prompt did: `executed` and `cached` node ids in order, `outputs` by node id, the `error` if any."""

    prompt_id: str
    executed: list[str] = field(default_factory=list)
    cached: list[str] = field(default_factory=list)
    outputs: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    seconds: float = 0.0

    def files(self, node_id: str, kind: str = "images") -> list[dict[str, str]]:
        """The files that an output node wrote: [{"filename", "subfolder", "type"}]."""
        files = self.outputs.get(node_id, {}).get(kind, [])
        return list(files)


class ComfyClient:
    """Talks to one server. Times are in seconds; every call raises URLError when the server is not there."""

    def __init__(self, host: str, port: int) -> None:
        self.address = f"{host}:{port}"

    def get(self, path: str, timeout: float = 60.0) -> Any:
        """The JSON that a GET of `path` answers."""
        with urllib.request.urlopen(f"http://{self.address}{path}", timeout=timeout) as response:
            return json.load(response)

    def post(self, path: str, body: Any, timeout: float = 60.0) -> tuple[int, Any]:
        """Posts JSON and returns the status and the JSON answer (an empty dict where there is none)."""
        request = urllib.request.Request(
            f"http://{self.address}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return response.status, json.loads(response.read() or b"{}")
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read() or b"{}")

    def is_up(self) -> bool:
        try:
            self.get("/system_stats", timeout=2.0)
        except (urllib.error.URLError, ConnectionError, TimeoutError, json.JSONDecodeError):
            return False
        return True

    def queue(self, workflow: Workflow, client_id: str | None = None) -> str:
        """Queues a workflow in API format and returns the prompt's id. Raises PromptRejected when it is refused."""
        status, answer = self.post("/prompt", {"prompt": workflow, **({"client_id": client_id} if client_id else {})})
        if status != 200:
            raise PromptRejected(status, answer)
        return str(answer["prompt_id"])

    def run(self, workflow: Workflow, timeout: float = 300.0) -> PromptRun:
        """Queues a workflow and waits for its end. Raises PromptRejected, PromptFailed or TimeoutError."""
        client_id = uuid.uuid4().hex
        started = time.monotonic()
        connection = websocket.create_connection(f"ws://{self.address}/ws?clientId={client_id}", timeout=timeout)
        try:
            run = PromptRun(self.queue(workflow, client_id))
            self._follow(connection, run, started + timeout)
        finally:
            connection.close()
        run.seconds = time.monotonic() - started
        if run.error is not None:
            raise PromptFailed(run)
        run.outputs = self.get(f"/history/{run.prompt_id}")[run.prompt_id]["outputs"]
        return run

    @staticmethod
    def _follow(connection: websocket.WebSocket, run: PromptRun, deadline: float) -> None:
        """Reads events until `executing` with node null: only then is the history written."""
        while True:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError(f"prompt {run.prompt_id} did not end in time")
            connection.settimeout(remaining)
            try:
                message = connection.recv()
            except websocket.WebSocketTimeoutException as error:
                raise TimeoutError(f"prompt {run.prompt_id} did not end in time") from error
            if not isinstance(message, str):
                continue  # a binary preview picture
            event = json.loads(message)
            data = event.get("data", {})
            if data.get("prompt_id") != run.prompt_id:
                continue
            if event["type"] == "execution_cached":
                run.cached.extend(data["nodes"])
            elif event["type"] == "execution_error":
                run.error = data
            elif event["type"] == "executing":
                if data["node"] is None:
                    return
                run.executed.append(data["node"])
