"""Quantities as text with units."""

from __future__ import annotations

import math
from collections.abc import Sequence

MIB = 1 << 20


def duration(seconds: float) -> str:
    return _in_units(seconds, (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)))


def byte_size(count: float) -> str:
    return _in_units(count, (("GiB", 1 << 30), ("MiB", MIB), ("KiB", 1 << 10), ("B", 1)))


def byte_rate(bytes_per_second: float) -> str:
    return _in_units(bytes_per_second, (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6)))


def _in_units(value: float, units: Sequence[tuple[str, float]]) -> str:
    """In the largest unit that does not exceed the value, or the smallest unit; three digits."""
    unit, scale = next((unit for unit in units if value >= unit[1]), units[-1])
    number = value / scale
    return f"{number:.0f} {unit}" if 100 <= number < math.inf else f"{number:.3g} {unit}"
