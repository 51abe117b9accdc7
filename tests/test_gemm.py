"""Values of the GEMM ops: dtypes, options, shapes, strides, exactness, determinism."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gemm_common import ACTIVATIONS, DTYPES, OPS, arguments, check, integers, rand, roundings, shapes_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import cuda_ext
from cuda_ext import testing
from cuda_ext._gemm import gated_linear, gemm, linear, mlp

pytestmark = pytest.mark.every_backend

# float16 products of plain PyTorch are slow on a CPU, so the sizes stay small.
SIZES = [(1, 1, 1), (3, 5, 7), (17, 97, 131), (73, 50, 300)]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_matches_reference(op: str, dtype: torch.dtype, activation: str | None) -> None:
    for m, n, k in SIZES:
        check(op, arguments(op, (), m, n, k, f=33, dtype=dtype), activation=activation)


@pytest.mark.parametrize("op", OPS)
def test_several_tasks_and_blocks_of_k(op: str, backend: str) -> None:
    """More rows, columns and k than one task or one block holds; those of the CUDA kernels are smaller."""
    rows, columns, f = (385, 261, 133) if backend == "simt" else (1153, 501, 301)
    check(op, arguments(op, (), rows, columns, 70, f=f, grad=False), activation="silu")
    check(op, arguments(op, (), 50, 60, 1031, f=1029), activation="gelu")


@pytest.mark.cpu_only("the BLAS")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_large_products_through_the_blas(dtype: torch.dtype) -> None:
    """From 256 on in every size, float32 and float64 products are the BLAS's; the epilogues are the same."""
    big = {"dtype": dtype}
    check("gemm", arguments("gemm", (2,), 300, 260, 270, **big), activation="gelu", alpha=0.5, beta=-2.0)
    check("gemm", {"a": rand(2, 3, 257, 256, **big), "b": rand(3, 256, 258, **big)})
    check("gemm", {"a": rand(260, 256, **big).t(), "b": rand(2, 300, 260, **big).mT}, activation="silu")
    check("linear", arguments("linear", (2,), 150, 280, 257, **big), activation="relu")
    check("mlp", arguments("mlp", (), 290, 260, 256, f=270, **big), activation="gelu_tanh")
    a, b = integers(300, 400, dtype=dtype), integers(400, 256, dtype=dtype)
    assert torch.equal(gemm(a, b).double(), a.double() @ b.double())


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("lead", [(), (1,), (2, 3), (2, 1, 3)])
def test_leading_dims(op: str, lead: tuple[int, ...]) -> None:
    check(op, arguments(op, lead, 4, 5, 6), activation="gelu")


@pytest.mark.parametrize("op", ["linear", "gated_linear", "mlp", "gated_mlp"])
def test_input_of_one_dim(op: str) -> None:
    tensors = arguments(op, (), 1, 5, 6)
    tensors["input"] = rand(6)
    if "residual" in tensors:
        tensors["residual"] = rand(5)
    check(op, tensors, activation="silu")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("empty", ["lead", "m", "n", "k"])
def test_empty_dims(op: str, empty: str) -> None:
    sizes = {"m": 3, "n": 4, "k": 5, empty: 0}
    lead = (0, 2) if sizes.pop("lead", 1) == 0 else (2,)
    check(op, arguments(op, lead, **sizes), activation="gelu")
    check(op, arguments(op, lead, **sizes, f=0), activation="gelu")


def test_empty_sum_leaves_the_other_terms() -> None:
    a, b, c, bias = torch.ones(3, 0), torch.ones(0, 4), integers(3, 4), integers(4)
    assert torch.equal(gemm(a, b, c, bias=bias, beta=2.0, activation="relu"), torch.relu(2 * c + bias))
    for batch in ((0,), (0, 2), (2, 0), (3, 0, 2)):
        b = torch.ones(2, 4, requires_grad=True)
        gemm(torch.ones(*batch, 3, 2), b).sum().backward()
        gemm(torch.ones(*batch, 2, 3).mT, b).sum().backward()
        assert torch.equal(b.grad, torch.zeros(2, 4))
        w = torch.ones(4, 2, requires_grad=True)
        linear(torch.ones(*batch, 3, 2).transpose(0, -2), w, activation="gelu").sum().backward()
        assert torch.equal(w.grad, torch.zeros(4, 2))


