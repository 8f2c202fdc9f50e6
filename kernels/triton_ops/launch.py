"""What every host function does before a launch: checks of its arguments, and the device the launch goes to."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
BYTE_DTYPES = tuple(
    getattr(torch, name)
    for name in ("uint8", "int8", "float8_e4m3fn", "float8_e8m0fnu", "float4_e2m1fn_x2")
    if hasattr(torch, name)
)


def on_device_of(x: torch.Tensor) -> AbstractContextManager[object]:
    """Makes x's GPU the current one: Triton launches on the current device's current stream. Nothing to do for
    interpreted CPU tensors."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def check_matrix(name: str, x: torch.Tensor, dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES) -> torch.Tensor:
    """x if it is 2-D, of one of ``dtypes`` and below 2**31 columns; a copy when its columns are not adjacent in
    memory."""
    if x.ndim != 2:
        raise ValueError(f"{name}: expected 2 dimensions, found shape {tuple(x.shape)}")
    if x.dtype not in dtypes:
        raise ValueError(f"{name}: expected one of {', '.join(map(str, dtypes))}, found {x.dtype}")
    if max(x.shape) >= 2**31:
        raise ValueError(f"{name}: expected sides below 2**31, found {tuple(x.shape)}")
    return x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()


def check_bytes(name: str, x: torch.Tensor) -> torch.Tensor:
    """x, stored as 8-bit codes, seen as contiguous-column uint8; 2-D."""
    return check_matrix(name, x.view(torch.uint8) if x.dtype in BYTE_DTYPES else x, (torch.uint8,))


def check_scalar(name: str, x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """x as a float32 tensor if it has one element and lies on ``device`` already (no host copy)."""
    if x.numel() != 1:
        raise ValueError(f"{name}: expected one element, found shape {tuple(x.shape)}")
    return check_vector(name, x.reshape(1), (1,), device)


def check_vector(name: str, x: torch.Tensor, lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """x flattened to contiguous float32 [n], n one of ``lengths``, on ``device``."""
    if x.numel() not in lengths:
        wanted = " or ".join(str(n) for n in dict.fromkeys(lengths))
        raise ValueError(f"{name}: expected {wanted} elements, found shape {tuple(x.shape)}")
    if x.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, found one on {x.device}")
    return x.reshape(-1).to(torch.float32).contiguous()


def check_rotation(rotation: int, K: int) -> None:
    """ConvRot groups are powers of 4 that divide K; the kernels know 16, 64 and 256 (and 1, no rotation)."""
    if rotation not in (1, 16, 64, 256):
        raise ValueError(f"rotation: expected 1, 16, 64 or 256, found {rotation}")
    if K % rotation:
        raise ValueError(f"rotation: expected a divisor of K = {K}, found {rotation}")


def row_range(
    rows: tuple[int, int] | None, weight: torch.Tensor, columns: int, *, codes_per_byte: int
) -> tuple[int, int]:
    """``rows`` or all rows of a stored weight [N, ...] that must hold at least ``columns`` codes a row."""
    start, stop = (0, weight.shape[0]) if rows is None else rows
    if not 0 <= start <= stop <= weight.shape[0]:
        raise ValueError(f"rows: expected a range inside 0 to {weight.shape[0]}, found {start} to {stop}")
    if columns < 0 or weight.shape[1] * codes_per_byte < columns:
        raise ValueError(
            f"columns: expected 0 to {weight.shape[1] * codes_per_byte} (what a row holds), found {columns}"
        )
    return start, stop


def block_scales(scale: torch.Tensor, rows: int, columns: int, block: int, device: torch.device) -> torch.Tensor:
    """The bytes of a 128x4-ordered scale image as contiguous uint8, checked to cover rows x ceil(columns / block)
    scales.

    The order is ceil(rows / 128) * ceil(scale columns / 4) tiles of 512 bytes; a longer image (padded rows) is fine,
    one of other columns is not and cannot be told apart here, which is why the file check refuses it.
    """
    tile_columns = -(-columns // (4 * block))
    needed = -(-rows // 128) * tile_columns * 512
    if scale.dtype not in BYTE_DTYPES:
        raise ValueError(f"scale: expected 8-bit codes, found {scale.dtype}")
    if scale.device != device:
        raise ValueError(f"scale: expected a tensor on {device}, found one on {scale.device}")
    if scale.numel() < needed:
        raise ValueError(
            f"scale: expected at least {needed} bytes in the 128x4 order for {rows} rows of {columns} columns, "
            f"found shape {tuple(scale.shape)}"
        )
    return scale.contiguous().view(torch.uint8)


def device_arch(device: torch.device) -> tuple[str, int]:
    """("sm_86" or "gfx1100", number of multiprocessors). Interpreted CPU tensors get a small GPU's name, to run its
    tiles."""
    if device.type != "cuda":
        return "sm_86", 1
    properties = torch.cuda.get_device_properties(device)
    gcn = getattr(properties, "gcnArchName", "")
    arch = gcn.partition(":")[0] if torch.version.hip else f"sm_{properties.major}{properties.minor}"
    return arch, properties.multi_processor_count
