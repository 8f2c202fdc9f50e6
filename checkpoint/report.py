"""What a check found: plain data, the same for the command line, the routes, the nodes and the loaders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

SCHEMA = 1

Rules = Literal["strict", "compatible"]
Verdict = Literal["ok", "refused", "unquantized"]
Severity = Literal["error", "warning", "notice"]
DeclaredBy = Literal["marker", "metadata", "quanto_map", "inferred"]


@dataclass(frozen=True)
class LayerSpec:
    """One quantised layer as the file declares it.

    ``shape`` is the logical ``(N, K)`` = ``(out_features, in_features)`` of the dense weight, whatever the packing.
    ``annotations`` holds what the maths needs, in plain Python values (see ``docs/formats.md``): for example
    ``convrot``, ``convrot_groupsize``, ``group_size``, ``linear_dtype``, ``full_precision_matrix_mult``,
    ``activation_scheme``, ``is_rowwise``, ``is_tensorwise_scalar``, ``has_codebook``, ``has_correction``,
    ``has_pre_quant_scale``, ``has_input_scale``.
    ``tensors`` maps a canonical suffix (``"weight"``, ``"weight_scale"``, ...) to the tensor's name in the file, so
    that a dialect's spelling (``scale_weight``, ``weight._data``) is known in one place only.
    """

    name: str
    format: str
    shape: tuple[int, int]
    bytes: int = 0
    declared_by: DeclaredBy = "marker"
    annotations: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    tensors: Mapping[str, str] = field(default_factory=dict)

    def alike(self, name: str, tensors: Mapping[str, str], notes: tuple[str, ...]) -> LayerSpec:
        """Another layer of the same kind, with the same annotations. A check makes thousands: setting frozen fields one
        by one would cost as much as parsing the header.
        """
        twin = object.__new__(LayerSpec)
        fields = twin.__dict__
        fields.update(self.__dict__)
        fields["name"] = name
        fields["tensors"] = tensors
        fields["notes"] = notes
        return twin

    @property
    def N(self) -> int:  # noqa: N802 - the field's own name
        """Output features."""
        return self.shape[0]

    @property
    def K(self) -> int:  # noqa: N802 - the field's own name
        """Input features."""
        return self.shape[1]

    def get(self, key: str, default: Any = None) -> Any:
        """An annotation by name, with or without the reference's leading underscore.

        Derived values carry no underscore here; an underscored key that came from the file is never returned.
        """
        return self.annotations.get(key.lstrip("_"), default)

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "format": self.format,
            "shape": list(self.shape),
            "bytes": self.bytes,
            "declared_by": self.declared_by,
            "annotations": dict(self.annotations),
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong (error), doubtful (warning) or worth knowing (notice)."""

    rule: str
    severity: Severity
    message: str
    fix: str
    layer: str | None = None
    tensor: str | None = None
    expected: str | None = None
    found: str | None = None
    repairable: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {
            "rule": self.rule,
            "severity": self.severity,
            "layer": self.layer,
            "tensor": self.tensor,
            "expected": self.expected,
            "found": self.found,
            "message": self.message,
            "fix": self.fix,
            "repairable": self.repairable,
        }


@dataclass(frozen=True)
class Group:
    """The same fault in many layers, said once."""

    rule: str
    severity: Severity
    count: int
    layers: tuple[str, ...]
    message: str
    fix: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "rule": self.rule,
            "severity": self.severity,
            "count": self.count,
            "layers": list(self.layers),
            "message": self.message,
            "fix": self.fix,
        }


@dataclass(frozen=True)
class Report:
    """The answer of :func:`quant_loader.checkpoint.check`."""

    files: tuple[str, ...]
    rules: Rules
    verdict: Verdict
    summary: str
    formats: Mapping[str, int]
    layers: tuple[LayerSpec, ...]
    faults: tuple[Fault, ...]
    groups: tuple[Group, ...]

    @property
    def errors(self) -> tuple[Fault, ...]:
        return tuple(f for f in self.faults if f.severity == "error")

    def to_dict(self) -> dict[str, Any]:
        """The JSON of the design (``docs/report.schema.json``)."""
        return {
            "schema": SCHEMA,
            "files": list(self.files),
            "rules": self.rules,
            "verdict": self.verdict,
            "summary": self.summary,
            "formats": dict(self.formats),
            "layers": [layer.to_dict() for layer in self.layers],
            "faults": [fault.to_dict() for fault in self.faults],
            "groups": [group.to_dict() for group in self.groups],
        }
