"""Stochastic rounding to FP8: its definition bit for bit, frequencies, the generator, transforms, gradients."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from ranks import on_ranks
from torch import Tensor, nn

import cuda_ext
from cuda_ext import fp8, testing
from cuda_ext.fp8 import quantize, quantize_both
from cuda_ext.testing.references import float8_neighbours, float8_numbers, scaled_elements, stochastic_float8

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = {E4M3: (448.0, 2.0**-6), E5M2: (57344.0, 2.0**-14)}  # the largest number, the least normal one
SCALINGS = ("TensorWise", "RowWise", "BlockWise1x128", "BlockWise128x128")
# Of a normal distribution: less often than once in 10^7.
SIGMAS = 5.5


def next_seed() -> int:
    """The 64 bits that the CPU's generator gives next, which it then gives again."""
    with torch.random.fork_rng([]):
        return int(torch.empty((), dtype=torch.int64).random_(-(2**63), None)) % 2**64


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 127), (130, 300), (257, 128), (2, 1001)], ids=str)
def test_any_backend_gives_the_bits_of_the_definition(shape: tuple[int, int], scaling: str, dtype: torch.dtype) -> None:
    kind = random.choice((torch.float32, torch.bfloat16, torch.float16))
    x = torch.randn(shape).mul(2.0 ** torch.randint(-24, 6, shape)).to(kind)
    x[torch.rand(shape) < 0.05] = 0.0
    power_of_two = random.random() < 0.5
    options: dict[str, Any] = {"dtype": dtype, "power_of_two": power_of_two}
    nearest = quantize_both(x, scaling, **options)
    seed = random.randrange(2**31)
    torch.manual_seed(seed)
    key = next_seed()
    wanted = [
        stochastic_float8(x, nearest[1], scaling, dtype, seed=key, offset=0),
        stochastic_float8(x.t(), nearest[3], scaling, dtype, seed=key, offset=0, transpose=True),
    ]
    strided = random.choice(
        (x, x.t().contiguous().t(), torch.zeros(shape[0], shape[1] + 3, dtype=kind)[:, 3:].copy_(x))
    )
    for backend in (contextlib.nullcontext(), testing.emulated("sm_80"), testing.emulated("sm_90a")):
        with backend:
            torch.manual_seed(seed)
            found = quantize_both(strided, scaling, **options, stochastic=True)
            torch.manual_seed(seed)
            alone = quantize(strided, scaling, **options, stochastic=True)
        assert found[1].equal(nearest[1]) and found[3].equal(nearest[3]) and alone[1].equal(nearest[1])
        assert found[0].double().equal(wanted[0]) and found[2].double().equal(wanted[1])
        assert alone[0].view(torch.uint8).equal(found[0].view(torch.uint8))
        assert found[0].stride() == nearest[0].stride()


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_numbers_of_the_format_stay_and_what_is_not_finite(dtype: torch.dtype) -> None:
    numbers = float8_numbers(dtype).float()
    for scale in (1.0, 2.0**-20):
        x = torch.cat([numbers, -numbers])[None] * scale
        for context in (contextlib.nullcontext(), testing.emulated(random.choice(("sm_80", "sm_90a")))):
            with context:
                data, scales = quantize(x, dtype=dtype, stochastic=True)
            assert scales.item() == scale and data.view(torch.uint8).equal((x / scale).to(dtype).view(torch.uint8))
    most = FORMATS[dtype][0]
    x = torch.tensor([[most, torch.inf, -torch.inf, torch.nan, -0.0, 0.0, 1.0, 2.0**-149]])
    for context in (contextlib.nullcontext(), testing.emulated(random.choice(("sm_80", "sm_90a")))):
        with context:
            data = quantize(x, dtype=dtype, stochastic=True)[0].float()[0]
        assert data[:3].tolist() == [most, most, -most] and data[3].isnan()
        assert data[4:7].tolist() == [0, 0, 1] and data[4].signbit() and not data[5].signbit() and data[7] == 0


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("emulated", [False, True])
def test_frequencies_are_the_fractions(emulated: bool, dtype: torch.dtype) -> None:
    """Of magnitudes from far below the least number to the largest; a row has its largest number as its first element,
    so that its scale is 1."""
    rows, columns = (24, 2000) if emulated else (60, 20000)
    most, least_normal = FORMATS[dtype]
    exponents = torch.empty(rows).uniform_(math.log2(least_normal) - 8, math.log2(most))
    x = (2.0**exponents)[:, None].repeat(1, columns)
    x[:, 0] = most
    with testing.emulated("sm_80") if emulated else contextlib.nullcontext():
        data, scales = quantize(x * random.choice((-1, 1)), dtype=dtype, stochastic=True)
    assert scales.eq(1).all()
    below, fraction = float8_neighbours(x[:, 1].double(), dtype)
    numbers = float8_numbers(dtype)
    following = numbers[(below + 1).clamp(max=len(numbers) - 1)]
    found = data.double().abs()[:, 1:]
    is_upper = found == following[:, None]
    assert (is_upper | (found == numbers[below][:, None])).all()
    draws = columns - 1
    error = (is_upper.double().sum(1) - draws * fraction).abs()
    assert (error <= SIGMAS * (draws * fraction * (1 - fraction)).sqrt() + 1e-6).all(), (error, fraction)


