"""Gradients of the matrices of experts that go straight into their places in a bucket."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from gradient_slots_common import DTYPES, Reducer
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cuda_ext import mixture_of_experts
from cuda_ext.fp8 import EXPERTS_RECIPES
from cuda_ext.nn import MixtureOfExperts

EXPERTS, TOKENS, FEATURES, HIDDEN = 5, 70, 40, 24


class Case:
    """Tokens for experts, one of which has none, and their matrices."""

    def __init__(self, dtype: torch.dtype, weight_dtype: torch.dtype | None = None) -> None:
        self.x = torch.randn(TOKENS, FEATURES).to(dtype)
        self.ids = torch.randint(0, EXPERTS - 1, (TOKENS, 2))
        self.weights = torch.rand(TOKENS, 2).to(dtype)
        self.factor = torch.randn(TOKENS, FEATURES).to(dtype)
        shapes = (EXPERTS, 2 * HIDDEN, FEATURES), (EXPERTS, FEATURES, HIDDEN)
        own = dtype if weight_dtype is None else weight_dtype
        self.matrices = [torch.randn(shape).to(own).requires_grad_() for shape in shapes]
        self.autocasts = own != dtype

    def loss(self, x: Tensor | None = None, **options: Any) -> Tensor:
        x = self.x if x is None else x
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.autocasts):
            out = mixture_of_experts(x, self.ids, self.weights, *self.matrices, **options)
        return (out * self.factor).float().sum() if out.dtype != torch.float64 else (out * self.factor).sum()


@pytest.mark.every_backend
@pytest.mark.parametrize(
    ("dtype", "fp8"), [(dtype, None) for dtype in DTYPES] + [*itertools.product(DTYPES[:3], EXPERTS_RECIPES)], ids=str
)
def test_first_write_accumulation_and_average(dtype: torch.dtype, fp8: str | None) -> None:
    case = Case(dtype)
    plain = torch.autograd.grad(case.loss(fp8=fp8), case.matrices)
    reducer = Reducer(*case.matrices)
    reducer.accumulate(case.loss(fp8=fp8))
    reducer.assert_in_place(*plain)
    reducer.accumulate(case.loss(fp8=fp8))
    eps = torch.finfo(dtype).eps
    for view, gradient in zip(reducer.views, plain, strict=True):
        bound = 2 * eps * float(gradient.abs().max())
        torch.testing.assert_close(view.double(), 2 * gradient.double(), rtol=2 * eps, atol=bound)
    assert reducer.synchronize(case.loss(fp8=fp8), 0.25) == [True, True]
    for view, gradient in zip(reducer.views, plain, strict=True):
        bound = 2 * eps * float(gradient.abs().max())
        torch.testing.assert_close(view.double(), 0.75 * gradient.double(), rtol=4 * eps, atol=bound)
        assert not view[-1].any()  # of the expert without tokens
    assert reducer.collected == [True] * 6


@pytest.mark.parametrize("fp8", [None, *EXPERTS_RECIPES])
def test_autocast_writes_float32(fp8: str | None) -> None:
    """Where without a slot the gradient of a cast may be rounded to 16 bits on its way."""
    case = Case(torch.bfloat16, torch.float32)
    plain = torch.autograd.grad(case.loss(fp8=fp8), case.matrices)
    reducer = Reducer(*case.matrices)
    reducer.accumulate(case.loss(fp8=fp8))
    for view, gradient in zip(reducer.views, plain, strict=True):
        torch.testing.assert_close(view, gradient, rtol=2**-8, atol=0.0)
    assert reducer.collected == [True, True]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpoints(use_reentrant: bool) -> None:
    case = Case(torch.float32)
    plain = torch.autograd.grad(case.loss(), case.matrices)
    reducer = Reducer(*case.matrices)
    reducer.accumulate(checkpoint(case.loss, case.x.requires_grad_(), use_reentrant=use_reentrant))
    reducer.assert_in_place(*plain)


def test_second_derivatives_and_compiled_code_leave_slots_alone() -> None:
    case = Case(torch.float64)
    plain = torch.autograd.grad(case.loss(), case.matrices)
    reducer = Reducer(*case.matrices)
    reducer.slots.open(0.5)
    case.loss().backward(create_graph=True)
    assert reducer.is_untouched()
    for matrix, gradient in zip(case.matrices, plain, strict=True):
        assert matrix.grad is not None
        torch.testing.assert_close(matrix.grad.detach(), gradient)
        matrix.grad = None
    torch._dynamo.reset()
    reducer.slots.open(0.5)
    torch.compile(case.loss, backend="aot_eager")().backward()
    for matrix, gradient in zip(case.matrices, plain, strict=True):
        torch.testing.assert_close(matrix.grad, gradient)
    assert reducer.is_untouched()


def test_layers_under_a_reducer() -> None:
    layer = MixtureOfExperts(FEATURES, HIDDEN, EXPERTS, top_k=2)
    matrices = [p for p in layer.experts.parameters() if p.dim() == 3]
    x = torch.randn(TOKENS, FEATURES)
    plain = torch.autograd.grad(layer(x).square().sum(), matrices)
    reducer = Reducer(*matrices)
    reducer.accumulate(layer(x).square().sum())
    reducer.assert_in_place(*plain)


def test_bad_slots_are_refused() -> None:
    a, b, offs = torch.ones(4, 10), torch.ones(10, 8), torch.tensor([3, 10])
    write = torch.ops.cuda_ext.grouped_mm.slot
    for slot in (torch.empty(2, 4, 9), torch.empty(2, 8, 4).mT):
        with pytest.raises(RuntimeError, match=r"grouped_mm: expected weight_slot contiguous and of shape \(2, 4, 8\)"):
            write(a, b, offs, weight_slot=slot, slot_alpha=1.0, slot_beta=0.0)
