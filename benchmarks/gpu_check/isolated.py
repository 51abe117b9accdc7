"""Runs cases in child processes, so that one that hangs, crashes or costs its process the GPU costs no other case.

After a bad memory access a process can no longer use its GPU, and a kernel that waits forever never returns. A child is
therefore killed after such a case, and another one goes on with the next. Children are forked, so that they start in
milliseconds: a process that calls `run` must not have used CUDA, whose state does not survive a fork.
"""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import re
import resource
import signal
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import IO

FORK = multiprocessing.get_context("fork")

# Seconds without an answer until a case counts as hung, and until a child is ready, which makes the GPU's context.
PATIENCE, START_PATIENCE = 5.0, 20.0
MOST_HUNG = 2  # cases of a kind, or starts of a group's children, after which the others are not run
LAST_WORDS = 5.0  # seconds until a child that is ended has written where it is; a busy machine needs more than one
START = ""  # among kinds
MOST_FRAMES = 3
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # loaded here, because no library should be loaded after a fork


@dataclass(frozen=True)
class Answer:
    good: bool
    text: str
    spoilt: bool = False  # the process is of no further use


@dataclass(frozen=True)
class Result:
    group: str
    case: str
    answer: Answer
    seconds: float


# Group and case -> answer; called in a child.
Work = Callable[[str, str], Answer]


def run(
    groups: Mapping[str, Sequence[str]],
    work: Work,
    *,
    prepare: Callable[[], object] = lambda: None,
    kind: Callable[[str], str] = lambda case: case,
    lanes: int = 1,
    patience: float = PATIENCE,
    start_patience: float = START_PATIENCE,
) -> Generator[Result, None, None]:
    """Yields the results of all cases as they come.

    groups: the cases of each; they run side by side, each in as many children as `lanes`.
    prepare: called in each child before its first case.
    kind: of a case. If several of a kind have hung, the others are not run.
    """
    pending = {group: deque(cases) for group, cases in groups.items()}
    hung: Counter[tuple[str, str]] = Counter()
    children = [
        _Child(group, work, prepare, patience, start_patience)
        for group, cases in groups.items()
        for _ in range(min(lanes, len(cases)))
    ]
    try:
        while True:
            for child in children:
                while not child.case and (cases := pending[child.group]):
                    case = cases.popleft()
                    if max(hung[child.group, kind(case)], hung[child.group, START]) < MOST_HUNG:
                        child.begin(case)
                    else:
                        yield Result(child.group, case, Answer(False, "NOT RUN: others of its kind have hung"), 0.0)
            busy = [child for child in children if child.case]
            if not busy:
                return
            left = min(child.deadline for child in busy) - time.monotonic()
            ready = connection.wait([child.pipe for child in busy], max(0.0, left))
            for child in busy:
                if child.pipe in ready:
                    if result := child.receive():
                        yield result
                elif time.monotonic() >= child.deadline:
                    hung[child.group, kind(child.case) if child.is_ready else START] += 1
                    yield child.give_up()
    finally:
        for child in children:
            child.close()


class _Child:
    """A process that answers one case after the other, and its successors."""

    def __init__(
        self, group: str, work: Work, prepare: Callable[[], object], patience: float, start_patience: float
    ) -> None:
        self.group, self.case = group, ""
        self.deadline, self.is_ready = 0.0, False
        self.pipe: connection.Connection
        self._work, self._prepare, self._patience, self._start_patience = work, prepare, patience, start_patience
        self._process: multiprocessing.process.BaseProcess | None = None
        self._trace = tempfile.TemporaryFile()  # noqa: SIM115 - where the child is when it is ended
        self._began = 0.0

    def begin(self, case: str) -> None:
        self.case = case
        if self._process is None:
            self._start()
        self._set_clock()
        with suppress(BrokenPipeError):  # it has ended, which `receive` reports
            self.pipe.send(case)

    def _set_clock(self) -> None:
        self._began = time.monotonic()
        self.deadline = self._began + self._limit

    @property
    def _limit(self) -> float:
        return self._patience if self.is_ready else self._start_patience

    def _start(self) -> None:
        self._trace.seek(0)
        self._trace.truncate()
        self.is_ready = False
        self.pipe, theirs = FORK.Pipe()
        arguments = self._work, self._prepare, self.group, theirs, self._trace
        self._process = FORK.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def receive(self) -> Result | None:
        """The result of the case, or None if the child has become ready for it."""
        assert self._process is not None
        try:
            answer: Answer | None = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(1)
            status = self._process.exitcode
            ended = f"ended by {signal.Signals(-status).name}" if status and status < 0 else f"exit status {status}"
            answer = Answer(False, f"CRASHED: {ended}{self._place()}", spoilt=True)
        if answer is None:
            self.is_ready = True
            self._set_clock()
            return None
        return self._end(answer)

    def give_up(self) -> Result:
        assert self._process is not None and self._process.pid is not None
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGABRT)  # faulthandler then writes where it is
        self._process.join(LAST_WORDS)
        what = "answer" if self.is_ready else "start of a process"
        return self._end(Answer(False, f"HUNG: no {what} within {self._limit:g} s{self._place()}", spoilt=True))

    def _place(self) -> str:
        """The innermost Python functions of the child, as far as they are not of a package."""
        self._trace.seek(0)
        frames = re.findall(r'File "(.*)", line (\d+) in (\S+)', self._trace.read().decode(errors="replace"))
        own = [f for f in frames if not re.search(r"site-packages|/multiprocessing/|/gpu_check/isolated\.py$", f[0])]
        names = [f"{function} ({Path(file).name}:{line})" for file, line, function in own[:MOST_FRAMES]]
        return f", in {', called by '.join(names)}" if names else ""

    def _end(self, answer: Answer) -> Result:
        result = Result(self.group, self.case, answer, time.monotonic() - self._began)
        self.case = ""
        if answer.spoilt:
            self._kill()
        return result

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join(1)  # not longer: the driver may take its time to end a kernel
            self.pipe.close()
            self._process = None

    def close(self) -> None:
        self._kill()
        self._trace.close()


def _serve(
    work: Work, prepare: Callable[[], object], group: str, pipe: connection.Connection, trace: IO[bytes]
) -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the parent ends its children
    # What the parent has may be neither its handler any more nor let SIGABRT through.
    faulthandler.disable()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    faulthandler.enable(trace, all_threads=False)
    try:
        prepare()
    except Exception as error:
        pipe.send(Answer(False, f"FAILED: the process cannot start: {error}", spoilt=True))
        return
    pipe.send(None)
    with suppress(EOFError):
        while not (answer := work(group, pipe.recv())).spoilt:
            pipe.send(answer)
        pipe.send(answer)
