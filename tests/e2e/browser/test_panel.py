"""The panel on the node: what a user sees on picking a file, before and after a run, in both renderers."""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quant_loader.demo import fixtures

SOUND = fixtures.file_name("int8_convrot")
REFUSED = "broken-zeroed-markers.safetensors"
DIALECT = "broken-half-scale.safetensors"
HOSTILE_FILE, HOSTILE_NAME = "hostile-names.safetensors", '<img src=x onerror="window.pwned=1"> & "quotes" <b>bold</b>'
SUBFOLDER_FILE = "水彩/Модель ü 模型.safetensors"
MIXED, CHANGING = "mixed-formats.safetensors", "changing.safetensors"
ENCODERS = ("encoder-sound.safetensors", "sub/encoder-dialect.safetensors", "encoder-broken.safetensors")
A_BLINK = 1000  # milliseconds: the goal is 150; a machine that shares its cores is given more

# Milliseconds from a combo's change to the moment a screen reader would hear the verdict.
PICK = """([id, file]) => new Promise((done) => {
  const widget = app.graph.getNodeById(id).widgets.find((w) => w.name === 'model_name');
  const live = document.querySelector('.ql-panel [role=status]');
  const start = performance.now();
  new MutationObserver((_, observer) => {
    if (!live.textContent.startsWith(file)) return;
    observer.disconnect();
    done(performance.now() - start);
  }).observe(live, { childList: true, characterData: true, subtree: true });
  widget.value = file;
  widget.callback(file);
})"""


# Where the classic canvas draws the file's combo, in pixels of the page.
COMBO_AT = """() => {
  const { canvas } = app;
  const node = app.graph.nodes.find((n) => n.type === 'QuantLoaderDiffusionModel');
  const widget = node.widgets.find((w) => w.name === 'model_name');
  if (!widget.last_y) return null;
  const [x, y] = canvas.convertOffsetToCanvas([node.pos[0] + node.size[0] * 0.6, node.pos[1] + widget.last_y + 10]);
  const box = canvas.canvas.getBoundingClientRect();
  return [x + box.left, y + box.top];
}"""
# The loader goes into a subgraph of its own; `window.ours` keeps the two for the next step.
INTO_A_SUBGRAPH = """() => {
  const loader = app.graph.nodes.find((n) => n.type === 'QuantLoaderDiffusionModel');
  window.ours = app.graph.convertToSubgraph(new Set([loader]));
}"""


def pick_with_the_mouse(editor: Any, file: str) -> None:
    """Opens the combo's list on the node and clicks a name."""
    if editor.renderer == "classic":
        at = editor.page.wait_for_function(COMBO_AT).json_value()  # once the canvas has drawn it
        choice = editor.page.locator(".litecontextmenu .litemenu-entry").get_by_text(file, exact=True)
        # A page that is still busy with its start takes a click for a drag: a user clicks again.
        for _ in range(10):
            editor.page.mouse.click(*at)
            editor.page.wait_for_timeout(500)
            if choice.count() > 0:
                break
    else:
        editor.page.get_by_role("combobox", name="model_name").click()
        choice = editor.page.get_by_role("option", name=file, exact=True)
    choice.click()


def test_picking_files_with_the_mouse(editor: Any) -> None:
    editor.add()
    editor.page.locator(".ql-panel .ql-verdict").wait_for()
    pick_with_the_mouse(editor, REFUSED)
    editor.verdict("refused")
    assert editor.value("model_name") == REFUSED
    assert "3 faults in 3 of 13 layers" in editor.panel().inner_text()
    pick_with_the_mouse(editor, SOUND)
    editor.verdict("ok")
    assert editor.value("model_name") == SOUND


