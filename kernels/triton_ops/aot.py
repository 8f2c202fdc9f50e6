"""Builds every production configuration for every architecture, without a GPU or a driver, and reads the machine code.

    python -m quant_loader.kernels.triton_ops.aot [--arch sm_90 gfx1100 ...] [--jobs 2] [--json]

prints a table (registers, spills, matrix instructions, shared memory) and exits with 1 when a build fails, spills
registers to memory, or lacks the matrix instruction its architecture has. A compiler that changes its mind about one
of our kernels is found here, not on somebody's GPU: Triton 3.8 did so with int8 products on sm_80 to sm_89.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from . import block_decode, float_quantizer, int8_matmul_supported, w4_decode
from .block_decode import decode_kernel
from .float_quantizer import quantize_float_kernel
from .int8_gemm import RANK_STEP, int8_gemm_kernel
from .row_quantizer import quantize_rows_kernel
from .schedules import MAX_ROW_TILE, GemmSchedule, gemm_table, row_schedule
from .w4_decode import w4_decode_kernel

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx1100", "gfx1151", "gfx1201")
SASS_OPCODE = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)", re.MULTILINE)
SASS_MATRIX = ("IMMA", "IGMMA", "UTCIMMA", "HMMA", "HGMMA", "UTCHMMA")
AMD_MATRIX = re.compile(r"\b(v_(?:wmma|mfma)_\w+)")


class Build(NamedTuple):
    """One configuration: a kernel, the types of its pointers, which integers are multiples of 16, its constants and
    options, and the matrix instructions that must appear in its code (substrings of their names)."""

    name: str
    kernel: Any
    pointers: Mapping[str, str]
    aligned: tuple[str, ...]
    constants: Mapping[str, object]
    options: Mapping[str, int]
    matrix: tuple[str, ...] = ()


class Result(NamedTuple):
    """What a build came to. spills: instructions that store to or load from local memory (AMD: spilled vector
    registers)."""

    arch: str
    name: str
    registers: int
    spills: int
    shared: int
    matrix: dict[str, int]
    problems: tuple[str, ...]


def matrix_instructions(arch: str, schedule: GemmSchedule, *, low_rank: bool) -> tuple[str, ...]:
    """The instruction an int8 tile (and its 16-bit low-rank epilogue) must use: the warp-group forms need 64 rows."""
    if arch.startswith("gfx"):
        names = ("mfma_i32", "mfma_f32") if arch.startswith("gfx9") else ("wmma_i32", "wmma_f32")
    elif arch == "sm_90" and schedule.block_m >= 64:
        names = ("IGMMA", "HGMMA")
    elif arch == "sm_100" and schedule.block_m >= 64:
        names = ("UTCIMMA", "UTCHMMA")
    else:
        names = ("IMMA", "HMMA")
    return names if low_rank else names[:1]


def gemm_builds(arch: str) -> Iterator[Build]:
    """The INT8 product: every tile of the architecture's table in the roles it is chosen for."""

    def build(role: str, tile: GemmSchedule, *, low_rank: bool = False, k: str = "even", out: str = "bf16") -> Build:
        names = ("a_ptr", "b_ptr", "scale_a_ptr", "scale_b_ptr", "bias_ptr", "low_rank_ptr", "up_ptr", "out_ptr")
        types = ("*i8", "*i8", "*fp32", "*fp32", f"*{out}", "*bf16", "*bf16", f"*{out}")
        aligned: tuple[str, ...] = ("N", "stride_low_rank", "stride_up", "stride_out")
        if k != "odd":
            aligned += ("K", "stride_a", "stride_b")
        constants = {
            "ROW_SCALE_A": True, "ROW_SCALE_B": True, "BIAS": True, "LOW_RANK": low_rank, "EVEN_K": k == "even",
            "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "DOTS": tile.dots,
            "GROUP_M": tile.group_m, "RANK_STEP": RANK_STEP,
        }  # fmt: skip
        shape = f"{tile.block_m}x{tile.block_n}x{tile.block_k}x{tile.dots} w{tile.num_warps} s{tile.num_stages}"
        return Build(
            name=f"int8_gemm {shape} {role}".rstrip(),
            kernel=int8_gemm_kernel,
            pointers=dict(zip(names, types, strict=True)),
            aligned=aligned,
            constants=constants,
            options={"num_warps": tile.num_warps, "num_stages": tile.num_stages},
            matrix=matrix_instructions(arch, tile, low_rank=low_rank),
        )

    table = gemm_table(arch)
    for tile in table.tiles:
        yield build("", tile)
    yield build("fp32 out", table.tiles[0], out="fp32")
    yield build("K tail", table.tiles[0], k="masked")
    for tile in table.low_rank:
        yield build("low rank", tile, low_rank=True)
    for tile in dict.fromkeys(table.skinny):
        yield build("", tile)
        yield build("low rank", tile, low_rank=True)
    yield build("odd K", table.unaligned, k="odd")
    yield build("odd K, low rank", table.unaligned, k="odd", low_rank=True)


