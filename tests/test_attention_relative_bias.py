"""`relative_bias` of flash_attention and flash_attention_varlen: values and gradients against the reference."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from test_attention import DTYPES, GRADIENT_FACTOR, atol, check, gradient_atol, qkv
from test_attention_block_mask import random_features
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import cuda_ext
from cuda_ext import BlockMask
from cuda_ext.testing import assert_op_matches_reference, reference_attention, reference_attention_varlen

pytestmark = pytest.mark.every_backend

LENGTHS = (1, 2, 7, 31, 64, 100, 129, 200)


def random_table(batch: int, heads: int, longest: int, dtype: torch.dtype) -> Tensor:
    """Of any extent, dtype and strides."""
    most = random.choice((0, 1, 5, longest - 1, longest + 10))
    leading = random.choice(((), (1,), (heads,), (batch, heads), (1, heads), (batch, 1)))
    if dtype.itemsize == 2 and random.random() < 0.5:
        dtype = torch.float32
    table = torch.randn(2 * most + 1, *leading, dtype=torch.float64).to(dtype).movedim(0, -1)
    return (table if random.random() < 0.5 else table.contiguous()).detach().requires_grad_()


@pytest.mark.sampled(cases=16)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", range(100))
def test_random_cases(case: int, dtype: torch.dtype) -> None:
    batch, heads_kv, group = random.choice((1, 2)), random.choice((1, 2)), random.choice((1, 3))
    heads, sq, sk = heads_kv * group, random.choice(LENGTHS), random.choice(LENGTHS)
    tensors = qkv(batch, sq, sk, heads, heads_kv, random.choice((8, 24, 64)), random.choice((8, 40)), dtype)
    more, options = random_features(batch, sq, sk, heads, dtype)
    if random.random() < 0.3:
        options["block_mask"] = BlockMask.from_dense(torch.rand(sq, sk) < 0.7)
    check({**tensors, **more, "relative_bias": random_table(batch, heads, max(sq, sk), dtype)}, **options)


@pytest.mark.sampled(cases=6)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", range(25))
def test_random_cases_of_packed_sequences(case: int, dtype: torch.dtype) -> None:
    """Each sequence has a diagonal of its own. The last rows of the tensors belong to no sequence."""
    lengths = {n: torch.tensor([random.choice((0, *LENGTHS)) for _ in range(3)]) for n in ("q", "k")}
    sq, sk = (max(1, int(each.max())) for each in lengths.values())
    rows_q, rows_k = (int(each.sum()) + 4 for each in lengths.values())
    tensors = {name: t.detach()[0].requires_grad_() for name, t in qkv(1, rows_q, rows_k, 2, 1, 16, 24, dtype).items()}
    more, options = random_features(3, sq, sk, 2, dtype)
    more.pop("attn_bias", None)
    tensors |= more | {"relative_bias": random_table(3, 2, max(sq, sk), dtype)}
    if random.random() < 0.5 or "attn_mask" in tensors:
        options |= {"max_seqlen_q": sq, "max_seqlen_k": sk}
    cumulative = {
        f"cu_seqlens_{n}": torch.nn.functional.pad(each.cumsum(0), (1, 0)).int() for n, each in lengths.items()
    }
    assert_op_matches_reference(
        cuda_ext.flash_attention_varlen,
        reference_attention_varlen,
        {**tensors, **cumulative},
        {"return_lse": True, **options},
        gradient_factor=GRADIENT_FACTOR,
        atol=atol(tensors["value"]),
        gradient_atol={
            name: allowed
            for name, allowed in gradient_atol({n: t[None] for n, t in tensors.items() if n != "sinks"}, 700).items()
            if name == "relative_bias"
        },
    )


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_kernel(head_dim: int, dtype: torch.dtype) -> None:
    """The head dims with kernels of their own; keys and queries of several tiles."""
    tensors = qkv(1, 200, 270, 2, 1, head_dim, head_dim, dtype)
    check({**tensors, "relative_bias": torch.randn(2, 301, requires_grad=True)}, causal=random.random() < 0.5)


@pytest.mark.parametrize("deterministic", [False, True])
def test_as_the_same_values_in_a_matrix(deterministic: bool) -> None:
    tensors = qkv(2, 150, 190, 4, 2, 32, 32, torch.float32)
    table = torch.randn(4, 2 * 40 + 1, requires_grad=True)
    distance = torch.arange(190) - (torch.arange(150)[:, None] + 40)
    matrix = table[:, 40 + distance.clamp(-40, 40)]
    grad, results = torch.randn(2, 150, 4, 32), []
    for bias in ({"relative_bias": table}, {"attn_bias": matrix}):
        out = cuda_ext.flash_attention(**tensors, **bias, deterministic=deterministic)
        results.append([out, *torch.autograd.grad(out, [*tensors.values(), table], grad, retain_graph=True)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_gradients_repeat_bit_for_bit() -> None:
    tensors = qkv(2, 200, 260, 4, 2, 64, 64, torch.bfloat16)
    table = torch.randn(4, 601, requires_grad=True)
    grad = torch.randn(2, 200, 4, 64).bfloat16()
    first, second = (
        torch.autograd.grad(
            cuda_ext.flash_attention(**tensors, relative_bias=table, deterministic=True),
            [*tensors.values(), table],
            grad,
        )
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_position_bias_of_t5() -> None:
    """As transformers computes it, whose table learns through ours."""
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    config = t5.T5Config(d_model=32, d_kv=8, num_heads=4, relative_attention_num_buckets=32)
    module = t5.T5Attention(config, has_relative_attention_bias=True)
    weight = module.relative_attention_bias.weight  # (buckets, heads)
    q, k, v = (torch.randn(2, 300, 4, 8) for _ in range(3))
    most = config.relative_attention_max_distance
    buckets = module._relative_position_bucket(torch.arange(-most, most + 1), bidirectional=True)
    grad = torch.randn(2, 300, 4, 8)
    ours = cuda_ext.flash_attention(q, k, v, scale=1.0, relative_bias=weight[buckets].T)
    theirs = reference_attention(q, k, v, scale=1.0, attn_bias=module.compute_bias(300, 300))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    grads = [torch.autograd.grad(out, weight, grad)[0] for out in (ours, theirs)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-3)


# PyTorch's transforms


def small(dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    return *qkv(2, 5, 7, 2, 1, 4, 4, dtype).values(), torch.randn(2, 7, dtype=dtype, requires_grad=True)


def attend(query: Tensor, key: Tensor, value: Tensor, table: Tensor, **options: Any) -> Tensor:
    return cuda_ext.flash_attention(query, key, value, relative_bias=table, **options)


@pytest.mark.cpu_only("composed of other ops")
@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 2.0}], ids=str)
def test_derivatives_of_any_order(options: dict[str, Any]) -> None:
    function = functools.partial(attend, **options)
    assert gradcheck(function, small(), check_forward_ad=True)
    assert gradgradcheck(function, small(), check_fwd_over_rev=True)


@pytest.mark.cpu_only("composed of other ops")
def test_functional_transforms() -> None:
    query, key, value, table = (t.detach() for t in small())
    tables = torch.randn(3, *table.shape, dtype=table.dtype)
    outs = torch.vmap(attend, in_dims=(None, None, None, 0))(query, key, value, tables)
    torch.testing.assert_close(outs, torch.stack([attend(query, key, value, each) for each in tables]))
    grads = torch.vmap(torch.func.grad(lambda t: attend(query, key, value, t).square().sum()))(tables)
    for each, grad in zip(tables, grads, strict=True):
        leaf = each.clone().requires_grad_()
        expected = torch.autograd.grad(attend(query, key, value, leaf).square().sum(), leaf)[0]
        torch.testing.assert_close(grad, expected)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(table, torch.ones_like(table))  # the softmax does not see a constant
        tangent = forward_ad.unpack_dual(attend(query, key, value, dual)).tangent
    torch.testing.assert_close(tangent, torch.zeros_like(tangent))


@pytest.mark.cpu_only("composed of other ops")
def test_derivatives_of_packed_sequences() -> None:
    offsets = torch.tensor([0, 2, 2, 6]).int(), torch.tensor([0, 3, 4, 6]).int()
    leaves = [torch.randn(6, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    for shape in ((5,), (2, 13), (3, 2, 3)):
        table = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        function = lambda *t: cuda_ext.flash_attention_varlen(*t[:3], *offsets, relative_bias=t[3])  # noqa: E731
        assert gradcheck(function, (*leaves, table), check_forward_ad=True)
        assert gradgradcheck(function, (*leaves, table))


@pytest.mark.cpu_only("above the kernels")
def test_compiled_with_dynamic_lengths() -> None:
    table = torch.randn(2, 2 * 20 + 1, requires_grad=True)
    compiled = torch.compile(attend, fullgraph=True, dynamic=True)
    for length in (12, 30, 50):  # the table is cut, and extended
        tensors = tuple(qkv(1, length, length, 2, 1, 8, 8, torch.float32).values())
        actual, expected = (function(*tensors, table, causal=True) for function in (compiled, attend))
        torch.testing.assert_close(actual, expected)
        grads = [torch.autograd.grad(out.sum(), (*tensors, table))[-1] for out in (actual, expected)]
        torch.testing.assert_close(*grads)


@pytest.mark.cpu_only("above the kernels")
def test_opcheck() -> None:
    query, key, value, _ = small(torch.float32)
    bias = torch.randn(2, 1, 13, requires_grad=True)
    arguments = query, key, value, None, None, bias
    torch.library.opcheck(torch.ops.cuda_ext.flash_attention.default, arguments, {"bias_is_relative": True})


@pytest.mark.cpu_only("above the kernels")
def test_nested_tensors() -> None:
    parts = [torch.randn(length, 2, 8) for length in (5, 0, 40)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    table = torch.randn(2, 9)
    out = cuda_ext.flash_attention(nested, nested, nested, relative_bias=table)
    for part, own in zip(parts, out.unbind(), strict=True):
        torch.testing.assert_close(own, attend(part[None], part[None], part[None], table)[0])


ERRORS: list[tuple[Any, dict[str, Any], str]] = [
    (torch.randn(2, 4), {}, r"expected relative_bias of shape \(2 R \+ 1,\), .* got \(2, 4\)"),
    (torch.randn(3, 5), {}, r"\(2 or 1, 2 R \+ 1\) .* got \(3, 5\)"),
    (torch.randn(3, 2, 5), {}, r"relative_bias of a shape that broadcasts to .* = \(2, 2, 1, .* got \(3, 2, 1, 13\)"),
    (torch.tensor(1.0), {}, r"expected relative_bias of shape .* got \(\)"),
    (torch.zeros(5).long(), {}, "relative_bias of dtype float32 to match query, got int64; convert it with .to"),
    (torch.zeros(5, device="meta"), {}, "relative_bias on device cpu to match query, got meta"),
    (0.5, {}, "expected relative_bias to be a tensor, got float"),
]


@pytest.mark.cpu_only("no kernel runs")
@pytest.mark.parametrize(("table", "options", "message"), ERRORS, ids=range(len(ERRORS)))
def test_errors(table: Any, options: dict[str, Any], message: str) -> None:
    query, key, value, _ = small(torch.float32)
    with pytest.raises(RuntimeError, match=message):
        attend(query, key, value, table, **options)


@pytest.mark.cpu_only("no kernel runs")
def test_errors_of_packed_sequences() -> None:
    x, offsets = torch.randn(6, 2, 8), torch.tensor([0, 6]).int()
    with pytest.raises(RuntimeError, match="expected relative_bias without attn_bias, got both"):
        cuda_ext.flash_attention_varlen(
            x, x, x, offsets, offsets, relative_bias=torch.zeros(3), attn_bias=torch.zeros(6, 6)
        )


@pytest.mark.cpu_only("no kernel runs")
def test_errors_of_the_op() -> None:
    query, key, value, _ = small(torch.float32)
    op = torch.ops.cuda_ext.flash_attention
    with pytest.raises(RuntimeError, match="expected attn_bias with bias_is_relative=True, got None"):
        op(query, key, value, bias_is_relative=True)
    with pytest.raises(RuntimeError, match=r"= \(2, 2, 1, 13\) with an odd number of distances, or more, got \(11,\)"):
        op(query, key, value, None, None, torch.zeros(11), bias_is_relative=True)
