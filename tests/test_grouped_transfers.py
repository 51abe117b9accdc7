"""Buckets of several dtypes whose sums share a transfer, over a backend that can; here one that pretends to."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed_common import assert_same_on_all_ranks, mean_over_ranks
from ranks import on_ranks
from torch import Tensor, nn

import cuda_ext.nn
from cuda_ext.distributed import BucketedDataParallel, algorithms, bucket_set
from cuda_ext.distributed.algorithms import AllReduce, Pending
from cuda_ext.distributed.bucketing.links import Link
from cuda_ext.distributed.bucketing.measuring import Measurement
from cuda_ext.distributed.collectives import coalesces, start_together
from cuda_ext.distributed.reducer import Arrivals

WIDTH = 300  # 90,000 weights a layer: too many for a single bucket


class Grouping(AllReduce):
    """All-reduces of gloo, which knows no groups: started one by one, and waited for together."""

    groups = True
    transfers: ClassVar[list[int]] = []  # buckets of each

    def start(self, wire: Tensor, flags: Tensor) -> Pending:
        self.transfers.append(1)
        return super().start(wire, flags)

    def start_together(self, wires: Sequence[Tensor]) -> Pending:
        self.transfers.append(len(wires))
        starts = [AllReduce.start(self, wire, wire) for wire in wires]

        class Together(Pending):
            def wait(self) -> None:
                for pending in starts:
                    pending.wait()

            def when_done(self, callback: Any) -> None:
                starts[-1].when_done(callback)

        return Together()


class Mixed(nn.Module):
    """float64 layers, each with a norm in float32 whose gradients come with theirs."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(cuda_ext.nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(layers))
        self.branch = nn.Linear(WIDTH, 1)
        self.fails = False

    def forward(self, x: Tensor, branch: bool = False, backwards: bool = False) -> Tensor:
        pairs = list(zip(self.layers, self.norms, strict=True))
        for layer, norm in reversed(pairs) if backwards else pairs:
            x = layer(norm(x).double()).float()
            if self.fails and layer is self.layers[1]:
                x.register_hook(fail)
        return self.branch(x).sum() if branch else x.square().mean()


def fail(_: Tensor) -> Tensor:
    raise ValueError("a batch that cannot be")


