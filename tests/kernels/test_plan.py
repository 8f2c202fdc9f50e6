"""The decision: what runs on which card, and the reasons a person reads."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from quant_loader import kernels
from quant_loader.checkpoint import LayerSpec
from quant_loader.kernels.facts import has_bf16, own_kernels, parse_version
from quant_loader.kernels.formats import products

ANNOTATIONS = {
    "int8_tensorwise": {"convrot": True, "convrot_groupsize": 256},
    "convrot_w4a4": {"convrot_groupsize": 256, "linear_dtype": "int4"},
    "asym_w4a8_int8": {"convrot_groupsize": 256, "group_size": 16},
}
FORMATS = list(kernels.FORMATS)


def spec(name: str, shape=(3072, 3072), **annotations) -> LayerSpec:
    return LayerSpec("blocks.0.proj", name, shape, annotations={**ANNOTATIONS.get(name, {}), **annotations})


# execution/backend under auto, by device: int8, w4a4, w4a8, nvfp4, fp8, mxfp8, quanto.
TABLE = """
gtx1080       native/torch   int8/torch     native/torch  int8/torch     int8/torch    int8/torch     int8/torch
gtx1660       native/kitchen int8/kitchen   native/torch  int8/kitchen   int8/kitchen  int8/kitchen   int8/kitchen
gtx1660-cu12  native/torch   int8/torch     native/torch  int8/torch     int8/torch    int8/torch     int8/torch
rtx2080       native/kitchen native/kitchen native/torch  int8/kitchen   int8/kitchen  int8/kitchen   int8/kitchen
rtx2080-cu12  native/torch   int8/torch     native/torch  int8/torch     int8/torch    int8/torch     int8/torch
a100          native/kitchen native/kitchen native/triton int8/kitchen   int8/kitchen  int8/kitchen   int8/kitchen
a100-cu12     native/triton  int8/triton    native/triton int8/triton    int8/triton   int8/triton    int8/triton
rtx3090       native/kitchen native/kitchen native/triton int8/kitchen   int8/kitchen  int8/kitchen   int8/kitchen
rtx3090-cu12  native/triton  int8/triton    native/triton int8/triton    int8/triton   int8/triton    int8/triton
rtx4090       native/kitchen native/kitchen native/triton int8/kitchen   native/torch  int8/kitchen   int8/kitchen
rtx4090-cu12  native/triton  int8/triton    native/triton int8/triton    native/torch  int8/triton    int8/triton
h200          native/kitchen int8/kitchen   native/triton int8/kitchen   native/torch  int8/kitchen   int8/kitchen
h200-cu12     native/triton  int8/triton    native/triton int8/triton    native/torch  int8/triton    int8/triton
b200          native/kitchen int8/kitchen   native/triton native/kitchen native/torch  native/kitchen int8/kitchen
b200-cu12     native/triton  int8/triton    native/triton native/triton  native/torch  native/triton  int8/triton
rtx5090       native/kitchen int8/kitchen   native/triton native/kitchen native/torch  native/kitchen int8/kitchen
rtx5090-cu12  native/triton  int8/triton    native/triton native/triton  native/torch  native/triton  int8/triton
rx6800        exact/torch    exact/torch    exact/torch   exact/torch    exact/torch   exact/torch    exact/torch
rx7900        native/kitchen native/kitchen native/triton int8/kitchen   int8/kitchen  int8/kitchen   int8/kitchen
strix-halo    native/kitchen native/kitchen native/triton int8/kitchen   int8/kitchen  int8/kitchen   int8/kitchen
rx9070        native/kitchen native/kitchen native/triton int8/kitchen   int8/kitchen  int8/kitchen   int8/kitchen
mps           exact/torch    exact/torch    exact/torch   exact/torch    exact/torch   exact/torch    exact/torch
cpu           native/torch   int8/torch     native/torch  exact/torch    exact/torch   exact/torch    exact/torch
cpu-vnni      native/torch   int8/torch     native/torch  int8/torch     int8/torch    int8/torch     int8/torch
"""
COLUMNS = ["int8_tensorwise", "convrot_w4a4", "asym_w4a8_int8", "nvfp4", "float8_e4m3fn", "mxfp8", "quanto_int8"]
ROWS = {line.split()[0]: dict(zip(COLUMNS, line.split()[1:], strict=True)) for line in TABLE.strip().splitlines()}


@pytest.mark.parametrize("device", ROWS)
def test_auto(device) -> None:
    facts = kernels.DEVICES[device]
    found = {}
    for name in COLUMNS:
        chosen = kernels.plan(spec(name), facts)
        found[name] = f"{chosen.execution}/{chosen.backend}"
        assert not chosen.slow
    assert found == ROWS[device]


@pytest.mark.parametrize("execution", kernels.MODES)
@pytest.mark.parametrize("name", FORMATS)
def test_every_plan_ends_in_torch_and_says_why(name, execution) -> None:
    for device, facts in kernels.DEVICES.items():
        chosen = kernels.plan(spec(name), facts, execution)
        ladder = (chosen.backend, *chosen.fallbacks)
        assert ladder[-1] == "torch", device
        assert len(set(ladder)) == len(ladder), device
        assert chosen.reason.endswith("."), device
        for passed in chosen.alternatives:
            assert passed.reason.endswith("."), device
            taken = (chosen.backend, chosen.execution, chosen.operator)
            assert (passed.backend, passed.execution, passed.operator) != taken, device
        if execution == "exact":
            assert chosen.execution == "exact", device
        assert kernels.plan(spec(name), facts, execution) == chosen, device


@pytest.mark.parametrize("execution", kernels.MODES)
@pytest.mark.parametrize("name", FORMATS)
def test_rdna2_never_gets_an_int8_product(name, execution) -> None:
    for facts in (
        kernels.DEVICES["rx6800"],
        dataclasses.replace(kernels.DEVICES["rx6800"], own_kernels="first"),
    ):
        chosen = kernels.plan(spec(name), facts, execution)
        assert chosen.backends == "torch"
        assert "_int_mm" not in chosen.operator


@pytest.mark.parametrize("execution", kernels.MODES)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("device", ["rtx2080", "rtx2080-cu12", "gtx1660", "gtx1660-cu12", "gtx1080"])
def test_turing_and_older_never_get_a_triton_product(name, device, execution) -> None:
    facts = dataclasses.replace(kernels.DEVICES[device], own_kernels="first")
    assert "triton" not in kernels.plan(spec(name), facts, execution).backends


def reasons(chosen: kernels.Plan) -> str:
    return " ".join([chosen.reason, *(alternative.reason for alternative in chosen.alternatives)])


def test_reasons_name_the_cause() -> None:
    cu12 = kernels.DEVICES["rtx3090-cu12"]
    assert (
        "PyTorch is built for CUDA 12.8; comfy-kitchen's kernels need 13.0." in kernels.plan(spec("nvfp4"), cu12).reason
    )
    no_triton = dataclasses.replace(cu12, triton=None)
    assert "Triton is not installed." in reasons(kernels.plan(spec("nvfp4"), no_triton))
    old_triton = dataclasses.replace(cu12, triton=(3, 1))
    assert "Triton 3.1 is too old; 3.3 is needed." in reasons(kernels.plan(spec("nvfp4"), old_triton))
    off = dataclasses.replace(cu12, own_kernels="off")
    assert "QUANT_LOADER_KERNELS=0" in reasons(kernels.plan(spec("nvfp4"), off))
    assert "gfx1030" in kernels.plan(spec("int8_tensorwise"), kernels.DEVICES["rx6800"]).reason
    turing = kernels.plan(spec("int8_tensorwise"), kernels.DEVICES["rtx2080-cu12"])
    assert "Triton reaches no tensor cores on this card (compute capability 7.5; 8.0 is needed)." in reasons(turing)
    assert "VNNI" in kernels.plan(spec("nvfp4"), kernels.DEVICES["cpu"]).reason
    hopper = kernels.plan(spec("nvfp4"), kernels.DEVICES["h200"])
    assert "FP4 arithmetic needs compute capability 10.0; this card has 9.0." in reasons(hopper)
    absent = dataclasses.replace(cu12, kitchen=None, kitchen_backends=frozenset(), kitchen_operators=frozenset())
    assert "comfy-kitchen is not installed." in reasons(kernels.plan(spec("nvfp4"), absent))
    disabled = dataclasses.replace(
        kernels.DEVICES["rtx3090"], kitchen_backends=frozenset(), kitchen_operators=frozenset()
    )
    assert "not loaded or switched off" in reasons(kernels.plan(spec("nvfp4"), disabled))


def test_kitchen_without_an_operator_is_said() -> None:
    old = kernels.DEVICES["rtx3090"]
    assert "comfy-kitchen 0.2.26 has no cuda kernel for w4a8_int8_linear." in reasons(
        kernels.plan(spec("asym_w4a8_int8"), old)
    )
    newer = dataclasses.replace(old, kitchen_operators=old.kitchen_operators | {"cuda.w4a8_int8_linear"})
    assert kernels.plan(spec("asym_w4a8_int8"), newer).backend == "kitchen"


@pytest.mark.parametrize(
    ("name", "shape", "annotations", "text"),
    [
        ("int8_tensorwise", (3072, 3080), {"convrot": False}, "multiple of 16; this layer has 3080"),
        ("int8_tensorwise", (3070, 3072), {}, "multiple of 8; this layer has 3070"),
        ("int8_tensorwise", (3072, 3072), {"convrot_groupsize": 1024}, "groups of 16, 64 or 256; this layer says 1024"),
        ("float8_e4m3fn", (3072, 3080), {}, "multiple of 16"),
    ],
)
def test_shapes_that_a_kernel_does_not_take(name, shape, annotations, text) -> None:
    chosen = kernels.plan(spec(name, shape, **annotations), kernels.DEVICES["rtx4090"])
    assert text in reasons(chosen)
    assert chosen.backend != "kitchen"


def test_full_precision_layers() -> None:
    facts = kernels.DEVICES["b200"]
    layer = spec("nvfp4", full_precision_matrix_mult=True)
    auto = kernels.plan(layer, facts)
    assert auto.execution == "exact"
    assert "asks for full precision" in auto.reason
    for execution in ("native", "int8"):
        forced = kernels.plan(layer, facts, execution)
        assert forced.execution == execution
        assert "overrides" in forced.reason


def test_int8_activations_in_the_file_are_native() -> None:
    layer = spec("convrot_w4a4", linear_dtype="int8")
    assert kernels.plan(layer, kernels.DEVICES["h200"]).execution == "native"
    assert kernels.plan(layer, kernels.DEVICES["rtx3090"]).operator == "convrot_w4a4_linear"


def test_a_weight_that_no_rotation_divides_is_not_carried() -> None:
    chosen = kernels.plan(spec("float8_e4m3fn", (3072, 3080)), kernels.DEVICES["rtx3090"], "int8")
    assert chosen.execution == "exact"
    assert "multiple of 16 inputs; this layer has 3080" in chosen.reason


def test_slow_plans_say_so() -> None:
    chosen = kernels.plan(spec("nvfp4"), kernels.DEVICES["rtx3090"], "native")
    assert chosen.slow
    assert "Slower" in chosen.reason


def test_own_kernels_first_and_off() -> None:
    card = kernels.DEVICES["h200"]
    first = dataclasses.replace(card, own_kernels="first")
    assert kernels.plan(spec("int8_tensorwise"), first).backends == "triton,kitchen,torch"
    off = dataclasses.replace(card, own_kernels="off")
    assert "triton" not in kernels.plan(spec("int8_tensorwise"), off).backends


@pytest.mark.parametrize(
    ("value", "meaning"),
    [("0", "off"), ("off", "off"), ("1", "on"), ("", "on"), ("first", "first"), (" FIRST ", "first")],
)
def test_environment_variable(value, meaning) -> None:
    assert own_kernels({kernels.ENVIRONMENT_VARIABLE: value}) == meaning
    assert own_kernels({}) == "on"


def test_impossible_requests_are_explained() -> None:
    with pytest.raises(
        ValueError, match=r"blocks\.0\.proj \(nvfp4\) cannot run with the triton backend on CPU.*NVIDIA and AMD"
    ):
        kernels.plan(spec("nvfp4"), kernels.DEVICES["cpu"], "auto", "triton")
    with pytest.raises(ValueError, match="execution must be one of auto, native, int8, exact, found 'fast'"):
        kernels.plan(spec("nvfp4"), kernels.DEVICES["cpu"], "fast")
    with pytest.raises(ValueError, match=r"blocks\.0\.proj: unknown format 'int3'"):
        kernels.plan(spec("int3"), kernels.DEVICES["cpu"])


def test_versions() -> None:
    assert parse_version("2.14.1+cu130") == (2, 14, 1)
    assert parse_version("13.0") == (13, 0)
    assert parse_version(None) is None
    assert parse_version("nightly") is None


def test_facts_of_this_machine() -> None:
    import torch

    facts = kernels.device_facts("cpu")
    assert facts.device == "cpu"
    assert facts.torch[:2] == parse_version(torch.__version__)[:2]
    assert facts.vnni == torch.cpu._is_vnni_supported()
    assert facts.maker == "cpu"


def test_devices_have_both_names() -> None:
    assert kernels.DEVICES["sm_86"] is kernels.DEVICES["rtx3090"]
    assert kernels.DEVICES["sm_120-cu12"] is kernels.DEVICES["rtx5090-cu12"]
    assert kernels.DEVICES["gfx1201"] is kernels.DEVICES["rx9070"]


SENTENCE = "A bfloat16 model's products run in float32: there are no bfloat16 units here."


def test_cards_before_ampere_and_plain_cpus_never_get_a_bfloat16_product() -> None:
    without = {device for device, facts in kernels.DEVICES.items() if not facts.bf16}
    cards = {"gtx1080", "gtx1660", "rtx2080", "sm_61", "sm_75"}
    assert without == {*cards, *(f"{card}-cu12" for card in cards), "cpu", "cpu-vnni"}
    for device, facts in kernels.DEVICES.items():
        for name in FORMATS:
            told = SENTENCE in kernels.plan(spec(name), facts, "exact").reason
            assert told == (device in without), device


@pytest.mark.parametrize(("supported", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_the_body_keeps_to_that_fact(supported, dtype, monkeypatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: supported)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert kernels.device_facts("cpu").bf16 == supported
    assert products.product_dtype(torch.zeros(1, dtype=torch.bfloat16)) is dtype
    assert products.product_dtype(torch.zeros(1, dtype=torch.float16)) is torch.float32


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_a_mock_card_has_bfloat16_from_ampere(capability, expected, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    assert has_bf16(torch.device("cuda")) == expected
