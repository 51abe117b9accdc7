"""The passes between the products of experts, on every backend, against their definitions in float64."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from gemm_common import ACTIVATIONS, DTYPES, integers, rand
from test_grouped_mm import random_strides
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import cuda_ext._rules  # noqa: F401
from cuda_ext._load import ops
from cuda_ext.testing.references import hidden_of

combine = ops.combine_experts.default
gate_backward = ops.experts_gate_backward.default
# Parts of a vector, of a warp's 512 bytes, several of them, and rows that are not aligned.
WIDTHS = (1, 7, 8, 33, 64, 256, 264, 515, 1100)


def permutation(size: int) -> tuple[Tensor, Tensor]:
    """Pairs of rows, and rows of pairs."""
    pairs = torch.randperm(size)
    return pairs, torch.empty_like(pairs).scatter_(0, pairs, torch.arange(size))


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def eps_of(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def of_rounding(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest error of one rounding."""
    return value.detach().abs() * (eps_of(dtype) / 2) + torch.finfo(dtype).smallest_normal * eps_of(dtype)


def random_weights(*shape: int, dtype: torch.dtype) -> Tensor:
    """Routing weights of any dtype, also in an order of their own."""
    weights = (torch.rand(shape) + 0.1).to(random.choice(DTYPES[:3] if dtype != torch.float64 else DTYPES))
    return random_strides(weights)


def assert_within(actual: Tensor, expected: Tensor, bound: Tensor) -> None:
    error = (actual.double() - expected).abs()
    assert actual.shape == expected.shape and bool((error <= bound).all()), (error - bound).max()


@pytest.mark.every_backend
@pytest.mark.sampled(cases=12)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("top_k", range(1, 9))
@pytest.mark.parametrize("n", WIDTHS)
def test_combination(n: int, top_k: int, dtype: torch.dtype) -> None:
    """Up to the roundings of float32 sums, and one to the dtype. Rows of no token do not matter."""
    tokens = random.choice((1, 5, 37))
    rows = permutation(tokens * top_k + 3)[1][: tokens * top_k].view(tokens, top_k)
    results = torch.full((tokens * top_k + 3, n), float("nan"), dtype=dtype)
    results[rows] = rand(tokens, top_k, n, dtype=dtype, grad=False)
    results = random_strides(results)
    weights = random.choice((None, random_weights(tokens, top_k, dtype=dtype)))
    out = combine(results, rows, weights)
    assert out.dtype == dtype and out.is_contiguous()
    terms = results[rows].double() * (1 if weights is None else weights.double().unsqueeze(-1))
    expected, size = terms.sum(1), terms.abs().sum(1)
    assert_within(out, expected, of_rounding(expected, dtype) + top_k * eps_of(sum_dtype(dtype)) * size)


@pytest.mark.every_backend
@pytest.mark.sampled(cases=6)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", (33, 264))
def test_combination_of_integers_is_exact(n: int, dtype: torch.dtype) -> None:
    rows = permutation(60)[1].view(12, 5)
    results = integers(60, n, dtype=dtype)
    weights = 2.0 ** torch.randint(-2, 3, (12, 5))
    expected = (results.double()[rows] * weights.unsqueeze(-1)).sum(1)
    assert combine(results, rows, weights).equal(expected.to(dtype))
    assert combine(results, rows).equal(results.double()[rows].sum(1).to(dtype))


@pytest.mark.every_backend
def test_a_row_that_several_tokens_read() -> None:
    results, rows = integers(3, 40), torch.tensor([[0, 0], [2, 0], [1, 2]])
    assert combine(results, rows).equal(results[rows].sum(1))


def test_combination_has_the_bits_of_pytorch() -> None:
    """Where products are exact: bfloat16 with weights of 16 bits."""
    results, rows = rand(60, 77, dtype=torch.bfloat16, grad=False), permutation(60)[1].view(12, 5)
    weights = torch.rand(12, 5).bfloat16()
    expected = torch.zeros(12, 77)
    for i in range(5):
        expected = expected + results[rows[:, i]].float() * weights[:, i : i + 1].float()
    assert combine(results, rows, weights).equal(expected.bfloat16())


