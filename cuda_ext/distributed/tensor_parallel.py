"""The two collectives of a tensor parallel layer: f and g of Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053).

A layer split over ranks takes an input that all ranks hold, computes a part of the output on each, and adds the parts.
Forward, the addition needs an all-reduce; backward, each rank has the gradient of the input through its own part only,
and these need one. Each is the other's derivative:

    forward                backward
    `all_reduce_gradient`  identity                sum over ranks          at the input: f
    `all_reduce`           sum over ranks          identity                at the output: g
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cuda_ext.distributed.collectives import DTYPES, resolve_group

__all__ = ["all_reduce", "all_reduce_gradient"]


def all_reduce(tensor: Tensor, op: str = "sum", *, group: dist.ProcessGroup | None = None) -> Tensor:
    """The sum or mean of ``tensor`` over the ranks, in a new tensor; backward hands the gradient of it to every rank.

    For the output of a row-parallel layer. What follows has to compute the same on every rank, so that the gradient of
    the result is the same everywhere; for the sum it is then the gradient of each rank's part as well, and nothing
    travels backward. Can be differentiated any number of times, or compiled with ``fullgraph=True`` (and differentiated
    once: torch.compile has no second derivatives).

    tensor: float32, float16, bfloat16 or float64, of any shape and strides; the same shape and dtype on every rank
        (not checked). op: ``"sum"``, the default, or ``"mean"``, which divides before it sums, so that float16 does not
        overflow. group: default the default group.

    Returns a contiguous tensor of the shape and dtype of ``tensor``, equal on all ranks, also under autocast. Raises
    RuntimeError without a process group, ValueError for another ``op``, TypeError for a tensor of another dtype or
    layout.
    """
    caller = "cuda_ext.distributed.all_reduce"
    group = resolve_group(caller, group)
    if op not in ("sum", "mean"):
        raise ValueError(f'{caller}: expected op to be "sum" or "mean", got {op!r}')
    _check(caller, tensor)
    return _AllReduce.apply(tensor / group.size() if op == "mean" else tensor, group.group_name)


def all_reduce_gradient(tensor: Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """``tensor`` as it is, in a view; backward sums the gradients that the ranks have for it.

    For the input of a column-parallel layer, which every rank holds and uses for its own part of the output. Arguments,
    errors and what works with it are those of `all_reduce`.
    """
    caller = "cuda_ext.distributed.all_reduce_gradient"
    group = resolve_group(caller, group)
    _check(caller, tensor)
    return _AllReduceGradient.apply(tensor, group.group_name)


def _check(caller: str, tensor: Tensor) -> None:
    if tensor.dtype not in DTYPES or tensor.layout is not torch.strided:
        raise TypeError(
            f"{caller}: expected tensor dense and float32, float16, bfloat16 or float64, got {tensor.dtype} and "
            f"{tensor.layout}"
        )


# By the functional collectives the compiler sees what travels, and can overlap it with what does not depend on it.


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(tensor: Tensor, group_name: str) -> Tensor:
        collectives = torch.ops._c10d_functional
        return collectives.wait_tensor(collectives.all_reduce(tensor, "sum", group_name))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
        ctx.group_name = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _AllReduceGradient.apply(grad, ctx.group_name), None


class _AllReduceGradient(torch.autograd.Function):
    @staticmethod
    def forward(tensor: Tensor, group_name: str) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
        ctx.group_name = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _AllReduce.apply(grad, ctx.group_name), None
