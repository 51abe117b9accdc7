"""Runs the bodies of tests on the ranks of a gloo group, in worker processes that tests share."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import multiprocessing
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch

COLLECTIVE_TIMEOUT = 60.0  # seconds after which a collective fails
BODY_TIMEOUT = 300.0  # seconds after which all workers are killed
EXIT_TIMEOUT = 30.0  # seconds for a worker to save its coverage and end

# Workers are forked from a server that has imported PyTorch, which takes two seconds.
FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(["torch", "torch.distributed", "torch.testing", "pytest"])


def on_ranks(world_size: int | str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that runs the body of a test on ``world_size`` ranks, or as many as the parameter of that name says;
    the test passes if all of them pass.

    The body has parameters but no fixtures, and gets its rank from `torch.distributed`. All ranks have the same random
    seed.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(workers: Workers, **parameters: Any) -> None:
            ranks = parameters[world_size] if isinstance(world_size, str) else world_size
            workers.run(ranks, body.__module__, body.__name__, parameters)

        signature = inspect.signature(body)
        fixture = inspect.Parameter("workers", inspect.Parameter.KEYWORD_ONLY)
        test.__signature__ = signature.replace(parameters=[*signature.parameters.values(), fixture])  # type: ignore[attr-defined]
        return test

    return decorate


class Workers:
    def __init__(self) -> None:
        self._workers: list[tuple[ForkServerProcess, Connection]] = []

    def run(self, world_size: int, module: str, name: str, parameters: dict[str, Any]) -> None:
        while len(self._workers) < world_size:
            self._start()
        workers = self._workers[:world_size]
        with tempfile.TemporaryDirectory() as folder:
            seed = int(torch.randint(2**31, ()))
            for rank, (_, connection) in enumerate(workers):
                with contextlib.suppress(BrokenPipeError):  # the worker died; _result says so
                    connection.send((rank, world_size, str(Path(folder) / "store"), seed, module, name, parameters))
            failures = [self._result(connection) for _, connection in workers]
        if any(failures):
            self.stop(kill=True)
            pytest.fail("\n".join(f"rank {rank}: {failure}" for rank, failure in enumerate(failures)), pytrace=False)

    def _start(self) -> None:
        folder = str(Path(__file__).resolve().parent)
        ours, theirs = FORK_SERVER.Pipe()
        process = FORK_SERVER.Process(target=_serve, args=(theirs, [str(Path(folder).parent), folder]), daemon=True)
        process.start()
        theirs.close()
        self._workers.append((process, ours))

    @staticmethod
    def _result(connection: Connection) -> str:
        with contextlib.suppress(EOFError, ConnectionResetError):
            if connection.poll(BODY_TIMEOUT):
                failure: str = connection.recv()
                return failure
        return f"no answer in {BODY_TIMEOUT} s, or the process died"

    def stop(self, kill: bool = False) -> None:
        for process, connection in self._workers:
            if kill:
                process.kill()
            connection.close()
        for process, _ in self._workers:
            process.join(EXIT_TIMEOUT)
            if process.is_alive():  # another process has inherited the connection, so that it did not end
                process.kill()
                process.join()
        self._workers.clear()


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    workers = Workers()
    yield workers
    workers.stop()


def _serve(connection: Connection, path: list[str]) -> None:
    import torch.distributed as dist

    sys.path[:0] = path
    torch.set_num_threads(1)
    while True:
        try:
            rank, world_size, store, seed, module, name, parameters = connection.recv()
        except EOFError:
            break
        failure = ""
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=COLLECTIVE_TIMEOUT),
            )
            body = getattr(importlib.import_module(module), name).__wrapped__  # the import may draw random numbers
            torch.manual_seed(seed)
            body(**parameters)
            dist.barrier()
            dist.destroy_process_group()
        except BaseException:
            failure = traceback.format_exc()
        connection.send(failure)
    _save_coverage()


def _save_coverage() -> None:
    """Forked processes end without the exit handlers that would save the measured coverage."""
    if "coverage" in sys.modules:
        import coverage

        if (current := coverage.Coverage.current()) is not None:
            current.stop()
            current.save()
