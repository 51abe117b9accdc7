from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor

from cuda_ext.distributed.tensor_parallel import all_reduce, all_reduce_gradient

FEATURES, HIDDEN, OUTPUTS = 5, 12, 3  # 2 to 4 ranks divide HIDDEN


def parameters() -> list[Tensor]:
    """Input (7, FEATURES) and the two weights of an MLP: the same on all ranks. float64, which 1e-12 asks for."""
    shapes = ((7, FEATURES), (HIDDEN, FEATURES), (OUTPUTS, HIDDEN))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def mlp(x: Tensor, weight1: Tensor, weight2: Tensor) -> Tensor:
    return (x @ weight1.t()).tanh() @ weight2.t()


def parallel_mlp(x: Tensor, weight1: Tensor, weight2: Tensor) -> Tensor:
    """The first layer column-parallel, the second row-parallel."""
    return all_reduce(mlp(all_reduce_gradient(x), weight1, weight2))


def own_part(x: Tensor, weight1: Tensor, weight2: Tensor) -> list[Tensor]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts = (x, weight1.chunk(ranks)[rank], weight2.chunk(ranks, dim=1)[rank])
    return [part.detach().clone().requires_grad_() for part in parts]


def assert_all_close(actual: list[Tensor], expected: list[Tensor]) -> None:
    """Another order of the sums changes an element by rounding errors of its terms, which are as large as the largest
    element: by 6e-15 of it in 3000 draws."""
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13 * float(b.abs().max()))


