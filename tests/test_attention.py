"""flash_attention and flash_attention_varlen against the reference: values and gradients."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import cuda_ext
from cuda_ext.testing import assert_op_matches_reference, reference_attention, reference_attention_varlen

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]

# Gradients of 16-bit attention see P rounded differently from plain PyTorch, which rounds P itself; FlashAttention-2's
# own tests allow gradients 3 times plain PyTorch's error for that reason.
GRADIENT_FACTOR = 3.0


# Beyond the rule: flash attention's dS = P (dP - delta) is a difference of two dot products of dim_v terms, so of order
# sqrt(dim_v), which plain PyTorch may get without error, and a gradient sums up to 700 terms of that order in another
# order. A wrong formula is off by 1e-3.
def atol(value: Tensor, terms: int = 700) -> float:
    """``terms``: of the longest sum; the errors of its terms have either sign, so that of a sum grows with the root."""
    roundings = {torch.float64: 4096, torch.float32: 64}.get(value.dtype, 1)
    return roundings * torch.finfo(value.dtype).eps * max(1.0, value.shape[-1] ** 0.5) * max(1.0, terms / 700) ** 0.5


def qkv(
    batch: int, sq: int, sk: int, heads: int, heads_kv: int, dim: int, dim_v: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    shapes = {
        "query": (batch, sq, heads, dim),
        "key": (batch, sk, heads_kv, dim),
        "value": (batch, sk, heads_kv, dim_v),
    }
    return {name: torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for name, shape in shapes.items()}


def gradient_atol(tensors: dict[str, Tensor], terms: int) -> dict[str, float]:
    """For the gradients of the bias, which are sums over many pairs, and of 16-bit keys, if there are few.

    With 16 bits, delta comes from the rounded output, so that the sum of a row of dS has an error of a deviation of
    eps * sqrt(dim_v / 12), which one of few keys gets a large part of, and a bias that all keys share the whole. Five
    deviations of the sum over rows are allowed.
    """
    query, value, bias = tensors["query"], tensors["value"], tensors.get("attn_bias")
    rows, keys = query.shape[:3].numel(), value.shape[1]
    per_row = 5 * torch.finfo(query.dtype).eps * (value.shape[-1] / 12) ** 0.5 if query.dtype.itemsize == 2 else 0.0
    allowed = {"key": max(atol(value, terms), per_row * rows**0.5 / max(1, keys))}
    if bias is not None and bias.numel():
        allowed["attn_bias"] = atol(value, max(terms, rows * keys // bias.numel()))
        if bias.shape[-1:] in ((), (1,)):
            allowed["attn_bias"] = max(allowed["attn_bias"], per_row * (rows // bias.numel()) ** 0.5)
    if (table := tensors.get("relative_bias")) is not None:
        # One element may have most of the pairs.
        sums = max(1, table.shape[:-1].numel())
        allowed["relative_bias"] = max(atol(value, max(terms, rows * keys // sums)), per_row * (rows // sums) ** 0.5)
    return allowed


def check(tensors: dict[str, Tensor], terms: int = 700, **options: Any) -> None:
    assert_op_matches_reference(
        cuda_ext.flash_attention,
        reference_attention,
        tensors,
        {"return_lse": True, **options},
        gradient_factor=GRADIENT_FACTOR,
        atol=atol(tensors["value"], terms),
        gradient_atol=gradient_atol(tensors, terms),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 128, 128, 2, 2, 64, 64), {}),
        ((2, 128, 128, 2, 2, 64, 64), {"causal": True}),
        ((1, 200, 333, 4, 2, 40, 24), {"causal": True}),
        ((1, 333, 200, 4, 1, 33, 65), {"causal": True}),
        ((3, 1, 200, 4, 1, 33, 65), {"causal": True}),
        ((1, 77, 301, 2, 2, 16, 16), {"window": (10, 3)}),
        ((1, 301, 77, 2, 2, 16, 16), {"window": (10, None)}),
        ((1, 301, 300, 2, 1, 16, 16), {"window": (None, 5)}),
        ((1, 301, 300, 2, 1, 16, 16), {"window": (70, 0), "causal": True}),
        ((2, 129, 130, 2, 2, 16, 16), {"softcap": 2.0}),
        ((2, 129, 130, 2, 2, 16, 16), {"softcap": 20.0, "causal": True, "scale": 0.7}),
        ((1, 65, 64, 2, 2, 16, 16), {"scale": -0.3}),
        ((1, 65, 64, 2, 2, 16, 16), {"scale": 0.0}),
        ((1, 600, 700, 2, 1, 8, 8), {"window": (100, 50)}),
    ],
    ids=str,
)
def test_matches_reference(dtype: torch.dtype, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    check(qkv(*shape, dtype), **options)


@pytest.mark.parametrize("step", [0.0, 3.0, 7.9, 8.1, 30.0])
def test_maxima_that_grow_from_block_to_block(step: float) -> None:
    """A block's maximum may exceed the one its terms are relative to by 8 before these are rescaled."""
    tensors = qkv(1, 50, 128 * 9, 1, 1, 4, 8, torch.float32)
    query, key = tensors["query"].detach() * 0.1, tensors["key"].detach() * 0.1
    query[..., 0] = 1.0
    key[..., 0] = step * torch.arange(9.0).repeat_interleave(128)[None, :, None]
    check({**tensors, "query": query.requires_grad_(), "key": key.requires_grad_()}, scale=1.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("per_batch", [False, True])
def test_alibi(dtype: torch.dtype, per_batch: bool) -> None:
    slopes = torch.rand(2, 4) if per_batch else torch.rand(4)
    check({**qkv(2, 100, 130, 4, 2, 16, 24, dtype), "alibi_slopes": slopes}, causal=True, softcap=15.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (5, 5), "softcap": 3.0}], ids=str)
