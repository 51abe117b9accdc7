"""Collectives that autograd differentiates any number of times, and that torch.compile understands.

What follows a collective is the same on all ranks of its group, so the gradient of its result is. The functions are
each other's derivatives in pairs:

    forward                    backward
    `AllReduceGradient`        identity            sum over ranks          f of Megatron-LM (arXiv 1909.08053)
    `AllReduce`                sum over ranks      identity                g
    `AllGather`                all ranks' parts    this rank's part
    `OwnPart`                  this rank's part    all ranks' parts
    `AllToAll`                 to each rank its    from each rank what it got
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

# The compiler understands functional collectives, and can overlap them with independent computation.


class AllReduce(torch.autograd.Function):
    """(tensor, name of the group)"""

    @staticmethod
    def forward(tensor: Tensor, group_name: str) -> Tensor:
        collectives = torch.ops._c10d_functional
        return collectives.wait_tensor(collectives.all_reduce(tensor, "sum", group_name))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
        ctx.group_name = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return AllReduceGradient.apply(grad, ctx.group_name), None


class AllReduceGradient(torch.autograd.Function):
    """(tensor, name of the group)"""

    @staticmethod
    def forward(tensor: Tensor, group_name: str) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
        ctx.group_name = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return AllReduce.apply(grad, ctx.group_name), None


class AllGather(torch.autograd.Function):
    """(tensor of any shape, rank, number of ranks, name of the group) -> (ranks, ...)"""

    @staticmethod
    def forward(part: Tensor, rank: int, ranks: int, group_name: str) -> Tensor:
        return gather(part, ranks, group_name)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int, int, str], output: Tensor) -> None:
        ctx.place = inputs[1:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return OwnPart.apply(grad, *ctx.place), None, None, None


class OwnPart(torch.autograd.Function):
    """(tensor (ranks, ...), rank, number of ranks, name of the group) -> (...)"""

    @staticmethod
    def forward(parts: Tensor, rank: int, ranks: int, group_name: str) -> Tensor:
        return parts[rank].clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int, int, str], output: Tensor) -> None:
        ctx.place = inputs[1:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return AllGather.apply(grad, *ctx.place), None, None, None


class Exchanges(Protocol):
    """Which group `AllToAll` is of, and what names it."""

    group_name: str

    def named(self, what: str) -> AbstractContextManager[None]: ...


class AllToAll(torch.autograd.Function):
    """(rows, how many go to each rank, how many come from each, exchanges, what they are) -> rows, in the order of
    ranks"""

    @staticmethod
    def forward(rows: Tensor, to: list[int], of: list[int], exchanges: Exchanges, what: str) -> Tensor:
        collectives = torch.ops._c10d_functional
        with exchanges.named(what):
            out = collectives.all_to_all_single(rows.contiguous(), of, to, exchanges.group_name)
            return collectives.wait_tensor(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.to, ctx.of, ctx.exchanges, ctx.what = inputs[1:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        what = f"the gradients of {ctx.what}"
        return AllToAll.apply(grad, ctx.of, ctx.to, ctx.exchanges, what), None, None, None, None


def gather(part: Tensor, ranks: int, group_name: str) -> Tensor:
    """The parts of all ranks, (ranks, ...), without a gradient."""
    collectives = torch.ops._c10d_functional
    parts = collectives.all_gather_into_tensor(part.contiguous().view(1, -1), ranks, group_name)
    return collectives.wait_tensor(parts).view(ranks, *part.shape)
