"""Conversion to FP8 fused with an activation and a gate, and the layers that use it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from ranks import on_ranks
from torch import Tensor, nn

import cuda_ext
from cuda_ext import fp8, testing
from cuda_ext._activations import ACTIVATIONS, NAMES
from cuda_ext.fp8 import quantize, quantize_both

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALINGS = ("TensorWise", "RowWise", "BlockWise1x128", "BlockWise128x128")


def hidden(x: Tensor, activation: str | None, gated: bool) -> Tensor:
    """activation(gate) * up, in float32 by the epilogue of a product with 1, rounded once. The product has no -0."""
    gate, up = x.chunk(2, 1) if gated else (x, None)
    one = torch.ones(1, 1, dtype=x.dtype)
    columns = gate.reshape(-1, 1)
    value = cuda_ext.gemm(columns, one, activation=activation, out_dtype=torch.float32).view(gate.shape)
    return (value if up is None else value * up.float()).to(x.dtype)


def bits(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Of NaN 0x7f: its sign says nothing."""
    numbers = [each for each in tensors if each.element_size() == 1]
    own = [torch.where(each.float().isnan(), 0x7F, each.view(torch.uint8)) for each in numbers]
    return [*own, *(each for each in tensors if each.element_size() > 1)]


def backends() -> list[Any]:
    arch = random.choice(("sm_75", "sm_80", "sm_89", "sm_120"))
    return [contextlib.nullcontext(), testing.emulated(arch), testing.emulated("sm_90a", "lazy", "pct")]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", [None, *NAMES])
@pytest.mark.parametrize("case", range(2))
def test_the_bits_of_quantising_the_hidden_tensor(
    case: int, activation: str | None, gated: bool, kind: torch.dtype
) -> None:
    rows, columns = random.choice(((1, 1), (3, 127), (130, 300), (257, 128), (2, 1001), (140, 264)))
    x = torch.randn(rows, columns * (1 + gated)).mul(3).to(kind)
    if random.random() < 0.5:
        for value in (torch.nan, torch.inf, -torch.inf, 0.0, 1e4, -1e4):
            x[torch.rand(x.shape) < 0.02] = value
    strided = random.choice((x, x.t().contiguous().t(), torch.zeros(rows, x.shape[1] + 3, dtype=kind)[:, 3:].copy_(x)))
    options: dict[str, Any] = {"dtype": random.choice((E4M3, E5M2)), "power_of_two": random.random() < 0.5}
    scaling = random.choice(SCALINGS)
    for backend in backends():
        with backend:
            h = hidden(x, activation, gated)
            expected = quantize_both(h, scaling, **options)
            found = quantize_both(strided, scaling, **options, activation=activation, gated=gated)
            alone = quantize(strided, scaling, **options, activation=activation, gated=gated)
        assert all(map(torch.equal, bits(found), bits(expected)))
        assert all(map(torch.equal, bits(alone), bits(expected[:2])))
        assert found[0].stride() == expected[0].stride() and found[2].stride() == expected[2].stride()


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", [None, *NAMES])
def test_the_hidden_tensor_is_that_of_pytorch(activation: str | None, gated: bool) -> None:
    x = torch.randn(30, 64 * (1 + gated), dtype=torch.float64)
    exact = fp8.hidden(x, activation, gated)
    torch.testing.assert_close(hidden(x.float(), activation, gated).double(), exact, rtol=1e-5, atol=1e-6)
    found, scales = quantize(x.float(), activation=activation, gated=gated)
    error = (found.double() * scales - exact).abs()
    assert (error <= exact.abs() * 2**-4 + scales * 2**-9).all()


