"""What went wrong for real users, as small files: each must get the answer that would have helped."""

from __future__ import annotations

import json

import pytest
from quant_loader.checkpoint import check, verdict_text

OUTER = "model.diffusion_model."
QKV = "blocks.0.attn.qkv_proj"
CONVROT256 = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256}
PLAIN = {"format": "int8_tensorwise"}
NVFP4 = {"format": "nvfp4"}
FP8 = {"format": "float8_e4m3fn"}
W4A8 = {"format": "asym_w4a8_int8", "group_size": 16, "convrot_groupsize": 256}


def metadata(layers, **more):
    return {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers}), **more}


@pytest.fixture
def answers(file):
    """``answers(tensors, ...)``: the strict and the compatible report of one file."""

    def ask(tensors, **options):
        path = file(tensors, **options)
        return check(path), check(path, rules="compatible")

    return ask


def rules(report):
    return {fault.rule for fault in report.errors}


def test_vendor_file_without_any_declaration(answers, tools):
    strict, compatible = answers(
        tools.layers.nvfp4(f"{OUTER}transformer_blocks.0.attn1.to_q"), metadata={"config": "{}"}
    )
    assert rules(strict) == rules(compatible) == {"marker.missing"}
    assert "packed U8, 16-wide E4M3 block scales, a global scale" in strict.faults[0].message
    assert "--declare" in verdict_text(strict)


def test_markers_zeroed_by_a_damaged_download(answers, tools):
    tensors, markers = {}, {}
    for i in range(10):
        tensors |= tools.layers.fp8(f"blocks.{i}.x")
        markers[f"blocks.{i}.x"] = b"\0" * 27 if 3 <= i <= 5 else FP8
    strict, compatible = answers(tensors, markers=markers)
    assert rules(strict) == rules(compatible) == {"marker.json"}
    assert strict.summary.startswith("Refused: 3 faults in 3 of 10 layers")
    assert "zeroed" in strict.faults[0].message
    assert "the same length as the float8_e4m3fn marker" in strict.faults[0].message
    assert "Download" in strict.faults[0].fix
    (group,) = strict.groups
    assert group.count == 3
    assert group.layers == ("blocks.3.x", "blocks.4.x", "blocks.5.x")


def test_empty_marker(answers, tools):
    tensors = {**tools.layers.int8("a"), **tools.layers.int8("b")}
    strict, compatible = answers(tensors, markers={"a": tools.CONVROT, "b": b""})
    assert rules(strict) == rules(compatible) == {"marker.json"}
    assert "empty" in strict.faults[0].message
    assert "zeroed" not in strict.faults[0].message
    assert "I8" in compatible.faults[0].message


def test_markers_of_a_retired_loader(answers, tools):
    prefix = f"{OUTER}double_blocks.0.img_attn.qkv"
    strict, compatible = answers(tools.layers.int8(prefix, k=256), markers={prefix: {"convrot": True}})
    assert rules(strict) == {"extra.format.absent"}
    assert verdict_text(strict).splitlines()[1].startswith("This file is refused by the strict rules only")
    (layer,) = compatible.layers
    assert (layer.format, layer.annotations["convrot_groupsize"]) == ("int8_tensorwise", 256)
    assert any("INT8-Fast" in note for note in layer.notes)


def test_unknown_format_names_the_known_ones(answers, tools):
    strict, compatible = answers(tools.layers.int8(), markers={"a": {"format": "int3_future"}})
    assert rules(strict) == rules(compatible) == {"extra.format.unknown"}
    for known in ("int8_tensorwise", "nvfp4", "mxfp8", "asym_w4a8_int8"):
        assert known in strict.faults[0].message


@pytest.mark.parametrize(
    ("changes", "strict_rule"),
    [
        ({"weight_codebook": ("F32", [16])}, None),
        ({"weight_s_rel": ("U8", [8, 16])}, "w4a8.dtype"),
        ({}, None),
    ],
    ids=["codebook", "u8 group scales", "no codebook"],
)
def test_w4a8(answers, tools, changes, strict_rule):
    strict, compatible = answers(tools.layers.w4a8(**changes), markers={"a": W4A8})
    assert rules(strict) == ({strict_rule} if strict_rule else set())
    assert compatible.verdict == "ok"
    assert compatible.layers[0].get("has_codebook") == ("weight_codebook" in changes)


