"""Block masks against their plain definitions, bit for bit, and what their lists promise to kernels."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from cuda_ext import BlockMask, _mask_builders, _mask_tiles
from cuda_ext._mask_lists import Grid

SIZES = (1, 2, 5, 127, 128, 129, 255, 256, 300, 385, 513)
GARBAGE = 2**31 - 1
FIELDS = ("kv_counts", "kv_indices", "kv_tiles", "q_counts", "q_indices", "q_tiles", "tiles", "tiles_t")
# Where column c of a row of bits is, as the documentation of BlockMask has it.
WORD = torch.tensor([c % 8 // 2 for c in range(128)])
BIT = torch.tensor([c // 8 * 2 + c % 2 for c in range(128)])


def size() -> int:
    return random.choice(SIZES)


def plain_bits(tiles: Tensor) -> Tensor:
    """bool (..., 128, 128)"""
    return (tiles[..., WORD] >> BIT & 1).bool()


def read(counts: Tensor, indices: Tensor, numbers: Tensor, tiles: Tensor, columns: int) -> Tensor:
    """The dense mask of some lists, by blocks one after the other: bool (B, H, rows, columns) of blocks' elements."""
    batch, heads, rows = counts.shape
    dense = torch.zeros(batch, heads, rows * 128, columns)
    bits = plain_bits(tiles)
    for b, h, m in torch.cartesian_prod(*map(torch.arange, counts.shape)).view(-1, 3).tolist():
        for place in range(int(counts[b, h, m])):
            n, number = int(indices[b, h, m, place]), int(numbers[b, h, m, place])
            block = dense[b, h, m * 128 : m * 128 + 128, n * 128 : n * 128 + 128]
            block += torch.ones_like(block) if number < 0 else bits[number][:, : block.shape[1]].float()
    assert dense.max() <= 1, "a block is listed twice"
    return dense.bool()


def check(mask: BlockMask, expected: Tensor) -> None:
    """`expected` is bool (B, H, Sq, Sk)."""
    queries, keys = expected.shape[2:]
    assert mask.shape == tuple(expected.shape) and mask.seq_lengths == (queries, keys)
    assert torch.equal(mask.to_dense(), expected)
    kv, q = [[getattr(mask, f"{side}_{name}") for name in ("counts", "indices", "tiles")] for side in ("kv", "q")]
    assert torch.equal(read(*kv, mask.tiles, keys)[:, :, :queries], expected)
    assert torch.equal(read(*q, mask.tiles_t, queries)[:, :, :keys], expected.mT)
    check_lists(mask, expected)
    transposed = dict(zip(("q_counts", "q_indices", "q_tiles"), q))
    for rebuilt in (BlockMask((queries, keys), *kv, mask.tiles, **more) for more in ({}, transposed)):
        for name in FIELDS:
            assert getattr(mask, name).dtype == torch.int32
            assert torch.equal(getattr(rebuilt, name), getattr(mask, name))


