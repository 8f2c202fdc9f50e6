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
from typing import NamedTuple

import torch
from torch import Tensor

from .. import kitchen
from ..facts import DeviceFacts
from ..operators import operator
from ..retire import run
from ..routes import Execution, Route, all_of
from ..routes import kitchen as kitchen_has
from ..spec import Spec, rotation_group
from . import quantize
from .base import Decoded, Format, Tensors, reference_int8
from .codes import as_float8, e4m3_to_float, unpack_nibbles
from .int8 import EXACT, TORCH_FLOAT_CODES, TORCH_INT8, TRITON_INT8, kitchen_shapes, triton_codes
from .products import Carried, CodeRows, FloatRows, dense_linear, flatten, int8_linear
from .scales import optional, required, row_scale


@operator(
    "w4a8_linear",
    "(Tensor x, Tensor qweight, Tensor s_rel, Tensor s_channel, Tensor? codebook, Tensor? correction, "
    "Tensor? bias, int out_features, int group_size, int rotation, str execution, str backends) -> Tensor",
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
    weight = canonical(qweight, s_rel, s_channel, codebook, correction, group_size, rotation, out_features)
    return run(f"w4a8_linear ({execution})", backends, _EXACT if execution == "exact" else _BODIES, x, weight, bias)


def decode_codes(
    qweight: Tensor, s_rel: Tensor, codebook: Tensor | None, group_size: int, table: Tensor | None = None
) -> Tensor:
    """int8 ``q8`` [rows, K] of packed codes [rows, K / 2] and group scales [rows, K / group_size].

    A group's scale byte and a packed byte say what two codes become: one lookup a pair, in a ``table`` of all 65,536
    (:func:`_pairs` of the codebook, which callers in a loop make once).
    """
    table = _pairs(codebook, qweight.device) if table is None else table
    rows, groups = s_rel.shape
    if group_size % 2:  # bytes lie across groups: one lookup a code, of which the low half of an entry is the first
        index = unpack_nibbles(qweight, high_first=False).to(torch.int32)
        index.view(rows, groups, group_size).add_(_scale_index(s_rel))
        return torch.index_select(table, 0, index.view(-1)).to(torch.int8).view(index.shape)
    index = qweight.view(torch.uint8).to(torch.int32)
    index.view(rows, groups, group_size // 2).add_(_scale_index(s_rel))
    return torch.index_select(table, 0, index.view(-1)).view(torch.int8).view(rows, groups * group_size)


def _scale_index(s_rel: Tensor) -> Tensor:
    """The scale bytes' part of an index into :func:`_pairs`, int32 [rows, groups, 1]."""
    return (s_rel.view(torch.uint8).to(torch.int32) << 8)[..., None]


def _pairs(codebook: Tensor | None, device: torch.device) -> Tensor:
    """int16 [65536]: at ``scale byte * 256 + packed byte`` the two int8 codes, that of the low nibble first."""
    byte = torch.arange(256, dtype=torch.uint8, device=device)
    values = torch.arange(-8, 8, device=device) if codebook is None else codebook
    single = (e4m3_to_float(byte)[:, None] * values.to(torch.float32)).round_().clamp_(-127.0, 127.0).to(torch.int8)
    low, high = (byte & 0x0F).to(torch.int64), (byte >> 4).to(torch.int64)
    return torch.stack((single[:, low], single[:, high]), dim=-1).view(torch.int16).reshape(-1)


class W4A8Weight(NamedTuple):
    """``qweight`` packed bytes [N, K / 2]; ``s_rel`` e4m3 bytes [N, K / group_size]; ``scale`` float32 [N, 1];
    ``codebook`` [16] or None; ``correction`` [K / group_size, N] or None; ``rotation`` the ConvRot group."""

    qweight: Tensor
    s_rel: Tensor
    scale: Tensor
    codebook: Tensor | None
    correction: Tensor | None
    group_size: int
    rotation: int

    @property
    def N(self) -> int:  # noqa: N802
        """Output features."""
        return self.qweight.shape[0]

    def codes(self) -> CodeRows:
        """Row access to the INT8 codes and their scale."""
        table = _pairs(self.codebook, self.qweight.device)
        return lambda start, stop: (
            decode_codes(self.qweight[start:stop], self.s_rel[start:stop], self.codebook, self.group_size, table),
            self.scale[start:stop],
        )

    def decoded(self) -> FloatRows:
        """Row access to the dense rotated weight."""
        part = self.codes()

        def rows(start: int, stop: int) -> Tensor:
            codes, factor = part(start, stop)
            weight = codes.to(torch.float32).mul_(factor)
            if self.correction is not None:
                offset = self.correction[:, start:stop].t().to(torch.float32)
                weight += offset.repeat_interleave(self.group_size, dim=1)
            return weight

        return rows


def canonical(
    qweight: Tensor,
    s_rel: Tensor,
    s_channel: Tensor,
    codebook: Tensor | None,
    correction: Tensor | None,
    group_size: int,
    rotation: int,
    out_features: int | None = None,
) -> W4A8Weight:
    """The weight from the file's tensors, cut to ``out_features`` rows."""
    scale = row_scale(s_channel, qweight.shape[0]).expand(qweight.shape[0], 1)
    return W4A8Weight(
        qweight[:out_features],
        s_rel[:out_features],
        scale[:out_features],
        codebook,
        None if correction is None else correction[:, :out_features],
        group_size,
        rotation,
    )


def _torch_exact(x: Tensor, w: W4A8Weight, bias: Tensor | None) -> Tensor:
    return dense_linear(x, w.N, w.decoded(), w.rotation, bias)


def _torch(x: Tensor, w: W4A8Weight, bias: Tensor | None) -> Tensor:
    return int8_linear(x, w.N, w.codes(), w.rotation, bias)


def _kitchen(x: Tensor, w: W4A8Weight, bias: Tensor | None) -> Tensor:
    y = kitchen.w4a8_int8_linear(
        flatten(x),
        w.qweight.view(torch.int8),
        as_float8(w.s_rel),
        w.scale.reshape(-1),
        w.codebook,
        bias,
        w.group_size,
        w.rotation,
    )
    return y.reshape(*x.shape[:-1], w.N)


def _triton(x: Tensor, w: W4A8Weight, bias: Tensor | None) -> Tensor:
    from ..triton_ops.w4_decode import decode_w4a8

    def rows(start: int, stop: int) -> tuple[Tensor, Tensor]:
        return decode_w4a8(w.qweight[start:stop], w.s_rel[start:stop], w.codebook, group_size=w.group_size), w.scale[
            start:stop
        ]

    return triton_codes(x, w.N, rows, bias, w.rotation)


_BODIES: dict[str, Callable[..., Tensor]] = {"kitchen": _kitchen, "triton": _triton, "torch": _torch}
_EXACT: dict[str, Callable[..., Tensor]] = {"torch": _torch_exact}


def _no_correction(spec: Spec, _facts: DeviceFacts) -> str | None:
    return "the layer has a correction, which needs the decoded weight." if spec.get("has_correction", False) else None


_WHY = "4-bit codes, decoded to INT8 by group."


class W4A8(Format):
    """``asym_w4a8_int8``."""

    name = "asym_w4a8_int8"
    int8_is_native = True
    has_int8_codes = True
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

    def _weight(self, spec: Spec, tensors: Tensors) -> W4A8Weight:
        return canonical(
            required(spec, tensors, "weight"),
            required(spec, tensors, "weight_s_rel"),
            required(spec, tensors, "weight_s_channel"),
            optional(tensors, "weight_codebook"),
            optional(tensors, "weight_correction"),
            int(spec.get("group_size", 16)),
            rotation_group(spec, always=True),
        )

    def decoded(self, spec: Spec, tensors: Tensors) -> Decoded:
        w = self._weight(spec, tensors)
        return Decoded(w.decoded(), w.N, 2 * w.qweight.shape[1], w.rotation)

    def carried(self, spec: Spec, tensors: Tensors) -> Carried:
        w = self._weight(spec, tensors)
        decoded = w.decoded()
        if w.correction is not None:  # beside the grid of the codes, so the weight is quantised anew, rotated as it is
            return Carried(lambda start, stop: quantize.int8_rows(decoded(start, stop)), w.N, w.rotation)
        return Carried(w.codes(), w.N, w.rotation)

    def reference_native(self, x: Tensor, spec: Spec, tensors: Tensors) -> Tensor:
        w = self._weight(spec, tensors)
        if w.correction is not None:
            return x @ self.dequantize(spec, tensors).t()
        return reference_int8(x, *w.codes()(0, w.N), w.rotation)

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
