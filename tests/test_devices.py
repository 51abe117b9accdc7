"""What the CUDA kernels' launchers make of the devices that people have: how they divide the work depends on the number
of multiprocessors, and the emulator has few of them unless it is told."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import cuda_ext
from cuda_ext import testing
from cuda_ext.testing import (
    assert_op_matches_reference,
    reference_attention,
    reference_attention_varlen,
    reference_gemm,
    reference_linear,
)

DEVICES = {"A100": ("sm_80", 108), "RTX 4090": ("sm_89", 128), "H200": ("sm_90a", 132)}


@contextmanager
def device(name: str) -> Iterator[testing.Emulation]:
    arch, processors = DEVICES[name]
    with testing.emulated(arch, "lazy", "pct", seed=1, processors=processors) as emulation:
        yield emulation


def tensors_of(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    return {name: torch.randn(shape).to(dtype).requires_grad_() for name, shape in shapes.items()}


def qkv(batch: int, queries: int, keys: int, heads: int, heads_kv: int, dim: int) -> dict[str, Tensor]:
    of_keys = (batch, keys, heads_kv, dim)
    return tensors_of({"query": (batch, queries, heads, dim), "key": of_keys, "value": of_keys})


@pytest.mark.sampled(cases="every value")
@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ((65, 130, 4099), torch.bfloat16),  # few tiles, divided
        ((1, 300, 2048), torch.float32),
        ((700, 900, 72), torch.float16),  # small tiles, or one of the large ones would be alone on the device
        ((1000, 1100, 40), torch.bfloat16),
    ],
)
def test_products(name: str, sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, n, k = sizes
    tensors = tensors_of({"a": (m, k), "b": (k, n)}, dtype)
    with device(name) as emulation:
        assert_op_matches_reference(cuda_ext.gemm, reference_gemm, tensors)
        before = emulation.counters["blocks"]
        with torch.no_grad():
            cuda_ext.gemm(tensors["a"], tensors["b"])
        blocks = emulation.counters["blocks"] - before
    # Of the smallest tile, 64 x 64, with k tiles of 64 or 32 elements, at least 4 of them to a block.
    tiles = math.ceil(m / 64) * math.ceil(n / 64)
    most = tiles * max(1, k // (4 * (32 if dtype == torch.float32 else 64)))
    assert blocks >= min(DEVICES[name][1], most) // 3, "most of the device has nothing to do"


@pytest.mark.parametrize("name", DEVICES)
def test_layers(name: str) -> None:
    tensors = tensors_of({"input": (33, 1100), "weight": (200, 1100), "bias": (200,)})
    with device(name):
        assert_op_matches_reference(cuda_ext.linear, reference_linear, tensors, {"activation": "gelu"})


@pytest.mark.sampled(cases="every value")
@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((1, 1, 3000, 8, 2, 64), {}),  # keys divided
        ((1, 5, 1500, 4, 4, 128), {"causal": True}),
        ((1, 500, 70, 4, 1, 64), {}),  # walks divided
        ((2, 260, 260, 3, 3, 128), {"causal": True, "deterministic": True}),
        ((1, 300, 200, 2, 2, 256), {"softcap": 3.0}),
    ],
)
def test_attention(name: str, sizes: Any, options: dict[str, Any]) -> None:
    tensors = qkv(*sizes)
    with device(name):
        assert_op_matches_reference(
            cuda_ext.flash_attention,
            reference_attention,
            tensors,
            {"return_lse": True, **options},
            gradient_factor=3.0,
            atol=2 * torch.finfo(torch.bfloat16).eps,
        )


@pytest.mark.parametrize("name", DEVICES)
def test_few_blocks_are_divided_until_the_device_is_full(name: str) -> None:
    """8 heads, a query each."""
    arguments = [tensor.detach() for tensor in qkv(1, 1, 4096, 8, 8, 64).values()]
    with device(name) as emulation:
        cuda_ext.flash_attention(*arguments)
        combining = math.ceil(8 / 4)  # a warp has a row
        blocks = emulation.counters["blocks"] - combining
    processors = DEVICES[name][1]
    assert 0.75 * processors <= blocks <= 4 * processors  # parts of whole steps
    assert blocks % 8 == 0


@pytest.mark.parametrize("name", DEVICES)
def test_packed_sequences(name: str) -> None:
    lengths = [0, 1, 70, 300, 0, 33, 64, 0]
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    shape = (sum(lengths), 3, 64)
    tensors = tensors_of({"query": shape, "key": shape, "value": shape})
    with device(name):
        assert_op_matches_reference(
            cuda_ext.flash_attention_varlen,
            reference_attention_varlen,
            tensors,
            {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "causal": True},
            gradient_factor=3.0,
            atol=2 * torch.finfo(torch.bfloat16).eps,
        )


@pytest.mark.parametrize("options", [{}, {"deterministic": True}])
def test_vectors_of_sums_where_the_device_has_them(options: dict[str, Any]) -> None:
    """One instruction where sm_80 has four, to the same sums."""
    tensors = qkv(1, 130, 200, 2, 2, 64)
    counted, gradients = {}, {}
    for arch in ("sm_80", "sm_90a"):
        with testing.attention_without_wgmma(), testing.emulated(arch):
            out = cuda_ext.flash_attention(**tensors, **options)
            with testing.emulated(arch) as emulation:
                gradients[arch] = torch.autograd.grad(out, list(tensors.values()), torch.ones_like(out))
        counted[arch] = emulation.counters
    assert counted["sm_80"]["atomic"] == 4 * counted["sm_90a"]["atomic"] > 0
    for sectors in ("global_load_sectors", "global_store_sectors", "blocks"):
        assert counted["sm_80"][sectors] == counted["sm_90a"][sectors]
    if options:
        assert all(map(torch.equal, gradients["sm_80"], gradients["sm_90a"]))


@pytest.mark.sampled
def test_more_heads_than_a_grid_has_rows() -> None:
    """The second and third axis of a grid end at 65,535."""
    heads = 65_537
    query = torch.randn(1, 1, heads, 8).bfloat16().requires_grad_()
    key = torch.randn(1, 0, 1, 8).bfloat16()
    with testing.emulated() as emulation:
        out = cuda_ext.flash_attention(query, key, key)
        (gradient,) = torch.autograd.grad(out, query, torch.ones_like(out))
    assert emulation.counters["blocks"] >= 2 * heads
    assert torch.equal(out, torch.zeros_like(out)) and torch.equal(gradient, torch.zeros_like(query))


def test_the_count_is_checked() -> None:
    for processors in (0, -1, 1.5):
        expected = pytest.raises(ValueError, match=r"expected processors to be an int of at least 1")
        with expected, testing.emulated(processors=processors):  # type: ignore[arg-type]
            pass
