"""Repair of shard sets: every shard mended losslessly, the index consistent, all of it written or nothing."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys

import pytest
from quant_loader.automation.errors import Refused
from quant_loader.automation.repair import repair
from quant_loader.checkpoint import check

INDEX = "model.safetensors.index.json"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.fixture
def shards(kit):
    """Two shards and their index in ``in``: a marker without format in each, narrow scales in the second."""
    contents = [
        {**kit.int8("a", {"convrot": True}), "norm.weight": kit.noise("BF16", 64)},
        kit.int8("b", {"convrot": True}, kit.scale("BF16", 256)),
    ]
    for name, tensors in zip(SHARDS, contents, strict=True):
        kit.file(f"in/{name}", tensors)
    (kit.folder / "out").mkdir()
    write_index(kit, {tensor: name for name, held in zip(SHARDS, contents, strict=True) for tensor in held})
    return contents


def write_index(kit, places, **more):
    text = json.dumps({"metadata": {"total_size": 1, "author": "me"}, "weight_map": places, **more})
    (kit.folder / "in" / INDEX).write_text(text, encoding="utf-8")


def everything(kit):
    """Every file below the test's folder with its content."""
    return {str(p.relative_to(kit.folder)): p.read_bytes() for p in kit.folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("given", [INDEX, *SHARDS])
def test_a_set_is_mended_into_a_folder(kit, shards, command, given):
    ran = command("repair", kit.folder / "in" / given, kit.folder / "out")
    assert ran.code == 0
    assert "4 changes" in ran.out
    assert sorted(path.name for path in (kit.folder / "out").iterdir()) == sorted([INDEX, *SHARDS])
    assert check([kit.folder / "out" / INDEX], rules="strict").formats == {"int8_tensorwise": 2}
    for name, before in zip(SHARDS, shards, strict=True):
        after = kit.read(kit.folder / "out" / name).tensors
        assert after.keys() == before.keys(), "every tensor stays in its shard"
        for tensor in before:
            if not tensor.endswith((".comfy_quant", "b.weight_scale")):
                assert after[tensor] == before[tensor]


def test_an_index_name_names_the_shards(kit, shards, command):
    target = kit.folder / "out" / "mended.safetensors.index.json"
    assert command("repair", kit.folder / "in" / INDEX, target).code == 0
    document = json.loads(target.read_text(encoding="utf-8"))
    found = {n: [f"mended-0000{n}-of-00002.safetensors"] for n in (1, 2)}
    sizes = 0
    for number, (name,) in found.items():
        tensors = kit.read(target.with_name(name)).tensors
        assert {t for t, place in document["weight_map"].items() if place == name} == tensors.keys(), number
        sizes += sum(len(tensor.data) for tensor in tensors.values())
    assert document["metadata"] == {"total_size": sizes, "author": "me"}


def test_an_index_that_lacks_tensors_is_completed(kit, shards, command):
    write_index(kit, {"a.weight": SHARDS[0], "b.weight": SHARDS[1]}, extra="kept")
    ran = command("repair", kit.folder / "in" / INDEX, kit.folder / "out")
    assert ran.code == 0
    assert "index now lists every tensor" in ran.out
    document = json.loads((kit.folder / "out" / INDEX).read_text(encoding="utf-8"))
    assert document["weight_map"].keys() == shards[0].keys() | shards[1].keys()
    assert document["extra"] == "kept"


def test_without_an_index_none_is_made(kit, shards, command):
    (kit.folder / "in" / INDEX).unlink()
    assert command("repair", kit.folder / "in" / SHARDS[1], kit.folder / "out").code == 0
    assert sorted(path.name for path in (kit.folder / "out").iterdir()) == SHARDS


def test_metadata_and_trailing_bytes_of_each_shard(kit, shards, command):
    """A table in each header, names without the prefix, bytes after the end of one shard."""
    prefix = "model.diffusion_model."
    for name, layer, tail in zip(SHARDS, "ab", (b"", b"xyz"), strict=True):
        kit.file(
            f"in/{name}", kit.nvfp4(prefix + layer), kit.metadata({layer: {"format": "nvfp4"}}, own=name), tail=tail
        )
    (kit.folder / "in" / INDEX).unlink()
    ran = command("repair", kit.folder / "in" / SHARDS[0], kit.folder / "out")
    assert ran.code == 0
    assert f"3 bytes after the last tensor of {SHARDS[1]}" in ran.out
    for name in SHARDS:
        meta = kit.read(kit.folder / "out" / name).metadata
        assert meta["own"] == name
        assert json.loads(meta["_quantization_metadata"])["layers"].keys() == {prefix + "a", prefix + "b"}
    assert check([kit.folder / "out" / SHARDS[0]], rules="strict").formats == {"nvfp4": 2}


def test_a_repeated_marker_is_kept_beside_its_weight(kit, shards, command):
    conf = {"format": "int8_tensorwise"}
    kit.file(f"in/{SHARDS[0]}", {**kit.int8("a", {"convrot": True}), "b.comfy_quant": kit.marker(conf)})
    kit.file(f"in/{SHARDS[1]}", kit.int8("b", conf))
    (kit.folder / "in" / INDEX).unlink()
    assert command("repair", kit.folder / "in" / SHARDS[0], kit.folder / "out").code == 0
    assert "b.comfy_quant" not in kit.read(kit.folder / "out" / SHARDS[0]).tensors
    assert "b.comfy_quant" in kit.read(kit.folder / "out" / SHARDS[1]).tensors


# -- refused, and nothing written --------------------------------------------------------------------------------------


def missing_shard(kit, shards):
    (kit.folder / "in" / SHARDS[1]).unlink()


def wrong_place(kit, shards):
    write_index(kit, {"a.weight": SHARDS[1]})


def lost_tensor(kit, shards):
    write_index(kit, {"a.weight": SHARDS[0], "c.weight": SHARDS[1]})


def two_contents(kit, shards):
    kit.file(f"in/{SHARDS[1]}", {**shards[1], "norm.weight": kit.noise("BF16", 64, seed=2)})


def bad_index(kit, shards):
    (kit.folder / "in" / INDEX).write_text("[]", encoding="utf-8")


def leaving_index(kit, shards):
    write_index(kit, {"a.weight": "../elsewhere.safetensors"})


def cut_shard(kit, shards):
    os.truncate(kit.folder / "in" / SHARDS[1], 3000)


def lossy(kit, shards):
    kit.file(f"in/{SHARDS[1]}", kit.int8("b", {"format": "int3_future"}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (missing_shard, f"Missing: {SHARDS[1]}"),
        (wrong_place, f"places tensor a.weight in {SHARDS[1]}, but it is in {SHARDS[0]}"),
        (lost_tensor, "places tensor c.weight"),
        (two_contents, "Tensor norm.weight is in"),
        (bad_index, "has no weight_map"),
        (leaving_index, "outside its folder"),
        (cut_shard, SHARDS[1]),
        (lossy, "int3_future"),
    ],
)
def test_what_cannot_be_mended_is_named(kit, shards, command, damage, words):
    damage(kit, shards)
    before = everything(kit)
    ran = command("repair", kit.folder / "in" / INDEX, kit.folder / "out")
    assert ran.code == 1
    assert words in ran.err + ran.out
    assert everything(kit) == before


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        (f"in/{INDEX}", "out.safetensors", "must be a folder that exists, or a name that ends"),
        (f"in/{INDEX}", "in", "must not be the old one"),
        (f"in/{INDEX}", f"in/{INDEX}", "must not be the old one"),
        (f"in/{INDEX}", "nowhere/x.safetensors.index.json", "no folder"),
        ("in/gone.safetensors.index.json", "out", "was not found"),
        ("in/model-00009-of-00002.safetensors", "out", "no such file"),
        (f"in/{INDEX}", "there", "exists already"),
    ],
)
def test_bad_requests(kit, shards, command, source, target, words):
    (kit.folder / "there").mkdir()
    (kit.folder / "there" / SHARDS[1]).write_bytes(b"mine")
    before = everything(kit)
    ran = command("repair", kit.folder / source, kit.folder / target)
    assert ran.code == 2
    assert words in ran.err
    assert len(ran.err.strip().splitlines()) == 1
    assert everything(kit) == before


