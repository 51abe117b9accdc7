"""Divides attention among ranks: which keys each rank needs, and the calls by which it computes its rows.

Query i of a document sees key j if `-left <= j - i - diagonal <= right`, where `diagonal` is the end of the document's
keys minus the end of its queries. A call of some of its rows and keys is a call of `flash_attention` with a window of
its own, because that is counted from the last row and the last key of the call.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from cuda_ext.block_mask import BlockMask
from cuda_ext.distributed.context_parallel.layout import Layout, Range, located, union

DROPOUT_GROUP = 4  # keys share a random number's counter, so a call with dropout begins at a multiple


class Document(NamedTuple):
    """A sequence among packed ones; without packing there is one."""

    queries: Range
    keys: Range

    @property
    def diagonal(self) -> int:
        return self.keys[1] - self.queries[1]


class Band(NamedTuple):
    """How many keys on each side of the diagonal are visible; None: all."""

    left: int | None
    right: int | None


class Segment(NamedTuple):
    """Adjacent rows of one document, and the adjacent keys of it that a call visits for them."""

    rows: Range
    keys: Range
    document: int
    offset: int  # the distance of the call's last row from its last key, which the call takes for 0


class Part(NamedTuple):
    """A call: one segment, or several documents whose rows and keys are adjacent, as packed sequences. With a mask the
    rows and keys of the segment are the first and the last ones, and others may be left out between."""

    segments: tuple[Segment, ...]
    rows: Range  # among the rank's own
    keys: Range  # among those of the transfer
    mask: BlockMask | None = None  # of these rows and keys

    @property
    def first(self) -> Segment:
        return self.segments[0]


class Transfer(NamedTuple):
    """The keys that a rank gets at once, and its calls for them.

    pieces: for each rank, in order, the ranges of its own rows that it sends; keys: all of them, in ascending order.
    """

    pieces: tuple[tuple[Range, ...], ...]
    keys: tuple[Range, ...]
    parts: tuple[Part, ...]


Transfers = Mapping[int, Transfer]  # by rank


class Problem(NamedTuple):
    """All that decides who computes what; the same on all ranks."""

    queries: Layout
    keys: Layout
    documents: tuple[Document, ...]
    band: Band
    by_distance: bool  # whether logits depend on the distance, so that calls must know it
    aligned: bool  # whether calls begin at multiples of DROPOUT_GROUP
    packs: bool  # whether one call may be of several documents

    def rows_in_documents(self, rank: int) -> int:
        """How many of a rank's rows are not after the last document; they are its first."""
        end = max((document.queries[1] for document in self.documents), default=0)
        return sum(min(last, end) - first for first, last in self.queries.ranges[rank] if first < end)


def of_everything(layout: Layout) -> Transfer:
    """All rows of a layout."""
    pieces = tuple(tuple(place for _, place in located(of_rank, of_rank)) for of_rank in layout.ranges)
    return Transfer(pieces, union([(0, layout.length)]), ())


@functools.lru_cache(maxsize=1024)
def gathered(problem: Problem, rank: int) -> Transfer:
    """All keys that the rank sees, at once. Each of its rows is in one call, which sees all of that row's keys."""
    everything = (0, problem.keys.length)
    parts = [
        part
        for rows in problem.queries.ranges[rank]
        for part in _runs(problem, list(_segments(problem, rows, everything, whole_rows=True)))
    ]
    return _transfer(problem, rank, parts, range(problem.keys.ranks))


@functools.lru_cache(maxsize=4096)
def from_one(problem: Problem, rank: int, source: int) -> Transfer:
    """The keys of rank `source` that the rank sees. A row may be in several calls, or in none."""
    parts = [
        part
        for rows in problem.queries.ranges[rank]
        for keys in problem.keys.ranges[source]
        for part in _runs(problem, list(_segments(problem, rows, keys, whole_rows=False)))
    ]
    return _transfer(problem, rank, parts, [source])


