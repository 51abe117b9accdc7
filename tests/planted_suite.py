"""A worker of `python -m benchmarks` whose suite "gemm" has sides that fail in every way there is."""

from __future__ import annotations

import os
import signal
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.results import OURS
from benchmarks.suites import worker
from benchmarks.suites.measure import Call, Case, relative_error


def make_case(name: str, sides: dict[str, Any]) -> Case:
    return Case(
        op="double",
        phase="forward",
        group="planted",
        name=name,
        dtype="float32",
        sides={OURS: lambda x: lambda: x + x, "good": lambda x: lambda: 2 * x, **sides},
        inputs=lambda: torch.randn(1000),
        check=lambda x, out: relative_error(out, 2 * x.double()),
        flops=1000.0,
        bytes=8000.0,
    )


def is_missing(x: torch.Tensor) -> Call:
    import a_package_that_nobody_has  # noqa: F401

    return lambda: x


def raises(x: torch.Tensor) -> Call:
    raise RuntimeError("no such\nmode")


def crashes(x: torch.Tensor) -> Call:
    os.kill(os.getpid(), signal.SIGSEGV)
    return lambda: x


def hangs(x: torch.Tensor) -> Call:
    time.sleep(1000)
    return lambda: x


def prints(x: torch.Tensor) -> Call:
    os.write(1, b"not a message\n")
    return lambda: 2 * x


class DiesLater:
    """Good when it is checked, and the end of its process when it is timed."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.calls = x, 0

    def __call__(self) -> torch.Tensor:
        self.calls += 1
        if self.calls > 10:
            os._exit(7)
        return 2 * self.x


def cases(device: str) -> Iterator[Case]:
    yield make_case("missing", {"missing": is_missing, "raises": raises})
    yield make_case("wrong", {"wrong": lambda x: lambda: 2.01 * x, "NaN": lambda x: lambda: x * float("nan")})
    yield make_case("shape", {"shape": lambda x: lambda: 2 * x[1:]})
    yield make_case("crash", {"crashes": crashes, "after it": lambda x: lambda: 2 * x})
    yield make_case("hang", {"hangs": hangs})
    yield make_case("chatty", {"prints": prints})
    yield make_case("late", {"dies later": DiesLater})
    yield make_case("last", {})


suite: Any = types.ModuleType("benchmarks.suites.bench_gemm")
suite.cases = cases
sys.modules["benchmarks.suites.bench_gemm"] = suite

if __name__ == "__main__":
    sys.exit(worker.main())
