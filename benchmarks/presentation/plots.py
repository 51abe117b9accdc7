"""Plots of one device's measurements: speed against size, roofline, ratios of every case, and their summary.

Nothing in a plot depends on the day it is drawn, so that a plot kept in the repository changes only with its data. Its
text has one colour, INK, legible on white and on black; a page may put its own in place of it.
"""

from __future__ import annotations

import io
import math
import operator
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from benchmarks.presentation.present import (
    byte_rate,
    counted,
    dtype_order,
    flop_rate,
    one_device,
    opponents,
    ratio,
    sections,
    short,
    suite_order,
    wrapped,
)
from benchmarks.results import OURS, Measurement, by_case, geometric_means

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


def figures(measurements: Iterable[Measurement]) -> dict[str, Figure]:
    """name -> figure, of those for which there is data; raises ResultsError if that is of several devices."""
    measurements = [m for sides in by_case(measurements).values() for m in sides.values()]
    if not measurements:
        return {}
    one_device(measurements)
    drawn = {}
    with matplotlib.rc_context(STYLE):
        for name, draw in {"summary": _summary, "speed": _speed, "roofline": _roofline, "ratios": _ratios}.items():
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


def render(figure: Figure, suffix: str) -> bytes:
    """A picture file; that of pixels has a white ground, as it may end up anywhere."""
    drawing = suffix == "svg"
    options = {"metadata": {"Date": None, "Creator": None}} if drawing else {"dpi": 130, "facecolor": "white"}
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format=suffix, **options)
    picture = buffer.getvalue()
    # Verdana is as wide, and there where DejaVu is not.
    return picture.replace(b"'DejaVu Sans'", b"'DejaVu Sans', Verdana, sans-serif") if drawing else picture


class Look:
    """Which colour and marker a side has: the same in all plots, and no two alike in one suite."""

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

    def line(self, side: str) -> dict[str, object]:
        colour, marker = self.styles[side]
        ours = side == OURS
        return {"color": colour, "marker": marker, "linewidth": 2.2 if ours else 1.2, "zorder": 5 if ours else 3}

    def handle(self, side: str, line: bool = True) -> Line2D:
        return Line2D([], [], label=side, markersize=5, **self.line(side) | ({} if line else {"linestyle": "none"}))


class Sheet:
    """A figure laid out in inches from its upper left corner."""

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


# Small multiples, each suite under its own legend.


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
        """The handles, and how many of them fit abreast."""
        sides = sorted({m.side for panel in panels for m in panel.measurements}, key=lambda side: (side != OURS, side))
        handles = [look.handle(side, self.lines) for side in sides]
        handles.append(Line2D([], [], color=INK, linestyle="--", linewidth=1, label=CEILING))
        widths = [0.55 + 0.065 * len(str(handle.get_label())) for handle in handles]
        room = width - 0.3
        return handles, len(handles) if sum(widths) <= room else max(1, int(room / max(widths)))


CEILING = "ceiling of the device"


def _suites(measurements: list[Measurement], title: Callable[[Measurement], str | None]) -> dict[str, list[Panel]]:
    """The panels of each suite: measurements of equal title; None leaves one out."""
    found: dict[str, dict[str, list[Measurement]]] = {}
    for m in sorted(measurements, key=lambda m: suite_order(m.suite)):
        if m.seconds and (name := title(m)) is not None:
            found.setdefault(m.suite, {}).setdefault(name, []).append(m)
    return {suite: [Panel(*panel) for panel in panels.items()] for suite, panels in found.items()}


def _speed(measurements: list[Measurement]) -> Figure | None:
    """Against size; higher is better where the axis is a speed."""

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
    if all(m.flops for m in points):
        work, scale, unit = operator.attrgetter("flops"), 1e12, "TFLOP/s"
    elif all(m.bytes for m in points):
        work, scale, unit = operator.attrgetter("bytes"), 1e9, "GB/s"
    else:
        work, scale, unit = None, 1.0, "seconds"
    if unit == "TFLOP/s" and max(work(m) / m.seconds for m in points) < 1e12:
        scale, unit = 1e9, "GFLOP/s"
    lines: dict[str, dict[float, list[float]]] = {}
    for m in points:
        value = work(m) / m.seconds / scale if work else m.seconds
        lines.setdefault(m.side, {}).setdefault(m.size, []).append(value)
    for side, by_size in lines.items():
        sizes = sorted(by_size)
        axes.plot(sizes, [statistics.median(by_size[size]) for size in sizes], label=side, **look.line(side))
        others = [(size, value) for size in sizes for value in by_size[size] if len(by_size[size]) > 1]
        if others:
            axes.scatter(*zip(*others), s=4, alpha=0.6, color=look.styles[side][0], linewidth=0, zorder=2)
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


