"""Writes benchmarks/results/README.md, with tables of the newest results of each device, and the README's summary."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.presentation import formatting, grouping
from benchmarks.presentation.formatting import counted, with_section
from benchmarks.presentation.grouping import Run
from benchmarks.presentation.sides import MEANINGS, REFERENCES
from benchmarks.results import (
    OURS,
    OUT_OF_TIME,
    ROOT,
    Measurement,
    ResultsError,
    by_case,
    geometric_means,
    iter_devices,
)

README = ROOT.parent.parent / "README.md"
BEGIN = "<!-- written by python -m benchmarks readme -->"
DEVICES = ("CPU", "NVIDIA A100", "NVIDIA H100", "NVIDIA H200", "NVIDIA RTX 4090")  # devices that readers ask about
PLOT = "summary"
NOISE = 0.03  # a mean this close to 1 is no difference
LEGEND = (
    "Each number is the geometric mean of baseline time / our time over the cases: 2.00× means that ours takes "
    "half the time. In parentheses: the slowest and the fastest case, and the number of cases."
)
SUMMARY = (
    "Time of the fastest baseline of each case / our time: 2.00× means that ours takes half the time. Each number is "
    "the geometric mean; in parentheses: the slowest and the fastest case, and the number of cases."
)
DETAILS = (
    "[benchmarks/results](benchmarks/results/README.md) has the baselines, dtypes, speeds and versions, and why some "
    "cases are slow."
)


def section(root: Path) -> str:
    """The README's summary: a row per suite and a column per device."""
    runs = [newest(folder) for folder in iter_devices(root)]
    if not runs:
        return not_measured(runs)
    columns = [{suite: _fastest(run, suite) for suite in run.suites} for run in runs]
    rows = [["", *(run.device for run in runs)], ["---"] * (1 + len(runs))]
    rows += [[suite, *(column.get(suite, "") for column in columns)] for suite in grouping.SUITES]
    table = [f"| {' | '.join(row)} |" for row in rows if any(row[1:])]
    return "\n".join([SUMMARY, "", *table, "", f"{DETAILS} {not_measured(runs)}"])


def _fastest(run: Run, suite: str) -> str:
    """Our speed relative to the fastest baseline of each case of a suite; empty if there are no baselines."""
    ratios = []
    for sides in by_case(m for m in run.measurements if m.suite == suite).values():
        of_case = [m.ratio for side, m in sides.items() if side not in (OURS, *REFERENCES) and m.ratio]
        ratios += [min(of_case)] if of_case else []
    return _mean(statistics.geometric_mean(ratios), ratios) if ratios else ""


def page(root: Path) -> str:
    """The tables of all devices."""
    folders = {folder: newest(folder) for folder in iter_devices(root)}
    parts = [_device(run, f"{folder.name}/{PLOT}.svg", read_notes(folder)) for folder, run in folders.items()]
    return "\n\n".join(["# Measurements", BEGIN, LEGEND, *parts]) + "\n"


def not_measured(runs: Collection[Run]) -> str:
    missing = [name for name in DEVICES if not any(_is(run, name) for run in runs)]
    return f"Not measured yet: {_list(missing)}." if missing else ""


def read_notes(folder: Path) -> dict[str, str]:
    """suite -> what a reader should know about its numbers, from DATE.notes.json next to DATE.jsonl.

    A note is dropped as soon as its suite is measured again, because newer files take its place.
    """
    notes: dict[str, str] = {}
    for path in sorted(folder.glob("*.jsonl")):
        measured = {m.suite for m in grouping.read_some(path)}
        notes = {suite: text for suite, text in notes.items() if suite not in measured}
        written = path.with_suffix(".notes.json")
        if written.is_file():
            notes |= json.loads(written.read_text())
    return notes


