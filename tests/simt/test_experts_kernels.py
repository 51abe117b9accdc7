"""The kernels between the products of experts: races, any schedule, sectors and bytes of memory.
tests/test_experts_passes.py compares their numbers with the definitions."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cuda_ext import testing
from cuda_ext._load import ops

combine = ops.combine_experts.default
gate_backward = ops.experts_gate_backward.default
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def combination(dtype: torch.dtype, n: int) -> Callable[[], list[Tensor]]:
    """Of tokens with five experts: more rows than are loaded at once."""
    results, rows, weights = torch.randn(65, n).to(dtype), torch.randperm(65).view(13, 5), torch.rand(13, 5)
    return lambda: [combine(results, rows, weights), combine(results, rows)]


def gradient(dtype: torch.dtype, n: int) -> Callable[[], list[Tensor]]:
    tensors = torch.randn(19, n).to(dtype), torch.randn(19, 2 * n).to(dtype), torch.rand(19), torch.randperm(19)
    options: dict[str, Any] = {"activation": "silu", "gated": True, "output_mask": [True] * 3}
    return lambda: list(gate_backward(*tensors, **options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [72, 333, 1100])
@pytest.mark.parametrize("case", [combination, gradient])
def test_any_schedule_gives_the_same_bits(case: Any, n: int, dtype: torch.dtype) -> None:
    call, found = case(dtype, n), []
    for schedule in ("fifo", "pct"):
        arch = random.choice(("sm_75", "sm_80", "sm_89", "sm_90a", "sm_120"))
        with testing.emulated(arch, mode="lazy", schedule=schedule, seed=random.randrange(2**31)):
            found.append(call())
    for mine, theirs in zip(*found, strict=True):
        assert mine.equal(theirs)


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT" or os.environ.get("CUDA_EXT_CPU_ISA") == "generic",
    reason="SSE2 rounds a product before it is added",
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [264, 333])
def test_combination_has_the_bits_of_the_cpu(n: int, dtype: torch.dtype) -> None:
    call = combination(dtype, n)
    with testing.emulated("sm_90a"):
        found = call()
    for mine, theirs in zip(found, call(), strict=True):
        assert mine.equal(theirs)


@pytest.mark.sampled(check="races")
@pytest.mark.parametrize("n", [264, 333])
@pytest.mark.parametrize("case", [combination, gradient])
def test_no_races(case: Any, n: int) -> None:
    call = case(torch.bfloat16, n)
    with testing.emulated("sm_90a", check_races=True):
        found = call()
    with testing.emulated("sm_90a"):
        for mine, theirs in zip(found, call(), strict=True):
            assert mine.equal(theirs)


def test_each_element_travels_once() -> None:
    """The bytes of the operands and results, beside indices and weights, in full sectors of 32 bytes."""
    tokens, top_k, n = 16, 4, 1024
    results, rows = torch.randn(tokens * top_k, n).bfloat16(), torch.randperm(tokens * top_k).view(tokens, top_k)
    with testing.emulated("sm_90a") as emulated:
        combine(results, rows)
        costs = emulated.counters
    warps = tokens * n // 256
    assert costs["global_store_bytes"] == 2 * tokens * n == 32 * costs["global_store_sectors"]
    indices = costs["global_load_bytes"] - 2 * tokens * top_k * n
    assert indices == warps * top_k * 32 * 8  # each lane has the index, in one sector
    assert costs["global_load_sectors"] == 2 * tokens * top_k * n // 32 + warps * top_k

    grad, product = torch.randn(64, n).bfloat16(), torch.randn(64, 2 * n).bfloat16()
    options: dict[str, Any] = {"activation": "silu", "gated": True, "output_mask": [True] * 3}
    with testing.emulated("sm_90a") as emulated:
        gate_backward(grad, product, torch.rand(64), torch.randperm(64), **options)
        costs = emulated.counters
    assert costs["global_store_bytes"] == 64 * (2 * 3 * n + 4)
    assert costs["global_store_sectors"] == 64 * (2 * 3 * n // 32 + 1)
    assert costs["global_load_sectors"] == 64 * (2 * 3 * n // 32 + 2)
