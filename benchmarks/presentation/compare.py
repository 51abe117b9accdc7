"""Lists where ours became slower from one run to another, beyond the noise of both runs.

A case is slower if its time grew by more than the larger of
  3 %, the error that a comparison of ours with itself may show, and
  four times the spread of both runs, sqrt(old² + new²); each spread is at least the median of its run and suite,
  because few rounds estimate it badly.
If baselines ran in both runs, with the same software, the ratio to them is compared instead of the time (the median, if
there are several): a machine that is slower as a whole slows all sides of a case, which alternate, and the ratio stays.
If the software differs, a baseline may itself have changed: then both time and ratio must exceed the noise. Without a
baseline only the time is known, and a slower machine looks like slower code.

False alarms, according to the tests: one in 250 cases with three rounds, one in 2000 with five or more; at worst, if a
whole run differs by as much as one round from the next, one in 100.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.presentation import formatting, grouping
from benchmarks.presentation.formatting import counted
from benchmarks.presentation.grouping import Run
from benchmarks.results import OURS, OUT_OF_TIME, Measurement, ResultsError, by_case

LEAST = 0.03
FACTOR = 4.0
OF_OURS = {"commit", "cuda_ext"}  # may differ between two environments with the same baselines

Cases = dict[tuple[str, ...], dict[str, Measurement]]


@dataclass(frozen=True)
class Change:
    device: str
    suite: str
    case: str
    old: float  # seconds
    new: float
    slowdown: float  # above 1: slower
    allowed: float  # a slowdown up to this is noise
    by: str  # the evidence: time, ratio or both


@dataclass
class Comparison:
    slower: list[Change] = field(default_factory=list)
    faster: list[Change] = field(default_factory=list)
    same: list[Change] = field(default_factory=list)
    failing: dict[str, str] = field(default_factory=dict)  # cases where only the old run has a time -> reason
    vanished: list[str] = field(default_factory=list)  # not in the new run, perhaps because its time ran out
    appeared: list[str] = field(default_factory=list)

    @property
    def compared(self) -> int:
        return len(self.slower) + len(self.faster) + len(self.same)

    @property
    def passed(self) -> bool:
        return not self.slower and not self.failing


def compare(old: Sequence[Measurement], new: Sequence[Measurement], force: bool = False) -> Comparison:
    """Raises ResultsError if the devices differ, unless `force`, or if no case is in both runs."""
    before, after = _by_device(old), _by_device(new)
    if before.keys() != after.keys():
        if not force:
            raise ResultsError(
                f"expected the same devices in both, got {_names(before)} and {_names(after)}: times of different "
                "devices say nothing about the code; --force compares them anyway"
            )
        before, after = {_names(before): by_case(old)}, {_names(before): by_case(new)}
    result = Comparison()
    for device in before:
        _compare_device(device, before[device], after[device], result)
    if not result.compared and not result.failing:
        raise ResultsError("expected cases that ours ran in both, got none; measure the same suites")
    result.slower.sort(key=lambda change: -change.slowdown)
    result.faster.sort(key=lambda change: change.slowdown)
    return result


def _by_device(measurements: Iterable[Measurement]) -> dict[str, Cases]:
    lists: dict[str, list[Measurement]] = {}
    for m in measurements:
        lists.setdefault(Run([m]).device, []).append(m)
    return {device: by_case(of_device) for device, of_device in sorted(lists.items())}


def _names(devices: dict[str, Cases]) -> str:
    return " and ".join(devices)


def _compare_device(device: str, before: Cases, after: Cases, result: Comparison) -> None:
    usual = [_usual_spreads(before), _usual_spreads(after)]
    for problem, sides in before.items():
        old, new = sides.get(OURS), after.get(problem, {}).get(OURS)
        if old is None or old.seconds is None:
            continue
        name = f"{old.suite}: {formatting.heading(old, old.case)}"
        if new is None or new.failure.startswith(OUT_OF_TIME):
            result.vanished.append(name)
        elif new.seconds is None:
            result.failing[name] = new.failure or grouping.NO_REASON
        else:
            slowdown, allowed, by = _judge(sides, after[problem], usual)
            change = Change(
                device, old.suite, name, old.seconds, new.seconds, math.exp(slowdown), math.exp(allowed), by
            )
            kind = result.slower if slowdown > allowed else result.faster if slowdown < -allowed else result.same
            kind.append(change)
    for problem, sides in after.items():
        new, old = sides.get(OURS), before.get(problem, {}).get(OURS)
        if new is not None and new.seconds is not None and (old is None or old.seconds is None):
            result.appeared.append(f"{new.suite}: {formatting.heading(new, new.case)}")


def _judge(
    before: dict[str, Measurement], after: dict[str, Measurement], usual: list[dict[tuple[str, str], float]]
) -> tuple[float, float, str]:
    """(logarithm of the slowdown, its noise limit, the evidence)."""
    evidence = []
    shared = [side for side, m in before.items() if side != OURS and m.ratio and side in after and after[side].ratio]
    if shared:
        pairs = [(before[side], after[side]) for side in shared]
        changes = [math.log(old.ratio / new.ratio) for old, new in pairs if old.ratio and new.ratio]
        noise = statistics.median(_noise(old, new, "ratio", _ratio_spread, usual) for old, new in pairs)
        by = f"ratio to {shared[0] if len(shared) == 1 else counted(len(shared), 'baseline')}"
        evidence.append((statistics.median(changes), noise, by))
    old, new = before[OURS], after[OURS]
    if not shared or _software(old) != _software(new):
        noise = _noise(old, new, "time", _time_spread, usual)
        assert old.seconds and new.seconds
        evidence.append((math.log(new.seconds / old.seconds), noise, "time"))
    slowdown, noise, _ = min(evidence, key=lambda e: abs(e[0]) / e[1])
    if len({change > 0 for change, _, _ in evidence}) > 1:
        slowdown = 0.0  # they contradict each other
    return slowdown, noise, " and ".join(by for _, _, by in evidence)


def _noise(
    old: Measurement,
    new: Measurement,
    kind: str,
    spread: Callable[[Measurement], float],
    usual: list[dict[tuple[str, str], float]],
) -> float:
    spreads = [max(spread(m), of_run.get((m.suite, kind), 0.0)) for m, of_run in zip((old, new), usual)]
    return max(LEAST, FACTOR * math.hypot(*spreads))


def _usual_spreads(cases: Cases) -> dict[tuple[str, str], float]:
    """(suite, "time" or "ratio") -> the median spread in a run."""
    spreads: dict[tuple[str, str], list[float]] = {}
    for sides in cases.values():
        for m in sides.values():
            if m.side == OURS and m.seconds:
                spreads.setdefault((m.suite, "time"), []).append(_time_spread(m))
            elif m.ratio:
                spreads.setdefault((m.suite, "ratio"), []).append(_ratio_spread(m))
    return {key: statistics.median(values) for key, values in spreads.items()}


def _time_spread(m: Measurement) -> float:
    return m.spread or 0.0


def _ratio_spread(m: Measurement) -> float:
    """Relative, like the spread of times."""
    return (m.ratio_spread or 0.0) / m.ratio if m.ratio else 0.0


def _software(m: Measurement) -> dict[str, object]:
    return {name: value for name, value in m.environment.items() if name not in OF_OURS}


def _lines(result: Comparison, everything: bool) -> Iterable[str]:
    def changes(title: str, found: list[Change]) -> Iterable[str]:
        if found:
            yield f"{title}:"
        width = max((len(change.case) for change in found), default=0)
        for c in found:
            judged = f"{c.slowdown:.2f}× as long (noise up to {formatting.ratio(c.allowed)})"
            times = f"{formatting.duration(c.old)} → {formatting.duration(c.new)}"
            yield f"  {judged}  {c.case:<{width}}  {times}, by {c.by}"

    yield from changes("slower", result.slower)
    if result.failing:
        yield "newly failing:"
        yield from (f"  {case}: {' '.join(reason.split())}" for case, reason in result.failing.items())
    if result.vanished:
        yield "vanished:"
        yield from (f"  {case}" for case in result.vanished)
    if everything:
        yield from changes("faster", result.faster)
        yield from changes("within the noise", result.same)
        if result.appeared:
            yield "new:"
            yield from (f"  {case}" for case in result.appeared)
    yield (
        f"{counted(result.compared, 'case')} compared: {len(result.slower)} slower, {len(result.faster)} faster, "
        f"{len(result.same)} within the noise; {len(result.failing)} newly failing, {len(result.vanished)} vanished, "
        f"{len(result.appeared)} new"
    )
    if allowed := [change.allowed for change in result.slower + result.faster + result.same]:
        yield f"a slowdown from {formatting.ratio(statistics.median(allowed))} on would be noticed in half of the cases"


def main(arguments: Sequence[str]) -> int:
    """Returns 0 if nothing is slower, 1 if a case is slower or fails now, 2 if the runs cannot be compared."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, help="a .jsonl file, or a folder that contains some")
    parser.add_argument("new", type=Path, help="the same for the later run")
    parser.add_argument("--all", action="store_true", help="also list cases that are faster, unchanged or new")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    parser.add_argument("--force", action="store_true", help="compare even if the devices differ")
    args = parser.parse_args(arguments)
    try:
        result = compare(grouping.read_some(args.old), grouping.read_some(args.new), args.force)
    except ResultsError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(asdict(result), indent=1) if args.json else "\n".join(_lines(result, args.all)))
    return 0 if result.passed else 1
