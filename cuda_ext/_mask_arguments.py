"""The arguments of the builders of block masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cuda_ext._checks import check, dtype_name, shape_of

Device = torch.device | str | int | None

_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)
_FAR = 2**40  # beyond any sequence


def device_of(device: Device, tensor: Tensor | None = None) -> torch.device:
    if device is None:
        return torch.get_default_device() if tensor is None else tensor.device
    return torch.empty(0, device=device).device  # with the index, which "cuda" lacks


def check_int(op: str, least: int, **numbers: Any) -> None:
    for name, number in numbers.items():
        fits = isinstance(number, int) and not isinstance(number, bool) and number >= least
        check(fits, op, f"expected {name} to be an int of {least} or more, got {number!r}")


def bounds_of(op: str, **bounds: Any) -> tuple[int | None, int | None]:
    """The left and the right bound of a window; None: unbounded."""
    for name, bound in bounds.items():
        fits = bound is None or (isinstance(bound, int) and not isinstance(bound, bool))
        check(fits, op, f"expected {name} to be an int, or None or -1 for no bound, got {bound!r}")
    # Bounds that do not fit into int64 are bounds, too.
    left, right = (None if bound in (None, -1) else min(max(bound, -_FAR), _FAR) for bound in bounds.values())
    return left, right


def integers(op: str, name: str, values: Tensor | Sequence[Any], dims: Sequence[int], device: Device) -> Tensor:
    """An int64 tensor on the device, of one of these numbers of dimensions."""
    check(hasattr(values, "__len__"), op, f"expected {name} to be a tensor or a list, got {values!r}")
    if isinstance(values, Tensor):
        tensor = values
    else:  # an empty list would be of floats
        tensor = torch.as_tensor(values, dtype=None if len(values) else torch.int64, device=device)
    kind = f"expected {name} of an integer dtype, got {dtype_name(tensor.dtype)}; convert it with .int()"
    check(tensor.dtype in _INTEGERS, op, kind)
    wanted = " or ".join(map(str, dims))
    check(tensor.dim() in dims, op, f"expected {name} with {wanted} dimensions, got shape {shape_of(tensor)}")
    return tensor.to(device_of(device, tensor), torch.int64)


def shifts_of(
    op: str, queries: int, keys: int, q_lengths: Tensor | None, k_lengths: Tensor | None, device: Device
) -> Tensor:
    """int64 (B,), of each sequence: how far its last key is behind its last query, counted from its first ones."""
    given = (q_lengths is None) == (k_lengths is None)
    check(given, op, "expected both of q_lengths and k_lengths or none, got one; give the other")
    if q_lengths is None or k_lengths is None:
        return torch.full((1,), keys - queries, device=device_of(device))
    q_lengths = integers(op, "q_lengths", q_lengths, (1,), device)
    k_lengths = integers(op, "k_lengths", k_lengths, (1,), device)
    what = f"expected q_lengths and k_lengths of as many sequences, at least one, got {len(q_lengths)} and"
    check(len(q_lengths) == len(k_lengths) > 0, op, f"{what} {len(k_lengths)}")
    what = f"expected q_lengths and k_lengths on one device, got {q_lengths.device} and {k_lengths.device}"
    check(q_lengths.device == k_lengths.device, op, f"{what}; move one of them, or give device=")
    return k_lengths - q_lengths


def booleans(op: str, name: str, values: Tensor, device: Device) -> Tensor:
    """A bool tensor of 4 dimensions on the device."""
    check(isinstance(values, Tensor), op, f"expected {name} to be a tensor, got {type(values).__name__}")
    kind = f"expected {name} of dtype bool, got {dtype_name(values.dtype)}; convert it with .bool()"
    check(values.dtype == torch.bool, op, kind)
    fits = 2 <= values.dim() <= 4 and values.numel() > 0
    what = f"expected {name} of shape (Sq, Sk), (B, Sq, Sk) or (B, H, Sq, Sk), none of them 0"
    check(fits, op, f"{what}, got {shape_of(values)}")
    values = values.to(device_of(device, values))
    return values.view(*(1,) * (4 - values.dim()), *values.shape) if values.dim() != 3 else values.unsqueeze(1)
