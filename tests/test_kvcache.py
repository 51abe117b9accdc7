"""Attention over a cache of keys and values, on the CPU and on the emulated CUDA kernels, against plain PyTorch.

The matrix is that of flash-attn's tests of flash_attn_with_kvcache, with NaN in every row that no sequence has.
"""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch
from kvcache_common import Cache, expected, make_cache
from torch import Tensor

import cuda_ext
from cuda_ext import testing

pytestmark = pytest.mark.every_backend

DIMS = (32, 64, 80, 128, 256)
PAGES = (0, 1, 4, 16, 32, 128, 256)  # 0: not in pages
# Queries, and keys of the longest sequence.
SIZES = ((1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (5, 256), (1, 1500), (128, 128), (130, 131))


def bits(tensor: Tensor) -> Tensor:
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def check(query: Tensor, cache: Cache, key: Tensor | None = None, value: Tensor | None = None, **options: Any) -> None:
    """Results, and what is in the cache afterwards."""
    ours = cache.clone()
    out, lse = cuda_ext.flash_attention_with_kvcache(
        query, ours.keys, ours.values, key, value, **cache.arguments, **options, return_lse=True
    )
    in_float64, in_float32 = cache.clone(), cache.clone()
    exact, exact_lse = expected(query, in_float64, key, value, torch.float64, **options)
    plain, _ = expected(query, in_float32, key, value, query.dtype, **options)
    error, of_plain = (out.double() - exact).abs().max(), (plain.double() - exact).abs().max()
    assert not out.isnan().any()
    assert error <= 2 * of_plain + 1e-5, f"error {error:.2e}, of plain PyTorch {of_plain:.2e}"
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-3, rtol=1e-3)
    assert torch.equal(bits(ours.values), bits(in_float64.values))
    if "rotary_cos" not in options:
        assert torch.equal(bits(ours.keys), bits(in_float64.keys))
    torch.testing.assert_close(ours.keys, in_float64.keys, atol=1e-3, rtol=1e-2, equal_nan=True)


def random_tree(queries: int, batch: int) -> Tensor:
    """Random bits rather than ancestors, in any layout: some rows may be empty."""
    shape = (queries, queries) if random.random() < 0.5 else (batch, queries, queries)
    mask = torch.rand(shape) < 0.5
    if random.random() < 0.3:
        mask = mask.mT
    if random.random() < 0.2:
        mask = torch.stack([mask, ~mask], -1)[..., 0]
    if random.random() < 0.2:
        mask = mask[..., :1, :].expand(mask.shape)
    return mask


