"""Bytes that a product on wgmma reads from memory: a simulation of L2.

Concurrent clusters advance through k in step. Each k tile of a row group or of a column of tiles is one entry of a
cache of which the least recently used entry is evicted; so are the tiles of the output, which are written at the end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

LINE = 128  # bytes of a row of a k tile


class Cache:
    """Evicts the least recently used entry."""

    def __init__(self, capacity: float) -> None:
        self.room = capacity
        self.entries: OrderedDict[tuple[object, ...], float] = OrderedDict()
        self.missed = 0.0

    def touch(self, key: tuple[object, ...], size: float, read: bool = True) -> None:
        if key in self.entries:
            self.entries.move_to_end(key)
            return
        self.missed += size * read
        self.entries[key] = size
        self.room -= size
        while self.room < 0:
            self.room += self.entries.popitem(last=False)[1]


def bytes_read(
    plan: Mapping[str, int], order: Sequence[Sequence[int]], capacity: float, element_bytes: int, slices: int = 16
) -> float:
    """Bytes of the operands that come from memory, for a plan of `torch.ops.cuda_ext._gemm_plan`.

    order: the places of its work items, of `_simt.gemm_order`.
    capacity: bytes of L2 that hold data.
    slices: the k tiles of a work item are simulated in so many pieces, or fewer if there are fewer.
    """
    cache = Cache(capacity)
    pieces = min(slices, plan["k_tiles"])
    depth = LINE * plan["k_tiles"] / pieces
    of_row, of_column = plan["cluster"] * plan["block_m"] * depth, plan["block_n"] * depth
    written = plan["cluster"] * plan["block_m"] * plan["block_n"] * element_bytes
    clusters = plan["clusters"]
    for first in range(0, len(order), clusters):
        wave = order[first : first + clusters]
        for piece in range(pieces):
            for split, _, row, column in wave:
                cache.touch(("a", row, split, piece), of_row)
                cache.touch(("b", column, split, piece), of_column)
        for split, _, row, column in wave:
            cache.touch(("out", row, column, split), written, read=False)
    return cache.missed