def test_a_loader_inside_a_subgraph(
    editor: Any, text_to_image: Callable[..., dict[str, Any]], panel_files: Path
) -> None:
    shutil.copy(panel_files / REFUSED, panel_files / CHANGING)
    editor.load(text_to_image(CHANGING))
    editor.verdict("refused")
    editor.page.evaluate(INTO_A_SUBGRAPH)
    editor.run()
    editor.page.get_by_text("Quant Loader stopped the run").first.wait_for()
    editor.page.evaluate("() => app.canvas.openSubgraph(window.ours.subgraph, window.ours.node)")
    try:
        banner = editor.page.locator(".ql-run-refused")
        banner.wait_for()
        assert "3 faults in 3 of 13 layers" in editor.panel().inner_text()
        editor.shot("subgraph")
        shutil.copy(panel_files / SOUND, panel_files / CHANGING)
        editor.verdict("ok")
        banner.wait_for(state="detached")
    finally:
        editor.page.evaluate("() => { window.ours.subgraph.clear(); app.canvas.setGraph(app.rootGraph); }")


def test_a_text_encoder_of_three_files(editor: Any) -> None:
    node = editor.add(kind="QuantLoaderTextEncoder")
    for number, file in enumerate(ENCODERS, start=1):
        editor.choose(f"clip_name{number}", file, node)
    views = editor.panel().locator(".ql-file-view")
    editor.page.wait_for_function("() => document.querySelectorAll('.ql-file-view .ql-buttons').length === 3")
    texts = views.all_inner_texts()
    for text, file, verdict in zip(texts, ENCODERS, ("Sound", "Refused", "Refused"), strict=True):
        assert text.startswith(file)
        assert verdict in text
    assert "zeroed" in texts[2]
    spoken = editor.panel().locator("[role=status]").inner_text()
    assert spoken == ". ".join(
        f"{file}: {verdict}" for file, verdict in zip(ENCODERS, ("Sound", "Refused", "Refused"), strict=True)
    )
    # What belongs to a file stays with it: its own table, its own focus when the panel is drawn again.
    views.nth(2).get_by_role("slider").focus()
    assert views.nth(1).get_by_role("button", name="Use compatible rules").count() == 1
    assert views.nth(2).get_by_role("button", name="Use compatible rules").count() == 0
    editor.choose("clip_name2", "none", node)
    editor.page.wait_for_function("() => document.querySelectorAll('.ql-file-view').length === 2")
    editor.shot("text-encoder")
    views.nth(1).get_by_role("button", name="All layers").click()
    dialog = editor.page.locator("dialog.ql-dialog")
    assert dialog.locator("tbody tr.ql-row-error").count() == 1
    editor.page.keyboard.press("Escape")


def test_the_inspect_node(editor: Any) -> None:
    node = editor.add(kind="QuantLoaderInspect")
    editor.choose("folder", "text_encoders", node)
    editor.choose("file", ENCODERS[1], node)
    editor.verdict("refused")
    editor.page.wait_for_function("() => document.querySelectorAll('.ql-verdict').length === 1")
    assert "Its dialect is known" in editor.panel().inner_text()
    editor.choose("rules", "compatible", node)
    editor.verdict("ok")
    done = """() => new Promise((done) => {
      const { api } = app;
      api.addEventListener('execution_success', () => done(true), { once: true });
      app.queuePrompt(0, 1);
    })"""
    assert editor.page.evaluate(done)
    editor.page.wait_for_timeout(300)
    assert editor.panel().locator(".ql-ran").count() == 0, "nothing was loaded, so nothing ran"
    editor.shot("inspect")


