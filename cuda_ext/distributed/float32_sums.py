"""Sums over ranks of values that are sent in 16 bits and added in float32.

An all-reduce of bfloat16 tensors adds in bfloat16: with N ranks it rounds N - 1 times, and the error grows with N. Here
an all-to-all gives every rank one chunk of each rank's values, which it adds in float32 and rounds once; an all-gather
distributes the sums. The bytes sent are those of an all-reduce, which also is a reduce-scatter and an all-gather.

The functions are generators of steps. Each yielded step has been started; wait for it before you request the next one.
The results are complete when the generator ends::

    for work in float32_all_reduce(wire, group):
        work.wait()

On a CPU ``wait`` blocks the thread, so run the loop in a background thread; on a GPU the current stream waits, not the
host, so use a side stream. Every rank must start the same sums in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from cuda_ext.distributed.checks import check_wire_dtype
from cuda_ext.distributed.process_groups import is_on_gloo

_SCATTER = "cuda_ext.distributed.Float32ReduceScatter"
_TAG = 0x5CA7  # of messages between two ranks over gloo; unlikely to be used by the program


class Step(Protocol):
    """An operation that was started and has to be waited for."""

    def wait(self) -> object: ...


class _Messages:
    """Messages over gloo that read and write chunks in place.

    gloo's all-gather of a flat tensor writes to a temporary one and copies from there.
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
    """The rounding error of the values sent so far, added to the next ones (Seide et al. 2014; 1-bit SGD).

    With the residual e, ``sent = round(values + e)`` and then ``e = values + e - sent``, so that the total sent in any
    number of steps differs from the exact total by one residual (Karimireddy et al. 2019, arXiv 1901.09847, algorithm
    2). A rank has one for the values it sends, and may have one for the chunk that it sums (Tang et al. 2019, arXiv
    1905.05957); residuals are not sent.

    Args:
        numel: the number of values per step. dtype: of the values before rounding, and of the residual; default
            float32. device: default that of new tensors.

    ``residual`` (numel,) is initially zero and in the same units as the values: rescale it when a loss scale changes.
    """

    def __init__(
        self, numel: int, dtype: torch.dtype = torch.float32, *, device: torch.device | str | None = None
    ) -> None:
        self.residual = torch.zeros(numel, dtype=dtype, device=device)

    def round(self, values: Tensor, wire: Tensor) -> None:
        """Writes ``values`` plus the residual to ``wire``, and stores the rounding error.

        values: (numel,), of the dtype of the residual, which is added to it in place. wire: (numel,), of another dtype.
        Where the wire is infinite or NaN the residual becomes zero, as it would make all later steps NaN.
        """
        values.add_(self.residual)
        wire.copy_(values)
        torch.sub(values, wire, out=self.residual)
        self.residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def sum_chunks(
    chunks: Sequence[Tensor], out: Tensor, *, scale: float = 1.0, feedback: ErrorFeedback | None = None
) -> None:
    """Writes ``scale`` times the sum of ``chunks`` to ``out``, rounded once.

    chunks: at least one, each (C,), of one dtype; ``out`` may be one of them, and the first may be overwritten. out:
    (C,). Both float32, float16, bfloat16 or float64. Chunks are added from first to last, in float32 (float64 if either
    dtype is), so the order does not depend on the position of a value. feedback: C elements, in the dtype of the sum;
    default None: rounding errors are discarded.
    """
    dtype = torch.float64 if torch.float64 in (chunks[0].dtype, out.dtype) else torch.float32
    if len(chunks) > 1 and chunks[0].dtype == out.dtype == dtype and feedback is None:
        own = next((n for n, chunk in enumerate(chunks) if chunk.data_ptr() == out.data_ptr()), 0)
        total = chunks[0]
        for chunk in chunks[1:own]:  # ``out`` cannot store the sum before it is added
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
    """Writes the sum over the ranks of chunk r of ``wire`` to ``out`` on rank r. Yields steps, see above.

    wire: (N C,) on N ranks, contiguous, float32, float16, bfloat16 or float64; it is only read, until the first step is
        done. out: (C,), of any of these dtypes; it may be the rank's own chunk of ``wire``.
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
    if _sends_in_place(group, wire):
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
    """Replaces ``wire`` by its sum over the ranks, with the same bits on all of them. Yields steps, see above.

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
    if _sends_in_place(group, wire):
        messages = _Messages(group)
        for rank in _others(group):
            messages.receive(chunks[rank], rank)
        for rank in _others(group):
            messages.send(own, rank)
        yield messages
    else:
        yield dist.all_gather_into_tensor(wire, own, group=group, async_op=True)


class Float32ReduceScatter:
    """A reduce-scatter for ``FSDPModule.set_custom_reduce_scatter`` that sums in float32 and rounds at most once.

    FSDP2 casts gradients to the ``reduce_dtype`` of its mixed precision policy; its own reduce-scatter sends and sums
    them in this dtype. This one sends ``wire_dtype``, sums in float32 (float64 if ``reduce_dtype`` is float64), and
    rounds the sum or mean to ``reduce_dtype``. With ``reduce_dtype=torch.float32`` and ``wire_dtype=torch.bfloat16`` it
    sends half the bytes and does not round the result.

    wire_dtype: float32, float16, bfloat16 or float64; default ``reduce_dtype``. float16 overflows beyond 65504, as
        values are not divided by the number of ranks before they are sent.

    One object may be set on any number of modules; FSDP2 requires setting it on each. Raises ValueError for another
    ``wire_dtype``, and from backward NotImplementedError for another reduction than a sum or mean.
    """

    # These two methods are FSDP2's protocol ReduceScatter, which torch does not export.

    def __init__(self, wire_dtype: torch.dtype | None = None) -> None:
        check_wire_dtype(_SCATTER, wire_dtype)
        self.wire_dtype = wire_dtype

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An empty tensor, for the gradients of a module or for this rank's shard of them."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Writes the sum or mean over N ranks of chunk r of ``input_tensor`` (N C,) to ``output_tensor`` (C,)."""
        if async_op:
            raise NotImplementedError(f"{_SCATTER}: expected async_op=False, which is what FSDP2 passes, got True")
        wire = input_tensor if self.wire_dtype is None else input_tensor.to(self.wire_dtype)
        for work in float32_reduce_scatter(wire, output_tensor, group, scale=_scale(op, group.size())):
            work.wait()  # on a GPU the stream of FSDP2 waits


def _scale(op: Any, ranks: int) -> float:
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1.0 / ranks
    if op == dist.ReduceOp.PREMUL_SUM:  # from set_gradient_divide_factor; only its pickled state has the factor
        return op.__getstate__()[1]
    raise NotImplementedError(f"{_SCATTER}: expected a sum, a mean or a sum with a factor, got {op}")


def _sends_in_place(group: dist.ProcessGroup, wire: Tensor) -> bool:
    """Whether to send `_Messages`: gloo copies a GPU's memory to the host for collectives, but not for messages."""
    return wire.is_cpu and is_on_gloo(group, wire.device)


def _others(group: dist.ProcessGroup) -> list[int]:
    """The other ranks, beginning with the next one, so that not all ranks send to the same one first."""
    ranks, rank = group.size(), group.rank()
    return [(rank + step) % ranks for step in range(1, ranks)]
