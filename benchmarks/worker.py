"""Measures the cases of one suite in a process of its own, which an opponent may crash: `python -m benchmarks.worker`.

It reads one JSON object from its standard input, the order, and writes one a line to its standard output:
  {"ceiling": "copy", "rate": 1e10}   what the device can do in a second, where that was the order
  {"total": 40}                       how many cases there are
  {"case": 3, "of": {...}}            begins one; `of` is the measurement as far as it is known before
  {"side": "torch.matmul"}            the code that now runs for the first time is this side's; "": that of all
  {"measurements": [{...}, ...]}      what a case gave
What opponents print goes to standard error.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

import torch

from benchmarks import environment, measure
from benchmarks.results import OURS, Measurement

# Of a case, so that a suite's first ones do not take the time of its others where there is plenty.
LONGEST = 6.0


def main() -> int:
    order = json.load(sys.stdin)
    report = _take_standard_output()
    torch.manual_seed(order["seed"])
    if order["threads"]:
        torch.set_num_threads(order["threads"])
    if order["suite"] == "ceilings":
        for name, rate in ceilings(order["device"]):
            _write(report, {"ceiling": name, "rate": rate})
        return 0
    run(order, report)
    return 0


def run(order: dict[str, Any], report: TextIO) -> None:
    device = order["device"]
    method = measure.Method(device, timer=order["timer"], against_itself=order["against_itself"])
    surroundings = environment.describe(device)
    cases = list(selected(order["suite"], device, order["only"]))
    _write(report, {"total": len(cases)})
    missing: set[str] = set()
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
        left = order["deadline"] - time.time()
        if left <= 0:
            rows = [dataclasses.replace(base, failure="out of time")]
        else:
            skip = set(order["skip"]) if number == order["first"] else set()
            share = min(LONGEST, 0.8 * left / (len(cases) - number))
            announce = lambda side: _write(report, {"side": side})  # noqa: E731
            rows = measure.measure(case, base, method, share, announce, skip)
            # That an opponent is not installed is said once.
            rows = [row for row in rows if row.side not in missing]
            missing |= {row.side for row in rows if row.failure.startswith(measure.NOT_INSTALLED)}
        _write(report, {"measurements": [dataclasses.asdict(row) for row in rows]})
        if device == "cuda" and not _device_works():
            # A kernel has left the device unusable for this process: the next one goes on after this case.
            raise SystemExit(1)


def selected(suite: str, device: str, only: str) -> Iterator[measure.Case]:
    """The suite's cases whose op, group, name or dtype matches `only`, a regular expression."""
    for case in importlib.import_module(f"benchmarks.bench_{suite}").cases(device):
        if re.search(only, f"{case.op} {case.phase} {case.group} {case.name} {case.dtype}", re.IGNORECASE):
            yield case


def ceilings(device: str) -> Iterator[tuple[str, float]]:
    """What the device can do in a second: bytes of a large copy, read and written; operations of a library matmul."""
    method = measure.Method(device)
    count = (1 << 28) if device == "cuda" else (1 << 25)
    source, target = torch.randn(count, device=device), torch.empty(count, device=device)
    yield "copy", 8.0 * count / _fastest(method, lambda: target.copy_(source))
    for dtype in ("float32", "bfloat16", "float16"):
        # float16 on a CPU takes PyTorch a hundred times as long.
        sizes = (8192, 4096) if device == "cuda" else (256,) if dtype == "float16" else (2048, 1024)
        for n in sizes:
            a, b = (torch.empty(n, n, device=device).uniform_(-1, 1).to(getattr(torch, dtype)) for _ in range(2))
            yield dtype, 2.0 * n**3 / _fastest(method, lambda: torch.matmul(a, b))  # noqa: B023


def _fastest(method: measure.Method, call: measure.Call) -> float:
    """The median, which is what a ceiling is for: what can be kept up."""
    case = measure.Case("", "", "", "", "float32", {OURS: lambda _: call})
    base = Measurement("", "", "", "", "", "float32", OURS, method.device)
    (row,) = measure.measure(case, base, method, 0.7, lambda _: None, set())
    return row.seconds or float("inf")


def _device_works() -> bool:
    try:
        torch.cuda.synchronize()
        return True
    except RuntimeError:
        return False


def _take_standard_output() -> TextIO:
    """Standard output as it was; what is printed from here on, by Python or by a library, goes to standard error."""
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return report


def _write(report: TextIO, message: dict[str, Any]) -> None:
    report.write(json.dumps(message) + "\n")
    report.flush()


if __name__ == "__main__":
    sys.exit(main())