def test_the_reader_keeps_their_place_when_the_panel_is_drawn_again(editor: Any, panel_files: Path) -> None:
    shutil.copy(panel_files / REFUSED, panel_files / CHANGING)
    editor.add(CHANGING)
    editor.verdict("refused")
    editor.page.wait_for_timeout(400)
    strip = editor.panel().locator(".ql-strip")
    scroll = """() => {
      const panel = document.querySelector('.ql-panel');
      panel.scrollTop = 30;
      panel.querySelector('.ql-strip').dataset.before = 'yes';
      return panel.scrollTop;
    }"""
    scrolled = editor.page.evaluate(scroll)
    box = strip.bounding_box()
    editor.page.mouse.move(box["x"] + box["width"] * 0.45, box["y"] + box["height"] / 2)
    pointed = strip.get_attribute("aria-valuetext")
    assert strip.get_attribute("aria-valuenow") == "6"
    shutil.copy(panel_files / REFUSED, panel_files / CHANGING)  # the same again, with a new date
    editor.page.locator(".ql-strip[data-before]").wait_for(state="detached")
    assert (strip.get_attribute("aria-valuenow"), strip.get_attribute("aria-valuetext")) == ("6", pointed)
    assert pointed.split(",")[0] in editor.panel().locator(".ql-strip-caption").inner_text()
    assert editor.page.evaluate("() => document.querySelector('.ql-panel').scrollTop") == scrolled
    shutil.copy(panel_files / SOUND, panel_files / CHANGING)


def test_a_sound_file(editor: Any) -> None:
    editor.add(SOUND)
    line = editor.verdict("ok").inner_text()
    panel = editor.panel()
    panel.locator(".ql-plan li").first.wait_for()
    assert "Sound" in line
    assert "4.7 MB" in line, "the size on disk"
    assert "8.1 bits per weight" in line, "INT8 rows: 8 bits and a float32 scale per row of 256 or more"
    assert "INT8 × 13" in panel.locator(".ql-legend").inner_text()
    plan = panel.locator(".ql-plan").inner_text()
    assert "13 × INT8" in plan
    assert len(panel.locator(".ql-reason").first.inner_text()) > 20, "the kernel comes with its reason"
    editor.shot("sound")


def test_a_broken_file(editor: Any) -> None:
    editor.add(REFUSED)
    editor.verdict("refused")
    text = editor.panel().inner_text()
    assert "3 faults in 3 of 13 layers" in text
    assert "marker.json" in text
    for layer in fixtures.BROKEN_LAYERS:
        assert layer in text
    assert "zeroed" in text, "what was found"
    assert '{"format":' in text, "what was expected"
    assert "Download the file again" in text, "the fix"
    editor.shot("refused")


def test_an_unquantised_file(editor: Any) -> None:
    editor.add(fixtures.REFERENCE)
    assert "Not quantised" in editor.verdict("unquantized").inner_text()


def test_a_file_in_many_formats(editor: Any) -> None:
    editor.add(MIXED)
    editor.verdict("ok")
    editor.panel().locator(".ql-plan li").nth(3).wait_for()
    legend = editor.panel().locator(".ql-legend").inner_text()
    for name in ("INT8", "NVFP4", "FP8 E4M3", "W4A4 ConvRot", "not quantised"):
        assert name in legend
    colours = editor.page.evaluate(
        "() => [...document.querySelectorAll('.ql-legend .ql-dot')].map((dot) => getComputedStyle(dot).backgroundColor)"
    )
    assert len(set(colours)) == len(colours) == 5
    editor.shot("mixed")


def test_time_from_the_pick_to_the_verdict(editor: Any, record_times: Callable[[str, list[float]], None]) -> None:
    node = editor.add(SOUND)
    editor.verdict("ok")
    names = ("int8_row", "nvfp4", "fp8", "convrot_w4a4", "mxfp8", "int8_scalar", "int8_convrot")
    times = [editor.page.evaluate(PICK, [node, fixtures.file_name(name)]) for name in names]
    record_times(f"pick to verdict, {editor.renderer}", times)
    middle, worst = statistics.median(times), max(times)
    print(f"\n{editor.renderer}: pick to verdict {middle:.0f} ms (median of {len(times)}, worst {worst:.0f})")
    assert middle < A_BLINK


