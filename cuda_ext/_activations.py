"""The activations of the products, each in one entry. csrc/gemm/activation.h has the names in the same order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Activation(NamedTuple):
    function: Callable[[Tensor], Tensor]
    onnx: Callable[[Any, Any], Any]  # (opset of onnxscript, input)
    # What `patch` recognises: functions, classes of modules that have no parameters that change what they compute, and
    # the `approximate` of F.gelu and nn.GELU.
    calls: tuple[Any, ...] = ()
    modules: tuple[str, ...] = ()
    approximate: str | None = None


ACTIVATIONS: dict[str | None, Activation] = {
    None: Activation(lambda x: x, onnx=lambda op, x: x),
    "relu": Activation(
        torch.relu,
        onnx=lambda op, x: op.Relu(x),
        calls=(F.relu, torch.relu, torch.Tensor.relu),
        modules=("torch.nn.modules.activation.ReLU",),
    ),
    "gelu": Activation(
        F.gelu,
        onnx=lambda op, x: op.Gelu(x, approximate="none"),
        modules=("transformers.activations.GELUActivation", "timm.layers.activations.GELU"),
        approximate="none",
    ),
    "gelu_tanh": Activation(
        lambda x: F.gelu(x, approximate="tanh"),
        onnx=lambda op, x: op.Gelu(x, approximate="tanh"),
        modules=(
            "transformers.activations.FastGELUActivation",
            "transformers.activations.GELUTanh",
            "transformers.activations.NewGELUActivation",
            "timm.layers.activations.GELUTanh",
        ),
        approximate="tanh",
    ),
    "silu": Activation(
        F.silu,
        onnx=lambda op, x: op.Mul(x, op.Sigmoid(x)),
        calls=(F.silu,),
        modules=("torch.nn.modules.activation.SiLU", "transformers.activations.SiLUActivation"),
    ),
    "relu2": Activation(
        lambda x: torch.relu(x).square(),
        onnx=lambda op, x: op.Mul(relu := op.Relu(x), relu),
        modules=("transformers.activations.ReLUSquaredActivation",),
    ),
}

NAMES = [name for name in ACTIVATIONS if name is not None]
_OF_MODULES = {module: name for name, each in ACTIVATIONS.items() if name for module in each.modules}
GELU = {each.approximate: name for name, each in ACTIVATIONS.items() if name and each.approximate}


def activation_of(module: nn.Module | None) -> str | None:
    """The name in `cuda_ext.gemm` of the activation that the module is; None if it is none of them."""
    kind = type(module)
    if kind is nn.GELU:
        return GELU.get(module.approximate)  # type: ignore[union-attr, arg-type]
    return _OF_MODULES.get(f"{kind.__module__}.{kind.__qualname__}")


def listed(names: list[str], conjunction: str) -> str:
    return f"{', '.join(names[:-1])} {conjunction} {names[-1]}"
