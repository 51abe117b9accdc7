"""`cuda_ext.nn.LinearCrossEntropyLoss` against plain PyTorch, with the arguments of PyTorch 2.13's module."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loss_common import operands, probabilities, with_ignored
from torch import Tensor, nn

import cuda_ext
from cuda_ext.nn import LinearCrossEntropyLoss


def composed(module: LinearCrossEntropyLoss, input: Tensor, target: Tensor) -> Tensor:
    shape = (*input.shape[:-1], module.num_classes, *module.out_features)
    z = module.linear(input).view(shape)
    options: dict[str, Any] = {"weight": module.weight, "label_smoothing": module.label_smoothing}
    index = -100 if module.ignore_index is None else module.ignore_index
    dim = input.dim() - 1
    loss = F.cross_entropy(
        z.movedim(dim, min(dim, 1)),
        target if not target.is_floating_point() else target.movedim(dim, min(dim, 1)),
        reduction=module.reduction,
        ignore_index=index,
        **options,
    )
    squares = module.z_loss * z.logsumexp(dim).square()
    if not target.is_floating_point():
        squares = squares[target != index] if module.reduction != "none" else squares * (target != index)
    return loss + (squares if module.reduction == "none" else getattr(squares, module.reduction)())


@pytest.mark.parametrize("kind", ["indices", "probabilities"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("out_features", [(), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_matches_the_composition(weighted: bool, out_features: tuple[int, ...], reduction: str, kind: str) -> None:
    weight = torch.rand(11, dtype=torch.float64) + 0.1 if weighted else None
    options: dict[str, Any] = {"reduction": reduction, "weight": weight, "label_smoothing": 0.2, "z_loss": 0.1}
    options |= {"ignore_index": 4} if kind == "indices" else {}
    module = LinearCrossEntropyLoss(5, 11, out_features=out_features, bias=True, dtype=torch.float64, **options)
    input = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    if kind == "indices":
        target = with_ignored(torch.randint(11, (7, *out_features)), ignore_index=4)
    else:
        target = probabilities((7, *out_features), 11, torch.float64).movedim(-1, 1)
    leaves = [input, *module.parameters()]
    losses = [module(input, target), composed(module, input, target)]
    assert losses[0].shape == losses[1].shape
    torch.testing.assert_close(*losses)
    gradient = torch.randn_like(losses[0])
    torch.testing.assert_close(*(torch.autograd.grad(loss, leaves, gradient) for loss in losses))


def test_arguments_of_the_op() -> None:
    tensors = operands((4, 6), 9, 5)
    options: dict[str, Any] = {"softcap": 3.0, "scale": 0.5, "z_loss": 0.1, "label_smoothing": 0.1, "reduction": "sum"}
    module = LinearCrossEntropyLoss(5, 9, method="recompute", memory_limit=1000, **options)
    module.linear.weight = nn.Parameter(tensors["linear_weight"].detach())
    expected = cuda_ext.linear_cross_entropy(**tensors, **options, method="recompute", memory_limit=1000)
    assert torch.equal(module(tensors["input"], tensors["target"]), expected)
    assert "softcap=3.0" in repr(module) and "label_smoothing=0.1" in repr(module)


def test_the_arguments_and_the_state_are_those_of_torch() -> None:
    """As documented; with a PyTorch that has the module, as it is."""
    names = ["in_features", "num_classes", "out_features", "bias", "device", "dtype", "reduction", "weight"]
    names += ["ignore_index", "label_smoothing", "options"]
    parameters = inspect.signature(LinearCrossEntropyLoss).parameters
    assert list(parameters)[: len(names)] == names
    assert [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD] == names[:2]
    settings: dict[str, Any] = {"out_features": (2,), "bias": True, "weight": torch.rand(4)}
    module = LinearCrossEntropyLoss(3, 4, **settings)
    shapes = {"weight": (4,), "linear.weight": (8, 3), "linear.bias": (8,)}
    assert {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()} == shapes
    assert list(LinearCrossEntropyLoss(3, 4).state_dict()) == ["linear.weight"]
    if hasattr(nn, "LinearCrossEntropyLoss"):
        theirs = nn.LinearCrossEntropyLoss(3, 4, **settings)
        signature = inspect.signature(nn.LinearCrossEntropyLoss).parameters
        assert [(n, p.default, p.kind) for n, p in signature.items()] == [
            (n, p.default, p.kind) for n, p in parameters.items() if n in signature
        ]
        theirs.load_state_dict(module.state_dict())
        input, target = torch.randn(6, 3), torch.randint(4, (6, 2))
        torch.testing.assert_close(module(input, target), theirs(input, target))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weight": torch.ones(3)}, r"expected weight of shape \(4,\), got \(3,\)"),
        ({"label_smoothing": 1.5}, "label_smoothing"),
        ({"reduction": "average"}, "expected reduction 'mean', 'sum' or 'none', got 'average'"),
        ({"softcap": -1.0}, "softcap"),
        ({"scale": math.nan}, "scale"),
        ({"method": "fast"}, "method"),
        ({"reduction": "none", "method": "forward"}, "method"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        LinearCrossEntropyLoss(3, 4, **arguments)


def test_wrong_inputs() -> None:
    input = torch.randn(6, 3)
    with pytest.raises(RuntimeError, match="expected no ignore_index with target probabilities, got 2"):
        LinearCrossEntropyLoss(3, 4, ignore_index=2)(input, probabilities((6,), 4))
    several = LinearCrossEntropyLoss(3, 4, out_features=(2, 5))
    for given, shape in ((input, (6, 10)), (input[None], (1, 2, 5)), (input, (6, 2))):
        with pytest.raises(RuntimeError, match=r"expected input \(N, K\) and target \('N', 2, 5\)"):
            several(given, torch.zeros(shape, dtype=torch.int64))
