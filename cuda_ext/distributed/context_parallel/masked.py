"""Block masks of sequences that ranks share: which keys each rank needs, and the mask of each of its calls.

A rank computes all of its rows by one call: its blocks of rows and the blocks of keys that they see, both in ascending
order, and a mask of these blocks alone. What depends on positions takes a call for each range of rows, whose keys are
all from the first to the last that the range sees. Lists of a mask are read once for each layout.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from cuda_ext import _mask_lists as lists
from cuda_ext._mask_lists import Entries
from cuda_ext.block_mask import BLOCK, BlockMask
from cuda_ext.distributed.context_parallel.layout import Layout, Range, located, size, union
from cuda_ext.distributed.context_parallel.parts import Band, Part, Problem, Segment, Transfer, pieces_of

Made = TypeVar("Made")

_made: weakref.WeakKeyDictionary[BlockMask, dict[Any, Any]] = weakref.WeakKeyDictionary()


def _once(mask: BlockMask, key: Any, make: Callable[[], Made]) -> Made:
    """What is made of a mask, as long as the mask lives; it must not refer to the mask."""
    of_mask = _made.setdefault(mask, {})
    if key not in of_mask:
        of_mask[key] = make()
    found: Made = of_mask[key]
    return found


def mask_of_heads(mask: BlockMask, heads: slice) -> BlockMask:
    """The mask of some query heads."""
    count = mask.shape[1]
    if count == 1 or heads == slice(0, count):
        return mask
    return _once(mask, ("heads", heads.start, heads.stop), lambda: _of_heads(mask, heads))


def _of_heads(mask: BlockMask, heads: slice) -> BlockMask:
    entries = mask._entries
    rows, columns = (torch.arange(count, device=mask.device) for count in (entries.grid.rows, entries.grid.columns))
    return BlockMask._from_entries(lists.selected(entries, heads, rows, columns))


def digest(mask: BlockMask) -> str:
    """Equal for equal masks: ranks compare it."""

    def made() -> str:
        found = hashlib.blake2b(digest_size=8)
        for tensor in mask._entries[1:]:
            found.update(tensor.cpu().numpy().tobytes())
        return found.hexdigest()

    return _once(mask, "digest", made)


def check_blocks(op: str, name: str, layout: Layout) -> None:
    """ValueError unless the ranges of a layout are whole blocks of a mask."""
    for rank, ranges in enumerate(layout.ranges):
        for first, end in ranges:
            if first % BLOCK or (end % BLOCK and end != layout.length):
                length, ranks = layout.length, layout.ranks
                raise ValueError(
                    f"{op}: expected {name} whose ranges begin and end at multiples of {BLOCK}, the blocks of "
                    f"block_mask, got rows {first} to {end} on rank {rank}; give shard_sequence and {op} "
                    f"Layout.balanced(block_mask, {ranks}) or Layout.zigzag({length}, {ranks}, multiple={BLOCK}), with "
                    "ulysses_group for its other ranks and .divided(ulysses_group.size())"
                )


class MaskedProblem:
    """What `gathered` and `from_one` of `parts` tell of a problem without a mask, of one with it.

    band: hides keys in addition. by_position: whether logits or dropout depend on positions. Only transfers of `rank`
    have calls.
    """

    def __init__(self, mask: BlockMask, problem: Problem, band: Band, rank: int, *, by_position: bool) -> None:
        self._mask, self._problem, self._band = mask, problem, band
        self._rank, self._by_position = rank, by_position
        self._key = (problem.queries, problem.keys, band)

    def gathered(self, rank: int) -> Transfer:
        """All keys that the rank sees. Each of its rows is in one call."""
        key = (*self._key, self._rank, self._by_position, rank)
        return _once(self._mask, key, lambda: self._transfer(rank, None))

    def from_one(self, rank: int, source: int) -> Transfer:
        """The keys of rank `source` that the rank sees."""
        key = (*self._key, self._rank, self._by_position, rank, source)
        return _once(self._mask, key, lambda: self._transfer(rank, source))

    @functools.cached_property
    def _entries(self) -> Entries:
        if self._band == Band(None, None):
            return self._mask._entries
        window = BlockMask.window(*self._mask.seq_lengths, *self._band, device=self._mask.device)
        return (self._mask & window)._entries

    def _seen(self) -> tuple[tuple[tuple[Range, ...], ...], ...]:
        """For each rank and each range of its rows, the keys that the rows see, by whole blocks."""
        entries, layout = self._entries, self._problem.queries
        numbers = torch.empty(entries.grid.rows, dtype=torch.int64)
        count = 0
        for ranges in layout.ranges:
            for first, end in ranges:
                numbers[first // BLOCK : -(-end // BLOCK)] = count
                count += 1
        seen = torch.zeros(count, entries.grid.columns, dtype=torch.bool, device=entries.line.device)
        seen[numbers.to(seen.device)[entries.line % entries.grid.rows], entries.column] = True
        found = iter([_ranges_of(row.nonzero().flatten().tolist(), entries.grid.keys) for row in seen.cpu()])
        return tuple(tuple(next(found) for _ in ranges) for ranges in layout.ranges)

    def _transfer(self, rank: int, source: int | None) -> Transfer:
        queries, layout = self._problem.queries.ranges[rank], self._problem.keys
        seen = _once(self._mask, self._key, self._seen)[rank]
        limits = ((0, layout.length),) if source is None else layout.ranges[source]
        runs: list[tuple[Sequence[Range], Sequence[Range]]]
        if self._by_position:
            runs = [([rows], _hull(_common(keys, [limit]))) for rows, keys in zip(queries, seen) for limit in limits]
        else:
            runs = [(queries, _common(union(part for keys in seen for part in keys), limits))]
        runs = [(rows, keys) for rows, keys in runs if rows and (keys or source is None)]
        keys = union(part for _, of_run in runs for part in of_run)
        parts = [self._part(queries, rows, keys, of_run) for rows, of_run in runs] if rank == self._rank else []
        sources = range(layout.ranks) if source is None else [source]
        return Transfer(pieces_of(layout, keys, sources), keys, tuple(parts))

    def _part(self, own: Sequence[Range], rows: Sequence[Range], there: Sequence[Range], keys: Sequence[Range]) -> Part:
        """own: all rows of the rank; there: all keys of the transfer."""
        row_hull = rows[0][0], rows[-1][1]
        if not keys:
            return Part((Segment(row_hull, (0, 0), 0, 0),), _span(own, rows), (0, 0))
        key_hull = keys[0][0], keys[-1][1]
        diagonal = self._problem.documents[0].diagonal
        offset = key_hull[1] - row_hull[1] - diagonal if self._by_position else 0
        return Part(
            (Segment(row_hull, key_hull, 0, offset),), _span(own, rows), _span(there, keys), self._selected(rows, keys)
        )

    def _selected(self, rows: Sequence[Range], keys: Sequence[Range]) -> BlockMask:
        entries = self._entries
        heads = slice(0, entries.grid.heads)
        blocks = [_blocks(ranges, entries.line.device) for ranges in (rows, keys)]
        return BlockMask._from_entries(lists.selected(entries, heads, *blocks))


def _ranges_of(blocks: Iterable[int], length: int) -> tuple[Range, ...]:
    return union((block * BLOCK, min(length, (block + 1) * BLOCK)) for block in blocks)


def _blocks(ranges: Iterable[Range], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(first // BLOCK, -(-end // BLOCK), device=device) for first, end in ranges])


def _common(ranges: Sequence[Range], limits: Sequence[Range]) -> tuple[Range, ...]:
    return union(rows for rows, _ in located(ranges, limits))


def _hull(ranges: Sequence[Range]) -> tuple[Range, ...]:
    return ((ranges[0][0], ranges[-1][1]),) if ranges else ()


def _span(ranges: Sequence[Range], wanted: Sequence[Range]) -> Range:
    """Where rows have `wanted` ones, which are adjacent there."""
    (first, _), *_ = (place for _, place in located(ranges, wanted))
    return first, first + size(wanted)
