"""Exchanges heads for rows: from some rows of all heads to all rows of some heads, and back.

These are compositions of one differentiable all-to-all with PyTorch's operations, so they can be differentiated any
number of times. Heads are divided evenly; a key head that query heads of several ranks read goes to all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cuda_ext.distributed.context_parallel.exchange import Exchange
from cuda_ext.distributed.context_parallel.layout import Layout, Range


class HeadSplit:
    """Which heads each rank has: adjacent query heads, and the key heads that they read."""

    def __init__(self, heads: int, key_heads: int, ranks: int) -> None:
        group = heads // key_heads
        unit = group if key_heads >= ranks else 1  # whole groups, if there are enough
        units = heads // unit
        ends = [units * rank // ranks * unit for rank in range(ranks + 1)]
        self.queries: list[Range] = list(zip(ends, ends[1:]))
        self.keys: list[Range] = [(first // group, (end - 1) // group + 1) for first, end in self.queries]
        self._group = group

    def readers(self, rank: int) -> list[int] | None:
        """For each query head of a rank the key head, among the rank's, that it reads; None if they are in equal
        groups, as attention takes them."""
        (first, end), (key, _) = self.queries[rank], self.keys[rank]
        found = [head // self._group - key for head in range(first, end)]
        counts = [found.count(head) for head in range(found[-1] + 1)]
        return None if len(set(counts)) == 1 else found


def to_heads(exchange: Exchange, tensors: Sequence[tuple[Tensor, Layout, Sequence[Range]]], what: str) -> list[Tensor]:
    """Of each tensor, (B, own rows, heads, dim), all rows of the heads of this rank, in order.

    tensors: of one dtype, each with the layout of its rows and the heads of each rank.
    """
    sent = [
        tensor[:, :, first:end].transpose(0, 1).reshape(-1)
        for rank in range(exchange.ranks)
        for tensor, _, heads in tensors
        for first, end in [heads[rank]]
    ]
    shapes = [
        [_shape(tensor, layout.rows(rank), heads[exchange.rank]) for tensor, layout, heads in tensors]
        for rank in range(exchange.ranks)
    ]
    received = _swapped(exchange, sent, len(tensors), shapes, what)
    result = []
    for number, (_, layout, _) in enumerate(tensors):
        parts = []
        for rank, ranges in enumerate(layout.ranges):
            rows, begin = received[rank][number], 0
            for first, end in ranges:
                parts.append((first, rows[begin : begin + end - first]))
                begin += end - first
        parts.sort(key=lambda part: part[0])
        result.append(torch.cat([received[0][number][:0], *(part for _, part in parts)]).transpose(0, 1))
    return result


def to_rows(exchange: Exchange, tensor: Tensor, layout: Layout, heads: Sequence[Range], what: str) -> Tensor:
    """The inverse of `to_heads` for query heads: (B, all rows, own heads, dim) -> (B, own rows, all heads, dim)."""
    rows_first = tensor.transpose(0, 1)
    sent = [
        torch.cat([rows_first[:0], *(rows_first[first:end] for first, end in ranges)]).reshape(-1)
        for ranges in layout.ranges
    ]
    shapes = [[_shape(tensor, layout.rows(exchange.rank), of_rank)] for of_rank in heads]
    parts = [part for (part,) in _swapped(exchange, sent, 1, shapes, what)]
    return torch.cat(parts, 2).transpose(0, 1)


def _shape(tensor: Tensor, rows: int, heads: Range) -> list[int]:
    return [rows, tensor.shape[0], heads[1] - heads[0], tensor.shape[3]]


def _swapped(
    exchange: Exchange, sent: list[Tensor], tensors: int, shapes: list[list[list[int]]], what: str
) -> list[list[Tensor]]:
    """sent: flat, for each rank so many tensors; shapes: of what comes from each rank."""
    sizes = [torch.Size(shape).numel() for of_rank in shapes for shape in of_rank]
    to, of = (
        [sum(counts[first : first + tensors]) for first in range(0, len(counts), tensors)]
        for counts in (list(map(len, sent)), sizes)
    )
    flat: Tensor = _Swap.apply(torch.cat(sent), to, of, exchange, what)
    parts = iter(flat.split(sizes))
    return [[next(parts).view(shape) for shape in of_rank] for of_rank in shapes]


class _Swap(torch.autograd.Function):
    """(rows, how many go to each rank, how many come from each, exchange, what they are) -> rows"""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, to: list[int], of: list[int], exchange: Exchange, what: str) -> Tensor:
        ctx.arguments = of, to, exchange, what
        return exchange.swap(rows, to, of, what)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of, to, exchange, what = ctx.arguments
        what = what if what.startswith("the gradients of") else f"the gradients of {what}"
        return _Swap.apply(grad.contiguous(), of, to, exchange, what), None, None, None, None
