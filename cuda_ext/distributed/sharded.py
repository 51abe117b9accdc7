"""Optimizers that hold a part of their state on each rank: ZeRO stage 1 (Rajbhandari et al., arXiv 1910.02054)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from cuda_ext import bucket as bucket_ops
from cuda_ext.distributed.arena import Layout
from cuda_ext.distributed.exchange import Exchange
from cuda_ext.distributed.gradient_bucket import GradientBucket
from cuda_ext.distributed.plan import NAME


def refuse_other_optimizers(named: Mapping[str, nn.Parameter]) -> RemovableHandle:
    """From now on an optimizer of one of these parameters raises when it steps: only their shards get gradients."""
    names = {id(parameter): name for name, parameter in named.items()}

    def refuse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in names:
                    raise RuntimeError(
                        f"{NAME}: expected an optimizer from model.sharded_optimizer, as with shard_optimizer=True "
                        f"only a rank's pieces of parameters get gradients, got {type(optimizer).__name__} with "
                        f"parameter {names[id(parameter)]}, which it would leave as it is"
                    )

    return register_optimizer_step_pre_hook(refuse)


class ShardedBucket(GradientBucket):
    """A bucket whose sum leaves every rank its part alone, and whose parameters lie as their gradients do.

    The rank's optimizer updates ``shards``: flat pieces of the parameters, where those overlap the rank's part, with
    gradients that are views of it. `gather` then brings the updated parts to all ranks, in place.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        layout: Layout,
        wire: Tensor,
        gradients: Tensor | None,  # (layout.size,), of which this rank's part is used
        exchange: Exchange,
        error_feedback: bool,
        values: Tensor,  # (layout.size,), in the parameters' dtype: where they move to
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__(named, layout, wire, gradients, exchange, error_feedback)
        self._group = group
        self._values = values
        size = layout.size // exchange.ranks
        part = slice(exchange.rank * size, (exchange.rank + 1) * size)
        self._wire_part, self._values_part = wire[part], values[part]
        self._gradients_part = self._wire_part if gradients is None else gradients[part]
        self.shards: dict[str, nn.Parameter] = {}
        self._places: list[tuple[int, nn.Parameter, Tensor]] = []  # of each shard: parameter, shard, gradient
        for position, (name, parameter) in enumerate(named.items()):
            begin = layout.offsets[position]
            place = self._view(values, position)
            place.copy_(parameter.detach())
            parameter.data = place
            end = min(begin + parameter.numel(), part.stop)
            begin = max(begin, part.start)
            if begin < end:
                shard = nn.Parameter(values[begin:end])
                self.shards[name] = shard
                gradient = self._gradients_part[begin - part.start : end - part.start]
                self._places.append((position, shard, gradient))

    def finish(self) -> float:
        mark = super().finish()
        self.drop_gradients()
        unused = set(self._unused)
        for position, shard, gradient in self._places:
            if position not in unused:
                shard.grad = gradient
            elif shard.grad is not None:  # whoever zeroes gradients in place wants zeros
                shard.grad.zero_()
        return mark

    def _receive(self, stats: Tensor | None) -> None:
        if self.unpacks:
            bucket_ops.unpack(self._wire_part, [self._gradients_part], [0])

    def gather(self) -> dist.Work | None:
        """Starts to bring every rank's part of the parameters to all."""
        return self._group._allgather_base(self._values, self._values_part)

    def reduced(self) -> list[Tensor]:
        return [shard.grad for shard in self.shards.values() if shard.grad is not None]

    def stats(self, whole: bool = False) -> tuple[Tensor, bool]:
        tensors = self.reduced()
        if not tensors:
            return torch.zeros(2, device=self.wire.device), True
        return bucket_ops.stats(tensors), True

    def remember(self, stats: Tensor) -> None:
        """Parts are read again: they differ, so nobody could tell by them whether all of them are unchanged."""
