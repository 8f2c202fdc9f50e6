"""Repair: every lossless mend, what is refused, and that nothing else of the file changes."""

from __future__ import annotations

import json

import numpy as np
import pytest
from quant_loader.automation.declare import parse_declaration
from quant_loader.automation.errors import Refused, RequestError
from quant_loader.automation.repair import repair
from quant_loader.checkpoint import check

LAYER = "blocks.0.attn.qkv_proj"
PREFIX = "model.diffusion_model."


def floats(tensor):
    return np.frombuffer(tensor.data, "<f4")


def unchanged(before, after, *except_for):
    """Every tensor but the named ones has the same dtype, shape and bytes."""
    assert set(before.tensors) - set(except_for) == set(after.tensors) - set(except_for)
    for name in set(before.tensors) - set(except_for):
        assert after.tensors[name] == before.tensors[name], name


@pytest.fixture
def mend(kit):
    """Mends a file of these tensors; returns (file before, file after, outcome)."""

    def run(tensors, meta=None, declare=(), keep=None, **damage):
        source = kit.file("in.safetensors", tensors, meta, **damage)
        target = kit.folder / "out.safetensors"
        outcome = repair(source, target, [parse_declaration(text) for text in declare], keep=keep)
        assert check([target], rules="strict").verdict == "ok"
        before = None if damage else kit.read(source)
        return before, kit.read(target), outcome

    return run


# -- scales ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "mended"), [((256,), (256, 1)), ((1,), ()), ((1, 1), ())])
def test_int8_scale_shapes(kit, mend, shape, mended):
    before, after, outcome = mend(kit.int8(LAYER, {"format": "int8_tensorwise"}, kit.scale("F32", *shape)))
    name = f"{LAYER}.weight_scale"
    unchanged(before, after, name)
    assert after.tensors[name].shape == mended
    assert after.tensors[name].data == before.tensors[name].data
    assert [change.kind for change in outcome.changes] == ["reshaped"]


def test_scale_that_may_mean_columns_is_refused(kit, mend):
    with pytest.raises(Refused) as refusal:
        mend(kit.int8(LAYER, weight_scale=kit.scale("F32", 1, 256)))
    assert "incompatible weight/scale shapes" in refusal.value.reasons[0]


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F64"])
def test_narrow_scales_are_widened_exactly(kit, mend, dtype):
    given = kit.scale(dtype, 256, 1)
    before, after, _ = mend(kit.int8(LAYER, weight_scale=given))
    name = f"{LAYER}.weight_scale"
    unchanged(before, after, name)
    raw = np.frombuffer(given.data, {"BF16": "<u2", "F16": "<f2", "F64": "<f8"}[dtype])
    expected = (raw.astype("<u4") << 16).view("<f4") if dtype == "BF16" else raw.astype("<f4")
    assert after.tensors[name].dtype == "F32"
    assert np.array_equal(floats(after.tensors[name]), expected)


def test_double_scales_that_single_precision_cannot_hold_are_refused(kit, mend):
    values = np.full(256, 1 / 3, "<f8")
    with pytest.raises(Refused):
        mend(kit.int8(LAYER, weight_scale=kit.T("F64", (256, 1), values.tobytes())))


def test_w4a4_column_scale(kit, mend):
    tensors = {
        f"{LAYER}.weight": kit.noise("I8", 64, 128),
        f"{LAYER}.weight_scale": kit.scale("F32", 64, 1),
        f"{LAYER}.comfy_quant": kit.marker({"format": "convrot_w4a4", "convrot_groupsize": 256}),
    }
    _, after, _ = mend(tensors)
    assert after.tensors[f"{LAYER}.weight_scale"].shape == (64,)


def test_w4a8_bytes_are_relabelled_and_narrow_row_scales_widened(kit, mend):
    tensors = {
        f"{LAYER}.weight": kit.noise("I8", 64, 128),
        f"{LAYER}.weight_s_rel": kit.T("U8", (64, 16), bytes([0x58]) * 1024),
        f"{LAYER}.weight_s_channel": kit.scale("BF16", 64, 1),
        f"{LAYER}.comfy_quant": kit.marker({"format": "asym_w4a8_int8", "group_size": 16, "convrot_groupsize": 256}),
    }
    before, after, outcome = mend(tensors)
    assert after.tensors[f"{LAYER}.weight_s_rel"] == ("F8_E4M3", (64, 16), before.tensors[f"{LAYER}.weight_s_rel"].data)
    assert after.tensors[f"{LAYER}.weight_s_channel"][:2] == ("F32", (64,))
    assert sorted(change.kind for change in outcome.changes) == ["relabelled", "reshaped", "widened"]


