"""How the flat buffers of buckets are summed over the ranks: by one collective, by several, or in shared memory."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cuda_ext.distributed.checks import NAME
from cuda_ext.distributed.collectives import coalesces, start_together
from cuda_ext.distributed.float32_sums import float32_all_reduce, float32_reduce_scatter
from cuda_ext.distributed.memory import RegisteredMemory
from cuda_ext.distributed.process_groups import is_on_gloo, own_group
from cuda_ext.distributed.symmetric import NotSharedError, SymmetricArena

ALGORITHMS = ("auto", "all_reduce", "float32", "symmetric")


def check_algorithm(name: str) -> None:
    if name not in ALGORITHMS:
        raise ValueError(f"{NAME}: expected algorithm to be one of {ALGORITHMS}, got {name!r}")


# Replaces ``wire``, which includes ``flags``, by its sum over the ranks. Returns when the current stream or thread may
# use it, with the statistics (see `cuda_ext.bucket`) of the sum if they were computed on the way.
Sum = Callable[[Tensor, Tensor], Tensor | None]
# Replaces several wires by their sums, in one transfer.
SumTogether = Callable[[Sequence[Tensor]], None]


class Pending(ABC):
    """A sum that has been started."""

    @abstractmethod
    def wait(self) -> Tensor | None:
        """On a CPU blocks the thread until the sum is complete; on a GPU the current stream waits for it, not the host.

        Returns what `Sum` returns.
        """

    @abstractmethod
    def when_done(self, callback: Callable[[], object]) -> None:
        """Runs ``callback`` in some thread when the sum is complete. Only on a CPU."""


class Algorithm(ABC):
    """Sums buckets over the ranks, one after the other, in the same order on all ranks ([Note 1] in reducer.py).

    Flags must be summed on every rank, even if each rank only gets a part of the rest ([Note 2] there).
    """

    groups = False  # whether it supports `start_together`
    stream: torch.cuda.Stream | None = None  # in which it sums, if that is not the current one

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.ranks = group.rank(), group.size()
        self._at_close: list[Callable[[], object]] = []

    @abstractmethod
    def start(self, wire: Tensor, flags: Tensor) -> Pending:
        """``flags``: see `Sum`."""

    def start_together(self, wires: Sequence[Tensor]) -> Pending:
        """Starts the sums of several buckets in one transfer, the same on all ranks. They end together."""
        raise NotImplementedError(f"{type(self).__name__} starts one bucket at a time")

    def run(self, buffer: Tensor) -> None:
        """Sums as much of ``buffer`` as a bucket can have, for measurements."""
        size = buffer.numel() - buffer.numel() % math.lcm(self.ranks, 128)
        self.start(buffer[:size], buffer[size:size]).wait()

    def run_together(self, buffers: Sequence[Tensor]) -> None:
        """`run` for several buffers, in one transfer."""
        self.start_together(buffers).wait()

    def at_close(self, function: Callable[[], object]) -> None:
        self._at_close.append(function)

    def close(self) -> None:
        """Releases resources; no sums may be started afterwards."""
        while self._at_close:
            self._at_close.pop()()


class AllReduce(Algorithm):
    """One asynchronous all-reduce of the group's backend."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._group = group

    def start(self, wire: Tensor, flags: Tensor) -> Pending:
        return _Work(self._group.allreduce([wire]))


class Blocking(Algorithm):
    """Sums that backward waits for: on a CPU, with a backend that has no `own_group` for use in a thread."""

    def __init__(self, group: dist.ProcessGroup, sum_up: Sum) -> None:
        super().__init__(group)
        self._sum_up = torch.no_grad()(sum_up)

    def start(self, wire: Tensor, flags: Tensor) -> Pending:
        return _Done(self._sum_up(wire, flags))


