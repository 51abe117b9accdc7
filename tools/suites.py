"""What the tools that run PyTorch's own tests on this package share."""

from __future__ import annotations

import re
import sys
import time
import unittest
from collections import Counter
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, TextIO

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def by_name(groups: dict[str, str]) -> dict[str, str]:
    """Test -> reason, of reason -> tests, without "test_"."""
    return {f"test_{name}": reason for reason, names in groups.items() for name in names.split()}


def reason_of(name: str, table: dict[str, str]) -> str:
    """Of a test in a table whose names may be patterns, as those of files; empty if none fits."""
    return next((reason for pattern, reason in table.items() if fnmatchcase(name, pattern)), "")


def is_chosen(name: str, parts: Sequence[str] | None) -> bool:
    """By the options -k of a command."""
    return not parts or any(part in name for part in parts)


def last_error(text: str) -> str:
    """The last exception in a report, without its C++ trace."""
    errors = re.findall(
        r"^(?:[\w.]*(?:Error|Exception|Interrupt)\b.*|Process \d+ terminated or timed out.*)", text, re.M
    )
    return errors[-1] if errors else text.strip().splitlines()[-1]


def run_test(test: unittest.TestCase) -> tuple[str, str]:
    """The outcome, passed, skipped or failed, and why."""
    result = unittest.TestResult()
    test.run(result)
    if result.skipped:
        return "skipped", result.skipped[0][1]
    if result.expectedFailures:
        return "skipped", "expected to fail"
    problems = [*result.errors, *result.failures]
    return ("failed", last_error(problems[0][1])) if problems else ("passed", "")


def judge(outcome: str, why: str, listed: str, verdict: str = "by design") -> tuple[str, str]:
    """The verdict on an outcome, and why.

    Args:
        listed: the reason why the test is expected to fail; empty if it is not.
        verdict: that of such a test.
    """
    if listed and outcome != "skipped":
        return (verdict, f"{listed}: {why}") if outcome == "failed" else ("FAILED", f"passed, but is listed: {listed}")
    return outcome.upper() if outcome == "failed" else outcome, why


def report(
    tests: Sequence[tuple[str, Callable[[], tuple[str, str]]]], environment: str, output: TextIO | None = None
) -> int:
    """Runs tests, which return a verdict and why, and prints a line for each and a summary. The exit status."""
    output = output or sys.stdout
    counts: Counter[str] = Counter()
    begin = time.monotonic()
    for number, (name, run) in enumerate(tests, 1):
        began = time.monotonic()
        verdict, why = run()
        counts[verdict] += 1
        seconds = time.monotonic() - began
        reason = f"  {why}" if why else ""
        print(f"[{number}/{len(tests)}] {verdict:9} {name} {seconds:.1f} s{reason}", file=output, flush=True)
    summary = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    print(f"{summary} in {time.monotonic() - begin:.0f} s, torch {torch.__version__}, {environment}", file=output)
    return int(counts["FAILED"] > 0)


class GPUsAreTheCPU(TorchFunctionMode):
    """Inside, tensors and modules moved to a GPU stay on the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.cuda:
            return args[0]
        if kwargs.get("device") is not None:
            kwargs["device"] = on_cpu(kwargs["device"])
        if func is Tensor.to:
            args = (args[0], *map(on_cpu, args[1:2]), *args[2:])
        return func(*args, **kwargs)


def on_cpu(place: Any) -> Any:
    """Replaces the name, number or device of a GPU by "cpu"; returns anything else unchanged."""
    is_gpu = isinstance(place, int) or (isinstance(place, str | torch.device) and str(place).startswith("cuda"))
    return "cpu" if is_gpu and not isinstance(place, bool) else place