BROADCASTS = [
    ((2, 3), (2, 3)),
    ((2, 3), ()),
    ((), (2, 3)),
    ((3,), (2, 1)),
    ((2, 1), (1, 3)),
    ((1, 3), (2, 3)),
    ((2, 1, 4, 1), (3, 1, 5)),
]


@pytest.mark.parametrize(("batch_a", "batch_b"), BROADCASTS)
def test_gemm_broadcasts_batches(batch_a: tuple[int, ...], batch_b: tuple[int, ...]) -> None:
    a, b = rand(*batch_a, 3, 4), rand(*batch_b, 4, 5)
    check("gemm", {"a": a, "b": b, "bias": rand(5)}, activation="silu")
    assert gemm(a, b).shape == torch.matmul(a, b).shape


@pytest.mark.parametrize("shape", [(), (5,), (1,), (4, 1), (1, 5), (3, 1, 1), (2, 3, 4, 5), (2, 1, 4, 5), (1, 1, 1, 1)])
def test_gemm_broadcasts_c(shape: tuple[int, ...]) -> None:
    check("gemm", {"a": rand(2, 3, 4, 6), "b": rand(6, 5), "c": rand(*shape)}, alpha=-0.5, beta=1.5, activation="gelu")
    check("gemm", {"a": rand(2, 3, 4, 6), "b": rand(3, 6, 5), "c": rand(*shape)}, beta=1.5)


@pytest.mark.parametrize("shape", [(), (5,), (1, 1), (4, 1), (3, 4, 5), (3, 1, 5), (1, 1, 5)])
def test_linear_broadcasts_residual(shape: tuple[int, ...]) -> None:
    for activation in (None, "relu"):
        check("linear", {"input": rand(3, 4, 6), "weight": rand(5, 6), "residual": rand(*shape)}, activation=activation)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_gemm_zero_scales_remove_terms(dtype: torch.dtype) -> None:
    nan = torch.full((3, 3), math.nan, dtype=dtype)
    a, b, c = (integers(3, 3, dtype=dtype) for _ in range(3))
    assert torch.equal(gemm(a, b, nan, beta=0.0), a @ b)
    assert torch.equal(gemm(nan, nan, c, alpha=0.0), c)
    leaves = [t.clone().requires_grad_() for t in (a, b, c)]
    gemm(*leaves, alpha=0.0, beta=0.0).sum().backward()
    assert all(torch.equal(leaf.grad, torch.zeros(3, 3, dtype=dtype)) for leaf in leaves)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", [None, "gelu", "relu"])
def test_gemm_out_dtype(dtype: torch.dtype, out_dtype: torch.dtype, activation: str | None) -> None:
    for addend in (dtype, out_dtype):
        tensors = {"a": rand(9, 20, dtype=dtype), "b": rand(20, 11, dtype=dtype)}
        tensors |= {"c": rand(9, 11, dtype=addend), "bias": rand(11, dtype=addend)}
        out = gemm(**tensors, activation=activation, out_dtype=out_dtype)
        assert out.dtype == out_dtype
        grads = torch.autograd.grad(out.sum(), list(tensors.values()))
        assert [g.dtype for g in grads] == [dtype, dtype, addend, addend]
        exact = {name: t.detach().double().requires_grad_() for name, t in tensors.items()}
        exact_out = testing.reference_gemm(**exact, activation=activation)
        exact_grads = torch.autograd.grad(exact_out.sum(), list(exact.values()))
        # The pre-activation is saved, and the gradient there rounded, in out_dtype: its eps counts in every gradient.
        for actual, expected in zip((out, *grads), (exact_out, *exact_grads), strict=True):
            eps = max(torch.finfo(actual.dtype).eps, torch.finfo(out_dtype).eps)
            bound = roundings(tensors["a"]) * eps * max(1.0, float(expected.detach().abs().max()))
            torch.testing.assert_close(actual.double(), expected, rtol=0, atol=bound)


