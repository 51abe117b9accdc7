"""What the wrapper adapts to (the order of gradients, freezing, uneven inputs), and what it records."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import queue
import re
import tempfile
import time
from datetime import timedelta
from logging.handlers import QueueHandler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_common import NAME, SMALL, assert_gradients, assert_same_on_all_ranks, count_ops, make_model
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import cuda_ext.nn
from cuda_ext.distributed import BucketedDataParallel


class Backwards(nn.Module):
    """Uses its layers in reverse order of registration, so that gradients arrive in order of registration."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(9, 9, dtype=torch.float64) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = layer(x).tanh()
        return x


def compare_steps(model: BucketedDataParallel, plain: nn.Module, steps: int, set_to_none: bool = True) -> None:
    """Both train on the same batches, ``model`` on this rank's part; gradients must stay equal."""
    rank, ranks = model.process_group.rank(), model.process_group.size()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (plain, model)]
    for _ in range(steps):
        batch = torch.randn(ranks, 4, 9, dtype=torch.float64)
        for m in (plain, model):
            m.zero_grad(set_to_none=set_to_none)
        plain(batch).square().mean().backward()
        model(batch[rank]).square().mean().backward()
        assert_gradients(model.module, plain)
        for optimizer in optimizers:
            optimizer.step()
        assert_same_on_all_ranks(list(model.parameters()))


@on_ranks(2)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_buckets_follow_the_order_of_arrival(set_to_none: bool) -> None:
    model = BucketedDataParallel(Backwards(), bucket_cap_mb=1.5e-3)  # two layers each
    plain = copy.deepcopy(model.module)
    before = [bucket.names for bucket in model._reducer.buckets]
    assert before[0][0].startswith("layers.5")
    memory = {bucket.wire.untyped_storage().data_ptr() for bucket in model._reducer.buckets}
    compare_steps(model, plain, 3, set_to_none)
    after = [bucket.names for bucket in model._reducer.buckets]
    assert after[0][0].startswith("layers.0")
    assert [name for names in after for name in names] == [
        f"layers.{n}.{kind}" for n in range(6) for kind in ("bias", "weight")
    ]
    assert {bucket.wire.untyped_storage().data_ptr() for bucket in model._reducer.buckets} == memory


@on_ranks(2)
def test_all_ranks_take_the_order_of_the_first() -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(9, 9, dtype=torch.float64) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            order = self.layers if dist.get_rank() == 0 else reversed(self.layers)
            for layer in order:
                x = layer(x).tanh()
            return x

    model = BucketedDataParallel(Either(), bucket_cap_mb=1e-3)
    for _ in range(3):
        model.zero_grad()
        model(torch.randn(2, 9, dtype=torch.float64)).sum().backward()
        assert_same_on_all_ranks([parameter.grad for parameter in model.parameters()])


@on_ranks(2)
def test_the_first_step_overlaps() -> None:
    model = BucketedDataParallel(make_model(), bucket_cap_mb=SMALL)
    with model.trace() as trace:
        model(torch.randn(64, 7, dtype=torch.float64)).square().mean().backward()
    sent = {span.bucket: span.begin for span in trace.spans if span.kind == "all-reduce"}
    (backward,) = (span for span in trace.spans if span.kind == "backward")
    assert sorted(sent) == list(range(6))
    assert all(sent[n] < backward.end for n in range(5)), "all but the last bucket leave while gradients are made"


@on_ranks(4)
@pytest.mark.parametrize("algorithm", ["auto", "all_reduce"])
def test_sizes_by_measurement(algorithm: str) -> None:
    layers = [
        cuda_ext.nn.Linear(9, 333),
        nn.Tanh(),
        cuda_ext.nn.Linear(333, 666),
        nn.Linear(666, 333),
        nn.Linear(333, 9),
    ]
    model = BucketedDataParallel(nn.Sequential(*layers).double(), algorithm=algorithm)
    plain = copy.deepcopy(model.module)
    assert "until the network is measured, before pass 4" in model.describe()
    logger, said = logging.getLogger("cuda_ext.distributed"), queue.SimpleQueue[logging.LogRecord]()
    logger.addHandler(QueueHandler(said))
    logger.setLevel(logging.INFO)
    silence = io.StringIO()
    with contextlib.redirect_stderr(silence), contextlib.redirect_stdout(silence):
        compare_steps(model, plain, 6)
    assert said.qsize() == (dist.get_rank() == 0) and not silence.getvalue()
    if dist.get_rank() == 0:
        record = said.get()
        assert record.levelno == logging.INFO
        assert re.match(r".*bucket.*; an all-reduce takes .*; backward takes ", record.getMessage())
    divisions = [None] * 4
    dist.all_gather_object(divisions, [bucket.names for bucket in model._reducer.buckets])
    assert divisions[1:] == divisions[:-1]
    assert "an all-reduce takes" in model.describe()


