"""The GEMM ops under torch.func, forward mode and second derivatives, beside plain PyTorch under the same transform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from gemm_common import ACTIVATIONS, OPS, REFERENCES, arguments, rand
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from cuda_ext import nn
from cuda_ext._gemm import gemm, linear
from cuda_ext._load import ops
from cuda_ext._toolchain import NAMESPACE

Function = Callable[..., Tensor]


def functions(op: str, names: list[str], **options: Any) -> tuple[Function, Function]:
    """The op and its reference, as functions of the tensors called `names`."""

    def positional(function: Function) -> Function:
        return lambda *values: function(**dict(zip(names, values, strict=True)), **options)

    return positional(OPS[op]), positional(REFERENCES[op])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("op", OPS)
def test_second_derivatives_and_forward_mode(op: str, activation: str | None) -> None:
    tensors = arguments(op, (2,), 2, 3, 2, f=2, dtype=torch.float64)
    ours, _ = functions(op, list(tensors), activation=activation)
    values = tuple(tensors.values())
    assert gradcheck(ours, values, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    assert gradgradcheck(ours, values, check_fwd_over_rev=True)


def test_second_derivatives_of_gemm_options() -> None:
    a, b, c = (rand(*s, dtype=torch.float64) for s in ((2, 1, 2, 3), (3, 3, 2), (3, 1, 2)))
    for activation in (None, "silu"):
        for beta in (-1.7, 0.0):
            call = lambda a, b, c, beta=beta, activation=activation: gemm(  # noqa: E731
                a, b, c, alpha=0.3, beta=beta, activation=activation
            )
            assert gradcheck(call, (a, b, c), check_forward_ad=True)
            assert gradgradcheck(call, (a, b, c), check_fwd_over_rev=True)


@pytest.mark.parametrize("op", OPS)
def test_absent_arguments_in_second_derivatives(op: str) -> None:
    tensors = arguments(op, (), 2, 3, 2, f=2, dtype=torch.float64)
    required = {n: t for n, t in tensors.items() if not n.startswith(("bias", "c", "residual"))}
    ours, _ = functions(op, list(required), activation="gelu")
    assert gradgradcheck(ours, tuple(required.values()), check_fwd_over_rev=True)


TRANSFORMS: dict[str, Callable[[Function, Tensor], Any]] = {
    "grad": lambda f, x: grad(lambda x: f(x).sin().sum())(x),
    "vjp": lambda f, x: vjp(f, x)[1](f(x).cos())[0],
    "jvp": lambda f, x: jvp(f, (x,), (x.sin(),)),
    "jacrev": lambda f, x: jacrev(f)(x),
    "jacfwd": lambda f, x: jacfwd(f)(x),
    "hessian": lambda f, x: hessian(lambda x: f(x).sin().sum())(x),
    "grad of grad": lambda f, x: grad(lambda x: grad(lambda x: f(x).sin().sum())(x).sin().sum())(x),
    "grad of vmap": lambda f, x: grad(lambda x: vmap(f)(torch.stack([x, x.cos()])).sin().sum())(x),
    "vmap of grad": lambda f, x: vmap(grad(lambda x: f(x).sin().sum()))(torch.stack([x, x.cos()])),
    "vmap of jvp": lambda f, x: vmap(lambda x: jvp(f, (x,), (x.sin(),)))(torch.stack([x, x.cos()])),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("op", OPS)
def test_transforms_of_every_argument(op: str, transform: str) -> None:
    tensors = arguments(op, (2,), 2, 3, 2, f=2, dtype=torch.float64, grad=False)
    ours, reference = functions(op, list(tensors), activation="silu")
    values = list(tensors.values())
    for n, value in enumerate(values):

        def of_one(function: Function, n: int = n) -> Function:
            return lambda x: function(*values[:n], x, *values[n + 1 :])

        actual = TRANSFORMS[transform](of_one(ours), value)
        torch.testing.assert_close(actual, TRANSFORMS[transform](of_one(reference), value))


@pytest.mark.every_backend
@pytest.mark.parametrize("op", OPS)
def test_on_every_backend(op: str) -> None:
    """Gradients of each sample, tangents and a Hessian-vector product: the products in them run on the backend."""
    tensors = [t / 3 for t in arguments(op, (), 4, 8, 8, f=8, grad=False).values()]  # results then are about 1
    ours, reference = functions(op, list(arguments(op, (), 4, 8, 8)), activation="gelu")

    def check(run: Callable[..., Any]) -> None:
        samples = torch.randn(3, 4, 8)
        actual = run(ours, samples, *tensors)
        expected = run(reference, samples.double(), *(t.double() for t in tensors))
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5, check_dtype=False)

    check(lambda f, samples, x, w, *more: vmap(grad(lambda w, x: f(x, w, *more).sin().sum()), (None, 0))(w, samples))
    check(lambda f, samples, x, *more: jvp(lambda x: f(x, *more), (x,), (samples[0],)))
    check(lambda f, samples, x, *more: jvp(grad(lambda x: f(x, *more).sin().sum()), (x,), (samples[0],)))

    def penalty(f: Function, samples: Tensor, x: Tensor, *more: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(f(x, *more).sin().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    check(penalty)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_dual_tensors(op: str, requires_grad: bool) -> None:
    tensors = arguments(op, (), 2, 3, 4, dtype=torch.float64, grad=requires_grad)
    ours, reference = functions(op, list(tensors), activation="relu")
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(t, torch.randn_like(t)) for t in tensors.values()]
        actual, expected = (forward_ad.unpack_dual(f(*duals)) for f in (ours, reference))
        torch.testing.assert_close(actual, expected)
        assert (actual.primal.grad_fn is not None) == requires_grad


def test_tangents_have_the_dtype_of_the_output() -> None:
    a, b = torch.randn(3, 4).bfloat16(), torch.randn(4, 5).bfloat16()
    out, tangent = jvp(lambda a: gemm(a, b, out_dtype=torch.float32), (a,), (torch.ones_like(a),))
    assert out.dtype == tangent.dtype == torch.float32
    torch.testing.assert_close(tangent, b.float().sum(0).expand(3, 5))


def test_gradients_of_each_sample_of_a_module() -> None:
    module = nn.GatedMLP(4, 8)
    parameters = {n: p.detach() for n, p in module.named_parameters()}
    inputs = torch.randn(3, 2, 4)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(module, parameters, (x,)).square().sum()

    together = vmap(grad(loss), (None, 0))(parameters, inputs)
    for n, x in enumerate(inputs):
        for name, alone in grad(loss)(parameters, x).items():
            torch.testing.assert_close(together[name][n], alone)


def test_an_outer_graph_goes_through_torch_func() -> None:
    x, w = rand(3, 4, dtype=torch.float64), rand(5, 4, dtype=torch.float64)
    run = lambda f: torch.autograd.grad(grad(lambda x: f(x, w).sin().sum())(x).sin().sum(), [x, w])  # noqa: E731
    torch.testing.assert_close(run(linear), run(torch.nn.functional.linear))


def test_a_gradient_penalty_in_low_precision() -> None:
    x, w = rand(8, 16, dtype=torch.bfloat16), rand(4, 16, dtype=torch.bfloat16)
    out = linear(x, w, activation="silu")
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    gradient.float().square().sum().backward()
    assert x.grad is not None and w.grad is not None and w.grad.dtype == torch.bfloat16


def test_second_derivatives_see_a_change_of_what_was_saved() -> None:
    x, w, c = rand(3, 4), rand(5, 4), torch.zeros(3, 5)
    out = gemm(x, w.t(), c, activation="silu")
    c.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


def test_names_of_nodes() -> None:
    x, w = rand(3, 4), rand(4, 4)
    assert linear(x, w).grad_fn.name() == f"{NAMESPACE}::LinearBackward"
    assert gemm(x, w).grad_fn.name() == f"{NAMESPACE}::GemmBackward"
    assert OPS["gated_linear"](x, w).grad_fn.name() == f"{NAMESPACE}::GatedLinearBackward"
    assert OPS["mlp"](x, w, w).grad_fn.name() == f"{NAMESPACE}::MlpBackward"
    assert OPS["gated_mlp"](x, w, rand(4, 2)).grad_fn.name() == f"{NAMESPACE}::GatedMlpBackward"


def test_the_ops_beneath_refuse_forward_mode() -> None:
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward AD"):
        ops.linear_forward(forward_ad.make_dual(x, x), w)
