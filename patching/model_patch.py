"""Model patches: ComfyUI builds them inside a node, from a file it reads itself and with operations of its own choice.

The node's function is run here in a namespace of its own, in which the file's tensors and the operations are ours.
Nothing of ComfyUI is changed; its list of model patches, and every one that a newer ComfyUI adds, is used as it is.
"""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

from .errors import HostError, QuantLoaderError
from .host import optional, version


class _Overlay:
    """A module with some names replaced; every other name is the module's."""

    def __init__(self, base: Any, **names: Any) -> None:
        self.__dict__.update(names)
        self._base = base

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)


def build(path: str, sd: dict[str, Any], metadata: dict[str, str], options: dict[str, Any]) -> Any:
    """The ModelPatcher of the model patch whose (folded) tensors are ``sd``.

    ``options["custom_operations"]``, where given, is what the model is built with.
    """
    import comfy
    import comfy.ops
    import comfy.utils

    node = optional("comfy_extras.nodes_model_patch", "ModelPatchLoader")
    function = getattr(node, "load_model_patch", None)
    if not isinstance(function, types.FunctionType):
        raise HostError(
            f"This ComfyUI ({version()}) builds model patches in a way that Quant Loader does not know. "
            "Load the unquantised file with ComfyUI's own ModelPatchLoader."
        )
    names = function.__globals__
    operations = options.get("custom_operations", comfy.ops.manual_cast)
    overlay = {
        "comfy": _Overlay(
            comfy,
            ops=_Overlay(comfy.ops, manual_cast=operations),
            utils=_Overlay(comfy.utils, load_torch_file=lambda *_, **__: (sd, metadata)),
        ),
        "folder_paths": _Overlay(names["folder_paths"], get_full_path_or_raise=lambda *_: path),
    }
    loader = types.FunctionType(function.__code__, {**names, **overlay}, function.__name__, function.__defaults__)
    name = Path(path).name
    try:
        (patcher,) = loader(None, name)
    except UnboundLocalError as error:
        # None of the node's branches took the file.
        raise QuantLoaderError(
            f"{name} holds no model patch that ComfyUI knows. Is it in the right folder, and is this ComfyUI new "
            "enough for it?"
        ) from error
    return patcher
