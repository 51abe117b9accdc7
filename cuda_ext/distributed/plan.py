"""Which gradients travel together: the cost model behind ``bucket_mb="auto"``, and how parameters fall into buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NAME = "cuda_ext.distributed.BucketedDataParallel"
MIB = 1 << 20


@dataclass(frozen=True)
class Link:
    """An all-reduce of S bytes takes ``latency + S / bandwidth`` seconds.

    ``hides``: whether that passes while the backward pass computes, rather than in the time of the same cores.
    """

    latency: float
    bandwidth: float
    hides: bool


LINKS = {
    # Fit to NCCL on 8 Hopper GPUs behind one NVSwitch, messages of 32 MiB and more.
    "nccl": Link(latency=79e-6, bandwidth=278e9, hides=True),
    # Fit to 2 processes on one host of 2 cores, both computing: docs/ladder_bucket.md.
    "gloo": Link(latency=1e-3, bandwidth=1e9, hides=False),
}


@dataclass(frozen=True)
class Capacity:
    """Bytes: of the last bucket to be sent, and of every other one."""

    last: float
    other: float
    reason: str


def choose_capacity(bucket_mb: float | str, backend: str) -> Capacity:
    """The capacities for a ``bucket_mb`` given by the user in MiB, or for ``"auto"``; ValueError for anything else.

    A bucket of S bytes uses S / (S + latency * bandwidth) of the bandwidth, and starts only when its last gradient is
    there. Where the transfer hides behind the backward pass, 4 * latency * bandwidth reaches 80 %; beyond, size gains
    little and hides less. The last bucket has nothing to hide behind; cut to latency * bandwidth / 8 it costs little
    more than the latency. Where the transfer takes time from the cores that compute, each bucket costs its latency in
    full, which 8 * latency * bandwidth makes a ninth, and a small last bucket gains nothing.
    """
    if bucket_mb == "auto":
        link = LINKS.get(backend, LINKS["nccl"])
        product = link.latency * link.bandwidth
        reason = (
            f"auto for {backend}: {link.latency * 1e6:.0f} us + size / ({link.bandwidth / 1e9:.0f} GB/s), "
            f"{'hidden behind' if link.hides else 'in the time of'} the backward pass"
        )
        last, other = (product / 8, 4 * product) if link.hides else (8 * product, 8 * product)
        return Capacity(last, other, reason)
    if isinstance(bucket_mb, bool) or not isinstance(bucket_mb, (int, float)) or not bucket_mb > 0:
        raise ValueError(f'{NAME}: expected bucket_mb to be "auto" or a positive number of MiB, got {bucket_mb!r}')
    return Capacity(last=bucket_mb * MIB, other=bucket_mb * MIB, reason="as given")


def assign(parameters: Sequence[Tensor], capacity: Capacity, wire_dtype: torch.dtype | None) -> list[list[int]]:
    """Buckets as lists of indices into ``parameters``, in the order in which they are sent.

    Backward makes gradients roughly in reverse order of registration, so buckets are filled in that order, those of
    each device and dtype on their own, and sent by when their last gradient is expected. A parameter is never split:
    one that exceeds the capacity has a bucket to itself.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index in reversed(range(len(parameters))):
        groups.setdefault((parameters[index].device, parameters[index].dtype), []).append(index)
    buckets: list[list[int]] = []
    for (_, dtype), indices in groups.items():
        sizes = [parameters[index].numel() * (wire_dtype or dtype).itemsize for index in indices]
        last_begin = len(indices) - 1
        while last_begin > 0 and sum(sizes[last_begin - 1 :]) <= capacity.last:
            last_begin -= 1
        filled = 0
        for position, (index, size) in enumerate(zip(indices, sizes, strict=True)):
            if position in (0, last_begin) or filled + size > capacity.other:
                buckets.append([])
                filled = 0
            buckets[-1].append(index)
            filled += size
    return sorted(buckets, key=lambda bucket: bucket[-1], reverse=True)
