"""The same results with other releases of comfy-kitchen than the one that this ComfyUI pins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from quant_loader.demo.paths import CACHE
from quant_loader.demo.setup_env import OTHER_KITCHEN

RELEASE = CACHE / f"kitchen-{OTHER_KITCHEN}"  # `make test` puts it there
SUBSET = "within_its_formats or dense_one_does or (effect and kohya) or embedding or convolution"


@pytest.mark.slow
def test_another_release_gives_the_same_results() -> None:
    if not RELEASE.is_dir():
        pytest.fail("No other comfy-kitchen: run `python3 demo/setup_env.py --tests`.")
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": str(RELEASE), "OMP_NUM_THREADS": "1"}
    version = subprocess.run(
        [sys.executable, "-c", "import importlib.metadata as m; print(m.version('comfy-kitchen'))"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert version.stdout.strip() == OTHER_KITCHEN
    files = [str(here / "test_formats.py"), str(here / "test_lora.py")]
    done = subprocess.run(
        [str(Path(sys.executable).with_name("pytest")), "-q", "-p", "no:cacheprovider", "-k", SUBSET, *files],
        env=environment,
        cwd=here,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-2000:]
