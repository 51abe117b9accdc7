"""What a module has to be to be wrapped, and to stay: the same on all ranks, trainable, and unchanged."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from cuda_ext.distributed.collectives import DTYPES
from cuda_ext.distributed.plan import NAME


def check_ranks_agree(
    parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor], options: str, group: dist.ProcessGroup
) -> None:
    """RuntimeError on every rank, naming the first difference, unless all wrap alike; they would else wait forever."""
    lines = [options]
    for name, parameter in parameters.items():
        shape = "lazy" if is_lazy(parameter) else f"{tuple(parameter.shape)} strides {parameter.stride()}"
        grad = "trained" if parameter.requires_grad else "frozen"
        lines.append(f"parameter {name} {parameter.dtype} {shape} {parameter.device.type} {grad}")
    for name, buffer in buffers.items():
        lines.append(f"buffer {name} {buffer.dtype} {tuple(buffer.shape)} {buffer.device.type}")
    digests: list[Any] = [None] * group.size()
    dist.all_gather_object(digests, hashlib.sha256("\n".join(lines).encode()).digest(), group=group)
    if len(set(digests)) == 1:
        return
    all_lines: list[Any] = [None] * group.size()
    dist.all_gather_object(all_lines, lines, group=group)
    other = next(rank for rank, theirs in enumerate(all_lines) if theirs != all_lines[0])
    pairs = zip_longest(all_lines[0], all_lines[other], fillvalue="nothing more")
    here, there = next((here, there) for here, there in pairs if here != there)
    raise RuntimeError(
        f"{NAME}: expected the same module and options on every rank, got on rank 0: {here}; on rank {other}: {there}"
    )


def check_trainable(named: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Those that require grad; ValueError or TypeError if their gradients cannot be averaged."""
    for name, parameter in named.items():
        if is_lazy(parameter):
            raise ValueError(
                f"{NAME}: expected parameters that have a shape, got lazy parameter {name}; run one forward pass first"
            )
    trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    if not trained:
        raise ValueError(
            f"{NAME}: expected a module with parameters that require grad, got {len(named)} and none that does"
        )
    first, device = next((name, parameter.device) for name, parameter in trained.items())
    for name, parameter in trained.items():
        if parameter.device != device:
            raise ValueError(
                f"{NAME}: expected parameters on one device, got {first} on {device} and {name} on {parameter.device}; "
                "wrap the part on each device by itself"
            )
        if parameter.dtype not in DTYPES:
            raise TypeError(
                f"{NAME}: expected parameter {name} of dtype float32, float16, bfloat16 or float64, "
                f"got {parameter.dtype}"
            )
    return trained


class WrappedModule:
    """Where a module keeps parameters and buffers, and what the parameters were, to notice changes in microseconds."""

    def __init__(self, module: nn.Module) -> None:
        self._tables: list[tuple[str, dict[str, Any], list[Any]]] = []
        self._parameters: list[tuple[str, nn.Parameter, tuple[object, ...], bool]] = []
        self._buffers: list[tuple[dict[str, Any], str]] = []
        for path, owner in module.named_modules():
            prefix = f"{path}." if path else ""
            for table in (owner._modules, owner._parameters):
                self._tables.append((prefix, table, list(table.values())))
            for name, parameter in owner._parameters.items():
                if parameter is not None:
                    traits = _traits(parameter)
                    self._parameters.append((prefix + name, parameter, traits, parameter.requires_grad))
            self._buffers += [(owner._buffers, name) for name, buffer in owner._buffers.items() if buffer is not None]

    def buffers(self) -> list[Tensor]:
        return [table[name] for table, name in self._buffers]

    def trained_changed(self) -> bool:
        """Whether a parameter was frozen, or freed to train, since the last call."""
        changed = False
        for n, (name, parameter, traits, trained) in enumerate(self._parameters):
            if parameter.requires_grad != trained:
                self._parameters[n] = name, parameter, traits, parameter.requires_grad
                changed = True
        return changed

    def check_unchanged(self) -> None:
        """RuntimeError, with the name, if a parameter or submodule was replaced, added, removed or given new traits."""
        for prefix, table, members in self._tables:
            if len(table) != len(members) or not all(map(operator.is_, table.values(), members)):
                known = {id(member) for member in members}
                new = [prefix + name for name, member in table.items() if id(member) not in known]
                what = f"{', '.join(new)} new" if new else f"members of {prefix.rstrip('.') or 'the module'} removed"
                raise RuntimeError(
                    f"{NAME}: expected the parameters and submodules that were wrapped, got {what}; "
                    "change the module before wrapping it"
                )
        for name, parameter, before, _ in self._parameters:
            now = _traits(parameter)
            if now != before:
                change = next(n for n in range(len(_TRAITS)) if now[n] != before[n])
                raise RuntimeError(
                    f"{NAME}: expected parameter {name} to keep {_TRAITS[change]} {before[change]}, got {now[change]}; "
                    "change the module before wrapping it"
                )


_TRAITS = ("dtype", "shape", "device")


def _traits(parameter: Tensor) -> tuple[object, ...]:
    return parameter.dtype, parameter.shape, parameter.device
