"""Calls into comfy-kitchen: its operators by name, on a real backend or not at all.

comfy-kitchen's public functions fall back to its "eager" backend (plain torch, slow, sometimes in another arithmetic)
without a word. Here the backend is named, so a call that its kernel cannot take raises instead, and the dispatcher's
next kernel takes over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _implementation(name: str, kwargs: dict[str, Any]) -> Callable[..., Any]:
    from comfy_kitchen.registry import registry

    backend = "hip" if torch.version.hip is not None else "cuda"
    found: Callable[..., Any] = registry.get_implementation(name, backend=backend, kwargs=kwargs)
    return found


def _call(name: str, **kwargs: Any) -> Any:
    return _implementation(name, kwargs)(**kwargs)


def int8_linear(x: Tensor, qweight: Tensor, scale: Tensor, bias: Tensor | None, group: int) -> Tensor:
    """``[M, N]`` of x ``[M, K]`` and int8 ``qweight`` [N, K]; ``scale`` float32 [] or [N, 1]; ``group`` 0 means no
    rotation.
    """
    y: Tensor = _call(
        "int8_linear",
        x=x.contiguous(),
        weight=qweight.contiguous(),
        weight_scale=scale.reshape(-1),
        bias=bias,
        out_dtype=x.dtype,
        convrot=group > 0,
        convrot_groupsize=group or 256,
    )
    return y


def convrot_w4a4_linear(
    x: Tensor, qweight: Tensor, scale: Tensor, bias: Tensor | None, group: int, activation_bits: int
) -> Tensor:
    """``[M, N]``; ``qweight`` int8 [N, K / 2] packed nibbles; ``scale`` float32 [N]. The card decides whether 4 bits
    are possible.
    """
    y: Tensor = _call(
        "convrot_w4a4_linear",
        x=x.contiguous(),
        qweight=qweight.contiguous(),
        wscales=scale.reshape(-1),
        bias=bias,
        convrot_groupsize=group,
        quant_group_size=64,
        linear_dtype="int4" if activation_bits == 4 else "int8",
    )
    return y


def w4a8_int8_linear(
    x: Tensor,
    qweight: Tensor,
    s_rel: Tensor,
    s_channel: Tensor,
    codebook: Tensor | None,
    bias: Tensor | None,
    group_size: int,
    rotation: int,
) -> Tensor:
    """``[M, N]``; ``qweight`` int8 [N, K / 2]; ``s_rel`` e4m3 [N, K / group_size]; ``s_channel`` float32 [N]."""
    y: Tensor = _call(
        "w4a8_int8_linear",
        x=x.contiguous(),
        qdata=qweight.contiguous(),
        s_rel=s_rel,
        s_channel=s_channel,
        codebook=codebook,
        correction=None,
        bias=bias,
        group_size=group_size,
        convrot_groupsize=rotation,
        out_dtype=x.dtype,
    )
    return y


def nvfp4_linear(
    x: Tensor,
    qweight: Tensor,
    block_scale: Tensor,
    global_scale: Tensor,
    activation_scale: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """``[M, N]``; x [M, K] float16 / bfloat16; ``qweight`` uint8 [N, K / 2]; ``block_scale`` e4m3, tiled; both global
    scales float32 [].
    """
    M = x.shape[0]
    xq, x_scale = _call(
        "quantize_nvfp4", x=x.contiguous(), per_tensor_scale=activation_scale, epsilon=0.0, pad_16x=True, hi_first=True
    )
    y: Tensor = _call(
        "scaled_mm_nvfp4",
        a=xq,
        b=qweight.contiguous(),
        tensor_scale_a=activation_scale,
        tensor_scale_b=global_scale,
        block_scale_a=x_scale,
        block_scale_b=block_scale.view(torch.float8_e4m3fn),
        bias=None if bias is None else bias.to(x.dtype),
        out_dtype=x.dtype,
    )
    return y[:M]


def quantize_mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """(float8_e4m3fn [M', K], E8M0 tiles); rows padded to 32."""
    codes, scale = _call("quantize_mxfp8", x=x.contiguous(), pad_32x=True)
    return codes, scale


def dequantize_nvfp4(qweight: Tensor, block_scale: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The dense weight ``[N, K]``; N a multiple of 16."""
    weight: Tensor = _call(
        "dequantize_nvfp4",
        qx=qweight.contiguous(),
        per_tensor_scale=global_scale,
        block_scales=block_scale.view(torch.float8_e4m3fn),
        output_type=dtype,
        hi_first=True,
    )
    return weight


def quantize_int8_convrot_weight(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """(int8 [N, K], float32 [N, 1]) of a dense weight, rotated."""
    codes, scale = _call("quantize_int8_convrot_weight", weight=weight, group_size=group)
    return codes, scale
