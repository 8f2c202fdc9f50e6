"""The report: its JSON against the published schema, its groups, its words."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from quant_loader.checkpoint import Report, check, verdict_text

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "report.schema.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def validate(report: Report) -> None:
    document = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    VALIDATOR.validate(document)
    assert (report.verdict == "refused") == any(fault.severity == "error" for fault in report.faults)
    assert sum(group.count for group in report.groups) >= len(report.faults)


def test_the_schema_is_a_schema():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_every_case_gives_a_valid_and_readable_report(conformance_case, tools, tmp_path):
    paths, rename = tools.write_case(conformance_case, tmp_path), tools.renamer(conformance_case)
    for rules in ("strict", "compatible"):
        report = check(paths, rules=rules, rename=rename)
        validate(report)
        for max_lines in (4, 6, 12):
            fits(report, max_lines)


def fits(report: Report, max_lines: int) -> None:
    lines = verdict_text(report, max_lines=max_lines).split("\n")
    assert 1 <= len(lines) <= max_lines
    assert all(len(line) <= 100 and line.isprintable() for line in lines)
    assert lines[0].split(":")[0] in ("OK", "Refused", "Not quantised")
    if report.verdict == "refused":
        assert any(line.startswith("Fix: ") for line in lines)


def test_an_invalid_report_is_noticed():
    report = check("nothing.safetensors").to_dict()
    del report["summary"]
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate(report)


def test_the_same_fault_in_many_layers_is_one_group(file):
    report = check(file({f"blocks.{i:03d}.x.weight": ("I8", [4, 4]) for i in range(200)}))
    (group,) = report.groups
    assert group.count == len(report.faults) == 200
    assert group.layers == ("blocks.000.x", "blocks.001.x", "blocks.002.x")
    assert report.summary == "Refused: 200 faults in 200 of 200 layers (layers without a declaration)"


def test_every_fault_of_a_layer_is_reported(file, tools):
    marker = {"format": "convrot_w4a4", "convrot_groupsize": 128, "linear_dtype": "fp8"}
    report = check(file(tools.layers.w4a4(weight_scale=("F16", [8, 1])), markers={"a": marker}))
    assert {fault.rule for fault in report.errors} == {
        "w4a4.dtype",
        "w4a4.shapes",
        "w4a4.groupsize",
        "extra.w4a4.linear_dtype",
    }


def test_faults_are_ordered_by_severity(file, tools):
    tensors = {**tools.layers.fp8("a", weight_scale=("BF16", [])), "b.weight": ("I8", [4, 4])}
    report = check(file(tensors, markers={"a": {"format": "float8_e4m3fn"}}))
    assert [fault.severity for fault in report.faults] == ["error", "warning"]


def test_known_messages_keep_their_first_sentence(file, tools):
    """The five messages that people search for."""
    i8 = {"format": "int8_tensorwise"}
    cases = (
        (
            tools.layers.int8(weight=("I8", [8, 4, 3, 3]), weight_scale=("F32", [])),
            i8,
            "Comfy tensorwise INT8 layer a needs a 2D weight, got (8, 4, 3, 3)",
        ),
        (
            tools.layers.int8(weight=("BF16", [8, 64])),
            i8,
            "Comfy INT8 layer a needs I8 weights and F32 scales, got BF16 and F32",
        ),
        (
            tools.layers.nvfp4(weight=("U8", [128, 4, 3, 3])),
            {"format": "nvfp4"},
            "Comfy NVFP4 layer a needs a 2D packed weight, got (128, 4, 3, 3)",
        ),
        (
            tools.layers.w4a4(weight_scale=("F32", [8, 1])),
            {"format": "convrot_w4a4"},
            "Comfy W4A4 layer a has incompatible weight/scale shapes: (8, 128) and (8, 1)",
        ),
    )
    for tensors, marker, start in cases:
        assert check(file(tensors, markers={"a": marker})).errors[0].message.startswith(start)
    declared = tools.quanto_metadata({"a": {"weights": "qint8", "activations": "none"}})
    report = check(file(tools.layers.quanto(**{"weight._data": ("I8", [8, 2, 8])}), metadata=declared))
    assert report.errors[0].message.startswith("Quanto layer a needs a 2D I8 weight, got I8 (8, 2, 8)")


def test_verdict_text_names_the_layer_and_the_fix(file, tools):
    text = verdict_text(check(file(tools.layers.int8("blocks.7.mlp"), markers={"blocks.7.mlp": b""})))
    assert text.splitlines()[0] == "Refused: 1 fault in 1 of 1 layer (markers unreadable)"
    assert "blocks.7.mlp" in text
    assert text.splitlines()[-1].startswith("Fix: ")


def test_verdict_text_shows_warnings_of_a_sound_file(file, tools):
    text = verdict_text(
        check(file(tools.layers.fp8(weight_scale=("BF16", [])), markers={"a": {"format": "float8_e4m3fn"}}))
    )
    assert text.splitlines()[0].startswith("OK: 1 quantised layer")
    assert "BF16" in text


def test_spoofed_annotations_never_win(file, tools):
    marker = {"format": "int8_tensorwise", "_is_tensorwise_scalar": True, "_is_rowwise": False, "convrot_groupsize": 16}
    (layer,) = check(file(tools.layers.int8(), markers={"a": marker})).layers
    assert layer.get("is_rowwise") is True
    assert layer.get("_is_rowwise") is True
    assert layer.get("is_tensorwise_scalar") is None
    assert layer.annotations["convrot"] is False
