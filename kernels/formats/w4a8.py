"""``asym_w4a8_int8``: 4-bit codes on a codebook or a uniform grid, an e4m3 scale a group, INT8 arithmetic, always
rotated.

``v = codebook[c]`` (or ``c - 8``), ``q8[n, k] = clamp(round(v * e4m3(s_rel[n, k div G])), -127, 127)``, ``W_rot = q8 *
s_channel[n] (+ correction[k div G, n])``; the LOW nibble is the even column, codes 0..15. Without a correction the
linear is the INT8 linear of (x, q8, s_channel); with one, the weight is decoded and x is not quantised. Source:
comfy-kitchen ``w4a8_int8_linear``; RULES section 4, "W4A8".

Tensors: ``weight`` I8 (or U8) [N, K / 2]; ``weight_s_rel`` e4m3 (or U8) [N, K / G]; ``weight_s_channel`` [N]; optional
``weight_codebook`` float32 [16] and ``weight_correction`` float32 [K / G, N].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from .. import kitchen
from ..facts import DeviceFacts
from ..operators import operator
from ..retire import run
from ..routes import Execution, Route, all_of
from ..routes import kitchen as kitchen_has
from ..spec import Spec, rotation_group
from .base import Decoded, Format, Tensors, reference_int8
from .int8 import EXACT, TORCH_FLOAT_CODES, TORCH_INT8, TRITON_INT8, kitchen_shapes, triton_codes
from .products import CodeRows, FloatRows, dense_linear, flatten, int8_linear
from .scales import as_float8, e4m3_to_float, optional, required, row_scale, unpack_nibbles


@operator(
    "w4a8_linear",
    "(Tensor x, Tensor qweight, Tensor s_rel, Tensor s_channel, Tensor? codebook, Tensor? correction, Tensor? bias, int out_features, "
    "int group_size, int rotation, str execution, str backends) -> Tensor",
)
def _w4a8_linear(
    x: Tensor,
    qweight: Tensor,
    s_rel: Tensor,
    s_channel: Tensor,
    codebook: Tensor | None,
    correction: Tensor | None,
    bias: Tensor | None,
    out_features: int,
    group_size: int,
    rotation: int,
    execution: str,
    backends: str,
) -> Tensor:
    scale = row_scale(s_channel, qweight.shape[0]).expand(qweight.shape[0], 1)
    arguments = (
        x,
        qweight[:out_features],
        s_rel[:out_features],
        scale[:out_features],
        codebook,
        None if correction is None else correction[:, :out_features],
        bias,
        group_size,
        rotation,
    )
    return run(f"w4a8_linear ({execution})", backends, _EXACT if execution == "exact" else _BODIES, *arguments)


def decode_codes(qweight: Tensor, s_rel: Tensor, codebook: Tensor | None, group_size: int) -> Tensor:
    """int8 ``q8`` [rows, K] of packed codes [rows, K / 2] and group scales [rows, K / group_size]."""
    codes = unpack_nibbles(qweight, high_first=False)
    if codebook is None:
        values = codes.to(torch.float32) - 8.0
    else:
        values = torch.index_select(codebook.to(torch.float32), 0, codes.reshape(-1).to(torch.int32)).reshape(
            codes.shape
        )
    grouped = values.reshape(codes.shape[0], -1, group_size).mul_(e4m3_to_float(s_rel)[..., None])
    return grouped.round_().clamp_(-127.0, 127.0).to(torch.int8).reshape(codes.shape)


def _codes(qweight: Tensor, s_rel: Tensor, scale: Tensor, codebook: Tensor | None, group_size: int) -> CodeRows:
    return lambda start, stop: (
        decode_codes(qweight[start:stop], s_rel[start:stop], codebook, group_size),
        scale[start:stop],
    )


def _decoded(
    qweight: Tensor, s_rel: Tensor, scale: Tensor, codebook: Tensor | None, correction: Tensor | None, group_size: int
) -> FloatRows:
    part = _codes(qweight, s_rel, scale, codebook, group_size)

    def rows(start: int, stop: int) -> Tensor:
        codes, factor = part(start, stop)
        weight = codes.to(torch.float32).mul_(factor)
        if correction is not None:
            weight += correction[:, start:stop].t().to(torch.float32).repeat_interleave(group_size, dim=1)
        return weight

    return rows


def _torch_exact(
    x: Tensor,
    qweight: Tensor,
    s_rel: Tensor,
    scale: Tensor,
    codebook: Tensor | None,
    correction: Tensor | None,
    bias: Tensor | None,
    group_size: int,
    rotation: int,
) -> Tensor:
    rows = _decoded(qweight, s_rel, scale, codebook, correction, group_size)
    return dense_linear(x, qweight.shape[0], rows, rotation, bias)


def _torch(
    x: Tensor,
    qweight: Tensor,
    s_rel: Tensor,
    scale: Tensor,
    codebook: Tensor | None,
    correction: Tensor | None,
    bias: Tensor | None,
    group_size: int,
    rotation: int,
) -> Tensor:
    return int8_linear(x, qweight.shape[0], _codes(qweight, s_rel, scale, codebook, group_size), rotation, bias)


def _kitchen(
    x: Tensor,
    qweight: Tensor,
    s_rel: Tensor,
    scale: Tensor,
    codebook: Tensor | None,
    correction: Tensor | None,
    bias: Tensor | None,
    group_size: int,
    rotation: int,
) -> Tensor:
    y = kitchen.w4a8_int8_linear(
        flatten(x), qweight.view(torch.int8), as_float8(s_rel), scale.reshape(-1), codebook, bias, group_size, rotation
    )
    return y.reshape(*x.shape[:-1], qweight.shape[0])


def _triton(
    x: Tensor,
    qweight: Tensor,
    s_rel: Tensor,
    scale: Tensor,
    codebook: Tensor | None,
    correction: Tensor | None,
    bias: Tensor | None,
    group_size: int,
    rotation: int,
) -> Tensor:
    from ..triton_ops.w4_decode import decode_w4a8

    def rows(start: int, stop: int) -> tuple[Tensor, Tensor]:
        return decode_w4a8(qweight[start:stop], s_rel[start:stop], codebook, group_size=group_size), scale[start:stop]

    return triton_codes(x, qweight.shape[0], rows, bias, rotation)


_BODIES: dict[str, Callable[..., Tensor]] = {"kitchen": _kitchen, "triton": _triton, "torch": _torch}
_EXACT: dict[str, Callable[..., Tensor]] = {"torch": _torch_exact}


def _no_correction(spec: Spec, facts: DeviceFacts) -> str | None:
    return "the layer has a correction, which needs the decoded weight." if spec.get("has_correction", False) else None


_WHY = "4-bit codes, decoded to INT8 by group."


class W4A8(Format):
    """``asym_w4a8_int8``."""

    name = "asym_w4a8_int8"
    operator = "w4a8_linear"
    routes = (
        Route(
            "native",
            "kitchen",
            "w4a8_int8_linear",
            "comfy-kitchen's w4a8_int8_linear runs on this card's INT8 units.",
            all_of(_no_correction, kitchen_has("w4a8_int8_linear"), kitchen_shapes),
        ),
        *(
            replace(route, why=f"{_WHY} {route.why}", fits=all_of(_no_correction, route.fits))
            for route in (TRITON_INT8, TORCH_INT8, TORCH_FLOAT_CODES)
        ),
        EXACT,
    )

    def int8_is_native(self, spec: Spec) -> bool:
        return True

    def _parts(self, spec: Spec, tensors: Tensors) -> tuple[Tensor, Tensor, Tensor, Tensor | None, int]:
        qweight = required(spec, tensors, "weight")
        N = qweight.shape[0]
        scale = row_scale(required(spec, tensors, "weight_s_channel"), N).expand(N, 1)
        s_rel, codebook = required(spec, tensors, "weight_s_rel"), optional(tensors, "weight_codebook")
        return qweight, s_rel, scale, codebook, int(spec.get("group_size", 16))

    def decoded(self, spec: Spec, tensors: Tensors) -> Decoded:
        qweight, s_rel, scale, codebook, group_size = self._parts(spec, tensors)
        rows = _decoded(qweight, s_rel, scale, codebook, optional(tensors, "weight_correction"), group_size)
        return Decoded(rows, qweight.shape[0], 2 * qweight.shape[1], rotation_group(spec, always=True))

    def int8_codes(self, spec: Spec, tensors: Tensors) -> tuple[CodeRows, int] | None:
        if optional(tensors, "weight_correction") is not None:
            return None
        return _codes(*self._parts(spec, tensors)), rotation_group(spec, always=True)

    def reference_native(self, x: Tensor, spec: Spec, tensors: Tensors) -> Tensor:
        qweight, s_rel, scale, codebook, group_size = self._parts(spec, tensors)
        if optional(tensors, "weight_correction") is not None:
            return x @ self.dequantize(spec, tensors).t()
        codes = decode_codes(qweight, s_rel, codebook, group_size)
        return reference_int8(x, codes, scale, rotation_group(spec, always=True))

    def linear(
        self, x: Tensor, spec: Spec, tensors: Tensors, bias: Tensor | None, execution: Execution, backends: str
    ) -> Tensor:
        correction = optional(tensors, "weight_correction")
        if correction is not None:
            execution, backends = "exact", "torch"
        return _w4a8_linear(
            x,
            required(spec, tensors, "weight"),
            required(spec, tensors, "weight_s_rel"),
            required(spec, tensors, "weight_s_channel"),
            optional(tensors, "weight_codebook"),
            correction,
            bias,
            spec.shape[0],
            int(spec.get("group_size", 16)),
            rotation_group(spec, always=True),
            execution,
            backends,
        )
