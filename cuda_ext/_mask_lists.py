"""Lists of blocks: from entries to padded lists and back, transposed, combined and checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cuda_ext._checks import check, check_same_device, check_shape, dtype_name, shape_of
from cuda_ext._mask_tiles import BLOCK, WORDS, prefix_bits, transpose_tiles, unique_rows

FULL, EMPTY = -1, -2  # instead of the number of a tile
TILES_AT_ONCE = 4096  # 8 MiB


class Grid(NamedTuple):
    """The sizes of a mask, and of its blocks."""

    batch: int
    heads: int
    queries: int
    keys: int

    @property
    def rows(self) -> int:
        return -(-self.queries // BLOCK)

    @property
    def columns(self) -> int:
        return -(-self.keys // BLOCK)

    @property
    def lines(self) -> int:
        """Rows of blocks of all heads."""
        return self.batch * self.heads * self.rows

    def transposed(self) -> Grid:
        return Grid(self.batch, self.heads, self.keys, self.queries)


class Entries(NamedTuple):
    """All listed blocks, ascending by line and column, and the pool of tiles."""

    grid: Grid
    line: Tensor  # (E,) int64: (b * H + h) * Mq + row
    column: Tensor  # (E,) int64
    tile: Tensor  # (E,) int64: FULL or a number of the pool
    tiles: Tensor  # (T, 128, 4) int32


class Lists(NamedTuple):
    """The lists of one direction, int32."""

    counts: Tensor  # (B, H, M)
    indices: Tensor  # (B, H, M, W)
    tiles: Tensor  # (B, H, M, W)

    def packed(self) -> Tensor:
        """(B, H, M, 2 + 2W): the rows by decreasing count, each count, and the pairs (block, tile)."""
        pairs = torch.stack((self.indices, self.tiles), dim=-1).flatten(-2)
        order = self.counts.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
        return torch.cat((order[..., None], self.counts[..., None], pairs), dim=-1)


class Chunk(NamedTuple):
    """Some blocks; in all chunks of a mask, each at most once."""

    line: Tensor  # (n,)
    column: Tensor  # (n,)
    tiles: Tensor | None  # (n, 128, 4); None: the blocks are full
    which: Tensor | None = None  # (n,): the tile of each block, of any number of tiles that are cropped to Sq and Sk


def in_chunks(
    line: Tensor, column: Tensor, tiles_of: Callable[[Tensor, Tensor], Tensor], size: int = TILES_AT_ONCE
) -> Iterator[Chunk]:
    for lines, columns in zip(line.split(size), column.split(size)):
        if len(lines):
            yield Chunk(lines, columns, tiles_of(lines, columns))


def existing_elements(grid: Grid, line: Tensor, column: Tensor) -> Tensor:
    """Tiles (n, 128, 4) in which all elements up to Sq and Sk are visible."""
    columns = prefix_bits(line.device)[(grid.keys - column * BLOCK).clamp(max=BLOCK)]
    rows = torch.arange(BLOCK, device=line.device) < (grid.queries - line % grid.rows * BLOCK).unsqueeze(1)
    return torch.where(rows.unsqueeze(2), columns.unsqueeze(1), 0)


def at_end(grid: Grid, line: Tensor, column: Tensor) -> Tensor:
    """The places of the blocks that may have elements past Sq or Sk."""
    return ((line % grid.rows == grid.rows - 1) | (column == grid.columns - 1)).nonzero().squeeze(1)


def _numbered(grid: Grid, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Lines, columns and numbers of the tiles of the visible blocks, and the tiles. Of equal tiles one is looked at."""
    line, column, tiles, which = chunk
    if tiles is None:
        return line, column, torch.full_like(line, FULL), _no_tiles(line.device)
    last = at_end(grid, line, column)
    existing = existing_elements(grid, line[last], column[last])
    if which is None:
        tiles, which = unique_rows(tiles.index_copy(0, last, tiles[last] & existing))
    words = tiles.flatten(1).view(torch.int64)
    visible, complete = (words != 0).any(1)[which], (words == -1).all(1)[which]
    complete[last] = (tiles[which[last]] == existing).flatten(1).all(1)
    partial = (visible & ~complete).nonzero().squeeze(1)
    used, inverse = torch.unique(which[partial], return_inverse=True)
    number = torch.full_like(line, FULL)
    number[partial] = inverse
    return line[visible], column[visible], number[visible], tiles.index_select(0, used)


