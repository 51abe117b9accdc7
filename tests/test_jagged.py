"""The projections and attention on jagged nested tensors, against one call for each sequence."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from gemm_common import OPS, arguments
from torch import Tensor

import cuda_ext
from cuda_ext._gemm import linear, mlp
from cuda_ext.attention import flash_attention
from cuda_ext.testing import reference_attention_varlen, reference_mlp


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
    out = mlp(x, weight, weight, residual=x)
    torch.testing.assert_close(out.values(), reference_mlp(x.values(), weight, weight, residual=x.values()))


def test_refusals() -> None:
    x = jagged([torch.randn(n, 5) for n in (2, 4)])
    weight = torch.randn(5, 5)
    with pytest.raises(RuntimeError, match="linear: expected both input and residual to be jagged nested tensors"):
        linear(x, weight, residual=torch.randn(5))
    with pytest.raises(RuntimeError, match="linear: expected both input and residual to be jagged nested tensors"):
        linear(torch.randn(6, 5), weight, residual=x)
    with pytest.raises(RuntimeError, match="linear: expected residual with the same offsets as input"):
        linear(x, weight, residual=jagged([torch.randn(n, 5) for n in (4, 2)]))
    holes = torch.nested.narrow(torch.randn(2, 6, 5), 1, torch.tensor([0, 1]), torch.tensor([2, 4]), torch.jagged)
    with pytest.raises(RuntimeError, match="linear: expected input to be contiguous"):
        linear(holes, weight)


ATTENTION_LENGTHS = (3, 0, 17, 1)


def attention_inputs(heads: tuple[int, int] = (4, 2)) -> list[list[Tensor]]:
    """Queries, keys and values of each sequence."""
    numbers = {"dtype": torch.float64, "requires_grad": True}
    return [
        [torch.randn(length, own_heads, dim, **numbers) for length in ATTENTION_LENGTHS]
        for own_heads, dim in ((heads[0], 8), (heads[1], 8), (heads[1], 5))
    ]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "softcap": 3.0}, {"window": (4, 2), "scale": 0.3, "alibi_slopes": torch.rand(4)}]
)
def test_attention(options: dict[str, Any], compiled: bool) -> None:
    inputs = attention_inputs()
    leaves = [leaf for sequences in inputs for leaf in sequences]
    offsets = torch.tensor([0, *itertools.accumulate(ATTENTION_LENGTHS)])
    given = [torch.nested.nested_tensor_from_jagged(torch.cat(sequences), offsets) for sequences in inputs]
    attend = torch.compile(flash_attention, fullgraph=True, backend="aot_eager") if compiled else flash_attention
    out, lse = attend(*given, return_lse=True, **options)
    assert out.shape[:2] == given[0].shape[:2] and out.shape[2:] == (4, 5)
    assert lse.shape == (4, 4, out.shape[1])
    torch.testing.assert_close((out + given[0][..., :5]).values(), out.values() + given[0].values()[..., :5])
    each = [
        flash_attention(*(x.unsqueeze(0) for x in of_one), return_lse=True, **options)
        for of_one in zip(*inputs, strict=True)
    ]
    expected_out = torch.cat([one.squeeze(0) for one, _ in each])
    expected_lse = torch.cat([one.squeeze(0) for _, one in each], -1)
    torch.testing.assert_close(out.values(), expected_out)
    torch.testing.assert_close(lse.values(), expected_lse)
    actual = torch.autograd.grad(out.values().sin().sum() + lse.values().sum(), leaves)
    expected = torch.autograd.grad(expected_out.sin().sum() + expected_lse.sum(), leaves)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_attention_to_other_sequences() -> None:
    queries, keys = ([torch.randn(n, 2, 8) for n in lengths] for lengths in ((3, 5), (7, 2)))
    key = jagged(keys)
    out = flash_attention(jagged(queries), key, key)
    for a, query, own in zip(out.unbind(), queries, keys, strict=True):
        torch.testing.assert_close(a, flash_attention(query[None], own[None], own[None])[0])


def test_attention_with_a_bias_and_a_mask() -> None:
    inputs = attention_inputs()
    offsets = jagged(inputs[0]).offsets()
    query, key, value = (torch.nested.nested_tensor_from_jagged(torch.cat(each), offsets) for each in inputs)
    bias = torch.randn(4, 1, 17, 17, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(17, 17) < 0.8
    out = flash_attention(query, key, value, attn_bias=bias, attn_mask=mask)
    cu = query.offsets().int()
    expected = reference_attention_varlen(
        query.values(), key.values(), value.values(), cu, cu, attn_bias=bias, attn_mask=mask
    )
    torch.testing.assert_close(out.values(), expected)


def test_refusals_of_attention() -> None:
    x = jagged([torch.randn(n, 2, 8) for n in (3, 5)])
    with pytest.raises(RuntimeError, match=r"flash_attention: expected query, key .*, got key with 4 .*not nested"):
        flash_attention(x, torch.randn(2, 5, 2, 8), x)
    for dense in (torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 8, requires_grad=True)):
        with pytest.raises(RuntimeError, match=r"flash_attention: expected .* nested tensors, got a dense query"):
            flash_attention(dense, x, x)
    with pytest.raises(RuntimeError, match=r"flash_attention: expected query, key and value .*, got query"):
        flash_attention(x.transpose(1, 2), x, x)
    with pytest.raises(RuntimeError, match=r"flash_attention: expected query, key and value .*torch.strided"):
        strided = torch.nested.nested_tensor([torch.randn(n, 2, 8) for n in (3, 5)], layout=torch.strided)
        flash_attention(strided, strided, strided)
    with pytest.raises(RuntimeError, match="flash_attention: expected value with the same offsets as key"):
        flash_attention(x, x, jagged([torch.randn(n, 2, 8) for n in (5, 3)]))


# FP8


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("module", ["Linear", "MLP", "GatedMLP"])
def test_layers_in_fp8(module: str, compiled: bool) -> None:
    """As of the packed rows, bit for bit."""
    sizes = {"Linear": (40, 40)}.get(module, (40, 24))
    layer = getattr(cuda_ext.nn, module)(*sizes, fp8=random.choice(cuda_ext.fp8.RECIPES))
    sequences = [torch.randn(length, 40, requires_grad=True) for length in (3, 1, 6)]
    leaves = [*sequences, *layer.parameters()]
    call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    for adds in (False, True):
        x, rows = jagged(sequences), torch.cat(sequences)
        out, expected = call(x, residual=x if adds else None), layer(rows, residual=rows if adds else None)
        assert out.is_nested and out.shape == x.shape and out.values().equal(expected)
        found = torch.autograd.grad(out.values().square().sum(), leaves)
        wanted = torch.autograd.grad(expected.square().sum(), leaves)
        assert all(map(torch.equal, found, wanted))


def test_converted_layers_and_other_jagged_dims() -> None:
    layer = torch.nn.Linear(40, 24)
    cuda_ext.fp8.convert(layer, least_features=1)
    x = jagged([torch.randn(length, 3, 40) for length in (2, 5)])
    out = layer(x)
    assert out.values().equal(layer(x.values())) and (out + out).shape == (2, x.shape[1], 3, 24)
    turned = x.transpose(1, 2)
    assert all(map(torch.equal, layer(turned).unbind(), (each.transpose(0, 1) for each in out.unbind())))
    gated = jagged([torch.randn(length, 80) for length in (2, 5)])
    options: dict[str, Any] = {"input_activation": "silu", "input_gated": True}
    assert layer(gated, **options).values().equal(layer(gated.values(), **options))


def test_refusals_in_fp8() -> None:
    message = r"fp8\.linear: expected a nested input of layout torch\.jagged, contiguous, .* call contiguous\(\)"
    weight = torch.randn(24, 5)
    holes = torch.nested.narrow(torch.randn(2, 6, 5), 1, torch.tensor([0, 1]), torch.tensor([2, 4]), torch.jagged)
    last = jagged([torch.randn(n, 5) for n in (2, 4)]).transpose(1, 2)
    strided = torch.nested.nested_tensor([torch.randn(n, 5) for n in (2, 4)])
    for x in (holes, last, strided):
        with pytest.raises(RuntimeError, match=message):
            cuda_ext.fp8.linear(x, weight)
    with pytest.raises(RuntimeError, match=r"fp8\.linear: expected input \(..., K\) and weight \(N, K\), got \(6, 7\)"):
        cuda_ext.fp8.linear(jagged([torch.randn(n, 7) for n in (2, 4)]), weight)
