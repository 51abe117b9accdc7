"""How a case is measured: fresh random inputs, checked first, then timed in turns, side after side, round after round.

- Every round calls each side once, or as often as makes a time the clock can see, and starts with another side each
  time, so that whatever else the machine does, and whatever one side leaves in the caches, hits all alike.
- Inputs rotate over more than twice the last-level cache, so that none finds its own in it.
- A side that fails, is not installed, or computes something else gets a row that says so; the others go on.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks import environment
from benchmarks.results import OURS, Measurement, quartile_spread

Call = Callable[[], Any]
AGAIN = f"{OURS} (again)"
NOT_INSTALLED = "not installed"

MAX_ROUNDS = 101
MIN_ROUNDS = 5
MAX_SETS = 256
# Seconds that one time by the clock, by CUDA events and of a graph's replay takes at least: long beside what the clock
# or the launch of a graph adds.
MIN_SECONDS = {"clock": 1e-3, "events": 1e-3, "graph": 5e-4}
# Under this a call's launches are as long as its kernels, and kernels alone can be timed only as a graph.
GRAPH_BELOW = 200e-6

# ||out - reference|| / ||reference|| above which a result is wrong, not rounded: several times what rounding gives.
# float32 is for products in full precision; through tf32 they are as good as float16's.
TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "float16": 5e-3, "bfloat16": 3e-2}
TF32_TOLERANCE = 5e-3


class Failure(Exception):
    """Why a side has no time, in a few words for its row."""


@dataclass
class Case:
    """A problem and who solves it.

    Each side turns a set of inputs into a call without arguments, and may import, convert and compile while it does so.
    """

    op: str
    phase: str
    group: str
    name: str
    dtype: str
    sides: dict[str, Callable[[Any], Call]]
    inputs: Callable[[], Any] = lambda: None
    check: Callable[[Any, Any], float] | None = (
        None  # (inputs, output) -> relative error; given the first inputs, always
    )
    size: float = 0.0
    size_name: str = ""
    flops: float = 0.0
    bytes: float = 0.0
    input_bytes: float = 0.0  # of one set, outputs included; 0: one set is enough
    tolerance: float | None = None  # if not the dtype's
    # Instead of calls: all samples of all sides, taken in turns by whatever means, in about so many seconds.
    samples: Callable[[float], dict[str, list[float]]] | None = None
    timer: str = ""  # if only one will do
    extra: dict[str, Any] = field(default_factory=dict)

    def allowed_error(self) -> float:
        if self.tolerance is not None:
            return self.tolerance
        if self.dtype == "float32" and torch.get_float32_matmul_precision() != "highest":
            return TF32_TOLERANCE
        return TOLERANCE[self.dtype]


@dataclass
class Method:
    """How to time."""

    device: str
    timer: str = ""  # "": the clock on a CPU; events, or a graph where calls are short, on a GPU. Or one by name
    against_itself: bool = False  # ours against ours: what the method makes of no difference at all
    memory_share: float = 0.25  # of what is free, for the sets of inputs

    def sets_for(self, input_bytes: float) -> int:
        """How many sets of inputs are more than twice the cache."""
        if input_bytes <= 0:
            return 1
        wanted = math.ceil(2 * environment.cache_bytes(self.device) / input_bytes) + 1
        affordable = int(self.memory_share * free_memory(self.device) / input_bytes)
        return max(1, min(wanted, affordable, MAX_SETS))


def free_memory(device: str) -> float:
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    try:
        with open("/proc/meminfo") as lines:
            return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 2e9


def relative_error(out: Any, reference: Any) -> float:
    """||out - reference|| / ||reference||, the largest of them if there are several tensors; NaN is infinite."""
    if isinstance(reference, (tuple, list)):
        return max(relative_error(a, b) for a, b in zip(out, reference, strict=True))
    if out.shape != reference.shape:
        raise Failure(f"wrong shape: {tuple(out.shape)}, expected {tuple(reference.shape)}")
    error = (out.to(reference.dtype) - reference).norm() / reference.norm()
    return float(error) if torch.isfinite(error) else math.inf


def describe_failure(error: BaseException) -> str:
    """In one line."""
    if isinstance(error, Failure):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        return f"{NOT_INSTALLED}: {error.name}"
    if isinstance(error, ImportError):
        return f"import failed: {_first_line(error)}"
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else ""


@dataclass
class _Side:
    """One side, ready to be timed."""

    name: str
    sets: int
    calls: Iterator[Call]  # of one set of inputs after the other, without end
    error: float | None
    seconds: float  # about how long a call takes
    repeats: int = 1
    timer: str = "clock"
    run: Call = lambda: None  # `repeats` calls


def measure(
    case: Case,
    base: Measurement,
    method: Method,
    seconds: float,
    announce: Callable[[str], None],
    skip: Mapping[str, str],
    patience: float = math.inf,
) -> list[Measurement]:
    """All sides of a case, in about `seconds`.

    `base` holds what all measurements share. `announce(side)` is called before a side's code first runs, so that a
    process which does not survive it has said whose fault that was. Sides in `skip` do not run, for the reason given
    there; those whose call takes longer than `patience` seconds are not timed.
    """
    base = replace(
        base,
        op=case.op,
        phase=case.phase,
        group=case.group,
        case=case.name,
        dtype=case.dtype,
        size=case.size,
        size_name=case.size_name,
        flops=case.flops,
        bytes=case.bytes,
        extra=dict(case.extra),
    )
    if case.samples is not None:
        return _measure_samples(case, base, method, seconds, announce)
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # what earlier cases have compiled is looked through at every call
    makers = {OURS: case.sides[OURS], AGAIN: case.sides[OURS]} if method.against_itself else case.sides
    sets = [case.inputs() for _ in range(method.sets_for(case.input_bytes))]
    base = replace(base, rotation=len(sets))
    ready: list[_Side] = []
    failed: list[Measurement] = []
    for name, maker in makers.items():
        if name in skip:
            failed.append(replace(base, side=name, failure=skip[name]))
            continue
        announce(name)
        try:
            ready.append(_prepare(name, maker, case, sets, method, patience))
        except Exception as error:
            failed.append(replace(base, side=name, failure=describe_failure(error)))
            del error
            _forget(method.device)
    announce("")
    try:
        timer = _settle(ready, method, case.timer)
        times = _do_bench(ready, seconds) if timer == "do_bench" else _in_turns(ready, timer, seconds)
    except Exception as error:
        why = describe_failure(error)
        return failed + [replace(base, side=side.name, failure=f"while timing: {why}") for side in ready]
    state = environment.state(method.device)
    rows = [replace(base, side=s.name, error=s.error, timer=timer, state=state) for s in ready]
    return [_summary(row, times[row.side], times.get(OURS)) for row in rows] + failed


def _measure_samples(
    case: Case, base: Measurement, method: Method, seconds: float, announce: Callable[[str], None]
) -> list[Measurement]:
    assert case.samples is not None
    announce("")
    try:
        times = case.samples(seconds)
    except Exception as error:
        return [replace(base, side=OURS, failure=describe_failure(error))]
    if method.against_itself:
        times = {OURS: times[OURS][::2], AGAIN: times[OURS][1::2]}
    base = replace(base, extra=dict(case.extra), state=environment.state(method.device), timer=case.timer or "clock")
    return [_summary(replace(base, side=name), times[name], times.get(OURS)) for name in times]


def _summary(row: Measurement, times: list[float], ours: list[float] | None) -> Measurement:
    seconds = statistics.median(times)
    row = replace(row, seconds=seconds, spread=quartile_spread(times) / seconds, rounds=len(times))
    if ours and row.side != OURS:
        ratios = [theirs / mine for theirs, mine in zip(times, ours)]
        row = replace(row, ratio=statistics.median(ratios), ratio_spread=quartile_spread(ratios))
    return row


def too_slow(seconds: float) -> str:
    """What the row of a side says whose call takes so long that timing it would cost the other cases their time."""
    return f"too slow: a call takes {seconds:.1f} s; raise --minutes to time it"


def _prepare(
    name: str, maker: Callable[[Any], Call], case: Case, sets: list[Any], method: Method, patience: float
) -> _Side:
    """Checks a side's result, and finds out about how long it takes."""
    calls = [maker(inputs) for inputs in sets]
    out = calls[0]()
    error = None
    if case.check is not None:
        error = case.check(sets[0], _in_our_layout(calls[0], out))
        if not error <= case.allowed_error():
            raise Failure(f"wrong: relative error {error:.1e}, expected at most {case.allowed_error():.0e}")
    del out
    _synchronize(method.device)
    rotation = itertools.cycle(calls)
    # The first call after the check still pays for what only a second one needs; the fastest of a few tells.
    seconds = math.inf
    for _ in range(3):
        start = time.perf_counter()
        next(rotation)()
        _synchronize(method.device)
        seconds = min(seconds, time.perf_counter() - start)
        if seconds > min(0.5, patience):
            break
    if seconds > patience:
        raise Failure(too_slow(seconds))
    return _Side(name, len(sets), rotation, error, seconds)