def unexplained(folder: Path) -> Iterable[str]:
    """Baselines that are faster than ours on average where no note says why."""
    notes = read_notes(folder)
    for (suite, dtype, side), (mean, _) in geometric_means(newest(folder).measurements).items():
        if mean < 1 - NOISE and side not in REFERENCES and suite not in notes:
            found = f"{suite}, {dtype}: {side} is faster than ours ({formatting.ratio(mean)})"
            yield f"{found}; write the reason to a DATE.notes.json, see read_notes in {Path(__file__).name}"


def newest(folder: Path) -> Run:
    """Each suite from the newest file that has it; files are named by date."""
    suites: dict[str, list[Measurement]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        found = [m for sides in by_case(grouping.read_some(path)).values() for m in sides.values()]
        measurements = [m for m in found if not m.failure.startswith(OUT_OF_TIME)]
        suites |= {suite: [m for m in measurements if m.suite == suite] for suite in {m.suite for m in measurements}}
    measurements = [m for suite in sorted(suites, key=grouping.suite_order) for m in suites[suite]]
    if not measurements:
        raise ResultsError(f"{folder}: expected cases that were measured, got none; remove it or measure again")
    grouping.one_device(measurements)
    return Run(measurements)


def _is(run: Run, name: str) -> bool:
    """Whether the device has that name: "NVIDIA H100 80GB HBM3" is an "NVIDIA H100"."""
    kind = run.measurements[0].device
    words = run.device.replace("-", " ").split()
    return kind == "cpu" if name == "CPU" else kind != "cpu" and set(name.split()[1:]) <= set(words)


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)


def _device(run: Run, plot: str, notes: Mapping[str, str]) -> str:
    origins: dict[str, dict[str, None]] = {}  # commit and versions -> the suites measured with them
    for m in run.measurements:
        origins.setdefault(_origin(m), {})[m.suite] = None
    about = [f"{_list(suites)}: {origin}" if len(origins) > 1 else origin for origin, suites in origins.items()]
    ceilings = [formatting.byte_rate(run.bandwidth) + " (copy)"] if run.bandwidth else []
    ceilings += [
        f"{formatting.flop_rate(flops)} ({' '.join([dtype, 'matmul']).strip()})" for dtype, flops in run.flops.items()
    ]
    means = geometric_means(run.measurements)
    lines = [f"## {run.device}", "", f"![baseline time / our time of all cases on {run.device}]({plot})", ""]
    for suite in run.suites:
        lines += [*_suite(suite, [m for m in run.measurements if m.suite == suite], means), ""]
        if suite in notes:
            lines += [notes[suite], ""]
    lines += _references(means)
    lines.append(f"Measured: {'; '.join(about)}. Ceilings, measured in the same run: {_list(ceilings) or 'none'}.")
    without = [suite for suite in grouping.SUITES if suite not in run.suites]
    if without:
        lines += ["", f"Not measured yet on this device: {_list(without)}."]
    return "\n".join(lines)


def _origin(m: Measurement) -> str:
    versions = [f"{name} {m.environment[name]}" for name in ("commit", "torch", "cuda") if m.environment.get(name)]
    return _list([m.date[:10], *versions])


Means = Mapping[tuple[str, str, str], tuple[float, int]]


def _suite(suite: str, measurements: Sequence[Measurement], means: Means) -> Iterable[str]:
    """A table with a row per dtype and a column per baseline, then the meaning of the columns."""
    dtypes: dict[str, list[dict[str, Measurement]]] = {}
    for sides in by_case(measurements).values():
        dtypes.setdefault(next(iter(sides.values())).dtype, []).append(sides)
    names, _ = grouping.baselines(sides for cases in dtypes.values() for sides in cases)
    baselines = [name for name in names if name not in REFERENCES]
    if not baselines:
        yield f"{suite}: {_largest([sides[OURS] for cases in dtypes.values() for sides in cases if OURS in sides])}"
        return
    yield f"| {suite} | {' | '.join([*baselines, 'largest case: speed, of the ceiling'])} |"
    yield "|---" * (2 + len(baselines)) + "|"
    for dtype in sorted(dtypes, key=grouping.dtype_order):
        ours = [sides[OURS] for sides in dtypes[dtype] if OURS in sides]
        cells = [_cell(means.get((suite, dtype, name)), dtypes[dtype], name) for name in baselines]
        yield f"| {' | '.join([dtype, *cells, _largest(ours)])} |"
    if explained := [f"{name}: {MEANINGS[name]}" for name in baselines if name in MEANINGS]:
        yield ""
        yield f"{'; '.join(explained)}."


