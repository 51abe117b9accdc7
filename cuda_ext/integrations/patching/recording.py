"""Records what the forward of a block computes, as an expression over its leaf modules.

The forward runs on a small random input under a mode that sees every torch function. Each tensor has an expression;
an operation that has none ends the recording, so the expression leaves nothing out. What Python reads on the way, such
as ``self.approximate`` or the dtype of a tensor, is recorded too: the expression holds only while it stays the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cuda_ext._activations import GELU, activation_of
from cuda_ext.integrations.patching.fusions import ABSENT, FUNCTIONS, Path, is_linear, is_plain

# ("input",), ("linear", path, e), ("activation", name, path or None, e), ("module", path, e), ("dropout", p, e),
# ("half", 0 or 1, e), ("product", e, e)
Expression = tuple[Any, ...]

_OWN = frozenset(vars(nn.Module()))  # attributes that every module has
_DTYPE, _DEVICE = (getattr(torch.Tensor, name).__get__ for name in ("dtype", "device"))
_PRODUCTS = (torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__)
_SPLITS = (torch.chunk, torch.Tensor.chunk, torch.split, torch.Tensor.split)
_SQUARES = (torch.square, torch.Tensor.square)
_POWERS = (torch.pow, torch.Tensor.pow, torch.Tensor.__pow__)
_VALUES = (bool, int, float, str, type(None), type(F.relu), type(F.gelu))


class NotRecognised(Exception):
    """Why a block stays as it is. ``close``: all of its forward is known, but no op computes it."""

    def __init__(self, reason: str, *, close: bool = False) -> None:
        super().__init__(reason)
        self.close = close


class Recording(TorchFunctionMode):
    """One run of a block's forward; afterwards `result` is the expression of what it returned."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.leaves, self.inlined = _leaves(block)
        self.attributes: dict[tuple[Path, str], Any] = {}
        self.reads_dtype = self.reads_device = False
        self._expressions: dict[int, Expression] = {}
        self._calls: list[Expression] = []
        self._tensors: list[Tensor] = []  # keeps their ids from being used again
        self._in_leaf = False

    def run(self, method: str, sample: Tensor) -> Expression:
        self._set(sample, ("input",))
        with torch.no_grad(), self._wrapped(), self:  # changes of the grad mode inside are seen too
            out = getattr(self.block, method)(sample)
        result = self._expressions.get(id(out))
        if result is None:
            raise NotRecognised("its forward returns something else than one tensor that it computes")
        if any(not _contains(result, call) for call in self._calls):
            raise NotRecognised("its forward calls a module whose result it does not use")
        return result

    def _set(self, tensor: Tensor, expression: Expression) -> None:
        self._expressions[id(tensor)] = expression
        self._tensors.append(tensor)

    def _get(self, value: Any, where: str) -> Expression:
        found = self._expressions.get(id(value))
        if found is None:
            raise NotRecognised(f"its forward calls {where} on something that no recognised step computes")
        return found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._in_leaf:
            return func(*args, **kwargs)
        if func == _DTYPE:
            self.reads_dtype = True
            return func(*args, **kwargs)
        if func == _DEVICE:
            self.reads_device = True
            return func(*args, **kwargs)
        expression = self._expression(func, args, kwargs)
        out = func(*args, **kwargs)
        if expression[0] == "halves":
            return self._halves(args[0], out, expression[1])
        out = out.view_as(out)  # a new tensor object, also where the operation returns its input
        self._set(out, expression)
        return out

    def _expression(self, func: Any, args: Any, kwargs: Any) -> Expression:
        name = getattr(func, "__name__", str(func))
        if func in FUNCTIONS:
            return ("activation", FUNCTIONS[func], None, self._get(args[0], name))
        if func in _SQUARES or (func in _POWERS and len(args) == 2 and type(args[1]) in (int, float) and args[1] == 2):
            squared = self._get(args[0], name)
            if squared[:3] == ("activation", "relu", None):
                return ("activation", "relu2", None, squared[3])
        if func is F.gelu:
            approximate = kwargs.get("approximate", "none")
            if approximate in GELU:
                return ("activation", GELU[approximate], None, self._get(args[0], name))
        if func is F.dropout:
            probability, training = (list(args[1:]) + [0.5, True][len(args) - 1 :])[:2]
            if kwargs.get("training", training) is self.block.training and not kwargs.get("inplace", False):
                return ("dropout", float(kwargs.get("p", probability)), self._get(args[0], name))
        if func in _PRODUCTS and len(args) == 2 and not kwargs:
            return ("product", self._get(args[0], name), self._get(args[1], name))
        if func in _SPLITS:
            return ("halves", self._get(args[0], name))
        raise NotRecognised(f"its forward calls {name}, which is not part of a known block")

    def _halves(self, whole: Tensor, parts: tuple[Tensor, ...], expression: Expression) -> tuple[Tensor, ...]:
        half = (*whole.shape[:-1], whole.shape[-1] // 2)
        if len(parts) != 2 or any(tuple(part.shape) != half for part in parts) or whole.shape[-1] % 2:
            raise NotRecognised("its forward splits a tensor, but not the last dimension into halves")
        for number, part in enumerate(parts):
            self._set(part, ("half", number, expression))
        return parts

    def _leaf_forward(self, path: Path, module: nn.Module) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            name = ".".join(path)
            if len(args) != 1 or kwargs:
                raise NotRecognised(f"its forward calls {name} with other arguments than one tensor")
            before = self._get(args[0], name)
            self._in_leaf = True
            try:
                out = type(module).forward(module, *args)
                if not isinstance(out, Tensor):
                    raise NotRecognised(f"{name} returns something else than a tensor")
                out = out.view_as(out)
            finally:
                self._in_leaf = False
            if (activation := activation_of(module)) is not None:
                expression: Expression = ("activation", activation, path, before)
            else:
                expression = ("linear" if is_linear(module) else "module", path, before)
            self._set(out, expression)
            self._calls.append(expression)
            return out

        return forward

    @contextlib.contextmanager
    def _wrapped(self) -> Iterator[None]:
        """Leaves report their calls, and all other modules the attributes that their forward reads."""
        classes = {path: type(module) for path, module in self.inlined.items()}
        try:
            for path, module in self.inlined.items():
                object.__setattr__(module, "__class__", _reporting(classes[path], path, self.attributes))
            for path, module in self.leaves.items():
                module.__dict__["forward"] = self._leaf_forward(path, module)
            yield
        finally:
            for path, module in self.inlined.items():
                object.__setattr__(module, "__class__", classes[path])
            for module in self.leaves.values():
                module.__dict__.pop("forward", None)


def _leaves(block: nn.Module) -> tuple[dict[Path, nn.Module], dict[Path, nn.Module]]:
    leaves: dict[Path, nn.Module] = {}
    inlined: dict[Path, nn.Module] = {}
    seen: set[int] = set()

    def visit(path: Path, module: nn.Module) -> None:
        if not is_plain(module):
            raise NotRecognised(f"{'.'.join(path) or 'it'} has hooks or a forward of its own")
        if id(module) in seen:
            raise NotRecognised(f"{'.'.join(path)} is in it twice")
        seen.add(id(module))
        children = {name: child for name, child in module._modules.items() if child is not None}
        if path and (not children or activation_of(module) is not None):
            leaves[path] = module
        else:
            inlined[path] = module
            for name, child in children.items():
                visit((*path, name), child)

    visit((), block)
    return leaves, inlined


def _contains(expression: Expression, part: Expression) -> bool:
    return expression is part or any(isinstance(each, tuple) and _contains(each, part) for each in expression)


def _reporting(kind: type, path: Path, found: dict[tuple[Path, str], Any]) -> type:
    """A subclass whose instances report what is read from them."""
    get: Any = kind.__getattribute__
    where = f"{'.'.join(path)}." if path else "self."

    def getattribute(self: nn.Module, name: str) -> Any:
        value = get(self, name)
        if name not in _OWN and not name.startswith("__") and name in object.__getattribute__(self, "__dict__"):
            if not isinstance(value, _VALUES):
                raise NotRecognised(f"its forward reads {where}{name}, whose content may change")
            found[path, name] = value
        return value

    def absent(self: nn.Module, name: str) -> Any:
        """Of children, and of what does not exist: an adapter may add it later."""
        try:
            value = kind.__getattr__(self, name)  # type: ignore[attr-defined]
        except AttributeError:
            found[path, name] = ABSENT
            raise
        if value is None:
            found[path, name] = None
        return value

    def setattribute(self: nn.Module, name: str, value: Any) -> None:
        raise NotRecognised(f"its forward sets {where}{name}")

    members = {"__getattribute__": getattribute, "__getattr__": absent, "__setattr__": setattribute}
    return type(kind)(kind.__name__, (kind,), {**members, "__module__": kind.__module__})
