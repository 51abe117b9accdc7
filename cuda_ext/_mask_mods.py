"""Block masks from a function of positions, and from FlexAttention's block masks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cuda_ext._checks import check, dtype_name
from cuda_ext._mask_builders import Visible, from_elements
from cuda_ext._mask_lists import Entries, Grid
from cuda_ext._mask_tiles import BLOCK

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as FlexMask

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class GatherIndexing(TorchFunctionMode):
    """Makes indexing by numbers, such as ``ids[q]``, a gather, which torch.vmap knows. Plain indexing by a tensor of
    one number reads the number, which torch.vmap refuses.

    On a GPU an index that is out of range gives NaN, or the first element if the table is of integers. Otherwise it
    would end the process's use of the GPU, even if it belongs to a hidden position, as those of pages that are not in
    use."""

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            table, index = args
            index = index if isinstance(index, tuple) else (index,)
            tensors = [each for each in index if isinstance(each, Tensor) and each.dtype != torch.bool]
            numbers = [each for each in index if isinstance(each, int) and not isinstance(each, bool)]
            if tensors and len(tensors) + len(numbers) == len(index):
                whole = [each if isinstance(each, Tensor) else tensors[0].new_full((), each) for each in index]
                return index_or_nan(table, whole) if table.is_cuda else torch.ops.aten.index(table, whole)
        return func(*args, **(kwargs or {}))


def index_or_nan(table: Tensor, index: Sequence[Tensor]) -> Tensor:
    """``table[index]``, by tensors of numbers. Out of range it is NaN; the first element of that dim in a table of
    integers."""
    sizes = table.shape[: len(index)]
    inside = [(each >= -size) & (each < size) for each, size in zip(index, sizes)]
    found: Tensor = torch.ops.aten.index(table, [torch.where(is_in, each, 0) for is_in, each in zip(inside, index)])
    if not table.is_floating_point():
        return found
    is_inside = functools.reduce(torch.logical_and, inside)
    for _ in table.shape[len(index) :]:
        is_inside = is_inside.unsqueeze(-1)
    return torch.where(is_inside, found, torch.nan)


def elements_of(op: str, mask_mod: MaskMod) -> Visible:
    """`mask_mod`, which is of four numbers, for whole blocks."""
    function: Any = mask_mod
    for dims in ((None, None, None, 0), (None, None, 0, None), (0, 0, 0, 0)):
        function = torch.vmap(function, in_dims=dims)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        with GatherIndexing():
            seen: Tensor = function(batch.flatten(), head.flatten(), query.flatten(1), key.flatten(1))
        got = f"got {dtype_name(seen.dtype)}; compare with 0, or convert it with .bool()"
        check(seen.dtype == torch.bool, op, f"expected mask_mod to return a tensor of dtype bool, {got}")
        return seen

    return visible


def from_mask_mod(op: str, mask_mod: MaskMod, grid: Grid, device: torch.device) -> Entries:
    every = torch.ones((), dtype=torch.bool, device=device)
    return from_elements(grid, ~every, every, elements_of(op, mask_mod))


def _listed_blocks(counts: Tensor | None, indices: Tensor | None, rows: int, columns: int) -> Tensor | None:
    """bool (B, H, rows, columns)"""
    if counts is None or indices is None:
        return None
    while counts.dim() < 3:
        counts, indices = counts.unsqueeze(0), indices.unsqueeze(0)
    here = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
    # What is past the counts may be anything. It goes into one more column.
    chosen = torch.where(here, indices, columns).long()
    found = torch.zeros(*counts.shape, columns + 1, dtype=torch.bool, device=counts.device)
    return found.scatter_(-1, chosen, True)[:, :, :rows, :columns]


def _edges(blocks: int, length: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each of our blocks the first of Flex's blocks in it, and the one after the last."""
    first = torch.arange(blocks, device=device) * BLOCK
    return first // size, (first + BLOCK).clamp(max=length).sub(1) // size + 1


def _counts(found: Tensor, rows: tuple[Tensor, Tensor], columns: tuple[Tensor, Tensor]) -> Tensor:
    """How many of Flex's blocks that are in each of ours were found: int64 (B, H, Mq, Mk)."""
    sums = F.pad(found.long().cumsum(2).cumsum(3), (1, 0, 1, 0))
    down = sums[:, :, rows[1]] - sums[:, :, rows[0]]
    return down[..., columns[1]] - down[..., columns[0]]


def from_flex(op: str, mask: FlexMask) -> Entries:
    (queries, keys), (size_q, size_k) = mask.seq_lengths, mask.BLOCK_SIZE
    rows, columns = -(-queries // size_q), -(-keys // size_k)
    partial = _listed_blocks(mask.kv_num_blocks, mask.kv_indices, rows, columns)
    assert partial is not None
    got = f"got {partial.shape[2]}; use the seq_lengths that the lists were made for"
    check(partial.shape[2] == rows, op, f"expected lists of {rows} rows of blocks for {queries} queries, {got}")
    listed_full = _listed_blocks(mask.full_kv_num_blocks, mask.full_kv_indices, rows, columns)
    full = torch.zeros_like(partial) if listed_full is None else listed_full
    grid = Grid(partial.shape[0], partial.shape[1], queries, keys)
    device = partial.device
    edges_q, edges_k = _edges(grid.rows, queries, size_q, device), _edges(grid.columns, keys, size_k, device)
    area = (edges_q[1] - edges_q[0]).unsqueeze(1) * (edges_k[1] - edges_k[0])
    in_full, in_partial = _counts(full, edges_q, edges_k), _counts(partial & ~full, edges_q, edges_k)
    by_mod = elements_of(op, mask.mask_mod)
    calls_mod = bool((in_partial > 0).any())  # the mask_mod of a slice of a BlockMask only raises an error

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        place = (batch, head, query // size_q, key // size_k)
        if not calls_mod:
            return full[place]
        return full[place] | (partial[place] & by_mod(batch, head, query, key))

    return from_elements(grid, in_full == area, (in_full > 0) | (in_partial > 0), visible)
