"""Linear layers with their activation, gate or residual in the epilogue of the GEMM."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cuda_ext import fp8 as _fp8
from cuda_ext._activations import ACTIVATIONS
from cuda_ext._fp8_recipes import checked_recipe
from cuda_ext._gemm import gated_linear, gated_mlp, linear, mlp
from cuda_ext.nn.joint_weights import join_on_load


def _empty() -> Tensor:
    """An empty input, on which an op only checks its options: constructors call the op on it to raise what `forward`
    would raise."""
    return torch.empty(0, 0, device="cpu", dtype=torch.float32)


def _in_fp8(layer: nn.Module) -> bool:
    """Of a layer that may be another than ours."""
    return getattr(layer, "fp8", None) is not None


def _second_layer(preact: Tensor, layer: Any, activation: str | None, gated: bool, residual: Tensor | None) -> Tensor:
    """``layer(activation(preact)) + residual`` of an MLP in FP8, whose layers are ops of their own."""
    # Hooks and other classes expect the hidden tensor as input.
    if _in_fp8(layer) and type(layer).forward in _FORWARDS and not _has_own_calls(layer):
        return layer(preact, residual, input_activation=activation, input_gated=gated)
    return layer(_fp8.hidden(preact, activation, gated), residual)


def _has_own_calls(layer: nn.Module) -> bool:
    return "forward" in vars(layer) or any((layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks))


class Linear(nn.Linear):
    """``activation(input @ weight.T + bias) + residual`` as one op, with the parameters and state dict of
    `torch.nn.Linear`.

    Args:
        in_features: K, the size of the last dimension of the input.
        out_features: N, the size of the last dimension of the output.
        bias: whether there is a ``bias`` (N,). Default True.
        device, dtype: of the parameters, as in `torch.nn.Linear`.
        activation: a name that `cuda_ext.gemm` takes, or None (default); another raises RuntimeError.
        fp8: a recipe of `cuda_ext.fp8`, in which forward and backward multiply; default None, in the precision of the
            input. It is an attribute, which `cuda_ext.fp8.convert` sets, as `stochastic_gradients` of
            `cuda_ext.fp8.linear` is one.

    Shape: input (..., K), weight (N, K), residual (..., N) -> (..., N).
    """

    fp8: str | None = None
    stochastic_gradients: bool = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None = None,
        fp8: str | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.activation = activation
        linear(_empty(), _empty(), activation=activation)
        self.fp8 = None if fp8 is None else checked_recipe(fp8)

    def forward(
        self,
        input: Tensor,
        residual: Tensor | None = None,
        *,
        input_activation: str | None = None,  # as `cuda_ext.fp8.linear`
        input_gated: bool = False,
    ) -> Tensor:
        if self.fp8 is None:
            input = _fp8.hidden(input, input_activation, input_gated)
            return linear(input, self.weight, self.bias, activation=self.activation, residual=residual)
        out = _fp8.linear(
            input,
            self.weight,
            self.bias,
            recipe=self.fp8,
            stochastic_gradients=self.stochastic_gradients,
            input_activation=input_activation,
            input_gated=input_gated,
        )
        out = ACTIVATIONS[self.activation].function(out)
        return out if residual is None else out + residual

    def extra_repr(self) -> str:
        options = {
            "activation": self.activation,
            "fp8": self.fp8,
            "stochastic_gradients": self.stochastic_gradients,
        }
        return super().extra_repr() + "".join(f", {name}={value}" for name, value in options.items() if value)


_FORWARDS = (Linear.forward, _fp8.Float8Linear.forward)


class MLP(nn.Module):
    """The feed-forward layer of GPT-2 and ViT as one op: ``fc2(activation(fc1(input))) + residual``.

    Args:
        features: K, the size of the last dimension of input and output.
        hidden_features: F, the size of the hidden layer.
        bias: whether both layers have a bias. Default True.
        activation: a name that `cuda_ext.gemm` takes (default "gelu", with erf), or None; another raises RuntimeError.
        fp8: of both layers, as in `Linear`; the products are then ops of their own.
        device, dtype: of the parameters.

    Shape: input (..., K) -> (..., K); ``residual``, if given, broadcasts to the output.

    State dict: ``fc1.weight`` (F, K) and ``fc2.weight`` (K, F), with ``.bias`` where there is one: that of two
    `torch.nn.Linear` under the names that timm's ``Mlp`` and many models use.
    """

    def __init__(
        self,
        features: int,
        hidden_features: int,
        *,
        bias: bool = True,
        activation: str | None = "gelu",
        fp8: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype, "fp8": fp8}
        self.activation = activation
        linear(_empty(), _empty(), activation=activation)
        self.fc1 = Linear(features, hidden_features, **factory)
        self.fc2 = Linear(hidden_features, features, **factory)

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        one, two = self.fc1, self.fc2
        if _in_fp8(one) or _in_fp8(two):
            return _second_layer(one(input), two, self.activation, False, residual)
        return mlp(input, one.weight, two.weight, one.bias, two.bias, activation=self.activation, residual=residual)

    def extra_repr(self) -> str:
        return f"activation={self.activation}"


class GatedMLP(nn.Module):
    """The feed-forward layer of Llama-style models as one op: ``down_proj(activation(gate_proj(input)) *
    up_proj(input)) + residual``.

    With "silu" this is SwiGLU, with "gelu" GEGLU (Shazeer, GLU Variants Improve Transformer, arXiv 2002.05202,
    equation 6).

    Args:
        features: K, the size of the last dimension of input and output.
        hidden_features: F, the size of the gated hidden layer.
        bias: whether both layers have a bias. Default False.
        activation: of the gate, a name that `cuda_ext.gemm` takes (default "silu") or None; another raises
            RuntimeError.
        fp8: of both layers, as in `Linear`; the products are then ops of their own.
        device, dtype: of the parameters.

    Shape: input (..., K) -> (..., K); ``residual``, if given, broadcasts to the output.

    State dict: ``gate_up_proj.weight`` (2F, K), the rows of the gate first, and ``down_proj.weight`` (K, F), with
    ``.bias`` if there is one. Separate ``gate_proj.weight`` and ``up_proj.weight``, both (F, K), load too;
    `cuda_ext.nn.separated` returns them.
    """

    def __init__(
        self,
        features: int,
        hidden_features: int,
        *,
        bias: bool = False,
        activation: str | None = "silu",
        fp8: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype, "fp8": fp8}
        self.activation = activation
        gated_linear(_empty(), _empty(), activation=activation)
        self.gate_up_proj = Linear(features, 2 * hidden_features, **factory)
        self.down_proj = Linear(hidden_features, features, **factory)
        join_on_load(self, "gate_up_proj", {"gate_proj": hidden_features, "up_proj": hidden_features})

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        up, down = self.gate_up_proj, self.down_proj
        if _in_fp8(up) or _in_fp8(down):
            return _second_layer(up(input), down, self.activation, True, residual)
        return gated_mlp(
            input, up.weight, down.weight, up.bias, down.bias, activation=self.activation, residual=residual
        )

    def extra_repr(self) -> str:
        return f"activation={self.activation}"
