"""The backward pass as the buckets see it: which gradients are ready, which bucket is sent next, when all is done.

Invariants that span several files; other comments refer to them by number.

[Note 1: Order of transfers] A transfer is one bucket, or several that are sent together. Ranks match collectives by
their order, so every rank starts the same transfers in the same order, and each once per pass. A transfer waits until
all of its gradients are ready and all earlier transfers have started (`_send_complete`); those that lack gradients
start at the end of the pass (`_finish`). A rank without gradients of its own starts all transfers, too: with zeros
(`shadow`), to announce a change (`announce_change`), or with NaN after an exception (`recover`). One thread or one
stream executes the sums in the order of transfers (`Background`), in a process group that nobody else uses
(`own_group`). All ranks divide gradients alike, by the arrivals of one rank (`BucketSet.learn`).

[Note 2: Flags] Behind its gradients a bucket has one flag per parameter, which says that this rank has a gradient for
it, and four that describe the rank (`RankFlag`). Flags are summed with the gradients, so all ranks see the same flags
and either all of them raise or none does. Three consequences:
- Flags have to be final when the bucket is packed. So `_finish` starts the last transfer if there are forward passes
  that backward has not reached yet.
- Flags are summed on every rank, even where each rank gets only a part of the gradients (`reduce_scatter`).
- A rank that abandons a pass sends NaN instead of flags and gradients, which every sum propagates.

[Note 3: Gradient slots] A product writes a gradient directly to its bucket, scaled as `open` says, between `_reset`,
which opens the slots, and `GradientBucket.pack`, which locks them: after that the sum may read the bucket at any time.
A later gradient of the same parameter accumulates in `parameter.grad` as usual; `gradient_hook` refuses it once the
bucket is sent. `pack` does not scale the content of a slot again (``kept``), so the scale of `open` is 1 / ranks where
the slot is in the buffer that is sent, and 1 where `pack` copies it to another buffer, and under `no_sync`.

[Note 4: End of a pass] `_finish` is a callback of the autograd engine, so ``backward()`` returns with the averages in
place. It is queued by the first hook of the outermost graph task, of an output if possible: a callback that is queued
inside a nested task, as in a re-entrant checkpoint, would run when that task ends.

[Note 5: Repeated gradients] A re-entrant checkpoint computes its gradients in a nested task, so a parameter that
several of them share gets several gradients in a pass, and nothing shows which is the last. Such a checkpoint is a
function of autograd that is written in Python. If one is in the graph of the first pass (`runs_python`), nothing is
sent before the end of that pass, and gradients are counted. From then on the bucket of a parameter that got several
waits for the end of backward, or with ``static_graph`` for as many.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cuda_ext import bucket as bucket_ops
from cuda_ext._load import ops
from cuda_ext._status_board import name_ranks
from cuda_ext._timing import Mark, mark, profiler_range, seconds_between
from cuda_ext._watch import NamedCollectives
from cuda_ext.distributed.checks import NAME, check_compiler
from cuda_ext.distributed.gradient_bucket import GradientBucket, Outcome, abandon, announce, send
from cuda_ext.distributed.trace import Trace


class Arrivals:
    """The gradients of a backward pass in order of arrival, as (bucket, position).

    timed: whether to record times too, in seconds since the first arrival.
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


def runs_python(outputs: Sequence[Tensor]) -> bool:
    """Whether backward from ``outputs`` runs code written in Python, which may itself run backward passes [Note 5]."""
    nodes: list[Node | None] = [output.grad_fn for output in outputs]
    seen: set[Node] = set()
    while nodes:
        node = nodes.pop()
        if isinstance(node, BackwardCFunction):
            return True
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [next_node for next_node, _ in node.next_functions]
    return False


class ForwardPasses:
    """The forward passes since the last backward pass that averaged."""

    def __init__(self) -> None:
        self.unreached = 0  # how many of them no backward pass has reached yet [Note 2]


