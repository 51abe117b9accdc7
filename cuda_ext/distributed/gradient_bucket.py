"""One bucket of gradients on its way: gathered, summed over the ranks, and handed back as views."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from cuda_ext import bucket as bucket_ops


class GradientBucket:
    """The flat buffers of some parameters of one device and dtype, and the state of their all-reduce.

    Layout of the buffer that travels, ``wire``: every gradient at a multiple of 64 bytes, then the tail, one element for each parameter. A rank writes
    1 / world size there if it has a gradient for that parameter, else 0, so that after the sum the tail tells which gradients exist at all. A rank that
    gives a backward pass up sends NaN everywhere, so that no other rank takes the sum for a gradient.

    ``gradients`` holds the averages in the dtype of the parameters: the head of ``wire`` where that has the same dtype, else a buffer of its own.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], wire_dtype: torch.dtype, group: dist.ProcessGroup) -> None:
        self.parameters = list(parameters)
        self.arrived = [False] * len(parameters)  # whose gradients the running backward pass has produced
        self.missing = len(parameters)  # how many it has not
        self._group = group
        self._scale = 1.0 / group.size()
        self._work: dist.Work | None = None
        self._unused: list[int] = []  # positions of the parameters without a gradient: on this rank, and once finished on any

        dtype, device = parameters[0].dtype, parameters[0].device
        self._offsets, size = bucket_ops.aligned_offsets([parameter.numel() for parameter in parameters], wire_dtype)
        self.wire = torch.zeros(size + len(parameters), dtype=wire_dtype, device=device)  # (size + number of parameters,)
        self._head, self._tail = self.wire[:size], self.wire[size:]
        self.gradients = self._head if wire_dtype == dtype else torch.zeros(size, dtype=dtype, device=device)  # (size,)
        self._all_used = torch.ones_like(self._tail)
        self._orders = [_memory_order(parameter) for parameter in parameters]
        self._views = [
            _view_like(self.gradients[offset : offset + parameter.numel()], parameter, order)
            for parameter, offset, order in zip(parameters, self._offsets, self._orders)
        ]
        self._stats: Tensor | None = None
        self._stats_version = 0

    @property
    def launched(self) -> bool:
        return self._work is not None

    def launch(self) -> None:
        """Packs the gradients there are, leaves views in their place, and starts the sum."""
        tensors, offsets, unused = [], [], []
        for position, (parameter, order) in enumerate(zip(self.parameters, self._orders)):
            grad = parameter.grad
            if grad is None:
                unused.append(position)
            else:
                tensors.append(grad if order is None else grad.permute(order))
                offsets.append(self._offsets[position])
        tensors.append(self._used(unused) if unused else self._all_used)
        offsets.append(self._head.numel())
        bucket_ops.pack(tensors, self.wire, offsets, scale=self._scale)
        for parameter, view in zip(self.parameters, self._views):
            if parameter.grad is not None:
                parameter.grad = view
        self._unused = unused
        self._work = self._group.allreduce([self.wire])

    def _used(self, unused: list[int]) -> Tensor:
        used = torch.ones_like(self._tail)
        used[unused] = 0.0
        return used

    def finish(self) -> bool:
        """Waits for the sum and brings it to ``gradients``; False if some rank gave the pass up."""
        assert self._work is not None
        self._work.wait()
        self._stats = None
        if self.gradients is not self._head:
            self._stats = bucket_ops.unpack(self._head, [self.gradients], [0])
            self._stats_version = self.gradients._version
        if self._unused:
            used = self._tail.tolist()
            for position in self._unused:
                if used[position] != 0.0:
                    self.parameters[position].grad = self._views[position]
            self._unused = [position for position in self._unused if used[position] == 0.0]
        self._reset()
        # Elsewhere this would make the host wait for the device; there the NaN shows in the statistics.
        return not (self.wire.is_cpu and math.isnan(self._tail[0].item()))

    def abandon(self) -> None:
        """Completes the sum that the other ranks are waiting for, with NaN in place of gradients not sent yet, and drops the gradients."""
        if self._work is None:
            self.wire.fill_(math.nan)
            self._work = self._group.allreduce([self.wire])
        self._work.wait()
        self._reset()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def _reset(self) -> None:
        self._work = None
        self.missing = len(self.parameters)
        self.arrived[:] = [False] * self.missing

    def reduced(self) -> list[Tensor]:
        """The gradients as they are now: one flat buffer, or tensor by tensor where somebody has replaced or removed one."""
        grads = [parameter.grad for parameter in self.parameters]
        absent = [position for position, (grad, view) in enumerate(zip(grads, self._views)) if grad is not view]
        if absent == self._unused and all(grads[position] is None for position in absent):
            return [self.gradients]
        return [grad for grad in grads if grad is not None]

    def stats(self) -> Tensor:
        """Statistics of the gradients, see `cuda_ext.bucket`: what `unpack` returned, unless the gradients were written to since."""
        tensors = self.reduced()
        if not tensors:
            return torch.zeros(2, device=self.wire.device)
        if tensors[0] is not self.gradients:
            return bucket_ops.stats(tensors)
        if self._stats is None or self._stats_version != self.gradients._version:
            self._stats = bucket_ops.stats(tensors)
            self._stats_version = self.gradients._version
        return self._stats


def _memory_order(parameter: Tensor) -> list[int] | None:
    """The order of dimensions in which a dense parameter (channels last, transposed) is contiguous; None if it is so already, or in none."""
    if parameter.is_contiguous():
        return None
    order = sorted(range(parameter.dim()), key=lambda dim: (-parameter.stride(dim), -parameter.size(dim)))
    return order if parameter.permute(order).is_contiguous() else None


def _view_like(flat: Tensor, parameter: Tensor, order: list[int] | None) -> Tensor:
    """``flat`` (numel,) in the shape of ``parameter`` and in its memory order, so that an optimizer walks both alike."""
    if order is None:
        return flat.view(parameter.shape)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return flat.view([parameter.size(dim) for dim in order]).permute(inverse)
