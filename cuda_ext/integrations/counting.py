"""Counts of the attention calls of an integration."""

from __future__ import annotations

import threading

__all__ = ["Calls"]


class Calls:
    """How many calls were served, by what, and how many were not, and why. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._served: dict[str, int] = {}
        self._refused: dict[str, int] = {}

    def served(self, by: str) -> None:
        with self._lock:
            self._served[by] = self._served.get(by, 0) + 1

    def refused(self, reason: str) -> None:
        with self._lock:
            self._refused[reason] = self._refused.get(reason, 0) + 1

    def report(self, *, reset: bool = False) -> dict[str, dict[str, int]]:
        """`{"served": {by: calls}, "refused": {reason: calls}}`; with `reset`, both start at 0 again."""
        with self._lock:
            found = {"served": dict(self._served), "refused": dict(self._refused)}
            if reset:
                self._served.clear()
                self._refused.clear()
        return found
