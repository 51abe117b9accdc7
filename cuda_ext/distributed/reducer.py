"""The backward pass as the buckets see it: which gradients have come, which bucket goes next, when all is done."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import Variable

from cuda_ext.distributed.gradient_bucket import GradientBucket
from cuda_ext.distributed.plan import NAME


class Reducer:
    """Sends every bucket once in a backward pass, strictly in order, as ranks match collectives by their order.

    A bucket goes when its last gradient has come and all buckets before it have gone; those that lack a gradient go at
    the end of the pass, which is a callback of the autograd engine, so that ``backward()`` returns with the averages in
    place. A backward call may hold several passes, as re-entrant checkpoints nest them: an average is linear and leaves
    what is averaged already as it is, so the later passes only add what the earlier ones lacked.
    """

    def __init__(self, buckets: Sequence[GradientBucket]) -> None:
        self.buckets = list(buckets)
        self.enabled = True  # False under no_sync()
        self._lock = threading.Lock()  # the engine has a thread for each device, and each runs hooks
        self._next = 0  # the bucket to go
        self._active = False  # whether a gradient has come since the last pass ended
        self._callback_task: int | None = None  # the engine's graph task at whose end _finish() runs

    def gradient_hook(self, bucket: GradientBucket, position: int) -> Callable[[Tensor], None]:
        """What runs when the gradient of a parameter is there: for every parameter in every pass."""
        arrived = bucket.arrived

        def on_gradient(_: Tensor) -> None:
            if not self.enabled:
                return
            with self._lock:
                if not self._active:
                    self._begin()
                if not arrived[position]:
                    arrived[position] = True
                    bucket.missing -= 1
                    if bucket.missing == 0:
                        self._launch_complete()
                elif bucket.launched:
                    raise RuntimeError(
                        f"{NAME}: expected one gradient of parameter {bucket.names[position]} in a backward pass, got "
                        "a second one after the first was sent; re-entrant checkpoints that share a parameter do that: "
                        "use torch.utils.checkpoint with use_reentrant=False"
                    )

        return on_gradient

    def output_hook(self, _: Tensor) -> None:
        """What runs when the gradient of an output is there: before any parameter's, in the outermost graph task."""
        if self.enabled:
            self._queue_finish()

    def _begin(self) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{NAME}: expected a backward pass without create_graph, got create_graph=True, but averages over "
                "ranks are no part of a graph; for a penalty on gradients, compute these with torch.autograd.grad(..., "
                "create_graph=True) and call backward() on the loss that holds the penalty"
            )
        if self._callback_task is None:
            self._queue_finish()
        self._active = True

    def _queue_finish(self) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._callback_task:
            self._callback_task = task
            Variable._execution_engine.queue_callback(self._finish)

    def _launch_complete(self) -> None:
        while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
            self.buckets[self._next].launch()
            self._next += 1

    def _finish(self) -> None:
        self._callback_task = None
        if not self._active:  # no gradient of a parameter was asked for, as by torch.autograd.grad
            return
        for bucket in self.buckets[self._next :]:
            bucket.launch()
            self._next += 1
        complete = [bucket.finish() for bucket in self.buckets]
        self._reset()
        if not all(complete):
            for bucket in self.buckets:
                bucket.drop_gradients()
            raise RuntimeError(
                f"{NAME}: expected every rank to finish the backward pass, but one gave it up, likely by an exception "
                "of its own; the gradients of this step are dropped on all ranks, and training can go on with the next"
            )

    def recover(self) -> None:
        """Completes what a backward pass that ended in an exception has left undone; does nothing inside of one."""
        if torch._C._current_graph_task_id() != -1:  # a checkpoint computes the forward pass again
            return
        self._callback_task = None
        if self._active:
            for bucket in self.buckets:
                bucket.abandon()
            self._reset()

    def _reset(self) -> None:
        self._next = 0
        self._active = False
