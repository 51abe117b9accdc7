"""Several collectives as one launch, where a backend has that: a group of NCCL's, which runs them in one kernel.

A group spares the latency of each collective but the first (NCCL user guide, Group Calls), and ends when all of it has.
All ranks have to make the same groups.
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
    """Calls ``collectives``, each of which starts one of ``group``, as one launch if that can be.

    Returns what is to be waited for before any of the results is used.
    """
    if len(collectives) < 2 or not coalesces(group, device):
        return [work for work in (start() for start in collectives) if work is not None]
    group._start_coalescing(device)
    try:
        for start in collectives:
            start()  # the handle of one is of no use
    finally:
        work = group._end_coalescing(device)
    return [] if work is None else [work]
