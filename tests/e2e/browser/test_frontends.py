"""Every frontend: test_panel.py covers the installed one, this file the newest on PyPI, and languages."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quant_loader.demo import fixtures
from quant_loader.demo.server import ComfyServer

SOUND, REFUSED, DIALECT = (
    fixtures.file_name("int8_convrot"),
    "broken-zeroed-markers.safetensors",
    "broken-half-scale.safetensors",
)
CHANGING = "changing.safetensors"


@pytest.fixture(scope="module", params=["classic", "nodes2"])
def newest_page(request: pytest.FixtureRequest, open_editor: Callable[..., Any], newest_server: ComfyServer) -> Any:
    editor = open_editor(newest_server, request.param)
    yield editor
    editor.page.context.close()


@pytest.fixture
def editor(newest_page: Any) -> Any:
    newest_page.clear()
    newest_page.errors.clear()
    yield newest_page
    assert newest_page.errors == [], "the page raised errors"


def test_the_newest_frontend_shows_the_verdict(editor: Any) -> None:
    editor.add(SOUND)
    assert "Sound" in editor.verdict("ok").inner_text()
    editor.panel().locator(".ql-plan li").first.wait_for()
    editor.choose("model_name", REFUSED)
    editor.verdict("refused")
    assert "3 faults in 3 of 13 layers" in editor.panel().inner_text()
    editor.shot("newest-refused")


def test_the_newest_frontend_shows_a_refused_run_and_its_end(
    editor: Any, text_to_image: Callable[..., dict[str, Any]], panel_files: Path
) -> None:
    shutil.copy(panel_files / REFUSED, panel_files / CHANGING)
    editor.load(text_to_image(CHANGING))
    editor.verdict("refused")
    editor.run()
    banner = editor.page.locator(".ql-run-refused")
    banner.wait_for()
    editor.page.get_by_text("Quant Loader stopped the run").first.wait_for()
    shutil.copy(panel_files / SOUND, panel_files / CHANGING)
    banner.wait_for(state="detached")
    editor.page.wait_for_function("() => Object.keys(app.lastNodeErrors ?? {}).length === 0")


def test_the_newest_frontend_switches_rules_and_opens_the_table(editor: Any) -> None:
    editor.add(DIALECT)
    editor.verdict("refused")
    editor.panel().get_by_role("button", name="Use compatible rules").click()
    editor.verdict("ok")
    assert editor.value("rules") == "compatible"
    editor.panel().get_by_role("button", name="All layers").click()
    dialog = editor.page.locator("dialog.ql-dialog")
    dialog.get_by_role("searchbox").fill("img_attn.proj")
    assert dialog.locator("tbody tr").count() == 1
    dialog.get_by_role("button", name="Close").click()
    dialog.wait_for(state="detached")


@pytest.mark.parametrize("palette", ["dark", "light"])
def test_the_newest_frontend_is_readable(editor: Any, palette: str) -> None:
    editor.setting("Comfy.ColorPalette", palette)
    try:
        editor.add(DIALECT)
        editor.verdict("refused")
        editor.page.wait_for_timeout(800)
        editor.shot(f"newest-{palette}")
        poor = [entry for entry in editor.contrasts() if entry["contrast"] < 4.5]
        assert poor == [], "WCAG AA asks for 4.5 : 1"
    finally:
        editor.setting("Comfy.ColorPalette", "dark")


def test_the_newest_frontend_stores_nothing(editor: Any, text_to_image: Callable[..., dict[str, Any]]) -> None:
    editor.load(text_to_image(SOUND))
    editor.verdict("ok")
    stored = editor.page.evaluate(
        """async () => {
          const { workflow, output } = await app.graphToPrompt();
          const node = workflow.nodes.find((n) => n.type === 'QuantLoaderDiffusionModel');
          return [node.widgets_values, output[node.id].inputs];
        }"""
    )
    assert stored == [[SOUND, "strict", "auto"], {"model_name": SOUND, "rules": "strict", "execution": "auto"}]


@pytest.mark.parametrize(
    ("locale", "word", "display_name"),
    [("zh", "完好", "加载量化扩散模型"), ("fr", "Sain", "Charger un modèle de diffusion quantifié")],
)
def test_the_panel_speaks_the_language_of_the_interface(
    open_editor: Callable[..., Any], server: ComfyServer, locale: str, word: str, display_name: str
) -> None:
    editor = open_editor(server, "classic", **{"Comfy.Locale": locale})
    editor.clear()
    editor.add(SOUND)
    assert word in editor.verdict("ok").inner_text()
    assert editor.page.evaluate("() => app.graph.nodes[0].title") == display_name
    editor.shot(f"language-{locale}")
    editor.page.context.close()


def test_the_server_offers_the_templates_and_help(server: ComfyServer) -> None:
    templates = server.client.get("/workflow_templates")["quant-loader"]
    assert {"flux-int8", "flux-nvfp4", "stable-diffusion-int8", "lora-on-quantized", "inspect-a-file"} <= set(templates)
    for name in templates:
        workflow = server.client.get(f"/api/workflow_templates/quant-loader/{name}.json")
        known = server.client.get("/object_info")
        missing = {node["type"] for node in workflow["nodes"]} - set(known) - {"MarkdownNote"}
        assert missing == set(), name
    extensions = server.client.get("/extensions")
    assert "/extensions/quant-loader/quant_loader.js" in extensions


def test_the_help_page_opens_with_its_picture(open_editor: Callable[..., Any], server: ComfyServer) -> None:
    """As the frontend asks for it: by the pack's folder and the node's id, the picture beside the page."""
    editor = open_editor(server, "classic")
    answer = editor.page.evaluate(
        """async () => {
          const page = await fetch('/extensions/quant-loader/docs/QuantLoaderDiffusionModel.md');
          const picture = await fetch('/extensions/quant-loader/docs/panel.png');
          return [page.ok, page.headers.get('content-type'), (await page.text()).slice(0, 40), picture.ok];
        }"""
    )
    assert answer[0]
    assert "html" not in answer[1]
    assert answer[2].startswith("# Load Quantized Diffusion Model")
    assert answer[3]
    editor.page.context.close()
