"""What would run and what ran: one group for all layers with the same answer."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..kernels import calls as operator_calls
from ..kernels import retired
from .ops import DENSE, LOOKUP, PATCHED
from .patcher import context_of, is_compiled, packed_modules

Group = dict[str, Any]
Way = tuple[str, str, str, str, str, bool]
"""A way to run a layer: format in the file, backend, operator, execution, reason, slow."""


def planned(*patchers: Any) -> list[Group]:
    """The kernel that each group of layers will run on its patcher's device, with the reason."""
    counts: Counter[Way] = Counter()
    for patcher in patchers:
        for module in packed_modules(patcher.model).values():
            if module.is_table:
                counts[(module.file_format, "torch", LOOKUP, "exact", _DENSE[LOOKUP], False)] += 1
            else:
                counts[_planned(module, patcher.load_device)] += 1
    return [_group(key, count) for key, count in sorted(counts.items())]


def calls_by_layer(model: Any) -> dict[str, dict[Way, int]]:
    """Layer name -> how often it ran each way since it was loaded, on any device; {} for one that did not run.

    ``model``: a patcher's ``model``. Reads counters only: no device is asked, and a run may go on meanwhile. Calls
    inside graphs of torch.compile are not among them: see :func:`compiled_calls`.
    """
    found: dict[str, dict[Way, int]] = {}
    for key, module in packed_modules(model).items():
        calls: Counter[Way] = Counter()
        for operator in module.operators():
            plan = operator.plan
            for backend, count in list(operator.stats.items()):
                reason = plan.reason
                if backend != plan.backend:
                    reason = f"It took over from {plan.backend}, whose kernel failed: {_failure(plan.backend)}"
                reason = _carried(module, operator) + reason
                execution = _execution(module, operator)
                calls[(module.file_format, backend, plan.operator, execution, reason, plan.slow)] += count
        for what, count in list(module.dense_calls.items()):
            calls[(module.file_format, "torch", what, "exact", _DENSE[what], what == PATCHED)] += count
        found[key.removesuffix(".weight")] = dict(calls)
    return found


def ran(patcher: Any) -> list[Group]:
    """What each group of layers ran on since it was loaded (:func:`calls_by_layer`), with the number of calls.

    Layers that did not run are listed with 0 calls and their plan.
    """
    layers: Counter[Way] = Counter()
    calls: Counter[Way] = Counter()
    modules = packed_modules(patcher.model)
    for name, ways in calls_by_layer(patcher.model).items():
        module = modules[f"{name}.weight"]
        for way, count in ways.items():
            layers[way] += 1
            calls[way] += count
        if not ways and not module.is_table:
            layers[_planned(module, patcher.load_device)] += 1
    return [_group(way, count) | {"calls": calls[way]} for way, count in sorted(layers.items())]


# Relative output error (docs/kernels.md): of the format's own arithmetic, and after it was carried over to INT8 rows.
_CARRIED_ERRORS = {
    "float8_e4m3fn": (0.037, 0.029),
    "mxfp8": (0.038, 0.029),
    "nvfp4": (0.134, 0.096),
    "quanto_int8": (0.009, 0.015),
}


def _planned(module: Any, device: Any) -> Way:
    operator = module.operator(device)
    plan = operator.plan
    reason = _carried(module, operator) + plan.reason
    if module.keeps(device) and not module.not_kept:
        reason += " The INT8 rows are kept from the first call on."
    return module.file_format, plan.backend, plan.operator, _execution(module, operator), reason, plan.slow


def _execution(module: Any, operator: Any) -> str:
    """What the person chose: an INT8 layer's own arithmetic is the ``int8`` execution of a weight carried over."""
    return "int8" if module.file_format != operator.spec.format else str(operator.plan.execution)


def _carried(module: Any, operator: Any) -> str:
    """The sentence on a weight whose INT8 rows an operator runs, with the error of a linear; else nothing.

    ``module.not_kept`` where rows should have been kept.
    """
    if module.file_format == operator.spec.format:
        return f"{module.not_kept} " if module.not_kept else ""
    when = "while loading" if operator.spec.format == module.spec.format else "at the first call, and kept beside it"
    errors = _CARRIED_ERRORS.get(module.file_format)
    size = (
        "" if errors is None else f" (relative error {errors[1]:.3f}; the format's own arithmetic has {errors[0]:.3f})"
    )
    return f"Carried over to INT8 rows with ConvRot {when}{size}. "


_DENSE = {
    PATCHED: "Its patches have no low-rank form, so the layer runs on a dequantised, patched copy of its weight.",
    DENSE: "ComfyUI handed over a dense copy of the weight (a weight wrapper, or a layer forced to another device).",
    LOOKUP: "Rows are decoded as they are looked up.",
}


def _failure(backend: str) -> str:
    return next((why for (_, name), why in retired().items() if name == backend), "no reason recorded")


def _group(key: tuple[Any, ...], count: int) -> Group:
    fields = ("format", "backend", "operator", "execution", "reason", "slow")
    return dict(zip(fields, key, strict=True)) | {"count": count}


def compiled_calls(patcher: Any) -> int:
    """Linears of this process that no layer of this model counted: inside compiled graphs, and of other models."""
    total = sum(count for (operator, _), count in operator_calls().items() if "_linear" in operator)
    counted: int = sum(group["calls"] for group in ran(patcher) if group["operator"] not in _DENSE)
    return max(0, total - counted)


def line(group: Group) -> str:
    """A group as one line of text."""
    calls = f", {group['calls']} calls" if "calls" in group else ""
    slow = " (slow)" if group["slow"] else ""
    head = f"{group['count']} x {group['format']}: {group['backend']} ({group['operator']}){slow}{calls}"
    return f"{head}: {group['reason']}"


def dequantised_lines(*patchers: Any) -> list[str]:
    """Layers of the file that have no kernel in these models, and why. Models of one load share one list."""
    reasons: dict[str, str] = {}
    for patcher in patchers:
        context = context_of(patcher.model)
        reasons |= {} if context is None else context.dequantised
    return [f"{name}: {why}" for name, why in sorted(reasons.items())]


def warnings_of(*patchers: Any) -> list[str]:
    """What loading these models and their runs so far gave reason to say, once each."""
    contexts = (context_of(patcher.model) for patcher in patchers)
    return list(dict.fromkeys(sentence for c in contexts if c is not None for sentence in c.sentences()))


def report(patcher: Any) -> tuple[str, Group]:
    """The text of the Kernel Report node and the entry for its panel."""
    modules = packed_modules(patcher.model)
    if not modules:
        summary = "No quantised layer: this model runs as ComfyUI runs it."
        return "\n".join([summary, *dequantised_lines(patcher)]), {"summary": summary, "groups": []}
    if hasattr(patcher, "read_guards"):
        patcher.read_guards()
    groups = ran(patcher)
    total = sum(group["calls"] for group in groups)
    summary = f"{len(modules)} quantised layers, {total} calls."
    if total == 0:
        summary += " Nothing ran outside compiled graphs yet: connect the model that is sampled, and run."
    lines = [summary, *(line(group) for group in groups)]
    inside = compiled_calls(patcher)
    if inside and (total == 0 or is_compiled(patcher)):
        lines.append(f"{inside} calls inside compiled graphs or of other models in this process.")
    lines += dequantised_lines(patcher)
    if hasattr(patcher, "lora_report"):
        lines += [*patcher.lora_report(), *patcher.hook_report()]
    warnings = warnings_of(patcher)
    lines += [f"warning: {sentence}" for sentence in warnings]
    return "\n".join(lines), {"summary": " ".join([summary, *warnings]), "groups": groups}
