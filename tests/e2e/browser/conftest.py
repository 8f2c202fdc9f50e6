"""The graph editor in a real browser: Chromium, driven by Playwright, against the real server, in both renderers.

Screenshots and the measured times go to `demo-output/browser`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from quant_loader.demo import fixtures, quantize, workflows
from quant_loader.demo.paths import CACHE, OUTPUT
from quant_loader.demo.server import ComfyServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

ARTIFACTS = OUTPUT / "browser"
NEWEST_FRONTEND = CACHE / "frontend-newest" / "comfyui_frontend_package" / "static"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
LOADER = "QuantLoaderDiffusionModel"
HOSTILE_LAYER = '<img src=x onerror="window.pwned=1"> & "quotes" <b>bold</b>'
SUBFOLDER_FILE = "水彩/Модель ü 模型.safetensors"
HOSTILE_FILE = "hostile-names.safetensors"
MANY_FORMATS_FILE = "mixed-formats.safetensors"
CHANGING_FILE = "changing.safetensors"
# Sound, of a known dialect, and broken: what the panel says of a file does not depend on what it holds.
ENCODERS = ("encoder-sound.safetensors", "sub/encoder-dialect.safetensors", "encoder-broken.safetensors")
VIEWPORT = {"width": 1440, "height": 900}
PATIENCE = 60_000  # milliseconds; a verdict takes a few hundredths of it, on a machine with nothing else to do
START = 240_000  # milliseconds for the page with its 600 modules


# The contrast of every piece of text in an element against its own background (WCAG 2.1, relative luminance).
CONTRASTS = """(selector) => {
  const root = [...document.querySelectorAll(selector)].at(-1);
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgb = (colour, under) => {
    canvas.fillStyle = under; canvas.fillRect(0, 0, 1, 1);
    canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const luminance = (c) => c.map((v) => v / 255).map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const backdrop = (element) => {
    const chain = [];
    for (let at = element; at && at !== root; at = at.parentElement) chain.unshift(at);
    let colour = getComputedStyle(root).backgroundColor;
    for (const at of chain) colour = `rgb(${rgb(getComputedStyle(at).backgroundColor, colour).join(',')})`;
    return colour;
  };
  const out = [];
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.textContent.trim();
    const element = walker.currentNode.parentElement;
    if (!text || element.closest('.ql-sr, option')) continue; // only for ears, or drawn by the system
    const under = backdrop(element);
    const pair = [rgb(getComputedStyle(element).color, under), rgb(under, '#000')];
    const [a, b] = pair.map(luminance).sort((x, y) => y - x);
    out.push({ text: text.slice(0, 40), contrast: (a + 0.05) / (b + 0.05) });
  }
  return out;
}"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.timeout(900))  # the first test of each renderer waits for the page
            # A page of 600 modules drawn without a graphics card can miss a frame; a real fault fails three times.
            item.add_marker(pytest.mark.flaky(reruns=2))


