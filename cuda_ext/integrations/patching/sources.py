"""Layers that call an activation on a linear layer among other things, as those of BART and Whisper do.

Their forward has too many arguments and branches to be recorded. Its source is compiled again with every expression
``self.activation(self.linear(x))`` replaced by one call that computes just that, so all else stays as it is. Two
statements that compute it one after the other count as one expression.
"""

from __future__ import annotations

import ast
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from cuda_ext._activations import activation_of
from cuda_ext.integrations.patching.blocks import activated
from cuda_ext.integrations.patching.fusions import is_linear

HELPER = "_cuda_ext_activated"


def activated_pairs(module: nn.Module) -> tuple[tuple[str, str], ...]:
    """(activation, linear) of each such expression in the forward of a module, by the names of the children."""
    children = module._modules
    return tuple(
        (one, two)
        for one, two in _pairs(type(module).forward)
        if activation_of(children.get(one)) is not None and is_linear(children.get(two))
    )


@functools.cache
def _pairs(forward: Any) -> tuple[tuple[str, str], ...]:
    inner = inspect.unwrap(forward)
    found = None if _wrappers(forward) is None else _source(inner)
    if found is None:
        return ()
    rewriter = _Rewriter(None)
    rewriter.visit(found[1])
    # The source may be of another version than the code, or a decorator may have changed the code.
    return tuple(dict.fromkeys(rewriter.found)) if rewriter.found and _is_current(inner) else ()


def rewritten(original: type[nn.Module], pairs: tuple[tuple[str, str], ...]) -> Callable[..., Any]:
    """The forward of a class with these expressions replaced."""
    forward: Any = inspect.unwrap(original.forward)
    found, wrappers = _source(forward), _wrappers(original.forward)
    if found is None or wrappers is None or not _is_current(forward):
        raise RuntimeError(
            f"cuda_ext.patch: the source of {original.__qualname__}.forward is not the one that it was patched with; "
            "load the model with the version of its library that saved it"
        )
    tree, definition = found
    _Rewriter(set(pairs)).visit(definition)
    code = _compiled(tree, forward)
    assert code is not None
    function = _like(forward, code, forward.__closure__)
    for wrapper in reversed(wrappers):
        cells = tuple(
            types.CellType(function) if _holds(cell, wrapper.__wrapped__) else cell for cell in _cells(wrapper)
        )
        outer = _like(wrapper, wrapper.__code__, cells)
        outer.__wrapped__ = function
        function = outer
    return function


def _like(model: Any, code: types.CodeType, cells: tuple[types.CellType, ...] | None) -> Any:
    function = types.FunctionType(code, model.__globals__, model.__name__, model.__defaults__, cells)
    function.__kwdefaults__ = model.__kwdefaults__
    functools.update_wrapper(function, model)
    return function


def _wrappers(function: Any) -> list[Any] | None:
    """The decorators' functions around a method, the outermost first, if each has the inner one in its closure."""
    found = []
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        if not isinstance(function, types.FunctionType) or sum(_holds(cell, inner) for cell in _cells(function)) != 1:
            return None
        found.append(function)
        function = inner
    return found


def _cells(function: Any) -> tuple[types.CellType, ...]:
    return function.__closure__ or ()


def _holds(cell: types.CellType, value: Any) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # empty
        return False


def activated_in(self: nn.Module, activation: nn.Module, layer: nn.Module, x: Any) -> Tensor:
    return activated(layer, activation, x)


class _Rewriter(ast.NodeTransformer):
    """Collects the expressions in `found`, and replaces those in ``pairs``."""

    def __init__(self, pairs: set[tuple[str, str]] | None) -> None:
        self.pairs = pairs
        self.found: list[tuple[str, str]] = []

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                value[:] = self._joined(value)
        return super().generic_visit(node)

    def _joined(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        """``x = self.linear(...); x = self.activation(x)`` as one statement."""
        joined: list[ast.stmt] = []
        for statement in statements:
            previous = joined[-1] if joined else None
            one, two = _assigned_call(previous), _assigned_call(statement)
            if one is not None and two is not None and one[0] == two[0] and previous is not None:
                argument, pair = two[1].args[0], (_attribute(two[1].func), _attribute(one[1].func))
                wanted = None not in pair and (self.pairs is None or pair in self.pairs)
                if wanted and isinstance(argument, ast.Name) and argument.id == one[0]:
                    two[1].args[0] = one[1]
                    joined[-1] = ast.copy_location(statement, previous)
                    continue
            joined.append(statement)
        return joined

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        inner = node.args[0] if len(node.args) == 1 and not node.keywords else None
        if not isinstance(inner, ast.Call) or len(inner.args) != 1 or inner.keywords:
            return node
        if isinstance(inner.args[0], ast.Starred):
            return node
        pair = (_attribute(node.func), _attribute(inner.func))
        if pair[0] is None or pair[1] is None:
            return node
        self.found.append((pair[0], pair[1]))
        if self.pairs is None or pair not in self.pairs:
            return node
        helper = ast.Attribute(ast.Name("self", ast.Load()), HELPER, ast.Load())
        return ast.copy_location(ast.Call(helper, [node.func, inner.func, inner.args[0]], []), node)


def _assigned_call(node: ast.stmt | None) -> tuple[str, ast.Call] | None:
    """The name and the call of ``name = function(argument)``."""
    if not isinstance(node, ast.Assign) or len(node.targets) != 1 or not isinstance(node.targets[0], ast.Name):
        return None
    call = node.value
    if not isinstance(call, ast.Call) or len(call.args) != 1 or call.keywords:
        return None
    return node.targets[0].id, call


def _attribute(node: ast.expr) -> str | None:
    is_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr if is_own else None  # type: ignore[attr-defined]


def _source(function: Any) -> tuple[ast.Module, ast.FunctionDef] | None:
    """The whole file of a function, because a compiler uses what it knows of the module, and the function in it."""
    if not isinstance(function, types.FunctionType):
        return None
    try:
        tree = ast.parse("".join(inspect.findsource(function)[0]))
    except (OSError, SyntaxError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == function.__name__:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if first == function.__code__.co_firstlineno:
                return tree, node
    return None


def _is_current(function: types.FunctionType) -> bool:
    found = _source(function)
    code = None if found is None else _compiled(found[0], function)
    return code is not None and code == function.__code__


def _compiled(tree: ast.Module, function: types.FunctionType) -> types.CodeType | None:
    """The code of the function with this tree of its file."""
    ast.fix_missing_locations(tree)
    wanted = function.__code__
    stack = [compile(tree, wanted.co_filename, "exec", dont_inherit=True)]
    while stack:
        code = stack.pop()
        if (code.co_name, code.co_firstlineno) == (wanted.co_name, wanted.co_firstlineno):
            return code
        stack += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return None
