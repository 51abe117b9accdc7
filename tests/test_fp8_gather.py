"""Weights that FSDP2 gathers in FP8, beside a model that is not sharded."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import cuda_ext
from cuda_ext import fp8
from cuda_ext._gathered_weights import GatheredWeight

WIDTH, HIDDEN, ROWS = 256, 512, 24
RECIPES = ("tensorwise", "blockwise")


def make(recipe: str, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(3)
    net = nn.Sequential(
        nn.Linear(WIDTH, HIDDEN), nn.GELU(), cuda_ext.nn.GatedMLP(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN),
        nn.Linear(HIDDEN, WIDTH),
    ).to(dtype)  # fmt: skip
    fp8.convert(net, recipe, least_features=1)
    return net


def shard(net: nn.Sequential, **options: Any) -> nn.Sequential:
    for layer in net:
        if not isinstance(layer, nn.GELU):
            fully_shard(layer, **options)
    return fully_shard(net, **options)


def batches(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """(count, ranks, ROWS, WIDTH)"""
    torch.manual_seed(5)
    return torch.randn(count, dist.get_world_size(), ROWS, WIDTH).to(dtype)


def loss(net: nn.Module, rows: Tensor) -> Tensor:
    return net(rows).float().square().mean()


def train(net: nn.Module, steps: Tensor, ranks: list[int]) -> list[float]:
    """The losses of the last rank of `ranks`, whose gradients are averaged."""
    optimizer, losses = torch.optim.AdamW(net.parameters(), lr=1e-3), []
    for step in steps:
        optimizer.zero_grad()
        for rank in ranks:
            value = loss(net, step[rank])
            (value / len(ranks)).backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return losses


def full(net: nn.Module) -> list[Tensor]:
    return [p.full_tensor().detach() if hasattr(p, "full_tensor") else p.detach() for p in net.parameters()]


class Sent:
    """Bytes of each all-gather into one tensor."""

    def __init__(self) -> None:
        self.bytes: list[int] = []

    @contextlib.contextmanager
    def count(self) -> Iterator[None]:
        since_2_15 = hasattr(dist, "all_gather_single")
        name = "all_gather_single" if since_2_15 else "all_gather_into_tensor"
        original = getattr(dist, name)

        def counted(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.bytes.append(input.nbytes)
            return original(output, input, *args, **kwargs)

        with mock.patch.object(dist, name, counted):
            yield


@on_ranks(2)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_training_is_that_of_one_rank(recipe: str, reshard: bool) -> None:
    """Outputs are equal bit for bit; of two ranks' gradients the mean has one order."""
    rank, steps = dist.get_rank(), batches(4)
    plain, sharded = make(recipe), shard(make(recipe), reshard_after_forward=reshard)
    report = fp8.gather_weights(sharded)
    assert len(report.converted) == 4 and not report.kept
    found, expected = train(sharded, steps, [rank]), train(plain, steps, [1 - rank, rank])
    assert found[0] == expected[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for actual, expected in zip(full(sharded), full(plain), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)  # Adam divides small gradients by themselves


@on_ranks(2)
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_of_the_first_step(recipe: str) -> None:
    rank, rows = dist.get_rank(), batches(1)[0]
    plain, sharded = make(recipe), shard(make(recipe))
    fp8.gather_weights(sharded)
    for _ in range(2):  # the memory of gathered weights is used again; gradients accumulate
        loss(sharded, rows[rank]).backward()
        for each in rows:
            (loss(plain, each) / 2).backward()
    for one, all_rows in zip(sharded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), all_rows.grad, rtol=1e-6, atol=1e-8)


