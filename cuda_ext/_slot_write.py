"""Gradient slots (`cuda_ext.bucket.GradientSlots`) for backward functions in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import cuda_ext._load  # noqa: F401
from cuda_ext._toolchain import NAMESPACE

_GradientSlotWrite = getattr(torch.classes, NAMESPACE).GradientSlotWrite


class SlotWrite:
    """The slot of a weight, of which the current backward function writes the gradient instead of returning it."""

    def __init__(self, found: Any, view: Tensor) -> None:
        self._found = found
        self.view = view

    def write(self, op: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """Calls an op that writes ``slot_alpha * gradient + slot_beta * weight_slot`` to ``weight_slot``."""
        scale = {"slot_alpha": self._found.alpha(), "slot_beta": self._found.beta()}
        op(*arguments, **options, weight_slot=self.view, **scale)
        self._found.done()


def find_slot(input: int, grad: Tensor) -> SlotWrite | None:
    """The slot for the gradient of the tensor that is input `input` of the current autograd function, counting tensors
    alone; None if it has none now, and the gradient must be returned. `grad`: the gradient that arrived."""
    if torch.compiler.is_compiling():
        return None
    found = _GradientSlotWrite(input, grad)
    view = found.view()
    return None if view is None else SlotWrite(found, view)
