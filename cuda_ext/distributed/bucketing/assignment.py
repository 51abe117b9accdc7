"""Buckets filled up to a size, for `bucket_cap_mb=N` and until the time of backward is known; then see `choice`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from cuda_ext.distributed.bucketing.links import Link
from cuda_ext.distributed.bucketing.simulation import Gradient, in_order, sort_by_arrival
from cuda_ext.distributed.bucketing.units import MIB

AUTO = "auto"


def parse_bucket_cap_mb(caller: str, bucket_cap_mb: float | str) -> float | None:
    """Bytes of a bucket, from MiB; None for ``"auto"``. Raises ValueError for anything else."""
    is_number = isinstance(bucket_cap_mb, (int, float)) and not isinstance(bucket_cap_mb, bool)
    if bucket_cap_mb == AUTO:
        return None
    if not (is_number and 0 < bucket_cap_mb < math.inf):  # type: ignore[operator]
        raise ValueError(
            f'{caller}: expected bucket_cap_mb to be "auto" or a positive number of MiB, got {bucket_cap_mb!r}'
        )
    return float(bucket_cap_mb) * MIB


@dataclass(frozen=True)
class Capacity:
    """The size in bytes up to which buckets are filled: ``last`` for the bucket that is sent last, ``other`` for the
    others, and the reason for these sizes."""

    last: float
    other: float
    reason: str


def fixed_capacity(size: float) -> Capacity:
    return Capacity(last=size, other=size, reason="as given")


def one_bucket(reason: str) -> Capacity:
    return Capacity(last=math.inf, other=math.inf, reason=reason)


def capacity_before_measuring() -> Capacity:
    """For the first passes, in which arrival times are recorded: the sizes of torch's DDP, which suit most networks."""
    return Capacity(last=1.0 * MIB, other=25.0 * MIB, reason="auto: until the network is measured, before pass 4")


def first_capacity(link: Link) -> Capacity:
    """Sizes that suit a link if the time of backward is unknown.

    A bucket of S bytes uses S / (S + latency * bandwidth) of the bandwidth, and starts only when its last gradient is
    ready. If backward hides transfers, 4 * latency * bandwidth reaches 80 %; larger buckets gain little and hide less.
    Nothing hides the last bucket; at latency * bandwidth / 8 it costs little more than the latency. If a transfer uses
    the cores that compute, each bucket costs its full latency, which is a ninth of the time at 8 * latency * bandwidth,
    and a small last bucket gains nothing.
    """
    product = link.latency * link.bandwidth
    hidden = link.hides >= 0.5
    last, other = (product / 8, 4 * product) if hidden else (8 * product, 8 * product)
    reason = f"an all-reduce takes {link}, {'hidden behind' if hidden else 'in the time of'} the backward pass"
    return Capacity(last, other, reason)


def fill(gradients: Sequence[Gradient], capacity: Capacity, max_buckets: int = 0) -> list[list[int]]:
    """Buckets as lists of indices into ``gradients``, in the order in which they are sent.

    The gradients of each kind are filled into buckets in order of arrival; a bucket is sent when its last gradient is
    ready. A gradient is never split: one that exceeds the capacity has a bucket to itself.

    max_buckets: the limit for each kind; `Capacity.other` is doubled until it is met. Default 0: no limit.
    """
    kinds: dict[str, list[int]] = {}
    for n in in_order(gradients):
        kinds.setdefault(gradients[n].kind, []).append(n)
    buckets: list[list[int]] = []
    for members in kinds.values():
        sizes = [gradients[n].bytes for n in members]
        other = capacity.other
        starts = _starts(sizes, capacity.last, other)
        while max_buckets and len(starts) > max_buckets:
            other = max(2 * other, 1.0)
            starts = _starts(sizes, capacity.last, other)
        buckets += [members[begin:end] for begin, end in pairwise([*starts, len(members)])]
    return sort_by_arrival(gradients, buckets)


def _starts(sizes: Sequence[float], last: float, other: float) -> list[int]:
    """Where buckets begin: each is filled up to ``other`` bytes, except the last one if ``last`` is less."""
    last_start = 0
    if last < other:
        last_start, size_of_last = len(sizes) - 1, sizes[-1]
        while last_start > 0 and size_of_last + sizes[last_start - 1] <= last:
            last_start -= 1
            size_of_last += sizes[last_start]
    starts, filled = [0], 0.0
    for position, size in enumerate(sizes):
        if position > 0 and (position == last_start or filled + size > other):
            starts.append(position)
            filled = 0.0
        filled += size
    return starts