def _no_tiles(device: torch.device) -> Tensor:
    return torch.empty(0, BLOCK, WORDS, dtype=torch.int32, device=device)


def collect(grid: Grid, chunks: Iterable[Chunk], device: torch.device) -> Entries:
    """Entries from chunks in any order: tiles are cropped to Sq and Sk, blocks without a visible element are dropped,
    those with all elements become full, and equal tiles are stored once."""
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    lines, columns, numbers, pools = [nothing], [nothing], [nothing], [_no_tiles(device)]
    stored = 0
    for chunk in chunks:
        line, column, number, pool = _numbered(grid, chunk)
        lines.append(line)
        columns.append(column)
        numbers.append(torch.where(number == FULL, FULL, number + stored))
        pools.append(pool)
        stored += len(pool)
    tiles, merged = unique_rows(torch.cat(pools))
    merged = torch.cat([merged, merged.new_full((1,), FULL)])  # FULL is also the index of the last one
    line, column, number = torch.cat(lines), torch.cat(columns), torch.cat(numbers)
    order = (line * grid.columns + column).argsort()
    return Entries(grid, line[order], column[order], merged[number[order]], tiles)


def places(found: Tensor) -> tuple[Tensor, Tensor]:
    """Lines and columns that are True in (lines, columns)."""
    line, column = found.nonzero().unbind(1)
    return line, column


def collect_found(
    grid: Grid,
    full: Tensor,
    some: Tensor,
    tiles_of: Callable[[Tensor, Tensor], Tensor],
    size: int = TILES_AT_ONCE,
) -> Entries:
    """Entries of bool (lines, columns): of blocks that are in `some`, but not `full`, `tiles_of` makes the tiles."""

    def chunks() -> Iterator[Chunk]:
        yield Chunk(*places(full), None)
        yield from in_chunks(*places(some & ~full), tiles_of, size)

    return collect(grid, chunks(), full.device)


def transposed(entries: Entries) -> Entries:
    grid = entries.grid
    line = entries.line // grid.rows * grid.columns + entries.column
    column = entries.line % grid.rows
    order = (line * grid.rows + column).argsort()
    tiles = transpose_tiles(entries.tiles)
    return Entries(grid.transposed(), line[order], column[order], entries.tile[order], tiles)


def selected(entries: Entries, heads: slice, rows: Tensor, columns: Tensor) -> Entries:
    """Some heads, rows and columns of blocks, numbered anew. rows, columns: ascending, at least one of each."""
    grid = entries.grid
    row_of, column_of = (
        torch.full((count,), -1, device=kept.device).index_copy_(0, kept, torch.arange(len(kept), device=kept.device))
        for count, kept in ((grid.rows, rows), (grid.columns, columns))
    )
    row, column = row_of[entries.line % grid.rows], column_of[entries.column]
    batch, head = entries.line // grid.rows // grid.heads, entries.line // grid.rows % grid.heads
    here = (row >= 0) & (column >= 0) & (head >= heads.start) & (head < heads.stop)
    lengths = (
        len(kept) * BLOCK - (count * BLOCK - length if int(kept[-1]) == count - 1 else 0)
        for count, kept, length in ((grid.rows, rows, grid.queries), (grid.columns, columns, grid.keys))
    )
    small = Grid(grid.batch, heads.stop - heads.start, *lengths)
    line = ((batch * small.heads + head - heads.start) * small.rows + row)[here]
    tile = entries.tile[here]
    used, numbers = torch.unique(tile[tile != FULL], return_inverse=True)
    return Entries(
        small, line, column[here], tile.masked_scatter(tile != FULL, numbers), entries.tiles.index_select(0, used)
    )


