"""The quick reading of usual headers: it takes the forms that writers use, and never says more than the JSON parser."""

from __future__ import annotations

import json
import math

import pytest
from quant_loader.checkpoint import header as header_module
from quant_loader.checkpoint.header import Header, HeaderError, Stamp

BITS = {"F4": 4, "I8": 8, "U8": 8, "BF16": 16, "F32": 32}
TENSORS = {
    "blocks.0.attn.weight": ("I8", [4, 8]),
    "blocks.0.attn.weight_scale": ("F32", [4, 1]),
    "blocks.0.attn.comfy_quant": ("U8", [29]),
    "nichts": ("BF16", [0, 3]),
    "eins": ("F32", []),
    "halves": ("F4", [2, 3]),
}


class Source:
    """What a header is read from: its text, and the size that the file would have."""

    def __init__(self, text: bytes, area: int) -> None:
        self.path = "model.safetensors"
        self.text = text
        self.stamp = Stamp(8 + len(text) + area, 0, 0)

    def scanned(self) -> Header | None:
        return header_module._scanned(self, self.text, 8 + len(self.text))

    def parsed(self) -> Header | None:
        try:
            return header_module._parsed(self, self.text, 8 + len(self.text))
        except HeaderError:
            return None


def entries(tensors=TENSORS, at=0):
    document = {}
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * BITS[dtype] // 8
        document[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    return document, at


def source(document, area, **how):
    return Source(json.dumps(document, ensure_ascii=False, **how).encode(), area)


COMPACT, SPACED = (",", ":"), (", ", ": ")


@pytest.mark.parametrize("separators", [COMPACT, SPACED])
@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}, {"a": '{"layers": "ü"}', "é": "\\ \n \u0000"}])
@pytest.mark.parametrize("padding", ["", "   "])
def test_the_forms_that_writers_use_are_scanned(separators, metadata, padding):
    document, area = entries()
    text = json.dumps(document if metadata is None else {"__metadata__": metadata, **document}, separators=separators)
    made = Source((text + padding).encode(), area)
    scanned = made.scanned()
    assert scanned is not None
    assert scanned == made.parsed()
    assert list(scanned.tensors) == list(TENSORS)
    assert scanned.metadata == (metadata or {})


def test_tensors_out_of_file_order_are_scanned():
    document, area = entries()
    made = source(dict(sorted(document.items())), area, separators=COMPACT)
    assert list(made.scanned().tensors) == sorted(TENSORS)
    assert made.scanned() == made.parsed()


def test_names_beyond_ascii_are_scanned():
    document, area = entries({"größe.weight": ("I8", [3]), "重み.weight": ("I8", [2, 2])})
    made = source(document, area, separators=COMPACT)
    assert made.scanned().tensors.keys() == document.keys()
    assert made.scanned() == made.parsed()


SOUND_BUT_UNUSUAL = {
    "indented": lambda d: json.dumps(d, indent=1),
    "escaped names": lambda d: json.dumps({f"{name}\\u00e9": entry for name, entry in d.items()}).replace(
        "\\\\u", "\\u"
    ),
    "keys in another order": lambda d: json.dumps({name: dict(reversed(e.items())) for name, e in d.items()}),
    "another key": lambda d: json.dumps({name: {**entry, "x": 1} for name, entry in d.items()}),
    "metadata at the end": lambda d: json.dumps({**d, "__metadata__": {}}),
    "mixed spaces": lambda d: json.dumps(d).replace(", ", ",", 1),
}


@pytest.mark.parametrize("form", SOUND_BUT_UNUSUAL)
def test_other_sound_forms_are_parsed(form):
    document, area = entries()
    made = Source(SOUND_BUT_UNUSUAL[form](document).encode(), area)
    assert made.scanned() is None
    assert len(made.parsed().tensors) == len(TENSORS)


def entry(name="a", dtype="U8", shape="[4]", offsets="[0,4]"):
    return f'"{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}'