def test_nothing_to_quantise() -> None:
    for shape in ((0, 6), (5, 0)):
        data, scales, transposed, _ = quantize_both(torch.empty(shape), activation="silu", gated=True)
        assert data.shape == (shape[0], shape[1] // 2) and transposed.shape == data.shape[::-1] and scales.eq(1).all()


def test_errors() -> None:
    x = torch.ones(2, 6)
    with pytest.raises(RuntimeError, match=r"quantize_fp8: expected activation to be None, 'relu', .* got 'tanh'"):
        quantize(x, activation="tanh")
    with pytest.raises(RuntimeError, match=r"quantize_fp8: expected gated input of shape \(R, 2C\), .* got \(2, 5\)"):
        quantize(x[:, :5], gated=True)
    with pytest.raises(RuntimeError, match="quantize_fp8: expected stochastic=False with an activation or a gate"):
        quantize_both(x, activation="silu", stochastic=True)
    with pytest.raises(RuntimeError, match=r"fp8.linear: expected input_activation of None, 'relu', .* got 'tanh'"):
        fp8.linear(x, torch.ones(4, 6), input_activation="tanh")
    with pytest.raises(RuntimeError, match=r"fp8.linear: expected input \(..., 2K\) and weight \(N, K\), got \(2, 6\)"):
        fp8.linear(x, torch.ones(4, 6), input_gated=True)


# PyTorch's transforms


def test_registrations() -> None:
    for op in (torch.ops.cuda_ext.quantize_fp8.activation, torch.ops.cuda_ext.quantize_fp8_both.activation):
        for scaling in (0, 1, 4, 5):
            for gated in (False, True):
                options = {"activation": random.choice(NAMES), "gated": gated}
                torch.library.opcheck(op, (torch.randn(5, 300), E4M3, scaling, True), options)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("op", [quantize, quantize_both])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_vmap(scaling: str, op: Callable[..., Any], dim: int) -> None:
    x = torch.randn(3, 5, 200)

    def call(each: Tensor) -> Any:
        return op(each, scaling, activation="silu", gated=True)

    found = torch.vmap(call, in_dims=dim)(x.movedim(0, dim))
    for mine, theirs in zip(found, zip(*map(call, x), strict=True), strict=True):
        assert mine.float().equal(torch.stack(theirs).float())


@on_ranks(2)
def test_dtensors_are_quantised_by_rows() -> None:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(6, 64)
    data, scales = quantize(distribute_tensor(x, mesh, [Shard(0)]), activation="gelu", gated=True)
    assert data.placements == (Shard(0),) and scales.placements == (Shard(0),)
    expected = quantize(x, activation="gelu", gated=True)
    mine = slice(torch.distributed.get_rank() * 3, torch.distributed.get_rank() * 3 + 3)
    assert data.to_local().float().equal(expected[0][mine].float())
    assert scales.to_local().equal(expected[1][mine])


# Layers


def assert_gradients(found: Any, expected: Any, recipe: str) -> None:
    """Bit for bit; in the precision of the input but for the last bits of activations, which other passes compute."""
    if recipe != "rowwise_with_gw_hp":
        assert all(map(torch.equal, found, expected))
        return
    for mine, theirs in zip(found, expected, strict=True):
        eps = 4 * torch.finfo(theirs.dtype).eps
        torch.testing.assert_close(mine, theirs, rtol=eps, atol=eps * float(theirs.abs().max()))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("recipe", fp8.RECIPES)
def test_linear_of_an_activation(recipe: str, gated: bool, bias: bool) -> None:
    """As the product of the hidden tensor; the gradient goes on through the activation."""
    activation = random.choice(NAMES)
    x = torch.randn(2, 20, 130 * (1 + gated), requires_grad=True)
    weight = torch.randn(30, 130, requires_grad=True)
    leaves = [x, weight, *([torch.randn(30, requires_grad=True)] if bias else [])]
    h = hidden(x.detach().flatten(0, 1), activation, gated).view(2, 20, 130).requires_grad_()
    grad = torch.randn(2, 20, 30)
    expected = fp8.linear(h, *leaves[1:], recipe=recipe)
    grad_h, *others = torch.autograd.grad(expected, [h, *leaves[1:]], grad)
    grad_x = torch.autograd.grad(fp8.hidden(x, activation, gated), x, grad_h)[0]
    options: dict[str, Any] = {"recipe": recipe, "input_activation": activation, "input_gated": gated}

    def call(*leaves: Tensor) -> Tensor:
        return fp8.linear(*leaves, **options)

    def gradients(f: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(f(*leaves), leaves, grad)

    assert call(*leaves).equal(expected)
    found = gradients(call)
    torch.testing.assert_close(found[0], grad_x, rtol=1e-4, atol=1e-5)
    assert_gradients(found[1:], others, recipe)
    torch.compiler.reset()
    compiled: Any = torch.compile(call, fullgraph=True, backend="aot_eager")
    for f in (compiled, lambda *leaves: torch.utils.checkpoint.checkpoint(call, *leaves, use_reentrant=False)):
        assert all(map(torch.equal, gradients(f), found))
    with torch.no_grad():
        h = hidden(x.flatten(0, 1), activation, gated).view(h.shape)
        assert call(*leaves).equal(fp8.linear(h, *leaves[1:], recipe=recipe))
    samples = torch.randn(3, 4, x.shape[-1])
    of_sample: Any = torch.func.grad(lambda weight, x: call(x, weight).square().sum())
    mapped = torch.vmap(of_sample, in_dims=(None, 0))(weight.detach(), samples)
    each = torch.stack([of_sample(weight.detach(), sample) for sample in samples])
    torch.testing.assert_close(mapped, each, rtol=0, atol=2.0**-18 * float(each.abs().max()))


@pytest.mark.parametrize("module", ["MLP", "GatedMLP"])
@pytest.mark.parametrize("recipe", fp8.RECIPES)
def test_the_hidden_tensor_is_not_stored(recipe: str, module: str) -> None:
    """For backward: x and the hidden tensor in FP8, and what the first layer returned; nothing else of their sizes. Or
    x, if the gradients of weights are in its precision."""
    net = getattr(cuda_ext.nn, module)(64, 96, fp8=recipe, bias=False)
    width = 96 * (2 if module == "GatedMLP" else 1)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    x = torch.randn(50, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        net(x)
    weights = {parameter.data_ptr() for parameter in net.parameters()}
    shapes = sorted(tuple(t.shape) for t in saved if t.data_ptr() not in weights and t.numel() >= 50 * 64)
    in_fp8 = [(50, 64)] if recipe == "rowwise_with_gw_hp" else [(64, 50), (96, 50)]
    assert shapes == sorted([*in_fp8, (50, width)])


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("recipe", fp8.RECIPES)
def test_training_and_inference_are_the_same(recipe: str, gated: bool, kind: torch.dtype) -> None:
    """The hidden tensor is rounded once, also for a gradient of the weight in its precision."""
    x = torch.randn(50, 96 * (1 + gated)).to(kind)
    weight = torch.randn(40, 96, dtype=kind).requires_grad_()
    options: dict[str, Any] = {"recipe": recipe, "input_activation": random.choice(NAMES), "input_gated": gated}
    out = fp8.linear(x, weight, **options)
    with torch.no_grad():
        assert out.equal(fp8.linear(x, weight, **options))
    grad = torch.randn(out.shape).to(kind)
    h = hidden(x, options["input_activation"], gated)
    expected = torch.autograd.grad(fp8.linear(h, weight, recipe=recipe), weight, grad)[0]
    assert_gradients(torch.autograd.grad(out, weight, grad), [expected], recipe)
    both = x.clone().requires_grad_(), weight
    assert_gradients(torch.autograd.grad(fp8.linear(*both, **options), both, grad)[1:], [expected], recipe)


@pytest.mark.parametrize("module", ["MLP", "GatedMLP"])
def test_modules_whose_second_layer_has_hooks_or_another_class(module: str) -> None:
    """They get the hidden tensor, as in any precision."""

    class Other(nn.Linear):
        fp8 = "rowwise"

        def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
            assert input.shape[-1] == 96
            return super().forward(input)

    gated = module == "GatedMLP"
    net = getattr(cuda_ext.nn, module)(64, 96, fp8="rowwise")
    name = "down_proj" if gated else "fc2"
    x, seen = torch.randn(5, 64), []
    fused = net(x)
    handle = getattr(net, name).register_forward_pre_hook(lambda _, args: seen.append(args[0].shape))
    torch.testing.assert_close(net(x), fused, rtol=0, atol=0.05)
    assert seen == [(5, 96)]
    handle.remove()
    assert net(x).equal(fused)
    setattr(net, name, Other(96, 64))
    assert net(x).shape == (5, 64)


@pytest.mark.parametrize("converted", [False, True])
def test_arguments_of_a_layer_that_is_not_in_fp8(converted: bool) -> None:
    """An unknown one is an error, the function of the input is applied."""
    layer = cuda_ext.nn.Linear(32, 48)
    if converted:
        net = nn.Sequential(nn.Linear(32, 48))
        fp8.convert(net, least_features=1)
        layer = net[0]
        layer.fp8 = None
    x = torch.randn(5, 64)
    with pytest.raises(TypeError, match="resdual"):
        layer(x[:, :32], resdual=x)
    gate, up = x.chunk(2, -1)
    expected = F.linear(F.silu(gate) * up, layer.weight, layer.bias)
    torch.testing.assert_close(layer(x, input_activation="silu", input_gated=True), expected)


def test_gated_mlp_is_near_pytorch() -> None:
    net = cuda_ext.nn.GatedMLP(64, 96, fp8="blockwise")
    x = torch.randn(6, 64)
    gate, up = F.linear(x, net.gate_up_proj.weight).chunk(2, -1)
    exact = F.linear(F.silu(gate) * up, net.down_proj.weight)
    assert 0 < (net(x) - exact).abs().max() < 0.1
    assert ACTIVATIONS["silu"].function is F.silu


@pytest.mark.parametrize("module", ["MLP", "GatedMLP"])
@pytest.mark.parametrize("recipe", fp8.RECIPES)
def test_modules_under_transforms(recipe: str, module: str) -> None:
    net = getattr(cuda_ext.nn, module)(64, 96, fp8=recipe, bias=True)
    x, residual = torch.randn(2, 6, 64, requires_grad=True), torch.randn(2, 6, 64)
    leaves = [x, *net.parameters()]
    expected = net(x, residual=residual)
    torch.compiler.reset()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager", dynamic=True)(x, residual=residual)
    grads = [torch.autograd.grad(out.square().sum(), leaves) for out in (expected, compiled)]
    assert compiled.equal(expected) and all(map(torch.equal, *grads))
    plain = net(x)
    with torch.no_grad():
        assert net(x).equal(plain)
        program = torch.export.export(net, (x.detach(),), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},))
        assert program.module()(x.detach()).equal(net(x))
    with fp8.unchanged_weights():
        assert net(x).equal(plain)
    with torch.autocast("cpu", torch.bfloat16):
        low = net(x)
    assert low.dtype == torch.bfloat16 and (low.float() - plain).abs().max() < 0.1
    low.float().sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32
    samples = torch.randn(3, 5, 64)
    each = torch.stack([net(sample) for sample in samples])
    torch.testing.assert_close(torch.vmap(net)(samples), each, rtol=0, atol=2.0**-18 * float(each.detach().abs().max()))
    assert net(torch.randn(0, 64)).shape == (0, 64)
    with pytest.raises(RuntimeError, match="expected reverse mode"):
        torch.func.jvp(net, (x.detach(),), (x.detach(),))