def test_rounds_once_from_float32() -> None:
    """Partial sums that bfloat16 could not hold, and a bias that only shows because nothing was rounded before it."""
    a = torch.full((1, 1000), 1.0, dtype=torch.bfloat16)
    b = torch.ones(1000, 1, dtype=torch.bfloat16)
    assert gemm(a, b).item() == 1000
    assert gemm(a, b, bias=torch.tensor([3.0]), out_dtype=torch.float32).item() == 1003
    assert gemm(a, b, bias=torch.tensor([2.25]).bfloat16()).item() == 1004  # 1002.25, not 1000 + 2.25 twice rounded


# integers: equality is exact whatever the order of summation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (9, 48, 256), (10, 49, 257), (71, 143, 513), (150, 7, 64)])
def test_integers_are_exact(dtype: torch.dtype, m: int, n: int, k: int) -> None:
    a, b, c = integers(m, k, dtype=dtype), integers(k, n, dtype=dtype), integers(m, n, dtype=dtype)
    bias = integers(n, dtype=dtype)
    out_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    expected = torch.relu(2 * (a.double() @ b.double()) - c.double() + bias.double())
    out = gemm(a, b, c, bias=bias, activation="relu", alpha=2.0, beta=-1.0, out_dtype=out_dtype)
    assert torch.equal(out.double(), expected)

    x, w = a.clone().requires_grad_(), b.t().contiguous().requires_grad_()
    bias_leaf = bias.clone().requires_grad_()
    out = linear(x, w, bias_leaf, residual=c, activation="relu")
    if dtype in (torch.float32, torch.float64):
        grad = integers(m, n, dtype=dtype)
        out.backward(grad)
        z = a.double() @ b.double() + bias.double()
        dz = grad.double() * (z > 0)
        assert torch.equal(out.double(), torch.relu(z) + c.double())
        assert torch.equal(x.grad.double(), dz @ b.double().t())
        assert torch.equal(w.grad.double(), dz.t() @ a.double())
        assert torch.equal(bias_leaf.grad.double(), dz.sum(0))


SMALL_SIZES = (1, 2, 3, 4, 5, 8, 13, 24, 33, 36, 37, 48, 49, 73, 128, 129)
COLUMNS = (*SMALL_SIZES, 100, 1009)
DEPTHS = (0, 1, 3, 4, 16, 17, 64, 65, 255, 256, 257, 511, 512, 515, 768, 1100)
ADDENDS: tuple[Callable[[int, int], tuple[int, ...]], ...] = (
    lambda m, n: (m, n), lambda m, n: (n,), lambda m, n: (m, 1), lambda m, n: (),
)  # fmt: skip


