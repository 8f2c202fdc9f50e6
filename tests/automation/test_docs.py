"""The documents name what exists: formats, tensors, commands, options, settings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import quant_loader
from quant_loader.automation import draft
from quant_loader.automation.doctor import VARIABLES
from quant_loader.checkpoint.formats import FORMATS
from quant_loader.cli import COMMANDS

ROOT = Path(quant_loader.__file__).resolve().parent
DOCS = sorted((ROOT / "docs").glob("*.md"))


def text(name):
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_described_with_its_tensors(name):
    row = next(line for line in text("formats.md").splitlines() if line.startswith("|") and f"`{name}`" in line)
    for suffix in {*FORMATS[name].required, *FORMATS[name].optional} - {"bias"}:
        assert f"`{suffix}`" in row


def test_every_command_and_option_is_described(command):
    page = text("automation.md")
    for name in COMMANDS:
        assert f"quant-loader {name}" in page
    for option in set(re.findall(r"(?<![-\w])--[a-z][a-z-]+", page)) - {"--seeds", "--files", "--via"}:
        helps = "".join(command(name, "--help").out for name in COMMANDS)
        assert option in helps, option


@pytest.mark.parametrize("kind", draft.KINDS)
def test_every_mend_is_described(kind):
    assert f"| {kind} |" in text("automation.md")


def test_our_settings_are_described():
    assert VARIABLES[0] in text("troubleshooting.md")


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_links_between_documents_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target
