"""INT8 rows that a CPU keeps in memory beside a weight, where the kernel would make them anew on every call.

On a GPU that work is a twentieth of a product of many tokens, and memory is what is short. On a CPU it takes as long as
the product of 512 tokens, and memory is there more often. The weight itself stays the file's, memory-mapped: saving,
merging and patches see nothing of the copy, which goes when the model is unloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import comfy.model_management
import torch

from ..checkpoint import LayerSpec
from ..kernels import Plan, PreparedLinear, int8_rows_spec, to_int8_rows

# The share of a machine's memory that copies leave free, for activations and for everything else that runs.
RESERVE = 1 / 8


class KeptRows(NamedTuple):
    """A weight as INT8 rows, the tensors of an ``int8_tensorwise`` layer by suffix, and the kernel that runs them."""

    operator: PreparedLinear
    tensors: dict[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Memory of the copy."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def keep(spec: LayerSpec, tensors: Mapping[str, torch.Tensor], planned: Callable[[LayerSpec], Plan]) -> KeptRows:
    """Make the INT8 rows of a layer where its tensors are; ``planned`` chooses their kernel. Raises ComfyUI's
    interrupt.
    """
    comfy.model_management.throw_exception_if_processing_interrupted()
    rows = to_int8_rows(spec, tensors)
    made = int8_rows_spec(spec, rows.group)
    return KeptRows(PreparedLinear(made, planned(made)), rows.tensors())


def too_little_memory(spec: LayerSpec, device: torch.device) -> str:
    """Why no INT8 rows of ``spec`` are kept on ``device``: a sentence, empty where there is memory for them."""
    needed = spec.shape[0] * spec.shape[1]
    free = comfy.model_management.get_free_memory(device)
    reserve = RESERVE * comfy.model_management.get_total_memory(device)
    if free - needed >= reserve:
        return ""
    return "Made again on every call: to keep the rows would leave less than an eighth of this machine's memory free."
