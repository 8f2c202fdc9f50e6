"""The kernels against float64 without a GPU: this folder's tests again, in a session where Triton interprets its
kernels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_kernel_in_the_interpreter():
    folder = Path(__file__).parent
    session = (
        f"import sys, pytest; sys.exit(pytest.main([{str(folder)!r}, '-q', '-m', 'not gpu', '-p', 'no:cacheprovider']))"
    )
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_ADDOPTS", None)  # the count below needs the summary line
    run = subprocess.run(
        [sys.executable, "-I", "-c", session], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None, run.stdout
    assert int(passed[1]) > 200
    assert "skipped" not in run.stdout.splitlines()[-1]