def lists_of(entries: Entries) -> Lists:
    grid, line = entries.grid, entries.line
    counts = torch.bincount(line, minlength=grid.lines)
    width = max(int(counts.max()), 1)
    place = torch.arange(len(line), device=line.device) - (counts.cumsum(0) - counts)[line]
    indices = torch.zeros(grid.lines, width, dtype=torch.int32, device=line.device)
    tiles = torch.full_like(indices, FULL)
    indices[line, place] = entries.column.to(torch.int32)
    tiles[line, place] = entries.tile.to(torch.int32)
    shape = (grid.batch, grid.heads, grid.rows)
    return Lists(counts.to(torch.int32).view(shape), indices.view(*shape, width), tiles.view(*shape, width))


def listed(lists: Lists) -> Tensor:
    """bool (B, H, M, W): the places before the count."""
    return torch.arange(lists.indices.shape[-1], device=lists.counts.device) < lists.counts.unsqueeze(-1)


def entries_of(grid: Grid, lists: Lists, tiles: Tensor) -> Entries:
    """The entries of lists, whose order may be any."""
    line, place = places(listed(lists).flatten(0, 2))
    column = lists.indices.flatten(0, 2)[line, place].long()
    tile = lists.tiles.flatten(0, 2)[line, place].long()
    order = (line * grid.columns + column).argsort()
    return Entries(grid, line[order], column[order], tile[order], tiles)


def states_of(entries: Entries) -> Tensor:
    """int64 (B, H, Mq, Mk): the number of the tile, FULL or EMPTY."""
    grid = entries.grid
    states = torch.full((grid.lines, grid.columns), EMPTY, device=entries.line.device)
    states[entries.line, entries.column] = entries.tile
    return states.view(grid.batch, grid.heads, grid.rows, grid.columns)


def _with_constants(tiles: Tensor) -> Tensor:
    """The tiles and those that the indices EMPTY and FULL, from the end, mean."""
    return torch.cat([tiles, tiles.new_zeros(1, BLOCK, WORDS), tiles.new_full((1, BLOCK, WORDS), -1)])


def combine(op: str, first: Entries, second: Entries) -> Entries:
    """``first & second`` or ``first | second``, as `op` says; batch and heads broadcast."""
    batch, heads = (max(sizes) for sizes in zip(first.grid[:2], second.grid[:2]))
    grid = first.grid._replace(batch=batch, heads=heads)
    a, b = (states_of(each).expand(batch, heads, -1, -1).reshape(grid.lines, grid.columns) for each in (first, second))
    if op == "&":
        full, some = (a == FULL) & (b == FULL), (a != EMPTY) & (b != EMPTY)
    else:
        full, some = (a == FULL) | (b == FULL), (a != EMPTY) | (b != EMPTY)
    of_first, of_second = _with_constants(first.tiles), _with_constants(second.tiles)

    def tiles_of(line: Tensor, column: Tensor) -> Tensor:
        one, other = of_first[a[line, column]], of_second[b[line, column]]
        return one & other if op == "&" else one | other

    return collect_found(grid, full, some, tiles_of)


def invert(entries: Entries) -> Entries:
    states = states_of(entries).flatten(0, 2)

    def tiles_of(line: Tensor, column: Tensor) -> Tensor:
        return ~entries.tiles[states[line, column]]

    return collect_found(entries.grid, states == EMPTY, states != FULL, tiles_of)


# Checks