def gate_case(
    rows: int, n: int, gated: bool, dtype: torch.dtype, top_k: int
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The arguments, and the weight of each row."""
    product = random_strides(rand(rows, n * (1 + gated), dtype=dtype, grad=False))
    grad = random_strides(rand(rows, n, dtype=dtype, grad=False))
    weights, pairs = random_weights(rows // top_k, top_k, dtype=dtype), permutation(rows)[0]
    return (grad, product, weights, pairs), weights.reshape(-1)[pairs].double().unsqueeze(1)


@pytest.mark.every_backend
@pytest.mark.sampled(cases=24)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("n", WIDTHS)
def test_gradient_of_the_gate(n: int, gated: bool, activation: str | None, dtype: torch.dtype) -> None:
    top_k = random.randint(1, 8)
    rows = top_k * random.choice((1, 7))
    tensors, weight = gate_case(rows, n, gated, dtype, top_k)
    grad, product = (t.double() for t in tensors[:2])
    product.requires_grad_()
    hidden = hidden_of(product, activation, gated)
    (expected,) = torch.autograd.grad(hidden, product, grad * weight)
    options: dict[str, Any] = {"activation": activation, "gated": gated}
    grad_product, weighted, grad_weights = gate_backward(*tensors, **options, output_mask=[True] * 3)
    assert (grad_product.dtype, weighted.dtype, grad_weights.dtype) == (dtype, dtype, sum_dtype(dtype))
    assert grad_weights.shape == tensors[2].shape
    # One rounding to the dtype; before it a few ulp of float32 of the activation, which is at most about 10.
    small = 64 * eps_of(sum_dtype(dtype))
    square = (1 + product.detach().abs()).square().amax(1, keepdim=True)
    size = (grad * weight).abs() * square
    both = torch.cat([size, size], 1) if gated else size
    assert_within(grad_product, expected, of_rounding(expected, dtype) + small * both)
    wanted = (hidden * weight).detach()
    assert_within(weighted, wanted, of_rounding(wanted, dtype) + small * weight * square)
    dots = (grad * hidden).detach()
    found = grad_weights.reshape(-1)[tensors[3]]
    assert_within(found, dots.sum(1), small * (size / weight).sum(1) + n * eps_of(sum_dtype(dtype)) * dots.abs().sum(1))


@pytest.mark.every_backend
@pytest.mark.sampled(cases=4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", [(i & 1 > 0, i & 2 > 0, i & 4 > 0) for i in range(8)], ids=str)
def test_only_what_is_wanted(mask: tuple[bool, bool, bool], dtype: torch.dtype) -> None:
    tensors, _ = gate_case(12, 40, True, dtype, 3)
    options: dict[str, Any] = {"activation": "silu", "gated": True}
    everything = gate_backward(*tensors, **options, output_mask=(True,) * 3)
    for found, expected, is_wanted in zip(
        gate_backward(*tensors, **options, output_mask=mask), everything, mask, strict=True
    ):
        assert found.equal(expected) if is_wanted else found.shape == (0,)


@pytest.mark.every_backend
def test_integers_through_relu_are_exact() -> None:
    grad, product, (pairs, rows) = integers(24, 72), integers(24, 144), permutation(24)
    weights = 2.0 ** torch.randint(-2, 3, (8, 3))
    weight = weights.view(-1)[pairs].unsqueeze(1)
    gate, up = product.chunk(2, 1)
    hidden = gate.relu() * up
    found = gate_backward(grad, product, weights, pairs, activation="relu", gated=True, output_mask=[True] * 3)
    assert found[0].equal(torch.cat([weight * grad * up * (gate > 0), weight * grad * gate.relu()], 1))
    assert found[1].equal(weight * hidden)
    assert found[2].equal((grad * hidden).sum(1)[rows].view(8, 3))


def test_sizes_of_zero() -> None:
    """No tokens, no experts of a token, no columns."""
    for tokens, top_k, n in ((0, 2, 5), (3, 0, 5), (3, 2, 0)):
        rows = permutation(tokens * top_k)[1].view(tokens, top_k)
        assert combine(torch.randn(tokens * top_k, n), rows).equal(torch.zeros(tokens, n))
        weights, pairs = torch.rand(tokens, top_k), rows.view(-1)
        options: dict[str, Any] = {"activation": "silu", "gated": True, "output_mask": [True] * 3}
        tensors = torch.randn(len(pairs), n), torch.randn(len(pairs), 2 * n)
        grad_product, weighted, grad_weights = gate_backward(*tensors, weights, pairs, **options)
        assert (grad_product.shape, weighted.shape) == (tensors[1].shape, tensors[0].shape)
        assert grad_weights.equal(torch.zeros(tokens, top_k)) or n > 0


def test_as_ops_of_pytorch() -> None:
    """Schemas, fake kernels, vmap, no gradient by accident."""
    results, rows = torch.randn(6, 5), permutation(6)[1].view(3, 2)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(combine, (results, rows, torch.rand(3, 2)), test_utils=checks)
    tensors, _ = gate_case(6, 5, True, torch.bfloat16, 2)
    options: dict[str, Any] = {"activation": "gelu", "gated": True, "output_mask": [True, False, True]}
    torch.library.opcheck(gate_backward, tensors, options, test_utils=checks)
    expected = gate_backward(*tensors, **options)
    with FakeTensorMode() as mode:
        found = gate_backward(*(mode.from_tensor(each) for each in tensors), **options)
    for fake, real in zip(found, expected, strict=True):
        assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())
    batch = torch.randn(2, 6, 5)
    assert torch.vmap(lambda x: combine(x, rows))(batch).equal(torch.stack([combine(x, rows) for x in batch]))
    with pytest.raises(RuntimeError, match="derivative for cuda_ext::combine_experts is not implemented"):
        combine(results.requires_grad_(), rows).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_gathered_rows_of_fp8(dtype: torch.dtype) -> None:
    """Bit for bit, NaN too; also of rows that are not contiguous."""
    rows, index = torch.randint(0, 256, (7, 33), dtype=torch.uint8), torch.tensor([6, 0, 0, 3])
    for data in (rows, rows[:, 5:]):
        gathered = ops.gather_fp8(data.view(dtype), index)
        assert gathered.dtype == dtype and gathered.view(torch.uint8).equal(data[index])
    checks = ("test_faketensor", "test_aot_dispatch_dynamic")  # test_schema multiplies arguments, which FP8 cannot
    found = torch.vmap(lambda each: ops.gather_fp8(each, index))(torch.stack([rows, rows + 1]).view(dtype))
    assert found.view(torch.uint8).equal(torch.stack([rows[index], (rows + 1)[index]]))
    torch.library.opcheck(ops.gather_fp8.default, (torch.randn(7, 33).to(dtype), index), test_utils=checks)
    with pytest.raises(RuntimeError, match="gather_fp8: expected rows of two dims and dtype float8_e4m3fn or"):
        ops.gather_fp8(rows, index)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(4, 3), torch.tensor([[0, 4]])), "combine_experts: expected rows from 0 to 3, got 4"),
        ((torch.zeros(4, 3), torch.tensor([[0, -1]])), "combine_experts: expected rows from 0 to 3, got -1"),
        ((torch.zeros(4, 3), torch.zeros(1, 2)), r"expected rows of 2 dims and dtype int64, got \(1, 2\) of float32"),
        ((torch.zeros(4), torch.tensor([[0]])), r"expected results of two dims, got \(4,\)"),
        (
            (torch.zeros(4, 3), torch.tensor([[0, 1]]), torch.zeros(2, 1)),
            r"expected weights of shape \(1, 2\) to match rows, got \(2, 1\)",
        ),
        (
            (torch.zeros(4, 3), torch.tensor([[0, 1]]), torch.zeros(1, 2).int()),
            "expected weights of dtype .*, got int32",
        ),
    ],
)
def test_errors_of_the_combination(arguments: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        combine(*arguments)


def test_errors_of_the_gradient() -> None:
    def call(grad: Tensor, product: Tensor, weights: Tensor, pairs: Tensor, activation: str = "silu") -> None:
        gate_backward(grad, product, weights, pairs, activation=activation, gated=True, output_mask=[True] * 3)

    grad, product, weights, pairs = torch.zeros(4, 3), torch.zeros(4, 6), torch.zeros(2, 2), torch.arange(4)
    with pytest.raises(RuntimeError, match=r"expected product of shape \(4, 6\) for grad_hidden \(4, 3\), got"):
        call(grad, grad, weights, pairs)
    with pytest.raises(RuntimeError, match="expected pairs from 0 to 3, got 4"):
        call(grad, product, weights, pairs + 1)
    with pytest.raises(RuntimeError, match=r"expected weights of 4 elements, one for each row, got \(1, 2\)"):
        call(grad, product, weights[:1], pairs)
    with pytest.raises(RuntimeError, match="expected activation to be"):
        call(grad, product, weights, pairs, "swish")
