"""The values a user can choose, said once for the nodes and the routes."""

from __future__ import annotations

from typing import Final

FOLDERS: Final = ("diffusion_models", "checkpoints", "text_encoders", "controlnet", "model_patches", "vae")
"""The model folders whose files can be checked."""
RULES: Final = ("strict", "compatible")
EXECUTIONS: Final = ("auto", "native", "int8", "exact")
