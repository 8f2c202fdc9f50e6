"""The generated pages are up to date, and the page of dialects covers what compatible does."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from quant_loader.checkpoint import RULES

DOCS = Path(__file__).parents[2] / "docs"


def test_rules_page_is_up_to_date():
    spec = importlib.util.spec_from_file_location("make_rules", DOCS / "make_rules.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (DOCS / "rules.md").read_text(encoding="utf-8") == module.page(), "run: python docs/make_rules.py"


def test_every_rule_is_on_the_page():
    page = (DOCS / "rules.md").read_text(encoding="utf-8")
    assert [rule for rule in RULES if f"**`{rule}`**" not in page] == []


def test_dialects_page_names_every_dialect():
    page = (DOCS / "dialects.md").read_text(encoding="utf-8")
    for word in (
        "padded",
        "scaled_fp8",
        "params",
        "convrot",
        "(N,)",
        "(1, 1)",
        "BF16",
        "U8",
        "outer prefix",
        "split",
        "plain",
    ):
        assert word in page
