"""Which gradients travel together: the cost model behind ``bucket_mb="auto"``, and the assignment of parameters to buckets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MIB = 1 << 20


@dataclass(frozen=True)
class Link:
    """How long an all-reduce of S bytes takes: ``latency + S / bandwidth`` seconds."""

    latency: float
    bandwidth: float  # bytes/s

    def time(self, size: float) -> float:
        return self.latency + size / self.bandwidth


# nccl: fit to NCCL 2.27 on 8 NVLink Hopper GPUs, messages of 32 MiB and more. gloo: fit to 2 processes on one host, see docs/ladder_bucket.md.
LINKS = {"nccl": Link(latency=79e-6, bandwidth=278e9), "gloo": Link(latency=400e-6, bandwidth=1e9)}


@dataclass(frozen=True)
class BucketSizes:
    """Capacities in bytes: of every bucket but the last to be sent, and of that one."""

    middle: float
    last: float
    reason: str


def choose_sizes(bucket_mb: float | str, backend: str) -> BucketSizes:
    """The capacities for a ``bucket_mb`` of the user, or for ``"auto"``.

    A bucket of size S uses S / (S + latency * bandwidth) of the bandwidth, and can only start once its last gradient is there. Buckets of
    4 * latency * bandwidth reach 80 % of the bandwidth; larger ones gain little and overlap less of the backward pass. The last bucket has nothing left
    to hide behind: its whole time, latency + S / bandwidth, is waited for, so it is cut to latency * bandwidth / 8, which leaves little but the latency.
    """
    if bucket_mb == "auto":
        link = LINKS.get(backend, LINKS["nccl"])
        product = link.latency * link.bandwidth
        reason = f"auto for {backend}: {link.latency * 1e6:.0f} us + size / {link.bandwidth / 1e9:.3g} GB/s per all-reduce"
        return BucketSizes(4 * product, product / 8, reason)
    if not isinstance(bucket_mb, (int, float)) or isinstance(bucket_mb, bool) or not bucket_mb > 0 or math.isnan(bucket_mb):
        raise ValueError(
            f'cuda_ext.distributed.BucketedDataParallel: expected bucket_mb to be "auto" or a positive number of MiB, got {bucket_mb!r}'
        )
    return BucketSizes(bucket_mb * MIB, bucket_mb * MIB, "given")


def assign(parameters: Sequence[Tensor], sizes: BucketSizes, wire_dtype: torch.dtype | None) -> list[list[int]]:
    """Buckets as lists of indices into ``parameters``, in the order in which they are sent.

    Backward computes the gradients roughly in reverse order of registration, so buckets fill in that order, separately for each device and dtype, and
    are sent by when their last gradient is expected. A parameter is never split: one larger than the capacity has a bucket of its own.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index in reversed(range(len(parameters))):
        groups.setdefault((parameters[index].device, parameters[index].dtype), []).append(index)
    buckets = []
    for (_, dtype), indices in groups.items():
        itemsize = (wire_dtype or dtype).itemsize
        size = [parameters[index].numel() * itemsize for index in indices]
        tail = len(indices) - 1
        while tail > 0 and sum(size[tail - 1 :]) <= sizes.last:
            tail -= 1
        bucket: list[int] = []
        filled = 0
        for position, index in enumerate(indices):
            if bucket and (filled + size[position] > sizes.middle or position == tail):
                buckets.append(bucket)
                bucket, filled = [], 0
            bucket.append(index)
            filled += size[position]
        buckets.append(bucket)
    return sorted(buckets, key=lambda bucket: -bucket[-1])
