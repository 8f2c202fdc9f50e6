"""``quant-loader check``: exit codes, the table, JSON, lists on standard input."""

from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from quant_loader.cli import COMMANDS, main

SCHEMA = json.loads((Path(__file__).parents[1] / "docs" / "report.schema.json").read_text(encoding="utf-8"))
MARKER = b'{"format": "int8_tensorwise"}'


def write(path: Path, scale_shape=(8, 1), marker: bytes | None = MARKER, layer: str = "blocks.0.x") -> str:
    """One INT8 layer."""
    tensors = {
        f"{layer}.weight": ("I8", [8, 64], bytes(512)),
        f"{layer}.weight_scale": ("F32", list(scale_shape), struct.pack("<8f", *[0.01] * 8)),
    }
    if marker is not None:
        tensors[f"{layer}.comfy_quant"] = ("U8", [len(marker)], marker)
    return write_tensors(path, tensors)


def write_tensors(path: Path, tensors) -> str:
    """A file of these tensors: name -> (dtype, shape, bytes)."""
    header, offset = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))
    return str(path)


@pytest.fixture
def good(tmp_path):
    return write(tmp_path / "good.safetensors")


@pytest.fixture
def bad(tmp_path):
    return write(tmp_path / "bad.safetensors", marker=None)


def test_an_empty_path_is_named(capsys):
    assert main(["check", ""]) == 2
    assert "an empty path was not found." in capsys.readouterr().out


def test_exit_codes(good, bad, tmp_path, capsys):
    empty = tmp_path / "empty.safetensors"
    empty.write_bytes(struct.pack("<Q", 2) + b"{}")
    notes = tmp_path / "notes.txt"
    notes.write_text("hello, this is no checkpoint at all")
    assert main(["check", good]) == 0
    assert main(["check", str(empty)]) == 0
    assert main(["check", bad]) == 1
    assert main(["check", str(tmp_path / "none.safetensors")]) == 2
    assert main(["check", good, good]) == 0
    assert main(["check", str(tmp_path / "none-00001-of-00002.safetensors")]) == 2
    assert main(["check", str(tmp_path)]) == 2
    assert main(["check", str(notes)]) == 2
    assert main(["check", good, bad]) == 1
    assert main(["check"]) == 2
    assert main(["check", good, "--rules", "sloppy"]) == 2
    assert main(["check", "--help"]) == 0
    assert main([]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_pickle_is_refused_unopened(tmp_path, capsys):
    path = tmp_path / "model.ckpt"
    path.write_bytes(b"\x80\x02cposix\nsystem\n.")
    assert main(["check", str(path)]) == 1
    assert "pickle" in capsys.readouterr().out


def test_the_table_names_formats_faults_and_fixes(good, bad, capsys):
    main(["check", good, bad])
    shown = capsys.readouterr().out
    for words in (
        "good.safetensors",
        "OK: 1 quantised layer",
        "int8_tensorwise",
        "row scales",
        "bad.safetensors",
        "Refused: 1 fault",
        "marker.missing",
        "blocks.0.x",
        "->",
    ):
        assert words in shown
    assert "\033[" not in shown


def test_compatible(tmp_path, capsys):
    path = write(tmp_path / "flat.safetensors", scale_shape=(8,))
    assert main(["check", path]) == 1
    assert "rules = compatible accepts it" in capsys.readouterr().out
    assert main(["check", path, "--rules", "compatible"]) == 0


def test_json(good, bad, capsys):
    assert main(["check", good, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    jsonschema.validate(report, SCHEMA)
    assert report["layers"][0]["shape"] == [8, 64]
    assert main(["check", good, bad, "--json"]) == 1
    reports = json.loads(capsys.readouterr().out)
    assert [report["verdict"] for report in reports] == ["ok", "refused"]


def test_a_list_on_standard_input(good, bad, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{good}\n\n{bad}\r\n"))
    assert main(["check", "-", "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)) == 2
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["check", "-"]) == 2


def test_shards_given_together_are_one_checkpoint(tmp_path, capsys):
    names = [write(tmp_path / f"m-0000{i}-of-00002.safetensors", layer=f"l{i}") for i in (1, 2)]
    assert main(["check", *names, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["formats"] == {"int8_tensorwise": 2}


def test_files_of_one_checkpoint(tmp_path, capsys):
    first, second = write(tmp_path / "a.safetensors", layer="a"), write(tmp_path / "b.safetensors", layer="b")
    assert main(["check", first, second, "--one", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["formats"] == {"int8_tensorwise": 2}


def test_hostile_names_do_not_reach_the_terminal(tmp_path, capsys):
    path = write(tmp_path / "evil.safetensors", marker=None, layer="\033[2J\u202eevil\n")
    assert main(["check", path]) == 1
    shown = capsys.readouterr().out
    assert "\033" not in shown
    assert "\u202e" not in shown


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_no_line_is_wider_than_the_terminal(tmp_path, monkeypatch, capsys, columns):
    """However long the names are; both ends of each can be read."""
    monkeypatch.setenv("COLUMNS", str(columns))
    layer = "model.diffusion_model." + "a_module_with_a_long_name." * 5 + "to_q"
    tensors = {}
    for number in range(6):
        tensors[f"{layer}{number}.weight"] = ("I8", [8, 64], bytes(512))
        tensors[f"{layer}{number}.weight_scale"] = ("F32", [], struct.pack("<f", 0.01))
        tensors[f"{layer}{number}.bias"] = ("F32", [64], bytes(256))
        tensors[f"{layer}{number}.comfy_quant"] = ("U8", [len(MARKER)], MARKER)
    path = write_tensors(tmp_path / ("a_file_with_a_long_name_" * 5 + ".safetensors"), tensors)
    assert main(["check", path]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    shown = "\n".join(lines)
    assert lines[0].startswith("a_file_with")
    assert lines[0].endswith(".safetensors")
    for number in range(3):
        assert f".to_q{number}" in shown
    assert "and 3 more." in shown


def test_progress_stays_on_its_line_and_is_printable(good, tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "60")
    evil = write(tmp_path / ("\033[2J" + "x" * 200 + ".safetensors"))
    assert main(["check", good, evil]) == 0
    shown = [text for text in terminal.getvalue().split("\r\033[K") if text]
    assert shown[0] == "[1/2] good.safetensors"
    assert shown[1].startswith("[2/2] ?[2J")
    assert shown[1].endswith(".safetensors")
    assert len(shown) == 2
    assert len(shown[1]) < 60


def test_the_installed_command(good):
    command = Path(sys.executable).with_name("quant-loader")
    if not command.exists():
        pytest.skip("the package is not installed with its command")
    done = subprocess.run([command, "check", good], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "OK" in done.stdout


def test_a_closed_pipe_is_no_traceback(good, tmp_path):
    program = f"import sys; from quant_loader.cli import main; sys.exit(main(['check'] + ['{good}'] * 2000))"
    done = subprocess.run(
        f'{sys.executable} -c "{program}" | head -1', shell=True, capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr


def test_every_subcommand_has_help():
    assert "check" in COMMANDS
    assert all(command.help for command in COMMANDS.values())
