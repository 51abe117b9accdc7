"""flash_attention and flash_attention_varlen with a BlockMask: values and gradients against the reference."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from test_attention import GRADIENT_FACTOR, atol, check, qkv
from torch import Tensor

import cuda_ext
from cuda_ext import BlockMask
from cuda_ext.testing import assert_op_matches_reference, reference_attention, reference_attention_varlen

pytestmark = pytest.mark.every_backend

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
LENGTHS = (1, 7, 64, 100, 127, 128, 129, 200, 256, 300, 389)


def random_mask(kind: str, batch: int, heads: int, sq: int, sk: int) -> BlockMask:
    """A mask of one builder. Those of one length are cut out of a square one."""
    size = max(sq, sk)
    if kind == "blocks":
        side = random.choice((16, 32, 64, 128))
        shape = (*random.choice(((), (batch, heads))), -(-sq // side), -(-sk // side))
        return BlockMask.blocks(torch.rand(shape) < 0.4, side, sq, sk)
    if kind == "causal":
        return BlockMask.causal(sq, sk)
    if kind == "window":
        return BlockMask.window(sq, sk, random.choice((0, 5, 130)), random.choice((0, 40, None)))
    if kind == "dense":
        shape = (random.choice((1, batch)), random.choice((1, heads)), sq, sk)
        return BlockMask.from_dense(torch.rand(shape) < random.choice((0.05, 0.5, 0.95)))
    if kind == "documents":
        ids = torch.randint(0, 4, (size,)).sort().values
        dense = BlockMask.documents(ids=ids, causal=random.random() < 0.5)
    elif kind == "prefix_lm":
        dense = BlockMask.prefix_lm(torch.randint(0, size + 1, (batch,)), size)
    elif kind == "window_with_global":
        dense = BlockMask.window_with_global(size, 40, min(size, 20))
    else:
        raise AssertionError(kind)
    return BlockMask.from_dense(dense.to_dense()[..., :sq, :sk])


KINDS = ("blocks", "causal", "window", "dense", "documents", "prefix_lm", "window_with_global")


def random_features(batch: int, sq: int, sk: int, heads: int, dtype: torch.dtype) -> tuple[dict[str, Tensor], Any]:
    tensors: dict[str, Tensor] = {}
    options: dict[str, Any] = {}
    if random.random() < 0.3:
        options["causal"] = True
    elif random.random() < 0.3:
        options["window"] = (random.choice((3, 150, None)), random.choice((3, 150, None)))
    if random.random() < 0.3:
        options["softcap"] = 3.0
    if random.random() < 0.3:
        tensors["alibi_slopes"] = torch.rand(heads)
    if random.random() < 0.3:
        tensors["sinks"] = torch.randn(heads, dtype=torch.float64).to(dtype).requires_grad_()
    if random.random() < 0.3:
        shape = (random.choice((1, batch)), random.choice((1, heads)), sq, sk)
        tensors["attn_bias"] = torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()
    if random.random() < 0.2:
        tensors["attn_mask"] = torch.rand(random.choice((1, batch)), 1, 1, sk) < 0.8
    if random.random() < 0.3:
        options["deterministic"] = True
    return tensors, options


@pytest.mark.sampled(cases=14)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", range(100))
def test_random_cases(case: int, dtype: torch.dtype) -> None:
    batch, heads_kv, group = random.choice((1, 2)), random.choice((1, 2)), random.choice((1, 3))
    heads, sq, sk = heads_kv * group, random.choice(LENGTHS), random.choice(LENGTHS)
    mask = random_mask(random.choice(KINDS), batch, heads, sq, sk)
    tensors = qkv(batch, sq, sk, heads, heads_kv, random.choice((8, 24, 64)), random.choice((8, 40)), dtype)
    more, options = random_features(batch, sq, sk, heads, dtype)
    check({**tensors, **more}, block_mask=mask, **options)


@pytest.mark.sampled(cases=6)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", range(15))
def test_random_cases_of_packed_sequences(case: int, dtype: torch.dtype) -> None:
    """The last rows of the tensors belong to no sequence."""
    lengths_q = torch.tensor([random.choice((0, *LENGTHS)) for _ in range(3)])
    lengths_k = torch.tensor([random.choice((0, *LENGTHS)) for _ in range(3)])
    sq, sk = int(lengths_q.max()), int(lengths_k.max())
    mask = random_mask(random.choice(KINDS), 3, 2, max(1, sq), max(1, sk))
    tensors = qkv(1, int(lengths_q.sum()) + 5, int(lengths_k.sum()) + 3, 2, 1, 16, 24, dtype)
    tensors = {name: t.detach()[0].requires_grad_() for name, t in tensors.items()}
    more, options = random_features(3, max(1, sq), max(1, sk), 2, dtype)
    tensors |= more
    cumulative = {
        f"cu_seqlens_{n}": torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        for n, lengths in (("q", lengths_q), ("k", lengths_k))
    }
    assert_op_matches_reference(
        cuda_ext.flash_attention_varlen,
        reference_attention_varlen,
        {**tensors, **cumulative},
        {"max_seqlen_q": max(1, sq), "max_seqlen_k": max(1, sk), "block_mask": mask, "return_lse": True, **options},
        gradient_factor=GRADIENT_FACTOR,
        atol=atol(tensors["value"]),
    )


@pytest.mark.cpu_only("kernels read these lists as others")
@pytest.mark.parametrize("sides", [(-30, 170), (140, -20), (-2, None)], ids=str)
def test_bands_beside_the_diagonals_of_packed_sequences(sides: tuple[int, int | None]) -> None:
    """Sequences with more queries than keys, with fewer, with as many, and with none. Their diagonals end at the
    last query and the last key."""
    lengths = {"q_lengths": torch.tensor([300, 100, 0, 129, 1]), "k_lengths": torch.tensor([140, 389, 7, 129, 200])}
    mask = BlockMask.window(300, 389, *sides, **lengths)
    shifts = (lengths["k_lengths"] - lengths["q_lengths"]).view(-1, 1, 1, 1)
    ahead = torch.arange(389) - (torch.arange(300).view(-1, 1) + shifts)
    left, right = sides
    dense = (ahead >= -left) & (ahead <= (999 if right is None else right))
    tensors = {
        name: torch.randn(int(lengths[of].sum()), heads, 16, requires_grad=True)
        for name, of, heads in (("query", "q_lengths", 2), ("key", "k_lengths", 1), ("value", "k_lengths", 1))
    }
    cumulative = {
        f"cu_seqlens_{of[0]}": torch.nn.functional.pad(each.cumsum(0), (1, 0)).int() for of, each in lengths.items()
    }
    assert_op_matches_reference(
        functools.partial(cuda_ext.flash_attention_varlen, block_mask=mask),
        functools.partial(reference_attention_varlen, attn_mask=dense),
        {**tensors, **cumulative},
        {"max_seqlen_q": 300, "max_seqlen_k": 389, "return_lse": True},
        gradient_factor=GRADIENT_FACTOR,
        atol=atol(tensors["value"]),
    )


# Lists as they may come


def rebuilt(mask: BlockMask, change: Any) -> BlockMask:
    """A mask whose lists `change` has edited in place."""
    lists = {name: getattr(mask, name).clone() for name in ("kv_counts", "kv_indices", "kv_tiles")}
    lists |= {name: getattr(mask, name).clone() for name in ("q_counts", "q_indices", "q_tiles")}
    for side in ("kv", "q"):
        change(*(lists[f"{side}_{name}"] for name in ("counts", "indices", "tiles")))
    return BlockMask(mask.seq_lengths, tiles=mask.tiles, check=False, **lists)


def outputs(tensors: dict[str, Tensor], **options: Any) -> list[Tensor]:
    leaves = [tensor for tensor in tensors.values() if tensor.requires_grad]
    out, lse = cuda_ext.flash_attention(**tensors, return_lse=True, deterministic=True, **options)
    torch.manual_seed(5)
    grads = torch.autograd.grad((out, lse), leaves, (torch.randn_like(out), torch.randn_like(lse)))
    return [out.detach(), lse.detach(), *grads]


def assert_same_bits(actual: list[Tensor], expected: list[Tensor]) -> None:
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=0, equal_nan=True)


def test_entries_behind_the_counts_are_not_followed() -> None:
    mask = random_mask("blocks", 1, 1, 700, 700) & BlockMask.causal(700, 700)
    tensors = qkv(1, 700, 700, 2, 1, 16, 16, torch.float32)

    def spoil(counts: Tensor, indices: Tensor, tiles: Tensor) -> None:
        stale = torch.arange(indices.shape[-1]) >= counts[..., None]
        indices[stale] = 2**31 - 1
        tiles[stale] = -(2**31)

    assert_same_bits(outputs(tensors, block_mask=rebuilt(mask, spoil)), outputs(tensors, block_mask=mask))


def test_lists_in_any_order() -> None:
    mask = BlockMask.window_with_global(700, 150, 10)
    tensors = qkv(1, 700, 700, 2, 2, 16, 16, torch.float32)

    def shuffle(counts: Tensor, indices: Tensor, tiles: Tensor) -> None:
        for at in torch.cartesian_prod(*(torch.arange(n) for n in counts.shape)).tolist():
            count = int(counts[tuple(at)])
            order = torch.randperm(count)
            for values in (indices[tuple(at)], tiles[tuple(at)]):
                values[:count] = values[:count][order]

    # CUDA kernels add in the order of the lists.
    shuffled = outputs(tensors, block_mask=rebuilt(mask, shuffle))
    torch.testing.assert_close(shuffled, outputs(tensors, block_mask=mask))


def test_lists_that_change_between_calls() -> None:
    mask = BlockMask.blocks(torch.ones(3, 3, dtype=torch.bool), 128)
    tensors = qkv(1, 384, 384, 1, 1, 16, 16, torch.float32)
    before = outputs(tensors, block_mask=mask)
    for counts in (mask.kv_counts, mask.q_counts):
        counts.fill_(1)  # the first block of keys, or queries, alone
    first = torch.zeros(3, 3, dtype=torch.bool)
    first[:, 0] = True
    expected = cuda_ext.flash_attention(**tensors, block_mask=BlockMask.blocks(first, 128))
    assert_same_bits([cuda_ext.flash_attention(**tensors, block_mask=mask)], [expected])
    assert not torch.equal(before[0], expected)


@pytest.mark.parametrize("sizes", [(1, 1), (129, 300), (300, 129), (200, 200)], ids=str)
def test_full_blocks_at_ragged_ends(sizes: tuple[int, int]) -> None:
    sq, sk = sizes
    mask = BlockMask.from_dense(torch.ones(sq, sk, dtype=torch.bool))
    assert mask.partial_blocks() == 0
    tensors = qkv(2, sq, sk, 2, 1, 16, 16, torch.float32)
    for actual, plain in zip(outputs(tensors, block_mask=mask), outputs(tensors), strict=True):
        torch.testing.assert_close(actual, plain)


@pytest.mark.parametrize("sinks", [False, True])
def test_rows_and_heads_without_keys(sinks: bool) -> None:
    dense = torch.rand(1, 3, 300, 300) < 0.5
    dense[:, 1] = False  # a head
    dense[:, :, 128:256] = False  # a block of queries
    dense[:, :, 7] = False
    tensors = qkv(1, 300, 300, 3, 3, 16, 16, torch.float32)
    if sinks:
        tensors["sinks"] = torch.randn(3, requires_grad=True)
    check(tensors, block_mask=BlockMask.from_dense(dense))
    out, lse = cuda_ext.flash_attention(**tensors, block_mask=BlockMask.from_dense(dense), return_lse=True)
    assert out[:, :, 1].eq(0).all() and out[:, 128:256].eq(0).all() and out[:, 7].eq(0).all()
    expected = tensors["sinks"][1] if sinks else torch.tensor(-torch.inf)
    torch.testing.assert_close(lse[:, 1], expected.expand(1, 300))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_that_are_not_listed_are_not_read(dtype: torch.dtype, backend: str) -> None:
    if dtype == torch.float64 and backend != "cpu":
        pytest.skip("composed of other ops, which read all")
    mask = BlockMask.blocks(torch.eye(4, dtype=torch.bool), 128, 500, 500)
    tensors = qkv(1, 500, 500, 2, 1, 16, 24, dtype)
    good = outputs(tensors, block_mask=mask)
    bad = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    for name in ("key", "value"):
        bad[name][:, 128:256] = torch.nan
    found = outputs({name: t.requires_grad_() for name, t in bad.items()}, block_mask=mask)
    rows = [*range(128), *range(256, 500)]
    assert_same_bits([t[:, rows] for t in (found[0], *found[2:])], [t[:, rows] for t in (good[0], *good[2:])])


@pytest.mark.cpu_only(reason="a CUDA kernel multiplies the hidden values of a listed block by 0")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hidden_keys_and_values_need_not_be_finite(dtype: torch.dtype, bad: float) -> None:
    """Also in a listed block: zero times NaN is not added. Padding that is not initialised is such a case."""
    dense = torch.rand(1, 2, 300, 300) < 0.5
    hidden = [3, 140, *range(270, 300)]
    dense[..., hidden] = False
    tensors = qkv(1, 300, 300, 2, 1, 16, 24, dtype)
    options: dict[str, Any] = {"softcap": 2.0} if random.random() < 0.5 else {}
    options |= {"block_mask": BlockMask.from_dense(dense), "causal": random.random() < 0.5}
    good = outputs(tensors, **options)
    spoilt = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    for name in ("key", "value"):
        spoilt[name][:, hidden] = bad
    found = outputs({name: tensor.requires_grad_() for name, tensor in spoilt.items()}, **options)
    # Sums are in another order where a block has such elements, and not rounded to bfloat16.
    bound = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(found, good, rtol=bound, atol=bound)


def test_not_finite_values_reach_the_rows_that_see_them(backend: str) -> None:
    dense = torch.rand(1, 1, 200, 200) < 0.5
    dense[:, :, :, 0] = True
    tensors = {name: tensor.detach() for name, tensor in qkv(1, 200, 200, 1, 1, 16, 16, torch.float32).items()}
    good = cuda_ext.flash_attention(**tensors, block_mask=BlockMask.from_dense(dense))
    tensors["value"][:, 150, 0, 3] = torch.nan
    found = cuda_ext.flash_attention(**tensors, block_mask=BlockMask.from_dense(dense))
    sees = dense[:, 0, :, 150]
    assert found[sees][..., 3].isnan().all()
    if backend == "cpu":
        torch.testing.assert_close(found[~sees], good[~sees])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_several_batches_and_heads_share_one_pool(dtype: torch.dtype, backend: str) -> None:
    """Tiles that no list names hold any bits. Each key head of each batch has NaN in a block of its own, which none of
    its query heads lists, but others do."""
    if dtype == torch.float64 and backend != "cpu":
        pytest.skip("composed of other ops, which read all")
    batch, heads, heads_kv, sq, sk = 2, 4, 2, 200, 500
    spoilt = torch.arange(batch * heads_kv).view(batch, heads_kv)  # the blocks of keys, all different
    hidden = torch.arange(sk) // 128 == spoilt.repeat_interleave(heads // heads_kv, 1)[:, :, None, None]
    dense = torch.rand(1, heads, sq, sk) < 0.5
    dense[:, 1, :128, 256:384] = True  # a full block
    mask = BlockMask.from_dense(dense & ~hidden)
    assert mask.shape == (batch, heads, sq, sk) and len(mask.tiles) < mask.partial_blocks() < mask.visible_blocks()
    tensors = qkv(batch, sq, sk, heads, heads_kv, 16, 24, dtype)
    good = outputs(tensors, block_mask=mask)
    assert all(each.isfinite().all() for each in good)

    pool = torch.randint(-(2**31), 2**31, (2 * len(mask.tiles) + 1, 128, 4)).int()
    pool[1::2] = mask.tiles
    fields = [f"{side}_{name}" for side in ("kv", "q") for name in ("counts", "indices", "tiles")]
    lists = {name: getattr(mask, name) for name in fields}
    for name in ("kv_tiles", "q_tiles"):
        lists[name] = torch.where(lists[name] >= 0, 2 * lists[name] + 1, lists[name])
    shared = BlockMask((sq, sk), tiles=pool, check=False, **lists)
    bad = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    for b, head in torch.cartesian_prod(torch.arange(batch), torch.arange(heads_kv)).tolist():
        block = int(spoilt[b, head])
        for name in ("key", "value"):
            bad[name][b, block * 128 : (block + 1) * 128, head] = torch.nan
    found = outputs({name: tensor.requires_grad_() for name, tensor in bad.items()}, block_mask=shared)
    assert_same_bits(found, good)


def test_dropout_has_the_numbers_of_a_call_without_lists() -> None:
    mask = BlockMask.documents([0, 100, 391], causal=True)
    tensors = qkv(1, 391, 391, 2, 1, 16, 16, torch.float32)
    results = []
    for option in ({"block_mask": mask}, {"attn_mask": mask.to_dense()}):
        torch.manual_seed(3)
        results.append(cuda_ext.flash_attention(**tensors, dropout_p=0.3, **option))
    grads = [torch.autograd.grad(out, list(tensors.values()), torch.ones_like(out)) for out in results]
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(grads[0], grads[1])


# PyTorch's transforms


def small() -> tuple[dict[str, Tensor], BlockMask]:
    tensors = qkv(2, 140, 135, 2, 1, 8, 8, torch.float64)
    return tensors, BlockMask.from_dense(torch.rand(2, 2, 140, 135) < 0.3)


@pytest.mark.cpu_only("float64")
def test_second_derivatives() -> None:
    tensors, mask = small()

    def gradient(function: Any, **options: Any) -> tuple[Tensor, ...]:
        out = function(**tensors, **options)
        (first,) = torch.autograd.grad(out.square().sum(), tensors["query"], create_graph=True)
        return torch.autograd.grad(first.sin().sum(), list(tensors.values()))

    expected = gradient(reference_attention, attn_mask=mask.to_dense())
    for a, e in zip(gradient(cuda_ext.flash_attention, block_mask=mask), expected, strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.cpu_only("float64")
def test_forward_mode_and_vmap() -> None:
    tensors, mask = small()
    query, key, value = (t.detach() for t in tensors.values())
    call = functools.partial(cuda_ext.flash_attention, block_mask=mask)
    plain = functools.partial(reference_attention, attn_mask=mask.to_dense())
    tangents = tuple(torch.randn_like(t) for t in (query, key, value))
    for a, e in zip(
        torch.func.jvp(call, (query, key, value), tangents),
        torch.func.jvp(plain, (query, key, value), tangents),
        strict=True,
    ):
        torch.testing.assert_close(a, e)
    queries = torch.stack([query, 2 * query])
    mapped = torch.vmap(lambda q: call(q, key, value))(queries)
    torch.testing.assert_close(mapped, torch.stack([plain(q, key, value) for q in queries]))


def test_compiled_with_the_mask_as_an_argument() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def function(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
        return cuda_ext.flash_attention(query, key, value, block_mask=mask).sin()

    for length in (130, 200):
        tensors = qkv(1, length, length, 2, 1, 16, 16, torch.float32)
        mask = BlockMask.causal(length, length)
        out = function(**tensors, mask=mask)
        expected = cuda_ext.flash_attention(**tensors, causal=True).sin()
        torch.testing.assert_close(out, expected)
        both = [torch.autograd.grad(o.sum(), list(tensors.values())) for o in (out, expected)]
        torch.testing.assert_close(*both)


def test_checkpointing_and_autocast() -> None:
    tensors = qkv(1, 200, 200, 2, 1, 16, 16, torch.float32)
    call = functools.partial(cuda_ext.flash_attention, block_mask=BlockMask.causal(200, 200))
    with torch.autocast("cpu", torch.bfloat16):
        out = torch.utils.checkpoint.checkpoint(call, *tensors.values(), use_reentrant=False)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert tensors["key"].grad is not None and tensors["key"].grad.dtype == torch.float32


# Wrong arguments


@pytest.mark.cpu_only("raised before any kernel runs")
def test_errors() -> None:
    tensors = qkv(2, 200, 300, 4, 2, 8, 8, torch.float32)

    def expect(message: str, mask: Any) -> None:
        with pytest.raises(RuntimeError, match=message):
            cuda_ext.flash_attention(**tensors, block_mask=mask)

    lengths = "expected block_mask for 200 queries and 300 keys, got one for 300 and 300; build it for these lengths"
    expect(lengths, BlockMask.causal(300, 300))
    booleans = "expected block_mask to be a cuda_ext.BlockMask, got Tensor; give booleans as attn_mask="
    expect(booleans, torch.ones(200, 300, dtype=torch.bool))
    shapes = (
        r"expected block_mask of batch 2 or 1, 4 heads or 1 and 2 blocks of queries \(128 rows each\), got lists of"
    )
    expect(shapes, BlockMask.from_dense(torch.ones(3, 1, 200, 300, dtype=torch.bool)))
    expect(shapes, BlockMask.from_dense(torch.ones(1, 2, 200, 300, dtype=torch.bool)))
    for name, value, message in (
        ("kv_counts", 99, "expected counts in block_keys of at most 3, the entries of a list, got 99"),
        ("kv_indices", 7, r"expected blocks in block_keys in \[0, 3\), got 7; build the mask with"),
        ("kv_indices", -1, r"expected blocks in block_keys in \[0, 3\), got -1; build the mask with"),
        ("q_tiles", 5, r"expected tiles in block_queries in \[0, 4\) or -1 for all of a block, got 5"),
    ):
        mask = BlockMask.causal(200, 300)
        getattr(mask, name).fill_(value)
        expect(message, mask)


def test_jagged_tensors() -> None:
    lengths = (130, 70)
    parts = [torch.randn(n, 2, 16, requires_grad=True) for n in lengths]
    nested = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    mask = BlockMask.window(130, 130, 20, 0)
    out = cuda_ext.flash_attention(nested, nested, nested, block_mask=mask)
    for part, found in zip(parts, out.unbind(), strict=True):
        dense = mask.to_dense()[..., : len(part), : len(part)]
        expected = cuda_ext.flash_attention(part[None], part[None], part[None], attn_mask=dense)
        torch.testing.assert_close(found, expected[0])
