"""One declared layer while it is being checked: its declaration, its tensors, and the words for what is wrong with
it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from .catalogue import READ_NESTED
from .dtypes import FLOATS, WIDE_FLOATS
from .findings import Findings
from .header import TensorInfo
from .words import dims, show

NESTED_KEYS = ("convrot", "convrot_groupsize", "group_size", "linear_dtype")
"""Settings that ComfyUI also looks for in a nested ``params`` object."""

DENSE_SUFFIXES = frozenset({"weight", "bias"})
"""What a layer has whether it is quantised or not."""

SCALE_SUFFIXES = (
    "weight_scale",
    "weight_scale_2",
    "input_scale",
    "pre_quant_scale",
    "weight_s_rel",
    "weight_s_channel",
    "weight_codebook",
    "weight_correction",
    "scale_weight",
    "scale_input",
)
"""Tensor suffixes that mean nothing unless a declaration uses them."""


class Read(NamedTuple):
    """A float tensor whose values the check looks at.

    ``signed`` tensors (codebook, pre_quant_scale) may hold zero and negative values. ``reach`` times the largest value
    is the largest weight that it can make (0: not a weight scale). ``exactly_one`` is Quanto's rule for auxiliary
    scales.
    """

    layer: str
    tensor: TensorInfo
    suffix: str
    signed: bool = False
    reach: float = 0.0
    exactly_one: bool = False


@dataclass(frozen=True)
class Understood:
    """What a format made of a sound layer."""

    shape: tuple[int, int]
    annotations: dict[str, Any]
    tensors: dict[str, str]


class Layer:
    """A declared layer under check.

    ``parts`` are its tensors by suffix as in the file; ``aliases`` map a canonical suffix to a dialect's spelling.
    ``readable``: whether values may be read from the file.
    ``used`` collects the suffixes that the format knows, ``reads`` the tensors whose values matter, ``notes`` what the
    user may want to know.
    """

    def __init__(
        self,
        prefix: str,
        conf: Mapping[str, Any],
        parts: Mapping[str, TensorInfo],
        findings: Findings,
        compatible: bool,
        aliases: Mapping[str, str] | None = None,
        readable: bool = True,
    ) -> None:
        self.prefix = prefix
        self.conf = conf
        self.parts = parts
        self.findings = findings
        self.compatible = compatible
        self.aliases = aliases or {}
        self.readable = readable
        self.notes: list[str] = []
        self.reads: list[Read] = []
        self.used: set[str] = set()
        self.sound = True
        self.refused_rotation = False
        """Whether a rotation that the format cannot have, or cannot lack, was refused."""
        self.silent = True
        """Whether nothing at all was said about this layer."""

    def tensor(self, suffix: str) -> TensorInfo | None:
        """The layer's tensor with this canonical suffix; it counts as used by the declaration."""
        suffix = self.aliases.get(suffix, suffix)
        self.used.add(suffix)
        return self.parts.get(suffix)

    def need(self, suffix: str) -> TensorInfo:
        """As :meth:`tensor`, for one whose presence was checked."""
        return self.parts[self.aliases.get(suffix, suffix)]

    def fault(self, rule: str, **words: Any) -> None:
        """Record an error of this layer."""
        self.sound = self.silent = False
        self.findings.add(rule, layer=self.prefix, **words)

    def remark(self, rule: str, **words: Any) -> None:
        """Record a warning or notice of this layer."""
        self.silent = False
        self.findings.add(rule, layer=self.prefix, **words)

    def dialect(self, found: str, variant: str) -> None:
        """Record what compatible understood."""
        self.notes.append(found)
        self.remark("extra.dialect", found=found, variant=variant)

    def read(self, suffix: str, tensor: TensorInfo, *, signed: bool = False, reach: float = 0.0) -> None:
        """Ask for the tensor's values to be looked at."""
        self.reads.append(Read(self.prefix, tensor, suffix, signed, reach))

    # -- settings ----------------------------------------------------------------------------------------------------

    def setting(self, key: str, default: Any = None) -> Any:
        """A setting of the declaration; compatible falls back to the nested ``params``, as ComfyUI does."""
        if key in self.conf:
            return self.conf[key]
        if self.compatible and key in NESTED_KEYS:
            params = self.conf.get("params")
            if isinstance(params, Mapping) and key in params:
                return params[key]
        return default

    def nested_params(self, effective: Mapping[str, Any], fixed: tuple[str, ...] = ()) -> None:
        """Check the nested ``params`` against the settings in effect (``effective``: only those this format reads).

        ``fixed``: those that the format leaves no choice in. One that was refused already is not refused again.
        """
        params = self.conf.get("params")
        if not isinstance(params, Mapping):
            return
        for key, value in effective.items():
            if key not in params or value is None or (key in fixed and self.refused_rotation):
                continue
            nested = params[key]
            if nested is None:
                continue
            if same(nested, value):
                if self.compatible and key not in self.conf:
                    self.dialect(f"{key} {show(nested)} read from nested params", "params")
                continue
            said = key in self.conf
            self.fault(
                "extra.params.contradict",
                expected=f"{key} {show(value)}" + ("" if said else " (by default)"),
                found=f"{key} {show(nested)}",
                remedy="" if said or key in fixed or self.compatible else READ_NESTED,
            )

    def whole_number(self, key: str, default: int) -> int | None:
        """An integer setting, or None (with a fault) when its kind is wrong but the reference's ``int()`` would have
        let it pass.
        """
        value = self.setting(key, default)
        number = plain_int(value, lenient=self.compatible)
        if number is None:
            self.fault("extra.value.type", found=show(value), expected="a whole number", setting=key)
        elif isinstance(value, str):
            self.dialect(f"{key} {show(value)} read as {number}", "number")
        return number

    def flag(self, key: str) -> bool | None:
        """A setting that changes what the weight means: true, false, null or absent; anything else is a fault."""
        value = self.setting(key)
        if value is None:
            return False
        if isinstance(value, bool):
            return value
        if self.compatible and type(value) in (int, float) and value in (0, 1):
            self.dialect(f"{key} {show(value)} read as {show(bool(value))}", "flag")
            return bool(value)
        self.fault("extra.value.type", found=show(value), expected="true or false", setting=key)
        return None

    def full_precision(self) -> bool:
        """``full_precision_matrix_mult``: any truthy value counts, as ComfyUI reads it."""
        value = self.setting("full_precision_matrix_mult")
        if value is not None and not isinstance(value, bool):
            self.remark(
                "extra.flag.type", setting="full_precision_matrix_mult", found=show(value), expected=show(bool(value))
            )
        return bool(value)

    def always_rotated(self, format_name: str) -> None:
        """Formats that are rotated whatever the declaration says must not be declared unrotated."""
        if self.setting("convrot") is not None and self.flag("convrot") is False:
            self.refused_rotation = True
            self.fault(
                "extra.convrot.unsupported",
                found=show(self.setting("convrot")),
                expected=f"{format_name} weights are always rotated",
            )

    def is_matrix(self, rule: str, weight: TensorInfo) -> bool:
        """Whether the weight has two dimensions; otherwise a fault of this rule that says what it probably is."""
        if len(weight.shape) == 2:
            return True
        self.fault(rule, tensor=weight.name, expected="2 dimensions", found=dims(weight.shape), look=look(weight.shape))
        return False

    def no_rotation(self, format_name: str) -> None:
        """Formats without rotation must not claim one, in nested ``params`` neither."""
        if self.setting("convrot"):
            self.refused_rotation = True
            self.fault(
                "extra.convrot.unsupported",
                found=show(self.setting("convrot")),
                expected=f"{format_name} weights are never rotated",
            )
        self.nested_params({"convrot": False}, ("convrot",))


