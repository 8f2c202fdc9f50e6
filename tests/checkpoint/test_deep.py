"""The deep check on made files: each fault is found, and sound files of every format and family stay silent.

The quantisers here are written from the formats' formulas, one value at a time where that is affordable.
"""

import json
import os
import struct
import time
import tracemalloc
import zlib

import numpy as np
import pytest
from quant_loader.checkpoint import RULES, check, open_checkpoint
from quant_loader.checkpoint.deep import deep_check
from quant_loader.checkpoint.deep.decode import tile_offsets
from quant_loader.checkpoint.deep.nibbles import Witnesses, pair_scores
from quant_loader.checkpoint.deep.rotation import hadamard, rotate
from quant_loader.checkpoint.findings import Findings
from quant_loader.checkpoint.header import RawFile

N, K = 128, 1024


# -- files -----------------------------------------------------------------------------------------------------------


def save(path, tensors):
    """Tensors in the given order: name -> (dtype, array of the stored bytes' type)."""
    header, offset = {}, 0
    for name, (dtype, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(data.shape), "data_offsets": [offset, offset + data.nbytes]}
        offset += data.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data.tobytes() for _, data in tensors.values()))
    return path


def span(path, name):
    """Absolute byte range of a tensor."""
    with path.open("rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        begin, end = json.loads(file.read(length))[name]["data_offsets"]
    return 8 + length + begin, 8 + length + end


def overwrite(path, start, data):
    with path.open("r+b") as file:
        file.seek(start)
        file.write(data)
    return path


def found(path, rules="strict"):
    report = check(path, rules, deep=True)
    others = [
        fault for fault in report.faults if not fault.rule.startswith("extra.deep.") and fault.severity == "error"
    ]
    assert others == [], "the made file must be sound otherwise"
    return [fault for fault in report.faults if fault.rule.startswith("extra.deep.")]


def rules_of(path, rules="strict"):
    return sorted({fault.rule for fault in found(path, rules)})


# -- formats, from their formulas ------------------------------------------------------------------------------------


def marker(**conf):
    return "U8", np.frombuffer(json.dumps(conf).encode(), np.uint8)


def e4m3_value(code):
    exponent, mantissa = (code >> 3) & 15, code & 7
    return mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


E4M3 = np.array([e4m3_value(code) for code in range(0x7F)])
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def code_of(levels, magnitude):
    """Nearest level (which way a tie goes does not matter here)."""
    return np.abs(magnitude[..., None] - levels).argmin(axis=-1)


def code_of_e4m3(magnitude):
    middles = (E4M3[1:] + E4M3[:-1]) / 2
    return np.digitize(magnitude, middles)


def kron_hadamard(g):
    h4 = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], float)
    return h4 / 2 if g == 4 else np.kron(kron_hadamard(g // 4), h4 / 2)


def rotated(w, g):
    h = kron_hadamard(g)
    return np.concatenate([w[:, i : i + g] @ h for i in range(0, w.shape[1], g)], axis=1)


def tiled(scales):
    """128x4 tile order, one scale at a time, from the offset formula."""
    rows, cols = -(-scales.shape[0] // 128) * 128, -(-scales.shape[1] // 4) * 4
    out = np.zeros(rows * cols, np.uint8)
    for r in range(scales.shape[0]):
        for c in range(scales.shape[1]):
            at = ((r // 128) * (cols // 4) + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4
            out[at] = scales[r, c]
    return out.reshape(rows, cols)


def int8(name, w, convrot=None, true=None):
    if true:
        w = rotated(w, true)
    scale = np.abs(w).max(1, keepdims=True) / 127
    conf = {"convrot": True, "convrot_groupsize": convrot} if convrot else {}
    q = np.rint(w / np.where(scale == 0, 1, scale)).astype(np.int8)
    return {
        f"{name}.weight": ("I8", q),
        f"{name}.weight_scale": ("F32", np.where(scale == 0, 1e-12, scale).astype(np.float32)),
        f"{name}.comfy_quant": marker(format="int8_tensorwise", **conf),
    }


def w4a4(name, w, convrot=256, true=256, exchanged=False):
    w = rotated(w, true) if true else w
    scale = np.abs(w).max(1) / 7
    q = np.rint(w / scale[:, None]).astype(np.int8) & 15
    even, odd = (q[:, 1::2], q[:, ::2]) if exchanged else (q[:, ::2], q[:, 1::2])
    return {
        f"{name}.weight": ("I8", (even | odd << 4).astype(np.uint8).view(np.int8)),
        f"{name}.weight_scale": ("F32", scale.astype(np.float32)),
        f"{name}.comfy_quant": marker(format="convrot_w4a4", convrot_groupsize=convrot),
    }


def w4a8(name, w, convrot=256, true=256, exchanged=False, codebook=False):
    w = rotated(w, true) if true else w
    channel = np.abs(w).max(1) / 127
    groups = (w / channel[:, None]).reshape(len(w), -1, 16)
    book = np.linspace(-7, 8, 16) if codebook else np.arange(-8.0, 8)
    rel = np.maximum(code_of_e4m3(np.abs(groups).max(2) / 7), 1)
    q = np.abs(groups[..., None] / E4M3[rel][..., None, None] - book).argmin(-1).reshape(w.shape).astype(np.uint8)
    even, odd = (q[:, 1::2], q[:, ::2]) if exchanged else (q[:, ::2], q[:, 1::2])
    parts = {
        f"{name}.weight": ("I8", (even | odd << 4).view(np.int8)),
        f"{name}.weight_s_rel": ("F8_E4M3", rel.astype(np.uint8)),
        f"{name}.weight_s_channel": ("F32", channel.astype(np.float32)),
        f"{name}.comfy_quant": marker(format="asym_w4a8_int8", group_size=16, convrot_groupsize=convrot),
    }
    if codebook:
        parts[f"{name}.weight_codebook"] = ("F32", book.astype(np.float32))
    return parts


def nvfp4(name, w, in_tiles=True, exchanged=False):
    groups = w.reshape(len(w), -1, 16)
    total = np.abs(w).max() / 2688
    scales = code_of_e4m3(np.abs(groups).max(2) / 6 / total)
    q = code_of(E2M1, np.abs(groups) / (total * np.maximum(E4M3[scales], 2**-9))[..., None])
    q = (q | (groups < 0) << 3).reshape(w.shape).astype(np.uint8)
    even, odd = (q[:, 1::2], q[:, ::2]) if exchanged else (q[:, ::2], q[:, 1::2])
    scales = scales.astype(np.uint8)
    return {
        f"{name}.weight": ("U8", even << 4 | odd),
        f"{name}.weight_scale": ("F8_E4M3", tiled(scales) if in_tiles else scales),
        f"{name}.weight_scale_2": ("F32", np.array(total, np.float32)),
        f"{name}.comfy_quant": marker(format="nvfp4"),
    }


def mxfp8(name, w, in_tiles=True):
    groups = w.reshape(len(w), -1, 32)
    exponent = np.ceil(np.log2(np.abs(groups).max(2) / 448))
    q = code_of_e4m3(np.abs(groups) / 2 ** exponent[..., None])
    q = (q | (groups < 0) << 7).reshape(w.shape).astype(np.uint8)
    scales = (exponent + 127).astype(np.uint8)
    return {
        f"{name}.weight": ("F8_E4M3", q),
        f"{name}.weight_scale": ("U8", tiled(scales) if in_tiles else scales),
        f"{name}.comfy_quant": marker(format="mxfp8"),
    }


def fp8(name, w, e5m2=False):
    scale = np.abs(w).max() / 448
    q = code_of_e4m3(np.abs(w) / scale) | (w < 0) << 7
    if e5m2:  # the same values with two mantissa bits: any finite codes will do
        q = np.where((q & 0x7F) < 0x7C, q, q & 0x80 | 0x7B)
    return {
        f"{name}.weight": ("F8_E5M2" if e5m2 else "F8_E4M3", q.astype(np.uint8)),
        f"{name}.weight_scale": ("F32", np.array(scale, np.float32)),
        f"{name}.comfy_quant": marker(format="float8_e5m2" if e5m2 else "float8_e4m3fn"),
    }


# -- weights ---------------------------------------------------------------------------------------------------------


def gaussian(rng, n=N, k=K):
    return 0.02 * rng.standard_normal((n, k))


def outliers(rng, n=N, k=K):
    gain = np.ones(k)
    gain[rng.choice(k, k // 100, replace=False)] = 20
    return gaussian(rng, n, k) * gain


def tails(rng, n=N, k=K):
    return 0.02 * rng.standard_t(5, (n, k))


def gains(rng, n=N, k=K):
    return gaussian(rng, n, k) * np.exp(0.35 * rng.standard_normal(k)) * np.exp(0.3 * rng.standard_normal((n, 1)))


def low_rank(rng, n=N, k=K):
    return 0.02 * rng.standard_normal((n, 4)) @ rng.standard_normal((4, k)) + 0.3 * gaussian(rng, n, k)


def smooth(rng, n=N, k=K):
    kernel = np.exp(-0.5 * (np.arange(-9, 10) / 3) ** 2)
    noise = rng.standard_normal((n, k + 18))
    return 0.02 * np.stack([np.convolve(row, kernel, "valid") for row in noise]) + 0.1 * gaussian(rng, n, k)


STRUCTURED = [outliers, tails, gains]
FAMILIES = [gaussian, low_rank, smooth, *STRUCTURED]
SOUND = {
    "int8": lambda name, w: int8(name, w),
    "int8 convrot 64": lambda name, w: int8(name, w, 64, 64),
    "int8 convrot 256": lambda name, w: int8(name, w, 256, 256),
    "w4a4 16": lambda name, w: w4a4(name, w, 16, 16),
    "w4a4 256": w4a4,
    "w4a8": w4a8,
    "w4a8 codebook": lambda name, w: w4a8(name, w, codebook=True),
    "nvfp4": nvfp4,
    "mxfp8": mxfp8,
    "fp8": fp8,
}


@pytest.fixture
def rng(request):
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


@pytest.mark.parametrize("kind", SOUND)
def test_sound_files_are_silent(tmp_path, rng, kind):
    tensors = {}
    for i, family in enumerate(FAMILIES):
        tensors.update(SOUND[kind](f"blocks.{i}.linear", family(rng)))
        tensors[f"blocks.{i}.norm.weight"] = ("F32", np.exp(0.2 * rng.standard_normal(K)).astype(np.float32))
    assert found(save(tmp_path / "sound.safetensors", tensors)) == []


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "suffix", "code", "word"),
    [
        (nvfp4, "weight_scale", 0x7F, "1 NaN of 8192"),
        (nvfp4, "weight_scale", 0xFF, "1 NaN of 8192"),
        (nvfp4, "weight_scale", 0xB8, "1 negative of 8192"),
        (mxfp8, "weight_scale", 0xFF, "1 NaN of 4096"),
        (w4a8, "weight_s_rel", 0x7F, "1 NaN of 8192"),
        (w4a8, "weight_s_rel", 0x81, "1 negative of 8192"),
    ],
)
def test_bad_block_scale_is_named_by_row(tmp_path, rng, make, suffix, code, word):
    path = save(tmp_path / "model.safetensors", make("a.linear", gaussian(rng)))
    columns = K // (32 if make is mxfp8 else 16)
    row, column = 70, 9
    in_tile = (column // 4) * 512 + (row % 32) * 16 + (row // 32) * 4 + column % 4
    at = row * columns + column if make is w4a8 else in_tile
    overwrite(path, span(path, f"a.linear.{suffix}")[0] + at, bytes([code]))
    (fault,) = found(path)
    assert fault.rule == "extra.deep.block_scale"
    assert (fault.layer, fault.tensor, fault.severity) == ("a.linear", suffix, "error")
    assert fault.found == f"{word} (rows 70)"


def test_e8m0_and_zero_scales_of_any_other_value_are_fine(tmp_path, rng):
    path = save(tmp_path / "model.safetensors", mxfp8("a.linear", gaussian(rng)))
    overwrite(path, span(path, "a.linear.weight_scale")[0], bytes([0xFE]))
    assert found(path) == []
    path = save(tmp_path / "other.safetensors", nvfp4("a.linear", gaussian(rng)))
    overwrite(path, span(path, "a.linear.weight_scale")[0], bytes([0x80]))  # minus zero is zero
    assert found(path) == []


def test_padding_of_block_scales_is_not_judged(tmp_path, rng):
    tensors = nvfp4("a.linear", gaussian(rng, 100, 1024))
    path = save(tmp_path / "model.safetensors", tensors)
    row, column = 110, 3
    at = (column // 4) * 512 + (row % 32) * 16 + (row // 32) * 4 + column % 4
    overwrite(path, span(path, "a.linear.weight_scale")[0] + at, b"\xff")
    assert found(path, "compatible") == []
    row = 99
    at = (column // 4) * 512 + (row % 32) * 16 + (row // 32) * 4 + column % 4
    overwrite(path, span(path, "a.linear.weight_scale")[0] + at, b"\xff")
    assert rules_of(path, "compatible") == ["extra.deep.block_scale"]


@pytest.mark.parametrize(
    ("make", "code", "word"),
    [
        (fp8, 0x7F, "1 NaN"),
        (fp8, 0xFF, "1 NaN"),
        (mxfp8, 0x7F, "1 NaN"),
        (lambda name, w: fp8(name, w, e5m2=True), 0x7C, "1 infinite"),
        (lambda name, w: fp8(name, w, e5m2=True), 0xFE, "1 NaN"),
    ],
)
def test_codes_that_are_no_numbers(tmp_path, rng, make, code, word):
    path = save(tmp_path / "model.safetensors", make("a.linear", gaussian(rng)))
    assert found(path) == []
    overwrite(path, span(path, "a.linear.weight")[0] + 5 * K + 7, bytes([code]))
    (fault,) = found(path)
    assert (fault.rule, fault.severity, fault.layer) == ("extra.deep.code_nan", "error", "a.linear")
    assert fault.found == f"{word} of {N * K} sampled codes"


def test_codes_that_quantisers_do_not_write(tmp_path, rng):
    path = save(tmp_path / "int8.safetensors", int8("a.linear", gaussian(rng)))
    overwrite(path, span(path, "a.linear.weight")[0] + 3, b"\x80")
    assert [(fault.rule, fault.severity) for fault in found(path)] == [("extra.deep.int8_min", "notice")]
    path = save(tmp_path / "w4a4.safetensors", w4a4("a.linear", gaussian(rng)))
    overwrite(path, span(path, "a.linear.weight")[0] + 3, b"\x18")
    (fault,) = found(path)
    assert (fault.rule, fault.severity) == ("extra.deep.int4_min", "warning")
    assert fault.found == f"1 of {N * K} codes in {N} sampled rows"


# -- holes -----------------------------------------------------------------------------------------------------------

HOLED = {"int8": int8, "w4a4": w4a4, "w4a8": w4a8, "nvfp4": nvfp4, "mxfp8": mxfp8, "fp8": fp8}


def big(rng, make, layers=2):
    tensors = {}
    for i in range(layers):
        tensors.update(make(f"blocks.{i}.linear", gaussian(rng, 384, K)))
    return tensors


@pytest.mark.parametrize("kind", HOLED)
def test_hole_inside_a_weight(tmp_path, rng, kind):
    path = save(tmp_path / "model.safetensors", big(rng, HOLED[kind]))
    start, _ = span(path, "blocks.1.linear.weight")
    overwrite(path, start + 20 * K // 2 + 333, bytes(80 << 10))
    (fault,) = found(path)
    assert (fault.rule, fault.severity, fault.layer) == ("extra.deep.zeros", "error", "blocks.1.linear")
    assert "80 KiB of zero bytes" in fault.found


@pytest.mark.parametrize("kind", ["int8", "w4a4", "w4a8", "nvfp4", "mxfp8"])
def test_whole_rows_of_zeros_that_their_scales_deny(tmp_path, rng, kind):
    tensors = HOLED[kind]("a.linear", gaussian(rng, 384, K))
    _, weight = tensors["a.linear.weight"]
    changed = weight.copy()
    changed[128:320] = 0
    path = save(
        tmp_path / "model.safetensors", {**tensors, "a.linear.weight": (tensors["a.linear.weight"][0], changed)}
    )
    assert rules_of(path) == ["extra.deep.zeros"]
    assert "scales of rows 128 to 319" in found(path)[0].found


@pytest.mark.parametrize("kind", ["int8", "nvfp4"])
def test_file_that_ends_in_zeros(tmp_path, rng, kind):
    path = save(
        tmp_path / "model.safetensors",
        {**big(rng, HOLED[kind], 1), "z.linear.weight": ("BF16", np.ones((64, 64), np.uint16))},
    )
    start, end = span(path, "blocks.0.linear.weight")
    overwrite(path, start + (end - start) // 2 + 77, bytes(end - start - (end - start) // 2 - 77))
    assert rules_of(path) == ["extra.deep.zeros"]


def test_hole_across_two_tensors_names_both_layers(tmp_path, rng):
    scales = {name: tensor for name, tensor in big(rng, int8).items() if not name.endswith(".weight")}
    weights = {name: tensor for name, tensor in big(rng, int8).items() if name.endswith(".weight")}
    path = save(tmp_path / "model.safetensors", {**weights, **scales})
    border = span(path, "blocks.1.linear.weight")[0]
    overwrite(path, border - 50 * K, bytes(100 * K))
    faults = found(path)
    assert [fault.layer for fault in faults] == ["blocks.0.linear", "blocks.1.linear"]
    assert {fault.rule for fault in faults} == {"extra.deep.zeros"}


def test_block_scales_lost_while_codes_remain(tmp_path, rng):
    path = save(tmp_path / "model.safetensors", nvfp4("a.linear", gaussian(rng, 1280, K)))
    start, _ = span(path, "a.linear.weight_scale")
    overwrite(path, start, bytes(72 << 10))
    assert "extra.deep.zeros" in rules_of(path)


def test_zero_rows_too_few_for_a_probe(tmp_path, rng):
    tensors = int8("a.linear", gaussian(rng))
    tensors["a.linear.weight"][1][17] = 0
    (fault,) = found(save(tmp_path / "model.safetensors", tensors))
    assert fault.rule == "extra.deep.zeros"
    assert "1 of 128 sampled rows" in fault.found
    assert "rows 17" in fault.found


@pytest.mark.parametrize("scale_of_zero", [1e-12, 1.0])
def test_pruned_rows_are_no_holes(tmp_path, rng, scale_of_zero):
    w = gaussian(rng, 384, K)
    w[100:300] = 0
    tensors = int8("a.linear", w)
    scale = tensors["a.linear.weight_scale"][1]
    scale[100:300] = scale_of_zero
    tensors.update(nvfp4("b.linear", w))
    tensors.update(fp8("c.linear", w))
    assert found(save(tmp_path / "model.safetensors", tensors)) == []


def test_layer_that_starts_at_zero(tmp_path, rng):
    tensors = fp8("a.linear", gaussian(rng))
    tensors["a.linear.weight"] = ("F8_E4M3", np.zeros((N, K), np.uint8))
    tensors["a.linear.weight_scale"] = ("F32", np.array(1.0, np.float32))
    assert found(save(tmp_path / "one.safetensors", tensors)) == []
    tensors["a.linear.weight_scale"] = ("F32", np.array(0.0003, np.float32))
    (fault,) = found(save(tmp_path / "used.safetensors", tensors))
    assert (fault.rule, fault.severity) == ("extra.deep.zero_weight", "warning")


# -- weights that do not look as declared ----------------------------------------------------------------------------


@pytest.mark.parametrize("family", STRUCTURED)
@pytest.mark.parametrize(
    ("make", "declared", "true"),
    [(int8, None, 256), (int8, None, 64), (int8, 256, None), (int8, 64, None), (w4a4, 256, None), (w4a8, 256, None)],
)
def test_rotation_that_is_not_as_declared(tmp_path, rng, family, make, declared, true):
    path = save(tmp_path / "model.safetensors", make("a.linear", family(rng), declared, true))
    (fault,) = found(path)
    assert (fault.rule, fault.severity, fault.layer) == ("extra.deep.rotation", "warning", "a.linear")
    size = f"rotated in groups of {declared or true}"
    assert (fault.expected, fault.found) == (("not rotated", size) if true else (size, "not rotated"))
    assert "an indication, not a proof" in fault.message
    assert check(path, deep=True).verdict == "ok"


@pytest.mark.parametrize("family", STRUCTURED)
@pytest.mark.parametrize(
    ("make", "declared", "true"), [(int8, 256, 64), (int8, 64, 256), (int8, 256, 16), (w4a4, 16, 256), (w4a8, 256, 64)]
)
def test_rotation_of_another_size(tmp_path, rng, family, make, declared, true):
    (fault,) = found(save(tmp_path / "model.safetensors", make("a.linear", family(rng), declared, true)))
    assert fault.rule == "extra.deep.rotation_size"
    assert (fault.expected, fault.found) == (f"rotated in groups of {declared}", f"rotated in groups of {true}")


@pytest.mark.parametrize("family", [gaussian, low_rank, smooth])
def test_nothing_is_said_where_nothing_can_be_known(tmp_path, rng, family):
    tensors = {
        **int8("a.linear", family(rng), 256),
        **int8("b.linear", family(rng), None, 256),
        **w4a4("c.linear", family(rng), 256, 64),
    }
    assert found(save(tmp_path / "model.safetensors", tensors)) == []


@pytest.mark.parametrize("family", [gaussian, low_rank, *STRUCTURED])
@pytest.mark.parametrize("make", [nvfp4, mxfp8])
def test_block_scales_row_by_row(tmp_path, rng, family, make):
    (fault,) = found(save(tmp_path / "model.safetensors", make("a.linear", family(rng), in_tiles=False)))
    assert (fault.rule, fault.severity, fault.layer) == ("extra.deep.scale_layout", "warning", "a.linear")
    assert (fault.expected, fault.found) == ("128x4 tiles", "row by row")


@pytest.mark.parametrize("exchanged", [False, True])
@pytest.mark.parametrize("make", [nvfp4, w4a4, w4a8])
def test_nibble_order_beside_norm_gains(tmp_path, rng, make, exchanged):
    tensors = {}
    for i in range(3):
        strength = rng.standard_normal(K)
        gain = np.exp(-0.2 * strength + 0.1 * rng.standard_normal(K))
        tensors[f"blocks.{i}.norm.weight"] = ("F32", gain.astype(np.float32))
        tensors.update(make(f"blocks.{i}.linear", gaussian(rng) * np.exp(0.3 * strength), exchanged=exchanged))
    faults = found(save(tmp_path / "model.safetensors", tensors))
    assert [(fault.rule, fault.severity) for fault in faults] == [("extra.deep.nibble_order", "warning")] * exchanged
    if exchanged:
        assert "3 of 3 signs" in faults[0].message


@pytest.mark.parametrize("make", [nvfp4, w4a4, w4a8])
def test_nibble_order_of_smooth_filters_and_without_any_witness(tmp_path, rng, make):
    assert rules_of(save(tmp_path / "a.safetensors", make("a.linear", smooth(rng), exchanged=True))) == [
        "extra.deep.nibble_order"
    ]
    for family in (gaussian, *STRUCTURED):
        assert (
            found(save(tmp_path / f"{family.__name__}.safetensors", make("a.linear", family(rng), exchanged=True)))
            == []
        )


# -- bounds ----------------------------------------------------------------------------------------------------------


def sparse(path, layers, n, k):
    """An INT8 and an NVFP4 layer of (n, k) per block, all zero bytes, in a file without data blocks."""
    header, offset, tail = {}, 0, {}
    for i in range(layers):
        for name, dtype, shape in (
            (f"blocks.{i}.a.weight", "I8", [n, k]),
            (f"blocks.{i}.b.weight", "U8", [n, k // 2]),
            (f"blocks.{i}.b.weight_scale", "F8_E4M3", [n, k // 16]),
        ):
            size = int(np.prod(shape))
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
            offset += size
        tail[f"blocks.{i}.a.weight_scale"] = ("F32", np.full((n, 1), 0.001, np.float32))
        tail[f"blocks.{i}.b.weight_scale_2"] = ("F32", np.array(0.001, np.float32))
        tail[f"blocks.{i}.a.comfy_quant"] = marker(format="int8_tensorwise")
        tail[f"blocks.{i}.b.comfy_quant"] = marker(format="nvfp4")
    start = offset
    for name, (dtype, data) in tail.items():
        header[name] = {"dtype": dtype, "shape": list(data.shape), "data_offsets": [offset, offset + data.nbytes]}
        offset += data.nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.seek(8 + len(text) + start)
        file.write(b"".join(data.tobytes() for _, data in tail.values()))
    return path


def test_nine_gigabytes_take_seconds_and_little_memory(tmp_path):
    path = sparse(tmp_path / "model.safetensors", 90, 8192, 8192)
    assert path.stat().st_size > 9e9
    report, checkpoint, findings = check(path), open_checkpoint(path), Findings()
    tracemalloc.start()
    started = time.process_time()
    deep_check(checkpoint, report.layers, findings, seconds=600)  # a wall clock would measure the other processes
    seconds = time.process_time() - started
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    faults = findings.faults()
    assert [fault.rule for fault in faults] == ["extra.deep.zero_weight"] * len(faults)
    assert {fault.layer for fault in faults} == {f"blocks.{i}.{part}" for i in range(90) for part in "ab"}
    assert seconds < 10
    assert peak < 100 << 20


def test_only_samples_are_read(tmp_path, rng, monkeypatch):
    w = gains(rng, 2048, 2048)
    tensors = {**int8("a.linear", w), **fp8("b.linear", w), **w4a4("c.linear", w)}
    path = save(tmp_path / "model.safetensors", tensors)
    read = []
    plain = RawFile.read_at

    def counting(self, offset, size):
        read.append(size)
        return plain(self, offset, size)

    monkeypatch.setattr(RawFile, "read_at", counting)
    checkpoint = open_checkpoint(path)
    specs = check(path).layers
    read.clear()
    deep_check(checkpoint, specs, Findings())
    weights = sum(data.nbytes for name, (_, data) in tensors.items() if name.endswith(".weight"))
    probes = 512 * (weights // (32 << 10) + 2 * len(tensors))
    samples = 2 * (1 << 17) + (1 << 16)
    witnesses = sum(data.nbytes for name, (_, data) in tensors.items() if not name.endswith(".weight"))
    assert sum(read) <= probes + samples + witnesses


def test_time_limit_is_said(tmp_path, rng):
    path = save(tmp_path / "model.safetensors", big(rng, int8))
    findings = Findings()
    deep_check(open_checkpoint(path), check(path).layers, findings, seconds=0.0)
    assert [(fault.rule, fault.severity) for fault in findings.faults()] == [("extra.deep.partial", "notice")]
    assert "0 of 2" in findings.faults()[0].message


def test_file_that_shrinks_is_a_fault_not_an_exception(tmp_path, rng):
    path = save(tmp_path / "model.safetensors", big(rng, nvfp4))
    checkpoint, specs = open_checkpoint(path), check(path).layers
    os.truncate(path, path.stat().st_size // 2)
    findings = Findings()
    deep_check(checkpoint, specs, findings)
    assert [fault.rule for fault in findings.faults()] == ["extra.file.changed"]


@pytest.mark.parametrize("kind", SOUND)
def test_tiny_layers_and_random_bytes_never_raise(tmp_path, rng, kind):
    k = 256
    tensors = SOUND[kind]("a.linear", gaussian(rng, 128, k))
    dtype, weight = tensors["a.linear.weight"]
    tensors["a.linear.weight"] = (dtype, rng.integers(0, 256, weight.shape, np.uint8).view(weight.dtype))
    for fault in found(save(tmp_path / "model.safetensors", tensors)):
        assert fault.rule in RULES


# -- the maths behind it ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("g", [16, 64, 256])
def test_hadamard_is_the_formats(g, rng):
    np.testing.assert_allclose(hadamard(g), kron_hadamard(g), atol=1e-6)
    w = gaussian(rng, 4, 512).astype(np.float32)
    np.testing.assert_allclose(rotate(rotate(w, g), g), w, atol=1e-6)


def test_exchange_of_nibbles_commutes_with_the_rotation(rng):
    w = gaussian(rng, 4, 512)
    exchange = np.arange(512) ^ 1
    np.testing.assert_allclose(rotated(w, 64)[:, exchange], rotated(w[:, exchange], 64), atol=1e-12)


def test_tile_offsets_match_the_formula():
    offsets = tile_offsets(128, 12)
    assert sorted(offsets.reshape(-1)) == list(range(128 * 12))
    scales = np.arange(128 * 4, dtype=np.int64).reshape(128, 4) % 251
    np.testing.assert_array_equal(tiled(scales).reshape(-1)[tile_offsets(128, 4)], scales)


def test_pair_scores_change_only_their_second_sign(rng):
    energies, exchange = rng.random(512), np.arange(512) ^ 1
    witness = energies + rng.random(512)
    relation, within = pair_scores(energies, witness)
    assert relation > 6
    assert within > 6
    np.testing.assert_allclose(pair_scores(energies[exchange], witness), (relation, -within))
    assert pair_scores(energies, np.ones(512)) == (0.0, 0.0)


# -- every rule ------------------------------------------------------------------------------------------------------


def with_byte(make, suffix, code, at=3):
    """A layer with one byte of one tensor replaced."""

    def example(folder, rng):
        path = save(folder / "model.safetensors", make("a.linear", gaussian(rng)))
        return overwrite(path, span(path, f"a.linear.{suffix}")[0] + at, bytes([code]))

    return example


def with_floats(make, suffix, dtype, values):
    """A layer with further floats beside its weight."""

    def example(folder, rng):
        tensors = make("a.linear", gaussian(rng))
        tensors[f"a.linear.{suffix}"] = (dtype, values)
        return save(folder / "model.safetensors", tensors)

    return example


def ones_but(value, shape=(N,), dtype=np.float32):
    """Ones, with one other value somewhere."""
    values = np.ones(shape, dtype)
    values.flat[5] = value
    return values


def layer(make, *arguments, family=outliers, **settings):
    return lambda folder, rng: save(folder / "model.safetensors", make("a.linear", family(rng), *arguments, **settings))


def zero_row(scale):
    """One row of zeros, and what its scale is."""

    def example(folder, rng):
        tensors = int8("a.linear", gaussian(rng))
        tensors["a.linear.weight"][1][17] = 0
        if scale is not None:
            tensors["a.linear.weight_scale"][1][17] = scale
        return save(folder / "model.safetensors", tensors)

    return example


def zero_layer(scale):
    def example(folder, rng):
        tensors = fp8("a.linear", gaussian(rng))
        tensors["a.linear.weight"] = ("F8_E4M3", np.zeros((N, K), np.uint8))
        tensors["a.linear.weight_scale"] = ("F32", np.array(scale, np.float32))
        return save(folder / "model.safetensors", tensors)

    return example


def within(seconds):
    """The rules that are broken when the check may take this long."""

    def example(folder, rng):
        path = save(folder / "model.safetensors", int8("a.linear", gaussian(rng)))
        findings = Findings()
        deep_check(open_checkpoint(path), check(path).layers, findings, seconds=seconds)
        return [fault.rule for fault in findings.faults()]

    return example


EXAMPLES = {
    "extra.deep.block_scale": (with_byte(nvfp4, "weight_scale", 0x7F), with_byte(nvfp4, "weight_scale", 0x7E)),
    "extra.deep.nonfinite": (
        with_floats(int8, "bias", "F16", ones_but(np.inf, dtype=np.float16)),
        with_floats(int8, "bias", "F16", ones_but(65504, dtype=np.float16)),
    ),
    "extra.deep.zeros": (zero_row(None), zero_row(1.0)),
    "extra.deep.zero_weight": (zero_layer(0.0003), zero_layer(1.0)),
    "extra.deep.code_nan": (with_byte(fp8, "weight", 0x7F), with_byte(fp8, "weight", 0x7E)),
    "extra.deep.int8_min": (with_byte(int8, "weight", 0x80), with_byte(int8, "weight", 0x81)),
    "extra.deep.int4_min": (with_byte(w4a4, "weight", 0x18), with_byte(w4a4, "weight", 0x19)),
    "extra.deep.rotation": (layer(int8, 256, None), layer(int8, 256, 256)),
    "extra.deep.rotation_size": (layer(int8, 256, 64), layer(int8, 64, 64)),
    "extra.deep.nibble_order": (
        layer(w4a4, family=smooth, exchanged=True),
        layer(w4a4, family=smooth, exchanged=False),
    ),
    "extra.deep.scale_layout": (layer(nvfp4, in_tiles=False), layer(nvfp4, in_tiles=True)),
    "extra.deep.partial": (within(0.0), within(600.0)),
}
"""A file that breaks each rule of the deep check, and one that nearly does: the next code, the right setting."""


@pytest.mark.parametrize("rule", EXAMPLES)
def test_breaking_and_nearly_breaking(tmp_path, rng, rule):
    broken, nearly = (
        made if isinstance(made := example(tmp_path, rng), list) else rules_of(made) for example in EXAMPLES[rule]
    )
    assert rule in broken
    assert nearly == []


@pytest.mark.parametrize(
    ("make", "suffix", "dtype", "values"),
    [
        (nvfp4, "bias", "BF16", ones_but(0x7FC0, dtype=np.uint16)),
        (fp8, "bias", "F8_E4M3", ones_but(0x7F, dtype=np.uint8)),
        (w4a4, "bias", "F32", ones_but(np.nan)),
        (w4a8, "weight_correction", "F32", ones_but(np.nan, (K // 16, N))),
    ],
)
def test_one_nan_beside_the_codes_is_named(tmp_path, rng, make, suffix, dtype, values):
    path = with_floats(make, suffix, dtype, values)(tmp_path, rng)
    assert check(path).verdict == "ok"
    (fault,) = check(path, deep=True).errors
    assert (fault.rule, fault.layer, fault.tensor) == ("extra.deep.nonfinite", "a.linear", suffix)
    assert fault.found == f"1 NaN of {values.size} values"


def test_every_rule_of_the_deep_check_has_examples():
    assert set(EXAMPLES) == {rule for rule in RULES if rule.startswith("extra.deep.")}


def test_a_layers_own_bias_is_no_witness_of_its_inputs(tmp_path):
    """It describes outputs; in a square layer it would look like a tensor of the inputs."""
    tensors = {
        "blocks.0.proj.weight": ("I8", np.zeros((256, 128), np.int8)),
        "blocks.0.proj.weight_scale": ("F32", np.full(256, 0.01, np.float32)),
        "blocks.0.proj.bias": ("F32", np.ones(256, np.float32)),
        "blocks.0.norm.weight": ("F32", np.ones(256, np.float32)),
    }
    marker = np.frombuffer(b'{"format": "convrot_w4a4"}', np.uint8)
    path = save(tmp_path / "m.safetensors", {**tensors, "blocks.0.proj.comfy_quant": ("U8", marker)})
    (spec,) = check(path).layers
    found = Witnesses(open_checkpoint(path).tensors.values()).of(spec)
    assert [tensor.name for tensor in found] == ["blocks.0.norm.weight"]
