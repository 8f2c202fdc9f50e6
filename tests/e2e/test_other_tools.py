"""Files that other programs made, on the real server: each renders as its weights, decoded here in float64, do.

The reference is an independent reading of the file: the test decodes every layer with a few lines of its own, writes
the model as plain F32, and ComfyUI's own loader runs that. A file that our loader misread in any way (nibbles, block
scales, rotation, a scale too many) would be a picture away from it.
"""

from __future__ import annotations

import functools
import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from quant_loader.demo import fixtures, pictures, quantize, workflows
from quant_loader.demo.server import ComfyServer
from safetensors.torch import load_file, save_file

MADE = Path(__file__).parents[1] / "automation" / "made_by_ctq"
CTQ = ("fp8", "int8-convrot", "nvfp4")
KITCHEN = ("int8_scalar", "mxfp8", "convrot_w4a4")
"""Of the demo's files, those of the layouts that convert_to_quant does not write here."""
HIDDEN, MLP, CONTEXT, VECTOR, TIME, PATCH = 128, 512, 1024, 64, 256, 64


def original() -> dict[str, np.ndarray]:
    """The 16-bit model that the files in ``made_by_ctq`` were made of, as float32 (every value is a BF16 one).

    A Flux transformer of one head, one double and one single block. ``RandomState`` streams never change, by NumPy's
    promise, so the model can be made again anywhere.
    """
    random = np.random.RandomState(1)
    tensors: dict[str, np.ndarray] = {}

    def linear(name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        tensors[f"{name}.weight"] = bf16(random.standard_normal((rows, columns)) * math.sqrt(gain / columns))
        tensors[f"{name}.bias"] = bf16(0.02 * random.standard_normal(rows))

    linear("img_in", HIDDEN, PATCH)
    linear("txt_in", HIDDEN, CONTEXT)
    for name, width in (("time_in", TIME), ("vector_in", VECTOR)):
        linear(f"{name}.in_layer", HIDDEN, width)
        linear(f"{name}.out_layer", HIDDEN, HIDDEN)
    for block in ("double_blocks.0.img", "double_blocks.0.txt"):
        linear(f"{block}_mod.lin", 6 * HIDDEN, HIDDEN)
        linear(f"{block}_attn.qkv", 3 * HIDDEN, HIDDEN)
        linear(f"{block}_attn.proj", HIDDEN, HIDDEN)
        linear(f"{block}_mlp.0", MLP, HIDDEN)
        linear(f"{block}_mlp.2", HIDDEN, MLP)
    linear("single_blocks.0.linear1", 3 * HIDDEN + MLP, HIDDEN)
    linear("single_blocks.0.linear2", HIDDEN, HIDDEN + MLP)
    linear("single_blocks.0.modulation.lin", 3 * HIDDEN, HIDDEN)
    linear("final_layer.adaLN_modulation.1", 2 * HIDDEN, HIDDEN)
    linear("final_layer.linear", PATCH, HIDDEN, gain=16.0)
    for place in ("double_blocks.0.img_attn", "double_blocks.0.txt_attn", "single_blocks.0"):
        for side in ("query_norm", "key_norm"):
            tensors[f"{place}.norm.{side}.scale"] = np.ones(HIDDEN, "<f4")
    return tensors


def bf16(values: np.ndarray) -> np.ndarray:
    """Rounded to BF16 (ties to even), as float32."""
    bits = values.astype("<f4").view("<u4")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype("<u4").view("<f4")


# -- an independent reading of the formats, in float64 -----------------------------------------------------------------

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
H4 = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]) / 2


class Decoded(NamedTuple):
    """A layer's weight [N, K], and the distance that rounding to its codes may have moved each entry at most."""

    weight: np.ndarray
    step: np.ndarray


def plain(tensor: torch.Tensor) -> np.ndarray:
    return tensor.double().numpy()


def unrotated(weight: np.ndarray, group: int) -> np.ndarray:
    matrix = H4
    while len(matrix) < group:
        matrix = np.kron(matrix, H4)
    return (weight.reshape(len(weight), -1, group) @ matrix).reshape(weight.shape)


