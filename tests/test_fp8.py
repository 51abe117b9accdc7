"""fp8.linear and fp8.convert: the three products of each recipe, transforms, models, training."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import cuda_ext
from cuda_ext import _fp8_recipes, _fp8_weights, fp8
from cuda_ext.testing.references import scaled_elements

RECIPES = fp8.RECIPES
TOKENS = {"tensorwise": "TensorWise", "blockwise": "BlockWise1x128"}
WEIGHTS = {"tensorwise": "TensorWise", "blockwise": "BlockWise128x128"}


def rounded(x: Tensor, scaling: str, dtype: torch.dtype, power_of_two: bool) -> Tensor:
    """What x is in FP8, in float64."""
    data, scales = fp8.quantize(x, scaling, dtype=dtype, power_of_two=power_of_two)
    return scaled_elements(data, scales, scaling)


def definition(x: Tensor, weight: Tensor, grad: Tensor, recipe: str) -> tuple[Tensor, Tensor, Tensor]:
    """The output and the gradients of input and weight, in float64."""
    tokens, weights = TOKENS.get(recipe, "RowWise"), WEIGHTS.get(recipe, "RowWise")
    power_of_two = recipe != "tensorwise"
    of_grad = torch.float8_e5m2 if recipe == "tensorwise" else torch.float8_e4m3fn
    e4m3 = torch.float8_e4m3fn
    out = rounded(x, tokens, e4m3, power_of_two) @ rounded(weight, weights, e4m3, power_of_two).t()
    grad_x = rounded(grad, tokens, of_grad, power_of_two) @ rounded(weight.t(), weights, e4m3, power_of_two).t()
    if recipe == "rowwise_with_gw_hp":
        return out, grad_x, grad.double().t() @ x.double()
    grad_weight = rounded(grad.t(), tokens, of_grad, power_of_two) @ rounded(x.t(), tokens, e4m3, power_of_two).t()
    return out, grad_x, grad_weight


@pytest.mark.every_backend
@pytest.mark.parametrize("shape", [(5, 7, 9), (150, 300, 140), (1, 128, 256)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_three_products(recipe: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    x = torch.randn(m, k).to(dtype).requires_grad_()
    weight = torch.randn(n, k).to(dtype).requires_grad_()
    bias = torch.randn(n).to(dtype).requires_grad_()
    out = fp8.linear(x, weight, bias, recipe=recipe)
    grad = torch.randn(m, n).to(dtype)
    found = (out, *torch.autograd.grad(out, (x, weight, bias), grad))
    expected = definition(x.detach(), weight.detach(), grad, recipe)
    expected = (expected[0] + bias.detach().double(), *expected[1:], grad.double().sum(0))
    for mine, theirs, terms in zip(found, expected, (k, n, m, m), strict=True):
        assert mine.dtype == dtype
        # Rounded once to the dtype, or in float32 as often as sums are; results reach about 4 sqrt(terms).
        bound = max(torch.finfo(dtype).eps, 2.0**-11 * x.is_cuda)  # tensor cores of FP8 keep about 14 bits of a sum
        torch.testing.assert_close(mine.double(), theirs, rtol=bound, atol=max(bound, 1e-6) * math.sqrt(terms) * 4)


@pytest.mark.parametrize("recipe", RECIPES)
def test_leading_dims_missing_bias_and_frozen_parameters(recipe: str) -> None:
    x, weight = torch.randn(2, 3, 40, requires_grad=True), torch.randn(24, 40)
    out = fp8.linear(x, weight, recipe=recipe)
    assert out.shape == (2, 3, 24)
    out.sum().backward()  # a gradient of strides 0
    assert x.grad is not None and x.grad.shape == x.shape
    weight.requires_grad_()
    (grad,) = torch.autograd.grad(fp8.linear(x.detach(), weight, recipe=recipe).sum(), weight)
    assert grad.shape == weight.shape
    assert fp8.linear(torch.randn(0, 40), weight, recipe=recipe).shape == (0, 24)
    assert fp8.linear(torch.randn(40), weight, recipe=recipe).shape == (24,)
    assert fp8.linear(torch.randn(2, 3, 0), torch.randn(24, 0), recipe=recipe).equal(torch.zeros(2, 3, 24))


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_saved_for_backward(recipe: str) -> None:
    x, weight = torch.randn(64, 256, requires_grad=True), torch.randn(128, 256, requires_grad=True)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        fp8.linear(x, weight, recipe=recipe)
    others = sum(each.nbytes for each in saved if each.data_ptr() != weight.data_ptr())
    limit = x.nbytes if recipe == "rowwise_with_gw_hp" else x.numel() * 1.07  # with a scale for each column, of 64 rows
    assert x.numel() <= others <= limit


@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_checkpointed_and_functional(recipe: str) -> None:
    leaves = [torch.randn(shape, requires_grad=True) for shape in ((20, 130), (30, 130), (30,))]

    def loss(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return fp8.linear(x, weight, bias, recipe=recipe).square().sum()

    expected = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    checkpointed: Any = torch.utils.checkpoint.checkpoint(loss, *leaves, use_reentrant=False)
    for found in (
        torch.autograd.grad(compiled(*leaves), leaves),
        torch.autograd.grad(checkpointed, leaves),
        torch.func.grad(loss, (0, 1, 2))(*(leaf.detach() for leaf in leaves)),
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_autocast_decides_the_dtype_of_the_output() -> None:
    x, weight = torch.randn(20, 130, requires_grad=True), torch.randn(30, 130, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = fp8.linear(x, weight)
    assert out.dtype == torch.bfloat16
    assert out.equal(fp8.linear(x, weight).bfloat16())
    out.float().square().sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32


def shapes_of_quantised(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """A list to which each quantisation from now on adds the shape of its matrix."""
    shapes: list[tuple[int, ...]] = []
    for name in ("quantize", "quantize_both"):
        each = getattr(_fp8_recipes, name)

        def counting(matrix: Tensor, *args: Any, each: Any = each, **options: Any) -> Any:
            shapes.append(tuple(matrix.shape))
            return each(matrix, *args, **options)

        monkeypatch.setattr(_fp8_recipes, name, counting)
    return shapes


@pytest.mark.parametrize("recipe", RECIPES)
def test_unchanged_weights_are_quantised_once(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(130, 70)
    fp8.convert(layer, recipe, least_features=1)
    parts = [torch.randn(5, 130, requires_grad=True) for _ in range(3)]
    quantised = shapes_of_quantised(monkeypatch)

    def gradients() -> list[Tensor]:
        layer.zero_grad()
        for part in parts:
            part.grad = None
            torch.utils.checkpoint.checkpoint(layer, part, use_reentrant=False).square().sum().backward()
        grads = [part.grad for part in parts] + [parameter.grad for parameter in layer.parameters()]
        assert all(grad is not None for grad in grads)
        return [grad.clone() for grad in grads if grad is not None]

    of_weight = {(70, 130), (130, 70)}
    expected = gradients()
    assert sum(shape in of_weight for shape in quantised) == 9  # forward, again for backward, and its transpose
    quantised.clear()
    with fp8.unchanged_weights():
        assert all(map(torch.equal, gradients(), expected))
        assert sum(shape in of_weight for shape in quantised) == 1
        monkeypatch.undo()
        with torch.inference_mode():
            assert layer(parts[0]).equal(layer(parts[0]))
        with torch.no_grad():
            layer.weight.mul_(2)
        twice = layer(parts[0])
        compiled = torch.compile(lambda x: layer(x), backend="aot_eager", fullgraph=True)
        assert compiled(parts[0]).equal(twice)
        functional = torch.func.functional_call(layer, {"weight": layer.weight / 2}, (parts[0],))
    assert layer(parts[0]).equal(twice) and not functional.equal(twice)
    assert not _fp8_weights._weights._kept  # nothing is kept outside


def test_kept_weights_are_those_of_their_dtype() -> None:
    """`Module.to` gives a parameter other numbers, and PyTorch counts no change."""
    layer = nn.Linear(130, 70)
    fp8.convert(layer, least_features=1)
    x = torch.randn(5, 130)
    with fp8.unchanged_weights():
        before = layer(x)
        layer.bfloat16()
        found = layer(x.bfloat16())
    assert found.equal(layer(x.bfloat16())) and not found.float().equal(before)


def test_second_derivatives_are_refused() -> None:
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(fp8.linear(x, weight).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_errors() -> None:
    x, weight = torch.randn(4, 8), torch.randn(8, 8)
    with pytest.raises(RuntimeError, match=r"fp8: expected a recipe of tensorwise, rowwise, .* got 'mxfp8'"):
        fp8.linear(x, weight, recipe="mxfp8")
    with pytest.raises(RuntimeError, match=r"fp8.linear: expected input \(..., K\) and weight \(N, K\), got \(4, 8\)"):
        fp8.linear(x, weight[:, :7])
    with pytest.raises(RuntimeError, match=r"fp8: expected a recipe"):
        fp8.convert(nn.Linear(8, 8), "delayed")


# Models


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), Scaled(128, 128), nn.Linear(128, 96), nn.Linear(96, 8))


def test_convert_reports_and_reverts() -> None:
    net = model()
    parameters = [id(parameter) for parameter in net.parameters()]
    state = {name: value.clone() for name, value in net.state_dict().items()}
    report = fp8.convert(net, "blockwise", lambda name, layer: name == "3", least_features=32)
    assert report.converted == ["0"] and list(report.kept) == ["2", "3", "4"]
    assert report.kept["3"] == "by keep" and "Scaled" in report.kept["2"] and "96 x 8" in report.kept["4"]
    assert str(report).startswith("1 linear layers in FP8, 3 kept\n  2: a Scaled")
    assert isinstance(net[0], nn.Linear) and "fp8=blockwise" in repr(net)
    assert [id(parameter) for parameter in net.parameters()] == parameters
    assert all(value.equal(state[name]) for name, value in net.state_dict().items())
    x = torch.randn(6, 64)
    assert net[0](x).equal(fp8.linear(x, net[0].weight, net[0].bias, recipe="blockwise"))
    assert copy.deepcopy(net)(x).equal(net(x))
    assert fp8.convert(net, "rowwise", least_features=32).converted == ["0", "3"]
    fp8.revert(net)
    assert [type(layer) for layer in net] == [type(layer) for layer in model()] and "fp8" not in repr(net)
    assert net[0](x).equal(F.linear(x, net[0].weight, net[0].bias))


def test_layers_with_a_forward_of_their_own_are_kept() -> None:
    """As libraries give layers that they wrap without a class."""
    layer = nn.Linear(64, 64)
    layer.forward = functools.partial(F.linear, weight=layer.weight)  # type: ignore[method-assign]
    report = fp8.convert(layer, least_features=1)
    assert report.kept == {"": "a Linear with a forward of its own"} and type(layer) is nn.Linear


def test_layers_are_kept_that_are_too_small_to_gain() -> None:
    report = fp8.convert(model())
    assert not report.converted and len(report.kept) == 4


@pytest.mark.parametrize("recipe", RECIPES)
def test_training_converges_as_in_float32(recipe: str) -> None:
    torch.manual_seed(0)
    target = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
    student = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
    twin = copy.deepcopy(student)
    fp8.convert(twin, recipe, least_features=1)
    last = []
    for net in (student, twin):
        torch.manual_seed(1)
        losses = []
        optimizer = torch.optim.Adam(net.parameters(), 3e-3)
        for _ in range(200):
            x = torch.randn(256, 32)
            loss = F.mse_loss(net(x), target(x).detach())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        last.append(sum(losses[-20:]) / 20)
        assert last[-1] < losses[0] / 40
    # Rounded weights cannot come closer than about 5 %, by any recipe and seed; twice that is allowed.
    assert last[1] < 1.1 * last[0], last


@pytest.mark.parametrize("sharded", [False, True])
@on_ranks(2)
def test_data_parallel_and_fsdp(sharded: bool) -> None:
    """As the mean of both ranks' gradients: scales are those of the rows of a rank."""
    rank = torch.distributed.get_rank()
    net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))
    fp8.convert(net, least_features=1)
    halves = torch.randn(2, 8, 32)
    expected = [torch.zeros_like(parameter) for parameter in net.parameters()]
    for half in halves:
        grads = torch.autograd.grad(net(half).square().sum(), [*net.parameters()])
        expected = [total + grad / 2 for total, grad in zip(expected, grads, strict=True)]
    if sharded:
        for layer in (net[0], net[2], net):
            fully_shard(layer)
        with fp8.unchanged_weights():  # also where the memory of gathered weights is used again
            for _ in range(2):
                net.zero_grad()
                net(halves[rank]).square().sum().backward()
        found = [parameter.grad.full_tensor() for parameter in net.parameters()]
        fp8.revert(net)  # also of the classes that FSDP2 makes
        assert net(halves[rank]).isfinite().all()
    else:
        wrapper = cuda_ext.distributed.BucketedDataParallel(net)
        wrapper(halves[rank]).square().sum().backward()
        found = [parameter.grad for parameter in net.parameters()]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("module", ["Linear", "MLP", "GatedMLP", "SelfAttention"])
