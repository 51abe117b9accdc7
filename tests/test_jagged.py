"""The projections on jagged nested tensors, against one call for each sequence."""

from __future__ import annotations

import pytest
import torch
from gemm_common import OPS, arguments
from torch import Tensor

from cuda_ext.gemm import linear


def jagged(sequences: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(sequences, layout=torch.jagged)


@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("op", [op for op in OPS if op != "gemm"])
def test_is_a_call_for_each_sequence(op: str, activation: str | None) -> None:
    tensors = arguments(op, (), 3, 4, 5, dtype=torch.float64)
    tensors.pop("residual", None)
    del tensors["input"]
    sequences = [torch.randn(length, 5, dtype=torch.float64, requires_grad=True) for length in (3, 1, 6)]

    def grads(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out.sin().sum(), [*sequences, *tensors.values()])

    actual = OPS[op](jagged(sequences), **tensors, activation=activation)
    assert actual.is_nested
    each = [OPS[op](sequence, **tensors, activation=activation) for sequence in sequences]
    for a, b in zip(actual.unbind(), each, strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(grads(actual.values()), grads(torch.cat(each)), strict=True):
        torch.testing.assert_close(a, b)
    with torch.no_grad():
        assert torch.equal(OPS[op](jagged(sequences), **tensors, activation=activation).values(), actual.values())


def test_residual() -> None:
    weight = torch.randn(5, 5, requires_grad=True)
    x = jagged([torch.randn(n, 5) for n in (2, 4)]).requires_grad_()
    out = linear(x, weight, activation="relu", residual=x)
    torch.testing.assert_close(out.values(), torch.relu(x.values() @ weight.mT) + x.values())
    out.values().sum().backward()
    assert x.grad.is_nested and weight.grad.shape == weight.shape


def test_refusals() -> None:
    x = jagged([torch.randn(n, 5) for n in (2, 4)])
    weight = torch.randn(5, 5)
    with pytest.raises(RuntimeError, match="linear: expected input and residual to be jagged nested tensors both"):
        linear(x, weight, residual=torch.randn(5))
    with pytest.raises(RuntimeError, match="linear: expected input and residual to be jagged nested tensors both"):
        linear(torch.randn(6, 5), weight, residual=x)
    with pytest.raises(RuntimeError, match="linear: expected residual of the same sequences as input"):
        linear(x, weight, residual=jagged([torch.randn(n, 5) for n in (4, 2)]))
    holes = torch.nested.narrow(torch.randn(2, 6, 5), 1, torch.tensor([0, 1]), torch.tensor([2, 4]), torch.jagged)
    with pytest.raises(RuntimeError, match="linear: expected input to be contiguous"):
        linear(holes, weight)