def test_w4a8_declared_in_the_header_only(answers, tools):
    tensors = {**tools.layers.w4a8("blocks.10.mlp.fc2"), **tools.layers.int8(QKV, k=256)}
    strict, _ = answers(tensors, metadata=metadata({"blocks.10.mlp.fc2": W4A8, QKV: CONVROT256}))
    assert strict.verdict == "ok"
    assert {layer.declared_by for layer in strict.layers} == {"metadata"}


def test_metadata_without_the_model_prefix(answers, tools):
    declared = metadata({"blocks.4.attn.wo": NVFP4}, quant_format="NVFP4")
    strict, compatible = answers(tools.layers.nvfp4(f"{OUTER}blocks.4.attn.wo"), metadata=declared)
    assert rules(strict) == {"layer.missing_tensors", "marker.missing"}
    assert compatible.verdict == "ok"
    assert compatible.layers[0].name == f"{OUTER}blocks.4.attn.wo"
    assert "matched 1/1 after adding model.diffusion_model." in " ".join(fault.message for fault in compatible.faults)


def test_header_and_marker_disagree(answers, tools):
    strict, compatible = answers(
        tools.layers.int8(QKV, k=256), markers={QKV: PLAIN}, metadata=metadata({QKV: CONVROT256})
    )
    assert rules(strict) == rules(compatible) == {"marker.conflict"}
    message = strict.faults[0].message
    assert '"convrot": true' in message
    assert message.index("in the header") < message.index("in its marker")


def test_metadata_is_no_json(answers, tools):
    options = {"markers": {"a": tools.CONVROT}, "metadata": {"_quantization_metadata": "{not json"}}
    strict, compatible = answers(tools.layers.int8(), **options)
    assert rules(strict) == rules(compatible) == {"meta.json"}


def test_packed_layers_that_architecture_detection_reads(answers, tools):
    names = ["img_in", "txt_in", "vector_in.in_layer", "cap_embedder.1"]
    tensors = {key: value for name in names for key, value in tools.layers.nvfp4(name).items()}
    strict, compatible = answers(tensors, markers=dict.fromkeys(names, NVFP4))
    assert strict.verdict == compatible.verdict == "ok"
    assert {layer.shape for layer in strict.layers} == {(128, 64)}


def test_a_file_name_never_decides(answers, tools):
    tensors = tools.layers.int8(weight_scale=("F32", []))
    strict, _ = answers(tensors, name="model_int8_convrot.safetensors", markers={"a": PLAIN})
    assert strict.verdict == "ok"
    assert strict.layers[0].annotations["convrot"] is False


def test_two_rotation_sizes_in_one_file(answers, tools):
    tensors = {**tools.layers.int8("a", k=256), **tools.layers.int8("b", k=64)}
    strict, _ = answers(tensors, markers={"a": CONVROT256, "b": tools.CONVROT})
    assert [layer.annotations["convrot_groupsize"] for layer in strict.layers] == [256, 64]


def test_group_512_does_not_exist(answers, tools):
    strict, compatible = answers(tools.layers.int8(k=512), markers={"a": {**CONVROT256, "convrot_groupsize": 512}})
    assert rules(strict) == rules(compatible) == {"extra.int8.groupsize"}


def test_quanto(answers, tools):
    declared = tools.quanto_metadata({"a": {"weights": "qint8", "activations": "none"}})
    fill = {"a.input_scale": 1.0, "a.output_scale": 1.0}
    strict, _ = answers(tools.layers.quanto(), metadata=declared, fill=fill)
    (layer,) = strict.layers
    assert (layer.format, layer.shape, layer.declared_by) == ("quanto_int8", (8, 16), "quanto_map")
    assert layer.tensors == {"weight": "a.weight._data", "weight_scale": "a.weight._scale"}


def test_bf16_scale_on_fp8(answers, tools):
    strict, compatible = answers(tools.layers.fp8(weight_scale=("BF16", [])), markers={"a": FP8})
    assert strict.verdict == compatible.verdict == "ok"
    (warning,) = [fault for fault in strict.faults if fault.severity == "warning"]
    assert warning.rule == "extra.fp8.scale_narrow"
    assert warning.repairable


@pytest.mark.parametrize(
    ("shape", "strict_ok", "compatible_reads"),
    [
        ([], True, "is_tensorwise_scalar"),
        ([1], False, "is_tensorwise_scalar"),
        ([64], False, "is_rowwise"),
        ([64, 1], True, "is_rowwise"),
        ([1, 1], False, "is_tensorwise_scalar"),
        ([1, 64], False, None),
    ],
)
def test_int8_scale_shapes_on_a_square_weight(answers, tools, shape, strict_ok, compatible_reads):
    strict, compatible = answers(tools.layers.int8(n=64, k=64, weight_scale=("F32", shape)), markers={"a": PLAIN})
    assert rules(strict) == (set() if strict_ok else {"int8.rowwise.shapes"})
    if compatible_reads is None:
        assert rules(compatible) == {"int8.rowwise.shapes"}
    else:
        assert compatible.layers[0].annotations[compatible_reads] is True


