"""Attention under torch.func, forward mode and second derivatives, against the reference under the same transform."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap

import cuda_ext
from cuda_ext import testing

# Rows without a key, a soft cap, both biases and shared heads take part.
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (1, 0), "softcap": 2.0},
    "wide": {"window": (9, 9), "scale": 0.3},
}


def inputs(seqlen_q: int = 3, seqlen_k: int = 2, grad: bool = True) -> list[Tensor]:
    """Query, key, value of shapes (B, Sq, H, D), (B, Sk, Hk, D), (B, Sk, Hk, Dv)."""
    shapes = ((1, seqlen_q, 2, 2), (1, seqlen_k, 1, 2), (1, seqlen_k, 1, 3))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=grad) for shape in shapes]


def finite(results: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Without the lse of rows that see no key, whose finite difference is NaN."""
    return tuple(result.masked_fill(result == -torch.inf, 0) for result in results)


@pytest.mark.sampled
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_second_derivatives_and_forward_mode(options: dict[str, Any]) -> None:
    call = lambda *t: finite(cuda_ext.flash_attention(*t, **options, return_lse=True))  # noqa: E731
    assert gradcheck(call, inputs(), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(call, inputs(), check_fwd_over_rev=True)


@pytest.mark.parametrize("shape", [(2, 3, 2), (1, 1, 2), (3, 1)])
def test_second_derivatives_of_bias_sinks_and_slopes(shape: tuple[int, ...]) -> None:
    bias, sinks = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in (shape, (2,)))
    slopes = torch.rand(1, 2)

    def call(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, sinks: Tensor) -> Any:
        return cuda_ext.flash_attention(
            query, key, value, attn_bias=bias, sinks=sinks, alibi_slopes=slopes, window=(2, 1), return_lse=True
        )

    assert gradgradcheck(call, (*inputs(), bias, sinks), check_fwd_over_rev=True)


@pytest.mark.sampled
@pytest.mark.parametrize("shape", [(3, 2, 3, 4), (1, 1, 4), (3, 1, 1, 4)], ids=str)
def test_second_derivatives_of_a_packed_bias(shape: tuple[int, ...]) -> None:
    lengths_q, lengths_k = torch.tensor([0, 2, 2, 5]).int(), torch.tensor([0, 4, 5, 5]).int()
    shapes = ((5, 2, 3), (5, 1, 3), (5, 1, 2), shape)
    tensors = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    mask = torch.rand(shape[-1]) < 0.7

    def call(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Any:
        return cuda_ext.flash_attention_varlen(
            query, key, value, lengths_q, lengths_k, attn_bias=bias, attn_mask=mask, softcap=2.0
        )

    assert gradcheck(call, tensors, check_forward_ad=True)
    assert gradgradcheck(call, tensors, check_fwd_over_rev=True)


def test_second_derivatives_where_a_mask_hides() -> None:
    mask = torch.tensor([[True, False], [False, False], [True, True]])
    assert gradgradcheck(lambda *t: cuda_ext.flash_attention(*t, attn_mask=mask), inputs(), check_fwd_over_rev=True)
    hidden = torch.zeros(3, 2, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    assert gradgradcheck(lambda *t: cuda_ext.flash_attention(*t, attn_bias=hidden), inputs(), check_fwd_over_rev=True)


@pytest.mark.sampled
def test_second_derivatives_of_packed_sequences() -> None:
    cu_q, cu_k = torch.tensor([0, 2, 2, 3], dtype=torch.int32), torch.tensor([0, 1, 3, 3], dtype=torch.int32)
    tensors = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 2, 2), (3, 1, 2), (3, 1, 3))]
    slopes = torch.rand(3, 2)
    tensors = [F.pad(t.detach(), (0, 0, 0, 0, 0, 1)).requires_grad_() for t in tensors]  # a row after the last sequence
    call = lambda *t: finite(  # noqa: E731
        cuda_ext.flash_attention_varlen(*t, cu_q, cu_k, causal=True, alibi_slopes=slopes, return_lse=True)
    )
    assert gradcheck(call, tensors, check_forward_ad=True)
    assert gradgradcheck(call, tensors, check_fwd_over_rev=True)


@pytest.mark.parametrize("packed", [False, True])
def test_second_derivatives_with_dropout_see_the_mask_of_forward(packed: bool) -> None:
    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        torch.manual_seed(3)
        if not packed:
            return cuda_ext.flash_attention(query, key, value, dropout_p=0.4)
        cu_seqlens = torch.tensor([0, 1, 6], dtype=torch.int32)
        query, key, value = (t.squeeze(0) for t in (query, key, value))
        return cuda_ext.flash_attention_varlen(query, key, value, cu_seqlens, cu_seqlens, dropout_p=0.4)

    assert gradgradcheck(call, inputs(6, 6))


