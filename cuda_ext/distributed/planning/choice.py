"""What the all-reduces of a backward pass cost, and by that which gradients travel together.

An all-reduce of S bytes takes ``latency + S / bandwidth`` seconds, as a fit to measured times has it (`fit`), or as the
algorithm and the network have it (`ring`, `tree`, `two_level`). From that, and from when each gradient is there,
`simulate` follows the buckets of one backward pass, and `choose` finds those that end it soonest. All is plain Python
on doubles, in the order of its arguments: equal arguments give equal plans, bit for bit.

docs/buckets.md tells it with an example; ``python -m cuda_ext.distributed plan --help`` is the tool.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

MIB = 1 << 20

# A plan of fewer buckets is taken as long as it lengthens the pass by no more than these parts of the exposed time and
# of backward: less than anyone can measure.
SLACK, SLACK_OF_BACKWARD = 0.01, 1e-4
# Buckets are tried up to this number, and beyond only where `largest` asks for more.
MOST_BUCKETS = 512
# A bucket may always be that large: no one misses the memory.
SMALL = 32 * MIB


@dataclass(frozen=True)
class Link:
    """An all-reduce of S bytes takes ``latency + S / bandwidth`` seconds.

    ``latency`` in seconds, ``bandwidth`` in bytes a second. ``hides``: how fast backward computes while a transfer
    runs, as part of its speed alone: 1 (or True) where a network does the work, 0 (or False) where the same cores do.
    ``grouped``: where several buckets can be launched as one, the seconds that each but the first of them adds, in
    place of a latency; None, the default, where they go one by one.
    """

    latency: float
    bandwidth: float
    hides: float = 1.0
    grouped: float | None = None

    def seconds(self, size: float, buckets: int = 1) -> float:
        """Of an all-reduce of ``size`` bytes, in so many buckets that are sent at once."""
        another = self.latency if self.grouped is None else self.grouped
        return self.latency + (buckets - 1) * another + size / self.bandwidth

    def __str__(self) -> str:
        return f"{duration(self.latency)} + size / ({byte_rate(self.bandwidth)})"


@dataclass(frozen=True)
class Hop:
    """One message from a rank to its neighbour: seconds, and bytes a second each way that each rank has to itself."""

    latency: float
    bandwidth: float


def ring(ranks: int, hop: Hop) -> Link:
    """An all-reduce that sends every piece round a ring twice: once to sum it, once to hand it out.

    2 (n - 1) hops one after the other, and 2 (n - 1) / n bytes out of each rank for each byte summed, the least there
    can be (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, JPDC 2009; Thakur et al., Optimization of
    collective communication operations in MPICH, IJHPCA 2005). NCCL counts the same (src/graph/tuning.cc).
    """
    if ranks == 1:
        return Link(0.0, math.inf)
    return Link(2 * (ranks - 1) * hop.latency, hop.bandwidth * ranks / (2 * (ranks - 1)))


def tree(ranks: int, hop: Hop) -> Link:
    """An all-reduce up and down two binary trees, each of which carries one half; inner ranks of one are leaves of the
    other.

    2 ceil(log2 n) hops one after the other, pieces of a message following each other, and 2 bytes out of each rank for
    each byte summed (Sanders, Speck and Träff, Two-tree algorithms for full bandwidth broadcast, reduction and scan,
    Parallel Computing 2009; NCCL's trees likewise have half the bandwidth, src/graph/tuning.cc).
    """
    if ranks == 1:
        return Link(0.0, math.inf)
    return Link(2 * math.ceil(math.log2(ranks)) * hop.latency, hop.bandwidth / 2)


ALGORITHMS = {"ring": ring, "tree": tree}


def two_level(ranks: int, ranks_per_node: int, inside: Hop, across: Hop, algorithm: str = "ring") -> Link:
    """A reduce-scatter inside each node, an all-reduce across nodes by ``algorithm``, an all-gather inside each node.

    Inside, both are a ring's, halves of `ring` over the ranks of a node. Across, each rank of a node sums its own part
    of the bytes, over a network of its own. Where ``ranks`` do not fill the last node, it has fewer networks than the
    others, and all wait for it.
    """
    if ranks <= ranks_per_node:
        return ring(ranks, inside)
    near, far = ring(ranks_per_node, inside), ALGORITHMS[algorithm](math.ceil(ranks / ranks_per_node), across)
    networks = ranks % ranks_per_node or ranks_per_node
    bandwidth = 1.0 / (1.0 / near.bandwidth + 1.0 / (networks * far.bandwidth))
    return Link(near.latency + far.latency, bandwidth)


@dataclass(frozen=True)
class Fit:
    """``error``: the median of |predicted - measured| / measured over the sizes."""

    link: Link
    error: float


def fit(sizes: Sequence[float], seconds: Sequence[float], hides: float = 1.0) -> Fit:
    """Latency and bandwidth from measured times of all-reduces of ``sizes`` bytes, at least two different ones.

    Of repeats of a size the shortest counts: what else a machine does only adds. Then the errors, relative to each
    time so that small sizes weigh as much as large ones, are made least: first the sum of their magnitudes, which a few
    wild times hardly move, then the sum of the squares of those that are left within three times the median. Neither
    latency nor the time of a byte comes out negative; where size does not show in the times, bandwidth is infinite.

    ValueError for fewer than two sizes, or a time or size that is not positive and finite.
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

    # A least sum of magnitudes is found on a line through two of the points, or through one where a bound holds.
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
    """Constant and slope, neither negative, that make the squares of the relative errors least."""
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


def slowest(ranks: int, spread: float, seed: int = 0, steps: int = 1000) -> float:
    """How much longer than the mean rank the slowest of ``ranks`` computes, on average over ``steps`` steps.

    The model: in each step each rank computes 1 + ``spread`` * z times as long as the mean, z standard normal, drawn
    anew for each rank and step (clocks, inputs of unequal length, the system). A collective starts when the last rank
    has come. The largest of n draws is drawn directly, from a uniform u as the normal quantile of u^(1/n).
    """
    draw, normal = random.Random(seed), statistics.NormalDist()
    largest = (normal.inv_cdf(max(draw.random(), 1e-300) ** (1.0 / ranks)) for _ in range(steps))
    return 1.0 + spread * statistics.fmean(largest)


@dataclass(frozen=True)
class Gradient:
    """``bytes`` that travel, once backward has computed for ``ready`` seconds; only those of a ``kind`` share a
    bucket.
    """

    name: str
    bytes: float
    ready: float
    kind: str = ""


def spread(sizes: Iterable[tuple[str, float]], backward_seconds: float) -> list[Gradient]:
    """Gradients of (name, bytes) in order of arrival, if each takes a part of backward in proportion to its bytes.

    For where arrivals were not measured; parameters arrive roughly in the reverse order of their registration.
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
    """Of a launch: bytes, and seconds since backward began when it is packed, sent, and ready."""

    bytes: float
    packed: float
    sent: float
    ready: float


@dataclass(frozen=True)
class Timeline:
    """One backward pass. ``alone``: seconds of backward by itself; ``computed``: when it ended; ``total``: when all
    was there.
    """

    transfers: tuple[Transfer, ...]
    alone: float
    computed: float
    total: float

    @property
    def exposed(self) -> float:
        """Seconds by which the transfers lengthen the pass: those after backward, and those they take from it."""
        return self.total - self.alone


def simulate(
    gradients: Sequence[Gradient],
    launches: Iterable[Sequence[int]],
    link: Link,
    backward_seconds: float,
    *,
    pack_bandwidth: float = math.inf,
    slowdown: float = 1.0,
) -> Timeline:
    """Follows one backward pass.

    A launch is one bucket, or several, of different kinds, that are sent as one. It is packed when its last gradient
    has come and those before it are packed. Packing takes the time of backward. Transfers go one after the other, in
    the order of the launches. While one runs, backward computes at ``link.hides`` of its speed.

    Args:
        gradients: in any order; ``ready`` counts seconds that backward computes, with nothing beside it.
        launches: indices into ``gradients``, in the order in which they are sent.
        link: of the all-reduces.
        backward_seconds: of backward alone; not before the last gradient.
        pack_bandwidth: bytes a second; default infinite.
        slowdown: how much longer the slowest rank computes, see `slowest`; exposed time counts from backward without.
    """
    hides = link.hides
    packing = 0.0  # seconds so far
    latest = 0.0  # of the gradients so far
    marks = []  # seconds of computing, packing included, after which each launch is packed; its bytes; its buckets
    for launch in launches:
        size = sum(gradients[n].bytes for n in launch)
        packing += size / pack_bandwidth
        latest = max(latest, *(gradients[n].ready for n in launch))
        marks.append((slowdown * latest + packing, size, len({gradients[n].kind for n in launch})))
    computing = slowdown * max(backward_seconds, latest) + packing
    clock = _Clock(hides)
    transfers = []
    free = 0.0  # when the link is
    free_by_computing = 0.0  # the same, in seconds of computing until then
    passing = 0.0  # seconds of all transfers so far, each of which cost (1 - hides) of computing
    for needs, size, buckets in marks:
        lasts = link.seconds(size, buckets)
        by_computing = max(free_by_computing, needs)
        sent = max(free, by_computing + (1.0 - hides) * passing)
        packed = clock.time_of(needs)
        clock.transfer(by_computing, sent, lasts)
        free, free_by_computing = sent + lasts, by_computing + hides * lasts
        passing += lasts
        transfers.append(Transfer(size, min(packed, sent), sent, free))
    computed = clock.time_of(computing)
    return Timeline(tuple(transfers), backward_seconds, computed, max(computed, free))


class _Clock:
    """When backward has computed for so many seconds; asked for ever more of them."""

    def __init__(self, speed: float) -> None:
        self._speed = speed  # during a transfer
        self._transfers: deque[tuple[float, float, float]] = deque()
        self._computed = self._time = 0.0  # at the end of the last transfer that is behind

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
    """Indices into ``gradients`` by arrival; of those that come at once, as they stand."""
    return sorted(range(len(gradients)), key=lambda n: (gradients[n].ready, n))


def fill(gradients: Sequence[Gradient], capacity: float) -> list[list[int]]:
    """Buckets of up to ``capacity`` bytes, filled in order of arrival, in the order in which they are sent.

    Buckets are indices into ``gradients``. A gradient is never split: one that exceeds the capacity has a bucket to
    itself.
    """
    filling: dict[str, list[int]] = {}
    sizes: dict[str, float] = {}
    buckets: list[list[int]] = []
    for n in in_order(gradients):
        kind, size = gradients[n].kind, gradients[n].bytes
        if kind not in filling or sizes[kind] + size > capacity:
            buckets.append([])
            filling[kind], sizes[kind] = buckets[-1], 0.0
        filling[kind].append(n)
        sizes[kind] += size
    return _sorted_by_arrival(gradients, buckets)


def _sorted_by_arrival(gradients: Sequence[Gradient], buckets: list[list[int]]) -> list[list[int]]:
    return sorted(buckets, key=lambda bucket: (gradients[bucket[-1]].ready, bucket[-1]))


Launch = list[list[int]]  # buckets that are sent as one, each of indices into the gradients


@dataclass(frozen=True)
class Choice:
    """``buckets``: indices into the gradients, in the order in which they are sent; ``launches``: how many of them each
    launch sends; ``sizes``: their bytes. ``reason``: one line for a log.
    """

    buckets: tuple[tuple[int, ...], ...]
    launches: tuple[int, ...]
    sizes: tuple[float, ...]
    timeline: Timeline
    reason: str

    @property
    def exposed(self) -> float:
        return self.timeline.exposed

    @property
    def last(self) -> float:
        """Bytes of the bucket that is sent last."""
        return self.sizes[-1]

    @property
    def largest(self) -> float:
        return max(self.sizes)


def choose(
    gradients: Sequence[Gradient],
    link: Link,
    backward_seconds: float,
    *,
    largest: float | None = None,
    pack_bandwidth: float = math.inf,
    slowdown: float = 1.0,
) -> Choice:
    """The buckets that end a backward pass soonest; of plans nearly as good, that of fewest buckets.

    Args:
        gradients: at least one, in any order.
        link, backward_seconds, pack_bandwidth, slowdown: as for `simulate`.
        largest: bytes that no bucket exceeds unless one gradient does. Gradients of a bucket are held beside it until
            it is packed, so this is memory. Default the most of: 32 MiB; the largest gradient, which is held anyway;
            and 8 * latency * bandwidth, at which size transfers reach 8/9 of the bandwidth, and more gains little.

    The plan is the best of all that keep the order of arrival, by dynamic programming over how many gradients have been
    sent in how many buckets. One of fewer buckets is taken if it exposes at most 1 % and 0.0001 ``backward_seconds``
    more. The last bucket comes out small, as nothing hides it, and those before large, as each costs a latency. Where
    gradients are of several kinds a bucket is split by kind, and small kinds go in one piece if that is sooner; where
    the link takes buckets in groups, those that were split go as one launch if that is sooner.
    """
    if not gradients:
        raise ValueError("choose: expected at least one gradient, got none")
    if largest is None:
        product = link.latency * link.bandwidth if link.bandwidth < math.inf else 0.0
        largest = max(SMALL, 8 * product, *(gradient.bytes for gradient in gradients))
    options = {"pack_bandwidth": pack_bandwidth, "slowdown": slowdown}
    order = in_order(gradients)
    segments = _best_segments([gradients[n] for n in order], link, backward_seconds, largest, **options)
    pieces = [[order[n] for n in segment] for segment in segments]
    kinds: dict[str, float] = {}
    for gradient in gradients:
        kinds[gradient.kind] = kinds.get(gradient.kind, 0.0) + gradient.bytes
    small = frozenset(kind for kind, size in kinds.items() if size < max(kinds.values()) and size <= largest)
    plans: list[list[Launch]] = []
    for whole in dict.fromkeys((frozenset[str](), small)):
        by_kind = _split_by_kind(gradients, pieces, whole)
        apart = _sorted_by_arrival(gradients, [bucket for launch in by_kind for bucket in launch])
        plans.append([[bucket] for bucket in apart])
        if link.grouped is not None and len(by_kind) < len(apart):
            plans.append(by_kind)
    timelines = [
        simulate(gradients, [list(chain(*launch)) for launch in plan], link, backward_seconds, **options)
        for plan in plans
    ]
    # Of equals the one with fewest buckets, and of these the one with most launches: a group has to wait for all of it.
    best = min(range(len(plans)), key=lambda n: (timelines[n].exposed, sum(map(len, plans[n])), -len(plans[n])))
    buckets = tuple(tuple(bucket) for launch in plans[best] for bucket in launch)
    sizes = tuple(sum(gradients[n].bytes for n in bucket) for bucket in buckets)
    launches = tuple(map(len, plans[best]))
    return Choice(buckets, launches, sizes, timelines[best], _reason(sizes, len(launches), timelines[best], link))


def _split_by_kind(
    gradients: Sequence[Gradient], pieces: Sequence[Sequence[int]], whole: frozenset[str]
) -> list[Launch]:
    """The pieces, each as buckets of one kind; all gradients of a kind in ``whole`` in one bucket, with the last piece
    that has any.
    """
    last = {gradients[n].kind: number for number, piece in enumerate(pieces) for n in piece}
    buckets: list[dict[str, list[int]]] = [{} for _ in pieces]
    for number, piece in enumerate(pieces):
        for n in piece:
            kind = gradients[n].kind
            buckets[last[kind] if kind in whole else number].setdefault(kind, []).append(n)
    return [_sorted_by_arrival(gradients, list(by_kind.values())) for by_kind in buckets if by_kind]


def _best_segments(
    gradients: Sequence[Gradient],
    link: Link,
    backward_seconds: float,
    largest: float,
    pack_bandwidth: float,
    slowdown: float,
) -> list[range]:
    """``gradients``, in order of arrival, cut where the pass ends soonest.

    Time is counted without what transfers take from backward: there a transfer of T lasts hides * T, and what it took,
    (1 - hides) * T, comes on top at the end. So all that matters of a plan for the first i gradients in k buckets is
    when the last of these is ready, the sooner the better:

        end[k][j] = min over i of max(end[k - 1][i], packed[j]) + hides * seconds(bytes of i to j)

    end[k - 1] never falls with i. So of all i whose buckets are done before j is packed the last is best, and of
    the others the one of least end[k - 1][i] - hides * bytes[i] / bandwidth, the minimum of a sliding window. That
    makes each k linear in the number of gradients.
    """
    count = len(gradients)
    hides, latency, bandwidth = link.hides, link.latency, link.bandwidth
    before = [0.0]  # bytes of the first j
    for gradient in gradients:
        before.append(before[-1] + gradient.bytes)
    total = before[count]
    packed = [0.0] + [slowdown * gradients[j - 1].ready + before[j] / pack_bandwidth for j in range(1, count + 1)]
    computing = max(slowdown * backward_seconds + total / pack_bandwidth, packed[count])
    first = [0] * (count + 1)  # the least i from which a bucket may reach to j
    for j in range(1, count + 1):
        i = first[j - 1]
        while i < j - 1 and before[j] - before[i] > largest:
            i += 1
        first[j] = i

    def finish(buckets: int, end: float) -> float:
        return max(end, computing) + (1.0 - hides) * (buckets * latency + total / bandwidth)

    def bound(buckets: int) -> float:
        """No plan of at least so many buckets ends sooner."""
        last = packed[count] + hides * link.seconds(gradients[-1].bytes)
        return finish(buckets, max(last, packed[1] + hides * (buckets * latency + total / bandwidth)))

    def limit(finished: float) -> float:
        """What is as good as ``finished``."""
        return finished + SLACK * (finished - backward_seconds) + SLACK_OF_BACKWARD * backward_seconds

    end = [math.inf] * (count + 1)
    end[0] = 0.0
    cuts: list[list[int]] = []
    finishes: list[float] = []
    least = math.inf  # nothing ends sooner
    for buckets in range(1, count + 1):
        end, cut = _one_more_bucket(end, buckets, before, packed, first, link)
        cuts.append(cut)
        finishes.append(finish(buckets, end[count]))
        best = min(finishes)
        least = min(best, bound(buckets + 1)) if buckets < min(count, MOST_BUCKETS) else best
        if best < math.inf and limit(least) >= best:
            break
    buckets = next(n for n, finished in enumerate(finishes, 1) if finished <= limit(least))
    segments = []
    j = count
    for cut in reversed(cuts[:buckets]):
        segments.append(range(cut[j], j))
        j = cut[j]
    return segments[::-1]


def _one_more_bucket(
    end: Sequence[float],
    buckets: int,
    before: Sequence[float],
    packed: Sequence[float],
    first: Sequence[int],
    link: Link,
) -> tuple[list[float], list[int]]:
    """From ``end`` of one bucket less, that of ``buckets``; and for each j the i at which its last bucket begins."""
    count = len(before) - 1
    per_byte = link.hides / link.bandwidth
    after, cut = [math.inf] * (count + 1), [0] * (count + 1)
    done = buckets - 2  # the last i whose buckets end before j is packed
    window: deque[int] = deque()  # other i, of ever greater gain
    gain = [ended - per_byte * size for ended, size in zip(end, before)]
    for j in range(buckets, count + 1):
        while window and gain[window[-1]] >= gain[j - 1]:
            window.pop()
        window.append(j - 1)
        while done + 1 < j and end[done + 1] <= packed[j]:
            done += 1
        while window and (window[0] <= done or window[0] < first[j]):
            window.popleft()
        if done >= buckets - 1 and done >= first[j]:
            after[j], cut[j] = packed[j] - per_byte * before[done], done
        if window and gain[window[0]] < after[j]:
            after[j], cut[j] = gain[window[0]], window[0]
        after[j] += link.hides * link.latency + per_byte * before[j]
    return after, cut


def _reason(sizes: Sequence[float], launches: int, timeline: Timeline, link: Link) -> str:
    *others, last = sizes
    plan = f"one bucket of {byte_size(last)}"
    if others:
        low, high = byte_size(min(others)), byte_size(max(others))
        plan = f"{len(others) + 1} buckets: {low if low == high else f'{low} to {high}'}, the last {byte_size(last)}"
    if launches < len(sizes):
        assert link.grouped is not None
        count = "one launch" if launches == 1 else f"{launches} launches"
        plan += f", in {count}, where each further bucket takes {duration(link.grouped)}"
    beside = f", {link.hides:.0%} of it beside backward" if link.hides < 1 else ""
    return (
        f"{plan}; an all-reduce takes {link}{beside}; backward takes {duration(timeline.alone)}, "
        f"and {duration(timeline.exposed)} more with the transfers"
    )


def duration(seconds: float) -> str:
    return _in_units(seconds, (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)))


def byte_size(count: float) -> str:
    return _in_units(count, (("GiB", 1 << 30), ("MiB", MIB), ("KiB", 1 << 10), ("B", 1)))


def byte_rate(bytes_per_second: float) -> str:
    return _in_units(bytes_per_second, (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6)))


def _in_units(value: float, units: Sequence[tuple[str, float]]) -> str:
    """In the largest unit of which there is one, or the smallest; three digits."""
    unit, scale = next((unit for unit in units if value >= unit[1]), units[-1])
    number = value / scale
    return f"{number:.0f} {unit}" if 100 <= number < math.inf else f"{number:.3g} {unit}"
