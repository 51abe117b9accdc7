"""BucketedDataParallel on a CUDA GPU: alone over NCCL, also captured into a graph; two processes that share the GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor, nn

import cuda_ext.nn
from cuda_ext.distributed import (
    BucketedDataParallel,
    all_gather_linear,
    all_reduce_coalesced,
    linear_reduce_scatter,
)
from cuda_ext.distributed.algorithms import by_all_reduce
from cuda_ext.distributed.memory import RegisteredMemory
from cuda_ext.distributed.symmetric import SymmetricArena, probe_shared_memory

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

STEPS, ROWS, WIDTH = 5, 64, 256


def make_model() -> nn.Module:
    torch.manual_seed(0)
    ours = cuda_ext.nn.Linear(WIDTH, WIDTH, activation="gelu")
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), ours, nn.LayerNorm(WIDTH), cuda_ext.nn.Linear(WIDTH, WIDTH)).cuda()


class WithUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = make_model(), nn.Linear(8, 8).cuda()

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


def trained(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for batch in batches:
        step(model, optimizer, batch)
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.fixture
def nccl(request: pytest.FixtureRequest) -> Iterator[None]:
    """A group of one rank; param: whether its communicator exists before the first collective."""
    device = torch.device("cuda", 0) if getattr(request, "param", True) else None
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16])
def test_alone_over_nccl(nccl: None, wire_dtype: torch.dtype | None) -> None:
    batches = [torch.randn(ROWS, WIDTH, device="cuda") for _ in range(STEPS)]
    expected = trained(make_model(), batches)
    got = trained(BucketedDataParallel(make_model(), bucket_cap_mb=0.3, wire_dtype=wire_dtype), batches)
    tolerance = {} if wire_dtype is None else {"rtol": 2e-2, "atol": 2e-3}
    torch.testing.assert_close(got, expected, **tolerance)


@pytest.mark.parametrize("warm_up", ["side", "default"])  # the stream of the steps before
@pytest.mark.parametrize("bucket_cap_mb", [0.3, "auto"])  # auto: one bucket, whose nodes are not made again by `learn`
def test_a_whole_step_is_captured(nccl: None, bucket_cap_mb: float | str, warm_up: str) -> None:
    batches = [torch.randn(ROWS, WIDTH, device="cuda") for _ in range(3 * STEPS)]
    expected = trained(WithUnused(), batches)
    given = torch.empty(ROWS, WIDTH, device="cuda")
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream() if warm_up == "side" else torch.cuda.default_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # the first steps determine the buckets
        model = BucketedDataParallel(WithUnused(), bucket_cap_mb=bucket_cap_mb)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        for batch in batches[:STEPS]:
            step(model, optimizer, given.copy_(batch))
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        step(model, optimizer, given)
    for batch in batches[STEPS:]:
        given.copy_(batch)
        graph.replay()
    torch.testing.assert_close([parameter.detach() for parameter in model.parameters()], expected)
    assert model.unused.weight.grad is None


def test_a_capture_refuses_an_earlier_graph(nccl: None) -> None:
    model, batch = BucketedDataParallel(make_model()), torch.randn(ROWS, WIDTH, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        step(model, optimizer, batch)
    loss = model(batch).square().mean()
    loss.backward()
    with pytest.raises(RuntimeError, match="delete the loss"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        step(model, optimizer, batch)
    step(model, optimizer, batch)
    del loss
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        step(model, optimizer, batch)


def test_the_host_waits_for_nothing_in_backward(nccl: None) -> None:
    model, batch = BucketedDataParallel(WithUnused(), bucket_cap_mb=0.3), torch.randn(ROWS, WIDTH, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01)
    unused = model.unused.weight.detach().clone()
    for n in range(4):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        torch.cuda.set_sync_debug_mode("error" if n > 1 else "default")  # the first ones determine the buckets
        try:
            loss.backward()
            model.clip_grad_norm_(1.0)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not model.unused.weight.grad.any()
        optimizer.step()
        assert model.unused.weight.grad is None
    assert torch.equal(model.unused.weight, unused)


def test_a_pass_is_busy_until_the_gpu_has_completed_it(nccl: None) -> None:
    model, batch = BucketedDataParallel(make_model()), torch.randn(ROWS, WIDTH, device="cuda")
    for _ in range(2):
        model(batch).square().mean().backward()
    reducer = model._reducer
    torch.cuda.synchronize()
    assert reducer._status() == "is not in a backward pass; it has completed 2"
    loss = model(batch).square().mean()
    torch.cuda._sleep(1 << 31)  # a second
    loss.backward()
    assert "has queued the sum of bucket 0, " in reducer._status()
    assert reducer.watch._lags()
    torch.cuda.synchronize()
    assert reducer._status() == "is not in a backward pass; it has completed 3"
    assert not reducer.watch._lags()


def test_the_watch_asks_while_a_stream_is_captured(nccl: None) -> None:
    model, batch = BucketedDataParallel(make_model()), torch.randn(ROWS, WIDTH, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        step(model, optimizer, batch)
    event = torch.cuda.Event()
    event.record()
    torch.cuda.synchronize()
    answers: list[bool] = []
    captured = threading.Event()

    def ask() -> None:
        while not captured.is_set():
            answers.append(model._reducer._queued._is_complete(event))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            before = len(answers)
            step(model, optimizer, batch)
            asked = len(answers) - before
    finally:
        captured.set()
        thread.join(10)
    graph.replay()
    assert asked > 0
    assert all(answers)


@pytest.mark.parametrize("nccl", [True, False], ids=["eager", "lazy"], indirect=True)
def test_memory_is_registered(nccl: None) -> None:
    memory = RegisteredMemory([(1 << 20, torch.float32)], dist.group.WORLD, torch.device("cuda", 0))
    assert memory.reason is None
    algorithm = by_all_reduce(dist.group.WORLD, torch.device("cuda", 0))
    algorithm.start(memory.buffers[0].fill_(3.0), memory.buffers[0][:0]).wait()
    assert (memory.buffers[0] == 3.0).all()
    memory.close(algorithm.stream)


PROGRAM = """
import sys
import torch
import torch.distributed as dist
from cuda_ext.distributed import BucketedDataParallel

dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
model = BucketedDataParallel(torch.nn.Linear(64, 64).cuda())
model(torch.randn(8, 64, device="cuda")).sum().backward()
if "close" in sys.argv:
    model.close()
if "destroy" in sys.argv:
    dist.destroy_process_group()
print("the end")
"""


@pytest.mark.parametrize("steps", [["close", "destroy"], ["destroy"], ["close"], []], ids="-".join)
def test_a_program_ends(steps: list[str], tmp_path: Path) -> None:
    """Whatever order destructors run in."""
    program = [sys.executable, "-c", PROGRAM, *steps]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    ended = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert "the end" in ended.stdout
    assert ended.returncode == 0, ended.stderr


def test_buckets_of_two_dtypes_in_one_launch(nccl: None) -> None:
    device = torch.device("cuda", 0)
    algorithm = by_all_reduce(dist.group.WORLD, device)
    assert algorithm.groups
    wires = [torch.empty(100_003, device=device), torch.empty(513, dtype=torch.bfloat16, device=device)]

    def sums(values: list[Tensor]) -> None:
        """The mean over one rank is unchanged; the test checks its order with earlier writes and later reads."""
        torch._foreach_copy_(wires, values)
        algorithm.start_together(wires).wait()
        torch._foreach_mul_(wires, 2.0)

    for _ in range(20):
        values = [torch.randn_like(wire) for wire in wires]
        sums(values)
        assert all(torch.equal(wire, 2 * value) for wire, value in zip(wires, values, strict=True))
    given, graph = [torch.empty_like(wire) for wire in wires], torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sums(given)
    for _ in range(20):
        values = [torch.randn_like(wire) for wire in wires]
        torch._foreach_copy_(given, values)
        graph.replay()
        assert all(torch.equal(wire, 2 * value) for wire, value in zip(wires, values, strict=True))


def test_a_sharded_optimizer_gathers_in_one_launch(nccl: None) -> None:
    batches = [torch.randn(ROWS, WIDTH, device="cuda") for _ in range(STEPS)]
    model = BucketedDataParallel(make_model(), bucket_cap_mb=0.3, shard_optimizer=True)
    assert len(model._reducer.buckets) > 1
    optimizer = model.sharded_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
    for batch in batches:
        step(model, optimizer, batch)
    torch.testing.assert_close([p.detach() for p in model.parameters()], trained(make_model(), batches))


def test_tensors_of_two_dtypes_in_one_launch(nccl: None) -> None:
    tensors = [torch.randn(1000, device="cuda"), torch.randn(77, dtype=torch.bfloat16, device="cuda")]
    expected = [tensor.clone() for tensor in tensors]
    all_reduce_coalesced(tensors)
    assert all(torch.equal(tensor, other) for tensor, other in zip(tensors, expected, strict=True))


@on_ranks(2)
@pytest.mark.parametrize("one_shot_bytes", [0, 1 << 20], ids=["two-shot", "one-shot"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_processes_sum_in_symmetric_memory(dtype: torch.dtype, one_shot_bytes: int) -> None:
    device = share_the_gpu()
    assert probe_shared_memory(dist.group.WORLD, device) is None
    count = 100_003
    arena = SymmetricArena(count * dtype.itemsize, dist.group.WORLD, device, one_shot_bytes=one_shot_bytes)
    bucket = arena.bytes.view(dtype)
    values = [torch.randn(count).to(dtype) for _ in range(2)]  # the same on both ranks
    expected = (values[0].float() + values[1].float()).to(dtype)
    for _ in range(20):
        bucket.copy_(values[dist.get_rank()])
        stats = arena.all_reduce(bucket)
        assert torch.equal(bucket.cpu(), expected)
        torch.testing.assert_close(stats[0].cpu(), expected.float().square().sum(), rtol=1e-5, atol=0.0)


@on_ranks(2)
@pytest.mark.parametrize("algorithm", ["symmetric", "all_reduce", "float32"])
def test_two_processes_train_as_one(algorithm: str) -> None:
    device = share_the_gpu()
    batches = [torch.randn(ROWS, WIDTH, device=device) for _ in range(STEPS)]
    rank = dist.get_rank()
    model = BucketedDataParallel(WithUnused(), bucket_cap_mb=0.3, algorithm=algorithm)
    got = trained(model, [batch.chunk(2)[rank] for batch in batches])
    torch.testing.assert_close(got, trained(WithUnused(), batches), rtol=1e-4, atol=1e-5)
    assert model.unused.weight.grad is None
    model.close()


@on_ranks(2)
@pytest.mark.parametrize("algorithm", ["all_reduce", "float32"])
def test_two_processes_with_parts_of_the_optimizer(algorithm: str) -> None:
    device = share_the_gpu()
    batches = [torch.randn(ROWS, WIDTH, device=device) for _ in range(STEPS)]
    model = BucketedDataParallel(WithUnused(), bucket_cap_mb=0.3, algorithm=algorithm, shard_optimizer=True)
    optimizer = model.sharded_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
    for batch in batches:
        step(model, optimizer, batch.chunk(2)[dist.get_rank()])
    got = [parameter.detach() for parameter in model.parameters()]
    torch.testing.assert_close(got, trained(WithUnused(), batches), rtol=1e-4, atol=1e-5)
    model.close()


@on_ranks(2)
def test_two_processes_use_different_parameters() -> None:
    """Over gloo, whose sums of the memory of a GPU are complete in the order of a stream, too."""
    share_the_gpu()
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)).cuda()

    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[dist.get_rank()](x)

    model, x = (
        BucketedDataParallel(Chosen(), bucket_cap_mb=0.3, algorithm="all_reduce"),
        torch.ones(1, WIDTH, device="cuda"),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).sum().backward()
        assert all((layer.bias.grad == 0.5).all() for layer in layers[:2])
        assert not layers[2].bias.grad.any()
        optimizer.step()
        assert layers[2].weight.grad is None
        assert all((layer.bias.grad == 0.5).all() for layer in layers[:2])
    model.close()


def share_the_gpu() -> torch.device:
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    torch.cuda.set_device(0)
    torch.cuda.manual_seed(0)
    return torch.device("cuda", 0)


def check_rows(group: dist.ProcessGroup, device: torch.device, chunks: int | None) -> None:
    """Two layers of which each rank has a part, beside the same layers on one."""
    rank, ranks, sizes = group.rank(), group.size(), [48 + 16 * n for n in range(group.size())]
    whole = [torch.randn(sum(sizes), 2, WIDTH, device=device)]
    whole += [torch.randn(WIDTH, WIDTH, device=device) / WIDTH**0.5 for _ in range(2)]
    own = [whole[0].split(sizes)[rank], whole[1].chunk(ranks)[rank], whole[2].chunk(ranks, dim=1)[rank]]
    whole, own = ([t.detach().clone().requires_grad_() for t in tensors] for tensors in (whole, own))
    options: dict[str, Any] = {"sizes": sizes, "chunks": chunks, "group": group}
    hidden = all_gather_linear(own[0], own[1], activation="gelu", **options)
    out = linear_reduce_scatter(hidden, own[2], **options)
    expected = cuda_ext.linear(cuda_ext.linear(whole[0], whole[1], activation="gelu"), whole[2])
    torch.testing.assert_close(out, expected.split(sizes)[rank], rtol=1e-4, atol=1e-4)
    grad = torch.randn_like(expected)
    found = torch.autograd.grad(out, own, grad.split(sizes)[rank])
    alone = torch.autograd.grad(expected, whole, grad)
    parts = alone[0].split(sizes)[rank], alone[1].chunk(ranks)[rank], alone[2].chunk(ranks, dim=1)[rank]
    for a, b in zip(found, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))


def test_rows_alone_over_nccl(nccl: None) -> None:
    for chunks in (None, 1, 3):
        check_rows(dist.group.WORLD, torch.device("cuda"), chunks)


@on_ranks(2)
def test_rows_of_two_processes() -> None:
    """gloo sends messages of a CPU's memory only."""
    check_rows(dist.group.WORLD, torch.device("cuda"), None)
    with pytest.raises(RuntimeError, match="expected chunks None or 1 on cuda:0 over gloo"):
        check_rows(dist.group.WORLD, torch.device("cuda", 0), 2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU, on which NCCL has one rank")
@on_ranks(2)
def test_rows_of_two_gpus() -> None:
    torch.cuda.set_device(dist.get_rank())
    group = dist.new_group(backend="nccl")
    for chunks in (None, 1, 2, 6):
        check_rows(group, torch.device("cuda", dist.get_rank()), chunks)