TRANSFORMS: dict[str, Callable[[Callable[..., Tensor], Tensor], Any]] = {
    "grad": lambda f, x: grad(lambda x: f(x).sin().sum())(x),
    "vjp": lambda f, x: vjp(f, x)[1](f(x).cos())[0],
    "jvp": lambda f, x: jvp(f, (x,), (x.sin(),)),
    "jacrev": lambda f, x: jacrev(f)(x),
    "jacfwd": lambda f, x: jacfwd(f)(x),
    "jvp of grad": lambda f, x: jvp(grad(lambda x: f(x).sin().sum()), (x,), (x.sin(),)),
    "grad of grad": lambda f, x: grad(lambda x: grad(lambda x: f(x).sin().sum())(x).sin().sum())(x),
    "grad of vmap": lambda f, x: grad(lambda x: vmap(f)(torch.stack([x, x.cos()])).sin().sum())(x),
    "vmap of grad": lambda f, x: vmap(grad(lambda x: f(x).sin().sum()))(torch.stack([x, x.cos()])),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(transform: str) -> None:
    values = inputs(3, 4, grad=False)
    options = {"causal": True, "softcap": 2.0, "sinks": torch.randn(2, dtype=torch.float64)}
    for n, value in enumerate(values):

        def of_one(function: Callable[..., Any], n: int = n) -> Callable[[Tensor], Tensor]:
            return lambda x: function(*values[:n], x, *values[n + 1 :], **options)

        actual = TRANSFORMS[transform](of_one(cuda_ext.flash_attention), value)
        torch.testing.assert_close(actual, TRANSFORMS[transform](of_one(testing.reference_attention), value))


@pytest.mark.every_backend
def test_on_every_backend() -> None:
    """The products in them run on the backend."""
    tensors = [torch.randn(1, s, h, 8) for s, h in ((5, 2), (6, 1), (6, 1))]

    def check(run: Callable[..., Any]) -> None:
        actual = run(cuda_ext.flash_attention, *(t.bfloat16() for t in tensors))
        expected = run(testing.reference_attention, *(t.bfloat16().double() for t in tensors))
        torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.05, check_dtype=False)

    check(lambda f, q, k, v: grad(lambda q: f(q, k, v, causal=True).sin().sum())(q))
    check(lambda f, q, k, v: vmap(grad(lambda q: f(q, k, v).sin().sum()))(torch.stack([q, -q])))
    check(lambda f, q, k, v: jvp(lambda q: f(q, k, v), (q,), (q,)))

    def penalty(f: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q.clone().requires_grad_()
        (first,) = torch.autograd.grad(f(q, k, v).sin().sum(), q, create_graph=True)
        return torch.autograd.grad(first.square().sum(), q)[0]

    check(penalty)


def test_dual_tensors() -> None:
    duals = lambda: [forward_ad.make_dual(t, t.cos()) for t in values]  # noqa: E731
    values = inputs(3, 4, grad=False)
    with forward_ad.dual_level():
        actual, expected = (
            f(*duals(), causal=True, return_lse=True) for f in (cuda_ext.flash_attention, testing.reference_attention)
        )
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(forward_ad.unpack_dual(a), forward_ad.unpack_dual(e))


def test_slopes_have_no_derivative() -> None:
    values = inputs(3, 4, grad=False)
    slopes = torch.rand(2)
    with pytest.raises(RuntimeError, match="expected alibi_slopes that need no gradient"):
        jvp(lambda s: cuda_ext.flash_attention(*values, alibi_slopes=s), (slopes,), (slopes,))


def test_dropout_under_transforms_follows_the_randomness_of_vmap() -> None:
    query, key, value = (torch.randn(1, 32, 2, 4) for _ in range(3))
    loss = lambda q: cuda_ext.flash_attention(q, key, value, dropout_p=0.5).sum()  # noqa: E731
    queries = torch.stack([query, query])
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(grad(loss))(queries)
    same = vmap(grad(loss), randomness="same")(queries)
    assert torch.equal(same[0], same[1]) and same.any()
    different = vmap(grad(loss), randomness="different")(queries)
    assert not torch.equal(different[0], different[1])


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_lengths_that_are_made_inside_of_a_transform(dropout_p: float) -> None:
    query, key, value = (torch.randn(9, 2, 4, dtype=torch.float64) for _ in range(3))
    numbers = [0, 4, 9]
    lengths = torch.tensor(numbers, dtype=torch.int32)

    def loss(query: Tensor, lengths: Tensor | None = None) -> Tensor:
        if lengths is None:
            lengths = torch.tensor(numbers, dtype=torch.int32)
        torch.manual_seed(5)
        options = {"dropout_p": dropout_p, "causal": True}
        return cuda_ext.flash_attention_varlen(query, key, value, lengths, lengths, **options).square().sum()

    for transform in (grad, jacrev, partial(jacfwd, randomness="same"), lambda f: jacrev(grad(f))):
        torch.testing.assert_close(transform(loss)(query), transform(loss)(query, lengths))
    with pytest.raises(RuntimeError, match="vmap"):
        vmap(grad(loss), in_dims=(None, 0), randomness="same")(query, lengths.expand(2, 3))


@pytest.mark.parametrize("derivative", [False, True])
@pytest.mark.parametrize("op", ["flash_attention", "flash_attention_varlen"])
def test_dropout_where_nothing_is_mapped_follows_the_randomness_of_vmap(op: str, derivative: bool) -> None:
    query, key, value = (torch.randn(1, 32, 2, 4) for _ in range(3))

    def attend(query: Tensor) -> Tensor:
        if op == "flash_attention":
            return cuda_ext.flash_attention(query, key, value, dropout_p=0.5)
        lengths = torch.tensor([0, 32], dtype=torch.int32)
        return cuda_ext.flash_attention_varlen(query[0], key[0], value[0], lengths, lengths, dropout_p=0.5)

    def mapped(x: Tensor) -> Tensor:
        return x + (grad(lambda q: attend(q).square().sum())(query) if derivative else attend(query)).sum()

    zeros = torch.zeros(2)
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(mapped)(zeros)
    same = vmap(mapped, randomness="same")(zeros)
    assert same[0] == same[1] != 0
    different = vmap(mapped, randomness="different")(zeros)
    assert different[0] != different[1]
    state = torch.get_rng_state()
    alone = attend(query)
    torch.set_rng_state(state)
    assert torch.equal(vmap(lambda x: x + attend(query), randomness="same")(zeros)[0], alone)


def test_name_of_the_node() -> None:
    assert cuda_ext.flash_attention(*inputs()).grad_fn.name() == "cuda_ext::FlashAttentionBackward"
