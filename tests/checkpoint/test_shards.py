"""Several files as one checkpoint: shard names, index files, whole sets and broken ones."""

from __future__ import annotations

import json
import os
import time

import pytest
from quant_loader.checkpoint import HeaderError, check, open_checkpoint

MARKER = {"format": "int8_tensorwise"}


@pytest.fixture
def pair(tmp_path, tools):
    """A layer whose weight and scale lie in two shards."""
    parts = tools.layers.int8()
    first = tools.write(
        tmp_path / "m-00001-of-00002.safetensors", {"a.weight": parts["a.weight"]}, markers={"a": MARKER}
    )
    second = tools.write(tmp_path / "m-00002-of-00002.safetensors", {"a.weight_scale": parts["a.weight_scale"]})
    return first, second


def write_index(folder, placed):
    path = folder / "m.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": placed}))
    return path


def rules(report):
    return {fault.rule for fault in report.errors}


def test_any_shard_stands_for_the_set(pair):
    for path in pair:
        report = check(path)
        assert report.verdict == "ok"
        assert set(report.files) == set(pair)
    assert check(list(pair)).formats == {"int8_tensorwise": 1}


def test_an_index_stands_for_its_shards(pair, tmp_path):
    names = {"a.weight": 1, "a.comfy_quant": 1, "a.weight_scale": 2}
    index = write_index(tmp_path, {name: f"m-0000{shard}-of-00002.safetensors" for name, shard in names.items()})
    report = check(index)
    assert report.verdict == "ok"
    assert report.files == pair


def test_a_missing_shard_is_named(pair):
    first, second = pair
    assert check(first).verdict == "ok"
    os.remove(second)
    (fault,) = check(first).faults
    assert (fault.rule, fault.found, fault.expected) == (
        "extra.shards.missing",
        "m-00002-of-00002.safetensors",
        "2 files",
    )


def test_the_shard_that_was_given_may_be_the_missing_one(pair):
    first, second = pair
    os.remove(second)
    report = check(second)
    assert [(fault.rule, fault.found) for fault in report.faults] == [
        ("extra.shards.missing", "m-00002-of-00002.safetensors")
    ]
    assert report.files == (first,)


@pytest.mark.parametrize("spoil", [os.remove, lambda path: os.truncate(path, 40)], ids=["gone", "cut short"])
def test_what_may_lie_in_another_shard_is_not_called_missing(tmp_path, tools, spoil):
    """A missing or damaged shard is one fault, not one for every layer, scale and declaration that it may hold; what
    the other shards prove wrong is still said.
    """
    tensors = {**tools.layers.int8("no_scale", weight_scale=None), **tools.layers.fp8("no_marker")}
    tensors |= {"no_weight.weight_scale": ("F32", [8, 1]), "no_weight.input_scale": ("F32", [])}
    tensors |= tools.layers.int8("wrong", weight_scale=("F32", [7, 1]))
    first = tools.write(
        tmp_path / "m-00001-of-00002.safetensors", tensors, markers={"no_scale": MARKER, "wrong": MARKER}
    )
    second = tools.write(tmp_path / "m-00002-of-00002.safetensors", {})
    told = {"layer.missing_tensors", "marker.missing", "extra.scale.orphan", "int8.rowwise.shapes"}
    assert rules(check(first)) == told
    spoil(second)
    assert sorted(fault.rule for fault in check(first).faults) == sorted(
        ["int8.rowwise.shapes", "crash.file" if os.path.exists(second) else "extra.shards.missing"]
    )


def test_half_an_mxfp8_model_is_one_fault(tmp_path, tools):
    path = tools.write(
        tmp_path / "m-00001-of-00002.safetensors", tools.layers.mxfp8(weight_scale=None), {"quant_format": "mxfp8"}
    )
    assert [fault.rule for fault in check(path).faults] == ["extra.shards.missing"]


@pytest.mark.parametrize("present", ["m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors"])
def test_half_a_quanto_model_is_one_fault(tmp_path, tools, present):
    entries = {"a": {"weights": "qint8", "activations": "none"}}
    tools.write(
        tmp_path / "m-00001-of-00002.safetensors",
        tools.layers.quanto(**{"weight._scale": None}),
        tools.quanto_metadata(entries),
    )
    tools.write(tmp_path / "m-00002-of-00002.safetensors", {"a.weight._scale": ("BF16", [8, 1])})
    for name in {"m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors"} - {present}:
        os.remove(tmp_path / name)
    assert [fault.rule for fault in check(tmp_path / present).faults] == ["extra.shards.missing"]


def test_a_shard_of_a_set_that_is_not_there_is_a_missing_file(tmp_path):
    for name in ("m-00002-of-00003.safetensors", "m-00009-of-00003.safetensors", "m-00001-of-99999.safetensors"):
        assert [fault.rule for fault in check(tmp_path / name).faults] == ["extra.file.not_found"]


def test_a_missing_shard_of_an_index_is_named(pair, tmp_path):
    index = write_index(
        tmp_path, {"a.weight": "m-00001-of-00002.safetensors", "a.weight_scale": "elsewhere.safetensors"}
    )
    (fault,) = check(index).faults
    assert (fault.rule, fault.found, fault.expected) == ("extra.shards.missing", "elsewhere.safetensors", "2 files")
    os.remove(pair[0])
    os.remove(pair[1])
    (fault,) = check(index).faults
    assert fault.found == "elsewhere.safetensors and m-00001-of-00002.safetensors"


