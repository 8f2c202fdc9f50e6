"""Write docs/rules.md from the catalogue of the check: ``python docs/make_rules.py``."""

from __future__ import annotations

from pathlib import Path

from quant_loader.checkpoint import RULES, Rule

TARGET = Path(__file__).with_name("rules.md")
SECTIONS = (
    ("Files and shards", ("crash.file", "extra.file.", "extra.shards.")),
    ("Formats of other tools", ("extra.foreign.",)),
    (
        "Declarations",
        ("meta.", "crash.meta.", "extra.meta.", "marker.", "crash.marker.", "extra.marker.", "extra.format."),
    ),
    (
        "Settings and tensors of a layer",
        (
            "extra.params.",
            "extra.value.",
            "extra.flag.",
            "extra.convrot.",
            "layer.",
        ),
    ),
    ("", ("extra.layer.", "map.", "extra.shape.", "extra.bias.", "extra.scale.")),
    ("INT8 (int8_tensorwise)", ("int8.", "extra.int8.")),
    ("W4A4 (convrot_w4a4)", ("w4a4.", "crash.w4a4.", "extra.w4a4.")),
    ("W4A8 (asym_w4a8_int8)", ("w4a8.", "crash.w4a8.", "extra.w4a8.")),
    ("NVFP4 (nvfp4)", ("nvfp4.", "extra.nvfp4.")),
    ("FP8 (float8_e4m3fn, float8_e5m2)", ("extra.fp8.",)),
    ("MXFP8 (mxfp8)", ("mxfp8.", "extra.mxfp8.")),
    ("Quanto INT8", ("quanto.", "crash.quanto.", "extra.quanto.")),
    ("The deep check", ("extra.deep.",)),
    ("Notices", ("extra.dialect", "extra.storage.", "extra.runtime", "extra.rules.")),
)
INTRODUCTION = """# The rules of the check

This page is written by `docs/make_rules.py` from the catalogue in `checkpoint/catalogue.py`.

Ids without a prefix are those of the reference rule set. `crash.` rules are inputs on which the
reference crashes. `extra.` rules are our own, always towards safety: no sound file is refused by one.
An **error** refuses the file, a **warning** says that something is doubtful, a **notice** that
something is worth knowing. Words in braces stand for what was found in the file. *lossless* means that
`quant-loader repair` can mend the usual case without changing a value.
"""


def entry(rule: Rule) -> str:
    """One rule as a list item."""
    lossless = ", lossless" if rule.repairable else ""
    lines = [f"**`{rule.id}`** ({rule.severity}{lossless}): {rule.title}.", ""]
    lines.append(f"> {rule.message.replace('{{', '{').replace('}}', '}')}")
    lines.append("")
    fix = " ".join(rule.fix.replace("{remedy}", " *(depends on what was found)*").split())
    lines.append(f"What to do: {fix}")
    if rule.why:
        lines.extend(["", rule.why])
    return "\n".join(lines) + "\n"


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    left = dict(RULES)
    for title, prefixes in SECTIONS:
        if title:
            parts.append(f"## {title}\n")
        parts.extend(entry(left.pop(id_)) for id_ in list(left) if id_.startswith(prefixes))
    if left:
        raise SystemExit(f"no section for {', '.join(left)}")
    return "\n".join(parts)


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
