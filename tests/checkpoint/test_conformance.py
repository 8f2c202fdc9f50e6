"""Agreement with the reference inspector on every stored case (data/cases.jsonl.gz: 1,236 small checkpoints and its
answers).
"""

from __future__ import annotations

from quant_loader.checkpoint import check

LAYOUT_RULES = {"extra.nvfp4.scale_layout", "extra.mxfp8.scale_layout"}


def test_agrees_with_the_reference(conformance_case, tools, tmp_path):
    expect = conformance_case["expect"]
    rename = tools.renamer(conformance_case)
    report = check(tools.write_case(conformance_case, tmp_path), rename=rename)
    rules = {fault.rule for fault in report.errors}
    if expect["verdict"] == "accept":
        assert not {rule for rule in rules if not rule.startswith("extra.")}
        if "baseline" in conformance_case["tags"]:
            assert rules <= LAYOUT_RULES
        layers = {layer.name: layer for layer in report.layers}
        for name, annotations in (expect.get("annotations") or {}).items():
            for key, value in annotations.items() if name in layers else ():
                known = layers[name].annotations
                assert known.get(key.lstrip("_"), known.get(key)) == value, (name, key)
        for name, format_name in (expect.get("formats") or {}).items():
            if name in layers:
                assert layers[name].format == format_name
        return
    assert report.verdict == "refused"
    hits = {fault.layer for fault in report.errors if fault.rule == expect["rule"]}
    assert hits, rules
    wanted = {expect["layer"], *(expect.get("layer_any_of") or ())} - {None}
    if wanted:
        lookup = rename if callable(rename) else (rename or {}).get
        assert wanted & (
            hits | {lookup(name) if callable(rename) else lookup(name, name) for name in hits if name is not None}
        )
    if expect["rule"] == "marker.missing":
        assert set(expect.get("layers") or ()) <= hits
