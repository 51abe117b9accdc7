"""Commands one after the other, each within a limit that follows from its estimate, whatever it does.

A stage that fails, hangs, ignores SIGTERM, leaves processes behind, prints without end or fills the disk costs its own
time and nothing of the others'.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.results import UNFINISHED

PASSED, FAILED, STOPPED, SKIPPED = "passed", "FAILED", "STOPPED", "not run"
UNAVAILABLE, IN_PART = "not available", "in part"

# A stage whose estimate is wrong may take this many times as long; those after it wait.
PATIENCE = 2.0
# A stage that leaves less free of a disk is stopped, or than half of what was free before it.
LEAST_FREE = 2 << 30

LOG_HEAD, LOG_TAIL = 512 << 10, 256 << 10  # bytes kept of a stage's log
KEY_LINES, TAIL_LINES, LINE = 60, 30, 300
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None)  # before a fork, after which no library should be loaded


@dataclass(frozen=True)
class Stage:
    """`commands` run in turn, each in any case. In their words "{python}" and the like are replaced, see `Run`; a word
    "{parts}" becomes as many words as there are parts."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    # Seconds that it should take. Its limit is PATIENCE times that, or its share of the time that is left, by the
    # estimates of this and all later stages, if that is more.
    estimate: float
    least: float = 1.0  # seconds under which it is not worth starting
    most: float = math.inf  # seconds that it is never given more than
    needs: tuple[str, ...] = ()  # stages without whose success it is not run
    always: bool = False  # also where only other stages are asked for
    fills: bool = False  # it takes the time it is given: the estimate, and no more where there is no more
    parts: tuple[str, ...] = ()  # names by which a part of it can be asked for
    # What it depends on in the checkout, beside csrc and cuda_ext: it is repeated when something there has changed.
    sources: tuple[str, ...] = ()
    repeats: bool = False  # in every call, also when it has passed in an earlier one
    key: str = ""  # the lines of its log that say most
    sign: str = ""  # what is printed once its tool works; a failure before is the tool's, not the code's
    archive: str = ""  # the file for what it leaves in {scratch}
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    stage: Stage
    verdict: str
    reason: str = ""
    seconds: float = 0.0
    limit: float = 0.0
    when: str = ""  # the time of the earlier call that it is from, if it is
    key_lines: list[str] = field(default_factory=list)
    tail: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return self.verdict in (PASSED, UNAVAILABLE, IN_PART)


class Log:
    """What a stage prints, to a file while it is printed: the beginning, and at last the end, of what is too long."""

    def __init__(self, file: Path, key: str = "", sign: str = "") -> None:
        self._file = file.open("ab", buffering=0)
        self._room = LOG_HEAD
        self._end = bytearray()
        self._left_out = 0
        self._line = b""
        self._key = re.compile(key or r"(?!)")
        self._sign = re.compile(sign)
        self.key_lines: list[str] = []
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.has_sign = not sign

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, data: bytes) -> None:
        head, rest = data[: self._room], data[self._room :]
        self._put(head)
        self._room -= len(head)
        self._end += rest
        if excess := max(0, len(self._end) - LOG_TAIL):
            self._left_out += excess
            del self._end[:excess]
        *lines, self._line = (self._line + data).split(b"\n")
        self._line = self._line[-LOG_TAIL:]  # a line without an end
        for line in lines:
            self._take(line)

    def _put(self, data: bytes) -> None:
        with suppress(OSError):  # a full disk costs the log, not the check
            self._file.write(data)

    def _take(self, line: bytes) -> None:
        # A progress bar overwrites its line.
        text = line.rstrip(b"\r").rpartition(b"\r")[2][: 4 * LINE].decode(errors="replace").rstrip()
        self.has_sign = self.has_sign or bool(self._sign.search(text))
        if text:
            self.tail.append(text[:LINE])
        if len(self.key_lines) < KEY_LINES and self._key.search(text):
            self.key_lines.append(text[:LINE])

    def say(self, text: str) -> None:
        """On lines of its own."""
        self.write(f"{chr(10) if self._line else ''}{text}\n".encode())

    def close(self) -> None:
        """Writes the end."""
        if self._line:
            self._take(self._line)
        if self._left_out:
            self._put(f"\n[... {self._left_out} bytes left out ...]\n".encode())
        self._put(bytes(self._end))
        self._file.close()