def test_fp8_narrow_scale(kit, mend):
    _, after, _ = mend(kit.fp8(LAYER, {"format": "float8_e4m3fn"}, dtype="BF16"))
    assert after.tensors[f"{LAYER}.weight_scale"][:2] == ("F32", ())


def test_padded_nvfp4_scales_have_no_strict_form(kit, mend):
    tensors = kit.nvfp4(LAYER, {"format": "nvfp4"}, N=64)
    tensors[f"{LAYER}.weight_scale"] = kit.noise("F8_E4M3", 128, 4)
    with pytest.raises(Refused) as refusal:
        mend(tensors)
    assert any("ompatible" in reason for reason in refusal.value.reasons)


# -- declarations ----------------------------------------------------------------------------------------------------


def conf_of(after, layer=LAYER):
    return json.loads(after.tensors[f"{layer}.comfy_quant"].data)


def test_marker_without_format_is_completed(kit, mend):
    before, after, _ = mend(kit.int8(LAYER, {"convrot": True}))
    unchanged(before, after, f"{LAYER}.comfy_quant")
    assert conf_of(after) == kit.convrot


def test_nested_settings_are_raised(kit, mend):
    nested = {"format": "int8_tensorwise", "params": {"convrot": True, "convrot_groupsize": 64}}
    _, after, _ = mend(kit.int8(LAYER, nested))
    assert conf_of(after) == {**nested, "convrot": True, "convrot_groupsize": 64}


def test_loosely_typed_settings_are_written_plainly(kit, mend):
    _, after, _ = mend(
        kit.int8(LAYER, {"format": "int8_tensorwise", "convrot": 1, "convrot_groupsize": "64", "tool": "x"})
    )
    conf = conf_of(after)
    assert conf == {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 64, "tool": "x"}
    assert conf["convrot"] is True


def test_sound_markers_keep_their_bytes(kit, mend):
    spaced = b'{ "format":"int8_tensorwise",\n "note": "kept" }'
    tensors = {**kit.int8("a", spaced), **kit.int8("b", weight_scale=kit.scale("F32", 256))}
    _, after, _ = mend(tensors)
    assert after.tensors["a.comfy_quant"].data == spaced


def test_nul_bytes_after_complete_json_are_dropped(kit, mend):
    text = json.dumps(kit.convrot).encode()
    _, after, _ = mend(kit.int8(LAYER, text + b"\0" * 9))
    assert after.tensors[f"{LAYER}.comfy_quant"].data == text


def test_halves_in_header_and_marker_are_joined(kit, mend):
    tensors = kit.int8(LAYER, {"convrot": True, "convrot_groupsize": 64})
    _, after, _ = mend(tensors, kit.metadata({LAYER: {"format": "int8_tensorwise"}}, author="me"))
    expected = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 64}
    assert conf_of(after) == expected
    assert json.loads(after.metadata["_quantization_metadata"])["layers"] == {LAYER: expected}
    assert after.metadata["author"] == "me"


def test_metadata_names_get_the_model_prefix(kit, mend):
    meta = kit.metadata({"blocks.4.attn.wo": {"format": "nvfp4"}}, quant_format="NVFP4")
    before, after, _ = mend(kit.nvfp4(PREFIX + "blocks.4.attn.wo"), meta)
    unchanged(before, after)
    document = json.loads(after.metadata["_quantization_metadata"])
    assert document == {"format_version": "1.0", "layers": {PREFIX + "blocks.4.attn.wo": {"format": "nvfp4"}}}
    assert after.metadata["quant_format"] == "NVFP4"


def test_unreadable_marker_of_an_unquantised_layer_is_dropped(kit, mend):
    tensors = {
        **kit.int8("a", {"convrot": True}),
        "b.weight": kit.noise("BF16", 16, 16),
        "b.comfy_quant": kit.marker(b""),
    }
    _, after, _ = mend(tensors)
    assert "b.comfy_quant" not in after.tensors


def test_contradiction_needs_a_choice(kit, mend):
    tensors, meta = kit.int8(LAYER, {"format": "int8_tensorwise"}), kit.metadata({LAYER: kit.convrot})
    with pytest.raises(Refused) as refusal:
        mend(tensors, meta)
    assert "declared twice" in refusal.value.reasons[0]


@pytest.mark.parametrize("keep", ["marker", "header"])
def test_contradiction_settled_by_the_person(kit, mend, keep):
    tensors, meta = kit.int8(LAYER, {"format": "int8_tensorwise"}), kit.metadata({LAYER: kit.convrot})
    _, after, outcome = mend(tensors, meta, keep=keep)
    expected = {"format": "int8_tensorwise"} if keep == "marker" else kit.convrot
    assert conf_of(after) == expected
    assert json.loads(after.metadata["_quantization_metadata"])["layers"][LAYER] == expected
    assert bool(outcome.report.layers[0].get("convrot")) == (keep == "header")


