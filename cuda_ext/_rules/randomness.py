"""The rules of `torch.vmap` for ops that draw random numbers."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from cuda_ext._toolchain import NAMESPACE


def mapped_where_numbers_differ(op: str, option: str, tensor: Tensor) -> Tensor:
    """`tensor`, mapped inside `torch.vmap` with randomness="different", so that each element gets its own random
    numbers even if no argument is mapped. Raises with randomness="error". An empty random tensor, which draws no
    number, makes PyTorch apply the setting.

    option: what makes the op draw numbers.
    """
    if torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is None:
        return tensor
    try:
        empty = torch.rand(0, dtype=tensor.dtype, device=tensor.device)
    except RuntimeError:
        raise _no_randomness(op, option) from None
    return tensor + empty.sum()


def draws_the_same(op: str, option: str, info: Any) -> bool:
    """Whether all elements get the same numbers. Raises with randomness="error"."""
    if info.randomness == "error":
        raise _no_randomness(op, option)
    return bool(info.randomness == "same")


def _no_randomness(op: str, option: str) -> RuntimeError:
    return RuntimeError(
        f"{NAMESPACE}::{op}: expected torch.vmap with randomness='same' or 'different' for {option}, "
        "got randomness='error'; pass one of them, or call the op outside vmap"
    )


def numbers_of_element(
    index: int, info: Any, device: torch.device, *, same: bool
) -> contextlib.AbstractContextManager[None]:
    """For the call of one element. With `same` all calls start from the same generator state; the last leaves it as a
    single call would."""
    forked = same and index + 1 < info.batch_size
    fork: contextlib.AbstractContextManager[None] = torch.random.fork_rng(
        [device] if device.type == "cuda" else [], enabled=forked
    )
    return fork
