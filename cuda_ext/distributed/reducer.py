"""The backward pass as the buckets see it: which gradients have come, which bucket goes next, when all is done."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch.autograd import Variable

from cuda_ext import bucket as bucket_ops
from cuda_ext._load import ops
from cuda_ext.distributed.clock import Mark, mark, seconds_between
from cuda_ext.distributed.gradient_bucket import GradientBucket, Outcome, abandon, announce, send
from cuda_ext.distributed.reporting import NAME
from cuda_ext.distributed.status_board import GAVE_UP, name_ranks
from cuda_ext.distributed.trace import Trace
from cuda_ext.distributed.watch import Watch
from cuda_ext.distributed.wrapped_module import check_compiler


class Arrivals:
    """The gradients of a backward pass in the order in which they came: bucket and position of each.

    If they are ``timed``, also when, in seconds since the first.
    """

    def __init__(self, device: torch.device, timed: bool) -> None:
        self.places: list[tuple[int, int]] = []
        self._device, self._timed = device, timed
        self._marks: list[Mark] = []

    def add(self, bucket: int, position: int) -> None:
        self.places.append((bucket, position))
        if self._timed:
            self._marks.append(mark(self._device))

    def seconds(self) -> list[float]:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return [seconds_between(self._marks[0], each) for each in self._marks]


class ForwardPasses:
    """Those since the last backward pass that averaged."""

    def __init__(self) -> None:
        self.unreached = 0  # how many of them no backward pass has reached yet


class Reducer:
    """Sends every bucket once in a backward pass, strictly in order, as ranks match collectives by their order.

    A bucket goes, or several that are launched as one, when the last gradient has come and all buckets before have
    gone; those that lack a gradient go at the end of the pass, which is a callback of the autograd engine, so that
    ``backward()`` returns with the averages in place. A backward call may hold several passes, as re-entrant
    checkpoints nest them: an average is linear and leaves what is averaged already as it is, so the later passes only
    add what the earlier ones lacked.

    A rank whose backward pass reaches an output of the module, and then no parameter, takes part with zeros. One whose
    backward pass reaches no output does not know of it, and its next pass would meet the one that the other ranks wait
    in. So with the last sum of a pass each rank tells whether it has forward passes that backward has not reached: all
    ranks raise if some have and others have not.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.buckets: list[GradientBucket] = []
        self.launches: list[range] = []  # the buckets that go together, in order
        self._enabled = True
        self._slots: list[tuple[bucket_ops.GradientSlots, float]] = []
        self.passes = 0  # that have ended with averages
        self.times_arrivals = False  # whether those of the next passes are to be timed
        self.arrivals = Arrivals(device, False)  # of the last of them
        self.trace: Trace | None = None
        self._device = device
        self.watch = Watch(group, device, self._status)
        self._failure = ""
        self._forward_passes = ForwardPasses()
        self._lock = threading.Lock()  # the engine has a thread for each device, and each runs hooks
        self._next = 0  # the launch to go
        self._waits_for = ""  # the collective that has to come before anything goes on
        self._active = False  # whether a gradient, of a parameter or output, has come since the last pass ended
        self._callback_task: int | None = None  # the engine's graph task at whose end _finish() runs

    @property
    def enabled(self) -> bool:
        """Whether backward passes average; not under no_sync()."""
        return self._enabled

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        self._enabled = enabled
        self._open_slots()

    def drop_slots(self) -> None:
        self._slots.clear()

    def add_slots(self, slots: bucket_ops.GradientSlots, scale: float) -> None:
        """``scale``: what a pass that averages multiplies gradients with on their way to these slots."""
        self._slots.append((slots, scale))

    def _open_slots(self) -> None:
        for slots, scale in self._slots:
            slots.unlock_all()
            slots.open(scale if self._enabled else 1.0)

    def use(self, buckets: Sequence[GradientBucket], launches: Sequence[int]) -> None:
        """Goes on with other buckets, between two passes. ``launches``: how many of them go together, in order."""
        self.buckets = list(buckets)
        ends = list(accumulate(launches, initial=0))
        self.launches = [range(begin, end) for begin, end in pairwise(ends)]
        self._reset()

    def gradient_hook(self, number: int, position: int) -> Callable[[object, object], None]:
        """What runs when AccumulateGrad of a parameter has: for every parameter in every pass that reaches it."""
        bucket = self.buckets[number]
        arrived = bucket.arrived

        def on_gradient(_: object, __: object) -> None:
            bucket.collect(position)
            if not self._enabled:
                return
            with self._lock:
                if not self._active:
                    self._refuse_create_graph()
                    if self._callback_task is None:
                        self._queue_finish()
                    self._begin()
                self.arrivals.add(number, position)
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

    def output_hook(self, trains: bool) -> Callable[[torch.Tensor], None]:
        """What runs when the gradient of an output is there: before any parameter's, in the outermost graph task.

        Asked for before each forward pass. ``trains``: whether a backward pass is to be expected of it.
        """
        forward_passes, reached = self._forward_passes, not trains
        forward_passes.unreached += trains

        def on_output(_: torch.Tensor) -> None:
            nonlocal reached
            with self._lock:
                forward_passes.unreached -= not reached
                reached = True
                if self._enabled:
                    self._queue_finish()
                    if not self._active and ops._in_whole_backward():
                        self._refuse_create_graph()
                        self._begin()

        return on_output

    @staticmethod
    def _refuse_create_graph() -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{NAME}: expected a backward pass without create_graph, got create_graph=True, but averages over "
                "ranks are no part of a graph; for a penalty on gradients, compute these with torch.autograd.grad(..., "
                "create_graph=True) and call backward() on the loss that holds the penalty"
            )

    def _begin(self) -> None:
        self._active = True
        self.watch.busy(True)
        self.arrivals = Arrivals(self._device, self.times_arrivals)
        if self.trace is not None:
            self.trace.backward_begins()

    def _queue_finish(self) -> None:
        check_compiler()
        task = torch._C._current_graph_task_id()
        if task != self._callback_task:
            self._callback_task = task
            Variable._execution_engine.queue_callback(self._finish)

    def _launch_complete(self) -> None:
        while self._next < len(self.launches):
            if any(self.buckets[number].missing for number in self.launches[self._next]):
                return
            if self._next == len(self.launches) - 1 and self._forward_passes.unreached:
                return  # this pass may still reach them; `_finish` knows
            self._launch_next()

    def _launch_next(self) -> None:
        launch = self.launches[self._next]
        last = len(self.buckets) - 1
        with torch.no_grad():
            for number in launch:
                bucket = self.buckets[number]
                with nullcontext() if self.trace is None else self.trace.packing(number, bucket.label):
                    bucket.pack(left_out=number == last and self._forward_passes.unreached > 0)
            with self._summing(launch):
                pending = send([self.buckets[number] for number in launch])
            if self.trace is not None:
                for number in launch:
                    self.trace.sent(number, pending)
        self._next += 1

    def _summing(self, launch: range) -> AbstractContextManager[None]:
        numbers = f"bucket {launch[0]}" if len(launch) == 1 else f"buckets {launch[0]} to {launch[-1]}"
        names = f"{self.buckets[launch[0]].names[0]} to {self.buckets[launch[-1]].names[-1]}"
        return self.collective(f"the sum of {numbers}, {names}, of backward pass {self.passes + 1}")

    @contextmanager
    def collective(self, what: str) -> Iterator[None]:
        """A failure in here is one of ``what``, a collective, and says so; who waits in here, too."""
        self._waits_for = what
        outside = not self._active  # of a pass
        if outside:
            self.watch.busy(True)
        try:
            yield
        except RuntimeError as error:
            raise self._failed(what, error) from error
        finally:
            self._waits_for = ""
            if outside:
                self.watch.busy(False)

    def _failed(self, what: str, error: Exception) -> RuntimeError:
        """What to raise where a collective has failed. The group is of no use from here on."""
        cause = str(error).strip().splitlines()[0]
        others = self.watch.report(f"{GAVE_UP} {what}: {cause}")
        self._reset()
        self._drop_gradients()
        self._failure = (
            f"{NAME}: expected {self.watch.ranks} ranks to take part in {what}, got: {cause}. "
            f"What the others do: {others}. The gradients of this step are dropped, and the process group is of "
            "no use any more: end the process; torchrun then restarts the job, which goes on from its last checkpoint"
        )
        return RuntimeError(self._failure)

    def _status(self) -> str:
        """What this rank is doing, for the others. Runs in the thread of the watch."""
        unreached = self._forward_passes.unreached
        passes = "forward pass" if unreached == 1 else f"{unreached} forward passes"
        left_out = f", and no backward pass has reached its last {passes}" if unreached else ""
        if self._waits_for:
            return f"waits for {self._waits_for}{left_out}"
        if not self._active:
            return f"is not in a backward pass; it has done {self.passes}{left_out}"
        launch = self.launches[min(self._next, len(self.launches) - 1)]  # the main thread goes on meanwhile
        number = next((number for number in launch if self.buckets[number].missing), launch[0])
        bucket = self.buckets[number]
        lacking = [name for name, arrived in zip(bucket.names, bucket.arrived) if not arrived]
        if not lacking:
            return f"has all gradients of backward pass {self.passes + 1}"
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        return (
            f"computes gradients in backward pass {self.passes + 1}; bucket {number} of {len(self.buckets)} lacks "
            f"{', '.join(lacking[:3])}{more}"
        )

    def _finish(self) -> None:
        self._callback_task = None
        if not self._active:  # no gradient of a parameter was asked for, as by torch.autograd.grad
            return
        left_out = bool(self._forward_passes.unreached)
        if self.trace is not None:
            self.trace.backward_ends()
        while self._next < len(self.launches):
            self._launch_next()
        outcomes = set()
        for launch in self.launches:
            with self._summing(launch):
                outcomes.update([self.buckets[number].finish() for number in launch])
        self._reset()
        if self.trace is not None:
            self.trace.finished()
        if outcomes != {Outcome.AVERAGES}:
            self._drop_gradients()
            raise self._no_averages(outcomes, left_out)
        self.passes += 1

    def _no_averages(self, outcomes: set[Outcome], left_out: bool) -> RuntimeError:
        """What to raise after a pass with another outcome. ``left_out``: whether this rank has left one out."""
        if Outcome.GIVEN_UP in outcomes:
            return RuntimeError(
                f"{NAME}: expected every rank to finish the backward pass, but one gave it up, likely by an exception "
                "of its own; the gradients of this step are dropped on all ranks, and training can go on with the next"
            )
        if Outcome.ANNOUNCED in outcomes:
            return RuntimeError(
                f"{NAME}: expected parameters to be frozen and freed on all ranks alike, got a rank on which some "
                "were, and not on this one; the gradients of this step are dropped"
            )
        ranks = self.watch.ranks_that(left_out)
        return RuntimeError(
            f"{NAME}: expected backward to reach an output of every forward pass, or of none on all ranks alike, got a "
            f"forward pass on {name_ranks(ranks) if ranks else 'some ranks'} that backward has not reached: the loss "
            "was a constant, or the step was skipped. So gradients of different steps have met; they are dropped on "
            "all ranks, and training can go on with the next step, unless an optimizer has stepped on some ranks only. "
            "Let every loss depend on the output (loss + 0.0 * output.sum()), skip a step on all ranks or on none, and "
            "run forward passes that nothing is trained on under torch.no_grad()"
        )

    def recover(self) -> None:
        """Completes what a backward pass that ended in an exception has left undone; does nothing inside of one."""
        if torch._C._current_graph_task_id() != -1:  # a checkpoint computes the forward pass again
            return
        self._callback_task = None
        if self._failure:
            raise RuntimeError(f"{self._failure}. That was in an earlier step")
        if self._active:
            for launch in self.launches:
                with self._summing(launch):
                    abandon([self.buckets[number] for number in launch])
            self._reset()

    def announce_change(self) -> bool:
        """A pass without gradients, after parameters were frozen or freed; whether they were on all ranks."""
        for bucket in self.buckets:
            bucket.release_views()
        everywhere = True
        for launch in self.launches:
            with self._summing(launch):
                everywhere &= announce([self.buckets[number] for number in launch])
        return everywhere

    def shadow(self) -> None:
        """A backward pass without gradients, for a rank that has no inputs left while others go on."""
        self._drop_gradients()  # of its own last step
        self._begin()
        self._finish()
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        for bucket in self.buckets:
            bucket.drop_gradients()

    def _reset(self) -> None:
        self._next = 0
        self._forward_passes = ForwardPasses()
        self._waits_for = ""
        self._active = False
        self._open_slots()
        self.watch.busy(False)