def test_a_refused_run_marks_the_node_until_the_cause_is_gone(
    editor: Any, text_to_image: Callable[..., dict[str, Any]], panel_files: Path
) -> None:
    folder = panel_files
    shutil.copy(folder / REFUSED, folder / CHANGING)
    editor.load(text_to_image(CHANGING))
    editor.verdict("refused")
    editor.run()
    banner = editor.page.locator(".ql-run-refused")
    banner.wait_for()
    assert "The last run was stopped here" in banner.inner_text()
    toast = editor.page.get_by_text("Quant Loader stopped the run")
    toast.first.wait_for()
    assert editor.page.get_by_text("Refused: 3 faults in 3 of 13 layers").first.is_visible()
    marked = "() => app.lastNodeErrors !== null && Object.keys(app.lastNodeErrors).length > 0"
    assert editor.page.evaluate(marked)
    editor.shot("refused-run")
    # The user puts the right file in place, without touching the node.
    shutil.copy(folder / SOUND, folder / CHANGING)
    editor.verdict("ok")
    banner.wait_for(state="detached")
    editor.page.wait_for_function(f"() => !({marked})()")


def test_after_a_run_the_panel_says_what_ran(editor: Any, text_to_image: Callable[..., dict[str, Any]]) -> None:
    editor.load(text_to_image(SOUND))
    editor.verdict("ok")
    steps = """(steps) => {
      app.graph.nodes.find((node) => node.type === 'KSampler').widgets.find((w) => w.name === 'steps').value = steps;
    }"""
    editor.page.evaluate(steps, 2)
    editor.run()
    ran = editor.panel().locator(".ql-ran")
    ran.get_by_text("13 of 13 layers ran").wait_for()
    assert "13 INT8 · 0 dequantised · 26 calls" in ran.inner_text(), "13 layers, 2 steps"
    assert "Last run (CPU)" in ran.inner_text()
    editor.shot("after-a-run")
    # The loader is answered from the cache now; the figures are those of this run all the same.
    editor.page.evaluate(steps, 3)
    editor.run()
    ran.get_by_text("0 dequantised · 39 calls").wait_for()
    # Another choice has not run yet; the first one's figures are still known.
    editor.choose("execution", "native")
    ran.wait_for(state="detached")
    editor.choose("execution", "auto")
    ran.get_by_text("39 calls").wait_for()


def test_after_a_run_slow_layers_are_named(editor: Any, text_to_image: Callable[..., dict[str, Any]]) -> None:
    workflow = text_to_image(SOUND, execution="exact")
    workflow["kernels"] = {"class_type": "QuantLoaderKernelReport", "inputs": {"model": ["loader", 0]}}
    editor.load(workflow)
    editor.verdict("ok")
    editor.run()
    ran = editor.page.locator(".ql-panel", has_text="Sound").locator(".ql-ran")
    ran.get_by_text("13 dequantised").wait_for()
    assert "double_blocks.0.img_attn.proj" in ran.inner_text()
    assert "and 9 more" in ran.inner_text()
    assert "The weight is decoded" in ran.inner_text(), "the reason"
    report = editor.page.locator(".ql-panel", has_not_text="Sound").locator(".ql-ran")
    assert "13 quantised layers" in report.inner_text(), "the Kernel Report node speaks for itself"
    editor.shot("after-a-slow-run")


def test_compatible_rules_are_one_button_away(editor: Any) -> None:
    editor.add(DIALECT)
    editor.verdict("refused")
    assert "Comfy INT8 layer double_blocks.0.img_attn.proj needs I8 weights" in editor.panel().inner_text()
    editor.panel().get_by_role("button", name="Use compatible rules").click()
    editor.verdict("ok")
    assert editor.value("rules") == "compatible"


def test_a_lossless_repair_is_offered_as_a_command(editor: Any) -> None:
    editor.add(DIALECT)
    editor.verdict("refused")
    command = editor.panel().locator(".ql-command").inner_text()
    assert command == f'quant-loader repair "{DIALECT}" "{DIALECT.removesuffix(".safetensors")}-repaired.safetensors"'
    editor.choose("model_name", REFUSED)
    editor.page.get_by_text("3 faults in 3 of 13 layers").wait_for()
    assert editor.panel().locator(".ql-command").count() == 0, "zeroed markers cannot be mended"


