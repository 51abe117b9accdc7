"""Numbers, units and names as readers expect them."""

from __future__ import annotations

import math
import re
from pathlib import Path

from benchmarks.results import Measurement, ResultsError

RATIO_MEANS = "Ratios are baseline time / our time: above 1 ours is faster"
END = "<!-- end -->"


def with_section(page: Path, begin: str, section: str) -> str:
    """The text of a Markdown page with `section` between its lines `begin` and END."""
    before, _, rest = (text := page.read_text()).partition(f"{begin}\n")
    _, end, after = rest.partition(END)
    if text.count(f"{begin}\n") != 1 or not end:
        raise ResultsError(f"{page.name}: expected the lines {begin} and {END} once, in this order; add them")
    return f"{before}{begin}\n{section}{END}{after}"


def heading(m: Measurement, *more: str) -> str:
    """ "flash_attention causal · forward · bfloat16" """
    return " · ".join(part for part in (m.op, m.phase, m.dtype, *more) if part)


def digits(value: float, unit: str = "") -> str:
    """Three significant digits, and all digits before the point: 0.0123, 1.23, 12.3, 123, 12345."""
    rounded = float(f"{value:.3g}")
    decimals = max(0, 2 - math.floor(math.log10(rounded))) if rounded > 0 else 0
    return (f"{value:.{decimals}f}" if decimals < 7 else f"{value:.2e}") + unit


def duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    for scale, unit in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= scale * 0.9995:
            return digits(seconds / scale, " " + unit)
    return digits(seconds / 1e-9, " ns")


def flop_rate(flops: float) -> str:
    return digits(flops / 1e12, " TFLOP/s") if flops >= 0.9995e12 else digits(flops / 1e9, " GFLOP/s")


def byte_rate(count: float) -> str:
    return digits(count / 1e12, " TB/s") if count >= 0.9995e12 else digits(count / 1e9, " GB/s")


def byte_count(count: float) -> str:
    for scale, unit in ((1e9, "GB"), (1e6, "MB")):
        if count >= 0.9995 * scale:
            return digits(count / scale, f" {unit}")
    return digits(count / 1e3, " kB")


def power_of_two(value: float) -> str:
    """128k for 131072."""
    return f"{value / 1024:g}k" if value >= 1024 and value % 1024 == 0 else f"{value:g}"


def rate(m: Measurement) -> str:
    """FLOP/s if operations are counted, else bytes/s."""
    if m.tflops is not None:
        return flop_rate(m.tflops * 1e12)
    return "" if m.bandwidth is None else byte_rate(m.bandwidth)


def ratio(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}×" if 0.1 <= value < 1 else digits(value, "×") if value >= 1 else f"{value:.1g}×"


def percent(fraction: float | None) -> str:
    return "" if fraction is None else f"{fraction:.0%}" if fraction >= 0.0995 else f"{fraction:.1%}"


def short(failure: str, width: int) -> str:
    """The first line, without the name of an exception, cut to `width`."""
    line = re.sub(r"^[\w.]*(Error|Exception): ", "", (failure.strip() or "no time").splitlines()[0])
    return line if len(line) <= width else line[: width - 1].rstrip(" :,.;") + "…"


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + "s" * (count != 1)


def wrapped(name: str, width: int = 13) -> list[str]:
    """The name of a side in lines, broken at spaces, points and underscores."""
    lines = [""]
    for part in re.findall(r"[^ ._]*[ ._]+|[^ ._]+", name):
        if lines[-1] and len((lines[-1] + part).rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return [line.rstrip() for line in lines]
