"""Runs all tests, and continues in a new process when a test breaks the process it runs in.

    python tests/relay.py [--patience SECONDS] [--record FILE] [--processes N] [arguments of pytest]

After a bad access to the memory of a GPU every later CUDA call of the process fails, and a kernel that waits forever
never ends. The remaining tests then run in a new process. As a pytest plugin (`-p relay`) this file records which tests
were started and how they ended. With --record the record is kept, and another call continues an interrupted run. With
--processes the test files among the arguments are shared out, and each process has a relay of its own.
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
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

# Files: of the tests of this process, and of those that have ended before.
RECORD, ENDED = "CUDA_EXT_TEST_RECORD", "CUDA_EXT_TESTS_ENDED"
BEGUN, SPOILT = "begun", 86  # an exit status that pytest does not use
STARTING = 120.0  # seconds until the first test of a process, which loads PyTorch first
# Tests of what is slow, the compiler of torch.compile and the start of ranks, get several times as much patience.
SLOW, SLOW_PATIENCE = ("compile", "distributed"), 4


# In the process that runs the tests


def note(word: str, nodeid: str) -> None:
    with open(os.environ[RECORD], "a") as file:
        file.write(f"{word}\t{nodeid}\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    done = outcomes(Path(os.environ[ENDED]), Path(os.environ[RECORD]))
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


def outcomes(*records: Path) -> dict[str, str]:
    """The worst recorded outcome of each test."""
    order = (BEGUN, "skipped", "passed", "failed", "lost", "hung", "crashed")
    worst: dict[str, str] = {}
    for line in (line for record in records for line in record.read_text().splitlines()):
        word, _, nodeid = line.partition("\t")
        worst[nodeid] = max(worst.get(nodeid, BEGUN), word, key=order.index)
    return worst


@dataclass
class Lane:
    """Tests that run one after the other."""

    arguments: Sequence[str]  # of pytest
    record: Path
    ended: Path
    patience: float
    name: str = ""  # before each line of output; empty: the output is not touched

    def run(self) -> Generator[None, None, bool]:
        """Runs all tests, in as many processes as that takes; returns whether all is well. Yields while it waits."""
        good = True
        while True:
            before = len(outcomes(self.record))
            status, end = yield from self._run_once()
            found = outcomes(self.record)
            good = good and status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
            for test in [test for test, word in found.items() if word == BEGUN]:
                with self.record.open("a") as file:
                    file.write(f"{end or 'crashed'}\t{test}\n")
            if not end or len(found) == before:  # pytest completed, or no test started
                return good
            what = "the GPU was lost" if status == SPOILT else f"a test {end}"
            print(f"relay: {self.name}{what}; the rest goes on in a new process", flush=True)

    def _run_once(self) -> Generator[None, None, tuple[int, str]]:
        """Runs pytest once; returns its exit status and, if it ended within a test, the reason."""
        here = str(Path(__file__).resolve().parent)
        path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
        command = [sys.executable, "-m", "pytest", "-p", "relay", "-v", "--tb=short", "-p", "no:cacheprovider"]
        # A file that cannot be collected is an error, but the others run.
        command += ["--continue-on-collection-errors", *self.arguments]
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        environment |= {RECORD: str(self.record), ENDED: str(self.ended)}
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if self.name else {}
        process = subprocess.Popen(command, env=environment, **output)
        try:
            reason = yield from self._watch(process)
        finally:
            process.kill()
            process.wait()
        if process.returncode == -signal.SIGTERM:  # this process received the signal too
            raise KeyboardInterrupt
        return process.returncode, reason or ("crashed" if process.returncode not in range(6) else "")

    def _watch(self, process: subprocess.Popen[bytes]) -> Generator[None, None, str]:
        """Waits for the end of the process; ends it and returns "hung" if no test begins or ends for too long."""
        size, since, limit = self.record.stat().st_size, time.monotonic(), max(self.patience, STARTING)
        lines = self._lines(process)
        while process.poll() is None:
            yield
            next(lines)
            if self.record.stat().st_size != size:
                size, since, limit = self.record.stat().st_size, time.monotonic(), self._patience_now()
            elif time.monotonic() - since > limit:
                process.send_signal(signal.SIGABRT)  # pytest's faulthandler then prints the stack
                with suppress(subprocess.TimeoutExpired):
                    process.wait(3)
                process.kill()
                process.wait()
                next(lines)
                return "hung"
        next(lines)
        return ""

    def _patience_now(self) -> float:
        last = self.record.read_text().rstrip().rpartition("\n")[2]
        return self.patience * (SLOW_PATIENCE if any(word in last for word in SLOW) else 1)

    def _lines(self, process: subprocess.Popen[bytes]) -> Iterator[None]:
        """Prints the lines that the process has written since the last call of `next`."""
        if process.stdout is None:
            while True:
                yield
        pipe, rest = process.stdout.fileno(), b""
        os.set_blocking(pipe, False)
        while True:
            with suppress(BlockingIOError):
                while data := os.read(pipe, 1 << 16):
                    rest += data
            *lines, rest = rest.split(b"\n")
            if process.returncode is not None and rest:
                lines, rest = [*lines, rest], b""
            for line in lines:
                print(f"{self.name}{line.decode(errors='replace')}", flush=True)
            yield


def shared_out(arguments: Sequence[str], processes: int) -> list[list[str]]:
    """The arguments of each process: all that are not files, and some of the files. The longest are shared out first,
    as they have the most tests."""
    if processes == 1:
        return [list(arguments)]
    files = {name: Path(name.partition("::")[0]) for name in arguments}
    sizes = {name: file.stat().st_size for name, file in files.items() if file.is_file()}
    parts: list[list[str]] = [[] for _ in range(min(processes, len(sizes)))]
    for name in sorted(sizes, key=sizes.__getitem__, reverse=True):
        min(parts, key=lambda part: sum(map(sizes.__getitem__, part))).append(name)
    return [[name for name in arguments if name not in sizes or name in part] for part in parts]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--patience", type=float, default=15, help="seconds without a test that ends (default: 15)")
    parser.add_argument("--record", type=Path, help="a file: tests that have ended by it are not run again")
    parser.add_argument("--processes", type=int, default=1, help="processes, among which test files are shared out")
    options, rest = parser.parse_known_args(arguments)
    shares = shared_out(rest, options.processes)
    if not shares:
        parser.error("--processes: expected test files among the arguments, which it shares out; got none")
    print(f"relay: pytest {pytest.__version__}", flush=True)
    # On SIGTERM, which the whole process group receives, print a summary before ending.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        ended = options.record or Path(folder, "record")
        ended.touch()
        merge(ended)
        records = [ended.with_name(f"{ended.name}.{i}") for i in range(len(shares))]
        for record in records:
            record.touch()
        names = [f"[{i}] " if len(shares) > 1 else "" for i in range(len(shares))]
        lanes = [
            Lane(share, record, ended, options.patience, name) for share, record, name in zip(shares, records, names)
        ]
        good = run_side_by_side([lane.run() for lane in lanes])
        found = outcomes(ended, *records)
        if options.record:
            merge(ended)
    for test, word in found.items():
        if word not in ("passed", "skipped"):
            print(f"{word} {test}")
    counts = Counter(found.values())
    print(f"relay: {', '.join(f'{count} {word}' for word, count in counts.items()) or 'no tests'}")
    return 0 if good and found and set(counts) <= {"passed", "skipped"} else 1


def merge(ended: Path) -> None:
    """Moves the records of processes to that of all. A test that was running when a call was stopped is left out, so
    that it starts again."""
    parts = [path for path in ended.parent.glob(f"{ended.name}.*") if path.suffix[1:].isdigit()]
    known = [(test, word) for test, word in outcomes(ended, *parts).items() if word != BEGUN]
    ended.write_text("".join(f"{word}\t{test}\n" for test, word in known))
    for part in parts:
        part.unlink()


def run_side_by_side(lanes: Sequence[Generator[None, None, bool]]) -> bool:
    good, running = True, list(lanes)
    try:
        while running:
            time.sleep(0.05)
            for lane in list(running):
                try:
                    next(lane)
                except StopIteration as end:
                    good = good and end.value
                    running.remove(lane)
    except KeyboardInterrupt:
        good = False
        for lane in running:
            lane.close()
        print("relay: stopped before the end")
    return good


if __name__ == "__main__":
    sys.exit(main())
