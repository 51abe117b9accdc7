"""Counters of the attention kernels on the emulator; tests/test_attention_cuda.py tests their results."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from cost import assert_same_cost

import cuda_ext
from cuda_ext import _emulator, testing

Counters = dict[str, int]

PHASES = ("forward", "backward")
DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
# Many heads fill the device; with few heads, keys are split among blocks.
SIZES = {"blocks enough": (8, 128, 128), "divided": (2, 128, 512)}  # heads, queries, keys
# The paper model (benchmarks/model) derives the costs of a step, a block and a tile of queries from these.
GROWING = ((8, 128, 128), (8, 128, 256), (8, 256, 128))
OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "causal": {"causal": True}, "softcap": {"softcap": 5.0}}


def costs(
    dims: tuple[int, int], sizes: tuple[int, int, int], options: dict[str, Any], arch: str = "sm_80"
) -> tuple[Counters, Counters]:
    """Counters of forward and of backward."""
    heads, queries, keys = sizes
    shapes = ((1, queries, heads, dims[0]), (1, keys, heads, dims[0]), (1, keys, heads, dims[1]))
    tensors = [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]
    with testing.emulated(arch) as emulation:
        out = cuda_ext.flash_attention(*tensors, **options)
        forward = dict(emulation.counters)
        torch.autograd.grad(out, tensors, torch.randn(out.shape).bfloat16())
    backward = {name: value - forward[name] for name, value in emulation.counters.items()}
    return forward, backward


def tile_of(dims: tuple[int, int], backward: bool, arch: str) -> str:
    heads, queries, keys = GROWING[0]
    tile = (
        _emulator.load()
        .attention_choice(
            *(backward, "bfloat16", (queries, keys), (heads, heads), dims),
            batch=1,
            window=(-1, -1),
            block_mask=False,
            compute_capability=int(arch[3:]),
            processors=4,
        )
        .tile
    )
    return f"{tile['block_m']}x{tile['block_n']}"


@pytest.fixture(scope="module")
def counted() -> dict[str, Counters]:
    found: dict[str, Counters] = {}
    for dims in DIMS:
        both = f"{dims[0]}/{dims[1]}"
        for size, option in itertools.product(SIZES, OPTIONS):
            for phase, cost in zip(PHASES, costs(dims, SIZES[size], OPTIONS[option]), strict=True):
                found[f"{phase} {both} {option}, {size}"] = cost
        for sizes, arch in itertools.product(GROWING, ("sm_80", "sm_89")):
            of = f"of {'x'.join(map(str, sizes))}"
            names = [f"{phase} {both} by {tile_of(dims, phase == 'backward', arch)} {of}" for phase in PHASES]
            if not set(names) <= set(found):
                found.update(zip(names, costs(dims, sizes, {}, arch), strict=True))
    return {name: {key: value for key, value in cost.items() if value} for name, cost in found.items()}


@pytest.mark.sampled(check="machine code")
def test_golden_counters(counted: dict[str, Counters]) -> None:
    assert_same_cost("attention", counted)


@pytest.mark.sampled(check="machine code")
def test_no_bank_conflicts(counted: dict[str, Counters]) -> None:
    for name, cost in counted.items():
        assert cost["matrix_wavefronts"] == cost["matrix_ideal_wavefronts"], name
        assert cost["shared_wavefronts"] == cost["shared_ideal_wavefronts"], name