def test_truncated_file(answers, tools):
    strict, compatible = answers(tools.layers.int8(), markers={"a": tools.CONVROT}, cut=100)
    assert rules(strict) == rules(compatible) == {"crash.file"}
    assert "Download" in strict.faults[0].fix


def test_bytes_after_the_last_tensor_can_be_cut(answers, tools):
    strict, _ = answers(tools.layers.int8(), markers={"a": tools.CONVROT}, tail=bytes(5))
    assert rules(strict) == {"crash.file"}
    assert "5 bytes follow" in strict.faults[0].message
    assert "`quant-loader repair`" in strict.faults[0].fix
    assert strict.faults[0].repairable
    strict, _ = answers({}, tail=bytes(5))  # nothing else is in the file: nothing to keep
    assert rules(strict) == {"crash.file"}
    assert "`quant-loader repair`" not in strict.faults[0].fix


@pytest.mark.parametrize(
    ("make", "mendable"),
    [
        (lambda t: (t.layers.int8(weight_scale=("F32", [8])), {"a": PLAIN}), True),
        (lambda t: (t.layers.nvfp4(n=127), {"a": NVFP4}), False),
        (lambda t: ({"a.weight": ("F8_E4M3", [8, 8])}, {}), False),
    ],
)
def test_what_compatible_accepts_can_be_mended_or_not(answers, tools, make, mendable):
    tensors, markers = make(tools)
    strict, compatible = answers(tensors, markers=markers)
    assert compatible.verdict != "refused"
    (hint,) = [fault for fault in strict.faults if fault.rule == "extra.rules.compatible"]
    assert hint.fix.startswith("Set rules to compatible")
    assert ("(lossless)" in hint.fix) is mendable
    assert ("does not help" in hint.fix) is not mendable


def test_a_type_fault_names_both_types(answers, tools):
    strict, _ = answers(tools.layers.int8(weight_scale=("BF16", [8, 1])), markers={"a": PLAIN})
    (fault,) = strict.errors
    assert (fault.tensor, fault.expected, fault.found) == ("a.weight_scale", "I8 and F32", "I8 and BF16")


def test_header_length_of_2_to_the_62(answers, tools):
    strict, _ = answers(tools.layers.int8(), header_length=2**62)
    assert rules(strict) == {"crash.file"}


def test_pre_quant_scale(answers, tools):
    strict, _ = answers(tools.layers.nvfp4(pre_quant_scale=("BF16", [64])), markers={"a": NVFP4})
    assert strict.verdict == "ok"
    assert strict.layers[0].annotations["has_pre_quant_scale"] is True
    assert strict.layers[0].tensors["pre_quant_scale"] == "a.pre_quant_scale"


def test_one_nan_row_scale(answers, tools):
    scales = b"".join(tools.number("F32", float("nan") if row == 5 else 0.004) for row in range(8))
    strict, compatible = answers(tools.layers.int8(QKV, weight_scale=("F32", [8, 1], scales)), markers={QKV: PLAIN})
    assert rules(strict) == rules(compatible) == {"extra.scale.nonfinite"}
    assert "row 5" in strict.faults[0].message
    assert QKV in strict.faults[0].message


def test_int8_embedding(answers, tools):
    strict, _ = answers(tools.layers.int8("model.embed_tokens"), markers={"model.embed_tokens": PLAIN})
    assert strict.verdict == "ok"
    assert "embedding table" in strict.layers[0].notes


def test_modelopt_export(answers, tools):
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["proj_out"]}
    declared = {"format": "pt", "quantization_config": json.dumps(config)}
    strict, compatible = answers(tools.layers.nvfp4("transformer_blocks.0.attn.to_q"), metadata=declared)
    assert "extra.foreign.modelopt" in rules(strict) & rules(compatible)
    assert "ModelOpt" in verdict_text(strict)


