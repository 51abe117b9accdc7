"""What runs on a CPU runs on a GPU: every op, in every dtype, with every option and head dim, by a kernel or composed
of other ops. Both sides get the same numbers; what CUDA refuses is in `REFUSED`."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import cuda_ext
from cuda_ext import bucket, testing

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Of a sum of about a hundred terms of order 1.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 0.1, torch.float16: 0.02}
HEAD_DIMS = (
    (1, 1),
    (7, 9),
    (20, 20),
    (33, 65),
    (64, 64),
    (100, 80),
    (128, 128),
    (192, 128),
    (250, 256),
    (300, 40),
    (64, 512),
)
ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (9, 3)},
    "softcap": {"softcap": 2.0, "scale": 0.3},
    "negative scale": {"scale": -0.2},
    "alibi": {"alibi_slopes": (4,)},
    "sinks": {"sinks": (4,)},
    "bias": {"attn_bias": (4, 13, 17)},
    "bias of keys": {"attn_bias": (17,)},
    "bias of distances": {"relative_bias": (4, 11)},
    "mask": {"attn_mask": (13, 17)},
    "dropout": {"dropout_p": 0.3},
    "deterministic": {"deterministic": True},
}
ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh", "silu", "relu2")

# What raises on CUDA only, with the reason; docs/support.md has this list.
REFUSED: dict[str, str] = {
    "flash_attention_with_kvcache that appends float64": "expected key of at most 32 bits on a CUDA device",
}


def tensor(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()


def results(call: Callable[..., Any], tensors: dict[str, Tensor], grads: list[Tensor]) -> list[Tensor]:
    """The outputs and the gradients of all leaves that require one."""
    outputs = call(**tensors)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    leaves = [leaf for leaf in tensors.values() if leaf.requires_grad]
    if not grads:
        grads += [torch.randn_like(out) for out in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, grads)]


def compare(call: Callable[..., Any], tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    state = torch.get_rng_state()
    grads: list[Tensor] = []
    on_cpu = results(call, tensors, grads)
    torch.set_rng_state(state)
    with testing.emulated():
        on_cuda = results(call, tensors, grads)
    for ours, expected in zip(on_cuda, on_cpu, strict=True):
        assert ours.dtype == expected.dtype and ours.shape == expected.shape
        assert ours.is_contiguous() == expected.is_contiguous()
        finite = expected.detach()[expected.isfinite()].abs()
        tolerance = TOLERANCE[dtype] * max(1.0, finite.max().item() if finite.numel() else 1.0)
        torch.testing.assert_close(ours, expected, atol=tolerance, rtol=0, equal_nan=True)


@pytest.mark.sampled(cases="every value")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("option", ATTENTION)
@pytest.mark.parametrize("varlen", [False, True])
def test_attention(dtype: torch.dtype, dims: tuple[int, int], option: str, varlen: bool) -> None:
    batch, queries, keys, heads, heads_kv = 2, 13, 17, 4, random.choice((1, 2, 4))

    def shape(rows: int, *more: int) -> tuple[int, ...]:
        return (batch * rows, *more) if varlen else (batch, rows, *more)

    tensors = {
        "query": tensor(*shape(queries, heads, dims[0]), dtype=dtype),
        "key": tensor(*shape(keys, heads_kv, dims[0]), dtype=dtype),
        "value": tensor(*shape(keys, heads_kv, dims[1]), dtype=dtype),
    }
    accumulation = torch.float64 if dtype == torch.float64 else torch.float32
    options: dict[str, Any] = {"return_lse": True}
    for name, given in ATTENTION[option].items():
        if name == "attn_mask":
            tensors[name] = torch.rand(given) < 0.7
        elif name == "alibi_slopes":
            tensors[name] = torch.rand(given, dtype=accumulation)
        elif name in ("sinks", "attn_bias", "relative_bias"):
            tensors[name] = tensor(*given, dtype=accumulation)
        else:
            options[name] = given
    if not varlen:
        return compare(lambda **given: cuda_ext.flash_attention(**given, **options), tensors, dtype)
    lengths = [torch.tensor([0, rows - 2, 2 * rows - 5], dtype=torch.int32) for rows in (queries, keys)]
    longest = (
        {} if "attn_bias" not in tensors and "attn_mask" not in tensors else {"max_seqlen_q": 13, "max_seqlen_k": 17}
    )

    def call(query: Tensor, key: Tensor, value: Tensor, **given: Tensor) -> Any:
        return cuda_ext.flash_attention_varlen(query, key, value, *lengths, **given, **options, **longest)

    compare(call, tensors, dtype)


@pytest.mark.sampled(cases="every value")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize("appends", [False, True])
def test_attention_over_a_cache(dtype: torch.dtype, dims: tuple[int, int], pages: bool, appends: bool) -> None:
    """The cache is read and written in place, whatever the alignment of its rows."""
    lengths = torch.tensor([5, 31], dtype=torch.int32)
    sizes = (20, 4) if pages else (2, 40)
    caches = [tensor(*sizes, 2, dim, dtype=dtype).detach() for dim in dims]
    options: dict[str, Any] = {"cache_seqlens": lengths, "causal": True, "return_lse": True}
    if pages:
        options["block_table"] = torch.randperm(20, dtype=torch.int32).view(2, 10)
    if appends:
        options |= {
            "key": tensor(2, 3, 2, dims[0], dtype=dtype).detach(),
            "value": tensor(2, 3, 2, dims[1], dtype=dtype).detach(),
        }
    if appends and dims[0] >= 16:
        angles = torch.rand(64, 8, dtype=torch.float64)
        options |= {"rotary_cos": angles.cos().to(dtype), "rotary_sin": angles.sin().to(dtype)}
        options["rotary_interleaved"] = random.random() < 0.5
    query = tensor(2, 3, 4, dims[0], dtype=dtype).detach()

    def call() -> list[Tensor]:
        copies = [cache.clone() for cache in caches]
        return [*cuda_ext.flash_attention_with_kvcache(query, *copies, **options), *copies]

    expected = call()
    with testing.emulated():
        if appends and dtype == torch.float64:
            with pytest.raises(RuntimeError, match=REFUSED["flash_attention_with_kvcache that appends float64"]):
                call()
            return
        ours = call()
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=TOLERANCE[dtype], rtol=0)


def products(dtype: torch.dtype, activation: str | None) -> dict[str, tuple[Callable[..., Any], dict[str, Tensor]]]:
    m, n, k = 9, 12, 20
    ids = torch.tensor([[0, 2], [2, 1], [3, 0]])

    def x(*shape: int) -> Tensor:
        return tensor(*shape, dtype=dtype)

    return {
        "gemm": (lambda **t: cuda_ext.gemm(**t, alpha=0.5, beta=2.0, activation=activation),
                 {"a": x(3, m, k), "b": x(k, n), "c": x(n), "bias": x(n)}),
        "gemm, broadcast": (cuda_ext.gemm, {"a": x(2, 1, m, k), "b": x(3, k, n)}),
        "gemm of nothing": (cuda_ext.gemm, {"a": x(m, 0), "b": x(0, n), "c": x(m, n)}),
        "grouped_mm": (lambda **t: cuda_ext.grouped_mm(**t, offs=torch.tensor([2, 2, 7])),
                       {"mat_a": x(m, k), "mat_b": x(3, k, n), "bias": x(3, n)}),
        "grouped_mm of terms": (lambda **t: cuda_ext.grouped_mm(**t, offs=torch.tensor([5, 19])),
                                {"mat_a": x(m, k), "mat_b": x(k, n)}),
        "mixture_of_experts": (lambda **t: cuda_ext.mixture_of_experts(**t, expert_ids=ids, activation=activation),
                               {"input": x(3, k), "expert_weights": x(3, 2), "w_up": x(3, 2 * n, k),
                                "w_down": x(3, k, n), "b_up": x(3, 2 * n), "b_down": x(3, k)}),
        "linear": (lambda **t: cuda_ext.linear(**t, activation=activation),
                   {"input": x(2, m, k), "weight": x(n, k), "bias": x(n), "residual": x(2, m, n)}),
        "gated_linear": (lambda **t: cuda_ext.gated_linear(**t, activation=activation or "silu"),
                         {"input": x(m, k), "weight": x(2 * n, k), "bias": x(2 * n)}),
        "mlp": (lambda **t: cuda_ext.mlp(**t, activation=activation or "gelu"),
                {"input": x(m, k), "weight1": x(n, k), "weight2": x(k, n), "bias1": x(n), "bias2": x(k),
                 "residual": x(m, k)}),
        "gated_mlp": (lambda **t: cuda_ext.gated_mlp(**t, activation=activation or "silu"),
                      {"input": x(2, m, k), "weight1": x(2 * n, k), "weight2": x(k, n), "bias1": x(2 * n)}),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_products(dtype: torch.dtype, activation: str | None) -> None:
    for call, tensors in products(dtype, activation).values():
        compare(call, tensors, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("of_probabilities", [False, True])
def test_losses(of_probabilities: bool, reduction: str, dtype: torch.dtype) -> None:
    m, v, k = 6, 21, 9
    tensors = {
        "input": tensor(2, m, k, dtype=dtype),
        "weight": tensor(v, k, dtype=dtype),
        "bias": tensor(v, dtype=dtype),
    }
    probabilities = torch.rand(2, m, v).softmax(-1)
    target = probabilities if of_probabilities else torch.randint(v, (2, m)).index_fill(1, torch.tensor([3]), -100)
    weights = torch.rand(v)
    options: list[dict[str, Any]] = [{}, {"softcap": 3.0, "scale": 0.5, "z_loss": 0.1, "label_smoothing": 0.1}]
    options += [{"weight": weights, "return_lse": True, "return_entropy": True}, {"memory_limit": 1000}]
    for option in options:
        loss = functools.partial(cuda_ext.linear_cross_entropy, target=target, reduction=reduction, **option)
        compare(lambda input, weight, bias, loss=loss: loss(input, weight, linear_bias=bias), tensors, dtype)


@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, DTYPES)), ids=str)
def test_buckets(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    tensors = [tensor(3, 5, dtype=dtypes[0]).detach(), tensor(7, dtype=dtypes[1]).detach()]

    def call() -> list[Tensor]:
        flat = torch.full((30,), float("nan"), dtype=dtypes[1])
        stats = bucket.pack(tensors, flat, [2, 20], scale=0.5)
        targets = [torch.empty_like(each) for each in tensors]
        return [flat, stats, bucket.unpack(flat, targets, [2, 20], scale=2.0), *targets, bucket.stats(tensors)]

    expected = call()
    with testing.emulated():
        ours = call()
    for mine, theirs in zip(ours, expected, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, atol=0, rtol=1e-6)


def test_autocast_does_not_reach_into_composed_attention() -> None:
    """The ops below autograd have no autocast of their own, and backward may run under it."""
    x = [torch.randn(1, 5, 2, 300) for _ in range(4)]
    ops = torch.ops.cuda_ext
    found = []
    for enabled in (False, True):
        with testing.emulated(), torch.autocast("cpu", enabled=enabled):
            out, lse, _ = ops.flash_attention_forward(*x[:3])
            found.append([out, lse, *ops.flash_attention_backward(x[3], None, *x[:3], out, lse, None)[:3]])
    for plain, under_autocast in zip(*found, strict=True):
        assert torch.equal(plain, under_autocast)


def test_composed_dropout_of_a_captured_graph_reads_the_numbers_of_each_replay() -> None:
    x = torch.randn(1, 5, 2, 300)
    with testing.emulated():
        torch.ops.cuda_ext._emulate_capture(torch.tensor([7, 12]))
        try:
            states = [torch.ops.cuda_ext.flash_attention_forward(x, x, x, dropout_p=0.2)[2].tolist() for _ in range(2)]
        finally:
            torch.ops.cuda_ext._emulate_capture(None)
    assert states == [[7, 12], [7, 16]]


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float64, 32), (torch.bfloat16, 300)])
def test_composed_attention_of_a_captured_graph_says_that_it_reads_lengths(dtype: torch.dtype, dim: int) -> None:
    """Dense attention reads none, forward and backward."""
    packed, lengths = torch.randn(6, 2, dim, dtype=dtype, requires_grad=True), torch.tensor([0, 2, 6]).int()
    cache, seqlens = torch.randn(1, 6, 2, dim, dtype=dtype), torch.tensor([4]).int()
    with testing.emulated():
        torch.ops.cuda_ext._emulate_capture(torch.tensor([7, 12]))
        try:
            with pytest.raises(RuntimeError, match="flash_attention_varlen: expected no capture"):
                cuda_ext.flash_attention_varlen(
                    packed, packed, packed, lengths, lengths, max_seqlen_q=4, max_seqlen_k=4
                )
            with pytest.raises(RuntimeError, match=r"flash_attention_with_kvcache: .* in a captured graph"):
                cuda_ext.flash_attention_with_kvcache(cache[:, :1], cache, cache, cache_seqlens=seqlens)
            cuda_ext.flash_attention(*[packed.unsqueeze(0)] * 3).sum().backward()
        finally:
            torch.ops.cuda_ext._emulate_capture(None)
    assert packed.grad is not None


@pytest.mark.parametrize("function", ["flash_attention", "linear", "mlp"])
def test_gradients_are_checked_in_float64(function: str) -> None:
    """torch.autograd.gradcheck, with the second derivative, as on a CPU."""

    def x(*shape: int) -> Tensor:
        return tensor(*shape, dtype=torch.float64)

    inputs: dict[str, tuple[Tensor, ...]] = {
        "flash_attention": (x(1, 3, 2, 4), x(1, 4, 1, 4), x(1, 4, 1, 3)),
        "linear": (x(3, 4), x(2, 4), x(2)),
        "mlp": (x(3, 4), x(5, 4), x(2, 5)),
    }
    with testing.emulated():
        assert torch.autograd.gradcheck(getattr(cuda_ext, function), inputs[function])
        assert torch.autograd.gradgradcheck(getattr(cuda_ext, function), inputs[function])
