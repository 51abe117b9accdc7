"""Groups measurements for readers: runs, sections, baselines and failures, in a fixed order."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.presentation.formatting import heading
from benchmarks.results import OURS, OUT_OF_TIME, Measurement, ResultsError, by_case, read

SUITES = ("gemm", "attention", "masks", "loss", "experts", "fp8", "bucket", "train", "overhead", "build")
DTYPES = ("float64", "float32", "tfloat32", "bfloat16", "float16", "")
NO_REASON = "no time, and no reason given"


@dataclass(frozen=True)
class Run:
    """Measurements of one environment, each case and side at most once."""

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
        """Bytes/s of the large copy; 0 if it was not measured."""
        return max(m.peak_bandwidth for m in self.measurements)

    @property
    def flops(self) -> dict[str, float]:
        """dtype -> FLOP/s of the fastest library matmul; a single key "" if it is the same for all."""
        peaks: dict[str, float] = {}
        for m in sorted(self.measurements, key=lambda m: dtype_order(m.dtype)):
            if m.peak_flops and m.flops:
                peaks[m.dtype] = max(peaks.get(m.dtype, 0.0), m.peak_flops)
        return {"": max(peaks.values())} if len(set(peaks.values())) == 1 else peaks


def split_into_runs(measurements: Iterable[Measurement]) -> list[Run]:
    """Sorted by device and date. Measurements of the same environment form one run, even if made by several commands,
    until a suite that was complete is measured again; of an incomplete suite the newest measurements count."""
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
    """The name of the device; raises ResultsError if there are several."""
    names = sorted({Run([m]).device for m in measurements})
    if len(names) != 1:
        raise ResultsError(f"expected measurements of one device, got {len(names)}: {', '.join(names)}; split them")
    return names[0]


def read_some(path: Path) -> list[Measurement]:
    """Reads at least one measurement; raises ResultsError."""
    if measurements := read(path):
        return measurements
    raise ResultsError(f"{path}: expected measurements, got empty files; measure again with `python -m benchmarks`")


def suite_order(suite: str) -> tuple[int, str]:
    return (SUITES.index(suite) if suite in SUITES else len(SUITES), suite)


def dtype_order(dtype: str) -> tuple[int, str]:
    return (DTYPES.index(dtype) if dtype in DTYPES else len(DTYPES), dtype)


def sections(measurements: Iterable[Measurement]) -> dict[str, dict[str, list[dict[str, Measurement]]]]:
    """suite -> heading -> the sides of each case in which any side has a time."""
    found: dict[str, dict[str, list[dict[str, Measurement]]]] = {}
    cases = sorted(by_case(measurements).values(), key=lambda sides: suite_order(next(iter(sides.values())).suite))
    for sides in cases:
        first = next(iter(sides.values()))
        if any(m.seconds is not None for m in sides.values()):
            found.setdefault(first.suite, {}).setdefault(heading(first), []).append(sides)
    return found


def baselines(cases: Iterable[dict[str, Measurement]]) -> tuple[list[str], dict[str, str]]:
    """The sides that ran at least once, most frequent first; and the others with the reason why they did not."""
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
    """(suite, side, reason) -> the measurements without a time; ours first."""
    found: dict[tuple[str, str, str], list[Measurement]] = {}
    for m in measurements:
        if m.seconds is None:
            found.setdefault((m.suite, m.side, m.failure or NO_REASON), []).append(m)
    return dict(sorted(found.items(), key=lambda item: (item[0][1] != OURS, suite_order(item[0][0]), item[0][1:])))
