from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor

from cuda_ext.distributed.bucketing import measuring
from cuda_ext.distributed.bucketing.links import Link
from cuda_ext.distributed.bucketing.measuring import Measurement, measure_link


@dataclass
class Sleeps:
    """A handle of a transfer that ends at ``end``, independent of the CPU's work."""

    end: float

    def wait(self) -> None:
        time.sleep(max(0.0, self.end - time.perf_counter()))


class PretendedLink:
    """An all-reduce that transfers nothing and takes the time of ``link``."""

    def __init__(self, link: Link, blocks: bool = False) -> None:
        self.link, self.blocks = link, blocks
        self.asked = 0.0  # seconds of all transfers together
        self.largest = 0

    def __call__(self, tensor: Tensor) -> Sleeps | None:
        seconds = self.link.seconds(tensor.nbytes)
        self.asked += seconds
        self.largest = max(self.largest, tensor.nbytes)
        work = Sleeps(time.perf_counter() + seconds)
        return work.wait() if self.blocks else work


def idle_computing(device: torch.device) -> Callable[[], object]:
    """Sleeps instead of computing, so that ranks on the same cores do not disturb each other."""
    return lambda: time.sleep(0.01)


def assert_same_on_all_ranks(measurement: Measurement) -> None:
    everyone: list[Measurement | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, measurement)
    assert everyone == [measurement] * dist.get_world_size()


def measured(all_reduce: PretendedLink, budget_seconds: float = 2.0) -> Measurement:
    assert dist.group.WORLD is not None
    with mock.patch.object(measuring, "_multiplication", idle_computing):
        measurement = measure_link(dist.group.WORLD, "cpu", all_reduce, budget_seconds)  # type: ignore[arg-type]
    assert_same_on_all_ranks(measurement)
    return measurement


def check_gloo(budget_seconds: float) -> None:
    generator = torch.get_rng_state()
    measurement = measure_link(dist.group.WORLD, "cpu", budget_seconds=budget_seconds)
    assert_same_on_all_ranks(measurement)
    assert torch.equal(torch.get_rng_state(), generator)
    assert list(measurement.sizes) == [measuring.SMALLEST << n for n in range(len(measurement.sizes))]
    assert len(measurement.sizes) == len(measurement.seconds) >= 2
    link = measurement.link
    assert link.latency >= 0 and link.bandwidth > 0 and 0 <= link.hides <= 1 and measurement.error >= 0
    if budget_seconds == 1.0:
        # Other processes disturb the times, but not by orders of magnitude.
        assert 1e-5 < link.seconds(64 << 10) < 0.3
        assert 1e-3 < link.seconds(16 << 20) < 3


@on_ranks(2)
@pytest.mark.parametrize("budget_seconds", [1.0, 1e-6])
def test_gloo_on_two_ranks(budget_seconds: float) -> None:
    check_gloo(budget_seconds)


@on_ranks(4)
def test_gloo_on_four_ranks() -> None:
    check_gloo(1.0)


@on_ranks(2)
def test_own_all_reduce_and_buffer() -> None:
    seen = set()

    def all_reduce(tensor: Tensor) -> None:
        seen.add((tensor.dtype, tensor.numel() * 2))
        dist.all_reduce(tensor)

    buffer = torch.zeros(3 << 18, dtype=torch.bfloat16)  # 1.5 MiB
    measurement = measure_link(dist.group.WORLD, "cpu", all_reduce, budget_seconds=0.3, buffer=buffer)
    assert_same_on_all_ranks(measurement)
    assert seen >= {(torch.bfloat16, size) for size in measurement.sizes}
    assert max(measurement.sizes) <= buffer.nbytes


@on_ranks(2)
def test_known_link_is_found() -> None:
    beside = PretendedLink(Link(10e-3, 2e9))
    measurement = measured(beside)
    assert measurement.sizes[-1] == beside.largest == 16 << 20
    assert measurement.link.latency == pytest.approx(10e-3, rel=0.25)
    assert measurement.link.bandwidth == pytest.approx(2e9, rel=0.25)
    assert measurement.link.hides > 0.6


@on_ranks(2)
def test_all_reduce_that_blocks_hides_nothing() -> None:
    assert measured(PretendedLink(Link(10e-3, 2e9), blocks=True)).link.hides < 0.4


@on_ranks(2)
def test_times_of_the_slowest_rank_count() -> None:
    slow = dist.get_rank() == 1
    link = measured(PretendedLink(Link(12e-3 if slow else 1e-3, 4e9), blocks=slow)).link
    assert link.latency == pytest.approx(12e-3, rel=0.25)
    assert link.hides < 0.4


@on_ranks(2)
@pytest.mark.parametrize("another", [-1e-3, 4e-3])
def test_what_a_second_bucket_adds_to_a_transfer(another: float) -> None:
    """The time on the slowest rank; at least 0."""
    link = PretendedLink(Link(5e-3, 2e9))
    asked = []

    def together(tensors: Sequence[Tensor]) -> None:
        asked.append([tensor.nbytes for tensor in tensors])
        slower = another if dist.get_rank() == 1 else 0.0
        time.sleep(link.link.seconds(sum(tensor.nbytes for tensor in tensors)) + slower)

    with mock.patch.object(measuring, "_multiplication", idle_computing):
        measurement = measure_link(dist.group.WORLD, "cpu", link, 0.3, together=together)  # type: ignore[arg-type]
    assert_same_on_all_ranks(measurement)
    assert asked and all(sizes == [32 << 10, 32 << 10] for sizes in asked)
    assert measurement.link.grouped == pytest.approx(max(another, 0.0), abs=1.5e-3)


@on_ranks(4)
def test_the_first_rank_decides_when_time_is_up() -> None:
    wants_to_leave = mock.patch.object(measuring, "_next_size", return_value=-1)
    if dist.get_rank() > 0:
        wants_to_leave.start()
    try:
        assert len(measured(PretendedLink(Link(1e-4, 1e10))).sizes) == 9
    finally:
        mock.patch.stopall()


@on_ranks(2)
@pytest.mark.parametrize("bandwidth", [2e7, 5e8])
def test_slow_link_stays_within_the_budget(bandwidth: float) -> None:
    """One repeat of all sizes would take 1.7 s, or 0.07 s."""
    link = PretendedLink(Link(1e-3, bandwidth))
    measurement = measured(link, budget_seconds=0.5)
    assert link.asked < 0.5
    assert len(measurement.sizes) >= 2 and (link.largest == 16 << 20) == (bandwidth == 5e8)
    assert measurement.link.bandwidth == pytest.approx(bandwidth, rel=0.3)


@on_ranks(2)
def test_two_sizes_are_measured_whatever_they_take() -> None:
    link = PretendedLink(Link(0.02, 1e7))
    assert measured(link, budget_seconds=1e-3).sizes == (64 << 10, 128 << 10)
    assert link.asked < 6 * link.link.seconds(128 << 10)


def test_one_rank_has_nothing_to_measure(group: None) -> None:
    link = PretendedLink(Link(1, 1))
    assert measure_link(dist.group.WORLD, "cpu", link) == Measurement((), (), Link(0.0, math.inf), 0.0)  # type: ignore[arg-type]
    assert link.asked == 0


@pytest.mark.parametrize("budget_seconds", [0.0, -1.0, math.nan])
def test_budget_has_to_be_positive(group: None, budget_seconds: float) -> None:
    with pytest.raises(ValueError, match="measure_link: expected budget_seconds above 0, got"):
        measure_link(dist.group.WORLD, "cpu", budget_seconds=budget_seconds)
