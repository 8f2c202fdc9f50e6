"""The same layer in every spelling that files use, decoded to the same numbers as the test's own float64 quantiser."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from quant_loader import kernels

FORMATS = [
    ("int8_tensorwise", {}),
    ("int8_tensorwise", {"rows": False}),
    ("int8_tensorwise", {"group": 16}),
    ("int8_tensorwise", {"group": 64}),
    ("quanto_int8", {}),
    ("convrot_w4a4", {}),
    ("asym_w4a8_int8", {}),
    ("asym_w4a8_int8", {"codebook": False, "group_size": 8, "group": 64}),
    ("nvfp4", {}),
    ("nvfp4", {"padded_rows": 10}),
    ("mxfp8", {}),
    ("float8_e4m3fn", {}),
    ("float8_e4m3fn", {"rows": True}),
    ("float8_e5m2", {}),
]


@pytest.mark.parametrize(("name", "options"), FORMATS)
def test_dequantize(name, options, quantised, relative) -> None:
    torch.manual_seed(0)
    layer = quantised(name, torch.randn(150, 128), **options)
    dense = kernels.dequantize(layer.spec, layer.tensors)
    assert dense.dtype == torch.float32
    assert relative(dense[:150], layer.dense) < 1e-6


@pytest.mark.parametrize(("name", "options"), FORMATS)
def test_embedding_is_a_row_of_the_dense_weight(name, options, quantised, relative) -> None:
    torch.manual_seed(1)
    layer = quantised(name, torch.randn(40, 128), **options)
    index = torch.tensor([[3, 39], [0, 3]])
    rows = kernels.embedding(index, layer.spec, layer.tensors)
    assert rows.shape == (2, 2, 128)
    assert relative(rows, layer.dense[index]) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["int8_tensorwise", "convrot_w4a4", "float8_e4m3fn", "quanto_int8"])
def test_row_scales_of_any_shape_and_dtype(name, dtype, quantised) -> None:
    torch.manual_seed(2)
    options = {"rows": True} if name in ("int8_tensorwise", "float8_e4m3fn") else {}
    layer = quantised(name, torch.randn(24, 64), **options)
    scale = layer.tensors["weight_scale"].to(dtype)
    x = torch.randn(3, 64)
    results = [
        kernels.linear(x, layer.spec, {**layer.tensors, "weight_scale": scale.reshape(shape)}, execution="native")
        for shape in ((24,), (24, 1))
    ]
    assert torch.equal(*results)
    expected = {**layer.tensors, "weight_scale": scale.float()}
    assert torch.equal(results[0], kernels.linear(x, layer.spec, expected, execution="native"))


@pytest.mark.parametrize("name", ["int8_tensorwise", "float8_e4m3fn"])
def test_scalar_scales_of_any_shape(name, quantised) -> None:
    torch.manual_seed(3)
    layer = quantised(name, torch.randn(24, 64), rows=False)
    x = torch.randn(3, 64)
    results = [
        kernels.linear(x, layer.spec, {**layer.tensors, "weight_scale": layer.tensors["weight_scale"].reshape(shape)})
        for shape in ((), (1,), (1, 1))
    ]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_row_scale_of_one_row_is_told_by_its_shape(quantised, relative) -> None:
    """With one output a row scale and a scalar are the same number; with more, the entries decide, whatever the flags
    say.
    """
    torch.manual_seed(4)
    layer = quantised("int8_tensorwise", torch.randn(24, 64))
    lying = dataclasses.replace(layer.spec, annotations={"is_tensorwise_scalar": True})
    assert relative(kernels.dequantize(lying, layer.tensors), layer.dense) < 1e-6


def test_wrong_number_of_scales_is_said(quantised) -> None:
    layer = quantised("int8_tensorwise", torch.randn(24, 64))
    tensors = {**layer.tensors, "weight_scale": torch.ones(23)}
    with pytest.raises(ValueError, match=r"1 or 24 entries .* found the shape \(23,\)"):
        kernels.linear(torch.randn(2, 64), layer.spec, tensors)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "mxfp8", "nvfp4", "asym_w4a8_int8"])
def test_bytes_stored_as_integers(name, quantised) -> None:
    torch.manual_seed(5)
    layer = quantised(name, torch.randn(32, 64))
    as_bytes = {
        key: tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor for key, tensor in layer.tensors.items()
    }
    x = torch.randn(3, 64)
    for execution in ("native", "int8", "exact"):
        expected = kernels.linear(x, layer.spec, layer.tensors, execution=execution)
        assert torch.equal(kernels.linear(x, layer.spec, as_bytes, execution=execution), expected)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8"])
def test_an_untiled_scale_is_refused(name, quantised) -> None:
    """An unpadded scale tensor read as tiles would move most of the scales: refuse it, with the layer's name."""
    layer = quantised(name, torch.randn(40, 96))
    block = 16 if name == "nvfp4" else 32
    plain = layer.tensors["weight_scale"].view(torch.uint8).reshape(-1)[: 40 * 96 // block].reshape(40, 96 // block)
    for call in (
        lambda tensors: kernels.linear(torch.randn(2, 96), layer.spec, tensors),
        lambda tensors: kernels.dequantize(layer.spec, tensors),
        lambda tensors: kernels.to_int8_rows(layer.spec, tensors),
    ):
        with pytest.raises(ValueError, match=r"blocks\.0\.proj.*128 x 4 tiles"):
            call({**layer.tensors, "weight_scale": plain})


def test_float8_without_a_scale_is_plain_storage(relative) -> None:
    from quant_loader.checkpoint import LayerSpec

    weight = torch.randn(24, 64).to(torch.float8_e4m3fn)
    spec = LayerSpec("blocks.0.proj", "float8_e4m3fn", (24, 64))
    assert torch.equal(kernels.dequantize(spec, {"weight": weight}), weight.float())


def test_quanto_under_its_own_names(quantised) -> None:
    layer = quantised("quanto_int8", torch.randn(24, 64))
    own = {"weight._data": layer.tensors["weight"], "weight._scale": layer.tensors["weight_scale"]}
    assert torch.equal(kernels.dequantize(layer.spec, own), kernels.dequantize(layer.spec, layer.tensors))


def test_a_missing_tensor_is_named(quantised) -> None:
    layer = quantised("nvfp4", torch.randn(24, 64))
    del layer.tensors["weight_scale_2"]
    with pytest.raises(KeyError, match=r"blocks\.0\.proj.*weight_scale_2"):
        kernels.linear(torch.randn(2, 64), layer.spec, layer.tensors)


def test_static_activation_scales_are_used(quantised, relative) -> None:
    """``input_scale`` replaces the dynamic scale: an FP8 activation beyond 448 of it is clipped."""
    torch.manual_seed(6)
    layer = quantised("float8_e4m3fn", torch.randn(24, 64))
    x = torch.randn(5, 64)
    static = x.abs().max() / 448 / 2
    y = kernels.linear(x, layer.spec, {**layer.tensors, "input_scale": static}, execution="native")
    clipped = (x / static).clamp(-448, 448).to(torch.float8_e4m3fn).double() * static.double()
    assert relative(y, clipped @ layer.dense.t()) < 1e-6
    dynamic = kernels.linear(x, layer.spec, layer.tensors, execution="native")
    assert relative(y, dynamic) > 0.01


def test_nvfp4_smoothing_and_static_scale(quantised, relative) -> None:
    torch.manual_seed(7)
    layer = quantised("nvfp4", torch.randn(24, 64))
    x, smooth = torch.randn(5, 64), torch.rand(64) + 0.5
    smoothed = {**layer.tensors, "pre_quant_scale": smooth}
    for execution in ("native", "int8", "exact"):
        y = kernels.linear(x, layer.spec, smoothed, execution=execution)
        assert relative(y, kernels.linear(x * smooth, layer.spec, layer.tensors, execution=execution)) < 1e-6
    small = {**layer.tensors, "input_scale": x.abs().max() / (448 * 6) / 100}
    saturated = kernels.linear(x, layer.spec, small, execution="native")
    assert saturated.norm() < 0.7 * kernels.linear(x, layer.spec, layer.tensors, execution="native").norm()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_code_of_an_8_bit_float(dtype) -> None:
    from quant_loader.kernels.formats.codes import float8_to_float

    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    torch.testing.assert_close(float8_to_float(codes), codes.to(torch.float32), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("largest", [1.0, 2.0**127], ids=["usual scales", "scales at the end of float32"])
@pytest.mark.parametrize("blocks", [None, 1, 8], ids=["tensor", "row", "block"])
def test_scaled_codes_of_more_than_one_piece(dtype, largest, blocks, monkeypatch) -> None:
    """Decoding in pieces, with the scale folded into the last step, gives the product's very bits."""
    from quant_loader.kernels.formats import codes

    monkeypatch.setattr(codes, "PIECE", 1000)
    byte = torch.randint(256, (37, 64), dtype=torch.uint8)
    scale = torch.rand(()) if blocks is None else torch.rand(37, blocks)
    scale = torch.where(torch.rand(scale.shape) < 0.5, scale * largest, scale * 2.0**-126)
    wide = scale if blocks is None else scale.repeat_interleave(64 // blocks, dim=1)
    expected = byte.view(dtype).to(torch.float32) * wide
    torch.testing.assert_close(codes.float8_to_float(byte.view(dtype), scale), expected, rtol=0, atol=0, equal_nan=True)
    narrow = codes.e2m1_to_float(byte[:, :32], scale)
    assert torch.equal(narrow, codes.e2m1_to_float(byte[:, :32].contiguous()) * wide)
    assert torch.equal(codes.unpack_int4(byte), torch.cat([codes.unpack_int4(row[None]) for row in byte]))


def test_every_packed_byte() -> None:
    from quant_loader.kernels.formats.codes import e2m1_to_float, unpack_int4

    byte = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    sign = torch.tensor([1.0, -1.0])
    values = e2m1_to_float(byte)
    codes = unpack_int4(byte)
    for i, b in enumerate(range(256)):
        high, low = b >> 4, b & 15
        r, c = divmod(i, 16)
        assert values[r, 2 * c] == e2m1[high & 7] * sign[high >> 3]
        assert values[r, 2 * c + 1] == e2m1[low & 7] * sign[low >> 3]
        assert codes[r, 2 * c] == (low ^ 8) - 8
        assert codes[r, 2 * c + 1] == (high ^ 8) - 8


@pytest.mark.parametrize("codebook", [None, torch.linspace(-1.0, 0.9, 16)], ids=["grid", "codebook"])
@pytest.mark.parametrize("group_size", [4, 5, 16])
def test_w4a8_codes_of_any_group_size(codebook, group_size) -> None:
    """The table of code pairs holds what the formula gives, also where a packed byte lies across two groups."""
    from quant_loader.kernels.formats.codes import unpack_nibbles
    from quant_loader.kernels.formats.w4a8 import decode_codes

    packed = torch.randint(-128, 128, (3, 40), dtype=torch.int8)
    s_rel = (60 * torch.rand(3, 80 // group_size)).to(torch.float8_e4m3fn)
    code = unpack_nibbles(packed, high_first=False).long()
    value = code - 8.0 if codebook is None else codebook[code]
    scaled = value * s_rel.float().repeat_interleave(group_size, dim=1)
    assert torch.equal(
        decode_codes(packed, s_rel, codebook, group_size), scaled.round().clamp(-127, 127).to(torch.int8)
    )
