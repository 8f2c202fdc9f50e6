"""Layers that a file lacks: an error by name, for each of several files, but for a result that no model reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import in_process  # noqa: F401  (prepares ComfyUI before anything imports it)
import pytest
import torch
from quant_loader.checkpoint import check
from quant_loader.demo import quantize, tiny_core
from quant_loader.patching.errors import ModelMismatch
from quant_loader.patching.load import load_text_encoder
from quant_loader.patching.ops import LoadContext, operations
from quant_loader.patching.state_dict import fold, read, verify

PROJECTION = "text_projection"


# A matrix that ComfyUI always multiplies by, for a result that not every model reads


@pytest.fixture(scope="module")
def encoders() -> dict[str, tuple[quantize.Tensors, dict[str, Any]]]:
    """A tiny CLIP-L and a tiny CLIP-G with INT8 linears, and the options that make ComfyUI build them."""
    sizes = {"clip_l": tiny_core.CLIP_L_OPTIONS["model_config"]}
    # CLIP-G is told by its thirty-first layer.
    sizes["clip_g"] = sizes["clip_l"] | {"num_hidden_layers": 32, "intermediate_size": 256}
    made = {name: tiny_core._clip_l(17, **size) for name, size in sizes.items()}
    return {
        name: (
            quantize.quantize(t, "int8_row", layers=tiny_core.linears(t, 64))[0],
            {"model_config": dict(sizes[name])},
        )
        for name, t in made.items()
    }


@pytest.fixture
def load(tmp_path: Path, encoders: dict[str, tuple[quantize.Tensors, dict[str, Any]]]) -> Callable[..., Any]:
    """``load(encoder, without, kind)``: the encoder, from a file without the tensors of one layer."""

    def loaded(encoder: str, without: str | None = None, kind: str = "stable_diffusion") -> Any:
        tensors, options = encoders[encoder]
        kept = {n: t for n, t in tensors.items() if without is None or not n.startswith(f"{without}.")}
        path = quantize.save(tmp_path / f"{encoder}.safetensors", kept)
        return load_text_encoder([path], kind, model_options=options)[0]

    return loaded


def encode(clip: Any, encoder: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The hidden states and the pooled output of one encoder of a set."""
    tokens = clip.tokenize("a small red house by the sea")[encoder[-1]]
    with torch.no_grad():
        hidden, pooled = getattr(clip.cond_stage_model, encoder).encode_token_weights(tokens)[:2]
    return hidden, pooled


def test_the_projection_of_clip_l_may_be_absent(load: Callable[..., Any]) -> None:
    whole, bare = (encode(load("clip_l", without), "clip_l") for without in (None, PROJECTION))
    assert torch.equal(bare[0], whole[0])
    assert torch.equal(bare[1], whole[1])
    clone = load("clip_l", PROJECTION).clone()
    assert torch.equal(encode(clone, "clip_l")[0], whole[0])


@pytest.mark.parametrize(("encoder", "kind"), [("clip_g", "stable_diffusion"), ("clip_l", "hidream")])
def test_a_projection_that_is_read_must_be_there(encoder: str, kind: str, load: Callable[..., Any]) -> None:
    """ComfyUI takes zeros for it, and with them for the pooled output."""
    assert encode(load(encoder, kind=kind), encoder)[1].abs().max() > 0
    with pytest.raises(ModelMismatch, match=rf"The file has no {PROJECTION}\.weight, which this model needs"):
        encode(load(encoder, PROJECTION, kind), encoder)


@pytest.mark.parametrize("layer", ["text_model.embeddings.token_embedding", "text_model.final_layer_norm"])
def test_a_table_or_a_norm_that_is_read_must_be_there(layer: str, load: Callable[..., Any]) -> None:
    clip = load("clip_l", layer)
    with pytest.raises(ModelMismatch, match=rf"The file has no {layer}\.weight, which this model needs"):
        encode(clip, "clip_l")


def test_a_layer_that_comfyui_tells_the_encoder_by_is_named(load: Callable[..., Any]) -> None:
    """Its detection of encoders fails with an error of Python's."""
    with pytest.raises(ModelMismatch, match=r"the file has no text_model\.encoder\.layers\.1\.mlp\.fc1\.") as caught:
        load("clip_l", "text_model.encoder.layers.1.mlp.fc1")
    assert "UnboundLocalError" not in str(caught.value)


