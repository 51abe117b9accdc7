"""Several collectives as one launch, if the backend supports it: NCCL's groups, which run them in one kernel.

A group saves the latency of each collective but the first (NCCL user guide, Group Calls), and ends when all of them
have. All ranks must make the same groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist


def coalesces(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the backend for ``device`` can launch several collectives as one."""
    return bool(getattr(group._get_backend(device), "supports_coalescing", False))


def start_together(
    group: dist.ProcessGroup, device: torch.device, collectives: Sequence[Callable[[], dist.Work | None]]
) -> list[dist.Work]:
    """Calls ``collectives``, each of which starts a collective of ``group``, as one launch if possible.

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
