"""Every format through ComfyUI: loads, computes what the dense model computes, counts what it weighs, fails by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import FORMATS, denoise, relative
from quant_loader.checkpoint import check
from quant_loader.demo import models, quantize
from quant_loader.patching import load as loading
from quant_loader.patching.errors import CheckpointRefused, ModelMismatch
from safetensors import safe_open

# ||y_q - y|| / ||y|| of one linear on Gaussian data, by format: the table of tolerances in docs/kernels.md, for what
# runs on a CPU (FP8, MXFP8 and NVFP4 decode the weight and multiply densely).
LINEAR_ERROR = {
    "int8_scalar": 0.018,
    "int8_row": 0.015,
    "int8_convrot": 0.016,
    "fp8": 0.029,
    "mxfp8": 0.029,
    "nvfp4": 0.100,
    "convrot_w4a4": 0.28,
    # The demo's W4A8 has no codebook: a uniform grid with steps of amax / 7 over 16 values. The largest of 16 Gaussians
    # is 1.97 sigma on average, so the step's error is 1.97 / 7 / sqrt(12) = 0.081; rounding the scale to E4M3 stretches
    # it by up to 1/16, and 8-bit activations add 0.0085.
    "asym_w4a8": 0.0871,
    "quanto_int8": 0.015,
}
# Errors of independent layers add in quadrature, and eight quantised linears follow each other in the tiny Flux.
IN_DEPTH = 8**0.5


def layers_of(tensors: quantize.Tensors, quantizer: str, pack_inputs: bool = False) -> list[str]:
    """What a quantised Flux file packs; with ``pack_inputs`` also the input projections that the format can rotate."""
    layers = quantize.layers_to_quantize(tensors, pack_inputs)
    if quantizer in ("int8_convrot", "convrot_w4a4", "asym_w4a8"):
        layers = [n for n in layers if tensors[f"{n}.weight"].shape[1] % quantize.ROTATION_GROUP == 0]
    return layers


def load_file(path: Path, rules: str = "strict", execution: str = "auto") -> Any:
    from quant_loader.patching.load import load_diffusion_model

    return load_diffusion_model([path], rules, execution)[0]


@pytest.mark.parametrize("quantizer", FORMATS)
def test_the_model_computes_what_the_dense_one_does(
    quantizer: str, load: Callable[..., Any], load_base: Callable[[], Any]
) -> None:
    assert relative(denoise(load(quantizer)), denoise(load_base())) < IN_DEPTH * LINEAR_ERROR[quantizer]


@pytest.mark.parametrize("quantizer", FORMATS)
def test_every_layer_is_within_its_formats_error(
    quantizer: str, load: Callable[..., Any], base_tensors: quantize.Tensors
) -> None:
    from quant_loader.patching.patcher import packed_modules

    modules = packed_modules(load(quantizer).model)
    assert len(modules) == len(quantize.layers_to_quantize(base_tensors))
    generator = torch.Generator().manual_seed(11)
    for key, module in modules.items():
        weight = base_tensors[key.removeprefix("diffusion_model.")].double()
        x = torch.randn(256, weight.shape[1], generator=generator)
        with torch.no_grad():
            y = module(x) - module.bias
        assert relative(y, x.double() @ weight.T) < LINEAR_ERROR[quantizer], key


@pytest.mark.parametrize("quantizer", FORMATS)
def test_packed_input_projections_do_not_mislead_detection(
    quantizer: str, tmp_path: Path, base_tensors: quantize.Tensors, load_base: Callable[[], Any]
) -> None:
    layers = layers_of(base_tensors, quantizer, pack_inputs=True)
    assert "txt_in" in layers
    path = quantize.save(tmp_path / "m.safetensors", *quantize.quantize(base_tensors, quantizer, layers=layers))
    patcher = load_file(path)
    base = load_base()
    assert patcher.model.model_config.unet_config == base.model.model_config.unet_config
    assert tuple(patcher.model.diffusion_model.txt_in.weight.shape) == (models.HIDDEN, models.CONTEXT)
    assert relative(denoise(patcher), denoise(base)) < IN_DEPTH * LINEAR_ERROR[quantizer]


@pytest.mark.parametrize("quantizer", FORMATS)
def test_sizes_are_the_files(quantizer: str, load: Callable[..., Any], files: Callable[..., Path]) -> None:
    """A packed layer counts the bytes of its tensors in the file: a 4-bit model counts 4 bits."""
    import comfy.model_management
    from quant_loader.patching.patcher import packed_modules

    patcher = load(quantizer)
    specs = {spec.name: spec for spec in check(str(files(quantizer))).layers}
    packed = 0
    for key, module in packed_modules(patcher.model).items():
        with safe_open(files(quantizer), "pt") as file:
            spec = specs[key.removeprefix("diffusion_model.").removesuffix(".weight")]
            stored = sum(file.get_tensor(name).nbytes for name in spec.tensors.values())
        marker = len(module.weight._params.declaration.marker)
        size = comfy.model_management.module_size(module)
        assert size == stored + marker + module.bias.nbytes, key
        packed += size
    plain = [
        p
        for k, p in patcher.model.named_parameters()
        if not any(k.startswith(m[:-6]) for m in packed_modules(patcher.model))
    ]
    buffers = sum(b.nbytes for b in patcher.model.state_dict().values()) - packed - sum(p.nbytes for p in plain)
    assert 0 <= buffers == patcher.model_size() - packed - sum(p.nbytes for p in plain)


def test_any_mix_of_formats_and_rotation_groups(
    tmp_path: Path, base_tensors: quantize.Tensors, load_base: Callable[[], Any]
) -> None:
    tensors, marked = dict(base_tensors), {}
    names = list(quantize.layers_to_quantize(base_tensors))
    mixed = [q for q in FORMATS if q != "quanto_int8"]
    for index, name in enumerate(names):
        quantizer = mixed[index % len(mixed)]
        packed = quantize.QUANTIZERS[quantizer](tensors.pop(f"{name}.weight"))
        if quantizer == "int8_convrot" and index >= len(mixed):
            packed = rotated_rows(base_tensors[f"{name}.weight"], 64)
        tensors.update({f"{name}.{suffix}": t for suffix, t in packed.tensors.items()})
        tensors[f"{name}.comfy_quant"] = quantize.marker_tensor(packed.marker)
        marked[name] = packed.marker
    groups = {m.get("convrot_groupsize") for m in marked.values()}
    assert {64, 256} <= groups
    patcher = load_file(quantize.save(tmp_path / "mixed.safetensors", tensors))
    assert relative(denoise(patcher), denoise(load_base())) < max(LINEAR_ERROR.values())


def rotated_rows(weight: torch.Tensor, group: int) -> quantize.Packed:
    rotated = quantize.rotate(weight, group)
    scale = rotated.abs().amax(1, keepdim=True) / 127
    codes = torch.round(rotated / scale).to(torch.int8)
    marker = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": group}
    return quantize.Packed({"weight": codes, "weight_scale": scale}, marker)


@pytest.mark.parametrize("quantizer", ["int8_scalar", "int8_row", "fp8", "mxfp8", "nvfp4", "quanto_int8"])
@pytest.mark.parametrize("rows", [0, 1, 16, 17])
def test_layers_whose_sizes_are_no_multiples_of_anything(quantizer: str, rows: int, tmp_path: Path) -> None:
    N, K = 66, 36
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    if quantizer in ("nvfp4", "mxfp8") and rows == 16:
        weight = weight.clone()
    module = linear_from_file(tmp_path, weight, quantizer)
    x = torch.randn(rows, K, generator=torch.Generator().manual_seed(4))
    y = module(x)
    assert y.shape == (rows, N)
    if rows:
        # One row has the error of one sample: its spread around the mean is a third at these sizes.
        assert relative(y - module.bias, x.double() @ weight.double().T) < 1.35 * LINEAR_ERROR[quantizer]


def linear_from_file(
    tmp_path: Path, weight: torch.Tensor, quantizer: str, bias: bool = True, **more: torch.Tensor
) -> Any:
    """A module with one linear ``layer`` of ours, filled from a file the way ComfyUI fills one."""
    from quant_loader.patching.ops import LoadContext, operations
    from quant_loader.patching.state_dict import fold, read

    N, K = weight.shape
    tensors = {
        "layer.weight": weight,
        "layer.bias": torch.zeros(N, dtype=weight.dtype),
        "other.weight": weight[0].clone(),
    }
    tensors, metadata = quantize.quantize(tensors, quantizer, layers=["layer"])
    tensors.update({f"layer.{suffix}": t for suffix, t in more.items()})
    path = quantize.save(tmp_path / "layer.safetensors", tensors, metadata)
    report = check(str(path), rules="compatible")
    assert report.verdict == "ok", report.faults
    context = LoadContext()
    module = torch.nn.Module()
    module.layer = operations(context).Linear(K, N, bias=bias, dtype=torch.float32)
    module.load_state_dict(fold(read([str(path)])[0], report.layers), strict=False)
    assert not context.mismatches
    assert context.consumed == {("", "layer")}
    return module.layer


def test_any_shape_of_input(tmp_path: Path) -> None:
    """3-D, 4-D, non-contiguous and empty inputs give what their rows give."""
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    layer = linear_from_file(tmp_path, weight, "int8_row")
    x = torch.randn(2, 3, 5, 64, generator=torch.Generator().manual_seed(4))
    rows = layer(x.reshape(-1, 64))
    assert torch.equal(layer(x), rows.reshape(2, 3, 5, 48))
    assert torch.equal(layer(x[0]), rows[:15].reshape(3, 5, 48))
    turned = x[0, 0].t().contiguous().t()
    assert not turned.is_contiguous()
    assert torch.equal(layer(turned), rows[:5])
    assert layer(x[:0]).shape == (0, 3, 5, 48)


def test_smoothing_multiplies_the_input_first(tmp_path: Path) -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    smooth = torch.rand(64, generator=torch.Generator().manual_seed(5)) + 0.5
    layer = linear_from_file(tmp_path, weight, "nvfp4", pre_quant_scale=smooth)
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(4))
    wanted = (x * smooth).double() @ weight.double().T
    assert relative(layer(x), wanted) < LINEAR_ERROR["nvfp4"]
    assert relative(x @ layer.weight.dequantize().float().T, wanted) < LINEAR_ERROR["nvfp4"]


def test_a_layer_of_another_shape_is_named(tmp_path: Path, base_tensors: quantize.Tensors) -> None:
    name = "double_blocks.0.img_mlp.0"
    cut = {f"{name}.{part}": base_tensors[f"{name}.{part}"][:-64].clone() for part in ("weight", "bias")}
    tensors = {**base_tensors, **cut}
    path = quantize.save(tmp_path / "m.safetensors", *quantize.quantize(tensors, "int8_row"))
    with pytest.raises(
        ModelMismatch,
        match=r"1 of 13 quantised layers disagree.\n- double_blocks.0.img_mlp.0: the file holds 960 x 256",
    ):
        load_file(path)


def test_a_packed_layer_half_as_wide_is_named(tmp_path: Path, base_tensors: quantize.Tensors) -> None:
    """W4A4 codes that nobody packed look like packed codes of twice the width."""
    name = "double_blocks.0.img_mlp.2"
    tensors, metadata = quantize.quantize(base_tensors, "convrot_w4a4")
    wide = torch.cat((base_tensors[f"{name}.weight"],) * 2, dim=1)
    for suffix, tensor in quantize.convrot_w4a4(wide).tensors.items():
        tensors[f"{name}.{suffix}"] = tensor
    with pytest.raises(ModelMismatch, match=rf"{name}: the file holds 256 x 2048 .*, the model's layer is 256 x 1024"):
        load_file(quantize.save(tmp_path / "m.safetensors", tensors, metadata))


def test_a_layer_the_model_lacks_is_named(tmp_path: Path, base_tensors: quantize.Tensors) -> None:
    tensors = {**base_tensors, "double_blocks.0.img_mlp.7.weight": torch.randn(64, 64).to(torch.bfloat16)}
    path = quantize.save(tmp_path / "m.safetensors", *quantize.quantize(tensors, "int8_row"))
    with pytest.raises(ModelMismatch, match=r"double_blocks.0.img_mlp.7: the model has no such layer"):
        load_file(path)


def test_a_layer_the_file_lacks_is_named(tmp_path: Path, base_tensors: quantize.Tensors) -> None:
    """A sibling of another block shows that the model reads it: refused before sampling."""
    second = {
        name.replace("single_blocks.0.", "single_blocks.1."): tensor.clone()
        for name, tensor in base_tensors.items()
        if name.startswith("single_blocks.0.")
    }
    tensors, metadata = quantize.quantize({**base_tensors, **second}, "int8_row")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("single_blocks.1.linear2.")}
    path = quantize.save(tmp_path / "m.safetensors", kept, metadata)
    with pytest.raises(
        ModelMismatch, match=r"1 layer disagrees.\n- single_blocks.1.linear2: the file has no weight and no bias for it"
    ):
        load_file(path)


def test_a_layer_without_a_sibling_is_named_when_it_is_used(tmp_path: Path, base_tensors: quantize.Tensors) -> None:
    tensors, metadata = quantize.quantize(base_tensors, "int8_row")
    del tensors["final_layer.linear.weight"]
    model = load_file(quantize.save(tmp_path / "m.safetensors", tensors, metadata)).model.diffusion_model
    layer = model.final_layer.linear
    with pytest.raises(ModelMismatch, match=r"The file has no final_layer.linear.weight, which this model needs"):
        layer(torch.zeros(1, layer.in_features))


def test_a_refused_file_is_never_read(
    tmp_path: Path, base_tensors: quantize.Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quant_loader.patching import state_dict

    tensors, metadata = quantize.quantize(base_tensors, "int8_row")
    tensors = quantize.half_scale(tensors, "double_blocks.0.img_mlp.0")
    path = quantize.save(tmp_path / "m.safetensors", tensors, metadata)
    monkeypatch.setattr(state_dict, "read", lambda paths: pytest.fail("the weights of a refused file were read"))
    with pytest.raises(CheckpointRefused, match=r"double_blocks\.0\.img_mlp\.0") as refused:
        load_file(path)
    assert refused.value.report.verdict == "refused"


def test_an_unquantised_file_loads_as_stock_does(files: Callable[..., Path], load_base: Callable[[], Any]) -> None:
    assert torch.equal(denoise(load_file(files("base"))), denoise(load_base()))


@pytest.mark.parametrize("damage", ["nan", "zero"])
def test_output_guards_name_the_layer_once(damage: str, load: Callable[..., Any]) -> None:
    from quant_loader.patching.patcher import packed_modules

    patcher = load("int8_row")
    name = "double_blocks.0.img_attn.proj"
    module = packed_modules(patcher.model)[f"diffusion_model.{name}.weight"]
    params = module.weight._params
    scale = (
        torch.full_like(params.weight_scale, float("nan")) if damage == "nan" else torch.zeros_like(params.weight_scale)
    )
    damaged = type(module.weight)(
        module.weight._qdata, module.weight._layout_cls, dataclasses.replace(params, weight_scale=scale)
    )
    module.weight = torch.nn.Parameter(damaged, requires_grad=False)
    module.bias = torch.nn.Parameter(torch.zeros_like(module.bias), requires_grad=False)
    denoise(patcher)
    (first, *others) = module.context.sentences()
    assert (
        f"Layer {name} (int8_tensorwise)" in first
        if damage == "zero"
        else any(name in w for w in module.context.sentences())
    )
    assert damage == "nan" or not others
    count = len(module.context.sentences())
    denoise(patcher)
    assert len(module.context.sentences()) == count
    # Mended, as by taking off the LoRA that was the cause: after a run without the fault nothing is said any more.
    mended = type(damaged)(damaged._qdata, damaged._layout_cls, params)
    module.weight = torch.nn.Parameter(mended, requires_grad=False)
    denoise(patcher)
    assert module.context.sentences() == []


def test_a_sound_model_sets_off_no_guard(load: Callable[..., Any]) -> None:
    from quant_loader.patching.patcher import packed_modules

    patcher = load("nvfp4")
    denoise(patcher)
    modules = list(packed_modules(patcher.model).values())
    assert modules[0].context.sentences() == []


@pytest.mark.parametrize("quantizer", ["int8_row", "int8_convrot", "int8_scalar"])
def test_a_quantised_embedding_looks_up_true_rows(quantizer: str, tmp_path: Path) -> None:
    from quant_loader.patching.ops import LoadContext, operations
    from quant_loader.patching.state_dict import fold, read

    table = torch.randn(512, 256, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    path = quantize.save(tmp_path / "e.safetensors", *quantize.quantize({"e.weight": table}, quantizer, layers=["e"]))
    report = check(str(path))
    assert report.verdict == "ok", report.faults
    context, module = LoadContext(), torch.nn.Module()
    module.e = operations(context).Embedding(512, 256, dtype=torch.bfloat16)
    module.load_state_dict(fold(read([str(path)])[0], report.layers))
    ids = torch.tensor([[0, 511, 7], [3, 3, 100]])
    rows = module.e(ids, out_dtype=torch.float32)
    assert rows.dtype == torch.float32
    # 8 bits with a row's or a table's scale: a step of amax / 127 is an error of 0.0085 on Gaussian rows, and more
    # where one scale serves the whole table.
    assert relative(rows, table[ids]) < (0.012 if quantizer == "int8_scalar" else 0.0095)


def test_a_quantised_convolution_is_dequantised_and_reported(tmp_path: Path) -> None:
    from quant_loader.patching.ops import LoadContext, operations
    from quant_loader.patching.state_dict import fold, read

    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    tensors, metadata = quantize.quantize({"c.weight": weight}, "int8_convrot", layers=["c"])
    tensors["c.bias"] = torch.zeros(64, dtype=torch.bfloat16)
    path = quantize.save(tmp_path / "c.safetensors", tensors, metadata)
    report = check(str(path))
    context, module = LoadContext(), torch.nn.Module()
    module.c = operations(context).Conv2d(256, 64, 1, dtype=torch.float32)
    module.load_state_dict(fold(read([str(path)])[0], report.layers))
    x = torch.randn(1, 256, 4, 4, generator=torch.Generator().manual_seed(4))
    wanted = torch.nn.functional.conv2d(x.double(), weight.double()[:, :, None, None])
    assert relative(module.c(x), wanted) < 0.0095
    assert "Conv2d has no quantised kernel" in context.dequantised["c"]


@pytest.mark.parametrize("name", ["img_in.bias", "double_blocks.0.img_attn.norm.query_norm.scale"])
def test_a_plain_parameter_that_is_absent_is_told(name: str, tmp_path: Path, base_tensors: quantize.Tensors) -> None:
    """ComfyUI leaves a bias or a norm unset, and only its log tells. A norm without its weight does not run."""
    tensors, metadata = quantize.quantize(base_tensors, "int8_row")
    path = quantize.save(tmp_path / "m.safetensors", {k: v for k, v in tensors.items() if k != name}, metadata)
    patcher, found = loading.load_diffusion_model([path])
    text, entry = loading.answer(found, [patcher], "auto")
    (warning,) = [line for line in text.splitlines() if line.startswith("warning: ")]
    told = name.replace("norm.scale", "norm.weight")  # as ComfyUI's model calls it
    assert f"diffusion_model.{told}" in warning
    assert told in entry["summary"]
    if "norm" in name:
        with pytest.raises(ModelMismatch, match=f"The file has no {told}, which this model needs"):
            denoise(patcher)
    else:
        denoise(patcher)


def test_a_plain_layer_of_another_shape_is_told_with_its_file(tmp_path: Path, base_tensors: quantize.Tensors) -> None:
    tensors, metadata = quantize.quantize({**base_tensors, "img_in.bias": torch.zeros(7)}, "int8_row")
    path = quantize.save(tmp_path / "m.safetensors", tensors, metadata)
    with pytest.raises(ModelMismatch, match=r"m\.safetensors does not fit the model .*\n.*\n.*img_in\.bias is \(7,\)"):
        load_file(path)


def test_codes_are_not_taken_for_weights(load: Callable[..., Any]) -> None:
    model = load("int8_row").model
    with pytest.raises(RuntimeError, match=r"img_mlp\.0\.weight holds the codes of a quantised layer"):
        model.load_state_dict(model.state_dict())


def test_an_output_of_zeros_without_a_bias_sets_off_no_guard(load: Callable[..., Any]) -> None:
    """As of a conditioning that was zeroed; with a bias it is the sign of a dead weight."""
    from quant_loader.patching.patcher import packed_modules

    patcher = load("int8_row")
    module = packed_modules(patcher.model)["diffusion_model.double_blocks.0.img_mlp.0.weight"]
    module.bias = None
    with torch.no_grad():
        module(torch.zeros(1, 256))
    assert patcher.read_guards() == []