def test_a_dry_run_writes_nothing(kit, shards, command):
    before = everything(kit)
    ran = command("repair", "--dry-run", kit.folder / "in" / INDEX, kit.folder / "out")
    assert (ran.code, everything(kit)) == (0, before)
    assert "would be written (4 changes)" in ran.out


# -- disks and interrupts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", range(1, 7))
def test_whatever_rename_fails_the_old_files_come_back(kit, shards, monkeypatch, at, error):
    """Three old files moved away, three new ones moved in: each of the six renames in turn."""
    for name in (INDEX, *SHARDS):
        (kit.folder / "out" / name).write_bytes(b"mine")
    before, rename, calls = everything(kit), os.replace, []

    def fail(old, new):
        calls.append(new)
        if len(calls) == at:
            raise error
        rename(old, new)

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else Refused):
        repair(kit.folder / "in" / INDEX, kit.folder / "out", overwrite=True)
    monkeypatch.undo()
    assert everything(kit) == before


def test_overwrite_replaces_the_set(kit, shards, command):
    for name in (INDEX, *SHARDS):
        (kit.folder / "out" / name).write_bytes(b"old")
    assert command("repair", "--overwrite", kit.folder / "in" / INDEX, kit.folder / "out").code == 0
    assert command("check", kit.folder / "out" / INDEX).code == 0
    assert sorted(path.name for path in (kit.folder / "out").iterdir()) == sorted([INDEX, *SHARDS])