def test_svdquant_file(answers):
    base = "transformer_blocks.0.attn.to_qkv"
    tensors = {
        f"{base}.qweight": ("I8", [192, 32]),
        f"{base}.wscales": ("BF16", [1, 192]),
        f"{base}.proj_down": ("BF16", [64, 32]),
        f"{base}.proj_up": ("BF16", [192, 32]),
        f"{base}.smooth_factor": ("BF16", [64]),
    }
    strict, compatible = answers(tensors, metadata={"quantization_config": '{"method": "svdquant"}'})
    assert rules(strict) == rules(compatible) == {"extra.foreign.svdquant"}
    assert "Nunchaku" in verdict_text(strict)


def test_every_format_in_one_file(answers, tools):
    tensors = {
        **tools.layers.int8("b.a", k=256),
        **tools.layers.nvfp4("b.b"),
        **tools.layers.fp8("b.c"),
        **tools.layers.w4a4("b.d"),
        **tools.layers.w4a8("b.e", weight_codebook=("F32", [16])),
        **tools.layers.mxfp8("b.f", k=64, weight_scale=("F8_E8M0", [128, 4])),
        "norm.weight": ("BF16", [64]),
    }
    markers = {
        "b.a": CONVROT256,
        "b.b": NVFP4,
        "b.c": {**FP8, "full_precision_matrix_mult": True},
        "b.d": {"format": "convrot_w4a4", "convrot_groupsize": 256},
        "b.e": W4A8,
        "b.f": {"format": "mxfp8"},
    }
    strict, compatible = answers(tensors, markers=markers)
    assert strict.verdict == compatible.verdict == "ok"
    assert set(strict.formats) == {markers[layer]["format"] for layer in markers}
    notices = " ".join(fault.message for fault in strict.faults if fault.severity == "notice")
    assert "stored as U8" in notices
    assert "resolve.unsupported" in notices


def test_w4a4_without_group_size(answers, tools):
    strict, _ = answers(tools.layers.w4a4(), markers={"a": {"format": "convrot_w4a4"}})
    assert strict.layers[0].annotations == {"convrot_groupsize": 256, "linear_dtype": "int4"}
    assert "no convrot_groupsize: 256 assumed" in strict.layers[0].notes


def test_w4a4_that_was_never_packed_is_twice_as_wide(answers, tools):
    strict, _ = answers(tools.layers.w4a4(weight=("I8", [8, 256])), markers={"a": {"format": "convrot_w4a4"}})
    assert strict.layers[0].shape == (8, 512)


def test_int8_without_a_marker_is_never_guessed(answers, tools):
    strict, compatible = answers(tools.layers.int8())
    assert rules(strict) == rules(compatible) == {"marker.missing"}
    assert "rotated or not" in strict.faults[0].message


def test_nested_params(answers, tools):
    nested = {**PLAIN, "params": {"convrot": True, "convrot_groupsize": 64}}
    strict, compatible = answers(tools.layers.int8(), markers={"a": nested})
    assert rules(strict) == {"extra.params.contradict"}
    assert strict.faults[0].fix.startswith("Set rules to compatible, which reads the nested settings")
    assert compatible.layers[0].annotations["convrot"] is True
    assert compatible.layers[0].annotations["convrot_groupsize"] == 64


def test_nested_params_that_say_something_else_are_refused_by_both_rules(answers, tools):
    """No rules make one of two statements the right one: the fix must not send anybody there."""
    contradicting = {**PLAIN, "convrot": False, "params": {"convrot": True}}
    for report in answers(tools.layers.int8(), markers={"a": contradicting}):
        (fault,) = report.errors
        assert fault.rule == "extra.params.contradict"
        assert fault.fix == "Export the layer again with one of the two left out."


@pytest.mark.parametrize(
    ("layer", "marker", "convrot"),
    [
        ("fp8", {"format": "float8_e4m3fn"}, True),
        ("nvfp4", {"format": "nvfp4"}, True),
        ("w4a4", {"format": "convrot_w4a4"}, False),
        ("w4a8", {"format": "asym_w4a8_int8"}, False),
    ],
)
def test_a_nested_rotation_that_the_format_leaves_no_choice_in_is_one_fault(answers, tools, layer, marker, convrot):
    parts = getattr(tools.layers, layer)()
    for report in answers(parts, markers={"a": {**marker, "params": {"convrot": convrot}}}):
        (fault,) = report.errors
        assert fault.rule in ("extra.params.contradict", "extra.convrot.unsupported")
        assert "compatible" not in fault.fix


def test_unaligned_int8(answers, tools):
    strict, _ = answers(tools.layers.int8(n=66, k=36), markers={"a": PLAIN})
    assert strict.layers[0].shape == (66, 36)


