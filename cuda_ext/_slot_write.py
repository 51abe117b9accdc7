"""Gradient slots (`cuda_ext.bucket.GradientSlots`) for backward functions in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import cuda_ext._load  # noqa: F401
from cuda_ext._toolchain import NAMESPACE

__all__ = ["writes_to_slot"]

_GradientSlotWrite = getattr(torch.classes, NAMESPACE).GradientSlotWrite


def writes_to_slot(input: int, grad: Tensor, op: Callable[..., Any], *arguments: Any, **options: Any) -> bool:
    """Calls an op that writes ``slot_alpha * gradient + slot_beta * weight_slot`` to ``weight_slot``, if the weight has
    a slot now; else returns False, and the gradient must be returned.

    input: which of the tensors that the current autograd function was given is the weight.
    grad: the gradient that arrived.
    """
    if torch.compiler.is_compiling():
        return False
    found = _GradientSlotWrite(input, grad)
    try:
        slot = found.view()
        if slot is None:
            return False
        op(*arguments, **options, weight_slot=slot, slot_alpha=found.alpha(), slot_beta=found.beta())
        found.done()
        return True
    finally:
        found.end()
