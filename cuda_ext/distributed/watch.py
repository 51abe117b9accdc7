"""Who is missing: what every rank is doing, for the others to read when a collective does not end.

A collective that fails, or hangs, knows neither parameters nor buckets, and often not even the rank. So a thread of
each rank writes a line to the store of the process group whenever a backward pass takes long, and every rank that fails
reads the lines of the others into its error. While steps follow each other nothing is written.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from cuda_ext.distributed.collectives import agreed_name

logger = logging.getLogger("cuda_ext.distributed")
GAVE_UP = "gave up"  # how the last line of a rank begins
PATIENCE = 2.5  # intervals after which a rank that writes nothing new, or a store that does not answer, counts as gone
STOPPING = 2.0  # seconds that the end of a process waits for a store that does not answer

_Lines = dict[int, tuple[int, str]]  # of each rank: how many it has written, and the last


class Watch:
    """Of one rank; making one is a collective. ``status()`` says in a few words what it is doing, in another thread.

    interval: seconds between two looks; who has begun or ended no backward pass since the last writes its line.
    warn_after: seconds after which a pass that does not end is logged as a warning, with what the others do: before the
    timeout of the group, as that of NCCL ends the process. Both default to parts of that timeout.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        status: Callable[[], str],
        *,
        interval: float | None = None,
        warn_after: float | None = None,
    ) -> None:
        timeout = _timeout(group, device)
        self.rank, self.ranks = group.rank(), group.size()
        # All write to one process; a thousand ranks do it less often.
        self.interval = interval or max(min(1.0, timeout / 10), self.ranks / 256)
        self.warn_after = warn_after or timeout / 2
        self._status = status
        self._prefix = f"cuda_ext/watch/{agreed_name(group)}"
        store: Any = group.get_group_store()
        self._store = store.clone()  # a client of its own: that of the group may be waiting for something
        self._since = time.monotonic()
        self._busy = False
        self._warned = False
        self._lines_written = 0
        self._heard: tuple[float, _Lines] | None = None  # in the running pass: when, and what the others had written
        self._asks_since: float | None = None  # since when the thread has waited for the store
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def busy(self, busy: bool) -> None:
        """A backward pass has begun, or has ended."""
        self._busy, self._warned, self._since, self._heard = busy, False, time.monotonic(), None
        if self._thread is None and self.ranks > 1:
            self._thread = threading.Thread(target=_watch, args=(weakref.ref(self), self._stopped), daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread.

        It must not come back from the store while the interpreter goes down: Python would end it in the midst of C++,
        which ends the process by an abort.
        """
        self._stopped.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(STOPPING)

    def look(self) -> None:
        """What the thread does at every interval."""
        waited = time.monotonic() - self._since
        if waited <= self.interval:
            return
        self._asks_since = time.monotonic()
        status = self._status()
        self._write(status)
        self._line(self.rank)  # unlike a write this waits for an answer: whether the store is there shows in time
        if self._busy and waited > self.warn_after and not self._warned:
            self._warned = True
            logger.warning("rank %d, for %.0f s, %s; %s", self.rank, waited, status, self._others())
        self._asks_since = None

    def report(self, doing: str) -> str:
        """Tells the others what this rank was ``doing``; returns "rank 1 does that; each of ranks 2 and 3 does it"."""
        answer: list[str] = []

        def ask() -> None:
            self._write(doing)
            answer.append(self._others())

        # The store may be on the host that is gone: then its client waits for long, but not the one who asks.
        asked = time.monotonic() if self._asks_since is None else self._asks_since
        heard = asked if self._heard is None else self._heard[0]
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(max(max(asked, heard) + PATIENCE * self.interval - time.monotonic(), 0.0) + self.interval)
        return answer[0] if answer else "the store of the process group, a process on its first host, does not answer"

    def _write(self, doing: str) -> None:
        self._lines_written += 1
        self._store.set(f"{self._prefix}/{self.rank}", json.dumps([self._lines_written, doing]))

    def _others(self) -> str:
        """What the others do; who has written nothing new since the last time, or all this time, is silent."""
        lines = {rank: self._line(rank) for rank in range(self.ranks) if rank != self.rank}
        if self._heard is None:
            self._heard = time.monotonic(), lines
        since, before = self._heard
        silent = [rank for rank, (_, doing) in lines.items() if not doing.startswith(GAVE_UP)]
        while silent := [rank for rank in silent if lines[rank][0] == before[rank][0]]:
            if time.monotonic() > since + PATIENCE * self.interval:
                break
            time.sleep(min(0.05, self.interval / 4))
            lines |= {rank: self._line(rank) for rank in silent}
        self._heard = time.monotonic(), lines
        ranks_that: dict[str, list[int]] = {}
        for rank, (_, doing) in lines.items():
            if rank in silent:
                doing = f"gives no sign of life{'; the last one: ' + doing if doing else ''}"
            ranks_that.setdefault(doing, []).append(rank)
        return "; ".join(
            f"{'each of ' if len(ranks) > 1 else ''}{name_ranks(ranks)} {doing}" for doing, ranks in ranks_that.items()
        )

    def _line(self, rank: int) -> tuple[int, str]:
        key = f"{self._prefix}/{rank}"
        if not self._store.check([key]):
            return 0, ""
        number, doing = json.loads(self._store.get(key))
        return number, doing


def name_ranks(ranks: Sequence[int]) -> str:
    """ "rank 3", or "ranks 1, 2 and 4", or of many the first and how many more."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = [str(rank) for rank in ranks[:8]]
    last = f"{len(ranks) - 8} more" if len(ranks) > 8 else shown.pop()
    return f"ranks {', '.join(shown)} and {last}"


def _watch(weak_watch: weakref.ref[Watch], stopped: threading.Event) -> None:
    while True:
        watch = weak_watch()
        if watch is None:
            return
        interval = watch.interval
        try:
            watch.look()
        except (RuntimeError, dist.DistError) as error:  # the group was destroyed, or the host of the store is gone
            logger.debug("rank %d no longer watches: %s", watch.rank, error)
            return
        del watch
        if stopped.wait(interval):
            return


def _timeout(group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds after which a collective of the group fails."""
    options = getattr(group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout.total_seconds() if timeout is not None else dist.constants.default_pg_timeout.total_seconds()