def test_an_index_that_names_a_set_in_every_line_is_read_in_bounded_time(tmp_path):
    """Two thousand sets of two thousand files would be four million look-ups."""
    index = write_index(tmp_path, {f"t{i}": f"s{i}-00001-of-02000.safetensors" for i in range(2000)})
    started = time.process_time()
    assert rules(check(index)) == {"extra.shards.missing"}
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "/etc/passwd", "", "..", "a/b.safetensors", "a\\b.safetensors", 3, "a\0b"]
)
def test_an_index_never_leaves_its_folder(tmp_path, shard):
    report = check(write_index(tmp_path, {"a.weight": shard}))
    assert rules(report) == {"extra.shards.index"}


@pytest.mark.parametrize("text", ["", "[]", "{", '{"weight_map": []}', '{"weight_map": {}}', "[" * 100_000])
def test_unusable_indices(tmp_path, text):
    path = tmp_path / "m.safetensors.index.json"
    path.write_text(text)
    assert rules(check(path)) == {"extra.shards.index"}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"weight_map": {"a.weight": 3}}', "it names no file for a.weight, but 3"),
        ('{"weight_map": {"a.weight": null}}', "it names no file for a.weight, but null"),
        ('{"weight_map": {"a.weight": "m.safetensors.index.json"}}', "it names itself as the file of a.weight"),
        (
            '{"weight_map": {"a.weight": "x.safetensors", "a.weight": "y.safetensors"}}',
            "it says two things of a.weight",
        ),
        ('{"weight_map": {}, "weight_map": {"a.weight": "x.safetensors"}}', "it says two things of weight_map"),
        ('{"weight_map": {"a.weight": ' + "9" * 5000 + "}}", "it is not JSON"),
    ],
)
def test_an_index_that_is_wrong_inside_says_where(tmp_path, text, found):
    path = tmp_path / "m.safetensors.index.json"
    path.write_text(text)
    (fault,) = check(path).faults
    assert (fault.rule, fault.found) == ("extra.shards.index", found)


def test_a_number_in_other_digits_makes_no_shard(tmp_path, tools):
    """Full-width digits are digits to a regular expression, but no tool writes them."""
    path = tools.write(tmp_path / "m-\uff10\uff10\uff10\uff10\uff11-of-00002.safetensors", {})
    assert check(path).verdict == "unquantized"


def test_one_tensor_in_two_shards(tmp_path, tools):
    for shard, scale in ((1, 0.5), (2, 0.25)):
        part = ("F32", [], tools.number("F32", scale))
        tools.write(
            tmp_path / f"m-0000{shard}-of-00002.safetensors",
            tools.layers.fp8(weight_scale=part),
            markers={"a": {"format": "float8_e4m3fn"}},
        )
    report = check(tmp_path / "m-00001-of-00002.safetensors")
    doubled = {fault.tensor for fault in report.errors if fault.rule == "extra.shards.duplicate_tensor"}
    assert doubled == {"a.weight", "a.weight_scale"}
    assert "m-00001-of-00002.safetensors and m-00002-of-00002.safetensors" in report.errors[0].message


def test_a_shard_number_out_of_range(tmp_path, tools):
    path = tools.write(tmp_path / "m-00003-of-00002.safetensors", {})
    assert rules(check(path)) == {"extra.shards.missing"}


def test_files_that_belong_together_by_hand(tmp_path, tools):
    parts = tools.layers.int8()
    first = tools.write(tmp_path / "one.safetensors", {"a.weight": parts["a.weight"]}, markers={"a": MARKER})
    second = tools.write(tmp_path / "two.safetensors", {"a.weight_scale": parts["a.weight_scale"]})
    assert check([first, second]).verdict == "ok"
    assert rules(check(first)) == {"layer.missing_tensors"}


def test_open_checkpoint_says_where_every_tensor_is(pair):
    checkpoint = open_checkpoint(pair[0])
    assert checkpoint.tensors["a.weight"].path == pair[0]
    assert checkpoint.tensors["a.weight_scale"].path == pair[1]
    tensor = checkpoint.tensors["a.weight_scale"]
    with open(tensor.path, "rb") as opened:
        opened.seek(tensor.start)
        assert opened.read(tensor.nbytes) == b"\0\0\x80\x3f" * 8
    with pytest.raises(HeaderError, match="not found"):
        open_checkpoint("nothing.safetensors")


def test_whole_checkpoints_are_checked_in_all_their_parts(tmp_path, tools):
    """Model, text encoder and VAE in one file: the same rules under every prefix."""
    prefixes = [
        "model.diffusion_model.blocks.0.x",
        "text_encoders.qwen.layers.0.mlp",
        "first_stage_model.decoder.mid.attn",
    ]
    tensors = {key: value for prefix in prefixes for key, value in tools.layers.int8(prefix).items()}
    path = tools.write(tmp_path / "all.safetensors", tensors, markers=dict.fromkeys(prefixes, MARKER))
    report = check(path)
    assert {layer.name for layer in report.layers} == set(prefixes)
    stripped = check(path, rename=lambda name: name.removeprefix("model.diffusion_model."))
    assert "blocks.0.x" in {layer.name for layer in stripped.layers}
