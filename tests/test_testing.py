"""The references against PyTorch's own functions in float64, and the tolerance rule against cases it has to tell
apart."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck

from cuda_ext import testing
from cuda_ext._activations import ACTIVATIONS
from cuda_ext.testing import (
    assert_close_to_reference,
    assert_op_matches_reference,
    dropout_mask,
    philox_uint32,
    reference_attention,
    reference_attention_varlen,
    reference_gated_linear,
    reference_gated_mlp,
    reference_gemm,
    reference_linear,
    reference_mlp,
)

FORMULAS = {
    None: lambda x: x,
    "relu": F.relu,
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "relu2": lambda x: torch.where(x > 0, x * x, 0),
}


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def assert_same_with_gradients(actual: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    """Equal up to float64 rounding (different orders of summation), output and gradients."""
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(expected)
    gradients = (torch.autograd.grad(tensor, inputs, grad, retain_graph=True) for tensor in (actual, expected))
    for a, e in zip(*gradients, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-11, atol=1e-12)


# GEMM family


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gemm(activation: str | None) -> None:
    a, b, c, bias = rand(2, 1, 3, 5), rand(4, 5, 7), rand(4, 3, 7), rand(7)
    actual = reference_gemm(a, b, c, bias=bias, activation=activation, alpha=0.5, beta=-2.0)
    expected = FORMULAS[activation](0.5 * torch.einsum("xymk,ykn->xymn", a.expand(2, 4, 3, 5), b) - 2.0 * c + bias)
    assert_same_with_gradients(actual, expected, [a, b, c, bias])


def test_gemm_out_dtype() -> None:
    a, b = torch.tensor([[1.0, 2.0]]).half(), torch.tensor([[3.0], [4.0]]).half()
    assert reference_gemm(a, b).dtype == torch.float16
    out = reference_gemm(a, b, out_dtype=torch.float32)
    assert out.dtype == torch.float32
    assert out.item() == 11.0


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_linear_family(activation: str | None) -> None:
    act = FORMULAS[activation]
    x, residual = rand(2, 3, 5), rand(2, 3, 4)
    w, b = rand(4, 5), rand(4)
    assert_same_with_gradients(
        reference_linear(x, w, b, activation=activation, residual=residual),
        act(x @ w.T + b) + residual,
        [x, w, b, residual],
    )
    gate, up, gate_bias, up_bias = rand(4, 5), rand(4, 5), rand(4), rand(4)
    hidden = act(x @ gate.T + gate_bias) * (x @ up.T + up_bias)
    packed, packed_bias = torch.cat([gate, up]), torch.cat([gate_bias, up_bias])
    inputs = [x, gate, up, gate_bias, up_bias]
    assert_same_with_gradients(reference_gated_linear(x, packed, packed_bias, activation=activation), hidden, inputs)
    w2, b2 = rand(6, 4), rand(6)
    assert_same_with_gradients(
        reference_gated_mlp(x, packed, w2, packed_bias, b2, activation=activation),
        hidden @ w2.T + b2,
        [*inputs, w2, b2],
    )
    assert_same_with_gradients(
        reference_mlp(x, w, w2, b, b2, activation=activation), act(x @ w.T + b) @ w2.T + b2, [x, w, b, w2, b2]
    )


def test_family_without_bias() -> None:
    x, w, w2, gated = rand(3, 5), rand(4, 5), rand(2, 4), rand(8, 5)
    assert_same_with_gradients(reference_linear(x, w), x @ w.T, [x, w])
    assert_same_with_gradients(reference_mlp(x, w, w2), F.gelu(x @ w.T) @ w2.T, [x, w, w2])
    assert_same_with_gradients(
        reference_gated_linear(x, gated), F.silu(x @ gated[:4].T) * (x @ gated[4:].T), [x, gated]
    )
    assert_same_with_gradients(
        reference_gated_mlp(x, gated, w2), (F.silu(x @ gated[:4].T) * (x @ gated[4:].T)) @ w2.T, [x, gated, w2]
    )


# attention


def sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, scale: float | None = None) -> Tensor:
    out = F.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask=mask, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2)


def brute_force(query: Tensor, key: Tensor, value: Tensor, logit, visible, sink=None) -> tuple[Tensor, Tensor]:
    """Attention of one batch entry and one head by scalar loops: (Sq, D), (Sk, D), (Sk, Dv) -> (Sq, Dv), (Sq,)."""
    out, lse = [], []
    for i in range(len(query)):
        columns = [j for j in range(len(key)) if visible(i, j)]
        weights = [torch.exp(logit(i, j, query[i] @ key[j])) for j in columns]
        total = sum(weights) + (torch.exp(sink) if sink is not None else 0.0)
        out.append(
            sum((w / total * value[j] for w, j in zip(weights, columns, strict=True)), torch.zeros_like(value[0]))
        )
        lse.append(torch.log(torch.as_tensor(total, dtype=query.dtype)))
    return torch.stack(out), torch.stack(lse)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 2), (3, 1)])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (5, 5), (3, 7)])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_matches_sdpa(heads: int, kv_heads: int, seqlen_q: int, seqlen_k: int, causal: bool) -> None:
    q, k, v = rand(2, seqlen_q, heads, 4), rand(2, seqlen_k, kv_heads, 4), rand(2, seqlen_k, kv_heads, 3)
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).tril(seqlen_k - seqlen_q) if causal else None
    assert_same_with_gradients(reference_attention(q, k, v, causal=causal), sdpa(q, k, v, mask), [q, k, v])
    assert_same_with_gradients(
        reference_attention(q, k, v, causal=causal, scale=0.3), sdpa(q, k, v, mask, 0.3), [q, k, v]
    )


@pytest.mark.parametrize("window", [(2, 1), (None, 0), (1, None), (0, 0), (None, None)])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(4, 6), (6, 4)])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_with_everything_matches_scalar_loops(window, seqlen_q: int, seqlen_k: int, causal: bool) -> None:
    heads, softcap, scale = 4, 1.5, 0.7
    q, k, v = rand(2, seqlen_q, heads, 3), rand(2, seqlen_k, 2, 3), rand(2, seqlen_k, 2, 5)
    slopes, sinks = rand(2, heads), rand(heads)
    inputs = [q, k, v, slopes, sinks]
    out, lse = reference_attention(
        q,
        k,
        v,
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        alibi_slopes=slopes,
        sinks=sinks,
        return_lse=True,
    )
    shift = seqlen_k - seqlen_q

    def visible(i: int, j: int) -> bool:
        left, right = window
        distance = j - (i + shift)
        return (
            not (causal and distance > 0)
            and (left is None or -distance <= left)
            and (right is None or distance <= right)
        )

    def logit(b: int, h: int) -> Callable[[int, int, Tensor], Tensor]:
        return lambda i, j, dot: softcap * torch.tanh(scale * dot / softcap) - slopes[b, h] * abs(i + shift - j)

    per_head = [
        brute_force(q[b, :, h], k[b, :, h // 2], v[b, :, h // 2], logit(b, h), visible, sinks[h])
        for b in range(2)
        for h in range(heads)
    ]
    expected = torch.stack([o for o, _ in per_head]).view(2, heads, seqlen_q, 5).transpose(1, 2)
    assert_same_with_gradients(out, expected, inputs)
    torch.testing.assert_close(
        lse, torch.stack([m for _, m in per_head]).view(2, heads, seqlen_q), rtol=1e-12, atol=1e-12
    )


def test_slopes_per_head_are_shared_by_the_batch() -> None:
    q, k, v, slopes = rand(2, 3, 4, 5), rand(2, 4, 4, 5), rand(2, 4, 4, 5), rand(4)
    torch.testing.assert_close(
        reference_attention(q, k, v, alibi_slopes=slopes),
        reference_attention(q, k, v, alibi_slopes=slopes.expand(2, 4)),
    )


@pytest.mark.parametrize("with_sink", [False, True])
def test_rows_without_a_key_are_zero_and_what_their_sink_is(with_sink: bool) -> None:
    q, k, v = rand(1, 5, 2, 3), rand(1, 3, 2, 3), rand(1, 3, 2, 3)
    sinks = rand(2)
    inputs = [q, k, v, sinks] if with_sink else [q, k, v]
    out, lse = reference_attention(q, k, v, causal=True, sinks=sinks if with_sink else None, return_lse=True)
    assert (out[:, :2] == 0).all()
    assert torch.equal(lse[0, :, :2], sinks[:, None].expand(2, 2) if with_sink else torch.full((2, 2), -math.inf))
    assert lse[..., 2:].isfinite().all()
    empty_rows = torch.autograd.grad(
        [out[:, :2], lse[..., :2]], inputs, [torch.ones(1, 2, 2, 3), torch.ones(1, 2, 2)], retain_graph=True
    )
    assert all((g == 0).all() for g in empty_rows[:3])
    assert all((g == 2).all() for g in empty_rows[3:])
    every_row = torch.autograd.grad([out, lse], inputs, [torch.ones_like(out), torch.ones_like(lse)])
    assert all(g.isfinite().all() and (g != 0).any() for g in every_row)
    assert (every_row[0][:, :2] == 0).all()


def test_sizes_of_zero() -> None:
    q, k, v = rand(2, 3, 2, 4), rand(2, 0, 2, 4), rand(2, 0, 2, 5)
    sinks = rand(2)
    out, lse = reference_attention(q, k, v, sinks=sinks, return_lse=True)
    assert out.shape == (2, 3, 2, 5)
    assert (out == 0).all()
    assert torch.equal(lse, sinks[:, None].expand_as(lse))
    value = rand(2, 4, 2, 5)
    mean = value.mean(1, keepdim=True).expand(2, 3, 2, 5)
    torch.testing.assert_close(reference_attention(q[..., :0], rand(2, 4, 2, 0), value), mean)
    assert reference_attention(q[:, :0], q, q).shape == (2, 0, 2, 4)
    assert reference_attention(q[:0], q[:0], q[:0]).shape == (0, 3, 2, 4)
    assert reference_attention(q[:, :, :0], q[:, :, :0], q[:, :, :0]).shape == (2, 3, 0, 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_lse_dtype(dtype: torch.dtype) -> None:
    q = torch.randn(1, 3, 2, 4).to(dtype)
    out, lse = reference_attention(q, q, q, return_lse=True)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_attention_gradcheck_through_out_and_lse() -> None:
    q, k, v, sinks = rand(1, 4, 2, 3), rand(1, 5, 1, 3), rand(1, 5, 1, 2), rand(2)
    assert gradcheck(
        lambda *t: reference_attention(
            *t[:3], sinks=t[3], causal=True, softcap=2.0, dropout_p=0.3, seed=5, return_lse=True
        ),
        (q, k, v, sinks),
    )


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_varlen_equals_dense_of_each_sequence(dropout_p: float) -> None:
    lengths_q, lengths_k, heads = [3, 0, 5, 1], [4, 2, 2, 0], 2
    q, k, v = rand(sum(lengths_q), heads, 4), rand(sum(lengths_k), 1, 4), rand(sum(lengths_k), 1, 3)
    slopes, sinks = rand(4, heads), rand(heads)
    cu_q, cu_k = (
        torch.tensor([0, *torch.tensor(n).cumsum(0).tolist()], dtype=torch.int32) for n in (lengths_q, lengths_k)
    )
    options = {"causal": True, "window": (2, None), "sinks": sinks, "dropout_p": dropout_p, "return_lse": True}
    out, lse = reference_attention_varlen(q, k, v, cu_q, cu_k, alibi_slopes=slopes, seed=3, offset=9, **options)
    assert out.shape == (9, heads, 3)
    assert lse.shape == (heads, 9)
    if dropout_p == 0.0:
        for n in range(4):
            rows, keys = slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n + 1])
            dense, dense_lse = reference_attention(
                q[None, rows], k[None, keys], v[None, keys], alibi_slopes=slopes[n], **options
            )
            torch.testing.assert_close(out[rows], dense[0], rtol=0, atol=0)
            torch.testing.assert_close(lse[:, rows], dense_lse[0], rtol=0, atol=0)
        assert reference_attention_varlen(q, k, v, cu_q, cu_k).shape == out.shape
    else:
        # third sequence: 5 queries from row 3 of the batch, 2 keys, rows 4 (longest sequence) elements apart
        row = torch.arange(heads)[:, None] * 9 + torch.arange(3, 8)
        keep = torch.stack([philox_uint32(3, 9, row * 4 + j) >= int(dropout_p * 2**32) for j in range(2)], dim=-1)
        scores = torch.einsum("qhd,kd->hqk", q[3:8], k[6:8, 0]) / 2.0
        i, j = torch.arange(5)[:, None] - 3, torch.arange(2)
        scores = (scores - slopes[2, :, None, None] * (i - j).abs()).masked_fill((j > i) | (j < i - 2), -math.inf)
        weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + sinks.exp()[:, None, None])
        expected = torch.einsum("hqk,kd->qhd", weights * keep / (1 - dropout_p), v[6:8, 0])
        torch.testing.assert_close(out[6:8], expected[3:], rtol=1e-12, atol=1e-12)


def test_varlen_of_nothing() -> None:
    q, cu = torch.zeros(0, 2, 4), torch.zeros(1, dtype=torch.int32)
    out, lse = reference_attention_varlen(q, q, q, cu, cu, return_lse=True)
    assert out.shape == (0, 2, 4)
    assert lse.shape == (2, 0)


# random numbers


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_known_answers(counter: str, key: str, expected: str) -> None:
    """The vectors that Random123 publishes for philox4x32-10."""
    words = tuple(torch.tensor([int(word, 16)]) for word in counter.split())
    low, high = (int(word, 16) for word in key.split())
    assert [f"{int(word):08x}" for word in testing.philox.philox4x32_10(words, (low, high))] == expected.split()


def test_philox_layout_of_key_and_counter() -> None:
    # elements are int64, so the high word of element >> 2 stays below 2**29
    element, offset, seed = 0x05A308D3_243F6A88 << 2, 0x03707344_13198A2E, 0x299F31D0_A4093822
    counter = [0x243F6A88, 0x05A308D3, 0x13198A2E, 0x03707344]
    words = testing.philox.philox4x32_10(tuple(torch.tensor([c]) for c in counter), (0xA4093822, 0x299F31D0))
    actual = philox_uint32(seed, offset, torch.tensor([[element, element + 1], [element + 2, element + 3]]))
    assert actual.shape == (2, 2)
    assert actual.flatten().tolist() == [int(word) for word in words]
    first = philox_uint32(0, 0, torch.arange(4))
    assert [f"{word:08x}" for word in first.tolist()] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]


def test_philox_multiplies_like_python() -> None:
    x = torch.cat([torch.randint(0, 2**32, (1000,)), torch.tensor([0, 1, 2**32 - 1])])
    for factor in (0xD2511F53, 0xCD9E8D57, 2**32 - 1):
        high, low = testing.philox._multiply_32x32(factor, x)
        assert [(h << 32) | w for h, w in zip(high.tolist(), low.tolist(), strict=True)] == [
            factor * value for value in x.tolist()
        ]


def test_dropout_mask_elements_and_rate() -> None:
    row = torch.arange(6).view(2, 3)
    mask = dropout_mask(0.25, 7, 11, row, 5)
    assert mask.shape == (2, 3, 5)
    assert mask.dtype == torch.bool
    for r in range(6):
        for j in range(5):
            word = int(philox_uint32(7, 11, torch.tensor(r * 8 + j)))
            assert bool(mask.view(6, 5)[r, j]) == (word >= 2**30)
    assert dropout_mask(0.0, 7, 11, row, 5).all()
    assert torch.equal(dropout_mask(0.25, 7, 11, row, 3, max_num_keys=5), mask[..., :3])
    many = dropout_mask(0.25, 1, 0, torch.arange(1000), 1000)
    assert abs(many.double().mean() - 0.75) < 5 * math.sqrt(0.25 * 0.75 / 1e6)


def test_attention_dropout_scales_what_it_keeps() -> None:
    q, k = rand(1, 6, 2, 4), rand(1, 5, 2, 4)
    value = (
        torch.eye(5, dtype=torch.float64).expand(2, 5, 5).transpose(0, 1)[None]
    )  # attention to the identity is the probabilities
    plain, plain_lse = reference_attention(q, k, value, return_lse=True)
    dropped, lse = reference_attention(q, k, value, dropout_p=0.5, seed=1, offset=2, return_lse=True)
    keep = dropout_mask(0.5, 1, 2, torch.arange(12).view(1, 2, 6), 5).transpose(1, 2)
    assert keep.any()
    assert not keep.all()
    torch.testing.assert_close(dropped, plain * keep * 2.0)
    torch.testing.assert_close(lse, plain_lse, rtol=0, atol=0)


# the tolerance rule


def test_rule_accepts_and_refuses_at_its_bound() -> None:
    reference = torch.zeros(2, 3, dtype=torch.float64)
    low = torch.full((2, 3), 1e-3)
    actual = torch.zeros(2, 3)
    actual[1, 2] = 1.9e-3
    assert_close_to_reference(actual, low, reference)
    assert_close_to_reference(actual, low, reference, factor=1.0, atol=1e-3)
    with pytest.raises(
        AssertionError, match=r"gradient of b: largest error 1\.900e-03 at \(1, 2\) .* exceeds 1 x 1\.000e-03"
    ):
        assert_close_to_reference(actual, low, reference, factor=1.0, name="gradient of b")


def test_default_atol_is_two_roundings_in_the_storage_dtype() -> None:
    exact = torch.linspace(0.5, 8.0, 50).bfloat16()
    eps = 2.0**-7  # of bfloat16
    for position, error, passes in (
        (49, 8.0 * eps, True),
        (49, 16.0 * eps, False),
        (0, 0.0625, True),
        (0, 0.125, False),
    ):
        actual = exact.clone()
        actual[position] += error
        if passes:
            assert_close_to_reference(actual, exact, exact.double())
        else:
            with pytest.raises(AssertionError, match=rf"at \({position},\)"):
                assert_close_to_reference(actual, exact, exact.double())


def test_default_atol_of_float64() -> None:
    exact = torch.tensor([100.0, 1.0], dtype=torch.float64)
    assert_close_to_reference(exact + 0.9e-10, exact, exact)
    with pytest.raises(
        AssertionError, match=r"exceeds 2 x 0\.000e\+00 \(plain PyTorch in torch\.float64\) \+ 1\.000e-10"
    ):
        assert_close_to_reference(exact + 1.1e-10, exact, exact)


def test_rule_handles_special_values() -> None:
    special = torch.tensor([math.nan, math.inf, -math.inf, 70000.0, 1.0], dtype=torch.float64)
    half = special.half()
    assert half[3] == math.inf
    assert_close_to_reference(half, half, special)
    assert_close_to_reference(
        torch.ones(2), torch.tensor([math.nan, 1.0]), torch.ones(2)
    )  # plain PyTorch may overflow, the op may not
    for position, wrong in enumerate([1.0, -math.inf, math.nan, math.nan, math.nan]):
        actual = half.clone()
        actual[position] = wrong
        with pytest.raises(AssertionError, match=rf"at \({position},\)"):
            assert_close_to_reference(actual, half, special)
    with pytest.raises(AssertionError, match="largest error"):
        assert_close_to_reference(
            torch.tensor([1.1, math.nan]), torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan])
        )


def test_rule_checks_shapes_and_takes_empty() -> None:
    assert_close_to_reference(torch.zeros(0, 3), torch.zeros(0, 3), torch.zeros(0, 3))
    with pytest.raises(AssertionError, match=r"lse: expected shape \(2,\), got \(3,\)"):
        assert_close_to_reference(torch.zeros(3), torch.zeros(2), torch.zeros(2), name="lse")


def test_op_comparison_finds_wrong_outputs_and_gradients() -> None:
    tensors = {
        "input": torch.randn(5, 7, requires_grad=True),
        "weight": torch.randn(3, 7, requires_grad=True),
        "bias": None,
        "residual": torch.randn(5, 3),
    }
    assert_op_matches_reference(reference_linear, reference_linear, tensors, {"activation": "silu"})
    assert tensors["weight"].grad is None

    def wrong_output(**arguments):
        return reference_linear(**arguments) * 1.001

    class WrongGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * 1.001

    def wrong_gradient(input, weight, **rest):
        return reference_linear(input, WrongGradient.apply(weight), **rest)

    with pytest.raises(AssertionError, match="output 0"):
        assert_op_matches_reference(wrong_output, reference_linear, tensors)
    assert_op_matches_reference(wrong_output, reference_linear, tensors, also=[wrong_output])
    with pytest.raises(AssertionError, match="gradient of weight"):
        assert_op_matches_reference(wrong_gradient, reference_linear, tensors)
    with pytest.raises(AssertionError, match=r"expected torch\.float32, got torch\.float64"):
        assert_op_matches_reference(lambda **a: reference_linear(**a).double(), reference_linear, tensors)


def test_op_comparison_with_tuples_dtypes_and_options_of_the_reference() -> None:
    q, k, v = (torch.randn(1, 4, 2, 8).half().requires_grad_() for _ in range(3))

    def op(query, key, value, **options):
        return reference_attention(query, key, value, seed=4, **options)

    options = {"dropout_p": 0.5, "return_lse": True}
    tensors = {"query": q, "key": k, "value": v}
    assert_op_matches_reference(op, reference_attention, tensors, options, reference_options={"seed": 4})
    with pytest.raises(AssertionError):
        assert_op_matches_reference(op, reference_attention, tensors, options, reference_options={"seed": 5})
    assert_op_matches_reference(
        reference_gemm,
        reference_gemm,
        {"a": torch.randn(3, 4).half(), "b": torch.randn(4, 5).half()},
        {"out_dtype": torch.float32},
    )


def test_importing_the_references_loads_no_library() -> None:
    program = "import sys, cuda_ext.testing; sys.exit('cuda_ext._load' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