def test_errors_have_no_mean_and_are_independent() -> None:
    """Of adjacent elements, whose numbers are of one counter or of two, of rows, of calls, and of the transpose."""
    x = torch.rand(500, 250).add(1).bfloat16()

    def errors() -> tuple[Tensor, Tensor]:
        data, scales, transposed, its_scales = quantize_both(x, "TensorWise", stochastic=True, power_of_two=True)
        both = scaled_elements(data, scales, "RowWise"), scaled_elements(transposed, its_scales, "RowWise").t()
        return both[0] - x.double(), both[1] - x.double()

    (first, of_transpose), (second, _) = errors(), errors()
    nearest = scaled_elements(*quantize(x, "TensorWise", power_of_two=True), "RowWise") - x.double()
    for left, right in (
        (first, second),
        (first, of_transpose),
        (first[1:], first[:-1]),
        (first[:, 1:], first[:, :-1]),
        (first[:, 4:], first[:, :-4]),
    ):
        correlation = (left * right).mean() / (left.square().mean() * right.square().mean()).sqrt()
        assert correlation.abs() < SIGMAS / left.numel() ** 0.5
        assert not left.equal(right)
    for each in (first, second, of_transpose):
        assert each.mean().abs() < SIGMAS * each.square().mean().sqrt() / each.numel() ** 0.5
    # A value that all elements have is rounded to nearest with the same error, however many they are.
    same = torch.full((1, 250001), 1.03125)
    same[0, 0] = 448.0
    assert (quantize(same)[0].double()[0, 1:].mean() - 1.03125).abs() == 0.03125
    mean = quantize(same, stochastic=True)[0].double()[0, 1:].mean()
    assert (mean - 1.03125).abs() < SIGMAS * 0.0625 * (0.25 * 0.75) ** 0.5 * 2 / 500
    assert nearest.abs().max() < first.abs().max()


def test_the_generator_determines_the_numbers() -> None:
    x = torch.randn(5, 300)
    torch.manual_seed(3)
    first, second = (quantize(x, stochastic=True)[0].float() for _ in range(2))
    after = torch.rand(())
    assert not first.equal(second)
    torch.manual_seed(3)
    assert quantize(x, stochastic=True)[0].float().equal(first)
    with torch.random.fork_rng([]):
        assert quantize(x, stochastic=True)[0].float().equal(second)
    assert quantize(x, stochastic=True)[0].float().equal(second) and torch.rand(()) == after
    state = torch.random.get_rng_state()
    quantize(x)
    assert torch.random.get_rng_state().equal(state)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_round(shape: tuple[int, int]) -> None:
    data, scales, transposed, its_scales = quantize_both(torch.empty(shape), stochastic=True)
    assert data.shape == shape and transposed.shape == shape[::-1] and scales.eq(1).all() and its_scales.eq(1).all()


