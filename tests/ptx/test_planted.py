"""Errors that only nvcc's code can have, in asm strings, `#if` branches, launches and tensor maps: each is found."""

from __future__ import annotations

import multiprocessing
import shutil
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from ptx import build

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "simt"))
import test_conformance as conformance
from harness import HERE as SIMT
from harness import Fault, Library


@dataclass(frozen=True)
class Error:
    file: str  # under csrc
    right: str
    wrong: str
    source: str  # of the case that finds it
    case: str
    arch: str = "sm_80"


ERRORS = {
    "a transposition is left out": Error(
        "arch/mma.cuh", "m8n8.x2.trans.shared.b16 {%0", "m8n8.x2.shared.b16 {%0", "mma", "ldmatrix_x2_trans"
    ),
    "rows of a fragment are swapped": Error(
        "arch/mma.cuh", '"r"(a[0]), "r"(a[1])', '"r"(a[1]), "r"(a[0])', "mma", "mma_f16"
    ),
    "halves of a register are swapped": Error(
        "arch/math.cuh",
        'asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));',
        'asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(low), "f"(high));',
        "memory",
        "conversions",
    ),
    "bytes that are not there are copied": Error(
        "arch/async_copy.cuh", "[%0], [%1], %2, %3;", "[%0], [%1], %2, %2;", "memory", "cp_async"
    ),
    "a wait lets copies through": Error(
        "arch/async_copy.cuh", '%0;" ::"n"(pending)', '%0;" ::"n"(pending + 3)', "memory", "cp_async"
    ),
    "a fence is left out": Error("arch/thread.cuh", "{ __threadfence(); }", "{}", "grid", "fences"),
    "a release is relaxed": Error(
        "arch/memory.cuh", "st.global.release.gpu.u32 [%0], %1;", "st.global.u32 [%0], %1;", "grid", "blocks_in_turn"
    ),
    "a wait is for the other parity": Error(
        "arch/barrier.cuh", '"r"(parity)', '"r"(parity ^ 1)', "sm90", "barrier_ring", "sm_90a"
    ),
    "a proxy fence is compiled away": Error(
        "arch/barrier.cuh",
        "fence_async_shared(Site = {}) {\n#if __CUDA_ARCH__ >= 900",
        "fence_async_shared(Site = {}) {\n#if __CUDA_ARCH__ >= 9000",
        "sm90", "tma_store_2d_128_swizzle128_bfloat16", "sm_90a",
    ),
    "coordinates of a tile are swapped": Error(
        "arch/tma.cuh", 'CUDA_EXT_TMA_RANK(2, "{%3, %4}"', 'CUDA_EXT_TMA_RANK(2, "{%4, %3}"',
        "sm90", "tma_load_2d_64_swizzle64_float16", "sm_90a",
    ),
    "a tensor map has another stride": Error(
        "rt/tensor_map.cuh", "cuuint64_t(t.strides[d - 1])", "cuuint64_t(t.strides[0])",
        "sm90", "tma_load_3d_48_none_float16", "sm_90a",
    ),
    "a launch has no cluster": Error(
        "rt/launch.cuh", "launch.numAttrs++];\n    attribute.id = cudaLaunchAttributeClusterDimension",
        "launch.numAttrs];\n    attribute.id = cudaLaunchAttributeClusterDimension",
        "cluster", "cluster_loads", "sm_90a",
    ),
    "orders of the operands are swapped": Error(
        "arch/wgmma.cuh", '"r"(scale_d), "n"(a_major), "n"(b_major)', '"r"(scale_d), "n"(b_major), "n"(a_major)',
        "wgmma", "wgmma_bf16_200_k128_m16", "sm_90a",
    ),
}  # fmt: skip


# These without --all-ptx: one of each kind.
QUICK = ("rows of a fragment are swapped", "a release is relaxed", "a proxy fence is compiled away",
         "a tensor map has another stride", "a launch has no cluster")  # fmt: skip
FORK = multiprocessing.get_context("fork")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", ERRORS if metafunc.config.getoption("--all-ptx") else QUICK)


def find(path: Path, case: str, answer: Connection) -> None:
    """Sends what is wrong with `case` of a library, in one of the modes of the conformance tests."""
    library, rng = Library(path), np.random.default_rng()
    for options in conformance.MODES:
        data = conformance.inputs_of(case, library.in_bytes(case) // 4, rng)
        try:
            with library.options(**options):
                conformance.assert_same(case, library.run(case, data), conformance.references[case](data))
        except (AssertionError, Fault) as error:
            return answer.send(str(error))
    answer.send("")


def test_an_error_is_found(name: str, tmp_path: Path) -> None:
    """The same case without the error passes in test_conformance.py."""
    if build.find_toolkit() is None:
        pytest.skip(build.NO_NVCC)
    error = ERRORS[name]
    csrc = shutil.copytree(build._emulator.CSRC, tmp_path / "csrc")
    file = csrc / error.file
    assert error.right in file.read_text(), "the text that the error changes is no longer there"
    file.write_text(file.read_text().replace(error.right, error.wrong, 1))
    path = build.build_library(
        "wrong", [SIMT / f"conformance_{error.source}.cu"], [(SIMT / "library.cpp", ())], arch=error.arch, csrc=csrc,
        folder=tmp_path,
    )  # fmt: skip
    # In a process of its own: room for a library's thread-local variables is never given back.
    received, sent = FORK.Pipe(duplex=False)
    child = FORK.Process(target=find, args=(path, error.case, sent))
    child.start()
    assert received.poll(60), "no answer within a minute"
    found = received.recv()
    child.join()
    assert found, "nothing has found the error"
