"""Weights that are kept in FP8 while `fp8.unchanged_weights` is entered, in compiled graphs: as in eager mode, bit for
bit, and converted as often."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.profiler import profile

import cuda_ext
from cuda_ext import _fp8_weights, fp8
from cuda_ext._fp8_recipes import BY_NAME

# Without biases, whose gradients are sums that compilers order otherwise.
MODULES: dict[str, Callable[[str], nn.Module]] = {
    "Linear": lambda recipe: converted(nn.Linear(40, 24, bias=False), recipe),
    "MLP": lambda recipe: cuda_ext.nn.MLP(40, 24, fp8=recipe, bias=False),
    "GatedMLP": lambda recipe: cuda_ext.nn.GatedMLP(40, 24, fp8=recipe),
    "MixtureOfExperts": lambda recipe: cuda_ext.nn.MixtureOfExperts(40, 24, 3, 2, fp8=recipe),
}


def converted(layer: nn.Module, recipe: str) -> nn.Module:
    fp8.convert(layer, recipe, least_features=1)
    return layer


def step(model: Any, parts: list[Tensor]) -> list[Tensor]:
    """Outputs, and gradients of a batch in parts."""
    model.zero_grad()
    leaves = [part.clone().requires_grad_() for part in parts]
    outs = [model(leaf) for leaf in leaves]
    for out in outs:
        out.square().sum().backward()
    return [*outs, *(leaf.grad for leaf in leaves), *(p.grad.clone() for p in model.parameters())]  # type: ignore


def quantisations(run: Callable[[], Any]) -> int:
    """How many matrices are converted as it runs."""
    with profile() as record:
        run()
    return sum(event.count for event in record.key_averages() if event.key.startswith("cuda_ext::quantize_fp8"))


class Rows(nn.Module):
    """Checkpointed, if it is."""

    def __init__(self, layer: nn.Module, checkpointed: bool) -> None:
        super().__init__()
        self.layer, self.checkpointed = layer, checkpointed

    def forward(self, x: Tensor) -> Tensor:
        if not self.checkpointed:
            return self.layer(x)  # type: ignore[no-any-return]
        return torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=False)  # type: ignore[no-any-return]


def check_steps(model: Any, compiled: Any, weights: int, matrices: int) -> None:
    """Of `weights`, which are converted to `matrices`."""
    parts = [torch.randn(7, 40) for _ in range(3)]
    count: Callable[[Any], int] = lambda model: quantisations(lambda: step(model, parts))  # noqa: E731
    outside = step(model, parts)
    assert all(map(torch.equal, step(compiled, parts), outside))
    converted = count(compiled)
    with fp8.unchanged_weights():
        assert all(map(torch.equal, step(compiled, parts), outside))
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert converted - count(compiled) >= 3 * 2 * weights  # forward and backward of each part
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-0.5)
        assert count(compiled) - count(compiled) == matrices
        changed = step(compiled, parts)
        assert all(map(torch.equal, changed, step(model, parts)))
        assert model.checkpointed or count(compiled) == count(model)  # compilers need not compute all again
    assert not _fp8_weights._weights._kept
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    last = step(model, parts)
    assert not last[0].equal(changed[0])
    assert all(map(torch.equal, step(compiled, parts), last))
    with fp8.unchanged_weights():  # the graphs are there
        assert all(map(torch.equal, step(compiled, parts), last))
        with fp8.unchanged_weights():
            assert all(map(torch.equal, step(compiled, parts), last))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("module", MODULES)
def test_compiled_steps(module: str, checkpointed: bool) -> None:
    recipe = random.choice(fp8.EXPERTS_RECIPES if module == "MixtureOfExperts" else fp8.RECIPES)
    model = Rows(MODULES[module](recipe), checkpointed)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    weights = 1 if module == "Linear" else 2
    # Linear layers both ways from one read; experts each way, and squares of 128 of each expert apart.
    each = {"rowwise_with_gw_hp": 2, "blockwise": 2 * 3}[recipe] if module == "MixtureOfExperts" else 1
    check_steps(model, compiled, weights, weights * each)


@pytest.mark.parametrize("module", ["Linear", "GatedMLP"])
def test_by_inductor_in_a_checkpoint_outside_of_the_graph(module: str) -> None:
    """Which gives backward other tensors than the parameters."""
    model = MODULES[module](random.choice(fp8.RECIPES))
    torch._dynamo.reset()
    weights = 1 if module == "Linear" else 2
    inner = torch.compile(model, fullgraph=True, dynamic=False)
    check_steps(Rows(model, True), Rows(inner, True), weights, weights)


def test_backward_after_the_context() -> None:
    model, x = MODULES["MLP"]("rowwise"), torch.randn(7, 40)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(model(x).square().sum(), [*model.parameters()])
    with fp8.unchanged_weights():
        outs = [compiled(x), model(x)]
    for out in outs:
        found = torch.autograd.grad(out.square().sum(), [*model.parameters()])
        assert all(map(torch.equal, found, expected))


def test_frozen_weights_and_inference() -> None:
    """Compilers detach weights that need no gradient: they are the same memory."""
    model, x = MODULES["Linear"]("blockwise"), torch.randn(7, 40, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    model.requires_grad_(False)
    expected = torch.autograd.grad(model(x).sum(), x)
    with fp8.unchanged_weights():
        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                compiled(x)
                assert quantisations(lambda: compiled(x)) == 1 and compiled(x).equal(model(x))
        assert torch.autograd.grad(compiled(x).sum(), x)[0].equal(expected[0])
        assert quantisations(lambda: torch.autograd.grad(compiled(x).sum(), x)) == 2  # of input and gradient


def test_other_tensors_than_parameters_are_not_kept() -> None:
    layer, x = MODULES["Linear"]("rowwise"), torch.randn(7, 40)
    torch._dynamo.reset()

    def call(scale: float) -> Tensor:
        weights = {"weight": layer.weight * scale}
        return torch.func.functional_call(layer, weights, (x,))  # type: ignore[no-any-return]

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with fp8.unchanged_weights():
        for scale in (1.0, 2.0):
            assert compiled(scale).equal(call(scale))
        assert not _fp8_weights._weights._kept
        samples = torch.randn(3, 5, 40)
        each = torch.stack([layer(sample) for sample in samples])
        torch.testing.assert_close(torch.vmap(layer)(samples), each, rtol=0, atol=1e-5)
        of_samples = torch.vmap(torch.func.grad(lambda sample: layer(sample).square().sum()))(samples)
        for sample, found in zip(samples, of_samples, strict=True):
            leaf = sample.clone().requires_grad_()
            torch.testing.assert_close(torch.autograd.grad(layer(leaf).square().sum(), leaf)[0], found)


def test_memory_that_another_weight_gets() -> None:
    """And that of weights that are gone is let go."""
    x = torch.randn(7, 40)
    with fp8.unchanged_weights():
        for _ in range(5):
            layer = MODULES["Linear"]("rowwise")
            assert layer(x).equal(fp8.linear(x, layer.weight.detach()))
            del layer
        assert len(_fp8_weights._weights._kept) == 1


@pytest.mark.parametrize("groups", [0, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_registration(transposed: bool, groups: int) -> None:
    recipe = random.choice(fp8.EXPERTS_RECIPES)
    weight = torch.randn(groups, 24, 40) if groups else torch.randn(24, 40)
    rows = BY_NAME[recipe].of(torch.randn(256, 24 if transposed else 40), BY_NAME[recipe].tokens)
    ends = torch.tensor([128, 128, 256]) if groups else None
    options = {"recipe": recipe, "transposed": transposed, "output_dtype": torch.float32}
    op = torch.ops.cuda_ext.multiply_by_kept_weight.default
    checks = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"  # PyTorch compares no FP8
    torch.library.opcheck(op, (rows.data, rows.scales, weight, None, ends), options, test_utils=checks)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        op(rows.data, rows.scales, weight, None, ends, **options)
    assert counter.get_total_flops() == 2 * 256 * 24 * 40


@pytest.mark.parametrize("capturing", [False, True])
def test_a_captured_graph_keeps_nothing(capturing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would read what is kept after that has been freed."""
    layer = MODULES["Linear"]("rowwise")
    monkeypatch.setattr(nn.Parameter, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    with fp8.unchanged_weights():
        layer(torch.randn(7, 40))
        assert len(_fp8_weights._weights._kept) == (not capturing)
