"""ConvRot: the group-wise regular Hadamard rotation of the input dimension.

``H4`` = rows (1, 1, 1, -1), (1, 1, -1, 1), (1, -1, 1, 1), (-1, 1, 1, 1); ``H(g)`` = H4 (x) H4 (x) ... / sqrt(g) for
``g`` a power of four. H is symmetric and its own inverse, so a stored weight ``W_rot = W H`` and a rotated activation
``x_rot = x H`` give ``x_rot W_rot^T = x W^T``, and un-rotating a weight is the same multiplication. Source: ConvRot,
"regular Hadamard" rotation as comfy-kitchen stores it (``convrot_groupsize`` consecutive inputs a group).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Rotation sizes offered when we choose one ourselves, best first.
PREFERRED_GROUPS = (256, 64, 16)


def is_rotation_size(group: int) -> bool:
    """True where ``H(group)`` exists: a power of four, at least 4."""
    return group >= 4 and group & (group - 1) == 0 and group.bit_length() % 2 == 1


def preferred_group(K: int) -> int:
    """The rotation size used when a weight of ``K`` inputs is carried over to INT8 rows; 0 where none divides K."""
    return next((group for group in PREFERRED_GROUPS if K % group == 0), 0)


def _build(group: int, device: torch.device) -> Tensor:
    # The sign of H[i, j] depends on i XOR j alone: it flips once for every base-4 digit of it that is 3 (both bits
    # set). Built from arange on the device itself, so that no host copy and no cache is needed.
    index = torch.arange(group, device=device, dtype=torch.int32)
    xor = index[:, None] ^ index[None, :]
    threes = xor & (xor >> 1) & 0x55555555
    parity = threes
    for shift in (16, 8, 4, 2):
        parity = parity ^ (parity >> shift)
    sign: Tensor = 1.0 - 2.0 * (parity & 1).to(torch.float32)
    return sign / math.sqrt(group)


# The three sizes that files use and the factors of their Kronecker products, made once at import: CPU only, plain
# tensors, never replaced, so tracing cannot poison them.
_CPU = {group: _build(group, torch.device("cpu")) for group in (*PREFERRED_GROUPS, 4)}
# H(g) = H(a) (x) H(b) on a CPU: (a, b). Eight or three times fewer operations than H(g) itself takes.
_CPU_FACTORS = {256: (16, 16), 64: (4, 16)}


def hadamard(group: int, device: torch.device) -> Tensor:
    """``H(group)``, float32 ``[group, group]``, on ``device``.

    Raises:
        ValueError: ``group`` is no power of four.
    """
    if not is_rotation_size(group):
        raise ValueError(f"a ConvRot rotation size must be a power of 4 (4, 16, 64, 256, ...), found {group}")
    if device.type == "cpu" and group in _CPU:
        return _CPU[group]
    return _build(group, device)


def rotate(x: Tensor, group: int) -> Tensor:
    """``x`` times H in every group of ``group`` consecutive entries of the last dimension, in float32.

    Args:
        x: ``[..., K]``, any float dtype.
        group: rotation size; 0 leaves ``x`` as it is (cast to float32).

    Returns:
        float32 ``[..., K]``; a fresh tensor unless ``group`` is 0 and ``x`` is float32 already.
    """
    x32 = x.to(torch.float32)
    if not group:
        return x32
    if x.shape[-1] % group:
        raise ValueError(
            f"{x.shape[-1]} inputs cannot be rotated in groups of {group}: the group must divide the inputs"
        )
    if x.device.type == "cpu" and group in _CPU_FACTORS:
        # Entry i * b + j of a group stands in row i and column j: x (H(a) (x) H(b)) = H(a) X H(b), both symmetric.
        a, b = _CPU_FACTORS[group]
        return torch.matmul(_CPU[a], torch.matmul(x32.reshape(-1, a, b), _CPU[b])).reshape(x.shape)
    return (x32.reshape(-1, group) @ hadamard(group, x.device)).reshape(x.shape)
