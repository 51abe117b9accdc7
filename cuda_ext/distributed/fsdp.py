"""A reduce-scatter for FSDP2: gradients are sent in 16 bits and summed in float32."""

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
    """A reduce-scatter for ``FSDPModule.set_custom_reduce_scatter`` that sums in float32 and rounds at most once.

    FSDP2 casts gradients to the ``reduce_dtype`` of its mixed precision policy; its own reduce-scatter sends and sums
    them in this dtype. This one sends ``wire_dtype``, sums in float32 (float64 if ``reduce_dtype`` is float64), and
    rounds the sum or mean to ``reduce_dtype``. With ``reduce_dtype=torch.float32`` and ``wire_dtype=torch.bfloat16`` it
    sends half the bytes and does not round the result.

    wire_dtype: float32, float16, bfloat16 or float64; default ``reduce_dtype``. float16 overflows beyond 65504, as
        values are not divided by the number of ranks before they are sent.

    One object may be set on any number of modules; FSDP2 requires setting it on each. Raises ValueError for another
    ``wire_dtype``, and from backward NotImplementedError for another reduction than a sum or mean.
    """

    # These two methods are FSDP2's protocol ReduceScatter, which torch does not export.

    def __init__(self, wire_dtype: torch.dtype | None = None) -> None:
        check_wire_dtype(NAME, wire_dtype)
        self.wire_dtype = wire_dtype

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An empty tensor, for the gradients of a module or for this rank's shard of them."""
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
            work.wait()  # on a GPU the stream of FSDP2 waits


def _scale(op: Any, ranks: int) -> float:
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1.0 / ranks
    if op == dist.ReduceOp.PREMUL_SUM:  # from set_gradient_divide_factor; only its pickled state has the factor
        return op.__getstate__()[1]
    raise NotImplementedError(f"{NAME}: expected a sum, a mean or a sum with a factor, got {op}")
