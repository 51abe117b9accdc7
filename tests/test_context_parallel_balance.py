"""Layouts that balance masks and documents."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from cuda_ext import BlockMask
from cuda_ext.distributed.context_parallel import Layout
from cuda_ext.distributed.context_parallel.balance import work_of_documents
from cuda_ext.distributed.context_parallel.layout import Range

ROWS = 8192  # of each rank


def documents(seed: int, total: int, kind: str) -> list[int]:
    """cu_seqlens of documents with long-tailed lengths."""
    draw = random.Random(seed)
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        length = draw.lognormvariate(7.5, 1.5) if kind == "lognormal" else 300 * draw.paretovariate(0.8)
        lengths.append(int(min(left, total // 2, max(16, length))))
    draw.shuffle(lengths)
    return [0, *torch.tensor(lengths).cumsum(0).tolist()]


def head_tail(ends: list[int], ranks: int) -> Layout:
    """Each document by itself in zigzag, as others divide them."""
    ranges: list[list[Range]] = [[] for _ in range(ranks)]
    for first, end in zip(ends, ends[1:]):
        for rank, own in enumerate(Layout.zigzag(end - first, ranks).ranges):
            ranges[rank] += [(first + low, first + high) for low, high in own]
    return Layout(ends[-1], tuple(map(tuple, ranges)))


LAYOUTS: dict[str, Callable[[list[int], int], Layout]] = {
    "of_documents": Layout.of_documents,
    "balanced": lambda ends, ranks: Layout.balanced(BlockMask.documents(ends, causal=True), ranks),
    "zigzag": lambda ends, ranks: Layout.zigzag(ends[-1], ranks),
    "contiguous": lambda ends, ranks: Layout.contiguous(ends[-1], ranks),
    "head-tail of documents": head_tail,
}


def imbalance(layout: Layout, visible: torch.Tensor) -> float:
    """The most pairs of rows and keys of a rank, relative to the mean. visible: the keys that each row sees."""
    total = torch.cat([visible.new_zeros(1), visible.cumsum(0)])
    pairs = [sum(int(total[end] - total[first]) for first, end in ranges) for ranges in layout.ranges]
    return max(pairs) * layout.ranks / int(total[-1])


def tiles(layout: Layout, ends: list[int]) -> float:
    """The most tiles of 128 rows and keys that a rank visits, relative to its share of those that one rank visits.

    A call's tiles are of one document, and begin with the rows that the rank has of it.
    """

    def visited(ranges: tuple[Range, ...]) -> int:
        count = 0
        for first, end in ranges:
            for begin, stop in zip(ends, ends[1:]):
                if max(first, begin) < min(end, stop):
                    rows = torch.arange(max(first, begin), min(end, stop), 128)
                    count += int((((rows + 128).clamp(max=min(end, stop)) - begin + 127) // 128).sum())
        return count

    return max(map(visited, layout.ranges)) * layout.ranks / visited(((0, ends[-1]),))


def visible_keys(ends: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(1, end - first + 1) for first, end in zip(ends, ends[1:])])


@pytest.mark.parametrize("ranks", [8, 16, 32, 64])
@pytest.mark.parametrize("kind", ["lognormal", "pareto"])
@pytest.mark.parametrize("seed", range(4))
def test_documents_are_balanced(ranks: int, kind: str, seed: int) -> None:
    ends = documents(seed, ranks * ROWS, kind)
    visible = visible_keys(ends)
    found = {name: imbalance(make(ends, ranks), visible) for name, make in LAYOUTS.items()}
    assert found["of_documents"] <= 1.05
    assert found["balanced"] <= 1.05
    assert found["zigzag"] > 1.15
    assert found["contiguous"] > 1.2
    for name in ("of_documents", "balanced"):
        layout = LAYOUTS[name](ends, ranks)
        assert {layout.rows(rank) for rank in range(ranks)} == {ROWS}


def test_documents_stay_whole_enough_for_tiles() -> None:
    """Documents that all ranks divide have tiles that are partly empty."""
    ends = documents(0, 64 * ROWS, "lognormal")
    whole, divided = (tiles(LAYOUTS[name](ends, 64), ends) for name in ("of_documents", "head-tail of documents"))
    assert whole < 1.1
    assert divided > 1.1


@pytest.mark.parametrize("seed", range(3))
def test_neighbours_stay_together(seed: int) -> None:
    """Ranks need fewer keys, and have fewer ranges of rows, than without slack."""
    ranks = 16
    ends = documents(seed, ranks * ROWS, "lognormal")
    mask = BlockMask.documents(ends, causal=True)

    def needs(layout: Layout) -> float:
        owner = torch.empty(layout.length // 128, dtype=torch.int64)
        for rank in range(ranks):
            owner[layout.positions(rank)[::128] // 128] = rank
        seen = torch.zeros(ranks, layout.length // 128)
        entries = mask._entries
        seen[owner[entries.line], entries.column] = 1.0
        return float(seen.mean())

    strict, near = (Layout.balanced(mask, ranks, slack=slack) for slack in (0.0, 0.05))
    assert needs(near) < 0.96 * needs(strict)
    assert 2 * sum(map(len, near.ranges)) < sum(map(len, strict.ranges))


@pytest.mark.parametrize("length", [1, 127, 128, 1000, 128 * 37 + 5])
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_numbers_of_blocks_differ_by_one(length: int, ranks: int) -> None:
    mask = BlockMask.from_dense(torch.rand(2, 1, length, 300) < 0.3)
    for layout in (Layout.balanced(mask, ranks), Layout.of_documents([0, length // 3, length], ranks, causal=False)):
        blocks = [sum(-(-(end - first) // 128) for first, end in ranges) for ranges in layout.ranges]
        assert sum(blocks) == -(-length // 128)
        assert max(blocks) - min(blocks) <= 1
        assert all(first % 128 == 0 for ranges in layout.ranges for first, _ in ranges)


def test_a_causal_sequence_is_balanced_to_a_block() -> None:
    mask = BlockMask.causal(64 * 128, 64 * 128)
    layout = Layout.balanced(mask, 8, slack=0.0)
    counts = mask.kv_counts.flatten()
    work = [int(counts[layout.positions(rank)[::128] // 128].sum()) for rank in range(8)]
    assert max(work) - min(work) <= 1


@pytest.mark.parametrize("causal", [False, True])
def test_work_of_documents_is_their_visible_pairs(causal: bool) -> None:
    ends = [0, 0, 1, 130, 130, 402, 500]
    dense = BlockMask.documents(ends, causal=causal).to_dense()[0, 0]
    expected = [int(rows.sum()) for rows in dense.split(128)]
    assert work_of_documents(ends, causal) == expected
    assert work_of_documents(torch.tensor(ends, dtype=torch.int32), causal) == expected


def test_ranges_of_names_are_whole_blocks_if_asked_for() -> None:
    for make in (Layout.zigzag, Layout.contiguous):
        layout = make(1000, 3, multiple=128)
        assert all(first % 128 == 0 for ranges in layout.ranges for first, _ in ranges)
        assert make(1000, 3) != layout
        assert max(map(layout.rows, range(3))) - min(map(layout.rows, range(3))) <= 256
