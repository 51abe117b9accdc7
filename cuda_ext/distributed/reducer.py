"""The backward pass as the buckets see it: which gradients have come, which bucket goes next, when all is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import Variable

from cuda_ext.distributed.gradient_bucket import GradientBucket

NAME = "cuda_ext.distributed.BucketedDataParallel"


class Reducer:
    """Sends every bucket once per backward pass, strictly in order, since ranks are matched by the order of their collectives.

    A bucket goes when the last of its gradients has come and all buckets before it have gone; those that lack a gradient go at the end of the pass. The
    pass ends in a callback of the autograd engine, so that ``backward()`` returns with the averages in place. The sum being linear, it does no harm if one
    backward call holds several passes (nested, as re-entrant checkpoints make them): what the earlier ones averaged stays what it is under an average.
    """

    def __init__(self, buckets: Sequence[GradientBucket]) -> None:
        self.buckets = list(buckets)
        self.enabled = True  # False under no_sync()
        self._next = 0  # the bucket to go
        self._active = False  # a gradient has come since the last pass ended
        self._callback_task: int | None = None  # the graph task of the engine that will call finish()

    def hook(self, bucket: GradientBucket, position: int, name: str) -> Callable[[Tensor], None]:
        """What to do when the gradient of a parameter is there; runs for every parameter of every pass."""
        arrived = bucket.arrived

        def on_gradient(parameter: Tensor) -> None:
            if not self.enabled:
                return
            if not self._active:
                self._begin()
            if arrived[position]:
                if bucket.launched:
                    raise RuntimeError(
                        f"{NAME}: expected one gradient of {name} in a backward pass, got a second one after the first was sent; a parameter shared by "
                        "several re-entrant checkpoints does that: use torch.utils.checkpoint with use_reentrant=False"
                    )
                return
            arrived[position] = True
            bucket.missing -= 1
            if bucket.missing == 0:
                self._launch_complete()

        return on_gradient

    def expect_backward(self, grad: Tensor) -> None:
        """Hook of the outputs: runs before any gradient of a parameter, in the outermost graph task of the pass."""
        if self.enabled:
            self._queue_finish()

    def _queue_finish(self) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._callback_task:
            self._callback_task = task
            Variable._execution_engine.queue_callback(self._finish)

    def _begin(self) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{NAME}: expected a backward pass without create_graph=True, got one with it; the average would not be part of the graph. For a penalty on "
                "gradients, compute them with torch.autograd.grad(..., create_graph=True) and call backward() on the result"
            )
        if self._callback_task is None:
            self._queue_finish()
        self._active = True

    def _launch_complete(self) -> None:
        while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
            self.buckets[self._next].launch()
            self._next += 1

    def _finish(self) -> None:
        self._callback_task = None
        if not self._active:  # the engine computed gradients of something else, as torch.autograd.grad does
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
                f"{NAME}: expected every rank to finish the backward pass, but one gave it up, likely by an exception (see its output); the gradients of this "
                "step are dropped on all ranks, and training can go on with the next one"
            )

    def recover(self) -> None:
        """Outside of a backward pass: completes what one that ended in an exception left undone."""
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
