"""Runs the bodies of tests on the ranks of a gloo group, in worker processes that tests share."""

from __future__ import annotations

import base64
import functools
import importlib
import inspect
import os
import pickle
import select
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

COLLECTIVE_TIMEOUT = 60.0  # seconds after which a collective fails
BODY_TIMEOUT = 300.0  # seconds after which all workers are killed


def on_ranks(world_size: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that runs the body of a test on ``world_size`` ranks; the test passes if all of them pass.

    The body has parameters but no fixtures, and gets its rank from `torch.distributed`. All ranks have the same random
    seed.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(workers: Workers, **parameters: Any) -> None:
            workers.run(world_size, body.__module__, body.__name__, parameters)

        signature = inspect.signature(body)
        fixture = inspect.Parameter("workers", inspect.Parameter.KEYWORD_ONLY)
        test.__signature__ = signature.replace(parameters=[*signature.parameters.values(), fixture])  # type: ignore[attr-defined]
        return test

    return decorate


class Workers:
    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[str]] = []

    def run(self, world_size: int, module: str, name: str, parameters: dict[str, Any]) -> None:
        while len(self._processes) < world_size:
            self._start()
        with tempfile.TemporaryDirectory() as folder:
            seed = int(torch.randint(2**31, ()))
            for rank, process in enumerate(self._processes[:world_size]):
                job = (rank, world_size, str(Path(folder) / "store"), seed, module, name, parameters)
                print(base64.b64encode(pickle.dumps(job)).decode(), file=process.stdin, flush=True)
            failures = [self._result(rank, process) for rank, process in enumerate(self._processes[:world_size])]
        if any(failures):
            self.stop(kill=True)
            pytest.fail("\n".join(f"rank {rank}: {failure}" for rank, failure in enumerate(failures)), pytrace=False)

    def _start(self) -> None:
        folder = str(Path(__file__).resolve().parent)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(folder).parent), folder])}
        process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._processes.append(process)

    @staticmethod
    def _result(rank: int, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], BODY_TIMEOUT)
        line = process.stdout.readline() if ready else ""
        return pickle.loads(base64.b64decode(line)) if line else f"no answer in {BODY_TIMEOUT} s, or the process died"

    def stop(self, kill: bool = False) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.kill() if kill else process.stdin.close()
        for process in self._processes:
            process.wait()
        self._processes.clear()


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    workers = Workers()
    yield workers
    workers.stop()


def _serve() -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    answers, sys.stdout = sys.stdout, sys.stderr  # a body may print
    for line in sys.stdin:
        rank, world_size, store, seed, module, name, parameters = pickle.loads(base64.b64decode(line))
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
        print(base64.b64encode(pickle.dumps(failure)).decode(), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
