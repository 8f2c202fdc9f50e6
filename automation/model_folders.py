"""Where an installation keeps its models: the ``models`` folder and ``extra_model_paths.yaml``, searched as ComfyUI
does.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoint.words import clean
from .documents import read_bytes, shown
from .errors import RequestError

_MAX_YAML = 1 << 20

_STOCK: dict[str, tuple[str, ...]] = {
    "text_encoders": ("text_encoders", "clip"),
    "diffusion_models": ("unet", "diffusion_models"),
    "controlnet": ("controlnet", "t2i_adapter"),
}
"""Folder kinds that ComfyUI looks for in more than the folder of their own name, in its order."""

_LEGACY = {"unet": "diffusion_models", "clip": "text_encoders"}
_ALSO = {"vae": ("vae_approx",)}
"""Kinds whose loader node lists a second kind as well."""


@dataclass
class ModelFolders:
    """Folder kind -> folders, first match wins: ``preferred``, the installation's own (``models``), ``extra``."""

    models: Path | None = None
    preferred: dict[str, list[Path]] = field(default_factory=dict)
    extra: dict[str, list[Path]] = field(default_factory=dict)

    def of(self, kind: str) -> list[Path]:
        """The folders of one kind (``diffusion_models``, ``checkpoints``, ...)."""
        kind = _LEGACY.get(kind, kind)
        own = [self.models / name for name in _STOCK.get(kind, (kind,))] if self.models is not None and kind else []
        folders = [*self.preferred.get(kind, []), *own, *self.extra.get(kind, [])]
        for also in _ALSO.get(kind, ()):
            folders.extend(self.of(also))
        return folders

    def find(self, kind: str, name: str) -> Path | None:
        """The file that a node means by ``name``, or None. Never a path outside the folders by ``..`` or an absolute
        name.

        A name written on Windows (``sub\\file``) is found on other systems too.
        """
        for spelling in dict.fromkeys((name, name.replace("\\", "/"))):
            parts = spelling.replace(os.sep, "/").split("/")
            if os.path.isabs(spelling) or ".." in parts or "\0" in spelling or ":" in parts[0]:
                return None
            for folder in self.of(kind):
                candidate = folder / spelling
                try:
                    if candidate.is_file():
                        return candidate
                except (OSError, ValueError):
                    continue
        return None

    def roots(self) -> list[Path]:
        """Every folder of the installation, for a walk: the models folder, then the extra ones that lie outside it."""
        roots = [self.models] if self.models is not None else []
        for folders in (*self.preferred.values(), *self.extra.values()):
            roots.extend(folders)
        return list(dict.fromkeys(roots))


def model_folders(models: str | None, extra_yaml: Iterable[str] = ()) -> ModelFolders:
    """The folders that the options name, else those of the ComfyUI around this pack or at ``COMFYUI_PATH``.

    ``models`` may be a models folder or a ComfyUI folder that has one. Raises RequestError when there is nothing to
    search.
    """
    folders = ModelFolders()
    files = list(extra_yaml)
    if models is not None:
        root = Path(models)
        if not root.is_dir():
            raise RequestError(f"There is no folder {shown(models)}.")
        folders.models = root
        if (root / "models").is_dir() and (root / "main.py").is_file():
            folders.models = root / "models"
            files.extend(_yaml_of(root))
    elif not files:
        found = installation()
        if found is None:
            raise RequestError(
                "No models folder is known: give it with --models DIR (ComfyUI's models folder), or set COMFYUI_PATH."
            )
        folders.models = found / "models"
        files.extend(_yaml_of(found))
    for path in files:
        _add_yaml(path, folders)
    return folders


def installation() -> Path | None:
    """The ComfyUI that this pack is installed in, or the one that ``COMFYUI_PATH`` names."""
    chosen = os.environ.get("COMFYUI_PATH")
    candidates = [Path(chosen).expanduser()] if chosen else []
    candidates.append(
        Path(os.path.abspath(__file__)).parents[3]
    )  # <ComfyUI>/custom_nodes/<pack>/automation/<file>, symlinks kept
    return next((root for root in candidates if (root / "main.py").is_file() and (root / "models").is_dir()), None)


def _yaml_of(root: Path) -> list[str]:
    path = root / "extra_model_paths.yaml"
    return [str(path)] if path.is_file() else []


def _add_yaml(path: str, folders: ModelFolders) -> None:
    for kind, listed, first in _entries(_load_yaml(path), path):
        target = (folders.preferred if first else folders.extra).setdefault(_LEGACY.get(kind, kind), [])
        target.extend(folder for folder in listed if folder not in target)


def _load_yaml(path: str) -> Mapping[str, Any]:
    try:
        import yaml
    except ImportError:
        raise RequestError(
            "Reading extra_model_paths.yaml needs PyYAML, which ComfyUI brings: pip install pyyaml."
        ) from None
    text = read_bytes(path, _MAX_YAML)
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "it cannot be read"
        raise RequestError(f"{shown(path)} is not YAML{where}: {clean(str(problem), 160)}.") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise RequestError(
            f"{shown(path)} is no list of model paths: expected sections such as comfyui with a base_path."
        )
    return content


def _entries(content: Mapping[str, Any], path: str) -> Iterable[tuple[str, list[Path], bool]]:
    """(kind, folders, searched first) in the file's order, by the rules of ComfyUI's ``load_extra_path_config``."""
    here = os.path.dirname(os.path.abspath(path))
    for name, section in content.items():
        if section is None:
            continue
        if not isinstance(section, dict):
            raise RequestError(f"{shown(path)}: the section {shown(str(name))} must be a table of folders.")
        base = section.get("base_path")
        if base is not None and not isinstance(base, str):
            raise RequestError(f"{shown(path)}: base_path of {shown(str(name))} must be a folder.")
        root = os.path.join(here, os.path.expandvars(os.path.expanduser(base))) if base else here
        for kind, value in section.items():
            if kind in ("base_path", "is_default"):
                continue
            if not isinstance(value, str):
                raise RequestError(
                    f"{shown(path)}: {shown(str(kind))} of {shown(str(name))} must be a folder, or folders on lines "
                    f"of their own."
                )
            lines = [line.strip() for line in value.split("\n") if line.strip()]
            yield (
                str(kind),
                [Path(os.path.normpath(os.path.join(root, line))) for line in lines],
                bool(section.get("is_default")),
            )
