"""The kernels of these tests, compiled for GPUs, do not spill, and ptxas does not serialise their wgmma."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from harness import CSRC, HERE, find_toolkit

SM80 = ("conformance_warp.cu", "conformance_memory.cu", "conformance_mma.cu", "conformance_grid.cu")
SM90 = (
    "conformance_sm89.cu",
    "conformance_sm90.cu",
    "conformance_cluster.cu",
    "conformance_wgmma.cu",
    "proof_gemm.cu",
    "proof_attention.cu",
)


def ptxas_log(source: str, architecture: str, target: Path) -> str:
    toolkit = find_toolkit()
    assert toolkit is not None
    command = [str(toolkit.home / "bin" / "nvcc"), "-std=c++20", "-O3", f"-I{CSRC}", f"-I{HERE}", "-Xptxas", "-v"]
    command += ["-gencode", f"arch=compute_{architecture},code=sm_{architecture}", "-c", str(HERE / source)]
    command += ["-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.skipif(find_toolkit() is None, reason="no CUDA toolkit")
def test_products_of_8_bit_floats_compile_only_where_they_exist(tmp_path: Path) -> None:
    toolkit, source = find_toolkit(), tmp_path / "float8.cu"
    assert toolkit is not None
    source.write_text(
        '#include "arch/mma.cuh"\nusing namespace cuda_ext;\n'
        "__global__ void multiply(float (&d)[4], uint32_t (&a)[4], uint32_t (&b)[2]) {\n"
        "  arch::mma_m16n8k32<float8_e4m3_t, float8_e5m2_t>(d, a, b);\n}\n"
    )
    messages = {}
    for architecture in ("86", "89"):
        command = [
            str(toolkit.home / "bin" / "nvcc"),
            "-std=c++20",
            f"-I{CSRC}",
            f"-arch=compute_{architecture}",
            "-ptx",
        ]
        done = subprocess.run([*command, str(source), "-o", str(tmp_path / "out")], capture_output=True, text=True)
        messages[architecture] = done.stderr
    assert "products of 8-bit floats need sm_89 or later" in messages["86"]
    assert messages["89"] == ""


@pytest.mark.sampled(cases=3, slow=True)
@pytest.mark.skipif(find_toolkit() is None, reason="no CUDA toolkit")
@pytest.mark.parametrize("architecture", ["80", "90a"])
@pytest.mark.parametrize("source", [*SM80, *SM90])
def test_compiles_cleanly(source: str, architecture: str, tmp_path: Path) -> None:
    log = ptxas_log(source, architecture, tmp_path / "out.o")
    assert re.search(r"Used \d+ registers", log), "no kernel was compiled"
    assert not re.findall(r".*\(C75\d\d\).*", log), "ptxas serialises wgmma or inserts waits"
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert spills and set(spills) == {("0", "0")}