class Editor:
    """One open page of the graph editor."""

    def __init__(self, page: Page, server: ComfyServer, renderer: str) -> None:
        self.page = page
        self.server = server
        self.renderer = renderer
        self.errors: list[str] = []
        page.set_default_timeout(PATIENCE)
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    def open(self) -> None:
        self.page.goto(self.server.address, timeout=START)
        ready = "window.app?.canvas && window.app.graph && window.app.extensionManager?.setting"
        self.page.wait_for_function(ready, timeout=START)
        # The frontend opens its default workflow when it is ready; a graph made before that would be replaced.
        self.page.wait_for_function("app.graph.nodes.length > 0", timeout=START)

    def clear(self) -> None:
        """An empty graph, no dialog, no toast, nothing queued."""
        self.page.evaluate(
            """() => {
              document.querySelectorAll('dialog[open]').forEach((dialog) => dialog.close());
              app.extensionManager.toast.removeAll?.();
              // Values of widgets are kept by node id: a used id must not come back.
              const last = app.graph.last_node_id;
              app.graph.clear();
              app.graph.last_node_id = last;
              app.canvas.ds.offset = [80, 70];
              app.canvas.ds.scale = 1;
              app.canvas.setDirty(true, true);
            }"""
        )

    def add(
        self, file: str | None = None, width: int = 340, position: tuple[int, int] = (40, 40), kind: str = LOADER
    ) -> int:
        """Adds our loader as a user does, with its panel, and picks a file; returns the node's id.

        ``kind``: another node of ours, whose file is then chosen with :meth:`choose`.
        """
        node = self.page.evaluate(
            """([type, width, position]) => {
              const node = LiteGraph.createNode(type);
              node.pos = position;
              node.size = [width, 120];
              app.graph.add(node);
              return node.id;
            }""",
            [kind, width, list(position)],
        )
        if file is not None:
            self.choose("model_name", file, node)
        return int(node)

    def choose(self, widget: str, value: str, node: int | None = None) -> None:
        """Sets a combo as its menu does: the value, then its callback."""
        self.page.evaluate(
            """([id, name, value]) => {
              const ours = (n) => (id === null ? n.type.startsWith('QuantLoader') : String(n.id) === String(id));
              const widget = app.graph.nodes.find(ours).widgets.find((w) => w.name === name);
              widget.value = value;
              widget.callback?.(value);
            }""",
            [node, widget, value],
        )

    def value(self, widget: str) -> Any:
        return self.page.evaluate(
            """(name) => app.graph.nodes.find((n) => n.type.startsWith('QuantLoader'))
              .widgets.find((w) => w.name === name).value""",
            widget,
        )

    def load(self, workflow: dict[str, Any]) -> None:
        """Opens a workflow in API format."""
        self.page.evaluate("async (workflow) => { await app.loadApiJson(workflow, 'test.json'); }", workflow)

    def run(self) -> None:
        self.page.evaluate("() => app.queuePrompt(0, 1)")

    def setting(self, name: str, value: Any) -> None:
        self.page.evaluate("async ([name, value]) => app.extensionManager.setting.set(name, value)", [name, value])

    def panel(self) -> Locator:
        return self.page.locator(".ql-panel").first

    def verdict(self, verdict: str) -> Locator:
        """The verdict line, once the panel shows this verdict."""
        line = self.page.locator(f".ql-panel .ql-verdict-{verdict}").first
        line.wait_for()
        return line

    def contrasts(self, selector: str = ".ql-panel") -> list[dict[str, Any]]:
        """[{text, contrast}] of every piece of text in the panel, or in the last element of another selector."""
        return list(self.page.evaluate(CONTRASTS, selector))

    def shot(self, name: str) -> Path:
        ARTIFACTS.mkdir(parents=True, exist_ok=True)
        path = ARTIFACTS / f"{name}-{self.renderer}.png"
        self.page.screenshot(path=path)
        return path