def test_modules_in_fp8(module: str) -> None:
    """As their layers one after the other; from the constructor or by convert, and back."""
    make: Any = getattr(cuda_ext.nn, module)
    sizes = {"Linear": (64, 64), "SelfAttention": (64, 4)}.get(module, (64, 96))
    options: dict[str, Any] = {"Linear": {"activation": "relu"}}.get(module, {})
    net = make(*sizes, **options)
    x, residual = torch.randn(2, 6, 64), torch.randn(2, 6, 64)
    exact = net(x, residual=residual)
    report = fp8.convert(net, "blockwise", least_features=1)
    assert len(report.converted) == (1 if module == "Linear" else 2) and not report.kept
    found = net(x, residual=residual)
    assert 0 < (found - exact).abs().max() < 0.3  # outputs of size 1, of a few products of numbers with 4 bits
    if module != "SelfAttention":
        twin = make(*sizes, **options, fp8="blockwise")
        twin.load_state_dict(net.state_dict())
        assert twin(x, residual=residual).equal(found) and "fp8=blockwise" in repr(twin)
    if module == "GatedMLP":
        preact = fp8.linear(x, net.gate_up_proj.weight, recipe="blockwise")
        hidden = cuda_ext.gated_linear(preact, torch.eye(192), activation="silu")  # silu(gate) * up
        assert found.equal(fp8.linear(hidden, net.down_proj.weight, recipe="blockwise") + residual)
    fp8.revert(net)
    assert net(x, residual=residual).equal(exact)


