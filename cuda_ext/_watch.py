"""Names for collectives, and the status of every rank, for the others to read when a collective does not end.

The error of a failed collective names neither parameters nor buckets, and often not even the rank. So threads of each
rank write its status to two boards whenever a backward pass takes long, and a rank that fails includes the status of
the others in its error. While steps succeed quickly, nothing is written.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from cuda_ext._status_board import (
    BOARD_ERRORS,
    FAILED,
    BoardInStore,
    StatusBoard,
    board_at_last_rank,
)
from cuda_ext._timing import is_captured, is_reached

logger = logging.getLogger("cuda_ext.distributed")

STOPPING = 2.0  # seconds that the exit of a process waits for a board that does not answer


class Watch:
    """Publishes the status of this rank. The constructor is a collective, unless `name` is given.

    status: returns in a few words what this rank is doing; called in other threads.
    lags: whether the device has not completed what the host has queued in earlier passes; called in other threads.
    interval: seconds between two checks; a rank that began or ended no backward pass since the last check writes its
        status.
    warn_after: seconds after which a pass that does not end is logged as a warning, with the status of the others:
        before the timeout of the group, as NCCL's ends the process. Both default to fractions of that timeout.
    name: of the only watch of the group that has it, the same on all ranks. Default: one that they agree on.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        status: Callable[[], str],
        *,
        lags: Callable[[], bool] = lambda: False,
        interval: float | None = None,
        warn_after: float | None = None,
        name: str = "",
    ) -> None:
        timeout = _timeout(group, device)
        self.rank, self.ranks = group.rank(), group.size()
        # All ranks write to one process; a thousand ranks write less often.
        self.interval = interval or max(min(1.0, timeout / 10), self.ranks / 256)
        self.warn_after = warn_after or timeout / 2
        self._status, self._lags = status, lags
        self._prefix = f"cuda_ext/watch/{name or agreed_name(group)}"
        store: Any = group.get_group_store()
        self._store = store.clone()  # a separate client, as the group's may be blocked
        # The board in the store, and the one at the last rank once a thread has found it.
        self.boards: list[StatusBoard] = [BoardInStore(self._store, self._prefix, self.rank, self.ranks, self.interval)]
        self._since = time.monotonic()
        self._busy = False
        self._warned = False
        self._times_asked = 0  # calls of `ranks_that`
        self._asked: set[StatusBoard] = set()  # boards that were read for a warning
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []

    def busy(self, busy: bool) -> None:
        """A backward pass has begun, or has ended."""
        self._busy, self._warned, self._since = busy, False, time.monotonic()
        self._asked.clear()
        for board in self.boards:
            board.forget()
        if not self._threads and self.ranks > 1:
            arguments = weakref.ref(self), self._stopped
            self._threads = [
                threading.Thread(target=target, args=arguments, daemon=True)
                for target in (_watch_store, _watch_last_rank)
            ]
            for thread in self._threads:
                thread.start()

    def stop(self) -> None:
        """Ends the threads.

        They must not return from the store while the interpreter shuts down: Python would end them inside C++ code,
        which aborts the process.
        """
        self._stopped.set()
        deadline = time.monotonic() + STOPPING
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(deadline - time.monotonic(), 0.0))
        del self.boards[1:]

    def look(self, board: StatusBoard) -> None:
        """One check by the thread of a board, at every interval."""
        waited = time.monotonic() - self._since
        if waited <= self.interval:
            return
        status = self._status()
        board.write(status)
        if not self._busy and not self._lags():
            return
        if waited > self.warn_after and board not in self._asked:
            self._asked.add(board)
            others = board.others()
            if not self._warned:
                self._warned = True
                logger.warning("rank %d, for %.0f s, %s; %s", self.rank, waited, status, others)
        elif not self.boards[0].answers and board is not self.boards[0]:
            board.read()  # now, as the last rank may soon fail, too

    def report(self, doing: str) -> str:
        """Tells the others what this rank was ``doing``; returns their status: "rank 1 waits for ...; rank 2 ..."."""
        answers = [board.report(doing) for board in self.boards]
        silent = ""
        for answer in answers:
            try:
                return answer() + silent
            except (concurrent.futures.TimeoutError, *BOARD_ERRORS):
                silent = f"; {_STORE} does not answer"
        what = ", and neither does the last rank, which has a copy" if len(answers) > 1 else ""
        return f"{_STORE} does not answer{what}; probably rank 0 has ended, or its host is disconnected"

    def answers(self, question: str, answer: str, is_past: Callable[[str], bool]) -> dict[int, str | None]:
        """The answers of the ranks that ask the same, by rank, until all have, or one does not: None of that one.

        is_past: whether a status says that a rank went on without asking. A rank that neither asks nor reports for
            `warn_after` counts as one that did.
        """
        prefix = f"{self._prefix}/answers/{question}"
        self._store.set(f"{prefix}/{self.rank}", answer)
        found: dict[int, str | None] = {self.rank: answer}
        deadline = time.monotonic() + self.warn_after
        while len(found) < self.ranks:
            for rank in range(self.ranks):
                if rank in found:
                    continue
                status = self.boards[0].line(rank)  # before the answer, which a rank gives first
                if self._store.check([f"{prefix}/{rank}"]):
                    found[rank] = self._store.get(f"{prefix}/{rank}").decode()
                elif is_past(status) or time.monotonic() > deadline:
                    return {**found, rank: None}
            time.sleep(self.interval / 100)
        return found

    def forget_answer(self, question: str) -> None:
        """Takes this rank's answer from the store. All ranks must have read it."""
        with contextlib.suppress(*BOARD_ERRORS):
            self._store.delete_key(f"{self._prefix}/answers/{question}/{self.rank}")

    def ranks_that(self, holds: bool) -> list[int]:
        """The ranks that pass True. All ranks call it; empty if some do not in time, or if the store does not answer.

        Uses the store, as collectives of the group may be out of step when this is called.
        """
        self._times_asked += 1
        prefix = f"{self._prefix}/ranks_that/{self._times_asked}"
        try:
            if holds:
                number = self._store.add(f"{prefix}/named", 1)
                self._store.set(f"{prefix}/{number}", str(self.rank))
            self._store.add(f"{prefix}/asked", 1)
            deadline = time.monotonic() + self.warn_after
            while self._store.add(f"{prefix}/asked", 0) < self.ranks:
                if time.monotonic() > deadline:
                    return []
                time.sleep(self.interval / 100)
            count = self._store.add(f"{prefix}/named", 0)
            return sorted(int(self._store.get(f"{prefix}/{number}")) for number in range(1, count + 1))
        except BOARD_ERRORS:
            return []


