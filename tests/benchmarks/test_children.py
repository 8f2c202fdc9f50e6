"""Children of one process that has imported ComfyUI: each starts from the same state, answers or says how it ended."""

from __future__ import annotations

import json
import os
import signal
import sys
import types

import pytest
from quant_loader.benchmarks import children, load, lora
from quant_loader.benchmarks.common import ChildFailed

ORDER = {"module": "a_module_of_this_test", "arguments": ["x"], "seconds": 30}

pytestmark = pytest.mark.skipif(not children.can_fork(), reason="children are forked on Linux without an accelerator")


@pytest.fixture
def module(monkeypatch):
    made = types.ModuleType(ORDER["module"])
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def answer(module, main, **changes):
    """What a forked child answers, whose module has this `main`."""
    module.main = main
    return children.fork_for({**ORDER, **changes}, 1)


def test_a_child_answers_with_its_last_line_and_changes_nothing_here(module):
    module.calls = []

    def main(arguments):
        module.calls.append(arguments)
        print("progress")
        print(json.dumps({"arguments": arguments, "calls": len(module.calls), "process": os.getpid()}))
        return 0

    first, second = answer(module, main)["found"], answer(module, main)["found"]
    assert first["arguments"] == ["x"]
    assert first["calls"] == second["calls"] == 1
    assert len({first["process"], second["process"], os.getpid()}) == 3
    assert module.calls == []


def test_an_error_is_told_with_its_last_words(module):
    def main(arguments):
        raise KeyError("no such layer")

    failed = answer(module, main)["failed"]
    assert failed.startswith("ended with an error:\n")
    assert failed.endswith("KeyError: 'no such layer'")


def test_a_child_that_fails_prints_nothing_or_is_killed_says_so(module):
    assert answer(module, lambda arguments: 3) == {"failed": "ended with 3"}
    assert answer(module, lambda arguments: 0) == {"failed": "ended with 0"}
    killed = answer(module, lambda arguments: os.kill(os.getpid(), signal.SIGKILL))
    assert killed == {"failed": "ended by signal 9"}


def test_a_child_that_hangs_is_ended(module):
    assert answer(module, lambda arguments: signal.pause(), seconds=1) == {"failed": "took longer than 1 s"}


@pytest.mark.slow
def test_a_host_has_imported_comfyui_and_answers_as_often_as_it_is_asked(tmp_path):
    order = {"side": "ours", "size": vars(lora.QUICK), "formats": [], "stacks": [], "repeats": 1, "device": "cpu"}
    with children.host() as in_child:
        for _ in range(2):
            assert in_child(lora.MODULE, "--one", json.dumps(order), "--folder", str(tmp_path)) == {}
            with pytest.raises(ChildFailed, match=r"load --one ours .*ended with an error:[\s\S]*nowhere\.safetensors"):
                in_child(load.MODULE, "--one", "ours", "--path", str(tmp_path / "nowhere.safetensors"))
