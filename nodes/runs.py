"""What ran: the models that this server's loader nodes handed out, and what their layers did in the latest prompt.

The figures are for the panel on the loader, which has no link to the sampler. A load is known by what was asked for (a
folder, files as they are on disk, rules, execution), as the panel knows it: ComfyUI answers another node with the same
inputs from its cache. Models are held by weak references, so that none lives longer for being counted.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from aiohttp import web

from . import files

if TYPE_CHECKING:
    from ..patching.kernel_report import Way

    Calls = dict[str, dict[Way, int]]

NAMED_LAYERS = 4
MAX_GROUPS = 24
MAX_SENTENCES = 5
MAX_TEXT = 400  # characters of one sentence or name
_MODEL_PREFIX = "diffusion_model."


class Asked(NamedTuple):
    """What a loader node was asked for; ``content`` changes when one of the files does."""

    folder: str
    files: tuple[str, ...]
    content: str
    rules: str
    execution: str

    @classmethod
    def now(cls, folder: str, names: Sequence[str], rules: str, execution: str) -> Asked:
        """Of files as they are on disk now."""
        content = "; ".join(files.fingerprint(folder, name) for name in names)
        return cls(folder, tuple(names), content, rules, execution)


@dataclass
class _Part:
    """One model of a load. ``start``: its counters when the latest prompt began; ``last``: what ran in the latest
    prompt before that in which anything did."""

    name: str
    model: weakref.ref[Any]
    device: Any
    start: Calls
    last: Calls

    def since_start(self, model: Any) -> Calls:
        from ..patching.kernel_report import calls_by_layer

        return _difference(calls_by_layer(model), self.start)

    def begin(self) -> None:
        model = self.model()
        if model is None:
            return
        from ..patching.kernel_report import calls_by_layer

        ran = self.since_start(model)
        if any(ran.values()):
            self.last = ran
        self.start = calls_by_layer(model)

    def figures(self) -> dict[str, Any] | None:
        """What the panel shows; None when the model is gone."""
        model = self.model()
        if model is None:
            return None
        ran = self.since_start(model)
        if not any(ran.values()):
            ran = self.last
        return {"part": self.name} | _figures(model, self.device, ran)


class Runs:
    """The latest ``limit`` loads of a server; safe to use from its threads."""

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._loads: OrderedDict[Asked, list[_Part]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._loads)

    def handed_out(self, asked: Asked, **patchers: Any) -> None:
        """A loader node gives these models away; None and models without a quantised layer are left out."""
        from ..patching.kernel_report import calls_by_layer, dequantised_lines

        parts = [
            _Part(name, weakref.ref(patcher.model), patcher.load_device, calls_by_layer(patcher.model), {})
            for name, patcher in patchers.items()
            if patcher is not None and (calls_by_layer(patcher.model) or dequantised_lines(patcher))
        ]
        with self._lock:
            self._loads.pop(asked, None)
            for other in [key for key, known in self._loads.items() if all(part.model() is None for part in known)]:
                del self._loads[other]
            if parts:
                self._loads[asked] = parts
            while len(self._loads) > self._limit:
                self._loads.popitem(last=False)

    def begin(self, asked: Asked) -> None:
        """A prompt with this loader begins: from here on its figures are counted anew."""
        with self._lock:
            for part in self._loads.get(asked, ()):
                part.begin()

    def figures(self, asked: Asked) -> list[dict[str, Any]]:
        """One entry for each model of this load that is still there; [] when nothing was loaded like this."""
        with self._lock:
            found = [part.figures() for part in self._loads.get(asked, ())]
        return [entry for entry in found if entry is not None]


RUNS = web.AppKey("quant_loader_runs", Runs)
"""Where a server keeps its :class:`Runs`."""


def of_server() -> Runs | None:
    """The running ComfyUI server's; None where the nodes are used without one."""
    try:
        from server import PromptServer
    except ImportError:
        return None
    instance = getattr(PromptServer, "instance", None)
    return None if instance is None else instance.app.get(RUNS)


def handed_out(folder: str, names: Sequence[str], rules: str, execution: str, **patchers: Any) -> None:
    """Note a load on the running server (:meth:`Runs.handed_out`)."""
    runs = of_server()
    if runs is not None:
        runs.handed_out(Asked.now(folder, names, rules, execution), **patchers)


def begin(asked: Asked) -> None:
    """Note on the running server that a prompt begins (:meth:`Runs.begin`)."""
    runs = of_server()
    if runs is not None:
        runs.begin(asked)


def _difference(now: Calls, before: Calls) -> Calls:
    """What was counted in between, for every layer."""
    return {
        layer: {
            way: count - before.get(layer, {}).get(way, 0)
            for way, count in ways.items()
            if count > before.get(layer, {}).get(way, 0)
        }
        for layer, ways in now.items()
    }


def _figures(model: Any, device: Any, ran: Calls) -> dict[str, Any]:
    """Counts, and the layers in groups that ran the same way.

    ``dequantised`` counts layers whose weight was decoded for a 16-bit product, while running or already while loading.
    """
    from ..kernels import device_facts
    from ..patching.kernel_report import calls_by_layer
    from ..patching.ops import LOOKUP
    from ..patching.patcher import context_of

    context = context_of(model)
    at_load: dict[str, str] = dict(context.dequantised) if context is not None else {}
    layers: dict[Way, list[str]] = {}
    calls: Counter[Way] = Counter()
    for layer, ways in ran.items():
        for way, count in ways.items():
            layers.setdefault(way, []).append(layer.removeprefix(_MODEL_PREFIX))
            calls[way] += count
    # Slow ways first, then decoded weights, then what most layers ran.
    ordered = sorted(layers.items(), key=lambda item: (not item[0][5], item[0][3] != "exact", -len(item[1])))
    groups = [
        dict(zip(("format", "backend", "operator", "execution"), way, strict=False))
        | {"reason": _cut(way[4]), "slow": way[5], "lookup": way[2] == LOOKUP, "count": len(names), "calls": calls[way]}
        | {"layers": [_cut(name) for name in names[:NAMED_LAYERS]]}
        for way, names in ordered[:MAX_GROUPS]
    ]
    warnings = context.sentences() if context is not None else []
    decoded = {layer for layer, ways in ran.items() if any(w[3] == "exact" and w[2] != LOOKUP for w in ways)}
    return {
        "device": device_facts(device).name,
        "layers": len(calls_by_layer(model)) + len(at_load),
        "ran": sum(bool(ways) for ways in ran.values()),
        "calls": sum(calls.values()),
        "dequantised": len(decoded) + len(at_load),
        "groups": groups,
        "more_groups": len(ordered) - len(groups),
        "loaded_dequantised": _by_reason(at_load),
        "warnings": [_cut(sentence) for sentence in warnings[-MAX_SENTENCES:]],
    }


def _by_reason(reasons: dict[str, str]) -> list[dict[str, Any]]:
    grouped: dict[str, list[str]] = {}
    for name, why in sorted(reasons.items()):
        grouped.setdefault(why, []).append(name)
    return [
        {"reason": _cut(why), "count": len(names), "layers": [_cut(name) for name in names[:NAMED_LAYERS]]}
        for why, names in list(grouped.items())[:MAX_SENTENCES]
    ]


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"
