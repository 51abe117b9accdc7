"""Runs a block by its fusion, if everything that the fusion relies on still holds; otherwise by its own forward.

The fusion leaves out calls of submodules. That changes nothing as long as they are of the types that it was made for,
and nothing observes or replaces their calls: no hooks, adapters, quantised or sharded weights.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from cuda_ext._activations import activation_of
from cuda_ext._gemm import gated_linear, gated_mlp, linear, mlp
from cuda_ext.integrations.patching.fusions import (
    ABSENT,
    Fusion,
    does_nothing,
    is_linear,
    is_plain,
    is_transposed,
    module_at,
)
from cuda_ext.integrations.patching.gate_up import gate_up_rows

# Neither DTensor nor quantised weights, which are subclasses: the original forward dispatches on them.
_PLAIN = (Tensor, nn.Parameter)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_Weights = tuple[Tensor, Tensor | None]


def run(block: nn.Module, fusion: Fusion, x: Any) -> Tensor | None:
    """The output of the fusion, or None if it does not apply to the block as it is now, or to this input."""
    if not _applies(block, fusion, x):
        return None
    first = _first(block, fusion, x)
    if first is None:
        return None
    step, second = 0, None
    while fusion.second is not None and step < len(fusion.chain):
        part = fusion.chain[step]
        if part == fusion.second:
            second = _weights(module_at(block, fusion.second), x)
            break
        if not (part == 0.0 or not block.training if isinstance(part, float) else _does_nothing(block, part)):
            break
        step += 1
    if second is None:
        step = 0
        op = gated_linear if fusion.gated else linear
        out = op(x, *first, activation=fusion.activation)
    else:
        step += 1
        fused = gated_mlp if fusion.gated else mlp
        out = fused(x, first[0], second[0], first[1], second[1], activation=fusion.activation)
    for part in fusion.chain[step:]:
        out = F.dropout(out, part, block.training) if isinstance(part, float) else module_at(block, part)(out)  # type: ignore[misc]
    return out


def _does_nothing(block: nn.Module, path: tuple[str, ...]) -> bool:
    module = module_at(block, path)
    return module is not None and does_nothing(module)


def _applies(block: nn.Module, fusion: Fusion, x: Any) -> bool:
    if not takes(x):
        return False
    if fusion.device is not None and not (x.device.type == fusion.device and _all_have(block, "device", x.device)):
        return False
    if fusion.reads_dtype and (torch.is_autocast_enabled(x.device.type) or not _all_have(block, "dtype", x.dtype)):
        return False
    for path, kind in fusion.inlined:
        module = module_at(block, path)
        if module is None or type(module) is not kind or not is_plain(module):
            return False
    for path, name, value in fusion.attributes:
        now = getattr(module_at(block, path), name, ABSENT)
        if type(now) is not type(value) or now != value:
            return False
    for step in fusion.chain:
        if not isinstance(step, float) and module_at(block, step) is None:
            return False
    return fusion.activation_path is None or is_activation(module_at(block, fusion.activation_path), fusion.activation)


def _all_have(block: nn.Module, name: str, value: Any) -> bool:
    """Whether the dtype or device of all parameters is this, as when the forward was recorded. Where they differ, a
    forward that reads it may convert: T5's casts to the dtype of its last weight, which may stay in float32."""
    return all(getattr(each, name) == value for each in block.parameters())


def takes(x: Any) -> bool:
    """Whether an op may take x in place of calls of submodules: it can, and nothing observes those calls."""
    if type(x) not in _PLAIN or x.dtype not in _DTYPES or not (x.is_cuda or x.is_cpu or x.is_meta):
        return False
    return torch.compiler.is_compiling() or not (_has_any_global_hook() or torch.jit.is_tracing())


def is_activation(module: nn.Module | None, name: str) -> bool:
    return module is not None and activation_of(module) == name and is_plain(module)


def _first(block: nn.Module, fusion: Fusion, x: Tensor) -> _Weights | None:
    layers = [module_at(block, path) for path in fusion.linears]
    weights = [_weights(layer, x) for layer in layers]
    if len(weights) == 1 or weights[0] is None or weights[1] is None:
        return weights[0] if len(weights) == 1 else None
    # A compiler does not see that gate and up are adjacent. It fuses their product itself.
    if torch.compiler.is_compiling() or any(is_transposed(layer) for layer in layers):
        return None
    (gate, gate_bias), (up, up_bias) = weights[0], weights[1]
    weight = gate_up_rows(gate, up)
    if weight is None or (gate_bias is None) != (up_bias is None):
        return None
    if gate_bias is None or up_bias is None:
        return weight, None
    bias = gate_up_rows(gate_bias, up_bias)
    return None if bias is None else (weight, bias)


def _weights(layer: nn.Module | None, x: Tensor) -> _Weights | None:
    """Weight (N, K) and bias of a layer that is what it was and takes the dtype of x; otherwise None."""
    if layer is None or not is_linear(layer) or not is_plain(layer):
        return None
    parameters = parameters_of(layer, x)
    if parameters is None or not is_transposed(layer):
        return parameters
    return parameters[0].t(), parameters[1]


def parameters_of(layer: nn.Module, x: Any) -> _Weights | None:
    """Weight, as it is stored, and bias of a layer, if the ops take them with x; otherwise None."""
    weight: Any = layer.weight
    bias: Any = layer.bias
    for tensor in (weight, bias):
        if tensor is not None and (type(tensor) not in _PLAIN or not _fits(tensor, x)):
            return None
    return weight, bias


def _fits(tensor: Tensor, x: Tensor) -> bool:
    return tensor.dtype == x.dtype or torch.is_autocast_enabled(x.device.type)


def activated(layer: nn.Module, activation: nn.Module, x: Any) -> Tensor:
    """``activation(layer(x))``"""
    name = activation_of(activation)
    if name is not None and takes(x) and is_plain(activation):
        weights = _weights(layer, x)
        if weights is not None:
            return linear(x, *weights, activation=name)
    return activation(layer(x))
