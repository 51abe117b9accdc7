"""Runs commands one after the other, each within a time limit derived from its estimate.

A stage that fails, hangs, ignores SIGTERM, leaves processes behind, prints without end or fills the disk costs only its
own time.
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

# A stage may take this many times its estimate, even if less time remains for later ones.
PATIENCE = 2.0
# A stage is stopped when a disk has fewer free bytes than this, or than half of those before the stage.
LEAST_FREE = 2 << 30

LOG_HEAD, LOG_TAIL = 512 << 10, 256 << 10  # bytes kept of a stage's log
KEY_LINES, TAIL_LINES, LINE = 60, 30, 300
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None)  # loaded here, because no library should be loaded after a fork


@dataclass(frozen=True)
class Stage:
    """Commands that all run, one after the other, even if one fails. "{python}" and other words in braces are replaced
    (see `Run`); the word "{parts}" becomes one word per part."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    # Expected seconds. The limit is PATIENCE times the estimate, or the stage's share of the remaining time (in
    # proportion to the estimates of this and all later stages) if that is more.
    estimate: float
    least: float = 1.0  # seconds; with less it is not started
    most: float = math.inf  # seconds; its limit is never higher
    needs: tuple[str, ...] = ()  # stages that must have succeeded
    always: bool = False  # runs even if only other stages were selected
    fills: bool = False  # uses all the time it gets, so PATIENCE does not apply
    parts: tuple[str, ...] = ()  # names of parts that can be selected
    # Sources it depends on besides csrc and cuda_ext; it is repeated when one has changed.
    sources: tuple[str, ...] = ()
    repeats: bool = False  # runs in every call, even if it passed in an earlier one
    key: str = ""  # a regular expression for the most informative lines of its log
    sign: str = ""  # a regular expression; a failure before any output matches it means "not available"
    archive: str = ""  # archive for the files it writes to {scratch}
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    stage: Stage
    verdict: str
    reason: str = ""
    seconds: float = 0.0
    limit: float = 0.0
    when: str = ""  # the time of the earlier call, if it is from one
    key_lines: list[str] = field(default_factory=list)
    tail: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return self.verdict in (PASSED, UNAVAILABLE, IN_PART)


class Log:
    """Copies the output of a stage to a file as it is printed; of long output, the beginning and finally the end."""

    def __init__(self, file: Path, key: str = "", sign: str = "") -> None:
        self._file = file.open("ab", buffering=0)
        self._head_left = LOG_HEAD
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
        head, rest = data[: self._head_left], data[self._head_left :]
        self._put(head)
        self._head_left -= len(head)
        self._end += rest
        if excess := max(0, len(self._end) - LOG_TAIL):
            self._left_out += excess
            del self._end[:excess]
        *lines, self._line = (self._line + data).split(b"\n")
        self._line = self._line[-LOG_TAIL:]  # limits a line that never ends
        for line in lines:
            self._record(line)

    def _put(self, data: bytes) -> None:
        with suppress(OSError):  # a full disk must not stop the check
            self._file.write(data)

    def _record(self, line: bytes) -> None:
        # A progress bar overwrites its line: only the last state counts.
        text = line.rstrip(b"\r").rpartition(b"\r")[2][: 4 * LINE].decode(errors="replace").rstrip()
        self.has_sign = self.has_sign or bool(self._sign.search(text))
        if text:
            self.tail.append(text[:LINE])
        if len(self.key_lines) < KEY_LINES and self._key.search(text):
            self.key_lines.append(text[:LINE])

    def say(self, text: str) -> None:
        """Writes a separate line."""
        self.write(f"{chr(10) if self._line else ''}{text}\n".encode())

    def close(self) -> None:
        """Writes the end of the output."""
        if self._line:
            self._record(self._line)
        if self._left_out:
            self._put(f"\n[... {self._left_out} bytes left out ...]\n".encode())
        self._put(bytes(self._end))
        self._file.close()


