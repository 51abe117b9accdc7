"""Times two sides of one question in turns, A B A B, so that whatever else the machine does hits both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def seconds(side: Callable[[], object]) -> float:
    start = time.perf_counter()
    side()
    return time.perf_counter() - start


def alternate(
    ours: Callable[[], object], theirs: Callable[[], object], budget: float = 3.0
) -> tuple[float, float, float]:
    """(median seconds of ours, of theirs, median of theirs / ours), over 3 to 101 pairs in about `budget` seconds."""
    ours(), theirs()
    pair = seconds(ours) + seconds(theirs)
    pairs = [(seconds(ours), seconds(theirs)) for _ in range(max(3, min(101, int(budget / pair))))]
    return (
        statistics.median(a for a, _ in pairs),
        statistics.median(b for _, b in pairs),
        statistics.median(b / a for a, b in pairs),
    )


def environment(threads: int) -> str:
    torch.set_num_threads(threads)
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
