"""The one decision per layer: which kernel runs it on this device, and why. Pure; runs nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .facts import DeviceFacts
from .formats import format_of
from .routes import Backend, Execution, Route, preferred
from .spec import Spec

Mode = Literal["auto", "native", "int8", "exact"]
MODES: tuple[Mode, ...] = ("auto", "native", "int8", "exact")


@dataclass(frozen=True)
class Alternative:
    """A way that was not taken, and why."""

    backend: str
    operator: str
    execution: Execution
    reason: str


@dataclass(frozen=True)
class Plan:
    """What will run for a layer.

    ``execution`` is the arithmetic (``native``: the format's own; ``int8``: INT8 on both sides; ``exact``: the weight
    decoded, a 16-bit product), ``backend`` whose kernel, ``operator`` its name, ``reason`` one or two sentences for a
    person, ``alternatives`` what was passed over with the reason of each, ``slow`` whether a plain 16-bit linear would
    be clearly faster on this device. ``fallbacks``: the backends, best first and ending in torch, that take over in
    this order if a kernel fails.
    """

    backend: Backend
    operator: str
    execution: Execution
    reason: str
    alternatives: tuple[Alternative, ...] = ()
    slow: bool = False
    fallbacks: tuple[Backend, ...] = ()

    @property
    def backends(self) -> str:
        """The ladder as the operators take it: chosen backend first, comma separated."""
        return ",".join((self.backend, *self.fallbacks))


def plan(spec: Spec, facts: DeviceFacts, execution: Mode = "auto", backend: Backend | None = None) -> Plan:
    """Decide what runs ``spec`` on a device.

    Args:
        spec: the layer.
        facts: the device (:func:`quant_loader.kernels.device_facts`, or one of ``DEVICES``).
        execution: the user's choice.
        backend: only this backend, if given.

    Raises:
        ValueError: unknown format or execution, or ``backend`` cannot run the layer (the message says why).
    """
    if execution not in MODES:
        raise ValueError(f"execution must be one of {', '.join(MODES)}, found {execution!r}")
    fmt = format_of(spec)
    order, note = _order(spec, execution, fmt.int8_is_native)
    passed_over: list[Alternative] = []
    fitting: list[Route] = []
    for wanted, any_will_do in order:
        for route in preferred(tuple(r for r in fmt.routes if r.execution == wanted), facts):
            if backend is not None and route.backend != backend:
                continue
            reason = route.fits(spec, facts)
            if reason is None and not any_will_do and route.slow(facts):
                reason = "it would be slower here than a 16-bit linear."
            if reason is None and not any_will_do and route.stands_in:
                reason = "it is less precise than INT8 and no faster here."
            if reason is None:
                fitting.append(route)
            elif (
                alternative := Alternative(route.backend, route.operator, route.execution, reason)
            ) not in passed_over:
                passed_over.append(alternative)
        if fitting:
            break
    if not fitting:
        listed = " ".join(f"{a.backend} ({a.operator}): {a.reason}" for a in passed_over)
        wanted_text = f"{backend} backend" if backend else f"{execution} execution"
        raise ValueError(
            f"layer {spec.name} ({spec.format}) cannot run with the {wanted_text} on {facts.name}. {listed}".strip()
        )
    chosen = fitting[0]
    fallbacks = (
        ()
        if backend is not None
        else tuple(dict.fromkeys(r.backend for r in fitting[1:] if r.backend != chosen.backend))
    )
    if backend is None and "torch" not in (chosen.backend, *fallbacks):
        # A kernel that fails always has plain torch behind it, however slow.
        fallbacks = (*fallbacks, "torch")
    slow = chosen.slow(facts)
    sentences = [chosen.why, note, _what_stood_in_the_way(chosen, passed_over, facts)]
    if chosen.execution == "exact" and not facts.bf16:
        sentences.append("A bfloat16 model's products run in float32: there are no bfloat16 units here.")
    if slow:
        sentences.append("Slower here than a 16-bit linear; the auto or exact execution is faster.")
    return Plan(
        backend=chosen.backend,
        operator=chosen.operator,
        execution=chosen.execution,
        reason=" ".join(sentence for sentence in sentences if sentence),
        alternatives=tuple(passed_over),
        slow=slow,
        fallbacks=fallbacks,
    )


def _order(spec: Spec, mode: Mode, int8_is_native: bool) -> tuple[tuple[tuple[Execution, bool], ...], str]:
    """(execution, whether slow and stand-in routes will do) in the order to try, and a note for the reason."""
    full_precision = bool(spec.get("full_precision_matrix_mult", False))
    if mode == "exact":
        return (("exact", True),), ""
    if mode == "auto":
        if full_precision:
            return (("exact", True),), "The file asks for full precision products in this layer."
        return (("native", False), ("int8", False), ("exact", True)), ""
    note = (
        "The file asks for full precision products in this layer; the chosen execution overrides that."
        if full_precision
        else ""
    )
    if mode == "int8" and not int8_is_native:
        return (("int8", True), ("exact", True)), note
    return (("native", True), ("exact", True)), note


def _what_stood_in_the_way(chosen: Route, passed_over: list[Alternative], facts: DeviceFacts) -> str:
    """The reason that tells a person most about why nothing better runs: comfy-kitchen's on a graphics card, PyTorch's
    elsewhere.
    """
    if chosen.backend == "kitchen":
        return ""
    card = facts.maker in ("nvidia", "amd")
    if not card and chosen.execution != "exact":
        return ""
    told = "kitchen" if card else "torch"
    reasons = (
        a.reason for a in passed_over if a.backend == told and a.execution != "exact" and not a.reason.startswith("it ")
    )
    first = next(reasons, "")
    return first[:1].upper() + first[1:]
