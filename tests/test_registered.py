"""Registered memory: all ranks or none, with a fake NCCL, as the real one needs a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

from cuda_ext.distributed.registered import RegisteredMemory


class Backend:
    """Records what would be done with NCCL's memory pools."""

    def __init__(self, fails: str = "", knows_symmetric: bool = True) -> None:
        self.calls: list[str] = []
        self._fails, self._knows_symmetric = fails, knows_symmetric
        self.has_communicator = False  # until the first collective

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
        self.calls.append("deregister")


@contextlib.contextmanager
def pretended_gpu(backend: Backend) -> Iterator[tuple[Any, Any]]:
    """A group whose backend is ``backend``, and a device that claims to be a GPU but has its memory on the CPU."""
    group = mock.Mock(wraps=dist.group.WORLD)
    group._get_backend = lambda device: backend
    zeros = torch.zeros
    with (
        mock.patch("torch.cuda.MemPool", lambda allocator: mock.Mock()),
        mock.patch("torch.cuda.use_mem_pool", lambda pool, device: contextlib.nullcontext()),
        mock.patch("torch.zeros", lambda *size, dtype, device: zeros(*size, dtype=dtype)),
        mock.patch("torch.distributed.all_gather_object", _gather(dist.all_gather_object, backend)),
    ):
        yield group, torch.device("cuda", 0)


def _gather(real: Any, backend: Backend) -> Any:
    def gather(values: list[object], value: object, group: object) -> None:
        backend.has_communicator = True
        real(values, value, group=dist.group.WORLD)

    return gather


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
    memory.close()
    memory.close()
    assert backend.calls[1:] == ["deregister"]


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
