"""What data parallel training does differently on a GPU, where the host runs ahead: with stand-ins for its streams."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed_common import SMALL, Branches, assert_gradients, gradients, make_model, mean_over_ranks, shard
from ranks import on_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from cuda_ext import _timing as timing
from cuda_ext import _watch as watch
from cuda_ext._load import ops
from cuda_ext._watch import MOST_QUEUED, Queued, Watch
from cuda_ext.distributed import BucketedDataParallel, bucket_set, float32_all_reduce, float32_sums


@contextlib.contextmanager
def no_reads() -> Iterator[None]:
    """Refuses what makes the host wait for a GPU: reading values, and writing at indices that the host has."""

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert func._opname not in ("_local_scalar_dense", "index", "index_put_", "nonzero"), func
            return func(*args, **(kwargs or {}))

    with mock.patch.object(torch.Tensor, "tolist", side_effect=AssertionError("the host read values")), Mode():
        yield


X = torch.linspace(-1, 1, 21, dtype=torch.float64).view(3, 7)
OF_NO_RANK = ["branches.3.weight", "branches.3.bias", "branches.4.weight", "branches.4.bias"]


def branches() -> Branches:
    torch.manual_seed(3)
    return Branches()


def backward(model: nn.Module) -> None:
    model(X, [0, 1 + dist.get_rank()]).backward()


def reading_late(**options: Any) -> BucketedDataParallel:
    """A wrapper that reads no flags in backward, as on a GPU; after two passes, so that its buckets stay."""
    model = BucketedDataParallel(branches(), bucket_cap_mb=options.pop("bucket_cap_mb", SMALL), **options)
    for _ in range(2):
        backward(model)
    model.zero_grad()
    for bucket in model._reducer.buckets:
        bucket._is_read_at_once = False
        for piece in getattr(bucket, "shards", {}).values():
            piece.grad = None
    return model


def averages() -> dict[str, Tensor | None]:
    alone = branches()
    for rank in range(2):
        (alone(X, [0, 1 + rank]) / 2).backward()
    return gradients(alone)


@on_ranks(2)
@pytest.mark.parametrize("bucket_cap_mb", [SMALL, 25.0])
def test_unused_parameters_are_settled_by_the_optimizer(bucket_cap_mb: float) -> None:
    model = reading_late(bucket_cap_mb=bucket_cap_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for _ in range(3):
        with no_reads():
            backward(model)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert (parameter.grad == 0.0).all() == (name in OF_NO_RANK)
        optimizer.step()
        assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == OF_NO_RANK
        changed = [name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])]
        assert changed == [name for name in before if name not in OF_NO_RANK]
        optimizer.zero_grad()


@on_ranks(2)
def test_unused_parameters_without_an_optimizer() -> None:
    """The next pass counts a parameter as unused, unless it has got a gradient meanwhile."""
    model, expected = reading_late(), averages()
    for _ in range(2):
        backward(model)
        assert_gradients(model, {name: torch.zeros_like(p) if expected[name] is None else expected[name]
                                 for name, p in model.named_parameters()})  # fmt: skip
        for parameter in model.parameters():
            if parameter.grad is not None and parameter.grad.any():
                parameter.grad = None
    with model.no_sync():
        model(X, [3]).backward()
    own = model.branches[3].weight.grad.clone()
    assert own.any()
    backward(model)
    torch.testing.assert_close(model.branches[3].weight.grad, mean_over_ranks(own))
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    assert model.branches[3].weight.grad is not None
    assert model.branches[4].weight.grad is None


@on_ranks(2)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_unused_shards_are_settled(set_to_none: bool) -> None:
    model = reading_late(shard_optimizer=True)
    optimizer = model.sharded_optimizer(torch.optim.SGD, lr=0.1, weight_decay=0.5)
    for _ in range(2):
        with no_reads():
            backward(model)
        optimizer.step()
        for name, piece in model.named_shards():
            assert (piece.grad is None) == (name in OF_NO_RANK)
        optimizer.zero_grad(set_to_none)


@on_ranks(2)
def test_a_capture_takes_the_flags_of_the_pass_before() -> None:
    model = reading_late()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    with mock.patch("cuda_ext.distributed.gradient_bucket.is_captured", lambda device: True), no_reads():
        backward(model)
        optimizer.step()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == OF_NO_RANK


@on_ranks(2)
def test_norms_are_computed_without_indices_of_the_host() -> None:
    model = BucketedDataParallel(make_model(), bucket_cap_mb=SMALL)
    x = torch.randn(8, 7, dtype=torch.float64)
    model(shard(x)).square().mean().backward()
    with no_reads():
        norm = model._reducer.stats(whole=False)[0].sqrt()
    expected = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(norm, expected)


@contextlib.contextmanager
def capturing(found: list[int]) -> Iterator[mock.Mock]:
    """Pretends that the current stream is captured, and gives answers to which parameter has a node elsewhere."""
    ops = mock.Mock()
    ops._accumulated_in_default_stream.side_effect = found
    with (
        mock.patch.object(bucket_set, "ops", ops),
        mock.patch.object(bucket_set, "is_captured", lambda device: True),
    ):
        yield ops


def test_nodes_are_made_again_for_a_capture(group: None) -> None:
    torch.manual_seed(0)
    plain, x = make_model(), torch.randn(8, 7, dtype=torch.float64)
    plain(x).square().mean().backward()
    torch.manual_seed(0)
    model = BucketedDataParallel(make_model())
    attachment = model._bucket_set._attachment
    for node in attachment._nodes:
        node.metadata["made"] = "before"  # type: ignore[index]
    del node
    with capturing([0, -1]):
        loss = model(x).square().mean()
    assert not any(node.metadata for node in attachment._nodes)
    loss.backward()
    assert_gradients(model, plain)
    assert model._reducer.passes == 1
    with capturing([-1]) as ops:
        model(x)
    assert ops._accumulated_in_default_stream.call_count == 1


def test_a_capture_with_an_earlier_graph_is_refused(group: None) -> None:
    model = BucketedDataParallel(make_model())
    with capturing([2, 2]), pytest.raises(RuntimeError, match=r"default stream.*parameter 4\.bias; delete the loss"):
        model(torch.randn(8, 7, dtype=torch.float64))
    model(torch.randn(8, 7, dtype=torch.float64)).sum().backward()
    assert model._reducer.passes == 1


def test_there_are_no_streams_on_a_cpu() -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    graph = parameters[0].sum()
    assert ops._accumulated_in_default_stream([*parameters, torch.ones(1)]) == -1
    del graph
    with pytest.raises(RuntimeError, match="_is_reached: expected a CUDA device, got cpu"):
        ops._is_reached(1, torch.device("cpu"))


@contextlib.contextmanager
def pretended_events() -> Iterator[set[int]]:
    """Events of a pretended GPU; yields the handles of those that it has reached."""
    reached: set[int] = set()
    handles = iter(range(1, 1000))
    event = lambda: SimpleNamespace(record=lambda stream: None, cuda_event=next(handles))  # noqa: E731
    with (
        mock.patch("torch.cuda.Event", event),
        mock.patch("torch.cuda.current_stream", lambda device: None),
        mock.patch.object(watch, "is_captured", lambda device: False),
        mock.patch.object(watch, "is_reached", lambda event, device: event.cuda_event in reached),
    ):
        yield reached


def test_the_oldest_queued_collective() -> None:
    on_gpu = Queued(torch.device("cuda", 0))
    with pretended_events() as reached:
        assert on_gpu.oldest() == ""
        for name in ("first", "second", "third"):
            on_gpu.add(name)
        assert on_gpu.oldest() == "first"
        reached |= {1, 2}
        assert on_gpu.oldest() == "third"
        reached.add(3)
        assert on_gpu.oldest() == ""
        for n in range(4 * MOST_QUEUED):  # what is complete is not remembered for ever
            on_gpu.add(str(n))
            reached.add(4 + n)
            assert len(on_gpu._entries) <= MOST_QUEUED
    on_cpu = Queued(torch.device("cpu"))
    on_cpu.add("a sum")
    assert on_cpu.oldest() == ""


@pytest.mark.parametrize("waits", [0, 1, 5])
def test_a_gpu_is_waited_for_only_so_long(waits: int) -> None:
    stream: Any = SimpleNamespace(record_event=lambda: None, device=torch.device("cuda", 0))
    answers = iter([False] * waits + [True] * 2)
    with (
        mock.patch("torch.cuda.current_stream", lambda device: stream),
        mock.patch.object(timing, "is_reached", lambda event, device: next(answers)),
    ):
        assert timing.ends_within(10.0, stream)
    with (
        mock.patch("torch.cuda.current_stream", lambda device: stream),
        mock.patch.object(timing, "is_reached", lambda event, device: False),
    ):
        assert not timing.ends_within(0.01, stream)


def test_a_failed_gpu_completes_nothing() -> None:
    on_gpu = Queued(torch.device("cuda", 0))
    with pretended_events():
        on_gpu.add("a sum")
        with mock.patch.object(watch, "is_reached", side_effect=RuntimeError("an illegal address")):
            assert on_gpu.oldest() == "a sum"


def test_a_pass_is_busy_until_its_gpu_has_completed_it(group: None) -> None:
    model = BucketedDataParallel(make_model())
    reducer = model._reducer
    reducer._collectives.queued._device = torch.device("cuda", 0)
    with pretended_events() as reached:
        model(torch.randn(8, 7, dtype=torch.float64)).sum().backward()
        what = "the sum of bucket 0, 6.bias to 0.weight, of backward pass 1"
        assert reducer._collectives.status() == f"has queued {what}, which its GPU has not completed"
        assert reducer.watch._lags()
        reached |= set(range(1, 100))
        assert reducer._collectives.status() == "is not in a backward pass; it has completed 1"
        assert not reducer.watch._lags()


@on_ranks(2)
def test_who_is_missing_is_logged_while_a_gpu_waits() -> None:
    """Rank 0 has queued a sum and is in no pass; rank 1 is elsewhere."""
    lags = dist.get_rank() == 0
    status = "has queued the sum of bucket 0" if lags else "is at lunch"
    watch = Watch(
        dist.group.WORLD, torch.device("cpu"), lambda: status, lags=lambda: lags, interval=0.05, warn_after=0.3
    )
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("cuda_ext.distributed").addHandler(handler)
    watch.busy(True)
    watch.busy(False)
    deadline = time.monotonic() + 20
    while lags and not lines and time.monotonic() < deadline:
        time.sleep(0.05)
    dist.barrier()
    watch.stop()
    logging.getLogger("cuda_ext.distributed").removeHandler(handler)
    assert len(lines) == lags
    assert not lags or lines[0].endswith("has queued the sum of bucket 0; rank 1 is at lunch")


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gloo_sends_memory_of_gpus_by_collectives(dtype: torch.dtype) -> None:
    values = [torch.randn(64).to(dtype) for _ in range(2)]
    own = values[dist.get_rank()].clone()
    with (
        mock.patch.object(float32_sums, "_sends_in_place", lambda group, wire: False),
        mock.patch.object(float32_sums, "_Messages", side_effect=AssertionError("gloo read a GPU's memory")),
    ):
        for work in float32_all_reduce(own, dist.group.WORLD):
            work.wait()
    assert torch.equal(own, (values[0].float() + values[1].float()).to(dtype))
    with mock.patch.object(float32_sums, "_sends_in_place", lambda group, wire: False):
        model, alone = BucketedDataParallel(make_model(), bucket_cap_mb=SMALL, algorithm="float32"), make_model()
        alone.load_state_dict(model.state_dict())
        x = torch.randn(8, 7, dtype=torch.float64)
        model(shard(x)).square().mean().backward()
    alone(x).square().mean().backward()
    assert_gradients(model, alone)
    assert not float32_sums._sends_in_place(dist.group.WORLD, torch.empty(1, device="meta"))


def test_close(group: None) -> None:
    module = make_model()
    model = BucketedDataParallel(module)
    x = torch.randn(8, 7, dtype=torch.float64)
    model(x).sum().backward()
    before = gradients(module)
    model.close()
    model.close()
    assert_gradients(module, before)
    with pytest.raises(
        RuntimeError, match=r"expected a wrapper in use, got one after close\(\); wrap the module again"
    ):
        model(x)
    module.zero_grad()
    again = BucketedDataParallel(module)
    again(x).sum().backward()
    assert_gradients(module, before)
