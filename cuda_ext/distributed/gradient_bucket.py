"""One bucket of gradients on its way: gathered, summed over the ranks, and handed back as views."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum

import torch
from torch import Tensor, nn

from cuda_ext import bucket as bucket_ops
from cuda_ext.distributed.arena import FLAGS_OF_A_RANK, Layout
from cuda_ext.distributed.exchange import Exchange, Pending
from cuda_ext.distributed.planning.units import byte_size
from cuda_ext.distributed.reporting import NAME
from cuda_ext.distributed.wire import ErrorFeedback

# What a set flag adds, before it is divided by the number of ranks: in a sum of squares over the whole of ``wire`` it
# does not show beside gradients of a norm above 1e-15.
FLAGS = dict.fromkeys((torch.float32, torch.bfloat16, torch.float64), 2.0 ** (-60))

SMALLEST_TO_TAKE = 64 << 10  # bytes: copying them takes longer than the call


class Outcome(Enum):
    """What the sum over the ranks of a bucket has brought."""

    AVERAGES = "the averages"
    GIVEN_UP = "some rank has given the pass up"
    ANNOUNCED = "some rank has only said that its parameters were frozen or freed"
    LEFT_OUT = "some ranks, and not all, have forward passes that backward has not reached"


class GradientBucket:
    """The flat buffers of some parameters of one dtype, and the state of their sum over the ranks.

    ``wire`` is what travels: the head, with the gradients, and behind it one flag for each parameter, which a rank sets
    if it has a gradient for that parameter, so that the sum tells which gradients exist at all. Four more tell about
    the rank: that backward passes have reached all of its forward passes, or not; that it takes part with gradients, or
    only to say that its parameters were frozen or freed. A rank that gives a backward pass up sends NaN everywhere, so
    that no other takes the sum for a gradient.

    ``gradients`` holds the averages in the dtype of the parameters: the head of ``wire`` itself if that has the same
    dtype, else a buffer of its own.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        layout: Layout,
        wire: Tensor,  # (layout.size,)
        gradients: Tensor | None,  # (layout.size,) in the parameters' dtype; None: as wire
        exchange: Exchange,
        error_feedback: bool = False,
    ) -> None:
        self._slots: bucket_ops.GradientSlots | None = None
        self._slot_of: dict[int, int] = {}  # position -> index
        self._takes = False
        self.names, self.parameters = list(named), list(named.values())
        self.wire = wire
        self.gradients = (wire if gradients is None else gradients)[: layout.head]
        self.unpacks = gradients is not None
        self.arrived = [False] * len(named)  # whose gradients the running backward pass has made
        self.missing = 0  # how many it has not
        self._exchange = exchange
        self._scale = 1.0 / exchange.ranks
        self._pending: Pending | None = None
        self._unused: list[int] = []  # parameters without a gradient: on this rank; once finished, on any

        self._head, self._flags = wire[: layout.head], wire[layout.head : layout.head + len(named) + FLAGS_OF_A_RANK]
        self._offsets = layout.offsets
        self._all_used = torch.full_like(self._flags, FLAGS.get(wire.dtype, 1.0))
        self._all_used[[-3, -1]] = 0.0
        self._orders = [_memory_order(parameter) for parameter in self.parameters]
        self.views = [self._view(self.gradients, position) for position in range(len(named))]
        self._feedback = None
        if error_feedback:
            self._feedback = ErrorFeedback(layout.head, self.gradients.dtype, device=wire.device)
        self._stats: Tensor | None = None  # of all gradients in that version
        self._version = -1  # of ``gradients``, when they last were the same on every rank
        self.expect()

    def expect(self) -> None:
        """Gets ready for the next backward pass. Nothing is expected of parameters that are frozen by now."""
        self.arrived[:] = [not parameter.requires_grad for parameter in self.parameters]
        self.missing = self.arrived.count(False)

    def _view(self, flat: Tensor, position: int) -> Tensor:
        """A parameter's place in ``flat``, in its shape and memory order, so that an optimizer walks both alike."""
        parameter, begin = self.parameters[position], self._offsets[position]
        if parameter.is_contiguous() or self._orders[position] is not None:
            # One call, where narrow, view and permute take three times as long.
            return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset() + begin)
        return flat.narrow(0, begin, parameter.numel()).view(parameter.shape)

    def use_slots(self, slots: bucket_ops.GradientSlots, slot_of: dict[int, int]) -> None:
        """Products of the backward pass write gradients to ``views``: that of a position to the slot of this index."""
        self._slots, self._slot_of = slots, slot_of
        # On a GPU one launch for all is worth more than the memory of a bucket's gradients.
        self._takes = self.wire.is_cpu and not self.unpacks

    def collect(self, position: int) -> None:
        """AccumulateGrad of a parameter has run: what other ops have contributed joins what the slot holds.

        A large gradient that others have made alone is packed here by itself, while it is in the cache: so that it need
        not live until its bucket is complete.
        """
        if self._slots is None or position not in self._slot_of:
            return
        slot = self._slot_of[position]
        if self._takes and self.views[position].nbytes >= SMALLEST_TO_TAKE:
            self._slots.take(slot)
        else:
            self._slots.collect(slot)

    def _lock(self, position: int) -> bool:
        """Whether a view holds the gradient of this pass, scaled, by a product. From now on it takes no other."""
        if self._slots is None or position not in self._slot_of:
            return False
        return self._slots.lock(self._slot_of[position])

    @property
    def label(self) -> str:
        """Size, and first and last parameter."""
        return f"{byte_size(self.wire.nbytes)}, {self.names[0]} … {self.names[-1]}"

    @property
    def launched(self) -> bool:
        return self._pending is not None

    def pack(self, *, left_out: bool = False) -> None:
        """Gathers the gradients there are, divided by the number of ranks, and leaves views in their place.

        What is in the wire already, divided by the product that made it, is not touched. ``left_out``: whether this
        rank has forward passes that backward has not reached.
        """
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
        flags = self._all_used
        if unused or left_out:
            flags = flags.clone()
            flags[unused] = 0.0
        if left_out:
            flags[-4], flags[-3] = 0.0, flags[-2]
        self._unused = unused
        if self._feedback is not None:
            bucket_ops.pack(tensors, self.gradients, offsets, scale=self._scale, stats=False)
            self._feedback.round(self.gradients, self._head)
            tensors, kept = [self._head], [0]
            offsets = [0]
        offsets.append(self._head.numel())
        bucket_ops.pack([*tensors, flags], self.wire, offsets, scale=self._scale, kept=kept, stats=False)

    def finish(self) -> Outcome:
        """Waits for the sum and brings it to ``gradients``."""
        assert self._pending is not None
        self._stats = self._receive(self._pending.wait())
        self._pending = None
        self._version = self.gradients._version
        if self._unused:
            used = self._flags.tolist()
            for position in self._unused:
                if used[position] != 0.0 and self.parameters[position].requires_grad:
                    self.parameters[position].grad = self.views[position]
            self._unused = [position for position in self._unused if used[position] == 0.0]
        self.expect()
        # On another device the host would have to wait for this; there the NaN shows in the statistics.
        return self._outcome() if self.wire.is_cpu else Outcome.AVERAGES

    def _outcome(self) -> Outcome:
        reached, left_out, _, announced = self._flags[-FLAGS_OF_A_RANK:].tolist()
        if math.isnan(announced):
            return Outcome.GIVEN_UP
        if announced:
            return Outcome.ANNOUNCED
        return Outcome.LEFT_OUT if reached and left_out else Outcome.AVERAGES

    def _receive(self, stats: Tensor | None) -> Tensor | None:
        """Brings the sum to the gradients; returns their statistics, if they came with it or it was read for this."""
        if self.unpacks:
            return bucket_ops.unpack(self._head, [self.gradients], [0])
        return stats if self.wire.dtype in FLAGS else None  # elsewhere flags would show in them

    def drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def release_views(self) -> None:
        """Copies the gradients that live here, before the memory gets another use."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is view:
                parameter.grad = view.clone()

    def reduced(self) -> list[Tensor]:
        """The gradients as they are now: one flat buffer, or one by one where somebody has replaced or removed some."""
        grads = [parameter.grad for parameter in self.parameters]
        absent = [n for n, (grad, view) in enumerate(zip(grads, self.views, strict=True)) if grad is not view]
        if absent == self._unused and all(grads[n] is None for n in absent):
            return [self.gradients]
        return [grad for grad in grads if grad is not None]

    def stats(self, whole: bool = False) -> tuple[Tensor, bool]:
        """Statistics of the gradients (see `cuda_ext.bucket`), and whether they are of this rank's part alone.

        While gradients are as the sum left them, and so the same on every rank, each reads an equal part of them, or
        nothing, if the statistics came with the sum. What somebody has changed since may differ, and is read in full,
        as is all if the ``whole`` is asked for.
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
        size = -(-count // self._exchange.ranks)
        begin = min(self._exchange.rank * size, count)
        return bucket_ops.stats([self.gradients[begin : begin + size]]), True

    def remember(self, stats: Tensor) -> None:
        """The statistics of the whole, which hold until somebody writes to the gradients."""
        self._stats = stats

    def scale(self, factor: Tensor) -> None:
        """Multiplies the gradients by ``factor``, 0-d; known statistics stay known."""
        tensors = self.reduced()
        if not tensors:
            return
        known = self._stats if tensors[0] is self.gradients and self.gradients._version == self._version else None
        torch._foreach_mul_(tensors, factor.to(torch.promote_types(factor.dtype, tensors[0].dtype)))
        if known is not None:
            squares, nonfinite = known
            self._stats = torch.stack([squares * factor.square(), nonfinite])
            self._version = self.gradients._version


def send(launch: Sequence[GradientBucket]) -> Pending:
    """Starts the sum over the ranks of a bucket, or of several, as one launch."""
    exchange = launch[0]._exchange
    if len(launch) == 1:
        pending = exchange.start(launch[0].wire, launch[0]._flags)
    else:
        pending = exchange.start_together([bucket.wire for bucket in launch])
    for bucket in launch:
        bucket._pending = pending
    return pending


def announce(launch: Sequence[GradientBucket]) -> bool:
    """Takes part in a sum without gradients, to say that parameters of this rank were frozen or freed since the last.

    Returns whether all ranks do so. Gradients that live in the buckets have to be copied before.
    """
    for bucket in launch:
        bucket.wire.fill_(0.0 if bucket.wire.is_cpu else math.nan)  # see `GradientBucket.finish`
        bucket._flags.zero_()
        bucket._flags[-1] = 1.0
    send(launch)
    for bucket in launch:
        assert bucket._pending is not None
        bucket._pending.wait()
        bucket._pending = None
    return all(bucket._flags[-2].item() == 0.0 for bucket in launch)


def abandon(launch: Sequence[GradientBucket]) -> None:
    """Completes the sum that other ranks wait for, with NaN for what was not sent yet, and drops the gradients."""
    if not launch[0].launched:
        for bucket in launch:
            bucket.wire.fill_(math.nan)
        send(launch)
    for bucket in launch:
        assert bucket._pending is not None
        bucket._pending.wait()
        bucket._pending = None
        bucket.expect()
        bucket.drop_gradients()


def _memory_order(parameter: Tensor) -> list[int] | None:
    """The order of dimensions in which a dense parameter (channels last, say) is contiguous; None for the usual one."""
    if parameter.is_contiguous():
        return None
    stride = parameter.stride()
    order = sorted(range(parameter.dim()), key=lambda dim: (stride[dim], parameter.size(dim)), reverse=True)
    return order if parameter.permute(order).is_contiguous() else None
