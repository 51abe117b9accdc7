"""One bucket of gradients: packed, summed over the ranks, and returned to the parameters as views.

[Note 2], [Note 3] and [Note 5], about flags, gradient slots and repeated gradients, are in reducer.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from enum import Enum

import torch
from torch import Tensor, nn

from cuda_ext import bucket as bucket_ops
from cuda_ext._load import ops
from cuda_ext._timing import begin_profiler_range, is_captured, profiler_range
from cuda_ext.distributed.algorithms import Algorithm, Pending
from cuda_ext.distributed.bucketing.units import byte_size
from cuda_ext.distributed.checks import NAME
from cuda_ext.distributed.float32_sums import ErrorFeedback
from cuda_ext.distributed.memory import Layout, RankFlag

# The value of a set flag, before division by the number of ranks: so small that a sum of squares over the whole of
# ``wire`` does not change if the gradients have a norm above 1e-15. float16 has no such value and uses 1.
FLAGS = dict.fromkeys((torch.float32, torch.bfloat16, torch.float64), 2.0 ** (-60))

SMALLEST_TO_PACK_EARLY = 64 << 10  # bytes: below, the call takes longer than the copy


class Outcome(Enum):
    """The result of the sum of a bucket over the ranks."""

    AVERAGES = "the averages"
    ABANDONED = "a rank has abandoned the pass"
    ANNOUNCED = "a rank has only announced that parameters were frozen or unfrozen"
    LEFT_OUT = "some ranks, but not all, have forward passes that backward has not reached"


class GradientBucket:
    """The flat buffers of some parameters of one dtype, and the state of their sum over the ranks.

    ``wire`` is the buffer that is sent: the head, with the gradients, and the flags after it [Note 2].

    ``gradients`` holds the averages in the dtype of the parameters: the head of ``wire`` if that has the same dtype,
    else a separate buffer.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        layout: Layout,
        wire: Tensor,  # (layout.size,)
        gradients: Tensor | None,  # (layout.size,) in the parameters' dtype; None: as wire
        algorithm: Algorithm,
        error_feedback: bool = False,
    ) -> None:
        self._slots: bucket_ops.GradientSlots | None = None
        self._slot_of: dict[int, int] = {}  # position -> index
        self._packs_early = False
        self.names, self.parameters = list(named), list(named.values())
        self.wire = wire
        self.gradients = (wire if gradients is None else gradients)[: layout.head]
        self.unpacks = gradients is not None
        self._is_read_at_once = wire.is_cpu  # on a GPU the host would wait for all that is queued
        self.repeats: Mapping[str, float] = {}  # name -> gradients in a pass, unless one [Note 5]
        self.awaited: list[float] = []  # for each parameter: how many more gradients before it may be sent
        self.missing = 0  # how many parameters await any
        self._algorithm = algorithm
        self._scale = 1.0 / algorithm.ranks
        self._pending: Pending | None = None
        self._unused: list[int] = []  # parameters without a gradient: on this rank, after `settle` on all ranks
        # Position -> owner and gradient of zeros, which `settle` takes back if no rank has used the parameter.
        self._unsettled: dict[int, tuple[Tensor, Tensor]] = {}
        self._unused_everywhere: set[int] = set()  # when flags were last read

        self._head, self._flags = wire[: layout.head], wire[layout.head : layout.head + len(named) + len(RankFlag)]
        self._offsets = layout.offsets
        self._set_flags = torch.full_like(self._flags, FLAGS.get(wire.dtype, 1.0))
        self._orders = [_memory_order(parameter) for parameter in self.parameters]
        views = [self._view(self.gradients, position) for position in range(len(named))]
        self.views: list[Tensor] = ops._not_views(views)  # old training loops call ``parameter.grad.detach_()``
        self._feedback = None
        if error_feedback:
            self._feedback = ErrorFeedback(layout.head, self.gradients.dtype, device=wire.device)
        self._stats: Tensor | None = None  # of all gradients in that version
        self._version = -1  # of ``gradients``, when they were last the same on every rank
        self.expect()

    def expect(self) -> None:
        """Prepares for the next backward pass. Parameters that are frozen now will not get a gradient."""
        self.awaited[:] = [
            self.repeats.get(name, 1) if parameter.requires_grad else 0
            for name, parameter in zip(self.names, self.parameters)
        ]
        self.missing = len(self.awaited) - self.awaited.count(0)

    def _view(self, flat: Tensor, position: int) -> Tensor:
        """A parameter's view of ``flat``, in its shape and memory order, so that optimizers traverse both alike."""
        parameter, begin = self.parameters[position], self._offsets[position]
        if parameter.is_contiguous() or self._orders[position] is not None:
            # One call: narrow, view and permute take three times as long.
            return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset() + begin)
        return flat.narrow(0, begin, parameter.numel()).view(parameter.shape)

    def use_slots(self, slots: bucket_ops.GradientSlots, slot_of: dict[int, int]) -> None:
        """Lets the products of backward write gradients to ``views``. ``slot_of``: position -> index of its slot."""
        self._slots, self._slot_of = slots, slot_of
        # On a GPU one launch for all gradients is worth more than the memory that this would save.
        self._packs_early = self.wire.is_cpu and not self.unpacks

    def collect(self, position: int) -> None:
        """After AccumulateGrad of a parameter: adds the contributions of other ops to its slot.

        A large gradient that was not written to the slot is moved there now, while it is in the cache, so that its
        memory can be freed before the bucket is complete.
        """
        self._unsettled.pop(position, None)
        if self._slots is None or position not in self._slot_of:
            return
        slot = self._slot_of[position]
        if self._packs_early and self.views[position].nbytes >= SMALLEST_TO_PACK_EARLY:
            self._slots.take(slot)
        else:
            self._slots.collect(slot)

    def _lock(self, position: int) -> bool:
        """Whether a slot holds the scaled gradient of this pass. From now on nothing is written to it [Note 3]."""
        if self._slots is None or position not in self._slot_of:
            return False
        return self._slots.lock(self._slot_of[position])

    @property
    def label(self) -> str:
        """Size, and first and last parameter."""
        return f"{byte_size(self.wire.nbytes)}, {self.names[0]} … {self.names[-1]}"

    @property
    def sent(self) -> bool:
        return self._pending is not None

    def pack(self, *, left_out: bool = False) -> None:
        """Copies the gradients to the wire, divided by the number of ranks, and replaces them by views.

        Gradients that products wrote to the wire, already divided, stay as they are. ``left_out``: whether this rank
        has forward passes that backward has not reached [Note 2].
        """
        self.settle()
        tensors: list[Tensor] = []
        offsets, unused, kept = [], [], []
        for position, parameter in enumerate(self.parameters):
            in_slot = self._lock(position)
            grad = parameter.grad if parameter.requires_grad else None
            if grad is None:
                unused.append(position)
                continue
            if grad.layout is not torch.strided:
                raise TypeError(
                    f"{NAME}: expected a dense gradient of parameter {self.names[position]}, got {grad.layout}; "
                    "buckets are flat: use sparse=False"
                )
            if in_slot and not self.unpacks:
                kept.append(len(tensors))
            order = self._orders[position]
            tensors.append(grad if order is None else grad.permute(order))
            offsets.append(self._offsets[position])
            if grad is not self.views[position]:
                parameter.grad = self.views[position]
        self._unused = unused
        if self._feedback is not None:
            bucket_ops.pack(tensors, self.gradients, offsets, scale=self._scale, stats=False)
            self._feedback.round(self.gradients, self._head)
            tensors, kept = [self._head], [0]
            offsets = [0]
        # `pack` writes zeros between the flags that are set.
        begin, count = 0, self._flags.numel()
        unset = RankFlag.REACHED if left_out else RankFlag.LEFT_OUT
        for end in (*unused, count + unset, count + RankFlag.ANNOUNCES):
            if begin < end:
                tensors.append(self._set_flags[begin:end])
                offsets.append(self._head.numel() + begin)
            begin = end + 1
        bucket_ops.pack(tensors, self.wire, offsets, scale=self._scale, kept=kept, stats=False)

    def finish(self) -> Outcome:
        """Waits for the sum and writes it to ``gradients``."""
        assert self._pending is not None
        with profiler_range("wait_for_bucket"):
            stats = self._pending.wait()
        self._stats = self._receive(stats)
        self._pending = None
        self._version = self.gradients._version
        for position in self._unused:
            parameter, view = self.parameters[position], self.views[position]
            if parameter.requires_grad:
                parameter.grad = view
                self._unsettled[position] = parameter, view
        self._unused = [position for position in self._unused if position not in self._unsettled]
        self.expect()
        if not self._is_read_at_once:
            return Outcome.AVERAGES  # NaN of a rank that has abandoned the pass appears in the statistics
        self.settle()
        return self._outcome()

    @property
    def unsettled(self) -> bool:
        """Whether parameters have gradients of zeros that `settle` may take back."""
        return bool(self._unsettled)

    def settle(self) -> None:
        """Sets the gradients of parameters that no rank has used to None; until then they are zeros.

        On a GPU the host waits for the flags here, so `finish` does not call this, but the next step of an optimizer.
        A stream that is captured cannot be waited for: there the flags are assumed to be those that were last read.
        """
        shown = {position: owner for position, (owner, gradient) in self._unsettled.items() if owner.grad is gradient}
        self._unsettled.clear()
        if not shown:
            return
        if not is_captured(self.wire.device):
            used = self._flags.tolist()
            self._unused_everywhere = {position for position in range(len(self.names)) if used[position] == 0.0}
        for position in shown.keys() & self._unused_everywhere:
            shown[position].grad = None
            self._unused.append(position)
        self._unused.sort()

    def _outcome(self) -> Outcome:
        of_ranks = self._flags[-len(RankFlag) :].tolist()
        if math.isnan(of_ranks[RankFlag.ANNOUNCES]):
            return Outcome.ABANDONED
        if of_ranks[RankFlag.ANNOUNCES]:
            return Outcome.ANNOUNCED
        is_mixed = of_ranks[RankFlag.REACHED] and of_ranks[RankFlag.LEFT_OUT]
        return Outcome.LEFT_OUT if is_mixed else Outcome.AVERAGES

    def _receive(self, stats: Tensor | None) -> Tensor | None:
        """Writes the sum to the gradients; returns their statistics if they were computed on the way."""
        if self.unpacks:
            with profiler_range("unpack_bucket"):
                return bucket_ops.unpack(self._head, [self.gradients], [0])
        return stats if self.wire.dtype in FLAGS else None  # in float16 the flags would change them

    def drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def release_views(self) -> None:
        """Copies the gradients that are views of this bucket, before its memory is reused."""
        self.settle()
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is view:
                parameter.grad = view.clone()

    def reduced(self) -> list[Tensor]:
        """The current gradients: one flat buffer, or separate tensors if the user has replaced or removed some."""
        grads = [parameter.grad for parameter in self.parameters]
        absent = [n for n, (grad, view) in enumerate(zip(grads, self.views, strict=True)) if grad is not view]
        if absent == self._unused and all(grads[n] is None for n in absent):
            return [self.gradients]
        return [grad for grad in grads if grad is not None]

    def stats(self, whole: bool = False) -> tuple[Tensor, bool]:
        """Statistics of the gradients (see `cuda_ext.bucket`), and whether they only cover this rank's part.

        Gradients that are unchanged since the sum are the same on every rank: each rank reads an equal part of them, or
        nothing if the statistics came with the sum. Gradients that were changed since may differ between ranks and are
        read in full. ``whole``: always cover all gradients.
        """
        tensors = self.reduced()
        if not tensors:
            return torch.zeros(2, device=self.wire.device), False
        if tensors[0] is not self.gradients or self.gradients._version != self._version:
            return bucket_ops.stats(tensors), False
        if self._stats is not None:
            return self._stats, False
        if whole:
            self._stats = bucket_ops.stats(tensors)
            return self._stats, False
        count = self.gradients.numel()
        size = -(-count // self._algorithm.ranks)
        begin = min(self._algorithm.rank * size, count)
        return bucket_ops.stats([self.gradients[begin : begin + size]]), True

    def remember(self, stats: Tensor) -> None:
        """Caches the statistics of all gradients; they are valid until the gradients are written."""
        self._stats = stats

    def scale(self, factor: Tensor) -> None:
        """Multiplies the gradients by ``factor``, 0-d, and cached statistics accordingly."""
        tensors = self.reduced()
        if not tensors:
            return
        known = self._stats if tensors[0] is self.gradients and self.gradients._version == self._version else None
        torch._foreach_mul_(tensors, factor.to(torch.promote_types(factor.dtype, tensors[0].dtype)))
        if known is not None:
            squares, nonfinite = known
            self._stats = torch.stack([squares * factor.square(), nonfinite])
            self._version = self.gradients._version


class _ProfiledPending(Pending):
    """Ends a profiler range when the sum is complete, before `wait` returns."""

    def __init__(self, pending: Pending, end_range: Callable[[], None]) -> None:
        self._pending, self._end_range = pending, end_range
        pending.when_done(end_range)

    def wait(self) -> Tensor | None:
        stats = self._pending.wait()
        self._end_range()
        return stats

    def when_done(self, callback: Callable[[], object]) -> None:
        self._pending.when_done(callback)


def send(buckets: Sequence[GradientBucket]) -> Pending:
    """Starts the sum over the ranks of the buckets of one transfer."""
    algorithm = buckets[0]._algorithm
    end_range = begin_profiler_range("sum_bucket")
    if len(buckets) == 1:
        pending = algorithm.start(buckets[0].wire, buckets[0]._flags)
    else:
        pending = algorithm.start_together([bucket.wire for bucket in buckets])
    if end_range is not None:
        if buckets[0].wire.is_cpu:
            pending = _ProfiledPending(pending, end_range)
        else:
            end_range()  # the profiler attributes to the range the kernels that were launched in it
    for bucket in buckets:
        bucket._pending = pending
    return pending


def announce(buckets: Sequence[GradientBucket]) -> bool:
    """Takes part in a sum without gradients, to announce that parameters of this rank were frozen or unfrozen [Note 2].

    Returns whether all ranks do so. Call `release_views` first.
    """
    for bucket in buckets:
        bucket.wire.fill_(0.0 if bucket.wire.is_cpu else math.nan)  # see `GradientBucket.finish`
        bucket._flags.zero_()
        bucket._flags[RankFlag.ANNOUNCES] = 1.0
    send(buckets)
    for bucket in buckets:
        assert bucket._pending is not None
        bucket._pending.wait()
        bucket._pending = None
    return all(bucket._flags[RankFlag.HAS_GRADIENTS].item() == 0.0 for bucket in buckets)


def abandon(buckets: Sequence[GradientBucket]) -> None:
    """Completes the sum that other ranks wait for, with NaN if not sent yet, and drops the gradients [Note 2]."""
    if not buckets[0].sent:
        for bucket in buckets:
            bucket.wire.fill_(math.nan)
        send(buckets)
    for bucket in buckets:
        assert bucket._pending is not None
        bucket._pending.wait()
        bucket._pending = None
        bucket.expect()
        bucket.drop_gradients()


def _memory_order(parameter: Tensor) -> list[int] | None:
    """The order of dimensions in which a dense parameter, e.g. channels last, is contiguous; None for the default."""
    if parameter.is_contiguous():
        return None
    stride = parameter.stride()
    order = sorted(range(parameter.dim()), key=lambda dim: (stride[dim], parameter.size(dim)), reverse=True)
    return order if parameter.permute(order).is_contiguous() else None