@dataclass
class Run:
    """Stages within a time.

    end: on the clock of time.monotonic; no stage goes on after it.
    words: what "{name}" in a command is replaced with, beside {minutes}, the time for a command that ends by itself,
        and {state}, a folder that the stage finds again in a later call.
    environment: for all stages.
    earlier: the outcome that a stage has had already, if it has one.
    state: the folder of a stage.
    before, after: told of each stage that is started, with its limit in seconds, and of each outcome.
    meanwhile: called about once a second while a stage runs.
    """

    folder: Path
    log: Path
    end: float
    words: Mapping[str, str]
    environment: Mapping[str, str]
    earlier: Callable[[Stage], Outcome | None] = lambda stage: None
    state: Callable[[Stage], Path] = lambda stage: Path()
    before: Callable[[Stage, float], None] = lambda stage, limit: None
    after: Callable[[Outcome], None] = lambda outcome: None
    meanwhile: Callable[[], None] = lambda: None
    outcomes: list[Outcome] = field(default_factory=list)
    interrupted: str = ""  # the name of the signal that asked for an end

    def all(self, stages: Sequence[Stage]) -> None:
        _adopt_orphans()
        with self._signals():
            for i, stage in enumerate(stages):
                if outcome := self.earlier(stage):
                    self.outcomes.append(outcome)
                    continue
                coming = [later for later in stages[i:] if not self._lacks(later) and not self.earlier(later)]
                outcome = self._one(stage, coming)
                self.outcomes.append(outcome)
                self.after(outcome)

    def _lacks(self, stage: Stage) -> list[str]:
        """What it needs and will not have."""
        return [o.stage.name for o in self.outcomes if o.stage.name in stage.needs and not o.good]

    def _one(self, stage: Stage, coming: Sequence[Stage]) -> Outcome:
        if self.interrupted:
            return Outcome(stage, SKIPPED, f"interrupted by {self.interrupted}")
        if lacks := self._lacks(stage):
            return Outcome(stage, SKIPPED, f"needs {' and '.join(lacks)}")
        left = self.end - time.monotonic()
        share = left * stage.estimate / sum(later.estimate for later in coming)
        wanted = stage.estimate * (1.0 if stage.fills else PATIENCE)
        limit = min(stage.most, left, max(share, wanted))
        if limit < stage.least:
            reason = f"no time left: it would have {max(0.0, limit):.0f} s and needs {stage.least:.0f} s"
            return Outcome(stage, SKIPPED, reason)
        self.before(stage, limit)
        began = time.monotonic()
        outcome = Outcome(stage, PASSED, limit=limit)
        with Log(self.log, stage.key, stage.sign) as log:
            self._commands(stage, began + limit, log, outcome)
        outcome.seconds = time.monotonic() - began
        outcome.key_lines, outcome.tail = log.key_lines, list(log.tail)
        if outcome.verdict == FAILED and not log.has_sign:
            outcome.verdict = UNAVAILABLE
        return outcome

    def _commands(self, stage: Stage, end: float, log: Log, outcome: Outcome) -> None:
        environment = {**os.environ, **self.environment, **stage.environment}
        for words in stage.commands:
            grace = min(3.0, (end - time.monotonic()) / 10)
            # A command that is told when to end needs some time after it, for what it has begun.
            left = max(0.0, end - grace - time.monotonic())
            minutes = f"{(left - min(45.0, left / 3)) / 60:.2f}"
            values = {**self.words, "state": str(self.state(stage)), "minutes": minutes}
            spread = [part for word in words for part in (stage.parts if word == "{parts}" else (word,))]
            command = [_filled(word, values) for word in spread]
            log.say(f"\n=== {stage.name}: {' '.join(' '.join(command).split())}")
            began = time.monotonic()
            try:
                status = self._command(command, environment, end, grace, log)
            except OSError as error:
                outcome.verdict, outcome.reason = FAILED, f"cannot be started: {error}"
                log.say(f"=== {outcome.reason}")
                continue
            log.say(f"=== {time.monotonic() - began:.1f} s, {_describe(status)}")
            if self.interrupted:
                outcome.verdict, outcome.reason = STOPPED, f"interrupted by {self.interrupted}"
                return
            if isinstance(status, str):
                outcome.verdict, outcome.reason = STOPPED, status
                return
            if status is None:
                outcome.verdict, outcome.reason = STOPPED, f"not done within its {outcome.limit:.0f} s"
                return
            if status == UNFINISHED:
                if outcome.verdict == PASSED:
                    outcome.verdict, outcome.reason = IN_PART, "the time was not enough; the next call goes on"
            elif status != 0:
                outcome.verdict, outcome.reason = FAILED, _describe(status)

    def _command(
        self, command: Sequence[str], environment: Mapping[str, str], end: float, grace: float, log: Log
    ) -> int | str | None:
        """The exit status, None if the command had to be stopped at its end, or for what other reason it had to be."""
        earlier = _children()
        disks = _Disks((self.folder, self.log.parent, Path(tempfile.gettempdir())))
        full, second = "", time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_prepare,
        )
        assert process.stdout is not None
        pipe = process.stdout.fileno()
        os.set_blocking(pipe, False)
        asked_to_end = False
        try:
            while process.poll() is None and time.monotonic() < end:
                if time.monotonic() - second > 1:
                    second = time.monotonic()
                    self.meanwhile()
                    if full := disks.problem():
                        break
                if not asked_to_end and (self.interrupted or time.monotonic() >= end - grace):
                    asked_to_end, end = True, min(end, time.monotonic() + grace)
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGTERM)
                select.select([pipe], [], [], 0.05)
                if not _read(pipe, log):
                    time.sleep(0.05)
            ended = process.poll() is not None and not asked_to_end and not full
        finally:
            # Also after a good end: what a stage leaves running would disturb those that measure.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            _kill(earlier)
            process.poll()
            deadline = time.monotonic() + 1
            while _read(pipe, log) and select.select([pipe], [], [], 0)[0] and time.monotonic() < deadline:
                pass
            process.stdout.close()
        return process.wait() if ended else full or None

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def interrupt(number: int, _: object) -> None:
            self.interrupted = signal.Signals(number).name

        asked = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        previous = {number: signal.signal(number, interrupt) for number in asked}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _filled(word: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), word)


