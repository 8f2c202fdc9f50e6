"""A repeated check answers from memory, and only while every file is as it was."""

from __future__ import annotations

import os

from quant_loader.checkpoint import cache, check

MARKER = {"a": {"format": "int8_tensorwise"}}


def test_the_same_file_is_read_once(file, tools, monkeypatch):
    path = file(tools.layers.int8(), markers=MARKER)
    first = check(path)
    monkeypatch.setattr("quant_loader.checkpoint.checker.load", None)  # would fail if called
    assert check(path) is first


def test_rules_and_renames_are_told_apart(file, tools):
    path = file(tools.layers.int8(weight_scale=("F32", [8])), markers=MARKER)
    assert check(path).verdict == "refused"
    assert check(path, rules="compatible").verdict == "ok"
    assert check(path, rules="compatible", rename={"a": "b"}).layers[0].name == "b"
    assert check(path, rules="compatible").layers[0].name == "a"


def test_a_changed_file_is_read_again(file, tools):
    path = file(tools.layers.int8(), markers=MARKER)
    assert check(path).verdict == "ok"
    file(tools.layers.int8(weight_scale=("F32", [8, 1], bytes(32))), markers=MARKER)
    os.utime(path, ns=(1, 1))
    assert check(path).verdict == "refused"


def test_a_changed_shard_is_noticed(tmp_path, tools):
    parts = tools.layers.int8()
    first = tools.write(tmp_path / "m-00001-of-00002.safetensors", {"a.weight": parts["a.weight"]}, markers=MARKER)
    second = tools.write(tmp_path / "m-00002-of-00002.safetensors", {"a.weight_scale": parts["a.weight_scale"]})
    assert check(first).verdict == "ok"
    tools.write(tmp_path / "m-00002-of-00002.safetensors", {})
    assert check(first).verdict == "refused"
    os.remove(second)
    assert check(first).verdict == "refused"
    tools.write(tmp_path / "m-00002-of-00002.safetensors", {"a.weight_scale": parts["a.weight_scale"]})
    assert check(first).verdict == "ok"


def test_a_file_that_appears_is_found(tmp_path, tools):
    path = tmp_path / "late.safetensors"
    assert check(path).verdict == "refused"
    tools.write(path, {})
    assert check(path).verdict == "unquantized"


def test_only_so_many_reports_are_kept(tmp_path, tools):
    for number in range(cache.CAPACITY + 5):
        check(tools.write(tmp_path / f"{number}.safetensors", {}))
    assert len(cache._entries) == cache.CAPACITY


def test_an_unhashable_rename_is_simply_not_remembered(file, tools):
    class Rename:
        __hash__ = None

        def __call__(self, name):
            return name

    path = file(tools.layers.int8(), markers=MARKER)
    assert check(path, rename=Rename()).verdict == "ok"
    assert len(cache._entries) == 0
