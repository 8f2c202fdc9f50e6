"""Every production configuration builds for every architecture, spills nothing and uses the matrix instructions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from quant_loader.kernels.triton_ops import aot

SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;   /* 0x00000a00ff017b82 */
                                                            /* 0x000fe20000000800 */
        /*0010*/              @!P0 IMMA.16832.S8.S8.SAT R4, R8.ROW, R10.COL, R4 ;
        /*0020*/                   STL.64 [R1+0x8], R4 ;
        /*0030*/              @UP2 LDL R5, [R1+0x8] ;
        /*0040*/                   IMMA.16832.S8.S8.SAT R4, R8.ROW, R10.COL, R4 ;
"""
AMDGCN = """
    v_wmma_i32_16x16x16_iu8 v[0:7], v[8:11], v[12:15], v[0:7]
    .private_segment_fixed_size: 16
    .vgpr_count:     151
"""


@pytest.fixture(scope="module")
def results():
    """One run of the tool for all architectures, two processes, by architecture."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    command = [sys.executable, "-I", "-m", "quant_loader.kernels.triton_ops.aot", "--json", "--jobs", "2"]
    run = subprocess.run(command, cwd=Path(__file__).parent, env=environment, capture_output=True, text=True)
    assert run.returncode in (0, 1), run.stderr[-4000:]
    assert run.stdout.startswith("["), run.stderr[-4000:]
    by_arch: dict[str, list[dict]] = {arch: [] for arch in aot.ARCHITECTURES}
    for result in json.loads(run.stdout):
        by_arch[result["arch"]].append(result)
    return by_arch


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", aot.ARCHITECTURES)
def test_production_configurations(arch, results):
    assert [r["name"] for r in results[arch]] == [b.name for b in aot.production_builds(arch)]
    problems = [f"{r['name']}: {'; '.join(r['problems'])}" for r in results[arch] if r["problems"]]
    assert not problems, "\n".join(problems)
    assert all(r["registers"] > 0 for r in results[arch])


def test_sass_is_read():
    assert aot.read_usage("Function k:\n REG:216 STACK:16 SHARED:0") == (216, 16)
    assert aot.read_sass(SASS) == {"IMMA": 2}


def test_amd_assembly_is_read():
    assert aot.read_amdgcn(AMDGCN) == (151, 16, {"v_wmma_i32_16x16x16_iu8": 1})


def test_unreadable_output_is_an_error():
    with pytest.raises(ValueError, match="cuobjdump"):
        aot.read_usage("")
    with pytest.raises(ValueError, match="cuobjdump"):
        aot.read_sass("fatbin without code")
    with pytest.raises(ValueError, match="no register metadata"):
        aot.read_amdgcn("s_endpgm")


def test_spills_and_missing_matrix_instructions_are_problems():
    build = next(b for b in aot.gemm_builds("sm_90") if b.name.endswith("low rank"))
    assert build.matrix == ("IGMMA", "HGMMA")
    assert aot.judge(build, 0, {"IGMMA": 8, "HGMMA": 2}) == ()
    assert aot.judge(build, 430, {"IMMA": 64, "HMMA": 2}) == (
        "spills 430 bytes a thread",
        "no IGMMA instruction",
        "no HGMMA instruction",
    )


def test_no_product_is_offered_where_triton_has_no_matrix_instruction():
    assert not [b for b in aot.production_builds("sm_75") if b.name.startswith("int8_gemm")]
    assert [b for b in aot.production_builds("sm_80") if b.name.startswith("int8_gemm")]


def test_a_configuration_that_does_not_build_is_a_problem(monkeypatch):
    broken = next(aot.element_builds())._replace(constants={"SOURCE": "no such storage"})
    monkeypatch.setattr(aot, "production_builds", lambda arch: [broken])
    result = aot.inspect("sm_86", 0)
    assert len(result.problems) == 1
    assert result.problems[0].startswith("does not build: ")


def test_the_table_has_a_line_a_build():
    result = aot.Result("sm_90", "int8_gemm", 234, 0, 147456, {"IGMMA": 8}, ())
    table = aot.format_table([result, result._replace(problems=("no IGMMA instruction",))]).splitlines()
    assert table[2] == "| sm_90 | int8_gemm | 234 | 0 | 8 IGMMA | 144.0 |  |"
    assert table[3].endswith("no IGMMA instruction |")
