"""Counters of nvcc's code on the emulator, compared with recorded values and with the direct emulation."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import cuda_ext
from cuda_ext import bucket, testing
from ptx import build, kernels

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "simt"))
from cost import assert_same_cost, is_recording

# In the direct emulation these exclude plain loads and stores, which do not call the emulator.
WITHOUT_PLAIN_ACCESSES = {"global_load_bytes", "global_store_bytes"}
# The direct emulation groups the accesses of a warp by source line, not by instruction: if lanes skip iterations of an
# unrolled loop, it groups accesses of different iterations.
BY_SOURCE_LINE = {"global_load_sectors", "global_store_sectors", "shared_wavefronts", "shared_ideal_wavefronts"}


def randn(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def gemm(m: int, n: int, k: int) -> None:
    cuda_ext.gemm(randn(m, k), randn(k, n))


def linear_backward() -> None:
    x, weight = randn(256, 64).requires_grad_(), randn(256, 64).requires_grad_()
    cuda_ext.linear(x, weight, activation="gelu").backward(randn(256, 256))


def attention(dim: int, backward: bool, **options: bool) -> None:
    q, k, v = (randn(1, 192, 2, dim).requires_grad_(backward) for _ in range(3))
    out = cuda_ext.flash_attention(q, k, v, **options)
    if backward:
        out.backward(randn(*out.shape))


def pack() -> None:
    tensors = [randn(4096), randn(1000), randn(3)]
    bucket.pack(tensors, torch.empty(8192, dtype=torch.bfloat16), [0, 4096, 5120])


CASES: dict[str, Callable[[], None]] = {
    "gemm 256x256x64": lambda: gemm(256, 256, 64),
    "gemm 127x130x67": lambda: gemm(127, 130, 67),
    "gemm 64x64x2048 with k split": lambda: gemm(64, 64, 2048),
    "linear 256x256x64 with gelu, forward and backward": linear_backward,
    "pack 4096, 1000, 3": pack,
}
for dim in (64, 128, 256):
    CASES[f"attention forward 192x{dim}"] = lambda dim=dim: attention(dim, False)
    CASES[f"attention forward and backward 192x{dim} causal"] = lambda dim=dim: attention(dim, True, causal=True)


def measure(case: Callable[[], None], emulation: testing.Emulation) -> dict[str, int]:
    before = emulation.counters
    case()
    return {name: count - before[name] for name, count in emulation.counters.items() if count != before[name]}


@pytest.fixture(scope="module")
def counted(pytestconfig: pytest.Config) -> dict[str, dict[str, int]]:
    """Counters of the cases whose head dim is in the library."""
    if build.find_toolkit() is None:
        pytest.skip(build.NO_NVCC)
    everything = pytestconfig.getoption("--full") or is_recording()
    cases = {name: case for name, case in CASES.items() if head_dim_of(name) in (0, *kernels.head_dims(everything))}
    with kernels.emulated(kernels.load(everything=everything), mode="lazy", threads=1) as emulation:
        return {name: measure(case, emulation) for name, case in cases.items()}


def head_dim_of(case: str) -> int:
    return int(case.partition("192x")[2].partition(" ")[0]) if case.startswith("attention") else 0


def test_counters_equal_the_recorded_ones(counted: dict[str, dict[str, int]]) -> None:
    assert_same_cost("ptx", counted, left_out=CASES.keys() - counted)


@pytest.mark.sampled
def test_counters_equal_those_of_the_direct_emulation(counted: dict[str, dict[str, int]]) -> None:
    with testing.emulated(mode="lazy", threads=1) as emulation:
        direct = {name: measure(CASES[name], emulation) for name in counted}
    for name, cost in counted.items():
        for counter in (cost.keys() | direct[name].keys()) - BY_SOURCE_LINE:
            here, there = cost.get(counter, 0), direct[name].get(counter, 0)
            as_expected = here == there or (here > there and counter in WITHOUT_PLAIN_ACCESSES)
            as_expected |= counter == "shuffle" and here == 2 * there  # a 64-bit shuffle is two of 32 bits
            assert as_expected, f"{name}: {counter} is {here}, and {there} in the direct emulation"
