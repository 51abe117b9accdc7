"""The buckets that end a backward pass soonest, from arrival times and the cost of an all-reduce."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from cuda_ext.distributed.bucketing.links import Link
from cuda_ext.distributed.bucketing.simulation import Gradient, Timeline, in_order, simulate, sort_by_arrival
from cuda_ext.distributed.bucketing.units import MIB, byte_size, duration

# A division into fewer buckets is preferred if it lengthens the pass by no more than these fractions of the exposed
# time and of backward, which is too little to measure.
SLACK, SLACK_OF_BACKWARD = 0.01, 1e-4
# More buckets are tried only if `largest` requires them.
MOST_BUCKETS = 512
# A bucket may always be this large: the memory does not matter.
SMALL = 32 * MIB

Buckets = list[list[int]]  # buckets that are sent together, as indices into the gradients


@dataclass(frozen=True)
class Choice:
    """A division of gradients into buckets.

    buckets: indices into the gradients, in the order of sending. transfers: the number of buckets of each transfer.
    sizes: the bytes of each bucket. reason: one line for a log.
    """

    buckets: tuple[tuple[int, ...], ...]
    transfers: tuple[int, ...]
    sizes: tuple[float, ...]
    timeline: Timeline
    reason: str

    @property
    def exposed(self) -> float:
        return self.timeline.exposed

    @property
    def last(self) -> float:
        """The size of the bucket that is sent last, in bytes."""
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
    """The buckets that end a backward pass soonest; among divisions nearly as good, one with the fewest buckets.

    Args:
        gradients: at least one, in any order.
        link, backward_seconds, pack_bandwidth, slowdown: as for `simulate`.
        largest: the maximum size of a bucket in bytes; only a single gradient may exceed it. A bucket and its gradients
            are in memory together until it is packed. Default the maximum of: 32 MiB; the largest gradient; and
            8 * latency * bandwidth, the size at which transfers reach 8/9 of the bandwidth.

    The result is the best of all divisions that keep the order of arrival, by dynamic programming over the number of
    gradients sent and the number of buckets. A division into fewer buckets is preferred if it exposes at most 1 % and
    0.0001 ``backward_seconds`` more. Typically the last bucket is small, as nothing hides it, and the others are large,
    as each costs a latency. A bucket with several kinds of gradients is split by kind; small kinds stay in one piece if
    that is faster; and if the link supports groups, the parts of a split bucket share a transfer if that is faster.
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
    divisions: list[list[Buckets]] = []
    for whole in dict.fromkeys((frozenset[str](), small)):
        by_kind = _split_by_kind(gradients, pieces, whole)
        separate = sort_by_arrival(gradients, [bucket for transfer in by_kind for bucket in transfer])
        divisions.append([[bucket] for bucket in separate])
        if link.grouped is not None and len(by_kind) < len(separate):
            divisions.append(by_kind)
    timelines = [
        simulate(gradients, [list(chain(*transfer)) for transfer in division], link, backward_seconds, **options)
        for division in divisions
    ]

    def cost(n: int) -> tuple[float, int, int]:
        # Ties: fewest buckets, then most transfers, as a bucket of a group waits for the others.
        return timelines[n].exposed, sum(map(len, divisions[n])), -len(divisions[n])

    best = min(range(len(divisions)), key=cost)
    buckets = tuple(tuple(bucket) for transfer in divisions[best] for bucket in transfer)
    sizes = tuple(sum(gradients[n].bytes for n in bucket) for bucket in buckets)
    transfers = tuple(map(len, divisions[best]))
    return Choice(buckets, transfers, sizes, timelines[best], _reason(sizes, len(transfers), timelines[best], link))


def _split_by_kind(
    gradients: Sequence[Gradient], pieces: Sequence[Sequence[int]], whole: frozenset[str]
) -> list[Buckets]:
    """Each piece as buckets of one kind. A kind in ``whole`` has a single bucket, in the last piece that has it."""
    last = {gradients[n].kind: number for number, piece in enumerate(pieces) for n in piece}
    buckets: list[dict[str, list[int]]] = [{} for _ in pieces]
    for number, piece in enumerate(pieces):
        for n in piece:
            kind = gradients[n].kind
            buckets[last[kind] if kind in whole else number].setdefault(kind, []).append(n)
    return [sort_by_arrival(gradients, list(by_kind.values())) for by_kind in buckets if by_kind]


