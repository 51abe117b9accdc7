"""Measures the cases of one suite in a separate process, because a baseline may crash it.

`python -m benchmarks.suites.worker` reads one line from standard input, the order, a JSON object. When that input ends,
nobody waits for results any more: it exits with all processes it has started. It writes one JSON object per line to
standard output:
  {"begins": "copy"}                  starts to measure a ceiling, if the order is ceilings
  {"ceiling": "copy", "rate": 1e10}   a ceiling of the device, per second
  {"total": 40}                       the number of cases
  {"case": 3, "of": {...}}            starts a case; `of` has the fields of its measurements known so far
  {"side": "torch.matmul"}            the code of this side now runs for the first time; "": that of all sides
  {"measurements": [{...}, ...]}      the measurements of the case
Output of baselines goes to standard error.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import json
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, TextIO

import torch

from benchmarks import environment
from benchmarks.results import OURS, OUT_OF_TIME, Measurement
from benchmarks.suites import measure

# Most seconds for a case, so that the first ones of a suite do not use up its time.
LONGEST = 6.0
# A side is not timed if a call takes longer than PATIENCE times the case's seconds and than LEAST_PATIENCE seconds.
PATIENCE, LEAST_PATIENCE = 2.0, 1.0
COPIED = {"cuda": 1 << 28, "cpu": 1 << 25}  # elements
# Sizes of the products whose rate is a ceiling. Larger ones are omitted once a call is expected to take longer than
# LONGEST_PRODUCT seconds: without a fast kernel, as for bfloat16 on many CPUs, PyTorch takes a thousand times as long.
PRODUCTS = {"cuda": (4096, 8192), "cpu": (256, 512, 1024, 2048)}
LONGEST_PRODUCT = 0.5


def main() -> int:
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    report = _redirect_output()
    torch.manual_seed(order["seed"])
    if order["threads"]:
        torch.set_num_threads(order["threads"])
    if order["suite"] == "ceilings":
        for message in ceilings(order["device"], order["seconds"]):
            _write(report, message)
        return 0
    run(order, report)
    return 0


def run(order: dict[str, Any], report: TextIO) -> None:
    device = order["device"]
    method = measure.Method(device, timer=order["timer"], against_itself=order["against_itself"])
    surroundings = environment.describe(device)
    done = {tuple(problem) for problem in order["done"]}
    suite = order["suite"]
    cases = [
        case
        for case in selected(suite, device, order["only"], order["without"])
        if (device, suite, case.op, case.phase, case.name, case.dtype) not in done
    ]
    _write(report, {"total": len(cases)})
    missing: set[str] = set()
    pace = Pace()
    for number in range(order["first"], len(cases)):
        case = cases[number]
        base = Measurement(
            suite=order["suite"],
            op=case.op,
            phase=case.phase,
            group=case.group,
            case=case.name,
            dtype=case.dtype,
            side=OURS,
            device=device,
            peak_flops=max(order["ceilings"].get(case.dtype, 0.0), order["ceilings"].get("float32", 0.0)),
            peak_bandwidth=order["ceilings"].get("copy", 0.0),
            environment=surroundings,
            date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        )
        _write(report, {"case": number, "of": dataclasses.asdict(base)})
        left = max(0.0, order["deadline"] - time.time())
        # The first case is always measured: on a slow machine, imports may use up the time of a short run.
        if left == 0 and number > 0:
            rows = [dataclasses.replace(base, failure=OUT_OF_TIME)]
        else:
            share = min(LONGEST, 0.8 * left / (len(cases) - number))
            patience = max(LEAST_PATIENCE, PATIENCE * share) if number else math.inf
            skip = pace.too_slow(case, patience)
            if number == order["first"]:
                skip |= order["skip"]
            announce = lambda side: _write(report, {"side": side})  # noqa: E731
            rows = measure.measure(case, base, method, share, announce, skip, patience)
            # A baseline that is not installed is reported once.
            rows = [row for row in rows if row.side not in missing]
            missing |= {row.side for row in rows if row.failure.startswith(measure.NOT_INSTALLED)}
            pace.note(case, rows)
        _write(report, {"measurements": [dataclasses.asdict(row) for row in rows]})
        if device == "cuda" and not _device_works():
            # A kernel has made the device unusable for this process: the next one continues after this case.
            raise SystemExit(1)


def selected(suite: str, device: str, only: str, without: str = "") -> Iterator[measure.Case]:
    """The suite's cases whose op, phase, group, name or dtype matches the regular expression `only`; of their baselines
    those whose name does not match `without`."""
    for case in importlib.import_module(f"benchmarks.suites.bench_{suite}").cases(device):
        if re.search(only, f"{case.op} {case.phase} {case.group} {case.name} {case.dtype}", re.IGNORECASE):
            if without:
                case.sides = {
                    side: maker
                    for side, maker in case.sides.items()
                    if side == OURS or not re.search(without, side, re.IGNORECASE)
                }
            yield case


class Pace:
    """Remembers the speed of the sides, to skip those that would take too long on a larger case."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[str, ...], float] = {}  # per operation, or per byte if those are not counted

    def note(self, case: measure.Case, rows: list[Measurement]) -> None:
        for row in rows:
            if row.seconds and (work := case.flops or case.bytes):
                key = case.op, case.phase, case.dtype, row.side
                self._seconds[key] = min(self._seconds.get(key, math.inf), row.seconds / work)

    def too_slow(self, case: measure.Case, patience: float) -> dict[str, str]:
        """Sides to skip, with the reason."""
        expected = {
            side: self._seconds.get((case.op, case.phase, case.dtype, side), 0.0) * (case.flops or case.bytes)
            for side in case.sides
        }
        return {side: measure.too_slow(seconds) for side, seconds in expected.items() if seconds > patience}


