"""The loss as PyTorch sees it: gradcheck, second derivatives, autocast, torch.func, fake tensors, torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from loss_common import DTYPES, REDUCTIONS, operands, probabilities, with_ignored
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap

import cuda_ext
from cuda_ext import testing

Function = Callable[..., Any]
LEAVES = ("input", "linear_weight", "linear_bias")


def loss_of(
    tensors: dict[str, Tensor], function: Function | None = None, **options: Any
) -> tuple[Function, tuple[Tensor, ...]]:
    """The op, or another function, of the hidden states, the weight and the bias alone; and these."""
    rest = {name: tensor for name, tensor in tensors.items() if name not in LEAVES}

    def call(*values: Tensor) -> Any:
        leaves = dict(zip(LEAVES, values, strict=True))
        return (function or cuda_ext.linear_cross_entropy)(**leaves, **rest, **options)

    return call, tuple(tensors[name] for name in LEAVES)


def small(*, ignored: bool = True, **more: Tensor) -> dict[str, Tensor]:
    tensors = operands((4,), 5, 3, torch.float64, bias=True)
    if ignored:
        tensors["target"] = with_ignored(tensors["target"])
    return {**tensors, **more}


# first derivatives


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "label smoothing": {"label_smoothing": 0.3},
    "softcap": {"softcap": 1.5},
    "scale": {"scale": -0.7},
    "z-loss": {"z_loss": 0.2},
    "all": {"label_smoothing": 0.2, "softcap": 2.0, "scale": 1.5, "z_loss": 0.1},
    "forward": {"method": "forward"},
    "recompute": {"method": "recompute"},
}


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.sampled(cases="every value")
def test_gradcheck(options: str, weighted: bool, reduction: str) -> None:
    if options == "forward" and reduction == "none":
        reduction = "sum"
    more = {"weight": torch.rand(5, dtype=torch.float64) + 0.1} if weighted else {}
    assert gradcheck(*loss_of(small(**more), reduction=reduction, **OPTIONS[options]))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradcheck_of_probabilities(reduction: str) -> None:
    tensors = small(ignored=False, target=probabilities((4,), 5, torch.float64), weight=torch.rand(5).double())
    assert gradcheck(*loss_of(tensors, reduction=reduction, label_smoothing=0.1, z_loss=0.1, softcap=3.0))


@pytest.mark.parametrize("wanted", [("lse",), ("entropy",), ("lse", "entropy")], ids=" ".join)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradcheck_of_all_outputs(reduction: str, wanted: tuple[str, ...]) -> None:
    options = {f"return_{name}": True for name in wanted}
    for more in ({}, {"softcap": 2.0, "scale": 1.3, "z_loss": 0.1, "label_smoothing": 0.1}):
        assert gradcheck(*loss_of(small(), reduction=reduction, **options, **more))


@pytest.mark.parametrize("output", [1, 2])
def test_gradcheck_of_one_output_alone(output: int) -> None:
    """Backward gets no gradient for the others."""
    call, leaves = loss_of(small(), return_lse=True, return_entropy=True, reduction="none")
    assert gradcheck(lambda *values: call(*values)[output], leaves)


@pytest.mark.parametrize("return_entropy", [False, True])
def test_gradcheck_of_log_probabilities(return_entropy: bool) -> None:
    for options in ({}, {"softcap": 2.0, "scale": 1.3}):
        call, leaves = loss_of(small(), cuda_ext.linear_log_prob, return_entropy=return_entropy, **options)
        assert gradcheck(call, leaves)


def test_gradients_without_a_bias_and_for_one_operand() -> None:
    tensors = small()
    x, w, target = (tensors[name] for name in ("input", "linear_weight", "target"))
    assert gradcheck(lambda x, w: cuda_ext.linear_cross_entropy(x, w, target), (x, w))
    assert gradcheck(lambda x: cuda_ext.linear_cross_entropy(x, w.detach(), target), (x,))
    assert gradcheck(lambda w: cuda_ext.linear_cross_entropy(x.detach(), w, target, reduction="none"), (w,))


def test_dtypes_of_results_and_gradients() -> None:
    for dtype in DTYPES:
        tensors = operands((3,), 5, 4, dtype, bias=True)
        result = torch.float64 if dtype == torch.float64 else torch.float32
        for reduction in REDUCTIONS:
            outputs = cuda_ext.linear_cross_entropy(
                **tensors, reduction=reduction, return_lse=True, return_entropy=True
            )
            assert [output.dtype for output in outputs] == [result] * 3
            sum(output.sum() for output in outputs).backward()
        log_probs = cuda_ext.linear_log_prob(**tensors, return_entropy=True)
        assert [output.dtype for output in log_probs] == [result] * 2
        assert [tensors[name].grad.dtype for name in LEAVES] == [dtype] * 3


# second derivatives


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradgradcheck(reduction: str) -> None:
    assert gradgradcheck(*loss_of(small(), reduction=reduction))


@pytest.mark.parametrize("options", OPTIONS)
def test_second_derivatives_of_every_option(options: str) -> None:
    """Products of Hessians with a vector, beside those of the composition."""
    tensors = small(weight=torch.rand(5).double() + 0.1)
    more = {} if options in ("forward", "recompute") else {"return_lse": True, "return_entropy": True}

    def second(function: Function) -> list[Tensor]:
        call, leaves = loss_of(tensors, function, **more, **OPTIONS[options])
        out = call(*leaves)
        total = sum(o.sin().sum() for o in out) if isinstance(out, tuple) else out.sin()
        first = torch.autograd.grad(total, leaves, create_graph=True)
        return list(torch.autograd.grad(sum(g.cos().sum() for g in first), leaves))

    ours, expected = second(cuda_ext.linear_cross_entropy), second(testing.reference_linear_cross_entropy)
    torch.testing.assert_close(ours, expected)


def test_second_derivatives_of_log_probabilities() -> None:
    call, leaves = loss_of(small(), cuda_ext.linear_log_prob, return_entropy=True, softcap=2.0)
    assert gradgradcheck(call, leaves)


def test_a_gradient_penalty_in_low_precision() -> None:
    tensors = operands((6,), 9, 5, torch.bfloat16, bias=True)
    loss = cuda_ext.linear_cross_entropy(**tensors)
    (gradient,) = torch.autograd.grad(loss, tensors["input"], create_graph=True)
    gradient.float().square().sum().backward()
    for name in ("input", "linear_weight"):
        assert tensors[name].grad.dtype == torch.bfloat16 and tensors[name].grad.any()


# autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_multiplies_in_its_dtype(dtype: torch.dtype) -> None:
    tensors = operands((2, 5), 12, 7, bias=True)
    low = {n: t.detach().to(dtype).requires_grad_() if n in LEAVES else t for n, t in tensors.items()}
    for function in (cuda_ext.linear_cross_entropy, cuda_ext.linear_log_prob):
        with torch.autocast("cpu", dtype=dtype):
            out = function(**tensors)
        expected = function(**low)
        assert out.dtype == torch.float32 and torch.equal(out, expected)
        gradients = torch.autograd.grad(out.sum(), [tensors[n] for n in LEAVES])
        for gradient, wanted in zip(gradients, torch.autograd.grad(expected.sum(), [low[n] for n in LEAVES])):
            assert gradient.dtype == torch.float32 and torch.equal(gradient, wanted.float())


def test_autocast_of_mixed_dtypes() -> None:
    """Hidden states that come from another op in autocast, and float32 parameters; the targets keep their dtype."""
    tensors = operands((6,), 12, 7, bias=True)
    mixed = {**tensors, "input": tensors["input"].detach().bfloat16()}
    weight, target = torch.rand(12), probabilities((6,), 12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = cuda_ext.linear_cross_entropy(**{**mixed, "target": target}, weight=weight)
    low = {n: t.bfloat16() if n in LEAVES else t for n, t in mixed.items()}
    assert torch.equal(loss, cuda_ext.linear_cross_entropy(**{**low, "target": target}, weight=weight))


# torch.func and forward mode

TRANSFORMS: dict[str, Callable[[Function, Tensor], Any]] = {
    "grad": lambda f, x: grad(lambda x: f(x).sum())(x),
    "grad_and_value": lambda f, x: grad_and_value(lambda x: f(x).sum())(x),
    "vjp": lambda f, x: vjp(f, x)[1](f(x).cos())[0],
    "jvp": lambda f, x: jvp(f, (x,), (x.sin(),)),
    "jacrev": lambda f, x: jacrev(f)(x),
    "jacfwd": lambda f, x: jacfwd(f)(x),
    "hessian": lambda f, x: hessian(lambda x: f(x).sum())(x),
    "vmap": lambda f, x: vmap(f)(torch.stack([x, x.cos()])),
    "vmap of grad": lambda f, x: vmap(grad(lambda x: f(x).sum()))(torch.stack([x, x.cos()])),
    "grad of vmap": lambda f, x: grad(lambda x: vmap(f)(torch.stack([x, x.cos()])).sin().sum())(x),
}


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_every_operand(transform: str, reduction: str) -> None:
    tensors = {n: t.detach() for n, t in small().items()}
    functions = (cuda_ext.linear_cross_entropy, testing.reference_linear_cross_entropy)
    for number, name in enumerate(LEAVES):

        def of_one(function: Function, number: int = number) -> Function:
            call, values = loss_of(tensors, function, reduction=reduction, label_smoothing=0.1, z_loss=0.1)
            return lambda x: call(*values[:number], x, *values[number + 1 :])

        actual, expected = (TRANSFORMS[transform](of_one(function), tensors[name]) for function in functions)
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("kind", ["indices", "probabilities"])
def test_vmap_over_targets(kind: str) -> None:
    """The loss of each of several sequences, as one call."""
    tensors = {n: t.detach() for n, t in small().items()}
    targets = torch.randint(5, (3, 4)) if kind == "indices" else probabilities((3, 4), 5, torch.float64)
    one = lambda target: cuda_ext.linear_cross_entropy(**{**tensors, "target": target})  # noqa: E731
    torch.testing.assert_close(vmap(one)(targets), torch.stack([one(target) for target in targets]))
    both = vmap(lambda x, target: cuda_ext.linear_cross_entropy(**{**tensors, "input": x, "target": target}))
    inputs = torch.randn(3, 4, 3, dtype=torch.float64)
    expected = [cuda_ext.linear_cross_entropy(**{**tensors, "input": x, "target": t}) for x, t in zip(inputs, targets)]
    torch.testing.assert_close(both(inputs, targets), torch.stack(expected))


def test_gradients_of_each_sample() -> None:
    tensors = {n: t.detach() for n, t in small().items()}
    inputs, targets = torch.randn(3, 4, 3, dtype=torch.float64), torch.randint(5, (3, 4))

    def loss(weight: Tensor, x: Tensor, target: Tensor) -> Tensor:
        return cuda_ext.linear_cross_entropy(x, weight, target)

    together = vmap(grad(loss), (None, 0, 0))(tensors["linear_weight"], inputs, targets)
    alone = [grad(loss)(tensors["linear_weight"], x, target) for x, target in zip(inputs, targets)]
    torch.testing.assert_close(together, torch.stack(alone))


def test_forward_mode_of_all_outputs() -> None:
    tensors = small()
    tangents = [torch.randn_like(tensors[name]) for name in LEAVES]
    results = []
    for function in (cuda_ext.linear_cross_entropy, testing.reference_linear_cross_entropy):
        call, leaves = loss_of(tensors, function, return_lse=True, return_entropy=True, softcap=2.0)
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(leaf.detach(), t) for leaf, t in zip(leaves, tangents)]
            results.append([forward_ad.unpack_dual(output) for output in call(*duals)])
    torch.testing.assert_close(*results)


# fake tensors and compilers


@pytest.mark.parametrize("device", ["meta", "fake"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_shapes_and_dtypes_without_data(dtype: torch.dtype, reduction: str, device: str) -> None:
    for lead in ((), (4,), (2, 3)):
        tensors = operands(lead, 5, 3, dtype, bias=True)
        both = {"return_lse": True, "return_entropy": True}
        expected = cuda_ext.linear_cross_entropy(**tensors, reduction=reduction, **both)
        log_probs = cuda_ext.linear_log_prob(**tensors)
        mode = FakeTensorMode() if device == "fake" else torch.device("meta")
        with mode:
            convert = mode.from_tensor if isinstance(mode, FakeTensorMode) else lambda tensor: tensor.to("meta")
            empty = {name: convert(tensor) for name, tensor in tensors.items()}
            actual = cuda_ext.linear_cross_entropy(**empty, reduction=reduction, **both)
            actual = (*actual, cuda_ext.linear_log_prob(**empty))
        for a, e in zip(actual, (*expected, log_probs), strict=True):
            assert (a.shape, a.dtype) == (e.shape, e.dtype)
            assert device == "fake" or a.device.type == "meta"


def training_step(call: Function, tensors: dict[str, Tensor], **options: Any) -> list[Tensor]:
    out = call(tensors, options)
    outputs = list(out) if isinstance(out, tuple) else [out]
    gradients = torch.autograd.grad(sum(o.sum() for o in outputs), [tensors[name] for name in LEAVES])
    return [*(o.detach() for o in outputs), *gradients]


def head(tensors: dict[str, Tensor], options: dict[str, Any]) -> Any:
    """What comes before the loss in a model, and after."""
    out = cuda_ext.linear_cross_entropy(**{**tensors, "input": tensors["input"].sin()}, **options)
    return tuple(2.0 * o for o in out) if isinstance(out, tuple) else 2.0 * out


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"method": "forward"},
        {"method": "recompute", "label_smoothing": 0.1, "z_loss": 0.1, "softcap": 3.0},
        {"reduction": "none", "return_lse": True, "return_entropy": True},
    ],
    ids=str,
)
def test_compile_of_a_training_step(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(head, fullgraph=True, backend="aot_eager")
    tensors = operands((6,), 11, 5, bias=True)
    tensors["target"] = with_ignored(tensors["target"])
    actual, expected = training_step(compiled, tensors, **options), training_step(head, tensors, **options)
    torch.testing.assert_close(actual, expected)


def test_compile_with_dynamic_shapes_traces_once() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(head, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows, classes, features in ((3, 11, 5), (6, 9, 7), (9, 30, 4)):
            tensors = operands((2, rows), classes, features, bias=True)
            torch.testing.assert_close(training_step(compiled, tensors), training_step(head, tensors))


@pytest.mark.sampled
def test_compile_with_inductor() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(head, fullgraph=True)
    tensors = operands((6,), 11, 5, bias=True)
    torch.testing.assert_close(training_step(compiled, tensors), training_step(head, tensors))


def test_compile_under_autocast() -> None:
    torch._dynamo.reset()
    tensors = operands((6,), 11, 5, bias=True)

    def call(tensors: dict[str, Tensor], options: dict[str, Any]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return cuda_ext.linear_cross_entropy(**tensors, **options)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(training_step(compiled, tensors), training_step(call, tensors))


@pytest.mark.sampled
def test_export_with_dynamic_rows() -> None:
    class Loss(torch.nn.Module):
        def forward(self, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
            return cuda_ext.linear_cross_entropy(x, weight, target, softcap=3.0)

    x, weight, target = (operands((4,), 7, 5, grad=False)[name] for name in ("input", "linear_weight", "target"))
    rows = torch.export.Dim("rows")
    shapes = {"x": {0: rows}, "weight": None, "target": {0: rows}}
    program = torch.export.export(Loss(), (x, weight, target), dynamic_shapes=shapes)
    other = operands((9,), 7, 5, grad=False)
    expected = cuda_ext.linear_cross_entropy(other["input"], weight, other["target"], softcap=3.0)
    torch.testing.assert_close(program.module()(other["input"], weight, other["target"]), expected)
