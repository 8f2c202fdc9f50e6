"""The same results with other releases of comfy-kitchen than the one that this ComfyUI pins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from quant_loader.demo.paths import CACHE

# Put there by: pip install --no-deps --target .cache/kitchen-0.2.40 comfy-kitchen==0.2.40
RELEASES = sorted(CACHE.glob("kitchen-*"))
SUBSET = "within_its_formats or dense_one_does or (effect and kohya) or embedding or convolution"


@pytest.mark.slow
@pytest.mark.skipif(not RELEASES, reason="no other comfy-kitchen in .cache; see the comment on RELEASES")
@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
def test_another_release_gives_the_same_results(release: Path) -> None:
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": str(release), "OMP_NUM_THREADS": "1"}
    version = subprocess.run(
        [sys.executable, "-c", "import importlib.metadata as m; print(m.version('comfy-kitchen'))"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert version.stdout.strip() == release.name.removeprefix("kitchen-")
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