def test_a_captured_graph_draws_anew_at_each_replay() -> None:
    """Seed and offset then lie in memory that a replay changes."""
    x = torch.randn(130, 140)
    generator = torch.tensor([7, 100])
    state = torch.random.get_rng_state()
    scales = quantize(x)[1]
    with testing.emulated("sm_80", "lazy", "pct", check_races=True):
        torch.ops.cuda_ext._emulate_capture(generator)
        try:
            found = [quantize(x, stochastic=True)[0] for _ in range(2)]
            generator[1] = 1000
            found.append(quantize(x, stochastic=True)[0])
        finally:
            torch.ops.cuda_ext._emulate_capture(None)
    assert torch.random.get_rng_state().equal(state)
    for data, offset in zip(found, (100, 104, 1008), strict=True):
        assert data.double().equal(stochastic_float8(x, scales, "RowWise", E4M3, seed=7, offset=offset))


# PyTorch's transforms


def test_compiled_calls_are_neither_joined_nor_repeated() -> None:
    def two(x: Tensor) -> tuple[Tensor, ...]:
        return *quantize(x, stochastic=True), *quantize(x, stochastic=True), *quantize_both(x, stochastic=True)

    x = torch.randn(5, 300)
    compiled = torch.compile(two, fullgraph=True, dynamic=True, backend="aot_eager")
    for size in (300, 77):
        torch.manual_seed(1)
        expected = two(x[:, :size])
        torch.manual_seed(1)
        found = compiled(x[:, :size])
        assert all(mine.float().equal(theirs.float()) for mine, theirs in zip(found, expected, strict=True))
        assert not found[0].float().equal(found[2].float())


def test_registrations() -> None:
    for op in (torch.ops.cuda_ext.quantize_fp8.stochastic, torch.ops.cuda_ext.quantize_fp8_both.stochastic):
        assert torch.Tag.nondeterministic_seeded in op.tags
        for scaling in (0, 1, 4, 5):
            # Without the comparison of outputs, which are random.
            utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
            torch.library.opcheck(op, (torch.randn(5, 300), E4M3, scaling, True), test_utils=utilities)
    for op in (torch.ops.cuda_ext.quantize_fp8.default, torch.ops.cuda_ext.quantize_fp8_both.default):
        assert torch.Tag.nondeterministic_seeded not in op.tags


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("op", [quantize, quantize_both])
@pytest.mark.parametrize("mapped", [True, False])
def test_vmap_follows_its_randomness(mapped: bool, op: Callable[..., Any], scaling: str) -> None:
    x = torch.randn(5, 200)
    batch = x.expand(3, 5, 200)

    def run(randomness: str) -> tuple[list[Tensor], Tensor]:
        """Also what the generator gives next."""
        torch.manual_seed(5)
        call = partial(op, scaling=scaling, stochastic=True)
        f = call if mapped else lambda each: [t.float() + 0 * each[0, 0] for t in call(x)]
        return [t.float() for t in torch.vmap(f, randomness=randomness)(batch)], torch.rand(())

    with pytest.raises(RuntimeError, match=r"quantize_fp8: expected torch.vmap with randomness='same' or 'different'"):
        run("error")
    torch.manual_seed(5)
    alone, following = op(x, scaling, stochastic=True), torch.rand(())
    same, after = run("same")
    assert after == following
    for of_batch, each in zip(same, alone, strict=True):
        assert all(element.equal(each.float()) for element in of_batch)
    different, _ = run("different")
    for data in different[::2]:
        assert not data[0].equal(data[1]) and not data[1].equal(data[2])
    for scales, each in zip(different[1::2], alone[1::2], strict=True):
        assert scales.equal(each.expand_as(scales))


@on_ranks(2)
def test_dtensors_are_refused() -> None:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.randn(8, 32), mesh, [Shard(0)])
    for op in (quantize, quantize_both):
        with pytest.raises(NotImplementedError, match="quantize_fp8: expected stochastic=False for DTensors"):
            op(x, stochastic=True)


# Gradients


