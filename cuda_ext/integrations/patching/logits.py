"""A model's loss without its logits, while the model's own forward runs.

The output layer returns a stand-in: what the logits would be computed from. It goes through what models do to logits
before their loss: a bias, a factor, tanh, another view of the rows, a conversion. Its cross entropy is
`cuda_ext.linear_cross_entropy`. Any other operation forms the logits and takes them, so only memory and time depend on
this list, and `cuda_ext.integrations.transformers.calls()` then has the name of the operation.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cuda_ext._checks import autocasts
from cuda_ext.integrations.patching.blocks import parameters_of, takes
from cuda_ext.integrations.patching.fusions import Path, is_plain, module_at
from cuda_ext.integrations.transformers.names import counter
from cuda_ext.loss import linear_cross_entropy

FLAG = "_cuda_ext_returns_stand_in"  # an attribute of an output layer
HEAD = ("head",)  # the recipe of its class
_Step = tuple[Callable[..., Any], tuple[Any, ...]]


class StandIn:
    """``steps`` applied to ``input @ weight.T + bias``, which is (..., V) and is not formed: their value is
    ``outer * tanh(inner * product)``, without ``outer`` ``inner * product``, in ``dtype``."""

    def __init__(
        self,
        input: Tensor,  # (..., K)
        weight: Tensor,  # (V, K)
        bias: Tensor | None,
        dtype: torch.dtype,
        inner: float = 1.0,
        outer: float | None = None,
        steps: tuple[_Step, ...] = (),
    ) -> None:
        self.input, self.weight, self.bias, self.dtype = input, weight, bias, dtype
        self.inner, self.outer, self.steps = inner, outer, steps

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.input.shape[:-1], self.weight.shape[0]))

    @property
    def device(self) -> torch.device:
        return self.input.device

    @property
    def ndim(self) -> int:
        return self.input.ndim

    def dim(self) -> int:
        return self.input.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def formed(self) -> Tensor:
        """The logits, by the steps that the model took."""
        # The rows of `input` are those after the steps that rearrange them: such steps are not among `steps`.
        logits = F.linear(self.input, self.weight, self.bias)
        for function, arguments in self.steps:
            logits = function(logits, *arguments)
        return logits

    def _next(self, function: Callable[..., Any], *arguments: Any, **changed: Any) -> StandIn:
        state = {"dtype": self.dtype, "inner": self.inner, "outer": self.outer, "input": self.input, **changed}
        return StandIn(weight=self.weight, bias=self.bias, steps=(*self.steps, (function, arguments)), **state)

    def _of_rows(self, input: Tensor) -> StandIn:
        return StandIn(input, self.weight, self.bias, self.dtype, self.inner, self.outer, self.steps)

    # What models do to logits before their loss

    def __mul__(self, other: Any) -> Any:
        if type(other) not in (int, float):
            return _form(torch.mul, (self, other))
        if self.outer is None:
            return self._next(torch.mul, other, inner=self.inner * other)
        return self._next(torch.mul, other, outer=self.outer * other)

    def __rmul__(self, other: Any) -> Any:
        return self * other

    def __truediv__(self, other: Any) -> Any:
        if type(other) not in (int, float) or other == 0:
            return _form(torch.div, (self, other))
        if self.outer is None:
            return self._next(torch.div, other, inner=self.inner / other)
        return self._next(torch.div, other, outer=self.outer / other)

    def __add__(self, other: Any) -> Any:
        """Of a bias that the model keeps apart from its output layer, as BART does."""
        classes = self.weight.shape[0]
        is_bias = isinstance(other, Tensor) and tuple(other.shape) in ((classes,), (1, classes))
        if not is_bias or self.steps or other.dtype != self.weight.dtype:
            return _form(torch.add, (self, other))
        bias = other.reshape(classes)
        return StandIn(self.input, self.weight, bias if self.bias is None else bias + self.bias, self.dtype)

    def tanh(self) -> Any:
        return self._next(torch.tanh, outer=1.0) if self.outer is None else _form(torch.tanh, (self,))

    def to(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            if args[0] == self.device:
                return self
            if isinstance(args[0], torch.dtype) and args[0].is_floating_point:
                return self._next(Tensor.to, args[0], dtype=args[0])
        return _form(Tensor.to, (self, *args), kwargs)

    def float(self) -> Any:
        return self.to(torch.float32)

    def contiguous(self) -> StandIn:
        return self

    def view(self, *shape: Any) -> Any:
        sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        if sizes and sizes[-1] == self.weight.shape[0]:
            return self._of_rows(self.input.reshape(*sizes[:-1], self.input.shape[-1]))
        return _form(Tensor.view, (self, *shape))

    def reshape(self, *shape: Any) -> Any:
        return self.view(*shape)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, tuple) and index and all(type(each) is slice or each is Ellipsis for each in index):
            sliced = len(index) - index.count(Ellipsis)  # dimensions
            of_classes = index[-1] is not Ellipsis and (Ellipsis in index or sliced == self.ndim)
            if index[-1] == slice(None) if of_classes else sliced < self.ndim:
                return self._of_rows(self.input[index])
        return _form(Tensor.__getitem__, (self, index))

    # All else

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy and (loss := _cross_entropy(*args, **kwargs)) is not None:
            return loss
        if func is torch.tanh and len(args) == 1 and not kwargs:
            return args[0].tanh()
        return _form(func, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a question whether it is of some kind
            raise AttributeError(name)
        _count(name)
        return getattr(self.formed(), name)


def _operator(name: str) -> Callable[..., Any]:
    def method(self: StandIn, *args: Any) -> Any:
        return _form(getattr(Tensor, name), (self, *args))

    return method


# Python looks these up in the class, past __getattr__.
for _name in ("radd", "sub", "rsub", "rtruediv", "pow", "matmul", "eq", "ne", "lt", "le", "gt", "ge"):
    setattr(StandIn, f"__{_name}__", _operator(f"__{_name}__"))
for _name in ("neg", "abs", "len", "bool", "iter", "setitem"):
    setattr(StandIn, f"__{_name}__", _operator(f"__{_name}__"))
StandIn.__hash__ = object.__hash__  # type: ignore[method-assign]


def _count(name: str) -> None:
    if not torch.compiler.is_compiling():
        counter.refused(f"loss: {name} of logits")


def _form(function: Callable[..., Any], args: Any, kwargs: Any = None) -> Any:
    _count(getattr(function, "__name__", str(function)))
    return function(*map(_formed, args), **{name: _formed(value) for name, value in (kwargs or {}).items()})


def _formed(value: Any) -> Any:
    if isinstance(value, StandIn):
        return value.formed()
    if type(value) in (list, tuple):
        return type(value)(map(_formed, value))
    return value


def _cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """None if the arguments are not those of logits (rows, V) and one class for each row."""
    if not (
        isinstance(input, StandIn)
        and isinstance(target, Tensor)
        and target.dtype == torch.int64
        and input.ndim <= 2
        and target.shape == input.shape[:-1]
        and size_average is reduce is None
        and (input.outer is None or input.outer > 0)
    ):
        return None
    counter.served("linear_cross_entropy")
    softcap = input.outer or 0.0
    loss: Any = linear_cross_entropy(
        input.input,
        input.weight,
        target,
        linear_bias=input.bias,
        weight=weight,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        softcap=softcap,
        scale=input.inner * softcap if softcap else input.inner,
    )
    found: Tensor = loss if autocasts(input.device) else loss.to(input.dtype)
    return found


# The methods of swapped modules


def head_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Of an output layer: a stand-in, while the model asks for it."""

    @functools.wraps(original)
    def forward(self: nn.Module, input: Any) -> Any:
        # A subclass, such as that of a parametrization, may have another weight.
        if getattr(self, FLAG) and "_cuda_ext_recipe" in type(self).__dict__ and is_plain(self) and takes(input):
            weights = parameters_of(self, input)
            if weights is not None:
                dtype = torch.get_autocast_dtype(input.device.type) if autocasts(input.device) else input.dtype
                return StandIn(input, *weights, dtype)
        return original(self, input)

    return forward


