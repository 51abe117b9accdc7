"""Collectives on many tensors at once, and the hook that brings them to torch's own DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from cuda_ext import bucket

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def resolve_group(caller: str, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """``group`` or the default group; RuntimeError if there is none or this process is not in it."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            f"{caller}: expected an initialised process group, got none; call torch.distributed.init_process_group() first, and start the program "
            "with torchrun, which sets the rank and the world size"
        )
    resolved = dist.group.WORLD if group is None else group
    if not isinstance(resolved, dist.ProcessGroup):
        raise RuntimeError(f"{caller}: expected a process group that holds this process, got {group!r}")
    return resolved


def check_wire_dtype(caller: str, wire_dtype: torch.dtype | None) -> None:
    if wire_dtype is not None and wire_dtype not in DTYPES:
        raise ValueError(f"{caller}: expected wire_dtype None, torch.float32, torch.float16, torch.bfloat16 or torch.float64, got {wire_dtype!r}")


def broadcast_coalesced(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Overwrites ``tensors`` (any dtypes and devices) with those of the group's first rank: one broadcast for each device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor.detach())
    for members in groups.values():
        flat = torch.cat([member.reshape(-1) for member in members])
        dist.broadcast(flat, group=group, group_src=0)
        pieces = flat.split([member.numel() for member in members])
        torch._foreach_copy_(members, [piece.view(member.shape) for piece, member in zip(pieces, members)])


class CoalescedWork:
    """An `all_reduce_coalesced` under way. The tensors hold the result once `wait` has returned; until then they may not be touched."""

    def __init__(self) -> None:
        self._pending: list[tuple[dist.Work, Tensor, list[Tensor], list[int]]] = []

    def _launch(self, tensors: list[Tensor], wire_dtype: torch.dtype, scale: float, group: dist.ProcessGroup) -> None:
        offsets, size = bucket.aligned_offsets([tensor.numel() for tensor in tensors], wire_dtype)
        wire = tensors[0].new_empty(size, dtype=wire_dtype)
        bucket.pack(tensors, wire, offsets, scale=scale)
        self._pending.append((group.allreduce([wire]), wire, tensors, offsets))

    def wait(self) -> None:
        """Waits for the ranks and writes the results; further calls do nothing. Raises what the process group raises."""
        while self._pending:
            work, wire, tensors, offsets = self._pending[0]
            work.wait()
            bucket.unpack(wire, tensors, offsets)
            del self._pending[0]


def all_reduce_coalesced(
    tensors: Sequence[Tensor],
    op: str = "mean",
    *,
    group: dist.ProcessGroup | None = None,
    wire_dtype: torch.dtype | None = None,
    async_op: bool = False,
) -> CoalescedWork | None:
    """Replaces every tensor by its mean or sum over the ranks, in place, with one all-reduce for each device and dtype.

    tensors: float32, float16, bfloat16 or float64, of any shape; the same shapes and dtypes in the same order on every rank (not checked). They may
    require grad; none is recorded.
    op: ``"mean"`` or ``"sum"``. The mean divides before it sums, so that float16 does not overflow.
    group: default the default group. wire_dtype: what travels; default each tensor's own dtype. With one given, all tensors of a device share one
    all-reduce, and the sum is rounded to it.
    async_op: return a handle at once, whose ``wait()`` finishes the job; default False, which returns None when it is done.

    Raises RuntimeError without a process group, ValueError for another ``op`` or ``wire_dtype``, TypeError for other tensors.
    """
    caller = "cuda_ext.distributed.all_reduce_coalesced"
    group = resolve_group(caller, group)
    check_wire_dtype(caller, wire_dtype)
    if op not in ("mean", "sum"):
        raise ValueError(f'{caller}: expected op "mean" or "sum", got {op!r}')
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor) or tensor.dtype not in DTYPES or tensor.layout is not torch.strided:
            got = f"{tensor.dtype} {tensor.layout}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{caller}: expected tensors[{index}] to be dense and float32, float16, bfloat16 or float64, got {got}")
        groups.setdefault((tensor.device, wire_dtype or tensor.dtype), []).append(tensor.detach())
    scale = 1.0 / group.size() if op == "mean" else 1.0
    work = CoalescedWork()
    for (_, dtype), members in groups.items():
        work._launch(members, dtype, scale, group)
    if async_op:
        return work
    work.wait()
    return None


@dataclass
class AllreduceState:
    """State of `allreduce_hook`: the group (default: the default group) and what travels (default: the dtype of the gradients)."""

    process_group: dist.ProcessGroup | None = None
    wire_dtype: torch.dtype | None = None


def allreduce_hook(state: AllreduceState | dist.ProcessGroup | None, bucket_: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Communication hook for ``torch.nn.parallel.DistributedDataParallel``: the mean over the ranks, scaled and cast in one pass each way.

    Use: ``ddp.register_comm_hook(None, allreduce_hook)``, or with ``AllreduceState(wire_dtype=torch.bfloat16)`` to send half the bytes. As with the
    hooks of torch, a process group may stand in place of the state.
    """
    if not isinstance(state, AllreduceState):
        state = AllreduceState(process_group=state)
    caller = "cuda_ext.distributed.allreduce_hook"
    group = resolve_group(caller, state.process_group)
    check_wire_dtype(caller, state.wire_dtype)
    gradients = bucket_.buffer()
    same = state.wire_dtype in (None, gradients.dtype)
    wire = gradients if same else torch.empty_like(gradients, dtype=state.wire_dtype)
    bucket.pack([gradients], wire, [0], scale=1.0 / group.size())

    def finish(reduced: torch.futures.Future[list[Tensor]]) -> Tensor:
        reduced.value()  # raises what the process group raised
        if not same:
            bucket.unpack(wire, [gradients], [0])
        return gradients

    return group.allreduce([wire]).get_future().then(finish)
