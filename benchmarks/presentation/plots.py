"""Plots of one device's measurements: speed against size, roofline, ratios of every case, and their summary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from benchmarks.presentation.drawing import STYLE, render
from benchmarks.presentation.grouping import one_device
from benchmarks.presentation.ratio_plots import draw_ratios, draw_summary
from benchmarks.presentation.size_plots import draw_roofline, draw_speed
from benchmarks.results import Measurement, by_case

PLOTS = {"summary": draw_summary, "speed": draw_speed, "roofline": draw_roofline, "ratios": draw_ratios}


def figures(measurements: Iterable[Measurement]) -> dict[str, Figure]:
    """name -> figure, omitting those without data; raises ResultsError if there are several devices."""
    measurements = [m for sides in by_case(measurements).values() for m in sides.values()]
    if not measurements:
        return {}
    one_device(measurements)
    drawn = {}
    with matplotlib.rc_context(STYLE):
        for name, draw in PLOTS.items():
            if (figure := draw(measurements)) is not None:
                drawn[name] = figure
    return drawn


def write_plots(
    measurements: Iterable[Measurement], folder: Path, formats: Sequence[str] = ("png", "svg")
) -> list[Path]:
    """At most four files of each format: summary, speed, roofline and ratios."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in figures(measurements).items():
        for suffix in formats:
            path = folder / f"{name}.{suffix}"
            path.write_bytes(render(figure, suffix))
            paths.append(path)
    return paths
