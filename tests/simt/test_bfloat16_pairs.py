"""The CPU kernels' variants for AVX512-BF16, which multiply pairs of bfloat16, with and without AMX, which multiplies
tiles of them: with a C++ model of these instructions, so that they run on every CPU."""

from __future__ import annotations

import ctypes
import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from gemm_library import Gemm, Target, encode, expected, place
from harness import HERE
from test_gemm_kernels import LAYOUTS, assert_exact, integers

from cuda_ext import _emulator
from cuda_ext.testing import reference_attention

# GCC takes over a minute to optimise vectors of 64 bytes for CPUs that have shorter ones.
MODELS = {"pairs": (), "tiles": ("-DMODEL_TILES", "-Wno-psabi", "-O0")}


@pytest.fixture(scope="module", params=MODELS)
def pairs(request: pytest.FixtureRequest) -> Any:
    source, flags = HERE / "bfloat16_pairs.cpp", ("-std=c++17", *MODELS[request.param])
    library: Any = ctypes.CDLL(str(_emulator.build_library(f"bfloat16-{request.param}", [], [(source, flags)])))
    library.has_tiles = request.param == "tiles"
    return library


def bfloat16(values: np.ndarray, order: tuple[int, ...] | None = None, offset: int = 0, gap: int = 0) -> np.ndarray:
    return place(values, "bfloat16", order, offset, gap)


def run(pairs: Any, call: Gemm) -> None:
    params = call.params()
    pairs.pairs_gemm(ctypes.byref(params))