@dataclass
class Run:
    """Runs stages within a time limit.

    end: a time of time.monotonic() at which every stage is stopped.
    words: replacements for "{name}" in commands. {minutes}, the time limit for commands that obey one, and {state}, the
        folder of the stage, are added.
    environment: variables for all stages.
    earlier: returns the outcome of a stage that need not run.
    state: returns the folder of a stage.
    before, after: called with each stage and its limit in seconds, and with each outcome.
    meanwhile: called about once per second while a stage runs.
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
    interrupted: str = ""  # the name of the signal received

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

    def _lacks(self, stage: Stage) -> list[Outcome]:
        """Of the needed stages that did not succeed."""
        done = (PASSED, IN_PART)
        return [o for o in self.outcomes if o.stage.name in stage.needs and o.verdict not in done]

    def _one(self, stage: Stage, coming: Sequence[Stage]) -> Outcome:
        if self.interrupted:
            return Outcome(stage, SKIPPED, f"interrupted by {self.interrupted}")
        if lacks := self._lacks(stage):
            is_here = any(outcome.verdict != UNAVAILABLE for outcome in lacks)
            names = " and ".join(outcome.stage.name for outcome in lacks)
            return Outcome(stage, SKIPPED if is_here else UNAVAILABLE, f"needs {names}")
        left = self.end - time.monotonic()
        share = left * stage.estimate / sum(later.estimate for later in coming)
        wanted = stage.estimate * (1.0 if stage.fills else PATIENCE)
        limit = min(stage.most, left, max(share, wanted))
        if limit < stage.least:
            reason = f"no time left: {max(0.0, limit):.0f} s remain, and it needs {stage.least:.0f} s"
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
            # A command needs some time after its own limit to finish what it has started.
            left = max(0.0, end - grace - time.monotonic())
            minutes = f"{(left - min(15.0, left / 3)) / 60:.2f}"
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
                outcome.verdict, outcome.reason = STOPPED, f"not finished within {outcome.limit:.0f} s"
                return
            if status == UNFINISHED:
                if outcome.verdict == PASSED:
                    outcome.verdict, outcome.reason = IN_PART, "the time did not suffice; the next call continues"
            elif status != 0:
                outcome.verdict, outcome.reason = FAILED, _describe(status)

    def _command(
        self, command: Sequence[str], environment: Mapping[str, str], end: float, grace: float, log: Log
    ) -> int | str | None:
        """The exit status, None if the command exceeded its time, or another reason why it was stopped."""
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
            # Also after success: remaining processes would disturb stages that measure.
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
    """Logs available output; False at the end of the pipe, or if there is none."""
    try:
        data = os.read(pipe, 1 << 16)
    except BlockingIOError:
        return False
    log.write(data)
    return bool(data)


class _Disks:
    """Watches the free space on the disks of some folders."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._least = {folder: min(LEAST_FREE, shutil.disk_usage(folder).free // 2) for folder in folders}

    def problem(self) -> str:
        """A message if a disk is nearly full, else empty."""
        for folder, least in self._least.items():
            if (free := shutil.disk_usage(folder).free) < least:
                return f"only {free >> 20} MiB are free on the disk of {folder}"
        return ""


def _prepare() -> None:
    """Runs in the child: disables core dumps, and lets the kernel kill it when this process ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _adopt_orphans() -> None:
    """Makes orphaned descendants children of this process, whatever their session, so that _kill finds them."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    _libc.prctl(option, value, 0, 0, 0)


def _parents() -> dict[int, int]:
    """pid -> parent pid of all living processes."""
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
    """Kills the children of this process, except `spared`, and all their descendants, and waits for their end."""
    end = time.monotonic() + 2
    while time.monotonic() < end:
        parents = _parents()
        victims = {pid for pid, parent in parents.items() if parent == os.getpid()} - spared
        while more := {pid for pid, parent in parents.items() if parent in victims} - victims:
            victims |= more
        if not victims:
            return
        for pid in victims:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