@pytest.mark.cpu_only("its kernels for these")
@given(
    dtype=st.sampled_from(DTYPES),
    lead=st.sampled_from([(), (), (3,), (2, 2)]),
    m=st.sampled_from(SMALL_SIZES),
    n=st.sampled_from(COLUMNS),
    k=st.sampled_from(DEPTHS),
    layouts=st.tuples(*[st.sampled_from(["contiguous", "padded", "every other", "shifted", "transposed"])] * 2),
    addend=st.sampled_from(ADDENDS),
    threads=st.sampled_from([1, 2, 5]),
)
@settings(max_examples=60)
def test_few_rows_and_small_matrices_are_exact(
    dtype: torch.dtype, lead: tuple[int, ...], m: int, n: int, k: int, layouts: tuple[str, str],
    addend: Callable[[int, int], tuple[int, ...]], threads: int,
) -> None:  # fmt: skip
    """Sizes around what a register tile, a vector, a block of k holds, and either operand laid out in any way."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check_few_rows(dtype, lead, m, n, k, layouts, addend)
    finally:
        torch.set_num_threads(before)


def check_few_rows(
    dtype: torch.dtype, lead: tuple[int, ...], m: int, n: int, k: int, layouts: tuple[str, str],
    addend: Callable[[int, int], tuple[int, ...]],
) -> None:  # fmt: skip
    a, b = integers(*lead, m, k, dtype=dtype), integers(*lead, k, n, dtype=dtype)
    a, b = strided_copies(a).get(layouts[0], a), strided_copies(b).get(layouts[1], b)
    out_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    product = a.double() @ b.double()
    assert torch.equal(gemm(a, b, out_dtype=out_dtype).double(), product)
    c, bias = integers(*addend(m, n), dtype=dtype), integers(n, dtype=dtype)
    expected = torch.relu(2 * product - c.double() + bias.double())
    out = gemm(a, b, c, bias=bias, activation="relu", alpha=2.0, beta=-1.0, out_dtype=out_dtype)
    assert torch.equal(out.double(), expected)
    x, weight, bias = a.flatten(0, -2), torch.cat([b[(0,) * len(lead)], -b[(0,) * len(lead)]], -1).mT, integers(2 * n)
    gate, up = (x.double() @ weight.double().t() + bias.double()).chunk(2, -1)
    out = gated_linear(x, weight, bias.to(dtype), activation="relu")
    assert torch.equal(out, (torch.relu(gate) * up).to(dtype))


@pytest.mark.cpu_only("its kernel for this")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("n", [1, 3, 8, 10, 64, 65, 200])
def test_gradient_of_a_bias_alone_is_exact(dtype: torch.dtype, n: int) -> None:
    for rows in (0, 1, 7, 72, 73, 600, 1201):
        for layout in ("contiguous", "padded", "transposed", "every other"):
            # Sums that bfloat16 holds exactly.
            values = torch.randint(0, 2, (rows, n)).to(dtype) * (torch.arange(rows)[:, None] % 10 == 0).to(dtype)
            grad = strided_copies(values)[layout] if layout != "contiguous" else values
            bias = torch.zeros(n, dtype=dtype, requires_grad=True)
            linear(torch.ones(rows, 2, dtype=dtype), torch.ones(n, 2, dtype=dtype), bias).backward(grad)
            assert torch.equal(bias.grad.double(), values.double().sum(0)), (rows, layout)


@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_integer_mlp_gradients_are_exact(activation: str) -> None:
    x, w1, w2, b1, b2 = integers(80, 20), integers(50, 20), integers(30, 50), integers(50), integers(30)
    leaves = [t.clone().requires_grad_() for t in (x, w1, w2, b1, b2)]
    exact = [t.double().requires_grad_() for t in (x, w1, w2, b1, b2)]
    grad = integers(80, 30)
    mlp(*leaves, activation=activation).backward(grad)
    testing.reference_mlp(*exact, activation=activation).backward(grad.double())
    for leaf, expected in zip(leaves, exact, strict=True):
        assert torch.equal(leaf.grad.double(), expected.grad)


def test_special_values_pass_through(backend: str) -> None:
    x = torch.tensor([[math.nan], [math.inf], [-math.inf], [0.0], [-0.0]])
    one = torch.ones(1, 1)
    for activation in ACTIVATIONS:
        out, expected = linear(x, one, activation=activation), testing.reference_linear(x, one, activation=activation)
        # torch's gelu and silu are NaN at -inf, where the limit is 0; either is taken
        limit = torch.tensor([[math.nan], [math.inf], [0.0], [0.0], [0.0]])
        same = (out == expected) | (out.isnan() & expected.isnan()) | (out == limit)
        assert same.all(), (activation, out, expected)
    overflow = gemm(torch.full((1, 1), 300.0).half(), torch.full((1, 1), 300.0).half())
    assert overflow.item() == math.inf


def test_relu2_is_exact(backend: str) -> None:
    x, weight, bias = integers(37, 20), integers(2 * 29, 20), integers(2 * 29)
    for function, reference in (
        (linear, testing.reference_linear),
        (gated_linear, testing.reference_gated_linear),
    ):
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        exact = [t.double().requires_grad_() for t in (x, weight, bias)]
        out, expected = function(*leaves, activation="relu2"), reference(*exact, activation="relu2")
        assert torch.equal(out.double(), expected)
        grad = torch.randint(-1, 2, out.shape).float()
        gradients = torch.autograd.grad(out, leaves, grad)
        for actual, want in zip(gradients, torch.autograd.grad(expected, exact, grad.double()), strict=True):
            assert torch.equal(actual.double(), want)


def test_relu2_and_its_derivatives_of_special_values(backend: str) -> None:
    x = torch.tensor([[math.nan], [math.inf], [-math.inf], [0.0], [-0.0], [3.0], [-3.0]], requires_grad=True)
    y = linear(x, torch.ones(1, 1), activation="relu2")
    (fused,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (composed,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(composed[1:].sum(), x)
    for actual, expected in (
        (y, [math.nan, math.inf, 0, 0, 0, 9, 0]),
        (fused, [math.nan, math.inf, 0, 0, 0, 6, 0]),
        (composed, [math.nan, math.inf, 0, 0, 0, 6, 0]),
        (second[1:], [2, 0, 0, 0, 2, 0]),
    ):
        want = torch.tensor(expected, dtype=torch.float32)[:, None]
        torch.testing.assert_close(actual, want, rtol=0, atol=0, equal_nan=True)


# strides


def strided_copies(tensor: Tensor) -> dict[str, Tensor]:
    """The same numbers in memory laid out in other ways."""
    value = tensor.detach()
    padded = torch.zeros(*value.shape[:-1], value.shape[-1] + 3, dtype=value.dtype)
    padded[..., :-3] = value
    every_other = torch.zeros(*value.shape[:-1], value.shape[-1] * 2, dtype=value.dtype)
    every_other[..., ::2] = value
    shifted = torch.zeros(value.numel() + 1, dtype=value.dtype)[1:].view(value.shape).copy_(value)
    copies = {"padded": padded[..., :-3], "every other": every_other[..., ::2], "shifted": shifted}
    if value.dim() >= 2:
        copies["transposed"] = value.transpose(-1, -2).contiguous().transpose(-1, -2)
    if value.dim() >= 3:
        copies["outer inside"] = value.movedim(0, -1).contiguous().movedim(-1, 0)
    return copies


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_strides_change_nothing(op: str, dtype: torch.dtype) -> None:
    """Whole numbers, whose sums are exact in any order: any layout has to give the same bits, forward and backward."""
    shapes = shapes_of(op, (2,), 19, 21, 35)
    values = {name: integers(*shape, dtype=dtype) for name, shape in shapes.items()}

    def run(tensors: dict[str, Tensor]) -> list[Tensor]:
        leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
        out = OPS[op](**leaves, activation="relu")
        return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out))]

    expected = run(values)
    for name, value in values.items():
        for layout, copy in strided_copies(value).items():
            assert torch.equal(copy, value), layout
            for actual, wanted in zip(run({**values, name: copy}), expected, strict=True):
                assert torch.equal(actual, wanted), f"{name} {layout}"


def test_expanded_tensors() -> None:
    check("gemm", {"a": rand(1, 6).expand(4, 6), "b": rand(6, 1).expand(6, 5)})
    x, w = rand(6).expand(2, 4, 6), rand(5, 1).expand(5, 6)
    check("linear", {"input": x, "weight": w, "bias": rand(1).expand(5)}, activation="silu")
    check("gated_linear", {"input": x, "weight": rand(1, 1).expand(10, 6)})


def test_size_one_dims_with_odd_strides() -> None:
    a = torch.randn(40).as_strided((1, 1, 6), (13, 29, 1))
    b = torch.randn(60).as_strided((6, 1), (1, 31))
    torch.testing.assert_close(gemm(a, b), torch.matmul(a, b))
    torch.testing.assert_close(linear(a, b.t()), torch.nn.functional.linear(a, b.t()))


def test_expanded_gradient() -> None:
    """`sum` sends back a gradient with strides of zero."""
    tensors = arguments("linear", (2,), 3, 5, 4)
    OPS["linear"](**tensors, activation="gelu").sum().backward()
    exact = {name: t.detach().double().requires_grad_() for name, t in tensors.items()}
    testing.reference_linear(**exact, activation="gelu").sum().backward()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor.grad.double(), exact[name].grad, rtol=1e-5, atol=1e-5)


def test_many_batch_dims() -> None:
    shape = (2, 1, 2, 1, 2, 1, 2, 1)
    check("gemm", {"a": rand(*shape, 2, 3), "b": rand(*reversed(shape), 3, 2)})
    check("gemm", {"a": rand(*shape, 1, 2, 2, 3), "b": rand(*shape, 1, 2, 3, 2)})
    shape = (2, 1, 2, 1, 2, 1, 2, 1, 2, 1)
    with pytest.raises(RuntimeError, match="gemm: expected at most 8 batch dims that cannot be merged"):
        gemm(rand(*shape, 2, 3), rand(*reversed(shape), 3, 2))


@pytest.mark.sampled
@given(
    op=st.sampled_from(list(OPS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    lead=st.lists(st.integers(0, 3), max_size=2),
    m=st.integers(0, 80),
    n=st.integers(0, 60),
    k=st.integers(0, 60),
    f=st.integers(0, 50),
    activation=st.sampled_from(ACTIVATIONS),
    absent=st.sets(st.sampled_from(["c", "bias", "residual", "bias1", "bias2"])),
    frozen=st.sets(st.sampled_from(["a", "b", "c", "bias", "input", "weight", "residual", "weight1", "weight2"])),
    layout=st.sampled_from(["contiguous", "padded", "every other", "shifted", "transposed"]),
    alpha=st.sampled_from([1.0, -0.5, 0.0]),
    beta=st.sampled_from([1.0, 2.0, 0.0]),
)
@settings(max_examples=60)
def test_random_calls(
    backend: str, op: str, dtype: torch.dtype, lead: list[int], m: int, n: int, k: int, f: int, activation: str | None,
    absent: set[str], frozen: set[str], layout: str, alpha: float, beta: float,
) -> None:  # fmt: skip
    assume(backend == "cpu" or dtype != torch.float64)
    tensors = arguments(op, tuple(lead), m, n, k, f=f, dtype=dtype)
    for name in list(tensors):
        if name in absent:
            del tensors[name]
        else:
            tensors[name] = strided_copies(tensors[name]).get(layout, tensors[name].detach())
            tensors[name].requires_grad_(name not in frozen)
    options: dict[str, Any] = {"alpha": alpha, "beta": beta} if op == "gemm" else {}
    check(op, tensors, activation=activation, **options)


# determinism


@pytest.mark.cpu_only("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [5, 111])
@pytest.mark.parametrize("op", OPS)
def test_same_bits_again_and_on_any_number_of_threads(op: str, rows: int, dtype: torch.dtype) -> None:
    tensors = arguments(op, (3,), rows, 130, 96, f=90, dtype=dtype)

    def run() -> list[Tensor]:
        out = OPS[op](**tensors, activation="gelu")
        return [out.detach(), *torch.autograd.grad(out.square().sum(), list(tensors.values()))]

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        two, again = run(), run()
        torch.set_num_threads(1)
        one = run()
    finally:
        torch.set_num_threads(threads)
    for a, b, c in zip(two, again, one, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_a_row_does_not_depend_on_the_batch_it_comes_in(backend: str) -> None:
    x, w, bias = torch.randn(200, 300), torch.randn(100, 300), torch.randn(100)
    if backend == "cpu":  # where few rows of a column-major b are summed in an order of their own
        w = w.t().contiguous().t()
    # On a GPU into how many parts k is split depends on the rows, unless they must not change the result.
    with contextlib.nullcontext() if backend == "cpu" else cuda_ext.batch_invariant():
        whole = linear(x, w, bias, activation="gelu")
        for rows in (slice(0, 1), slice(37, 38), slice(50, 63), slice(3, 7), slice(90, 123)):
            assert torch.equal(linear(x[rows], w, bias, activation="gelu"), whole[rows])


@pytest.mark.cpu_only("its orders of sums")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("k", [70, 300, 1100, 2100])
def test_an_element_does_not_depend_on_the_rest_of_its_product(k: int, dtype: torch.dtype) -> None:
    """Sums are formed in one order for row-major b of several columns, and in one for a number of rows otherwise."""
    a, b = torch.randn(50, k, dtype=dtype), torch.randn(k, 200, dtype=dtype)
    whole = gemm(a, b)
    for m in (1, 2, 4, 5, 33):
        transposed = gemm(a[:m], strided_copies(b)["transposed"])
        for n in (2, 7, 8, 30, 200):
            for layout in ("padded", "every other"):
                assert torch.equal(gemm(a[:m], strided_copies(b[:, :n])[layout]), whole[:m, :n]), (m, n, layout)
            assert torch.equal(gemm(a[:m], strided_copies(b[:, :n])["transposed"]), transposed[:, :n]), (m, n)


# instruction sets

VARIANT_PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import json, torch
from gemm_common import OPS, arguments, check, integers
from cuda_ext._gemm import gemm
torch.manual_seed(int(sys.argv[2]))
for op in OPS:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        check(op, arguments(op, (2,), 37, 29, 270, f=19, dtype=dtype), activation="gelu")
for dtype in (torch.float32, torch.bfloat16, torch.float64):
    for m, n, k in ((70, 90, 300), (1, 77, 1100), (1, 1, 600), (3, 100, 800), (33, 50, 70), (500, 1, 300), (200, 9, 5)):
        a, b = integers(m, k, dtype=dtype), integers(k, n, dtype=dtype)
        exact = (a.double() @ b.double()).to(dtype)
        for layout in (b, b.t().contiguous().t()):
            assert torch.equal(gemm(a, layout), exact), (dtype, m, n, k)
print(json.dumps("ok"))
"""