UNSOUND = {
    "nothing": ("", 0),
    "no tensors": ("{}", 0),
    "a tensor twice": ("{" + entry() + "," + entry(offsets="[4,8]") + "}", 8),
    "metadata as a tensor": ("{" + entry("__metadata__") + "}", 4),
    "metadata twice": ('{"__metadata__":{},' + entry("__metadata__") + "}", 4),
    "metadata of numbers": ('{"__metadata__":{"a":1},' + entry() + "}", 4),
    "a leading zero": ("{" + entry(offsets="[00,4]") + "}", 4),
    "a leading zero in the shape": ("{" + entry(shape="[04]") + "}", 4),
    "a sign": ("{" + entry(offsets="[+0,4]") + "}", 4),
    "a fraction": ("{" + entry(offsets="[0,4.0]") + "}", 4),
    "an exponent": ("{" + entry(offsets="[0,4e0]") + "}", 4),
    "three offsets": ("{" + entry(offsets="[0,4,4]") + "}", 4),
    "one offset": ("{" + entry(offsets="[4]") + "}", 4),
    "empty offsets": ("{" + entry(offsets="[,4]") + "}", 4),
    "digits of another script": ("{" + entry(offsets="[0,٤]") + "}", 4),
    "an unknown dtype": ("{" + entry(dtype="Q8") + "}", 4),
    "half a byte": ("{" + entry(dtype="F4", shape="[7]") + "}", 4),
    "a gap": ("{" + entry() + "," + entry("b", offsets="[5,9]") + "}", 9),
    "an overlap": ("{" + entry() + "," + entry("b", offsets="[3,7]") + "}", 7),
    "a late beginning": ("{" + entry(offsets="[1,5]") + "}", 5),
    "bytes after the end": ("{" + entry() + "}", 5),
    "a cut file": ("{" + entry() + "}", 3),
    "sizes that overflow": ("{" + entry(shape=f"[{1 << 40},{1 << 40},0]", offsets="[0,0]") + "}", 0),
    "offsets beyond 64 bits": ("{" + entry(offsets=f"[{1 << 64},{(1 << 64) + 4}]") + "}", 4),
    "too many dimensions": ("{" + entry(shape="[" + ",".join("1" * 33) + "]", offsets="[0,1]") + "}", 1),
    "a quote in a name": ("{" + entry('a"b') + "}", 4),
    "a control character": ("{" + entry("a\tb") + "}", 4),
    "text after the end": ("{" + entry() + "}x", 4),
    "a comma at the end": ("{" + entry() + ",}", 4),
    "no bracket": (entry(), 4),
}


@pytest.mark.parametrize("what", UNSOUND)
def test_unsound_headers_are_left_to_the_parser(what):
    text, area = UNSOUND[what]
    made = Source(text.encode(), area)
    assert made.scanned() is None
    try:
        parsed = header_module._parsed(made, made.text, 8 + len(made.text))
    except HeaderError:
        return
    assert parsed.duplicates or not parsed.tensors


def test_text_that_is_not_utf_8_is_left_to_the_parser():
    made = Source(("{" + entry("ä") + "}").encode("latin-1"), 4)
    assert made.scanned() is None
    assert made.parsed() is None


@pytest.mark.parametrize("separators", [COMPACT, SPACED])
def test_every_change_of_one_byte_means_the_same_to_both(separators):
    document, area = entries({"a.w": ("I8", [10, 2]), "b": ("U8", [3])})
    text = json.dumps({"__metadata__": {"k": "v"}, **document}, separators=separators).encode()
    letters = b'"\\{}[]:, 0129-aI\n\0\xc3'
    kept = 0
    for at in range(len(text) + 1):
        changes = [text[:at] + text[at + 1 :]]
        changes += [text[:at] + bytes([byte]) + text[at + 1 :] for byte in letters]
        changes += [text[:at] + bytes([byte]) + text[at:] for byte in letters]
        for changed in changes:
            made = Source(changed, area)
            scanned = made.scanned()
            if scanned is not None:
                assert scanned == made.parsed(), changed
                kept += 1
    assert kept > len(letters)  # changes of a name or of the metadata leave a usual header
