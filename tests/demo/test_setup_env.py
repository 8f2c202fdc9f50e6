"""What the set-up says when something is missing: one sentence, and which one."""

from __future__ import annotations

import tarfile

import pytest
from quant_loader.demo import setup_env
from quant_loader.demo.setup_env import SetupError


def test_old_python_is_refused_with_the_version_to_get():
    with pytest.raises(SetupError, match=r"Python 3\.9\.18 is too old: install Python 3\.10"):
        setup_env.check_python((3, 9, 18))


def test_supported_python_is_accepted():
    setup_env.check_python((3, 10, 0))
    setup_env.check_python((3, 13, 1))


def test_full_disk_is_found_before_anything_is_downloaded(tmp_path):
    with pytest.raises(SetupError, match=r"Not enough disk space: this needs 1000000000\.0 GB free"):
        setup_env.check_space(10**18, tmp_path)


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "the disk is full"),
        ("NewConnectionError: Failed to establish a new connection: [Errno -3] Temporary failure", "no network"),
        (
            "NameResolutionError(...)\nERROR: Could not find a version that satisfies the requirement torch",
            "no network",
        ),
        ("ERROR: No matching distribution found for torch==2.14.1", "No matching distribution found for torch"),
    ],
)
def test_failure_of_pip_is_told_in_one_sentence(output, sentence):
    message = str(setup_env.explain(output, "Installing"))
    assert sentence in message
    assert "\n" not in message


def test_failed_step_raises_with_its_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(setup_env, "LOG", tmp_path / "setup.log")
    command = [setup_env.sys.executable, "-c", "import sys; print('ERROR: nothing to see'); sys.exit(3)"]
    with pytest.raises(SetupError, match="Trying failed: ERROR: nothing to see"):
        setup_env.run_step("Trying", command)
    assert "nothing to see" in (tmp_path / "setup.log").read_text(encoding="utf-8")


def test_downloads_are_shown_while_a_step_runs(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(setup_env, "LOG", tmp_path / "setup.log")
    lines = "Collecting torch\\nDownloading torch-2.whl (800 MB)\\nInstalling collected packages: a, b, c"
    setup_env.run_step("Installing", [setup_env.sys.executable, "-c", f"print('{lines}')"])
    shown = capsys.readouterr().out
    assert "Downloading torch-2.whl (800 MB)" in shown
    assert "Unpacking 3 packages" in shown
    assert "Collecting" not in shown


def test_missing_ensurepip_names_the_package(monkeypatch, tmp_path):
    monkeypatch.setattr(setup_env, "VENV", tmp_path / "venv")
    monkeypatch.setattr(setup_env.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SetupError, match=r"sudo apt install python3\.\d+-venv"):
        setup_env.make_venv()


def test_wrong_comfyui_path_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path))
    with pytest.raises(SetupError, match="is not a ComfyUI checkout"):
        setup_env.comfyui_tree()


def test_existing_checkout_is_used(monkeypatch, tmp_path):
    (tmp_path / "main.py").write_text("")
    (tmp_path / "requirements.txt").write_text("")
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path))
    assert setup_env.comfyui_tree() == tmp_path.resolve()


def test_optional_requirements_are_left_out(tmp_path):
    (tmp_path / "requirements.txt").write_text(
        "comfyui-workflow-templates==0.1\ncomfyui-embedded-docs==1\n# note\n\ntorch\nnumpy>=1.25.0\n"
    )
    assert setup_env.requirements_of(tmp_path) == ["torch", "numpy>=1.25.0"]


def test_stamp_follows_the_requirements():
    assert setup_env.stamp_of(["numpy"]) == setup_env.stamp_of(["numpy"])
    assert setup_env.stamp_of(["numpy"]) != setup_env.stamp_of(["numpy", "scipy"])


@pytest.mark.parametrize(
    ("name", "kind", "plain"),
    [
        ("tree/main.py", tarfile.REGTYPE, True),
        ("tree/folder", tarfile.DIRTYPE, True),
        ("tree/../../outside.py", tarfile.REGTYPE, False),
        ("tree/link", tarfile.SYMTYPE, False),
    ],
)
def test_archive_members_stay_inside(name, kind, plain):
    member = tarfile.TarInfo(name)
    member.type = kind
    assert setup_env.is_plain(member) is plain


def test_a_machine_without_apt_is_told_to_install_chromium(monkeypatch):
    monkeypatch.delenv("CHROMIUM", raising=False)
    monkeypatch.setattr(setup_env.shutil, "which", lambda name: None)
    with pytest.raises(SetupError, match="need Chromium: install it"):
        setup_env.install_chromium()


def test_a_named_chromium_is_taken_as_it_is(monkeypatch):
    monkeypatch.setenv("CHROMIUM", "/opt/browser")
    assert setup_env.find_chromium() == "/opt/browser"
    setup_env.install_chromium()
