"""The time of a launch on a GPU, computed from its Work; independent of any kernel."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.model.gpus import Gpu

# Resources in use at the same time contend: together they take the p-norm of their separate times, with this p. With
# infinity only the largest would count, with 1 nothing would overlap.
OVERLAP = 4
# The same for kernels whose loads (TMA) and products (wgmma) run beside their instructions. Without multicast, which
# loads 1.5 times as much from L2, github.com/pranjalssh/fast.cu reached 704 TFLOP/s, with it 734; 8 gives 685 and 797
# for the loop alone, 4 gives 633 and 752.
OVERLAP_ASYNCHRONOUS = 8


@dataclass(frozen=True)
class Amounts:
    """Amounts of work of one SM."""

    tensor: float = 0.0  # multiply-adds of 16-bit operands; one of tf32 counts as two
    shared: float = 0.0  # wavefronts of 128 bytes
    issue: float = 0.0  # warp instructions
    special: float = 0.0  # exponentials
    l2: float = 0.0  # bytes from and to L2
    reduce: float = 0.0  # bytes added to sums in L2

    def __add__(self, other: Amounts) -> Amounts:
        return Amounts(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other))))

    def __mul__(self, times: float) -> Amounts:
        return Amounts(*(a * times for a in dataclasses.astuple(self)))


@dataclass(frozen=True)
class Persistent:
    """How a kernel runs whose `blocks` are tiles that fewer persistent blocks compute one after the other, with loads
    by TMA and products by wgmma. wgmma reads shared memory as it multiplies: the slower of the two counts."""

    workers: int  # blocks that run
    hides_epilogues: bool  # a tile is multiplied while the one before is stored
    restart: float  # cycles per tile whose epilogue is not hidden: waiting for the last products, issuing the first
    once: float = 0.0  # cycles per launch: waiting for other blocks of a cluster
    overlap: float = OVERLAP_ASYNCHRONOUS  # of products with instructions and exponentials


@dataclass(frozen=True)
class Work:
    """The work of a launch."""

    blocks: int
    blocks_per_sm: int  # blocks that fit on an SM at once
    iterations: int | Sequence[int]  # of a block's main loop: one number for all, or one per block in launch order
    iteration: Amounts
    outside: Amounts  # per block, before and after its loop
    in_flight: int  # iterations whose loads are in flight at the same time
    memory_bytes: float  # of all blocks, from and to memory
    launches: int = 1
    tail: Amounts = Amounts()  # work of one SM after all others have finished
    tail_waits: int = 0  # round trips to memory in the tail
    lead: float = 0.0  # cycles per iteration before a block's first product, when its tensor cores idle
    lone_cycles: float = 0.0  # cycles per iteration of a block that has its SM to itself; 0: its loads decide
    persistent: Persistent | None = None  # else each block computes one tile, by mma.sync


RESOURCES = (*(field.name for field in dataclasses.fields(Amounts)), "memory", "latency")


@dataclass(frozen=True)
class Time:
    seconds: float
    resources: dict[str, float]  # seconds that each resource would take alone
    waves: float

    @property
    def binding(self) -> str:
        return max(self.resources, key=lambda name: self.resources[name])


def time_of(work: Work, gpu: Gpu) -> Time:
    """The time until the busiest SM finishes."""
    persistent = work.persistent
    l2_bytes, sms, overlap = gpu.l2_bytes, gpu.sms, OVERLAP
    if persistent:
        # L2 has its own clock.
        at_clock = gpu.clock / gpu.wgmma_clock
        gpu = dataclasses.replace(gpu, clock=gpu.wgmma_clock, multiply_adds=gpu.wgmma_multiply_adds)
        l2_bytes = min(gpu.port_bytes, l2_bytes * at_clock * gpu.sms / persistent.workers)
        sms, overlap = persistent.workers, OVERLAP_ASYNCHRONOUS
    rates = Amounts(gpu.multiply_adds, gpu.shared_bytes / 128, gpu.issued, gpu.special, l2_bytes, gpu.reduced_bytes)

    def seconds(amounts: Amounts) -> list[float]:
        return [a / rate / gpu.clock for a, rate in zip(dataclasses.astuple(amounts), dataclasses.astuple(rates))]

    def together(times: Sequence[float]) -> float:
        if persistent:
            tensor, shared, issue, special, *others = times
            inner = persistent.overlap
            times = [sum(t**inner for t in (max(tensor, shared), issue, special)) ** (1 / inner), *others]
        return sum(t**overlap for t in times) ** (1 / overlap)

    wait = gpu.memory_latency / gpu.clock
    blocks, iterations = _busiest(work, sms, together(seconds(work.iteration)), together(seconds(work.outside)))
    # The prologue and epilogue of a block that is alone on an SM overlap with nothing; of several blocks, those of all
    # but one overlap with the loops of the others.
    exposed = max(1.0, blocks / work.blocks_per_sm)
    waits = exposed
    if persistent:  # the loads of the next tile do not wait for the end of this one
        exposed, waits = 1.0 if persistent.hides_epilogues else blocks, 1.0
    memory = work.memory_bytes / gpu.memory_bytes
    of_iteration = max(wait / work.in_flight, work.lone_cycles / gpu.clock)
    pipeline = math.ceil(blocks / work.blocks_per_sm) * iterations / max(1, blocks) * of_iteration
    main = seconds(work.iteration * iterations + work.outside * (blocks - exposed))
    idle = work.launches * gpu.launch + (waits + work.tail_waits) * wait
    if persistent:
        idle += (exposed * persistent.restart + persistent.once) / gpu.clock
    elif work.blocks_per_sm == 1:
        idle += iterations * work.lead / gpu.clock
    total = idle + together([*main, memory, pipeline]) + together(seconds(work.outside * exposed))
    total += together(seconds(work.tail))
    each = seconds(work.iteration * iterations + work.outside * blocks + work.tail)
    waves = work.blocks / (sms * work.blocks_per_sm)
    return Time(total, dict(zip(RESOURCES, [*each, memory, pipeline + idle])), waves)


def _busiest(work: Work, sms: int, iteration: float, outside: float) -> tuple[int, int]:
    """The number of blocks of the SM that finishes last, and their iterations in total. Each block is assigned to the
    SM that would finish first."""
    if isinstance(work.iterations, int):
        blocks = math.ceil(work.blocks / sms)
        return blocks, blocks * work.iterations
    loads = [(0.0, 0, 0)] * sms  # seconds, blocks, iterations
    for iterations in work.iterations:
        seconds, blocks, all_iterations = loads[0]
        heapq.heapreplace(loads, (seconds + iterations * iteration + outside, blocks + 1, all_iterations + iterations))
    _, blocks, all_iterations = max(loads)
    return blocks, all_iterations