def check_structure(op: str, lengths: Sequence[int], tensors: dict[str, Tensor | None], tiles: Tensor) -> None:
    """Types, dtypes, devices and shapes of the lists, which are named kv_counts, ..., q_tiles."""
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    absent = [name for name in tensors if name not in given]
    missing = [name for name in absent if name.startswith("kv_")]
    check(not missing, op, f"expected {', '.join(missing)} to be a tensor, got None; only the lists q_ may be left out")
    all_or_none = len(absent) in (0, 3)
    what = "expected all of q_counts, q_indices and q_tiles or none of them, got no"
    check(all_or_none, op, f"{what} {', '.join(absent)}; leave out all, and they are computed")
    every = {**given, "tiles": tiles}
    for name, tensor in every.items():
        check(isinstance(tensor, Tensor), op, f"expected {name} to be a tensor, got {tensor!r}")
        got = f"expected {name} of dtype int32, got {dtype_name(tensor.dtype)}; convert it with .int()"
        check(tensor.dtype == torch.int32, op, got)
    counts = given["kv_counts"]
    check_same_device(op, "kv_counts", counts, **{**given, "tiles": tiles})
    check(
        counts.dim() == 3, op, f"expected kv_counts of shape (B, H, {-(-lengths[0] // BLOCK)}), got {shape_of(counts)}"
    )
    fits = tiles.dim() == 3 and shape_of(tiles)[1:] == (BLOCK, WORDS)
    check(fits, op, f"expected tiles of shape (T, {BLOCK}, {WORDS}), got {shape_of(tiles)}")
    for side, length in zip(("kv", "q"), lengths):
        if (indices := given.get(f"{side}_indices")) is None:
            continue
        leading = (*counts.shape[:2], -(-length // BLOCK))
        suffix = f", a row for each of the blocks of {length} {'queries' if side == 'kv' else 'keys'}"
        check_shape(op, f"{side}_counts", given[f"{side}_counts"], leading, suffix)
        fits = indices.dim() == 4 and shape_of(indices)[:3] == leading and indices.shape[3] >= 1
        what = f"expected {side}_indices of shape ({', '.join(map(str, leading))}, W) with W of 1 or more"
        check(fits, op, f"{what}, got {shape_of(indices)}")
        check_shape(op, f"{side}_tiles", given[f"{side}_tiles"], shape_of(indices), f" to match {side}_indices")


def check_values(op: str, side: str, grid: Grid, lists: Lists, tiles: Tensor) -> None:
    """Counts, and what they say is listed. `grid` is that of this side."""

    def within(name: str, values: Tensor, low: int, high: int, advice: str) -> None:
        if values.numel():
            least, most = int(values.min()), int(values.max())
            got = f"got {least if least < low else most}; {advice}"
            check(low <= least and most <= high, op, f"expected {side}_{name} in [{low}, {high}], {got}")

    here = listed(lists)
    within("counts", lists.counts, 0, lists.indices.shape[-1], "a count is at most the width of the lists")
    within("indices", lists.indices[here], 0, grid.columns - 1, "up to the count, each entry is the number of a block")
    within("tiles", lists.tiles[here], FULL, len(tiles) - 1, "-1 means full, other entries are numbers of `tiles`")
    entries = entries_of(grid, lists, tiles)
    twice = (entries.line.diff() == 0) & (entries.column.diff() == 0)
    if bool(twice.any()):
        place = int(twice.nonzero()[0, 0])
        row, column = int(entries.line[place]) % grid.rows, int(entries.column[place])
        check(False, op, f"expected {side}_indices without repetition, got {column} twice in row {row}; list it once")


def check_tails(op: str, entries: Entries) -> None:
    """Kernels trust the bits of a tile also at the end of the sequences."""
    grid = entries.grid
    chosen = at_end(grid, entries.line, entries.column)
    chosen = chosen[entries.tile[chosen] >= 0]
    for part in chosen.split(TILES_AT_ONCE):
        line, column = entries.line[part], entries.column[part]
        outside = entries.tiles[entries.tile[part]] & ~existing_elements(grid, line, column)
        wrong = (outside != 0).flatten(1).any(1)
        if bool(wrong.any()):
            first = int(wrong.nonzero()[0, 0])
            place = f"row {int(line[first]) % grid.rows}, column {int(column[first])}"
            lengths = f"{grid.queries} queries and {grid.keys} keys"
            check(
                False, op, f"expected tiles without bits past {lengths}, got some in the block of {place}; clear them"
            )


def check_transposed(op: str, entries: Entries, of_keys: Lists) -> None:
    wanted = transposed(entries)
    got = entries_of(wanted.grid, of_keys, entries.tiles)
    same = all(torch.equal(a, b) for a, b in zip(wanted[1:4], got[1:4]))
    what = "expected q_counts, q_indices and q_tiles to list the same blocks as kv_counts, kv_indices and kv_tiles"
    check(same, op, f"{what}, got others; leave them out, and they are computed")
