"""Memory that NCCL knows beforehand, so that its kernels read and write buckets where they lie.

A buffer registered with the communicator spares NCCL the copies to and from its own; registered as symmetric, at one
offset on every rank, it lets NCCL 2.27 and later take kernels of far lower latency (NCCL user guide, User Buffer
Registration; Megatron-LM's ``nccl_ub``). All ranks have to do it or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cuda_ext.distributed.reporting import logger


class RegisteredMemory:
    """``buffers``: of so many elements and such dtypes, registered with ``group`` if every rank could do so.

    A collective. Where a rank cannot, none does, buffers are ordinary ones, and ``reason``, one line, says why; None
    if they are registered. Lives as long as the buffers are used.
    """

    def __init__(
        self, sizes: Sequence[tuple[int, torch.dtype]], group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self.buffers: list[Tensor] = []
        self.reason: str | None = None
        self._backend: Any = group._get_backend(device)
        self._pool: Any = None
        if device.type != "cuda":
            self.reason = "only memory of GPUs is registered"
            # Its pages are taken when gradients come: nobody reads before `pack` has written all of a bucket.
            self.buffers = [torch.empty(size, dtype=dtype, device=device) for size, dtype in sizes]
        else:
            self.reason = self._register(sizes, device)
            reasons: list[str | None] = [None] * group.size()
            dist.all_gather_object(reasons, self.reason, group=group)
            first = next((rank for rank, reason in enumerate(reasons) if reason is not None), None)
            if first is not None:
                self.close()
                self.reason = f"rank {first}: {reasons[first]}"
                if group.rank() == 0:
                    logger.info("buckets are not registered with NCCL; %s", self.reason)
        if not self.buffers:
            self.buffers = [torch.zeros(size, dtype=dtype, device=device) for size, dtype in sizes]

    def close(self) -> None:
        """NCCL forgets the memory; before the group goes."""
        if self._pool is not None:
            self._backend.deregister_mem_pool(self._pool)
            self._pool = None

    def _register(self, sizes: Sequence[tuple[int, torch.dtype]], device: torch.device) -> str | None:
        """Why this rank could not."""
        try:
            pool = torch.cuda.MemPool(self._backend.mem_allocator)
            with torch.cuda.use_mem_pool(pool, device):
                self.buffers = [torch.zeros(size, dtype=dtype, device=device) for size, dtype in sizes]
            try:
                self._backend.register_mem_pool(pool, symm=True)
            except TypeError:  # a torch that knows no symmetric registration
                self._backend.register_mem_pool(pool)
            self._pool = pool
        except (AttributeError, RuntimeError, TypeError) as error:
            self.buffers = []
            return str(error).splitlines()[0]
        return None
