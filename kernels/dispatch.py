"""The entries that callers use: the reference, one call, and a layer prepared once and called often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from .facts import DeviceFacts, device_facts
from .formats import format_of
from .formats.int8_rows import Int8Rows, gather
from .planning import Mode, Plan, plan
from .retire import is_retired
from .routes import Execution
from .spec import Spec

BackendChoice = Literal["auto", "kitchen", "triton", "torch", "reference"]


def reference_linear(
    x: Tensor,
    spec: Spec,
    tensors: Mapping[str, Tensor],
    bias: Tensor | None = None,
    execution: Execution | None = None,
) -> Tensor:
    """The layer's linear by the formulas of its format, float32 throughout: the truth that kernels are tested against.

    Args:
        x: ``[..., K]``, any float dtype.
        spec: the layer; ``shape`` is the logical (N, K).
        tensors: suffix as in the file -> tensor.
        bias: ``[N]`` or None.
        execution: whose arithmetic; None takes ``exact`` for layers that ask for full precision products, else
            ``native``.

    Returns:
        float32 ``[..., N]``.
    """
    fmt = format_of(spec)
    if execution is None:
        execution = "exact" if spec.get("full_precision_matrix_mult", False) else "native"
    if execution == "int8" and fmt.int8_is_native:
        execution = "native"
    with torch.no_grad():
        return fmt.reference(x, spec, tensors, bias, execution)


def dequantize(spec: Spec, tensors: Mapping[str, Tensor]) -> Tensor:
    """The dense weight, float32 ``[rows, columns]`` as stored (padding included), rotation undone. ``pre_quant_scale``
    is not applied.
    """
    return format_of(spec).dequantize(spec, tensors)


def embedding(index: Tensor, spec: Spec, tensors: Mapping[str, Tensor]) -> Tensor:
    """Rows ``index`` of the dense weight, float32 ``[*index.shape, K]``; only those rows are decoded where the format
    allows it.
    """
    return format_of(spec).embedding(index, spec, tensors)


def linear(
    x: Tensor,
    spec: Spec,
    tensors: Mapping[str, Tensor],
    bias: Tensor | None = None,
    backend: BackendChoice = "auto",
    execution: Mode = "auto",
) -> Tensor:
    """``y = x W^T + bias`` on the fastest correct kernel of x's device. Plans anew each time; see :func:`prepare` for
    repeated calls.

    Args:
        x: ``[..., K]``, float32 / float16 / bfloat16, any strides; there may be no rows at all.
        spec: the layer.
        tensors: suffix as in the file -> tensor, on x's device.
        bias: ``[N]`` or None.
        backend: ``auto``; one backend, whose errors are then raised; or ``reference``.
        execution: ``auto``, ``native``, ``int8`` or ``exact``.

    Returns:
        ``[..., N]`` of x's dtype.

    Raises:
        ValueError: the named backend cannot run this layer on this device (the message says why).
    """
    facts = device_facts(x.device)
    if backend == "reference":
        chosen = plan(spec, facts, execution)
        return reference_linear(x, spec, tensors, bias, chosen.execution).to(x.dtype)
    chosen = plan(spec, facts, execution, None if backend == "auto" else backend)
    return PreparedLinear(spec, chosen)(x, tensors, bias)


class PreparedLinear:
    """A layer whose kernel has been chosen.

    ``plan`` is the choice; ``stats`` counts calls by the backend that ran, outside compiled graphs (inside them the
    operators count for the whole process: :func:`quant_loader.kernels.calls`).
    """

    def __init__(self, spec: Spec, chosen: Plan) -> None:
        self.spec = spec
        self.plan = chosen
        self.stats: Counter[str] = Counter()
        self._format = format_of(spec)
        self._backends = chosen.backends
        self._ladder = (chosen.backend, *chosen.fallbacks)
        self._operator = f"{self._format.operator} ({chosen.execution})"

    def __call__(
        self,
        x: Tensor,
        tensors: Mapping[str, Tensor],
        bias: Tensor | None = None,
        low_rank: Tensor | None = None,
        up: Tensor | None = None,
    ) -> Tensor:
        """``[..., N]`` of x's dtype. A kernel that fails is reported, retired for the process, and the plan's next one
        runs.

        ``low_rank [..., R]`` and ``up [N, R]``, both of x's dtype, come together: ``low_rank up^T`` is added to the
        result (a LoRA beside the weight, its first product and its strength applied), in the epilogue of our INT8
        product where that runs.
        """
        how = (self.plan.execution, self._backends)
        if low_rank is None or up is None:
            y = self._format.linear(x, self.spec, tensors, bias, *how)
        else:
            y = self._format.linear_beside(x, self.spec, tensors, bias, *how, low_rank, up)
        if not torch.compiler.is_compiling():
            self.stats[self.backend] += 1
        return y

    @property
    def backend(self) -> str:
        """The backend that runs now: the plan's, or the one that took over from a retired one."""
        return next((name for name in self._ladder[:-1] if not is_retired(self._operator, name)), self._ladder[-1])


def prepare(spec: Spec, facts: DeviceFacts, execution: Mode = "auto") -> PreparedLinear:
    """Choose the kernel of a layer, once."""
    return PreparedLinear(spec, plan(spec, facts, execution))


def to_int8_rows(spec: Spec, tensors: Mapping[str, Tensor], device: torch.device | str | None = None) -> Int8Rows:
    """A layer's weight carried over to INT8 rows with ConvRot (the largest of 256, 64 and 16 that divides K).

    Codes that are INT8 rows already, or fit into them (``int8_tensorwise``, ``convrot_w4a4``, ``asym_w4a8_int8``
    without correction), are taken as they are: nothing is rounded twice. ``pre_quant_scale`` stays the caller's to
    apply.

    Args:
        spec: the layer.
        tensors: suffix as in the file -> tensor.
        device: where to work and where the result lives; None keeps the tensors' own.
    """
    moved = {name: tensor.to(device) for name, tensor in tensors.items()} if device is not None else dict(tensors)
    fmt = format_of(spec)
    with torch.no_grad():
        found = fmt.carried(spec, moved)
        stored = fmt.decoded(spec, moved)
        device = next(iter(moved.values())).device
        return gather(found._replace(N=min(spec.shape[0], found.N)), stored.columns, device)
