"""Points in time, on the host or in a GPU's stream."""

from __future__ import annotations

import time

import torch

Mark = float | torch.cuda.Event  # seconds of the host's clock, or a point of a GPU's current stream


def mark(device: torch.device) -> Mark:
    """Now: on a GPU, when the current stream comes here."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Mark, end: Mark) -> float:
    """Both of one kind; those of a GPU have to have passed."""
    if isinstance(begin, float):
        assert isinstance(end, float)
        return end - begin
    assert isinstance(end, torch.cuda.Event)
    return begin.elapsed_time(end) * 1e-3
