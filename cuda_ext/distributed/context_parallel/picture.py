"""Who computes what: a map of the rows and keys of a sequence, by the rank that has the rows."""

from __future__ import annotations

from collections.abc import Sequence

from cuda_ext._mask_lists import EMPTY
from cuda_ext._mask_plot import svg
from cuda_ext.block_mask import BLOCK, BlockMask
from cuda_ext.distributed.context_parallel.layout import Layout
from cuda_ext.distributed.context_parallel.parts import Band, Document

_CELLS = 64  # rows and columns of a map, at most
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_GOLDEN_ANGLE = 137.508  # degrees: hues of successive ranks are far from each other

Cells = tuple[tuple[int, ...], ...]  # the rank, or EMPTY where nothing is visible


def cells(layout: Layout, documents: Sequence[Document], band: Band, mask: BlockMask | None) -> Cells:
    """A cell is visible if any of its elements is, and belongs to the rank of its first row. band: without a mask."""
    length = layout.length
    count = min(_CELLS, -(-length // BLOCK))
    edges = [length * n // count for n in range(count + 1)]
    seen = _seen(edges, documents, band) if mask is None else _listed(mask, count)
    owners = [
        next(rank for rank, ranges in enumerate(layout.ranges) if any(first <= row < end for first, end in ranges))
        for row in edges[:-1]
    ]
    return tuple(
        tuple(owner if (row, column) in seen else EMPTY for column in range(count)) for row, owner in enumerate(owners)
    )


def _listed(mask: BlockMask, count: int) -> set[tuple[int, int]]:
    entries = mask._entries
    rows = entries.line % entries.grid.rows * count // entries.grid.rows
    return set(zip(rows.tolist(), (entries.column * count // entries.grid.columns).tolist()))


def _seen(edges: Sequence[int], documents: Sequence[Document], band: Band) -> set[tuple[int, int]]:
    seen = set()
    for begin, end in (document.queries for document in documents):
        for row, (first, last) in enumerate(zip(edges, edges[1:])):
            first, last = max(begin, first), min(end, last)
            low = begin if band.left is None else max(begin, first - band.left)
            high = end if band.right is None else min(end, last + band.right)
            if first < last:
                columns = enumerate(zip(edges, edges[1:]))
                seen |= {(row, column) for column, keys in columns if max(low, keys[0]) < min(high, keys[1])}
    return seen


def text(map_of: Cells) -> str:
    """A character for each cell: 0-9, a-z, A-Z, for rank 62 again 0; a point where nothing is visible."""
    return "\n".join("".join("." if cell == EMPTY else _DIGITS[cell % len(_DIGITS)] for cell in row) for row in map_of)


def drawing(map_of: Cells, title: str) -> str:
    """The text of an SVG; a color for each rank."""
    return svg(map_of, title, lambda rank: f"hsl({rank * _GOLDEN_ANGLE % 360:.0f},60%,45%)")