def element_builds() -> Iterator[Build]:
    """The kernels without a matrix product; they are the same for every architecture."""

    def rows(name: str, source: str, pointer: str, K: int, rotation: int, scale_in: str) -> Build:
        schedule = row_schedule(K)
        pointers = {
            "x_ptr": pointer, "block_scale_ptr": "*u8", "scale_in_ptr": "*fp32", "q_ptr": "*i8", "scale_ptr": "*fp32",
            "floor": "fp32",
        }  # fmt: skip
        constants = {
            "SOURCE": source, "ROTATION": rotation, "QMAX": 127, "SCALE_IN": scale_in, "ROWS": schedule.rows,
            "CHUNKS": schedule.chunks, "ONE_PASS": K <= MAX_ROW_TILE,
        }  # fmt: skip
        options = {"num_warps": schedule.num_warps}
        return Build(f"{name} K={K}", quantize_rows_kernel, pointers, ("K", "stride_x"), constants, options)

    yield rows("quantize_rows bf16", "float", "*bf16", 3072, 1, "none")
    yield rows("quantize_rows static bf16", "float", "*bf16", 3072, 256, "static")
    for rotation, K in ((16, 256), (64, 3072), (256, 3072), (256, 15360), (256, 21504), (256, 40960)):
        yield rows(f"convrot{rotation} + quantize bf16", "float", "*bf16", K, rotation, "none")
    yield rows("convrot256 + quantize fp32", "float", "*fp32", 3072, 256, "none")
    yield rows("fp8 to int8", "e4m3", "*u8", 3072, 256, "tensor")
    yield rows("mxfp8 to int8", "mxfp8", "*u8", 3072, 256, "none")
    yield rows("nvfp4 to int8", "nvfp4", "*u8", 3072, 256, "tensor")
    yield rows("nvfp4 to int8", "nvfp4", "*u8", 15360, 256, "tensor")

    for source, scale in (("e4m3", "tensor"), ("mxfp8", "none"), ("nvfp4", "tensor")):
        pointers = {"w_ptr": "*u8", "block_scale_ptr": "*u8", "scale_ptr": "*fp32", "out_ptr": "*bf16"}
        constants = {"SOURCE": source, "SCALE": scale, "ROWS": block_decode.ROWS, "CHUNKS": block_decode.CHUNKS}
        options = {"num_warps": block_decode.WARPS}
        yield Build(f"decode {source} bf16", decode_kernel, pointers, ("K", "stride_w"), constants, options)

    for grouped, codebook, name in (
        (False, False, "decode int4"),
        (True, True, "decode w4a8 codebook"),
        (True, False, "decode w4a8"),
    ):
        pointers = {"w_ptr": "*u8", "scale_ptr": "*u8", "codebook_ptr": "*fp32", "out_ptr": "*i8"}
        constants = {
            "GROUPED": grouped,
            "CODEBOOK": codebook,
            "GROUP": 16,
            "ROWS": w4_decode.ROWS,
            "BYTES": w4_decode.BYTES,
        }
        yield Build(name, w4_decode_kernel, pointers, ("half_k", "stride_w"), constants, {"num_warps": w4_decode.WARPS})

    for format_name in ("fp8", "mxfp8", "nvfp4"):
        pointers = {"x_ptr": "*bf16", "scale_in_ptr": "*fp32", "q_ptr": "*u8", "block_scale_ptr": "*u8"}
        constants = {"FORMAT": format_name, "ROWS": float_quantizer.ROWS, "CHUNKS": float_quantizer.CHUNKS}
        options = {"num_warps": float_quantizer.WARPS}
        aligned = ("K", "stride_x", "stride_q")
        yield Build(f"quantize {format_name} bf16", quantize_float_kernel, pointers, aligned, constants, options)


def production_builds(arch: str) -> list[Build]:
    """Everything that may be launched on ``arch``."""
    products = list(gemm_builds(arch)) if int8_matmul_supported(arch) else []
    return [*products, *element_builds()]


def _target(arch: str) -> GPUTarget:
    if arch.startswith("gfx"):
        return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)
    return GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)


