"""Writes the README's performance section from the newest results of each device in benchmarks/results."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.presentation import formatting, grouping
from benchmarks.presentation.formatting import counted
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
END = "<!-- end -->"
DEVICES = ("CPU", "NVIDIA A100", "NVIDIA H100", "NVIDIA H200", "NVIDIA RTX 4090")  # devices that readers ask about
PLOT = "summary"
NOISE = 0.03  # a mean this close to 1 is no difference
LEGEND = (
    "Each number is the geometric mean of baseline time / our time over the cases: 2.00× means that ours takes "
    "half the time. In parentheses: the slowest and the fastest case, and the number of cases."
)


def section(root: Path = ROOT, link: str = "benchmarks/results") -> str:
    """The text between the marks. `link` is the path from the README to `root`."""
    folders = {folder: newest(folder) for folder in iter_devices(root)}
    parts = [_device(run, f"{link}/{folder.name}/{PLOT}.svg", read_notes(folder)) for folder, run in folders.items()]
    missing = [name for name in DEVICES if not any(_is(run, name) for run in folders.values())]
    if parts:
        parts.insert(0, LEGEND)
    if missing:
        suites = "" if parts else f" (suites {_list(grouping.SUITES)})"
        parts.append(f"Not measured yet: {_list(missing)}{suites}.")
    return "\n\n".join(parts)


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
    lines = [f"### {run.device}", "", f"![baseline time / our time of all cases on {run.device}]({plot})", ""]
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
    ratios = [sides[name].ratio or 0.0 for sides in cases if name in sides and sides[name].ratio]
    value, count = mean
    span = f"{formatting.ratio(min(ratios))[:-1]}–{formatting.ratio(max(ratios))[:-1]}, " if count > 1 else ""
    return f"**{formatting.ratio(value)}** ({span}{count})"


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


def updated(text: str, written: str) -> str:
    pattern = re.compile(f"(?<={re.escape(BEGIN)}\n).*?(?={re.escape(END)})", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ResultsError(f"{README}: expected the lines {BEGIN!r} and {END!r} once, in this order; add them")
    return pattern.sub(lambda _: f"\n{written}\n\n", text)


def main(arguments: Sequence[str]) -> int:
    """Returns 0 if the section is written or current, 1 if it is not, 2 on an error."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks readme", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if it is not current")
    args = parser.parse_args(arguments)
    try:
        text = README.read_text()
        new = updated(text, section())
        pictures = [folder / f"{PLOT}.svg" for folder in iter_devices()]
        if args.check:
            missing = [str(path) for path in pictures if not path.is_file()]
            if new != text or missing:
                what = f"{README.name} does not match the results" if new != text else f"missing: {_list(missing)}"
                print(f"{what}; run `python -m benchmarks readme` and commit the changes", file=sys.stderr)
                return 1
            return 0
        for path in pictures:
            for problem in unexplained(path.parent):
                print(f"{path.parent}: {problem}", file=sys.stderr)
        if pictures:
            from benchmarks.presentation import drawing, plots  # not above: --check works without matplotlib

            for path in pictures:
                figure = plots.figures(newest(path.parent).measurements)[PLOT]
                path.write_bytes(drawing.render(figure, "svg"))
        README.write_text(new)
    except (ResultsError, OSError, ImportError) as error:
        print(error, file=sys.stderr)
        return 2
    for path in [README, *pictures]:
        print(path)
    return 0
