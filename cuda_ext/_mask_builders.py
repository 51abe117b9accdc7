"""Builders of block masks: three ways to the listed blocks, and the masks that each of them builds.

Intervals: each query sees a union of few intervals of keys. The smallest start and largest end of 128 queries bound
which blocks can be visible, the largest start and smallest end which are full; tiles of the blocks between follow from
a table of bits. O(S + listed blocks), without a single element.
Elements: the visible elements of given blocks are computed, some blocks at a time.
Rows: a dense mask is read by rows of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from cuda_ext._mask_lists import TILES_AT_ONCE, Chunk, Entries, Grid, collect, collect_found, places, transposed
from cuda_ext._mask_tiles import BLOCK, WORDS, pack_bits, prefix_bits, unique_rows

ELEMENT_BLOCKS = 64  # blocks whose elements are computed at once: 2^20 elements, 8 MiB for each int64 intermediate
ROW_ELEMENTS = 2**22  # of a dense mask, read at once

# Which elements are visible: of b, h (n, 1, 1), queries (n, 128, 1) and keys (n, 1, 128), all int64 and within the
# mask, bool (n, 128, 128).
Visible = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Interval = tuple[Tensor, Tensor]


# The three ways


def by_line(values: Tensor) -> Tensor:
    """(..., S) to (..., M, 128). The last value is repeated up to a whole block; no minimum or maximum changes."""
    length = values.shape[-1]
    rows = -(-length // BLOCK)
    places = torch.arange(rows * BLOCK, device=values.device).clamp(max=length - 1)
    return values[..., places].unflatten(-1, (rows, BLOCK))


def from_intervals(grid: Grid, intervals: Sequence[Interval]) -> Entries:
    """Each query sees the union of intervals [start, end) of keys; starts and ends broadcast to (B, H, Sq)."""
    shape = (grid.batch, grid.heads, grid.queries)
    start, end = (torch.stack([each.expand(shape) for each in bounds]) for bounds in zip(*intervals))  # (k, B, H, Sq)
    start, end = start.clamp(min=0), end.clamp(max=grid.keys)
    # An empty interval must neither widen the union nor narrow it.
    start, end = torch.where(start < end, start, grid.columns * BLOCK), torch.where(start < end, end, 0)
    start, end = (by_line(each).flatten(1, 3) for each in (start, end))  # (k, lines, 128)
    full_start = (start.amax(2) + BLOCK - 1) // BLOCK
    full_end = end.amin(2)
    full_end = torch.where(full_end == grid.keys, grid.columns, full_end // BLOCK)
    line, column = _blocks_of_ranges(start.amin(2) // BLOCK, (end.amax(2) + BLOCK - 1) // BLOCK)
    full = ((full_start[:, line] <= column) & (column < full_end[:, line])).any(0)
    start, end = start.int(), end.int()
    inside = torch.arange(BLOCK, device=line.device)

    def chunks() -> Iterator[Chunk]:
        yield Chunk(line[full], column[full], None)
        for lines, columns in zip(line[~full].split(TILES_AT_ONCE), column[~full].split(TILES_AT_ONCE)):
            first = (columns * BLOCK).int().unsqueeze(1)
            low, high = (
                (each.index_select(1, lines) - first).clamp_(0, BLOCK).to(torch.uint8) for each in (start, end)
            )
            exists = inside < (grid.queries - lines % grid.rows * BLOCK).unsqueeze(1)
            seen = (low < high) & exists  # all empty intervals are written alike
            ranges = torch.stack([low * seen, high * seen]).permute(2, 0, 1, 3)  # (n, 2, k, 128)
            # Intervals have an eighth of the bytes of tiles, so that equal ones are found before there are tiles.
            different, which = unique_rows(ranges.contiguous())
            yield Chunk(lines, columns, _tiles_of_ranges(different), which)

    return collect(grid, chunks(), start.device)


def _tiles_of_ranges(ranges: Tensor) -> Tensor:
    """uint8 (n, 2, k, 128), starts and ends, to tiles."""
    bits = prefix_bits(ranges.device)
    tiles = bits.new_zeros(ranges.shape[0], BLOCK, WORDS)
    for low, high in (each.unbind(1) for each in ranges.int().unbind(2)):
        below_low, below_high = (bits.index_select(0, each.flatten()) for each in (low, high))
        tiles |= (below_high & ~below_low).view(tiles.shape)
    return tiles


def _blocks_of_ranges(first: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Lines and columns of the union of k ranges of columns a line; first and end are (k, lines)."""
    first, order = first.sort(0)
    end = end.gather(0, order)
    # Each range begins where those before it end, so that no block is listed twice.
    seen = end.cummax(0).values.roll(1, 0)
    seen[0] = 0
    first = torch.maximum(first, seen)
    lengths = (end - first).clamp(min=0).t().flatten()  # of (line, range)
    total = lengths.cumsum(0)
    part = torch.repeat_interleave(torch.arange(len(lengths), device=first.device), lengths)
    place = torch.arange(len(part), device=first.device) - (total - lengths)[part]
    return part // len(first), first.t().flatten()[part] + place


