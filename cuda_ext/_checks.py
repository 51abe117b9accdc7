"""Checks for fake kernels, with the same errors as the checks in C++, and the refusal of scalars that require grad.

With them, mistakes are found while a compiler traces and on the meta device. They include devices: PyTorch calls the
fake kernel as soon as one argument is on the meta device, whose result would be uninitialised memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cuda_ext._toolchain import NAMESPACE


def check(condition: Any, op: str, message: str) -> None:
    torch._check(condition, lambda: f"{NAMESPACE}::{op}: {message}")


def expected(op: str, what: str) -> RuntimeError:
    """The error to raise where Dynamo traces a call: the closure of `check` would break its graph."""
    return RuntimeError(f"{NAMESPACE}::{op}: expected {what}")


def shape_of(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def is_floating(dtype: torch.dtype) -> bool:
    return dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def autocasts(device: torch.device) -> bool:
    """Whether autocast is enabled for ops on this kind of device. For that of meta, PyTorch raises an error."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def is_transformed() -> bool:
    """Whether torch.func or forward mode differentiates what is computed now, so that operations have to be composed.

    The names are PyTorch's own. Where one is missing, the answer is yes, which is right for any call.
    """
    functorch = getattr(torch._C, "_are_functorch_transforms_active", None)
    return functorch is None or functorch() or getattr(forward_ad, "_current_level", 0) >= 0


def check_floating(op: str, name: str, tensor: Tensor) -> None:
    check(
        is_floating(tensor.dtype),
        op,
        (
            f"expected {name} of dtype float32, float16, bfloat16 or float64, got {dtype_name(tensor.dtype)}; "
            "convert it with .to()"
        ),
    )


def check_same_dtype(op: str, name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    check(
        tensor.dtype == other.dtype,
        op,
        (
            f"expected {name} of dtype {dtype_name(other.dtype)} to match {other_name}, got "
            f"{dtype_name(tensor.dtype)}; convert one of them with .to()"
        ),
    )


def check_same_device(op: str, other_name: str, other: Tensor, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != other.device:
            raise RuntimeError(
                f"{NAMESPACE}::{op}: expected {name} on device {other.device} to match {other_name}, got "
                f"{tensor.device}; move one of them with .to()"
            )


# The results of the next two functions are symbolic if a size is; `check` then defers the check to run time.


def has_shape(tensor: Tensor, expected: Sequence[Any]) -> Any:
    fits: Any = tensor.dim() == len(expected)
    for size, wanted in zip(tensor.shape, expected, strict=False):
        fits = fits & (size == wanted)
    return fits


def broadcasts_to(shape: Sequence[Any], target: Sequence[Any]) -> Any:
    fits: Any = len(shape) <= len(target)
    for size, wanted in zip(reversed(shape), reversed(target), strict=False):
        fits = fits & ((size == 1) | (size == wanted))
    return fits


def check_shape(op: str, name: str, tensor: Tensor, expected: Sequence[Any], suffix: str = "") -> None:
    check(
        has_shape(tensor, expected),
        op,
        f"expected {name} of shape {tuple(expected)}{suffix}, got {shape_of(tensor)}",
    )


def check_constants(op: str, **numbers: Any) -> None:
    """Refuses tensors that require grad: the dispatcher would convert them to numbers, and lose their gradient."""
    for name, number in numbers.items():
        if isinstance(number, Tensor) and number.requires_grad:
            raise RuntimeError(
                f"{NAMESPACE}::{op}: expected {name} to be a number, which has no gradient, got a tensor with "
                "requires_grad=True; detach() it, or multiply by it outside the op"
            )


def is_finite(number: Any) -> bool:
    """Symbolic numbers, whose value is unknown, count as finite."""
    return not isinstance(number, float) or math.isfinite(number)


def number_text(number: Any) -> str:
    return f"{number:g}" if isinstance(number, float) else str(number)
