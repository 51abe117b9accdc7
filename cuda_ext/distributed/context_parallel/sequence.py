"""Sequences that are divided among the ranks of a group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cuda_ext._group_calls import begin_call
from cuda_ext.distributed.context_parallel.exchange import Exchange, group_of_exchanges
from cuda_ext.distributed.context_parallel.layout import Layout, layout_of
from cuda_ext.distributed.context_parallel.parts import Transfers, of_everything
from cuda_ext.distributed.process_groups import resolve_group

_MODULE = "cuda_ext.distributed.context_parallel"


def shard_sequence(
    tensor: Tensor, dim: int = 1, *, group: dist.ProcessGroup | None = None, layout: str | Layout = "zigzag"
) -> Tensor:
    """This rank's rows of a sequence that all ranks have.

    Args:
        tensor: any shape and dtype, the same on all ranks.
        dim: along which the sequence runs; default 1.
        group: the ranks that share the sequence; default: all.
        layout: ``"zigzag"`` (default), ``"contiguous"`` or a `Layout`. A length that the ranks (``2 * ranks`` chunks)
            do not divide is divided as evenly as whole rows allow; then pass the `Layout` itself to attention, too,
            which cannot know the length from one rank's rows.

    Returns:
        A contiguous tensor. Its gradient is this rank's rows of the gradient of `tensor`, the other rows of which are
        zero: what was computed before is the same on all ranks, so sum its gradients over the group.

    Raises:
        ValueError: a layout for other ranks or another length.
    """
    group = resolve_group(f"{_MODULE}.shard_sequence", group)
    found = layout_of(f"{_MODULE}.shard_sequence", layout, group.size(), tensor.shape[dim])
    return own_rows(tensor, dim, found, group.rank())


def own_rows(tensor: Tensor, dim: int, layout: Layout, rank: int) -> Tensor:
    parts = [tensor.narrow(dim, first, end - first) for first, end in layout.ranges[rank]]
    return torch.cat(parts, dim) if parts else tensor.narrow(dim, 0, 0)


def unshard_sequence(
    tensor: Tensor,
    dim: int = 1,
    *,
    group: dist.ProcessGroup | None = None,
    layout: str | Layout = "zigzag",
    sum_gradients: bool = False,
) -> Tensor:
    """The whole sequence, on all ranks; a collective.

    Args:
        tensor: this rank's rows, as `shard_sequence` gives them.
        dim, group, layout: as of `shard_sequence`. By name, all ranks have the same number of rows.
        sum_gradients: the gradient of this rank's rows is their sum over ranks, for what differs between ranks
            afterwards, a second collective. Default False: the rows of this rank's gradient, for what is the same on
            all ranks afterwards.

    Raises:
        RuntimeError: other arguments on other ranks; a rank that does not take part, which is named.
        ValueError: a layout for other ranks or another length.
    """
    op = "unshard_sequence"
    group = resolve_group(f"{_MODULE}.{op}", group)
    dim = dim % tensor.dim()
    length = tensor.shape[dim] * group.size() if isinstance(layout, str) else layout.length
    found = layout_of(f"{_MODULE}.{op}", layout, group.size(), length)
    result: Tensor = _Unshard.apply(tensor, dim, group, found, sum_gradients)
    return result


def positions(
    length: int,
    *,
    group: dist.ProcessGroup | None = None,
    layout: str | Layout = "zigzag",
    device: torch.device | str | None = None,
) -> Tensor:
    """The positions in the whole sequence of this rank's rows, ``(rows,)``, int64: for rotary embeddings, masks and
    labels.

    Args:
        length: rows of the whole sequence.
        group, layout: as of `shard_sequence`.
        device: of the result; default that of new tensors.
    """
    group = resolve_group(f"{_MODULE}.positions", group)
    found = layout_of(f"{_MODULE}.positions", layout, group.size(), length)
    return found.positions(group.rank(), device=device)


class _Unshard(torch.autograd.Function):
    """(tensor, dim, group, layout, whether to sum gradients) -> the whole sequence"""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, dim: int, group: dist.ProcessGroup, layout: Layout, sum_gradients: bool
    ) -> Tensor:
        ctx.arguments = dim, group, layout, sum_gradients
        rows = tensor.movedim(dim, 0)
        exchange = _exchange(rows, group, layout)
        (whole,) = exchange.start(_everywhere(layout), [rows], "the rows of the sequence")()
        return whole.movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dim, group, layout, sum_gradients = ctx.arguments
        return _Reshard.apply(grad, dim, group, layout, sum_gradients), None, None, None, None


class _Reshard(torch.autograd.Function):
    """The derivative of `_Unshard`: this rank's rows, of this rank's tensor or of the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, dim: int, group: dist.ProcessGroup, layout: Layout, sums: bool) -> Tensor:
        ctx.arguments = dim, group, layout
        rows = whole.movedim(dim, 0)
        if sums:
            exchange = _exchange(rows[:0], group, layout)
            own = rows.new_zeros(layout.rows(group.rank()), *rows.shape[1:])
            exchange.give_back(_everywhere(layout), [rows], [own], rows.dtype, "the gradients of rows")()
        else:
            own = torch.cat([rows[:0], *(rows[first:end] for first, end in layout.ranges[group.rank()])])
        return own.movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Unshard.apply(grad, *ctx.arguments, False), None, None, None, None


def _everywhere(layout: Layout) -> Transfers:
    return dict.fromkeys(range(layout.ranks), of_everything(layout))


def _exchange(rows: Tensor, group: dist.ProcessGroup, layout: Layout) -> Exchange:
    """Compares what must be the same on all ranks; rows: (rows, ...)."""
    own = layout.rows(group.rank())
    count = "the layout's rows" if len(rows) in (0, own) else f"{len(rows)} rows where the layout has {own}"
    same = f"{count} of {tuple(rows.shape[1:])}, {rows.dtype}, {layout}"
    call = begin_call("unshard_sequence", group, rows.device, same=same)
    return Exchange(call, group_of_exchanges(group, rows.device), layout)
