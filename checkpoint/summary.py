"""The verdict in words: one line for the table, a few for the node."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Set

from .findings import Findings
from .report import Group, Report, Verdict
from .words import clean, cut

ACCEPTED_BY_COMPATIBLE = "extra.rules.compatible"


def plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def summarise(findings: Findings, formats: Mapping[str, int], suspects: Set[str]) -> tuple[Verdict, str]:
    """The verdict and its one line, for example ``Refused: 3 faults in 2 of 10 layers (markers unreadable)``."""
    if findings.refused:
        titles = findings.titles()
        words = "; ".join(titles[:3]) + (f"; {len(titles) - 3} more kinds" if len(titles) > 3 else "")
        line = f"Refused: {plural(findings.error_count, 'fault')}"
        if findings.faulty_layers:
            line += f" in {len(findings.faulty_layers)} of {plural(len(suspects | findings.faulty_layers), 'layer')}"
        return "refused", f"{line} ({words})"
    if not formats:
        return "unquantized", "Not quantised: loaded as the stock loader does"
    kinds = ", ".join(f"{count} {name}" for name, count in formats.items())
    return "ok", f"OK: {plural(sum(formats.values()), 'quantised layer')} ({kinds})"


def group_text(group: Group, names: int = 1) -> str:
    """A group's message; for several layers up to ``names`` of the further ones and the number of the others."""
    also = group.layers[1 : 1 + names]
    if not also:
        return group.message
    message = group.message.removesuffix(f" The same in {group.count - 1} more.")
    rest = group.count - 1 - len(also)
    return f"{message} Also {', '.join(map(clean, also))}" + (f" and {rest} more." if rest else ".")


def verdict_text(report: Report, max_lines: int = 6, width: int = 100) -> str:
    """The verdict for a small box: the verdict on line 1, then the faults by kind with the first layers' names, then
    the fix.

    At most ``max_lines`` lines of about ``width`` characters. A refusal that the compatible rules would lift says so on
    line 2.
    """
    head = [cut(report.summary, width)]
    accepted = [group for group in report.groups if group.rule == ACCEPTED_BY_COMPATIBLE]
    head.extend(cut(group.message, width) for group in accepted)
    worst = "error" if report.verdict == "refused" else "warning"
    groups = [group for group in report.groups if group.severity == worst]
    if not groups:
        return "\n".join(head[:max_lines])
    fix = f"Fix: {(accepted or groups)[0].fix}"
    room = max_lines - len(head)
    tail = textwrap.wrap(fix, width) if room > 3 else [cut(fix, width)]
    if len(tail) > 2:
        tail = [tail[0], cut(" ".join(tail[1:]), width)]
    body: list[str] = []
    room = max(room - len(tail), 1)
    for position, group in enumerate(groups):
        left, waiting = room - len(body), len(groups) - position - 1
        if left <= 0:
            break
        text = clean(group_text(group), 6 * width)
        if left == 1 and waiting:
            more = f" (and {plural(waiting, 'more kind')})"
            body.append(cut(text, width - len(more)) + more)
            break
        lines = textwrap.wrap(text, width)
        allowed = max(left - waiting, 1)
        body.extend(
            lines if len(lines) <= allowed else [*lines[: allowed - 1], cut(" ".join(lines[allowed - 1 :]), width)]
        )
    return "\n".join([*head, *body, *tail][:max_lines])
