"""mixture_of_experts: values and derivatives for any routing, memory, transforms, errors."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gemm_common import DTYPES, rand
from ranks import on_ranks
from test_grouped_mm import random_strides
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import cuda_ext
from cuda_ext import mixture_of_experts
from cuda_ext._activations import ACTIVATIONS
from cuda_ext._expert_products import multiply_groups
from cuda_ext.testing import assert_close_to_reference, assert_op_matches_reference, reference_mixture_of_experts
from cuda_ext.testing.references import hidden_of

NAMES = ("input", "expert_weights", "w_up", "w_down", "b_up", "b_down")


def clamped(product: Tensor) -> Tensor:
    """The gate of gpt-oss, whose columns alternate."""
    gate, up = product[..., ::2].clamp(max=1.5), product[..., 1::2].clamp(-1.5, 1.5)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def random_ids(tokens: int, top_k: int, experts: int) -> Tensor:
    """Of some routings: uniform, all to one, few experts, and ids of experts that are not here."""
    kind = random.choice(("uniform", "one", "few", "elsewhere"))
    ids = torch.randint(0, {"one": 1, "few": min(experts, 2)}.get(kind, experts), (tokens, top_k))
    if kind == "elsewhere":
        ids = torch.randint(-1, experts + 2, (tokens, top_k))
    return ids.to(random.choice((torch.int32, torch.int64)))


def random_case(dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Any]]:
    tokens, k, hidden = random.choice((0, 1, 3, 40, 130)), random.choice((1, 8, 33)), random.choice((1, 7, 24))
    experts, top_k = random.choice((1, 2, 5, 33)), random.choice((1, 2, 3))
    activation = random.choice([*ACTIVATIONS, clamped])
    gated = activation is clamped or random.random() < 0.7
    up = 2 * hidden if gated else hidden
    has_bias = random.random() < 0.5
    tensors = {
        "input": random_strides(rand(tokens, k, dtype=dtype)),
        "expert_weights": rand(tokens, top_k, dtype=random.choice((dtype, torch.promote_types(dtype, torch.float32)))),
        "w_up": random_strides(rand(experts, up, k, scale=k**-0.5, dtype=dtype)),
        "w_down": random_strides(rand(experts, k, hidden, scale=hidden**-0.5, dtype=dtype)),
        "b_up": rand(experts, up, dtype=dtype) if has_bias else None,
        "b_down": rand(experts, k, dtype=dtype) if has_bias else None,
    }
    ids = random_ids(tokens, top_k, experts)
    return tensors, {"expert_ids": ids, "activation": activation, "gated": gated}


def weighted_first(
    input: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    *,
    activation: Any,
    gated: bool,
) -> Tensor:
    """The reference with weights before the second product: terms of its gradients cancel elsewhere."""
    out = torch.zeros(input.shape, dtype=torch.promote_types(input.dtype, torch.float32))
    for e in range(len(w_up)):
        weight = (expert_weights * (expert_ids == e)).sum(-1, keepdim=True)
        hidden = hidden_of(F.linear(input, w_up[e], None if b_up is None else b_up[e]), activation, gated)
        out = out + F.linear((hidden * weight).to(input.dtype), w_down[e])
        out = out if b_down is None else out + b_down[e] * weight
    return out.to(input.dtype)


def sizes_of_gradients(tensors: dict[str, Any], options: dict[str, Any]) -> dict[str, float]:
    """The largest element of each, for a random gradient of the output."""
    leaves = {n: t.detach().double().requires_grad_() for n, t in tensors.items() if t is not None}
    out = reference_mixture_of_experts(**leaves, **options)
    gradients = torch.autograd.grad(out, list(leaves.values()), torch.randn_like(out))
    return {n: float(g.abs().max()) if g.numel() else 0.0 for n, g in zip(leaves, gradients, strict=True)}


def check(tensors: dict[str, Any], options: dict[str, Any]) -> None:
    # Plain PyTorch rounds at the same places, but weights are applied at others; and of few elements an evaluation can
    # be exact by luck: 16 roundings of numbers of size 1, which inputs are.
    dtype = tensors["w_up"].dtype
    atol = None if dtype == torch.float64 else 16 * torch.finfo(dtype).eps
    # Gradients of weights are sums over rows, of terms that are rounded to 16 bits, or of which three tf32 products
    # leave out 2^-22; and all gradients have some roundings of their own size, which squares make large.
    rows = max(1, options["expert_ids"].numel())
    sizes = sizes_of_gradients(tensors, options)
    assert_op_matches_reference(
        mixture_of_experts,
        reference_mixture_of_experts,
        tensors,
        options,
        also=[weighted_first],
        atol=atol,
        gradient_factor=4.0,
        gradient_atol={} if atol is None else {n: atol * (1 + rows**0.5 / 4 + sizes[n] / 2) for n in sizes},
    )


@pytest.mark.every_backend
@pytest.mark.sampled(cases=10)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", range(25))
def test_random_cases(case: int, dtype: torch.dtype) -> None:
    check(*random_case(dtype))


def small_case(dtype: torch.dtype = torch.float64, **options: Any) -> tuple[list[Tensor], Callable[..., Tensor]]:
    ids = torch.tensor([[0, 2], [2, 1], [5, 0], [2, 0], [-1, 7]])
    shapes = (5, 6), (5, 2), (4, 8, 6), (4, 6, 4), (4, 8), (4, 6)
    tensors = [rand(*shape, dtype=dtype) for shape in shapes]
    return tensors, lambda input, weights, *mlp: mixture_of_experts(input, ids, weights, *mlp, **options)


@pytest.mark.parametrize("activation", ["silu", "gelu", clamped], ids=["silu", "gelu", "clamped"])
def test_derivatives_of_all_orders(activation: Any) -> None:
    tensors, op = small_case(activation=activation)
    checks = {"check_batched_grad": True, "check_forward_ad": True}
    assert torch.autograd.gradcheck(op, tensors, **checks)
    assert torch.autograd.gradgradcheck(op, tensors, check_fwd_over_rev=True)


@pytest.mark.parametrize("wanted", range(6))
def test_gradient_of_one_input_alone(wanted: int) -> None:
    tensors, op = small_case()
    grad = rand(5, 6, dtype=torch.float64).detach()
    expected = torch.autograd.grad(op(*tensors), tensors, grad)[wanted]
    alone = [t.detach().requires_grad_(i == wanted) for i, t in enumerate(tensors)]
    torch.testing.assert_close(torch.autograd.grad(op(*alone), alone[wanted], grad)[0], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ["silu", clamped], ids=["silu", "clamped"])
def test_compiled_as_eager(activation: Any, dtype: torch.dtype) -> None:
    """Dynamo has sent the gradient of a Function to one of its other outputs, silently."""
    tensors, op = small_case(dtype, activation=activation)
    grad = rand(5, 6, dtype=dtype).detach()
    out = op(*tensors)
    expected = torch.autograd.grad(out, tensors, grad)
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")(*tensors)
    torch.testing.assert_close(compiled, out)
    for actual, gradient in zip(torch.autograd.grad(compiled, tensors, grad), expected, strict=True):
        torch.testing.assert_close(actual, gradient)


def test_transforms() -> None:
    tensors, op = small_case()
    values = [t.detach() for t in tensors]
    expected = torch.autograd.grad(op(*tensors).sum(), tensors)
    found = torch.func.grad(lambda *t: op(*t).sum(), argnums=tuple(range(6)))(*values)
    for actual, gradient in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, gradient)
    batch = torch.stack([values[0], values[0] * 2])
    mapped = torch.func.vmap(lambda x: op(x, *values[1:]))(batch)
    torch.testing.assert_close(mapped, torch.stack([op(x, *values[1:]) for x in batch]))


def test_leading_dims() -> None:
    _, weights, *mlp = (t.detach() for t in small_case()[0])
    x, ids = torch.randn(2, 3, 6).double(), torch.randint(0, 4, (2, 3, 2))
    weights = torch.rand(2, 3, 2).double()
    flat = mixture_of_experts(x.view(6, 6), ids.view(6, 2), weights.view(6, 2), *mlp)
    torch.testing.assert_close(mixture_of_experts(x, ids, weights, *mlp), flat.view(2, 3, 6), rtol=0, atol=0)


@pytest.mark.parametrize("activation", ["silu", clamped], ids=["silu", "clamped"])
@pytest.mark.parametrize(
    ("top_k", "k", "hidden"),
    [(0, 6, 4), (2, 0, 4), (2, 6, 0)],
    ids=["no experts of a token", "no features", "no layer"],
)
def test_sizes_of_zero(top_k: int, k: int, hidden: int, activation: Any) -> None:
    """Values and gradients are those of the reference: zeros, or for tokens without a hidden layer `b_down`."""
    shapes = (2, 3, k), (2, 3, top_k), (4, 2 * hidden, k), (4, k, hidden), (4, 2 * hidden), (4, k)
    tensors = dict(zip(NAMES, (rand(*shape, dtype=torch.float64) for shape in shapes), strict=True))
    options = {"expert_ids": torch.randint(0, 4, (2, 3, top_k)), "activation": activation}
    assert mixture_of_experts(**tensors, **options).requires_grad  # type: ignore[arg-type]
    assert_op_matches_reference(mixture_of_experts, reference_mixture_of_experts, tensors, options)


@pytest.mark.parametrize(
    "name", ["torch._C._are_functorch_transforms_active", "torch.autograd.forward_ad._current_level"]
)
def test_without_a_private_name_of_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release of PyTorch may lack it."""
    tensors, op = small_case()
    expected = op(*tensors)
    monkeypatch.delattr(name)
    actual = op(*tensors)
    torch.testing.assert_close(actual, expected)
    found = torch.autograd.grad(actual.sum(), tensors)
    for gradient, wanted in zip(found, torch.autograd.grad(expected.sum(), tensors), strict=True):
        torch.testing.assert_close(gradient, wanted)


