"""Locales, words and help pages: complete in every language, and true to the nodes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from quant_loader.demo.paths import CHECKOUT

LANGUAGES = ["en", "zh", "ja", "ko", "de", "fr", "es", "ru"]
LOCALE_FILES = ["nodeDefs", "settings", "commands"]
WEB = CHECKOUT / "web"
NODE_IDS = [
    "QuantLoaderDiffusionModel",
    "QuantLoaderCheckpoint",
    "QuantLoaderTextEncoder",
    "QuantLoaderControlNet",
    "QuantLoaderModelPatch",
    "QuantLoaderSave",
    "QuantLoaderInspect",
    "QuantLoaderKernelReport",
]
MODULES = sorted(WEB.rglob("*.js"))


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def leaves(tree: Any, path: str = "") -> dict[str, str]:
    """Every text of a locale file by its path."""
    if isinstance(tree, str):
        return {path: tree}
    return {key: text for name, inner in tree.items() for key, text in leaves(inner, f"{path}/{name}").items()}


def places(text: str) -> list[str]:
    return sorted(re.findall(r"\{(\w+)\}", text))


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("file", LOCALE_FILES)
def test_every_locale_has_every_text(language: str, file: str) -> None:
    english = leaves(read(CHECKOUT / "locales" / "en" / f"{file}.json"))
    texts = leaves(read(CHECKOUT / "locales" / language / f"{file}.json"))
    assert texts.keys() == english.keys()
    assert [path for path, text in texts.items() if not text.strip()] == []
    # ComfyUI compiles these texts: the characters have a meaning there.
    assert [path for path, text in texts.items() if re.search(r"[@{}|]", text)] == []
    if language != "en":
        whole_sentences = [path for path, text in english.items() if len(text) > 40 and texts[path] == text]
        assert whole_sentences == [], "left in English"


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_language_has_every_word_of_the_panel(language: str) -> None:
    english = read(WEB / "words" / "en.json")
    words = read(WEB / "words" / f"{language}.json")
    assert words.keys() == english.keys()
    assert {key: places(text) for key, text in words.items()} == {key: places(text) for key, text in english.items()}
    if language != "en":
        assert [key for key, text in english.items() if len(text) > 40 and words[key] == text] == [], "left in English"


def test_every_word_that_a_module_asks_for_exists_and_is_used() -> None:
    english = read(WEB / "words" / "en.json")
    source = "\n".join(path.read_text(encoding="utf-8") for path in MODULES)
    asked = set(re.findall(r'\bt\((?:[\w .=?!]+\? )?"([\w.]+)"', source)) | set(
        re.findall(r'"([a-z]+\.[a-z.]+)"', source)
    )
    asked = {key for key in asked if "." in key and not key.endswith((".js", ".json", ".css"))}
    prefixes = tuple(re.findall(r"t\(`([\w.]+)\$\{", source))  # t(`verdict.${...}`)
    assert sorted(asked - english.keys()) == []
    unused = [key for key in english if key not in asked and not key.startswith(prefixes) and f'"{key}"' not in source]
    assert unused == []


def test_every_rule_has_a_family_with_a_title() -> None:
    """The table of `families.js`, read as the browser reads it: its patterns are plain enough for both."""
    table = (WEB / "lib" / "families.js").read_text(encoding="utf-8")
    families = re.findall(r'^  \[/(.+)/, "(\w+)"\],$', table, re.MULTILINE)
    titles = {key.removeprefix("family.") for key in read(WEB / "words" / "en.json") if key.startswith("family.")}
    assert {name for _, name in families} == titles
    rules = re.findall(
        r"^\*\*`([\w.]+)`\*\*", (CHECKOUT / "docs" / "rules.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(rules) > 100
    found = {rule: next((name for pattern, name in families if re.search(pattern, rule)), None) for rule in rules}
    assert [rule for rule, name in found.items() if name is None] == []
    assert set(found.values()) == titles, "a family that no rule belongs to"
    samples = {
        "crash.file": "file",
        "marker.json": "declaration",
        "int8.dtype": "dtype",
        "nvfp4.scale_2": "scale",
        "w4a8.rank": "shape",
        "extra.mxfp8.scale_layout": "layout",
        "quanto.missing_tensors": "tensors",
        "extra.deep.scale_layout": "deep",
        "extra.dialect": "notice",
    }
    assert {rule: found[rule] for rule in samples} == samples


def test_the_locales_know_every_node() -> None:
    assert sorted(read(CHECKOUT / "locales" / "en" / "nodeDefs.json")) == sorted(NODE_IDS)


@pytest.mark.parametrize("node", NODE_IDS)
def test_every_node_has_a_help_page_with_a_picture(node: str) -> None:
    page = (WEB / "docs" / f"{node}.md").read_text(encoding="utf-8")
    definition = read(CHECKOUT / "locales" / "en" / "nodeDefs.json")[node]
    assert page.startswith(f"# {definition['display_name']}\n")
    pictures = re.findall(r"!\[.+?\]\((.+?)\)", page)
    assert pictures
    for picture in pictures:
        assert (WEB / "docs" / picture).is_file()
    for name in definition["inputs"]:
        numbered = re.sub(r"\d$", "", name)
        assert name in page or numbered in page or name == "model", f"the page does not mention {name}"


def test_the_panel_knows_every_node_that_names_a_file() -> None:
    table = (WEB / "lib" / "nodes.js").read_text(encoding="utf-8")
    for node, definition in read(CHECKOUT / "locales" / "en" / "nodeDefs.json").items():
        names = [name for name in definition["inputs"] if re.fullmatch(r"\w*name\d?|file", name)]
        row = re.search(rf"{node}: \{{(.*?)\}}", table, re.DOTALL)
        if names and node != "QuantLoaderSave":
            assert row is not None
            assert all(f'"{name}"' in row[1] for name in names)


def test_no_module_builds_html_or_fetches_from_elsewhere() -> None:
    for path in MODULES:
        source = path.read_text(encoding="utf-8")
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", source), (
            path
        )
        addresses = re.findall(r"https?://[^\"'` ]+", source)
        allowed = ("https://github.com/quant-loader/", "http://www.w3.org/2000/svg")
        assert [address for address in addresses if not address.startswith(allowed)] == [], path
