"""Block masks of sequences that ranks share, against one rank."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from context_common import Case, Check, loss_of
from ranks import on_ranks

from cuda_ext import BlockMask, flash_attention
from cuda_ext import _mask_lists as lists
from cuda_ext.distributed import context_parallel as cp
from cuda_ext.distributed.context_parallel import Layout, masked
from cuda_ext.distributed.context_parallel.masked import MaskedProblem
from cuda_ext.distributed.context_parallel.parts import Band, Document, Problem

# Each with the batch and heads of its mask.
CASES: dict[str, tuple[Case, tuple[int, int]]] = {
    "plain": (Case(4, 2, (1100, 1100)), (1, 1)),
    "of batches and heads": (Case(4, 2, (900, 1290)), (2, 4)),
    "causal and window": (Case(4, 2, (1100, 1003), {"causal": True, "window": (300, None)}), (1, 4)),
    "sinks": (Case(4, 1, (1025, 700), {"sinks": (4,)}), (2, 1)),
    "alibi": (Case(4, 2, (1100, 1000), {"alibi_slopes": (4,), "window": (None, 400)}), (1, 1)),
    "bias": (Case(4, 2, (900, 901), {"attn_bias": (4, 900, 901)}), (1, 4)),
    "mask": (Case(4, 2, (900, 770), {"attn_mask": (900, 770), "causal": True}), (1, 1)),
    "relative bias": (Case(4, 4, (900, 1001), {"relative_bias": (4, 301)}), (2, 1)),
}


def random_mask(batch: int, heads: int, queries: int, keys: int) -> BlockMask:
    """Blocks that are full, partial and empty, a row of blocks that sees nothing, keys that nobody sees."""
    rows, columns = -(-queries // 128), -(-keys // 128)
    states = torch.rand(batch, heads, rows, columns)
    states[:, :, torch.randint(rows, ())] = 1.0
    states[:, :, :, torch.randint(columns, ())] = 1.0
    blocks = states.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :queries, :keys]
    return BlockMask.from_dense((blocks < 0.3) | ((blocks < 0.5) & (torch.rand(blocks.shape) < 0.4)))


def layouts_of(kind: str, case: Case, ranks: int) -> list[Layout]:
    """Of queries and of keys, by whole blocks."""
    if kind == "zigzag":
        return [Layout.zigzag(length, ranks, multiple=128) for length in case.rows]
    made = []
    for length in case.rows:  # random blocks; some ranks may have none
        owners = torch.randint(ranks, (-(-length // 128),)).tolist()
        ranges = [
            tuple((n * 128, min(length, n * 128 + 128)) for n, owner in enumerate(owners) if owner == rank)
            for rank in range(ranks)
        ]
        made.append(Layout(length, tuple(ranges)))
    return made


def check_of(name: str, kind: str, **options: Any) -> Check:
    case, shape = CASES[name]
    check = Check(case, kind, layouts=layouts_of(kind, case, dist.get_world_size()))
    options["block_mask"] = random_mask(*shape, *case.rows)
    check.whole.options.update(options)
    check.options.update(options)
    return check


@on_ranks(4)
@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize(("kind", "method"), [("zigzag", "p2p"), ("uneven", "all_gather"), ("uneven", "p2p")])
def test_ring(case: str, kind: str, method: str) -> None:
    check_of(case, kind).run(cp.ring_attention, method=method)


@on_ranks(4)
@pytest.mark.parametrize("case", ["of batches and heads", "causal and window", "bias", "alibi"])
def test_ulysses(case: str) -> None:
    check_of(case, "uneven").run(cp.ulysses_attention)


@on_ranks(4)
@pytest.mark.parametrize("case", ["of batches and heads", "relative bias"])
@pytest.mark.parametrize("method", ["all_gather", "p2p"])
def test_two_dimensions(case: str, method: str) -> None:
    """Layouts of the ring are whole blocks; those inside of a host are not."""
    rank = dist.get_rank()
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3], [0, 1], [2, 3])]
    given, shape = CASES[case]
    check = Check(given, "", layouts=[layout.divided(2) for layout in layouts_of("uneven", given, 2)])
    check.whole.options["block_mask"] = check.options["block_mask"] = random_mask(*shape, *given.rows)
    check.run(cp.ring_attention, group=groups[rank % 2], ulysses_group=groups[2 + rank // 2], method=method)


@on_ranks(3)
@pytest.mark.parametrize("method", ["all_gather", "p2p"])
def test_results_repeat(method: str) -> None:
    check = check_of("causal and window", "uneven")
    found = []
    for _ in range(2):
        results = check.call(cp.ring_attention, method=method)
        loss = loss_of(results, [torch.ones_like(tensor) for tensor in results])
        found.append([*results, *torch.autograd.grad(loss, check.own)])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@on_ranks(4)
@pytest.mark.parametrize("name", ["ring", "p2p", "ulysses"])
def test_dropout_is_that_of_one_rank(name: str) -> None:
    check = check_of("of batches and heads", "uneven", dropout_p=0.4)
    function = cp.ulysses_attention if name == "ulysses" else cp.ring_attention
    arguments = {"method": "p2p"} if name == "p2p" else {}
    check.run(function, same_state=True, **arguments)
    without = flash_attention(*check.whole.tensors, **{**check.whole.options, "dropout_p": 0.0})
    assert not torch.allclose(check.whole.attend()[0], without)


@on_ranks(2)
def test_lists_are_read_once_and_die_with_the_mask() -> None:
    mask = random_mask(1, 4, 512, 512)
    layout = Layout.balanced(mask, 2)
    own = [torch.randn(1, layout.rows(dist.get_rank()), 4, 4) for _ in range(3)]
    cp.ring_attention(*own, layout=layout, block_mask=mask)
    made = dict(masked._made[mask])
    cp.ring_attention(*own, layout=layout, block_mask=mask)
    assert made
    assert made.keys() == masked._made[mask].keys()
    assert all(value is masked._made[mask][key] for key, value in made.items())
    del made
    dead = weakref.ref(mask)
    del mask
    gc.collect()
    assert dead() is None


@on_ranks(2)
def test_only_blocks_of_keys_that_are_seen_travel() -> None:
    rank = dist.get_rank()
    mask = BlockMask.documents([0, 500, 640, 1100], causal=True)
    layout = Layout.balanced(mask, 2)
    problem = Problem(layout, layout, (Document((0, 1100), (0, 1100)),), Band(None, None), False, False, True)
    dense = mask.to_dense()[0, 0]
    for by_position in (False, True):
        transfer = MaskedProblem(mask, problem, Band(None, None), rank, by_position=by_position).gathered(rank)
        came = torch.zeros(1100, dtype=torch.bool)
        for first, end in transfer.keys:
            came[first:end] = True
        seen = F.pad(dense[layout.positions(rank)].any(0), (0, 52)).view(-1, 128).any(1).repeat_interleave(128)[:1100]
        assert torch.equal(came, seen)
        assert 0 < int(came.sum()) < 1100


@on_ranks(2)
def test_errors() -> None:
    mask = BlockMask.causal(1000, 1000)
    own = [torch.randn(1, 500, 4, 4) for _ in range(3)]
    call = "cuda_ext::ring_attention: expected "
    with pytest.raises(ValueError, match=r"multiples of 128.*rows 0 to 250 on rank 0.*Layout.balanced\(block_mask, 2"):
        cp.ring_attention(*own, block_mask=mask)
    with pytest.raises(
        RuntimeError, match=call + r"block_mask of the whole sequence.*\(1, 4, 1000, 1000\), got \(1, 1, 9"
    ):
        cp.ring_attention(*own, block_mask=BlockMask.causal(999, 1000))
    with pytest.raises(RuntimeError, match=call + r"block_mask to be a cuda_ext.BlockMask, got Tensor; give booleans"):
        cp.ring_attention(*own, block_mask=torch.ones(1000, 1000, dtype=torch.bool))
    heads = BlockMask.from_dense(torch.rand(1, 3, 1000, 1000) < 0.5)
    with pytest.raises(RuntimeError, match="block_mask of the whole sequence"):
        cp.ulysses_attention(*own, block_mask=heads)
    ends = torch.tensor([0, 1000], dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"no block_mask with packed sequences, got one;.*BlockMask.documents"):
        cp.ring_attention_varlen(*(tensor[0] for tensor in own), ends, ends, block_mask=mask)
    other = BlockMask.window(1000, 1000, 300 + dist.get_rank(), 0)
    with pytest.raises(RuntimeError, match=r"expected the same arguments on all 2 ranks, got .*block_mask"):
        cp.ulysses_attention(*own, block_mask=other)


def test_selected_blocks_are_those_of_the_dense_mask() -> None:
    for _ in range(20):
        queries, keys = torch.randint(1, 900, (2,)).tolist()
        mask = random_mask(2, 3, queries, keys)
        rows, columns = (
            torch.randperm(-(-n // 128))[: int(torch.randint(1, -(-n // 128) + 1, ()))].sort().values
            for n in (queries, keys)
        )
        first, end = sorted(torch.randperm(4)[:2].tolist())
        small = BlockMask._from_entries(lists.selected(mask._entries, slice(first, end), rows, columns))
        i, j = (
            torch.cat([torch.arange(n * 128, min(n * 128 + 128, length)) for n in kept.tolist()])
            for kept, length in ((rows, queries), (columns, keys))
        )
        assert torch.equal(small.to_dense(), mask.to_dense()[:, first:end][:, :, i][:, :, :, j])
        assert len(small.tiles) <= len(mask.tiles)
