"""Fake kernels of the losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cuda_ext._checks import check, check_floating, check_same_device, check_same_dtype, shape_of
from cuda_ext._toolchain import NAMESPACE

_OP = "linear_cross_entropy"


def _check(input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor | None) -> torch.dtype:
    check_floating(_OP, "input", input)
    check_same_dtype(_OP, "linear_weight", weight, "input", input)
    check_same_device(_OP, "input", input, linear_weight=weight, linear_bias=bias, target=target)
    check(
        input.dim() == 2 and weight.dim() == 2 and weight.shape[1] == input.shape[1],
        _OP,
        f"expected input of shape (M, K) and linear_weight of shape (V, K), got {shape_of(input)} and "
        f"{shape_of(weight)}",
    )
    if bias is not None:
        check_same_dtype(_OP, "linear_bias", bias, "input", input)
        check(
            bias.dim() == 1 and bias.shape[0] == weight.shape[0],
            _OP,
            f"expected linear_bias of shape ({weight.shape[0]},), got {shape_of(bias)}",
        )
    return torch.float64 if input.dtype == torch.float64 else torch.float32


@torch.library.register_fake(f"{NAMESPACE}::logit_statistics")
def _(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor | None,
    coefficients: Tensor | None,
    *,
    entropy: bool,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dtype = _check(input, weight, bias, target)
    present = (True, target is not None, coefficients is not None, entropy, True)
    made = [input.new_empty((input.shape[0],) if wanted else (0,), dtype=dtype) for wanted in present]
    return made[0], made[1], made[2], made[3], made[4]


def _gradients(input: Tensor, weight: Tensor, bias: Tensor | None, wanted: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    bias_dtype = input.dtype if bias is None or not wanted[2] else bias.dtype
    return (
        input.new_empty(input.shape if wanted[0] else (0,)),
        input.new_empty(weight.shape if wanted[1] else (0,)),
        input.new_empty((weight.shape[0],) if wanted[2] else (0,), dtype=bias_dtype),
    )


def _statistics_backward(
    grad_lse: Tensor | None,
    grad_nll: Tensor | None,
    grad_dot: Tensor | None,
    grad_entropy: Tensor | None,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *saved: Tensor | None,
    output_mask: list[bool],
    weight_slot: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients(input, weight, bias, [output_mask[0], output_mask[1] and weight_slot is None, output_mask[2]])


torch.library.register_fake(f"{NAMESPACE}::logit_statistics_backward", _statistics_backward)
torch.library.register_fake(f"{NAMESPACE}::logit_statistics_backward.slot", _statistics_backward)


@torch.library.register_fake(f"{NAMESPACE}::linear_loss")
def _(input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor | None, *rest: Any, **options: Any) -> Tensor:
    return input.new_empty((), dtype=_check(input, weight, bias, target))


@torch.library.register_fake(f"{NAMESPACE}::linear_loss_forward")
def _(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor | None,
    *rest: Any,
    output_mask: list[bool],
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss = input.new_empty((), dtype=_check(input, weight, bias, target))
    return loss, *_gradients(input, weight, bias, output_mask)
