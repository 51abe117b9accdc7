"""Three tables for the head of a report: products, attention, bytes. Each line has our time of a case, the fastest
opponent's and the paper model's.

The predictions come from a file, because the model needs the emulator, which a machine with a GPU has no time to
compile. `python -m benchmarks model --write` writes it.
"""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks import results
from benchmarks.results import OURS, Measurement

PREDICTED = Path(__file__).resolve().parent / "model" / "predicted_times.json"
TABLES = {"gemm": "Products", "attention": "Attention", "bucket": "Bytes"}  # suite -> title
MOST_LINES = 24  # of a table; of more cases, the slowest relative to their opponents


def name_of(m: Measurement) -> str:
    """The key of a case in PREDICTED, for one GPU."""
    return ", ".join(filter(None, (m.op, m.phase, m.case, m.dtype)))


@functools.cache
def predicted_times() -> Mapping[str, Mapping[str, float]]:
    """Folder of a GPU in benchmarks/results -> name of a case -> microseconds."""
    times: Mapping[str, Mapping[str, float]] = json.loads(PREDICTED.read_text())
    return times


def rate(m: Measurement) -> str:
    if m.suite == "bucket":
        return f"{m.bandwidth / 1e9:.0f} GB/s" if m.bandwidth else ""
    return f"{m.tflops:.1f} TFLOP/s" if m.tflops and m.tflops < 10 else f"{m.tflops:.0f} TFLOP/s" if m.tflops else ""


def line(ours: Measurement, opponent: Measurement | None) -> list[str]:
    assert ours.seconds is not None
    times = predicted_times().get(results.slug(str(ours.environment.get("device", ""))), {})
    predicted = times.get(name_of(ours)) if ours.device == "cuda" else None
    return [
        name_of(ours),
        f"{ours.seconds * 1e6:.1f}",
        rate(ours),
        opponent.side if opponent else "",
        f"{opponent.ratio:.2f}" if opponent else "",
        f"{predicted:.1f}" if predicted else "",
        f"{ours.seconds * 1e6 / predicted - 1:+.0%}" if predicted else "",
    ]


def table(suite: str, measurements: Iterable[Measurement]) -> list[str]:
    """Lines of Markdown, the slowest relative to their opponents first; none without a measurement of the suite."""
    cases = []
    for sides in results.by_case(m for m in measurements if m.suite == suite).values():
        ours = sides.get(OURS)
        if ours is not None and ours.seconds:
            rivals = [m for m in sides.values() if m.side != OURS and m.ratio]
            cases.append((ours, min(rivals, key=lambda m: m.ratio or 0.0, default=None)))
    if not cases:
        return []
    cases.sort(key=lambda case: (case[1] is None, case[1].ratio if case[1] else 0.0))
    ratios = [opponent.ratio for _, opponent in cases if opponent and opponent.ratio]
    shown = cases[:MOST_LINES]
    mean = f", geometric mean of the ratios {statistics.geometric_mean(ratios):.2f}" if ratios else ""
    rest = f"; the {MOST_LINES} slowest relative to their opponents" if len(cases) > len(shown) else ""
    return [
        f"### {TABLES[suite]}: {len(cases)} case{'s' if len(cases) > 1 else ''}{mean}{rest}",
        "",
        "| case | ours, µs | | fastest opponent | its time / ours | predicted, µs | off by |",
        "|---|---:|---:|---|---:|---:|---:|",
        *(f"| {' | '.join(line(*case))} |" for case in shown),
        "",
    ]


def tables(measurements: Iterable[Measurement]) -> list[str]:
    measurements = list(measurements)
    return [text for suite in TABLES for text in table(suite, measurements)]
