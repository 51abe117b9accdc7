"""Runs all tests, and continues in a new process when a test breaks the process it runs in.

    python tests/relay.py [--patience SECONDS] [--record FILE] [arguments of pytest]

After a bad access to the memory of a GPU every later CUDA call of the process fails, and a kernel that waits forever
never ends. The remaining tests then run in a new process. As a pytest plugin (`-p relay`) this file records which tests
were started and how they ended. With --record the record is kept, and another call continues an interrupted run.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

RECORD = "CUDA_EXT_TEST_RECORD"
BEGUN, SPOILT = "begun", 86  # an exit status that pytest does not use
STARTING = 120.0  # seconds until the first test of a process, which loads PyTorch first


# In the process that runs the tests


def note(word: str, nodeid: str) -> None:
    with open(os.environ[RECORD], "a") as file:
        file.write(f"{word}\t{nodeid}\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    done = outcomes(Path(os.environ[RECORD]))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
    items[:] = [item for item in items if item.nodeid not in done]


def pytest_runtest_logstart(nodeid: str) -> None:
    note(BEGUN, nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or not report.passed:
        note(report.outcome, report.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    result = yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            note("lost", item.nodeid)
            pytest.exit(f"{item.nodeid} has cost this process the GPU: {str(error).splitlines()[0]}", SPOILT)
    return result


# In the process that starts them


def outcomes(record: Path) -> dict[str, str]:
    """The worst recorded outcome of each test."""
    order = (BEGUN, "skipped", "passed", "failed", "lost", "hung", "crashed")
    worst: dict[str, str] = {}
    for line in record.read_text().splitlines():
        word, _, nodeid = line.partition("\t")
        worst[nodeid] = max(worst.get(nodeid, BEGUN), word, key=order.index)
    return worst


def run_once(arguments: Sequence[str], record: Path, patience: float) -> tuple[int, str]:
    """Runs pytest once; returns its exit status and, if it ended within a test, the reason."""
    here = str(Path(__file__).resolve().parent)
    path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "pytest", "-p", "relay", "-v", "--tb=short", "-p", "no:cacheprovider"]
    # A file that cannot be collected is an error, but the others run.
    command += ["--continue-on-collection-errors", *arguments]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path, RECORD: str(record)})
    size, since, limit = record.stat().st_size, time.monotonic(), max(patience, STARTING)
    while process.poll() is None:
        time.sleep(0.05)
        if record.stat().st_size != size:
            size, since, limit = record.stat().st_size, time.monotonic(), patience
        elif time.monotonic() - since > limit:
            process.send_signal(signal.SIGABRT)  # pytest's faulthandler then prints the stack
            try:
                process.wait(3)
            except subprocess.TimeoutExpired:
                process.kill()
            return process.wait(), "hung"
    if process.returncode == -signal.SIGTERM:  # this process received the signal too
        raise KeyboardInterrupt
    return process.returncode, "crashed" if process.returncode not in range(6) else ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--patience", type=float, default=60, help="seconds without a test that ends (default: 60)")
    parser.add_argument("--record", type=Path, help="a file: tests that have ended by it are not run again")
    options, rest = parser.parse_known_args(arguments)
    print(f"relay: pytest {pytest.__version__}", flush=True)
    # On SIGTERM, which the whole process group receives, print a summary before ending.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        record = options.record or Path(folder, "record")
        record.touch()
        # A test that was running when an earlier call was stopped starts again.
        ended = [(test, word) for test, word in outcomes(record).items() if word != BEGUN]
        record.write_text("".join(f"{word}\t{test}\n" for test, word in ended))
        good = True
        try:
            while True:
                before = len(outcomes(record))
                status, end = run_once(rest, record, options.patience)
                found = outcomes(record)
                good = good and status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
                for test in [test for test, word in found.items() if word == BEGUN]:
                    with record.open("a") as file:
                        file.write(f"{end or 'crashed'}\t{test}\n")
                if not end or len(found) == before:  # pytest completed, or no test started
                    break
                what = "the GPU was lost" if status == SPOILT else f"a test {end}"
                print(f"relay: {what}; the rest goes on in a new process", flush=True)
        except KeyboardInterrupt:
            good = False
            print("relay: stopped before the end")
        found = outcomes(record)
    for test, word in found.items():
        if word not in ("passed", "skipped"):
            print(f"{word} {test}")
    counts = Counter(found.values())
    print(f"relay: {', '.join(f'{count} {word}' for word, count in counts.items()) or 'no tests'}")
    return 0 if good and found and set(counts) <= {"passed", "skipped"} else 1


if __name__ == "__main__":
    sys.exit(main())