def _in_our_layout(call: Call, out: Any) -> Any:
    """A call with another layout than ours knows how to change it, `to_ours`, which is not timed."""
    to_ours = getattr(call, "to_ours", None)
    if to_ours is None:
        return out
    return tuple(map(to_ours, out)) if isinstance(out, tuple) else to_ours(out)


def _settle(sides: list[_Side], method: Method, wanted: str) -> str:
    """Decides with which timer, alike for all sides, and how many calls make one time. Returns the timer's name."""
    timer = wanted or method.timer or ("clock" if method.device == "cpu" else "events")
    if timer == "events" and not method.timer and any(side.seconds < GRAPH_BELOW for side in sides):
        if all(_capture(side) for side in sides):
            return "graph"
        for side in sides:
            side.repeats = 1
    for side in sides:
        side.timer = timer
        side.repeats = max(1, math.ceil(MIN_SECONDS.get(timer, 0.0) / max(side.seconds, 1e-9)))
        side.run = _repeat(side)
    return timer


def _repeat(side: _Side) -> Call:
    def run() -> None:
        for _ in range(side.repeats):
            next(side.calls)()

    return run


def _capture(side: _Side) -> bool:
    """Makes a CUDA graph of the side's calls; False where it cannot be captured."""
    side.timer = "graph"
    # What a call has taken is mostly its launch; its kernels are several times as fast. And all inputs have their turn.
    side.repeats = max(side.sets, math.ceil(4 * MIN_SECONDS["graph"] / side.seconds))
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            _repeat(side)()
        graph.replay()
        torch.cuda.synchronize()
    except Exception:
        return False
    side.run = graph.replay
    return True


