"""What a function has captured: closures, defaults, globals that it names, attributes of objects."""

from __future__ import annotations

import builtins
import enum
import functools
import types
import weakref
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Captures", "References", "captures_of"]

_CONSTANTS: tuple[type, ...] = (int, float, bool, complex, str, bytes, type(None), type(Ellipsis), range, enum.Enum)
_CONSTANTS += (torch.dtype, torch.device, torch.layout, torch.Size)
_LIBRARIES = ("torch", "math", "operator", "builtins", "functools")  # whose attributes do not change
_MAX_OBJECTS = 400  # of a function that captures a whole model, no more is looked at
_MAX_VALUES = 1 << 16


class Captures(NamedTuple):
    key: tuple[Hashable, ...]  # equal keys mean equal behaviour, if complete, while `tensors` are alive
    tensors: list[Tensor]
    is_complete: bool  # False: something was found whose changes would not be noticed
    form: tuple[Hashable, ...]  # the key, but floating-point tensors count by dtype, device and shape only


class References:
    """To tensors that are not kept alive."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._own = [weakref.ref(each) for each in tensors]

    def are_to(self, tensors: list[Tensor]) -> bool:
        """False if another tensor has taken the identity of one."""
        return all(own() is each for own, each in zip(self._own, tensors, strict=True))


def captures_of(*roots: Any) -> Captures:
    """Looks at the objects and all that they refer to. Tensors count by identity, place and version, which changes when
    they are written to in place. Those of inference mode have no version, and count by their values."""
    walk = _Walk()
    for root in roots:
        walk.visit(root)
    form = tuple(walk.forms.get(place, each) for place, each in enumerate(walk.key))
    return Captures(tuple(walk.key), walk.tensors, walk.is_complete, form)


class _Walk:
    def __init__(self) -> None:
        self.key: list[Hashable] = []
        self.forms: dict[int, Hashable] = {}  # of floating-point tensors, by their places in `key`
        self.tensors: list[Tensor] = []
        self.is_complete = True
        self._seen: dict[int, int] = {}

    def visit(self, each: Any) -> None:
        if isinstance(each, _CONSTANTS):
            self.key += [type(each).__qualname__, each]
            return
        if id(each) in self._seen:
            self.key.append(("again", self._seen[id(each)]))
            return
        self._seen[id(each)] = len(self._seen)
        if len(self._seen) > _MAX_OBJECTS:
            self.is_complete = False
        elif isinstance(each, Tensor):
            self._tensor(each)
        elif isinstance(each, types.CellType):
            self._cell(each)
        elif _is_of_library(each):
            self.key.append(each)
        else:
            self._object(each)

    def _tensor(self, tensor: Tensor) -> None:
        self.tensors.append(tensor)
        if tensor.is_floating_point():
            self.forms[len(self.key)] = (tensor.dtype, tensor.device, tuple(tensor.shape))
        own: tuple[Hashable, ...] = (id(tensor), tensor.requires_grad)
        try:
            if not tensor.is_inference():
                own += (tensor.data_ptr(), tensor._version, tuple(tensor.shape), tensor.stride())
            elif tensor.numel() <= _MAX_VALUES:
                own += (tuple(tensor.shape), tuple(tensor.flatten().tolist()))
            else:
                self.is_complete = False
        except RuntimeError:  # a tensor without memory
            self.is_complete = False
        self.key.append(own)

    def _cell(self, cell: types.CellType) -> None:
        try:
            self.visit(cell.cell_contents)
        except ValueError:  # empty
            self.key.append("empty")

    def _object(self, each: Any) -> None:
        if isinstance(each, types.FunctionType):
            self.key.append(each.__code__)
            parts = [*(each.__closure__ or ()), *(each.__defaults__ or ()), each.__kwdefaults__]
            parts += [each.__globals__[name] for name in _names(each.__code__) if name in each.__globals__]
        elif isinstance(each, types.MethodType):
            parts = [each.__func__, each.__self__]
        elif isinstance(each, functools.partial):
            parts = [each.func, each.args, each.keywords]
        elif isinstance(each, (tuple, list)):
            parts = list(each)
        elif isinstance(each, dict):
            parts = [part for item in each.items() for part in item]
        elif isinstance(each, (slice, set, frozenset)):
            parts = [each.start, each.stop, each.step] if isinstance(each, slice) else list(each)
        elif not isinstance(each, (type, types.ModuleType)) and hasattr(each, "__dict__"):
            parts = [vars(type(each)).get("__call__"), vars(each)]
            self.is_complete = self.is_complete and not hasattr(type(each), "__slots__")
        else:
            parts = []
            self.is_complete = False
        self.key += [f"{type(each).__module__}.{type(each).__qualname__}", len(parts)]
        for part in parts:
            self.visit(part)


def _is_of_library(each: Any) -> bool:
    """Whether it is a module, class or function of a library, or one written in C that is bound to no object."""
    if isinstance(each, types.BuiltinFunctionType):
        owner = each.__self__
        return owner is None or isinstance(owner, (types.ModuleType, type))
    if isinstance(each, types.ModuleType):
        return each.__name__.partition(".")[0] in _LIBRARIES
    if isinstance(each, (type, types.FunctionType, torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        is_builtin = getattr(builtins, getattr(each, "__name__", ""), None) is each
        is_local = isinstance(each, types.FunctionType) and each.__closure__ is not None
        module = str(getattr(each, "__module__", "")).partition(".")[0]
        return is_builtin or (module in _LIBRARIES and not is_local)
    return isinstance(each, (types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType))


def _names(code: types.CodeType) -> Iterator[str]:
    """The names that a function looks up, those of functions inside included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