def _transfer(problem: Problem, rank: int, runs: list[tuple[Segment, ...]], sources: Sequence[int]) -> Transfer:
    keys = union((run[0].keys[0], run[-1].keys[1]) for run in runs)
    parts = []
    for run in runs:
        rows = _place(problem.queries.ranges[rank], (run[0].rows[0], run[-1].rows[1]))
        parts.append(Part(run, rows, _place(keys, (run[0].keys[0], run[-1].keys[1]))))
    return Transfer(pieces_of(problem.keys, keys, sources), keys, tuple(parts))


def pieces_of(layout: Layout, keys: Sequence[Range], sources: Sequence[int]) -> tuple[tuple[Range, ...], ...]:
    """For each rank of a layout, where its rows have `keys`; only `sources` send."""
    pieces: list[tuple[Range, ...]] = [()] * layout.ranks
    for source in sources:
        pieces[source] = tuple(place for _, place in located(layout.ranges[source], keys))
    return tuple(pieces)


def _place(ranges: Sequence[Range], wanted: Range) -> Range:
    if wanted[0] == wanted[1]:
        return 0, 0
    ((_, place),) = located(ranges, [wanted])
    return place


def _segments(problem: Problem, rows: Range, keys: Range, *, whole_rows: bool) -> Iterator[Segment]:
    """whole_rows: yields all rows, also those that see none of the keys."""
    left, right = problem.band
    for number in range(*_with_rows(problem.documents, rows)):
        document = problem.documents[number]
        begin, end = max(rows[0], document.queries[0]), min(rows[1], document.queries[1])
        if begin >= end:
            continue
        low, high = max(keys[0], document.keys[0]), min(keys[1], document.keys[1])
        diagonal = document.diagonal
        if not whole_rows:
            begin = begin if right is None else max(begin, low - diagonal - right)
            end = end if left is None else min(end, high - diagonal + left)
        # A call of whole documents visits adjacent keys, so no key is left out at the begin of one.
        if left is not None and not (whole_rows and begin == document.queries[0]):
            low = max(low, begin + diagonal - left)
        if right is not None:
            high = min(high, end + diagonal + right)
        if begin < end and low < high:
            if problem.aligned:  # not before a rank's first key, see `Call.from_all`
                low -= (low - document.keys[0]) % DROPOUT_GROUP
            yield Segment((begin, end), (low, high), number, high - end - diagonal)
        elif whole_rows:
            yield Segment((begin, end), (low, low), number, 0)


def _with_rows(documents: tuple[Document, ...], rows: Range) -> Range:
    """The numbers of the documents that may have some of the rows."""
    begins, ends = _bounds(documents)
    return bisect.bisect_right(ends, rows[0]), bisect.bisect_left(begins, rows[1])


@functools.lru_cache(maxsize=64)
def _bounds(documents: tuple[Document, ...]) -> tuple[list[int], list[int]]:
    begins, ends = ([document.queries[side] for document in documents] for side in (0, 1))
    return begins, ends


def _runs(problem: Problem, segments: list[Segment]) -> Iterator[tuple[Segment, ...]]:
    """Joins segments that can be the packed sequences of one call."""

    def begins_as_document(segment: Segment) -> bool:
        return segment.keys[0] == problem.documents[segment.document].keys[0]

    def can_be_packed(segment: Segment) -> bool:
        return segment.keys[0] < segment.keys[1] and (segment.offset == 0 or not problem.by_distance)

    run: list[Segment] = []
    for segment in segments:
        joins = (
            problem.packs
            and run
            and can_be_packed(segment)
            and all(map(can_be_packed, run))
            and segment.rows[0] == run[-1].rows[1]
            and segment.keys[0] == run[-1].keys[1]
            and not (problem.aligned and not (begins_as_document(segment) and begins_as_document(run[0])))
        )
        if run and not joins:
            yield tuple(run)
            run = []
        run.append(segment)
    if run:
        yield tuple(run)


def window_of(band: Band, offset: int) -> Band:
    """The window of a call whose diagonal is `offset` before that of its document."""
    left, right = band
    return Band(None if left is None else left + offset, None if right is None else right - offset)
