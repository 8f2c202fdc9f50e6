"""Repair when things go wrong: bad requests, full disks, interrupts, hostile files. Nothing half-made stays."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time

import pytest
from quant_loader.automation.declare import parse_declaration
from quant_loader.automation.errors import Refused, RequestError
from quant_loader.automation.repair import repair
from quant_loader.automation.writing import check_target

LAYER = "blocks.0.attn.qkv_proj"
posix = pytest.mark.skipif(os.name == "nt", reason="POSIX signals and limits")


@pytest.fixture
def broken(kit):
    """A file that a repair can mend."""
    return kit.file("in.safetensors", kit.int8(LAYER, {"convrot": True}))


def names(kit):
    return sorted(path.name for path in kit.folder.iterdir())


# -- the command and its exit codes ----------------------------------------------------------------------------------


def test_written(kit, broken, command):
    ran = command("repair", broken, kit.folder / "out.safetensors")
    assert ran.code == 0
    assert LAYER in ran.out
    assert "1 change" in ran.out
    assert command("check", kit.folder / "out.safetensors").code == 0


def test_dry_run_says_the_same_and_writes_nothing(kit, broken, command):
    dry = command("repair", "--dry-run", broken, kit.folder / "out.safetensors")
    assert dry.code == 0
    assert "would be written (1 change)" in dry.out
    assert names(kit) == ["in.safetensors"]
    wet = command("repair", broken, kit.folder / "out.safetensors")
    assert dry.out.splitlines()[:-1] == wet.out.splitlines()[:-1]


def test_refused(kit, command):
    source = kit.file("in.safetensors", kit.int8(LAYER, {"format": "int3_future"}))
    for options in ([], ["--dry-run"]):
        ran = command("repair", *options, source, kit.folder / "out.safetensors")
        assert ran.code == 1
        assert "int3_future" in ran.out
        assert "nothing was written" in ran.err
    assert names(kit) == ["in.safetensors"]


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        ("missing.safetensors", "out.safetensors", "no such file"),
        (".", "out.safetensors", "folder"),
        ("in.safetensors", "in.safetensors", "must not be the old one"),
        ("in.safetensors", ".", "is a folder"),
        ("in.safetensors", "nowhere/out.safetensors", "no folder"),
        ("in.safetensors", "out.bin", "must end in .safetensors"),
        ("in.safetensors", "there.safetensors", "exists already"),
        ("in.safetensors", "in.safetensors/out.safetensors", "no folder"),
        ("in\0.safetensors", "out.safetensors", ""),
    ],
)
def test_bad_requests(kit, broken, command, source, target, words):
    (kit.folder / "there.safetensors").write_bytes(b"mine")
    ran = command("repair", f"{kit.folder}/{source}", f"{kit.folder}/{target}")
    assert ran.code == 2
    assert words in ran.err
    assert len(ran.err.strip().splitlines()) == 1
    assert names(kit) == ["in.safetensors", "there.safetensors"]
    assert (kit.folder / "there.safetensors").read_bytes() == b"mine"


def test_overwrite_is_asked_for(kit, broken, command):
    target = kit.folder / "out.safetensors"
    target.write_bytes(b"old")
    assert command("repair", "--overwrite", broken, target).code == 0
    assert command("check", target).code == 0


def test_overwrite_never_reaches_the_source_through_a_link(kit, broken):
    before = broken.read_bytes()
    link = kit.folder / "link.safetensors"
    os.link(broken, link)
    with pytest.raises(RequestError, match="must not be the old one"):
        check_target(link, [broken], overwrite=True)
    assert broken.read_bytes() == before


def test_source_is_untouched(kit, broken, command):
    before, stat = broken.read_bytes(), broken.stat()
    command("repair", broken, kit.folder / "out.safetensors")
    assert broken.read_bytes() == before
    assert broken.stat().st_mtime_ns == stat.st_mtime_ns


# -- disks and interrupts --------------------------------------------------------------------------------------------


@posix
def test_failing_disk_leaves_nothing(kit, broken):
    """A limit on the size of written files makes the operating system refuse the write half-way."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (40000, 40000)); "
    code = limit + "import sys; from quant_loader.cli import main; sys.exit(main(sys.argv[1:]))"
    out = kit.folder / "out.safetensors"
    done = subprocess.run(
        [sys.executable, "-c", code, "repair", broken, out], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "Writing the new file failed" in done.stderr
    assert "Traceback" not in done.stderr
    assert names(kit) == ["in.safetensors"]


def test_full_disk_is_said_before_writing(kit, broken, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("usage", (), {"free": 1000})())
    with pytest.raises(Refused, match="free some space first"):
        repair(broken, kit.folder / "out.safetensors")
    assert names(kit) == ["in.safetensors"]


@pytest.mark.parametrize("call", ["os.fsync", "os.replace"])
def test_disk_that_fails_at_the_end_leaves_nothing(kit, broken, monkeypatch, call):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(call, fail)
    with pytest.raises(Refused, match="Input/output error"):
        repair(broken, kit.folder / "out.safetensors")
    monkeypatch.undo()
    assert names(kit) == ["in.safetensors"]


def test_source_that_changes_meanwhile_is_noticed(kit, broken):
    def touch(done, total):
        os.utime(broken, ns=(1, 1))

    with pytest.raises(Refused, match="changed while"):
        repair(broken, kit.folder / "out.safetensors", progress=touch)
    assert names(kit) == ["in.safetensors"]


def test_source_that_shrinks_meanwhile_is_noticed(kit):
    source = kit.file("in.safetensors", kit.int8(LAYER, {"convrot": True}))

    def cut(done, total):
        os.truncate(source, 100)

    with pytest.raises(Refused, match="nothing was kept"):
        repair(source, kit.folder / "out.safetensors", progress=cut)
    assert names(kit) == ["in.safetensors"]


@posix
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_leaves_nothing(kit, number):
    weight = 400 << 20  # sparse: takes no room, yet long enough to write for a signal to arrive in between
    source = kit.file("in.safetensors", kit.int8(LAYER, {"convrot": True}))
    raw = source.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    body = raw[8 + size :]
    text = raw[8 : 8 + size].decode()
    text = text[:-1] + f',"big":{{"dtype":"U8","shape":[{weight}],"data_offsets":[{len(body)},{len(body) + weight}]}}}}'
    with source.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text.encode() + body)
        file.truncate(8 + len(text) + len(body) + weight)
    process = subprocess.Popen(
        [sys.executable, "-m", "quant_loader.cli", "repair", source, kit.folder / "out.safetensors"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 30
    while not any(name.endswith(".partial") for name in names(kit)) and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert names(kit) == ["in.safetensors"]


# -- hostile sources -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"PK\x03\x04 a zip file",
        (1 << 62).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]" + b"x" * 50,
        (2).to_bytes(8, "little") + b"{}" + b"x" * 50,
        (40).to_bytes(8, "little") + b'{"a":{"data_offsets":[0,"x"]}}          ' + b"x" * 50,
        (60).to_bytes(8, "little") + b'{"a":{"dtype":"U8","shape":[9],"data_offsets":[-9,0]}}'.ljust(60) + b"x" * 50,
        (9000).to_bytes(8, "little") + b"[" * 9000 + b"x" * 9,
    ],
    ids=range(8),
)
def test_no_file_brings_it_down(kit, command, raw):
    source = kit.folder / "in.safetensors"
    source.write_bytes(raw)
    ran = command("repair", source, kit.folder / "out.safetensors")
    assert ran.code == 1
    assert len(ran.err.strip().splitlines()) == 1
    assert names(kit) == ["in.safetensors"]


