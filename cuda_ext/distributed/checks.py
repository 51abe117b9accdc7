"""Checks of arguments, and of the wrapped module: it must be the same on all ranks, trainable, and unchanged."""

from __future__ import annotations

import hashlib
import json
import operator
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from cuda_ext._watch import Watch


NAME = "cuda_ext.distributed.BucketedDataParallel"
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def check_wire_dtype(caller: str, wire_dtype: torch.dtype | None) -> None:
    if wire_dtype is not None and wire_dtype not in DTYPES:
        raise ValueError(f"{caller}: expected wire_dtype to be None or one of {DTYPES}, got {wire_dtype!r}")


def check_ranks_agree(
    parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor], options: str, group: dist.ProcessGroup
) -> None:
    """RuntimeError on every rank, with the first difference, if modules or options differ: the ranks would deadlock."""
    lines = [options, f"inference_mode={torch.is_inference_mode_enabled()}"]
    for name, parameter in parameters.items():
        shape = "lazy" if is_lazy(parameter) else f"{tuple(parameter.shape)} strides {parameter.stride()}"
        grad = "trained" if parameter.requires_grad else "frozen"
        if not is_lazy(parameter) and parameter.is_inference():
            grad = "made in inference mode"
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


def check_trainable(named: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    """The parameters that require grad; ValueError or TypeError if gradients cannot be averaged, or buffers sent."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{NAME}: expected to be constructed outside torch.inference_mode(), got a call inside it, where "
            "nothing can be trained; use torch.no_grad() instead"
        )
    for name, parameter in named.items():
        if is_lazy(parameter):
            raise ValueError(
                f"{NAME}: expected parameters that have a shape, got lazy parameter {name}; run one forward pass first"
            )
    for name, tensor in (*named.items(), *buffers.items()):
        if tensor.is_meta:
            raise ValueError(
                f"{NAME}: expected parameters and buffers that have memory, got {name} on meta; allocate memory "
                'first: module.to_empty(device="cpu"), and then initialise the values'
            )
        if tensor.is_inference():
            raise ValueError(
                f"{NAME}: expected parameters and buffers made outside torch.inference_mode(), got {name} made "
                "inside it; clone it outside"
            )
    trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    if not trained:
        raise ValueError(
            f"{NAME}: expected a module with parameters that require grad, got {len(named)}, none of which does"
        )
    first, device = next((name, parameter.device) for name, parameter in trained.items())
    for name, parameter in trained.items():
        if parameter.device != device:
            raise ValueError(
                f"{NAME}: expected parameters on one device, got {first} on {device} and {name} on {parameter.device}; "
                "wrap the part on each device by itself"
            )
        if is_traceable_wrapper_subclass(parameter):
            raise TypeError(
                f"{NAME}: expected plain parameters, got {name}, a {type(parameter).__name__}, not flat memory; "
                "layers that are sharded over ranks need torch.nn.parallel.DistributedDataParallel(module, "
                "device_mesh=mesh) or FSDP2"
            )
        if parameter.dtype not in DTYPES:
            raise TypeError(
                f"{NAME}: expected parameter {name} of dtype float32, float16, bfloat16 or float64, "
                f"got {parameter.dtype}"
            )
        check_no_earlier_use(name, parameter)
    return trained


def check_no_earlier_use(name: str, parameter: nn.Parameter) -> None:
    """ValueError if something uses the gradient inside backward, before it is averaged."""
    if hasattr(parameter, "_in_backward_optimizers"):  # from torch.distributed.optim
        raise ValueError(
            f"{NAME}: expected parameters whose optimizer steps after backward, got an optimizer inside "
            f"backward for {name}, which would step before the gradient is averaged; "
            "call optimizer.step() after backward"
        )
    if parameter._post_accumulate_grad_hooks:
        raise ValueError(
            f"{NAME}: expected parameters without hooks of register_post_accumulate_grad_hook, got {name} with one, "
            "which would run before the gradient is averaged; do what it does after backward"
        )


def check_compiler() -> None:
    """RuntimeError under compiled autograd, which traces the hooks on gradients and does not run their callbacks."""
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")  # loaded only if it is used
    if compiled_autograd is not None and (
        compiled_autograd.compiled_autograd_enabled or compiled_autograd.in_compiled_autograd_region
    ):
        raise RuntimeError(
            f"{NAME}: expected a backward pass that autograd runs, got compiled autograd; turn it off "
            "(torch._dynamo.config.compiled_autograd = False); the forward pass may be compiled"
        )


class WrappedModule:
    """The parameters, buffers and submodules of a module when it was wrapped, to detect changes in microseconds.

    ignored: parameters and buffers that are not averaged or broadcast. They may change, and so may submodules that have
    no others.
    """

    def __init__(self, module: nn.Module, ignored: Collection[str] = ()) -> None:
        self._tables: list[tuple[str, Mapping[str, Any], list[Any]]] = []
        free = _ignored_parts(module, ignored) if ignored else ()
        self._parameters: list[tuple[str, nn.Parameter, tuple[object, ...], bool]] = []
        self._buffers: list[tuple[dict[str, Any], str, str]] = []  # table, key, and name from the root
        self._sizes: dict[str, tuple[str, _Size]] = {}  # name of a buffer -> class of its module, size on all ranks
        for path, owner in module.named_modules():
            if path in free:
                continue
            prefix = f"{path}." if path else ""
            for table in (owner._modules, owner._parameters):
                shown = _Without(table, {name for name in table if prefix + name in free}) if free else table
                self._tables.append((prefix, shown, list(shown.values())))
            for name, parameter in owner._parameters.items():
                if parameter is not None and prefix + name not in ignored:
                    traits = _traits(parameter)
                    self._parameters.append((prefix + name, parameter, traits, parameter.requires_grad))
            for name, buffer in owner._buffers.items():
                if buffer is not None and prefix + name not in ignored:
                    self._buffers.append((owner._buffers, name, prefix + name))
                    self._sizes[prefix + name] = (type(owner).__name__, _size(buffer))

    def buffers(self) -> list[Tensor]:
        """The buffers that existed when the module was wrapped; RuntimeError if one was removed."""
        buffers = [table.get(key) for table, key, _ in self._buffers]
        for buffer, (table, key, name) in zip(buffers, self._buffers):
            if buffer is None:
                what = "None" if key in table else "none"
                raise RuntimeError(
                    f"{NAME}: expected buffer {name}, which existed when the module was wrapped and is broadcast from "
                    f"the first rank, got {what}; wrap the module again, or pass broadcast_buffers=False"
                )
        return buffers  # type: ignore[return-value]

    def resized_buffers(self, buffers: Sequence[Tensor]) -> dict[str, str]:
        """Of ``buffers``, which `buffers` has returned, the dtypes and sizes that have changed since `accept_sizes`."""
        named = zip(self._sizes.items(), buffers)
        return {name: _size_in_words(_size(buffer)) for (name, (_, size)), buffer in named if _size(buffer) != size}

    def compare_sizes(self, changed: Mapping[str, str], watch: Watch, number: int) -> None:
        """RuntimeError unless buffers have ``changed`` alike on all ranks, before pass ``number``: a broadcast of
        different sizes would end processes."""

        def is_past(status: str) -> bool:  # a rank that compares sizes names no pass
            return any(int(n) >= number for n in re.findall(r"pass (\d+)", status))

        for rank, answer in watch.answers(f"buffers {number}", json.dumps(changed), is_past).items():
            theirs = json.loads(answer or "{}")
            for name, (owner, size) in self._sizes.items():
                here, there = (changes.get(name, _size_in_words(size)) for changes in (changed, theirs))
                if here != there:
                    raise RuntimeError(
                        f"buffer {name} of {owner} is {here} here and {there} on rank {rank}; give it the same size on "
                        "every rank, or pass broadcast_buffers=False"
                    )

    def accept_sizes(self, buffers: Sequence[Tensor]) -> None:
        for (name, (owner, _)), buffer in zip([*self._sizes.items()], buffers):
            self._sizes[name] = owner, _size(buffer)

    def trained_changed(self) -> list[str]:
        """The parameters that were frozen or unfrozen since `accept_trained`."""
        return [name for name, parameter, _, trained in self._parameters if parameter.requires_grad != trained]

    def accept_trained(self) -> None:
        self._parameters = [
            (name, parameter, traits, parameter.requires_grad) for name, parameter, traits, _ in self._parameters
        ]

    def check_unchanged(self) -> None:
        """Raises, with the name, if a parameter or submodule was replaced, added, removed, converted or given hooks."""
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
            check_no_earlier_use(name, parameter)


class _Without(Mapping[str, Any]):
    """``table`` without the keys ``left_out``."""

    def __init__(self, table: Mapping[str, Any], left_out: Collection[str]) -> None:
        self._table, self._left_out = table, left_out

    def __getitem__(self, key: str) -> Any:
        return self._table[key]

    def __iter__(self) -> Iterator[str]:
        return (key for key in self._table if key not in self._left_out)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _ignored_parts(module: nn.Module, ignored: Collection[str]) -> set[str]:
    """The names in ``ignored``, and the paths of the submodules of which all parameters and buffers are."""
    parts = set(ignored)
    for path, owner in module.named_modules():
        names = [f"{path}.{name}" for name, _ in (*owner.named_parameters(), *owner.named_buffers())]
        if path and names and set(names) <= parts:
            parts.update(f"{path}.{inner}" if inner else path for inner, _ in owner.named_modules())
    return parts


_Size = tuple[torch.dtype, torch.Size]


def _size(buffer: Tensor) -> _Size:
    return buffer.dtype, buffer.shape


def _size_in_words(size: _Size) -> str:
    return f"{size[0]} {tuple(size[1])}"


_TRAITS = ("dtype", "shape", "device")


def _traits(parameter: Tensor) -> tuple[object, ...]:
    return parameter.dtype, parameter.shape, parameter.device
