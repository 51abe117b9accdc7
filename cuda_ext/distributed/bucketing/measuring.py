"""Measures the time of all-reduces on a process group, and fits a `Link` to it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from cuda_ext.distributed.bucketing.links import Link, fit

SMALLEST, LARGEST = 64 << 10, 16 << 20  # bytes; each size is twice the previous one
MOST_REPEATS = 5  # of each size
# The fraction of the budget for sizes; the rest is for the speed of computing during a transfer.
FRACTION_FOR_SIZES = 0.6
# A repeat is assumed to take at most this many times as long as the previous one.
SAFETY_FACTOR = 2.5

AllReduce = Callable[[Tensor], "dist.Work | None"]
AllReduceTogether = Callable[[Sequence[Tensor]], object]


@dataclass(frozen=True)
class Measurement:
    """The same on all ranks, bit for bit.

    seconds: the shortest time of an all-reduce of each of ``sizes`` bytes, on the slowest rank. error: as in
    `links.Fit`.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    link: Link
    error: float


def measure_link(
    group: dist.ProcessGroup,
    device: torch.device | str,
    all_reduce: AllReduce | None = None,
    budget_seconds: float = 1.0,
    buffer: Tensor | None = None,
    together: AllReduceTogether | None = None,
) -> Measurement:
    """Times all-reduces of 64 KiB to 16 MiB, and one during which each rank computes, and fits a `Link` to them.

    A collective: all ranks of the group call it, with equal arguments. After each all-reduce the first rank decides by
    its clock whether there is time for another one and which, and tells the others, so that all stop together. The
    smallest two sizes are measured at least once. For each repeat the slowest rank's time counts.

    Args:
        group: a single rank gets a link without cost.
        device: of the buffers; on CUDA, times are those of events in the current stream.
        all_reduce: sums a flat tensor over the group, in place, and returns its ``Work``, or None if it is done (on a
            GPU: in the order of the current stream). Default the group's all-reduce.
        budget_seconds: from the first all-reduce to the last, on the first rank; the time that a backend needs before
            its first collective, to connect ranks for example, is added.
        buffer: the tensor to sum, at least 128 KiB, overwritten; the time of a sum on a CPU depends on the dtype.
            Default zeros, 16 MiB of float32.
        together: sums several tensors in one transfer, and returns when ``all_reduce`` with None would. If given, two
            of 32 KiB are compared with one of 64 KiB, for ``Link.grouped``. Default None: one bucket per transfer.

    Raises ValueError for a budget that is not positive.
    """
    if not budget_seconds > 0:
        raise ValueError(f"measure_link: expected budget_seconds above 0, got {budget_seconds}")
    if group.size() == 1:
        return Measurement((), (), Link(0.0, math.inf), 0.0)
    device = torch.device(device)
    if buffer is None:
        buffer = torch.zeros(LARGEST // 4, device=device)
    meter = _Meter(group, device, all_reduce or (lambda tensor: group.allreduce([tensor])), buffer)
    with torch.no_grad():
        measurement = meter.measure(budget_seconds)
        if together is None:
            return measurement
        return replace(measurement, link=replace(measurement.link, grouped=meter.measure_grouped(together)))


class _Meter:
    def __init__(self, group: dist.ProcessGroup, device: torch.device, all_reduce: AllReduce, buffer: Tensor) -> None:
        self._group, self._device, self._all_reduce = group, device, all_reduce
        self._buffer = buffer
        self._sizes = [SMALLEST << n for n in range((min(LARGEST, buffer.nbytes) // SMALLEST).bit_length())]

    def measure(self, budget: float) -> Measurement:
        self._reduce(SMALLEST)  # the first one takes longer: connections, memory
        self._agreed(0)
        begin = time.perf_counter()
        times: list[list[float]] = [[] for _ in self._sizes]  # seconds of each size on this rank
        while (n := self._agreed(_next_size(times, begin + FRACTION_FOR_SIZES * budget))) >= 0:
            times[n].append(self._timed(partial(self._reduce, self._sizes[n])))
        seconds = self._of_slowest_rank(times)
        sizes = self._sizes[: len(seconds)]
        fitted = fit(sizes, seconds, self._measure_hides(sizes, seconds, begin + budget))
        # All ranks have the same times, but different CPUs may fit them differently.
        link = self._tensor([fitted.link.latency, fitted.link.bandwidth, fitted.link.hides, fitted.error])
        dist.broadcast(link, group=self._group, group_src=0)
        *values, error = link.tolist()
        return Measurement(tuple(sizes), tuple(seconds), Link(*values), error)

    def _measure_hides(self, sizes: list[int], seconds: list[float], end: float) -> float:
        """The speed of computing during a transfer, relative to the speed alone, on the slowest rank: 0 to 1."""
        multiply = _multiplication(self._device)
        multiply()
        once = min(self._timed(multiply) for _ in range(3))
        # Multiplications take 1.5 times as long as the transfer, so that it ends first when both run together.
        left = end - time.perf_counter()
        n = self._agreed(max((n for n, alone in enumerate(seconds) if SAFETY_FACTOR * 5 * alone <= left), default=0))
        count = math.ceil(1.5 * seconds[n] / once)
        transfer = partial(self._reduce, sizes[n])
        compute = partial(_repeat, multiply, count)
        both = partial(self._reduce, sizes[n], meanwhile=compute)
        # Other activity on the machine only adds time, so the shortest time of each of the three counts.
        computing = passing = together = math.inf
        done, repeat = 0, 0.0
        while self._agreed(done == 0 or (done < MOST_REPEATS and time.perf_counter() + SAFETY_FACTOR * repeat <= end)):
            begin = time.perf_counter()
            computing = min(computing, self._timed(compute))
            self._agreed(0)
            passing = min(passing, self._timed(transfer))
            self._agreed(0)
            together = min(together, self._timed(both))
            done, repeat = done + 1, time.perf_counter() - begin
        hides = self._tensor([(passing + computing - together) / passing])
        dist.all_reduce(hides, dist.ReduceOp.MIN, group=self._group)
        return min(1.0, max(0.0, hides.item()))

    def measure_grouped(self, together: AllReduceTogether) -> float:
        """Seconds that a second bucket adds to a transfer: two halves of the smallest size compared with one whole."""
        count = SMALLEST // self._buffer.itemsize
        halves = self._buffer[:count].chunk(2)
        times: list[list[float]] = [[], []]
        together(halves)  # the first one takes longer
        calls: list[Callable[[], object]] = [partial(self._reduce, SMALLEST), partial(together, halves)]
        for _ in range(MOST_REPEATS):
            for each, call in zip(times, calls):
                self._agreed(0)
                each.append(self._timed(call))
        alone, grouped = self._of_slowest_rank(times)
        return max(0.0, grouped - alone)

    def _reduce(self, size: int, meanwhile: Callable[[], None] | None = None) -> None:
        work = self._all_reduce(self._buffer[: size // self._buffer.itemsize])
        if meanwhile is not None:
            meanwhile()
        if work is not None:
            work.wait()

    def _timed(self, call: Callable[[], object]) -> float:
        if self._device.type != "cuda":
            begin = time.perf_counter()
            call()
            return time.perf_counter() - begin
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.device(self._device):
            start.record()
            call()
            stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) * 1e-3

    def _agreed(self, decision: int) -> int:
        """The first rank's ``decision``. Also a barrier: all ranks return when the last one has called it."""
        decided = torch.tensor(decision if self._group.rank() == 0 else 0, dtype=torch.int64, device=self._device)
        dist.all_reduce(decided, group=self._group)
        return int(decided.item())

    def _of_slowest_rank(self, times: list[list[float]]) -> list[float]:
        """The shortest repeat of each measured size; each repeat counts with the time of its slowest rank."""
        slowest = self._tensor([seconds for each in times for seconds in each])
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self._group)
        return [min(each).item() for each in slowest.split([len(each) for each in times if each])]

    def _tensor(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self._device)


def _next_size(times: list[list[float]], end: float) -> int:
    """Index of the size to time next: the smallest of those with the fewest repeats that fit before ``end``; or -1.

    In this order all sizes are affected by the same disturbances.
    """
    for n in sorted(range(len(times)), key=lambda n: len(times[n])):
        if n < 2 and not times[n]:
            return n
        if n and not times[n - 1]:
            continue
        expected = times[n][-1] if times[n] else 2 * times[n - 1][-1]
        if len(times[n]) < MOST_REPEATS and time.perf_counter() + SAFETY_FACTOR * expected <= end:
            return n
    return -1


def _multiplication(device: torch.device) -> Callable[[], object]:
    """A matrix multiplication, as in backward, of tens of microseconds."""
    rows, dtype = (2048, torch.bfloat16) if device.type == "cuda" else (128, torch.float32)
    generator = torch.Generator(device).manual_seed(0)  # the program's generator stays unchanged
    a, b = (torch.randn(rows, rows, dtype=dtype, device=device, generator=generator) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def _repeat(call: Callable[[], object], count: int) -> None:
    for _ in range(count):
        call()