def _cell(mean: tuple[float, int] | None, cases: Iterable[dict[str, Measurement]], name: str) -> str:
    """ "**1.08×** (0.97–1.15, 5)" """
    if mean is None:
        return ""
    return _mean(mean[0], [sides[name].ratio or 0.0 for sides in cases if name in sides and sides[name].ratio])


def _mean(mean: float, ratios: Sequence[float]) -> str:
    span = f"{formatting.ratio(min(ratios))[:-1]}–{formatting.ratio(max(ratios))[:-1]}, " if len(ratios) > 1 else ""
    return f"**{formatting.ratio(mean)}** ({span}{len(ratios)})"


def _references(means: Means) -> Iterable[str]:
    found = [(suite, dtype, side) for suite, dtype, side in means if side in REFERENCES]
    if found:
        yield "For scale, not baselines: lower bounds and other options of ours."
        yield ""
        yield "| suite | reference | its time / our time |"
        yield "|---|---|---|"
    for suite, dtype, side in found:
        value, count = means[suite, dtype, side]
        yield f"| {_list(filter(None, (suite, dtype)))} | {REFERENCES[side]} | {formatting.ratio(value)} ({count}) |"
    if found:
        yield ""


def _largest(ours: Sequence[Measurement]) -> str:
    """The case with the most arithmetic, or else traffic; and how many cases failed."""
    ran = [m for m in ours if m.seconds is not None]
    failed = f"{counted(len(ours) - len(ran), 'case')} failed" if len(ran) < len(ours) else ""
    if not ran:
        return failed
    m = max(ran, key=lambda m: (m.flops, m.bytes, m.size, m.seconds))
    name = " ".join(
        filter(None, (m.op if m.op != m.suite else "", m.phase if m.phase not in ("forward", "step") else "", m.case))
    )
    speed = _list(
        filter(None, (formatting.rate(m) or formatting.duration(m.seconds), formatting.percent(m.of_ceiling), failed))
    )
    return f"{name}: {speed}".replace("|", "\\|")


def main(arguments: Sequence[str]) -> int:
    """Returns 0 if both pages are written or current, 1 if they are not, 2 on an error."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks readme", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if they are not current")
    args = parser.parse_args(arguments)
    try:
        pages = {README: with_section(README, BEGIN, f"\n{section(ROOT)}\n\n"), ROOT / "README.md": page(ROOT)}
        pictures = [folder / f"{PLOT}.svg" for folder in iter_devices(ROOT)]
        if args.check:
            wrong = [str(path) for path, text in pages.items() if not path.is_file() or path.read_text() != text]
            wrong += [str(path) for path in pictures if not path.is_file()]
            if wrong:
                print(f"not current: {_list(wrong)}; run `python -m benchmarks readme` and commit", file=sys.stderr)
            return int(bool(wrong))
        for path in pictures:
            for problem in unexplained(path.parent):
                print(f"{path.parent}: {problem}", file=sys.stderr)
        if pictures:
            from benchmarks.presentation import drawing, plots  # not above: --check works without matplotlib

            for path in pictures:
                figure = plots.figures(newest(path.parent).measurements)[PLOT]
                path.write_bytes(drawing.render(figure, "svg"))
        for path, text in pages.items():
            path.write_text(text)
    except (ResultsError, OSError, ImportError) as error:
        print(error, file=sys.stderr)
        return 2
    for path in [*pages, *pictures]:
        print(path)
    return 0