@pytest.mark.sampled(cases=1, slow=True)
@pytest.mark.cpu_only("instruction sets")
@pytest.mark.parametrize("isa", ["generic", "avx2", *["avx512", "avx512bf16"] * torch.cpu._is_avx512_bf16_supported()])
def test_every_instruction_set(isa: str, run_python: Callable[..., Any], request: pytest.FixtureRequest) -> None:
    """Each but the widest, which every other test runs; on a processor that lacks one, the widest it has runs again."""
    seed = str(torch.randint(2**31, ()).item())
    result = run_python("-c", VARIANT_PROGRAM, str(request.path.parent), seed, CUDA_EXT_CPU_ISA=isa)
    assert result.returncode == 0, result.stdout
    assert json.loads(result.stdout.splitlines()[-1]) == "ok"


def test_gate_comes_first() -> None:
    x = torch.tensor([[2.0]])
    weight = torch.tensor([[-1.0], [3.0]])
    assert gated_linear(x, weight, activation="relu").item() == 0.0
    assert gated_linear(x, weight.flip(0), activation="relu").item() == -12.0


COUNT_THREADS = """
import os
import torch
from cuda_ext import gemm
a = torch.zeros(300, 300, dtype=torch.bfloat16)
torch.set_num_threads(3)
before = len(os.listdir("/proc/self/task"))
gemm(a, a)
print("more threads:", len(os.listdir("/proc/self/task")) > before)
"""


@pytest.mark.cpu_only("threads")
def test_work_is_shared_among_threads(run_python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """Built without OpenMP, torch's parallel_for would be a plain loop."""
    done = run_python("-c", COUNT_THREADS)
    assert done.returncode == 0 and "more threads: True" in done.stdout, done.stdout