@on_ranks(2)
@pytest.mark.parametrize("algorithm", ["auto", "float32"])
def test_measuring_keeps_gradients(algorithm: str) -> None:
    """It sums in the memory of buckets, before the fourth pass; gradients that were not zeroed are in that memory."""
    model = BucketedDataParallel(nn.Linear(9, 20000, dtype=torch.float64), algorithm=algorithm)
    plain = copy.deepcopy(model.module)
    for step in range(5):
        batch = torch.randn(2, 3, 9, dtype=torch.float64)
        plain(batch).square().mean().backward()
        model(batch[dist.get_rank()]).square().mean().backward()
        assert_gradients(model.module, plain)
        assert ("an all-reduce takes" in model.describe()) == (step >= 3)


def proportional_set_size() -> int:
    (line,) = (text for text in Path("/proc/self/smaps_rollup").read_text().splitlines() if text.startswith("Pss:"))
    return int(line.split()[1]) << 10


@on_ranks(2)
@pytest.mark.parametrize("algorithm", ["auto", "float32", "all_reduce"])
def test_wrapping_takes_no_pages(algorithm: str) -> None:
    """The memory of buckets is only allocated when gradients arrive."""
    module = nn.Linear(4096, 4096)
    BucketedDataParallel(nn.Linear(9, 9), algorithm=algorithm)
    dist.barrier()
    before = proportional_set_size()
    model = BucketedDataParallel(module, algorithm=algorithm)
    dist.barrier()
    assert proportional_set_size() - before < 16 << 20
    assert sum(bucket.wire.nbytes for bucket in model._reducer.buckets) > 64 << 20
    dist.barrier()


@on_ranks(2)
@pytest.mark.parametrize("algorithm", ["auto", "float32", "all_reduce"])
def test_wrapping_calls_few_ops_for_each_parameter(algorithm: str) -> None:
    """They take most of the time: 3 on the rank that sends its parameters, 8 on those that receive them."""

    def ops(parameters: int) -> int:
        module = nn.ParameterList(nn.Parameter(torch.randn(16, 16)) for _ in range(parameters))
        with torch.autograd.profiler.profile() as profile:
            BucketedDataParallel(module, algorithm=algorithm)
        return sum(event.name.startswith("aten::") for event in profile.function_events)

    ops(1)
    assert ops(200) - ops(100) <= (3 if dist.get_rank() == 0 else 8) * 100


# frozen and freed


@on_ranks(2)
def test_freezing_and_unfreezing() -> None:
    module = Backwards()
    module.layers[2].requires_grad_(False)
    model = BucketedDataParallel(module, bucket_cap_mb=1e-3)
    plain = copy.deepcopy(module)

    def change(layer: int, trained: bool) -> None:
        for m in (model.module, plain):
            m.layers[layer].requires_grad_(trained)
            m.zero_grad()

    compare_steps(model, plain, 2)
    size = sum(bucket.wire.numel() for bucket in model._reducer.buckets)
    change(4, False)
    compare_steps(model, plain, 2)
    assert sum(bucket.wire.numel() for bucket in model._reducer.buckets) < size
    change(2, True)
    change(4, True)
    compare_steps(model, plain, 2)
    assert sum(bucket.wire.numel() for bucket in model._reducer.buckets) > size
    # Frozen between forward and backward, or where nothing is averaged: no gradient is expected.
    output = model(torch.randn(3, 9, dtype=torch.float64))
    model.module.layers[1].requires_grad_(False)
    output.sum().backward()