def test_all_layers_can_be_searched_and_sorted(editor: Any) -> None:
    editor.add(MIXED)
    editor.verdict("ok")
    editor.panel().locator(".ql-plan li").first.wait_for()
    editor.panel().get_by_role("button", name="All layers").click()
    dialog = editor.page.locator("dialog.ql-dialog")
    rows = dialog.locator("tbody tr")
    assert rows.count() == 13
    first = rows.first.inner_text()
    search = dialog.get_by_role("searchbox")
    search.fill("nvfp4 mlp")
    assert rows.count() == 2
    assert "2 of 13 layers" in dialog.locator("[role=status]").inner_text()
    search.fill("")
    header = dialog.get_by_role("button", name="Shape (N × K)")
    column = dialog.locator("thead th").filter(has_text="Shape (N × K)")

    def weights() -> list[int]:
        shapes = [cell.split(" × ") for cell in dialog.locator("tbody tr td:nth-child(3)").all_inner_texts()]
        return [int(n) * int(k) for n, k in shapes]

    header.click()
    assert column.get_attribute("aria-sort") == "ascending"
    assert weights() == sorted(weights())
    header.click()
    assert column.get_attribute("aria-sort") == "descending"
    assert weights() == sorted(weights(), reverse=True)
    header.click()
    assert rows.first.inner_text() == first, "back in the order of the file"
    editor.shot("layers")
    editor.page.keyboard.press("Escape")
    dialog.wait_for(state="detached")
    assert editor.page.evaluate("() => document.activeElement.textContent") == "All layers", "focus returns"


def test_hostile_layer_names_stay_text(editor: Any) -> None:
    editor.add(HOSTILE_FILE)
    editor.verdict("refused")
    assert HOSTILE_NAME in editor.panel().inner_text()
    editor.panel().get_by_role("button", name="All layers").click()
    dialog = editor.page.locator("dialog.ql-dialog")
    assert dialog.get_by_text(HOSTILE_NAME, exact=True).count() == 1
    assert editor.page.locator(".ql-panel img, .ql-dialog img, .ql-body b:text('bold')").count() == 0
    assert editor.page.evaluate("() => window.pwned") is None


def test_sub_folders_and_other_scripts(editor: Any) -> None:
    editor.add(SUBFOLDER_FILE)
    assert "Sound" in editor.verdict("ok").inner_text()
    assert SUBFOLDER_FILE in editor.panel().locator("[role=status]").inner_text()


def test_a_file_that_went_away(editor: Any, panel_files: Path) -> None:
    shutil.copy(panel_files / SOUND, panel_files / CHANGING)
    editor.add(CHANGING)
    editor.verdict("ok")
    moved = (panel_files / CHANGING).rename(panel_files / "moved.tmp")
    try:
        editor.page.get_by_text("is not in the diffusion_models folder").wait_for()
    finally:
        moved.rename(panel_files / CHANGING)
    editor.verdict("ok")


def test_nothing_is_stored_in_the_workflow(editor: Any, text_to_image: Callable[..., dict[str, Any]]) -> None:
    editor.load(text_to_image(SOUND))
    editor.verdict("ok")
    stored = editor.page.evaluate(
        """async () => {
          const { workflow, output } = await app.graphToPrompt();
          const node = workflow.nodes.find((n) => n.type === 'QuantLoaderDiffusionModel');
          return { values: node.widgets_values, properties: node.properties, prompt: output[node.id].inputs };
        }"""
    )
    assert stored["values"] == [SOUND, "strict", "auto"]
    assert stored["prompt"] == {"model_name": SOUND, "rules": "strict", "execution": "auto"}
    assert "quant_loader" not in json.dumps(stored["properties"]).replace("quant-loader", "")


