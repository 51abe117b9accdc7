"""The paper model of attention with block masks: its steps are those of the lists."""

from __future__ import annotations

import pytest

from benchmarks.model.attention_work import (
    QUERIES_OF_SEPARATE,
    AttentionTile,
    Division,
    ListedProblem,
    steps_of_queries,
)
from benchmarks.model.evidence import Evidence
from benchmarks.model.mask_work import lists_of
from benchmarks.suites.bench_masks import Mask
from cuda_ext.block_mask import BLOCK, BlockMask

LENGTH, HEADS, KEY_HEADS = 15 * BLOCK, 6, 2
TILES = [(128, 128), (128, 64), (128, 32), (64, 128), (64, 64), (32, 128), (32, 64)]


def listed_pairs(mask: BlockMask) -> set[tuple[int, int]]:
    """Blocks of queries and of keys, from the lists of the blocks of queries."""
    counts, indices = mask.kv_counts[0, 0].tolist(), mask.kv_indices[0, 0].tolist()
    return {(row, column) for row, count in enumerate(counts) for column in indices[row][:count]}


def forward_steps(pairs: set[tuple[int, int]], queries: int, keys: int) -> list[int]:
    """Of each tile of queries of a head, the longest first: one for each tile of keys in a listed block."""
    steps = []
    for query in range(0, LENGTH, queries):
        steps.append(sum((query // BLOCK, key // BLOCK) in pairs for key in range(0, LENGTH, keys)))
    return sorted(steps, reverse=True)


def backward_steps(pairs: set[tuple[int, int]], queries: int, keys: int) -> list[int]:
    """Of each tile of keys of a key head: one for each tile of queries of each of its query heads."""
    steps = []
    for key in range(0, LENGTH, keys):
        count = 0
        for _ in range(HEADS // KEY_HEADS):
            count += sum((query // BLOCK, key // BLOCK) in pairs for query in range(0, LENGTH, queries))
        steps.append(count)
    return sorted(steps, reverse=True)


@pytest.mark.parametrize("sizes", TILES, ids=str)
@pytest.mark.parametrize("name", ["causal documents", "window + global", "prefix-LM"])
def test_steps_are_those_of_the_lists(name: str, sizes: tuple[int, int]) -> None:
    mask = Mask(name, LENGTH)
    pairs = listed_pairs(mask.build("cpu"))
    assert 0 < len(pairs) < (LENGTH // BLOCK) ** 2
    problem = ListedProblem(1, LENGTH, HEADS, 64, KEY_HEADS, lists=lists_of(mask))
    assert problem.pairs() == BLOCK**2 * len(pairs)
    tile = AttentionTile(64, 64, *sizes, warps=4, min_blocks=1, stages=1, shared_bytes=0)
    assert problem.steps_of_head(tile, backward=False) == forward_steps(pairs, *sizes)
    assert problem.steps_of_head(tile, backward=True) == backward_steps(pairs, *sizes)
    # The separate kernel for the gradients of queries has tiles of its own; its blocks are of all heads.
    of_head = forward_steps(pairs, QUERIES_OF_SEPARATE, sizes[1])
    assert steps_of_queries(problem, tile) == sorted(of_head * HEADS, reverse=True)


@pytest.mark.parametrize("backward", [False, True])
def test_lists_that_are_much_longer_than_others_have_parts(backward: bool) -> None:
    """As LongLists in csrc/attention/scheduler.cuh, whose tiles and parts the emulator tells."""
    choice = Evidence.recorded().simt.attention_choice(
        *(backward, "bfloat16", (32 * BLOCK, 32 * BLOCK), (HEADS, HEADS), (64, 64), 1, (-1, -1), True, 90, 132)
    )
    tile = AttentionTile(**choice.tile)
    own, looped = (tile.block_n, tile.block_m) if backward else (tile.block_m, tile.block_n)
    assert (choice.long_tiles, choice.most_parts) == (BLOCK // own, 8)
    problem = ListedProblem(1, 32 * BLOCK, HEADS, 64, lists=((3,) * 10 + (30,) + (5,) * 21,) * 2)
    division = Division(choice.long_tiles, choice.most_parts, Evidence.recorded().simt.SHORTEST_PART)
    steps = problem.steps_of_head(tile, backward, division)
    # The longest that is not divided has 5 blocks.
    of_block = BLOCK // looped
    assert steps[: 6 * (BLOCK // own)] == [5 * of_block] * 6 * (BLOCK // own)
    assert sum(steps) == sum(problem.steps_of_head(tile, backward))
    assert max(problem.steps_of_head(tile, backward)) == 30 * of_block == 6 * max(steps)
