"""How a case is measured: random inputs, results checked first, then sides timed alternately, round after round.

- Every round calls each side once, or as often as the clock needs to resolve it, and starts with the next side, so that
  other load, and what a side leaves in the caches, affect all sides equally.
- Inputs rotate over more than twice the last-level cache, so that no input is still in it.
- A side that fails, is not installed or returns a wrong result gets a row that says so; the others continue.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
# Least seconds of one sample, by timer: long compared with what the clock or the launch of a graph adds.
MIN_SECONDS = {"clock": 1e-3, "events": 1e-3, "graph": 5e-4}
# In shorter calls, launches take as long as kernels, and only a graph can time the kernels alone.
GRAPH_BELOW = 200e-6

# ||out - reference|| / ||reference|| above which a result is wrong: several times the rounding error. float32 is for
# products in full precision; tf32 is as precise as float16.
TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "float16": 5e-3, "bfloat16": 3e-2}
TF32_TOLERANCE = 5e-3


class Failure(Exception):
    """Why a side has no time, in a few words for its row."""


@dataclass
class Case:
    """A problem and its implementations.

    Each side is a function from a set of inputs to a call without arguments; it may import, convert and compile.
    """

    op: str
    phase: str
    group: str
    name: str
    dtype: str
    sides: dict[str, Callable[[Any], Call]]
    inputs: Callable[[], Any] = lambda: None
    check: Callable[[Any, Any], float] | None = (
        None  # (inputs, output) -> relative error; called with the first set of inputs
    )
    size: float = 0.0
    size_name: str = ""
    flops: float = 0.0
    bytes: float = 0.0
    input_bytes: float = 0.0  # of one set, including outputs; 0: one set is enough
    tolerance: float | None = None  # None: that of the dtype
    # Instead of calls: takes the samples of all sides itself, alternately, in about this many seconds.
    samples: Callable[[float], dict[str, list[float]]] | None = None
    timer: str = ""  # if the case needs a certain one
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
    timer: str = ""  # "": the clock on a CPU; on a GPU events, or a graph if calls are short
    against_itself: bool = False  # compare ours with itself, to see the error of the method
    memory_share: float = 0.25  # of the free memory, for the sets of inputs

    def sets_for(self, input_bytes: float) -> int:
        """The number of sets of inputs that exceed twice the cache."""
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
    """||out - reference|| / ||reference||, the largest if there are several tensors; infinite instead of NaN."""
    if isinstance(reference, (tuple, list)):
        return max(relative_error(a, b) for a, b in zip(out, reference, strict=True))
    if out.shape != reference.shape:
        raise Failure(f"wrong shape: {tuple(out.shape)}, expected {tuple(reference.shape)}")
    error = (out.to(reference.dtype) - reference).norm() / reference.norm()
    return float(error) if torch.isfinite(error) else math.inf


def describe_failure(error: BaseException) -> str:
    """The reason in one line."""
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
    calls: Iterator[Call]  # one set of inputs after the other, cyclically
    error: float | None
    seconds: float  # estimated duration of a call
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

    `base` has the fields that all measurements share. `announce(side)` is called before a side's code first runs, so
    that a crash can be attributed. Sides in `skip` do not run, for the reason given there; a side whose call takes
    longer than `patience` seconds is not timed.
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
    with _side_stream(method.device):
        return _measure_sides(case, base, method, seconds, announce, skip, patience)


def _measure_sides(
    case: Case,
    base: Measurement,
    method: Method,
    seconds: float,
    announce: Callable[[str], None],
    skip: Mapping[str, str],
    patience: float,
) -> list[Measurement]:
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # else every call searches what earlier cases compiled
    makers = {OURS: case.sides[OURS], AGAIN: case.sides[OURS]} if method.against_itself else case.sides
    try:
        sets = [case.inputs() for _ in range(method.sets_for(case.input_bytes))]
    except Exception as error:
        failure = f"its inputs: {describe_failure(error)}"
        del error
        _free_cached_memory(method.device)
        return [replace(base, side=OURS, failure=failure)]
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
            _free_cached_memory(method.device)
    announce("")
    try:
        timer = _choose_timer(ready, method, case.timer)
        times = _do_bench(ready, seconds) if timer == "do_bench" else _alternate(ready, timer, seconds)
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
    """The failure of a side whose timing would use up the time of other cases."""
    return f"too slow: a call takes {seconds:.1f} s; raise --minutes to time it"


def _prepare(
    name: str, maker: Callable[[Any], Call], case: Case, sets: list[Any], method: Method, patience: float
) -> _Side:
    """Checks the result of a side and estimates its duration."""
    calls = [maker(inputs) for inputs in sets]
    out = calls[0]()
    error = None
    if case.check is not None:
        error = case.check(sets[0], _to_our_layout(calls[0], out))
        if not error <= case.allowed_error():
            raise Failure(f"wrong: relative error {error:.1e}, expected at most {case.allowed_error():.0e}")
    del out
    _synchronize(method.device)
    rotation = itertools.cycle(calls)
    # The second call may still initialize something; the fastest of a few counts.
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


def _to_our_layout(call: Call, out: Any) -> Any:
    """Converts the output of a call with another layout by its `to_ours`, which is not timed."""
    to_ours = getattr(call, "to_ours", None)
    if to_ours is None:
        return out
    return tuple(map(to_ours, out)) if isinstance(out, tuple) else to_ours(out)


def _choose_timer(sides: list[_Side], method: Method, wanted: str) -> str:
    """Chooses the timer, the same for all sides, and the number of calls per sample. Returns the timer's name."""
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
    """Captures a CUDA graph of the side's calls; False if that fails."""
    side.timer = "graph"
    # The estimated duration is mostly the launch; kernels are several times as fast. Each set of inputs is used.
    side.repeats = max(side.sets, math.ceil(4 * MIN_SECONDS["graph"] / side.seconds))
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            _repeat(side)()
        graph.replay()
        torch.cuda.synchronize()
    except Exception:
        return False
    side.run = graph.replay
    return True


