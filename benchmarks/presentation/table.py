"""Tables for terminals of any width; coloured if rich is installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.presentation import formatting, grouping
from benchmarks.presentation.formatting import counted
from benchmarks.results import OURS, Measurement, by_case, geometric_means

if TYPE_CHECKING:
    from rich.console import Console

NOISE = 0.03  # a ratio closer to 1 has no colour


class Cell(NamedTuple):
    text: str
    style: str = ""  # of rich


Line = list[Cell]


def show(measurements: Sequence[Measurement], console: Console | None = None) -> None:
    """A table per suite, then geometric means."""
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        for line in lines(measurements, shutil.get_terminal_size((100, 24)).columns):
            print("".join(cell.text for cell in line).rstrip())
        return
    console = console or Console()
    for line in lines(measurements, console.width):
        console.print(Text.assemble(*line), no_wrap=True, overflow="ellipsis", crop=True, highlight=False)


def lines(measurements: Sequence[Measurement], width: int) -> list[Line]:
    """No line is longer than `width`, if that is at least 40."""
    found: list[Line] = []
    for suite in sorted({m.suite for m in measurements}, key=grouping.suite_order):
        found += _suite(suite, [m for m in measurements if m.suite == suite], width)
    return found + _means(measurements, width)


def _suite(suite: str, measurements: Sequence[Measurement], width: int) -> list[Line]:
    parts = grouping.sections(measurements).get(suite, {})
    names, absent = grouping.baselines(by_case(measurements).values())
    rows = [_row(sides, names) for cases in parts.values() for sides in cases]
    found: list[Line] = [[], *_wrap([Cell(suite, "bold")], width)]
    blocks = _stacked(rows, names, width) if rows else []
    for breadth in (13, 8) if rows else ():
        head = _head(["", OURS, "speed", "ceiling", *names], breadth)
        used = [any(row[i].text for row in rows) for i in range(len(head[0]))]
        if laid := _grid([list(compress(row, used)) for row in head + rows], 1, width):
            found += laid[: len(head)]
            blocks = [[line] for line in laid[len(head) :]]
            break
    for title, cases in parts.items():
        found += _wrap([Cell(title, "cyan")], width)
        found += [line for block in blocks[: len(cases)] for line in block]
        blocks = blocks[len(cases) :]
    return found + _reasons(measurements, absent, width)


def _reasons(measurements: Sequence[Measurement], absent: Iterable[str], width: int) -> list[Line]:
    """The reasons for missing times: of `absent` sides, or with the number or the names of the cases."""
    reasons: dict[str, list[str]] = {}
    for (_, side, reason), failed in grouping.failures(measurements).items():
        if side not in absent:
            few = side == OURS and len(failed) < 3 and failed[0].case
            side += ", " + (
                " and ".join(formatting.heading(m, m.case) for m in failed) if few else counted(len(failed), "case")
            )
        reasons.setdefault(" ".join(reason.split()), []).append(side)
    return [
        line
        for reason, who in reasons.items()
        for line in _wrap([Cell(word, "dim") for word in f"{', '.join(who)}: {reason}".split()], width, 2, gap=1)
    ]


def _head(names: list[str], breadth: int) -> list[list[Cell]]:
    """Column heads on as many lines as the longest needs, aligned at the bottom."""
    wrapped = [formatting.wrapped(name, breadth) for name in names]
    height = max(map(len, wrapped))
    padded = [[""] * (height - len(parts)) + parts for parts in wrapped]
    return [[Cell(parts[i], "dim") for parts in padded] for i in range(height)]


def _row(sides: dict[str, Measurement], names: list[str]) -> list[Cell]:
    """Case, our time, speed and fraction of the ceiling, then the ratio of each baseline."""
    first, ours = next(iter(sides.values())), sides.get(OURS)
    cells = [Cell("  " + first.case)]
    if ours is None or ours.seconds is None:
        cells += [Cell("failed" if ours else "not run", "bold red"), Cell(""), Cell("")]
    else:
        texts = formatting.duration(ours.seconds), formatting.rate(ours), formatting.percent(ours.of_ceiling)
        cells += [Cell(texts[0], "bold"), Cell(texts[1]), Cell(texts[2], "dim")]
    for name in names:
        m = sides.get(name)
        if m is None:
            cells.append(Cell(""))
        elif m.seconds is None:
            cells.append(Cell(formatting.short(m.failure, 7), "dim"))
        else:
            cells.append(_ratio(m.ratio) if m.ratio is not None else Cell(formatting.duration(m.seconds)))
    return cells


def _ratio(value: float) -> Cell:
    return Cell(formatting.ratio(value), "green" if value > 1 + NOISE else "red" if value < 1 - NOISE else "")


def _stacked(rows: list[list[Cell]], names: list[str], width: int) -> list[list[Line]]:
    """For a narrow terminal: the baselines below the case, each with its name."""
    aligned = _grid([row[:4] for row in rows], 1, width)
    found = []
    for i, row in enumerate(rows):
        own = [aligned[i]] if aligned else _wrap([cell for cell in row[:4] if cell.text], width, hang=4)
        others = [Cell(f"{name} {cell.text}", cell.style) for name, cell in zip(names, row[4:]) if cell.text]
        found.append(own + _wrap(others, width, indent=4))
    return found


def _means(measurements: Sequence[Measurement], width: int) -> list[Line]:
    means = geometric_means(measurements)
    if not means:
        return []
    order = sorted(means, key=lambda key: (grouping.suite_order(key[0]), grouping.dtype_order(key[1]), key[2]))
    rows = []
    for key in order:
        mean, count = means[key]
        rows.append([*map(Cell, key), _ratio(mean), Cell(counted(count, "case"), "dim")])
    laid = _grid(rows, 3, width) or [line for row in rows for line in _wrap(row, width, hang=4)]
    about = [Cell(word, "dim") for word in (formatting.RATIO_MEANS + ".").split()]
    return [[], *_wrap([Cell("geometric means of the ratios", "bold")], width), *laid, *_wrap(about, width, gap=1)]


def _grid(rows: list[list[Cell]], left: int, width: int) -> list[Line] | None:
    """Cells in columns, the first `left` columns left-aligned; None if they do not fit."""
    widths = [max(len(row[i].text) for row in rows) for i in range(len(rows[0]))]
    if sum(widths) + 2 * (len(widths) - 1) > width:
        return None
    found = []
    for row in rows:
        line: Line = []
        for i, (cell, wide) in enumerate(zip(row, widths)):
            text = cell.text.ljust(wide) if i < left else cell.text.rjust(wide)
            line += [Cell("  " * (i > 0)), cell._replace(text=text)]
        found.append(line)
    return found


def _wrap(cells: Iterable[Cell], width: int, indent: int = 0, hang: int = 0, gap: int = 2) -> list[Line]:
    """Fills lines with cells; later lines are indented by `hang` more. A cell longer than a line is cut."""
    found: list[Line] = []
    used = 0
    for cell in cells:
        if found and used + gap + len(cell.text) <= width:
            found[-1].append(Cell(" " * gap))
            used += gap
        else:
            used = indent + hang * bool(found)
            found.append([Cell(" " * used)])
        text = cell.text if used + len(cell.text) <= width else cell.text[: width - used - 1] + "…"
        found[-1].append(cell._replace(text=text))
        used += len(text)
    return found
