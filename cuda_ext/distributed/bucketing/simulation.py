"""One backward pass: when each bucket is packed, sent and ready, and how long all of it takes.

Plain Python on doubles, in the order of the arguments: equal arguments give equal results, bit for bit.
docs/buckets.md explains the model with an example.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cuda_ext.distributed.bucketing.links import Link


@dataclass(frozen=True)
class Gradient:
    """A gradient of ``bytes`` bytes that is complete after ``ready`` seconds of backward.

    Only gradients of the same ``kind`` share a bucket. `fill` only uses the order of ``ready``, in any unit.
    """

    name: str
    bytes: float
    ready: float
    kind: str = ""


def spread(sizes: Iterable[tuple[str, float]], backward_seconds: float) -> list[Gradient]:
    """Gradients of (name, bytes) in order of arrival, each taking a share of backward proportional to its bytes.

    For use without measured arrivals; gradients arrive roughly in the reverse order of registration.
    """
    sizes = list(sizes)
    total = sum(size for _, size in sizes)
    gradients, before = [], 0.0
    for name, size in sizes:
        before += size
        gradients.append(Gradient(name, size, backward_seconds * before / (total or 1)))
    return gradients


@dataclass(frozen=True)
class Transfer:
    """One transfer: its bytes, and when it is packed, sent and ready, in seconds since backward began."""

    bytes: float
    packed: float
    sent: float
    ready: float


@dataclass(frozen=True)
class Timeline:
    """One backward pass, in seconds.

    alone: the time of backward without transfers. computed: when backward ended. total: when the last transfer ended.
    """

    transfers: tuple[Transfer, ...]
    alone: float
    computed: float
    total: float

    @property
    def exposed(self) -> float:
        """Seconds by which the transfers lengthen the pass: after backward, and by slowing it down."""
        return self.total - self.alone


def simulate(
    gradients: Sequence[Gradient],
    transfers: Iterable[Sequence[int]],
    link: Link,
    backward_seconds: float,
    *,
    pack_bandwidth: float = math.inf,
    slowdown: float = 1.0,
) -> Timeline:
    """Simulates one backward pass.

    A transfer is one bucket, or several buckets of different kinds that are sent together. It is packed when its last
    gradient is ready and the transfers before it are packed. Packing adds to the time of backward. Transfers run one
    after the other, in order. During a transfer, backward runs at ``link.hides`` of its speed.

    Args:
        gradients: in any order; ``ready`` in seconds of backward without transfers.
        transfers: indices into ``gradients``, in the order in which they are sent.
        link: the cost of an all-reduce.
        backward_seconds: the time of backward alone; at least the last ``ready``.
        pack_bandwidth: bytes per second; default infinite.
        slowdown: the relative time of the slowest rank, see `slowest`; exposed time is relative to backward without it.
    """
    hides = link.hides
    packing = 0.0  # seconds so far
    latest = 0.0  # arrival so far
    packs = []  # of each transfer: seconds of computing, packing included, until it is packed; its bytes; its buckets
    for transfer in transfers:
        size = sum(gradients[n].bytes for n in transfer)
        packing += size / pack_bandwidth
        latest = max(latest, *(gradients[n].ready for n in transfer))
        packs.append((slowdown * latest + packing, size, len({gradients[n].kind for n in transfer})))
    computing = slowdown * max(backward_seconds, latest) + packing
    clock = _Clock(hides)
    timed = []
    free = 0.0  # when the link is free
    free_by_computing = 0.0  # the same moment, in seconds of computing
    passing = 0.0  # seconds of all transfers so far; each second cost (1 - hides) seconds of computing
    for needs, size, buckets in packs:
        lasts = link.seconds(size, buckets)
        by_computing = max(free_by_computing, needs)
        sent = max(free, by_computing + (1.0 - hides) * passing)
        packed = clock.time_of(needs)
        clock.transfer(by_computing, sent, lasts)
        free, free_by_computing = sent + lasts, by_computing + hides * lasts
        passing += lasts
        timed.append(Transfer(size, min(packed, sent), sent, free))
    computed = clock.time_of(computing)
    return Timeline(tuple(timed), backward_seconds, computed, max(computed, free))


class _Clock:
    """Converts seconds of computing to the time at which they are done; arguments must not decrease."""

    def __init__(self, speed: float) -> None:
        self._speed = speed  # during a transfer
        self._transfers: deque[tuple[float, float, float]] = deque()
        self._computed = self._time = 0.0  # at the end of the last transfer passed

    def transfer(self, computed: float, begin: float, lasts: float) -> None:
        self._transfers.append((computed, begin, lasts))

    def time_of(self, needs: float) -> float:
        while self._transfers and needs > self._transfers[0][0]:
            computed, begin, lasts = self._transfers[0]
            if needs <= computed + self._speed * lasts:
                return begin + (needs - computed) / self._speed
            self._computed, self._time = computed + self._speed * lasts, begin + lasts
            self._transfers.popleft()
        return needs + (self._time - self._computed)


def in_order(gradients: Sequence[Gradient]) -> list[int]:
    """Indices into ``gradients`` by arrival; ties keep their order."""
    return sorted(range(len(gradients)), key=lambda n: (gradients[n].ready, n))


def sort_by_arrival(gradients: Sequence[Gradient], buckets: list[list[int]]) -> list[list[int]]:
    """``buckets``, each in order of arrival, sorted by the arrival of their last gradient: the order of sending."""
    return sorted(buckets, key=lambda bucket: (gradients[bucket[-1]].ready, bucket[-1]))


def slowest(ranks: int, spread: float, seed: int = 0, steps: int = 1000) -> float:
    """The time of the slowest of ``ranks`` relative to the mean rank, averaged over ``steps`` steps.

    The model: in each step each rank takes 1 + ``spread`` * z times as long as the mean, with z standard normal and
    independent for each rank and step (clocks, inputs of different lengths, the system). A collective starts when the
    last rank arrives. The maximum of n draws is sampled directly: the normal quantile of u^(1/n), u uniform.
    """
    draw, normal = random.Random(seed), statistics.NormalDist()
    largest = (normal.inv_cdf(max(draw.random(), 1e-300) ** (1.0 / ranks)) for _ in range(steps))
    return 1.0 + spread * statistics.fmean(largest)