@pytest.mark.parametrize("recipe", fp8.RECIPES)
def test_gradients_have_the_mean_of_exact_ones(recipe: str) -> None:
    """Input and weight are rounded as always; the gradient of the output, which is the same in all rows, at random."""
    x = torch.randn(40, 48, requires_grad=True)
    weight = torch.randn(24, 48, requires_grad=True)
    grad = torch.randn(24).expand(40, 24)
    options: dict[str, Any] = {"recipe": recipe}

    def gradients(stochastic: bool) -> list[Tensor]:
        out = fp8.linear(x, weight, **options, stochastic_gradients=stochastic)
        assert out.equal(fp8.linear(x, weight, **options))
        return [each.double() for each in torch.autograd.grad(out, (x, weight), grad)]

    scalings = {"tensorwise": ("TensorWise", "TensorWise"), "blockwise": ("BlockWise1x128", "BlockWise128x128")}
    tokens, weights = scalings.get(recipe, ("RowWise", "RowWise"))
    power_of_two = recipe != "tensorwise"
    of_weight = scaled_elements(*quantize(weight.t().detach(), weights, power_of_two=power_of_two), weights).t()
    of_rows = scaled_elements(*quantize(x.t().detach(), tokens, power_of_two=power_of_two), tokens).t()
    exact = [grad.double() @ of_weight, grad.double().t() @ of_rows]
    samples = [gradients(True) for _ in range(100)]
    for index, wanted in enumerate(exact):
        if recipe == "rowwise_with_gw_hp" and index == 1:
            continue  # that product is not in FP8
        found = torch.stack([sample[index] for sample in samples])
        spread = found.std(0)
        assert spread.max() > 0 and not found[0].equal(found[1])
        assert ((found.mean(0) - wanted).abs() <= SIGMAS * spread / 10 + 1e-4 * wanted.abs().max()).all()
        # The error of rounding to nearest is the same in all rows.
        assert (gradients(False)[index] - wanted).abs().max() > 2 * (found.mean(0) - wanted).abs().max()


@pytest.mark.parametrize("recipe", fp8.RECIPES)
def test_gradients_compiled_checkpointed_and_functional(recipe: str) -> None:
    leaves = [torch.randn(shape, requires_grad=True) for shape in ((20, 130), (30, 130), (30,))]

    def loss(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return fp8.linear(x, weight, bias, recipe=recipe, stochastic_gradients=True).square().sum()

    def gradients(function: Callable[..., Tensor], seed: int = 1) -> tuple[Tensor, ...]:
        torch.manual_seed(seed)
        return torch.autograd.grad(function(*leaves), leaves)

    expected = gradients(loss)
    assert not gradients(loss, seed=2)[0].equal(expected[0])
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    checkpointed = partial(torch.utils.checkpoint.checkpoint, loss, use_reentrant=False)
    torch.manual_seed(1)
    functional = torch.func.grad(loss, (0, 1, 2))(*(leaf.detach() for leaf in leaves))
    for found in (gradients(compiled), gradients(checkpointed), functional):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    samples = torch.randn(3, 2, 130)
    of_samples: Any = torch.func.grad(lambda weight, x: loss(x, weight, leaves[2].detach()))
    mapped = torch.vmap(of_samples, in_dims=(None, 0), randomness="different")(leaves[1].detach(), samples)
    assert mapped.shape == (3, 30, 130) and mapped.isfinite().all()
    if recipe != "rowwise_with_gw_hp":
        with pytest.raises(RuntimeError, match="randomness"):
            torch.vmap(of_samples, in_dims=(None, 0))(leaves[1].detach(), samples)


def test_convert_and_revert() -> None:
    net = nn.Sequential(nn.Linear(64, 128), cuda_ext.nn.Linear(128, 64, activation="relu"))
    x = torch.randn(6, 64, requires_grad=True)

    def gradient(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return torch.autograd.grad(net(x).square().sum(), x)[0]

    fp8.convert(net, least_features=1, stochastic_gradients=True)
    assert repr(net).count("stochastic_gradients=True") == 2
    assert gradient(1).equal(gradient(1)) and not gradient(1).equal(gradient(2))
    fp8.convert(net, least_features=1)
    assert "stochastic" not in repr(net) and gradient(1).equal(gradient(2))
    fp8.convert(net, least_features=1, stochastic_gradients=True)
    fp8.revert(net)
    assert "stochastic" not in repr(net) and type(net[0]) is nn.Linear and not hasattr(net[0], "stochastic_gradients")
    assert cuda_ext.nn.Linear(64, 64).stochastic_gradients is False


def test_revert_leaves_other_modules_alone() -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    net[1].stochastic_gradients = "mine"
    fp8.convert(net, least_features=1)
    fp8.revert(net)
    assert net[1].stochastic_gradients == "mine"
