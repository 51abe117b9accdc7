"""How data parallel training reports to its user: the name in errors, the logger, and profiler ranges."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

NAME = "cuda_ext.distributed.BucketedDataParallel"
logger = logging.getLogger("cuda_ext.distributed")

_NOTHING = nullcontext()


def profiler_range(name: str) -> AbstractContextManager[object]:
    """A range ``cuda_ext::name`` in the trace of `torch.profiler`; without a profiler, a check of 0.1 us.

    The name should not be one of our ops, with which the profiler's tables would merge it.
    """
    return record_function(f"cuda_ext::{name}") if _profiler_enabled() else _NOTHING


def begin_profiler_range(name: str) -> Callable[[], None] | None:
    """Begins a range; the returned function ends it, in any thread, once. None without a profiler."""
    if not _profiler_enabled():
        return None
    begun = record_function(f"cuda_ext::{name}")
    begun.__enter__()
    # A profiler only sees its own thread. The callbacks of a future run with the state of the thread that added them.
    done: torch.futures.Future[None] = torch.futures.Future()
    begun._call_end_callbacks_on_future(done)
    lock = threading.Lock()

    def end() -> None:
        with lock:  # a second caller returns only when the range has ended
            if not done.done():
                done.set_result(None)

    return end