def _compile(arch: str, build: Build) -> Any:
    names = list(build.kernel.arg_names)
    signature = {
        name: "constexpr"
        if name in build.constants
        else build.pointers.get(name, "fp32" if name == "strength" else "i32")
        for name in names
    }
    aligned = [name for name in names if name in build.aligned or build.pointers.get(name, "").startswith("*")]
    source = ASTSource(
        fn=build.kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in build.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(source, target=_target(arch), options=dict(build.options))


def _cuobjdump(flag: str, cubin: Path) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([str(tool), flag, str(cubin)], capture_output=True, text=True, check=True).stdout


def read_usage(usage: str) -> tuple[int, int]:
    """(registers a thread, bytes of local memory a thread) of cuobjdump's --dump-resource-usage."""
    found = re.search(r"\bREG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise ValueError("cuobjdump printed no register count")
    return int(found[1]), int(found[2])


def read_sass(sass: str) -> dict[str, int]:
    """The matrix instructions of cuobjdump's --dump-sass, counted."""
    opcodes = Counter(SASS_OPCODE.findall(sass))
    if not opcodes:
        raise ValueError("cuobjdump printed no instructions")
    return {name: opcodes[name] for name in SASS_MATRIX if opcodes[name]}


def read_amdgcn(text: str) -> tuple[int, int, dict[str, int]]:
    """(vector registers, bytes of local memory a thread, matrix instructions) of AMD assembly."""
    found = {name: re.search(rf"\.{name}:\s*(\d+)", text) for name in ("vgpr_count", "private_segment_fixed_size")}
    numbers = {name: int(match[1]) for name, match in found.items() if match is not None}
    if len(numbers) < len(found):
        raise ValueError("the assembly has no register metadata")
    return numbers["vgpr_count"], numbers["private_segment_fixed_size"], dict(Counter(AMD_MATRIX.findall(text)))


def judge(build: Build, spills: int, matrix: Mapping[str, int]) -> tuple[str, ...]:
    """What is wrong with a build, in words."""
    problems = [f"spills {spills} bytes a thread"] if spills else []
    problems += [f"no {wanted} instruction" for wanted in build.matrix if not any(wanted in name for name in matrix)]
    return tuple(problems)


def inspect(arch: str, index: int) -> Result:
    """Builds configuration ``index`` of ``production_builds(arch)`` and reads its code. A compiler's failure is a
    problem, not an error."""
    build = production_builds(arch)[index]
    try:
        compiled = _compile(arch, build)
    except Exception as error:  # noqa: BLE001  whatever the compiler raises is this tool's finding
        return Result(arch, build.name, 0, 0, 0, {}, (f"does not build: {type(error).__name__}: {error}",))
    if arch.startswith("gfx"):
        registers, spills, matrix = read_amdgcn(compiled.asm["amdgcn"])
    else:
        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder) / "kernel.cubin"
            cubin.write_bytes(compiled.asm["cubin"])
            registers, spills = read_usage(_cuobjdump("--dump-resource-usage", cubin))
            # Disassembling is the slow part, and only a product has matrix instructions to look for.
            matrix = read_sass(_cuobjdump("--dump-sass", cubin)) if build.matrix else {}
    return Result(arch, build.name, registers, spills, compiled.metadata.shared, matrix, judge(build, spills, matrix))


def _start_worker(cache: str) -> None:
    os.environ["TRITON_CACHE_DIR"] = cache
    os.environ["TRITON_ALWAYS_COMPILE"] = "1"


def inspect_all(architectures: Sequence[str], jobs: int) -> list[Result]:
    """Every production build of every architecture, in order, by ``jobs`` processes with a cache of their own that is
    thrown away."""
    tasks = [(arch, index) for arch in architectures for index in range(len(production_builds(arch)))]
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as cache,
        ProcessPoolExecutor(jobs, mp_context=context, initializer=_start_worker, initargs=(cache,)) as pool,
    ):
        return list(pool.map(inspect, *zip(*tasks, strict=True), chunksize=4))


def format_table(results: Sequence[Result]) -> str:
    """A Markdown table, one line a build."""
    lines = [
        "| arch | kernel | registers | spilled bytes | matrix instructions | shared KB | |",
        "|---|---|---:|---:|---|---:|---|",
    ]
    for r in results:
        matrix = ", ".join(f"{count} {name}" for name, count in r.matrix.items())
        cells = (r.arch, r.name, r.registers, r.spills, matrix, f"{r.shared / 1024:.1f}", "; ".join(r.problems))
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="aot", description="Build the Triton kernels ahead of time and read their machine code."
    )
    parser.add_argument("--arch", nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES), metavar="ARCH")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        parser.error("TRITON_INTERPRET is set: unset it, interpreted kernels cannot be built")
    results = inspect_all(options.arch, options.jobs)
    text = json.dumps([r._asdict() for r in results], indent=1) if options.json else format_table(results)
    sys.stdout.write(text + "\n")
    return int(any(r.problems for r in results))


if __name__ == "__main__":
    sys.exit(main())