def _best_segments(
    gradients: Sequence[Gradient],
    link: Link,
    backward_seconds: float,
    largest: float,
    pack_bandwidth: float,
    slowdown: float,
) -> list[range]:
    """Divides ``gradients``, in order of arrival, where the pass ends soonest.

    Time is counted in seconds of computing: in this measure a transfer of T seconds lasts hides * T, and the rest,
    (1 - hides) * T, is added at the end. The first i gradients in k buckets are then fully described by the time at
    which the last of these buckets is ready, the sooner the better:

        end[k][j] = min over i of max(end[k - 1][i], packed[j]) + hides * seconds(bytes of i to j)

    end[k - 1] does not decrease with i. So among all i with end[k - 1][i] <= packed[j] the last is best, and among the
    others the one with the smallest end[k - 1][i] - hides * bytes[i] / bandwidth, the minimum of a sliding window. Each
    k therefore takes time linear in the number of gradients.
    """
    count = len(gradients)
    hides, latency, bandwidth = link.hides, link.latency, link.bandwidth
    before = [0.0]  # bytes of the first j gradients
    for gradient in gradients:
        before.append(before[-1] + gradient.bytes)
    total = before[count]
    packed = [0.0] + [slowdown * gradients[j - 1].ready + before[j] / pack_bandwidth for j in range(1, count + 1)]
    computing = max(slowdown * backward_seconds + total / pack_bandwidth, packed[count])
    first = [0] * (count + 1)  # the smallest i at which a bucket that ends at j may begin
    for j in range(1, count + 1):
        i = first[j - 1]
        while i < j - 1 and before[j] - before[i] > largest:
            i += 1
        first[j] = i

    def total_time(buckets: int, end: float) -> float:
        return max(end, computing) + (1.0 - hides) * (buckets * latency + total / bandwidth)

    def bound(buckets: int) -> float:
        """A lower bound for divisions into at least this many buckets."""
        last = packed[count] + hides * link.seconds(gradients[-1].bytes)
        return total_time(buckets, max(last, packed[1] + hides * (buckets * latency + total / bandwidth)))

    def limit(best: float) -> float:
        """The longest time that counts as equal to ``best``."""
        return best + SLACK * (best - backward_seconds) + SLACK_OF_BACKWARD * backward_seconds

    end = [math.inf] * (count + 1)
    end[0] = 0.0
    cuts: list[list[int]] = []
    totals: list[float] = []  # of the best division into 1, 2, ... buckets
    least = math.inf  # a lower bound for any number of buckets
    for buckets in range(1, count + 1):
        end, cut = _one_more_bucket(end, buckets, before, packed, first, link)
        cuts.append(cut)
        totals.append(total_time(buckets, end[count]))
        best = min(totals)
        least = min(best, bound(buckets + 1)) if buckets < min(count, MOST_BUCKETS) else best
        if best < math.inf and limit(least) >= best:
            break
    buckets = next(n for n, total_seconds in enumerate(totals, 1) if total_seconds <= limit(least))
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
    """``end`` for ``buckets``, from ``end`` for one bucket fewer; and for each j, the start i of its last bucket."""
    count = len(before) - 1
    per_byte = link.hides / link.bandwidth
    after, cut = [math.inf] * (count + 1), [0] * (count + 1)
    done = buckets - 2  # the last i whose buckets are ready before j is packed
    window: deque[int] = deque()  # other i, by increasing offset
    offset = [ended - per_byte * size for ended, size in zip(end, before)]
    for j in range(buckets, count + 1):
        while window and offset[window[-1]] >= offset[j - 1]:
            window.pop()
        window.append(j - 1)
        while done + 1 < j and end[done + 1] <= packed[j]:
            done += 1
        while window and (window[0] <= done or window[0] < first[j]):
            window.popleft()
        if done >= buckets - 1 and done >= first[j]:
            after[j], cut[j] = packed[j] - per_byte * before[done], done
        if window and offset[window[0]] < after[j]:
            after[j], cut[j] = offset[window[0]], window[0]
        after[j] += link.hides * link.latency + per_byte * before[j]
    return after, cut


def _reason(sizes: Sequence[float], transfers: int, timeline: Timeline, link: Link) -> str:
    *others, last = sizes
    division = f"one bucket of {byte_size(last)}"
    if others:
        low, high = byte_size(min(others)), byte_size(max(others))
        sizes_of_others = low if low == high else f"{low} to {high}"
        division = f"{len(sizes)} buckets: {sizes_of_others}, the last {byte_size(last)}"
    if transfers < len(sizes):
        assert link.grouped is not None
        count = "one transfer" if transfers == 1 else f"{transfers} transfers"
        division += f", in {count}, where each further bucket takes {duration(link.grouped)}"
    speed = f", during which backward runs at {link.hides:.0%} of its speed" if link.hides < 1 else ""
    return (
        f"{division}; an all-reduce takes {link}{speed}; backward takes {duration(timeline.alone)}, "
        f"and {duration(timeline.exposed)} more with the transfers"
    )
