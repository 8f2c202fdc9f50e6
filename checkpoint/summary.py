"""The verdict in words: one line for the table, a few for the node."""

from __future__ import annotations

from collections.abc import Mapping, Set

from .findings import Findings
from .report import Report, Verdict
from .words import clean, listing


def summarise(findings: Findings, formats: Mapping[str, int], suspects: Set[str]) -> tuple[Verdict, str]:
    """The verdict and its one line, for example ``Refused: 3 faults in 2 of 10 layers (markers unreadable)``."""
    if findings.refused:
        faults = findings.error_count
        words = listing(findings.titles(), limit=3)
        line = f"Refused: {faults} {'fault' if faults == 1 else 'faults'}"
        if findings.faulty_layers:
            total = len(suspects | findings.faulty_layers)
            line += f" in {len(findings.faulty_layers)} of {total} {'layer' if total == 1 else 'layers'}"
        return "refused", f"{line} ({words})"
    if not formats:
        return "unquantized", "Not quantised: nothing to check"
    total = sum(formats.values())
    kinds = ", ".join(f"{count} {name}" for name, count in formats.items())
    return "ok", f"OK: {total} quantised {'layer' if total == 1 else 'layers'} ({kinds})"


def verdict_text(report: Report, max_lines: int = 6, width: int = 100) -> str:
    """The verdict for a small box: verdict on line 1, then the faults by kind with the first layers' names, then the fix."""
    lines = [clean(report.summary, width)]
    notices = [group for group in report.groups if group.rule == "extra.rules.compatible"]
    if notices:
        lines.append(clean(notices[0].message, width))
    worst = "error" if report.verdict == "refused" else "warning"
    groups = [group for group in report.groups if group.severity == worst]
    fixes = list(dict.fromkeys(group.fix for group in groups if group.fix))
    room = max_lines - len(lines) - (1 if fixes else 0)
    for position, group in enumerate(groups[: max(room, 0)]):
        rest = len(groups) - position
        if position == room - 1 and rest > 1:
            lines.append(clean(f"… and {rest} more kinds of faults: {listing([g.rule for g in groups[position:]])}", width))
            break
        where = f" [{listing(list(group.layers), limit=2)}{f' and {group.count - 2} more' if group.count > 2 else ''}]" if group.count > 1 and group.layers else ""
        message = group.message.split(" The same in ")[0]
        lines.append(clean(message, max(width - len(where), 40)) + where)
    if fixes:
        lines.append(clean(f"Fix: {fixes[0]}", width * 2))
    return "\n".join(lines[:max_lines])
