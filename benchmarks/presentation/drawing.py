"""Shared by all plots: style, colours and markers of the sides, layout in inches, and image files.

A plot does not depend on the day it is drawn, so a plot in the repository changes only with its data. All text has one
colour, INK, legible on white and on black; the HTML page replaces it with its own.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.results import OURS, Measurement

INK = "#767a80"
OUR_COLOUR = "#e8590c"
OTHER_COLOURS = ("#1c7ed6", "#0f9d8a", "#9c5fd6", "#b08900", "#d6569f", "#4c6ef5", "#5c940d", "#868e96")
MARKERS = "sD^vPXphd<>"
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "cuda_ext",
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.labelsize": 7.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "legend.handletextpad": 0.5,
    "legend.columnspacing": 1.4,
    "lines.linewidth": 1.3,
    "lines.markersize": 3.6,
    "lines.markeredgewidth": 0,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def render(figure: Figure, suffix: str) -> bytes:
    """An image file; PNG has a white background, because it may be shown on any page."""
    drawing = suffix == "svg"
    options = {"metadata": {"Date": None, "Creator": None}} if drawing else {"dpi": 130, "facecolor": "white"}
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format=suffix, **options)
    picture = buffer.getvalue()
    # Verdana is as wide, and installed where DejaVu is not.
    return picture.replace(b"'DejaVu Sans'", b"'DejaVu Sans', Verdana, sans-serif") if drawing else picture


class Look:
    """The colour and marker of each side: the same in all plots, and distinct within a suite."""

    def __init__(self, measurements: Iterable[Measurement]) -> None:
        suites: dict[str, set[str]] = {}
        for m in measurements:
            suites.setdefault(m.side, set()).add(m.suite)
        self.styles = {OURS: (OUR_COLOUR, "o")}
        taken: Counter[tuple[str, int]] = Counter()
        for side in sorted(suites.keys() - {OURS}):
            index = min(range(len(OTHER_COLOURS) * 2), key=lambda i: (sum(taken[s, i] for s in suites[side]), i))
            taken.update((suite, index) for suite in suites[side])
            self.styles[side] = (OTHER_COLOURS[index % len(OTHER_COLOURS)], MARKERS[index % len(MARKERS)])

    def line(self, side: str) -> dict[str, Any]:
        colour, marker = self.styles[side]
        ours = side == OURS
        return {"color": colour, "marker": marker, "linewidth": 2.2 if ours else 1.2, "zorder": 5 if ours else 3}

    def handle(self, side: str, line: bool = True) -> Line2D:
        return Line2D([], [], label=side, markersize=5, **self.line(side) | ({} if line else {"linestyle": "none"}))


class Sheet:
    """A figure whose coordinates are inches from its upper left corner."""

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        self.figure = Figure(figsize=(width, height))

    def at(self, x: float, y: float) -> tuple[float, float]:
        return x / self.width, 1 - y / self.height

    def axes(self, x: float, y: float, width: float, height: float) -> Axes:
        return self.figure.add_axes((*self.at(x, y + height), width / self.width, height / self.height))

    def text(self, x: float, y: float, text: str, **style: Any) -> None:
        self.figure.text(*self.at(x, y), text, **{"va": "top"} | style)

    def legend(self, x: float, y: float, handles: list[Line2D], columns: int) -> None:
        place = {"loc": "upper left", "bbox_to_anchor": self.at(x, y), "borderaxespad": 0, "borderpad": 0}
        self.figure.legend(handles=handles, ncols=columns, **place)
