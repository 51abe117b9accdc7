"""Memory registered with NCCL, so that its kernels read and write buckets in place.

For a registered buffer NCCL needs no copies to and from buffers of its own; if it is registered as symmetric, at the
same offset on every rank, NCCL 2.27 and later can use kernels of far lower latency (NCCL user guide, User Buffer
Registration; Megatron-LM's ``nccl_ub``). Either all ranks register their buffers or none does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cuda_ext.distributed.reporting import logger


class RegisteredMemory:
    """``buffers`` of the given numbers of elements and dtypes, registered with ``group`` if every rank can do so.

    The constructor is a collective. If a rank cannot register them, all ranks use ordinary buffers, and ``reason`` says
    why, in one line; it is None if they are registered. Keep this object as long as the buffers are used.
    """

    def __init__(
        self, sizes: Sequence[tuple[int, torch.dtype]], group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self.buffers: list[Tensor] = []
        self.reason: str | None = None
        self._backend: Any = group._get_backend(device)
        self._pool: Any = None
        self._is_registered = False
        if device.type != "cuda":
            self.reason = "only memory of GPUs is registered"
            # The system allocates pages when gradients arrive: `pack` writes all of a bucket before it is read.
            self.buffers = [torch.empty(size, dtype=dtype, device=device) for size, dtype in sizes]
        else:
            # Registration is a collective without a timeout, which every rank must reach; and it needs a communicator,
            # which `init_process_group` without a device_id leaves to the first collective: the ranks agree first.
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

    def close(self) -> None:
        """Deregisters the memory; call it before the group is destroyed."""
        if self._is_registered:
            self._backend.deregister_mem_pool(self._pool)
            self._is_registered = False
        self._pool = None

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


def _line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _first_reason(reason: str | None, group: dist.ProcessGroup) -> str | None:
    """The reason of the first rank that has one, on all ranks."""
    reasons: list[str | None] = [None] * group.size()
    dist.all_gather_object(reasons, reason, group=group)
    return next((f"rank {rank}: {each}" for rank, each in enumerate(reasons) if each is not None), None)
