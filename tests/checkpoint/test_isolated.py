"""The room needs the standard library and numpy, nothing else."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOM = Path(__file__).parents[2] / "checkpoint"
BLOCK = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "safetensors", "comfy", "comfy_kitchen", "triton", "aiohttp"}:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
from quant_loader.checkpoint import check, verdict_text
from quant_loader.cli import main
print(check(sys.argv[1]).verdict, main(["check", sys.argv[1]]), "torch" in sys.modules)
"""


def test_runs_without_torch(file, tools):
    path = file(tools.layers.int8(), markers={"a": {"format": "int8_tensorwise"}})
    done = subprocess.run([sys.executable, "-c", BLOCK, path], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "ok 0 False"


def test_imports_only_the_standard_library_and_numpy():
    allowed = set(sys.stdlib_module_names) | {"numpy"}
    found = {}
    for path in ROOM.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            strangers = {name.split(".")[0] for name in names} - allowed
            if strangers:
                found[path.name] = strangers
    assert found == {}
