"""Boards to which every rank writes its status, for the others to read: in a store, and at the last rank.

The store of a process group is usually a process on the first host, rank 0 itself or its launcher, and fails with it.
So the last rank, which launchers put on the last host, keeps a second board: `board_at_last_rank`.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import socket
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore

FAILED = "failed in"  # begins the last status of a rank
PATIENCE = 2.5  # intervals without a new status, or without an answer, after which a rank or a board counts as lost
BOARD_ERRORS = (RuntimeError, OSError)  # raised if a board cannot be reached

Line = tuple[int, str]  # the number of statuses that a rank has written, and the last one


@dataclass
class _Heard:
    number: int
    doing: str
    since: float  # when the number was first read


class StatusBoard(ABC):
    """interval: seconds between two statuses of a rank that waits, or computes for long."""

    reconnects = True  # whether the board may answer again after an error

    def __init__(self, rank: int, ranks: int, interval: float) -> None:
        self.interval = interval
        self._rank, self._others = rank, [other for other in range(ranks) if other != rank]
        self._written = 0
        self._heard: dict[int, _Heard] = {}  # from the other ranks, in the current pass
        self._asked = 0.0  # when the others were last read
        self._tries_since: float | None = None  # when `write` began to wait for an answer
        self._lost = False

    @abstractmethod
    def _put(self, line: Line) -> None:
        """Returns once the board has answered."""

    @abstractmethod
    def _get(self, ranks: Iterable[int]) -> dict[int, Line]:
        """Number 0 for a rank that has written nothing."""

    @property
    def answers(self) -> bool:
        """Whether the board answered the last time, or may still answer in time."""
        since = self._tries_since
        return not self._lost and (since is None or time.monotonic() < since + PATIENCE * self.interval)

    def line(self, rank: int) -> str:
        """The last status of a rank; empty if it has written none."""
        return self._get([rank])[rank][1]

    def forget(self) -> None:
        """Forgets what the other ranks wrote, when a new pass begins."""
        self._heard = {}

    def write(self, doing: str) -> None:
        self._tries_since = time.monotonic()
        self._written += 1
        try:
            self._put((self._written, doing))
        except BOARD_ERRORS:
            self._lost = True
            raise
        self._lost = False
        self._tries_since = None

    def read(self) -> list[int]:
        """Reads the statuses of the others; returns the ranks that wrote nothing new since the last read and have not
        failed."""
        return self._read(self._others, self._heard)

    def _read(self, ranks: Sequence[int], heard: dict[int, _Heard]) -> list[int]:
        unheard = []
        for rank, (number, doing) in self._get(ranks).items():
            known = heard.get(rank)
            if known is None or known.number != number:
                heard[rank] = _Heard(number, doing, time.monotonic())
            if (known is None or known.number == number) and not doing.startswith(FAILED):
                unheard.append(rank)
        self._asked = time.monotonic()
        return unheard

    def others(self) -> str:
        """The status of the other ranks. Waits until each has written a new one, or counts as lost."""
        heard = self._heard
        try:
            unheard = self._read(self._others, heard)
            while any(time.monotonic() < heard[rank].since + PATIENCE * self.interval for rank in unheard):
                time.sleep(min(0.05, self.interval / 4))
                unheard = self._read(unheard, heard)
        except BOARD_ERRORS:
            if not heard:
                raise
            unheard = [rank for rank, last in heard.items() if not last.doing.startswith(FAILED)]
        ranks_that: dict[str, list[int]] = {}
        for rank, last in heard.items():
            doing, silent_for = last.doing, time.monotonic() - last.since
            if rank in unheard and silent_for >= PATIENCE * self.interval:
                doing = f"does not respond{'; its last status: ' + doing if doing else ''}"
            elif rank in unheard:  # because the board could not be reached
                doing = f"has not reported for {silent_for:.1f} s{'; its last status: ' + doing if doing else ''}"
            ranks_that.setdefault(doing, []).append(rank)
        return "; ".join(
            f"{'each of ' if len(ranks) > 1 else ''}{name_ranks(ranks)} {doing}" for doing, ranks in ranks_that.items()
        )

    def report(self, doing: str) -> Callable[[], str]:
        """Writes a status and reads `others` in a thread. The returned function waits for the answer, up to a deadline.

        If the host of the board is lost, the thread may wait much longer than the deadline.
        """
        answer: Future[str] = Future()

        def ask() -> None:
            try:
                with contextlib.suppress(*BOARD_ERRORS):  # statuses from before may still be useful
                    self.write(doing)
                answer.set_result(self.others())
            except BOARD_ERRORS as error:
                answer.set_exception(error)

        asked = self._tries_since or time.monotonic()
        deadline = max(max(asked, self._asked) + PATIENCE * self.interval, time.monotonic()) + self.interval
        threading.Thread(target=ask, daemon=True).start()
        return lambda: answer.result(max(deadline - time.monotonic(), 0.0))


class BoardInStore(StatusBoard):
    """A board in the store of a process group."""

    reconnects = False  # each use of a lost connection logs a page of errors

    def __init__(self, store: Any, prefix: str, rank: int, ranks: int, interval: float) -> None:
        super().__init__(rank, ranks, interval)
        self._store, self._prefix = store, prefix

    def _put(self, line: Line) -> None:
        self._store.set(f"{self._prefix}/{self._rank}", json.dumps(line))
        self._get([self._rank])  # waits for an answer, unlike `set`

    def _get(self, ranks: Iterable[int]) -> dict[int, Line]:
        return {rank: self._line(f"{self._prefix}/{rank}") for rank in ranks}

    def _line(self, key: str) -> Line:
        if not self._store.check([key]):
            return 0, ""
        number, doing = json.loads(self._store.get(key))
        return number, doing


def board_at_last_rank(
    store: Any, prefix: str, rank: int, ranks: int, interval: float, stopped: threading.Event
) -> StatusBoard | None:
    """The second board. None if ``store`` is not a TCPStore, which can fail, or if ``stopped`` is set meanwhile.

    Waits for the last rank, which publishes the address of its board in ``store``.
    """
    server = _tcp_store(store)
    if server is None:
        return None
    key = f"{prefix}/board"
    if rank == ranks - 1:
        board = _OwnBoard(rank, ranks, interval, prefix)
        store.set(key, json.dumps((_own_address(server.host, server.port), board.port)))
        return board
    while not store.check([key]):
        if stopped.wait(interval / 10):
            return None
    host, port = json.loads(store.get(key))
    return _RemoteBoard(rank, ranks, interval, prefix, (host, port))


class _OwnBoard(StatusBoard):
    """A board in this process: a thread serves it to all ranks until this object is deleted."""

    def __init__(self, rank: int, ranks: int, interval: float, prefix: str) -> None:
        super().__init__(rank, ranks, interval)
        self._lines: dict[int, Line] = {}
        listener = _listen()
        self.port = listener.getsockname()[1]
        weakref.finalize(self, _stop_listening, listener)
        arguments = listener, prefix, ranks, self._lines
        threading.Thread(target=_serve, args=arguments, daemon=True, name="cuda_ext.status_board").start()

    def _put(self, line: Line) -> None:
        self._lines[self._rank] = line

    def _get(self, ranks: Iterable[int]) -> dict[int, Line]:
        return {rank: self._lines.get(rank, (0, "")) for rank in ranks}


class _RemoteBoard(StatusBoard):
    def __init__(self, rank: int, ranks: int, interval: float, prefix: str, address: tuple[str, int]) -> None:
        super().__init__(rank, ranks, interval)
        self._prefix, self._address = prefix, address

    def _put(self, line: Line) -> None:
        self._ask(line, [])

    def _get(self, ranks: Iterable[int]) -> dict[int, Line]:
        return self._ask(None, list(ranks))

    def _ask(self, line: Line | None, ranks: list[int]) -> dict[int, Line]:
        connection = socket.create_connection(self._address, timeout=self.interval)
        with connection, connection.makefile("rw") as stream:
            print(json.dumps((self._prefix, self._rank, line, ranks)), file=stream, flush=True)
            answer = stream.readline()
        if not answer:
            raise ConnectionResetError("the board at the last rank closed the connection")
        return {rank: (number, doing) for rank, (number, doing) in zip(ranks, json.loads(answer))}


def _serve(listener: socket.socket, prefix: str, ranks: int, lines: dict[int, Line]) -> None:
    """Answers one connection at a time until ``listener`` is closed; ignores clients that do not send ``prefix``."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError), connection:
            connection.settimeout(1.0)
            with connection.makefile("rw") as stream:
                its_prefix, rank, line, wanted = json.loads(stream.readline(1 << 20))
                if its_prefix != prefix or not 0 <= rank < ranks:
                    continue
                if line is not None:
                    lines[rank] = line
                print(json.dumps([lines.get(other, (0, "")) for other in wanted]), file=stream, flush=True)


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # a kernel without IPv6
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def _stop_listening(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # ends `accept`, which `close` does not
    listener.close()


def _own_address(host: str, port: int) -> str:
    """An address of this process for the other ranks: that of the interface towards ``host``, which all ranks reach."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as route:
        route.connect(address)  # UDP: sends nothing
        own: str = route.getsockname()[0]
    return host if own == address[0] or ipaddress.ip_address(own).is_loopback else own


def _tcp_store(store: Any) -> Any:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, TCPStore) else None


def name_ranks(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 1, 2 and 4", or the first eight and the number of the others."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = [str(rank) for rank in ranks[:8]]
    last = f"{len(ranks) - 8} more" if len(ranks) > 8 else shown.pop()
    return f"ranks {', '.join(shown)} and {last}"
