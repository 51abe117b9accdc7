"""Which gradients travel together, while nobody knows how long backward takes; later `cost_model.choose` says it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cuda_ext.distributed.planning.choice import Link
from cuda_ext.distributed.reporting import NAME

MIB = 1 << 20


@dataclass(frozen=True)
class Capacity:
    """Bytes: of the last bucket to be sent, and of every other one."""

    last: float
    other: float
    reason: str


def check_bucket_mb(bucket_mb: float | str) -> None:
    """ValueError unless it is a size in MiB or ``"auto"``."""
    is_number = isinstance(bucket_mb, (int, float)) and not isinstance(bucket_mb, bool)
    if bucket_mb != "auto" and not (is_number and 0 < bucket_mb < math.inf):  # type: ignore[operator]
        raise ValueError(f'{NAME}: expected bucket_mb to be "auto" or a positive number of MiB, got {bucket_mb!r}')


def fixed_capacity(bucket_mb: float) -> Capacity:
    return Capacity(last=bucket_mb * MIB, other=bucket_mb * MIB, reason="as given")


def one_bucket(reason: str) -> Capacity:
    return Capacity(last=math.inf, other=math.inf, reason=reason)


def capacity_before_measuring() -> Capacity:
    """For the first passes, which tell when gradients come: sizes that suit most networks, as torch's own."""
    return Capacity(last=1.0 * MIB, other=25.0 * MIB, reason="auto: until the network is measured, before pass 4")


def first_capacity(link: Link) -> Capacity:
    """What suits a link whatever backward takes.

    A bucket of S bytes uses S / (S + latency * bandwidth) of the bandwidth, and starts only when its last gradient is
    there. Where the transfer hides behind the backward pass, 4 * latency * bandwidth reaches 80 %; beyond, size gains
    little and hides less. The last bucket has nothing to hide behind; cut to latency * bandwidth / 8 it costs little
    more than the latency. Where the transfer takes time from the cores that compute, each bucket costs its latency in
    full, which 8 * latency * bandwidth makes a ninth, and a small last bucket gains nothing.
    """
    product = link.latency * link.bandwidth
    hidden = link.hides >= 0.5
    last, other = (product / 8, 4 * product) if hidden else (8 * product, 8 * product)
    reason = f"an all-reduce takes {link}, {'hidden behind' if hidden else 'in the time of'} the backward pass"
    return Capacity(last, other, reason)


@dataclass(frozen=True)
class Size:
    """What the plan has to know of a parameter: gradients of one ``dtype`` share buckets and travel as ``bytes``."""

    dtype: torch.dtype
    bytes: int


def assign(sizes: Sequence[Size], order: Sequence[int], capacity: Capacity, max_buckets: int = 0) -> list[list[int]]:
    """Buckets as lists of indices into ``sizes``, in the order in which they are sent.

    order: the indices in the order in which gradients are expected. Buckets are filled in that order, those of each
    dtype on their own, and sent by when their last gradient is expected. A parameter is never split: one that exceeds
    the capacity has a bucket to itself.
    max_buckets: of one dtype; where the capacity would make more, it grows until they do. Default 0, any number.
    """
    dtypes: dict[torch.dtype, list[int]] = {}
    for index in order:
        dtypes.setdefault(sizes[index].dtype, []).append(index)
    expected = {index: place for place, index in enumerate(order)}
    buckets: list[list[int]] = []
    for indices in dtypes.values():
        bytes_each = [sizes[index].bytes for index in indices]
        other = capacity.other
        ends = _ends(bytes_each, capacity.last, other)
        while max_buckets and len(ends) > max_buckets:
            other = max(2 * other, 1.0)
            ends = _ends(bytes_each, capacity.last, other)
        buckets += [indices[begin:end] for begin, end in zip([0, *ends], ends)]
    return sorted(buckets, key=lambda bucket: expected[bucket[-1]])


def _ends(sizes: list[int], last: float, other: float) -> list[int]:
    """Where buckets end: filled up to ``other`` bytes, but for the last one, of up to ``last``."""
    last_begin, size_of_last = len(sizes) - 1, sizes[-1]
    while last_begin > 0 and size_of_last + sizes[last_begin - 1] <= last:
        last_begin -= 1
        size_of_last += sizes[last_begin]
    ends, filled = [], 0
    for position, size in enumerate(sizes):
        if position > 0 and (position == last_begin or filled + size > other):
            ends.append(position)
            filled = 0
        filled += size
    return [*ends, len(sizes)]