def test_same_bits_on_each_call() -> None:
    tensors, op = small_case(torch.float32)
    runs = [[(out := op(*tensors)), *torch.autograd.grad(out.sum(), tensors)] for _ in range(3)]
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


def test_autocast() -> None:
    tensors, op = small_case(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = op(*tensors)
    assert out.dtype == torch.bfloat16
    gradients = torch.autograd.grad(out.float().sum(), tensors)
    expected = torch.autograd.grad(op(*tensors).sum(), tensors)
    for actual, gradient in zip(gradients, expected, strict=True):
        assert actual.dtype == torch.float32
        # a few roundings to bfloat16 of sums of 5 tokens
        torch.testing.assert_close(actual, gradient, rtol=0.05, atol=0.05 * float(gradient.abs().max()))


def fp8_case(dtype: torch.dtype) -> list[Any]:
    """Rows of different sizes, and weights of powers of two, with which rows are converted as without them."""
    tensors = [rand(70, 48, dtype=dtype), torch.randint(0, 5, (70, 2)), 2.0 ** torch.randint(-3, 1, (70, 2))]
    tensors[2].requires_grad_()
    return tensors + [rand(4, size, inner, scale=inner**-0.5, dtype=dtype) for size, inner in ((64, 48), (48, 32))]


@pytest.mark.every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_fp8_as_linear_layers_in_fp8(dtype: torch.dtype) -> None:
    x, ids, weights, w_up, w_down = fp8_case(dtype)
    out = mixture_of_experts(x, ids, weights, w_up, w_down, fp8="rowwise_with_gw_hp")
    linear = partial(cuda_ext.fp8.linear, recipe="rowwise_with_gw_hp")
    expected = torch.zeros(70, 48)
    for expert in range(4):  # id 4 is of an expert that is not here
        tokens, place = (ids == expert).nonzero(as_tuple=True)
        gate, up = linear(x[tokens], w_up[expert]).chunk(2, -1)
        results = linear(F.silu(gate) * up, w_down[expert])
        expected = expected.index_add(0, tokens, weights[tokens, place].unsqueeze(1) * results)
    leaves = [x, weights, w_up, w_down]
    grad = torch.randn(70, 48, dtype=dtype)
    found = (out, *torch.autograd.grad(out, leaves, grad))
    wanted = (expected.to(dtype), *torch.autograd.grad(expected, leaves, grad.float()))
    # What is converted in between may differ in its last bit, and then by a rounding to 4 bits: of a few elements. The
    # gradient of the weights is a product with other operands in FP8.
    for mine, theirs, share in zip(found, wanted, (0.02, 0.02, 0.1, 0.02, 0.02), strict=True):
        error = (mine.float() - theirs.float()).abs()
        assert error.mean() < share * theirs.float().abs().mean()
        assert error.max() < 0.25 * theirs.float().abs().max()
    exact = mixture_of_experts(x, ids, weights, w_up, w_down)
    assert not out.equal(exact) and (out - exact).abs().mean() < 0.1 * exact.abs().mean()


@pytest.mark.every_backend
@pytest.mark.sampled(cases=3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("k", [16, 48, 130])
def test_a_gathered_row_is_converted_as_one_that_is_not(k: int, dtype: torch.dtype) -> None:
    rows, matrices = rand(7, k, dtype=dtype, grad=False), rand(3, 24, k, dtype=dtype, grad=False)
    gathered, ends = torch.randint(0, 7, (30,)), torch.tensor([11, 11, 25], dtype=torch.int32)
    found = multiply_groups(rows, matrices, ends, gathered=gathered)
    assert found.equal(multiply_groups(rows[gathered], matrices, ends)) and found[:25].any()


def test_fp8_converts_each_token_once() -> None:
    """Rows of each operand that is quantised: of tokens, hidden rows and matrices; in backward of gradients, too."""

    class Quantised(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.cuda_ext.quantize_fp8.default:
                rows.append(len(args[0]))
            return func(*args, **(kwargs or {}))

    rows: list[int] = []
    x, ids, weights, w_up, w_down = fp8_case(torch.bfloat16)
    with Quantised():
        out = mixture_of_experts(x, ids, weights, w_up, w_down, fp8="rowwise_with_gw_hp")
        assert sorted(rows) == sorted([70, 4 * 64, 140, 4 * 48])
        rows.clear()
        out.backward(torch.ones_like(out))
    assert sorted(rows) == sorted([70, 4 * 32, 140, 4 * 48])


def test_layers_and_limits_of_fp8() -> None:
    x, ids, weights, w_up, w_down = fp8_case(torch.float32)
    compiled = torch.compile(partial(mixture_of_experts, fp8="rowwise_with_gw_hp"), backend="aot_eager")
    assert compiled(x, ids, weights, w_up, w_down).equal(
        mixture_of_experts(x, ids, weights, w_up, w_down, fp8="rowwise_with_gw_hp")
    )
    layer = cuda_ext.nn.MixtureOfExperts(48, 32, 4, 2, shared_hidden_features=32, fp8="rowwise_with_gw_hp")
    twin = cuda_ext.nn.MixtureOfExperts(48, 32, 4, 2, shared_hidden_features=32)
    twin.load_state_dict(layer.state_dict())
    assert "fp8=rowwise_with_gw_hp" in repr(layer.experts) and "fp8" not in repr(twin.experts)
    out, exact = layer(x), twin(x)
    assert 0 < (out - exact).abs().max() < 0.3 * exact.abs().max()
    out.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in layer.parameters())
    with pytest.raises(RuntimeError, match="None or 'rowwise_with_gw_hp' or 'blockwise', recipes of experts, got 'x'"):
        mixture_of_experts(x, ids, weights, w_up, w_down, fp8="x")
    with pytest.raises(RuntimeError, match="expected fp8=None with a function as activation"):
        mixture_of_experts(x, ids, weights, w_up, w_down, activation=clamped, fp8="rowwise_with_gw_hp")
    with pytest.raises(RuntimeError, match="float16 or bfloat16 with fp8, got float64"):
        double = [each.double() for each in (x, w_up, w_down)]
        mixture_of_experts(double[0], ids, weights, *double[1:], fp8="rowwise_with_gw_hp")
    with pytest.raises(RuntimeError, match="expected fp8=None for second derivatives"):
        torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)


@pytest.mark.parametrize("count", [0, 3])
def test_experts_without_tokens_have_gradients_of_zero(count: int) -> None:
    _, _, *mlp = small_case()[0]
    ids = torch.full((count, 2), 3)
    out = mixture_of_experts(torch.randn(count, 6).double(), ids, torch.rand(count, 2), *mlp)
    for gradient in torch.autograd.grad(out.sum(), mlp):
        assert torch.equal(gradient[:3], torch.zeros_like(gradient[:3]))
        assert bool(gradient[3].any()) == bool(count)


def test_memory_for_backward() -> None:
    """The docstring's 2 F numbers for a token and expert, and the 4 F + 2 K of PyTorch's operations."""
    tokens, k, hidden, experts, top_k = 64, 48, 32, 4, 2
    ids = torch.randint(0, experts, (tokens, top_k))
    x, weights = rand(tokens, k), rand(tokens, top_k)
    w_up, w_down = rand(experts, 2 * hidden, k), rand(experts, k, hidden)

    def saved(activation: Any) -> int:
        storages = {}

        def pack(tensor: Tensor) -> Tensor:
            if tensor.is_floating_point():
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 4
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            mixture_of_experts(x, ids, weights, w_up, w_down, activation=activation)
        given = sum(t.numel() for t in (x, weights, w_up, w_down))
        return sum(storages.values()) - given

    def swiglu(product: Tensor) -> Tensor:
        gate, up = product.chunk(2, -1)
        return F.silu(gate) * up

    assert saved("silu") == tokens * top_k * 2 * hidden
    assert saved(swiglu) >= tokens * top_k * (4 * hidden + 2 * k) - tokens * k


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "swish"}, "expected activation .*None or a function, got 'swish'"),
        ({"input": torch.zeros(5, 7)}, r"expected input of shape \(\.\.\., 6\) for w_up \(4, 8, 6\), got \(5, 7\)"),
        ({"w_up": torch.zeros(4, 8)}, r"expected w_up of shape \(experts, U, K\).*got \(4, 8\)"),
        ({"w_down": torch.zeros(4, 6, 8)}, r"expected w_down of shape \(4, 6, 4\) .*with a gate, got \(4, 6, 8\)"),
        ({"gated": False}, r"expected w_down of shape \(4, 6, 8\) .*without a gate, got \(4, 6, 4\)"),
        ({"expert_ids": torch.zeros(5, 3).long()}, r"of shape \(5, k\) for input \(5, 6\), got \(5, 3\) and \(5, 2\)"),
        ({"expert_ids": torch.zeros(5, 2)}, "expected expert_ids of dtype int32 or int64, got float32"),
        ({"expert_weights": torch.zeros(5, 2).int()}, "expected expert_weights of a floating dtype, got int32"),
        ({"b_up": torch.zeros(4, 6)}, r"expected b_up of shape \(4, 8\), got \(4, 6\)"),
        ({"b_down": torch.zeros(4, 8)}, r"expected b_down of shape \(4, 6\), got \(4, 8\)"),
        ({"input": torch.zeros(5, 6).double()}, "dtype"),
    ],
)
def test_errors(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "input": torch.zeros(5, 6),
        "expert_ids": torch.zeros(5, 2, dtype=torch.int64),
        "expert_weights": torch.zeros(5, 2),
        "w_up": torch.zeros(4, 8, 6),
        "w_down": torch.zeros(4, 6, 4),
        **change,
    }
    with pytest.raises(RuntimeError, match=message):
        cuda_ext.mixture_of_experts(**arguments)


