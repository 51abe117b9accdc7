"""Attention's CUDA kernels, forward and backward, against the reference: emulated, and on a GPU where there is one."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import cuda_ext
from cuda_ext import testing
from cuda_ext.testing import assert_op_matches_reference, reference_attention, reference_attention_varlen

pytestmark = pytest.mark.every_backend

DTYPES = [torch.bfloat16, torch.float16, torch.float32]

# Beyond the rule: both sides may get a value without error where the other rounds once. An lse, which is always
# float32, may be 8, and then a rounding is that of 8; with 16 bits that does not count.
ATOL = 2.0
ATOL_FLOAT32 = 8.0


def qkv(batch: int, sq: int, sk: int, heads: int, heads_kv: int, dim: int, dim_v: int, dtype: torch.dtype) -> Any:
    shapes = {
        "query": (batch, sq, heads, dim),
        "key": (batch, sk, heads_kv, dim),
        "value": (batch, sk, heads_kv, dim_v),
    }
    return {name: torch.randn(shape).to(dtype).requires_grad_() for name, shape in shapes.items()}


def in_other_order(reference: Callable[..., Any], dim: int, seed: int) -> Callable[..., Any]:
    """The reference with the terms of its logits added in another order."""
    order = torch.randperm(dim, generator=torch.Generator().manual_seed(seed))
    return lambda query, key, **others: reference(query[..., order], key[..., order], **others)


def check(tensors: dict[str, Tensor], *, packed: bool = False, **options: Any) -> None:
    """Outputs, lse and the gradients of all leaves: errors at most 2 and 3 times those of plain PyTorch; of
    float32 gradients 4 times."""
    reference_options: dict[str, int] = {}
    if options.get("dropout_p", 0.0) > 0:
        arguments = {name: tensor.detach() for name, tensor in tensors.items()}
        with torch.random.fork_rng():  # the next call draws the same seed again
            drawn = torch.ops.cuda_ext.flash_attention_forward(**arguments, dropout_p=options["dropout_p"])[2]
        seed, offset = drawn.tolist()
        reference_options = {"seed": seed % 2**64, "offset": offset % 2**64}
    eps = torch.finfo(tensors["value"].dtype).eps
    dim, dim_v = tensors["query"].shape[-1], tensors["value"].shape[-1]
    steepness = max(1.0, abs(options.get("scale") or 0.0) * math.sqrt(dim))
    atol, gradient_factor = ATOL, 3.0
    is_float32 = tensors["value"].dtype == torch.float32
    if is_float32:
        # Backward computes the probs again, with errors that are independent of those of delta: on the CPU one of 1,487
        # random cases was beyond 3 (at 3.8), and none of 4,114 beyond 4; emulated none of 817 beyond 3. Of a few rows a
        # BLAS adds the terms of a logit in vectors, of more rows one after the other, as our kernels may do for all.
        atol, gradient_factor = ATOL_FLOAT32 * (8 if tensors["query"].shape[-3] <= 16 else 1), 4.0
    # The gradient of a sink is a sum over all rows' products of output and its gradient, of outputs that were rounded:
    # independent errors, of which a sink's weight, about a tenth, counts.
    rounded = tensors["value"].shape[-1] * math.prod(tensors["query"].shape[:-2])
    # Backward subtracts rowsum(grad_out * out) from the gradient of every logit, with an output that was rounded: dim_v
    # errors of standard deviation eps / sqrt(12), of which three standard deviations count. Plain PyTorch does not have
    # this error, and hardly another if one key has nearly all the weight. The gradients of query and key multiply it by
    # the scale.
    of_logits = 3 / math.sqrt(12) * math.sqrt(dim_v)
    reference = reference_attention_varlen if packed else reference_attention
    assert_op_matches_reference(
        cuda_ext.flash_attention_varlen if packed else cuda_ext.flash_attention,
        reference,
        tensors,
        {"return_lse": True, **options},
        reference_options=reference_options,
        also=[in_other_order(reference, dim, seed) for seed in range(4)] if is_float32 else (),
        gradient_factor=gradient_factor,
        atol=atol * eps,
        gradient_atol={
            "sinks": eps * max(atol, 0.1 * math.sqrt(rounded)),
            "attn_bias": eps * max(atol, of_logits),
            "query": atol * eps * steepness,
            "key": atol * eps * steepness,
        },
    )


FEATURES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window": (20, 9)},
    "left window": {"window": (33, None)},
    "softcap": {"softcap": 3.0},
    "scale": {"scale": 0.3},
    "alibi": {"alibi": True},
    "sinks": {"sinks": True},
    "attn_bias": {"attn_bias": True},
    "attn_mask": {"attn_mask": True},
    "dropout": {"dropout_p": 0.2},
    "deterministic": {"deterministic": True},
}
PAIRS = [
    pair
    for pair in itertools.combinations(FEATURES, 2)
    if pair not in (("causal", "window"), ("window", "left window"))
]


DIMS = (32, 64, 96, 128, 192, 256)
LENGTHS = ((1, 70), (33, 31), (130, 140), (67, 129))  # queries, keys


def options_of(*features: str) -> dict[str, Any]:
    return {name: value for feature in features for name, value in FEATURES[feature].items()}


def check_with(tensors: dict[str, Tensor], options: dict[str, Any]) -> None:
    queries, heads = tensors["query"].shape[1:3]
    keys = tensors["key"].shape[1]
    options = dict(options)
    if options.pop("alibi", False):
        tensors = {**tensors, "alibi_slopes": torch.rand(heads)}
    if options.pop("sinks", False):
        tensors = {**tensors, "sinks": torch.randn(heads, requires_grad=True)}
    if options.pop("attn_bias", False):
        tensors = {**tensors, "attn_bias": torch.randn(heads, queries, keys, requires_grad=True)}
    if options.pop("attn_mask", False):
        tensors = {**tensors, "attn_mask": torch.rand(queries, keys) < 0.8}
    check(tensors, **options)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("feature", ["plain", *FEATURES])
def test_each_feature_at_each_head_dim(dim: int, feature: str) -> None:
    dtype = random.choice(DTYPES)
    check_with(qkv(1, 70, 75, 2, 1, dim, dim, dtype), {} if feature == "plain" else options_of(feature))


@pytest.mark.parametrize("pair", PAIRS, ids=" + ".join)
def test_pairs_of_features(pair: tuple[str, str], pytestconfig: pytest.Config) -> None:
    """All head dims and lengths take minutes, so that without --full a run draws one of each for every pair."""
    every = list(itertools.product(DIMS, LENGTHS))
    for dim, lengths in every if pytestconfig.getoption("--full") else [random.choice(every)]:
        heads_kv = random.choice((1, 2))
        check_with(qkv(1, *lengths, 2, heads_kv, dim, dim, random.choice(DTYPES)), options_of(*pair))


# Around tiles of 128 queries, and of 128 or 64 keys.
@pytest.mark.sampled(cases="every value")
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 128, 129, 193, 257])
@pytest.mark.parametrize("extra", [-64, -1, 0, 1, 64])
def test_lengths_around_the_tiles(length: int, extra: int) -> None:
    dim = random.choice((64, 128))
    check(qkv(1, length, max(1, length + extra), 1, 1, dim, dim, torch.bfloat16), causal=random.random() < 0.5)


@pytest.mark.cpu_only("emulated as a device with little shared memory")
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("feature", ["causal", "window", "softcap"])
def test_devices_with_little_shared_memory(dims: tuple[int, int], feature: str) -> None:
    with testing.emulated("sm_89"):
        check_with(qkv(1, 140, 100, 2, 1, *dims, torch.float16), options_of(feature))


@pytest.mark.parametrize(
    "dims",
    [(8, 8), (24, 40), (64, 72), (72, 64), (136, 64), (192, 128), (128, 256), (200, 8), (16, 0), (20, 33), (1, 3)],
)
def test_head_dims_are_padded(dims: tuple[int, int]) -> None:
    for dtype in DTYPES:
        check(qkv(1, 70, 75, 2, 1, *dims, dtype), causal=True)


@pytest.mark.sampled(cases="every value")
@pytest.mark.parametrize("group", [1, 2, 8, 40])
@pytest.mark.parametrize("queries", [1, 3, 20, 150])
def test_heads_that_share_keys(group: int, queries: int) -> None:
    """Of few queries the heads of a group share a tile."""
    check_with(qkv(2, queries, 90, 2 * group, 2, 64, 64, torch.float16), {"causal": True, "sinks": True, "alibi": True})


@pytest.mark.sampled(cases="every value")
@pytest.mark.parametrize("keys", [1, 64, 65, 1000])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("features", [(), ("causal",), ("window", "sinks"), ("alibi", "softcap")], ids=str)
def test_keys_are_divided_among_blocks(queries: int, keys: int, features: tuple[str, ...]) -> None:
    check_with(qkv(1, queries, keys, 2, 1, 64, 128, torch.bfloat16), options_of(*features))


def test_scales_that_are_not_positive() -> None:
    for scale in (-0.3, 0.0):
        check(qkv(1, 65, 64, 2, 2, 64, 64, torch.float16), scale=scale)


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
@pytest.mark.cpu_only("nothing is launched for most of them")
def test_empty_on_the_cpu(sizes: tuple[int, ...]) -> None:
    check(qkv(*sizes, torch.bfloat16), causal=True)


# 150 queries, of which the first 80 see nothing: keys, and what hides them.
HIDDEN_ROWS: dict[str, tuple[int, dict[str, Any]]] = {
    "causal": (70, {"causal": True}),
    "window": (70, {"window": (9, 0)}),
    "attn_bias": (75, {"attn_bias": torch.zeros(150, 1).index_fill(0, torch.arange(80), -math.inf)}),
    "attn_mask": (75, {"attn_mask": (torch.arange(150) >= 80)[:, None]}),
    "causal and mask": (110, {"causal": True, "attn_mask": (torch.arange(150) >= 80)[:, None]}),
    "no keys": (0, {}),
}


@pytest.mark.sampled(cases="every value")
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(("hidden", "packed"), [(name, packed) for name in HIDDEN_ROWS for packed in (False, True)])
def test_rows_that_see_nothing(hidden: str, with_sinks: bool, packed: bool) -> None:
    """Their softmax is that of the sink alone, or of nothing."""
    keys, options = HIDDEN_ROWS[hidden]
    tensors = qkv(1, 150, keys, 4, 2, 64, 64, torch.bfloat16)
    sinks = torch.randn(4, requires_grad=True)
    op: Any = cuda_ext.flash_attention
    if packed:
        tensors = {name: tensor.detach()[0].requires_grad_() for name, tensor in tensors.items()}
        tensors["cu_seqlens_q"] = torch.tensor([0, 150], dtype=torch.int32)
        tensors["cu_seqlens_k"] = torch.tensor([0, keys], dtype=torch.int32)
        op = cuda_ext.flash_attention_varlen
    if with_sinks:
        tensors["sinks"] = sinks
    hiding = {name: x.to(sinks.device) for name, x in options.items() if isinstance(x, Tensor)}
    options = {name: x for name, x in options.items() if name not in hiding}
    check({**tensors, **hiding}, packed=packed, **options)

    blind = 80 if keys else 150
    out, lse = op(**tensors, **options, **hiding, return_lse=True)
    out, lse = (out[None], lse[None]) if packed else (out, lse)
    assert (out[:, :blind] == 0).all() and (out[:, blind:] != 0).any(-1).all()
    of_blind = lse[..., :blind]
    if not with_sinks:
        assert (of_blind == -math.inf).all()
        gradients = torch.autograd.grad(of_blind.sum() + out.float().sum(), list(tensors.values())[:3])
        assert all(gradient.isfinite().all() for gradient in gradients)
    else:
        torch.testing.assert_close(of_blind, sinks.detach()[:, None].expand_as(of_blind[0])[None])
        (gradient,) = torch.autograd.grad(of_blind.sum(), sinks)
        torch.testing.assert_close(gradient, torch.full_like(gradient, blind))


@pytest.mark.parametrize("part_with_sinks", [0, 1])
def test_parts_merged_by_lse_are_the_whole(part_with_sinks: int) -> None:
    """As ring attention has them. Half of the queries come before all keys of the second part."""
    half = 70

    def merged(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, return_lse: bool) -> tuple[Tensor, Tensor]:
        parts = []
        for n, options in enumerate(({"window": (None, half)}, {"causal": True})):
            own = slice(n * half, (n + 1) * half)
            of_part = sinks if n == part_with_sinks else None
            parts.append(
                cuda_ext.flash_attention(
                    query, key[:, own], value[:, own], sinks=of_part, return_lse=return_lse, **options
                )
            )
        lse = torch.logsumexp(torch.stack([lse for _, lse in parts]), 0)
        weighed = [(of_part - lse).exp().transpose(1, 2)[..., None] * out for out, of_part in parts]
        return sum(weighed).to(query.dtype), lse

    tensors = {**qkv(1, 2 * half, 2 * half, 4, 2, 64, 64, torch.float16), "sinks": torch.randn(4, requires_grad=True)}

    def whole(**arguments: Any) -> Any:
        return reference_attention(**arguments, causal=True)

    eps = torch.finfo(torch.float16).eps
    assert_op_matches_reference(
        merged,
        whole,
        tensors,
        {"return_lse": True},
        gradient_factor=3.0,
        atol=2 * ATOL * eps,  # both parts round their outputs
        gradient_atol={"sinks": eps * 0.1 * math.sqrt(64 * 2 * half)},
    )


@pytest.mark.parametrize("sizes", [(70, 40), (40, 70)], ids=str)
@pytest.mark.parametrize("far", [2**29, 2**31, 2**62, 2**63 - 1])
def test_windows_wider_than_anything(sizes: tuple[int, int], far: int) -> None:
    tensors = qkv(1, *sizes, 2, 1, 64, 64, torch.bfloat16)
    for wide, unbounded in (((None, far), None), ((far, None), None), ((far, far), None), ((far, 3), (None, 3))):
        results = []
        for window in (wide, unbounded):
            out = cuda_ext.flash_attention(**tensors, window=window, deterministic=True)
            results.append([out, *torch.autograd.grad(out, list(tensors.values()), torch.ones_like(out))])
        assert all(map(torch.equal, *results)), (wide, unbounded)


def test_packed_sequences_said_to_be_as_long_as_can_be() -> None:
    dense = qkv(1, 70, 40, 2, 1, 64, 64, torch.bfloat16)
    tensors = {name: tensor.detach()[0].requires_grad_() for name, tensor in dense.items()}
    sequences = {
        "cu_seqlens_q": torch.tensor([0, 14, 42, 70], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 8, 24, 40], dtype=torch.int32),
    }
    results = []
    for longest in (None, 2**31 - 1):
        out = cuda_ext.flash_attention_varlen(
            **tensors, **sequences, max_seqlen_q=longest, max_seqlen_k=longest, causal=True, deterministic=True
        )
        results.append([out, *torch.autograd.grad(out, list(tensors.values()), torch.ones_like(out))])
    assert all(map(torch.equal, *results))


@pytest.mark.sampled(check="races", slow=True)
@pytest.mark.cpu_only("emulated as a test wants it")
def test_dropout_of_a_captured_graph_is_drawn_anew_by_each_replay() -> None:
    """Seed and offset then lie in memory that a replay changes; what a forward took of it, its backward gets."""
    tensors = qkv(1, 70, 90, 2, 1, 64, 64, torch.float16)
    generator = torch.tensor([7, 100])

    def expected(offset: int) -> list[Tensor]:
        out = reference_attention(**tensors, dropout_p=0.4, seed=7, offset=offset)
        assert isinstance(out, Tensor)
        return [out, *torch.autograd.grad(out, list(tensors.values()), torch.ones_like(out))]

    state = torch.random.get_rng_state()
    with testing.emulated("sm_80", "lazy", "pct", check_races=True):
        torch.ops.cuda_ext._emulate_capture(generator)
        try:
            outs = [cuda_ext.flash_attention(**tensors, dropout_p=0.4) for _ in range(2)]
            generator[1] = 1000  # the next replay; its backwards repeat the masks of their forwards nevertheless
            first, second = (
                [out, *torch.autograd.grad(out, list(tensors.values()), torch.ones_like(out))] for out in outs
            )
            drawn = torch.ops.cuda_ext.flash_attention_forward(**tensors, dropout_p=0.4)
        finally:
            torch.ops.cuda_ext._emulate_capture(None)
    assert torch.equal(torch.random.get_rng_state(), state)
    for offset, actual in ((100, first), (104, second)):
        for a, e in zip(actual, expected(offset), strict=True):
            torch.testing.assert_close(a, e, atol=2e-2, rtol=2e-2)
    assert drawn[2].tolist() == [7, 1008]
    torch.testing.assert_close(drawn[0], expected(1008)[0], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("shape", [(2, 4, 70, 75), (1, 4, 70, 75), (2, 1, 1, 75), (70, 1)], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_bias_of_every_shape(shape: tuple[int, ...], deterministic: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        tensors = qkv(2, 70, 75, 4, 2, 64, 64, torch.bfloat16)
        bias = torch.randn(shape).to(dtype).requires_grad_()
        check({**tensors, "attn_bias": bias}, causal=True, deterministic=deterministic)


@pytest.mark.sampled(cases="every value")
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("options", [{"causal": True}, {"softcap": 2.0}], ids=str)
def test_blocks_that_do_a_whole_walk(dims: tuple[int, int], options: dict[str, Any], backend: str) -> None:
    """There are enough of them, so that none is divided: for all SMs of a GPU, or for the 4 of the emulator."""
    heads = 180 if backend == "cuda" else 18
    check(qkv(2, 37, 41, heads, heads // 2, *dims, torch.bfloat16), **options)


def test_gradients_of_any_layout() -> None:
    query, key, value = qkv(2, 70, 75, 2, 2, 64, 64, torch.float16).values()
    out = cuda_ext.flash_attention(query, key, value)
    expanded = torch.autograd.grad(out.sum(), (query, key, value), retain_graph=True)
    dense = torch.autograd.grad(out, (query, key, value), torch.ones_like(out), retain_graph=True)
    by_heads = torch.ones(2, 2, 70, 64).half().transpose(1, 2)
    strided = torch.autograd.grad(out, (query, key, value), by_heads)
    for a, b, c in zip(expanded, dense, strided):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(c, b)


def test_very_large_and_very_negative_logits() -> None:
    tensors = qkv(1, 130, 130, 1, 1, 64, 64, torch.bfloat16)
    for scale in (50.0, -50.0):
        check({**tensors, "query": tensors["query"].abs() + 1, "key": tensors["key"].abs() + 1}, scale=scale)


@pytest.mark.parametrize("keys", [64, 256])
def test_uniform_weights_give_exact_means(keys: int) -> None:
    """Unless the keys are divided among blocks: the factors of the parts are rounded, and their products too."""
    value = torch.randint(-8, 9, (2, keys, 2, 64)).bfloat16()
    query, key = torch.randn(2, 70, 2, 64).bfloat16(), torch.zeros(2, keys, 2, 64, dtype=torch.bfloat16)
    expected = value.double().mean(1, keepdim=True).expand(2, 70, 2, 64).bfloat16()
    out = cuda_ext.flash_attention(query, key, value)
    splits = cuda_ext.attention_plan(query, key, value).splits
    assert keys > 64 or splits <= 1
    if splits <= 1:
        assert torch.equal(out, expected)
    else:
        torch.testing.assert_close(out, expected, rtol=2**-8, atol=1e-6)


def lengths() -> Iterator[tuple[list[int], list[int]]]:
    yield [3, 130, 0, 64, 1], [70, 130, 5, 0, 200]
    yield [1, 1, 1], [100, 1, 65]
    yield [200], [10]


@pytest.mark.parametrize("case", list(lengths()), ids=str)
@pytest.mark.parametrize(
    "features",
    [
        (),
        ("causal",),
        ("window", "sinks"),
        ("alibi", "softcap", "causal"),
        ("dropout", "deterministic"),
        ("attn_bias", "attn_mask"),
        ("attn_bias", "causal", "deterministic"),
    ],
    ids=str,
)
def test_packed_sequences(case: tuple[list[int], list[int]], features: tuple[str, ...]) -> None:
    of_q, of_k = case
    tensors: dict[str, Tensor] = {
        "query": torch.randn(sum(of_q), 4, 64).half().requires_grad_(),
        "key": torch.randn(sum(of_k), 2, 64).half().requires_grad_(),
        "value": torch.randn(sum(of_k), 2, 64).half().requires_grad_(),
        "cu_seqlens_q": torch.tensor([0, *itertools.accumulate(of_q)], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, *itertools.accumulate(of_k)], dtype=torch.int32),
    }
    options = options_of(*features)
    if options.pop("alibi", False):
        tensors["alibi_slopes"] = torch.rand(len(of_q), 4)
    if options.pop("sinks", False):
        tensors["sinks"] = torch.randn(4, requires_grad=True)
    if options.pop("attn_bias", False):
        batch = random.choice((1, len(of_q)))
        tensors["attn_bias"] = torch.randn(batch, random.choice((1, 4)), max(of_q), max(of_k), requires_grad=True)
    if options.pop("attn_mask", False):
        tensors["attn_mask"] = torch.rand(len(of_q), 1, random.choice((1, max(of_q))), max(of_k)) < 0.8
    check(tensors, packed=True, **options)


TAILS: dict[str, tuple[list[int], list[int], tuple[int, int], dict[str, Any]]] = {
    "plain": ([3, 70, 0], [40, 5, 90], (64, 64), {}),
    "no sequences": ([], [], (64, 64), {"max_seqlen_q": 9, "max_seqlen_k": 9}),
    "empty sequences": ([0, 0], [0, 0], (64, 64), {}),
    "no keys": ([5, 3], [0, 0], (64, 64), {"sinks": True}),
    "no queries": ([0, 0], [5, 3], (64, 64), {"attn_bias": True}),
    "split keys": ([1], [900], (64, 64), {}),
    "window and sinks": ([3, 70], [40, 90], (64, 64), {"window": (20, 9), "sinks": True}),
    "softcap, alibi and bias": ([3, 70], [40, 90], (64, 64), {"softcap": 3.0, "alibi": True, "attn_bias": True}),
    "dropout": ([3, 70], [40, 90], (64, 64), {"dropout_p": 0.2, "causal": True}),
    "128": ([64, 64], [128], (128, 128), {"causal": True}),
    "256": ([3, 70], [40, 90], (256, 256), {"sinks": True}),
    "256, bias": ([3, 70], [40, 90], (192, 128), {"attn_bias": True}),
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", TAILS)
def test_rows_after_the_last_sequence(name: str, deterministic: bool) -> None:
    """They give zeros, -inf of lse and zero gradients. What is in them, here NaN, reaches nothing else."""
    of_q, of_k, (dim, dim_v), options = TAILS[name]
    of_k = of_k + [0] * (len(of_q) - len(of_k))
    q_end, k_end = sum(of_q), sum(of_k)
    options = {**options, "deterministic": deterministic}
    sizes: dict[str, tuple[int, ...]] = {"attn_bias": (4, max(of_q, default=0), max(of_k, default=0)), "sinks": (4,)}
    leaves = {
        "query": torch.randn(q_end + 75, 4, dim).bfloat16(),
        "key": torch.randn(k_end + 3, 2, dim).bfloat16(),
        "value": torch.randn(k_end + 3, 2, dim_v).bfloat16(),
        **{each: torch.randn(size) for each, size in sizes.items() if options.pop(each, False)},
    }
    if options.pop("alibi", False):
        options["alibi_slopes"] = torch.rand(len(of_q), 4)
    lengths = [torch.tensor([0, *itertools.accumulate(each)], dtype=torch.int32) for each in (of_q, of_k)]
    given = torch.randn(q_end + 75, 4, dim_v).bfloat16(), torch.randn(4, q_end + 75)
    end_of = {"query": q_end, "key": k_end, "value": k_end}

    def free_garbage(*tensors: Tensor) -> None:
        """Memory that the next tensors of these sizes are likely to get."""
        del [torch.full_like(each, math.nan) for each in tensors][:]

    def run(content: float) -> list[Tensor]:
        filled = {each: tensor.clone() for each, tensor in leaves.items()}
        grad_out, grad_lse = (each.clone() for each in given)
        for each, end in end_of.items():
            filled[each][end:] = content
        grad_out[q_end:], grad_lse[:, q_end:] = content, content
        inputs = [each.requires_grad_() for each in filled.values()]
        torch.manual_seed(0)
        free_garbage(grad_out, grad_lse)
        out = cuda_ext.flash_attention_varlen(
            *inputs[:3], *lengths, return_lse=True, **dict(zip(list(filled)[3:], inputs[3:])), **options
        )
        assert not out[0][q_end:].any() and bool((out[1][:, q_end:] == -math.inf).all())
        free_garbage(*inputs)
        gradients = torch.autograd.grad(out, inputs, (grad_out, grad_lse))
        for gradient, end in zip(gradients, end_of.values()):
            assert not gradient[end:].any()
        return [*(each.detach() for each in out), *gradients]

    for poisoned, clean in zip(run(math.nan), run(0.0)):
        if deterministic:
            assert torch.equal(poisoned, clean)
        torch.testing.assert_close(poisoned, clean, rtol=2e-2, atol=2e-2)
    if of_q and "dropout_p" not in options:
        tensors = {each: tensor.requires_grad_() for each, tensor in leaves.items()}
        slopes = {"alibi_slopes": options.pop("alibi_slopes")} if "alibi_slopes" in options else {}
        tensors |= {"cu_seqlens_q": lengths[0], "cu_seqlens_k": lengths[1], **slopes}
        check(tensors, packed=True, **options)


def test_strided_tensors_are_read_in_place() -> None:
    qkv_packed = torch.randn(2, 70, 3, 4, 64).bfloat16()
    query, key, value = qkv_packed.unbind(2)
    check({"query": query, "key": key, "value": value})
    by_heads = torch.randn(2, 4, 70, 64).bfloat16().transpose(1, 2)
    check({"query": by_heads, "key": key, "value": value})


def test_tensors_at_any_address() -> None:
    shape = (1, 70, 2, 64)
    shifted = [torch.randn(math.prod(shape) + 1).half()[1:].view(shape) for _ in range(3)]
    check(dict(zip(("query", "key", "value"), shifted)))
    check(dict(zip(("query", "key", "value"), (torch.randn(1, 70, 2, 67).half()[..., :64] for _ in range(3)))))
    check(dict(zip(("query", "key", "value"), (torch.randn(1, 70, 64, 2).half().transpose(2, 3) for _ in range(3)))))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (40, 3)}], ids=str)
@pytest.mark.parametrize("heads", [(2, 2), (8, 1)], ids=str)
@pytest.mark.cpu_only("compares two backends")
def test_the_same_weights_are_dropped_as_on_a_cpu(options: dict[str, Any], heads: tuple[int, int]) -> None:
    """Values that tell keys apart show which weights there are."""
    queries = 70 if heads == (2, 2) else 5
    tensors = qkv(2, queries, 64, *heads, 64, 64, torch.float16)
    tensors["value"] = torch.eye(64).half()[None, :, None].expand(2, 64, heads[1], 64)
    with torch.random.fork_rng():
        on_cpu = cuda_ext.flash_attention(**tensors, dropout_p=0.3, **options)
    with testing.emulated(mode="lazy", schedule="pct"):
        emulated = cuda_ext.flash_attention(**tensors, dropout_p=0.3, **options)
    assert torch.equal(on_cpu == 0, emulated == 0)
    assert 0.1 < float((on_cpu == 0).float().mean()) < 0.9
    torch.testing.assert_close(on_cpu, emulated, atol=2e-3, rtol=2e-2)


STEEP = 0.3  # logits up to 13, where a few keys have nearly all the weight and roundings of a logit count


@pytest.mark.sampled(cases="every value")
@pytest.mark.cpu_only("emulated as a test wants it")
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("queries", "causal"), [(1, False), (5, False), (16, False), (300, False), (300, True)])
def test_float32_is_as_exact_as_that_of_pytorch(dim: int, queries: int, causal: bool) -> None:
    """On the CPU, and of three products of tf32: at most twice SDPA's error, of the output and each gradient."""

    def results(call: Any, dtype: torch.dtype, inputs: list[Tensor]) -> list[Tensor]:
        *leaves, grad_out = [tensor.to(dtype).requires_grad_() for tensor in inputs]
        out = call(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad_out.detach())]

    def ours(*leaves: Tensor) -> Tensor:
        transposed = [leaf.transpose(1, 2) for leaf in leaves]
        return cuda_ext.flash_attention(*transposed, causal=causal, scale=STEEP).transpose(1, 2)

    def theirs(*leaves: Tensor) -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal, scale=STEEP)

    squares = dict.fromkeys(("SDPA", "CPU", "emulated"), torch.zeros(4))
    for _ in range(max(1, 32 // queries)):  # few rows have few errors to average
        inputs = [torch.randn(1, 2, length, dim) for length in (queries, 300, 300, queries)]
        exact = results(theirs, torch.float64, inputs)
        computed = {name: results(call, torch.float32, inputs) for name, call in (("SDPA", theirs), ("CPU", ours))}
        with testing.emulated("sm_80"):  # backward, too
            computed["emulated"] = results(ours, torch.float32, inputs)
        for name, tensors in computed.items():
            errors = [mine.double() - right for mine, right in zip(tensors, exact)]
            squares[name] = squares[name] + torch.stack([error.square().mean().float() for error in errors])
    of_sdpa = squares.pop("SDPA")
    for name, sums in squares.items():
        ratios = (sums / of_sdpa).sqrt()
        assert ratios.max() <= 2, f"{name}, output and gradients of query, key and value: {ratios.tolist()}"


# Head dims and the keys of a tile, by architecture.
BACKWARD_TILES = [
    *(("sm_80", *tile) for tile in ((64, 64, 128), (96, 96, 64), (128, 128, 64), (192, 128, 64), (256, 256, 64))),
    ("sm_89", 256, 256, 32),
]


class TestCost:
    """What the kernels move, as the emulator counts it."""

    pytestmark = pytest.mark.cpu_only("emulated as a test wants it")

    @pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
    def test_every_byte_once_for_each_tile_and_no_bank_conflict(self, dims: tuple[int, int]) -> None:
        heads, queries, keys = 8, 256, 128
        tensors = qkv(1, queries, keys, heads, heads, *dims, torch.bfloat16)
        with testing.emulated("sm_80") as emulation:
            cuda_ext.flash_attention(**tensors)
        block_m = 128
        counted = emulation.counters
        read = 2 * heads * (queries * dims[0] + keys * (dims[0] + dims[1]) * (queries // block_m))
        written = heads * queries * (2 * dims[1] + 4)
        assert counted["global_load_bytes"] == read
        assert counted["global_load_sectors"] * 32 == read
        assert counted["global_store_bytes"] == written
        assert counted["matrix_wavefronts"] == counted["matrix_ideal_wavefronts"]
        assert counted["shared_wavefronts"] == counted["shared_ideal_wavefronts"]
        assert counted["mma"] == 2 * heads * queries * keys * (dims[0] + dims[1]) // (2 * 16 * 8 * 16)

    @pytest.mark.parametrize("tile", BACKWARD_TILES, ids=str)
    def test_the_backward_moves_every_byte_once_for_each_tile_too(self, tile: tuple[str, int, int, int]) -> None:
        """Gradients of queries are added up in the workspace: written, added to by every tile of keys, and read."""
        arch, *dims, block_n = tile
        heads, queries, keys = 8, 128, 128
        tensors = qkv(1, queries, keys, heads, heads, *dims, torch.bfloat16)
        grad_out = torch.randn(1, queries, heads, dims[1]).bfloat16()
        with testing.emulated(arch) as emulation:
            out = cuda_ext.flash_attention(**tensors)
            before = dict(emulation.counters)
            torch.autograd.grad(out, list(tensors.values()), grad_out)
        counted = {name: value - before[name] for name, value in emulation.counters.items()}
        rows, key_tiles = heads * queries, keys // block_n
        of_rows = rows * (2 * 2 * dims[1] + 4)
        of_walks = key_tiles * rows * (2 * (dims[0] + dims[1]) + 2 * 4) + 2 * heads * keys * sum(dims)
        of_finish = 4 * rows * dims[0]
        assert counted["global_load_bytes"] == of_rows + of_walks + of_finish
        # Four rows of a warp ask for half of a sector of lse.
        assert counted["global_load_sectors"] * 32 == counted["global_load_bytes"] + 4 * rows
        written = rows * (2 * 4 + 4 * dims[0]) + 2 * heads * keys * sum(dims) + 2 * rows * dims[0]
        assert counted["global_store_bytes"] == written
        assert counted["matrix_wavefronts"] == counted["matrix_ideal_wavefronts"]
        assert counted["shared_wavefronts"] == counted["shared_ideal_wavefronts"]
        products = 3 * dims[0] + 2 * dims[1]
        assert counted["mma"] == heads * queries * keys * products // (16 * 8 * 16)

    def test_keys_of_packed_heads_are_read_once(self) -> None:
        tensors = qkv(1, 1, 4096, 32, 4, 64, 64, torch.bfloat16)
        with testing.emulated("sm_80") as emulation:
            cuda_ext.flash_attention(**tensors)
        keys = 2 * 4096 * 4 * (64 + 64)
        assert keys <= emulation.counters["global_load_bytes"] < 1.5 * keys


@pytest.mark.sampled(check="races")
class TestRaces:
    pytestmark = pytest.mark.cpu_only("emulated as a test wants it")
    OPTIONS: Any = ({}, {"causal": True}, {"window": (70, 10), "softcap": 2.0, "dropout_p": 0.2})

    @pytest.mark.sampled
    @pytest.mark.parametrize("options", OPTIONS, ids=str)
    @pytest.mark.parametrize(
        "sizes",
        [
            (1, 140, 130, 1, 1, 64, 64),
            (1, 70, 70, 1, 1, 192, 128),
            (1, 40, 70, 1, 1, 256, 256),
            (1, 1, 300, 4, 1, 64, 64),
        ],
    )
    def test_none_in_any_order(self, sizes: tuple[int, ...], options: dict[str, Any]) -> None:
        tensors = qkv(*sizes, torch.bfloat16)
        state = torch.random.get_rng_state()
        results = []
        for mode, schedule, check_races in (("eager", "fifo", True), ("lazy", "pct", True), ("lazy", "pct", False)):
            torch.random.set_rng_state(state)
            with testing.emulated("sm_80", mode, schedule, random.randrange(2**31), check_races=check_races):
                results.append(self.run(tensors, **options))
        for result in results:
            assert all(torch.equal(a, b) for a, b in zip(results[0], result, strict=True))

    def run(self, tensors: dict[str, Tensor], **options: Any) -> list[Tensor]:
        """Output and gradients, with no choice of order."""
        out = cuda_ext.flash_attention(**tensors, **{"deterministic": True, **options})
        return [out.detach(), *torch.autograd.grad(out, list(tensors.values()), torch.ones_like(out))]

    def many_terms(self) -> dict[str, Tensor]:
        """Six blocks add to the gradient of queries, large terms that cancel: rounding shows their order."""
        tensors = qkv(1, 30, 700, 1, 1, 64, 64, torch.float16)
        return {**tensors, "key": (tensors["key"].detach() + 32).requires_grad_()}

    @pytest.mark.sampled
    def test_deterministic_gradients_are_equal_in_every_order(self) -> None:
        """Something orders all additions, so their order is the same in 20 schedules. Where blocks do not take turns
        nothing does, or this test would show nothing."""
        tensors = self.many_terms()
        with testing.emulated("sm_80", check_races=True, ordered_sums=True):
            first = self.run(tensors)
            with pytest.raises(RuntimeError, match=r"race: this write of .* are not ordered"):
                self.run(tensors, deterministic=False)
        for seed in range(20):
            with testing.emulated("sm_80", "lazy", "pct", seed):
                assert all(map(torch.equal, self.run(tensors), first))

    @pytest.mark.sampled
    def test_every_wait_is_needed(self) -> None:
        """Few heads divide keys or walks among blocks, many do not, and both ways have waits of their own; as have a
        head dim at which warps share keys, and blocks that take turns."""
        cases: list[tuple[dict[str, Tensor], dict[str, Any]]] = [
            (qkv(1, 140, 200, 2, 1, 64, 64, torch.bfloat16), {}),
            ({**qkv(1, 70, 70, 1, 1, 256, 256, torch.bfloat16), "sinks": torch.zeros(1, requires_grad=True)}, {}),
            # One block of keys: the gradient of queries has but one term.
            (qkv(2, 33, 33, 4, 4, 64, 64, torch.bfloat16), {"deterministic": False}),
            (self.many_terms(), {}),
        ]
        with testing.emulated("sm_80") as emulation:
            results = [self.run(tensors, **options) for tensors, options in cases]
        sites = [site for site in emulation.sync_sites if "attention" in site[0] and "_sm90" not in site[0]]
        waits = {"sync_threads", "sync_warp", "cp_async_wait", "cp_async_commit", "wait_equal", "store_release"}
        assert {site[2] for site in sites} == waits
        assert not [site for site in sites if not self.is_noticed(cases, results, site)]

    def is_noticed(
        self,
        cases: list[tuple[dict[str, Tensor], dict[str, Any]]],
        results: list[list[Tensor]],
        site: tuple[str, int, str],
    ) -> bool:
        """Mostly by wrong numbers, at once. The checker needs no luck: it finds accesses, and additions, that nothing
        orders any more, in whatever order this run has them."""
        for check_races, (case, expected) in itertools.product((False, True), zip(cases, results, strict=True)):
            tensors, options = case
            try:
                with testing.emulated("sm_80", "lazy", check_races=check_races, ordered_sums=check_races, skip=site):
                    if not all(map(torch.equal, self.run(tensors, **options), expected)):
                        return True
            except RuntimeError:
                return True
        return False