def test_another_layer_is_named_while_loading(load: Callable[..., Any]) -> None:
    layer = "text_model.encoder.layers.1.mlp.fc2"
    with pytest.raises(ModelMismatch, match=rf"1 layer disagrees\.\n- {layer}: the file has no weight and no bias for"):
        load("clip_l", layer)


# Several files whose layers share names


class Block(torch.nn.Module):
    """Two linears and two norms of one name each, so that one has a sibling that shows it is read."""

    def __init__(self, ops: Any) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.ModuleDict({"fc": ops.Linear(64, 64)}) for _ in range(2))
        for layer in self.layers:
            layer["norm"] = ops.LayerNorm(64)


def tensors_of(*without: str) -> quantize.Tensors:
    """A file for :class:`Block` without some layers."""
    random = torch.Generator().manual_seed(1)
    tensors = {}
    for index in range(2):
        tensors[f"layers.{index}.fc.weight"] = torch.randn(64, 64, generator=random).to(torch.bfloat16)
        tensors[f"layers.{index}.fc.bias"] = torch.zeros(64, dtype=torch.bfloat16)
        tensors[f"layers.{index}.norm.weight"] = torch.ones(64, dtype=torch.bfloat16)
        tensors[f"layers.{index}.norm.bias"] = torch.zeros(64, dtype=torch.bfloat16)
    return {name: t for name, t in tensors.items() if not name.startswith(tuple(f"{w}." for w in without))}


def load_two(tmp_path: Path, files: dict[str, quantize.Tensors], layers: dict[str, int] | None = None) -> None:
    """Load each file into a model of its own, all of one operations class, as ComfyUI does with several encoders.

    ``layers``: how many of its two layers a model has, where not both.
    """
    context, models = LoadContext(), torch.nn.ModuleDict()
    declared = []
    for name, tensors in files.items():
        packed = [n.removesuffix(".weight") for n, t in tensors.items() if t.dim() == 2]
        path = str(
            quantize.save(tmp_path / f"{name}.safetensors", quantize.quantize(tensors, "int8_row", layers=packed)[0])
        )
        report = check(path)
        declared += [(report.files[0], spec) for spec in report.layers]
        models[name] = Block(operations(context))
        models[name].layers = models[name].layers[: (layers or {}).get(name, 2)]
        models[name].load_state_dict(fold(read([path])[0], report.layers, files=report.files), strict=False)
    verify(declared, context, [models])


def test_two_files_with_the_same_layers_load(tmp_path: Path) -> None:
    load_two(tmp_path, {"first": tensors_of(), "second": tensors_of()})


@pytest.mark.parametrize("lacking", ["first", "second"])
@pytest.mark.parametrize("part", ["fc", "norm"])
def test_a_layer_that_one_of_two_files_lacks_is_named(lacking: str, part: str, tmp_path: Path) -> None:
    files = {name: tensors_of(*([f"layers.1.{part}"] if name == lacking else [])) for name in ("first", "second")}
    sentence = rf"1 layer disagrees\.\n- {lacking}: layers\.1\.{part}: the file has no weight and no bias for it"
    with pytest.raises(ModelMismatch, match=sentence):
        load_two(tmp_path, files)


@pytest.mark.parametrize("smaller", ["first", "second"])
def test_a_layer_that_one_of_two_models_lacks_is_named(smaller: str, tmp_path: Path) -> None:
    files = {"first": tensors_of(), "second": tensors_of()}
    sentence = (
        r"first\.safetensors, second\.safetensors do not fit the model .* 1 of 4 quantised layers disagree\.\n"
        rf"- {smaller}\.safetensors: layers\.1\.fc: the model has no such layer"
    )
    with pytest.raises(ModelMismatch, match=sentence):
        load_two(tmp_path, files, {smaller: 1})


def test_a_bare_parameter_that_another_layer_has_is_an_error(tmp_path: Path) -> None:
    """T5's norms are parameters of modules that are none of the operations class, so that their load tells nothing."""
    tensors = tiny_core.t5_base()
    packed, _ = quantize.quantize(tensors, "int8_row", layers=tiny_core.linears(tensors, 64))
    absent = "encoder.block.0.layer.1.layer_norm"
    path = quantize.save(tmp_path / "t5.safetensors", {n: t for n, t in packed.items() if n != f"{absent}.weight"})
    with pytest.raises(ModelMismatch, match=f"{absent}: the file has no weight for it"):
        load_text_encoder([path], "stable_audio", model_options=tiny_core.T5_OPTIONS)