@contextlib.contextmanager
def groups_that_win(grouped: float | None = 0.0) -> Iterator[list[int]]:
    """Wrappers inside find a network where all hides but the last transfer, and a latency is what matters; and
    gradients that arrive one after the other, however busy the machine."""
    link = Link(latency=1e-3, bandwidth=1e11, hides=1.0, grouped=grouped)
    asked = []

    def measure_link(*arguments: Any) -> Measurement:
        asked.append(arguments[-1])
        return Measurement((), (), link, 0.0)

    def seconds(arrivals: Arrivals) -> list[float]:
        return [1e-4 * place for place in range(len(arrivals.places))]

    Grouping.transfers.clear()
    with (
        mock.patch.object(bucket_set, "measure_link", measure_link),
        mock.patch.object(Arrivals, "seconds", seconds),
        mock.patch.object(algorithms, "AllReduce", Grouping),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        yield Grouping.transfers
    assert all(together.__name__ == "run_together" for together in asked)


def wrap(module: nn.Module) -> BucketedDataParallel:
    return BucketedDataParallel(module, algorithm="all_reduce")


def backward(model: nn.Module, **options: Any) -> None:
    model(torch.randn(8, WIDTH), **options).backward()


def settle(model: BucketedDataParallel) -> None:
    """Passes until the buckets are what they will be."""
    for _ in range(4):
        model.zero_grad()
        backward(model)


def assert_means(model: BucketedDataParallel, local: nn.Module) -> None:
    """Gradients are the means of those that ``local`` has on each rank."""
    for (name, parameter), own in zip(model.named_parameters(), local.parameters(), strict=True):
        everyone: list[bool] = [False] * dist.get_world_size()
        dist.all_gather_object(everyone, own.grad is not None)
        if not any(everyone):
            assert parameter.grad is None, name
            continue
        expected = mean_over_ranks(torch.zeros_like(own) if own.grad is None else own.grad)
        tolerance = 1e-12 if own.dtype == torch.float64 else 1e-5
        torch.testing.assert_close(parameter.grad, expected, rtol=tolerance, atol=tolerance)


@on_ranks(2)
def test_dtypes_that_end_together_share_a_transfer() -> None:
    torch.manual_seed(dist.get_rank())
    with groups_that_win() as transfers:
        model = wrap(Mixed())
        settle(model)
        assert [len(transfer) for transfer in model._reducer.transfers][-1] == 2
        assert "sent with bucket" in model.describe()
        local = copy.deepcopy(model.module)
        for step in range(6):
            transfers.clear()
            options = {"branch": step % 3 == dist.get_rank(), "backwards": step % 2 == 1}
            batch = torch.randn(8, WIDTH)
            for each in (model, local):
                each.zero_grad(set_to_none=step % 2 == 0)
            with model.trace() as trace:
                model(batch, **options).backward()
            local(batch, **options).backward()
            assert transfers == [len(transfer) for transfer in model._reducer.transfers]
            assert_means(model, local)
            assert_same_on_all_ranks([p.grad for p in model.parameters() if p.grad is not None])
            sent = {span.bucket for span in trace.spans if span.kind == "all-reduce"}
            assert sent == set(range(len(model._reducer.buckets)))


@on_ranks(2)
def test_gradients_that_accumulate() -> None:
    with groups_that_win():
        model = wrap(Mixed())
        settle(model)
        local = copy.deepcopy(model.module)
        for each in (model, local):
            each.zero_grad()
        batches = torch.randn(2, 8, WIDTH) * (1 + dist.get_rank())
        with model.no_sync():
            model(batches[0]).backward()
        model(batches[1]).backward()
        for batch in batches:
            local(batch).backward()
        assert_means(model, local)


@on_ranks(2)
def test_a_rank_that_gives_up() -> None:
    """Its transfers are completed as the others start them, and the next pass is as any."""
    with groups_that_win() as transfers:
        model = wrap(Mixed())
        settle(model)
        model.module.fails = dist.get_rank() == 1
        transfers.clear()
        what = "cannot be" if dist.get_rank() == 1 else "expected every rank to complete the backward pass"
        with pytest.raises((ValueError, RuntimeError), match=what):
            backward(model)
        model.module.fails = False
        model.zero_grad()
        backward(model)
        assert transfers == 2 * [len(transfer) for transfer in model._reducer.transfers]
        assert_same_on_all_ranks([p.grad for p in model.parameters() if p.grad is not None])


@on_ranks(2)
def test_groups_that_cost_more_are_not_made() -> None:
    with groups_that_win(grouped=2e-3):
        model = wrap(Mixed())
        settle(model)
        assert all(len(transfer) == 1 for transfer in model._reducer.transfers)
        assert "in one transfers" not in model.describe()


# the calls


class Recorded:
    """A process group of which it is recorded what is called."""

    def __init__(self, group: dist.ProcessGroup, can: bool) -> None:
        self.calls: list[str] = []
        self._group, self._can = group, can

    def _get_backend(self, device: torch.device) -> Any:
        return mock.Mock(supports_coalescing=self._can)

    def _start_coalescing(self, device: torch.device) -> None:
        self.calls.append("start")

    def _end_coalescing(self, device: torch.device) -> str:
        self.calls.append("end")
        return "all"

    def starts(self, name: str) -> Any:
        def start() -> str:
            self.calls.append(name)
            if name == "bad":
                raise RuntimeError("bad")
            return name

        return start


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("can", "names", "calls", "works"),
    [
        (True, "ab", ["start", "a", "b", "end"], ["all"]),
        (True, "a", ["a"], ["a"]),
        (True, "", [], []),
        (False, "ab", ["a", "b"], ["a", "b"]),
    ],
)
def test_start_together(group: None, can: bool, names: str, calls: list[str], works: list[str]) -> None:
    recorded: Any = Recorded(dist.group.WORLD, can)
    assert start_together(recorded, CPU, [recorded.starts(name) for name in names]) == works
    assert recorded.calls == calls


def test_a_group_ends_where_one_of_it_fails(group: None) -> None:
    recorded: Any = Recorded(dist.group.WORLD, True)
    with pytest.raises(RuntimeError, match="bad"):
        start_together(recorded, CPU, [recorded.starts("a"), recorded.starts("bad"), recorded.starts("b")])
    assert recorded.calls == ["start", "a", "bad", "end"]


def test_gloo_has_no_groups(group: None) -> None:
    assert not coalesces(dist.group.WORLD, CPU)
    with pytest.raises(NotImplementedError, match="AllReduce starts one bucket at a time"):
        AllReduce(dist.group.WORLD).start_together([torch.zeros(1)])
