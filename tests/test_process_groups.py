"""Sums of a wrapper together with other collectives of the same ranks: of another wrapper, a layer or the loss."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn
from distributed_common import SMALL, assert_same_on_all_ranks
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from cuda_ext.distributed import BucketedDataParallel

WAYS: dict[str, dict[str, Any]] = {
    "auto": {},
    "all_reduce": {"algorithm": "all_reduce"},
    "float32": {"algorithm": "float32"},
    "nodes": {"algorithm": "all_reduce"},
    "sharded": {"shard_optimizer": True},
    "sharded, float32": {"shard_optimizer": True, "algorithm": "float32"},
    "not gloo": {"algorithm": "float32"},
}


def wrap(module: nn.Module, way: str) -> BucketedDataParallel:
    nodes = DeviceMesh("cpu", torch.arange(dist.get_world_size()).view(2, -1)) if way == "nodes" else None
    other = way == "not gloo"  # like another backend on CPUs, with which a wrapper has no separate group
    with (
        mock.patch("cuda_ext.distributed.algorithms.is_on_gloo", return_value=False) if other else nullcontext(),
        mock.patch("cuda_ext.distributed.process_groups.is_on_gloo", return_value=False) if other else nullcontext(),
    ):
        return BucketedDataParallel(module, process_group=nodes, bucket_cap_mb=SMALL, **WAYS[way])


class MeanGradient(torch.autograd.Function):
    """Identity with the mean over the ranks in backward: by a collective, or over ``ranks`` in one process."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.ranks:
            return grad.view(ctx.ranks, -1, 9).mean(0, keepdim=True).expand(ctx.ranks, -1, 9).reshape(grad.shape), None
        grad = grad / dist.get_world_size()
        dist.all_reduce(grad)
        return grad, None


class Tower(nn.Module):
    """Layers with a bucket each; before each of them, backward computes the mean over the ranks."""

    def __init__(self, collective: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(9, 9, dtype=torch.float64) for _ in range(6))
        self.collective = collective

    def forward(self, x: Tensor, ranks: int) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
            if self.collective:
                x = MeanGradient.apply(x, ranks)
        return x


def product(x: Tensor, y: Tensor, ranks: int) -> Tensor:
    return (x * y).square().sum() / (ranks or 1)


def contrast(x: Tensor, y: Tensor, ranks: int) -> Tensor:
    """A loss that matches each x with its y, among those of all ranks."""
    own = torch.arange(len(x)) if ranks else torch.arange(len(x)) + dist.get_rank() * len(x)
    everyone = (x, y) if ranks else (torch.cat(torch.distributed.nn.all_gather(z, dist.group.WORLD)) for z in (x, y))
    all_x, all_y = everyone
    return nn.functional.cross_entropy(x @ all_y.t(), own) + nn.functional.cross_entropy(y @ all_x.t(), own)


def train(way: str, collective: bool, loss_of: Callable[[Tensor, Tensor, int], Tensor]) -> None:
    """Two wrapped towers train in one backward pass as in one process with the whole batch."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    towers = [Tower(collective) for _ in range(2)]
    plain = [Tower(collective) for _ in range(2)]
    for copied, tower in zip(plain, towers):
        copied.load_state_dict(tower.state_dict())
    models = [wrap(tower, way) for tower in towers]
    sgd = torch.optim.SGD
    optimizers = [sgd(tower.parameters(), lr=0.1) for tower in plain]
    for model in models:
        sharded = WAYS[way].get("shard_optimizer", False)
        optimizers.append(model.sharded_optimizer(sgd, lr=0.1) if sharded else sgd(model.parameters(), lr=0.1))
    for _ in range(2):
        batch = torch.randn(2, ranks, 5, 9, dtype=torch.float64)
        loss_of(models[0](batch[0, rank], 0), models[1](batch[1, rank], 0), 0).backward()
        loss_of(plain[0](batch[0].flatten(0, 1), ranks), plain[1](batch[1].flatten(0, 1), ranks), ranks).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for tower, copied in zip(towers, plain):
            for actual, expected in zip(tower.parameters(), copied.parameters(), strict=True):
                torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def train_all(way: str) -> None:
    train(way, False, product)
    train(way, True, product)
    train(way, False, contrast)


@on_ranks(2)
@pytest.mark.parametrize("way", [way for way in WAYS if way != "nodes"])
def test_together_with_other_collectives_on_two_ranks(way: str) -> None:
    train_all(way)


@on_ranks(4)
@pytest.mark.parametrize("way", WAYS)
def test_together_with_other_collectives(way: str) -> None:
    train_all(way)


@on_ranks(2)
def test_a_rank_without_a_gradient_sends_its_bucket_later() -> None:
    """Together with a collective of a layer: on one rank before it, on the other after it."""
    tower = Tower(True)
    tower.head = nn.Linear(9, 9, dtype=torch.float64)
    model = BucketedDataParallel(tower, bucket_cap_mb=SMALL, algorithm="all_reduce")
    x = torch.randn(5, 9, dtype=torch.float64)
    output = model(x, 0)
    (model.module.head(output) if dist.get_rank() == 0 else output).sum().backward()
    expected = output.sum(0) / 2
    torch.testing.assert_close(tower.head.weight.grad, expected.expand(9, 9), rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_it_is_freed_with_the_wrapper() -> None:
    def held() -> set[str]:
        """Sockets and files, by their own names: numbers are used again, and others' may close at any time."""
        gc.collect()
        names = set()
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # that of the listing itself
                names.add(os.readlink(f"/proc/self/fd/{number}"))
        return names

    for algorithm in ("all_reduce", "float32"):
        before = held()
        model = BucketedDataParallel(nn.Linear(3, 2), algorithm=algorithm)
        model(torch.randn(4, 3)).sum().backward()
        opened = held() - before
        assert opened
        dist.barrier()  # when one rank frees its group, gloo closes the sockets of the others
        del model
        assert not opened & held()


@on_ranks(4)
def test_wrappers_of_some_ranks_alone_do_not_confuse_the_others() -> None:
    """All ranks find what the others write to the store."""
    some = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        BucketedDataParallel(nn.Linear(3, 2), process_group=some)
    model = BucketedDataParallel(nn.Linear(3, 2))
    assert_same_on_all_ranks([torch.tensor(list(model._reducer.watch._prefix.encode()))])
