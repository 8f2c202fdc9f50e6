"""``quanto_int8``: Quanto's qint8 weights, int8 codes with one scale an output row; the activation is not quantised.

Weight: ``W[n, k] = code[n, k] * scale[n]``. Native linear: the decoded weight in a dense product. The ``int8``
execution carries the weight over to INT8 rows with ConvRot rather than use its codes as they are: without the rotation,
int8 activations with outlier channels cost four times the error. Source: optimum-quanto ``qint8``; RULES section 4,
"Quanto qint8".

Tensors: ``weight`` (``weight._data``) int8 [N, K]; ``weight_scale`` (``weight._scale``) [N, 1]. Input and output scales
are 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..operators import operator
from ..retire import run
from ..routes import Execution, always_slow, carried_routes
from ..spec import Spec
from .base import Decoded, Format, Tensors, scaled_rows
from .int8 import CARRIED_ROUTES, EXACT, torch_exact
from .int8_rows import CARRIED_BODIES, carried
from .products import Carried
from .scales import required, row_scale


@operator(
    "quanto_linear",
    "(Tensor x, Tensor qweight, Tensor scale, Tensor? bias, int out_features, str execution, str backends) -> Tensor",
)
def _quanto_linear(
    x: Tensor, qweight: Tensor, scale: Tensor, bias: Tensor | None, out_features: int, execution: str, backends: str
) -> Tensor:
    scale = row_scale(scale, qweight.shape[0])
    arguments = (x, qweight[:out_features], scale[:out_features] if scale.dim() else scale, bias)
    return run(f"quanto_linear ({execution})", backends, _BODIES[execution], *arguments)


def _torch_exact(x: Tensor, qweight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    return torch_exact(x, qweight, scale, bias, 0)


def _carried(qweight: Tensor, scale: Tensor, N: int) -> Carried:
    decoded = scaled_rows(qweight, scale)

    def by_triton(start: int, stop: int, group: int) -> tuple[Tensor, Tensor]:
        from ..triton_ops.row_quantizer import quantize_rows

        return quantize_rows(decoded(start, stop), rotation=group or 1)

    return carried("quanto", qweight.device, N, qweight.shape[1], decoded, {"triton": by_triton})


def _carried_body(body: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, qweight, scale, bias: body(x, _carried(qweight, scale, qweight.shape[0]), bias)


_BODIES: dict[str, dict[str, Callable[..., Tensor]]] = {
    "int8": {backend: _carried_body(body) for backend, body in CARRIED_BODIES.items()},
    "native": {"torch": _torch_exact},
    "exact": {"torch": _torch_exact},
}

_CARRIED = "The weight is carried over to INT8 rows with ConvRot."


class Quanto(Format):
    """``quanto_int8``."""

    name = "quanto_int8"
    operator = "quanto_linear"
    routes = (
        *carried_routes(_CARRIED, *CARRIED_ROUTES),
        replace(EXACT, execution="native", slow=always_slow),
        EXACT,
    )

    def _parts(self, spec: Spec, tensors: Tensors) -> tuple[Tensor, Tensor]:
        qweight = required(spec, tensors, "weight", "weight._data")
        return qweight, row_scale(required(spec, tensors, "weight_scale", "weight._scale"), qweight.shape[0])

    def decoded(self, spec: Spec, tensors: Tensors) -> Decoded:
        qweight, scale = self._parts(spec, tensors)
        return Decoded(scaled_rows(qweight, scale), *qweight.shape)

    def carried(self, spec: Spec, tensors: Tensors) -> Carried:
        qweight, scale = self._parts(spec, tensors)
        return _carried(qweight, scale, qweight.shape[0])

    def reference_native(self, x: Tensor, spec: Spec, tensors: Tensors) -> Tensor:
        return x @ self.dequantize(spec, tensors).t()

    def linear(
        self, x: Tensor, spec: Spec, tensors: Tensors, bias: Tensor | None, execution: Execution, backends: str
    ) -> Tensor:
        qweight, scale = self._parts(spec, tensors)
        return _quanto_linear(x, qweight, scale, bias, spec.shape[0], execution, backends)

    def embedding(self, index: Tensor, spec: Spec, tensors: Tensors) -> Tensor:
        qweight, scale = self._parts(spec, tensors)
        rows = torch.nn.functional.embedding(index, qweight).to(torch.float32)
        return rows * (torch.nn.functional.embedding(index, scale) if scale.dim() else scale)
