"""Whether a patch is made for a weight of this shape, told from the shapes of its matrices.

ComfyUI finds out when it computes the patch, logs the error, and goes on without it: the patch would be lost.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from comfy.weight_adapter import LoRAAdapter

from .errors import QuantLoaderError

Shape = tuple[int, ...]


class _Unfit(Exception):
    """What is wrong with the patch itself, whatever the weight."""


def misfit(adapter: Any, wanted: Shape, key: str) -> str | None:
    """Why ``adapter`` (ComfyUI's: a weight adapter, or a tuple or list of tensors) does not fit ``wanted`` ``(N, K)``,
    the weight ``key`` or the part of it that the patch is for; None when it does, or when its kind is not known here.

    Raises:
        QuantLoaderError: the patch consists of raw codes of another quantised model.
    """
    try:
        found = _made_for(adapter, wanted)
    except _Unfit as problem:
        return f"its part for {key} {problem}"
    except (AttributeError, IndexError, TypeError):
        return None  # a later ComfyUI keeps this kind in another way, and judges it itself
    if found is None or found == tuple(wanted):
        return None
    return f"it has {' x '.join(map(str, found))} for {key}, the model's layer is {' x '.join(map(str, wanted))}"


def _made_for(adapter: Any, wanted: Shape) -> Shape | None:
    if isinstance(adapter, LoRAAdapter):
        return _lora(adapter.weights, wanted)
    if isinstance(adapter, list):
        return tuple(adapter[0][0].shape)  # another model's weight, and what was patched into it
    if isinstance(adapter, tuple):
        return _tensors(adapter, wanted)
    known = {"loha": _loha, "lokr": _lokr, "oft": _oft, "boft": _boft, "glora": _glora}.get(adapter.name)
    return None if known is None else known(adapter.weights, wanted)


def _lora(weights: Any, wanted: Shape) -> Shape:
    up, down, _, mid, dora_scale, reshape = weights
    if up.dim() < 2 or down.dim() < 2:
        raise _Unfit(f"has matrices of {_dims(up.shape)} and {_dims(down.shape)}")
    if reshape is not None and tuple(reshape) != tuple(wanted):
        raise _Unfit(_wider(reshape))
    inner = up.flatten(start_dim=1).shape[1]
    if mid is not None:
        if mid.shape[0] != inner or mid.numel() != mid.shape[0] * mid.shape[1]:
            raise _Unfit(f"has a middle matrix of {_dims(mid.shape)} between ranks {inner} and {down.shape[0]}")
        inner = mid.shape[1]
    if inner != down.shape[0] or inner == 0:
        raise _Unfit(f"has matrices of ranks {inner} and {down.shape[0]}")
    found = (int(up.shape[0]), int(down[0].numel()))
    if dora_scale is not None and (dora_scale.dim() < 2 or dora_scale.numel() not in found):
        raise _Unfit(f"has magnitudes of shape {_dims(dora_scale.shape)} for a weight of {_dims(found)}")
    return found


def _tensors(adapter: tuple[Any, ...], wanted: Shape) -> Shape | None:
    values = adapter[1] if len(adapter) == 2 else adapter
    if not isinstance(values[0], torch.Tensor):
        return None
    if not values[0].is_floating_point() or values[0].element_size() < 2:  # FP8 codes are floats by type
        raise QuantLoaderError(
            "A patch made of a quantised model's raw codes reached this model; adding codes to weights gives "
            "noise. Load the other model with a Quant Loader node, or use its 16-bit version."
        )
    found = tuple(values[0].shape)
    if len(adapter) == 2 and len(values) > 1 and values[1].get("pad_weight") and found != tuple(wanted):
        raise _Unfit(_wider(found))
    return found


def _loha(weights: Any, wanted: Shape) -> Shape:
    w1a, w1b, _, w2a, w2b, t1, t2, *_ = weights
    first, second = _product(w1a, w1b, t1), _product(w2a, w2b, t2)
    if first != second:
        raise _Unfit(f"multiplies {_dims(first)} with {_dims(second)}")
    return first


def _lokr(weights: Any, wanted: Shape) -> Shape:
    w1, w2, _, w1_a, w1_b, w2_a, w2_b, t2, *_ = weights
    outer = _product(w1_a, w1_b, None) if w1 is None else _matrix(w1)
    inner = _product(w2_a, w2_b, t2) if w2 is None else _matrix(w2)
    return outer[0] * inner[0], outer[1] * inner[1]


def _oft(weights: Any, wanted: Shape) -> Shape:
    blocks, size, *_ = weights[0].shape
    return int(blocks * size), *wanted[1:]


def _boft(weights: Any, wanted: Shape) -> Shape:
    _, blocks, size, *_ = weights[0].shape
    if weights[2] is None:
        raise _Unfit("has no alpha, which ComfyUI needs for this kind (BOFT)")
    return int(blocks * size), *wanted[1:]


def _glora(weights: Any, wanted: Shape) -> Shape:
    """``W + B + W A`` with both parts low-rank, in the order of the matrices of either version of the tool."""
    a1, a2, b1, b2, *_ = (_matrix(matrix) for matrix in weights[:4])
    versions = []
    if b2[1] == b1[0] and a2[1] == a1[0]:
        versions.append(((b2[0], b1[1]), (a2[0], a1[1])))
    if b1[1] == b2[0] and a1[1] == a2[0]:
        versions.append(((b1[0], b2[1]), (a1[0], a2[1])))
    if not versions:
        raise _Unfit("has matrices whose ranks differ")
    fitting = [added for added, factor in versions if added == tuple(wanted) and factor == (wanted[1], wanted[1])]
    if not fitting and versions[0][0] == tuple(wanted):
        raise _Unfit(f"multiplies the weight by {_dims(versions[0][1])}, where {wanted[1]} x {wanted[1]} fits")
    return fitting[0] if fitting else versions[0][0]


def _matrix(tensor: torch.Tensor) -> tuple[int, int]:
    return int(tensor.shape[0]), int(tensor[0].numel())


def _product(a: torch.Tensor, b: torch.Tensor, core: torch.Tensor | None) -> tuple[int, int]:
    """The shape of ``a b``, or of a Tucker ``core`` ``[i, j, ...]`` with ``a [i, N]`` and ``b [j, K]``."""
    if core is None:
        if a.shape[1] != b.shape[0]:
            raise _Unfit(f"has matrices of ranks {a.shape[1]} and {b.shape[0]}")
        return int(a.shape[0]), int(b.shape[1])
    return int(a.shape[1]), int(b.shape[1]) * math.prod(core.shape[2:])


def _wider(shape: Any) -> str:
    return (
        f"makes the layer {_dims(shape)}, which a quantised layer cannot become. Load a file in which this layer is "
        "not quantised"
    )


def _dims(shape: Any) -> str:
    return " x ".join(map(str, shape))