class Background(Algorithm):
    """Sums of several steps, which wait for each other in the background of the backward pass.

    On a CPU they run in one thread, in order; no other thread may make collectives of the same groups. On a GPU they
    run in a stream of high priority ([Note 1] in reducer.py).
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, sum_up: Sum, sum_together: SumTogether | None = None
    ) -> None:
        super().__init__(group)
        self.groups = sum_together is not None
        self._sum_up, self._sum_together = torch.no_grad()(sum_up), sum_together
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._thread = None if self.stream is not None else ThreadPoolExecutor(1, "cuda_ext.distributed")
        if self._thread is not None:
            self.at_close(functools.partial(self._thread.shutdown, wait=False))

    def start(self, wire: Tensor, flags: Tensor) -> Pending:
        return self._start(functools.partial(self._sum_up, wire, flags))

    def start_together(self, wires: Sequence[Tensor]) -> Pending:
        assert self._sum_together is not None
        return self._start(functools.partial(self._sum_together, wires))

    def _start(self, sum_up: Callable[[], Tensor | None]) -> Pending:
        if self._thread is not None:
            return _InThread(self._thread.submit(sum_up))
        assert self.stream is not None
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            stats = sum_up()
            return _OnStream(self.stream.record_event(), self.stream.device, stats)


def by_all_reduce(group: dist.ProcessGroup, device: torch.device) -> Algorithm:
    """The all-reduce of the group's backend.

    NCCL's runs in a stream of high priority: in NCCL's own stream, of normal priority, the blocks of the sum would wait
    for those of backward.
    """
    if not isinstance(group._get_backend(device), getattr(dist, "ProcessGroupNCCL", ())):
        return AllReduce(own_group(group, device))
    options = dist.AllreduceOptions()
    options.asyncOp = False  # in the current stream

    def sum_together(wires: Sequence[Tensor]) -> None:
        starts = [functools.partial(group.allreduce, [wire], options) for wire in wires]
        for work in start_together(group, device, starts):
            work.wait()

    def sum_up(wire: Tensor, flags: Tensor) -> None:
        sum_together([wire])

    return Background(group, device, sum_up, sum_together if coalesces(group, device) else None)


def hierarchical(
    group: dist.ProcessGroup, device: torch.device, inside: dist.ProcessGroup, across: dist.ProcessGroup
) -> Algorithm:
    """Sums inside each node first, so that each rank sends only 1 / (ranks per node) of its bytes across nodes.

    inside: the ranks of this rank's node. across: the ranks with the same index in each node. A reduce-scatter inside
    each node, an all-reduce of each part across nodes, an all-gather inside each node (Horovod's hierarchical
    all-reduce).
    """
    inside, across = own_group(inside, device), own_group(across, device)

    def sum_up(wire: Tensor, flags: Tensor) -> None:
        part = wire.chunk(inside.size())[inside.rank()]
        dist.reduce_scatter_tensor(part, wire, group=inside)
        dist.all_reduce(part, group=across)
        dist.all_gather_into_tensor(wire, part, group=inside)

    return _by_collectives(group, device, sum_up)


def reduce_scatter(group: dist.ProcessGroup, device: torch.device, adds_in_float32: bool) -> Algorithm:
    """Leaves each rank with the sum of its own part of the buffer only."""
    own = own_group(group, device)

    def sum_up(wire: Tensor, flags: Tensor) -> None:
        dist.all_reduce(flags, group=own)  # first, as they are in the last rank's part, which is summed next
        part = wire.chunk(own.size())[own.rank()]
        if adds_in_float32:
            for work in float32_reduce_scatter(wire, part, own):
                work.wait()
        else:
            dist.reduce_scatter_tensor(part, wire, group=own)

    return _by_collectives(group, device, sum_up)


def in_float32(group: dist.ProcessGroup, device: torch.device) -> Algorithm:
    """Adds in float32 (float64 for float64), in the order of the ranks, and rounds once."""
    own = own_group(group, device)

    def sum_up(wire: Tensor, flags: Tensor) -> None:
        for work in float32_all_reduce(wire, own):
            work.wait()

    return _by_collectives(group, device, sum_up)


def in_shared_memory(group: dist.ProcessGroup, device: torch.device, arena: SymmetricArena) -> Algorithm:
    """Loads and stores in memory that all ranks share; adds in float32."""

    def sum_up(wire: Tensor, flags: Tensor) -> Tensor:
        return arena.all_reduce(wire)

    return Background(group, device, sum_up)


def _by_collectives(group: dist.ProcessGroup, device: torch.device, sum_up: Sum) -> Algorithm:
    if device.type == "cpu" and not is_on_gloo(group, device):
        return Blocking(group, sum_up)
    return Background(group, device, sum_up)


def choose_algorithm(
    group: dist.ProcessGroup,
    mesh: DeviceMesh | None,
    device: torch.device,
    buffers: Sequence[tuple[int, torch.dtype]],
    name: str,
    *,
    narrowed: bool,
    sharded: bool,
) -> tuple[Algorithm, list[Tensor]]:
    """The algorithm of this name, and the memory of buckets for it. A collective.

    buffers: (elements, dtype) of each. mesh: two dimensions select `hierarchical`. name: the argument ``algorithm`` of
    `BucketedDataParallel`. narrowed: whether values are rounded to be sent. sharded: whether each rank should only get
    its own part.
    """
    # With two ranks a sum in 16 bits is rounded once, too. On a CPU float32 costs nothing, and unlike with a ring the
    # sum of an element does not depend on its position: a run that is resumed with other buckets gives the same bits.
    narrow = narrowed and group.size() > 2 and all(dtype.itemsize == 2 for _, dtype in buffers)
    wants_float32 = name == "float32" or (name == "auto" and (narrow or device.type == "cpu"))
    # On GPUs shared memory should only be faster for small buckets; this has not been measured yet.
    tries_shared = name == "symmetric" or (name == "auto" and device.type == "cpu" and group.size() > 1)
    if tries_shared and not sharded and (mesh is None or mesh.ndim == 1):
        try:
            arena, memory = _shared_memory(group, device, buffers)
            return in_shared_memory(group, device, arena), memory
        except NotSharedError as error:
            if name == "symmetric":
                raise RuntimeError(
                    f'{NAME}: expected ranks that share memory for algorithm="symmetric", got {error.reason}'
                ) from None
    registered = RegisteredMemory(buffers, group, device)
    if sharded:
        algorithm = reduce_scatter(group, device, wants_float32)
    elif mesh is not None and mesh.ndim == 2:
        across, inside = mesh.get_all_groups()
        algorithm = hierarchical(group, device, inside, across)
    elif wants_float32 and group.size() > 1:
        algorithm = in_float32(group, device)
    else:
        algorithm = by_all_reduce(group, device)
    algorithm.at_close(functools.partial(registered.close, algorithm.stream))
    return algorithm, registered.buffers


def _shared_memory(
    group: dist.ProcessGroup, device: torch.device, buffers: Sequence[tuple[int, torch.dtype]]
) -> tuple[SymmetricArena, list[Tensor]]:
    starts, end = [], 0
    for size, dtype in buffers:
        starts.append(end)
        end += -(-size * dtype.itemsize // 64) * 64
    arena = SymmetricArena(end, group, device)
    memory = [
        arena.bytes[start : start + size * dtype.itemsize].view(dtype) for start, (size, dtype) in zip(starts, buffers)
    ]
    return arena, memory


class _Work(Pending):
    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait()

    def when_done(self, callback: Callable[[], object]) -> None:
        self._work.get_future().then(lambda _: callback())


class _Done(Pending):
    def __init__(self, stats: Tensor | None) -> None:
        self._stats = stats

    def wait(self) -> Tensor | None:
        return self._stats

    def when_done(self, callback: Callable[[], object]) -> None:
        callback()


class _InThread(Pending):
    def __init__(self, future: Future[Tensor | None]) -> None:
        self._future = future

    def wait(self) -> Tensor | None:
        return self._future.result()

    def when_done(self, callback: Callable[[], object]) -> None:
        self._future.add_done_callback(lambda _: callback())


class _OnStream(Pending):
    def __init__(self, done: torch.cuda.Event, device: torch.device, stats: Tensor | None) -> None:
        self._done, self._device, self._stats = done, device, stats

    def wait(self) -> Tensor | None:
        torch.cuda.current_stream(self._device).wait_event(self._done)
        return self._stats

    def when_done(self, callback: Callable[[], object]) -> None:
        raise NotImplementedError("a stream cannot run callbacks; record an event after wait()")
