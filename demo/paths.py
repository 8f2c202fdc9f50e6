"""Where the demo and the tests keep things, all inside the checkout and ignored by git."""

from __future__ import annotations

import os
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
CACHE = CHECKOUT / ".cache"
OUTPUT = CHECKOUT / "demo-output"
EXAMPLE_WORKFLOWS = CHECKOUT / "example_workflows"


def comfyui_tree() -> Path:
    """The ComfyUI source tree to run: the checkout named by COMFYUI_PATH, else the one that the set-up unpacked."""
    chosen = os.environ.get("COMFYUI_PATH")
    return Path(chosen).expanduser().resolve() if chosen else CACHE / "ComfyUI"
