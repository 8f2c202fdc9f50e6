"""Tensors as files spell them, brought to one form: scale shapes, byte-stored floats, packed nibbles, tiled block
scales.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..spec import Spec
from .quantize import E2M1_VALUES


def required(spec: Spec, tensors: Mapping[str, Tensor], *names: str) -> Tensor:
    """The first of ``names`` that is there; the names are spellings of one tensor.

    Raises:
        KeyError: none is there. The message names the layer.
    """
    found = optional(tensors, *names)
    if found is None:
        raise KeyError(
            f"layer {spec.name}: a {spec.format} layer needs the tensor {names[0]}, "
            f"found {', '.join(sorted(tensors)) or 'none'}"
        )
    return found


def optional(tensors: Mapping[str, Tensor], *names: str) -> Tensor | None:
    """The first of ``names`` that is there, or None."""
    return next((tensors[name] for name in names if tensors.get(name) is not None), None)


def row_scale(scale: Tensor, rows: int) -> Tensor:
    """A weight scale as float32 ``[]`` (one for the tensor) or ``[rows, 1]`` (one an output row).

    Accepts ``[]``, ``[1]``, ``[1, 1]``, ``[rows]`` and ``[rows, 1]`` in any float dtype. With one row the two forms
    mean the same.

    Raises:
        ValueError: the number of entries is neither 1 nor ``rows``.
    """
    if scale.numel() == 1:
        return scale.reshape(()).to(torch.float32)
    if scale.numel() == rows:
        return scale.reshape(rows, 1).to(torch.float32)
    raise ValueError(
        f"a weight scale has 1 or {rows} entries (one an output row), found the shape {tuple(scale.shape)}"
    )


def scalar(scale: Tensor) -> Tensor:
    """A one-element scale as float32 ``[]``."""
    if scale.numel() != 1:
        raise ValueError(f"expected a scale with one entry, found the shape {tuple(scale.shape)}")
    return scale.reshape(()).to(torch.float32)


def as_float8(tensor: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """``tensor`` read as an 8-bit float ``dtype``: files also store these bytes as U8 or I8."""
    return tensor.view(dtype) if tensor.dtype in (torch.uint8, torch.int8) else tensor


def float8_to_float(codes: Tensor) -> Tensor:
    """float32 values of float8_e4m3fn or float8_e5m2 codes.

    On the CPU by way of float16's bits, a third of the time of torch's own conversion (measured): e5m2 is float16's
    upper byte, and e4m3 shifted by 7 is a float16 that is 2^8 too small.
    """
    if codes.device.type != "cpu":
        return codes.to(torch.float32)
    bits = codes.view(torch.int8).to(torch.int16)
    if codes.dtype is torch.float8_e5m2:
        return (bits << 8).view(torch.float16).to(torch.float32)
    # Weights hardly ever hold a NaN, and finding the two extreme bytes costs a tenth of masking every element.
    not_a_number = (bits & 0x7F) == 0x7F if _may_hold_e4m3_nan(codes) else None
    bits <<= 7
    bits &= ~0x4000  # the second copy of the sign
    if not_a_number is not None:
        bits.masked_fill_(not_a_number, 0x7E00)
    return bits.view(torch.float16).to(torch.float32).mul_(256.0)


def _may_hold_e4m3_nan(codes: Tensor) -> bool:
    """Whether a byte is 0x7F or 0xFF, e4m3's two NaNs: the largest signed and the largest unsigned byte."""
    if not codes.numel():
        return False
    return int(codes.view(torch.int8).amax()) == 0x7F or int(codes.view(torch.uint8).amax()) == 0xFF


def e4m3_to_float(tensor: Tensor) -> Tensor:
    """float32 values of e4m3 bytes (float8_e4m3fn, or U8 holding them)."""
    return float8_to_float(as_float8(tensor))


def e8m0_to_float(tensor: Tensor) -> Tensor:
    """``2^(e - 127)`` of E8M0 bytes (U8 or float8_e8m0fnu), float32; e = 0 decodes to 0, as comfy-kitchen does."""
    exponent = tensor.view(torch.uint8).to(torch.int32)
    # 2^(e-127) as a float32 has the exponent field e; e = 0 is then +0.0 and e = 255 (E8M0's NaN) is infinity, made NaN
    # here.
    value = (exponent << 23).view(torch.float32)
    return torch.where(exponent == 255, torch.nan, value)


