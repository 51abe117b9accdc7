"""Which rows of a sequence each rank has."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from cuda_ext.block_mask import BlockMask
from cuda_ext.distributed.context_parallel.balance import SLACK, owners, ranges_of, work_of_documents, work_of_mask

Range = tuple[int, int]  # from the first up to the second

NAMES = ("zigzag", "contiguous")


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which rows of a sequence of ``length`` rows each rank has; a rank holds its rows in ascending order.

    Args:
        length: rows of the whole sequence; of packed sequences, their total.
        ranges: for each rank ``(first, end)`` of its ranges of rows. Together they are all rows, each once; a rank may
            have none. They are stored in ascending order, adjacent ones as one.

    Raises:
        ValueError: ranges that overlap, or leave rows out.
    """

    length: int
    ranges: tuple[tuple[Range, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranges", tuple(merged(of_rank) for of_rank in self.ranges))
        end = 0
        for first, stop in sorted(part for of_rank in self.ranges for part in of_rank):
            if first != end:
                what = "overlap" if first < end else "leave rows out"
                raise ValueError(f"Layout: expected ranges with each row once, got ranges that {what} at row {first}")
            end = stop
        if end != self.length:
            raise ValueError(f"Layout: expected ranges that end at {self.length}, the length, got {end}")

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        """Each call looks up its transfers by layouts, of which those of many ranks are long."""
        return hash((self.length, self.ranges))

    @classmethod
    def contiguous(cls, length: int, ranks: int, *, multiple: int = 1) -> Layout:
        """Rank 0 has the first rows, rank 1 the next; numbers of rows differ by at most one.

        multiple: ranges end at multiples of it or at the end; 128 for block masks. Numbers of rows then differ by so
            many.
        """
        return cls(length, tuple(((first, end),) for first, end in _chunks(length, ranks, multiple)))

    @classmethod
    def zigzag(cls, length: int, ranks: int, *, multiple: int = 1) -> Layout:
        """Of ``2 * ranks`` chunks, rank r has chunks r and ``2 * ranks - 1 - r``, so that a causal mask gives all
        ranks the same work (The Llama 3 Herd of Models, arXiv 2407.21783, section 3.3.2). multiple: as of `contiguous`.
        """
        chunks = _chunks(length, 2 * ranks, multiple)
        return cls(length, tuple((chunks[rank], chunks[-1 - rank]) for rank in range(ranks)))

    @classmethod
    def balanced(cls, block_mask: BlockMask, ranks: int, *, slack: float = SLACK) -> Layout:
        """Blocks of 128 queries of a mask, so that all ranks visit as many blocks of keys, and need few of them.

        Each block goes to the rank with the least work, those with the longest lists first; among ranks whose work
        differs by less than `slack` of their mean, to one that has an adjacent block. Numbers of blocks differ by at
        most one, so that a rank has at most ``128 * ceil(blocks / ranks)`` rows, and memory and the rest of a model
        are balanced, too. See `balance`.

        Args:
            block_mask: of the whole sequence, with as many keys as queries if keys have the same layout.
            slack: default 0.05; 0 balances to a block, and makes each rank need more keys.
        """
        length = block_mask.seq_lengths[0]
        found = owners(work_of_mask(block_mask), ranks, slack)
        return cls(length, ranges_of(found, ranks, length))

    @classmethod
    def of_documents(
        cls,
        cu_seqlens: Tensor | Sequence[int],
        ranks: int,
        *,
        causal: bool = True,
        slack: float = SLACK,
    ) -> Layout:
        """As `balanced`, for packed documents by the number of keys that their rows see.

        Args:
            cu_seqlens: ``(documents + 1,)``, the cumulative lengths from 0. The host reads them.
            causal: whether rows see only keys up to themselves; default True.
        """
        length = int(cu_seqlens[-1])
        found = owners(work_of_documents(cu_seqlens, causal), ranks, slack)
        return cls(length, ranges_of(found, ranks, length))

    @property
    def ranks(self) -> int:
        return len(self.ranges)

    def rows(self, rank: int) -> int:
        return size(self.ranges[rank])

    def positions(self, rank: int, *, device: torch.device | str | None = None) -> Tensor:
        """The positions in the whole sequence of this rank's rows, (rows,), int64."""
        parts = [torch.arange(first, end, device=device) for first, end in self.ranges[rank]]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)

    def divided(self, ranks: int) -> Layout:
        """The layout over ``self.ranks * ranks`` ranks in which the rows of rank r are divided among ranks
        ``r * ranks`` up to ``(r + 1) * ranks``, in order: that of Ulysses inside of a host and a ring between hosts."""
        parts = []
        for rank, of_rank in enumerate(self.ranges):
            for first, end in _chunks(self.rows(rank), ranks):
                parts.append(tuple(part for part, _ in shared(of_rank, [(first, end)])))
        return Layout(self.length, tuple(parts))


def layout_of(
    op: str, layout: str | Layout, ranks: int, length: int, heads: int = 1, *, name: str = "layout"
) -> Layout:
    """The layout that a user names; ValueError if it is for other ranks or another length.

    heads: how many ranks exchange heads, see `Layout.divided`; if all do, it is the named layout of all ranks.
    name: of the argument, for errors.
    """
    check_kind(op, layout, name)
    if isinstance(layout, str):
        make = Layout.zigzag if layout == "zigzag" else Layout.contiguous
        return make(length, ranks) if heads in (1, ranks) else make(length, ranks // heads).divided(heads)
    if layout.ranks != ranks:
        raise ValueError(f"{op}: expected a {name} for the {ranks} ranks of group, got one for {layout.ranks}")
    if layout.length != length:
        raise ValueError(f"{op}: expected a {name} of {length} rows, got one of {layout.length}")
    return layout


def check_kind(op: str, layout: str | Layout, name: str = "layout") -> None:
    if not isinstance(layout, Layout) and layout not in NAMES:
        raise ValueError(f"{op}: expected {name} {' or '.join(map(repr, NAMES))}, or a Layout, got {layout!r}")


def size(ranges: Iterable[Range]) -> int:
    return sum(end - first for first, end in ranges)


def merged(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The same rows in ascending order, without empty ranges; those that touch or overlap are one."""
    result: list[Range] = []
    for first, end in sorted(ranges):
        if first >= end:
            continue
        if result and first == result[-1][1]:
            result[-1] = result[-1][0], end
        else:
            result.append((first, end))
    return tuple(result)


def union(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The rows that are in any of the ranges."""
    result: list[Range] = []
    for first, end in sorted(ranges):
        if first >= end:
            continue
        if result and first <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((first, end))
    return tuple(result)


def shared(rows: Sequence[Range], places: Sequence[Range]) -> list[tuple[Range, Range]]:
    """Rows that are numbered from 0 in the order of ``rows``: for each of ``places`` in that numbering, the rows there
    and their places."""
    result = []
    begin = 0
    for first, end in rows:
        for place, stop in places:
            low, high = max(place, begin), min(stop, begin + end - first)
            if low < high:
                result.append(((first + low - begin, first + high - begin), (low, high)))
        begin += end - first
    return result


def located(rows: Sequence[Range], wanted: Sequence[Range]) -> list[tuple[Range, Range]]:
    """Rows that are numbered from 0 in the order of ``rows``: for each of ``wanted`` rows that is among them, in
    ascending order, these rows and their places in that numbering."""
    result = []
    begin = 0
    for first, end in rows:
        for low, high in wanted:
            low, high = max(low, first), min(high, end)
            if low < high:
                result.append(((low, high), (begin + low - first, begin + high - first)))
        begin += end - first
    return result


def _chunks(length: int, count: int, multiple: int = 1) -> list[Range]:
    units = -(-length // multiple)
    ends = [min(length, units * n // count * multiple) for n in range(count + 1)]
    return list(zip(ends, ends[1:]))
