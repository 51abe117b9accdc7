"""Runs each suite in a separate process and keeps its measurements, even if that process crashes.

A side that crashes its process, or hangs, gets a row that says so, and a new process continues after it.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from benchmarks.environment import ROOT
from benchmarks.results import OURS, Measurement

# Suites by importance, with their shares of the time; unused time goes to later ones.
SUITES = {
    "gemm": 0.2,
    "attention": 0.27,
    "masks": 0.05,
    "loss": 0.1,
    "experts": 0.05,
    "fp8": 0.03,
    "bucket": 0.15,
    "train": 0.11,
    "overhead": 0.03,
    "build": 0.21,
    "plans": 0.2,  # only if asked for: all choices of our own
}
DEFAULT_SUITES = [suite for suite in SUITES if suite != "plans"]

# Seconds without a message after which a process counts as hung: by device; for imports, and for baselines with a
# compiler, which are slow; for suites whose cases start processes.
SILENCE = {"cpu": 150.0, "cuda": 20.0}
SLOW_SILENCE, SLOW_SIDES = 150.0, re.compile("torch.compile|FlexAttention")
SUITE_SILENCE = {"build": 900.0, "train": 60.0}
CEILINGS = "ceilings"
# Time for each size of each ceiling: a share of the run, and at most this many seconds.
CEILING_SHARE, LONGEST_CEILING = 0.005, 0.7


class Progress(Protocol):
    """Receives each suite with its number of cases (0: unknown), each case and side that begins, and results."""

    def start(self, suite: str, total: int) -> None: ...
    def case(self, text: str) -> None: ...
    def side(self, name: str) -> None: ...
    def done(self, rows: list[Measurement]) -> None: ...


@dataclass
class Plan:
    suites: list[str]
    device: str
    minutes: float
    only: str = ""
    without: str = ""
    timer: str = ""
    against_itself: bool = False
    threads: int = 0
    seed: int = 0
    done: set[tuple[str, ...]] = field(default_factory=set)  # `Measurement.problem` of cases to skip
    silence: float = 0.0  # 0: that of the device
    log: Path | None = None  # for the output of the processes
    command: list[str] = field(default_factory=lambda: [sys.executable, "-m", "benchmarks.suites.worker"])

    def patience(self, suite: str, side: str = "") -> float:
        """Seconds without a message after which the process of a suite counts as hung."""
        if self.silence:
            return self.silence
        return max(
            SILENCE[self.device], SUITE_SILENCE.get(suite, 0.0), SLOW_SILENCE if SLOW_SIDES.search(side) else 0.0
        )


def run(plan: Plan, progress: Progress) -> Iterator[list[Measurement]]:
    """Yields the measurements of each case as soon as they are known."""
    end = time.time() + 60 * plan.minutes
    ceilings = _ceilings(plan, progress)
    left = sum(SUITES[suite] for suite in plan.suites)
    for suite in plan.suites:
        now = time.time()
        deadline = now + (end - now) * SUITES[suite] / left
        left -= SUITES[suite]
        yield from _run_suite(plan, suite, deadline, end, ceilings, progress)


def _ceilings(plan: Plan, progress: Progress) -> dict[str, float]:
    """The highest rate by name; if the process crashes, those measured before."""
    found: dict[str, float] = {}
    progress.start(CEILINGS, 0)
    seconds = min(LONGEST_CEILING, CEILING_SHARE * 60 * plan.minutes)
    with _Worker(plan, {"suite": CEILINGS, "seconds": seconds}) as worker:
        for message in worker.messages(lambda: plan.patience(CEILINGS)):
            if "begins" in message:
                progress.case(message["begins"])
            elif "ceiling" in message:
                found[message["ceiling"]] = max(found.get(message["ceiling"], 0.0), message["rate"])
    return found


def _run_suite(
    plan: Plan, suite: str, deadline: float, end: float, ceilings: dict[str, float], progress: Progress
) -> Iterator[list[Measurement]]:
    first, total, skip = 0, 1, dict[int, dict[str, str]]()
    order: dict[str, Any] = {"suite": suite, "deadline": deadline, "ceilings": ceilings, "only": plan.only}
    order["without"] = plan.without
    order["done"] = sorted(problem for problem in plan.done if problem[1] == suite)

    def patience() -> float:
        """Seconds to wait for the next message: less when the time is over, except for the first case."""
        silence = plan.patience(suite, side)
        return min(silence, max(10.0, end + 30.0 - time.time())) if case > 0 else silence

    while first < total:
        case, side, base = -1, "", None
        with _Worker(plan, order | {"first": first, "skip": skip.get(first, {})}) as worker:
            for message in worker.messages(patience):
                if "total" in message:
                    total = message["total"]
                    if first == 0:
                        progress.start(suite, total)
                elif "case" in message:
                    case, side, base = message["case"], "", Measurement(**message["of"])
                    progress.case(f"{base.op} {base.phase} {base.case} {base.dtype}")
                elif "side" in message:
                    side = message["side"]
                    progress.side(side)
                elif "measurements" in message:
                    rows = [Measurement(**row) for row in message["measurements"]]
                    progress.done(rows)
                    yield rows
                    first, base = case + 1, None
            why = worker.exit_reason()
        if first >= total:
            break
        if base is None:
            if case >= 0:
                continue  # crashed between cases
            # It crashed before the first case: the suite itself is at fault.
            blank = Measurement(suite, "", "", "", "all", "", OURS, plan.device, failure=why)
            progress.start(suite, 1)
            progress.done([blank])
            yield [blank]
            break
        first = case
        if side:
            skip.setdefault(case, {})[side] = why
        else:
            rows = [replace(base, failure=f"while timing: {why}")]
            progress.done(rows)
            yield rows
            first = case + 1


class _Worker:
    """A measuring process, which is killed together with its children."""

    def __init__(self, plan: Plan, order: dict[str, Any]) -> None:
        defaults = {
            "device": plan.device,
            "timer": plan.timer,
            "against_itself": plan.against_itself,
            "threads": plan.threads,
            "seed": plan.seed,
        }
        self._hung = False
        self._log = open(plan.log or os.devnull, "ab")  # noqa: SIM115
        self._process = subprocess.Popen(
            plan.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # messages() notices that it has exited
            # stdin stays open: the worker exits when this process does, even if it is killed.
            self._process.stdin.write(json.dumps(defaults | order).encode() + b"\n")
            self._process.stdin.flush()
        self._lines: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(b"")

    def messages(self, silence: Callable[[], float]) -> Iterator[dict[str, Any]]:
        """Yields messages until the process exits, or is killed after `silence()` seconds without one. The first one,
        which follows its imports, may take `SLOW_SILENCE`."""
        least = SLOW_SILENCE
        while True:
            try:
                line = self._lines.get(timeout=max(silence(), least))
                least = 0.0
            except queue.Empty:
                self._hung = True
                self._kill()
                return
            if not line:
                return
            yield json.loads(line)

    def exit_reason(self) -> str:
        """Why the process ended."""
        if self._hung:
            return "hung"
        status = self._process.wait()
        if status < 0:
            return f"crashed: {signal.Signals(-status).name}"
        return f"crashed: exit status {status}"

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        self._log.close()
