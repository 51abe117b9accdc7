"""Rows that are divided over ranks: gathered, or summed and scattered, at once or in chunks beside products.

At once is one collective. In chunks is a pairwise exchange: in step i each rank sends to the i-th rank after it and
receives from the i-th before it. Over NCCL the steps run in the communicator's stream, in order, beside the products in
the current one; over gloo in its threads. Values are sent in their dtype and added in float32 (float64 for float64) by
one reduction over the ranks' parts, which is the same either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cuda_ext._group_calls import GroupCall

_TAG = 0x5CA8  # of messages over gloo; unlikely to be used by the program


class Parts(NamedTuple):
    """The division of rows, and the call whose exchanges it is of."""

    sizes: tuple[int, ...]  # rows of each rank
    rank: int
    group: dist.ProcessGroup
    call: GroupCall | None  # None in a compiled graph, where exchanges have no names

    @property
    def ranks(self) -> int:
        return len(self.sizes)

    @property
    def own(self) -> int:
        return self.sizes[self.rank]

    def rows(self, rank: int) -> slice:
        begin = sum(self.sizes[:rank])
        return slice(begin, begin + self.sizes[rank])

    def chunks(self, rank: int, count: int) -> list[slice]:
        """The rows of a rank in as equal chunks as possible, without empty ones."""
        begin, size = self.rows(rank).start, self.sizes[rank]
        ends = [begin + size * number // count for number in range(count + 1)]
        return [slice(*both) for both in zip(ends, ends[1:]) if both[0] < both[1]]

    def steps(self) -> Iterator[tuple[int, int]]:
        """The rank that is sent to, and the one that is received from, in each step."""
        for step in range(1, self.ranks):
            yield (self.rank + step) % self.ranks, (self.rank - step) % self.ranks

    def named(self, what: str, *, completes: bool = True) -> AbstractContextManager[None]:
        return nullcontext() if self.call is None else self.call.named(what, completes=completes)


class GatherRows(torch.autograd.Function):
    """(own rows (s, ...), parts, what they are) -> the rows of all ranks (S, ...)"""

    @staticmethod
    def forward(rows: Tensor, parts: Parts, what: str) -> Tensor:
        return finish_gather(start_gather(rows, parts, what), parts, what)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Parts, str], output: Tensor) -> None:
        _, ctx.parts, ctx.what = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ScatterSums.apply(grad, ctx.parts, f"the gradients of {ctx.what}"), None, None


class ScatterSums(torch.autograd.Function):
    """(terms of all rows (S, ...), parts, what they are) -> the sums over the ranks of the own rows (s, ...)"""

    @staticmethod
    def forward(terms: Tensor, parts: Parts, what: str) -> Tensor:
        return add_parts(finish_scatter(start_scatter(terms, parts, what), parts, what))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Parts, str], output: Tensor) -> None:
        _, ctx.parts, ctx.what = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return GatherRows.apply(grad, ctx.parts, f"the gradients of {ctx.what}"), None, None


# Functional collectives return before they end. Compilers understand them.


def start_gather(rows: Tensor, parts: Parts, what: str) -> Tensor:
    """What `finish_gather` takes. Parts of different sizes are padded to the largest."""
    most = max(parts.sizes)
    if parts.own < most:
        rows = torch.cat([rows, rows.new_zeros(most - parts.own, *rows.shape[1:])])
    if rows.numel() == 0:  # on every rank
        return rows.new_empty(parts.ranks * most, *rows.shape[1:])
    with parts.named(what, completes=False):
        collectives = torch.ops._c10d_functional
        return collectives.all_gather_into_tensor(rows.contiguous(), parts.ranks, parts.group.group_name)


def finish_gather(started: Tensor, parts: Parts, what: str) -> Tensor:
    """(S, ...), contiguous."""
    with parts.named(what):
        gathered: Tensor = torch.ops._c10d_functional.wait_tensor(started)
    most = max(parts.sizes)
    if min(parts.sizes) == most:
        return gathered
    return torch.cat([gathered[rank * most : rank * most + size] for rank, size in enumerate(parts.sizes)])


def start_scatter(terms: Tensor, parts: Parts, what: str) -> Tensor:
    """What `finish_scatter` takes; terms: (S, ...)."""
    received = [parts.own] * parts.ranks
    if terms.numel() == 0:  # on every rank
        return terms.new_empty(sum(received), *terms.shape[1:])
    collectives = torch.ops._c10d_functional
    with parts.named(what, completes=False):
        return collectives.all_to_all_single(terms.contiguous(), received, list(parts.sizes), parts.group.group_name)


def finish_scatter(started: Tensor, parts: Parts, what: str) -> Tensor:
    """(ranks, s, ...): the terms of each rank for the own rows."""
    with parts.named(what):
        received: Tensor = torch.ops._c10d_functional.wait_tensor(started)
    return received.view(parts.ranks, parts.own, *received.shape[1:])


def add_parts(terms: Tensor, bias: Tensor | None = None) -> Tensor:
    """The sum over the first dim, and the bias, rounded once."""
    total = terms.sum(0, dtype=torch.float64 if terms.dtype == torch.float64 else torch.float32)
    if bias is not None:
        total = total + bias
    return total.to(terms.dtype) if total.dtype != terms.dtype else total


def gather_beside(rows: Tensor, parts: Parts, chunks: int, use: Callable[[Tensor, slice], None], what: str) -> Tensor:
    """The rows of all ranks (S, ...). Calls `use` with the own rows while others are on their way, and with each chunk
    that has arrived; and the place of both among all rows.

    chunks: of the part of each rank.
    """
    rows, own = rows.contiguous(), parts.rows(parts.rank)
    gathered = rows.new_empty(sum(parts.sizes), *rows.shape[1:])
    begun = []
    for receiver, sender in parts.steps():
        for sent, place in zip_longest(parts.chunks(parts.rank, chunks), parts.chunks(sender, chunks)):
            message = None if sent is None else rows[_moved(sent, own)]
            arrives = None if place is None else gathered[place]
            begun.append((place, _start(parts, message, receiver, arrives, sender, what)))
    gathered[own] = rows
    if parts.own:
        use(rows, own)
    for place, exchange in begun:
        exchange.wait()
        if place is not None:
            use(gathered[place], place)
    return gathered


def scatter_beside(
    make: Callable[[slice], Tensor], like: Tensor, width: int, parts: Parts, chunks: int, what: str
) -> Tensor:
    """`finish_scatter` of ``make(slice(0, S))``, whose chunks are sent as soon as they are made, the own rows last.

    like: (S, ..., any); the terms are (S, ..., width), of its dtype. chunks: of the part of each rank.
    """
    received, own = like.new_empty(parts.ranks, parts.own, *like.shape[1:-1], width), parts.rows(parts.rank)
    begun = []
    for receiver, sender in parts.steps():
        for place, arriving in zip_longest(parts.chunks(receiver, chunks), parts.chunks(parts.rank, chunks)):
            message = None if place is None else make(place).contiguous()
            arrives = None if arriving is None else received[sender, _moved(arriving, own)]
            begun.append(_start(parts, message, receiver, arrives, sender, what))
    if parts.own:
        received[parts.rank] = make(own)
    for exchange in begun:
        exchange.wait()
    return received


def _moved(rows: slice, own: slice) -> slice:
    """Their place in the own part."""
    return slice(rows.start - own.start, rows.stop - own.start)


class _Exchange(NamedTuple):
    """One step, as it was started."""

    parts: Parts
    what: str
    message: Tensor | None  # lives until it has been sent
    works: list[dist.Work]

    def wait(self) -> None:
        with self.parts.named(self.what):
            for work in self.works:
                work.wait()


def _start(
    parts: Parts, message: Tensor | None, receiver: int, arrives: Tensor | None, sender: int, what: str
) -> _Exchange:
    """Sends and receives, in one launch over NCCL; nothing where there is no value."""
    ends = (dist.isend, message, receiver), (dist.irecv, arrives, sender)
    both = [
        dist.P2POp(operation, tensor, group=parts.group, group_peer=peer, tag=_TAG)
        for operation, tensor, peer in ends
        if tensor is not None and tensor.numel()
    ]
    what = f"{what}, to rank {receiver} and from rank {sender}"
    with parts.named(what, completes=False):
        return _Exchange(parts, what, message, dist.batch_isend_irecv(both) if both else [])
