"""A broken file is refused when it is queued, with the reason, and nothing is loaded or sampled for it."""

from __future__ import annotations

import re

import pytest
from quant_loader.checkpoint import check
from quant_loader.demo import fixtures, workflows
from quant_loader.demo.client import PromptRejected
from quant_loader.demo.comfy_cli import ComfyRunError

PREFIX = "model_name - "  # ComfyUI puts the argument's name in front

KNOWN_SENTENCES = {
    "broken-half-scale.safetensors": r"Comfy INT8 layer (.+?) needs I8 weights and F32 scales, got (.+?) and (.+?)",
    "broken-column-scale.safetensors": r"Comfy W4A4 layer (.+?) has incompatible weight/scale shapes: (.+?) and (.+?)",
}


def refusal_of(server, name: str, **options: str) -> PromptRejected:
    with pytest.raises(PromptRejected) as caught:
        server.client.queue(workflows.text_to_image(workflows.quant_loader(name, **options), prefix="e2e/broken"))
    return caught.value


@pytest.mark.parametrize("name", fixtures.BROKEN)
def test_first_line_is_the_verdict_and_the_layer_is_named(server, work_done, name):
    rejected = refusal_of(server, name)
    assert rejected.status == 400
    assert list(rejected.node_errors) == [workflows.LOADER]
    first, *rest = rejected.details()[0].splitlines()
    assert first == PREFIX + check([server.models("diffusion_models") / name]).summary
    assert fixtures.BROKEN_LAYERS[0] in "\n".join(rest)
    assert work_done() == ""


def test_every_broken_layer_is_counted(server):
    verdict, *_ = refusal_of(server, "broken-zeroed-markers.safetensors").details()[0].splitlines()
    assert "3 faults in 3 of 13 layers" in verdict


@pytest.mark.parametrize("name", KNOWN_SENTENCES)
def test_known_sentences_are_found_by_a_search(server, name):
    unwrapped = " ".join(refusal_of(server, name).details()[0].split())
    assert re.search(KNOWN_SENTENCES[name], unwrapped)


@pytest.mark.parametrize("name", fixtures.BROKEN)
def test_no_traceback_reaches_the_user(server, name):
    assert "Traceback" not in "\n".join(refusal_of(server, name).details())


def test_comfy_run_hands_the_refusal_on(server, cli, tmp_path, work_done):
    workflow = workflows.text_to_image(workflows.quant_loader("broken-zeroed-markers.safetensors"), prefix="e2e/cli")
    with pytest.raises(ComfyRunError) as caught:
        cli.run(workflow, tmp_path / "workflow.json", server.port)
    first = caught.value.node_errors[workflows.LOADER]["errors"][0]["details"]
    assert first.startswith(f"{PREFIX}Refused: 3 faults")
    assert fixtures.BROKEN_LAYERS[0] in first
    assert work_done() == ""


def test_comfy_run_renders_a_sound_file(server, cli, tmp_path):
    workflow = workflows.text_to_image(workflows.quant_loader(fixtures.file_name("nvfp4")), prefix="e2e/cli", seed=11)
    answer = cli.run(workflow, tmp_path / "workflow.json", server.port)
    assert answer["status"] == "completed"
    assert workflows.SAMPLER in answer["executed_node_ids"]