@pytest.mark.parametrize("kind", ["flags", "names", "undeclared"])
def test_files_of_many_layers_cost_linear_time(kit, kind):
    """Thousands of legacy flags, of metadata names without a prefix, of layers to declare: seconds, not hours."""
    count = 4000
    scale, codes = kit.scale("F32"), kit.T("U8", (1, 8), bytes(range(1, 9)))
    tensors, meta = {}, None
    if kind == "flags":
        for i in range(count):
            tensors.update({f"a{i}.scaled_fp8": kit.T("F8_E4M3", (0,), b""), f"b{i}.scale_weight": scale})
    elif kind == "names":
        tensors = {f"model.diffusion_model.b{i}.weight": codes for i in range(count)}
        meta = kit.metadata({f"b{i}": {"format": "nvfp4"} for i in range(count)})
    else:
        for i in range(count):
            tensors.update({f"b{i}.weight": codes._replace(dtype="I8"), f"b{i}.weight_scale": scale})
    source = kit.file("in.safetensors", tensors, meta)
    started = time.process_time()
    refused = contextlib.nullcontext() if kind == "undeclared" else pytest.raises(RequestError, match="no layer lacks")
    with refused:
        repair(source, kit.folder / "out.safetensors", [parse_declaration("int8_tensorwise")], dry_run=True)
    assert time.process_time() - started < 20


def test_truncated_file_is_refused(kit, command):
    source = kit.file("in.safetensors", kit.int8(LAYER), cut=1000)
    ran = command("repair", source, kit.folder / "out.safetensors")
    assert (ran.code, names(kit)) == (1, ["in.safetensors"])


def test_names_with_line_breaks_and_control_characters_stay_on_their_line(kit, command):
    layer = "blocks\n\x1b[31m.0"
    source = kit.file(f"in{kit.odd}.safetensors", kit.int8(layer, {"convrot": True}))
    ran = command("repair", source, kit.folder / "out.safetensors")
    assert ran.code == 0
    assert "\x1b" not in ran.out
    assert len(ran.out.splitlines()) == 2


@posix
def test_a_name_that_is_not_utf8_is_a_name(kit, command):
    """File systems of other days hold bytes; a shell hands them over as they are."""
    source = kit.file("in.safetensors", kit.int8(LAYER, {"convrot": True}))
    odd = kit.folder / os.fsdecode(b"in-\xff\xe9.safetensors")
    source.rename(odd)
    assert command("repair", odd, kit.folder / os.fsdecode(b"out-\xff.safetensors")).code == 0
    assert command("check", kit.folder / os.fsdecode(b"out-\xff.safetensors")).code == 0
