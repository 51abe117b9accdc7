"""Registered memory: all ranks or none, with a fake NCCL, as the real one needs a GPU."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

from cuda_ext.distributed.memory import RegisteredMemory, _is_destroyed


class Backend:
    """Records what would be done with NCCL's memory pools."""

    def __init__(self, fails: str = "", knows_symmetric: bool = True) -> None:
        self.calls: list[str] = []
        self._fails, self._knows_symmetric = fails, knows_symmetric
        self.has_communicator = False  # until the first collective of a tensor on the device

    @property
    def mem_allocator(self) -> object:
        if self._fails == "allocator":
            raise RuntimeError("no multicast on this device\nmore of it")
        return object()

    def register_mem_pool(self, pool: object, **options: Any) -> None:
        assert self.has_communicator
        if options and not self._knows_symmetric:
            raise TypeError("unexpected keyword symm")
        if self._fails == "register":
            raise RuntimeError("cannot register")
        self.calls.append(f"register {options}")

    def deregister_mem_pool(self, pool: object) -> None:
        assert self._fails not in ("destroyed", "busy")
        if self._fails == "deregister":
            raise RuntimeError("NCCL communicator was aborted\nmore of it")
        self.calls.append("deregister")


@contextlib.contextmanager
def pretended_gpu(backend: Backend) -> Iterator[tuple[Any, Any]]:
    """A group whose backend is ``backend``, and a device that claims to be a GPU but has its memory on the CPU."""
    group = mock.Mock(wraps=dist.group.WORLD)
    group._get_backend = lambda device: backend
    zeros = torch.zeros

    def allreduce(tensors: list[torch.Tensor]) -> Any:
        backend.has_communicator = True
        return dist.group.WORLD.allreduce(tensors)

    group.allreduce = allreduce
    with (
        mock.patch("torch.cuda.device", lambda device: contextlib.nullcontext()),
        mock.patch("cuda_ext.distributed.memory._is_destroyed", lambda group: backend._fails == "destroyed"),
        mock.patch("cuda_ext.distributed.memory.ends_within", lambda seconds, stream: backend._fails != "busy"),
        mock.patch("torch.cuda.MemPool", lambda allocator: mock.Mock()),
        mock.patch("torch.cuda.use_mem_pool", lambda pool, device: contextlib.nullcontext()),
        mock.patch("torch.zeros", lambda *size, dtype, device: zeros(*size, dtype=dtype)),
        mock.patch("torch.distributed.all_gather_object", _gather(dist.all_gather_object)),
    ):
        yield group, torch.device("cuda", 0)


def _gather(real: Any) -> Any:
    return lambda values, value, group: real(values, value, group=dist.group.WORLD)


STREAM: Any = object()
SIZES = [(5, torch.float32), (7, torch.bfloat16)]


@on_ranks(2)
@pytest.mark.parametrize("knows_symmetric", [True, False])
def test_registered(knows_symmetric: bool) -> None:
    backend = Backend(knows_symmetric=knows_symmetric)
    with pretended_gpu(backend) as (group, device):
        memory = RegisteredMemory(SIZES, group, device)
        assert memory.reason is None
        assert backend.calls == ["register {'symm': True}" if knows_symmetric else "register {}"]
        assert [(buffer.numel(), buffer.dtype) for buffer in memory.buffers] == SIZES
        memory.close(STREAM)
        memory.close(STREAM)
    assert backend.calls[1:] == ["deregister"]


REASONS = {
    "destroyed": "the group is destroyed",
    "deregister": "NCCL communicator was aborted",
    "busy": "the GPU has not completed its sums",
}


@pytest.mark.parametrize("fails", REASONS)
def test_memory_that_stays_registered_is_kept(group: None, caplog: pytest.LogCaptureFixture, fails: str) -> None:
    """PyTorch would end the process when it is freed."""
    with pretended_gpu(Backend(fails)) as (pretended, device):
        memory = RegisteredMemory(SIZES, pretended, device)
        pool, buffer = map(weakref.ref, (memory._pool, memory.buffers[0]))
        memory.close(STREAM)
        del memory
    gc.collect()
    assert pool() is not None
    assert buffer() is not None
    assert f"registered with NCCL, but {REASONS[fails]}; it is kept until the process ends" in caplog.text


def test_destroyed_groups() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    groups = [dist.group.WORLD, dist.new_group([0])]
    assert not any(map(_is_destroyed, groups))
    dist.destroy_process_group()
    assert all(map(_is_destroyed, groups))


@on_ranks(2)
@pytest.mark.parametrize("fails", ["allocator", "register"])
def test_all_ranks_or_none(fails: str) -> None:
    backend = Backend(fails if dist.get_rank() == 1 else "")
    with pretended_gpu(backend) as (group, device):
        memory = RegisteredMemory(SIZES, group, device)
    text = "no multicast on this device" if fails == "allocator" else "cannot register"
    assert memory.reason == f"rank 1: {text}"
    assert [(buffer.numel(), buffer.dtype) for buffer in memory.buffers] == SIZES
    assert not any(buffer.any() for buffer in memory.buffers)
    # Registration is a collective: no rank begins it if another one has no memory for it.
    registers = dist.get_rank() == 0 and fails == "register"
    assert backend.calls == (["register {'symm': True}", "deregister"] if registers else [])


@on_ranks(2)
def test_on_a_cpu_there_is_nothing_to_register() -> None:
    memory = RegisteredMemory(SIZES, dist.group.WORLD, torch.device("cpu"))
    assert memory.reason == "only memory of GPUs is registered"
    assert [(buffer.numel(), buffer.dtype) for buffer in memory.buffers] == SIZES
