"""nvcc's code of the products of FP8 on mma.sync: the bits of the direct emulation, without races. Scales are powers of
two, so that a multiplication and an addition round like the fused ones of nvcc."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cuda_ext import scaled_grouped_mm, scaled_mm, testing
from ptx import build, kernels

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "simt"))
from scaled_cases import E4M3, E5M2, SCALINGS, assert_near, problem, random_epilogue

ARCH = "sm_89"
INSTANTIATIONS = ("scaled_gemm_sm89_e4m3_e4m3", "scaled_gemm_sm89_e5m2_e4m3", "scaled_groups_sm89_e4m3")
SOURCES = ["gemm/scaled_gemm_cuda", "gemm/gemm_cuda", *(f"gemm/instantiations/{name}" for name in INSTANTIATIONS)]


@pytest.fixture(scope="module")
def library() -> kernels.Kernels:
    if build.find_toolkit() is None:
        pytest.skip(build.NO_NVCC)
    files = [build._emulator.CSRC / f"{name}.cu" for name in SOURCES]
    return kernels.Kernels(build.build_library("scaled-sm_89", files, kernels.OTHERS, arch=ARCH, stubs=True))


# Of the tiles of 64 and of 128 rows, on the 4 SMs that are emulated.
@pytest.mark.parametrize("sizes", [(65, 67, 333), (200, 300, 300)], ids=str)
@pytest.mark.parametrize("of_a", [E4M3, E5M2], ids=str)
def test_bits_equal_those_of_the_direct_emulation(
    library: kernels.Kernels, sizes: tuple[int, int, int], of_a: torch.dtype
) -> None:
    arguments = problem(*sizes, (random.choice(SCALINGS), random.choice(SCALINGS)), (of_a, E4M3))
    options = random_epilogue(sizes[0], sizes[1], random.choice((torch.bfloat16, torch.float32)))
    with testing.emulated(ARCH):
        expected = scaled_mm(*arguments, **options)
    for emulation in ({"mode": "lazy", "schedule": "pct", "seed": random.randrange(2**31)}, {"check_races": True}):
        with kernels.emulated(library, ARCH, **emulation) as device:
            found = scaled_mm(*arguments, **options)
            assert device.counters["mma"] > 0
        assert_near(found, arguments, options)
        assert found.equal(expected)


def test_groups(library: kernels.Kernels) -> None:
    rows, n, k = [70, 0, 3], 40, 150
    each = [problem(count, n, k, ("RowWise", "BlockWise128x128"), (E4M3, E4M3)) for count in rows]
    a, scale_a = (torch.cat([arguments[i] for arguments in each]) for i in (0, 2))
    b, scale_b = torch.stack([arguments[1].t() for arguments in each]).mT, torch.stack([args[4] for args in each])
    call: list[Any] = [a, b, scale_a, "RowWise", scale_b, "BlockWise128x128"]
    offs, out = torch.tensor(rows).cumsum(0), {"output_dtype": torch.float32}
    with testing.emulated(ARCH):
        expected = scaled_grouped_mm(*call, offs=offs, **out)
    with kernels.emulated(library, ARCH, mode="lazy", schedule="pct", seed=random.randrange(2**31)):
        found = scaled_grouped_mm(*call, offs=offs, **out)
    assert found.equal(expected)