def tiled(scales: torch.Tensor, rows: int, columns: int) -> np.ndarray:
    """Entry (r, c) of block scales that lie in tiles of 128 x 4."""
    flat, across = plain(scales).reshape(-1), -(-columns // 4)
    r, c = np.arange(rows)[:, None], np.arange(columns)[None, :]
    return flat[((r // 128) * across + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4]


def nibbles(codes: torch.Tensor, first: str) -> np.ndarray:
    raw = codes.view(torch.uint8).numpy()
    pair = (raw >> 4, raw & 15) if first == "high" else (raw & 15, raw >> 4)
    return np.stack(pair, -1).reshape(len(raw), -1)


def decode(conf: dict[str, Any], part: dict[str, torch.Tensor]) -> Decoded:
    """A layer's declaration and tensors (by suffix) to its weight."""
    codes, form = part["weight"], conf["format"]
    if form == "float8_e4m3fn":
        scale = float(part["weight_scale"])
        weight = plain(codes) * scale
        return Decoded(weight, np.maximum(np.abs(weight) / 15, scale * 2.0**-10))  # 3 bits of mantissa; subnormals
    if form == "nvfp4":
        code = nibbles(codes, "high")
        scale = tiled(part["weight_scale"], len(code), code.shape[1] // 16) * float(part["weight_scale_2"])
        scale = scale.repeat(16, 1)
        return Decoded(np.where(code & 8, -1, 1) * E2M1[code & 7] * scale, scale)  # 4 and 6 are two steps apart
    if form == "mxfp8":
        exponents = tiled(part["weight_scale"], len(codes), codes.shape[1] // 32)
        scale = (2.0 ** (exponents - 127)).repeat(32, 1)
        weight = plain(codes) * scale
        return Decoded(weight, np.maximum(np.abs(weight) / 15, scale * 2.0**-10))
    group = conf.get("convrot_groupsize", 256)
    scale = plain(part["weight_scale"]).reshape(-1, 1)
    if form == "convrot_w4a4":
        code = nibbles(codes, "low").astype(int)
        return Decoded(unrotated((code - 16 * (code > 7)) * scale, group), scale)
    assert form == "int8_tensorwise"
    weight = plain(codes) * scale
    return Decoded(unrotated(weight, group) if conf.get("convrot") else weight, scale)


def dequantised(path: Path) -> dict[str, Decoded | torch.Tensor]:
    """Every tensor of the model in ``path``: decoded where its layer has a marker, as it is elsewhere."""
    tensors = load_file(path)
    markers = {n.removesuffix(".comfy_quant"): t for n, t in tensors.items() if n.endswith(".comfy_quant")}
    assert markers
    found: dict[str, Decoded | torch.Tensor] = {}
    for layer, marker in markers.items():
        part = {n[len(layer) + 1 :]: tensors.pop(n) for n in list(tensors) if n.rpartition(".")[0] == layer}
        found[f"{layer}.weight"] = decode(json.loads(bytes(marker.tolist())), part)
        if "bias" in part:
            found[f"{layer}.bias"] = part["bias"]
    return {**tensors, **found}


# -- the weights -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CTQ)
def test_every_weight_is_its_original_to_a_rounding_of_the_format(name: str) -> None:
    """So the decoder above reads the files rightly, and the program packs every linear of the model."""
    decoded = {n: t for n, t in dequantised(MADE / f"{name}.safetensors").items() if isinstance(t, Decoded)}
    weights = {n: t for n, t in original().items() if n.endswith(".weight")}
    assert decoded.keys() == weights.keys()
    for layer, (weight, step) in decoded.items():
        moved = weight - weights[layer]
        if name == "int8-convrot":  # the codes are of the rotated weight; a rotation keeps lengths
            moved, step = np.linalg.norm(moved, axis=1), step[:, 0] / 2 * math.sqrt(weight.shape[1])
        assert (np.abs(moved) <= step * (1 + 2.0**-22)).all(), layer  # the program rounds ties in single precision


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_comfy_kitchen_loses_as_much_on_the_same_layers(name: str, tmp_path: Path) -> None:
    """The program's pictures are further from 16 bit than the demo's because it packs all layers, not by how."""
    weights = {n: t for n, t in original().items() if n.endswith(".weight")}
    model = {n: torch.from_numpy(t.copy()).bfloat16() for n, t in weights.items()}
    packed = quantize.quantize(model, name, layers=[n.removesuffix(".weight") for n in weights])
    theirs, kitchens = (
        sum(float(np.square(tensors[n].weight - weights[n]).sum()) for n in weights)
        for tensors in (
            dequantised(MADE / f"{name}.safetensors"),
            dequantised(quantize.save(tmp_path / "kitchen.safetensors", *packed)),
        )
    )
    assert theirs == pytest.approx(kitchens, rel=1e-4)


# -- the pictures ------------------------------------------------------------------------------------------------------


class Rendered(NamedTuple):
    """Latents of one file: by our loader under each execution, and by ComfyUI's own of the decoded weights."""

    ours: Callable[[str], torch.Tensor]
    decoded: torch.Tensor


@pytest.fixture(scope="module")
def latent(render: Callable[..., Any]) -> Callable[[dict[str, Any]], torch.Tensor]:
    return lambda loader: render(loader, size=64)[1].double()


@pytest.fixture(scope="module")
def rendered_file(server: ComfyServer, latent: Callable[..., torch.Tensor]) -> Callable[[Path], Rendered]:
    folder = server.models("diffusion_models")

    @functools.cache
    def run(path: Path) -> Rendered:
        save_file(as_floats(dequantised(path)), folder / f"decoded-{path.name}")
        given = folder / f"given-{path.name}"
        given.write_bytes(path.read_bytes())

        @functools.cache
        def ours(execution: str) -> torch.Tensor:
            return latent(workflows.quant_loader(given.name, rules="compatible", execution=execution))

        return Rendered(ours, latent(workflows.stock_loader(f"decoded-{path.name}")))

    return run


def as_floats(tensors: Mapping[str, Decoded | torch.Tensor]) -> dict[str, torch.Tensor]:
    """The model as F32, for ComfyUI's own loader."""
    plain_weights = {n: torch.from_numpy(t.weight) if isinstance(t, Decoded) else t for n, t in tensors.items()}
    return {name: tensor.float().contiguous() for name, tensor in plain_weights.items()}


@pytest.fixture(scope="module")
def sixteen_bit(server: ComfyServer, latent: Callable[..., torch.Tensor]) -> torch.Tensor:
    """The original's latent."""
    tensors = {name: torch.from_numpy(values.copy()).bfloat16() for name, values in original().items()}
    save_file(tensors, server.models("diffusion_models") / "before-other-tools.safetensors")
    return latent(workflows.stock_loader("before-other-tools.safetensors"))


@pytest.fixture(scope="module")
def rounding(
    server: ComfyServer, latent: Callable[..., torch.Tensor], rendered_file: Callable[[Path], Rendered]
) -> float:
    """How far one rounding of every weight to BF16 moves the latent, relatively."""
    path = MADE / "fp8.safetensors"
    rounded = {name: tensor.bfloat16() for name, tensor in as_floats(dequantised(path)).items()}
    save_file(rounded, server.models("diffusion_models") / "rounded.safetensors")
    return pictures.relative_difference(
        latent(workflows.stock_loader("rounded.safetensors")), rendered_file(path).decoded
    )


def made(name: str, server: ComfyServer) -> Path:
    """A file of convert_to_quant, or one of the demo's, which comfy-kitchen quantised."""
    return MADE / f"{name}.safetensors" if name in CTQ else server.models("diffusion_models") / fixtures.file_name(name)


@pytest.mark.parametrize("name", [*CTQ, *KITCHEN])
def test_exact_execution_renders_what_the_decoded_weights_do(
    name: str, server: ComfyServer, rendered_file: Callable[[Path], Rendered], rounding: float
) -> None:
    """The two differ by the roundings of our decoding in single precision: at most one a term of a rotation of 256,
    each 2^-24, where BF16 rounds once, by 2^-9: 2^-7 of what that does to the latent.
    """
    found = rendered_file(made(name, server))
    assert pictures.relative_difference(found.ours("exact"), found.decoded) <= rounding * 2.0**-7


@pytest.mark.parametrize("execution", ["auto", "native"])
@pytest.mark.parametrize("name", CTQ)
def test_quantised_activations_cost_no_more_than_the_weights(
    name: str, execution: str, rendered_file: Callable[[Path], Rendered], sixteen_bit: torch.Tensor
) -> None:
    """A format's own arithmetic rounds activations to the grid that the weights were rounded to, and the two enter a
    product alike: what it adds is of the size of what the file had lost already, which is known here.
    """
    found = rendered_file(MADE / f"{name}.safetensors")
    lost = pictures.relative_difference(found.decoded, sixteen_bit)
    assert pictures.relative_difference(found.ours(execution), found.decoded) <= 1.5 * lost


@pytest.mark.parametrize(("name", "rules"), [("fp8", "strict"), ("int8-convrot", "strict"), ("nvfp4", "compatible")])
def test_the_command_accepts_what_the_server_renders(name: str, rules: str) -> None:
    program = str(Path(sys.executable).with_name("quant-loader"))
    words = [program, "check", "--rules", rules, str(MADE / f"{name}.safetensors")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "OK: 21 quantised layers" in done.stdout
