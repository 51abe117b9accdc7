"""`torch.nn.functional.linear_cross_entropy` (PyTorch 2.13) on `cuda_ext.linear_cross_entropy`, in the whole process.

    from cuda_ext.integrations import linear_cross_entropy

    linear_cross_entropy.enable()          # until linear_cross_entropy.disable()
    with linear_cross_entropy.enable():    # or for a block
        loss = torch.nn.functional.linear_cross_entropy(input, linear_weight, target)
    linear_cross_entropy.calls()           # {'served': {'linear_cross_entropy': 1}, 'refused': {}}

`torch.nn.LinearCrossEntropyLoss` calls the function, and so is served too. What it cannot serve runs in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from cuda_ext import loss as _loss
from cuda_ext._checks import autocasts
from cuda_ext._switch import Enabled, Switch
from cuda_ext.integrations.counting import Calls

__all__ = ["calls", "disable", "enable", "is_enabled"]

_NAME = "linear_cross_entropy"
_KINDS = (Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_counter = Calls()


def enable() -> Enabled:
    """Routes `torch.nn.functional.linear_cross_entropy` to `cuda_ext.linear_cross_entropy`, in all threads.

    Calling it again changes nothing. A function that `torch.compile` has compiled keeps the loss that it was compiled
    with, and so does a name that was imported from `torch.nn.functional`: call `enable()` first.

    Losses have the dtype that PyTorch gives them. ``options``, which choose PyTorch's form in chunks, are not read.

    Returns:
        An object for `with`: at the end of the block the function is what it was before. Blocks may be nested, and
        overlap in several threads.

    Raises:
        RuntimeError: PyTorch is older than 2.13.
    """
    return _switch.turn_on()


def disable() -> None:
    """Takes back `enable()`. A `with` block that is running stays active to its end. Without an earlier `enable()` it
    does nothing."""
    _switch.turn_off()


def is_enabled() -> bool:
    """Whether the function is routed to this package now, by `enable()` or by a `with` block in any thread."""
    return _switch.is_active


def calls(*, reset: bool = False) -> dict[str, dict[str, int]]:
    """The number of calls since the start of the process, or since the last reset, while this was enabled.

    Args:
        reset: start at 0 again.

    Returns:
        `served`, under the name of the op, and `refused`, by reasons: calls that ran in PyTorch. A compiled function
        counts when it is traced.
    """
    return _counter.report(reset=reset)


def _activate() -> Callable[..., Tensor]:
    original: Any = getattr(F, _NAME, None)
    if original is None:
        raise RuntimeError(
            f"linear_cross_entropy.enable: expected PyTorch 2.13 or newer, which has {F.__name__}.{_NAME}, got "
            f"{torch.__version__}; call cuda_ext.linear_cross_entropy"
        )
    setattr(F, _NAME, _linear_cross_entropy)
    return original


def _deactivate(original: Callable[..., Tensor]) -> None:
    setattr(F, _NAME, original)


_switch = Switch(_activate, _deactivate)


def _linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
) -> Tensor:
    arguments: dict[str, Any] = {"linear_bias": linear_bias, "weight": weight, "reduction": reduction}
    arguments |= {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    reason = _reason(input, linear_weight, target, linear_bias, weight, ignore_index)
    if reason:
        _counter.refused(reason)
        found: Tensor = _switch.state(input, linear_weight, target, options=options, **arguments)
        return found
    _counter.served(_NAME)
    arguments["ignore_index"] = -100 if ignore_index is None else ignore_index
    loss: Any = _loss.linear_cross_entropy(input, linear_weight, target, **arguments)
    found = loss if autocasts(input.device) else loss.to(input.dtype)
    return found


def _reason(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    ignore_index: int | None,
) -> str:
    """Why PyTorch has to compute the loss, or to raise its error; empty if it need not."""
    operands = [each for each in (input, linear_weight, linear_bias) if each is not None]
    given = [*operands, target, *([] if weight is None else [weight])]
    if not all(type(each) in _KINDS for each in given):
        return "tensor subclass"
    if not all(each.is_cpu or each.is_cuda or each.is_meta for each in given):
        return "device"
    if any(each.dtype not in _DTYPES for each in operands):
        return "dtype"
    if len({each.dtype for each in operands}) > 1 and not autocasts(input.device):
        return "several dtypes"
    if linear_weight.dim() > 2:
        return "K-dimensional loss"
    if input.dim() not in (1, 2) or linear_weight.dim() < 2 or input.shape[-1] != linear_weight.shape[1]:
        return "shapes"
    classes = linear_weight.shape[0]
    if any(each is not None and tuple(each.shape) != (classes,) for each in (linear_bias, weight)):
        return "shapes"
    if target.is_floating_point():
        if target.requires_grad and torch.is_grad_enabled():
            return "a gradient of probabilities"
        fits = tuple(target.shape) == (*input.shape[:-1], classes) and ignore_index is None
    else:
        fits = target.dtype == torch.int64 and target.shape == input.shape[:-1]
    return "" if fits else "target"