# Experts


def experts_model(**options: Any) -> nn.Sequential:
    experts = cuda_ext.nn.MixtureOfExperts(48, 32, 4, 2, shared_hidden_features=32, **options)
    return nn.Sequential(experts, nn.Linear(48, 8))


def outputs_and_gradients(net: nn.Module, x: Tensor) -> list[Tensor]:
    out = net(x)
    return [out, *torch.autograd.grad(out.square().sum(), [*net.parameters()])]


def test_convert_experts_and_revert() -> None:
    net, recipe = experts_model(), fp8.EXPERTS_RECIPES[0]
    state = {name: value.clone() for name, value in net.state_dict().items()}
    parameters = [id(parameter) for parameter in net.parameters()]
    x = torch.randn(40, 48)
    exact = outputs_and_gradients(net, x)
    report = fp8.convert(net, recipe, lambda name, layer: name == "1", least_features=32)
    linear = ["0.shared_experts.gate_up_proj", "0.shared_experts.down_proj"]
    assert report.converted == ["0.experts", *linear] and report.experts == 1 and report.kept == {"1": "by keep"}
    assert str(report) == "2 linear layers and 1 layers of experts in FP8, 1 kept\n  1: by keep"
    assert f"fp8={recipe}" in repr(net[0].experts)
    assert [id(parameter) for parameter in net.parameters()] == parameters
    assert net.state_dict().keys() == state.keys()
    assert all(value.equal(state[name]) for name, value in net.state_dict().items())
    twin = experts_model(fp8=recipe)
    twin.load_state_dict(state)
    found = outputs_and_gradients(net, x)
    assert all(map(torch.equal, found, outputs_and_gradients(twin, x)))
    assert not found[0].equal(exact[0]) and (found[0] - exact[0]).abs().mean() < 0.1 * exact[0].abs().mean()
    assert all(map(torch.equal, outputs_and_gradients(copy.deepcopy(net), x), found))
    for each in (net, twin):
        fp8.revert(each)
        assert all(map(torch.equal, outputs_and_gradients(each, x), exact)) and "fp8=r" not in repr(each)