def model_forward(original: Callable[..., Any], head: Path, return_logits: bool) -> Callable[..., Any]:
    """Of a model with its output layer at ``head``."""
    position = list(inspect.signature(original).parameters).index("labels") - 1  # without self

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        labels = args[position] if len(args) > position else kwargs.get("labels")
        layer = None if labels is None else module_at(self, head)
        if layer is None or getattr(layer, "_cuda_ext_recipe", None) != HEAD:
            return original(self, *args, **kwargs)
        # A second thread may find the flag set or cleared too early. Then it forms its logits, here or in its loss.
        setattr(layer, FLAG, True)
        try:
            outputs = original(self, *args, **kwargs)
        finally:
            setattr(layer, FLAG, False)
        return _without_stand_ins(outputs, return_logits)

    return forward


def _without_stand_ins(outputs: Any, return_logits: bool) -> Any:
    """``outputs`` with logits, or without, as transformers leaves out what is None."""
    if isinstance(outputs, tuple):
        kept = [each for each in outputs if return_logits or not isinstance(each, StandIn)]
        return tuple(map(_formed, kept))
    if isinstance(outputs, dict):  # a ModelOutput
        found = {name: each for name, each in outputs.items() if return_logits or not isinstance(each, StandIn)}
        return type(outputs)(**{name: _formed(each) for name, each in found.items()})
    return _formed(outputs)