def test_marker_without_a_weight(answers):
    strict, compatible = answers({"norm.weight": ("BF16", [64])}, markers={QKV: CONVROT256})
    assert rules(strict) == rules(compatible) == {"layer.missing_tensors"}


@pytest.mark.parametrize("elements", [0, 2])
@pytest.mark.parametrize("outer", ["", OUTER])
def test_legacy_scaled_fp8(answers, tools, outer, elements):
    part = {"weight_scale": None, "scale_weight": ("F32", [])}
    tensors = {
        **tools.layers.fp8(f"{outer}a", **part, scale_input=("F32", [], tools.number("F32", 0.5))),
        **tools.layers.fp8(f"{outer}b", **part, scale_input=("F32", [], tools.number("F32", 1.0))),
        f"{outer}scaled_fp8": ("F8_E4M3", [elements]),
    }
    strict, compatible = answers(tensors)
    assert rules(strict) == {"marker.missing"}
    assert verdict_text(strict).splitlines()[1].startswith("This file is refused by the strict rules only")
    first, second = compatible.layers
    assert first.tensors["weight_scale"] == f"{outer}a.scale_weight"
    assert first.annotations == {"activation_scheme": "static", "full_precision_matrix_mult": elements == 2}
    assert second.annotations["activation_scheme"] == "dynamic"
    assert "input_scale" not in second.tensors


def test_row_scaled_fp8_without_a_declaration(answers, tools):
    tensors = tools.layers.fp8("encoder.block.0.layer.0.SelfAttention.q", weight_scale=("F32", [16, 1]))
    strict, compatible = answers(tensors)
    assert rules(strict) == rules(compatible) == {"marker.missing"}
    assert "row or block scales" in strict.faults[0].message


def test_plain_fp8_storage(answers):
    tensors = {"a.weight": ("F8_E4M3", [8, 8]), "b.weight": ("F8_E4M3", [8]), "n.weight": ("BF16", [8])}
    tensors |= {"a.bias": ("BF16", [8]), "n.bias": ("BF16", [8])}
    strict, compatible = answers(tensors)
    assert rules(strict) == {"marker.missing"}
    assert compatible.verdict == "unquantized"
    assert [fault.rule for fault in compatible.faults] == ["extra.storage.plain"]


def test_int8_convolution_inside_a_vae(answers, tools):
    tensors = {"decoder.conv_in.weight": ("I8", [8, 4, 3, 3]), "decoder.conv_in.weight_scale": ("F32", [8, 1])}
    strict, compatible = answers(tensors, markers={"decoder.conv_in": PLAIN})
    assert rules(strict) == rules(compatible) == {"int8.rowwise.shapes"}
    assert "convolution" in strict.faults[0].message


def test_expert_bank_is_named(answers, tools):
    tensors = {"mlp.experts.weight": ("I8", [4, 8, 64]), "mlp.experts.weight_scale": ("F32", [])}
    strict, _ = answers(tensors, markers={"mlp.experts": PLAIN})
    assert rules(strict) == {"int8.scalar.rank"}
    assert "bank of 4 experts" in strict.faults[0].message


def test_unreadable_marker_on_an_unquantised_layer(answers, tools):
    tensors = {**tools.layers.int8("a"), "b.weight": ("BF16", [8, 8])}
    strict, compatible = answers(tensors, markers={"a": tools.CONVROT, "b": b"\0\0\0"})
    assert rules(strict) == {"marker.json"}
    assert compatible.verdict == "ok"
    assert [layer.name for layer in compatible.layers] == ["a"]


def test_unscaled_weights_of_a_legacy_file_are_plain_storage(answers, tools):
    tensors = {
        **tools.layers.fp8("a", weight_scale=None, scale_weight=("F32", [])),
        "embed.weight": ("F8_E4M3", [8, 8]),
        "embed.bias": ("F8_E4M3", [8]),
        "scaled_fp8": ("F8_E4M3", [0]),
    }
    _, compatible = answers(tensors)
    assert compatible.verdict == "ok"
    assert [layer.name for layer in compatible.layers] == ["a"]
    assert "extra.storage.plain" in {fault.rule for fault in compatible.faults}
    tensors["embed.weight_scale"] = ("F32", [])
    _, compatible = answers(tensors)
    assert rules(compatible) == {"marker.missing"}


def test_plain_storage_needs_a_file_without_scales(answers, tools):
    tensors = {"a.weight": ("F8_E4M3", [8, 8]), **tools.layers.int8("b")}
    _, compatible = answers(tensors, markers={"b": tools.CONVROT})
    assert rules(compatible) == {"marker.missing"}