@on_ranks(2)
def test_unfrozen_while_gradients_accumulate() -> None:
    module = Backwards()
    module.layers[3].requires_grad_(False)
    model = BucketedDataParallel(module, bucket_cap_mb=1e-3)
    plain = copy.deepcopy(module)
    batch = torch.randn(2, 2, 4, 9, dtype=torch.float64)
    for m in (model.module, plain):
        m.layers[3].requires_grad_(True)
    with model.no_sync():
        model(batch[0, dist.get_rank()]).square().mean().backward()
    model(batch[1, dist.get_rank()]).square().mean().backward()
    for part in batch:
        plain(part).square().mean().backward()
    assert_gradients(model.module, plain)


@on_ranks(2)
def test_ranks_that_freeze_different_parameters_say_so() -> None:
    model = BucketedDataParallel(Backwards())
    model.module.layers[dist.get_rank()].requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"parameter layers\.0\.weight .* frozen; on rank 1: .* trained"):
        model(torch.randn(2, 9, dtype=torch.float64))


# uneven inputs


@on_ranks(4)
@pytest.mark.parametrize("broadcast_buffers", [True, False])
def test_uneven_inputs(broadcast_buffers: bool) -> None:
    rank = dist.get_rank()
    module = nn.Sequential(nn.Linear(9, 9), nn.BatchNorm1d(9, track_running_stats=True), nn.Linear(9, 2)).double()
    module[1].eval()  # normalises by its buffers, so that the batch of another rank does not matter
    model = BucketedDataParallel(module, bucket_cap_mb=SMALL, broadcast_buffers=broadcast_buffers)
    model.train()
    module[1].eval()
    plain = copy.deepcopy(module)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (plain, model)]
    counts = [5, 2, 6, 3]
    batches = torch.randn(6, 4, 3, 9, dtype=torch.float64)
    with Join([model]):
        for step in range(counts[rank]):
            model.zero_grad()
            model(batches[step, rank]).square().mean().backward()
            optimizers[1].step()
    for step in range(max(counts)):
        plain.zero_grad()
        losses = [plain(batches[step, r]).square().mean() for r in range(4) if step < counts[r]]
        (torch.stack(losses).sum() / 4).backward()
        optimizers[0].step()
    for actual, expected in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    assert_same_on_all_ranks(list(model.state_dict().values()))


@on_ranks(2)
@pytest.mark.parametrize("size", [9, 600])  # the larger one is measured before it is divided
def test_uneven_inputs_of_a_first_rank_without_any(size: int) -> None:
    """Buckets follow the order of arrival on a rank that has gradients."""
    module = nn.Sequential(nn.Linear(size, size), nn.Linear(size, size, bias=False)).double()
    model = BucketedDataParallel(module, bucket_cap_mb=SMALL if size == 9 else "auto")
    plain = copy.deepcopy(module)
    batches = torch.randn(5, 3, size, dtype=torch.float64)
    with Join([model]):
        for batch in batches[: 5 * dist.get_rank()]:
            model.zero_grad()
            plain.zero_grad()
            model(batch).square().mean().backward()
            (plain(batch).square().mean() / 2).backward()
            assert_gradients(module, plain)


@on_ranks(4)
@pytest.mark.parametrize("algorithm", ["auto", "all_reduce", "float32", "sharded"])
@pytest.mark.parametrize("trained", [True, False])
def test_frozen_or_unfrozen_on_some_ranks_only(algorithm: str, trained: bool) -> None:
    """All ranks raise at once, and training can continue when the ranks agree again."""
    module = nn.Sequential(make_model(), nn.BatchNorm1d(3, dtype=torch.float64))
    module[0][2].weight.requires_grad_(not trained)
    sharded = algorithm == "sharded"
    model = BucketedDataParallel(
        module, bucket_cap_mb=SMALL, algorithm="auto" if sharded else algorithm, shard_optimizer=sharded
    )
    batch = torch.randn(4, 7, dtype=torch.float64)
    model(batch).square().mean().backward()
    if odd := dist.get_rank() in (1, 2):
        module[0][2].weight.requires_grad_(trained)
    where = rf"got 0\.2\.weight on rank {dist.get_rank()} and not on all others$" if odd else "got a change on another"
    message = rf"^{re.escape(NAME)}: expected the same parameters to be frozen or unfrozen on all ranks, {where}"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            model(batch).square().mean().backward()
        assert all(parameter.grad is None for parameter in module.parameters()) or odd
    module[0][2].weight.requires_grad_(not trained)
    model.zero_grad()
    plain = copy.deepcopy(module)
    for m in (model, plain):
        m(batch).square().mean().backward()
    if not sharded:
        assert_gradients(module, plain)