def test_experts_that_convert_keeps() -> None:
    report = fp8.convert(experts_model(), "rowwise", least_features=1)
    assert "0.experts" not in report.converted and report.experts == 0
    reason = "multiplies in FP8 by 'rowwise_with_gw_hp' or 'blockwise' alone, not by 'rowwise'"
    assert report.kept == {"0.experts": reason} and reason in str(report)
    kept = fp8.convert(experts_model(), fp8.EXPERTS_RECIPES[0]).kept
    assert kept["0.experts"] == "48 x 32: quantising would take longer than FP8 saves"
    by_keep = fp8.convert(
        experts_model(), fp8.EXPERTS_RECIPES[0], lambda name, _: name == "0.experts", least_features=1
    )
    assert by_keep.kept["0.experts"] == "by keep" and len(by_keep.converted) == 3
    alone = cuda_ext.nn.Experts(48, 32, 4) if hasattr(cuda_ext.nn, "Experts") else experts_model()[0].experts
    assert fp8.convert(alone, fp8.EXPERTS_RECIPES[0], least_features=1).converted == [""]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_unchanged_experts_are_quantised_once(
    checkpointed: bool, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = cuda_ext.nn.MixtureOfExperts(48, 32, 4, 2, fp8=fp8.EXPERTS_RECIPES[0])
    parts = [torch.randn(9, 48) for _ in range(3)]
    quantised = shapes_of_quantised(monkeypatch)

    def losses_and_gradients() -> list[Tensor]:
        layer.zero_grad()
        losses = []
        for part in parts:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                # The input requires grad: else the first product's rows need no gradient.
                x = part.clone().requires_grad_()
                out = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
            losses.append(out.float().square().sum())
            losses[-1].backward()
        return [*losses, *(parameter.grad.clone() for parameter in layer.parameters())]  # type: ignore[union-attr]

    # Up (4 x 64, 48) and down (4 x 48, 32) in forward, their transposes (4 x 48, 64) and (4 x 32, 48) in backward.
    of_matrices = [(256, 48), (192, 32), (192, 64), (128, 48)]

    def counts() -> list[int]:
        found = [quantised.count(shape) for shape in of_matrices]
        quantised.clear()
        return found

    expected = losses_and_gradients()
    forwards = 6 if checkpointed else 3
    assert counts() == [forwards, forwards, 3, 3]
    with fp8.unchanged_weights():
        assert all(map(torch.equal, losses_and_gradients(), expected))
        assert counts() == [1, 1, 1, 1]
        with torch.no_grad():
            layer.experts.down_proj.mul_(2)
        twice = losses_and_gradients()
        assert counts() == [0, 1, 0, 1]
    assert all(map(torch.equal, losses_and_gradients(), twice))
    assert not _fp8_weights._weights._kept


def test_experts_under_autocast_are_converted_from_their_own_precision() -> None:
    """As linear layers: not from bfloat16. Gradients have the dtype of the parameters, from sums in float32."""
    layer = cuda_ext.nn.MixtureOfExperts(48, 32, 4, 2, fp8=fp8.EXPERTS_RECIPES[0]).experts
    x, ids, weights = torch.randn(20, 48).bfloat16(), torch.randint(0, 4, (20, 2)), torch.rand(20, 2)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x.float(), ids, weights)
    assert out.dtype == torch.bfloat16 and out.equal(layer(x, ids, weights))
    for gradient in torch.autograd.grad(out.float().square().sum(), [*layer.parameters()]):
        assert gradient.dtype == torch.float32 and not gradient.equal(gradient.bfloat16().float())