def of_rank(name: str, tensor: Tensor, tokens: slice) -> Tensor:
    """What this rank has of an argument, of its gradient or of the output."""
    if name in ("input", "expert_weights", "output"):
        return tensor[tokens]
    return tensor.tensor_split(dist.get_world_size())[dist.get_rank()]


def with_gradients(op: Callable[..., Tensor], tensors: dict[str, Tensor], grad: Tensor) -> dict[str, Tensor]:
    leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
    out = op(**leaves)
    return {"output": out, **dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), grad), strict=True))}


@pytest.mark.parametrize("experts", [3, 8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ["silu", clamped], ids=["silu", "clamped"])
@pytest.mark.parametrize("kind", ["even", "uneven", "one expert", "elsewhere"])
@on_ranks(3)
def test_experts_of_ranks(experts: int, dtype: torch.dtype, activation: Any, kind: str) -> None:
    """As exact as all experts on one rank. Some ranks have no tokens, or none for theirs."""
    rank = dist.get_rank()
    counts = [5, 5, 5] if kind == "even" else [0, 9, 2]
    mine = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    shapes = (sum(counts), 6), (sum(counts), 2), (experts, 8, 6), (experts, 6, 4), (experts, 8), (experts, 6)
    tensors = dict(zip(NAMES, (rand(*shape, dtype=dtype) for shape in shapes), strict=True))
    low, high = {"one expert": (0, 1), "elsewhere": (-2, experts + 2)}.get(kind, (0, experts))
    ids, grad = torch.randint(low, high, (sum(counts), 2)), rand(sum(counts), 6, dtype=dtype, grad=False)
    options = {"expert_ids": ids, "activation": activation}
    exact = with_gradients(
        partial(reference_mixture_of_experts, **options), {n: t.double() for n, t in tensors.items()}, grad.double()
    )
    alone = with_gradients(partial(mixture_of_experts, **options), tensors, grad)  # type: ignore[arg-type]
    own = {name: of_rank(name, t, mine) for name, t in tensors.items()}
    options = {"expert_ids": ids[mine], "activation": activation, "experts": experts, "group": dist.group.WORLD}
    found = with_gradients(partial(mixture_of_experts, **options), own, grad[mine])  # type: ignore[arg-type]
    for name, actual in found.items():
        # One rank may be exact by luck in few elements: four roundings of results, gradients and weighted rows each.
        atol = None if dtype == torch.float64 else 4 * torch.finfo(dtype).eps * float(exact[name].abs().max())
        plain, reference = (of_rank(name, each[name], mine) for each in (alone, exact))
        assert_close_to_reference(actual, plain, reference, atol=atol, name=name)


@on_ranks(2)
def test_experts_of_ranks_have_second_derivatives() -> None:
    tensors = [t.detach().requires_grad_() for t in small_case()[0]]
    own = [t if i < 2 else t.detach().tensor_split(2)[dist.get_rank()].requires_grad_() for i, t in enumerate(tensors)]
    ids = torch.tensor([[0, 2], [2, 1], [3, 0], [2, 0], [1, 3]])

    def second(function: Callable[..., Tensor], given: list[Tensor]) -> Tensor:
        (first,) = torch.autograd.grad(function(*given).square().sum(), given[0], create_graph=True)
        return torch.autograd.grad(first.square().sum(), given[0])[0]

    alone = second(lambda x, w, *mlp: mixture_of_experts(x, ids, w, *mlp), tensors)
    options: dict[str, Any] = {"experts": 4, "group": dist.group.WORLD}
    together = second(lambda x, w, *mlp: mixture_of_experts(x, ids, w, *mlp, **options), own)
    torch.testing.assert_close(together, alone)


@on_ranks(2)
def test_a_wrong_share_of_experts() -> None:
    arguments: list[Any] = [torch.zeros(5, 6), torch.zeros(5, 2).long(), torch.zeros(5, 2)]
    group: Any = dist.group.WORLD
    with pytest.raises(RuntimeError, match=r"expected w_up with \d of 5 experts on rank \d of 2, got \(4, 8, 6\)"):
        mixture_of_experts(*arguments, torch.zeros(4, 8, 6), torch.zeros(4, 6, 4), experts=5, group=group)
    with pytest.raises(RuntimeError, match="expected experts, the number of those of all ranks, with group"):
        mixture_of_experts(*arguments, torch.zeros(4, 8, 6), torch.zeros(4, 6, 4), group=group)
    empty = torch.zeros(1 - dist.get_rank(), 8, 6), torch.zeros(1 - dist.get_rank(), 6, 4)
    with pytest.raises(RuntimeError, match="expected at least one expert for each of 2 ranks, got 1"):
        mixture_of_experts(*arguments, *empty, experts=1, group=group)
    with pytest.raises(RuntimeError, match="expected w_up of all 8 experts, or a group"):
        mixture_of_experts(*arguments, torch.zeros(4, 8, 6), torch.zeros(4, 6, 4), experts=8)


@pytest.mark.parametrize("activation", ["silu", clamped], ids=["silu", "clamped"])
@on_ranks(2)
def test_experts_of_ranks_break_a_compiled_graph(activation: Any) -> None:
    """As the docstring says: the host reads how many rows travel. Results and gradients are those of eager calls."""
    tensors = [t.detach().requires_grad_() for t in small_case()[0]]
    own = [t if i < 2 else t.detach().tensor_split(2)[dist.get_rank()].requires_grad_() for i, t in enumerate(tensors)]
    ids = torch.tensor([[0, 2], [2, 1], [3, 0], [2, 0], [1, 3]])

    def op(x: Tensor, weights: Tensor, *mlp: Tensor) -> Tensor:
        options: dict[str, Any] = {"activation": activation, "experts": 4, "group": dist.group.WORLD}
        return mixture_of_experts(x.sin(), ids, weights, *mlp, **options).cos()

    expected = op(*own)
    counters = torch._dynamo.utils.counters
    counters.clear()
    actual = torch.compile(op, backend="aot_eager")(*own)
    assert sum(counters["graph_break"].values()) > 0
    torch.testing.assert_close(actual, expected)
    found = torch.autograd.grad(actual.sum(), own)
    for gradient, wanted in zip(found, torch.autograd.grad(expected.sum(), own), strict=True):
        torch.testing.assert_close(gradient, wanted)