@on_ranks(2)
@pytest.mark.parametrize("recipe", RECIPES)
def test_half_of_the_bytes_of_bfloat16(recipe: str) -> None:
    sent = []
    for gathers in (False, True):
        net = shard(make(recipe), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        if gathers:
            fp8.gather_weights(net)
        counter = Sent()
        with counter.count():
            loss(net, batches(1)[0][dist.get_rank()]).backward()
        sent.append(sum(counter.bytes))
    assert 0.49 < sent[1] / sent[0] < 0.52, sent


@on_ranks(4)
@pytest.mark.parametrize("recipe", RECIPES)
def test_hybrid_sharding_and_mixed_precision(recipe: str) -> None:
    """bfloat16 of everything but the weights, which are quantised from float32."""
    rank, rows = dist.get_rank(), batches(1)[0]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    net = shard(make(recipe), mesh=mesh, mp_policy=policy)
    assert len(fp8.gather_weights(net).converted) == 4
    plain = make(recipe)
    for layer in plain.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            if parameter.dim() == 1:
                setattr(layer, name, nn.Parameter(parameter.bfloat16()))
    low = rows[rank].bfloat16()
    found = net(rows[rank])
    assert found.dtype == torch.bfloat16 and found.equal(plain(low))
    found.float().square().mean().backward()
    for one in net.parameters():
        assert one.grad.dtype == torch.float32 and one.grad.to_local().isfinite().all()


@on_ranks(2)
def test_special_numbers_are_those_of_quantize() -> None:
    """Also where one rank alone has the largest element, or an infinite one."""
    for recipe in RECIPES:
        layer = nn.Linear(HIDDEN, WIDTH, bias=False)
        with torch.no_grad():
            layer.weight.copy_(torch.randn(WIDTH, HIDDEN, generator=torch.Generator().manual_seed(1)))
            layer.weight[WIDTH // 2 :] *= 100
            layer.weight[3, 5], layer.weight[7, 2], layer.weight[WIDTH - 1, 4] = torch.inf, torch.nan, -torch.inf
        net = nn.Sequential(layer)
        fp8.convert(net, recipe, least_features=1)
        expected = net[0](torch.eye(HIDDEN))
        fully_shard(net)
        fp8.gather_weights(net)
        torch.testing.assert_close(net(torch.eye(HIDDEN)), expected, rtol=0, atol=0, equal_nan=True)


@on_ranks(2)
def test_other_users_of_the_weight_have_its_numbers() -> None:
    """As a penalty in the loss, whose gradient reaches the parameter, too."""
    net = shard(make("tensorwise"))
    fp8.gather_weights(net)
    seen = []

    def penalty(layer: nn.Linear, args: tuple[Tensor]) -> Tensor:
        assert isinstance(layer.weight, GatheredWeight)
        seen.append(layer.weight.detach().clone())
        return args[0] + layer.weight.square().mean()

    net[0].register_forward_pre_hook(penalty)
    loss(net, batches(1)[0][dist.get_rank()]).backward()
    exact = next(net.parameters()).full_tensor()
    assert type(seen[0]) is Tensor and 0 < (seen[0] - exact).abs().max() < exact.abs().max() / 16
    assert next(net.parameters()).grad.to_local().isfinite().all()


@on_ranks(2)
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_people_do_with_sharded_models(recipe: str) -> None:
    """Checkpointing of activations, clipping, evaluation, state dicts and their ways to files, pickle."""
    rank, rows = dist.get_rank(), batches(1)[0]
    net = make(recipe)
    apply_activation_checkpointing(net, check_fn=lambda layer: isinstance(layer, cuda_ext.nn.GatedMLP))
    shard(net)
    fp8.gather_weights(net)
    before = full(net)
    with fp8.unchanged_weights():
        for _ in range(2):
            loss(net, rows[rank]).backward()
    assert torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0).full_tensor() > 0
    with torch.no_grad():
        assert loss(net, rows[rank]).isfinite()
    with torch.inference_mode():
        assert net(rows[rank]).isfinite().all()
    for found, expected in zip(full(net), before, strict=True):
        assert found.equal(expected)
    state = net.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert state.keys() == loaded.keys()
    net.load_state_dict(loaded)
    again = loss(net, rows[rank])
    assert again.isfinite() and all(type(p.to_local()) is Tensor for p in net.parameters())
    assert fp8.gather_weights(net).converted == []


@on_ranks(2)
def test_weights_that_travel_as_they_did() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.second.weight = self.first.weight

    layers = nn.ModuleDict({
        "sharded": nn.Linear(WIDTH, HIDDEN), "plain": nn.Linear(WIDTH, HIDDEN), "rows": nn.Linear(WIDTH, 257),
        "blocks": nn.Linear(WIDTH, 128), "columns": nn.Linear(200, HIDDEN), "tied": Tied(),
    })  # fmt: skip
    fp8.convert(layers, "blockwise", least_features=1)
    other = nn.Linear(WIDTH, HIDDEN)
    layers["recipe"] = other
    fp8.convert(other, "rowwise", least_features=1)
    for name, layer in layers.items():
        if name != "plain":
            fully_shard(layer)
    report = fp8.gather_weights(layers)
    assert report.converted == ["sharded"] and {name: reason.split()[0] for name, reason in report.kept.items()} == {
        "plain": "not", "rows": "2", "blocks": "64", "columns": "rows", "tied.first": "shared",
        "tied.second": "shared", "recipe": "the",
    }  # fmt: skip
    with pytest.raises(RuntimeError, match=r"fp8\.revert: expected .* got 'sharded'"):
        fp8.revert(layers)
    kept = fp8.convert(layers, "tensorwise", least_features=1).kept
    assert kept["sharded"] == "its weight is gathered in FP8"
    assert kept["rows"] == "convert before fully_shard, which changes the class"


@on_ranks(2)
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_blocks(recipe: str) -> None:
    rank, rows = dist.get_rank(), batches(1)[0]
    plain, compiled = (shard(make(recipe)) for _ in range(2))
    for net in (plain, compiled):
        fp8.gather_weights(net)
    for layer in compiled:
        layer.compile(backend="aot_eager")
    for _ in range(2):
        losses = []
        for net in (plain, compiled):
            losses.append(loss(net, rows[rank]))
            losses[-1].backward()
        torch.testing.assert_close(*losses)
    for one, other in zip(compiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad.to_local(), other.grad.to_local())
