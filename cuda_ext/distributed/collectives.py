"""Collectives on many tensors, several collectives at once, and a hook for torch's DistributedDataParallel."""

# No `from __future__ import annotations`: DistributedDataParallel compares the annotations of a hook with the types.

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from cuda_ext import bucket as bucket_ops
from cuda_ext.distributed.checks import DTYPES, check_wire_dtype
from cuda_ext.distributed.process_groups import resolve_group

SMALLEST_ALONE = 256 << 10  # bytes from which a tensor has its own broadcast
LARGEST_SHARED = 4 << 20  # bytes that share one broadcast, through a copy


def averages(caller: str, op: object) -> bool:
    """Whether ``op`` is a mean, not a sum; ValueError for others."""
    name = op if isinstance(op, str) else getattr(op, "name", "").lower()  # torch.compile cannot compare ReduceOps
    if name not in ("avg", "sum"):
        raise ValueError(f'{caller}: expected op to be "avg" or "sum", got {op!r}')
    return name == "avg"


def coalesces(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the backend for ``device`` runs several collectives as one launch, as NCCL's groups do."""
    return bool(getattr(group._get_backend(device), "supports_coalescing", False))


def start_together(
    group: dist.ProcessGroup, device: torch.device, collectives: Sequence[Callable[[], dist.Work | None]]
) -> list[dist.Work]:
    """Calls ``collectives``, each of which starts a collective of ``group``, as one launch if possible.

    A group saves the latency of each collective but the first (NCCL user guide, Group Calls), and ends when all of them
    have. All ranks must make the same groups.

    Returns the handles to wait for before any of the results is used.
    """
    if len(collectives) < 2 or not coalesces(group, device):
        return [work for work in (start() for start in collectives) if work is not None]
    group._start_coalescing(device)
    try:
        for start in collectives:
            start()  # the handle of a single collective cannot be waited for
    finally:
        work = group._end_coalescing(device)
    return [] if work is None else [work]


def broadcast_coalesced(tensors: Iterable[Tensor], group: dist.ProcessGroup, source: int = 0) -> None:
    """Overwrites ``tensors`` with those of the group's rank ``source``.

    Large tensors are sent in place; small ones of the same device and dtype share a broadcast, through a small copy.
    """
    small: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    sizes: dict[tuple[torch.device, torch.dtype], int] = {}
    works = []
    for tensor in map(Tensor.detach, tensors):
        if tensor.nbytes >= SMALLEST_ALONE and tensor.is_contiguous():
            works.append(dist.broadcast(tensor, group=group, group_src=source, async_op=True))
            continue
        kind = tensor.device, tensor.dtype
        small.setdefault(kind, []).append(tensor)
        sizes[kind] = sizes.get(kind, 0) + tensor.nbytes
        if sizes[kind] >= LARGEST_SHARED:
            _broadcast_flat(small.pop(kind), group, source)
            sizes[kind] = 0
    for members in small.values():
        _broadcast_flat(members, group, source)
    for work in filter(None, works):
        work.wait()


def _broadcast_flat(members: list[Tensor], group: dist.ProcessGroup, source: int) -> None:
    flat = _flatten_dense_tensors(members)
    dist.broadcast(flat, group=group, group_src=source)
    if group.rank() != source:
        torch._foreach_copy_(members, _unflatten_dense_tensors(flat, members))


@dataclass
class _Bucket:
    wire: Tensor
    tensors: list[Tensor]
    offsets: list[int]


class CoalescedWork:
    """An `all_reduce_coalesced` that was started; the tensors are only valid after `wait`."""

    def __init__(self, works: list[dist.Work], buckets: list[_Bucket]) -> None:
        self._works, self._buckets = works, buckets

    def wait(self) -> None:
        """Waits for the sums and writes the results; further calls do nothing. Raises what the group raises."""
        for work in self._works:
            work.wait()
        for bucket in self._buckets:
            bucket_ops.unpack(bucket.wire, bucket.tensors, bucket.offsets)
        self._works, self._buckets = [], []


def all_reduce_coalesced(
    tensors: Sequence[Tensor],
    op: str | dist.ReduceOp.RedOpType = "avg",
    *,
    group: dist.ProcessGroup | None = None,
    wire_dtype: torch.dtype | None = None,
    async_op: bool = False,
) -> CoalescedWork | None:
    """Replaces every tensor by its mean or sum over the ranks, in place, with one all-reduce per device and dtype.

    Over NCCL the all-reduces of a device are one launch.

    Args:
        tensors: float32, float16, bfloat16 or float64, of any shape and strides; the same shapes and dtypes in the same
            order on every rank (not checked). They may require grad; autograd does not record the operation.
        op: ``"avg"``, the default, or ``"sum"``, or torch's `ReduceOp`. A mean divides before it sums, so that float16
            does not overflow.
        group: default the default group.
        wire_dtype: the dtype in which values are sent and summed; default each tensor's own. If given, all tensors of a
            device share one all-reduce.
        async_op: whether to return immediately, with a handle whose ``wait()`` completes the operation; default False:
            return None when done.

    Raises RuntimeError without a process group, ValueError for another ``op`` or ``wire_dtype``, TypeError for a tensor
    of another dtype or layout.
    """
    caller = "cuda_ext.distributed.all_reduce_coalesced"
    group = resolve_group(caller, group)
    check_wire_dtype(caller, wire_dtype)
    scale = 1.0 / group.size() if averages(caller, op) else 1.0
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for n, tensor in enumerate(tensors):
        if tensor.dtype not in DTYPES or tensor.layout is not torch.strided:
            raise TypeError(
                f"{caller}: expected tensors[{n}] dense and float32, float16, bfloat16 or float64, got {tensor.dtype} "
                f"and {tensor.layout}"
            )
        groups.setdefault((tensor.device, wire_dtype or tensor.dtype), []).append(tensor.detach())
    buckets: dict[torch.device, list[_Bucket]] = {}
    for (device, dtype), members in groups.items():
        offsets, size = bucket_ops.aligned_offsets([member.numel() for member in members], dtype)
        wire = torch.empty(size, dtype=dtype, device=device)
        bucket_ops.pack(members, wire, offsets, scale=scale)
        buckets.setdefault(device, []).append(_Bucket(wire, members, offsets))
    works = []
    for device, of_device in buckets.items():
        works += start_together(group, device, [partial(group.allreduce, [bucket.wire]) for bucket in of_device])
    work = CoalescedWork(works, [bucket for of_device in buckets.values() for bucket in of_device])
    if async_op:
        return work
    work.wait()
    return None


@dataclass
class AllreduceState:
    """State of `allreduce_hook`: the group, default the default one, and the dtype of transfers, default gradients'."""

    process_group: dist.ProcessGroup | None = None
    wire_dtype: torch.dtype | None = None


def allreduce_hook(
    state: AllreduceState | dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Communication hook for `torch.nn.parallel.DistributedDataParallel`: the mean over the ranks, with one pass over
    memory before and after the sum.

    Use ``ddp.register_comm_hook(None, allreduce_hook)``, or ``AllreduceState(wire_dtype=torch.bfloat16)`` instead of
    None to send half the bytes; a process group works, too, as with torch's own hooks. torch passes ``bucket``; the
    future has its buffer, averaged.
    """
    if not isinstance(state, AllreduceState):
        state = AllreduceState(process_group=state)
    caller = "cuda_ext.distributed.allreduce_hook"
    group = resolve_group(caller, state.process_group)
    check_wire_dtype(caller, state.wire_dtype)
    gradients = bucket.buffer()
    in_place = state.wire_dtype in (None, gradients.dtype)
    wire = gradients if in_place else torch.empty_like(gradients, dtype=state.wire_dtype)
    bucket_ops.pack([gradients], wire, [0], scale=1.0 / group.size())

    def finish(reduced: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        reduced.value()  # raises what the group raises
        if not in_place:
            bucket_ops.unpack(wire, [gradients], [0])
        return gradients

    return group.allreduce([wire]).get_future().then(finish)
