"""One bucket of gradients on its way: gathered, summed over the ranks, and handed back as views."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cuda_ext import bucket as bucket_ops
from cuda_ext.distributed.plan import NAME


class GradientBucket:
    """The flat buffers of some parameters of one device and dtype, and the state of their all-reduce.

    ``wire`` is what travels: the head, with every gradient at a multiple of 64 bytes, and the tail, one element for
    each parameter. There a rank writes 1 / world size if it has a gradient for that parameter, else 0, so that the sum
    tells which gradients exist at all. A rank that gives a backward pass up sends NaN everywhere, so that no other
    takes the sum for a gradient.

    ``gradients`` holds the averages in the dtype of the parameters: the head of ``wire`` itself if that has the same
    dtype, else a buffer of its own.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], wire_dtype: torch.dtype, group: dist.ProcessGroup) -> None:
        self.names, self.parameters = list(named), list(named.values())
        self.arrived = [False] * len(named)  # whose gradients the running backward pass has made
        self.missing = len(named)  # how many it has not
        self._group = group
        self._scale = 1.0 / group.size()
        self._work: dist.Work | None = None
        self._unused: list[int] = []  # parameters without a gradient: on this rank; once finished, on any

        dtype, device = self.parameters[0].dtype, self.parameters[0].device
        offsets, size = bucket_ops.aligned_offsets([parameter.numel() for parameter in self.parameters], wire_dtype)
        self.wire = torch.zeros(size + len(named), dtype=wire_dtype, device=device)
        self._head, self._tail = self.wire[:size], self.wire[size:]
        self.gradients = self._head if wire_dtype == dtype else torch.zeros(size, dtype=dtype, device=device)
        self._all_used = torch.ones_like(self._tail)
        self._offsets = offsets
        self._orders = [_memory_order(parameter) for parameter in self.parameters]
        self._views = [
            _view_like(self.gradients[offset : offset + parameter.numel()], parameter, order)
            for parameter, offset, order in zip(self.parameters, offsets, self._orders, strict=True)
        ]
        self._stats: Tensor | None = None
        self._stats_version = 0

    @property
    def launched(self) -> bool:
        return self._work is not None

    def launch(self) -> None:
        """Packs the gradients there are, leaves views in their place, and starts the sum."""
        tensors, offsets, unused = [], [], []
        for position, parameter in enumerate(self.parameters):
            grad = parameter.grad
            if grad is None:
                unused.append(position)
                continue
            if grad.layout is not torch.strided:
                raise TypeError(
                    f"{NAME}: expected a dense gradient of parameter {self.names[position]}, got {grad.layout}; "
                    "buckets are flat: use sparse=False"
                )
            order = self._orders[position]
            tensors.append(grad if order is None else grad.permute(order))
            offsets.append(self._offsets[position])
            if grad is not self._views[position]:
                parameter.grad = self._views[position]
        tail = self._all_used
        if unused:
            tail = tail.clone()
            tail[unused] = 0.0
        bucket_ops.pack([*tensors, tail], self.wire, [*offsets, self._head.numel()], scale=self._scale)
        self._unused = unused
        self._work = self._group.allreduce([self.wire])

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
        # On another device the host would have to wait for this; there the NaN shows in the statistics.
        return not (self.wire.is_cpu and math.isnan(self._tail[0].item()))

    def abandon(self) -> None:
        """Completes the sum that other ranks wait for, with NaN for what was not sent yet, and drops the gradients."""
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
        """The gradients as they are now: one flat buffer, or one by one where somebody has replaced or removed some."""
        grads = [parameter.grad for parameter in self.parameters]
        absent = [n for n, (grad, view) in enumerate(zip(grads, self._views, strict=True)) if grad is not view]
        if absent == self._unused and all(grads[n] is None for n in absent):
            return [self.gradients]
        return [grad for grad in grads if grad is not None]

    def stats(self) -> Tensor:
        """Statistics of the gradients (see `cuda_ext.bucket`): those of `unpack` while nobody has written since."""
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
    """The order of dimensions in which a dense parameter (channels last, say) is contiguous; None for the usual one."""
    if parameter.is_contiguous():
        return None
    stride = parameter.stride()
    order = sorted(range(parameter.dim()), key=lambda dim: (stride[dim], parameter.size(dim)), reverse=True)
    return order if parameter.permute(order).is_contiguous() else None


def _view_like(flat: Tensor, parameter: Tensor, order: list[int] | None) -> Tensor:
    """``flat`` (numel,) in the shape and memory order of ``parameter``, so that an optimizer walks both alike."""
    if order is None:
        return flat.view(parameter.shape)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return flat.view([parameter.size(dim) for dim in order]).permute(inverse)
