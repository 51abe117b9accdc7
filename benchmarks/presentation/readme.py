"""Writes the README's performance section from the newest results of each device in benchmarks/results."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.presentation import formatting, grouping
from benchmarks.presentation.formatting import counted
from benchmarks.presentation.grouping import Run
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
DEVICES = ("CPU", "NVIDIA A100", "NVIDIA H100", "NVIDIA H200", "NVIDIA RTX 4090")  # those that one asks about
PLOT = "summary"


def section(root: Path = ROOT, link: str = "benchmarks/results") -> str:
    """Between the marks, without them. `link` leads from the README to `root`."""
    folders = {folder: newest(folder) for folder in iter_devices(root)}
    parts = [_device(run, f"{link}/{folder.name}/{PLOT}.svg") for folder, run in folders.items()]
    missing = [name for name in DEVICES if not any(_is(run, name) for run in folders.values())]
    if parts:
        parts.insert(0, f"Geometric means over the cases. {formatting.RATIO_MEANS}.")
    if missing:
        suites = "" if parts else f" (suites {_list(grouping.SUITES)})"
        parts.append(f"Not measured yet: {_list(missing)}{suites}.")
    return "\n\n".join(parts)


def newest(folder: Path) -> Run:
    """Each suite from the newest file in which it was measured; files are named by date."""
    suites: dict[str, list[Measurement]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        found = [m for sides in by_case(grouping.read_some(path)).values() for m in sides.values()]
        measurements = [m for m in found if not m.failure.startswith(OUT_OF_TIME)]
        suites |= {suite: [m for m in measurements if m.suite == suite] for suite in {m.suite for m in measurements}}
    measurements = [m for suite in sorted(suites, key=grouping.suite_order) for m in suites[suite]]
    if not measurements:
        raise ResultsError(f"{folder}: expected cases that were measured, got none; remove it or measure anew")
    grouping.one_device(measurements)
    return Run(measurements)


def _is(run: Run, name: str) -> bool:
    """Whether a device is of that name: "NVIDIA H100 80GB HBM3" is an "NVIDIA H100"."""
    kind = run.measurements[0].device
    words = run.device.replace("-", " ").split()
    return kind == "cpu" if name == "CPU" else kind != "cpu" and set(name.split()[1:]) <= set(words)


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)


def _device(run: Run, plot: str) -> str:
    origins: dict[str, dict[str, None]] = {}  # what is said of a run -> its suites
    for m in run.measurements:
        origins.setdefault(_origin(m), {})[m.suite] = None
    about = [f"{_list(suites)}: {origin}" if len(origins) > 1 else origin for origin, suites in origins.items()]
    ceilings = [formatting.byte_rate(run.bandwidth) + " (copy)"] if run.bandwidth else []
    ceilings += [
        f"{formatting.flop_rate(flops)} ({' '.join([dtype, 'matmul']).strip()})" for dtype, flops in run.flops.items()
    ]
    lines = [
        f"### {run.device}",
        "",
        f"{'; '.join(about)}. Ceilings, measured in the same run: {_list(ceilings) or 'none'}.",
        "",
        "| suite | dtype | baseline, geometric mean (cases) | worst … best | largest case: speed, of the ceiling |",
        "|---|---|---|---|---|",
        *_rows(run),
    ]
    without = [suite for suite in grouping.SUITES if suite not in run.suites]
    if without:
        lines += ["", f"Not measured yet on this device: {_list(without)}."]
    return "\n".join([*lines, "", f"![ratios of all cases on {run.device}]({plot})"])


def _origin(m: Measurement) -> str:
    versions = [f"{name} {m.environment[name]}" for name in ("commit", "torch", "cuda") if m.environment.get(name)]
    return _list([m.date[:10], *versions])


def _rows(run: Run) -> Iterable[str]:
    means = geometric_means(run.measurements)
    groups: dict[tuple[str, str], list[dict[str, Measurement]]] = {}
    for sides in by_case(run.measurements).values():
        first = next(iter(sides.values()))
        groups.setdefault((first.suite, first.dtype), []).append(sides)
    for suite, dtype in sorted(groups, key=lambda key: (grouping.suite_order(key[0]), grouping.dtype_order(key[1]))):
        cases = groups[suite, dtype]
        sides, _ = grouping.opponents(cases)
        of_sides = [(side, means[suite, dtype, side]) for side in sides if (suite, dtype, side) in means]
        against = (f"{side} **{formatting.ratio(mean)}** ({count})" for side, (mean, count) in of_sides)
        ratios = [m.ratio for case in cases for m in case.values() if m.ratio and m.side != OURS]
        worst = f"{formatting.ratio(min(ratios))} … {formatting.ratio(max(ratios))}" if ratios else ""
        ours = [case[OURS] for case in cases if OURS in case]
        yield f"| {suite} | {dtype} | {'; '.join(against) or '–'} | {worst} | {_largest(ours)} |"


def _largest(ours: Sequence[Measurement]) -> str:
    """Of the cases that ran, that with the most arithmetic, or else traffic; and how many did not run."""
    ran = [m for m in ours if m.seconds is not None]
    failed = f"{counted(len(ours) - len(ran), 'case')} failed" if len(ran) < len(ours) else ""
    if not ran:
        return failed
    m = max(ran, key=lambda m: (m.flops, m.bytes, m.size, m.seconds))
    name = " ".join(filter(None, (m.op, m.phase if m.phase not in ("forward", "step") else "", m.case)))
    speed = _list(
        filter(None, (formatting.rate(m) or formatting.duration(m.seconds), formatting.percent(m.of_ceiling), failed))
    )
    return f"{name}: {speed}".replace("|", "\\|")


def updated(text: str, written: str) -> str:
    pattern = re.compile(f"(?<={re.escape(BEGIN)}\n).*?(?={re.escape(END)})", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ResultsError(f"{README}: expected the lines {BEGIN!r} and {END!r} once, in this order; write them there")
    return pattern.sub(lambda _: f"\n{written}\n\n", text)


def main(arguments: Sequence[str]) -> int:
    """0: written, or current; 1: not current; 2: cannot be told."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks readme", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the section is not current")
    args = parser.parse_args(arguments)
    try:
        text = README.read_text()
        new = updated(text, section())
        pictures = [folder / f"{PLOT}.svg" for folder in iter_devices()]
        if args.check:
            missing = [str(path) for path in pictures if not path.is_file()]
            if new != text or missing:
                what = f"{README.name} is not what the results say" if new != text else f"missing: {_list(missing)}"
                print(f"{what}; run `python -m benchmarks readme` and commit what it writes", file=sys.stderr)
                return 1
            return 0
        if pictures:
            from benchmarks.presentation import plots  # here, because the check works without matplotlib

            for path in pictures:
                figure = plots.figures(newest(path.parent).measurements)[PLOT]
                path.write_bytes(plots.render(figure, "svg"))
        README.write_text(new)
    except (ResultsError, OSError, ImportError) as error:
        print(error, file=sys.stderr)
        return 2
    for path in [README, *pictures]:
        print(path)
    return 0