def _in_turns(sides: list[_Side], timer: str, seconds: float) -> dict[str, list[float]]:
    """Seconds of a call, by side; the n-th of all sides are of the same round."""
    times: dict[str, list[float]] = {side.name: [] for side in sides}
    once = _clock_round if timer == "clock" else _event_round
    if sum(side.seconds * side.repeats for side in sides) < seconds:
        once(sides)  # warm-up; longer calls than these are warm
    start = time.perf_counter()
    for n in range(MAX_ROUNDS):
        if n >= MIN_ROUNDS and time.perf_counter() - start > seconds:
            break
        if n >= 1 and time.perf_counter() - start > 4 * seconds:
            break  # far slower than hoped
        turn = n % len(sides) if sides else 0
        for name, value in once(sides[turn:] + sides[:turn]):
            times[name].append(value)
    return times


def _clock_round(sides: list[_Side]) -> list[tuple[str, float]]:
    values = []
    for side in sides:
        start = time.perf_counter()
        side.run()
        values.append((side.name, (time.perf_counter() - start) / side.repeats))
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # not timed: what the host can queue without waiting is what was asked for
    return values


def _event_round(sides: list[_Side]) -> list[tuple[str, float]]:
    """All sides are queued before any is waited for, so that the GPU need not wait for the host between them."""
    events = []
    for side in sides:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        side.run()
        end.record()
        events.append((side, begin, end))
    torch.cuda.synchronize()
    return [(side.name, begin.elapsed_time(end) * 1e-3 / side.repeats) for side, begin, end in events]


def _do_bench(sides: list[_Side], seconds: float) -> dict[str, list[float]]:
    """By triton.testing.do_bench, which empties the cache before each call; sides one after the other."""
    from triton.testing import do_bench

    share = 1e3 * seconds / max(len(sides), 1)

    def of(side: _Side) -> list[float]:
        milliseconds = do_bench(side.run, warmup=0.2 * share, rep=0.8 * share, return_mode="all")
        return [ms * 1e-3 for ms in milliseconds]

    return {side.name: of(side) for side in sides}


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _forget(device: str) -> None:
    """Frees what a failed side held."""
    if device == "cuda":
        torch.cuda.empty_cache()