class Reducer:
    """Sends every bucket once per backward pass, in order [Note 1], and waits for the sums at the end [Note 4].

    One call of ``backward()`` may contain several passes, as re-entrant checkpoints nest them. Averaging is linear and
    leaves what is already averaged unchanged, so later passes only add what earlier ones lacked.

    A rank whose backward pass reaches an output of the module, but no parameter, takes part with zeros. A rank whose
    backward pass reaches no output does not know of the pass, and its next pass would be matched with the current one
    of the other ranks. So each rank reports whether it has forward passes that backward has not reached [Note 2], and
    all ranks raise if only some have.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.buckets: list[GradientBucket] = []
        self.transfers: list[range] = []  # the buckets of each transfer, in order
        self._enabled = True
        self._slots: list[tuple[bucket_ops.GradientSlots, float]] = []
        self.passes = 0  # that have ended with averages
        self.times_arrivals = False  # whether to time arrivals in the next passes
        self.arrivals = Arrivals(device, False)  # of the last pass
        self.trace: Trace | None = None
        self.static_graph = False  # the promise that the numbers of gradients stay what they are in the first pass
        self.looks_for_repeats = True  # whether the next forward passes search the graph [Note 5]
        self._counts = False  # whether this pass counts gradients, and sends nothing before its end
        self._repeats: dict[str, float] = {}  # parameter -> the number of gradients that its bucket waits for, if not 1
        self._group, self._device = group, device
        self._collectives = NamedCollectives(
            NAME, group, device, self._status, loss="The gradients of this step are dropped", on_failure=self._give_up
        )
        self.watch = self._collectives.watch
        self._forward_passes = ForwardPasses()
        self._lock = threading.Lock()  # the engine runs hooks in one thread per device
        self._next = 0  # the index of the next transfer
        self._active = False  # whether a gradient of a parameter or output was ready since the last pass ended
        self._callback_task: int | None = None  # the engine's graph task that ends with _finish() [Note 4]
        self._settles_before_steps = False
        self._is_released = False

    @property
    def enabled(self) -> bool:
        """Whether backward passes average: False under no_sync()."""
        return self._enabled

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        self._enabled = enabled
        self._open_slots()

    def drop_slots(self) -> None:
        self._slots.clear()

    def add_slots(self, slots: bucket_ops.GradientSlots, scale: float) -> None:
        """``scale``: the factor that products apply to gradients in a pass that averages [Note 3]."""
        self._slots.append((slots, scale))

    def _open_slots(self) -> None:
        for slots, scale in self._slots:
            slots.unlock_all()
            slots.open(scale if self._enabled else 1.0)

    def use(self, buckets: Sequence[GradientBucket], transfers: Sequence[int]) -> None:
        """Replaces the buckets, between two passes. ``transfers``: the number of buckets of each transfer, in order."""
        self.buckets = list(buckets)
        ends = list(accumulate(transfers, initial=0))
        self.transfers = [range(begin, end) for begin, end in pairwise(ends)]
        for bucket in buckets:
            bucket.repeats = self._repeats
            bucket.expect()
        self._reset()

    def gradient_hook(self, number: int, position: int) -> Callable[[object, object], None]:
        """A hook that runs after AccumulateGrad of a parameter, in every pass that reaches the parameter."""
        bucket = self.buckets[number]
        awaited = bucket.awaited

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
                awaited[position] -= 1
                if awaited[position] == 0:
                    bucket.missing -= 1
                    if bucket.missing == 0:
                        self._send_complete()
                elif awaited[position] < 0 and bucket.sent:
                    raise self._too_late(bucket.names[position])

        return on_gradient

    def _too_late(self, name: str) -> RuntimeError:
        """The error of a gradient that arrives after its bucket was sent. Later passes wait for it [Note 5]."""
        expected = self._repeats.get(name, 1)
        self._count_gradients()
        self.looks_for_repeats = True
        return RuntimeError(
            f"{NAME}: expected {expected} gradient{'s' if expected > 1 else ''} of parameter {name} in a backward "
            "pass, as in earlier ones, got another after its bucket was sent, as from re-entrant checkpoints that "
            "share a parameter; the gradients of this step are dropped, and later steps wait for more: skip this step, "
            "or use torch.utils.checkpoint with use_reentrant=False"
        )

    def _count_gradients(self) -> None:
        """Notes which parameters have got several gradients in this pass [Note 5]."""
        for (number, position), count in Counter(self.arrivals.places).items():
            name = self.buckets[number].names[position]
            if count > self._repeats.get(name, 1):
                self._repeats[name] = count if self.static_graph else math.inf

    def look_for_repeats(self, outputs: Sequence[Tensor]) -> None:
        """After a forward pass with these outputs, in the first passes: whether to count their gradients [Note 5]."""
        self._counts = self._counts or runs_python(outputs)

    def output_hook(self, trains: bool) -> Callable[[Tensor], None]:
        """A hook for the gradients of the outputs: it runs before those of parameters, in the outermost graph task.

        One is made before each forward pass. ``trains``: whether a backward pass should follow.
        """
        forward_passes, reached = self._forward_passes, not trains
        forward_passes.unreached += trains

        def on_output(_: Tensor) -> None:
            nonlocal reached
            with self._lock:
                forward_passes.unreached -= not reached
                reached = True
                if self._enabled:
                    self._queue_finish()
                    if not self._active and ops._in_whole_backward():
                        self._refuse_released()
                        self._refuse_create_graph()
                        self._begin()

        return on_output

    def release(self) -> None:
        """The wrapper is freed or closed. Hooks of outputs stay, as long as a graph has them."""
        self._is_released = True

    def _refuse_released(self) -> None:
        if self._is_released:
            raise RuntimeError(
                f"{NAME}: expected a wrapper in use during backward, got one that was freed or closed after forward; "
                f"keep a reference to it until backward() has returned: model = {NAME}(module), not "
                f"{NAME}(module)(input).backward()"
            )

    @staticmethod
    def _refuse_create_graph() -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{NAME}: expected a backward pass without create_graph, got create_graph=True, but averages over "
                "ranks cannot be differentiated; for a gradient penalty, compute gradients with torch.autograd.grad("
                "..., create_graph=True) and call backward() on the loss that includes the penalty"
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

    def _send_complete(self) -> None:
        if self._counts:
            return
        while self._next < len(self.transfers):
            if any(self.buckets[number].missing for number in self.transfers[self._next]):
                return
            if self._next == len(self.transfers) - 1 and self._forward_passes.unreached:
                return  # this pass may still reach them [Note 2]
            self._send_next()

    def _send_next(self) -> None:
        transfer = self.transfers[self._next]
        last = len(self.buckets) - 1
        with torch.no_grad():
            for number in transfer:
                bucket = self.buckets[number]
                traced = nullcontext() if self.trace is None else self.trace.packing(number, bucket.label)
                with traced, profiler_range("pack_bucket"):
                    bucket.pack(left_out=number == last and self._forward_passes.unreached > 0)
            with self._summing(transfer, completes=False):
                pending = send([self.buckets[number] for number in transfer])
            if self.trace is not None:
                for number in transfer:
                    self.trace.sent(number, pending)
        self._next += 1

    def _summing(self, transfer: range, completes: bool = True) -> AbstractContextManager[None]:
        numbers = f"bucket {transfer[0]}" if len(transfer) == 1 else f"buckets {transfer[0]} to {transfer[-1]}"
        names = f"{self.buckets[transfer[0]].names[0]} to {self.buckets[transfer[-1]].names[-1]}"
        return self.collective(f"the sum of {numbers}, {names}, of backward pass {self.passes + 1}", completes)

    def collective(self, what: str, completes: bool = True) -> AbstractContextManager[None]:
        """`NamedCollectives.named`."""
        return self._collectives.named(what, completes=completes, is_busy=self._active)

    def _give_up(self) -> None:
        self._reset()
        self._drop_gradients()

    def _status(self, waiting: str) -> str:
        """What this rank is doing. Runs in the threads of the watch."""
        unreached = self._forward_passes.unreached
        passes = "forward pass" if unreached == 1 else f"{unreached} forward passes"
        left_out = f", and no backward pass has reached its last {passes}" if unreached else ""
        if waiting:
            return f"{waiting}{left_out}"
        if not self._active:
            return f"is not in a backward pass; it has completed {self.passes}{left_out}"
        transfer = self.transfers[min(self._next, len(self.transfers) - 1)]  # the main thread may change it meanwhile
        number = next((number for number in transfer if self.buckets[number].missing), transfer[0])
        bucket = self.buckets[number]
        lacking = [name for name, awaited in zip(bucket.names, bucket.awaited) if awaited > 0]
        if not lacking:
            return f"has all gradients of backward pass {self.passes + 1}"
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        return (
            f"computes gradients in backward pass {self.passes + 1}; bucket {number} of {len(self.buckets)} lacks "
            f"{', '.join(lacking[:3])}{more}"
        )

    def _finish(self) -> None:
        self._callback_task = None
        if not self._active:  # no gradient of a parameter was requested, as by torch.autograd.grad
            return
        left_out = bool(self._forward_passes.unreached)
        if self.trace is not None:
            self.trace.backward_ends()
        while self._next < len(self.transfers):
            self._send_next()
        outcomes = set()
        for transfer in self.transfers:
            with self._summing(transfer):
                outcomes.update([self.buckets[number].finish() for number in transfer])
        if self._counts:
            self._count_gradients()
            for bucket in self.buckets:
                bucket.expect()
        self._reset()
        if self.trace is not None:
            self.trace.finished()
        if not self._settles_before_steps and any(bucket.unsettled for bucket in self.buckets):
            self._settle_before_steps()
        if outcomes != {Outcome.AVERAGES}:
            self._drop_gradients()
            raise self._no_averages(outcomes, left_out)
        self.looks_for_repeats = False
        self.passes += 1

    def _settle_before_steps(self) -> None:
        """From now on, no optimizer sees a gradient of zeros of a parameter that no rank has used."""
        self._settles_before_steps = True
        weak_self = weakref.ref(self)

        def settle(*_: object) -> None:
            reducer = weak_self()
            for bucket in reducer.buckets if reducer is not None else ():
                bucket.settle()

        weakref.finalize(self, register_optimizer_step_pre_hook(settle).remove).atexit = False

    def _no_averages(self, outcomes: set[Outcome], left_out: bool) -> RuntimeError:
        """The error of a pass without averages. ``left_out``: whether backward did not reach a forward pass here."""
        if Outcome.ABANDONED in outcomes:
            return RuntimeError(
                f"{NAME}: expected every rank to complete the backward pass, got one that did not, probably because of "
                "an exception; the gradients of this step are dropped on all ranks, and training can continue"
            )
        if Outcome.ANNOUNCED in outcomes:
            return RuntimeError(
                f"{NAME}: expected the same parameters to be frozen or unfrozen on all ranks, got a change on another "
                "rank and none on this one; the gradients of this step are dropped"
            )
        ranks = self.watch.ranks_that(left_out)
        return RuntimeError(
            f"{NAME}: expected backward to reach an output of every forward pass, or of none on all ranks, got a "
            f"forward pass on {name_ranks(ranks) if ranks else 'some ranks'} that backward has not reached: the loss "
            "was a constant, or the step was skipped. So gradients of different steps were added; they are dropped on "
            "all ranks, and training can continue, unless an optimizer has stepped on some ranks only. Let every loss "
            "depend on the output (loss + 0.0 * output.sum()), skip a step on all ranks or on none, and run forward "
            "passes without a backward pass under torch.no_grad()"
        )

    def recover(self) -> None:
        """After a backward pass that ended in an exception, completes its transfers; no-op inside a backward pass."""
        if torch._C._current_graph_task_id() != -1:  # a checkpoint recomputes the forward pass
            return
        self._callback_task = None
        self._collectives.refuse_failed()
        if self._active:
            for transfer in self.transfers:
                with self._summing(transfer):
                    abandon([self.buckets[number] for number in transfer])
            self._reset()

    def stats(self, whole: bool) -> Tensor:
        """Sum of squares of the gradients, and number of buckets with a non-finite value: (2,). A collective.

        whole: whether a rank may have run out of inputs; as it does not call this, the others must not need it.
        """
        is_double = any(bucket.gradients.dtype == torch.float64 for bucket in self.buckets)
        stats = [bucket.stats(whole) for bucket in self.buckets]
        known = [each.double() for each, _ in stats]  # (2,) each
        parts = [n for n, (_, is_part) in enumerate(stats) if is_part]
        if parts:
            of_parts = torch.stack([known[n] for n in parts])  # indices of the host would be copied to a GPU, and wait
            with self.collective(f"the norm of the gradients of backward pass {self.passes}"):
                dist.all_reduce(of_parts, group=self._group)
            for n, of_all in zip(parts, of_parts):
                known[n] = of_all
                self.buckets[n].remember(of_all)
        return torch.stack(known).sum(dim=0).to(torch.float64 if is_double else torch.float32)

    def announce_change(self) -> bool:
        """A pass without gradients, after parameters were frozen or unfrozen; returns whether all ranks did so."""
        for bucket in self.buckets:
            bucket.release_views()
        everywhere = True
        for transfer in self.transfers:
            with self._summing(transfer):
                everywhere &= announce([self.buckets[number] for number in transfer])
        return everywhere

    def shadow(self) -> None:
        """A backward pass without gradients, for a rank that has no inputs left while others have."""
        self._drop_gradients()  # of this rank's last step
        self._begin()
        self._finish()
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        for bucket in self.buckets:
            bucket.drop_gradients()

    def _reset(self) -> None:
        self._next = 0
        self._forward_passes = ForwardPasses()
        self._active = self._counts = False
        self._open_slots()
        self.watch.busy(False)
