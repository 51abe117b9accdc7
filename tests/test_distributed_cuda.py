"""BucketedDataParallel on a CUDA GPU: alone over NCCL, also captured into a graph; two processes that share the GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor, nn

import cuda_ext.nn
from cuda_ext.distributed import BucketedDataParallel, all_reduce_coalesced
from cuda_ext.distributed.exchange import over_nccl
from cuda_ext.distributed.symmetric import SymmetricArena, probe_shared_memory

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

STEPS, ROWS, WIDTH = 5, 64, 256


def make_model() -> nn.Module:
    torch.manual_seed(0)
    ours = cuda_ext.nn.Linear(WIDTH, WIDTH, activation="gelu")
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), ours, nn.LayerNorm(WIDTH), cuda_ext.nn.Linear(WIDTH, WIDTH)).cuda()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


def trained(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in batches:
        step(model, optimizer, batch)
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.fixture
def nccl() -> Iterator[None]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16])
def test_alone_over_nccl(nccl: None, wire_dtype: torch.dtype | None) -> None:
    batches = [torch.randn(ROWS, WIDTH, device="cuda") for _ in range(STEPS)]
    expected = trained(make_model(), batches)
    got = trained(BucketedDataParallel(make_model(), bucket_mb=0.3, wire_dtype=wire_dtype), batches)
    tolerance = {} if wire_dtype is None else {"rtol": 2e-2, "atol": 2e-3}
    torch.testing.assert_close(got, expected, **tolerance)


@pytest.mark.parametrize("bucket_mb", [0.3, "auto"])  # auto: a single bucket, whose nodes are never made again
def test_a_whole_step_is_captured(nccl: None, bucket_mb: float | str) -> None:
    batches = [torch.randn(ROWS, WIDTH, device="cuda") for _ in range(3 * STEPS)]
    expected = trained(make_model(), batches)
    given = torch.empty(ROWS, WIDTH, device="cuda")
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # nodes belong to the stream they are made in; the first steps determine buckets
        model = BucketedDataParallel(make_model(), bucket_mb=bucket_mb)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for batch in batches[:STEPS]:
            step(model, optimizer, given.copy_(batch))
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        step(model, optimizer, given)
    for batch in batches[STEPS:]:
        given.copy_(batch)
        graph.replay()
    torch.testing.assert_close([parameter.detach() for parameter in model.parameters()], expected)


def test_buckets_of_two_dtypes_in_one_launch(nccl: None) -> None:
    device = torch.device("cuda", 0)
    exchange = over_nccl(dist.group.WORLD, device)
    assert exchange.groups
    wires = [torch.empty(100_003, device=device), torch.empty(513, dtype=torch.bfloat16, device=device)]

    def sums(values: list[Tensor]) -> None:
        """The mean over one rank is unchanged; the test checks its order with earlier writes and later reads."""
        torch._foreach_copy_(wires, values)
        exchange.start_together(wires).wait()
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
    model = BucketedDataParallel(make_model(), bucket_mb=0.3, shard_optimizer=True)
    assert len(model._reducer.buckets) > 1
    optimizer = model.sharded_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
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
@pytest.mark.parametrize("algorithm", ["symmetric", "all_reduce"])
def test_two_processes_train_as_one(algorithm: str) -> None:
    device = share_the_gpu()
    batches = [torch.randn(ROWS, WIDTH, device=device) for _ in range(STEPS)]
    rank = dist.get_rank()
    model = BucketedDataParallel(make_model(), bucket_mb=0.3, algorithm=algorithm)
    got = trained(model, [batch.chunk(2)[rank] for batch in batches])
    torch.testing.assert_close(got, trained(make_model(), batches), rtol=1e-4, atol=1e-5)


def share_the_gpu() -> torch.device:
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    torch.cuda.set_device(0)
    torch.cuda.manual_seed(0)
    return torch.device("cuda", 0)
