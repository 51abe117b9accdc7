"""What an all-reduce takes: ``latency + S / bandwidth`` seconds for S bytes.

Both numbers come from an algorithm and a network (`ring`, `tree`, `two_level`) or from a fit to measurements (`fit`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from cuda_ext.distributed.bucketing.units import byte_rate, duration


@dataclass(frozen=True)
class Link:
    """An all-reduce of S bytes takes ``latency + S / bandwidth`` seconds.

    latency: in seconds. bandwidth: in bytes per second.
    hides: the speed of backward during a transfer, relative to its speed alone: 1 (or True) if a network does the work,
        0 (or False) if the same cores do.
    grouped: if several buckets can share a transfer, the seconds that each bucket after the first adds, instead of a
        latency; None, the default, if every bucket is a transfer.
    """

    latency: float
    bandwidth: float
    hides: float = 1.0
    grouped: float | None = None

    def seconds(self, size: float, buckets: int = 1) -> float:
        """The time of an all-reduce of ``size`` bytes in this many buckets, in one transfer."""
        another = self.latency if self.grouped is None else self.grouped
        return self.latency + (buckets - 1) * another + size / self.bandwidth

    def __str__(self) -> str:
        return f"{duration(self.latency)} + size / ({byte_rate(self.bandwidth)})"


@dataclass(frozen=True)
class Hop:
    """One message from a rank to its neighbour: seconds of latency; bytes per second of each rank in each direction."""

    latency: float
    bandwidth: float


def ring(ranks: int, hop: Hop) -> Link:
    """An all-reduce that sends every piece around a ring twice: once to sum it, once to distribute the sum.

    It takes 2 (n - 1) hops in sequence, and each rank sends 2 (n - 1) / n bytes for each byte summed, which is the
    minimum (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, JPDC 2009; Thakur et al., Optimization of
    collective communication operations in MPICH, IJHPCA 2005). NCCL counts the same (src/graph/tuning.cc).
    """
    if ranks == 1:
        return Link(0.0, math.inf)
    return Link(2 * (ranks - 1) * hop.latency, hop.bandwidth * ranks / (2 * (ranks - 1)))


def tree(ranks: int, hop: Hop) -> Link:
    """An all-reduce up and down two binary trees, each for one half of the data; inner ranks of one are leaves of the
    other.

    It takes 2 ceil(log2 n) hops in sequence, pipelined, and each rank sends 2 bytes for each byte summed (Sanders,
    Speck and Träff, Two-tree algorithms for full bandwidth broadcast, reduction and scan, Parallel Computing 2009;
    NCCL's trees likewise have half the bandwidth, src/graph/tuning.cc).
    """
    if ranks == 1:
        return Link(0.0, math.inf)
    return Link(2 * math.ceil(math.log2(ranks)) * hop.latency, hop.bandwidth / 2)


ALGORITHMS = {"ring": ring, "tree": tree}


def two_level(ranks: int, ranks_per_node: int, inside: Hop, across: Hop, algorithm: str = "ring") -> Link:
    """A reduce-scatter inside each node, an all-reduce across nodes by ``algorithm``, an all-gather inside each node.

    Inside a node both use a ring; together they are `ring` over the ranks of a node. Across nodes, each rank of a node
    sums its own part of the bytes over its own network link. If ``ranks`` do not fill the last node, it has fewer links
    than the others, and all wait for it.
    """
    if ranks <= ranks_per_node:
        return ring(ranks, inside)
    near, far = ring(ranks_per_node, inside), ALGORITHMS[algorithm](math.ceil(ranks / ranks_per_node), across)
    networks = ranks % ranks_per_node or ranks_per_node
    bandwidth = 1.0 / (1.0 / near.bandwidth + 1.0 / (networks * far.bandwidth))
    return Link(near.latency + far.latency, bandwidth)


@dataclass(frozen=True)
class Fit:
    """A link fitted to measured times. ``error``: the median of |predicted - measured| / measured over the sizes."""

    link: Link
    error: float


def fit(sizes: Sequence[float], seconds: Sequence[float], hides: float = 1.0) -> Fit:
    """Latency and bandwidth from measured times of all-reduces of ``sizes`` bytes, at least two different sizes.

    The shortest time of each size counts, as other activity on the machine only adds time. The fit minimises errors
    relative to the measured time, so that small sizes weigh as much as large ones: first the sum of absolute errors,
    which is robust to a few outliers, then the sum of squares over the points whose error is within three times the
    median. Latency and time per byte are at least 0; if times do not depend on size, bandwidth is infinite.

    Raises ValueError for fewer than two sizes, or a time or size that is not positive and finite.
    """
    shortest: dict[float, float] = {}
    for size, time in zip(sizes, seconds, strict=True):
        if not (0 < size < math.inf and 0 < time < math.inf):
            raise ValueError(f"fit: expected positive finite sizes and seconds, got {size} bytes in {time} s")
        shortest[size] = min(time, shortest.get(size, math.inf))
    points = sorted(shortest.items())
    if len(points) < 2:
        raise ValueError(f"fit: expected at least two different sizes, got {len(points)}; measure another")

    def errors(line: tuple[float, float]) -> list[float]:
        return [abs(line[0] + line[1] * size - time) / time for size, time in points]

    # A line that minimises the sum of absolute errors passes through two points, or through one if a bound is active.
    lines = [(0.0, time / size) for size, time in points] + [(time, 0.0) for _, time in points]
    for n, (size, time) in enumerate(points):
        for other_size, other_time in points[n + 1 :]:
            slope = (other_time - time) / (other_size - size)
            lines.append((time - slope * size, slope))
    robust = min((line for line in lines if min(line) >= 0), key=lambda line: sum(errors(line)))
    limit = max(3 * statistics.median(errors(robust)), 1e-9)
    kept = [point for point, error in zip(points, errors(robust)) if error <= limit]
    latency, slope = _least_squares(kept) if len(kept) > 1 else robust
    link = Link(latency, 1.0 / slope if slope > 0 else math.inf, hides)
    return Fit(link, statistics.median(errors((latency, slope))))


def _least_squares(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Constant and slope, both at least 0, that minimise the sum of squared relative errors."""
    # Each equation is divided by its time: constant * u + slope * v = 1.
    rows = [(1.0 / time, size / time) for size, time in points]
    uu, uv, vv = sum(u * u for u, _ in rows), sum(u * v for u, v in rows), sum(v * v for _, v in rows)
    u1, v1 = sum(u for u, _ in rows), sum(v for _, v in rows)
    determinant = uu * vv - uv * uv
    constant, slope = (u1 * vv - v1 * uv) / determinant, (v1 * uu - u1 * uv) / determinant
    if constant < 0:
        return 0.0, v1 / vv
    if slope < 0:
        return u1 / uu, 0.0
    return constant, slope