def gradient_penalty(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """The gradients of the squared norm of the gradient of the input: they need the second derivative."""
    grad = torch.autograd.grad(function(*inputs).square().sum(), inputs[0], create_graph=True)[0]
    return list(torch.autograd.grad(grad.square().sum(), inputs))


def check_mlp() -> None:
    whole = parameters()
    parts = own_part(*whole)
    expected, actual = mlp(*whole), parallel_mlp(*parts)
    assert_all_close([actual], [expected])
    weights = torch.randn_like(expected)
    grads = own_part(*torch.autograd.grad((expected * weights).sum(), whole))
    assert_all_close(list(torch.autograd.grad((actual * weights).sum(), parts)), grads)
    assert_all_close(gradient_penalty(parallel_mlp, parts), own_part(*gradient_penalty(mlp, whole)))


@on_ranks(2)
def test_mlp_on_two_ranks() -> None:
    check_mlp()


@on_ranks(4)
def test_mlp_on_four_ranks() -> None:
    check_mlp()


@on_ranks(3)
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_derivative_by_differences(op: str) -> None:
    """Finite differences of the total loss in one value of one rank, compared with that rank's gradient."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = torch.randn(ranks, 2, 3, dtype=torch.float64)[rank].requires_grad_()
    shared = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)  # equal on all ranks, and changed on all

    def loss(own: Tensor, shared: Tensor) -> Tensor:
        return all_reduce((own * all_reduce_gradient(shared)).sin(), op).square().sum()

    grads = torch.autograd.grad(loss(own, shared), (own, shared))
    step = 1e-6  # central differences: an error of step**2 times third derivatives, and of rounding / step
    for holder in range(ranks):
        for index in range(own.numel()):
            move = torch.zeros_like(own).view(-1)
            move[index] = step
            move = move.view_as(own)
            mine = move if rank == holder else torch.zeros_like(own)
            slope = (loss(own.detach() + mine, shared) - loss(own.detach() - mine, shared)) / (2 * step)
            if rank == holder:
                torch.testing.assert_close(grads[0].view(-1)[index], slope.detach(), rtol=1e-6, atol=1e-7)
            slope = (loss(own, shared.detach() + move) - loss(own, shared.detach() - move)) / (2 * step)
            torch.testing.assert_close(grads[1].view(-1)[index], slope.detach(), rtol=1e-6, atol=1e-7)


@on_ranks(3)
def test_values_dtypes_and_layouts() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        # 3 times small integers: sums and means are exact in every dtype.
        x = torch.arange(12).view(3, 4).t().to(dtype) * 3 + 3 * rank
        before = x.clone()
        total = all_reduce(x)
        assert torch.equal(total, (torch.arange(12).view(3, 4).t() * 9 + 9).to(dtype))
        assert total.dtype == dtype and total.is_contiguous() and torch.equal(x, before)
        torch.testing.assert_close(
            all_reduce(x, "avg"), total / ranks, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps
        )
    for shape in ((), (0,), (2, 0, 3)):
        assert all_reduce(torch.ones(shape)).shape == shape
    x = torch.full((2,), 60000.0, dtype=torch.float16)
    assert all_reduce(x, "avg").isfinite().all()  # the sum overflows
    assert all_reduce(x).isinf().all()
    ones, op = torch.ones(2), dist.ReduceOp
    assert torch.equal(all_reduce(ones, op.AVG), ones) and torch.equal(all_reduce(ones, op.SUM), ranks * ones)


@on_ranks(2)
def test_without_autograd_and_under_autocast() -> None:
    whole = parameters()
    expected = mlp(*whole)
    parts = own_part(*whole)
    with torch.inference_mode():
        actual = parallel_mlp(*parts)
        assert actual.is_inference()
    assert_all_close([actual], [expected.detach()])
    with torch.no_grad():
        assert not parallel_mlp(*parts).requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        for x in (torch.randn(3, requires_grad=True), torch.randn(3, dtype=torch.bfloat16, requires_grad=True)):
            assert all_reduce(x).dtype == all_reduce(x, "avg").dtype == all_reduce_gradient(x).dtype == x.dtype
            all_reduce(all_reduce_gradient(x), "avg").sum().backward()
            # 1 / 2 for each of the two ranks
            assert torch.equal(x.grad, torch.ones_like(x))


@on_ranks(2)
def test_group_of_some_ranks() -> None:
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    x = torch.randn(3, requires_grad=True) + dist.get_rank()
    assert torch.equal(all_reduce(all_reduce_gradient(x, group=alone), group=alone), x)


@pytest.mark.sampled(cases=1, slow=True)
@on_ranks(2)
@pytest.mark.parametrize(
    ("backend", "op"),
    [("aot_eager", "sum"), ("aot_eager", "avg"), ("aot_eager", dist.ReduceOp.AVG), ("inductor", "sum")],
)
def test_compiled(backend: str, op: str | dist.ReduceOp.RedOpType) -> None:
    def step(x: Tensor, weight1: Tensor, weight2: Tensor) -> Tensor:
        return all_reduce(mlp(all_reduce_gradient(x), weight1, weight2), op)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    parts = own_part(*parameters())
    expected, actual = step(*parts), compiled(*parts)
    assert_all_close([actual], [expected])
    grads = [list(torch.autograd.grad(output.square().sum(), parts)) for output in (actual, expected)]
    assert_all_close(*grads)
    if backend == "aot_eager":  # another compilation, which takes long with inductor
        with torch.inference_mode():
            assert_all_close([compiled(*parts)], [expected.detach()])


def test_bad_arguments(group: None) -> None:
    prefix = "cuda_ext.distributed.all_reduce"
    dense = "expected tensor dense and float32, float16, bfloat16 or float64, got "
    cases: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: all_reduce(torch.ones(2), "max"), ValueError, ': expected op to be "avg" or "sum", got \'max\''),
        (lambda: all_reduce(torch.ones(2), dist.ReduceOp.MAX), ValueError, ': expected op to be "avg" or "sum", got <'),
        (lambda: all_reduce(torch.ones(2, dtype=torch.int64)), TypeError, f": {dense}torch.int64 and torch.strided"),
        (lambda: all_reduce_gradient(torch.ones(2).to_sparse()), TypeError, f"_gradient: {dense}torch.float32 and "),
    ]
    for call, error, message in cases:
        with pytest.raises(error, match=f"^{re.escape(prefix + message)}"):
            call()


def test_without_a_group() -> None:
    for function in (all_reduce, all_reduce_gradient):
        name = f"cuda_ext.distributed.{function.__name__}"
        with pytest.raises(RuntimeError, match=f"^{name}: expected an initialised process group, got none"):
            function(torch.ones(2))