def _alternate(sides: list[_Side], timer: str, seconds: float) -> dict[str, list[float]]:
    """Seconds per call, by side; the n-th samples of all sides are from the same round."""
    times: dict[str, list[float]] = {side.name: [] for side in sides}
    once = _clock_round if timer == "clock" else _event_round
    if sum(side.seconds * side.repeats for side in sides) < seconds:
        once(sides)  # warm-up; longer calls need none
    start = time.perf_counter()
    for n in range(MAX_ROUNDS):
        if n >= MIN_ROUNDS and time.perf_counter() - start > seconds:
            break
        if n >= 1 and time.perf_counter() - start > 4 * seconds:
            break  # far slower than estimated
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
            torch.cuda.synchronize()  # not timed: the clock measures the time until the call returns
    return values


def _event_round(sides: list[_Side]) -> list[tuple[str, float]]:
    """Queues all sides before it waits, so that the GPU does not wait for the host between them."""
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
    """triton.testing.do_bench, which clears the cache before each call; sides run one after the other."""
    from triton.testing import do_bench

    share = 1e3 * seconds / max(len(sides), 1)

    def of(side: _Side) -> list[float]:
        milliseconds = do_bench(side.run, warmup=0.2 * share, rep=0.8 * share, return_mode="all")
        return [ms * 1e-3 for ms in milliseconds]

    return {side.name: of(side) for side in sides}


@functools.cache
def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


@contextmanager
def _side_stream(device: str) -> Iterator[None]:
    """All of a case runs on a stream that can be captured: backward runs on the stream of its forward, and the default
    one cannot be."""
    if device != "cuda":
        yield
        return
    torch.cuda.synchronize()  # what the case has made on the default stream
    with torch.cuda.stream(_stream()):
        yield


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _free_cached_memory(device: str) -> None:
    """Frees the cached memory of a failed side."""
    if device == "cuda":
        torch.cuda.empty_cache()
