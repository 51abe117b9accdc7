"""Speed against size, and rooflines: small multiples, each suite under its own legend."""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from benchmarks.presentation.drawing import INK, Look, Sheet
from benchmarks.presentation.formatting import byte_rate, flop_rate, short
from benchmarks.presentation.grouping import suite_order
from benchmarks.results import OURS, Measurement


@dataclass
class Panel:
    title: str
    measurements: list[Measurement]


@dataclass
class Multiples:
    columns: int
    width: float
    height: float
    draw: Callable[[Axes, Panel, Look], None]
    lines: bool

    def figure(self, measurements: list[Measurement], suites: dict[str, list[Panel]]) -> Figure | None:
        if not suites:
            return None
        look = Look(measurements)
        columns = min(self.columns, max(2, *map(len, suites.values()), 2))
        sheet_width = columns * self.width + 0.15
        legends = {suite: self._legend(panels, look, sheet_width) for suite, panels in suites.items()}
        rows = {suite: math.ceil(len(panels) / columns) for suite, panels in suites.items()}
        heads = {suite: 0.3 + 0.18 * math.ceil(len(handles) / abreast) for suite, (handles, abreast) in legends.items()}
        sheet = Sheet(sheet_width, 0.1 + sum(heads[suite] + self.height * rows[suite] for suite in suites))
        top = 0.1
        for suite, panels in suites.items():
            sheet.text(0.15, top, suite, fontsize=12, fontweight="bold")
            sheet.legend(0.15, top + 0.28, *legends[suite])
            top += heads[suite]
            for i, panel in enumerate(panels):
                x, y = (i % columns) * self.width, top + (i // columns) * self.height
                lines = panel.title.count("\n") + 1
                axes = sheet.axes(
                    x + 0.55, y + 0.2 + 0.13 * lines, self.width - 0.75, self.height - 0.75 - 0.13 * lines
                )
                axes.set_title(panel.title)
                axes.grid(axis="y", color=INK, alpha=0.18, linewidth=0.5)
                self.draw(axes, panel, look)
            top += self.height * rows[suite]
        return sheet.figure

    def _legend(self, panels: list[Panel], look: Look, width: float) -> tuple[list[Line2D], int]:
        """The handles, and how many of them fit on a line."""
        sides = sorted({m.side for panel in panels for m in panel.measurements}, key=lambda side: (side != OURS, side))
        handles = [look.handle(side, self.lines) for side in sides]
        handles.append(Line2D([], [], color=INK, linestyle="--", linewidth=1, label=CEILING))
        widths = [0.55 + 0.065 * len(str(handle.get_label())) for handle in handles]
        room = width - 0.3
        return handles, len(handles) if sum(widths) <= room else max(1, int(room / max(widths)))


CEILING = "ceiling of the device"


def _suites(measurements: list[Measurement], title: Callable[[Measurement], str | None]) -> dict[str, list[Panel]]:
    """The panels of each suite: one per title; a title of None omits the measurement."""
    found: dict[str, dict[str, list[Measurement]]] = {}
    for m in sorted(measurements, key=lambda m: suite_order(m.suite)):
        if m.seconds and (name := title(m)) is not None:
            found.setdefault(m.suite, {}).setdefault(name, []).append(m)
    return {suite: [Panel(*panel) for panel in panels.items()] for suite, panels in found.items()}


def draw_speed(measurements: list[Measurement]) -> Figure | None:
    """Speed against size, or time if no work is counted."""

    def title(m: Measurement) -> str | None:
        about = " · ".join(part for part in (m.phase, m.dtype, m.group) if part)
        return f"{short(m.op, 38)}\n{short(about, 38)}" if m.size and m.size_name else None

    suites = _suites(measurements, title)
    for suite, panels in suites.items():
        suites[suite] = [panel for panel in panels if len({m.size for m in panel.measurements}) > 1]
    multiples = Multiples(columns=4, width=3.0, height=2.5, draw=_speed_panel, lines=True)
    return multiples.figure(measurements, {suite: panels for suite, panels in suites.items() if panels})


def _speed_panel(axes: Axes, panel: Panel, look: Look) -> None:
    points = panel.measurements
    work: Callable[[Measurement], float] | None
    if all(m.flops for m in points):
        work, scale, unit = operator.attrgetter("flops"), 1e12, "TFLOP/s"
    elif all(m.bytes for m in points):
        work, scale, unit = operator.attrgetter("bytes"), 1e9, "GB/s"
    else:
        work, scale, unit = None, 1.0, "seconds"
    if unit == "TFLOP/s" and max(m.tflops or 0.0 for m in points) < 1:
        scale, unit = 1e9, "GFLOP/s"
    lines: dict[str, dict[float, list[float]]] = {}
    for m in points:
        assert m.seconds is not None
        value = work(m) / m.seconds / scale if work else m.seconds
        lines.setdefault(m.side, {}).setdefault(m.size, []).append(value)
    for side, by_size in lines.items():
        sizes = sorted(by_size)
        axes.plot(sizes, [statistics.median(by_size[size]) for size in sizes], label=side, **look.line(side))
        others = [(size, value) for size in sizes for value in by_size[size] if len(by_size[size]) > 1]
        if others:
            x, y = zip(*others)
            axes.scatter(x, y, s=4, alpha=0.6, color=look.styles[side][0], linewidth=0, zorder=2)
    ceiling: dict[float, float] = {}
    for m in points:
        if work and m.peak_flops and m.peak_bandwidth:
            highest = work(m) / max(m.flops / m.peak_flops, m.bytes / m.peak_bandwidth) / scale
            ceiling[m.size] = max(ceiling.get(m.size, 0.0), highest)
    if ceiling:
        axes.plot(*zip(*sorted(ceiling.items())), "--", color=INK, linewidth=1, zorder=1, label=CEILING)
    sizes = sorted({m.size for m in points})
    if sizes[-1] >= 4 * sizes[0]:
        axes.set_xscale("log", base=2)
    step = math.ceil(len(sizes) / 6)
    axes.set_xticks(sizes[::-step][::-1], [_count(size) for size in sizes[::-step][::-1]])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(points[0].size_name)
    axes.set_ylabel(unit)
    if work:
        axes.set_ylim(bottom=0)
    else:
        axes.set_yscale("log")


def _count(value: float) -> str:
    for scale, unit in ((1e9, "G"), (1e6, "M")):
        if value >= scale:
            return f"{value / scale:.3g}{unit}"
    return f"{value / 1024:g}k" if value >= 10000 and value % 1024 == 0 else f"{value:g}"


def draw_roofline(measurements: list[Measurement]) -> Figure | None:
    def title(m: Measurement) -> str | None:
        return (m.dtype or m.suite) if m.flops and m.bytes and m.peak_flops and m.peak_bandwidth else None

    multiples = Multiples(columns=3, width=4.1, height=3.2, draw=_roofline_panel, lines=False)
    return multiples.figure(measurements, _suites(measurements, title))


def _roofline_panel(axes: Axes, panel: Panel, look: Look) -> None:
    points = panel.measurements
    flops, bandwidth = max(m.peak_flops for m in points), max(m.peak_bandwidth for m in points)
    scale, unit = (1e12, "TFLOP/s") if flops >= 1e12 else (1e9, "GFLOP/s")
    for side in {m.side: None for m in points}:
        own = [m for m in points if m.side == side]
        style = look.line(side) | {"linestyle": "none", "alpha": 0.85 if side == OURS else 0.6}
        axes.plot(
            [m.flops / m.bytes for m in own], [(m.tflops or 0.0) * 1e12 / scale for m in own], label=side, **style
        )
    ridge, highest = flops / bandwidth, flops / scale
    left = min(ridge / 4, min(m.flops / m.bytes for m in points) / 1.5)
    right = max(ridge * 6, max(m.flops / m.bytes for m in points) * 1.5)
    low = min(highest / 4, min((m.tflops or 0.0) * 1e12 for m in points) / scale / 1.5)
    axes.plot([left, ridge, right], [left / ridge * highest, highest, highest], "--", color=INK, linewidth=1, zorder=1)
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(low, highest * 3))
    axes.set(xlabel="FLOPs per byte", ylabel=unit)
    axes.text(right, highest * 1.15, flop_rate(flops), ha="right", va="bottom", fontsize=7)
    middle = math.sqrt(max(left, low / highest * ridge) * ridge)
    axes.annotate(
        byte_rate(bandwidth),
        (middle, middle / ridge * highest),
        (-2, 3),
        textcoords="offset points",
        rotation=_slope(axes),
        rotation_mode="anchor",
        ha="center",
        va="bottom",
        fontsize=7,
    )
    for axis, (first, last) in ((axes.xaxis, (left, right)), (axes.yaxis, (low, highest * 3))):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if last < 100 * first else (1,), numticks=12))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


def _slope(axes: Axes) -> float:
    """The angle, in degrees, of a line y = x in a plot with logarithmic axes."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    place, (width, height) = axes.get_position(), figure.get_size_inches()
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    up, along = place.height * height / math.log(high / low), place.width * width / math.log(right / left)
    return math.degrees(math.atan2(up, along))
