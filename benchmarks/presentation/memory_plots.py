"""Peak memory against size: one panel for each group of measurements with `extra["peak bytes"]`."""

from __future__ import annotations

from collections.abc import Iterable

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from benchmarks.presentation.drawing import INK, STYLE, Look, Sheet
from benchmarks.presentation.formatting import byte_count, power_of_two
from benchmarks.results import OURS, Measurement

WIDTH, HEIGHT = 3.4, 2.7


def draw_memory(measurements: Iterable[Measurement]) -> Figure | None:
    groups: dict[str, list[Measurement]] = {}
    for m in measurements:
        if m.extra.get("peak bytes"):
            groups.setdefault(m.group, []).append(m)
    if not groups:
        return None
    look = Look(m for group in groups.values() for m in group)
    with matplotlib.rc_context(STYLE):
        sheet = Sheet(WIDTH * len(groups) + 0.15, HEIGHT + 0.35)
        sheet.legend(0.15, 0.1, [look.handle(side) for side in _sides(groups)], columns=len(look.styles))
        for number, (title, points) in enumerate(groups.items()):
            axes = sheet.axes(WIDTH * number + 0.7, 0.65, WIDTH - 0.9, HEIGHT - 0.85)
            axes.set_title(title)
            axes.grid(axis="y", color=INK, alpha=0.18, linewidth=0.5)
            for side in _sides({title: points}):
                line = sorted((m.size, m.extra["peak bytes"]) for m in points if m.side == side)
                axes.plot(*zip(*line), label=side, **look.line(side))
            axes.set(xlabel=points[0].size_name, xscale="log", yscale="log")
            sizes = sorted({m.size for m in points})
            axes.set_xticks(sizes, [power_of_two(size) for size in sizes])
            axes.xaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: byte_count(value)))
            axes.yaxis.set_minor_locator(NullLocator())
    return sheet.figure


def _sides(groups: dict[str, list[Measurement]]) -> list[str]:
    found = {m.side for group in groups.values() for m in group}
    return sorted(found, key=lambda side: (side != OURS, side))
