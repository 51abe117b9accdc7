"""Measures what all-reduces of a group take, for `cuda_ext.distributed.planning.choice`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from cuda_ext.distributed.planning.links import Link, fit

SMALLEST, LARGEST = 64 << 10, 16 << 20  # bytes; each size is twice the one before
TURNS = 5  # at most, of each size
# The part of the budget for sizes; the rest is to see how fast a rank computes beside a transfer.
PART_OF_SIZES = 0.6
# The next time of a kind may be that much longer than the last.
CAUTION = 2.5

AllReduce = Callable[[Tensor], "dist.Work | None"]
AllReduceTogether = Callable[[Sequence[Tensor]], object]


@dataclass(frozen=True)
class Measurement:
    """``seconds``: shortest time of an all-reduce of each of ``sizes`` bytes on the slowest rank; ``error`` as of
    `cost_model.fit`. The same on all ranks, bit for bit.
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
    """Times all-reduces of 64 KiB to 16 MiB, and one beside which each rank computes, and fits a `Link` to them.

    A collective: all ranks of the group call it, with equal arguments. After each all-reduce the first rank decides by
    its clock whether there is time for another and which, and tells the others, so that none leaves early. The smallest
    two sizes are measured in any case, once. Of each repeat the slowest rank's time counts.

    Args:
        group: a single rank gets a link that costs nothing.
        device: where the buffers are; of CUDA, times are those of events on the current stream.
        all_reduce: sums a flat tensor over the group, in place, and returns its ``Work``, or None if it is done (on a
            GPU: in the current stream's order). Default that of the group.
        budget_seconds: from the first all-reduce to the last, on the first rank. What a backend does before its first
            collective, such as connecting ranks, comes on top.
        buffer: what is summed, of at least 128 KiB, overwritten; of another dtype sums take a processor longer or
            shorter. Default zeros, 16 MiB of float32.
        together: sums several tensors as one launch, and returns when they are done as ``all_reduce`` with None. If
            given, two of 32 KiB are timed against one of 64 KiB, for ``Link.grouped``. Default None: buckets go one by
            one.

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
        return replace(measurement, link=replace(measurement.link, grouped=meter.another(together)))


class _Meter:
    def __init__(self, group: dist.ProcessGroup, device: torch.device, all_reduce: AllReduce, buffer: Tensor) -> None:
        self._group, self._device, self._all_reduce = group, device, all_reduce
        self._buffer = buffer
        self._sizes = [SMALLEST << n for n in range((min(LARGEST, buffer.nbytes) // SMALLEST).bit_length())]

    def measure(self, budget: float) -> Measurement:
        self._reduce(SMALLEST)  # the first of all takes longer: connections, memory
        self._agreed(0)
        begin = time.perf_counter()
        turns: list[list[float]] = [[] for _ in self._sizes]  # seconds of each size on this rank
        while (n := self._agreed(_next_size(turns, begin + PART_OF_SIZES * budget))) >= 0:
            turns[n].append(self._timed(partial(self._reduce, self._sizes[n])))
        seconds = self._of_slowest_rank(turns)
        sizes = self._sizes[: len(seconds)]
        fitted = fit(sizes, seconds, self._hiding(sizes, seconds, begin + budget))
        # All ranks have the same times, but perhaps not the same processors.
        link = self._tensor([fitted.link.latency, fitted.link.bandwidth, fitted.link.hides, fitted.error])
        dist.broadcast(link, group=self._group, group_src=0)
        *values, error = link.tolist()
        return Measurement(tuple(sizes), tuple(seconds), Link(*values), error)

    def _hiding(self, sizes: list[int], seconds: list[float], end: float) -> float:
        """How fast the slowest rank computes while a transfer runs, as part of its speed alone: 0 to 1."""
        multiply = _multiplication(self._device)
        multiply()
        once = min(self._timed(multiply) for _ in range(3))
        # Multiplications take half as long again as the transfer, which therefore ends first when both go together.
        left = end - time.perf_counter()
        n = self._agreed(max((n for n, alone in enumerate(seconds) if CAUTION * 5 * alone <= left), default=0))
        count = math.ceil(1.5 * seconds[n] / once)
        transfer = partial(self._reduce, sizes[n])
        compute = partial(_repeat, multiply, count)
        both = partial(self._reduce, sizes[n], meanwhile=compute)
        # What else a machine does only adds: of each of the three the shortest time counts.
        computing = passing = together = math.inf
        done, turn = 0, 0.0
        while self._agreed(done == 0 or (done < TURNS and time.perf_counter() + CAUTION * turn <= end)):
            begin = time.perf_counter()
            computing = min(computing, self._timed(compute))
            self._agreed(0)
            passing = min(passing, self._timed(transfer))
            self._agreed(0)
            together = min(together, self._timed(both))
            done, turn = done + 1, time.perf_counter() - begin
        hides = self._tensor([(passing + computing - together) / passing])
        dist.all_reduce(hides, dist.ReduceOp.MIN, group=self._group)
        return min(1.0, max(0.0, hides.item()))

    def another(self, together: AllReduceTogether) -> float:
        """Seconds that a second bucket adds to a launch: of two halves of the smallest size over that of it in one."""
        count = SMALLEST // self._buffer.itemsize
        halves = self._buffer[:count].chunk(2)
        turns: list[list[float]] = [[], []]
        together(halves)  # the first of all takes longer
        calls: list[Callable[[], object]] = [partial(self._reduce, SMALLEST), partial(together, halves)]
        for _ in range(TURNS):
            for times, call in zip(turns, calls):
                self._agreed(0)
                times.append(self._timed(call))
        alone, grouped = self._of_slowest_rank(turns)
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
        """The first rank's ``decision``; all ranks leave together, as soon as the last has come."""
        decided = torch.tensor(decision if self._group.rank() == 0 else 0, dtype=torch.int64, device=self._device)
        dist.all_reduce(decided, group=self._group)
        return int(decided.item())

    def _of_slowest_rank(self, turns: list[list[float]]) -> list[float]:
        """The shortest turn of each size that has one, each turn as long as it was on its slowest rank."""
        slowest = self._tensor([seconds for times in turns for seconds in times])
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self._group)
        return [min(times).item() for times in slowest.split([len(times) for times in turns if times])]

    def _tensor(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self._device)


def _next_size(turns: list[list[float]], end: float) -> int:
    """Index of the size to time next: the smallest of those with fewest turns for which there is time; -1 for none.

    So all sizes meet the same disturbances, whenever time is up.
    """
    for n in sorted(range(len(turns)), key=lambda n: len(turns[n])):
        if n < 2 and not turns[n]:
            return n
        if n and not turns[n - 1]:
            continue
        expected = turns[n][-1] if turns[n] else 2 * turns[n - 1][-1]
        if len(turns[n]) < TURNS and time.perf_counter() + CAUTION * expected <= end:
            return n
    return -1


def _multiplication(device: torch.device) -> Callable[[], object]:
    """Some computing of the kind that makes gradients: tens of microseconds."""
    rows, dtype = (2048, torch.bfloat16) if device.type == "cuda" else (128, torch.float32)
    generator = torch.Generator(device).manual_seed(0)  # the program's own is left alone
    a, b = (torch.randn(rows, rows, dtype=dtype, device=device, generator=generator) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def _repeat(call: Callable[[], object], count: int) -> None:
    for _ in range(count):
        call()
