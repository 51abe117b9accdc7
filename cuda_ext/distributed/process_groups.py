"""Process groups: the one that a caller means, and one for a wrapper alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import DeviceMesh

from cuda_ext._watch import agreed_name


def resolve_group(caller: str, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """``group``, or the default group; RuntimeError if it does not exist or this process is not in it."""
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError(
            f"{caller}: expected an initialised process group, got none; call torch.distributed.init_process_group() "
            "first, in a program started by torchrun, which sets rank and world size"
        )
    resolved = world if group is None else group
    if not isinstance(resolved, dist.ProcessGroup):
        raise RuntimeError(f"{caller}: expected a process group that contains this process, got {resolved!r}")
    return resolved


def resolve_mesh(caller: str, mesh: DeviceMesh) -> dist.ProcessGroup:
    """The group of all ranks of a mesh of one or two dimensions; ValueError for more, or if this rank is not in it."""
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"{caller}: expected a device mesh that contains this rank, got rank {dist.get_rank()} and {mesh}; only "
            "call this on the ranks of the mesh"
        )
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh.ndim != 2:
        raise ValueError(
            f"{caller}: expected a device mesh of one dimension, or of two, (nodes, ranks of a node), got {mesh.ndim}; "
            "take a submesh, as in mesh['nodes', 'ranks']"
        )
    world = dist.group.WORLD
    if world is not None and mesh.size() == world.size():
        return world
    return mesh._flatten().get_group()


def is_on_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    return isinstance(_backend(group, device), dist.ProcessGroupGloo)


def own_group(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """A new group of the ranks of ``group``, for buffers on ``device``; ``group`` itself unless it `is_on_gloo`.

    gloo matches the collectives of a group by the order in which each rank starts them. A wrapper's sums run in a
    thread, or start when the last gradient of a bucket is ready, so their order relative to the program's own
    collectives (in backward, in the loss, or of a second wrapper) differs between ranks. In a group of the wrapper
    alone it does not matter.

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
