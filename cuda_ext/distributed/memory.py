"""The memory of gradient buckets: one flat buffer per dtype, allocated once and divided as often as buckets change; on
GPUs registered with NCCL."""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cuda_ext._timing import ends_within
from cuda_ext.bucket import aligned_offsets


class RankFlag(IntEnum):
    """The last flags of a bucket, which describe a rank, as indices from the end ([Note 2] in reducer.py)."""

    REACHED = -4  # its backward passes have reached all of its forward passes
    HAS_GRADIENTS = -3  # it takes part with gradients
    LEFT_OUT = -2  # backward has not reached all forward passes
    ANNOUNCES = -1  # it only announces that parameters were frozen or unfrozen


@dataclass(frozen=True)
class Layout:
    """The layout of a bucket, in elements: gradients at ``offsets``, flags at ``head``, then padding up to ``size``.

    There is one flag per gradient, and one per `RankFlag` ([Note 2] in reducer.py). Every gradient begins at a
    multiple of 64 bytes. ``size`` is a multiple of the number of ranks, so that each can own an equal part, and of 128,
    so that parts begin at whole vectors (as Megatron-LM pads its buckets).
    """

    offsets: list[int]
    head: int
    size: int


def layout(counts: Sequence[int], dtype: torch.dtype, ranks: int) -> Layout:
    """The layout of gradients of ``counts`` elements that travel as ``dtype``."""
    offsets, head = aligned_offsets(counts, dtype)
    return Layout(offsets, head, _round_up(head + len(counts) + len(RankFlag), math.lcm(ranks, 128)))


def elements_needed(counts: Sequence[int], dtype: torch.dtype, ranks: int, max_buckets: int) -> int:
    """The size of an arena for gradients of ``counts`` elements in up to ``max_buckets`` buckets, in any order."""
    head = aligned_offsets(counts, dtype)[1]
    padding = math.lcm(ranks, 128) - 1
    return head + len(counts) + max_buckets * (len(RankFlag) + padding)


class Arena:
    """Flat memory that is divided into buckets."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._used = 0

    def allocate(self, size: int) -> Tensor:
        """The next ``size`` elements, as a tensor with its own version counter."""
        begin = self._used
        self._used += size
        assert self._used <= self.memory.numel()
        return self.memory[begin : self._used].data

    def clear(self) -> None:
        """Frees everything; later allocations reuse the memory."""
        self._used = 0


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


logger = logging.getLogger("cuda_ext.distributed")

PATIENCE = 2.0  # seconds that the end of a process waits for a GPU, which may wait for ranks that have ended


class RegisteredMemory:
    """``buffers`` of the given numbers of elements and dtypes, registered with ``group`` if every rank can do so.

    NCCL's kernels read and write a registered buffer in place, without copies to and from buffers of its own; if it is
    registered as symmetric, at the same offset on every rank, NCCL 2.27 and later can use kernels of far lower latency
    (NCCL user guide, User Buffer Registration; Megatron-LM's ``nccl_ub``).

    The constructor is a collective. If a rank cannot register them, all ranks use ordinary buffers, and ``reason`` says
    why, in one line; it is None if they are registered. Keep this object as long as the buffers are used, and `close`
    it before the group is destroyed.
    """

    def __init__(
        self, sizes: Sequence[tuple[int, torch.dtype]], group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self.buffers: list[Tensor] = []
        self.reason: str | None = None
        self._group: dist.ProcessGroup | None = group
        self._backend: Any = group._get_backend(device)
        self._device = device
        self._pool: Any = None
        self._is_registered = False
        if device.type != "cuda":
            self.reason = "only memory of GPUs is registered"
            # The system allocates pages when gradients arrive: `pack` writes all of a bucket before it is read.
            self.buffers = [torch.empty(size, dtype=dtype, device=device) for size, dtype in sizes]
        else:
            with torch.cuda.device(device):  # pools belong to the current device
                # Registration needs a communicator for this device, which `init_process_group` without a device_id
                # leaves to the first collective. It is itself a collective, without a timeout: the ranks agree first.
                group.allreduce([torch.zeros(1, dtype=torch.float32, device=device)]).wait()
                self.reason = _first_reason(self._allocate(sizes, device), group)
                if self.reason is None:
                    self.reason = _first_reason(self._register(), group)
            if self.reason is not None:
                self.close()
                self.buffers = []
                if group.rank() == 0:
                    logger.info("buckets are not registered with NCCL; %s", self.reason)
        if not self.buffers:
            self.buffers = [torch.zeros(size, dtype=dtype, device=device) for size, dtype in sizes]

    def close(self, stream: torch.cuda.Stream | None = None) -> None:
        """Deregisters the memory, which is used in ``stream`` and the current one, if at all. Not a collective.

        If the group has been destroyed, or if the GPU still waits for other ranks, the memory is kept until the process
        ends: PyTorch would look for its registration when it is freed, in a destructor, and end the process.
        """
        if self._is_registered:
            self._is_registered = False
            reason = self._deregister(stream)
            if reason is not None:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object((self._pool, self.buffers)))
                logger.warning(
                    "expected close() while the process group can be used, got memory that is still registered with "
                    "NCCL, but %s; it is kept until the process ends",
                    reason,
                )
        self._pool = self._backend = self._group = None

    def _deregister(self, stream: torch.cuda.Stream | None) -> str | None:
        """Returns why the memory could not be deregistered, or None."""
        if _is_destroyed(self._group):
            return "the group is destroyed"
        try:
            if stream is not None and not ends_within(PATIENCE, stream):
                return "the GPU has not completed its sums"
            self._backend.deregister_mem_pool(self._pool)
        except RuntimeError as error:
            return _line(error)
        return None

    def _allocate(self, sizes: Sequence[tuple[int, torch.dtype]], device: torch.device) -> str | None:
        """Allocates the buffers in a pool of NCCL's allocator; returns why this rank could not, or None."""
        try:
            self._pool = torch.cuda.MemPool(self._backend.mem_allocator)
            with torch.cuda.use_mem_pool(self._pool, device):
                self.buffers = [torch.zeros(size, dtype=dtype, device=device) for size, dtype in sizes]
        except (AttributeError, RuntimeError, TypeError) as error:
            return _line(error)
        return None

    def _register(self) -> str | None:
        """Registers the pool; returns why this rank could not, or None."""
        try:
            try:
                self._backend.register_mem_pool(self._pool, symm=True)
            except TypeError:  # a torch without symmetric registration
                self._backend.register_mem_pool(self._pool)
        except (AttributeError, RuntimeError, TypeError) as error:
            return _line(error)
        self._is_registered = True
        return None


def _is_destroyed(group: Any) -> bool:
    try:
        dist.get_global_rank(group, 0)
    except ValueError:
        return True
    return False


def _line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _first_reason(reason: str | None, group: dist.ProcessGroup) -> str | None:
    """The reason of the first rank that has one, on all ranks."""
    reasons: list[str | None] = [None] * group.size()
    dist.all_gather_object(reasons, reason, group=group)
    return next((f"rank {rank}: {each}" for rank, each in enumerate(reasons) if each is not None), None)
