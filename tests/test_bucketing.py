"""The cost model of gradient buckets: against brute force, closed forms and published algorithms, on random inputs."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from conftest import ROOT

from cuda_ext.distributed.bucketing.assignment import fill, fixed_capacity
from cuda_ext.distributed.bucketing.choice import choose
from cuda_ext.distributed.bucketing.links import Hop, Link, fit, ring, tree, two_level
from cuda_ext.distributed.bucketing.simulation import Gradient, in_order, simulate, slowest, spread
from cuda_ext.distributed.bucketing.units import byte_rate, byte_size, duration

Buckets = Sequence[Sequence[int]]
NVLINK = Link(79e-6, 278e9)  # a fit to NCCL on 8 GPUs of one node
STEPS = 5000  # of a simulated backward pass


def random_gradients(count: int, backward_seconds: float, kinds: Sequence[str] = ("",)) -> list[Gradient]:
    """Unordered; sizes over three orders of magnitude, some ready at the same time."""
    moments = [random.uniform(0, backward_seconds) for _ in range(max(1, count - count // 4))]
    return [
        Gradient(f"g{n}", math.ceil(10 ** random.uniform(3, 6)), random.choice(moments), random.choice(kinds))
        for n in range(count)
    ]


def random_link() -> Link:
    return Link(10 ** random.uniform(-6, -3), 10 ** random.uniform(6.5, 9), random.choice((0, 1, random.random())))


def random_cut(gradients: Sequence[Gradient]) -> list[list[int]]:
    order = in_order(gradients)
    cuts = sorted(random.sample(range(1, len(order)), random.randrange(len(order)))) if len(order) > 1 else []
    return [order[i:j] for i, j in itertools.pairwise([0, *cuts, len(order)])]


def every_division(gradients: Sequence[Gradient], largest: float) -> Iterator[list[list[int]]]:
    """All divisions that keep the order of arrival."""
    order = in_order(gradients)
    for chosen in itertools.product((False, True), repeat=len(order) - 1):
        cuts = [0, *(n for n, cut in enumerate(chosen, 1) if cut), len(order)]
        division = [order[i:j] for i, j in itertools.pairwise(cuts)]
        if all(len(bucket) == 1 or sum(gradients[n].bytes for n in bucket) <= largest for bucket in division):
            yield division


def stepped(
    gradients: Sequence[Gradient], buckets: Buckets, link: Link, backward_seconds: float, pack_bandwidth: float
) -> tuple[list[list[float]], float, float]:
    """[packed, sent, ready] of each bucket, the end of backward and of all, by simulation in small time steps.

    One processor computes backward, and stops it for each bucket that is complete, to pack it.
    """
    step = backward_seconds / STEPS
    now = computed = 0.0
    packing = 0.0  # seconds left of the bucket being packed
    running = 0.0  # seconds left of the transfer that runs
    events: list[list[float]] = [[] for _ in buckets]
    packed = sent = ready = 0
    end = math.nan
    sizes = [sum(gradients[n].bytes for n in bucket) for bucket in buckets]
    being_packed = False
    while ready < len(buckets) or math.isnan(end):
        if running <= 0 and sent > ready:
            events[ready].append(now)
            ready += 1
        if sent == ready and sent < packed:
            events[sent].append(now)
            running = link.seconds(sizes[sent])
            sent += 1
        if being_packed and packing <= 0:
            events[packed].append(now)
            packed += 1
            being_packed = False
            continue
        come = packed < len(buckets) and all(gradients[n].ready <= computed + 1e-12 for n in buckets[packed])
        if come and not being_packed:
            being_packed, packing = True, sizes[packed] / pack_bandwidth
            continue
        if math.isnan(end) and not being_packed and computed >= backward_seconds - 1e-12:
            end = now
        speed = link.hides if sent > ready else 1.0
        if being_packed:
            packing -= speed * step
        else:
            computed += speed * step
        running -= step
        now += step
    return events, end, max(now, end)


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("trial", range(12))
def test_simulation_against_small_steps(trial: int, packs: bool) -> None:
    # If transfers stop backward, a gradient within a time step of the end would make the end depend on rounding.
    gradients = random_gradients(random.randint(1, 12), 0.0098)
    total = sum(gradient.bytes for gradient in gradients)
    link = Link(random.uniform(0, 1e-3), total / random.uniform(0.001, 0.02), random.choice((0, 1, random.random())))
    pack_bandwidth = total / 0.002 if packs else math.inf
    buckets = random_cut(gradients)
    if trial % 2:
        random.shuffle(buckets)  # as if gradients arrive in an unexpected order
    timeline = simulate(gradients, buckets, link, 0.01, pack_bandwidth=pack_bandwidth)
    events, end, total_seconds = stepped(gradients, buckets, link, 0.01, pack_bandwidth)
    tolerance = 0.01 / STEPS * (4 * len(buckets) + 4)  # each event is noticed up to a step late
    for transfer, expected in zip(timeline.transfers, events, strict=True):
        assert (transfer.packed, transfer.sent, transfer.ready) == pytest.approx(expected, abs=tolerance)
    assert timeline.computed == pytest.approx(end, abs=tolerance)
    assert timeline.total == pytest.approx(total_seconds, abs=tolerance)
    assert timeline.exposed == pytest.approx(timeline.total - 0.01)


def test_simulation_by_hand() -> None:
    gradients = [Gradient("a", 100, 1.0), Gradient("b", 300, 2.0), Gradient("c", 100, 4.0)]
    beside = simulate(gradients, [[0], [1], [2]], Link(0.5, 100), 4.0)
    assert [(t.packed, t.sent, t.ready) for t in beside.transfers] == [(1, 1, 2.5), (2, 2.5, 6), (4, 6, 7.5)]
    assert (beside.computed, beside.total, beside.exposed) == (4, 7.5, 3.5)
    # Backward stops during transfers, which always run from 1 s on.
    instead = simulate(gradients, [[0], [1], [2]], Link(0.5, 100, hides=False), 4.0)
    assert [(t.packed, t.sent, t.ready) for t in instead.transfers] == [(1, 1, 2.5), (3.5, 3.5, 7), (9, 9, 10.5)]
    assert instead.exposed == 6.5
    half = simulate(gradients, [[0], [1], [2]], Link(0.5, 100, hides=0.5), 4.0)
    assert [(t.packed, t.sent, t.ready) for t in half.transfers] == [(1, 1, 2.5), (2.75, 2.75, 6.25), (6.5, 6.5, 8)]
    late = simulate(gradients, [[0, 1, 2]], Link(0.5, 100), 5.0, pack_bandwidth=1000, slowdown=1.5)
    assert [(t.packed, t.sent, t.ready) for t in late.transfers] == [(6.5, 6.5, 12)]
    assert (late.computed, late.exposed) == (8, 7)


def test_transfers_that_hide_nothing_cost_all_their_time() -> None:
    gradients, link = random_gradients(40, 0.1), random_link()
    buckets = random_cut(gradients)
    timeline = simulate(gradients, buckets, Link(link.latency, link.bandwidth, hides=0), 0.1)
    assert timeline.exposed == pytest.approx(sum(link.seconds(transfer.bytes) for transfer in timeline.transfers))


@pytest.mark.parametrize("trial", range(20))
def test_a_better_link_never_exposes_more(trial: int) -> None:
    gradients, link = random_gradients(30, 0.1), random_link()
    buckets = random_cut(gradients)

    def exposed(**changes: float) -> float:
        values = {"latency": link.latency, "bandwidth": link.bandwidth, "hides": link.hides} | changes
        return simulate(gradients, buckets, Link(**values), 0.1).exposed

    rounding = 1e-12
    assert exposed(bandwidth=link.bandwidth * 1.7) <= exposed() + rounding
    assert exposed(latency=link.latency / 1.7) <= exposed() + rounding
    assert exposed(hides=(link.hides + 1) / 2) <= exposed() + rounding
    assert exposed(bandwidth=math.inf, latency=0) == pytest.approx(0, abs=rounding)


# choice


@pytest.mark.parametrize("trial", range(60))
def test_choice_is_the_best_of_all_divisions(trial: int) -> None:
    backward = 0.01
    gradients = random_gradients(random.randint(1, 9), backward)
    total = sum(gradient.bytes for gradient in gradients)
    link = Link(random.choice((0, 1e-5, 1e-3)), total / random.uniform(0.001, 0.03), random.choice((0, 0.4, 1)))
    largest = random.choice((math.inf, total / 2, total / 5))
    options = {"pack_bandwidth": random.choice((math.inf, total / 0.001)), "slowdown": random.choice((1.0, 1.1))}
    choice = choose(gradients, link, backward, largest=largest, **options)
    best = min(
        simulate(gradients, division, link, backward, **options).exposed
        for division in every_division(gradients, largest)
    )
    assert best - 1e-12 <= choice.exposed <= best * 1.01 + 1e-4 * backward + 1e-12
    assert list(choice.buckets) in [
        [tuple(bucket) for bucket in division] for division in every_division(gradients, largest)
    ]


@pytest.mark.parametrize("trial", range(10))
def test_choice_is_never_worse_than_a_uniform_size(trial: int) -> None:
    backward = 10 ** random.uniform(-2, 0)
    gradients, link = random_gradients(300, backward), random_link()
    largest = 1e7
    exposed = choose(gradients, link, backward, largest=largest).exposed
    for capacity in (largest / 2**n for n in range(14)):
        uniform = simulate(gradients, fill(gradients, fixed_capacity(capacity)), link, backward).exposed
        assert exposed <= uniform * 1.01 + 1e-4 * backward


def test_best_uniform_size_by_the_closed_form() -> None:
    """If the network is the bottleneck, b* = G * sqrt(latency / B): only the first bucket waits for backward."""
    total, backward, link = 2.6e9, 0.2, Link(75e-6, 8e9)
    gradients = spread([(str(n), total / 4000) for n in range(4000)], backward)
    exposed = {}
    for count in (5, 10, 20, 40, 50, 80, 100, 200, 400):
        capacity = total / count
        timeline = simulate(gradients, fill(gradients, fixed_capacity(capacity * 1.0001)), link, backward)
        assert len(timeline.transfers) == count
        assert timeline.total == pytest.approx(backward / count + count * link.latency + total / link.bandwidth)
        exposed[capacity] = timeline.exposed
    closed = total * math.sqrt(link.latency / backward)
    assert min(exposed, key=exposed.__getitem__) == pytest.approx(closed, rel=0.05)
    # Growing buckets are better: a small first one starts the network early.
    choice = choose(gradients, link, backward, largest=math.inf)
    assert choice.exposed < min(exposed.values())
    assert choice.timeline.transfers[0].bytes < closed / 2


def test_small_last_bucket_behind_large_ones_where_the_network_is_fast() -> None:
    gradients = spread([(str(n), 1e6) for n in range(2600)], 0.2)
    choice = choose(gradients, NVLINK, 0.2)
    sizes = [transfer.bytes for transfer in choice.timeline.transfers]
    assert sizes == sorted(sizes, reverse=True) and choice.last == sizes[-1] <= 8e6
    assert 64e6 < choice.largest == sizes[0] == sizes[-5] <= 8 * NVLINK.latency * NVLINK.bandwidth
    assert choice.exposed < 1.5 * NVLINK.latency
    smaller = choose(gradients, NVLINK, 0.2, largest=2e7)
    assert smaller.largest <= 2e7 < choice.largest


def test_one_bucket_where_nothing_hides() -> None:
    choice = choose(random_gradients(50, 0.1), Link(1e-3, 1e9, hides=False), 0.1)
    assert len(choice.buckets) == 1
    assert choice.exposed == pytest.approx(1e-3 + choice.last / 1e9)


@pytest.mark.sampled
def test_choice_depends_on_its_arguments_alone() -> None:
    gradients, link = random_gradients(200, 0.1, kinds=("a", "b")), random_link()
    choice = choose(gradients, link, 0.1)
    assert choose(list(gradients), link, 0.1) == choice
    program = (
        "from cuda_ext.distributed.bucketing.choice import Gradient, Link, choose\n"
        f"choice = choose({gradients!r}, {link!r}, 0.1)\n"
        "print((choice.buckets, choice.timeline.total, choice.reason))"
    )
    other = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert other.stdout == f"{(choice.buckets, choice.timeline.total, choice.reason)}\n", other.stderr


@pytest.mark.parametrize("trial", range(10))
def test_kinds_travel_apart(trial: int) -> None:
    kinds = ("float32", "bfloat16", "float64")[: random.randint(2, 3)]
    gradients, link = random_gradients(60, 0.05, kinds), random_link()
    for buckets in (choose(gradients, link, 0.05).buckets, fill(gradients, fixed_capacity(3e6))):
        assert sorted(itertools.chain(*buckets)) == list(range(60))
        for bucket in buckets:
            assert len({gradients[n].kind for n in bucket}) == 1
        arrivals = [max(gradients[n].ready for n in bucket) for bucket in buckets]
        assert arrivals == sorted(arrivals)


def test_a_small_kind_goes_in_one_piece() -> None:
    gradients = [Gradient(str(n), 1e7, n / 100, "bfloat16") for n in range(1, 100)]
    norms = [Gradient(f"norm {n}", 1e3, n / 100, "float32") for n in range(1, 100)]
    choice = choose([*gradients, *norms], Link(1e-3, 1e9), 1.0)
    assert len(choice.buckets) > 5
    assert sum(bucket[0] >= 99 for bucket in choice.buckets) == 1


def test_transfers_by_hand() -> None:
    """Two kinds that are ready at once: one transfer saves a latency, and costs what the second bucket adds."""
    gradients = [Gradient("a", 100, 1.0, "bfloat16"), Gradient("b", 20, 1.0, "float32")]
    for grouped, transfers, exposed in ((None, (1, 1), 2.2), (0.0, (2,), 1.7), (0.2, (2,), 1.9), (0.6, (1, 1), 2.2)):
        choice = choose(gradients, Link(0.5, 100, grouped=grouped), 1.0)
        assert choice.transfers == transfers and choice.buckets == ((0,), (1,)), grouped
        assert choice.exposed == pytest.approx(exposed)
        assert (choice.last, choice.largest) == (20, 100)
        assert ("2 buckets: 100 B, the last 20 B, in one transfer, where" in choice.reason) == (transfers == (2,))
    # A transfer waits for all of its buckets. If the network is busy longer, the first bucket is sent at once.
    early = [Gradient("a", 100, 0.1, "bfloat16"), Gradient("b", 20, 1.0, "float32")]
    choice = choose(early, Link(0.5, 100, grouped=0.0), 1.0)
    assert choice.transfers == (1, 1)
    assert choice.exposed == pytest.approx(1.3)


@pytest.mark.parametrize("trial", range(10))
def test_groups_are_used_only_if_they_are_faster(trial: int) -> None:
    gradients = random_gradients(60, 0.05, ("float32", "bfloat16", "float64")[: random.randint(2, 3)])
    link = random_link()
    apart = choose(gradients, link, 0.05)
    assert apart.transfers == (1,) * len(apart.buckets)
    for part in (0.0, 0.5, 1.0, 2.0):
        choice = choose(gradients, replace(link, grouped=part * link.latency), 0.05)
        assert sum(choice.transfers) == len(choice.buckets) == len(choice.sizes)
        assert sorted(itertools.chain(*choice.buckets)) == list(range(60))
        assert choice.exposed <= apart.exposed + 1e-12
        if max(choice.transfers) > 1:
            assert choice.exposed < apart.exposed
        begin = 0
        for count in choice.transfers:
            kinds = [gradients[bucket[0]].kind for bucket in choice.buckets[begin : begin + count]]
            assert len(set(kinds)) == count
            begin += count


def test_fill() -> None:
    gradients = [Gradient(str(size), size, ready) for ready, size in enumerate((20, 20, 100, 20, 20, 0))]
    assert fill(gradients, fixed_capacity(40)) == [[0, 1], [2], [3, 4, 5]]
    assert fill(gradients, fixed_capacity(1000)) == [[0, 1, 2, 3, 4, 5]]
    assert fill(gradients[::-1], fixed_capacity(1000)) == [[5, 4, 3, 2, 1, 0]]
    mixed = [Gradient("", 4, ready, "ab"[ready % 2]) for ready in range(6)]
    assert fill(mixed, fixed_capacity(8)) == [[0, 2], [1, 3], [4], [5]]


def test_nothing_to_choose_from() -> None:
    with pytest.raises(ValueError, match="choose: expected at least one gradient, got none"):
        choose([], NVLINK, 1.0)
    assert spread([], 1.0) == []
    empty = spread([("a", 0), ("b", 0)], 1.0)
    assert choose(empty, NVLINK, 1.0).buckets == ((0, 1),)
    free = choose(random_gradients(10, 1.0), Link(0.0, math.inf), 1.0)
    assert free.exposed == 0


def test_many_gradients_take_seconds() -> None:
    gradients = spread([(str(n), 1e5) for n in range(10_000)], 0.2)
    begin = time.perf_counter()
    choice = choose(gradients, NVLINK, 0.2)
    simulate(gradients, fill(gradients, fixed_capacity(1e7)), NVLINK, 0.2)
    assert time.perf_counter() - begin < 30  # 0.6 s on an idle core
    assert sum(map(len, choice.buckets)) == 10_000


def test_reason_is_one_line_of_what_was_found() -> None:
    gradients = spread([(str(n), 1 << 20) for n in range(2500)], 0.2)
    reason = choose(gradients, NVLINK, 0.2).reason
    assert "buckets: " in reason and ", the last " in reason and "\n" not in reason
    assert "an all-reduce takes 79 us + size / (278 GB/s); backward takes 200 ms, and " in reason
    one = choose(gradients[:1], Link(1e-3, 1e9, 0.25), 0.2).reason
    assert one.startswith(
        "one bucket of 1 MiB; an all-reduce takes 1 ms + size / (1 GB/s), during which backward runs at 25% of its "
        "speed; backward takes 200 ms, and "
    )


# fit


@pytest.mark.parametrize("trial", range(10))
def test_fit_finds_a_known_link(trial: int) -> None:
    """From nine sizes, five times each; a tenth of the times are outliers, the others up to 2 % too long."""
    sizes = [2.0**n for n in range(16, 25)]
    latency = 10 ** random.uniform(-5, -3)
    bandwidth = 2**20 / latency * random.uniform(0.2, 5)  # so that both affect the times
    link = Link(latency, bandwidth)
    times = [(size, link.seconds(size) * (1 + 0.02 * random.random())) for size in sizes for _ in range(5)]
    times = [(size, time * random.choice([1] * 9 + [20])) for size, time in times]
    spoiled = random.choice(sizes[1:-1])  # all of its repeats are outliers
    times = [(size, time * 3 if size == spoiled else time) for size, time in times]
    found = fit(*zip(*times), hides=0.5)
    assert found.link.latency == pytest.approx(latency, rel=0.1)
    assert found.link.bandwidth == pytest.approx(bandwidth, rel=0.1)
    assert found.link.hides == 0.5
    assert found.error < 0.02


def test_fit_of_exact_times_is_exact() -> None:
    link = random_link()
    sizes = sorted(random.sample(range(10**4, 10**8), 6))
    found = fit(sizes, [link.seconds(size) for size in sizes])
    assert (found.link.latency, found.link.bandwidth) == pytest.approx((link.latency, link.bandwidth), rel=1e-6)
    assert found.error < 1e-9


def test_fit_is_never_negative() -> None:
    steeper = fit([1e5, 2e5, 4e5, 8e5], [1e-4, 3e-4, 9e-4, 2.7e-3])
    assert steeper.link.latency == 0 and 0 < steeper.link.bandwidth < math.inf
    falling = fit([1e5, 2e5, 4e5], [3e-3, 2e-3, 1e-3])
    assert falling.link.bandwidth == math.inf and 1e-3 <= falling.link.latency <= 3e-3
    assert falling.error > 0.1
    for _ in range(100):
        noise = fit([2.0**n for n in range(6)], [10 ** random.uniform(-4, -2) for _ in range(6)]).link
        assert noise.latency >= 0 and noise.bandwidth > 0 and noise.seconds(1e6) > 0


@pytest.mark.parametrize(
    ("sizes", "seconds", "complaint"),
    [
        ([1e6], [1e-3], "expected at least two different sizes, got 1"),
        ([1e6, 1e6], [1e-3, 2e-3], "expected at least two different sizes, got 1"),
        ([1e6, 2e6], [1e-3, 0.0], "expected positive finite sizes and seconds, got 2000000.0 bytes in 0.0 s"),
        ([1e6, 2e6], [1e-3, math.nan], "expected positive finite"),
        ([0, 2e6], [1e-3, 1e-3], "expected positive finite"),
    ],
)
def test_fit_refuses(sizes: list[float], seconds: list[float], complaint: str) -> None:
    with pytest.raises(ValueError, match=f"fit: {complaint}"):
        fit(sizes, seconds)


# networks


def simulated_ring(ranks: int, size: float, hop: Hop) -> float:
    """Seconds of a ring all-reduce in which every rank sends a chunk to the next one in each step."""
    arrived = [0.0] * ranks
    for _ in range(2 * (ranks - 1)):
        sent = [time + hop.latency + size / ranks / hop.bandwidth for time in arrived]
        arrived = [max(sent[rank - 1], arrived[rank]) for rank in range(ranks)]
    return max(arrived)


def test_algorithms() -> None:
    hop = Hop(random.uniform(1e-6, 1e-5), random.uniform(1e9, 1e11))
    for ranks in (2, 3, 7, 64):
        assert ring(ranks, hop).seconds(1e7) == pytest.approx(simulated_ring(ranks, 1e7, hop))
    assert ring(1024, hop).latency == pytest.approx(2046 * hop.latency)
    assert tree(1024, hop).latency == pytest.approx(20 * hop.latency)
    assert tree(1025, hop).latency == pytest.approx(22 * hop.latency)
    for algorithm in (ring, tree):
        assert algorithm(1, hop).seconds(1e9) == 0
        # Each byte leaves and enters every rank about twice.
        assert algorithm(1024, hop).bandwidth == pytest.approx(hop.bandwidth / 2, rel=1e-3)


def test_two_levels() -> None:
    inside, across = Hop(1e-6, 400e9), Hop(5e-6, 50e9)
    assert two_level(8, 8, inside, across) == ring(8, inside)
    assert two_level(4, 8, inside, across) == ring(4, inside)
    assert two_level(64, 1, inside, across) == ring(64, across)
    link = two_level(64, 8, inside, across, "tree")
    size = 1e8
    halves = 2 * (7 * inside.latency + 7 / 8 * size / inside.bandwidth)
    assert link.seconds(size) == pytest.approx(halves + tree(8, across).seconds(size / 8))
    # With 60 ranks the last node has 4 ranks and 4 links.
    link = two_level(60, 8, inside, across)
    halves = 2 * (7 * inside.latency + 7 / 8 * size / inside.bandwidth)
    assert link.seconds(size) == pytest.approx(halves + ring(8, across).seconds(size / 4))


def test_the_slowest_of_many_ranks() -> None:
    assert slowest(1024, 0.0) == 1.0
    assert slowest(64, 0.03, seed=5) == slowest(64, 0.03, seed=5)
    assert slowest(64, 0.03, seed=5) != slowest(64, 0.03, seed=6)
    drawn = statistics.fmean(max(random.gauss(1.0, 0.03) for _ in range(100)) for _ in range(2000))
    assert slowest(100, 0.03, seed=random.getrandbits(30)) == pytest.approx(drawn, abs=0.03 * 0.1)
    assert slowest(1, 0.03, steps=4000) == pytest.approx(1.0, abs=0.03 * 0.1)
    growing = [slowest(ranks, 0.03) for ranks in (1, 8, 64, 512, 4096)]
    assert growing == sorted(growing) and growing[-1] == pytest.approx(1 + 0.03 * 3.6, abs=0.03 * 0.2)


def test_text() -> None:
    assert [duration(seconds) for seconds in (2.5, 0.0123, 79e-6, 0, 1e-9)] == [
        "2.5 s",
        "12.3 ms",
        "79 us",
        "0 us",
        "0.001 us",
    ]
    assert [byte_size(count) for count in (0, 1023, 1536, 1023 << 10, 3 << 30)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "1023 KiB",
        "3 GiB",
    ]
    assert [byte_rate(rate) for rate in (278e9, 2e12, 12.5e6)] == ["278 GB/s", "2 TB/s", "12.5 MB/s"]
