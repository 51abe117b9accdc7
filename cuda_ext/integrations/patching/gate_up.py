"""One weight from two: gate and up lie in one buffer, one after the other, so that no call copies them.

The parameters stay the same objects with the same names; only their memory moves. Each has a storage of its own, by
which savers tell them apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cuda_ext._load import ops


def are_adjacent(first: Tensor, second: Tensor) -> bool:
    """Whether the rows of both, in this order, are those of one tensor."""
    return _joined(first, second) is not None


def _joined(first: Tensor, second: Tensor) -> Tensor | None:
    if type(first) is not nn.Parameter or type(second) is not nn.Parameter:
        return None
    rows: Tensor | None = ops._joined_rows(first, second)
    return rows


def lay_adjacent(first: nn.Module, second: nn.Module) -> bool:
    """Moves the weights, and the biases, of two layers into one buffer each; returns whether they are adjacent then.

    Parameters that share their memory with anything else stay where they are: the flat buffers of optimizers and of
    `torch.nn.utils.vector_to_parameters` rely on it.
    """
    parameters: Any = [(first.weight, second.weight), (first.bias, second.bias)]
    if any((one is None) != (two is None) for one, two in parameters):
        return False
    present = [gate_up for gate_up in parameters if gate_up[0] is not None]
    if not all(are_adjacent(*gate_up) or _can_move(*gate_up) for gate_up in present):
        return False
    with torch.no_grad():
        for one, two in present:
            if not are_adjacent(one, two):
                buffer = torch.cat([one.data, two.data])
                one.data, two.data = map(ops._own_storage, (buffer[: len(one)], buffer[len(one) :]))
    return True


def lay_apart(first: nn.Module, second: nn.Module) -> None:
    """Undoes `lay_adjacent`: memory of their own for the weights, and the biases, that share a buffer with no other."""
    parameters: Any = [(first.weight, second.weight), (first.bias, second.bias)]
    for gate_up in parameters:
        if gate_up[0] is not None and are_adjacent(*gate_up) and ops._memory_holders(gate_up[0]) == 2:
            for each in gate_up:
                each.data = each.data.clone()


def _can_move(one: Tensor, two: Tensor) -> bool:
    return (
        type(one) is type(two) is nn.Parameter
        and one is not two
        and one.shape == two.shape
        and one.dtype == two.dtype
        and one.device == two.device
        and one.device.type in ("cpu", "cuda")
        and all(each.is_contiguous() and _owns_its_memory(each) for each in (one, two))
    )


def _owns_its_memory(tensor: Tensor) -> bool:
    in_shared_memory = tensor.is_cpu and tensor.is_shared()
    owns_storage = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return owns_storage and not in_shared_memory and ops._memory_holders(tensor) == 1


def gate_up_rows(first: Tensor, second: Tensor) -> Tensor | None:
    """The rows of both parameters as one tensor without a copy, through which gradients flow; None if not adjacent."""
    rows = _joined(first, second)
    if rows is not None and torch.is_grad_enabled() and (first.requires_grad or second.requires_grad):
        rows = _GateUpRows.apply(first, second)
    return rows


class _GateUpRows(torch.autograd.Function):
    # vmap over the input of a block runs forward on the parameters themselves, which it does not batch.
    generate_vmap_rule = True

    @staticmethod
    def forward(first: Tensor, second: Tensor) -> Tensor:
        rows: Tensor = ops._joined_rows(first, second)
        return rows

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.rows = inputs[0].shape[0]
        # What saves the packed weight does not see that one of these changes. Saving them makes backward raise if an
        # optimizer changes them before, as it does for every saved tensor.
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (gradient,) = gradients
        _ = ctx.saved_tensors
        one, two = ctx.needs_input_grad
        return gradient[: ctx.rows] if one else None, gradient[ctx.rows :] if two else None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return torch.cat(tangents)