def _roofline(measurements: list[Measurement]) -> Figure | None:
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
        axes.plot([m.flops / m.bytes for m in own], [m.flops / m.seconds / scale for m in own], label=side, **style)
    ridge, highest = flops / bandwidth, flops / scale
    left = min(ridge / 4, min(m.flops / m.bytes for m in points) / 1.5)
    right = max(ridge * 6, max(m.flops / m.bytes for m in points) * 1.5)
    low = min(highest / 4, min(m.flops / m.seconds for m in points) / scale / 1.5)
    axes.plot([left, ridge, right], [left / ridge * highest, highest, highest], "--", color=INK, linewidth=1, zorder=1)
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(low, highest * 3))
    axes.set(xlabel="FLOPs a byte", ylabel=unit)
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
    """Degrees, on the picture, of a line along which y grows as x does, both axes being logarithmic."""
    place, (width, height) = axes.get_position(), axes.figure.get_size_inches()
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    up, along = place.height * height / math.log(high / low), place.width * width / math.log(right / left)
    return math.degrees(math.atan2(up, along))


# Ratios: orange where ours is faster, blue where the other side is.

LIMIT = 4.0
RATIO_COLOURS = LinearSegmentedColormap.from_list("ratio", ["#1864ab", "#9cc9ee", "#eef0f2", "#fcc49a", "#d9480f"])
NOT_RUN = "#adb5bd"
CELL_WIDTH, CELL_HEIGHT = 0.74, 0.2
WIDEST = 18.0


@dataclass
class Block:
    """The cases of one op, phase and dtype, beneath each other."""

    title: str
    cases: list[dict[str, Measurement]]

    def __post_init__(self) -> None:
        self.names, self.absent = opponents(self.cases)
        self.labels = [short(next(iter(sides.values())).case, 36) for sides in self.cases]
        self.label_width = 0.15 + 0.066 * max(map(len, self.labels))
        self.width = max(self.label_width + CELL_WIDTH * len(self.names), 4.1)
        reasons: dict[str, list[str]] = {}
        for side, reason in self.absent.items():
            reasons.setdefault(short(reason, 60), []).append(side)
        note = "; ".join(f"{', '.join(sides)}: {reason}" for reason, sides in reasons.items())
        self.title = fill(self.title, int(self.width / 0.076))
        self.note = fill(note, int(self.width / 0.064)) if note else ""
        self.head = 0.1 + 0.15 * (self.title.count("\n") + 1)
        self.head += 0.08 + 0.12 * max(len(wrapped(name)) for name in self.names)
        self.height = self.head + CELL_HEIGHT * len(self.cases) + 0.2
        self.height += 0.13 * (self.note.count("\n") + 1) if self.note else 0


def _ratios(measurements: list[Measurement]) -> Figure | None:
    blocks = [
        Block(f"{suite}: {title}", cases)
        for suite, parts in sections(measurements).items()
        for title, cases in parts.items()
        if opponents(cases)[0]
    ]
    if not blocks:
        return None
    wanted = round(math.sqrt(sum(block.height for block in blocks) / 4))
    for count in range(max(1, min(4, wanted)), 0, -1):
        columns = _columns(blocks, count)
        widths = [max(block.width for block in column) + 0.35 for column in columns]
        if sum(widths) <= WIDEST:
            break
    heights = [sum(block.height for block in column) for column in columns]
    sheet = Sheet(max(4.6, sum(widths)), max(heights) + 0.6)
    _ratio_scale(sheet)
    left = 0.15
    for column, width in zip(columns, widths):
        top = 0.55
        for block in column:
            _ratio_block(sheet, block, left, top)
            top += block.height
        left += width
    return sheet.figure


def _columns(blocks: list[Block], count: int) -> list[list[Block]]:
    """At most `count`, of about the same height."""
    total = sum(block.height for block in blocks)
    columns: list[list[Block]] = [[]]
    filled = 0.0
    for block in blocks:
        if columns[-1] and len(columns) < count and filled + block.height / 2 > len(columns) * total / count:
            columns.append([])
        columns[-1].append(block)
        filled += block.height
    return columns


def _ratio_colour(value: float) -> tuple[float, float, float]:
    position = 0.5 + math.log(min(max(value, 1 / LIMIT), LIMIT)) / math.log(LIMIT) / 2
    return to_rgb(RATIO_COLOURS(position))


def _ratio_scale(sheet: Sheet) -> None:
    axes = sheet.axes(1.35, 0.1, 1.6, 0.13)
    axes.set(xlim=(-1, 1), ylim=(0, 1))
    for i in range(-32, 32):
        axes.add_patch(Rectangle((i / 32, 0), 1 / 30, 1, facecolor=_ratio_colour(LIMIT ** (i / 32)), linewidth=0))
    axes.set_xticks([-1, -0.5, 0, 0.5, 1], [ratio(LIMIT**x) for x in (-1, -0.5, 0, 0.5, 1)])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    sheet.text(1.25, 0.1, "other side faster", ha="right")
    sheet.text(3.05, 0.1, "ours faster")


