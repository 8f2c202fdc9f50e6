"""Collecting faults: every one, worded from the catalogue, grouped as they come."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

from .catalogue import RULES
from .header import HeaderError
from .report import Fault, Group, Severity
from .words import clean, name_of

MAX_FAULTS = 5_000
"""Faults listed one by one; further ones are counted in their groups."""
MAX_KINDS = 200
"""Different kinds of faults that are told apart."""
GROUP_NAMES = 3
_ORDER: dict[Severity, int] = {"error": 0, "warning": 1, "notice": 2}


@dataclass
class _Pile:
    rule: str
    severity: Severity
    message: str
    fix: str
    count: int = 0
    layers: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    """Further tensors, where the faults are of no layer."""


def _said_once(pile: _Pile) -> str:
    """The message of a group: the first fault's, and how many more there are."""
    if pile.count == 1:
        return pile.message
    rest = pile.count - 1 - len(pile.others)
    if not pile.others:
        return f"{pile.message} The same in {rest} more."
    return f"{pile.message} The same in {', '.join(pile.others)}{f' and {rest} more' if rest else ''}."


class Findings:
    """All faults of one check.

    While ``incomplete``, a file of the checkpoint is missing or cannot be read. What is absent may lie there: rules
    ``of_absence`` are not held against the rest.
    """

    def __init__(self) -> None:
        self._faults: list[Fault] = []
        self._piles: dict[tuple[str, str], _Pile] = {}
        self.incomplete = False
        self.dropped = 0
        self.faulty_layers: set[str] = set()

    def copy(self) -> Findings:
        """The same findings, to be added to independently."""
        twin = Findings()
        twin._faults = list(self._faults)
        twin._piles = {
            key: replace(pile, layers=list(pile.layers), others=list(pile.others)) for key, pile in self._piles.items()
        }
        twin.incomplete = self.incomplete
        twin.dropped = self.dropped
        twin.faulty_layers = set(self.faulty_layers)
        return twin

    def add(
        self,
        rule: str,
        *,
        layer: str | None = None,
        tensor: str | None = None,
        expected: str | None = None,
        found: str | None = None,
        repairable: bool | None = None,
        variant: str = "",
        **words: str,
    ) -> None:
        """Record one fault. ``variant`` keeps different kinds of one rule in different groups; ``words`` fill the
        rule's own templates.
        """
        row = RULES[rule]
        if self.incomplete and row.of_absence:
            return
        if len(self._piles) > MAX_KINDS:
            variant = ""
        if row.severity == "error" and layer is not None:
            self.faulty_layers.add(layer)
        pile = self._piles.get((rule, variant))
        if pile is not None and len(self._faults) >= MAX_FAULTS:
            pile.count += 1
            self.dropped += 1
            return
        blanks = {
            "layer": name_of(layer) if layer is not None else "",
            "tensor": clean(tensor) if tensor is not None else "",
            "expected": expected or "",
            "found": found or "",
            "look": "",
            "remedy": "",
            **words,
        }
        message = row.message.format_map(blanks)
        fix = row.fix.format_map(blanks).strip()
        if pile is None:
            pile = self._piles[(rule, variant)] = _Pile(rule, row.severity, message, fix)
        pile.count += 1
        if layer is not None and len(pile.layers) < GROUP_NAMES and layer not in pile.layers:
            pile.layers.append(layer)
        elif layer is None and tensor is not None and pile.count > 1 and len(pile.others) < GROUP_NAMES:
            pile.others.append(clean(tensor))
        self._faults.append(
            Fault(
                rule=rule,
                severity=row.severity,
                message=message,
                fix=fix,
                layer=layer,
                tensor=tensor,
                expected=expected,
                found=found,
                repairable=row.repairable if repairable is None else repairable,
            )
        )

    def add_unreadable(self, path: str, error: HeaderError) -> None:
        """Record that a file cannot be read any more though its header was sound."""
        rule = "extra.file.changed" if error.rule == "crash.file" else error.rule
        self.add(rule, file=clean(os.path.basename(path)), found=error.detail)

    def has(self, *rules: str) -> bool:
        """Whether any of these rules was broken."""
        return any(rule in rules for rule, _ in self._piles)

    def counted(self, rule: str, variant: str = "") -> bool:
        """Whether further faults of this kind are only counted: words for them need not be found."""
        return len(self._faults) >= MAX_FAULTS and (rule, variant) in self._piles

    @property
    def refused(self) -> bool:
        return any(pile.severity == "error" for pile in self._piles.values())

    @property
    def error_count(self) -> int:
        return sum(pile.count for pile in self._piles.values() if pile.severity == "error")

    def faults(self) -> tuple[Fault, ...]:
        """Errors first, then warnings, then notices; within each in the order they were found."""
        return tuple(sorted(self._faults, key=lambda fault: _ORDER[fault.severity]))

    def groups(self) -> tuple[Group, ...]:
        """The same fault in many layers, said once."""
        piles = sorted(self._piles.values(), key=lambda pile: _ORDER[pile.severity])
        return tuple(
            Group(
                pile.rule,
                pile.severity,
                pile.count,
                tuple(pile.layers),
                _said_once(pile),
                pile.fix,
            )
            for pile in piles
        )

    def titles(self) -> list[str]:
        """Short plain words for the kinds of errors, in order, without repetition."""
        return list(dict.fromkeys(RULES[pile.rule].title for pile in self._piles.values() if pile.severity == "error"))
