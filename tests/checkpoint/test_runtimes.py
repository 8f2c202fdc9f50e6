"""The later stages of the reference runtime, by platform, and the notices made from them."""

from __future__ import annotations

import pytest
from quant_loader.checkpoint import check
from quant_loader.checkpoint.runtimes import Platform, later_stages


@pytest.mark.parametrize("profile", ["seed", "latest"])
def test_platforms(platform_case, profile):
    expect = platform_case["expect"]
    if profile == "latest":
        expect = platform_case.get("expect_latest", expect)
    platform = Platform(platform_case["platform"]["kind"], platform_case["platform"]["cc"])
    outcome = later_stages(platform_case["markers"], platform_case["weight_shapes"], platform, profile)
    assert outcome.resolved == expect["resolved"]
    assert outcome.rule == expect["final"]["rule"]
    stages = [expect[stage] for stage in ("config", "bind") if stage in expect]
    assert outcome.layer == next((stage["layer"] for stage in stages if stage["verdict"] != "accept"), None)


def test_later_stages_of_sound_files_become_notices(sound_case, tools, tmp_path):
    """On every sound one-file case: a notice with the reference's rule exactly where the reference refuses later on."""
    expect = sound_case["expect"]
    report = check(tools.write_case(sound_case, tmp_path), rename=tools.renamer(sound_case))
    words = " ".join(fault.message for fault in report.faults if fault.rule == "extra.runtime")
    if report.verdict == "refused":
        assert all(fault.rule.startswith("extra.") for fault in report.errors)
        assert not words
        return
    rule = expect["final"]["rule"]
    assert (rule in words) if rule else ("0.5.19" not in words)
    latest = sound_case.get("expect_latest", expect)["final"]["rule"]
    if latest is not None and not latest.startswith("marker."):
        assert latest in words


def test_notices_are_never_errors(file, tools):
    tensors = {**tools.layers.int8("a"), **tools.layers.fp8("b")}
    report = check(file(tensors, markers={"a": tools.CONVROT, "b": {"format": "float8_e4m3fn"}}))
    assert report.verdict == "ok"
    (notice,) = [fault for fault in report.faults if fault.rule == "extra.runtime"]
    assert notice.severity == "notice"
    assert "resolve.unsupported" in notice.message
