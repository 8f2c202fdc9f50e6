"""Tensors as files spell them, brought to one form: names, scale shapes, tiled block scales."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..spec import Spec


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
