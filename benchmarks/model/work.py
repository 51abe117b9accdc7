"""How long a launch takes on a GPU, from what it asks of it: the machine of the paper model, which knows no kernel."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.model.gpus import Gpu

# Resources that are all in use at the same time get into each other's way: together they take the norm of this exponent
# of what each takes alone. With infinity the largest would count alone, with 1 nothing would overlap.
OVERLAP = 4


@dataclass(frozen=True)
class Amounts:
    """What is asked of one multiprocessor."""

    tensor: float = 0.0  # multiply-adds of 16-bit operands; one of tf32 counts as two
    shared: float = 0.0  # wavefronts of 128 bytes
    issue: float = 0.0  # warp instructions
    special: float = 0.0  # exponentials
    l2: float = 0.0  # bytes from and to L2
    reduce: float = 0.0  # bytes added to sums at L2

    def __add__(self, other: Amounts) -> Amounts:
        return Amounts(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other))))

    def __mul__(self, times: float) -> Amounts:
        return Amounts(*(a * times for a in dataclasses.astuple(self)))


@dataclass(frozen=True)
class Work:
    """What a launch does, whatever the kernel."""

    blocks: int
    at_once: int  # blocks that fit a multiprocessor
    turns: int | Sequence[int]  # of a block's main loop: the same for all, or of each in the order in which they start
    turn: Amounts
    ends: Amounts  # of a block, before and after its loop
    in_flight: int  # turns whose loads are under way at the same time
    memory_bytes: float  # of all blocks, beyond L2
    launches: int = 1
    last: Amounts = Amounts()  # what one multiprocessor does when all others are done
    last_waits: int = 0  # round trips to memory then
    lead: float = 0.0  # cycles of a turn before a block's first product: its tensor cores are another block's, or idle
    alone: float = 0.0  # cycles of a turn of a block beside which no other runs, if more than its loads make it wait


RESOURCES = (*(field.name for field in dataclasses.fields(Amounts)), "memory", "latency")


@dataclass(frozen=True)
class Time:
    seconds: float
    resources: dict[str, float]  # seconds that each would take alone
    waves: float

    @property
    def binding(self) -> str:
        return max(self.resources, key=lambda name: self.resources[name])


def time_of(work: Work, gpu: Gpu) -> Time:
    """Until the busiest multiprocessor is done."""
    rates = Amounts(gpu.multiply_adds, gpu.shared_bytes / 128, gpu.issued, gpu.special, gpu.l2_bytes, gpu.reduced_bytes)

    def seconds(amounts: Amounts) -> list[float]:
        return [a / rate / gpu.clock for a, rate in zip(dataclasses.astuple(amounts), dataclasses.astuple(rates))]

    def together(times: Sequence[float]) -> float:
        return sum(t**OVERLAP for t in times) ** (1 / OVERLAP)

    wait = gpu.memory_latency / gpu.clock
    blocks, turns = _busiest(work, gpu.processors, together(seconds(work.turn)), together(seconds(work.ends)))
    # A block alone on a multiprocessor fills its pipeline and goes through its ends with nobody to use the time; of
    # several, all but one have neighbours in their loops.
    seen = max(1.0, blocks / work.at_once)
    memory = work.memory_bytes / gpu.memory_bytes
    of_turn = max(wait / work.in_flight, work.alone / gpu.clock)
    pipeline = math.ceil(blocks / work.at_once) * turns / max(1, blocks) * of_turn
    main = seconds(work.turn * turns + work.ends * (blocks - seen))
    idle = work.launches * gpu.launch + (seen + work.last_waits) * wait
    if work.at_once == 1:
        idle += turns * work.lead / gpu.clock
    total = idle + together([*main, memory, pipeline]) + together(seconds(work.ends * seen))
    total += together(seconds(work.last))
    each = seconds(work.turn * turns + work.ends * blocks + work.last)
    waves = work.blocks / (gpu.processors * work.at_once)
    return Time(total, dict(zip(RESOURCES, [*each, memory, pipeline + idle])), waves)


def _busiest(work: Work, processors: int, turn: float, ends: float) -> tuple[int, int]:
    """Blocks of the multiprocessor that is done last, and the turns of them all. Each block goes to the one that would
    have been done first."""
    if isinstance(work.turns, int):
        blocks = math.ceil(work.blocks / processors)
        return blocks, blocks * work.turns
    loads = [(0.0, 0, 0)] * processors  # seconds, blocks, turns
    for turns in work.turns:
        seconds, blocks, all_turns = loads[0]
        heapq.heapreplace(loads, (seconds + turns * turn + ends, blocks + 1, all_turns + turns))
    _, blocks, all_turns = max(loads)
    return blocks, all_turns
