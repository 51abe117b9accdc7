"""Measurements for readers: which of them belong to one run, and numbers the way people write them."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results import OURS, OUT_OF_TIME, Measurement, ResultsError, by_case, read

SUITES = ("gemm", "attention", "bucket", "train", "overhead", "build")
DTYPES = ("float64", "float32", "tfloat32", "bfloat16", "float16", "")

RATIO_MEANS = "1.27× = baseline time / our time: above 1 ours is faster, below 1 the baseline is"
NO_REASON = "no time, and no reason given"


@dataclass(frozen=True)
class Run:
    """What was measured in one environment, nothing of it twice."""

    measurements: list[Measurement]

    @property
    def device(self) -> str:
        first = self.measurements[0]
        return str(first.environment.get("device") or first.device)

    @property
    def commit(self) -> str:
        return str(self.measurements[0].environment.get("commit") or "")

    @property
    def date(self) -> str:
        return max(m.date for m in self.measurements)[:10]

    @property
    def suites(self) -> list[str]:
        return sorted({m.suite for m in self.measurements}, key=suite_order)

    @property
    def bandwidth(self) -> float:
        """Bytes a second of the large copy; 0 if it was not measured."""
        return max(m.peak_bandwidth for m in self.measurements)

    @property
    def flops(self) -> dict[str, float]:
        """dtype -> FLOPs a second of the largest library matmul; of "" if it is the same for all."""
        peaks: dict[str, float] = {}
        for m in sorted(self.measurements, key=lambda m: dtype_order(m.dtype)):
            if m.peak_flops and m.flops:
                peaks[m.dtype] = max(peaks.get(m.dtype, 0.0), m.peak_flops)
        return {"": max(peaks.values())} if len(set(peaks.values())) == 1 else peaks


def runs(measurements: Iterable[Measurement]) -> list[Run]:
    """By device, then by date. What was measured in the same environment is one run, in however many parts, until a
    suite that had come to its end is measured again; of a suite that had not, the newest counts."""
    takes: dict[tuple[str, str], list[dict[tuple[str, ...], Measurement]]] = {}
    for m in sorted(measurements, key=lambda m: m.date):
        environment = json.dumps([m.device, m.environment], sort_keys=True)
        of_suite = takes.setdefault((environment, m.suite), [{}])
        key = (*m.problem, m.group, m.side)
        if key in of_suite[-1]:
            if _untried(m):
                continue
            if not any(map(_untried, of_suite[-1].values())):
                of_suite.append({})
        of_suite[-1][key] = m
    found: dict[tuple[str, int], list[Measurement]] = {}
    for (environment, _), of_suite in takes.items():
        for number, take in enumerate(of_suite):
            found.setdefault((environment, number), []).extend(take.values())
    return sorted(map(Run, found.values()), key=lambda run: (run.measurements[0].device, run.device, run.date))


def _untried(m: Measurement) -> bool:
    return m.seconds is None and m.failure.startswith(OUT_OF_TIME)


def one_device(measurements: Iterable[Measurement]) -> str:
    """The name of the device that all of them ran on; raises ResultsError if there are several."""
    names = sorted({Run([m]).device for m in measurements})
    if len(names) != 1:
        raise ResultsError(f"expected measurements of one device, got {len(names)}: {', '.join(names)}; split them")
    return names[0]


def read_some(path: Path) -> list[Measurement]:
    """At least one; raises ResultsError."""
    if measurements := read(path):
        return measurements
    raise ResultsError(f"{path}: expected measurements, got empty files; measure anew with `python -m benchmarks`")


def suite_order(suite: str) -> tuple[int, str]:
    return (SUITES.index(suite) if suite in SUITES else len(SUITES), suite)


def dtype_order(dtype: str) -> tuple[int, str]:
    return (DTYPES.index(dtype) if dtype in DTYPES else len(DTYPES), dtype)


def heading(m: Measurement, *more: str) -> str:
    """ "flash_attention causal · forward · bfloat16" """
    return " · ".join(part for part in (m.op, m.phase, m.dtype, *more) if part)


def sections(measurements: Iterable[Measurement]) -> dict[str, dict[str, list[dict[str, Measurement]]]]:
    """suite -> heading -> the sides of each case of which any has a time."""
    found: dict[str, dict[str, list[dict[str, Measurement]]]] = {}
    cases = sorted(by_case(measurements).values(), key=lambda sides: suite_order(next(iter(sides.values())).suite))
    for sides in cases:
        first = next(iter(sides.values()))
        if any(m.seconds is not None for m in sides.values()):
            found.setdefault(first.suite, {}).setdefault(heading(first), []).append(sides)
    return found


def opponents(cases: Iterable[dict[str, Measurement]]) -> tuple[list[str], dict[str, str]]:
    """Those that ran at least once, most often first; and of the others why they did not."""
    ran: Counter[str] = Counter()
    reasons: dict[str, str] = {}
    for sides in cases:
        for side, m in sides.items():
            if side != OURS:
                ran[side] += m.seconds is not None
                if m.failure:
                    reasons.setdefault(side, m.failure)
    names = [side for side, count in sorted(ran.items(), key=lambda item: (-item[1], item[0])) if count]
    return names, {side: reasons.get(side, NO_REASON) for side in sorted(ran) if not ran[side]}


def failures(measurements: Iterable[Measurement]) -> dict[tuple[str, str, str], list[Measurement]]:
    """(suite, side, reason) -> what has failed for it; ours first."""
    found: dict[tuple[str, str, str], list[Measurement]] = {}
    for m in measurements:
        if m.seconds is None:
            found.setdefault((m.suite, m.side, m.failure or NO_REASON), []).append(m)
    return dict(sorted(found.items(), key=lambda item: (item[0][1] != OURS, suite_order(item[0][0]), item[0][1:])))


def digits(value: float, unit: str = "") -> str:
    """Three significant digits, and all of those before the point: 0.0123, 1.23, 12.3, 123, 12345."""
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
    """A second."""
    return digits(flops / 1e12, " TFLOP/s") if flops >= 0.9995e12 else digits(flops / 1e9, " GFLOP/s")


def byte_rate(count: float) -> str:
    """A second."""
    return digits(count / 1e12, " TB/s") if count >= 0.9995e12 else digits(count / 1e9, " GB/s")


def rate(m: Measurement) -> str:
    """FLOPs a second where they are counted, else bytes."""
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
    """The first line, without the name of an exception, cut."""
    line = re.sub(r"^[\w.]*(Error|Exception): ", "", (failure.strip() or "no time").splitlines()[0])
    return line if len(line) <= width else line[: width - 1].rstrip(" :,.;") + "…"


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + "s" * (count != 1)


def wrapped(name: str, width: int = 13) -> list[str]:
    """A side's name on several lines, broken at spaces, points and underscores."""
    lines = [""]
    for part in re.findall(r"[^ ._]*[ ._]+|[^ ._]+", name):
        if lines[-1] and len((lines[-1] + part).rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return [line.rstrip() for line in lines]
