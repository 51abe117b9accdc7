"""Ratios of every case, and their summary: orange where ours is faster, blue where the baseline is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import NullLocator

from benchmarks.presentation.drawing import INK, OTHER_COLOURS, OUR_COLOUR, Sheet
from benchmarks.presentation.formatting import counted, ratio, short, wrapped
from benchmarks.presentation.grouping import baselines, dtype_order, sections, suite_order
from benchmarks.presentation.sides import REFERENCES
from benchmarks.results import OURS, Measurement, by_case, geometric_means

LIMIT = 4.0
RATIO_COLOURS = LinearSegmentedColormap.from_list("ratio", ["#1864ab", "#9cc9ee", "#eef0f2", "#fcc49a", "#d9480f"])
NOT_RUN = "#adb5bd"
CELL_WIDTH, CELL_HEIGHT = 0.74, 0.2
WIDEST = 18.0


@dataclass
class Block:
    """The cases of one op, phase and dtype as rows of a table."""

    title: str
    cases: list[dict[str, Measurement]]

    def __post_init__(self) -> None:
        self.names, self.absent = baselines(self.cases)
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


def draw_ratios(measurements: list[Measurement]) -> Figure | None:
    blocks = [
        Block(f"{suite}: {title}", cases)
        for suite, parts in sections(measurements).items()
        for title, cases in parts.items()
        if baselines(cases)[0]
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
    """Distributes blocks to at most `count` columns of about the same height."""
    total = sum(block.height for block in blocks)
    columns: list[list[Block]] = [[]]
    filled = 0.0
    for block in blocks:
        if columns[-1] and len(columns) < count and filled + block.height / 2 > len(columns) * total / count:
            columns.append([])
        columns[-1].append(block)
        filled += block.height
    return columns


def ratio_colour(value: float) -> tuple[float, float, float]:
    position = 0.5 + math.log(min(max(value, 1 / LIMIT), LIMIT)) / math.log(LIMIT) / 2
    return to_rgb(RATIO_COLOURS(position))


def _ratio_scale(sheet: Sheet) -> None:
    axes = sheet.axes(1.35, 0.1, 1.6, 0.13)
    axes.set(xlim=(-1, 1), ylim=(0, 1))
    for i in range(-32, 32):
        axes.add_patch(Rectangle((i / 32, 0), 1 / 30, 1, facecolor=ratio_colour(LIMIT ** (i / 32)), linewidth=0))
    axes.set_xticks([-1, -0.5, 0, 0.5, 1], [ratio(LIMIT**x) for x in (-1, -0.5, 0, 0.5, 1)])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    sheet.text(1.25, 0.1, "baseline faster", ha="right")
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
                colour, text, size = ratio_colour(m.ratio), ratio(m.ratio), 7.5
                red, green, blue = colour
                ink = "#16191d" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.55 else "#ffffff"
            else:
                ours = sides.get(OURS)
                reason = m.failure if m is not None else ""
                reason = reason or ("ours failed" if ours is not None and ours.failure else "not run")
                colour, text, size, ink = to_rgb(NOT_RUN), short(reason, 15), 5.5, "#16191d"
            axes.add_patch(Rectangle((column + 0.01, row + 0.04), 0.98, 0.92, facecolor=colour, linewidth=0))
            axes.text(column + 0.5, row + 0.52, text, ha="center", va="center", fontsize=size, color=ink)


# The summary, in inches; its text is larger than that of other plots, because the README shows it as wide as a page.
ROW, GAP, NAMES, DOTS, MEANS = 0.25, 0.16, 3.2, 3.9, 1.35
TICKS = (0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 1000)
SPARSE_TICKS = (0.001, 0.01, 0.1, 1, 10, 100, 1000)


def draw_summary(measurements: list[Measurement]) -> Figure | None:
    """Each case as a dot and their geometric mean as a diamond; a row per suite, dtype and baseline."""
    means = {key: mean for key, mean in geometric_means(measurements).items() if key[2] not in REFERENCES}
    if not means:
        return None
    rows = sorted(means, key=lambda key: (suite_order(key[0]), dtype_order(key[1]), -means[key][0]))
    ratios: dict[tuple[str, str, str], list[float]] = {row: [] for row in rows}
    for sides in by_case(measurements).values():
        for m in sides.values():
            if m.ratio and (m.suite, m.dtype, m.side) in ratios:
                ratios[m.suite, m.dtype, m.side].append(m.ratio)
    body = ROW * len(rows) + GAP * len({row[:2] for row in rows})
    sheet = Sheet(NAMES + DOTS + MEANS, body + 0.8)
    axes = sheet.axes(NAMES, 0.45, DOTS, body)
    _summary_axes(axes, [r for values in ratios.values() for r in values], body)
    sheet.text(NAMES, 0.12, "← baseline faster", color=OTHER_COLOURS[0], fontweight="bold", fontsize=10)
    sheet.text(NAMES + DOTS, 0.12, "ours faster →", ha="right", color=OUR_COLOUR, fontweight="bold", fontsize=10)
    sheet.text(sheet.width - 0.1, 0.12, "geometric mean", ha="right", fontsize=9)
    y = 0.0
    for i, row in enumerate(rows):
        if i == 0 or row[:2] != rows[i - 1][:2]:
            y += GAP
            suite, dtype, _ = row
            sheet.text(0.1, 0.45 + y + ROW / 2, suite, fontweight="bold", fontsize=10, va="center_baseline")
            sheet.text(1.0, 0.45 + y + ROW / 2, dtype, fontsize=10, va="center_baseline")
        _summary_row(sheet, axes, y + ROW / 2, row[2], ratios[row], means[row])
        y += ROW
    return sheet.figure


def _summary_axes(axes: Axes, ratios: list[float], body: float) -> None:
    highest = max(max(r, 1 / r) for r in ratios) * 1.15
    right = max(highest, 2.2)
    left = max(1 / right, min(min(ratios) / 1.25, 0.5))
    axes.set(xscale="log", xlim=(left, right), ylim=(body, 0))
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.axvline(1, color=INK, linewidth=1, zorder=1)
    axes.set_yticks([])
    ticks = [t for t in (TICKS if right / left < 2000 else SPARSE_TICKS) if left <= t <= right]
    axes.set_xticks(ticks, [f"{t:g}×" for t in ticks], fontsize=9)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(axis="x", length=0)


def _summary_row(sheet: Sheet, axes: Axes, y: float, name: str, ratios: list[float], mean: tuple[float, int]) -> None:
    value, count = mean
    axes.axhline(y, color=INK, linewidth=0.4, alpha=0.35, zorder=0)
    colours = [OUR_COLOUR if r >= 1 else OTHER_COLOURS[0] for r in ratios]
    axes.scatter(ratios, [y] * len(ratios), s=16, c=colours, alpha=0.45, linewidth=0, zorder=2)
    colour = OUR_COLOUR if value >= 1 else OTHER_COLOURS[0]
    axes.scatter([value], [y], s=48, marker="D", color=colour, linewidth=0, zorder=3)
    style = {"va": "center_baseline", "fontsize": 10}
    sheet.text(NAMES - 0.12, 0.45 + y, short(name, 24), ha="right", **style)
    sheet.text(NAMES + DOTS + 0.15, 0.45 + y, ratio(value), fontweight="bold", color=colour, **style)
    sheet.text(sheet.width - 0.1, 0.45 + y, counted(count, "case"), ha="right", **style | {"fontsize": 8.5})
