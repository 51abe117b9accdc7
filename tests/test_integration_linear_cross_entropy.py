"""cuda_ext.integrations.linear_cross_entropy: PyTorch 2.13's function; on an older PyTorch, one with its arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loss_common import operands, probabilities, with_ignored
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from cuda_ext.integrations import linear_cross_entropy as integration

HAS = hasattr(F, "linear_cross_entropy")


def documented(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
) -> Tensor:
    """What PyTorch's documentation says that it is equivalent to."""
    classes, *out_features, features = linear_weight.shape
    bias = None if linear_bias is None else linear_bias.reshape(-1)
    logits = F.linear(input, linear_weight.reshape(-1, features), bias)
    logits = logits.reshape(*input.shape[:-1], classes, *out_features)
    index = -100 if ignore_index is None else ignore_index
    return F.cross_entropy(logits, target, weight, None, index, None, reduction, label_smoothing)


@pytest.fixture
def function(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """PyTorch's function before it is replaced."""
    if not HAS:
        monkeypatch.setattr(F, "linear_cross_entropy", documented, raising=False)
    integration.calls(reset=True)
    yield F.linear_cross_entropy
    assert not integration.is_enabled()


def call(**arguments: Any) -> Tensor:
    found: Tensor = F.linear_cross_entropy(
        arguments.pop("input"), arguments.pop("linear_weight"), arguments.pop("target"), **arguments
    )
    return found


def both(**arguments: Any) -> tuple[Tensor, Tensor]:
    with integration.enable():
        ours = call(**arguments)
    return ours, call(**arguments)


SERVED: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "ignored": {"ignore_index": 3},
    "class weights": {"weight": torch.rand(11, dtype=torch.float64) + 0.1},
    "smoothed": {"label_smoothing": 0.2},
    "options": {"options": nn.LinearCrossEntropyOptions() if HAS else object()},
}


@pytest.mark.parametrize("lead", [(), (7,)], ids=str)
@pytest.mark.parametrize("options", SERVED)
def test_served(function: Any, options: str, lead: tuple[int, ...]) -> None:
    tensors = operands(lead, 11, 5, torch.float64, bias=True)
    if lead:
        tensors["target"] = with_ignored(tensors["target"], SERVED[options].get("ignore_index", -100))
    else:
        tensors["target"].fill_(5)  # of one ignored row the mean is NaN
    ours, theirs = both(**tensors, **SERVED[options])
    assert integration.calls() == {"served": {"linear_cross_entropy": 1}, "refused": {}}
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs)
    leaves = [each for each in tensors.values() if each.requires_grad]
    torch.testing.assert_close(*(torch.autograd.grad(loss.sum(), leaves) for loss in (ours, theirs)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes_and_autocast(function: Any, dtype: torch.dtype) -> None:
    tensors = operands((7,), 11, 5, dtype)
    ours, theirs = both(**tensors)
    assert ours.dtype == theirs.dtype == dtype
    torch.testing.assert_close(ours, theirs)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = both(**operands((7,), 11, 5))
    assert ours.dtype == theirs.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=2.0**-7, atol=0)
    assert integration.calls()["served"] == {"linear_cross_entropy": 2}


def test_probabilities(function: Any) -> None:
    tensors = operands((7,), 11, 5, torch.float64)
    tensors["target"] = probabilities((7,), 11, torch.float64)
    torch.testing.assert_close(*both(**tensors))
    assert integration.calls()["served"] == {"linear_cross_entropy": 1}
    (gradient,) = torch.autograd.grad(
        both(**{**tensors, "target": tensors["target"].requires_grad_()})[0], tensors["target"]
    )
    assert gradient.abs().sum() > 0
    assert integration.calls()["refused"] == {"a gradient of probabilities": 1}


def test_what_is_left_to_torch(function: Any) -> None:
    tensors = operands((7,), 11, 5, torch.float64)
    several = torch.randn(11, 2, 5, dtype=torch.float64)
    torch.testing.assert_close(*both(input=tensors["input"], linear_weight=several, target=torch.randint(11, (7, 2))))
    assert integration.calls(reset=True)["refused"] == {"K-dimensional loss": 1}
    wrapped = {name: TwoTensor(each.detach(), each.detach().clone()) for name, each in tensors.items()}
    with integration.enable():
        assert isinstance(call(**wrapped), TwoTensor)
    assert integration.calls(reset=True)["refused"] == {"tensor subclass": 1}
    for changed in ({"target": torch.zeros(6).long()}, {"weight": torch.ones(4)}, {"linear_weight": torch.ones(11, 4)}):
        for enabled in (False, True):
            with pytest.raises((RuntimeError, ValueError)) as error:
                if enabled:
                    with integration.enable():
                        call(**{**tensors, **changed})
                else:
                    call(**{**tensors, **changed})
            assert "cuda_ext" not in str(error.value)


def test_enabled_and_disabled(function: Any) -> None:
    integration.enable()
    with integration.enable():
        assert integration.is_enabled() and F.linear_cross_entropy is not function
    assert integration.is_enabled()
    integration.disable()
    assert not integration.is_enabled() and F.linear_cross_entropy is function


def test_meta_and_compiled(function: Any) -> None:
    tensors = operands((7,), 11, 5)
    with integration.enable():
        assert call(**{n: t.to("meta") for n, t in tensors.items()}).shape == ()
        torch._dynamo.reset()
        compiled = torch.compile(lambda: call(**tensors), fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(), function(**tensors))
        assert integration.calls()["refused"] == {}
        several = {**tensors, "linear_weight": torch.randn(11, 2, 5), "target": torch.randint(11, (7, 2))}
        torch.compile(lambda: call(**several), fullgraph=True, backend="aot_eager")()
    assert integration.calls()["refused"] == {"K-dimensional loss": 1}


def test_an_older_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(F, "linear_cross_entropy", raising=False)
    with pytest.raises(RuntimeError, match=r"expected PyTorch 2\.13 or newer, .* got 2\.\d+.*cuda_ext\.linear_cross"):
        integration.enable()
    assert not integration.is_enabled()


class Module(nn.Module):
    """Calls the function as PyTorch's own module does."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, classes)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return call(input=input, linear_weight=self.linear.weight, target=target, linear_bias=self.linear.bias)


def test_a_module_made_before(function: Any) -> None:
    module = nn.LinearCrossEntropyLoss(5, 11, bias=True) if HAS else Module(5, 11)
    input, target = torch.randn(7, 5), torch.randint(11, (7,))
    with integration.enable():
        ours = module(input, target)
    assert integration.calls()["served"] == {"linear_cross_entropy": 1}
    torch.testing.assert_close(ours, module(input, target))