def test_unreadable_metadata_is_dropped_when_the_markers_are_chosen(kit, mend):
    meta = {"_quantization_metadata": "{not json", "author": "me"}
    with pytest.raises(Refused):
        mend(kit.int8(LAYER), meta)
    _, after, _ = mend_again(kit, kit.int8(LAYER), meta)
    assert after.metadata == {"author": "me"}


def mend_again(kit, tensors, meta):
    source = kit.file("again.safetensors", tensors, meta)
    outcome = repair(source, kit.folder / "again-out.safetensors", keep="marker")
    return kit.read(source), kit.read(kit.folder / "again-out.safetensors"), outcome


def test_mxfp8_flag_over_padded_scales_becomes_markers(kit, mend):
    tensors = {f"{LAYER}.weight": kit.noise("F8_E4M3", 64, 64), f"{LAYER}.weight_scale": kit.noise("U8", 128, 4)}
    _, after, _ = mend(tensors, {"quant_format": "mxfp8", "author": "me"})
    assert conf_of(after) == {"format": "mxfp8"}
    assert after.metadata == {"author": "me"}


# -- the legacy fp8 spelling -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("elements", [0, 2])
def test_legacy_scaled_fp8(kit, mend, elements):
    tensors = {
        "scaled_fp8": kit.noise("F8_E4M3", elements),
        **kit.fp8("a", suffix="scale_weight"),
        **kit.fp8("b", suffix="scale_weight", dtype="BF16"),
        "a.scale_input": kit.T("F32", (), np.float32(1.0).tobytes()),
        "b.scale_input": kit.T("F32", (), np.float32(0.5).tobytes()),
        "norm.weight": kit.noise("BF16", 64),
    }
    before, after, _ = mend(tensors)
    names = {f"{layer}.{suffix}" for layer in "ab" for suffix in ("weight", "weight_scale", "comfy_quant")}
    assert set(after.tensors) == {*names, "b.input_scale", "norm.weight"}
    assert conf_of(after, "a") == {
        "format": "float8_e4m3fn",
        **({"full_precision_matrix_mult": True} if elements else {}),
    }
    assert after.tensors["a.weight"] == before.tensors["a.weight"]
    assert after.tensors["a.weight_scale"] == before.tensors["a.scale_weight"]
    assert after.tensors["b.weight_scale"].dtype == "F32"


# -- declarations by the person --------------------------------------------------------------------------------------


def test_declared_format_is_written(kit, mend):
    before, after, _ = mend(kit.nvfp4(LAYER), declare=["nvfp4"])
    unchanged(before, after, f"{LAYER}.comfy_quant")
    assert conf_of(after) == {"format": "nvfp4"}


def test_declaration_with_settings_and_patterns(kit, mend):
    tensors = {
        **kit.int8("blocks.0.a", None),
        **kit.int8("blocks.0.b", None),
        **kit.fp8("c"),
        "table.weight": kit.noise("F32", 8, 8),
    }
    declare = [
        "*.a=int8_tensorwise,convrot=true,convrot_groupsize=64",
        "int8_tensorwise",
        'c={"format": "float8_e4m3fn"}',
    ]
    _, after, _ = mend(tensors, declare=declare)
    assert conf_of(after, "blocks.0.a") == {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 64}
    assert conf_of(after, "blocks.0.b") == {"format": "int8_tensorwise"}
    assert conf_of(after, "c") == {"format": "float8_e4m3fn"}
    assert "table.comfy_quant" not in after.tensors


def test_declaration_reaches_the_legacy_spelling(kit, mend):
    _, after, _ = mend(kit.fp8(LAYER, suffix="scale_weight"), declare=["float8_e4m3fn"])
    assert set(after.tensors) == {f"{LAYER}.weight", f"{LAYER}.weight_scale", f"{LAYER}.comfy_quant"}


def test_empty_marker_is_filled_by_a_declaration(kit, mend):
    _, after, _ = mend(kit.int8(LAYER, b""), declare=[f"{LAYER}=int8_tensorwise"])
    assert conf_of(after) == {"format": "int8_tensorwise"}