@pytest.fixture(scope="module")  # Playwright keeps an event loop running in this thread: no other module may meet it
def browser() -> Iterator[Browser]:
    """Chromium. Absent, the tests fail: a skipped test of what users see is no test."""
    executable = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if executable is None:
        pytest.fail("No Chromium: run `apt-get install -y chromium`, or name one with CHROMIUM=/path/to/chromium.")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.fail("No Playwright: run `pip install playwright` (its own browsers are not needed).")
    with sync_playwright() as playwright:
        # A fresh profile in a temporary folder is Playwright's default.
        browser = playwright.chromium.launch(executable_path=executable, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def panel_files(unstarted: ComfyServer, tensors: quantize.Tensors) -> Path:
    """Files that only the panel's tests need; returns their folder."""
    folder = unstarted.models("diffusion_models")
    packed, metadata = quantize.quantize(tensors, "int8_row")
    (folder / SUBFOLDER_FILE).parent.mkdir(exist_ok=True)
    quantize.save(folder / SUBFOLDER_FILE, packed, metadata)
    victim = fixtures.BROKEN_LAYERS[0]
    hostile = {name.replace(victim, HOSTILE_LAYER): tensor for name, tensor in packed.items()}
    quantize.save(folder / HOSTILE_FILE, quantize.half_scale(hostile, HOSTILE_LAYER), metadata)
    mixed = dict(packed)
    for quantizer, part in (("nvfp4", "img_mlp"), ("fp8", "single_blocks"), ("convrot_w4a4", "txt_mlp")):
        other = quantize.quantize(tensors, quantizer)[0]
        mixed = {k: v for k, v in mixed.items() if part not in k} | {k: v for k, v in other.items() if part in k}
    quantize.save(folder / MANY_FORMATS_FILE, mixed, metadata)
    quantize.save(folder / CHANGING_FILE, packed, metadata)
    encoders = unstarted.models("text_encoders")
    (encoders / ENCODERS[1]).parent.mkdir(exist_ok=True)
    quantize.save(encoders / ENCODERS[0], packed, metadata)
    quantize.save(encoders / ENCODERS[1], quantize.half_scale(packed, victim), metadata)
    quantize.save(encoders / ENCODERS[2], quantize.zero_markers(packed, [victim]), metadata)
    return folder


@pytest.fixture(scope="module")
def open_editor(browser: Browser, panel_files: Path) -> Iterator[Callable[..., Editor]]:
    """Opens the editor of a server in a renderer."""
    contexts = []

    def make(server: ComfyServer, renderer: str, **settings: Any) -> Editor:
        chosen = {
            "Comfy.TutorialCompleted": True,
            "Comfy.VueNodes.Enabled": renderer == "nodes2",
            "Comfy.ColorPalette": "dark",
            "Comfy.Locale": "en",
            "Comfy.Graph.CanvasInfo": False,
            "Comfy.Minimap.Visible": False,
            **settings,
        }
        for name, value in chosen.items():
            server.client.post(f"/settings/{name}", value)
        context = browser.new_context(viewport=VIEWPORT)
        contexts.append(context)
        editor = Editor(context.new_page(), server, renderer)
        editor.open()
        return editor

    yield make
    for context in contexts:
        context.close()


@pytest.fixture(scope="module", params=["classic", "nodes2"])
def page_in_renderer(
    request: pytest.FixtureRequest, open_editor: Callable[..., Editor], server: ComfyServer
) -> Iterator[Editor]:
    editor = open_editor(server, request.param)
    yield editor
    editor.page.context.close()  # an open page goes on drawing beside the tests that follow


@pytest.fixture
def editor(page_in_renderer: Editor) -> Iterator[Editor]:
    """An empty graph in the installed frontend, once per renderer."""
    page_in_renderer.clear()
    page_in_renderer.errors.clear()
    yield page_in_renderer
    assert page_in_renderer.errors == [], "the page raised errors"


@pytest.fixture(scope="session")
def newest_server(server: ComfyServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    """A second server over the same models that serves the newest frontend on PyPI."""
    if not (NEWEST_FRONTEND / "index.html").is_file():
        pytest.fail(
            "No newest frontend: run `pip install --no-deps --target .cache/frontend-newest comfyui-frontend-package`."
        )
    base = tmp_path_factory.mktemp("comfyui-newest")
    (base / "models").symlink_to(server.base / "models", target_is_directory=True)
    with ComfyServer(base, extra_arguments=("--front-end-root", str(NEWEST_FRONTEND))) as newest:
        yield newest


@pytest.fixture
def text_to_image() -> Callable[..., dict[str, Any]]:
    """The demo's workflow around our loader, in API format."""
    return lambda file, **inputs: workflows.text_to_image(workflows.quant_loader(file, **inputs), prefix="browser/run")


@pytest.fixture(scope="session")
def record_times() -> Iterator[Callable[[str, list[float]], None]]:
    """Keeps measured milliseconds by name and writes them beside the screenshots."""
    times: dict[str, list[float]] = {}

    def record(name: str, milliseconds: list[float]) -> None:
        times[name] = [round(value, 1) for value in milliseconds]

    yield record
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    (ARTIFACTS / "times.json").write_text(json.dumps(times, indent=1), encoding="utf-8")
