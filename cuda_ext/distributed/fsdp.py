"""The door to FSDP2: gradients that travel in 16 bits and are added in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cuda_ext.distributed.collectives import check_wire_dtype
from cuda_ext.distributed.wire import float32_reduce_scatter

NAME = "cuda_ext.distributed.Float32ReduceScatter"


class Float32ReduceScatter:
    """A reduce-scatter for ``FSDPModule.set_custom_reduce_scatter`` that adds in float32 and rounds once, if at all.

    FSDP2 casts gradients to the ``reduce_dtype`` of its mixed precision policy, in which its own reduce-scatter sends
    and adds them. This one sends ``wire_dtype``, adds in float32 (float64 if ``reduce_dtype`` is), and rounds the sum
    or mean to ``reduce_dtype``. With ``reduce_dtype=torch.float32`` and ``wire_dtype=torch.bfloat16`` half the bytes
    travel and the result is not rounded at all.

    wire_dtype: float32, float16, bfloat16 or float64; default ``reduce_dtype``. float16 overflows beyond 65504, as
        values are not divided by the number of ranks before they travel.

    One object may serve any number of modules; FSDP2 wants it set on each. Raises ValueError for another
    ``wire_dtype``, and from backward NotImplementedError for another reduction than a sum or mean.
    """

    # FSDP2 names this protocol ReduceScatter, asks no more of it than these two methods, and does not export it.

    def __init__(self, wire_dtype: torch.dtype | None = None) -> None:
        check_wire_dtype(NAME, wire_dtype)
        self.wire_dtype = wire_dtype

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An empty tensor: for the gradients of a module, and for the shard of them that stays."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Writes the sum or mean over N ranks of chunk r of ``input_tensor`` (N C,) to ``output_tensor`` (C,)."""
        if async_op:
            raise NotImplementedError(f"{NAME}: expected async_op=False, which is what FSDP2 passes, got True")
        wire = input_tensor if self.wire_dtype is None else input_tensor.to(self.wire_dtype)
        for work in float32_reduce_scatter(wire, output_tensor, group, scale=_scale(op, group.size())):
            work.wait()  # on a GPU it is the stream of FSDP2 that waits


def _scale(op: Any, ranks: int) -> float:
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1.0 / ranks
    if op == dist.ReduceOp.PREMUL_SUM:  # of set_gradient_divide_factor; the factor can be had from its pickle only
        return op.__getstate__()[1]
    raise NotImplementedError(f"{NAME}: expected a sum, a mean or a sum with a factor, got {op}")
