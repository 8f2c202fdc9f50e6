"""The pack as the Comfy registry gets it: metadata, and the archive's content."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import quant_loader

ROOT = Path(quant_loader.__file__).resolve().parent
PACKAGES = ("automation", "checkpoint", "kernels", "nodes", "patching")


@pytest.fixture(scope="module")
def project():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 and later")
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def modules(*tops):
    """The package folders of the working tree, as pyproject lists them."""
    found = {"quant_loader"}
    for top in tops:
        for path in (ROOT / top).rglob("__init__.py"):
            found.add(".".join(("quant_loader", *path.parent.relative_to(ROOT).parts)))
    return found


def test_every_package_is_listed(project):
    assert set(project["tool"]["setuptools"]["packages"]) == modules(*PACKAGES)


def test_metadata(project):
    table, comfy = project["project"], project["tool"]["comfy"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", table["version"])
    assert f"## {table['version']}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "comfyui" not in table["name"].lower()
    assert all(re.fullmatch(r"[\w-]+", dependency) for dependency in table["dependencies"]), (
        "no pins: the user's torch stays"
    )
    assert {"PublisherId", "DisplayName", "Icon", "Banner", "requires-comfyui"} <= set(comfy)
    for key in ("Icon", "Banner"):
        assert (ROOT / comfy[key].partition("/main/")[2]).is_file()
    classifiers = table["classifiers"]
    assert any(entry.startswith("Operating System ::") for entry in classifiers)
    assert any(entry.startswith("Environment :: GPU ::") for entry in classifiers)


@pytest.fixture(scope="module")
def comfy(tmp_path_factory):
    """Runs comfy-cli on a copy of the tree, with settings of its own."""
    program = Path(sys.executable).with_name("comfy.exe" if os.name == "nt" else "comfy")
    if not program.exists():
        pytest.skip("comfy-cli is not installed here (extra: demo)")
    copy = tmp_path_factory.mktemp("pack") / "quant-loader"
    ignored = shutil.ignore_patterns(
        ".git", ".venv", ".cache", "__pycache__", "demo-output", "node_modules", "*.egg-info", ".*_cache"
    )
    shutil.copytree(ROOT, copy, ignore=ignored)
    home = tmp_path_factory.mktemp("home")
    private = {
        "HOME": str(home),
        "USERPROFILE": str(home),
        "XDG_CACHE_HOME": str(home),
        "DO_NOT_TRACK": "1",
        "COMFY_NO_UPDATE_CHECK": "1",
    }

    def run(*arguments):
        return subprocess.run(
            [program, "--skip-prompt", *arguments],
            cwd=copy,
            env={**os.environ, **private},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            timeout=120,
            check=False,
        )

    assert run("tracking", "disable").returncode == 0
    return copy, run


def test_node_validate(comfy):
    done = comfy[1]("node", "validate")
    assert done.returncode == 0
    assert "All validation checks passed" in done.stdout + done.stderr
    assert "Warning" not in done.stdout + done.stderr


def test_archive_holds_what_a_user_needs_and_nothing_else(comfy):
    copy, run = comfy
    assert run("node", "pack").returncode == 0
    with zipfile.ZipFile(copy / "node.zip") as archive:
        names = set(archive.namelist())
    tops = {name.partition("/")[0] for name in names}
    needed = {
        "__init__.py",
        "cli.py",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "web",
        "locales",
        "example_workflows",
    }
    assert needed | set(PACKAGES) <= tops
    assert tops <= needed | {*PACKAGES, "docs", "examples", "web"}
    code = {str(path.relative_to(ROOT)).replace(os.sep, "/") for top in PACKAGES for path in (ROOT / top).rglob("*.py")}
    assert code <= names
    assert sum((copy / name).stat().st_size for name in names) < 2 << 20
