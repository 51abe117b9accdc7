"""Divides blocks of rows among ranks: equal work, equal numbers of rows, and few keys for each rank.

Longest processing time first (Graham, Bounds on Multiprocessing Timing Anomalies, SIAM Journal on Applied Mathematics
17, 1969): of the blocks, that with the most work goes to the rank with the least. Among ranks whose work differs by
less than the slack, a block goes to one that has the block before or after it, as neighbours see nearly the same keys.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from cuda_ext.block_mask import BLOCK, BlockMask

SLACK = 0.05


def owners(work: Sequence[float], ranks: int, slack: float = SLACK) -> list[int]:
    """The rank of each block. Numbers of blocks differ by at most one."""
    fewest, extra = divmod(len(work), ranks)
    found, load, count = [-1] * (len(work) + 1), [0.0] * ranks, [0] * ranks  # the last: after the last block
    tolerance = slack * sum(work) / ranks
    by_load = [(0.0, rank) for rank in range(ranks)]

    def has_room(rank: int) -> bool:
        return count[rank] < fewest or (count[rank] == fewest and extra > 0)

    for block in sorted(range(len(work)), key=lambda block: (work[block], block), reverse=True):
        while by_load[0][0] != load[by_load[0][1]] or not has_room(by_load[0][1]):
            heapq.heappop(by_load)
        least, rank = by_load[0]
        for near in (found[block + 1], found[block - 1]):
            if near >= 0 and has_room(near) and load[near] <= least + tolerance:
                rank = near
                break
        extra -= count[rank] == fewest
        found[block] = rank
        load[rank] += work[block]
        count[rank] += 1
        heapq.heappush(by_load, (load[rank], rank))
    return found[:-1]


def ranges_of(of_blocks: Sequence[int], ranks: int, length: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The ranges of rows of each rank."""
    found: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for block, rank in enumerate(of_blocks):
        found[rank].append((block * BLOCK, min(length, (block + 1) * BLOCK)))
    return tuple(map(tuple, found))


def work_of_mask(block_mask: BlockMask) -> list[int]:
    """For each block of queries, how many blocks of keys it visits, of all batches and heads."""
    counts: list[int] = block_mask.kv_counts.sum((0, 1)).tolist()
    return counts


def work_of_documents(cu_seqlens: Tensor | Sequence[int], causal: bool) -> list[int]:
    """For each block of rows of packed documents, how many keys its rows see together."""
    ends = torch.as_tensor(cu_seqlens, device="cpu").long()
    rows = torch.arange(int(ends[-1]))
    document = torch.searchsorted(ends, rows, right=True)
    start, end = ends[document - 1], ends[document]
    visible = rows + 1 - start if causal else end - start
    padded = visible.new_zeros(-(-len(rows) // BLOCK) * BLOCK)
    padded[: len(rows)] = visible
    found: list[int] = padded.view(-1, BLOCK).sum(1).tolist()
    return found
