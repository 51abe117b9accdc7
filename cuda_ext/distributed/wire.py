"""Sums over ranks whose values travel in 16 bits and are added in float32.

An all-reduce of bfloat16 tensors adds in bfloat16: with N ranks it rounds N - 1 times, and the error grows with N. Here
every rank gets one chunk of each rank's values by an all-to-all, adds them in float32 and rounds once; an all-gather
brings the chunks together. That is the traffic of an all-reduce, which is a reduce-scatter and an all-gather as well.

These are generators of steps. A step has been started when it is yielded, and is to be waited for before the next one
is asked for; the results are there when the generator ends::

    for work in float32_all_reduce(wire, group):
        work.wait()

On a CPU ``wait`` blocks, so a thread of its own runs the loop; on a GPU the current stream waits, not the host, so a
side stream does. Every rank has to start the same sums in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from cuda_ext.distributed.own_group import is_on_gloo

_TAG = 0x5CA7  # of messages between two ranks, over gloo; unlike those of a program


class Step(Protocol):
    """What has been started, and is to be waited for."""

    def wait(self) -> object: ...


class _Messages:
    """Chunks on their way from rank to rank over gloo, from where they lie to where they go.

    Its own all-gather of a flat tensor writes to another one first, and copies from there.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._works = group, list[dist.Work]()

    def receive(self, chunk: Tensor, rank: int) -> None:
        self._works.append(self._group.recv([chunk], rank, _TAG))

    def send(self, chunk: Tensor, rank: int) -> None:
        self._works.append(self._group.send([chunk], rank, _TAG))

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class ErrorFeedback:
    """What rounding took from the values sent so far, to be added to the next ones (Seide et al. 2014; 1-bit SGD).

    With the residual e, ``sent = round(values + e)`` and then ``e = values + e - sent``, so that what all steps sent
    differs from what they should have sent by one residual, however many they were (Karimireddy et al. 2019, arXiv
    1901.09847, algorithm 2). A rank keeps one for what it sends, and may keep one for the chunk that it sums (Tang et
    al. 2019, arXiv 1905.05957); neither is part of any exchange.

    Args:
        numel: how many values are sent in a step. dtype: in which they are before they are rounded, and in which the
            residual is kept; default float32. device: default that of new tensors.

    ``residual`` (numel,) is zero at first, and in units of the values: multiply it with them when a loss scale changes.
    """

    def __init__(
        self, numel: int, dtype: torch.dtype = torch.float32, *, device: torch.device | str | None = None
    ) -> None:
        self.residual = torch.zeros(numel, dtype=dtype, device=device)

    def round(self, values: Tensor, wire: Tensor) -> None:
        """Writes ``values`` plus the residual to ``wire``, and keeps what the rounding loses.

        values: (numel,), of the dtype of the residual; the residual is added to it in place. wire: (numel,), of another
        dtype. Where the wire is infinite or NaN the residual becomes zero, lest it spoil all steps to come.
        """
        values.add_(self.residual)
        wire.copy_(values)
        torch.sub(values, wire, out=self.residual)
        self.residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def sum_chunks(
    chunks: Sequence[Tensor], out: Tensor, *, scale: float = 1.0, feedback: ErrorFeedback | None = None
) -> None:
    """Writes ``scale`` times the sum of ``chunks`` to ``out``, rounded once.

    chunks: (C,) each, of one dtype, at least one; ``out`` may be one of them, the first may be overwritten. out: (C,).
    Either of float32, float16, bfloat16 or float64. Added from first to last in float32 (float64 if either dtype is),
    so that the order does not depend on where a value lies. feedback: of C elements, of the dtype in which is added;
    default None: what rounding loses is lost.
    """
    dtype = torch.float64 if torch.float64 in (chunks[0].dtype, out.dtype) else torch.float32
    if len(chunks) > 1 and chunks[0].dtype == out.dtype == dtype and feedback is None:
        own = next((n for n, chunk in enumerate(chunks) if chunk.data_ptr() == out.data_ptr()), 0)
        total = chunks[0]
        for chunk in chunks[1:own]:  # before it is added, ``out`` cannot take the sum
            total.add_(chunk)
        torch.add(total, chunks[max(own, 1)], out=out)
        total, others = out, chunks[max(own, 1) + 1 :]
    else:
        total = out if out.dtype == dtype and feedback is None else torch.empty_like(out, dtype=dtype)
        total.copy_(chunks[0])
        others = chunks[1:]
    for chunk in others:
        total.add_(chunk)
    if scale != 1.0:
        total.mul_(scale)
    if feedback is not None:
        feedback.round(total, out)
    elif total is not out:
        out.copy_(total)