def test_a_loaded_workflow_keeps_its_size(editor: Any) -> None:
    """The panel's height is part of the node's: loading a saved workflow again must not make the node grow."""
    editor.add(REFUSED)
    editor.verdict("refused")
    editor.page.wait_for_timeout(500)
    size = "() => [...app.graph.nodes[0].size]"
    before = editor.page.evaluate(size)
    for _ in range(2):
        editor.page.evaluate("async () => { await app.loadGraphData(app.graph.serialize()); }")
        editor.verdict("refused")
        editor.page.wait_for_timeout(500)
    after = editor.page.evaluate(size)
    assert after == pytest.approx(before, abs=1.0)


@pytest.mark.parametrize("palette", ["dark", "light"])
@pytest.mark.parametrize("file", [MIXED, DIALECT])
def test_text_is_readable_in_every_theme(editor: Any, palette: str, file: str) -> None:
    editor.setting("Comfy.ColorPalette", palette)
    try:
        editor.add(file)
        editor.page.locator(".ql-panel .ql-buttons").wait_for()
        editor.page.wait_for_timeout(400)
        editor.shot(f"{palette}-{file.split('.')[0]}")
        poor = [entry for entry in editor.contrasts() if entry["contrast"] < 4.5]
        assert poor == [], "WCAG AA asks for 4.5 : 1"
    finally:
        editor.setting("Comfy.ColorPalette", "dark")


@pytest.mark.parametrize("palette", ["dark", "light"])
def test_the_table_is_readable_in_every_theme(editor: Any, palette: str) -> None:
    editor.setting("Comfy.ColorPalette", palette)
    try:
        editor.add(DIALECT)
        editor.verdict("refused")
        editor.panel().get_by_role("button", name="All layers").click()
        editor.page.locator("dialog.ql-dialog tbody tr").first.wait_for()
        texts = editor.contrasts("dialog.ql-dialog")
        assert len(texts) > 13
        assert [entry for entry in texts if entry["contrast"] < 4.5] == [], "WCAG AA asks for 4.5 : 1"
    finally:
        editor.setting("Comfy.ColorPalette", "dark")


def test_the_focus_can_be_seen(editor: Any) -> None:
    editor.add(DIALECT)
    editor.verdict("refused")
    editor.page.wait_for_timeout(300)
    editor.panel().get_by_role("slider").focus()
    rings = []
    for _ in range(4):
        editor.page.keyboard.press("Tab")
        rings.append(
            editor.page.evaluate(
                """() => {
                  const { outlineStyle, outlineWidth } = getComputedStyle(document.activeElement);
                  const inside = document.activeElement.closest('.ql-panel') !== null;
                  return [inside, outlineStyle !== 'none' && parseFloat(outlineWidth) >= 1];
                }"""
            )
        )
    assert rings == [[True, True]] * 4


@pytest.mark.parametrize("width", [225, 600])
def test_narrow_and_wide_nodes(editor: Any, width: int) -> None:
    editor.add(DIALECT, width=width)
    editor.verdict("refused")
    editor.page.wait_for_timeout(400)
    overflow = editor.page.evaluate(
        "() => { const p = document.querySelector('.ql-panel'); return p.scrollWidth - p.clientWidth; }"
    )
    assert overflow <= 0
    editor.shot(f"width-{width}")


@pytest.mark.parametrize("scale", [0.3, 2.0])
def test_any_zoom(editor: Any, scale: float) -> None:
    editor.add(SOUND)
    editor.verdict("ok")
    editor.page.evaluate("(scale) => { app.canvas.ds.scale = scale; app.canvas.setDirty(true, true); }", scale)
    editor.page.wait_for_timeout(600)
    panel = editor.panel()
    assert panel.is_visible(), "the verdict stays at every zoom"
    box = panel.bounding_box()
    assert box["width"] == pytest.approx(scale * 320, rel=0.08), "the panel zooms with its node"
    strip = panel.locator(".ql-strip").bounding_box()
    editor.page.mouse.move(strip["x"] + strip["width"] * 0.99, strip["y"] + strip["height"] / 2)
    assert "single_blocks.0.modulation.lin" in panel.locator(".ql-strip-caption").inner_text(), "the last layer"


