"""What a module has to be to be wrapped, and to stay so: the same on all ranks, trainable, and unchanged."""

from __future__ import annotations

import hashlib
import operator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from cuda_ext.distributed.collectives import DTYPES
from cuda_ext.distributed.reducer import NAME


def check_ranks_agree(module: nn.Module, options: str, group: dist.ProcessGroup) -> None:
    """RuntimeError on every rank, naming the first difference, unless all ranks wrap alike; without this they would wait for each other forever."""
    description = [options]
    for name, parameter in module.named_parameters():
        shape = "of unknown shape" if is_lazy(parameter) else f"{tuple(parameter.shape)} with strides {parameter.stride()}"
        description.append(f"parameter {name} {parameter.dtype} {shape} on {parameter.device.type}, requires_grad={parameter.requires_grad}")
    description += [f"buffer {name} {buffer.dtype} {tuple(buffer.shape)} on {buffer.device.type}" for name, buffer in module.named_buffers()]
    digests: list[bytes] = [b""] * group.size()
    dist.all_gather_object(digests, hashlib.sha256("\n".join(description).encode()).digest(), group=group)
    if len(set(digests)) == 1:
        return
    descriptions: list[list[str]] = [[]] * group.size()
    dist.all_gather_object(descriptions, description, group=group)
    first = descriptions[0]
    rank = next(rank for rank, other in enumerate(descriptions) if other != first)
    other = descriptions[rank]
    line = next((n for n, (a, b) in enumerate(zip(first, other)) if a != b), min(len(first), len(other)))
    here, there = (lines[line] if line < len(lines) else "nothing more" for lines in (first, other))
    raise RuntimeError(f"{NAME}: expected the same module and options on every rank, got {here} on rank 0, {there} on rank {rank}")


def check_trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require grad, by name; ValueError or TypeError if their gradients cannot be averaged."""
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"{NAME}: expected parameters with a shape, got the lazy parameter {name}; run one forward pass first")
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    if not trained:
        count = sum(1 for _ in module.parameters())
        raise ValueError(f"{NAME}: expected a module with a parameter that requires grad, got {count} parameters and none that does")
    for name, parameter in trained.items():
        if parameter.dtype not in DTYPES:
            raise TypeError(f"{NAME}: expected parameter {name} of dtype float32, float16, bfloat16 or float64, got {parameter.dtype}")
    return trained


class WrappedModule:
    """Where the parameters and buffers of a module are and what the parameters were, so that any change is noticed in microseconds."""

    def __init__(self, module: nn.Module) -> None:
        self._children: list[tuple[str, dict[str, Any], list[Any]]] = []
        self._parameters: list[tuple[str, nn.Parameter, tuple[object, ...]]] = []
        self._buffers: list[tuple[dict[str, Any], str]] = []
        for path, owner in module.named_modules():
            prefix = f"{path}." if path else ""
            for table in (owner._modules, owner._parameters):
                self._children.append((prefix, table, list(table.values())))
            for name, parameter in owner._parameters.items():
                if parameter is not None:
                    self._parameters.append((prefix + name, parameter, _traits(parameter)))
            self._buffers += [(owner._buffers, name) for name, buffer in owner._buffers.items() if buffer is not None]

    def buffers(self) -> list[Tensor]:
        return [table[name] for table, name in self._buffers]

    def check_unchanged(self) -> None:
        for prefix, table, children in self._children:
            if len(table) != len(children) or not all(map(operator.is_, table.values(), children)):
                known = {id(child) for child in children}
                changed = [name for name, child in table.items() if id(child) not in known] or ["something that was removed"]
                raise RuntimeError(
                    f"{NAME}: expected the parameters that were wrapped, got others at {', '.join(prefix + name for name in changed)}; "
                    "change the module first and wrap it then"
                )
        for name, parameter, traits in self._parameters:
            if _traits(parameter) != traits:
                changes = ", ".join(
                    f"{what} {then} to be unchanged, got {now}" for what, then, now in zip(_TRAITS, traits, _traits(parameter)) if then != now
                )
                raise RuntimeError(f"{NAME}: expected of parameter {name} {changes}; change the module first and wrap it then")


_TRAITS = ("requires_grad", "dtype", "shape", "device")


def _traits(parameter: Tensor) -> tuple[object, ...]:
    return parameter.requires_grad, parameter.dtype, parameter.shape, parameter.device