def random_case(dtype: torch.dtype, dims: tuple[int, ...] = DIMS) -> None:
    dim = random.choice(dims)
    dim_v = dim if random.random() < 0.8 else random.choice(dims)
    heads_kv, group = random.choice([1, 2, 3]), random.choice([1, 2, 4])
    queries, longest = random.choice(SIZES)
    new_rows = random.choice([0, 0, queries, random.randint(1, 5)])
    lengths = [random.randint(0, longest) for _ in range(random.randint(1, 4))] + [longest]
    page_size = random.choice(PAGES)
    cache = make_cache(
        *(lengths, longest + new_rows + random.randint(0, 40), heads_kv, dim, dim_v, dtype),
        page_size=page_size,
        heads_first=random.random() < 0.3,
        leftpad=random.random() < 0.3,
        batch_idx=not page_size and random.random() < 0.5,
        new_rows=new_rows,
    )
    options: dict[str, Any] = {"causal": random.random() < 0.5, "num_splits": random.choice([0, 0, 1, 3])}
    if random.random() < 0.3:
        options["window"] = (random.choice([None, random.randint(0, longest)]), random.choice([None, 0, 7]))
    if random.random() < 0.3:
        options["causal"] = False
        options["tree_mask"] = random_tree(queries, len(lengths))
    if random.random() < 0.2:
        options["softcap"] = 5.0
    if random.random() < 0.2:
        shape = (heads_kv * group,) if random.random() < 0.5 else (len(lengths), heads_kv * group)
        options["alibi_slopes"] = torch.rand(shape) * 0.1
    if random.random() < 0.2:
        options["sinks"] = torch.randn(heads_kv * group)
    if random.random() < 0.2:
        options["scale"] = 0.2
    key = value = None
    if new_rows:
        key = torch.randn(len(lengths), new_rows, heads_kv, dim).to(dtype)
        value = torch.randn(len(lengths), new_rows, heads_kv, dim_v).to(dtype)
        if random.random() < 0.6:
            angles = torch.rand(cache.rows + page_size + 1, random.choice([16, dim // 16 * 16]) // 2) * 6.28
            options |= {"rotary_cos": angles.cos().to(dtype), "rotary_sin": angles.sin().to(dtype)}
            options["rotary_interleaved"] = random.random() < 0.5
            if random.random() < 0.3:
                options["rotary_positions"] = torch.randint(0, 20, (len(lengths),)).int()
    check(torch.randn(len(lengths), queries, heads_kv * group, dim).to(dtype), cache, key, value, **options)


@pytest.mark.sampled(cases=24)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", range(100))
def test_random(dtype: torch.dtype, case: int) -> None:
    random_case(dtype, random.choice((DIMS, (16, 59, 100, 128, 300))))


@pytest.mark.sampled
@pytest.mark.parametrize(("queries", "keys"), [(64, 2048), (16, 20000), (1, 131072), (16, 131072)])
def test_long_sequences(queries: int, keys: int) -> None:
    cache = make_cache([keys, 70], keys, 1, 64, 64, torch.bfloat16, page_size=256)
    check(torch.randn(2, queries, 2, 64).bfloat16(), cache, causal=True)


@pytest.mark.cpu_only("of a dtype that CUDA does not append")
@pytest.mark.sampled(cases=6)
@pytest.mark.parametrize("case", range(50))
def test_random_in_float64(case: int) -> None:
    random_case(torch.float64, (16, 59, 100, 128, 300))


def alone_and_in_a_batch(dtype: torch.dtype, batch: int, **options: Any) -> None:
    lengths = [random.randint(0, 900) for _ in range(batch)]
    cache = make_cache(lengths, 1024, 2, 64, 64, dtype, page_size=16, new_rows=1)
    query, key, value = (torch.randn(batch, 1, heads, 64).to(dtype) for heads in (8, 2, 2))
    together = cache.clone()
    out, lse = cuda_ext.flash_attention_with_kvcache(
        query, together.keys, together.values, key, value, **cache.arguments, causal=True, return_lse=True, **options
    )
    for b in random.sample(range(batch), 6):
        alone = cache.clone()
        one = {name: tensor[b : b + 1] for name, tensor in cache.arguments.items()}
        own = [tensor[b : b + 1] for tensor in (query, key, value)]
        own_out, own_lse = cuda_ext.flash_attention_with_kvcache(
            own[0], alone.keys, alone.values, *own[1:], **one, causal=True, return_lse=True, **options
        )
        assert torch.equal(bits(own_out[0]), bits(out[b])) and torch.equal(own_lse[0], lse[b])


@pytest.mark.sampled
@pytest.mark.parametrize("window", [None, (100, 0)], ids=str)
def test_a_sequence_has_the_same_bits_alone_and_in_a_batch_of_64(window: tuple[int, int] | None) -> None:
    alone_and_in_a_batch(torch.bfloat16, 64, window=window)


def test_lengths_as_a_number_and_a_whole_cache() -> None:
    cache = make_cache([90, 90], 90, 2, 64, 64, torch.bfloat16)
    query = torch.randn(2, 1, 4, 64).bfloat16()
    attend = cuda_ext.flash_attention_with_kvcache
    given = attend(query, cache.keys, cache.values, **cache.arguments)
    assert torch.equal(attend(query, cache.keys, cache.values, cache_seqlens=90), given)
    assert torch.equal(attend(query, cache.keys, cache.values), given)


def test_rows_without_keys() -> None:
    """Length 0, a whole batch of it, and causal rows before the first key."""
    query = torch.randn(2, 5, 4, 64).bfloat16()
    for lengths in ([0, 0], [3, 0]):
        check(query, make_cache(lengths, 64, 2, 64, 64, torch.bfloat16, page_size=16), causal=True)
    cache = make_cache([0, 0], 64, 2, 64, 64, torch.bfloat16)
    out, lse = cuda_ext.flash_attention_with_kvcache(
        query, cache.keys, cache.values, **cache.arguments, return_lse=True
    )
    assert not out.any() and (lse == -torch.inf).all()


@pytest.mark.cpu_only("emulated as well")
@pytest.mark.parametrize("sizes", [(0, 1, 4, 2), (2, 0, 4, 2), (2, 1, 0, 0)], ids=str)
def test_sizes_of_zero(sizes: tuple[int, int, int, int]) -> None:
    """No sequences, no queries, no heads. New keys are appended even without queries."""
    batch, queries, heads, heads_kv = sizes
    for emulated in (False, True):
        keys, values = (torch.zeros(batch, 8, heads_kv, 64).bfloat16() for _ in range(2))
        new = torch.ones(batch, 1, heads_kv, 64).bfloat16()
        with testing.emulated("sm_80") if emulated else contextlib.nullcontext():
            out, lse = cuda_ext.flash_attention_with_kvcache(
                torch.zeros(batch, queries, heads, 64).bfloat16(),
                *(keys, values, new, new),
                cache_seqlens=torch.full((batch,), 3).int(),
                return_lse=True,
            )
        assert out.shape == (batch, queries, heads, 64) and lse.shape == (batch, heads, queries)
        assert bool((keys[:, 3] == 1).all()) and bool((values[:, 3] == 1).all()) and not keys[:, 4:].any()


def test_a_full_cache() -> None:
    cache = make_cache([63, 20], 64, 2, 64, 64, torch.bfloat16)
    check(*(torch.randn(2, 1, heads, 64).bfloat16() for heads in (4,)), cache, *new_rows(2, 1), causal=True)


def new_rows(batch: int, rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, rows, 2, 64).bfloat16(), torch.randn(batch, rows, 2, 64).bfloat16()


class TestOnDevices:
    """Values that a host does not see: emulated, with tensors between guards."""

    pytestmark = pytest.mark.cpu_only("emulated as a test wants it")

    def test_nothing_is_written_past_the_end(self) -> None:
        cache = make_cache([63, 64], 64, 2, 64, 64, torch.bfloat16)
        query, (key, value) = torch.randn(2, 1, 4, 64).bfloat16(), new_rows(2, 3)
        kept = cache.clone()
        with testing.emulated("sm_80"):
            out = cuda_ext.flash_attention_with_kvcache(
                query, cache.keys, cache.values, key, value, cache_seqlens=cache.arguments["cache_seqlens"]
            )
        kept.keys[0, 63], kept.values[0, 63] = key[0, 0], value[0, 0]
        assert torch.equal(bits(cache.keys), bits(kept.keys)) and torch.equal(bits(cache.values), bits(kept.values))
        full = cuda_ext.flash_attention_with_kvcache(query, kept.keys, kept.values, cache_seqlens=64)
        torch.testing.assert_close(out, full, atol=2e-2, rtol=2e-2)

    def test_wrong_pages_and_lengths_stay_inside(self) -> None:
        cache = make_cache([40, 64], 64, 2, 64, 64, torch.bfloat16, page_size=16)
        cache.arguments["block_table"][0, 1] = -7
        cache.arguments["block_table"][1, 0] = 10**6
        cache.arguments["cache_seqlens"][1] = 10**6
        with testing.emulated("sm_80"):
            cuda_ext.flash_attention_with_kvcache(
                torch.randn(2, 1, 4, 64).bfloat16(), cache.keys, cache.values, *new_rows(2, 1), **cache.arguments
            )

    @pytest.mark.parametrize("processors", [4, 132])
    def test_more_splits_than_blocks(self, processors: int) -> None:
        cache = make_cache([700, 3, 0, 65], 1024, 1, 64, 64, torch.bfloat16, page_size=16)
        with testing.emulated("sm_80", processors=processors):
            check(torch.randn(4, 1, 2, 64).bfloat16(), cache)


TREE_SIZES = (1, 7, 64, 130)


def chain(queries: int) -> Tensor:
    return torch.ones(queries, queries, dtype=torch.bool).tril()


class TestTreeMask:
    @pytest.mark.parametrize("queries", TREE_SIZES)
    @pytest.mark.parametrize("lengths", [(900, 300), (100, 5)], ids=str)
    def test_a_chain_is_causal(self, queries: int, lengths: tuple[int, int]) -> None:
        """Up to rounding: a causal call visits fewer keys."""
        cache = make_cache(list(lengths), 1040, 2, 64, 64, torch.bfloat16, page_size=16, new_rows=queries)
        query, key, value = (torch.randn(2, queries, heads, 64).bfloat16() for heads in (4, 2, 2))
        results = []
        for options in ({"causal": True}, {"tree_mask": chain(queries)}):
            own = cache.clone()
            results.append(
                cuda_ext.flash_attention_with_kvcache(
                    query, own.keys, own.values, key, value, **cache.arguments, num_splits=1, return_lse=True, **options
                )
            )
        for causal, tree in zip(*results, strict=True):
            torch.testing.assert_close(tree, causal, atol=1e-2, rtol=1e-2)

    @pytest.mark.parametrize("queries", TREE_SIZES)
    @pytest.mark.parametrize("num_splits", [0, 1, 3])
    def test_a_star(self, queries: int, num_splits: int) -> None:
        """Each query sees the root and itself; two heads of keys, left padding, sequences shorter than the tree."""
        star = torch.eye(queries, dtype=torch.bool)
        star[:, 0] = True
        cache = make_cache([700, queries // 2, 0], 701, 2, 64, 64, torch.bfloat16, leftpad=True, batch_idx=True)
        check(torch.randn(3, queries, 8, 64).bfloat16(), cache, tree_mask=star, num_splits=num_splits)

    @pytest.mark.parametrize("queries", TREE_SIZES)
    @pytest.mark.parametrize("page_size", [0, 16])
    def test_random_bits_of_each_sequence(self, queries: int, page_size: int) -> None:
        cache = make_cache([300, 40, 3], 450, 1, 64, 128, torch.float16, page_size=page_size, new_rows=queries)
        new = [torch.randn(3, queries, 1, dim).half() for dim in (64, 128)]
        mask = torch.rand(queries, 3, queries).transpose(0, 1) < 0.3
        options: dict[str, Any] = {"softcap": 4.0, "alibi_slopes": torch.rand(4) * 0.1, "sinks": torch.randn(4)}
        check(torch.randn(3, queries, 4, 64).half(), cache, *new, tree_mask=mask, **options)
        check(torch.randn(3, queries, 4, 64).half(), cache, *new, tree_mask=mask, window=(50, 3))

    def test_rows_without_keys(self) -> None:
        """The whole sequence is the tree, of which the second query sees nothing."""
        mask = chain(7)
        mask[1] = False
        cache = make_cache([7, 7], 64, 2, 64, 64, torch.bfloat16)
        query = torch.randn(2, 7, 4, 64).bfloat16()
        check(query, cache, tree_mask=mask)
        out, lse = cuda_ext.flash_attention_with_kvcache(
            query, cache.keys, cache.values, **cache.arguments, tree_mask=mask, return_lse=True
        )
        assert not out[:, 1].any() and (lse[:, :, 1] == -torch.inf).all()
        assert out[:, 2:].any() and (lse[:, :, 2:] > -torch.inf).all()

    @pytest.mark.parametrize(("queries", "prefix"), [(7, 0), (64, 200), (130, 70)])
    def test_as_a_block_mask_without_a_cache(self, queries: int, prefix: int) -> None:
        parents = [random.randint(-1, n - 1) for n in range(queries)]
        rows = prefix + queries
        query = torch.randn(1, queries, 4, 64)
        key, value = torch.randn(1, rows, 2, 64), torch.randn(1, rows, 2, 64)
        tree = cuda_ext.BlockMask.tree(parents).to_dense()[0, 0]
        ours = cuda_ext.flash_attention_with_kvcache(query, key, value, tree_mask=tree, return_lse=True)
        mask = cuda_ext.BlockMask.tree(parents, prefix)
        theirs = cuda_ext.flash_attention(query, key, value, block_mask=mask, return_lse=True)
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, atol=1e-3, rtol=1e-3)

    @pytest.mark.cpu_only("emulated as well")
    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
    def test_where_there_is_no_kernel(self, dtype: torch.dtype) -> None:
        """float64, and a head dim above 256."""
        dim = 32 if dtype == torch.float64 else 300
        cache = make_cache([50, 3, 0], 64, 2, dim, dim, dtype, page_size=16)
        query, mask = torch.randn(3, 7, 4, dim).to(dtype), torch.rand(3, 7, 7) < 0.5
        check(query, cache, tree_mask=mask)
        with testing.emulated("sm_80"):
            check(query, cache, tree_mask=mask)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "length beyond the cache": ({"cache_seqlens": torch.tensor([65, 3]).int()}, "cache_seqlens between 0 and 64"),
    "negative length": ({"cache_seqlens": torch.tensor([-1, 3]).int()}, "cache_seqlens between 0 and 64"),
    "full": ({"cache_seqlens": torch.tensor([64, 3]).int()}, "the cache is full: expected room for 1 new"),
    "lengths of int64": ({"cache_seqlens": torch.tensor([3, 3])}, "cache_seqlens of dtype int32"),
    "no lengths": ({"cache_seqlens": None}, "expected cache_seqlens with key"),
    "padding beyond the length": ({"cache_leftpad": torch.tensor([4, 0]).int()}, "cache_leftpad between 0 and"),
    "row of no sequence": ({"cache_batch_idx": torch.tensor([0, 2]).int()}, "cache_batch_idx between 0 and 1"),
    "negative page": ({"block_table": torch.tensor([[0], [-1]]).int()}, r"block_table between 0 and 1 .*got -1"),
    "table of floats": ({"block_table": torch.zeros(2, 1)}, "block_table of dtype int32"),
    "table and rows": (
        {"block_table": torch.zeros(2, 1).int(), "cache_batch_idx": torch.zeros(2).int()},
        "either block_table or cache_batch_idx",
    ),
    "value alone": ({"key": None}, "expected key with value"),
    "key alone": ({"value": None}, "expected value with key"),
    "other heads": ({"key": torch.zeros(2, 1, 3, 64).bfloat16()}, r"expected key of shape \(2, new rows, 2, 64\)"),
    "short rotary table": (
        {"rotary_cos": torch.zeros(9, 32).bfloat16(), "rotary_sin": torch.zeros(9, 32).bfloat16()},
        "rotary_cos of at least 64 positions",
    ),
    "cos alone": ({"rotary_cos": torch.zeros(64, 32).bfloat16()}, "both rotary_cos and rotary_sin"),
    "odd rotary dim": (
        {"rotary_cos": torch.zeros(64, 5).bfloat16(), "rotary_sin": torch.zeros(64, 5).bfloat16()},
        "rotary_dim a multiple of 16",
    ),
    "splits": ({"num_splits": -1}, "num_splits >= 0"),
    "tree of floats": ({"tree_mask": torch.ones(1, 1)}, "tree_mask of dtype bool, got float32; convert it"),
    "tree of other queries": (
        {"tree_mask": torch.ones(2, 3, 3).bool()},
        r"tree_mask of shape \(1, 1\) or \(2, 1, 1\), .* got \(2, 3, 3\)",
    ),
    "tree and causal": (
        {"tree_mask": torch.ones(1, 1).bool(), "causal": True},
        "causal=False with tree_mask, got True",
    ),
    "another dtype": ({"query": torch.zeros(2, 1, 4, 64)}, "key_cache of dtype float32 to match query"),
    "a cache that would be copied": (
        {"key_cache": torch.zeros(2, 64, 2, 128).bfloat16()[..., ::2]},
        "key_cache with a dense last dimension, because it is used in place",
    ),
}


@pytest.mark.cpu_only("the messages are the same")
@pytest.mark.parametrize("name", BAD)
def test_bad_input_has_its_own_message_and_leaves_the_cache(name: str) -> None:
    changed, message = BAD[name]
    cache = make_cache([3, 3], 64, 2, 64, 64, torch.bfloat16)
    key, value = new_rows(2, 1)
    arguments = {
        "query": torch.randn(2, 1, 4, 64).bfloat16(),
        "key_cache": cache.keys,
        "value_cache": cache.values,
        "key": key,
        "value": value,
        **cache.arguments,
        **changed,
    }
    kept = cache.clone()
    with pytest.raises(RuntimeError, match=f"flash_attention_with_kvcache: .*({message})"):
        cuda_ext.flash_attention_with_kvcache(**arguments)
    assert torch.equal(bits(cache.keys), bits(kept.keys)) and torch.equal(bits(cache.values), bits(kept.values))


@pytest.mark.cpu_only("of PyTorch's transforms")
class TestTransforms:
    def arguments(self) -> tuple[Tensor, Cache, Tensor, Tensor]:
        cache = make_cache([30, 30], 64, 2, 64, 64, torch.float32, page_size=16, new_rows=4)
        cache.keys.nan_to_num_(), cache.values.nan_to_num_()
        key, value = torch.randn(2, 1, 2, 64), torch.randn(2, 1, 2, 64)
        return torch.randn(2, 1, 4, 64), cache, key, value

    def test_opcheck(self) -> None:
        query, cache, key, value = self.arguments()
        where = (cache.arguments["cache_seqlens"], None, None, cache.arguments["block_table"])
        ops = torch.ops.cuda_ext
        torch.library.opcheck(ops.flash_attention_cached.default, (query, cache.keys, cache.values, *where))
        tree = torch.rand(2, 1, 1) < 0.5
        torch.library.opcheck(ops.flash_attention_cached.default, (query, cache.keys, cache.values, *where, tree))
        torch.library.opcheck(
            ops.flash_attention_with_kvcache.default, (query, cache.keys, cache.values, key, value, *where)
        )

    @pytest.mark.sampled
    def test_compiled_without_a_graph_break(self) -> None:
        query, cache, key, value = self.arguments()

        tree = torch.ones(1, 1, dtype=torch.bool)

        def step(query: Tensor, keys: Tensor, values: Tensor, key: Tensor, value: Tensor, **where: Tensor) -> Tensor:
            out = cuda_ext.flash_attention_with_kvcache(query, keys, values, key, value, causal=True, **where)
            return out + cuda_ext.flash_attention_with_kvcache(query, keys, values, tree_mask=tree, **where)

        compiled = torch.compile(step, fullgraph=True)
        for length in (30, 31, 32):
            cache.arguments["cache_seqlens"].fill_(length)
            ours, eager = cache.clone(), cache.clone()
            out = compiled(query, ours.keys, ours.values, key, value, **cache.arguments)
            assert torch.equal(out, step(query, eager.keys, eager.values, key, value, **cache.arguments))
            assert torch.equal(ours.keys, eager.keys) and torch.equal(ours.values, eager.values)

    def test_derivatives_are_refused(self) -> None:
        query, cache, _, _ = self.arguments()

        def attend(query: Tensor) -> Tensor:
            return cuda_ext.flash_attention_with_kvcache(query, cache.keys, cache.values, **cache.arguments)

        with pytest.raises(RuntimeError, match="flash_attention_cached"):
            attend(query.clone().requires_grad_()).sum().backward()
        with pytest.raises(RuntimeError, match="flash_attention_cached"):
            torch.func.grad(lambda query: attend(query).sum())(query)
        with pytest.raises(NotImplementedError, match="flash_attention_cached"):
            torch.func.jvp(attend, (query,), (query,))
