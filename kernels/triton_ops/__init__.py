"""Our Triton kernels: for the devices and PyTorch builds where comfy-kitchen has no kernel of its own.

One file per kernel: the kernel, the host function that launches it, its formula and where that comes from. Host
functions take plain tensors and return plain tensors, allocate through torch, launch on the current stream of the
tensor's device, never synchronise with the host and keep nothing between calls, so they may be called from a
``torch.library.custom_op`` and captured in a CUDA graph. Nothing is tuned at run time: `schedules` is a static table.

This package imports where Triton is missing; its modules do not. Ask `available()` first and import the modules after::

    if available().usable:
        from .triton_ops.int8_gemm import int8_matmul

**int8_gemm**
    ``int8_matmul(a, b, scale_a, scale_b, bias=None, *, out_dtype, low_rank=None, up=None, strength=1.0, out=None)``
    gives [M, N]: a [M, K] and b [N, K] int8; scale_a float32 [M] or [1]; scale_b float32 [N] or [1]; bias [N];
    low_rank [M, R] and up [N, R] add ``strength * low_rank @ up.T`` (fused when both are float16 or both bfloat16);
    out_dtype float16, bfloat16 or float32. ``out`` may be a column slice of a wider matrix, which is how a weight
    decoded in row chunks is multiplied chunk by chunk.

**row_quantizer**
    ``quantize_rows(x, *, rotation=1, qmax=127)`` gives (q int8 [M, K], scale float32 [M]): ConvRot by rotation 16, 64
    or 256 (1: none), then one scale per row; qmax 7 gives the codes of W4A4 activations.
    ``quantize_rows_static(x, scale, *, rotation=1)`` gives q int8 [M, K]: the scale (one float32 element, on the
    device) is the file's.

**transcode**, all giving (q int8 [n, K], scale float32 [n]): decode, rotate, requantise in one pass
    ``fp8_to_int8(weight, scale, *, rotation=256)``
    ``mxfp8_to_int8(weight, scale, *, columns, rotation=256, rows=None)``
    ``nvfp4_to_int8(weight, scale, tensor_scale, *, columns, rotation=256, rows=None)``
    ``rows=(start, stop)`` does a chunk of the rows of a block-scaled weight (for fp8 slice the tensors).

**w4_decode**, giving int8 [N, K] for ``int8_matmul``
    ``decode_int4(weight)``: signed nibbles, low nibble = even column (convrot_w4a4).
    ``decode_w4a8(weight, scale, codebook=None, *, group_size=16)``: unsigned codes, codebook or uniform, e4m3 group
    scales (asym_w4a8_int8).

**block_decode**, giving [n, K] in dtype float16, bfloat16 or float32; block scales in the 128x4 order
    ``decode_fp8(weight, scale, *, dtype)``
    ``decode_mxfp8(weight, scale, *, columns, dtype, rows=None)``
    ``decode_nvfp4(weight, scale, tensor_scale, *, columns, dtype, rows=None)``

**float_quantizer**, activations; a scale image is the 128x4 order, uint8 [ceil128(rows), ceil4(scale columns)]
    ``quantize_fp8(x, scale)`` gives float8_e4m3fn [M, K].
    ``quantize_mxfp8(x)`` gives (float8_e4m3fn [Mp, Kp], scale image), Mp and Kp rounded up to 32.
    ``quantize_nvfp4(x, tensor_scale)`` gives (codes uint8 [Mp, Kp / 2], scale image), rounded up to 16.
    Scales given are float32 of one element on the device; the dynamic ones are
    ``torch.linalg.vector_norm(x, inf) / 448`` and ``/ (448 * 6)``.

Scale bytes (e4m3, e8m0) may come as uint8 or as torch's float8 dtypes; they are read as bytes either way. ``x`` is 2-D
float16, bfloat16 or float32 with unit column stride (row stride free). ValueError names the argument, what was expected
and what was found.

Everything but ``int8_matmul`` is element-wise and builds for sm_75 and later, RDNA and CDNA. ``int8_matmul`` needs a
tensor core Triton can reach: sm_80 and later, RDNA3 and later (`int8_matmul_supported`).
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["MIN_TRITON", "Availability", "available", "int8_matmul_supported"]

MIN_TRITON = (3, 3)


class Availability(NamedTuple):
    """Whether the kernels of this package can be imported, and, in words for a report, why not."""

    usable: bool
    reason: str


def available() -> Availability:
    """Whether Triton is installed and recent enough. Says nothing about a device: see `int8_matmul_supported`."""
    wanted = ".".join(map(str, MIN_TRITON))
    try:
        import triton
    except ImportError as error:
        return Availability(False, f"Triton cannot be imported ({error})")
    found = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if found < MIN_TRITON:
        return Availability(False, f"Triton {triton.__version__} is older than {wanted}")
    return Availability(True, f"Triton {triton.__version__}")


def int8_matmul_supported(arch: str) -> bool:
    """Whether `int8_matmul` has a matrix instruction on ``arch``: "sm_86" style for NVIDIA, "gfx1100" style for AMD.

    Turing is left out because Triton has no tensor-core path for it (int8 `tl.dot` does not compile), RDNA1 and RDNA2
    because they have no matrix instruction at all.
    """
    if arch.startswith("sm_"):
        digits = arch.removeprefix("sm_").rstrip("af")
        return digits.isdigit() and int(digits) >= 80
    name = arch.partition(":")[0]
    return name.startswith(("gfx11", "gfx12", "gfx94", "gfx95")) or name in ("gfx908", "gfx90a")