@on_ranks(2)
def test_uneven_inputs_can_end_all() -> None:
    model = BucketedDataParallel(make_model())
    with pytest.raises(RuntimeError, match="exhausted"), Join([model], throw_on_early_termination=True):
        for _ in range(2 + dist.get_rank()):
            model(torch.randn(2, 7, dtype=torch.float64)).sum().backward()


@on_ranks(2)
def test_a_sharded_optimizer_needs_all_ranks() -> None:
    """A rank without inputs would not update its part."""
    model = BucketedDataParallel(make_model(), shard_optimizer=True)
    batch = torch.randn(2, 7, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="expected shard_optimizer=False inside Join, got True"), Join([model]):
        model(batch)
    with Join([model], enable=False):
        model(batch).sum().backward()


@on_ranks(2)
def test_a_norm_without_the_rank_that_has_run_out() -> None:
    """Over sockets the norm is a sum over the ranks, but not if a rank may no longer take part."""
    model = BucketedDataParallel(make_model(), algorithm="all_reduce")
    norms = []
    with Join([model]):
        for _ in range(3 + 2 * dist.get_rank()):
            model.zero_grad()
            model(torch.randn(2, 7, dtype=torch.float64)).sum().backward()
            norms.append(model.clip_grad_norm_(1e9))
            own = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
            torch.testing.assert_close(norms[-1], own.norm())
            assert not model.found_nonfinite()
    with count_ops() as count:  # without Join each rank reads its part again
        model(torch.randn(2, 7, dtype=torch.float64)).sum().backward()
        model.clip_grad_norm_(1e9)
    assert count["elements"] < 0.6 * own.numel()


def test_join_divides_by_all_ranks(group: None) -> None:
    model = BucketedDataParallel(make_model())
    with pytest.raises(ValueError, match=f"^{re.escape(NAME)}.join_hook: expected divide_by_initial_world_size=True"):
        Join([model], divide_by_initial_world_size=False)


# what cannot be done


def test_parameters_on_two_devices_are_refused(group: None) -> None:
    class Elsewhere(nn.Parameter):
        device = torch.device("cuda", 1)

    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = Elsewhere(torch.zeros(2, 2))
    message = f"{NAME}: expected parameters on one device, got 0.weight on cpu and 1.weight on cuda:1; wrap the part"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        BucketedDataParallel(module)


# the timeline


@pytest.mark.sampled
@on_ranks(2)
def test_trace() -> None:
    model = BucketedDataParallel(make_model(), bucket_cap_mb=SMALL)

    def step() -> None:
        model.zero_grad()
        model(torch.randn(4, 7, dtype=torch.float64)).sum().backward()

    step()
    with model.trace() as trace:
        step()
        step()
    step()
    kinds = {kind: [span for span in trace.spans if span.kind == kind] for kind in ("backward", "pack", "all-reduce")}
    assert [span.step for span in kinds["backward"]] == [0, 1]
    for kind in ("pack", "all-reduce"):
        assert [(span.step, span.bucket) for span in kinds[kind]] == [(step, n) for step in range(2) for n in range(6)]
    for packed, sent in zip(kinds["pack"], kinds["all-reduce"], strict=True):
        assert 0 <= packed.begin <= packed.end <= sent.begin <= sent.end
    assert len(trace.exposed()) == 2
    assert all(0 <= seconds < 60 for seconds in trace.exposed())
    with tempfile.TemporaryDirectory() as folder:
        trace.save(Path(folder) / "trace.json")
        events = json.loads((Path(folder) / "trace.json").read_text())["traceEvents"]
        assert sum(event["ph"] == "X" for event in events) == len(trace.spans)
        assert {event["pid"] for event in events} == {dist.get_rank()}
        trace.plot(Path(folder) / "trace.png")
        assert (Path(folder) / "trace.png").read_bytes().startswith(b"\x89PNG")