def ceilings(device: str, seconds: float) -> Iterator[dict[str, Any]]:
    """Messages with the ceilings of the device: bytes/s of a large copy, read and written, and FLOP/s of library
    matmuls of growing size, the highest of which counts. `seconds` is the time for each size."""
    method = measure.Method(device)
    count = COPIED[device]
    yield {"begins": "copy"}
    source, target = torch.randn(count, device=device), torch.empty(count, device=device)
    yield {"ceiling": "copy", "rate": 8.0 * count / _median(method, seconds, lambda: target.copy_(source))}
    for dtype in ("float32", "bfloat16", "float16"):
        for n in PRODUCTS[device]:
            yield {"begins": f"{dtype} product of {n}³"}
            a, b = (torch.empty(n, n, device=device).uniform_(-1, 1).to(getattr(torch, dtype)) for _ in range(2))
            took = _median(method, seconds, lambda: torch.matmul(a, b))  # noqa: B023
            yield {"ceiling": dtype, "rate": 2.0 * n**3 / took}
            if 8 * took > LONGEST_PRODUCT:
                break


def _median(method: measure.Method, seconds: float, call: measure.Call) -> float:
    """Median seconds per call: a ceiling is a sustained rate."""
    case = measure.Case("", "", "", "", "float32", {OURS: lambda _: call})
    base = Measurement("", "", "", "", "", "float32", OURS, method.device)
    (row,) = measure.measure(case, base, method, seconds, lambda _: None, {})
    return row.seconds or float("inf")


def _end_with_input() -> None:
    # Not sys.stdin.read: a thread that holds the lock of a file is fatal when the interpreter exits.
    while os.read(0, 1 << 16):
        pass
    os.killpg(0, signal.SIGKILL)


def _device_works() -> bool:
    try:
        torch.cuda.synchronize()
        return True
    except RuntimeError:
        return False


def _redirect_output() -> TextIO:
    """The original standard output; all later output, of Python or a library, goes to standard error."""
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return report


def _write(report: TextIO, message: dict[str, Any]) -> None:
    report.write(json.dumps(message) + "\n")
    report.flush()


if __name__ == "__main__":
    sys.exit(main())