def test_zeroed_marker_needs_its_layer_named(kit, mend):
    tensors = {**kit.fp8("a", b"\0" * 27), **kit.fp8("b", {"format": "float8_e4m3fn"}), **kit.fp8("c")}
    with pytest.raises(Refused) as refusal:
        mend(tensors, declare=["float8_e4m3fn"])
    assert "zeroed" in refusal.value.reasons[0]
    _, after, _ = mend(tensors, declare=["[ac]=float8_e4m3fn"])
    assert conf_of(after, "a") == {"format": "float8_e4m3fn"}


def test_declaration_must_not_contradict_the_marker(kit, mend):
    with pytest.raises(RequestError, match="its marker says convrot true"):
        mend(kit.int8(LAYER, {"convrot": True, "tool": "x"}), declare=["int8_tensorwise,convrot=false"])


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (["float8_e4m3fn"], "no layer lacks a declaration"),
        (["nothing.*=int8_tensorwise"], "no layer named nothing"),
        (["int8_tensorwise", "convrot_w4a4"], "fits several"),
    ],
)
def test_declarations_that_cannot_be_meant(kit, mend, declare, message):
    with pytest.raises(RequestError, match=message):
        mend(kit.int8(LAYER, None, kit.scale("F32", 256)), declare=declare)


@pytest.mark.parametrize(
    "text",
    [
        "int9",
        "int8_tensorwise,convrot",
        "int8_tensorwise,convrot=maybe",
        "int8_tensorwise,speed=9",
        "{",
        "[1]",
        "=nvfp4x",
        "",
    ],
)
def test_bad_declarations_are_named(text):
    with pytest.raises(RequestError, match="--declare"):
        parse_declaration(text)


# -- files -----------------------------------------------------------------------------------------------------------


def test_trailing_bytes_are_dropped(kit, mend):
    tensors = kit.int8(LAYER)
    _, after, outcome = mend(tensors, tail=b"\0" * 100)
    assert after.tensors == tensors
    assert "100 bytes" in outcome.changes[0].text


def test_trailing_bytes_together_with_other_mends(kit, mend):
    _, after, outcome = mend(kit.int8(LAYER, {"convrot": True}, kit.scale("BF16", 256)), tail=b"x")
    assert after.tensors[f"{LAYER}.weight_scale"][:2] == ("F32", (256, 1))
    assert len(outcome.changes) == 4


def test_quanto_files_lose_trailing_bytes_only(kit):
    import base64

    layer = "blocks.0.attn.wq"
    one = kit.T("BF16", (), b"\x80\x3f")
    tensors = {
        f"{layer}.weight._data": kit.noise("I8", 64, 64),
        f"{layer}.weight._scale": kit.scale("BF16", 64, 1),
        f"{layer}.input_scale": one,
        f"{layer}.output_scale": one,
    }
    table = base64.b64encode(json.dumps({layer: {"weights": "qint8", "activations": "none"}}).encode()).decode()
    source = kit.file(
        "q.safetensors", tensors, {"quantization_format": "quanto", "quantization_map_base64": table}, tail=b"x"
    )
    repair(source, kit.folder / "out.safetensors")
    assert kit.read(kit.folder / "out.safetensors").tensors == tensors


def test_every_tensor_of_the_new_file_is_aligned(kit, mend):
    tensors = {"a.weight": kit.noise("U8", 3), **kit.int8(LAYER, {"convrot": True}), "n.weight": kit.noise("BF16", 5)}
    tensors["a.lookup"] = tensors.pop("a.weight")
    mend(tensors)
    raw = (kit.folder / "out.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    widths = {"F32": 4, "BF16": 2}
    assert size % 8 == 0
    assert all(entry["data_offsets"][0] % widths.get(entry["dtype"], 1) == 0 for entry in header.values())


def test_sound_file_is_left_alone(kit, mend):
    with pytest.raises(Refused, match="nothing to mend"):
        mend(kit.int8(LAYER))
    assert not (kit.folder / "out.safetensors").exists()


@pytest.mark.parametrize(
    "conf", [{"format": "int3_future"}, {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 512}]
)
def test_what_is_not_lossless_is_refused_with_the_reason(kit, mend, conf):
    with pytest.raises(Refused) as refusal:
        mend(kit.int8(LAYER, conf, K=512))
    assert LAYER in refusal.value.reasons[0]
    assert sorted(path.name for path in kit.folder.iterdir()) == ["in.safetensors"]


def test_nan_scale_is_found_before_anything_is_written(kit, mend):
    values = np.full(256, 0.004, "<f4")
    values[5] = np.nan
    with pytest.raises(Refused) as refusal:
        mend(kit.int8(LAYER, {"convrot": True}, kit.T("F32", (256,), values.tobytes())))
    assert any("NaN in row 5" in reason for reason in refusal.value.reasons)
    assert sorted(path.name for path in kit.folder.iterdir()) == ["in.safetensors"]