@pytest.mark.skipif(os.name == "nt", reason="POSIX limits")
def test_a_disk_that_fills_up_in_the_second_shard_leaves_nothing(kit, shards):
    """A limit on file sizes: the first shard fits, the second does not."""
    kit.file(f"in/{SHARDS[1]}", {**shards[1], "big.weight": kit.noise("BF16", 512, 256)})
    before = everything(kit)
    size = (kit.folder / "in" / SHARDS[0]).stat().st_size + 4096
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size})); "
    code = limit + "import sys; from quant_loader.cli import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", code, "repair", kit.folder / "in" / INDEX, kit.folder / "out"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "Writing the new file failed" in done.stderr
    assert "Traceback" not in done.stderr
    assert everything(kit) == before


def test_a_full_disk_is_said_for_the_whole_set(kit, shards, monkeypatch):
    """Room for either shard is not enough."""
    before = everything(kit)
    one = max((kit.folder / "in" / name).stat().st_size for name in SHARDS) + 1000
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("usage", (), {"free": one})())
    with pytest.raises(Refused, match="free some space first"):
        repair(kit.folder / "in" / INDEX, kit.folder / "out")
    assert everything(kit) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_in_the_middle_leaves_nothing(kit, shards, command, monkeypatch, number):
    """The signal arrives while the second shard is being written; the first lies complete beside its name."""
    before = everything(kit)
    from quant_loader.automation import repair as module

    write, calls = module.write_pieces, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            signal.raise_signal(number)
        return write(*arguments)

    monkeypatch.setattr(module, "write_pieces", interrupted)
    ran = command("repair", kit.folder / "in" / INDEX, kit.folder / "out")
    assert ran.code == 130
    assert len(calls) == 2
    assert everything(kit) == before


def test_a_shard_that_changes_meanwhile_is_noticed(kit, shards):
    def touch(done, total):
        os.utime(kit.folder / "in" / SHARDS[0], ns=(1, 1))

    with pytest.raises(Refused, match="changed while"):
        repair(kit.folder / "in" / INDEX, kit.folder / "out", progress=touch)
    assert list((kit.folder / "out").iterdir()) == []


def test_progress_is_of_the_whole_set(kit, shards):
    seen = []
    outcome = repair(
        kit.folder / "in" / INDEX, kit.folder / "out", progress=lambda done, total: seen.append((done, total))
    )
    assert {total for _, total in seen} == {outcome.size}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == outcome.size