def check_lists(mask: BlockMask, expected: Tensor) -> None:
    """Blocks are listed if they have a visible element, ascending, and as full if they have no hidden one."""
    batch, heads, queries, keys = expected.shape
    rows, columns = -(-queries // 128), -(-keys // 128)
    some, hidden = torch.zeros(2, batch, heads, rows * 128, columns * 128, dtype=torch.bool)
    some[:, :, :queries, :keys], hidden[:, :, :queries, :keys] = expected, ~expected
    some, hidden = (
        each.unflatten(3, (columns, 128)).unflatten(2, (rows, 128)).any(5).any(3) for each in (some, hidden)
    )
    for side, blocks, holes in (("kv", some, hidden), ("q", some.mT, hidden.mT)):
        counts, indices, numbers = (getattr(mask, f"{side}_{name}") for name in ("counts", "indices", "tiles"))
        assert torch.equal(counts, blocks.sum(3, dtype=torch.int32))
        assert indices.shape[3] == max(1, int(counts.max()))
        here = torch.arange(indices.shape[3]) < counts.unsqueeze(3)
        assert torch.equal(indices[here].long(), blocks.nonzero()[:, 3])
        assert torch.equal(numbers[here] >= 0, holes[blocks])
        assert set(numbers[here].tolist()) - {-1} == set(range(len(mask.tiles)))
    assert len(torch.unique(mask.tiles.flatten(1), dim=0)) == len(mask.tiles)
    assert torch.equal(plain_bits(mask.tiles_t), plain_bits(mask.tiles).mT)


# Each builder with random arguments, and its definition by comparing positions


def positions(queries: int, keys: int | None = None) -> tuple[Tensor, Tensor]:
    return torch.arange(queries).view(-1, 1), torch.arange(queries if keys is None else keys)


def of_dense() -> tuple[BlockMask, Tensor]:
    batch, heads, queries, keys = random.choice([1, 2]), random.choice([1, 3]), size(), size()
    mask = torch.rand(batch, heads, queries, keys) < random.choice([0.001, 0.5, 0.9999])
    mask &= (torch.rand(batch, heads, 1, -(-keys // 128)) < 0.7).repeat_interleave(128, 3)[..., :keys]
    mask |= (torch.rand(batch, heads, -(-queries // 128), 1) < 0.2).repeat_interleave(128, 2)[:, :, :queries]
    if heads > 1:
        return BlockMask.from_dense(mask), mask
    return BlockMask.from_dense(mask[:, 0] if batch > 1 or random.random() < 0.5 else mask[0, 0]), mask


def causal() -> tuple[BlockMask, Tensor]:
    queries, keys, bottom_right = size(), size(), random.random() < 0.6
    i, j = positions(queries, keys)
    dense = j <= i + (keys - queries if bottom_right else 0)
    return BlockMask.causal(queries, keys, bottom_right=bottom_right), dense[None, None]


def near(i: Tensor, j: Tensor, left: int | None, right: int | None) -> Tensor:
    seen = torch.ones(i.shape[-2], j.shape[-1], dtype=torch.bool)
    seen = seen if left in (None, -1) else seen & (j >= i - min(left, 10**6))
    return seen if right in (None, -1) else seen & (j <= i + min(right, 10**6))


def random_bound() -> int | None:
    return random.choice([None, -1, 0, 1, 100, 128, 10**30, random.randint(0, 300), -random.randint(2, 200)])


def random_lengths_of_both(queries: int, keys: int) -> tuple[dict[str, Tensor], list[int]]:
    """Arguments of a builder, and how far each sequence's last key is behind its last query."""
    if random.random() < 0.5:
        return {}, [keys - queries]
    count = random.choice([1, 2, 4])
    q_lengths, k_lengths = (
        torch.tensor([random.choice([0, 1, most, random.randint(0, most)]) for _ in range(count)])
        for most in (queries, keys)
    )
    return {"q_lengths": q_lengths, "k_lengths": k_lengths.int()}, (k_lengths - q_lengths).tolist()


def window() -> tuple[BlockMask, Tensor]:
    queries, keys, left, right = size(), size(), random_bound(), random_bound()
    lengths, shifts = random_lengths_of_both(queries, keys)
    i, j = positions(queries, keys)
    dense = torch.stack([near(i + shift, j, left, right) for shift in shifts])
    return BlockMask.window(queries, keys, left, right, **lengths), dense[:, None]


def document_options() -> dict[str, Any]:
    return {
        "causal": random.random() < 0.5,
        "window": None if random.random() < 0.6 else (random_bound(), random_bound()),
    }


def same_document(ids: Tensor, causal: bool, window: tuple[int | None, int | None] | None) -> Tensor:
    i, j = positions(ids.shape[-1])
    seen = ids.unsqueeze(-1) == ids.unsqueeze(-2)
    seen = seen & (j <= i) if causal else seen
    return seen if window is None else seen & near(i, j, *window)


def random_lengths(total: int) -> list[int]:
    lengths: list[int] = []
    while sum(lengths) < total:
        lengths.append(min(random.choice([0, 1, 64, 128, random.randint(0, 300)]), total - sum(lengths)))
    return lengths


def documents() -> tuple[BlockMask, Tensor]:
    total, options = size(), document_options()
    lengths, padding = random_lengths(total), random.choice([0, 0, 3, 200])
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0, dtype=random.choice([torch.int32, torch.int64]))
    dense = torch.zeros(total + padding, total + padding, dtype=torch.bool)
    dense[:total, :total] = same_document(ids, **options)
    mask = BlockMask.documents(cu_seqlens, S=total + padding if padding else None, **options)
    return mask, dense[None, None]


def document_ids() -> tuple[BlockMask, Tensor]:
    """Also ids that are not sorted, and documents in several pieces."""
    batch, total, options = random.choice([1, 2]), size(), document_options()
    rows = []
    for _ in range(batch):
        lengths = random_lengths(total)
        names = random.choice([range(len(lengths)), [random.randint(-2, 3) for _ in lengths]])
        rows.append(torch.repeat_interleave(torch.tensor([*names]), torch.tensor(lengths)))
    ids = torch.stack(rows)[:, torch.randperm(total) if random.random() < 0.2 else slice(None)]
    given = ids[0] if batch == 1 and random.random() < 0.5 else ids.int()
    return BlockMask.documents(ids=given, **options), same_document(ids, **options).unsqueeze(1)


def prefix_lm() -> tuple[BlockMask, Tensor]:
    total = size()
    prefix = torch.tensor([random.randint(0, total + 1) for _ in range(random.choice([1, 2, 3]))])
    i, j = positions(total)
    given = int(prefix) if len(prefix) == 1 else prefix
    return BlockMask.prefix_lm(given, total), ((j < prefix.view(-1, 1, 1)) | (j <= i)).unsqueeze(1)


def window_with_global() -> tuple[BlockMask, Tensor]:
    total, width, count, causal = size(), random.randint(0, 200), random.randint(0, 200), random.random() < 0.5
    i, j = positions(total)
    dense = ((i - j).abs() <= width) | (i < count) | (j < count)
    dense = dense & (j <= i) if causal else dense
    return BlockMask.window_with_global(total, width, count, causal=causal), dense[None, None]


def chunks() -> tuple[BlockMask, Tensor]:
    queries, keys, length = size(), size(), random.choice([1, 7, 64, 128, 200])
    j = torch.arange(keys)

    def dense(shift: int) -> Tensor:
        return (torch.arange(queries) + shift).unsqueeze(1).div(length, rounding_mode="floor") == j // length

    lengths, shifts = random_lengths_of_both(queries, keys)
    return BlockMask.chunks(queries, keys, length, **lengths), torch.stack([dense(n) for n in shifts])[:, None]


def shared_prompt() -> tuple[BlockMask, Tensor]:
    prompt, answers = random.choice([0, 1, 100, 128, 200]), random_lengths(size())
    part = torch.repeat_interleave(torch.arange(len(answers) + 1), torch.tensor([prompt, *answers]))
    i, j = positions(len(part))
    dense = (j <= i) & ((part.view(-1, 1) == part) | (part == 0))
    return BlockMask.shared_prompt(prompt, random.choice([answers, torch.tensor(answers)])), dense[None, None]


def blocks() -> tuple[BlockMask, Tensor]:
    side, queries, keys = random.choice([16, 32, 64, 128]), size(), size()
    leading = random.choice([(), (2,), (2, 3), (1, 2)])
    matrix = torch.rand(*leading, -(-queries // side), -(-keys // side)) < random.choice([0.1, 0.5, 0.95])
    dense = matrix.repeat_interleave(side, -2).repeat_interleave(side, -1)[..., :queries, :keys]
    dense = dense.unsqueeze(1) if len(leading) == 1 else dense.view(*leading or (1, 1), queries, keys)
    return BlockMask.blocks(matrix, side, queries, keys), dense


def column_ranges() -> tuple[BlockMask, Tensor]:
    batch, heads, total, causal = random.choice([1, 2]), random.choice([1, 2]), size(), random.random() < 0.5
    queries = random.choice([total, size()])
    count = random.choice([1, 2] if causal else [2, 4])
    groups = random.choice([1, 2]) if heads > 1 else 1
    ranges = torch.randint(0, queries + 1, (batch, heads, total, count), dtype=torch.int32)
    if random.random() < 0.7:  # long runs of equal columns, whose blocks are full or empty
        ranges = ranges[:, :, torch.arange(total) // 150 * 150]
    i = torch.arange(queries).unsqueeze(-1)
    bounds = [each.unsqueeze(-2).repeat_interleave(groups, 1) for each in ranges.unbind(-1)]  # (B, H, 1, Sk)
    hidden = i >= bounds[0]
    if count == 4 or (causal and count == 2):
        hidden = hidden & (i < bounds[1])
    if not causal:
        hidden = hidden | ((i >= bounds[2]) & (i < bounds[3]) if count == 4 else i < bounds[1])
    dense = ~hidden & (torch.arange(total) <= i + (total - queries)) if causal else ~hidden
    options = {} if queries == total else {"Sq": queries}
    return BlockMask.from_column_ranges(ranges, causal, num_heads=heads * groups, **options), dense


def tree() -> tuple[BlockMask, Tensor]:
    batch, count, prefix = random.choice([1, 2]), size(), random.choice([0, 0, 1, 128, 200])
    deep = random.random() < 0.5
    parents = torch.tensor(
        [[random.randint(max(-1, node - 3) if deep else -1, node - 1) for node in range(count)] for _ in range(batch)]
    )
    seen = torch.zeros(batch, count, prefix + count, dtype=torch.bool)
    for b in range(batch):
        for node in range(count):
            seen[b, node] = (
                seen[b, parents[b, node]] if parents[b, node] >= 0 else torch.arange(prefix + count) < prefix
            )
            seen[b, node, prefix + node] = True
    if random.random() < 0.3:  # parents that come after their children
        order = torch.randperm(count)
        rank = torch.cat([order.argsort(), torch.tensor([-1])])
        parents = rank[parents][:, order]
        seen = seen[:, order][:, :, torch.cat([torch.arange(prefix), prefix + order])]
    return BlockMask.tree(parents[0] if batch == 1 else parents, prefix), seen.unsqueeze(1)


def random_mask_mod(batch: int, heads: int, queries: int, keys: int) -> Callable[..., Tensor]:
    ids, reach = torch.randint(0, 3, (batch, max(queries, keys))).sort(1).values, torch.randint(0, 300, (heads,))
    table = torch.rand(queries, keys) < 0.5
    mods: list[Callable[..., Tensor]] = [
        lambda b, h, q, k: q >= k,
        lambda b, h, q, k: (q - k).abs() <= reach[h],
        lambda b, h, q, k: ids[b, q] == ids[b, k],
        lambda b, h, q, k: table[q, k] & (k < 200),
        lambda b, h, q, k: (ids[b][q] == 0) | (q % 7 == k % 7),
        lambda b, h, q, k: b.new_ones((), dtype=torch.bool),
        lambda b, h, q, k: (torch.stack([q, k]) > 130).any(),  # a reduction: wrong if it saw more than one element
    ]
    return random.choice(mods)


def mask_mod() -> tuple[BlockMask, Tensor]:
    sizes = random.choice([1, 2]), random.choice([1, 2]), size(), size()
    mod = random_mask_mod(*sizes)
    given: list[Any] = [None if number == 1 else number for number in sizes[:2]]
    return BlockMask.from_mask_mod(mod, *given, *sizes[2:]), flex.create_mask(mod, *sizes, device="cpu")


def flex_mask() -> tuple[BlockMask, Tensor]:
    sizes = random.choice([1, 2]), random.choice([1, 2]), size(), size()
    mod = random_mask_mod(*sizes)
    side = random.choice([16, 64, 128, 256, (128, 64), (96, 200), (256, 128)])
    theirs = flex.create_block_mask(mod, *sizes, device="cpu", BLOCK_SIZE=side)
    return BlockMask.from_flex(theirs), flex.create_mask(mod, *sizes, device="cpu")


BUILDERS = (
    *(of_dense, causal, window, documents, document_ids, prefix_lm, window_with_global),
    *(chunks, shared_prompt, blocks, column_ranges, tree, mask_mod, flex_mask),
)


@pytest.mark.sampled(cases="every value")
@pytest.mark.parametrize("case", range(24))
@pytest.mark.parametrize("builder", BUILDERS)
def test_mask_is_its_definition(builder: Callable[[], tuple[BlockMask, Tensor]], case: int) -> None:
    check(*builder())


@pytest.mark.parametrize("case", range(12))
def test_algebra_is_that_of_dense_masks(case: int) -> None:
    queries, keys = size(), size()

    def draw() -> BlockMask:
        leading = random.choice([1, 2]), random.choice([1, 3])
        matrix = torch.rand(*leading, -(-queries // 128), -(-keys // 128)) < 0.5
        some = BlockMask.window(queries, keys, random_bound(), random_bound())
        full = BlockMask.blocks(matrix, 128, queries, keys)
        dense = BlockMask.from_dense((torch.rand(*leading, queries, keys) < 0.5) & full.to_dense())
        return random.choice([some, full, dense])

    a, b = draw(), draw()
    check(a & b, a.to_dense() & b.to_dense())
    check(a | b, a.to_dense() | b.to_dense())
    check(~a, ~a.to_dense())
    check(~~a, a.to_dense())
    with pytest.raises(TypeError):
        a & 1


@pytest.mark.parametrize("case", range(8))
def test_past_the_counts_is_garbage(case: int) -> None:
    mask, expected = random.choice(BUILDERS)()
    mask = BlockMask.from_dense(expected & (torch.rand(*expected.shape[:2], expected.shape[2], 1) < 0.1)) | mask
    lists = {}
    for side in ("kv", "q"):
        counts, indices, tiles = (getattr(mask, f"{side}_{name}") for name in ("counts", "indices", "tiles"))
        past = torch.arange(indices.shape[3] + 2) >= counts.unsqueeze(3)
        wider = [torch.nn.functional.pad(each, (0, 2)).masked_fill(past, GARBAGE) for each in (indices, tiles)]
        lists |= dict(zip((f"{side}_counts", f"{side}_indices", f"{side}_tiles"), (counts, *wider)))
    dirty = BlockMask(mask.seq_lengths, tiles=mask.tiles, **lists)
    assert (dirty.kv_indices == GARBAGE).any() and torch.equal(dirty.kv_counts, mask.kv_counts)
    assert torch.equal(dirty.to_dense(), mask.to_dense())
    assert (dirty.partial_blocks(), dirty.sparsity()) == (mask.partial_blocks(), mask.sparsity())
    check(dirty & mask, expected)
    check(~dirty, ~expected)


def test_lists_may_have_any_order() -> None:
    mask = BlockMask.causal(513, 513)
    orders = [torch.cat([torch.randperm(n), torch.arange(n, 5)]) for n in mask.kv_counts.flatten().tolist()]
    order = torch.stack(orders)[None, None]
    lists = [each.gather(3, order) for each in (mask.kv_indices, mask.kv_tiles)]
    shuffled = BlockMask((513, 513), mask.kv_counts, *lists, mask.tiles)
    assert torch.equal(shuffled.to_dense(), mask.to_dense())
    assert all(torch.equal(getattr(shuffled, name), getattr(mask, name)) for name in FIELDS[3:])


def test_equal_tiles_are_stored_once() -> None:
    assert len(BlockMask.causal(4096, 4096).tiles) == 1
    assert len(BlockMask.window(4096, 4096, 1024, 0).tiles) == 2
    assert len(BlockMask.window(4096, 4096, 1000, 7).tiles) == 4
    assert len(BlockMask.causal(4000, 4000).tiles) == 2  # the last has its tail
    assert len(BlockMask.documents([0, 1024, 1280, 4096], causal=True).tiles) == 1
    several = BlockMask.from_dense(torch.ones(3, 2, 640, 640, dtype=torch.bool).tril())
    assert len(several.tiles) == 1 and several.shape == (3, 2, 640, 640)
    in_chunks = BlockMask.from_mask_mod(lambda b, h, q, k: q >= k, 2, 2, 1280, 1280)
    assert len(in_chunks.tiles) == 1 and in_chunks.partial_blocks() == 40


def test_chunks_with_different_tiles() -> None:
    table = torch.rand(1100, 1000) < 0.5
    mask = BlockMask.from_mask_mod(lambda b, h, q, k: table[q, k], 1, 1, 1100, 1000)
    assert len(mask.tiles) == 72 > _mask_builders.ELEMENT_BLOCKS
    check(mask, table[None, None])


def test_full_blocks_at_the_end_have_no_tile() -> None:
    for mask in (BlockMask.window(300, 513, None, None), BlockMask.blocks(torch.ones(3, 5).bool(), 128, 300, 513)):
        assert len(mask.tiles) == 0 and mask.visible_blocks() == 15 and mask.sparsity() == 0
        assert (mask.kv_tiles == -1).all() and mask.to_dense().all()


def test_tiles_with_the_same_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = torch.rand(400, 500) < 0.5
    monkeypatch.setattr(_mask_tiles, "_hashes", lambda tiles: torch.zeros(len(tiles), dtype=torch.int64))
    mask = BlockMask.from_dense(dense)
    assert len(mask.tiles) == 16
    check(mask, dense[None, None])


@pytest.mark.parametrize("case", range(20))
def test_unions_of_any_intervals(case: int) -> None:
    """Also ranges of blocks that are in one another."""
    batch, heads, queries, keys = random.choice([1, 2]), random.choice([1, 2]), size(), size()
    spread = random.choice([5, 200])
    intervals = []
    for _ in range(random.randint(1, 4)):
        start = random.randint(-50, keys) + torch.randint(0, spread, (batch, heads, queries))
        intervals.append((start, start + random.randint(-100, 300) + torch.randint(0, spread, (heads, queries))))
    key = torch.arange(keys)
    dense = sum((start.unsqueeze(3) <= key) & (key < end.unsqueeze(3)) for start, end in intervals)
    entries = _mask_builders.from_intervals(Grid(batch, heads, queries, keys), intervals)
    check(BlockMask._from_entries(entries), torch.as_tensor(dense).bool())


@pytest.mark.parametrize("case", range(10))
def test_flex_lists_that_no_mask_mod_made(case: int) -> None:
    """Full blocks, and partial ones with a mask_mod that also shows what is not listed. Past the counts is garbage."""
    queries, keys, side = size(), size(), random.choice([32, 64, 128, 96, 256])
    kind = torch.randint(0, 3, (2, 3, -(-queries // side), -(-keys // side)))
    has_mod = case % 2 == 0  # else full blocks only, and no function that could be called
    lists = []
    for listed in (kind == 1) & has_mod, kind == 2:
        counts = listed.sum(3, dtype=torch.int32)
        indices = (~listed).byte().sort(dim=3, stable=True).indices.int()
        lists += [counts, indices.masked_fill(torch.arange(kind.shape[3]) >= counts.unsqueeze(3), GARBAGE)]

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert has_mod
        return (q + k) % 3 != 0

    options = {"BLOCK_SIZE": side, "mask_mod": mod, "seq_lengths": (queries, keys), "compute_q_blocks": False}
    i, j = positions(queries, keys)
    kind = kind.repeat_interleave(side, 2).repeat_interleave(side, 3)[:, :, :queries, :keys]
    expected = (kind == 2) | ((kind == 1) & has_mod & ((i + j) % 3 != 0))
    check(BlockMask.from_flex(flex.BlockMask.from_kv_blocks(*lists, **options)), expected)


# Long masks


class Recorder(TorchDispatchMode):
    """The bytes of the largest tensor that ops make, and of all."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {each.untyped_storage().data_ptr() for each in pytree.tree_leaves(args) if isinstance(each, Tensor)}
        result = func(*args, **(kwargs or {}))
        for each in pytree.tree_leaves(result):
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in inputs:
                self.largest = max(self.largest, each.untyped_storage().nbytes())
                self.total += each.untyped_storage().nbytes()
        return result


LONG = 65536
LENGTHS = [0, *sorted(torch.randperm(LONG, generator=torch.Generator().manual_seed(0))[:127].tolist()), LONG]
DOCUMENT = torch.bucketize(torch.arange(LONG), torch.tensor(LENGTHS), right=True)
LONG_MASKS: dict[str, tuple[Callable[[], BlockMask], Callable[[Tensor, Tensor], Tensor]]] = {
    "causal": (lambda: BlockMask.causal(LONG, LONG), lambda i, j: j <= i),
    "window": (lambda: BlockMask.window(LONG, LONG, 1000, 7), lambda i, j: (j >= i - 1000) & (j <= i + 7)),
    "documents": (lambda: BlockMask.documents(LENGTHS), lambda i, j: DOCUMENT[i] == DOCUMENT[j]),
    "ids": (
        lambda: BlockMask.documents(ids=DOCUMENT, causal=True),
        lambda i, j: (DOCUMENT[i] == DOCUMENT[j]) & (j <= i),
    ),
    "prefix": (lambda: BlockMask.prefix_lm(12345, LONG), lambda i, j: (j < 12345) | (j <= i)),
    "global": (
        lambda: BlockMask.window_with_global(LONG, 500, 100),
        lambda i, j: ((i - j).abs() <= 500) | (i < 100) | (j < 100),
    ),
    "prompt": (
        lambda: BlockMask.shared_prompt(1000, torch.tensor(LENGTHS).diff()),
        lambda i, j: (j <= i) & ((j < 1000) | ((i >= 1000) & (DOCUMENT[i - 1000] == DOCUMENT[j - 1000]))),
    ),
}


def test_the_recorder_sees_large_tensors() -> None:
    with Recorder() as recorder:
        (torch.ones(1000, 1) * torch.ones(1000)).view(-1)
    assert recorder.largest == 4_000_000 and recorder.total < 4_100_000


@pytest.mark.parametrize("name", LONG_MASKS)
def test_long_masks_need_little_memory(name: str) -> None:
    build, visible = LONG_MASKS[name]
    with Recorder() as recorder:
        mask = build()
    assert recorder.largest < LONG * LONG // 256  # of 1 byte an element; there are S^2 / 16384 blocks
    assert recorder.total < LONG * LONG // 8
    keys = torch.arange(mask.shape[3])
    for query in torch.randint(0, mask.shape[2], (20,)).tolist():
        row, inside = divmod(query, 128)
        count = int(mask.kv_counts[0, 0, row])
        seen = torch.zeros(-(-len(keys) // 128), 128, dtype=torch.bool)
        numbers = mask.kv_tiles[0, 0, row, :count].long()
        words = torch.cat([mask.tiles[:, inside], torch.full((1, 4), -1)])[numbers]
        seen[mask.kv_indices[0, 0, row, :count].long()] = plain_bits(words)
        assert torch.equal(seen.flatten()[: len(keys)], visible(torch.tensor(query), keys))
