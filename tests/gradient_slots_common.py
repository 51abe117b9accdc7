"""Helpers of the tests of gradient slots: a reducer with one bucket, and exact inputs."""

from __future__ import annotations

import torch
from gemm_common import integers
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from cuda_ext import bucket

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WEIGHTS = {"linear": ("weight",), "gated_linear": ("weight",)}
WEIGHTS |= {"mlp": ("weight1", "weight2"), "gated_mlp": ("weight1", "weight2")}


class Reducer:
    """Slots in one poisoned bucket, with the hooks that a reducer of gradients registers."""

    def __init__(self, *parameters: Tensor, takes: bool = False) -> None:
        dtype, device = parameters[0].dtype, parameters[0].device
        offsets, size = bucket.aligned_offsets([parameter.numel() for parameter in parameters], dtype)
        self.bucket = torch.full((size,), torch.nan, dtype=dtype, device=device)
        self.views = [
            self.bucket[offset : offset + parameter.numel()].view(parameter.shape)
            for parameter, offset in zip(parameters, offsets, strict=True)
        ]
        self.parameters = parameters
        self.slots = bucket.GradientSlots()
        self.slots.assign(parameters, self.views)
        self.collected: list[bool] = []
        self._nodes = [get_gradient_edge(parameter).node for parameter in parameters]
        finish = self.slots.take if takes else self.slots.collect
        for index, node in enumerate(self._nodes):
            node.register_hook(lambda *_, index=index: self.collected.append(finish(index)))

    def accumulate(self, loss: Tensor, **options: bool) -> None:
        self.slots.open(1.0)
        loss.backward(**options)

    def synchronize(self, loss: Tensor, scale: float = 0.25) -> list[bool]:
        """Ends as a pass that averages does; returns which gradients are in their slots."""
        self.slots.open(scale)
        loss.backward()
        locked = [self.slots.lock(index) for index in range(len(self.parameters))]
        self.slots.unlock_all()
        return locked

    def is_untouched(self) -> bool:
        return bool(self.bucket.isnan().all())

    def assert_in_place(self, *expected: Tensor) -> None:
        for parameter, view, values in zip(self.parameters, self.views, expected, strict=True):
            assert parameter.grad is view
            assert_same(view, values)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=0, atol=0)


def whole(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A leaf of small integers."""
    return integers(*shape, dtype=dtype, grad=True)


def linear_case(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """input, weight, and the gradient of the weight under the sum of the outputs; all exact."""
    x, w = integers(3, 7, dtype=dtype), whole(5, 7, dtype=dtype)
    return x, w, torch.ones(3, 5, dtype=dtype).t() @ x
