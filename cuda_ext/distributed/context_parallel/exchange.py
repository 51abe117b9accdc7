"""Rows of keys and values on their way to the ranks that see them, and gradients on their way back.

A transfer starts in the background: over NCCL in a stream, over gloo in a thread. Where all ranks see all keys, it is
an all-gather, else an all-to-all of the rows that each rank sees. Gradients come back by an all-to-all, in the dtype of
the operands; their sums are formed in the accumulation type, the rank's own first and the others' in the order of
ranks, and rounded once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cuda_ext._group_calls import GroupCall
from cuda_ext.distributed.context_parallel.layout import Layout, Range, located, size
from cuda_ext.distributed.context_parallel.parts import Transfer, Transfers
from cuda_ext.distributed.process_groups import own_group

_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, dist.ProcessGroup]]
_groups = weakref.WeakKeyDictionary()


def group_of_exchanges(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """The group that transfers use, see `own_group`; made by the first call for a group, which is a collective."""
    own = _groups.setdefault(group, {})
    if device not in own:
        own[device] = own_group(group, device)
    return own[device]


class Exchange:
    """The transfers of one call."""

    def __init__(self, call: GroupCall, group: dist.ProcessGroup, layout: Layout) -> None:
        self._call, self._group, self._layout = call, group, layout
        self.rank, self.ranks = group.rank(), group.size()

    def start(self, transfers: Transfers, tensors: Sequence[Tensor], what: str) -> Callable[[], list[Tensor]]:
        """Starts the transfer of rows of `tensors`, each (own rows, ...).

        transfers: of this rank and of those that get its rows. Returns a function that waits and returns, for each
        tensor, the rows of this rank's transfer, (keys, ...).
        """
        everything = ((0, self._layout.length),)
        with self._call.named(what, completes=False):
            if len(transfers) == self.ranks and all(each.keys == everything for each in transfers.values()):
                started = [self._gather(rows) for rows in tensors]
            else:
                started = [self._send(transfers, rows) for rows in tensors]

        def wait() -> list[Tensor]:
            with self._call.named(what):
                return [started.pop(0)() for _ in tensors]  # what has come is freed before the next is ordered

        return wait

    def give_back(
        self,
        transfers: Transfers,
        grads: Sequence[Tensor],
        sums: Sequence[Tensor],
        dtype: torch.dtype,
        what: str,
    ) -> Callable[[], None]:
        """Starts to send the gradients of the rows of this rank's transfer, each (keys, ...), in `dtype`.

        Adds those of this rank's rows to `sums`, each (own rows, ...). Returns a function that waits and adds what the
        other ranks have sent.
        """
        own = transfers[self.rank]
        places = self._places(own, self.rank)
        with self._call.named(what, completes=False):
            started = [self._return(transfers, grad, dtype) for grad in grads]
        for grad, total in zip(grads, sums):
            for (first, end), (low, high) in zip(own.pieces[self.rank], places, strict=True):
                total[first:end] += grad[low:high]

        def finish() -> None:
            with self._call.named(what):
                for total in sums:
                    self._add(transfers, started.pop(0)(), total)

        return finish

    def _gather(self, rows: Tensor) -> Callable[[], Tensor]:
        counts = [self._layout.rows(rank) for rank in range(self.ranks)]
        most = max(counts)
        sent = _dense(rows, most)
        received = sent.new_empty(self.ranks * most, *sent.shape[1:])
        work: Any = dist.all_gather_into_tensor(received, sent, group=self._group, async_op=True)

        def finish() -> Tensor:
            work.wait()
            parts = []
            for rank, ranges in enumerate(self._layout.ranges):
                begin = rank * most
                for first, end in ranges:
                    parts.append((first, received[begin : begin + end - first]))
                    begin += end - first
            return _joined([part for _, part in sorted(parts, key=lambda part: part[0])], received)

        return finish

    def _send(self, transfers: Transfers, rows: Tensor) -> Callable[[], Tensor]:
        own = transfers[self.rank]
        to = self._pieces_for_others(transfers)
        of = [0 if rank == self.rank else size(pieces) for rank, pieces in enumerate(own.pieces)]
        received = self._all_to_all(_packed(rows, to), list(map(size, to)), of)

        def finish() -> Tensor:
            others = received()
            sources = [rank for rank, pieces in enumerate(own.pieces) if pieces]
            if len(sources) == 1:  # in order, as a rank's rows are
                return _packed(rows, [own.pieces[self.rank]]) if sources == [self.rank] else others
            result = rows.new_empty(size(own.keys), *rows.shape[1:])
            begin = 0
            for rank, pieces in enumerate(own.pieces):
                for (first, end), (low, high) in zip(pieces, self._places(own, rank), strict=True):
                    if rank == self.rank:
                        result[low:high] = rows[first:end]
                    else:
                        result[low:high] = others[begin : begin + end - first]
                        begin += end - first
            return result

        return finish

    def _pieces_for_others(self, transfers: Transfers) -> list[tuple[Range, ...]]:
        """Which of this rank's rows each other rank gets."""
        others = [transfers.get(rank) if rank != self.rank else None for rank in range(self.ranks)]
        return [() if other is None else other.pieces[self.rank] for other in others]

    def _places(self, transfer: Transfer, rank: int) -> list[Range]:
        """Where a transfer has the pieces of a rank, among its keys."""
        if not transfer.pieces[rank]:
            return []
        rows = [rows for rows, _ in located(self._layout.ranges[rank], transfer.keys)]
        return [place for _, place in located(transfer.keys, rows)]

    def _return(self, transfers: Transfers, grad: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
        own = transfers[self.rank]
        to = [() if rank == self.rank else tuple(self._places(own, rank)) for rank in range(self.ranks)]
        of = list(map(size, self._pieces_for_others(transfers)))
        return self._all_to_all(_packed(grad, to, dtype), list(map(size, to)), of)

    def _add(self, transfers: Transfers, received: Tensor, total: Tensor) -> None:
        """In the order of ranks, so that the bits do not depend on which gradients come first."""
        begin = 0
        for rank in sorted(transfers.keys() - {self.rank}):
            pieces = transfers[rank].pieces[self.rank]
            _add_to(total, pieces, received[begin : begin + size(pieces)])
            begin += size(pieces)

    def swap(self, rows: Tensor, to: list[int], of: list[int], what: str) -> Tensor:
        """Sends so many `rows` to each rank, in order; returns what has come, in order."""
        with self._call.named(what):
            return self._all_to_all(rows, to, of)()

    def _all_to_all(self, rows: Tensor, to: list[int], of: list[int]) -> Callable[[], Tensor]:
        received = rows.new_empty(sum(of), *rows.shape[1:])
        work: Any = dist.all_to_all_single(received, rows, of, to, group=self._group, async_op=True)

        def wait() -> Tensor:
            work.wait()
            assert rows is not None  # it lives until here
            return received

        return wait


class NoExchange:
    """The exchange of one rank."""

    rank, ranks = 0, 1

    def start(self, transfers: Transfers, tensors: Sequence[Tensor], what: str) -> Callable[[], list[Tensor]]:
        (keys,) = transfers[0].pieces
        return lambda: [_packed(rows, [keys]) for rows in tensors]

    def give_back(
        self,
        transfers: Transfers,
        grads: Sequence[Tensor],
        sums: Sequence[Tensor],
        dtype: torch.dtype,
        what: str,
    ) -> Callable[[], None]:
        (keys,) = transfers[0].pieces
        for grad, total in zip(grads, sums):
            _add_to(total, keys, grad)
        return lambda: None


def _packed(rows: Tensor, ranges: Sequence[Sequence[Range]], dtype: torch.dtype | None = None) -> Tensor:
    """The rows of all ranges, one after the other; a view if they are so already."""
    parts: list[Range] = []
    for first, end in (part for of_rank in ranges for part in of_rank):
        if parts and parts[-1][1] == first:
            first = parts.pop()[0]
        parts.append((first, end))
    packed = [rows[first:end].to(dtype or rows.dtype) for first, end in parts or [(0, 0)]]
    return packed[0].contiguous() if len(packed) == 1 else torch.cat(packed)


def _add_to(total: Tensor, pieces: Sequence[Range], rows: Tensor) -> None:
    """Adds rows, which are one after the other, to pieces of `total`."""
    begin = 0
    for first, end in pieces:
        total[first:end] += rows[begin : begin + end - first]
        begin += end - first


def _dense(rows: Tensor, count: int) -> Tensor:
    """Contiguous, of `count` rows; those that are missing may be anything finite."""
    if len(rows) == count:
        return rows.contiguous()
    return torch.cat([rows, rows.new_zeros(count - len(rows), *rows.shape[1:])])


def _joined(parts: list[Tensor], of: Tensor) -> Tensor:
    """Parts of a tensor one after the other; a view if they are so already."""
    end = of.data_ptr()
    for part in parts:
        if part.data_ptr() != end:
            return torch.cat(parts)
        end += part.numel() * part.element_size()
    return of[: sum(map(len, parts))]
