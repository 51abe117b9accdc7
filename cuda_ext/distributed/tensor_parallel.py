"""The two collectives of a tensor parallel layer: f and g of Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053).

A layer that is split over ranks has the same input on all ranks; each rank computes a part of the output, and the parts
are added. Forward, this sum is an all-reduce. Backward, each rank has the gradient of the input through its own part
only, and their sum is an all-reduce, too. Each of the two functions is the other's derivative:

    forward                backward
    `all_reduce_gradient`  identity                sum over ranks          at the input: f
    `all_reduce`           sum over ranks          identity                at the output: g
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from cuda_ext._collectives import AllReduce, AllReduceGradient
from cuda_ext.distributed.checks import DTYPES
from cuda_ext.distributed.collectives import averages
from cuda_ext.distributed.process_groups import resolve_group

__all__ = ["all_reduce", "all_reduce_gradient"]


def all_reduce(
    tensor: Tensor, op: str | dist.ReduceOp.RedOpType = "sum", *, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Returns a new tensor, the sum or mean of ``tensor`` over the ranks; backward passes its gradient to every rank.

    For the output of a row-parallel layer. The following computation must be the same on every rank, so that the
    gradient of the result is; it is then also the gradient of each rank's part of a sum, and backward needs no
    communication. It can be differentiated any number of times, or compiled with ``fullgraph=True`` (and differentiated
    once: torch.compile has no second derivatives).

    tensor: float32, float16, bfloat16 or float64, of any shape and strides; the same shape and dtype on every rank
        (not checked). op: ``"sum"``, the default, or ``"avg"``, which divides before it sums, so that float16 does not
        overflow, or torch's `ReduceOp`. group: default the default group.

    The result is contiguous, of the shape and dtype of ``tensor``, and equal on all ranks, also under autocast. Raises
    RuntimeError without a process group, ValueError for another ``op``, TypeError for a tensor of another dtype or
    layout.
    """
    caller = "cuda_ext.distributed.all_reduce"
    group = resolve_group(caller, group)
    is_mean = averages(caller, op)
    _check(caller, tensor)
    return AllReduce.apply(tensor / group.size() if is_mean else tensor, group.group_name)


def all_reduce_gradient(tensor: Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """A view of ``tensor``; backward sums its gradients over the ranks.

    For the input of a column-parallel layer, which is the same on every rank; each rank uses it for its own part of the
    output. Arguments, errors and supported transforms are those of `all_reduce`.
    """
    caller = "cuda_ext.distributed.all_reduce_gradient"
    group = resolve_group(caller, group)
    _check(caller, tensor)
    return AllReduceGradient.apply(tensor, group.group_name)


def _check(caller: str, tensor: Tensor) -> None:
    if tensor.dtype not in DTYPES or tensor.layout is not torch.strided:
        raise TypeError(
            f"{caller}: expected tensor dense and float32, float16, bfloat16 or float64, got {tensor.dtype} and "
            f"{tensor.layout}"
        )
