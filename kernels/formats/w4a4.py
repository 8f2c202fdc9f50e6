"""``convrot_w4a4``: rotated weights in signed 4-bit codes, one scale an output row, activations in 4 or 8 bits.

Weight: ``W_rot[n, k] = code[n, k] * weight_scale[n]``, codes two's-complement nibbles -8..7, the LOW nibble being the
even column. ``linear_dtype`` "int4": ``s = max(max|x_rot|, 1e-10) / 7``, ``q = clamp(round(x_rot / s), -7, 7)``;
"int8": Q8. ``y = (q code^T) * s * weight_scale + bias``. Cards without 4-bit integer units run int8 activations either
way: more precise (0.154 against 0.22 relative output error), and the codes are carried over as they are. Source:
ConvRot; comfy-kitchen ``convrot_w4a4_linear``; RULES section 4, "W4A4".

Tensors: ``weight`` I8 (or U8) [N, K / 2]; ``weight_scale`` [N] (or [N, 1]), any float dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from .. import kitchen
from ..facts import DeviceFacts
from ..operators import operator
from ..retire import run
from ..routes import Execution, Route, all_of, inputs_divisible
from ..routes import kitchen as kitchen_has
from ..spec import Spec, rotation_group
from .base import Decoded, Format, Tensors, reference_int8
from .codes import unpack_int4
from .int8 import EXACT, TORCH_FLOAT_CODES, TORCH_INT8, TRITON_INT8, kitchen_shapes, triton_codes
from .products import Carried, CodeRows, FloatRows, dense_linear, flatten, int8_linear
from .scales import required, row_scale


@operator(
    "w4a4_linear",
    "(Tensor x, Tensor qweight, Tensor scale, Tensor? bias, int out_features, int group, "
    "int activation_bits, str execution, str backends) -> Tensor",
)
def _w4a4_linear(
    x: Tensor,
    qweight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    out_features: int,
    group: int,
    activation_bits: int,
    execution: str,
    backends: str,
) -> Tensor:
    scale = row_scale(scale, qweight.shape[0])
    weight = W4A4Weight(qweight[:out_features], scale[:out_features] if scale.dim() else scale, group, activation_bits)
    return run(f"w4a4_linear ({execution})", backends, _EXACT if execution == "exact" else _BODIES, x, weight, bias)


class W4A4Weight(NamedTuple):
    """``qweight`` packed bytes [N, K / 2]; ``scale`` float32 [] or [N, 1]; ``group`` the rotation; ``bits`` of the
    activation.
    """

    qweight: Tensor
    scale: Tensor
    group: int
    bits: int

    @property
    def N(self) -> int:  # noqa: N802
        """Output features."""
        return self.qweight.shape[0]

    def codes(self) -> CodeRows:
        """Row access to the codes, one a byte, and their scale."""
        return lambda start, stop: (
            unpack_int4(self.qweight[start:stop]),
            self.scale[start:stop] if self.scale.dim() else self.scale,
        )

    def decoded(self) -> FloatRows:
        """Row access to the dense rotated weight."""
        part = self.codes()

        def rows(start: int, stop: int) -> Tensor:
            codes, factor = part(start, stop)
            return codes.to(torch.float32).mul_(factor)

        return rows


def _torch_exact(x: Tensor, w: W4A4Weight, bias: Tensor | None) -> Tensor:
    return dense_linear(x, w.N, w.decoded(), w.group, bias)


def _torch(x: Tensor, w: W4A4Weight, bias: Tensor | None) -> Tensor:
    return int8_linear(x, w.N, w.codes(), w.group, bias, w.bits)


def _kitchen(x: Tensor, w: W4A4Weight, bias: Tensor | None) -> Tensor:
    N = w.N
    y = kitchen.convrot_w4a4_linear(flatten(x), w.qweight.view(torch.int8), w.scale.expand(N, 1), bias, w.group, w.bits)
    return y.reshape(*x.shape[:-1], N)


def _triton(x: Tensor, w: W4A4Weight, bias: Tensor | None) -> Tensor:
    from ..triton_ops.w4_decode import decode_int4

    def rows(start: int, stop: int) -> tuple[Tensor, Tensor]:
        return decode_int4(w.qweight[start:stop]), w.scale[start:stop] if w.scale.dim() else w.scale

    return triton_codes(x, w.N, rows, bias, w.group, bits=w.bits)


_BODIES: dict[str, Callable[..., Tensor]] = {"kitchen": _kitchen, "triton": _triton, "torch": _torch}
_EXACT: dict[str, Callable[..., Tensor]] = {"torch": _torch_exact}


def _int4_units(spec: Spec, facts: DeviceFacts) -> str | None:
    if wants_int8(spec) or facts.int4_units or facts.maker == "amd":
        return None
    return "this device has no 4-bit integer units."


def wants_int8(spec: Spec) -> bool:
    """The layer itself asks for int8 activations."""
    return str(spec.get("linear_dtype", "int4")) == "int8"


_SHAPES = all_of(inputs_divisible(64, "comfy-kitchen's W4A4 kernel"), kitchen_shapes)
_KITCHEN = all_of(kitchen_has("convrot_w4a4_linear"), _SHAPES)
_WIDER = "The 4-bit arithmetic is carried out by wider products of the same codes."
_NO_INT4 = "4-bit codes with int8 activations: this device has no 4-bit integer units, and 8 bits are more precise."


class W4A4(Format):
    """``convrot_w4a4``."""

    name = "convrot_w4a4"
    has_int8_codes = True
    operator = "w4a4_linear"
    routes = (
        Route(
            "native",
            "kitchen",
            "convrot_w4a4_linear",
            "comfy-kitchen's convrot_w4a4_linear runs on this card's integer units.",
            all_of(_int4_units, _KITCHEN),
        ),
        *(
            replace(route, operator=f"{route.operator}, 4-bit codes", why=_WIDER, stands_in=True)
            for route in (TRITON_INT8, TORCH_INT8, TORCH_FLOAT_CODES)
        ),
        Route(
            "int8",
            "kitchen",
            "convrot_w4a4_linear",
            f"{_NO_INT4} comfy-kitchen's convrot_w4a4_linear runs on the INT8 units.",
            _KITCHEN,
        ),
        *(
            replace(r, execution="int8", why=f"{_NO_INT4} {r.why}")
            for r in (TRITON_INT8, TORCH_INT8, TORCH_FLOAT_CODES)
        ),
        EXACT,
    )

    def _weight(self, spec: Spec, tensors: Tensors) -> W4A4Weight:
        qweight = required(spec, tensors, "weight")
        scale = row_scale(required(spec, tensors, "weight_scale"), qweight.shape[0])
        return W4A4Weight(qweight, scale, rotation_group(spec, always=True), activation_bits(spec, "native"))

    def decoded(self, spec: Spec, tensors: Tensors) -> Decoded:
        w = self._weight(spec, tensors)
        return Decoded(w.decoded(), w.N, 2 * w.qweight.shape[1], w.group)

    def carried(self, spec: Spec, tensors: Tensors) -> Carried:
        w = self._weight(spec, tensors)
        return Carried(w.codes(), w.N, w.group)

    def reference_native(self, x: Tensor, spec: Spec, tensors: Tensors) -> Tensor:
        w = self._weight(spec, tensors)
        return reference_int8(x, *w.codes()(0, w.N), w.group, w.bits)

    def linear(
        self, x: Tensor, spec: Spec, tensors: Tensors, bias: Tensor | None, execution: Execution, backends: str
    ) -> Tensor:
        weight, scale = required(spec, tensors, "weight"), required(spec, tensors, "weight_scale")
        group, bits = rotation_group(spec, always=True), activation_bits(spec, execution)
        return _w4a4_linear(x, weight, scale, bias, spec.shape[0], group, bits, execution, backends)


def activation_bits(spec: Spec, execution: Execution) -> int:
    """4 where the format's own arithmetic is wanted and the layer does not ask for int8; 8 otherwise."""
    return 4 if execution == "native" and not wants_int8(spec) else 8
