"""Time stamps, on the host or in a GPU's stream."""

from __future__ import annotations

import time

import torch

Mark = float | torch.cuda.Event  # seconds of the host's clock, or an event in a GPU's current stream


def mark(device: torch.device) -> Mark:
    """The current time; on a GPU, the time at which the current stream gets here."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Mark, end: Mark) -> float:
    """Seconds between two marks of the same device; on a GPU, both must have been reached."""
    if isinstance(begin, float):
        assert isinstance(end, float)
        return end - begin
    assert isinstance(end, torch.cuda.Event)
    return begin.elapsed_time(end) * 1e-3
