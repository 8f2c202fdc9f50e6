"""What every format offers to the dispatcher."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..routes import Execution, Route
from ..spec import Spec
from . import quantize
from .codes import float8_to_float
from .products import Carried, FloatRows, add_low_rank
from .rotation import preferred_group, rotate

Tensors = Mapping[str, Tensor]


class Decoded(NamedTuple):
    """Row access to a decoded weight: ``rows(start, stop)`` is float32 [n, columns]; ``N`` rows are stored, in the
    basis rotated by ``group`` (0: not rotated)."""

    rows: FloatRows
    N: int
    columns: int
    group: int = 0


class Format(ABC):
    """One quantisation format: decoding, reference maths, the operator that inference calls, and what can run it.

    ``tensors`` maps suffixes as in the file ("weight", "weight_scale", ...) to tensors, in any of the dialects' shapes
    and dtypes. ``spec.shape`` is the logical (N, K). A weight may be stored with more rows or columns (padding): N rows
    of the result are kept, and x is padded with zeros to the stored columns.
    """

    #: As layers declare it.
    name: str
    #: Whether the format's own arithmetic is INT8 already, so that the ``int8`` execution is ``native``.
    int8_is_native: ClassVar[bool] = False
    #: Whether the stored codes are INT8 codes or fit into them, so that carrying the weight over rounds nothing.
    has_int8_codes: ClassVar[bool] = False
    #: Of the operator ``quant_loader::<operator>``.
    operator: str
    #: What can run it, best first within each execution. Every execution ends in a torch route that always fits.
    routes: ClassVar[tuple[Route, ...]]

    @abstractmethod
    def decoded(self, spec: Spec, tensors: Tensors) -> Decoded:
        """Row access to the decoded weight."""

    @abstractmethod
    def carried(self, spec: Spec, tensors: Tensors) -> Carried:
        """The weight as INT8 rows: its own codes where ``has_int8_codes``, else rotated and requantised."""

    @abstractmethod
    def reference_native(self, x: Tensor, spec: Spec, tensors: Tensors) -> Tensor:
        """The format's own arithmetic on float32 x [M, columns]: float32 [M, stored rows], without bias."""

    @abstractmethod
    def linear(
        self, x: Tensor, spec: Spec, tensors: Tensors, bias: Tensor | None, execution: Execution, backends: str
    ) -> Tensor:
        """Call the format's operator; ``backends`` is the ladder of a plan."""

    def linear_beside(
        self,
        x: Tensor,
        spec: Spec,
        tensors: Tensors,
        bias: Tensor | None,
        execution: Execution,
        backends: str,
        low_rank: Tensor,
        up: Tensor,
    ) -> Tensor:
        """:meth:`linear` plus ``low_rank up^T`` (``[..., R]`` and ``[N, R]``, x's dtype). Formats whose kernels add it
        in their epilogue override this."""
        return add_low_rank(self.linear(x, spec, tensors, bias, execution, backends), low_rank, up)

    def input(self, x: Tensor, tensors: Tensors) -> Tensor:  # noqa: ARG002
        """The activation the weight acts on: smoothed, where the format knows that."""
        return x

    def dequantize(self, spec: Spec, tensors: Tensors) -> Tensor:
        """The dense weight, float32 ``[rows, columns]`` as stored (padding included), in the UNROTATED basis."""
        rows, N, _, group = self.decoded(spec, tensors)
        return rotate(rows(0, N), group)

    def reference(self, x: Tensor, spec: Spec, tensors: Tensors, bias: Tensor | None, execution: Execution) -> Tensor:
        """The linear by the formulas of the rules, float32 throughout, nothing clever: ``[..., N]``."""
        weight = self.dequantize(spec, tensors)
        x2 = self.input(x.to(torch.float32), tensors).reshape(-1, x.shape[-1])
        x2 = pad_inputs(x2, weight.shape[1])
        if execution == "exact":
            y = x2 @ weight.t()
        elif execution == "int8" and self.has_int8_codes:
            rows, N, group = self.carried(spec, tensors)
            y = reference_int8(x2, *rows(0, N), group)
        elif execution == "int8":
            group = preferred_group(weight.shape[1])
            y = reference_int8(x2, *quantize.int8_rows(rotate(weight, group)), group)
        else:
            y = self.reference_native(x2, spec, tensors)
        y = y[:, : spec.shape[0]]
        if bias is not None:
            y = y + bias.to(torch.float32)
        return y.reshape(*x.shape[:-1], spec.shape[0])

    def embedding(self, index: Tensor, spec: Spec, tensors: Tensors) -> Tensor:
        """Rows of the dense weight, float32 ``[*index.shape, K]``. Formats that decode single rows override this."""
        return torch.nn.functional.embedding(index, self.dequantize(spec, tensors)[:, : spec.shape[1]])


def reference_int8(x: Tensor, codes: Tensor, scale: Tensor, group: int, bits: int = 8) -> Tensor:
    """The INT8 linear on codes: float32 [M, N] of float32 x [M, K], int8 codes [N, K], scale [] or [N, 1]. The sums are
    exact (float64).
    """
    quantised, s_row = (quantize.int8_rows if bits == 8 else quantize.int4_rows)(rotate(x, group))
    sums = (quantised.to(torch.float64) @ codes.to(torch.float64).t()).to(torch.float32)
    return sums * (s_row * scale.reshape(1, -1))


def pad_inputs(x: Tensor, columns: int) -> Tensor:
    """``x`` with zeros up to the columns a padded weight is stored with."""
    missing = columns - x.shape[-1]
    return torch.nn.functional.pad(x, (0, missing)) if missing > 0 else x


def scaled_rows(codes: Tensor, scale: Tensor) -> FloatRows:
    """Row access to ``codes * scale``: codes [N, K], float8 or int8, scale float32 [] or [N, 1]."""

    def rows(start: int, stop: int) -> Tensor:
        part, factor = codes[start:stop], scale[start:stop] if scale.dim() else scale
        return float8_to_float(part, factor) if part.is_floating_point() else part.to(torch.float32).mul_(factor)

    return rows