def _describe(status: int | str | None) -> str:
    if status is None:
        return "stopped"
    if isinstance(status, str):
        return f"stopped: {status}"
    return f"exit status {status}" if status >= 0 else f"ended by {signal.Signals(-status).name}"


def _read(pipe: int, log: Log) -> bool:
    """Passes on what is there; False at the end of the pipe, or when there is nothing."""
    try:
        data = os.read(pipe, 1 << 16)
    except BlockingIOError:
        return False
    log.write(data)
    return bool(data)


class _Disks:
    """The file systems of some folders, and what was free on them."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._least = {folder: min(LEAST_FREE, shutil.disk_usage(folder).free // 2) for folder in folders}

    def problem(self) -> str:
        """What has become of them, if that is bad."""
        for folder, least in self._least.items():
            if (free := shutil.disk_usage(folder).free) < least:
                return f"it has left {free >> 20} MiB free on the disk of {folder}"
        return ""


def _prepare() -> None:
    """In the new process: it leaves no core dump, and ends with this one, however that ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _adopt_orphans() -> None:
    """Makes processes whose parent ends children of this one, in whatever session they are, so that they are found."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    _libc.prctl(option, value, 0, 0, 0)


def _parents() -> dict[int, int]:
    """Process -> its parent, of all that live."""
    parents = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = file.read_text().rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue
        if state not in "ZX":
            parents[int(file.parent.name)] = int(parent)
    return parents


def _children() -> set[int]:
    return {pid for pid, parent in _parents().items() if parent == os.getpid()}


def _kill(spared: set[int]) -> None:
    """Ends this process's children other than `spared`, and their children, and waits until they are gone."""
    end = time.monotonic() + 2
    while time.monotonic() < end:
        parents = _parents()
        doomed = {pid for pid, parent in parents.items() if parent == os.getpid()} - spared
        while more := {pid for pid, parent in parents.items() if parent in doomed} - doomed:
            doomed |= more
        if not doomed:
            return
        for pid in doomed:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