def unpack_nibbles(packed: Tensor, *, high_first: bool) -> Tensor:
    """uint8 codes 0..15 ``[rows, 2 * columns]`` of packed bytes ``[rows, columns]`` (U8 or I8).

    ``high_first``: the even column is in the high nibble (NVFP4), else in the low one (W4A4, W4A8).
    """
    byte = packed.view(torch.uint8)
    low, high = byte & 0x0F, byte >> 4
    pair = (high, low) if high_first else (low, high)
    return torch.stack(pair, dim=-1).reshape(byte.shape[0], 2 * byte.shape[1])


def unpack_int4(packed: Tensor) -> Tensor:
    """int8 codes -8..7 ``[rows, 2 * columns]`` of two's-complement nibbles, the low nibble being the even column."""
    # Both codes side by side in an int16, little-endian: the shifts extend the signs, and no interleaving copy is
    # needed.
    wide = packed.view(torch.int8).to(torch.int16)
    low = (wide << 12) >> 12
    low &= 0xFF
    wide >>= 4
    wide <<= 8
    low |= wide
    return low.view(torch.int8).reshape(packed.shape[0], 2 * packed.shape[1])


def e2m1_values(packed: Tensor) -> Tensor:
    """float32 values ``[rows, 2 * columns]`` of packed e2m1 bytes ``[rows, columns]``, the even column in the high
    nibble.
    """
    byte = torch.arange(256, device=packed.device)
    table = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=packed.device)
    # One lookup a byte: the pair of values is read as one 64-bit lane.
    pairs = torch.stack((table[byte >> 4], table[byte & 0x0F]), dim=-1).view(torch.int64).reshape(256)
    lanes = torch.index_select(pairs, 0, packed.view(torch.uint8).reshape(-1).to(torch.int32))
    return lanes.view(torch.float32).reshape(packed.shape[0], 2 * packed.shape[1])


def tiled_shape(rows: int, columns: int) -> tuple[int, int]:
    """The padded shape of a block scale image: rows to 128, columns to 4."""
    return -(-rows // 128) * 128, -(-columns // 4) * 4


def check_tiled(layer: str, image: Tensor, rows: int, columns: int) -> None:
    """Refuse block scales that are no tile image of a weight with ``rows`` rows and ``columns`` blocks a row.

    Raises:
        ValueError: another number of entries. An unpadded ``[rows, columns]`` tensor is refused unless it is the image
            itself: reading it as one would move most of the scales.
    """
    shape = tiled_shape(rows, columns)
    if image.numel() != shape[0] * shape[1]:
        raise ValueError(
            f"layer {layer}: the block scales should be stored in 128 x 4 tiles, {shape[0]} x {shape[1]} here, "
            f"found {' x '.join(map(str, image.shape))}; re-export the file with a current converter"
        )


def tiles_of(image: Tensor, rows: int, columns: int) -> Tensor:
    """A block scale image as uint8 ``[ceil128(rows), ceil4(columns)]``, whatever shape and dtype its bytes were stored
    in.
    """
    return image.view(torch.uint8).reshape(tiled_shape(rows, columns))


def untile(image: Tensor, start: int, stop: int, columns: int) -> Tensor:
    """Rows ``start:stop`` of a block scale image, in plain order.

    ``scale(r, c)`` sits at ``((r div 128) * Ct + c div 4) * 512 + (r mod 32) * 16 + ((r mod 128) div 32) * 4 + c mod
    4`` with ``Ct = ceil(columns / 4)``: cuBLAS's 128 x 4 block-scaling layout.

    Args:
        image: ``[ceil128(rows), ceil4(columns)]``, any 8-bit dtype.
        start: first row, a multiple of 128.
        stop: one past the last row.
        columns: block columns wanted.

    Returns:
        ``[stop - start, columns]`` of the same dtype.
    """
    column_tiles = image.shape[1] // 4
    first, last = start // 128, -(-stop // 128)
    # Floats of 8 bits have no index kernels on every device; bytes do.
    tiles = image.view(torch.uint8).reshape(-1, column_tiles, 32, 4, 4)[first:last]
    plain = tiles.permute(0, 3, 2, 1, 4).reshape((last - first) * 128, column_tiles * 4)
    return plain[: stop - start, :columns].contiguous().view(image.dtype)
