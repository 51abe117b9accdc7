"""`filter_gradients`: classes that get no gradient to speak of are left out of the products of backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gradient_slots_common import Reducer
from loss_common import operands
from torch import Tensor

import cuda_ext

ROWS, CLASSES, FEATURES, LIKELY = 150, 520, 32, 40


def trained(dtype: torch.dtype, bias: bool = False) -> dict[str, Tensor]:
    """Operands of which softmax is on the first LIKELY classes, and targets among these."""
    tensors = operands((ROWS,), CLASSES, FEATURES, dtype, bias=bias)
    with torch.no_grad():
        tensors["input"][:, 0] = 8.0
        tensors["linear_weight"][:, 0] = -4.0
        tensors["linear_weight"][:LIKELY, 0] = 0.0
    tensors["target"] = torch.randint(LIKELY, (ROWS,))
    return tensors


def gradients(tensors: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    leaves = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    loss = cuda_ext.linear_cross_entropy(**tensors, **options)
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


@pytest.mark.every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", ["forward", "recompute"])
@pytest.mark.parametrize("memory_limit", [None, 50_000])
def test_only_what_vanishes_is_left_out(dtype: torch.dtype, method: str, memory_limit: int | None) -> None:
    tensors = trained(dtype, bias=True)
    options = {"method": method, "memory_limit": memory_limit, "reduction": "sum", "scale": 0.8}
    exact = gradients(tensors, **options)
    filtered = gradients(tensors, **options, filter_gradients=True)
    least = torch.finfo(dtype).eps / 32 * 0.8
    eps = torch.finfo(dtype).eps
    for name, of_operand in (("input", "linear_weight"), ("linear_weight", "input")):
        largest = float(tensors[of_operand].detach().abs().max())
        terms = CLASSES if name == "input" else ROWS
        limit = terms * least * largest + 2 * eps * float(exact[name].abs().max())
        torch.testing.assert_close(filtered[name], exact[name], rtol=0, atol=limit)
    assert exact["linear_weight"][LIKELY:].ne(0).any(), "nothing to leave out"
    assert filtered["linear_weight"][LIKELY:].eq(0).all()
    torch.testing.assert_close(filtered["linear_bias"], exact["linear_bias"], rtol=0, atol=0)


@pytest.mark.every_backend
def test_without_a_reason_nothing_is_left_out() -> None:
    """Every class has its part of a flat softmax; the threshold is relative to the factor of a row."""
    tensors = operands((ROWS,), 64, FEATURES, torch.bfloat16)
    with torch.no_grad():
        tensors["linear_weight"] *= 0.01
    exact, filtered = (gradients(tensors, filter_gradients=on) for on in (False, True))
    for name in exact:
        torch.testing.assert_close(filtered[name], exact[name], rtol=0, atol=0)


@pytest.mark.every_backend
@pytest.mark.parametrize("method", ["forward", "recompute"])
def test_no_row_counts(method: str) -> None:
    tensors = {**trained(torch.float32), "target": torch.full((ROWS,), -100)}
    for gradient in gradients(tensors, method=method, filter_gradients=True, reduction="sum").values():
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=0)


def test_nan_counts() -> None:
    tensors = trained(torch.float32)
    with torch.no_grad():
        tensors["input"][3] = torch.nan
    found = gradients(tensors, filter_gradients=True)
    assert found["input"][3].isnan().all() and not found["input"][4].isnan().any()
    assert found["linear_weight"].isnan().all()


@pytest.mark.every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", ["forward", "recompute"])
@pytest.mark.parametrize("memory_limit", [None, 50_000])
def test_gradients_go_to_slots(dtype: torch.dtype, method: str, memory_limit: int | None) -> None:
    tensors = trained(dtype)
    options: dict[str, Any] = {"method": method, "memory_limit": memory_limit, "filter_gradients": True}
    expected = gradients(tensors, **options)["linear_weight"].double()
    eps = torch.finfo(dtype).eps * float(expected.abs().max())
    reducer = Reducer(tensors["linear_weight"])
    for passes in (1, 2):
        reducer.accumulate(cuda_ext.linear_cross_entropy(**tensors, **options))
        torch.testing.assert_close(reducer.views[0].double(), passes * expected, rtol=0, atol=2 * passes * eps)
    assert reducer.synchronize(cuda_ext.linear_cross_entropy(**tensors, **options), 0.25) == [True]
    torch.testing.assert_close(reducer.views[0].double(), 0.75 * expected, rtol=0, atol=4 * eps)


def test_log_probabilities_take_it() -> None:
    tensors = trained(torch.float32)
    leaves = [tensors["input"], tensors["linear_weight"]]
    found = []
    for on in (False, True):
        log_prob = cuda_ext.linear_log_prob(**tensors, filter_gradients=on)
        found.append(torch.autograd.grad(log_prob.sum(), leaves))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-4)
    assert found[0][1][LIKELY:].ne(0).any() and found[1][1][LIKELY:].eq(0).all()


def test_compiled() -> None:
    tensors = trained(torch.float32)
    compiled = torch.compile(cuda_ext.linear_cross_entropy, fullgraph=True, backend="aot_eager")
    (found,) = torch.autograd.grad(compiled(**tensors, filter_gradients=True), tensors["linear_weight"])
    torch.testing.assert_close(found, gradients(tensors, filter_gradients=True)["linear_weight"])
    assert found[LIKELY:].eq(0).all()