def float32_reduce_scatter(
    wire: Tensor,
    out: Tensor,
    group: dist.ProcessGroup,
    *,
    scale: float = 1.0,
    feedback: ErrorFeedback | None = None,
) -> Iterator[Step]:
    """Leaves rank r with the sum over the ranks of chunk r of ``wire``: the steps of it, see above.

    wire: (N C,) on N ranks, contiguous, float32, float16, bfloat16 or float64; it is only read, and not any more once
        the first step is done. out: (C,), of any of these dtypes; it may be the rank's own chunk of ``wire``.
    scale: multiplies the sum before it is rounded to the dtype of ``out``; default 1. feedback: of C elements, for that
        rounding; default None.

    Raises ValueError at the first step for sizes that do not fit.
    """
    ranks = group.size()
    if wire.numel() != ranks * out.numel():
        raise ValueError(
            "cuda_ext.distributed.float32_reduce_scatter: expected wire to hold one chunk of the size of out for each "
            f"of {ranks} ranks, {ranks} x {out.numel()} elements, got {wire.numel()}; pad it"
        )
    if is_on_gloo(group, wire.device):
        chunks = list(wire.view(ranks, -1))
        received = torch.empty(ranks - 1, out.numel(), dtype=wire.dtype, device=wire.device)
        messages = _Messages(group)
        for place, rank in enumerate(_others(group)):
            messages.receive(received[place], rank)
        for rank in _others(group):
            messages.send(chunks[rank], rank)
        yield messages
        for place, rank in enumerate(_others(group)):
            chunks[rank] = received[place]
    else:
        copied = torch.empty_like(wire)
        yield dist.all_to_all_single(copied, wire, group=group, async_op=True)
        chunks = list(copied.view(ranks, -1))
    sum_chunks(chunks, out, scale=scale, feedback=feedback)


def float32_all_reduce(
    wire: Tensor, group: dist.ProcessGroup, *, feedback: ErrorFeedback | None = None
) -> Iterator[Step]:
    """Replaces ``wire`` by its sum over the ranks, the same bits on all of them: the steps of it, see above.

    wire: (N C,) on N ranks, contiguous, float32, float16, bfloat16 or float64. feedback: of C elements, for the
    rounding of the sum in the chunk of this rank; default None. Raises ValueError at the first step for a length that
    the ranks do not divide.
    """
    ranks = group.size()
    if wire.numel() % ranks:
        raise ValueError(
            f"cuda_ext.distributed.float32_all_reduce: expected wire of a multiple of {ranks} elements, one chunk for "
            f"each rank, got {wire.numel()}; pad it"
        )
    chunks = wire.view(ranks, -1)
    own = chunks[group.rank()]
    yield from float32_reduce_scatter(wire, own, group, feedback=feedback)
    if is_on_gloo(group, wire.device):
        messages = _Messages(group)
        for rank in _others(group):
            messages.receive(chunks[rank], rank)
        for rank in _others(group):
            messages.send(own, rank)
        yield messages
    else:
        yield dist.all_gather_into_tensor(wire, own, group=group, async_op=True)


def _others(group: dist.ProcessGroup) -> list[int]:
    """The other ranks, from the next one on: so that not all send to the same one first."""
    ranks, rank = group.size(), group.rank()
    return [(rank + step) % ranks for step in range(1, ranks)]