def from_elements(grid: Grid, full: Tensor, some: Tensor, visible: Visible) -> Entries:
    """`full` and `some`: bool, broadcast to (B, H, Mq, Mk). Of blocks in `some` that are not full, `visible` tells the
    elements."""
    shape = (grid.batch, grid.heads, grid.rows, grid.columns)
    full, some = (each.expand(shape).reshape(grid.lines, grid.columns) for each in (full, some))

    def tiles_of(line: Tensor, column: Tensor) -> Tensor:
        head, row = line // grid.rows, line % grid.rows
        inside = torch.arange(BLOCK, device=line.device)
        query = (row.view(-1, 1, 1) * BLOCK + inside.view(1, -1, 1)).clamp(max=grid.queries - 1)
        key = (column.view(-1, 1, 1) * BLOCK + inside.view(1, 1, -1)).clamp(max=grid.keys - 1)
        batch, head = ((head // grid.heads).view(-1, 1, 1), (head % grid.heads).view(-1, 1, 1))
        return pack_bits(visible(batch, head, query, key).expand(len(line), BLOCK, BLOCK))

    return collect_found(grid, full, some, tiles_of, ELEMENT_BLOCKS)


def from_dense(mask: Tensor) -> Entries:
    """mask: bool (B, H, Sq, Sk)."""
    grid = Grid(*mask.shape)
    width = grid.columns * BLOCK
    inside = torch.arange(BLOCK, device=mask.device)

    def chunks() -> Iterator[Chunk]:
        for line in torch.arange(grid.lines, device=mask.device).split(max(1, ROW_ELEMENTS // (BLOCK * width))):
            head = (line // grid.rows).unsqueeze(1)
            query = (line % grid.rows * BLOCK).unsqueeze(1) + inside
            rows = mask[head // grid.heads, head % grid.heads, query.clamp(max=grid.queries - 1)]  # (n, 128, Sk)
            blocks = F.pad(rows, (0, width - grid.keys)).view(-1, BLOCK, grid.columns, BLOCK)
            full, some = blocks.all(3).all(1), blocks.any(3).any(1)
            place, column = places(full)
            yield Chunk(line[place], column, None)
            place, column = places(some & ~full)
            if len(place):
                yield Chunk(line[place], column, pack_bits(blocks[place, :, column]))

    return collect(grid, chunks(), mask.device)


# Masks of intervals


def bounded(position: Tensor, left: int | None, right: int | None, keys: int) -> Interval:
    """The interval of keys from `left` before to `right` after a position; None: unbounded."""
    start = torch.zeros_like(position) if left is None else position - left
    end = torch.full_like(position, keys) if right is None else position + right + 1
    return start, end


def both(first: Interval, second: Interval) -> Interval:
    return torch.maximum(first[0], second[0]), torch.minimum(first[1], second[1])


def positions(grid: Grid, shift: Tensor) -> Tensor:
    """Of queries among the keys, (B, 1, Sq); shift: (B,)."""
    return torch.arange(grid.queries, device=shift.device) + shift.view(-1, 1, 1)


def window(grid: Grid, shift: Tensor, left: int | None, right: int | None) -> Entries:
    """shift: (B,), from queries to their positions among the keys."""
    return from_intervals(grid, [bounded(positions(grid, shift), left, right, grid.keys)])


def prefix_lm(prefix: Tensor, length: int) -> Entries:
    """prefix: (B,)"""
    query = torch.arange(length, device=prefix.device)
    end = torch.maximum(prefix.long().view(-1, 1, 1), query + 1)
    return from_intervals(Grid(len(prefix), 1, length, length), [(torch.zeros_like(end), end)])


def window_with_global(length: int, window: int, count: int, causal: bool, device: torch.device) -> Entries:
    query = torch.arange(length, device=device)
    start, end = bounded(query, window, window, length)
    global_end = torch.where(query < count, length, count)
    if causal:
        end, global_end = query + 1, torch.minimum(global_end, query + 1)
    return from_intervals(Grid(1, 1, length, length), [(torch.zeros_like(query), global_end), (start, end)])


def shared_prompt(prompt: int, answers: Tensor) -> Entries:
    """answers: lengths (n,)"""
    ends = prompt + answers.long().cumsum(0)
    length = int(ends[-1]) if len(ends) else prompt
    query = torch.arange(length, device=answers.device)
    bounds = torch.cat([ends.new_tensor([0, prompt]), ends])  # where the prompt and the answers begin
    start = bounds[torch.searchsorted(bounds, query, right=True) - 1]
    start = torch.where(query < prompt, 0, start)
    common = (torch.zeros_like(query), (query + 1).clamp(max=prompt))
    return from_intervals(Grid(1, 1, length, length), [common, (start, query + 1)])


def from_column_ranges(ranges: Tensor, causal: bool, length: int) -> Entries:
    """ranges: (B, H, Sk, 1, 2 or 4): of each key, hidden queries, of `length`. The mask is built with keys as lines,
    then transposed."""
    batch, heads, keys, count = ranges.shape
    grid = Grid(batch, heads, keys, length)
    key = torch.arange(keys, device=ranges.device)
    last = torch.full_like(key, length).expand(batch, heads, keys)
    bounds = ranges.long().clamp(0, length).unbind(-1)
    # Two hidden intervals [a, b) and [c, d); with one, the second is empty.
    if count == 4:
        a, b, c, d = bounds
    elif count == 2 and not causal:
        a, b, c, d = bounds[0], last, torch.zeros_like(last), bounds[1]
    else:
        a, b, c, d = bounds[0], bounds[1] if count == 2 else last, last, last
    a, b, c, d = torch.where(a < b, a, length), torch.maximum(a, b), torch.where(c < d, c, length), torch.maximum(c, d)
    swap = c < a
    a, b, c, d = (torch.where(swap, *pair) for pair in ((c, a), (d, b), (a, c), (b, d)))
    base = ((key - (keys - length)).clamp(0, length) if causal else torch.zeros_like(key), last)
    visible: list[Interval] = [(torch.zeros_like(a), a), (b, c), (torch.maximum(b, d), last)]
    return transposed(from_intervals(grid, [both(base, each) for each in visible]))


# Documents


def chunks(grid: Grid, shift: Tensor, size: int) -> Entries:
    """shift: (B,), from queries to their positions among the keys."""
    start = positions(grid, shift).div(size, rounding_mode="floor") * size
    return from_intervals(grid, [(start, start + size)])


def documents_of_lengths(bounds: Tensor, length: int, near: tuple[int | None, int | None]) -> Entries:
    """bounds: cumulative lengths (n + 1,)"""
    query = torch.arange(length, device=bounds.device)
    bounds = torch.cat([bounds.long(), bounds.new_full((1,), length, dtype=torch.int64)])
    document = torch.searchsorted(bounds[:-1], query, right=True)
    start, end = bounds[document - 1], bounds[document]
    end = torch.where(query < bounds[-2], end, start)  # nothing past the last document
    return from_intervals(Grid(1, 1, length, length), [both((start, end), bounded(query, *near, length))])


def documents_of_ids(ids: Tensor, near: tuple[int | None, int | None]) -> Entries:
    """ids: (B, S)"""
    length = ids.shape[1]
    grid = Grid(len(ids), 1, length, length)
    place = torch.arange(length, device=ids.device).expand_as(ids)
    begins = torch.cat([torch.ones_like(ids[:, :1], dtype=torch.bool), ids[:, 1:] != ids[:, :-1]], 1)
    label = _first_places(ids)
    if bool((begins & (label != place)).any()):  # a document goes on after another: no interval
        return _scattered_documents(grid, label, near)
    ends = torch.cat([begins[:, 1:], torch.ones_like(begins[:, :1])], 1)
    end = torch.where(ends, place + 1, length).flip(1).cummin(1).values.flip(1)
    start, end = both((label, end), bounded(place, *near, length))
    return from_intervals(grid, [(start.unsqueeze(1), end.unsqueeze(1))])


def _first_places(ids: Tensor) -> Tensor:
    """(B, S): where each position's id occurs first. A name of the document that is ascending where ids are new, so
    that the labels of a block span little."""
    values, order = ids.sort(dim=1, stable=True)
    begins = torch.ones_like(values, dtype=torch.bool)
    begins[:, 1:] = values[:, 1:] != values[:, :-1]
    place = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    group = torch.where(begins, place, 0).cummax(1).values
    return torch.empty_like(order).scatter_(1, order, order.gather(1, group))


def _scattered_documents(grid: Grid, label: Tensor, near: tuple[int | None, int | None]) -> Entries:
    left, right = near
    label = label.unsqueeze(1)  # (B, 1, S)
    low, high = by_line(label).amin(-1), by_line(label).amax(-1)
    common = (low.unsqueeze(3) <= high.unsqueeze(2)) & (low.unsqueeze(2) <= high.unsqueeze(3))
    first = torch.arange(grid.rows, device=label.device) * BLOCK
    ahead = first - first.unsqueeze(1)  # of keys, between the first elements of the blocks
    if left is not None:
        common = common & (ahead + BLOCK - 1 >= -left)
    if right is not None:
        common = common & (ahead - BLOCK + 1 <= right)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = label[batch, head, query] == label[batch, head, key]
        if left is not None:
            seen = seen & (key >= query - left)
        return seen if right is None else seen & (key <= query + right)

    return from_elements(grid, torch.zeros_like(common), common, visible)


# Trees


def tours(parents: Sequence[int]) -> tuple[list[int], list[int]] | None:
    """The number of each node in a walk from the roots, and the first number after its descendants; None: a cycle. The
    ancestors of a node and itself are those whose interval contains its number."""
    children: list[list[int]] = [[] for _ in parents]
    waiting: list[int] = []
    for node, parent in enumerate(parents):
        (waiting if parent < 0 else children[parent]).append(node)
    order: list[int] = []
    enter, leave = [0] * len(parents), [0] * len(parents)
    while waiting:
        node = waiting.pop()
        enter[node] = len(order)
        order.append(node)
        waiting.extend(children[node])
    if len(order) < len(parents):
        return None
    for node in reversed(order):
        leave[node] = max(enter[node] + 1, leave[node])
        if parents[node] >= 0:
            leave[parents[node]] = max(leave[parents[node]], leave[node])
    return enter, leave


def tree(enter: Tensor, leave: Tensor, prefix: int) -> Entries:
    """enter and leave: (B, n), of `tours`"""
    batch, count = enter.shape
    grid = Grid(batch, 1, count, prefix + count)
    # A key of the prefix is as an ancestor of all.
    low, high = F.pad(enter, (prefix, 0), value=0), F.pad(leave, (prefix, 0), value=count)
    own, lows, highs = (by_line(each.unsqueeze(1)) for each in (enter, low, high))
    own_low, own_high = own.amin(-1).unsqueeze(3), own.amax(-1).unsqueeze(3)
    some = (lows.amin(-1).unsqueeze(2) <= own_high) & (own_low < highs.amax(-1).unsqueeze(2))
    full = (lows.amax(-1).unsqueeze(2) <= own_low) & (own_high < highs.amin(-1).unsqueeze(2))

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        node = enter[batch, query]
        return (low[batch, key] <= node) & (node < high[batch, key])

    return from_elements(grid, full, some, visible)


# Smaller blocks


def from_blocks(blocks: Tensor, size: int, queries: int, keys: int) -> Entries:
    """blocks: bool (B, H, rows of blocks, columns of blocks)"""
    grid = Grid(blocks.shape[0], blocks.shape[1], queries, keys)
    ratio = BLOCK // size
    more = grid.columns * ratio - blocks.shape[3], grid.rows * ratio - blocks.shape[2]
    parts = F.pad(blocks, (0, more[0], 0, more[1])).view(grid.lines, ratio, grid.columns, ratio)
    some = parts.any(3).any(1)
    full = parts.all(3).all(1)  # at a ragged end `collect` finds out
    bits = prefix_bits(blocks.device)
    edges = torch.arange(ratio + 1, device=blocks.device) * size
    pieces = bits[edges[1:]] & ~bits[edges[:-1]]  # (ratio, 4): a row of one small block

    def tiles_of(line: Tensor, column: Tensor) -> Tensor:
        chosen = parts[line, :, column].unsqueeze(3)  # (n, ratio, ratio, 1)
        rows = torch.where(chosen, pieces, 0).sum(2, dtype=torch.int32)  # no two have a bit in common
        return rows.repeat_interleave(size, 1)

    return collect_found(grid, full, some, tiles_of)