# k: one element, odd and even, a vector, a block of 512, more than a block.
SHAPES = [(1, 1, 1), (3, 7, 2), (5, 12, 9), (9, 13, 0), (73, 48, 64), (70, 67, 511), (33, 25, 513), (2, 300, 1100)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_are_exact(pairs: Any, layout: str) -> None:
    order_a, order_b = LAYOUTS[layout]
    for (m, n, k), gap in itertools.product(SHAPES, (0, 3)):
        call = Gemm(
            bfloat16(integers((m, k)), order_a, gap, gap),
            bfloat16(integers((k, n)), order_b, gap, gap),
            Target((m, n), "float32", gap),
        )
        run(pairs, call)
        assert_exact(call)


def test_operands_without_a_unit_stride(pairs: Any) -> None:
    a, b = bfloat16(integers((2 * 19, 2 * 27)))[::2, ::2], bfloat16(integers((3 * 27, 2 * 30)))[::3, ::2]
    call = Gemm(a, b, Target((19, 30), "float32"))
    run(pairs, call)
    assert_exact(call)


def test_batches_reduced_dims_and_epilogues(pairs: Any) -> None:
    a, b = bfloat16(integers((3, 2, 13, 45)), (1, 0, 3, 2)), bfloat16(integers((3, 2, 45, 20)))
    batched = Gemm(a, b, Target((3, 2, 13, 20), "bfloat16"), alpha=0.5, activation="relu")
    batched.bias = place(integers((20,)), "float32")
    reduced = Gemm(a, b, Target((2, 13, 20), "float32"), reduced_dims=1)
    gated = Gemm(a[0, 0], b[0, 0], Target((13, 10), "float32"), n=10, gated=True, activation="relu")
    backward = Gemm(a[0, 0], b[0, 0], Target((13, 20), "float32"), activation="relu")
    backward.preact, backward.bias_grad = bfloat16(integers((13, 20))), Target((20,), "float32")
    for call in (batched, reduced, gated, backward):
        run(pairs, call)
        assert_exact(call)


def test_sums_are_as_exact_as_float32(pairs: Any) -> None:
    rng = np.random.default_rng(random.getrandbits(64))
    a, b = bfloat16(rng.normal(size=(40, 700))), bfloat16(rng.normal(size=(700, 50)), (1, 0))
    call = Gemm(a, b, Target((40, 50), "float32"))
    run(pairs, call)
    assert call.out is not None
    # The rounding errors of 700 sums of size sqrt(700) add up to about sqrt(700)^2 2^-24. With sequential float32 sums,
    # the largest of 2000 such errors was 2.3 times as large in 300 draws.
    np.testing.assert_allclose(call.out.values(), expected(call).out, rtol=0, atol=4 * 700 * 2.0**-24)


# Head dims: one value, odd and even, a vector of pairs and around it, more than one; few queries have their own kernel.
@pytest.mark.parametrize(("dim", "dim_v"), [(1, 3), (6, 8), (7, 7), (9, 2), (64, 80)])
@pytest.mark.parametrize(("queries", "keys"), [(33, 33), (40, 300), (19, 5), (1, 50)])
def test_attention(pairs: Any, queries: int, keys: int, dim: int, dim_v: int) -> None:
    heads, heads_kv, scale, softcap = 4, 2, 0.7 / dim**0.5, 3.0
    query, key, value, grad_out = (
        torch.randn(n, h, d, dtype=torch.bfloat16)
        for n, h, d in ((queries, heads, dim), (keys, heads_kv, dim), (keys, heads_kv, dim_v), (queries, heads, dim_v))
    )
    out, grad_query, grad_key, grad_value = (torch.full_like(t, torch.nan) for t in (grad_out, query, key, value))
    lse = torch.full((heads, queries), torch.nan)
    sizes = [ctypes.c_int64(n) for n in (queries, keys, heads, heads_kv, dim, dim_v)]
    tensors = (query, key, value, grad_out, out, lse, grad_query, grad_key, grad_value)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in tensors]
    pairs.pairs_attention(*sizes, ctypes.c_double(scale), ctypes.c_double(softcap), *pointers, None)

    exact = [t.double()[None].requires_grad_() for t in (query, key, value)]
    want, want_lse = reference_attention(*exact, causal=True, scale=scale, softcap=softcap, return_lse=True)
    grads = torch.autograd.grad(want, exact, grad_out.double()[None])
    # Logits are as exact as in float32; everything else is rounded to bfloat16 once. With tiles, so are the weights,
    # before they are multiplied by values below 4.
    torch.testing.assert_close(lse, want_lse[0].detach().float(), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(out.double(), want[0].detach(), rtol=2**-8, atol=2**-7 if pairs.has_tiles else 1e-6)
    for got, exact_grad in zip((grad_query, grad_key, grad_value), grads):
        # A row's gradients use its rounded output, whose error of 2^-9 is multiplied by sums of a few values below 4.
        torch.testing.assert_close(got.double(), exact_grad[0], rtol=2**-8, atol=2**-6)


# Few queries and many, more than the keys, and one; 64 is a head dim that tiles serve for few queries, too.
@pytest.mark.parametrize("dim", [7, 64])
@pytest.mark.parametrize(("queries", "keys"), [(4, 200), (12, 40), (40, 300), (19, 5), (1, 50)])
def test_attention_with_a_tree_mask(pairs: Any, queries: int, keys: int, dim: int) -> None:
    query, key, value = (torch.randn(n, h, dim).bfloat16() for n, h in ((queries, 4), (keys, 2), (keys, 2)))
    out, lse = torch.full_like(query, torch.nan), torch.full((4, queries), torch.nan)
    tree = torch.rand(queries, queries) < 0.5
    sizes = [ctypes.c_int64(n) for n in (queries, keys, 4, 2, dim, dim)]
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (query, key, value, query, out, lse, query, key, value, tree)]
    pairs.pairs_attention(*sizes, ctypes.c_double(dim**-0.5), ctypes.c_double(0), *pointers)

    newest = min(queries, keys)
    mask = torch.cat([torch.ones(queries, keys - newest, dtype=torch.bool), tree[:, queries - newest :]], 1)
    exact = [t.double()[None] for t in (query, key, value)]
    want, want_lse = reference_attention(*exact, attn_mask=mask, return_lse=True)
    torch.testing.assert_close(lse, want_lse[0].float(), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(out.double(), want[0], rtol=2**-8, atol=2**-7 if pairs.has_tiles else 1e-6)


# The smallest normal number, and half of it in bfloat16, which is subnormal.
TINY, SUBNORMAL = 2.0**-126, 2.0**-127
CASES = [  # sum, (a0, a1), (b0, b1), result of the instruction
    (1.0, (2.0, 3.0), (5.0, 7.0), 32.0),
    (1.0, (SUBNORMAL, 3.0), (2.0**120, 7.0), 22.0),  # subnormal operands count as zero
    (SUBNORMAL, (0.0, 0.0), (0.0, 0.0), 0.0),  # so does a subnormal sum
    (0.0, (2.0**-100, 0.0), (2.0**-27, 0.0), 0.0),  # a subnormal result becomes zero
    (0.0, (1.0, 2.0**-100), (TINY, 2.0**-27), TINY),  # so does an intermediate one
    (2.0**24, (1.0, 1.0), (1.0, 1.0), 2.0**24),  # each sum is rounded, to even: 2^24 + 1 is not a float32
    (0.0, (1.0, 2.0**24), (1.0, 1.0), 2.0**24),
    (0.0, (2.0**24, 1.0), (1.0, 1.0), 2.0**24),
    (0.0, (-(2.0**24), 2.0**24), (1.0, 1.0), 0.0),
    (1.0, (-(2.0**24), 2.0**24), (1.0, 1.0), 0.0),  # the second product of a pair is added first: 1 is lost
    (0.0, (math.inf, 1.0), (1.0, 1.0), math.inf),
    (0.0, (math.inf, -math.inf), (1.0, 1.0), math.nan),
    (0.0, (math.inf, 1.0), (SUBNORMAL, 1.0), math.nan),  # infinity times a subnormal, which counts as zero
]


def test_the_model_of_the_instruction(pairs: Any) -> None:
    for start, a, b, want in CASES:
        sums = np.full(4, start, np.float32)
        words = [np.tile(encode(np.array(pair), "bfloat16"), 4).view(np.uint32) for pair in (a, b)]
        pairs.pairs_multiply_add(*(ctypes.c_void_p(array.ctypes.data) for array in (sums, *words)))
        np.testing.assert_array_equal(sums, np.full(4, want, np.float32), str((start, a, b)))
