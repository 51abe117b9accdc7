"""nvcc's code accesses global memory with the width that the source requests, line by line."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from ptx import build, kernels, parse, widths

MEMORY = build._emulator.CSRC / "arch" / "memory.cuh"


@pytest.fixture(scope="module")
def requested() -> dict[str, int]:
    return widths.requested_widths(MEMORY)


def test_lines_name_their_width(requested: dict[str, int]) -> None:
    assert set(requested.values()) == {1, 2, 4, 8, 16}


def test_a_split_store_is_reported(tmp_path: Path) -> None:
    header = tmp_path / "memory.cuh"
    header.write_text("\n  if constexpr (sizeof(Vector) == 16) *static_cast<uint4*>(pointer) = v;\n")
    narrow = "st.global.u32 [%rd1+4], %r1;"
    stores = ["st.global.v4.u32 [%rd1], {%r1, %r2, %r3, %r4};", narrow, "ld.global.v2.f32 {%f1, %f2}, [%rd1];"]
    text = (
        ".version 9.0\n.target sm_80\n.address_size 64\n.visible .entry kernel(\n)\n{\n"
        ".loc 1 7 1\n.loc 2 2 40, function_name $L__info_string0, inlined_at 1 7 1\n"
        + "\n".join([*stores, "st.global.cs.v4.u32 [%rd1], {%r1, %r2, %r3, %r4};", ".loc 1 8 1", narrow])
        + '\nret;\n}\n.file 1 "/x/csrc/gemm/gemm.cuh"\n.file 2 "/x/csrc/arch/memory.cuh"\n'
    )  # fmt: skip
    found = widths.widths([parse.parse(text, "x.ptx")], widths.requested_widths(header))
    assert found == Counter(
        {("gemm.cuh:7", "st", 16, 16): 2, ("gemm.cuh:7", "st", 16, 4): 1, ("gemm.cuh:7", "ld", 16, 8): 1}
    )
    assert widths.split_accesses(found) == [
        "gemm.cuh:7: 1 loads of 8 bytes instead of 16",
        "gemm.cuh:7: 1 stores of 4 bytes instead of 16",
    ]


def test_no_access_of_a_kernel_is_split(requested: dict[str, int], pytestconfig: pytest.Config) -> None:
    toolkit = build.find_toolkit()
    if toolkit is None:
        pytest.skip(build.NO_NVCC)
    sources = kernels.sources(everything=(full := pytestconfig.getoption("--full")))
    if not full:
        sources = random.sample(sources, 4)  # parsing takes a second each
    with build._build.lock(build.FOLDER):
        files = [build.compile_with_nvcc(toolkit, source, "sm_80")[1] for source in sources]
    found = widths.widths((parse.parse(path.read_text(), path.name) for path in files), requested)
    # asm statements fix the width; for intrinsics and plain stores the compiler chooses it.
    assert sum(found.values()) > (1000 if full else 0), "few accesses are found by their line"
    assert not (narrow := widths.split_accesses(found)), "nvcc splits accesses:\n" + "\n".join(narrow)