def same(a: Any, b: Any) -> bool:
    """Equality of JSON values that cannot fail: too deep to compare counts as different."""
    try:
        return bool(a == b)
    except RecursionError:
        return False


def plain_int(value: Any, *, lenient: bool) -> int | None:
    """A whole number written as one: 64 or 64.0, and when lenient "64"; never true, 64.9 or other spellings."""
    if type(value) is int:
        return value
    if type(value) is float and value.is_integer():
        return int(value)
    if lenient and type(value) is str and value.isascii() and value.strip().isdigit() and len(value) < 12:
        return int(value)
    return None


def coerced_int(value: Any) -> int | None:
    """``int(value)`` as the reference does it; None where that raises."""
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return None


def is_power_of_four(value: int) -> bool:
    """Sizes for which the rotation exists: 4, 16, 64, 256, ..."""
    return value >= 4 and value & (value - 1) == 0 and value.bit_length() % 2 == 1


def check_bias(bias: TensorInfo | None, shape: tuple[int, int], row_multiple: int, fault: Callable[..., None]) -> None:
    """Record what is wrong with the bias of a weight ``(N, K)``: one float for each of its N rows, but for those that
    pad N to ``row_multiple``.

    It is the one witness of how many rows a weight should have: one that was stored transposed, or cut short, is as
    sound as any other when its scales do not depend on its shape.
    """
    if bias is None:
        return
    n, k = shape
    if bias.dtype not in FLOATS or bias.dtype == "F8_E8M0":  # which holds scales: powers of two without a sign
        fault("extra.bias.dtype", tensor=bias.name, expected="floating point numbers", found=bias.dtype)
    elif bias.shape != (n,) and (len(bias.shape) != 1 or padded(bias.shape[0], row_multiple) != n):
        turned = bias.shape == (k,)
        fault(
            "extra.bias.shape",
            tensor=bias.name,
            expected=dims((n,)),
            found=dims(bias.shape),
            weight=dims(shape),
            look=": the weight may be stored transposed" if turned else "",
            variant="transposed" if turned else "",
        )


def look(shape: tuple[int, ...]) -> str:
    """What a weight of the wrong rank probably is."""
    if len(shape) == 3:
        return f" (a bank of {shape[0]} experts, or a 1D convolution)"
    if len(shape) == 4:
        return " (a 2D convolution kernel)"
    if len(shape) == 5:
        return " (a 3D convolution kernel)"
    if len(shape) < 2:
        return " (a norm, a bias or a lookup table)"
    return ""


def typed(tensor: TensorInfo) -> str:
    """``F32 (8, 1)``."""
    return f"{tensor.dtype} {dims(tensor.shape)}"


def narrow(tensor: TensorInfo) -> bool:
    """A 16-bit or 64-bit float that F32 can stand in for."""
    return tensor.dtype in WIDE_FLOATS and tensor.dtype != "F32"


def padded(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
