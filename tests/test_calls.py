"""The faster calls of cuda_ext._calls: the same results, errors and dispatch as torch.ops, or none of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import cuda_ext
from cuda_ext import _load

A, B, C, V = torch.randn(3, 4), torch.randn(4, 5), torch.randn(3, 5), torch.randn(5)
W, W2 = torch.randn(6, 4), torch.randn(5, 3)
Q = torch.randn(1, 3, 2, 8)
# Arguments of each op, all of them by position.
CALLS: dict[str, tuple[Any, ...]] = {
    "gemm": (A, B, C, V, "relu", 2.0, 0.5, torch.float32),
    "linear": (A, W, torch.randn(6), torch.randn(3, 6), "gelu"),
    "gated_linear": (A, W, torch.randn(6), None),
    "mlp": (A, torch.randn(3, 4), W2, None, V, None, "relu2"),
    "gated_mlp": (A, W, W2, torch.randn(6), None, torch.randn(5), "silu"),
    "flash_attention": (Q, Q, Q, *[None] * 7, True, 0.5, 1, None, 0.0, 0.0, None, False),
}


def test_they_are_built_for_this_python() -> None:
    assert not isinstance(_load.calls, _load._NoCalls)
    assert f"cpython-{sys.version_info.major}{sys.version_info.minor}" in _load.calls.__file__


@pytest.mark.parametrize("name", CALLS)
def test_they_are_the_ops(name: str) -> None:
    arguments = CALLS[name]
    schema = getattr(torch.ops.cuda_ext, name).default._schema
    assert len(schema.arguments) == len(arguments)
    positional = [value for given, value in zip(schema.arguments, arguments) if not given.kwarg_only]
    keywords = {given.name: value for given, value in zip(schema.arguments, arguments) if given.kwarg_only}
    expected = getattr(torch.ops.cuda_ext, name)(*positional, **keywords)
    torch.testing.assert_close(getattr(_load.calls, name)(*arguments), expected, atol=0, rtol=0)


class Sub(Tensor):
    pass


class Counts(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is torch.ops.cuda_ext.gemm.default
        return func(*args, **(kwargs or {}))


class Sees(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


ODD: dict[str, Callable[[], Any]] = {
    "a subclass": lambda: _load.calls.gemm(A.as_subclass(Sub), B, None, None, None, 1.0, 1.0, None),
    "an int for a float": lambda: _load.calls.gemm(A, B, None, None, None, 1, 1.0, None),
    "a tensor for a float": lambda: _load.calls.gemm(A, B, None, None, None, torch.tensor(1.0), 1.0, None),
    "no tensor": lambda: _load.calls.gemm(A, None, None, None, None, 1.0, 1.0, None),
    "a number for a name": lambda: _load.calls.linear(A, W, None, None, 3),
    "a name that is no text": lambda: _load.calls.linear(A, W, None, None, "\ud800"),
    "too few": lambda: _load.calls.gemm(A, B),
    "a large int": lambda: _load.calls.flash_attention(
        *CALLS["flash_attention"][:12], 2**70, *CALLS["flash_attention"][13:]
    ),
}


@pytest.mark.parametrize("what", ODD)
def test_what_they_do_not_know_is_left_to_the_op(what: str) -> None:
    assert ODD[what]() is NotImplemented


def test_the_functions_serve_it_all_the_same() -> None:
    torch.testing.assert_close(cuda_ext.gemm(A, B, alpha=2), 2 * A @ B)
    assert isinstance(cuda_ext.gemm(A.as_subclass(Sub), B), Sub)
    with pytest.raises(RuntimeError, match="Expected a value of type 'Tensor' for argument 'b'"):
        cuda_ext.gemm(A, 3)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"cuda_ext::gemm: expected b of shape \(\.\.\., 4, N\)"):
        cuda_ext.gemm(A, A)
    with pytest.raises(RuntimeError, match="expected activation to be None"):
        cuda_ext.linear(A, W, activation="swish")
    with Counts() as mode:
        cuda_ext.gemm(A, B)
    assert mode.calls == 1
    with Sees() as seen:
        cuda_ext.gemm(A, B)
    assert seen.seen == [torch.ops.cuda_ext.gemm.default]


def test_autograd_autocast_vmap_and_tracing() -> None:
    a = A.clone().requires_grad_()
    assert cuda_ext.gemm(a, B).grad_fn.name() == "cuda_ext::GemmBackward"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert cuda_ext.gemm(A, B).dtype == torch.bfloat16
    torch.testing.assert_close(torch.vmap(lambda x: cuda_ext.gemm(x[None], B)[0])(A), A @ B)
    traced = torch.jit.trace(lambda x: cuda_ext.gemm(x, B), (A,))
    assert "cuda_ext::gemm" in str(traced.inlined_graph)
    torch.testing.assert_close(traced(A + 1), (A + 1) @ B)
    with torch.inference_mode():
        assert cuda_ext.linear(A, W).is_inference()


def test_a_compiled_graph_has_the_op() -> None:
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: cuda_ext.gemm(x, B) + 1, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(A), A @ B + 1)
    assert any(node.target is torch.ops.cuda_ext.gemm.default for node in graphs[0].graph.nodes)


def test_without_the_module_calls_go_through_the_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuda_ext._gemm.calls", _load._NoCalls())
    monkeypatch.setattr("cuda_ext.attention.calls", _load._NoCalls())
    torch.testing.assert_close(cuda_ext.gemm(A, B), A @ B)
    torch.testing.assert_close(cuda_ext.mlp(A, torch.eye(4), torch.eye(4), activation=None), A)
    assert cuda_ext.flash_attention(Q, Q, Q).shape == Q.shape
