"""A process group for a wrapper alone, so that its sums are never matched with other collectives of the program.

gloo matches the collectives of a group by the order in which each rank starts them. A wrapper's sums run in a thread,
or start when the last gradient of a bucket is ready, so their order relative to the program's own collectives (in
backward, in the loss, or of a second wrapper) differs between ranks. In a separate group it does not matter.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from cuda_ext.distributed.collectives import agreed_name


def is_on_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    return isinstance(_backend(group, device), dist.ProcessGroupGloo)


def own_group(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """A new group of the ranks of ``group``, for buffers on ``device``; ``group`` itself unless it `is_on_gloo`.

    A collective. The new group is freed with the last reference to it: `torch.distributed` does not register it.
    """
    if not is_on_gloo(group, device):
        return group
    store = PrefixStore(f"cuda_ext/own_group/{agreed_name(group)}", group.get_group_store())
    own = dist.ProcessGroup(store, group.rank(), group.size())
    gloo = dist.ProcessGroup.BackendType.GLOO
    own._set_default_backend(gloo)
    options = _backend(group, device).options  # network devices and timeout
    own._register_backend(device, gloo, dist.ProcessGroupGloo(store, group.rank(), group.size(), options))
    return own


def _backend(group: dist.ProcessGroup, device: torch.device) -> Any:
    backend = group._get_backend(device)
    return getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it
