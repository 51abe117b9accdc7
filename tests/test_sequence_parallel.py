"""Layers between which the sequence is divided over ranks, beside the same layers on one rank."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradient_slots_common import Reducer
from ranks import on_ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import cuda_ext
from cuda_ext._activations import ACTIVATIONS
from cuda_ext._group_calls import begin_call
from cuda_ext.distributed import all_gather_linear, linear_reduce_scatter, plan_sequence_parallel
from cuda_ext.distributed.prediction.layers import Rates

NAMES = ("output", "input", "weight", "bias")
OPS = {"all_gather_linear": all_gather_linear, "linear_reduce_scatter": linear_reduce_scatter}
# Rows of each rank; the last rank has none, or one has all.
KINDS = {"even": [3, 3, 3, 3], "uneven": [5, 1, 4, 2], "empty": [4, 0, 3, 0], "one": [0, 6, 0, 0], "none": [0] * 4}


class Case:
    """A layer on one rank, and this rank's part of it."""

    def __init__(
        self,
        op: str,
        kind: str = "uneven",
        *,
        dtype: torch.dtype = torch.float64,
        batch: Sequence[int] = (2,),
        features: int = 13,
        outputs: int = 11,
        with_bias: bool = True,
        factor: int = 1,
        dim: int = 0,
    ) -> None:
        self.op, self.dim = op, dim
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.sizes = [size * factor for size in KINDS[kind][:ranks]]
        rows = sum(self.sizes)
        shape = [*batch, features]
        shape.insert(dim, rows)
        # The same on all ranks, which have the same random seed.
        self.whole = [torch.randn(shape), torch.randn(outputs, features) / features**0.5]
        self.whole += [torch.randn(outputs)] * with_bias
        self.whole = [tensor.to(dtype) for tensor in self.whole]
        self.grad = torch.randn(*shape[:-1], outputs).to(dtype)
        # Neither number is divided by 2 to 4 ranks: the parts differ.
        begin = sum(self.sizes[:rank])
        self.rows = slice(begin, begin + self.sizes[rank])
        self.columns = torch.arange(outputs if op == "all_gather_linear" else features).tensor_split(ranks)[rank]

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """Of this rank, of a tensor or its gradient."""
        gathers = self.op == "all_gather_linear"
        if name == ("input" if gathers else "output"):
            return tensor.narrow(self.dim, self.rows.start, self.rows.stop - self.rows.start)
        if gathers:
            return tensor[..., self.columns] if name in ("output", "bias") else tensor[self.columns]
        return tensor if name == "bias" else tensor[..., self.columns]

    def own(self) -> list[Tensor]:
        named = zip(NAMES[1:], self.whole, strict=False)
        return [self.part(name, tensor).detach().clone().requires_grad_() for name, tensor in named]

    def leaves(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        return [tensor.detach().to(dtype or tensor.dtype).requires_grad_() for tensor in self.whole]

    def call(self, *tensors: Tensor, **options: Any) -> Tensor:
        return OPS[self.op](*tensors, dim=self.dim, sizes=self.sizes, **options)

    def run(self, **options: Any) -> dict[str, Tensor]:
        """The output of this rank, and the gradients of what it has."""
        return with_gradients(lambda *own: self.call(*own, **options), self.own(), self.part("output", self.grad))

    def expected(self, activation: str | None = None, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        def layer(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            return ACTIVATIONS[activation].function(torch.nn.functional.linear(x, weight, bias))

        found = with_gradients(layer, self.leaves(dtype), self.grad.to(dtype))
        return {name: self.part(name, tensor) for name, tensor in found.items()}


def with_gradients(function: Callable[..., Tensor], tensors: list[Tensor], grad: Tensor) -> dict[str, Tensor]:
    out = function(*tensors)
    gradients = torch.autograd.grad(out, tensors, grad.to(out.dtype))
    return dict(zip(NAMES, [out.detach(), *gradients], strict=False))


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        text = {"msg": lambda text, name=name: f"{name}: {text}"}
        torch.testing.assert_close(tensor, expected[name], rtol=tolerance, atol=tolerance, **text)


def chunk_counts() -> list[int]:
    ranks = dist.get_world_size()
    return [1, ranks, 3 * ranks]


def check_layer(op: str) -> None:
    for kind, with_bias, activation in itertools.product(KINDS, (True, False), (None, "relu", "gelu")):
        if activation is not None and op == "linear_reduce_scatter":
            continue
        case = Case(op, kind, with_bias=with_bias)
        options = {} if activation is None else {"activation": activation, "keep_gathered": with_bias}
        for chunks in chunk_counts():
            assert_equal(case.run(chunks=chunks, **options), case.expected(activation))


# The number of ranks is an argument of the decorator.


@pytest.mark.parametrize("op", OPS)
@on_ranks(1)
def test_one_rank(op: str) -> None:
    check_layer(op)


@pytest.mark.parametrize("op", OPS)
@on_ranks(2)
def test_two_ranks(op: str) -> None:
    check_layer(op)


@pytest.mark.parametrize("op", OPS)
@on_ranks(3)
def test_three_ranks(op: str) -> None:
    check_layer(op)


@pytest.mark.parametrize("op", OPS)
@on_ranks(4)
def test_four_ranks(op: str) -> None:
    check_layer(op)


@pytest.mark.parametrize("op", OPS)
@on_ranks(2)
def test_shapes(op: str) -> None:
    """Rows alone, the sequence in another dim, no features, no columns on a rank, one column of two ranks."""
    for options in (
        {"batch": ()},
        {"batch": (2, 3), "dim": 1},
        {"batch": (2, 3), "dim": 2},
        {"batch": (0,)},
        {"features": 0},
        {"outputs": 0},
        {"features": 1, "outputs": 1},
    ):
        case = Case(op, **options)  # type: ignore[arg-type]
        if case.dim == 2:  # counted from the end
            case.dim = -2
        for chunks in chunk_counts():
            assert_equal(case.run(chunks=chunks), case.expected())
    case = Case(op, "even")
    assert_equal(with_gradients(OPS[op], case.own(), case.part("output", case.grad)), case.expected())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("op", OPS)
@on_ranks(4)
def test_error_of_roundings(op: str, dtype: torch.dtype) -> None:
    """At most 1.5 times that of one rank: each term is rounded once, and their sum. Terms of 4 ranks are half as large
    as the sum, so that the roundings of all of them are as much as one of it. In float32 sums of terms have errors as
    the one sum has."""
    case = Case(op, dtype=dtype, features=96, outputs=80, factor=9)
    alone = with_gradients(cuda_ext.linear, case.leaves(), case.grad)
    exact = case.expected()
    for chunks in chunk_counts():
        for name, tensor in case.run(chunks=chunks).items():
            assert tensor.dtype == dtype
            error, least = (
                (each.double() - exact[name]).square().mean().sqrt() for each in (tensor, case.part(name, alone[name]))
            )
            assert error <= 1.5 * least, (name, float(error / least))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("op", OPS)
@on_ranks(3)
def test_chunks_have_the_bits_of_one_product(op: str, dtype: torch.dtype) -> None:
    case = Case(op, dtype=dtype, features=70, outputs=50, factor=7)
    activation = {"activation": "gelu"} if op == "all_gather_linear" else {}
    with cuda_ext.batch_invariant():
        whole, *others = (case.run(chunks=chunks, **activation) for chunks in chunk_counts())
    for other in others:
        assert_equal(other, whole, 0.0)


@on_ranks(3)
def test_sums_are_rounded_once() -> None:
    """1 + 2**-8 + 2**-8 in bfloat16: added in bfloat16, each of the small terms is lost."""
    rank = dist.get_rank()
    value = 1.0 if rank == 0 else 2.0**-8
    terms, weight = torch.full((3, 1), value, dtype=torch.bfloat16), torch.ones(1, 1, dtype=torch.bfloat16)
    for chunks in chunk_counts():
        assert linear_reduce_scatter(terms, weight, chunks=chunks).item() == 1.0 + 2.0**-7
        # With the bias 1 - 2**-8 - 2**-8 + 2**-8: not rounded before it is added.
        bias = torch.full((1,), -(2.0**-8), dtype=torch.bfloat16)
        terms = torch.full((3, 1), 1.0 if rank == 0 else -(2.0**-9), dtype=torch.bfloat16)
        assert linear_reduce_scatter(terms, weight, bias, chunks=chunks).item() == 1.0 - 2.0**-7
        terms = torch.full((3, 1), value, dtype=torch.bfloat16)


@pytest.mark.parametrize("op", OPS)
@on_ranks(2)
def test_needed_gradients_alone(op: str) -> None:
    """Backward exchanges the same on all ranks, whatever is needed."""
    for needed in itertools.product((False, True), repeat=3):
        if not any(needed):
            continue
        case = Case(op)
        expected = case.expected()
        for chunks in chunk_counts():
            own = [t.requires_grad_(wanted) for t, wanted in zip(case.own(), needed, strict=True)]
            case.call(*own, chunks=chunks).backward(case.part("output", case.grad))
            for name, tensor, wanted in zip(NAMES[1:], own, needed, strict=True):
                assert (tensor.grad is not None) == wanted
                if tensor.grad is not None:
                    torch.testing.assert_close(tensor.grad, expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op", OPS)
@on_ranks(3)
def test_second_derivatives(op: str) -> None:
    """The gradients of a squared gradient. The sum over rows is one over ranks, and so is its gradient."""

    def penalty(layer: Callable[..., Tensor], tensors: list[Tensor], grad: Tensor) -> list[Tensor]:
        grads = torch.autograd.grad(layer(*tensors), tensors, grad, create_graph=True)
        return list(torch.autograd.grad(sum(each.square().sum() for each in grads[:2]), tensors[:2]))

    activation = "gelu" if op == "all_gather_linear" else None
    options: dict[str, Any] = {} if activation is None else {"activation": activation}
    for chunks, keeps in itertools.product(chunk_counts(), (False, True)):
        case = Case(op)
        if op == "all_gather_linear":
            options["keep_gathered"] = keeps
        alone = penalty(
            lambda *t: ACTIVATIONS[activation].function(torch.nn.functional.linear(*t)), case.leaves(), case.grad
        )
        own = case.own()
        found = penalty(
            lambda *t, c=case, n=chunks: c.call(*t, chunks=n, **options), own, case.part("output", case.grad)
        )
        for name, actual, expected in zip(NAMES[1:], found, alone, strict=False):
            torch.testing.assert_close(actual, case.part(name, expected), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("op", OPS)
@on_ranks(2)
def test_autocast_and_without_gradients(op: str) -> None:
    case = Case(op, dtype=torch.float32, features=40, outputs=30)
    for chunks in chunk_counts():
        own = case.own()
        with torch.autocast("cpu", torch.bfloat16):
            out = case.call(*own, chunks=chunks)
        assert out.dtype == torch.bfloat16
        out.backward(case.part("output", case.grad).bfloat16())
        in_bfloat16 = [t.detach().bfloat16().requires_grad_() for t in own]
        expected = with_gradients(lambda *t, n=chunks: case.call(*t, chunks=n), in_bfloat16, out.detach() * 0 + 1)
        assert torch.equal(out, expected["output"])
        assert all(tensor.grad is not None and tensor.grad.dtype == torch.float32 for tensor in own)
        with torch.inference_mode():
            alone = case.call(*own, chunks=chunks)
            assert alone.is_inference() and not alone.requires_grad
        torch.testing.assert_close(alone, case.call(*own, chunks=chunks).detach(), rtol=0, atol=0)


@pytest.mark.parametrize("use_reentrant", [False, True])
@on_ranks(2)
def test_checkpoints(use_reentrant: bool) -> None:
    """Two layers around an elementwise function, as in a transformer."""
    first, second = Case("all_gather_linear", outputs=8), Case("linear_reduce_scatter", features=8, outputs=13)

    def block(x: Tensor, w1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        return second.call(first.call(x, w1).tanh(), w2, b2)

    def wrapped(*tensors: Tensor) -> Tensor:
        return checkpoint(block, *tensors, use_reentrant=use_reentrant)  # type: ignore[no-any-return]

    own = [*first.own()[:2], *second.own()[1:]]
    grad = second.part("output", second.grad)
    plain = torch.autograd.grad(block(*own), own, grad)
    if use_reentrant:
        wrapped(*own).backward(grad)
        found = [tensor.grad for tensor in own]
    else:
        found = [*torch.autograd.grad(wrapped(*own), own, grad)]
    for a, b in zip(found, plain, strict=True):
        assert torch.equal(a, b)
    # Against one rank, with all tensors.
    x, w1, w2, b2 = (t.detach().requires_grad_() for t in (*first.whole[:2], *second.whole[1:]))
    out = torch.nn.functional.linear(torch.nn.functional.linear(x, w1).tanh(), w2, b2)
    alone = torch.autograd.grad(out, [x, w1, w2, b2], second.grad)
    parts = [first.part("input", alone[0]), first.part("weight", alone[1]), second.part("weight", alone[2]), alone[3]]
    for a, b in zip(found, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("op", OPS)
@on_ranks(2)
def test_gradients_go_to_slots(op: str, dtype: torch.dtype) -> None:
    case = Case(op, dtype=dtype)
    grad = case.part("output", case.grad)
    for chunks in chunk_counts():
        x, weight, bias = case.own()
        plain = torch.autograd.grad(case.call(x, weight, bias, chunks=chunks), weight, grad)
        reducer = Reducer(weight)
        reducer.accumulate((case.call(x, weight, bias, chunks=chunks) * grad).sum())
        reducer.assert_in_place(*plain)
        assert reducer.collected == [True]
        case.call(x, weight, bias, chunks=chunks).backward(grad)
        torch.testing.assert_close(reducer.views[0], 2 * plain[0])
        before = reducer.views[0].clone()
        (again,) = torch.autograd.grad(case.call(x, weight, bias, chunks=chunks), x, grad)
        assert torch.equal(reducer.views[0], before) and again.shape == x.shape


@pytest.mark.parametrize("op", OPS)
@on_ranks(2)
def test_slots_under_autocast(op: str) -> None:
    case = Case(op, dtype=torch.float32)
    x, weight, bias = case.own()
    grad = case.part("output", case.grad)

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return (case.call(x, weight, bias) * grad).float().sum()

    plain = torch.autograd.grad(loss(), weight)
    reducer = Reducer(weight)
    reducer.accumulate(loss())
    assert reducer.collected == [True]
    torch.testing.assert_close(reducer.views[0], plain[0], rtol=2**-8, atol=1e-6)
    assert not torch.equal(reducer.views[0], plain[0])  # float32 sums, which were not rounded to bfloat16


@pytest.mark.sampled(cases=2, slow=True)
@pytest.mark.parametrize("kind", ["even", "uneven", "empty"])
@pytest.mark.parametrize("op", OPS)
@on_ranks(2)
def test_compiled(op: str, kind: str) -> None:
    case = Case(op, kind)
    options = {"activation": "gelu"} if op == "all_gather_linear" else {}

    def step(*tensors: Tensor) -> Tensor:
        return case.call(tensors[0].sin(), *tensors[1:], **options).cos()

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    own, grad = case.own(), case.part("output", case.grad)
    assert_equal(with_gradients(compiled, own, grad), with_gradients(step, own, grad))
    with torch.inference_mode():
        torch.testing.assert_close(compiled(*own), step(*own))


@pytest.mark.sampled(cases=1, slow=True)
@pytest.mark.parametrize("op", OPS)
@on_ranks(2)
def test_compiled_by_inductor(op: str) -> None:
    case = Case(op)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *t: case.call(*t) * 2, fullgraph=True)
    own, grad = case.own(), case.part("output", case.grad)
    assert_equal(with_gradients(compiled, own, grad), with_gradients(lambda *t: case.call(*t) * 2, own, grad))


@pytest.mark.parametrize("op", OPS)
@on_ranks(3)
def test_different_arguments_raise_on_every_rank(op: str) -> None:
    rank = dist.get_rank()
    dtype = torch.float64 if rank == 1 else torch.float32
    x, weight = torch.randn(6, 4, dtype=dtype), torch.randn(2, 4, dtype=dtype)
    gathered = op == "all_gather_linear"
    fewer = 6 - (rank == 2)
    cases: list[tuple[Callable[[], Tensor], str]] = [
        (lambda: OPS[op](x, weight), "float64"),
        (lambda: OPS[op](x.float()[:fewer], weight.float()), "5, 5, 5 rows" if gathered else "2, 2, 1 rows"),
        (lambda: OPS[op](x.float(), weight.float(), chunks=3 if rank == 2 else 1), "3 chunks"),
        (lambda: OPS[op](x.float(), weight.float().clone().requires_grad_(rank == 0)), "gradients of weight"),
    ]
    for call, got in cases:
        begin = time.monotonic()
        with pytest.raises(
            RuntimeError, match=f"^cuda_ext::{op}: expected the same arguments on all 3 ranks, "
        ) as caught:
            call()
        assert got in str(caught.value) and f"on rank {rank} and" in str(caught.value)
        assert time.monotonic() - begin < 20.0
    assert OPS[op](x.float(), weight.float()).shape == ((18, 2) if gathered else (2, 2))


@on_ranks(3)
def test_ranks_tell_what_may_differ() -> None:
    """What decides how a call is made is the same on all ranks, also when some have other numbers later."""
    rank, group, device = dist.get_rank(), dist.group.WORLD, torch.device("cpu")
    for own in (str(rank), "3" if rank == 1 else str(rank)):
        assert begin_call("op", group, device, same="a", own=own).told == ["0", "1", "2"]
    assert begin_call("op", group, device, same="b", own="3").told == ["3", "3", "3"]


@pytest.mark.parametrize("op", OPS)
def test_bad_arguments(op: str, group: None) -> None:
    function: Callable[..., Tensor] = OPS[op]
    x, weight = torch.ones(3, 4), torch.ones(5, 4)
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: function(x, torch.ones(5, 3)), "weight of shape (N, 4) for input (3, 4), got (5, 3)"),
        (lambda: function(x, torch.ones(4)), "weight of shape (N, 4) for input (3, 4), got (4,)"),
        (lambda: function(x, weight, torch.ones(4)), "bias of shape (5,) for weight (5, 4), got (4,)"),
        (lambda: function(x, weight.double()), "weight of dtype float32 on cpu, as input, got float64 on cpu"),
        (lambda: function(x, weight, torch.ones(5).half()), "bias of dtype float32 on cpu, as input, got float16"),
        (lambda: function(x.long(), weight.long()), "input of dtype float32, float16, bfloat16 or float64, got int64"),
        (lambda: function(x, weight, dim=1), "dim to be one of input's but the last, got 1 for input (3, 4)"),
        (lambda: function(x, weight, dim=-3), "dim to be one of input's but the last, got -3"),
        (lambda: function(x[0], weight), "dim to be one of input's but the last, got 0 for input (4,)"),
        (lambda: function(x, weight, chunks=0), "chunks None, 1 or a multiple of the 1 ranks, got 0"),
        (lambda: function(x, weight, sizes=[2]), "got (2,)"),
        (lambda: function(x, weight, sizes=[3, 0]), "got (3, 0)"),
    ]
    for call, message in cases:
        with pytest.raises(RuntimeError, match=rf"^cuda_ext::{op}: expected .*{re.escape(message)}"):
            call()


def test_without_a_group() -> None:
    for name, op in OPS.items():
        with pytest.raises(RuntimeError, match=f"^cuda_ext::{name}: expected an initialised process group, got none"):
            op(torch.ones(3, 4), torch.ones(5, 4))


# The plan


def test_few_rows_take_one_product() -> None:
    for op in OPS:
        plan = plan_sequence_parallel(448, 8192, 3584, torch.bfloat16, 8, op=op)
        assert plan.chunks == 1 and plan.chunked > plan.whole and "read the weights 8 times" in str(plan)
        plan = plan_sequence_parallel(16384, 4096, 4096, torch.bfloat16, 8, op=op)
        assert plan.chunks % 8 == 0 and plan.chunks > 1 and plan.chunked < 0.95 * plan.whole
        assert plan_sequence_parallel(16384, 4096, 4096, torch.bfloat16, 1, op=op).chunks == 1
    with pytest.raises(ValueError, match="plan_sequence_parallel: expected op one of"):
        plan_sequence_parallel(1, 1, 1, torch.float32, 2, op="linear")


def test_bounds_of_the_plan() -> None:
    """Chunks hide at most the shorter of exchange and product; a free network leaves nothing to hide."""
    for rows, k, n, ranks in itertools.product((1, 1000, 100000), (64, 5000), (64, 5000), (2, 3, 8)):
        for op in OPS:
            plan = plan_sequence_parallel(rows, k, n, torch.bfloat16, ranks, op=op)
            assert plan.whole == plan.product + plan.exchange
            assert plan.chunked >= max(plan.product, plan.exchange) * (1 - 1e-9)
            free = Rates(bandwidth=1e30, latency=0.0)
            assert plan_sequence_parallel(rows, k, n, torch.bfloat16, ranks, op=op, rates=free).chunks == 1