def test_sinks_and_their_gradient(dtype: torch.dtype, options: dict[str, Any]) -> None:
    sinks = torch.randn(4, dtype=torch.float64).to(dtype).requires_grad_()
    check({**qkv(2, 90, 70, 4, 2, 16, 16, dtype), "sinks": sinks}, **options)


def test_float32_sinks_beside_bfloat16_tensors_keep_their_dtype() -> None:
    tensors = qkv(1, 30, 30, 2, 2, 16, 16, torch.bfloat16)
    sinks = torch.randn(2, requires_grad=True)
    cuda_ext.flash_attention(**tensors, sinks=sinks).sum().backward()
    assert sinks.grad is not None and sinks.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True, "softcap": 3.0, "scale": -0.4}, {"window": (700, None)}, {"window": (0, 0)}],
    ids=str,
)
def test_few_queries(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """They have a kernel of their own, which shares keys among heads and, with more threads than heads, splits them."""
    queries, dim, dim_v = random.choice([(1, 64, 64), (2, 17, 40), (3, 40, 17), (16, 8, 8), (7, 96, 32), (16, 64, 128)])
    heads_kv = random.choice((1, 2, 6))
    heads = heads_kv * random.choice((1, 3, 8))
    tensors = qkv(2, queries, 1100, heads, heads_kv, dim, dim_v, dtype)
    for name in ("key", "value"):
        if random.random() < 0.25:  # else heads are neighbours in memory, and read together
            tensors[name] = tensors[name].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    tensors["sinks"] = torch.randn(heads, dtype=torch.float64).to(dtype).requires_grad_()
    if random.random() < 0.5:
        tensors["alibi_slopes"] = torch.rand(2, heads)
    if random.random() < 0.5:
        wide = random.choice(EVERY_BROADCAST)
        bias_dtype = random.choice((dtype, torch.bool))
        tensors |= named(bias_of(broadcast((2, heads, queries, 1100), wide), bias_dtype, hidden=0.2))
    ambient = torch.get_num_threads()
    try:
        for threads in (1, 24):
            torch.set_num_threads(threads)
            check(tensors, terms=2 * heads * queries * 1100, **options)
    finally:
        torch.set_num_threads(ambient)


# Around the kernels' panel of 64 queries and blocks of 128 and 256 keys, and lengths that divide nothing.
EDGES = [1, 2, 63, 64, 65, 127, 128, 129, 255, 257, 509, 521]


@pytest.mark.parametrize("length", EDGES)
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_lengths_around_the_tiles(length: int, extra: int) -> None:
    for causal in (False, True):
        check(qkv(1, length, max(1, length + extra), 2, 1, 8, 8, torch.float32), causal=causal)


@pytest.mark.parametrize("dim", [1, 3, 15, 16, 17, 31, 48, 80, 96, 192, 256])
def test_head_dims(dim: int) -> None:
    check(qkv(1, 70, 75, 2, 1, dim, 257 - dim, torch.float32), causal=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_uniform_weights_give_exact_means(dtype: torch.dtype) -> None:
    """Equal logits and a power of two of integer values: every step is exact in every dtype."""
    value = torch.randint(-8, 9, (2, 256, 3, 5)).to(dtype)
    query, key = torch.randn(2, 70, 3, 8).to(dtype), torch.zeros(2, 256, 3, 8, dtype=dtype)
    expected = value.double().mean(1, keepdim=True).expand(2, 70, 3, 5).to(dtype)
    assert torch.equal(cuda_ext.flash_attention(query, key, value), expected)


@pytest.mark.parametrize(
    "sizes",
    [
        (0, 5, 5, 2, 2, 8, 8),
        (2, 0, 5, 2, 2, 8, 8),
        (2, 5, 0, 2, 2, 8, 8),
        (2, 5, 5, 0, 0, 8, 8),
        (2, 5, 5, 0, 2, 8, 8),
        (2, 5, 5, 2, 1, 8, 0),
    ],
    ids=str,
)
def test_zero_sized(sizes: tuple[int, ...]) -> None:
    check(qkv(*sizes, torch.float32), causal=True)


def test_zero_head_dim_weighs_all_keys_alike() -> None:
    tensors = qkv(1, 5, 7, 2, 2, 0, 4, torch.float32)
    check(tensors)
    expected = tensors["value"].mean(1, keepdim=True).expand(1, 5, 2, 4)
    torch.testing.assert_close(cuda_ext.flash_attention(**tensors), expected)


# Bias

EVERY_BROADCAST = list(itertools.product([False, True], repeat=4))

# (dtype of query, dtype of the bias)
BIAS_DTYPES = [(dtype, dtype) for dtype in DTYPES] + [(torch.bfloat16, torch.float32), (torch.float32, torch.bool)]


def bias_of(shape: Sequence[int], dtype: torch.dtype, hidden: float = 0.0) -> Tensor:
    """Random numbers, or booleans, that hide this part of the keys."""
    visible = torch.rand(tuple(shape)) >= hidden
    if dtype == torch.bool:
        return visible
    return torch.randn(tuple(shape), dtype=torch.float64).to(dtype).masked_fill(~visible, -math.inf).requires_grad_()


def named(bias: Tensor) -> dict[str, Tensor]:
    """Booleans are the argument attn_mask, numbers the argument attn_bias."""
    return {"attn_mask" if bias.dtype == torch.bool else "attn_bias": bias}


def broadcast(full: Sequence[int], wide: Sequence[bool]) -> list[int]:
    return [size if is_wide else 1 for size, is_wide in zip(full, wide, strict=True)]


@pytest.mark.parametrize(
    "wide", EVERY_BROADCAST, ids=lambda wide: "".join("1BHQK"[n * w] for n, w in enumerate(wide, 1))
)
@pytest.mark.parametrize(("dtype", "bias_dtype"), BIAS_DTYPES, ids=str)
def test_bias_of_every_broadcast_shape(dtype: torch.dtype, bias_dtype: torch.dtype, wide: tuple[bool, ...]) -> None:
    bias = bias_of(broadcast((2, 4, 70, 90), wide), bias_dtype, hidden=0.3 if bias_dtype == torch.bool else 0.0)
    sinks = torch.randn(4, dtype=torch.float64).to(dtype).requires_grad_()
    terms = 2 * 4 * 70 * 90 // bias.numel()  # that the gradient of one element of the bias sums up
    check({**qkv(2, 70, 90, 4, 2, 16, 8, dtype), **named(bias), "sinks": sinks}, terms, causal=True, softcap=3.0)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("dtype", "bias_dtype"), BIAS_DTYPES, ids=str)
def test_bias_whose_keys_are_not_adjacent(dtype: torch.dtype, bias_dtype: torch.dtype, batch: int) -> None:
    """As T5 computes its position bias, with the heads innermost; expanded to the batch, or sliced."""
    inputs = qkv(2, 70, 90, 4, 2, 16, 8, dtype)
    strided = bias_of((70, 90, 4), bias_dtype, hidden=0.3 if bias_dtype == torch.bool else 0.0).detach()
    strided = strided.permute(2, 0, 1).expand(batch, 4, 70, 90)
    every_third = strided.repeat_interleave(3, dim=-1)[..., ::3]
    adjacent = strided.contiguous()
    assert strided.stride(-1) == 4 and every_third.stride(-1) == 3

    def run(bias: torch.Tensor) -> list[torch.Tensor]:
        bias = bias.requires_grad_(bias.dtype != torch.bool)
        out = cuda_ext.flash_attention(**inputs, **named(bias))
        wanted = [*inputs.values(), *[bias] * bias.requires_grad]
        return [out.detach(), *torch.autograd.grad(out, wanted, torch.ones_like(out))]

    for other in (strided, every_third):
        assert all(torch.equal(a, b) for a, b in zip(run(adjacent), run(other.detach()), strict=True))


@pytest.mark.parametrize("shape", [(), (1,), (90,), (70, 90), (70, 1), (4, 70, 90), (4, 1, 1), (1, 90)], ids=str)
def test_bias_of_lower_rank(shape: tuple[int, ...]) -> None:
    bias = bias_of(shape, torch.float32)
    check({**qkv(2, 70, 90, 4, 2, 16, 8, torch.float32), "attn_bias": bias}, terms=2 * 4 * 70 * 90 // bias.numel())


@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bool], ids=str)
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((1, 300, 600, 4, 1, 8, 8), {"causal": True}),
        ((1, 301, 77, 2, 2, 16, 16), {"window": (10, None)}),
        ((2, 65, 129, 2, 1, 17, 5), {"window": (9, 3), "softcap": 2.0, "scale": -0.3}),
        ((3, 1, 300, 4, 2, 16, 8), {}),
        ((3, 300, 1, 4, 2, 16, 8), {}),
        ((2, 1, 1, 2, 2, 8, 8), {}),
        ((1, 17, 1030, 1, 1, 8, 8), {"causal": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("extras", [False, True])
def test_bias_that_hides_keys(
    sizes: tuple[int, ...], options: dict[str, Any], extras: bool, bias_dtype: torch.dtype
) -> None:
    batch, sq, sk, heads = sizes[:4]
    bias = bias_of((batch, heads, sq, sk), bias_dtype, hidden=0.5)
    more = {"alibi_slopes": torch.rand(heads), "sinks": torch.randn(heads, requires_grad=True)} if extras else {}
    check({**qkv(*sizes, torch.float32), **named(bias), **more}, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("boolean", [False, True])
def test_rows_that_a_bias_hides(dtype: torch.dtype, boolean: bool) -> None:
    tensors = qkv(2, 40, 25, 2, 2, 8, 8, dtype)
    bias = bias_of((1, 2, 40, 25), torch.bool if boolean else dtype)
    with torch.no_grad():
        bias[:, 1, 7:30] = False if boolean else -math.inf
    check({**tensors, **named(bias)})
    out, lse = cuda_ext.flash_attention(**tensors, **named(bias), return_lse=True)
    assert out[:, 7:30, 1].eq(0).all() and lse[:, 1, 7:30].eq(-math.inf).all() and lse[:, 0].isfinite().all()
    leaves = [*tensors.values(), *([] if boolean else [bias])]
    gradients = torch.autograd.grad([out, lse], leaves, [torch.ones_like(out), torch.ones_like(lse)])
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert gradients[0][:, 7:30, 1].eq(0).all() and (boolean or gradients[3][:, 1, 7:30].eq(0).all())


def test_a_sink_is_all_that_is_left_of_a_row_that_a_bias_hides() -> None:
    tensors = {**qkv(1, 9, 5, 2, 1, 4, 4, torch.float32), "sinks": torch.randn(2, requires_grad=True)}
    bias = torch.ones(9, 5, dtype=torch.bool)
    bias[3] = False
    check({**tensors, **named(bias)})
    out, lse = cuda_ext.flash_attention(**tensors, **named(bias), return_lse=True)
    assert out[:, 3].eq(0).all() and torch.equal(lse[0, :, 3], tensors["sinks"])
    # As it is of one that the diagonal hides.
    check({**tensors, **named(bias)}, causal=True)
    lse = cuda_ext.flash_attention(**tensors, **named(bias), causal=True, return_lse=True)[1]
    assert torch.equal(lse[0, :, :4], tensors["sinks"][:, None].expand(2, 4))


@pytest.mark.parametrize("shape", [(2, 3, 70, 90), (1, 3, 1, 90), (70, 1)], ids=str)
def test_false_is_minus_infinity(shape: tuple[int, ...]) -> None:
    tensors = qkv(2, 70, 90, 3, 3, 16, 16, torch.float32)
    mask = torch.rand(shape) < 0.6
    by_mask, by_numbers = (
        cuda_ext.flash_attention(**tensors, **named(bias))
        for bias in (mask, torch.zeros(shape).masked_fill(~mask, -math.inf))
    )
    assert torch.equal(by_mask, by_numbers)
    gradients = [
        torch.autograd.grad(out, list(tensors.values()), torch.ones_like(out)) for out in (by_mask, by_numbers)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("bias_wide", "mask_wide"),
    [((0, 1, 1, 1), (1, 0, 0, 1)), ((1, 1, 1, 1), (0, 0, 1, 1)), ((0, 1, 0, 0), (1, 1, 1, 1)), ((0,) * 4, (0,) * 4)],
)
@pytest.mark.parametrize("queries", [2, 70])
def test_bias_and_mask_together(
    dtype: torch.dtype, bias_wide: tuple[bool, ...], mask_wide: tuple[bool, ...], queries: int
) -> None:
    full = (2, 4, queries, 90)
    bias = bias_of(broadcast(full, bias_wide), dtype)
    mask = bias_of(broadcast(full, mask_wide), torch.bool, hidden=0.4)
    tensors = {**qkv(2, queries, 90, 4, 2, 16, 8, dtype), "attn_bias": bias, "attn_mask": mask}
    check(tensors, 2 * 4 * queries * 90 // bias.numel(), causal=True, softcap=3.0)


def test_a_mask_overrides_any_bias() -> None:
    tensors = qkv(1, 70, 90, 2, 2, 16, 16, torch.float32)
    mask = torch.rand(70, 90) < 0.6
    expected = cuda_ext.flash_attention(**tensors, attn_mask=mask)
    for value in (math.nan, math.inf):
        actual = cuda_ext.flash_attention(
            **tensors, attn_mask=mask, attn_bias=torch.zeros(70, 90).masked_fill(~mask, value)
        )
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("right", [1, 50])
def test_causal_sets_the_right_side_of_the_window(right: int) -> None:
    tensors = qkv(2, 40, 60, 2, 2, 8, 8, torch.float32)
    check(tensors, causal=True, window=(20, right))
    actual, expected = (
        cuda_ext.flash_attention(**tensors, causal=True, window=(20, side), return_lse=True) for side in (right, 0)
    )
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def test_what_the_window_hides_stays_hidden_whatever_the_bias() -> None:
    tensors = qkv(1, 70, 90, 2, 2, 16, 16, torch.float32)
    bias = torch.randn(70, 90)
    expected = cuda_ext.flash_attention(**tensors, attn_bias=bias, causal=True)
    hidden = torch.ones(70, 90, dtype=torch.bool).triu(21)
    for value in (math.nan, math.inf):
        odd = bias.masked_fill(hidden, value).requires_grad_()
        actual = cuda_ext.flash_attention(**tensors, attn_bias=odd, causal=True)
        assert torch.equal(actual, expected)
        (gradient,) = torch.autograd.grad(actual.sum(), odd)
        assert gradient.isfinite().all() and gradient[hidden].eq(0).all()


BIAS_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda t: t.mT.contiguous().mT,
    "heads inside": lambda t: t.movedim(1, -1).contiguous().movedim(-1, 1),
    "sparse last dim": lambda t: torch.stack([t, t], -1).flatten(-2)[..., ::2],
    "misaligned": lambda t: torch.cat([t.flatten(), t.flatten()[:1]]).roll(1)[1:].view(t.shape),
    "padded rows": lambda t: torch.nn.functional.pad(t, (1, 2))[..., 1:-2],
    "expanded": lambda t: t[:1, :, :, :1].expand(t.shape),
}


@pytest.mark.parametrize("layout", BIAS_LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool], ids=str)
def test_a_bias_of_any_strides_is_read_in_place(layout: str, dtype: torch.dtype) -> None:
    tensors = qkv(2, 70, 90, 3, 3, 16, 16, torch.float32 if dtype == torch.bool else dtype)
    arranged = BIAS_LAYOUTS[layout](bias_of((2, 3, 70, 90), dtype, hidden=0.1).detach())
    contiguous = arranged.clone(memory_format=torch.contiguous_format)
    leaves = [bias.requires_grad_(dtype != torch.bool) for bias in (arranged, contiguous)]
    outs = [cuda_ext.flash_attention(**tensors, **named(bias), causal=True) for bias in leaves]
    assert torch.equal(*outs)
    gradients = [
        torch.autograd.grad(out, [t for t in (*tensors.values(), bias) if t.requires_grad], torch.ones_like(out))
        for out, bias in zip(outs, leaves, strict=True)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("threads", [1, 5, 24])
@pytest.mark.parametrize("sizes", [(2, 300, 600, 2, 1, 8, 8), (5, 40, 30, 6, 2, 24, 8)], ids=str)
@pytest.mark.parametrize("wide", [(0, 0, 1, 1), (0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 1, 0), (0, 1, 0, 0)], ids=str)
def test_threads_that_share_a_bias(threads: int, sizes: tuple[int, ...], wide: tuple[bool, ...]) -> None:
    """A gradient larger than that of query (the first sizes) is shared out in another way than a smaller one."""
    batch, sq, sk, heads = sizes[:4]
    tensors = {
        **qkv(*sizes, torch.float32),
        "attn_bias": bias_of(broadcast((batch, heads, sq, sk), wide), torch.float32),
    }
    tensors["sinks"] = torch.randn(heads, requires_grad=True)
    ambient = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        check(tensors)
        runs = [
            torch.autograd.grad(cuda_ext.flash_attention(**tensors).square().sum(), list(tensors.values()))
            for _ in range(3)
        ]
    finally:
        torch.set_num_threads(ambient)
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("sizes", [(0, 5, 5, 2), (2, 0, 5, 2), (2, 5, 0, 2), (2, 5, 5, 0)], ids=str)
@pytest.mark.parametrize("wide", [(1, 1, 1, 1), (0, 1, 1, 1), (1, 0, 0, 1), (0, 0, 0, 0)], ids=str)
def test_zero_sized_bias(sizes: tuple[int, ...], wide: tuple[bool, ...]) -> None:
    batch, sq, sk, heads = sizes
    bias = bias_of(broadcast((batch, heads, sq, sk), wide), torch.float32)
    check({**qkv(batch, sq, sk, heads, heads, 8, 8, torch.float32), "attn_bias": bias})


@pytest.mark.parametrize("shape", [(2, 4, 33, 50), (2, 1, 1, 50), (33, 50)], ids=str)
@pytest.mark.parametrize("boolean", [False, True])
def test_bias_is_the_mask_of_scaled_dot_product_attention(shape: tuple[int, ...], boolean: bool) -> None:
    tensors = qkv(2, 33, 50, 4, 2, 16, 16, torch.float64)
    bias = bias_of(shape, torch.bool if boolean else torch.float64, hidden=0.1)
    leaves = [t for t in (*tensors.values(), bias) if t.requires_grad]
    actual = cuda_ext.flash_attention(**tensors, **named(bias))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in tensors.values()), attn_mask=bias, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(actual, expected)
    grad = torch.randn_like(expected)
    for a, e in zip(
        torch.autograd.grad(actual, leaves, grad), torch.autograd.grad(expected, leaves, grad), strict=True
    ):
        torch.testing.assert_close(a, e)


def test_relative_positions_of_t5() -> None:
    """A table of 32 buckets per head becomes a bias (1, H, S, S) that the batch shares, and learns through it."""
    tensors = qkv(3, 60, 60, 4, 4, 16, 16, torch.float64)
    table = torch.randn(32, 4, dtype=torch.float64, requires_grad=True)
    distance = (torch.arange(60)[:, None] - torch.arange(60)).clamp(-16, 15) + 16
    grad = torch.randn(3, 60, 4, 16, dtype=torch.float64)
    actual, expected = (
        torch.autograd.grad(op(**tensors, attn_bias=table[distance].permute(2, 0, 1)[None], scale=1.0), table, grad)[0]
        for op in (cuda_ext.flash_attention, reference_attention)
    )
    torch.testing.assert_close(actual, expected)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads first": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "batch inside": lambda t: t.permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3),
    "sparse last dim": lambda t: torch.stack([t, t], -1).flatten(-2)[..., ::2],
    "misaligned": lambda t: torch.cat([t.flatten(), t.flatten()[:1]]).roll(1)[1:].view(t.shape),
    "padded rows": lambda t: torch.nn.functional.pad(t, (1, 2), value=math.nan)[..., 1:-2],
    "padded sequence": lambda t: torch.nn.functional.pad(t, (0, 0, 0, 0, 2, 3), value=math.nan)[:, 2:-3],
    "reversed copy": lambda t: t.flip(1).flip(1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strides_are_read_in_place(layout: str, dtype: torch.dtype) -> None:
    """The same numbers in another layout give the same bits, and padding full of NaN is never read."""
    tensors = qkv(2, 70, 90, 4, 2, 19, 21, dtype)
    arranged = {name: LAYOUTS[layout](t.detach()).requires_grad_() for name, t in tensors.items()}
    expected, actual = (cuda_ext.flash_attention(**t, causal=True) for t in (tensors, arranged))
    assert torch.equal(actual, expected)
    grad = LAYOUTS[layout](torch.randn_like(expected))
    for a, e in zip(
        torch.autograd.grad(actual, list(arranged.values()), grad),
        torch.autograd.grad(expected, list(tensors.values()), grad),
        strict=True,
    ):
        assert torch.equal(a, e)


def test_expanded_tensors_and_size_one_dims_with_odd_strides() -> None:
    row = torch.randn(1, 1, 1, 16)
    query = row.expand(2, 33, 4, 16)
    key = torch.randn(2, 1, 1, 16).as_strided((2, 1, 1, 16), (16, 7, 3, 1))
    value = torch.randn(16).expand(2, 1, 1, 16)
    out = cuda_ext.flash_attention(query, key, value)
    torch.testing.assert_close(out, value.expand(2, 33, 4, 16).contiguous())


def test_a_nan_reaches_the_rows_that_see_it_and_no_other() -> None:
    tensors = qkv(1, 100, 100, 2, 2, 16, 16, torch.float32)
    with torch.no_grad():
        tensors["key"][0, 60, 1] = math.nan
        out = cuda_ext.flash_attention(**tensors, causal=True)
    assert out[0, 60:, 1].isnan().all() and not out[0, :60].isnan().any() and not out[0, :, 0].isnan().any()


def test_large_logits_do_not_overflow() -> None:
    tensors = qkv(1, 50, 60, 2, 2, 16, 16, torch.float32)
    large = {name: (t.detach() * 30).requires_grad_() if name != "value" else t for name, t in tensors.items()}
    with torch.no_grad():
        logits = torch.einsum("bihd,bjhd->bhij", large["query"], large["key"]) / 4
    # A logit of thousands is only known to an ulp, and backward forms the weights from it anew.
    assert_op_matches_reference(
        cuda_ext.flash_attention,
        reference_attention,
        large,
        factor=4.0,
        gradient_factor=4.0,
        atol=30 * torch.finfo(torch.float32).eps * logits.abs().max().item(),
    )


# Packed sequences


def cu_seqlens(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def packed(
    lengths_q: list[int], lengths_k: list[int], heads: int, heads_kv: int, dim: int, dim_v: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    shapes = {
        "query": (sum(lengths_q), heads, dim),
        "key": (sum(lengths_k), heads_kv, dim),
        "value": (sum(lengths_k), heads_kv, dim_v),
    }
    tensors = {
        name: torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for name, shape in shapes.items()
    }
    return {**tensors, "cu_seqlens_q": cu_seqlens(lengths_q), "cu_seqlens_k": cu_seqlens(lengths_k)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window": (20, 4), "softcap": 5.0}, {"max_seqlen_q": 500, "max_seqlen_k": 600}],
    ids=str,
)
def test_varlen(dtype: torch.dtype, options: dict[str, Any]) -> None:
    tensors = packed([5, 0, 130, 64, 1, 17], [9, 3, 100, 64, 0, 300], 4, 2, 24, 40, dtype)
    tensors["sinks"] = torch.randn(4, dtype=torch.float64).to(dtype).requires_grad_()
    tensors["alibi_slopes"] = torch.rand(6, 4)
    assert_op_matches_reference(
        cuda_ext.flash_attention_varlen,
        reference_attention_varlen,
        tensors,
        {"return_lse": True, **options},
        gradient_factor=GRADIENT_FACTOR,
        atol=atol(tensors["value"]),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "wide", EVERY_BROADCAST, ids=lambda wide: "".join("1BHQK"[n * w] for n, w in enumerate(wide, 1))
)
def test_varlen_bias_and_mask(dtype: torch.dtype, wide: tuple[bool, ...]) -> None:
    """Of any broadcast shape over (B, H, max Sq, max Sk); what lies past the end of a sequence is not read."""
    lengths_q, lengths_k = [5, 0, 130, 64, 1, 17], [9, 3, 100, 64, 0, 300]
    tensors = packed(lengths_q, lengths_k, 4, 2, 24, 16, dtype)
    longest = {"max_seqlen_q": 140, "max_seqlen_k": 300} if random.random() < 0.5 else {}
    full = (6, 4, longest.get("max_seqlen_q", 130), 300)
    bias = bias_of(
        broadcast(full, wide), random.choice([dtype, torch.float64 if dtype == torch.float64 else torch.float32])
    )
    mask = bias_of(broadcast(full, random.choice(EVERY_BROADCAST)), torch.bool, hidden=0.3)
    with torch.no_grad():
        for n, (q, k) in enumerate(zip(lengths_q, lengths_k, strict=True)):
            if wide[0] and wide[2]:
                bias[n, :, q:] = math.nan
            if wide[0] and wide[3]:
                bias[n, :, :, k:] = math.nan
    terms = 4 * sum(q * k for q, k in zip(lengths_q, lengths_k, strict=True)) // bias.numel()
    assert_op_matches_reference(
        cuda_ext.flash_attention_varlen,
        reference_attention_varlen,
        {**tensors, "attn_bias": bias, **({"attn_mask": mask} if random.random() < 0.7 else {})},
        {"return_lse": True, "causal": random.random() < 0.5, **longest},
        gradient_factor=GRADIENT_FACTOR,
        atol=atol(tensors["value"]),
        gradient_atol={"attn_bias": atol(tensors["value"], max(700, terms))},
    )


def test_varlen_of_equal_lengths_is_the_dense_form() -> None:
    tensors = qkv(3, 70, 80, 4, 2, 16, 16, torch.float32)
    out, lse = cuda_ext.flash_attention(**tensors, causal=True, return_lse=True)
    flat = {name: t.flatten(0, 1) for name, t in tensors.items()}
    out_v, lse_v = cuda_ext.flash_attention_varlen(
        **flat, cu_seqlens_q=cu_seqlens([70] * 3), cu_seqlens_k=cu_seqlens([80] * 3), causal=True, return_lse=True
    )
    assert torch.equal(out_v.view_as(out), out) and torch.equal(lse_v.view(4, 3, 70).transpose(0, 1), lse)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_varlen_without_rows(lengths: list[int]) -> None:
    out, lse = cuda_ext.flash_attention_varlen(**packed(lengths, lengths, 2, 1, 8, 4, torch.float32), return_lse=True)
    assert out.shape == (0, 2, 4) and lse.shape == (2, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [(130, 3), (0, 200), (20, 0)])
def test_varlen_rows_after_the_last_sequence(dtype: torch.dtype, rows: tuple[int, int]) -> None:
    """More rows of queries, or of keys, than cu_seqlens counts; NaN in them reaches nothing."""
    tensors = packed([5, 0, 70, *rows[:1]], [9, 3, 100, *rows[1:]], 4, 2, 24, 40, dtype)
    tensors["sinks"] = torch.randn(4, dtype=torch.float64).to(dtype).requires_grad_()
    tensors |= {name: tensors[name][:-1] for name in ("cu_seqlens_q", "cu_seqlens_k")}
    with torch.no_grad():
        tensors["query"][75:] = tensors["key"][112:] = tensors["value"][112:] = math.nan
    assert_op_matches_reference(
        cuda_ext.flash_attention_varlen,
        reference_attention_varlen,
        tensors,
        {"return_lse": True, "causal": True},
        gradient_factor=GRADIENT_FACTOR,
        atol=atol(tensors["value"]),
    )


# Dropout


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (33, 9), "softcap": 4.0}], ids=str)
@pytest.mark.parametrize("bias_shape", [None, (2, 4, 75, 130), (1, 1, 75, 1)], ids=str)
def test_dropout_is_the_documented_philox_mask(
    dtype: torch.dtype, options: dict[str, Any], bias_shape: tuple[int, ...] | None
) -> None:
    tensors = qkv(2, 75, 130, 4, 2, 16, 16, dtype)
    if bias_shape is not None:
        tensors["attn_bias"] = bias_of(bias_shape, dtype)
    torch.manual_seed(7)
    left, right = options.get("window", (None, None))
    flat = {name: value for name, value in options.items() if name != "window"} | {
        "window_left": left,
        "window_right": right,
    }
    seed, offset = torch.ops.cuda_ext.flash_attention_forward(**tensors, dropout_p=0.3, **flat)[2].tolist()

    def op(**arguments: Any) -> Any:
        torch.manual_seed(7)
        return cuda_ext.flash_attention(**arguments)

    assert_op_matches_reference(
        op,
        reference_attention,
        tensors,
        {"return_lse": True, "dropout_p": 0.3, **options},
        reference_options={"seed": seed % 2**64, "offset": offset},
        gradient_factor=GRADIENT_FACTOR,
        atol=atol(tensors["value"]),
    )


def test_dropout_in_packed_sequences() -> None:
    tensors = packed([40, 0, 70], [50, 5, 33], 2, 2, 16, 16, torch.float32)
    torch.manual_seed(8)
    seed, offset = torch.ops.cuda_ext.flash_attention_forward(**tensors, dropout_p=0.4)[2].tolist()

    def op(**arguments: Any) -> Any:
        torch.manual_seed(8)
        return cuda_ext.flash_attention_varlen(**arguments)

    assert_op_matches_reference(
        op,
        reference_attention_varlen,
        tensors,
        {"dropout_p": 0.4},
        reference_options={"seed": seed % 2**64, "offset": offset},
        gradient_factor=GRADIENT_FACTOR,
        atol=atol(tensors["value"]),
    )


def test_dropout_follows_the_seed_and_keeps_the_mean() -> None:
    query, key = torch.zeros(2, 64, 4, 8), torch.zeros(2, 512, 4, 8)
    value = torch.ones(2, 512, 4, 1)
    torch.manual_seed(1)
    first = cuda_ext.flash_attention(query, key, value, dropout_p=0.25)
    second = cuda_ext.flash_attention(query, key, value, dropout_p=0.25)
    torch.manual_seed(1)
    again = cuda_ext.flash_attention(query, key, value, dropout_p=0.25)
    assert torch.equal(first, again) and not torch.equal(first, second)
    # 262144 Bernoulli draws: the mean is within 6 standard deviations, sqrt(p / (1 - p) / n) each.
    assert abs(first.mean().item() - 1) < 6 * math.sqrt(0.25 / 0.75 / 262144)


# Determinism, threads, instruction sets, memory


@pytest.mark.parametrize("heads", [1, 4])
def test_runs_repeat_bit_for_bit(heads: int) -> None:
    """One head on several threads is the case in which dQ is summed from parts."""
    tensors = qkv(1, 300, 700, heads, 1, 16, 16, torch.float32)

    def run() -> list[Tensor]:
        out = cuda_ext.flash_attention(**tensors, causal=True)
        return [out, *torch.autograd.grad(out, list(tensors.values()), torch.ones_like(out))]

    first = run()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_more_threads_than_heads(dtype: torch.dtype) -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(5)
        check(qkv(1, 300, 1100, 2, 1, 17, 16, dtype), window=(600, 30))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.sampled(cases=1)
@pytest.mark.parametrize("isa", ["generic", "avx2", *["avx512", "avx512bf16"] * torch.cpu._is_avx512_bf16_supported()])
def test_instruction_sets(isa: str, run_python: Callable[..., Any]) -> None:
    """Each but the widest, which all other tests run; one that the processor lacks falls back to the widest it has."""
    tests = [
        "test_matches_reference",
        "test_head_dims",
        "test_few_queries",
        "test_bias_of_every_broadcast_shape",
        "test_dropout_in_packed_sequences",
        "test_more_threads_than_heads",
    ]
    files = [*(f"{__file__}::{test}" for test in tests), str(Path(__file__).with_name("test_attention_block_mask.py"))]
    on_cpu = ("-m", "not (simt or ptx or cuda)")
    done = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", *on_cpu, *files, CUDA_EXT_CPU_ISA=isa)
    assert done.returncode == 0, done.stdout


@pytest.mark.sampled
@pytest.mark.parametrize("bias_shape", [None, (8192,), (8192, 1)], ids=str)
def test_memory_is_linear_in_the_sequence(bias_shape: tuple[int, ...] | None, run_python: Callable[..., Any]) -> None:
    """At S = 8192 one S x S float32 matrix is 256 MiB; forward and backward may grow the process by a tenth of that."""
    code = f"""
import resource, torch, cuda_ext
q, k, v = (torch.randn(1, 8192, 1, 16).requires_grad_() for _ in range(3))
bias = None if {bias_shape} is None else torch.randn({bias_shape}, requires_grad=True)
grad = torch.randn(1, 8192, 1, 16)
cuda_ext.flash_attention(q[:, :64], k[:, :64], v[:, :64]).backward(grad[:, :64])  # torch imports modules at the first
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
cuda_ext.flash_attention(q, k, v, attn_bias=bias).backward(grad)
print("grown", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stdout
    assert int(done.stdout.split("grown")[1]) < 25 * 1024


lengths = st.integers(1, 150)


@pytest.mark.sampled
@settings(max_examples=60)
@given(
    batch=st.integers(0, 2),
    sq=lengths,
    sk=lengths,
    group=st.integers(1, 3),
    heads_kv=st.integers(1, 2),
    dim=st.integers(1, 40),
    dim_v=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    causal=st.booleans(),
    left=st.none() | st.integers(0, 200),
    softcap=st.sampled_from([0.0, 1.5]),
    scale=st.none() | st.floats(0.01, 1.0),
    sinks=st.booleans(),
    alibi=st.booleans(),
    bias=st.sampled_from([None, "dtype of query", "accumulation dtype", "booleans"]),
    wide=st.tuples(*[st.booleans()] * 4),
    layout=st.sampled_from(sorted(LAYOUTS)),
    seed=st.integers(0, 2**31),
)
def test_anything_matches_reference(
    batch: int,
    sq: int,
    sk: int,
    group: int,
    heads_kv: int,
    dim: int,
    dim_v: int,
    dtype: torch.dtype,
    causal: bool,
    left: int | None,
    softcap: float,
    scale: float | None,
    sinks: bool,
    alibi: bool,
    bias: str | None,
    wide: tuple[bool, ...],
    layout: str,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    tensors = qkv(batch, sq, sk, group * heads_kv, heads_kv, dim, dim_v, dtype)
    arranged = {name: LAYOUTS[layout](t.detach()).requires_grad_() for name, t in tensors.items()} if batch else tensors
    if sinks:
        arranged["sinks"] = torch.randn(group * heads_kv, dtype=torch.float64).to(dtype).requires_grad_()
    if alibi:
        arranged["alibi_slopes"] = torch.rand(group * heads_kv)
    if bias is not None:
        accumulation = torch.float64 if dtype == torch.float64 else torch.float32
        bias_dtype = {"dtype of query": dtype, "accumulation dtype": accumulation, "booleans": torch.bool}[bias]
        arranged |= named(bias_of(broadcast((batch, group * heads_kv, sq, sk), wide), bias_dtype, hidden=0.2))
    check(arranged, causal=causal, window=(left, None), softcap=softcap, scale=scale)
