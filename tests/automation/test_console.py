"""Standard output and error as a person or a script has them: full, closed, piped, a terminal."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has a device that is always full")
@pytest.mark.parametrize("words", [["check", "in.safetensors"], ["check", "--json", "--all", "."]])
def test_a_full_disk_behind_standard_output(kit, words):
    kit.file("in.safetensors", kit.int8("a"))
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, "-m", "quant_loader.cli", *words],
            cwd=kit.folder,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == f"quant-loader {words[0]}: the answer could not be written: No space left on device.\n"


@pytest.mark.skipif(os.name == "nt", reason="a POSIX shell closes it")
def test_a_closed_standard_output(kit):
    source = kit.file("in.safetensors", kit.int8("a"))
    words = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "quant_loader.cli", "check", source]
    done = subprocess.run(words, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.strip().endswith("there is nowhere to write the answer.")


@pytest.mark.skipif(os.name == "nt", reason="pseudo-terminals")
def test_progress_goes_to_the_terminal_and_never_into_the_answer(kit):
    """Standard error is a terminal, standard output a file: as `quant-loader check --all models > list.txt`."""
    for number in range(3):
        kit.file(f"{number}.safetensors", kit.int8("a"))
    ours, theirs = os.openpty()
    words = [sys.executable, "-m", "quant_loader.cli", "check", "--all", "."]
    done = subprocess.run(
        words, cwd=kit.folder, stdout=subprocess.PIPE, stderr=theirs, text=True, timeout=60, check=False
    )
    os.close(theirs)
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert len(done.stdout.splitlines()) == 4
    for place in ("[1/3]", "[2/3]", "[3/3]"):
        assert place in shown
    assert "[4/3]" not in shown
