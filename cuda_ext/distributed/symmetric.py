"""All-reduce by loads and stores in memory that the ranks of a group on one host share, without messages.

On CPUs this is anonymous shared memory, which the system frees when the processes end, in whatever way; on GPUs it is
`torch.distributed._symmetric_memory`. Large buckets are summed two-shot: each rank sums one part of the buckets of all
ranks, and writes the sum to all ranks. Small ones are summed one-shot, which waits once instead of twice: each rank
writes its whole bucket to all others, and sums everything itself (csrc/bucket/symmetric.h describes the waiting).
"""

from __future__ import annotations

import errno
import fcntl
import math
import mmap
import os
import secrets
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from cuda_ext import _toolchain
from cuda_ext._load import ops

NAME = "cuda_ext.distributed.SymmetricArena"
MAX_RANKS = 32
MAX_SLOTS = 8
ALIGNMENT = 64  # bytes, of the start of a bucket
PAD_BYTES = 128 << 10  # before the buckets; as in csrc/bucket/symmetric.h

_PROCESSES = Path("/proc")


def probe_shared_memory(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Whether the ranks of ``group`` can share memory on ``device``: None if they can, else the reason in one line.

    A collective, with the same answer on all ranks: each rank allocates a little memory and maps that of the others.
    """
    try:
        _Segments(1, group, device)
    except _NotShared as error:
        return str(error)
    return None


class NotSharedError(RuntimeError):
    """The ranks do not share memory; raised on all ranks. ``reason`` says why, in one line."""

    def __init__(self, nbytes: int, reason: str) -> None:
        super().__init__(f"{NAME}: expected ranks that share memory of {nbytes} bytes each, got {reason}")
        self.reason = reason


class SymmetricArena:
    """Memory for buckets on this rank, which the other ranks of the group map, too.

    The constructor is a collective, with the same ``nbytes`` on all ranks. Buckets are views of ``bytes``: each rank
    packs its own, then `all_reduce` replaces it by the sum over the ranks. ::

        arena = SymmetricArena(nbytes, group, device)
        bucket = arena.bytes[begin:end].view(torch.bfloat16)  # begin: a multiple of 64; the same on all ranks
        pack(gradients, bucket, offsets, scale=1 / group.size())
        stats = arena.all_reduce(bucket)

    Args:
        nbytes: memory for buckets, on each rank. On a CPU, pages are allocated when they are first written.
        group: at most 32 ranks, all on one host.
        device: of the buckets; CPU or CUDA.
        timeout: seconds that `all_reduce` waits for a late rank; default the group's timeout.
        slots: how many all-reduces may run at the same time, 1 to 8.
        one_shot_bytes: buckets up to this size are summed one-shot, with the same bits; 0 for none. It is rounded up
            to a multiple of 64, and needs 2 x slots x ranks times as much additional memory on each rank. Default:
            `default_one_shot_bytes`.

    ``bytes`` is (nbytes,), uint8, initially zeros. It outlives the arena, but the other ranks then no longer write it.

    Raises `NotSharedError`, a RuntimeError, on all ranks alike, if the ranks do not share memory (which
    `probe_shared_memory` tells before) or have too little, and ValueError for a wrong argument.
    """

    def __init__(
        self,
        nbytes: int,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        timeout: float | None = None,
        slots: int = 1,
        one_shot_bytes: int | None = None,
    ) -> None:
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"{NAME}: expected group to be a process group that contains this process, got {group!r}")
        if one_shot_bytes is None:
            one_shot_bytes = default_one_shot_bytes(group.size(), device) if group.size() > 1 else 0
        if timeout is None:
            timeout = group._get_backend(device).options._timeout.total_seconds()
        problem = ""
        if not isinstance(nbytes, int) or nbytes < 0:
            problem = f"expected nbytes >= 0, got {nbytes!r}"
        elif not 1 <= slots <= MAX_SLOTS:
            problem = f"expected slots from 1 to {MAX_SLOTS}, got {slots}"
        elif one_shot_bytes < 0:
            problem = f"expected one_shot_bytes >= 0, got {one_shot_bytes}"
        elif not 0 < timeout < math.inf:
            problem = f"expected a timeout of more than 0 seconds, got {timeout}"
        for rank, its_problem in enumerate(_gather(problem, group)):
            if its_problem:
                raise ValueError(f"{NAME}: {its_problem} on rank {rank}")
        try:
            self._segments = _Segments(nbytes, group, device, staging=(slots, _aligned(one_shot_bytes)))
        except _NotShared as error:
            raise NotSharedError(nbytes, str(error)) from None
        self.timeout = timeout
        self.bytes = self._segments.tensors[group.rank()][PAD_BYTES : PAD_BYTES + nbytes]
        self.one_shot_bytes = _aligned(one_shot_bytes)
        self._slots = slots
        self._rank = group.rank()

    def all_reduce(self, bucket: Tensor, *, slot: int = 0) -> Tensor:
        """Replaces ``bucket`` by its sum over the ranks, in place, with the same bits on all of them.

        bucket: a view of ``bytes``, 1-d and contiguous, float32, float16, bfloat16 or float64, at a multiple of 64
            bytes; the same offset, size and dtype on all ranks.
        slot: 0 to ``slots`` - 1, default 0. The ranks run the all-reduces of one slot in the same order, one after the
            other; those of different slots may run at the same time, in separate threads or streams.

        Values are added in the order of the ranks, in float32 (float64 for float64), and rounded once. On a CPU this
        returns when the sum is complete, and releases the GIL; on CUDA it is queued in the current stream.

        Returns the statistics of the sum, as in `cuda_ext.bucket`: (2,), float32 (float64 for float64), the sum of
        squares, and 1.0 if a value is infinite or NaN.

        Raises RuntimeError, with the ranks concerned, if a rank is late, has ended, or reduces another bucket. No rank
        can use the arena after that: its all-reduces raise an error that names the first rank that failed.
        """
        if not 0 <= slot < self._slots:
            raise ValueError(
                f"{NAME}.all_reduce: expected slot from 0 to {self._slots - 1}, got {slot}; pass a larger slots "
                "to SymmetricArena"
            )
        return ops.symmetric_all_reduce(
            bucket,
            self._segments.tensors,
            rank=self._rank,
            slot=slot,
            one_shot_bytes=self.one_shot_bytes,
            locks=self._segments.files,
            timeout=self.timeout,
        )

    def abort(self) -> None:
        """Makes `all_reduce` fail on all ranks from now on, also where a rank waits already; for a rank that fails."""
        ops.symmetric_abort(self._segments.tensors, rank=self._rank)


def default_one_shot_bytes(ranks: int, device: torch.device) -> int:
    """The largest bucket for which one-shot is faster than two-shot.

    Measured on a CPU (docs/ladder_bucket.md). For GPUs it is the size at which vLLM's custom_all_reduce changes from
    one stage to two with NVLink: 512 KiB on four GPUs, 256 KiB on eight; not measured here.
    """
    return (1 << 17 if device.type == "cpu" else 1 << 21) // ranks


class _NotShared(Exception):
    """The ranks do not share memory. The message says why, and is the same on all ranks."""


class _Segments:
    """The memory of all ranks, mapped by this one: ``tensors`` by rank, uint8: pad, then buckets, then staging.

    nbytes: for buckets. staging: the number of slots, and the bytes of staging per slot and rank.

    On CPUs ``files`` are the open files of the tensors. Each rank locks its own file, so that others see that it lives.
    """

    def __init__(
        self, nbytes: int, group: dist.ProcessGroup, device: torch.device, staging: tuple[int, int] = (0, 0)
    ) -> None:
        self.tensors: list[Tensor] = []
        self.files: list[int] = []
        weakref.finalize(self, _close, self.files)
        slots, row = staging
        size = PAD_BYTES + _aligned(nbytes) + slots * 2 * group.size() * row
        if group.size() > MAX_RANKS:
            raise _NotShared(f"a group of {group.size()} ranks, where memory is shared by {MAX_RANKS} at most")
        layout = (nbytes, *staging)
        if device.type == "cpu":
            self._share_host_memory(size, layout, group)
        elif device.type == "cuda":
            _check_same(_gather(layout, group))
            self._share_device_memory(size, group, device)
        else:
            raise _NotShared(f"no memory is shared between devices of type {device.type}")

    def _share_host_memory(self, size: int, layout: tuple[int, ...], group: dist.ProcessGroup) -> None:
        name = f"cuda_ext-{secrets.token_hex(16)}"  # unique, so that other ranks can verify that they opened this file
        own, problem = -1, ""
        try:
            # Checked first: if memory runs out, the kernel may kill a process instead of refusing pages.
            if size * group.size() > _toolchain.available_memory_gib() * 2**30:
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            own = os.memfd_create(name, os.MFD_CLOEXEC)
            os.ftruncate(own, max(size, 1))
            fcntl.lockf(own, fcntl.LOCK_EX)
            own_tensor = _map(own, size)
        except (AttributeError, OSError) as error:
            problem = f"rank {group.rank()} has no {size} bytes of shared memory ({_reason(error)})"
        try:
            offers = _gather((layout, os.getpid(), own, name, problem), group)
            _check_same([offer[0] for offer in offers])
            problem = next((offer[-1] for offer in offers if offer[-1]), "")
            if problem:
                raise _NotShared(problem)
            for rank, (_, process, file, its_name, _) in enumerate(offers):
                if rank == group.rank():
                    self.files.append(own)  # not opened twice: closing one would release the lock
                    self.tensors.append(own_tensor)
                    continue
                path = _PROCESSES / str(process) / "fd" / str(file)
                try:
                    if its_name not in os.readlink(path):
                        raise OSError(errno.ENOENT, "it is another file", str(path))
                    self.files.append(os.open(path, os.O_RDWR | os.O_CLOEXEC))
                    self.tensors.append(_map(self.files[-1], size))
                except OSError as error:
                    problem = f"rank {group.rank()} does not reach the memory of rank {rank} ({_reason(error)})"
                    break
            problem = next(filter(None, _gather(problem, group)), "")
            if problem:
                raise _NotShared(problem)
        except BaseException:
            if own >= 0 and own not in self.files:
                os.close(own)
            raise

    def _share_device_memory(self, size: int, group: dist.ProcessGroup, device: torch.device) -> None:
        from torch.distributed import _symmetric_memory as symmetric_memory

        problem = ""
        try:
            own = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
            own.zero_()
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            problem = f"rank {group.rank()} has no {size} bytes of symmetric memory ({_reason(error)})"
        problem = next(filter(None, _gather(problem, group)), "")
        if problem:
            raise _NotShared(problem)
        try:
            self._handle = symmetric_memory.rendezvous(own, group)  # keeps the memory of the others mapped
            self.tensors += [
                own if rank == group.rank() else self._handle.get_remote_tensor(rank, own.shape, own.dtype)
                for rank in range(group.size())
            ]
        except RuntimeError as error:
            problem = f"rank {group.rank()} does not reach the memory of the others ({_reason(error)})"
        problem = next(filter(None, _gather(problem, group)), "")
        if problem:
            raise _NotShared(problem)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _check_same(layouts: list[tuple[int, ...]]) -> None:
    if len(set(layouts)) > 1:
        raise _NotShared(f"arenas of different (nbytes, slots, one_shot_bytes): {', '.join(map(str, layouts))}")


def _gather(value: object, group: dist.ProcessGroup) -> list:  # type: ignore[type-arg]
    values = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def _map(file: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, size, mmap.MAP_SHARED), dtype=torch.uint8)


def _reason(error: Exception) -> str:
    return str(error).splitlines()[0]


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)
