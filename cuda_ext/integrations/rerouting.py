"""Reroutes a function of another library in place, by its code.

Who has imported the function, or wrapped it with `torch.compile`, holds the same object, and so is rerouted too.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

__all__ = ["Rerouted"]


class Rerouted:
    """``function`` calls ``module.name`` with all its arguments by name, until `restore`. ``original`` is what it was.

    It also takes keyword arguments that it did not have, and passes them on.

    Raises:
        RuntimeError: `function` is not written in Python, or has a closure.
    """

    def __init__(self, function: Any, module: str, name: str) -> None:
        if not isinstance(function, types.FunctionType) or function.__closure__ is not None:
            own = getattr(function, "__name__", name)
            raise RuntimeError(f"expected {own} to be a plain Python function, got {function!r}; undo what replaced it")
        self._function, self._code = function, function.__code__
        self.original = copy_of(function)
        self._set(_code(function.__name__, _parameters(self.original), module, name))

    def restore(self) -> None:
        self._set(self._code)

    def _set(self, code: types.CodeType) -> None:
        self._function.__code__ = code
        # Dynamo keeps the parameters of a function that it has traced, also after `torch.compiler.reset()`.
        specs = getattr(sys.modules.get("torch._dynamo.variables.functions"), "_spec_cache", None)
        if specs is not None:
            specs.pop(self._function, None)


def copy_of(function: types.FunctionType) -> Callable[..., Any]:
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(copy, function)
    del copy.__wrapped__  # type: ignore[attr-defined]
    return copy


def _parameters(function: Callable[..., Any]) -> tuple[tuple[str, bool], ...]:
    """The names, and whether they are for keywords only."""
    parameters = inspect.signature(function).parameters.values()
    return tuple((each.name, each.kind is each.KEYWORD_ONLY) for each in parameters)


# Always the same code, because compilers keep what they have compiled with it.
@functools.cache
def _code(name: str, parameters: tuple[tuple[str, bool], ...], module: str, target: str) -> types.CodeType:
    """Code of the same layout, so that the defaults of the function remain valid."""
    plain = [each for each, keyword_only in parameters if not keyword_only]
    keywords = [each for each, keyword_only in parameters if keyword_only]
    head = ", ".join([*plain, *(["*", *keywords] if keywords else []), "**more"])
    passed = ", ".join([*(f"{each}={each}" for each, _ in parameters), "**more"])
    source = f"def {name}({head}):\n    from {module} import {target}\n    return {target}({passed})\n"
    namespace: dict[str, Any] = {}
    exec(compile(source, __file__, "exec"), namespace)
    code: types.CodeType = namespace[name].__code__
    return code
