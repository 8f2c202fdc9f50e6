"""The server keeps answering whatever lies in the model folder."""

from __future__ import annotations

import pytest
from quant_loader.demo import fixtures, workflows
from quant_loader.demo.client import PromptRejected

UNUSABLE = [
    "empty.safetensors",
    "page-not-found.safetensors",
    "cut-short.safetensors",
    "huge-header.safetensors",
    "locked.safetensors",
]


def test_object_info_answers_with_broken_and_unreadable_files_in_the_folder(server, unusable):
    info = server.client.get(f"/object_info/{workflows.OUR_NODE}")[workflows.OUR_NODE]
    declaration = info["input"]["required"]["model_name"]
    options = declaration[0] if isinstance(declaration[0], list) else declaration[1]["options"]
    assert {*unusable, *fixtures.BROKEN, fixtures.REFERENCE} <= set(options)


def test_every_other_node_is_still_listed(server):
    assert {workflows.OUR_NODE, "UNETLoader", "KSampler", "SaveLatent"} <= set(server.client.get("/object_info"))


@pytest.mark.parametrize("name", UNUSABLE)
def test_unusable_file_is_refused_in_words(server, unusable, work_done, name):
    if name not in unusable:
        pytest.skip("this system cannot make such a file")
    with pytest.raises(PromptRejected) as caught:
        server.client.queue(workflows.text_to_image(workflows.quant_loader(name), prefix="e2e/unusable"))
    details = caught.value.details()[0]
    assert details.startswith("model_name - ")
    assert name in details
    assert "Traceback" not in details
    assert work_done() == ""


def test_name_that_is_not_in_the_folder_is_refused(server, work_done):
    for name in ("no-such-file.safetensors", "../secret.safetensors", "/etc/passwd"):
        with pytest.raises(PromptRejected) as caught:
            server.client.queue(workflows.text_to_image(workflows.quant_loader(name), prefix="e2e/missing"))
        assert name in caught.value.details()[0]
    assert work_done() == ""


def test_pack_is_imported_without_complaint(server):
    assert "IMPORT FAILED" not in server.log()