MOST_QUEUED = 64  # collectives that are remembered before it is asked which are complete


class Queued:
    """The collectives that the host has queued on a GPU and that the GPU has not completed; none on a CPU.

    Over NCCL a rank that waits for another one waits on its GPU: the host runs ahead, and cannot tell from its own
    calls which collective does not end.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._entries: deque[tuple[str, torch.cuda.Event]] = deque()

    def add(self, what: str) -> None:
        """``what`` ends before anything that is queued in the current stream from now on.

        What is captured runs later, and has no name then.
        """
        if self._device.type != "cuda" or is_captured(self._device):
            return
        if len(self._entries) >= MOST_QUEUED:
            self.oldest()
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._entries.append((what, event))

    def oldest(self) -> str:
        """The first collective that is not complete, or an empty string. In any thread, even during a capture."""
        with self._lock:
            while self._entries:
                what, event = self._entries[0]
                if not self._is_complete(event):
                    return what
                self._entries.popleft()
        return ""

    def _is_complete(self, event: torch.cuda.Event) -> bool:
        try:
            return is_reached(event, self._device)
        except RuntimeError:  # an error of an earlier launch, which the next call of the host raises
            return False


class NamedCollectives:
    """The collectives of one user of a group. Each has a name, for the error if it fails, and for what the errors of
    other ranks say of this one while it waits. The constructor is a collective, unless `name` is given.

    caller: begins the errors.
    status: returns in a few words what this rank is doing, given what it waits for, or ""; called in other threads.
    loss: what a failure costs, before "the process group can no longer be used".
    on_failure: is called before the error is raised.
    name: as of `Watch`.
    """

    def __init__(
        self,
        caller: str,
        group: dist.ProcessGroup,
        device: torch.device,
        status: Callable[[str], str],
        *,
        loss: str = "",
        on_failure: Callable[[], None] = lambda: None,
        name: str = "",
    ) -> None:
        self.queued = Queued(device)
        self.watch = Watch(group, device, self.status, lags=lambda: bool(self.queued.oldest()), name=name)
        self.failure = ""  # the error of the first collective that failed
        self._caller, self._status, self._loss, self._on_failure = caller, status, loss, on_failure
        self._waits_for = ""
        self._last_words = ""  # the status of a rank that has failed

    @contextlib.contextmanager
    def named(self, what: str, *, completes: bool = True, is_busy: bool = False) -> Iterator[None]:
        """Names the collective inside.

        completes: whether it ends inside, on a GPU in the order of the current stream.
        is_busy: whether the watch already knows that this rank waits for others, and goes on knowing.
        """
        self._waits_for = what
        if not is_busy:
            self.watch.busy(True)
        try:
            yield
            if completes:
                self.queued.add(what)
        except RuntimeError as error:
            raise self._failed(what, error) from error
        finally:
            self._waits_for = ""
            if not is_busy:
                self.watch.busy(False)

    def refuse_failed(self) -> None:
        """Raises again what a collective has raised: the process group cannot be used from then on."""
        if self.failure:
            raise RuntimeError(f"{self.failure}. That was in an earlier step")

    def status(self) -> str:
        """What this rank is doing, for the errors of the others. Runs in the threads of the watch."""
        if self._last_words:
            return self._last_words
        if self._waits_for:
            return self._status(f"waits for {self._waits_for}")
        queued = self.queued.oldest()
        return self._status(f"has queued {queued}, which its GPU has not completed" if queued else "")

    def _failed(self, what: str, error: Exception) -> RuntimeError:
        cause = str(error).strip().splitlines()[0]
        self._last_words = f"{FAILED} {what}: {cause}"
        others = self.watch.report(self._last_words)
        self._on_failure()
        the_group = f"{self._loss}, and the process group" if self._loss else "The process group"
        self.failure = (
            f"{self._caller}: expected {self.watch.ranks} ranks to take part in {what}, got: {cause}. "
            f"Status of the other ranks: {others}. {the_group} can no longer be used; exit the process, so that "
            "torchrun restarts the job from its last checkpoint"
        )
        return RuntimeError(self.failure)


def agreed_name(group: dist.ProcessGroup) -> str:
    """A new unique name, the same on all ranks, for keys in the store of ``group``. A collective."""
    name = [secrets.token_hex(8)]
    dist.broadcast_object_list(name, group=group, group_src=0)
    return name[0]


_STORE = "the store of the process group, on the host of rank 0 of the job,"


def _watch_store(weak_watch: weakref.ref[Watch], stopped: threading.Event) -> None:
    watch = weak_watch()
    if watch is not None:
        board = watch.boards[0]
        del watch
        _watch(weak_watch, board, stopped)


def _watch_last_rank(weak_watch: weakref.ref[Watch], stopped: threading.Event) -> None:
    watch = weak_watch()
    if watch is None:
        return
    arguments = watch._store, watch._prefix, watch.rank, watch.ranks, watch.interval
    del watch
    try:
        board = board_at_last_rank(*arguments, stopped)
    except BOARD_ERRORS as error:
        logger.debug("rank %d has no second board: %s", arguments[2], error)
        return
    watch = weak_watch()
    if board is None or watch is None:
        return
    watch.boards.append(board)
    del watch
    _watch(weak_watch, board, stopped)


def _watch(weak_watch: weakref.ref[Watch], board: StatusBoard, stopped: threading.Event) -> None:
    while True:
        watch = weak_watch()
        if watch is None:
            return
        try:
            watch.look(board)
        except BOARD_ERRORS as error:  # the group was destroyed, or the host of the board failed
            logger.debug("rank %d: a board does not answer: %s", watch.rank, error)
            if not board.reconnects:
                return
        del watch
        if stopped.wait(board.interval):
            return


def _timeout(group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds after which a collective of the group fails."""
    options = getattr(group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout.total_seconds() if timeout is not None else dist.constants.default_pg_timeout.total_seconds()
