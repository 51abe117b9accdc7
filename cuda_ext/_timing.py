"""Time stamps, on the host or in a GPU's stream; whether that stream runs now or is captured; and profiler ranges."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

from cuda_ext._load import ops

Mark = float | torch.cuda.Event  # seconds of the host's clock, or an event in a GPU's current stream


def mark(device: torch.device) -> Mark:
    """The current time; on a GPU, the time at which its current stream gets here."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def is_reached(event: torch.cuda.Event, device: torch.device) -> bool:
    """Whether the GPU has reached an event. Unlike ``event.query()``, allowed while any stream is captured.

    Raises RuntimeError if a kernel has failed.
    """
    return bool(ops._is_reached(event.cuda_event, device))


def ends_within(seconds: float, stream: torch.cuda.Stream) -> bool:
    """Whether the GPU completes in that time what is queued in ``stream`` and in the current stream of its device."""
    events = [each.record_event() for each in (stream, torch.cuda.current_stream(stream.device))]
    deadline = time.monotonic() + seconds
    while not all(is_reached(event, stream.device) for event in events):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def is_captured(device: torch.device) -> bool:
    """Whether the current stream of ``device`` is captured into a CUDA graph, so that the host cannot wait for it."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def seconds_between(begin: Mark, end: Mark) -> float:
    """Seconds between two marks of the same device; on a GPU, both must have been reached."""
    if isinstance(begin, float):
        assert isinstance(end, float)
        return end - begin
    assert isinstance(end, torch.cuda.Event)
    return begin.elapsed_time(end) * 1e-3


_NOTHING = nullcontext()


def profiler_range(name: str) -> AbstractContextManager[object]:
    """A range ``cuda_ext::name`` in the trace of `torch.profiler`; without a profiler, a check of 0.1 us.

    The name should not be one of our ops, with which the profiler's tables would merge it.
    """
    return record_function(f"cuda_ext::{name}") if _profiler_enabled() else _NOTHING


def begin_profiler_range(name: str) -> Callable[[], None] | None:
    """Begins a range; the returned function ends it, in any thread, once. None without a profiler."""
    if not _profiler_enabled():
        return None
    begun = record_function(f"cuda_ext::{name}")
    begun.__enter__()
    # A profiler only sees its own thread. The callbacks of a future run with the state of the thread that added them.
    done: torch.futures.Future[None] = torch.futures.Future()
    begun._call_end_callbacks_on_future(done)
    lock = threading.Lock()

    def end() -> None:
        with lock:  # a second caller returns only when the range has ended
            if not done.done():
                done.set_result(None)

    return end
