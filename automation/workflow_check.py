"""``quant-loader check --workflow``: every model file that a workflow names, judged by the rules that its node would
use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from ..checkpoint import Report, check
from ..checkpoint.report import SCHEMA, Rules
from ..checkpoint.words import clean
from .model_folders import ModelFolders
from .workflows import Document, FileReference, UnknownFile, WorkflowFiles, model_files

Status = Literal["ok", "unquantized", "refused", "missing", "skipped"]

STOCK_RULES: Rules = "compatible"
"""What the stock loaders read comes closest to this set; our own nodes carry their choice."""

_SAFETENSORS = (".safetensors", ".sft", ".safetensors.index.json")


@dataclass(frozen=True)
class Model:
    """One named file and what became of it. ``report`` is None for a missing or skipped one."""

    reference: FileReference
    status: Status
    summary: str
    path: str | None = None
    rules: Rules | None = None
    report: Report | None = None

    def to_dict(self) -> dict[str, Any]:
        reference = self.reference
        return {
            "node_id": reference.node_id,
            "node_type": reference.node_type,
            "input": reference.input,
            "folder": reference.folder,
            "name": reference.name,
            "path": self.path,
            "status": self.status,
            "summary": self.summary,
            "rules": self.rules,
            "report": None if self.report is None else self.report.to_dict(),
        }


@dataclass(frozen=True)
class WorkflowReport:
    """The answer for one workflow. ``verdict`` is refused when a model is refused or missing."""

    source: str
    format: str
    models: tuple[Model, ...]
    unknown: tuple[UnknownFile, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def verdict(self) -> Literal["ok", "refused"]:
        return "refused" if any(model.status in ("refused", "missing") for model in self.models) else "ok"

    @property
    def summary(self) -> str:
        if not self.models:
            return "OK: the workflow names no model file that is known here"
        counts = {status: sum(model.status == status for model in self.models) for status in _WORDS}
        words = ", ".join(f"{count} {_WORDS[status]}" for status, count in counts.items() if count)
        total = len(self.models)
        verdict = "OK" if self.verdict == "ok" else "Refused"
        return f"{verdict}: {total} model {'file' if total == 1 else 'files'} ({words})"

    def to_dict(self) -> dict[str, Any]:
        """The JSON of ``check --workflow --json``."""
        return {
            "schema": SCHEMA,
            "workflow": self.source,
            "format": self.format,
            "verdict": self.verdict,
            "summary": self.summary,
            "models": [model.to_dict() for model in self.models],
            "unknown": [{"node_id": u.node_id, "node_type": u.node_type, "name": u.name} for u in self.unknown],
            "notes": list(self.notes),
        }


_WORDS: dict[Status, str] = {
    "ok": "sound",
    "unquantized": "not quantised",
    "refused": "refused",
    "missing": "missing",
    "skipped": "not checked",
}


def check_workflow(
    document: Document,
    folders: ModelFolders,
    *,
    stock_rules: Rules = STOCK_RULES,
    progress: Callable[[str], None] | None = None,
) -> WorkflowReport:
    """Find and check every model file of ``document``. Raises RequestError for a workflow that cannot be followed."""
    found = model_files(document)
    known: dict[tuple[str, str], Report] = {}
    models: list[Model] = []
    for reference in found.references:
        if progress is not None:
            progress(f"checking {reference.name}")
        models.append(_judge(reference, folders, found, stock_rules, known))
    return WorkflowReport(document.source, document.format, tuple(models), tuple(found.unknown), tuple(found.notes))


def _judge(
    reference: FileReference,
    folders: ModelFolders,
    found: WorkflowFiles,
    stock_rules: Rules,
    known: dict[tuple[str, str], Report],
) -> Model:
    path = folders.find(reference.folder, reference.name)
    if path is None:
        where = found.sources.get(reference.name)
        hint = f"; the workflow says where to get it: {where}" if where else ""
        return Model(
            reference,
            "missing",
            f"Missing: there is no {clean(reference.name)} in the {clean(reference.folder)} folders{hint}",
        )
    ours = reference.rules is not None
    if not ours and not reference.name.lower().endswith(_SAFETENSORS):
        return Model(reference, "skipped", "Not checked: not a safetensors file", str(path))
    rules: Rules = stock_rules if not ours else ("compatible" if reference.rules == "compatible" else "strict")
    key = (str(path), rules)
    if key not in known:
        known[key] = check([path], rules=rules)
    report = known[key]
    return Model(reference, report.verdict, report.summary, str(path), rules, report)
