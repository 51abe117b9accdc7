"""Counts of the attention calls of an integration."""

from __future__ import annotations

import itertools
import threading

import torch

__all__ = ["Calls"]


class Calls:
    """How many calls were served, by what, and how many were not, and why. Safe to use from several threads."""

    def __init__(self) -> None:
        self._served, self._refused = _Counts(), _Counts()

    # The result is a constant for torch.compile, which runs the function once, while it traces: if compiled code
    # counted, the count would be an input of the graph.
    @torch.compiler.assume_constant_result
    def served(self, by: str) -> None:
        next(self._served[by])

    @torch.compiler.assume_constant_result
    def refused(self, reason: str) -> None:
        next(self._refused[reason])

    def report(self, *, reset: bool = False) -> dict[str, dict[str, int]]:
        """`{"served": {by: calls}, "refused": {reason: calls}}`; with `reset`, both start at 0 again."""
        return {"served": self._served.report(reset), "refused": self._refused.report(reset)}


class _Counts(dict[str, "itertools.count[int]"]):
    """`next(counts[name])` counts one. Other threads cannot interrupt it, and a lock would take four times as long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._uncounted: dict[str, int] = {}  # what to subtract: calls before the last reset, and reports

    def __missing__(self, name: str) -> itertools.count[int]:
        return self.setdefault(name, itertools.count())

    def report(self, reset: bool) -> dict[str, int]:
        found = {}
        with self._lock:
            for name, count in list(self.items()):
                total, uncounted = next(count), self._uncounted.get(name, 0)
                self._uncounted[name] = total + 1 if reset else uncounted + 1
                if total > uncounted:
                    found[name] = total - uncounted
        return found