@on_ranks(2)
def test_profiler_ranges() -> None:
    ranges = ("pack_bucket", "sum_bucket", "wait_for_bucket", "unpack_bucket")
    batch = torch.randn(4, 9, dtype=torch.float64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        pass  # the first one takes seconds to load, on one rank longer than on the other
    dist.barrier()
    options: dict[str, Any]
    for options in ({"algorithm": "float32"}, {"algorithm": "all_reduce"}, {"shard_optimizer": True}):
        model = BucketedDataParallel(Backwards(), bucket_cap_mb=SMALL, wire_dtype=torch.float32, **options)
        output = model(batch).sum()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            output.backward()
        buckets = len(model._reducer.buckets)
        assert buckets > 2
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(path))
            events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
        named = {name: [event for event in events if event["name"] == f"cuda_ext::{name}"] for name in ranges}
        assert [len(found) for found in named.values()] == [buckets] * 4, options
        # A sum lasts until another thread has it, so that the last one ends after all buckets are packed.
        end = {name: max(event["ts"] + event["dur"] for event in found) for name, found in named.items()}
        assert end["pack_bucket"] < end["sum_bucket"] < end["unpack_bucket"], options
        model(batch).sum().backward()  # without the profiler
        assert model._reducer.passes == 2


class Growing(nn.Module):
    """Has a buffer with a row for each row of its longest batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, batch: Tensor) -> Tensor:
        if len(batch) > len(self.table):
            self.table = torch.arange(float(len(batch)))
        return self.linear(batch) * self.table[: len(batch), None]


def grown(rows: int) -> BucketedDataParallel:
    """After a step in which all ranks have few rows, and an evaluation of this one with `rows` rows."""
    group = dist.new_group(timeout=timedelta(seconds=8))
    model = BucketedDataParallel(nn.Sequential(Growing()), process_group=group)
    model(torch.randn(2, 3)).sum().backward()
    model.eval()
    with torch.no_grad():
        model(torch.randn(rows, 3))
    return model.train()


@on_ranks(3)
def test_buffers_that_grow_alike_on_all_ranks() -> None:
    model = grown(9)
    for _ in range(2):
        model(torch.randn(9, 3)).sum().backward()
    assert model.module[0].table.shape == (9,)
    model.module[0].table[:] = float(dist.get_rank())
    model.module[0].table = model.module[0].table.double()
    model(torch.randn(9, 3)).sum().backward()
    assert (model.module[0].table == 0).all(), "the first rank's"


@on_ranks(3)
@pytest.mark.parametrize("odd", [0, 2])
def test_buffers_that_grow_on_one_rank(odd: int) -> None:
    """The rank says which, before anything is sent; a broadcast of different sizes would end processes."""
    rank = dist.get_rank()
    model = grown(9 if rank == odd else 3)
    match = r"buffer 0\.table of Growing is torch\.float32 \(9,\) here and torch\.float32 \(4,\) on rank \d; give it"
    began = time.monotonic()
    with pytest.raises(
        RuntimeError, match=match if rank == odd else f"rank {odd} failed in the comparison of the sizes"
    ):
        model(torch.randn(2, 3)).sum().backward()
    assert time.monotonic() - began < 6 or rank != odd


@on_ranks(2)
def test_buffers_that_grow_differently() -> None:
    rank = dist.get_rank()
    model = grown(9 + rank)
    sizes = [f"torch.float32 ({9 + n},)" for n in (rank, 1 - rank)]
    match = rf"buffer 0.table of Growing is {sizes[0]} here and {sizes[1]} on rank {1 - rank}; give it the same size"
    with pytest.raises(RuntimeError, match=re.escape(match)):
        model(torch.randn(2, 3))


@on_ranks(2)
def test_a_rank_that_generates_longer_texts_trains_on() -> None:
    """A rank alone has met longer sequences."""
    attention = cuda_ext.nn.SelfAttention(16, 2)
    model = BucketedDataParallel(attention)
    if dist.get_rank() == 0:
        with torch.inference_mode():
            attention(torch.randn(1, 2100, 16))
    for length in (5, 2100 + dist.get_rank()):
        model(torch.randn(1, length, 16)).sum().backward()