def test_by_keyboard_and_by_ear(editor: Any) -> None:
    editor.add(DIALECT)
    editor.verdict("refused")
    panel = editor.panel()
    assert panel.get_attribute("aria-label") == "Quant Loader: file check"
    live = panel.locator("[role=status]")
    assert live.get_attribute("aria-live") == "polite"
    assert live.inner_text() == f"{DIALECT}: Refused"
    unnamed = editor.page.evaluate(
        "() => [...document.querySelectorAll('.ql-panel button')].filter((b) => !(b.textContent || b.ariaLabel)).length"
    )
    assert unnamed == 0
    strip = panel.get_by_role("slider")
    strip.focus()
    editor.page.keyboard.press("End")
    at = [strip.get_attribute(name) for name in ("aria-valuenow", "aria-valuetext")]
    assert at == ["13", "single_blocks.0.modulation.lin, INT8"]
    editor.page.keyboard.press("Home")
    assert strip.get_attribute("aria-valuenow") == "1"
    assert strip.get_attribute("aria-valuetext") == f"{fixtures.BROKEN_LAYERS[0]}, int8.dtype"
    editor.page.keyboard.press("Delete")
    assert editor.page.evaluate("() => app.graph.nodes.length") == 1, "keys in the panel do not reach the canvas"
    order = []
    for _ in range(8):
        editor.page.keyboard.press("Tab")
        order.append(editor.page.evaluate("() => document.activeElement.textContent"))
    buttons = [
        text
        for text in order
        if text in ("Copy command", "Use compatible rules", "All layers", "Copy text", "Copy JSON")
    ]
    assert buttons == ["Copy command", "Use compatible rules", "All layers", "Copy text", "Copy JSON"]


def test_the_panel_can_be_turned_off(editor: Any) -> None:
    editor.add(SOUND)
    editor.verdict("ok")
    editor.setting("QuantLoader.ShowPanel", False)
    try:
        editor.page.locator(".ql-verdict").wait_for(state="detached")
    finally:
        editor.setting("QuantLoader.ShowPanel", True)
    editor.verdict("ok")


def test_new_nodes_start_with_the_chosen_defaults(editor: Any, text_to_image: Callable[..., dict[str, Any]]) -> None:
    editor.setting("QuantLoader.DefaultRules", "compatible")
    editor.setting("QuantLoader.DefaultExecution", "exact")
    try:
        editor.add(SOUND)
        assert (editor.value("rules"), editor.value("execution")) == ("compatible", "exact")
        editor.clear()
        editor.load(text_to_image(SOUND))
        assert (editor.value("rules"), editor.value("execution")) == ("strict", "auto"), "a workflow keeps its own"
    finally:
        editor.setting("QuantLoader.DefaultRules", "strict")
        editor.setting("QuantLoader.DefaultExecution", "auto")


def test_check_all_quantised_models(editor: Any, unusable: list[str]) -> None:
    editor.page.evaluate("() => app.extensionManager.command.execute('QuantLoader.CheckAll')")
    dialog = editor.page.locator("dialog.ql-dialog")
    files = editor.server.client.get("/quant-loader/files")["folders"]
    total = sum(len(folder["files"]) for folder in files)
    dialog.get_by_text(f"{total} of {total} files").wait_for()
    text = dialog.inner_text()
    assert SUBFOLDER_FILE in text
    for name in unusable:
        assert name in text
    row = dialog.locator("tr", has_text=REFUSED)
    assert "3 faults in 3 of 13 layers" in row.inner_text()
    editor.shot("all-files")
    row.get_by_role("button", name="Refused").click()
    assert editor.page.locator("dialog.ql-dialog").last.locator("tbody tr").count() == 13
