"""The package twice in one process: installed, and as a checkout in custom_nodes under another name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import importlib.util, sys
import torch
import quant_loader
from quant_loader import kernels
from quant_loader.checkpoint import LayerSpec

root = sys.argv[1]
spec = importlib.util.spec_from_file_location("second_copy", root + "/__init__.py", submodule_search_locations=[root])
module = importlib.util.module_from_spec(spec)
sys.modules["second_copy"] = module
spec.loader.exec_module(module)
second = importlib.import_module("second_copy.kernels")
assert second is not kernels and second.plan is not kernels.plan

x = torch.randn(3, 64)
weight = torch.randint(-127, 128, (24, 64), dtype=torch.int8)
layer = LayerSpec("a", "int8_tensorwise", (24, 64))
tensors = {"weight": weight, "weight_scale": torch.tensor(0.01)}
truth = kernels.reference_linear(x, layer, tensors)
for copy in (kernels, second, kernels):
    y = copy.linear(x, layer, tensors)
    assert (y - truth).norm() / truth.norm() < 1e-6
assert kernels.calls() == {("int8_linear (native)", "torch"): 2}, kernels.calls()
assert second.calls() == {("int8_linear (native)", "torch"): 1}, second.calls()
print("fine")
"""


def test_both_copies_work(tmp_path) -> None:
    import quant_loader

    root = Path(quant_loader.__file__).parent
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(root)],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=tmp_path,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip().endswith("fine")
