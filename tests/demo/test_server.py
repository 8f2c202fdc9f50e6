"""The server harness without a server: ports, missing trees, and that nothing outlives who started it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from quant_loader.demo import supervise
from quant_loader.demo.server import ComfyServer, ServerError, free_port, port_in_use

SUPERVISOR = str(Path(supervise.__file__))


def wait_for(condition, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A ComfyUI tree whose main.py is what the test writes there."""
    folder = tmp_path / "tree"
    folder.mkdir()
    monkeypatch.setenv("COMFYUI_PATH", str(folder))
    return folder


def test_port_in_use_is_one_sentence(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert port_in_use(port)
        with pytest.raises(ServerError, match=rf"^Port {port} is already in use by another program; choose another"):
            ComfyServer(tmp_path, port).start()


def test_free_port_is_free():
    assert not port_in_use(free_port())


def test_missing_tree_is_named(tmp_path, tree):
    with pytest.raises(ServerError, match=r"No ComfyUI at .*tree: run demo/setup_env\.py"):
        ComfyServer(tmp_path / "base").start()


def test_server_that_dies_is_reported_with_its_last_lines(tmp_path, tree):
    (tree / "main.py").write_text("raise SystemExit('the database is on fire')")
    server = ComfyServer(tmp_path / "base", with_pack=False)
    with pytest.raises(ServerError, match=r"ended by itself(.|\n)*the database is on fire"):
        server.start()


def test_server_that_never_answers_is_stopped(tmp_path, tree):
    (tree / "main.py").write_text("import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(600)")
    server = ComfyServer(tmp_path / "base", with_pack=False, start_timeout=3.0)
    with pytest.raises(ServerError, match="did not answer within 3 s"):
        server.start()
    pid = int((tmp_path / "base" / "pid").read_text())
    assert wait_for(lambda: not is_running(pid))


def test_pack_is_linked_and_the_tree_stays_as_it_was(tmp_path, tree):
    (tree / "main.py").write_text("raise SystemExit(0)")
    with pytest.raises(ServerError):
        ComfyServer(tmp_path / "base").start()
    pack = tmp_path / "base" / "custom_nodes" / "quant-loader"
    assert (pack / "pyproject.toml").is_file()
    assert [path.name for path in tree.iterdir()] == ["main.py"]


def test_command_ends_when_its_starter_is_killed(tmp_path):
    note = tmp_path / "pid"
    child = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    starter = (
        "import subprocess, sys, time\n"
        f"command = [sys.executable, '-I', {SUPERVISOR!r}, sys.executable, '-c', {child!r}]\n"
        "subprocess.Popen(command, stdin=subprocess.PIPE)\n"
        "time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", starter])
    assert wait_for(lambda: note.exists() and note.read_text() != "")
    process.kill()
    process.wait()
    assert wait_for(lambda: not is_running(int(note.read_text())))


def test_supervisor_hands_the_exit_status_on():
    command = [sys.executable, "-I", SUPERVISOR, sys.executable, "-c", "raise SystemExit(7)"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert process.wait(30) == 7