def _ratio_block(sheet: Sheet, block: Block, x: float, y: float) -> None:
    axes = sheet.axes(
        x + block.label_width, y + block.head, CELL_WIDTH * len(block.names), CELL_HEIGHT * len(block.cases)
    )
    axes.set(xlim=(0, len(block.names)), ylim=(len(block.cases), 0))
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, pad=3)
    axes.xaxis.tick_top()
    axes.set_xticks(
        [i + 0.5 for i in range(len(block.names))], ["\n".join(wrapped(name)) for name in block.names], fontsize=6.5
    )
    axes.set_yticks([i + 0.5 for i in range(len(block.cases))], block.labels)
    sheet.text(x, y + 0.05, block.title, fontweight="bold")
    if block.note:
        sheet.text(x, y + block.head + CELL_HEIGHT * len(block.cases) + 0.04, block.note, fontsize=7, style="italic")
    for row, sides in enumerate(block.cases):
        for column, name in enumerate(block.names):
            m = sides.get(name)
            if m is not None and m.ratio:
                colour, text, size = _ratio_colour(m.ratio), ratio(m.ratio), 7.5
                red, green, blue = colour
                ink = "#16191d" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.55 else "#ffffff"
            else:
                ours = sides.get(OURS)
                reason = m.failure if m is not None else ""
                reason = reason or ("ours failed" if ours is not None and ours.failure else "not run")
                colour, text, size, ink = to_rgb(NOT_RUN), short(reason, 15), 5.5, "#16191d"
            axes.add_patch(Rectangle((column + 0.01, row + 0.04), 0.98, 0.92, facecolor=colour, linewidth=0))
            axes.text(column + 0.5, row + 0.52, text, ha="center", va="center", fontsize=size, color=ink)


def _summary(measurements: list[Measurement]) -> Figure | None:
    """The ratio of every case as a dot, and their geometric means."""
    means = geometric_means(measurements)
    if not means:
        return None
    rows = sorted(means, key=lambda key: (suite_order(key[0]), dtype_order(key[1]), -means[key][0]))
    groups = {row[:2]: None for row in rows}
    row_height, gap, names, dots = 0.2, 0.12, 3.2, 3.9
    ratios: dict[tuple[str, str, str], list[float]] = {}
    for sides in by_case(measurements).values():
        for m in sides.values():
            if m.ratio and m.side != OURS:
                ratios.setdefault((m.suite, m.dtype, m.side), []).append(m.ratio)
    reach = max(max(max(r, 1 / r) for values in ratios.values() for r in values) * 1.15, 2.2)
    lowest = min(min(values) for values in ratios.values())
    body = row_height * len(rows) + gap * len(groups)
    sheet = Sheet(names + dots + 1.25, body + 0.75)
    axes = sheet.axes(names, 0.35, dots, body)
    left = max(1 / reach, min(lowest / 1.25, 0.5))
    axes.set(xscale="log", xlim=(left, reach), ylim=(body, 0))
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.axvline(1, color=INK, linewidth=0.9, zorder=1)
    axes.set_yticks([])
    ticks = [t for t in (0.01, 0.03, 0.1, 0.25, 0.5, 1, 2, 4, 10, 30, 100, 300, 1000) if left <= t <= reach]
    axes.set_xticks(ticks, [f"{t:g}×" for t in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(axis="x", length=0)
    sheet.text(names + dots, 0.1, "ours faster →", ha="right", color=OUR_COLOUR, fontweight="bold")
    sheet.text(names, 0.1, "← other side faster", color=OTHER_COLOURS[0], fontweight="bold")
    sheet.text(names + dots + 0.15, 0.1, "geometric mean", fontsize=7)
    y = 0.0
    previous = None
    for row in rows:
        suite, dtype, side = row
        if row[:2] != previous:
            y += gap
            sheet.text(0.1, 0.35 + y + row_height / 2, suite, fontweight="bold", va="center_baseline")
            sheet.text(0.95, 0.35 + y + row_height / 2, dtype, va="center_baseline")
            previous = row[:2]
        middle = y + row_height / 2
        axes.axhline(middle, color=INK, linewidth=0.4, alpha=0.35, zorder=0)
        colours = [OUR_COLOUR if r >= 1 else OTHER_COLOURS[0] for r in ratios[row]]
        axes.scatter(ratios[row], [middle] * len(colours), s=11, c=colours, alpha=0.4, linewidth=0, zorder=2)
        mean, count = means[row]
        colour = OUR_COLOUR if mean >= 1 else OTHER_COLOURS[0]
        axes.scatter([mean], [middle], s=34, marker="D", color=colour, linewidth=0, zorder=3)
        sheet.text(names - 0.12, 0.35 + middle, short(side, 26), ha="right", va="center_baseline")
        sheet.text(
            names + dots + 0.15, 0.35 + middle, ratio(mean), va="center_baseline", fontweight="bold", color=colour
        )
        sheet.text(
            sheet.width - 0.1,
            0.35 + middle,
            counted(count, "case"),
            va="center_baseline",
            ha="right",
            fontsize=7,
        )
        y += row_height
    return sheet.figure
