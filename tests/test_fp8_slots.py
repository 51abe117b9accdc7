"""Gradients of weights of layers in FP8 that go straight into their places in a bucket."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from gradient_slots_common import Reducer
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from cuda_ext import fp8
from cuda_ext._slot_write import writes_to_slot

SIZES = (40, 72, 136)  # tokens, outputs, inputs


def case(dtype: torch.dtype, weight_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """input, weight, and the gradient of the output."""
    tokens, outputs, inputs = SIZES
    weight = torch.randn(outputs, inputs).to(weight_dtype).requires_grad_()
    return torch.randn(2, tokens // 2, inputs).to(dtype), weight, torch.randn(2, tokens // 2, outputs).to(dtype)


def product(x: Tensor, weight: Tensor, factor: Tensor, recipe: str) -> Tensor:
    autocasts = weight.dtype != x.dtype
    with torch.autocast(x.device.type, torch.bfloat16, enabled=autocasts):
        return (fp8.linear(x, weight, recipe=recipe) * factor).float().sum()


DTYPES = ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32), (torch.bfloat16, torch.float32))


@pytest.mark.every_backend
@pytest.mark.parametrize(("dtype", "weight_dtype"), DTYPES, ids=str)
@pytest.mark.parametrize("recipe", fp8.RECIPES)
def test_first_write_accumulation_and_average(recipe: str, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    x, weight, factor = case(dtype, weight_dtype)
    (plain,) = torch.autograd.grad(product(x, weight, factor, recipe), weight)
    reducer = Reducer(weight)
    reducer.accumulate(product(x, weight, factor, recipe))
    reducer.assert_in_place(plain)
    reducer.accumulate(product(x, weight, factor, recipe))
    eps = torch.finfo(weight_dtype).eps
    torch.testing.assert_close(reducer.views[0].float(), 2 * plain.float(), rtol=2 * eps, atol=0.0)
    # A quarter of the sum of three.
    assert reducer.synchronize(product(x, weight, factor, recipe), 0.25) == [True]
    torch.testing.assert_close(reducer.views[0].float(), 0.75 * plain.float(), rtol=4 * eps, atol=0.0)
    assert reducer.collected == [True] * 3 and weight.grad is reducer.views[0]


def test_no_memory_of_the_size_of_a_gradient_is_allocated() -> None:
    x, weight = torch.randn(16, 1024).bfloat16(), torch.randn(1024, 1024).bfloat16().requires_grad_()
    reducer = Reducer(weight)
    reducer.slots.open(1.0)
    loss = fp8.linear(x, weight).float().sum()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss.backward()
    events = profiler.profiler.kineto_results.events()  # of which the public events only show sums over ops
    assert 0 < max(event.nbytes() for event in events if event.name() == "[memory]") < weight.numel()
    assert weight.grad is reducer.views[0]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpoints(use_reentrant: bool) -> None:
    x, weight, factor = case(torch.bfloat16, torch.bfloat16)
    (plain,) = torch.autograd.grad(product(x, weight, factor, "rowwise"), weight)
    reducer = Reducer(weight)
    x.requires_grad_()
    reducer.accumulate(checkpoint(lambda x: product(x, weight, factor, "rowwise"), x, use_reentrant=use_reentrant))
    reducer.assert_in_place(plain)


def test_a_weight_that_is_used_twice() -> None:
    x, weight, factor = case(torch.float32, torch.float32)
    both: Any = lambda: product(x, weight, factor, "rowwise") + product(2 * x, weight, factor, "rowwise")  # noqa: E731
    (plain,) = torch.autograd.grad(both(), weight)
    reducer = Reducer(weight)
    reducer.accumulate(both())
    torch.testing.assert_close(reducer.views[0], plain, rtol=2**-20, atol=2.0**-20 * float(plain.abs().max()))


def test_whoever_looks_at_the_gradient_sees_it() -> None:
    x, weight, factor = case(torch.float32, torch.float32)
    (plain,) = torch.autograd.grad(product(x, weight, factor, "rowwise"), weight)
    seen = []
    weight.register_hook(seen.append)
    reducer = Reducer(weight)
    reducer.accumulate(product(x, weight, factor, "rowwise"))
    assert len(seen) == 1 and seen[0].equal(plain)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("recipe", fp8.RECIPES)
def test_create_graph_leaves_slots_alone(recipe: str) -> None:
    x, weight, factor = case(torch.float32, torch.float32)
    (plain,) = torch.autograd.grad(product(x, weight, factor, recipe).square(), weight)
    reducer = Reducer(weight)
    reducer.slots.open(1.0)
    product(x, weight, factor, recipe).square().backward(create_graph=True)
    assert reducer.is_untouched() and weight.grad is not None and weight.grad.detach().equal(plain)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        weight.grad.sum().backward()


class Product(torch.autograd.Function):
    """input (T, K) @ weight (N, K).T, whose backward function fails in the middle of a write if `fails` is set."""

    fails = False

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        (x,) = ctx.saved_tensors

        def write(*, weight_slot: Tensor, slot_alpha: float, slot_beta: float) -> None:
            if Product.fails:
                raise RuntimeError("out of memory")
            before = weight_slot * slot_beta if slot_beta else 0.0
            weight_slot.copy_(slot_alpha * (grad.t() @ x) + before)

        return None, None if writes_to_slot(1, grad, write) else grad.t() @ x


def test_an_error_in_backward_does_not_bring_a_gradient_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a handler looks at the exception, which has the frames of backward functions, the gradient is removed."""
    x, weight, _ = case(torch.float32, torch.float32)
    x = x.flatten(0, 1)
    (plain,) = torch.autograd.grad(Product.apply(x, weight).sum(), weight)
    reducer = Reducer(weight)
    reducer.accumulate(Product.apply(x, weight).sum())
    reducer.assert_in_place(plain)
    monkeypatch.setattr(Product, "fails", True)
    with pytest.raises(RuntimeError, match="out of memory") as kept:
        reducer.accumulate(Product.apply(x, weight).sum())
    assert weight.grad is reducer.views[0]  # of the pass before
    weight.grad = None
    del kept
    assert weight.grad is None
    monkeypatch.setattr(Product, "fails", False)
    reducer.accumulate(Product.apply(x, weight).sum())
    reducer.assert_in_place(plain)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_code_gives_gradients_as_always(dynamic: bool) -> None:
    torch._dynamo.reset()
    x, weight, factor = case(torch.float32, torch.float32)
    (plain,) = torch.autograd.grad(product(x, weight, factor, "rowwise"), weight)
    reducer = Reducer(weight)
    reducer.slots.open(0.5)
    compiled = torch.compile(product, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    compiled(x, weight, factor, "rowwise").backward()
    torch.testing.assert_close(weight.grad, plain)
    assert reducer.is_untouched()


@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_transforms_leave_slots_alone(transform: str) -> None:
    x, weight, factor = case(torch.float32, torch.float32)
    reducer = Reducer(weight)
    reducer.slots.open(1.0)
    of_weight = torch.func.grad(lambda w: product(x, w, factor, "rowwise"))
    if transform == "grad":
        of_weight(weight.detach())
    else:
        torch.vmap(of_weight)(weight.detach().expand(3, -1, -1))
    assert reducer.is_untouched() and weight.grad is None


@pytest.mark.parametrize(("recipe", "frozen"), [*itertools.product(("rowwise", "rowwise_with_gw_hp"), (False, True))])
def test_converted_models_under_a_reducer(recipe: str, frozen: bool) -> None:
    """The last layer needs no gradient for its input, or the first none for its weight."""
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 48)).bfloat16()
    fp8.convert(model, recipe, least_features=1)
    model[0].weight.requires_grad_(not frozen)
    weights = [layer.weight for layer in model if isinstance(layer, nn.Linear) and layer.weight.requires_grad]
    x = torch.randn(24, 32).bfloat16()
    plain = torch.autograd.grad(model(x).float().square().sum(), weights)
    reducer = Reducer(*weights)
    reducer.accumulate(model(x).float().square().sum())
    reducer.assert_in_place(*plain)


def test_bad_slots_are_refused() -> None:
    one = torch.ones(1)
    a, b = torch.ones(4, 16).to(torch.float8_e4m3fn), torch.ones(16, 8).to(torch.float8_e4m3fn)
    write = torch.ops.cuda_ext.scaled_mm.slot
    for slot in (torch.empty(4, 9), torch.empty(8, 4).t(), torch.empty(4, 8, dtype=torch.float64)):
        with pytest.raises(RuntimeError, match=r"scaled_mm: expected weight_slot contiguous, of shape \(4, 8\)"):
            write(a, b, one, 0, one, 0, weight_slot=slot, slot_alpha=1.0, slot_beta=0.0)
