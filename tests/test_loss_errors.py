"""Bad input to the loss: each check of an argument, by the op's and the argument's name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loss_common import operands, probabilities
from torch import Tensor
from torch._subclasses import FakeTensorMode

import cuda_ext
from cuda_ext._toolchain import NAMESPACE


def call(op: str = "linear_cross_entropy", **changed: Any) -> Any:
    """The op on good arguments, of 4 rows, 3 features and 5 classes, but for those given."""
    good = {"input": torch.zeros(4, 3), "linear_weight": torch.zeros(5, 3), "target": torch.zeros(4, dtype=torch.int64)}
    return getattr(cuda_ext, op)(**{**good, **changed})


def t(*shape: int, **options: Any) -> Tensor:
    return torch.zeros(shape, **options)


HALF, INT, INT32 = ({"dtype": dtype} for dtype in (torch.float16, torch.int64, torch.int32))
# Arguments that are built when the test runs, on its device; the argument that the error names; what it says it got.
BAD: dict[str, tuple[Callable[[], dict[str, Any]], str, str]] = {
    "input of no dims": (lambda: {"input": t()}, "input", ""),
    "input of integers": (lambda: {"input": t(4, 3, **INT)}, "input", "int64"),
    "weight of other features": (lambda: {"linear_weight": t(5, 4)}, "linear_weight", "(5, 4)"),
    "weight of one dim": (lambda: {"linear_weight": t(3)}, "linear_weight", "(3,)"),
    "weight of three dims": (lambda: {"linear_weight": t(1, 5, 3)}, "linear_weight", "(1, 5, 3)"),
    "weight of another dtype": (lambda: {"linear_weight": t(5, 3, **HALF)}, "linear_weight", "float16"),
    "bias of another length": (lambda: {"linear_bias": t(4)}, "linear_bias", "(4,)"),
    "bias of two dims": (lambda: {"linear_bias": t(1, 5)}, "linear_bias", "(1, 5)"),
    "bias of another dtype": (lambda: {"linear_bias": t(5, **HALF)}, "linear_bias", "float16"),
    "class weights of another length": (lambda: {"weight": t(3)}, "weight", "(3,)"),
    "class weights of two dims": (lambda: {"weight": t(1, 5)}, "weight", "(1, 5)"),
    "class weights of integers": (lambda: {"weight": t(5, **INT)}, "weight", "int64"),
    "more targets than rows": (lambda: {"target": t(5, **INT)}, "target", "(5,)"),
    "targets of another shape": (lambda: {"target": t(2, 2, **INT)}, "target", "(2, 2)"),
    "targets that would broadcast": (lambda: {"target": t(1, **INT)}, "target", "(1,)"),
    "targets of int32": (lambda: {"target": t(4, **INT32)}, "target", "int32"),
    "targets of bool": (lambda: {"target": t(4, dtype=torch.bool)}, "target", "bool"),
    "indices in the shape of probabilities": (lambda: {"target": t(4, 5, **INT)}, "target", ""),
    "probabilities of other classes": (lambda: {"target": t(4, 6)}, "target", "(4, 6)"),
    "probabilities of other rows": (lambda: {"target": t(3, 5)}, "target", "(3, 5)"),
    "probabilities in the shape of indices": (lambda: {"target": t(4)}, "target", ""),
    "probabilities that want a gradient": (lambda: {"target": t(4, 5, requires_grad=True)}, "target", ""),
    "unknown reduction": (lambda: {"reduction": "avg"}, "reduction", "'avg'"),
    "unknown method": (lambda: {"method": "fast"}, "method", "'fast'"),
    "gradients in forward of losses": (lambda: {"method": "forward", "reduction": "none"}, "method", "'forward'"),
    "gradients in forward of lse": (lambda: {"method": "forward", "return_lse": True}, "method", "'forward'"),
    "gradients in forward of entropy": (lambda: {"method": "forward", "return_entropy": True}, "method", "'forward'"),
    "smoothing below 0": (lambda: {"label_smoothing": -0.1}, "label_smoothing", "-0.1"),
    "smoothing above 1": (lambda: {"label_smoothing": 1.5}, "label_smoothing", "1.5"),
    "smoothing of NaN": (lambda: {"label_smoothing": math.nan}, "label_smoothing", "nan"),
    "negative softcap": (lambda: {"softcap": -1.0}, "softcap", "-1"),
    "softcap of NaN": (lambda: {"softcap": math.nan}, "softcap", "nan"),
    "infinite scale": (lambda: {"scale": math.inf}, "scale", "inf"),
    "scale of NaN": (lambda: {"scale": math.nan}, "scale", "nan"),
    "z-loss of NaN": (lambda: {"z_loss": math.nan}, "z_loss", "nan"),
    "scale that wants a gradient": (lambda: {"scale": t(requires_grad=True)}, "scale", "a tensor"),
    "softcap that wants a gradient": (lambda: {"softcap": t(requires_grad=True)}, "softcap", "a tensor"),
    "z-loss that wants a gradient": (lambda: {"z_loss": t(requires_grad=True)}, "z_loss", "a tensor"),
}
OF_LOG_PROB = (
    *("input of no dims", "weight of other features", "weight of another dtype", "bias of another length"),
    *("more targets than rows", "targets of int32", "probabilities in the shape of indices"),
    *("negative softcap", "infinite scale", "scale that wants a gradient"),
)


@pytest.mark.parametrize("device", ["cpu", "meta", "fake"])
@pytest.mark.parametrize("bad", BAD)
def test_refusal(bad: str, device: str) -> None:
    arguments, name, got = BAD[bad]
    message = rf"^{NAMESPACE}::linear_cross_entropy: expected (the )?{name}\b.*got .*{re.escape(got)}"
    with (
        FakeTensorMode() if device == "fake" else torch.device(device),
        pytest.raises(RuntimeError, match=message),
    ):
        call(**arguments())


@pytest.mark.parametrize("bad", OF_LOG_PROB)
def test_refusal_of_log_probabilities(bad: str) -> None:
    arguments, name, got = BAD[bad]
    message = rf"^{NAMESPACE}::linear_(log_prob|cross_entropy): expected (the )?{name}\b.*got .*{re.escape(got)}"
    with pytest.raises(RuntimeError, match=message):
        call("linear_log_prob", **arguments())


@pytest.mark.parametrize("op", ["linear_cross_entropy", "linear_log_prob"])
def test_the_good_arguments_are_accepted(op: str) -> None:
    """Else the refusals above could be of something else."""
    assert call(op).isfinite().all()
    if op == "linear_cross_entropy":
        good = {"linear_bias": t(5), "weight": torch.ones(5), "label_smoothing": 1.0, "method": "forward"}
        for target in (t(4, **INT), probabilities((4,), 5)):
            assert call(**good, target=target).isfinite()


@pytest.mark.parametrize("target", [5, 6, 2**31, 2**40, -1, -5, -101])
@pytest.mark.parametrize("place", [0, 3])
def test_a_target_out_of_range_is_named(target: int, place: int) -> None:
    labels = torch.zeros(4, dtype=torch.int64)
    labels[place] = target
    for options in ({}, {"reduction": "none"}, {"method": "forward"}, {"weight": torch.ones(5)}):
        for wants in (False, True):
            with pytest.raises((IndexError, RuntimeError), match=rf"expected target.*got {target}\b"):
                call(target=labels, input=t(4, 3, requires_grad=wants), **options)
    with pytest.raises((IndexError, RuntimeError), match=rf"expected target.*got {target}\b"):
        call("linear_log_prob", target=labels)
    assert call(target=labels, ignore_index=target).isfinite()


def test_ignore_index_may_be_any_number() -> None:
    labels = torch.tensor([0, 2**40, 1, 4])
    tensors = {**operands((4,), 5, 3), "target": labels}
    kept = labels != 2**40
    loss = cuda_ext.linear_cross_entropy(**tensors, ignore_index=2**40)
    expected = cuda_ext.linear_cross_entropy(tensors["input"][kept], tensors["linear_weight"], labels[kept])
    torch.testing.assert_close(loss, expected)


def test_refusal_comes_with_gradients_and_autocast_too() -> None:
    message = f"{NAMESPACE}::linear_cross_entropy: expected linear_weight"
    with pytest.raises(RuntimeError, match=message):
        call(input=t(4, 3, requires_grad=True), linear_weight=t(5, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RuntimeError, match=message):
        call(linear_weight=t(5, 4))


def test_one_argument_on_another_device_is_refused() -> None:
    tensors = {**operands((4,), 5, 3, bias=True, grad=False), "weight": torch.ones(5)}
    for name, tensor in tensors.items():
        with pytest.raises(RuntimeError, match=rf"{NAMESPACE}::linear_cross_entropy: expected \w+ on device"):
            cuda_ext.linear_cross_entropy(**{**tensors, name: tensor.to("meta")})


@pytest.mark.parametrize("name", ["input", "linear_weight", "linear_bias", "weight"])
def test_layouts_other_than_strided_are_refused(name: str) -> None:
    tensors = {**operands((4,), 5, 3, bias=True, grad=False), "weight": torch.ones(5)}
    with pytest.raises(RuntimeError, match=f"{NAMESPACE}::linear_cross_entropy: expected dense tensors"):
        cuda_ext.linear_cross_entropy(**{**tensors, name: tensors[name].to_sparse()})


def test_options_are_keywords() -> None:
    x, weight, target = t(4, 3), t(5, 3), t(4, **INT)
    with pytest.raises(TypeError):
        cuda_ext.linear_cross_entropy(x, weight, target, t(5))
    with pytest.raises(TypeError):
        cuda_ext.linear_log_prob(x, weight, target, t(5))


@pytest.mark.parametrize("name", ["input", "linear_weight", "target"])
def test_none_for_a_tensor(name: str) -> None:
    with pytest.raises(RuntimeError, match=f"^{NAMESPACE}::linear_cross_entropy: expected {name} to be a tensor, got"):
        call(**{name: None})
