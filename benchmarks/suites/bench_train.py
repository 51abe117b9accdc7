"""Training: transformer blocks, and a data-parallel step against torch's DistributedDataParallel.

A data-parallel step is zero_grad, forward, backward with its all-reduce, and an SGD update; it takes as long as its
slowest rank. All wrappers run in the same processes and alternate. On a CPU, processes communicate over gloo; on GPUs,
one process per GPU over NCCL. A single GPU shows the overhead of a wrapper without communication.
"""

from __future__ import annotations

import functools
import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import cuda_ext.nn
from benchmarks.results import OURS
from benchmarks.suites.measure import Call, Case, relative_error
from cuda_ext.distributed import BucketedDataParallel
from cuda_ext.distributed.prediction.presets import PRESETS

# Widths of linear layers, which have from 2 thousand to 790 thousand weights.
WIDTHS = (64, 96, 1024, 33, 256, 512, 768, 128, 384, 640)
WARMUP = 5  # buckets are rebuilt after three steps


def cases(device: str) -> Iterator[Case]:
    on_cpu = device == "cpu"
    small = [WIDTHS[i % len(WIDTHS)] for i in range(31)]
    if not on_cpu:
        yield data_parallel(device, "60 small parameters", chain=small, batch=32)
    for ranks in (2, 4) if on_cpu else ():
        yield data_parallel(device, "60 small parameters", chain=small, batch=32, ranks=ranks)
        yield data_parallel(device, "our layers, 8 of 1024²", chain=[1024] * 9, batch=128, ranks=ranks, ours=True)
        yield data_parallel(device, "12 of 512 ↔ 2048", chain=[512, 2048] * 6 + [512], batch=128, ranks=ranks)
    if on_cpu:
        yield data_parallel(device, "ResNet-50's parameters", preset="resnet-50")
        yield transformer(device, "float32", Blocks(layers=2, features=512, heads=8, hidden=1408), batch=1, length=512)
        yield transformer(device, "bfloat16", Blocks(layers=2, features=512, heads=8, hidden=1408), batch=1, length=512)
        yield transformer(device, "float32", Blocks(layers=2, features=512, heads=0, hidden=1408), batch=1, length=512)
    else:
        for heads in (32, 0):
            blocks = Blocks(layers=2, features=4096, heads=heads, hidden=11008)
            yield transformer(device, "bfloat16", blocks, batch=4, length=4096)
        yield data_parallel(device, "16 layers of 4096²", chain=[4096] * 17, batch=4096, dtype="bfloat16")


@dataclass(frozen=True)
class Blocks:
    layers: int
    features: int
    heads: int  # 0: feed-forward layers only
    hidden: int


class PlainAttention(nn.Module):
    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(features, 3 * features, bias=False)
        self.out = nn.Linear(features, features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class PlainGatedMLP(nn.Module):
    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(features, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Transformer(nn.Module):
    """Pre-norm blocks of causal attention and SwiGLU, from our modules or from PyTorch's."""

    def __init__(self, shape: Blocks, ours: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList()
        for _ in range(shape.layers):
            if shape.heads:
                self.parts.append(
                    cuda_ext.nn.SelfAttention(shape.features, shape.heads, rotary_base=None)
                    if ours
                    else PlainAttention(shape.features, shape.heads)
                )
            self.parts.append(
                cuda_ext.nn.GatedMLP(shape.features, shape.hidden)
                if ours
                else PlainGatedMLP(shape.features, shape.hidden)
            )
        self.norms = nn.ModuleList(nn.RMSNorm(shape.features) for _ in self.parts)

    def forward(self, x: Tensor) -> Tensor:
        for part, norm in zip(self.parts, self.norms):
            x = x + part(norm(x))
        return x


def transformer(device: str, dtype: str, shape: Blocks, batch: int, length: int) -> Case:
    """Forward and backward, with gradients of the input and of all weights."""
    torch_dtype = getattr(torch, dtype)
    weights = shape.layers * shape.features * (3 * shape.hidden + (4 * shape.features if shape.heads else 0))
    tokens = batch * length
    attention = 4.0 * batch * length**2 / 2 * shape.features * shape.layers * 3.5 if shape.heads else 0.0

    @functools.cache
    def model(ours: bool) -> Transformer:
        made = Transformer(shape, ours)
        if ours:  # the same weights; both have their parameters in the same order
            with torch.no_grad():
                for mine, plain in zip(made.parameters(), model(False).parameters(), strict=True):
                    mine.copy_(plain)
        return made.to(device, torch_dtype)

    def inputs() -> tuple[Tensor, Tensor]:
        x = torch.randn(batch, length, shape.features, device=device).to(torch_dtype)
        return x.requires_grad_(), torch.randn_like(x, requires_grad=False)

    def step(net: nn.Module, given: tuple[Tensor, Tensor]) -> Call:
        """A call that returns the gradient of the input, which depends on all other gradients."""
        x, grad = given
        leaves = [x, *net.parameters()]
        return lambda: torch.autograd.grad(net(x), leaves, grad)[0]

    def check(given: tuple[Tensor, Tensor], gradient: Tensor) -> float:
        precise = torch.float64 if device == "cpu" else torch.float32
        exact = Transformer(shape, ours=False).to(device, precise)
        exact.load_state_dict(model(False).state_dict())
        x, grad = (t.detach().to(precise) for t in given)
        return relative_error(gradient, step(exact, (x.requires_grad_(), grad))())

    sides: dict[str, Any] = {
        OURS: lambda given: step(model(True), given),
        "PyTorch": lambda given: step(model(False), given),
    }
    if device == "cuda":

        def compiled() -> nn.Module:
            made: Any = torch.compile(model(False), fullgraph=True, dynamic=False)
            return made

        sides["torch.compile"] = lambda given: step(compiled(), given)
    heads = f"{shape.heads} heads" if shape.heads else "feed-forward only"
    return Case(
        op="transformer blocks" if shape.heads else "feed-forward blocks",
        phase="forward + backward",
        group="modules",
        name=f"{shape.layers} × {shape.features}/{shape.hidden}, {heads}, {tokens} tokens",
        dtype=dtype,
        sides=sides,
        inputs=inputs,
        check=check,
        size=float(tokens),
        size_name="tokens",
        flops=3 * 2.0 * tokens * weights + attention,
        bytes=float(torch_dtype.itemsize * (3 * weights + 4 * tokens * shape.features)),
    )


class Parameters(nn.Module):
    """Parameters of given shapes with hardly any arithmetic; the loss depends on all of them."""

    def __init__(self, shapes: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.full(tuple(shape), 0.5)) for shape in shapes)

    def forward(self, scale: Tensor | float = 1.0) -> Tensor:
        return scale * torch.stack([part.square().mean() for part in self.parts]).sum()


def data_parallel(
    device: str,
    name: str,
    chain: Sequence[int] = (),
    preset: str = "",
    batch: int = 1,
    dtype: str = "float32",
    ranks: int = 2,
    ours: bool = False,
) -> Case:
    """Linear layers of a chain of widths, with GELU (``ours``: of cuda_ext.nn, for all wrappers); or the parameters of
    a preset, alone."""
    ranks = torch.cuda.device_count() if device == "cuda" else ranks
    setup = Setup(device, ranks, tuple(chain), preset, batch, dtype, ours)
    with torch.device("meta"):
        weights = sum(parameter.numel() for parameter in setup.model("meta").parameters())
    return Case(
        op="data-parallel step",
        phase="step",
        group="data parallel",
        name=f"{name}, {ranks} {'rank' if ranks == 1 else 'ranks'}",
        dtype=dtype,
        sides={},
        samples=functools.partial(_run_ranks, setup),
        timer="clock",
        extra={"parameters": weights, "ranks": ranks, "rows of each": batch},
    )


@dataclass(frozen=True)
class Setup:
    device: str
    ranks: int
    chain: tuple[int, ...]
    preset: str
    batch: int
    dtype: str
    ours: bool

    def model(self, device: str = "") -> nn.Module:
        torch.manual_seed(0)
        if self.preset:
            made: nn.Module = Parameters([parameter.shape for parameter in PRESETS[self.preset].parameters()])
        else:
            layers: list[nn.Module] = []
            for k, n in zip(self.chain, self.chain[1:]):
                layers += [cuda_ext.nn.Linear(k, n, activation="gelu")] if self.ours else [nn.Linear(k, n), nn.GELU()]
            made = nn.Sequential(*layers)
        return made.to(device or self.device, getattr(torch, self.dtype))

    def inputs(self, seed: int) -> Tensor:
        shape = () if self.preset else (self.batch, self.chain[0])
        made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return made.to(self.device, getattr(torch, self.dtype))


def algorithms(device: str) -> dict[str, str]:
    """Side -> algorithm other than the default, which on a CPU is shared memory."""
    if device == "cuda":
        return {f"{OURS}, all_reduce": "all_reduce", f"{OURS}, float32 sums": "float32"}
    return {f"{OURS}, over sockets": "all_reduce", f"{OURS}, float32 over sockets": "float32"}


def _run_ranks(setup: Setup, seconds: float) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(setup, seconds, folder), nprocs=setup.ranks)
        times: dict[str, list[float]] = torch.load(Path(folder) / "times.pt")
    return times


def _rank(rank: int, setup: Setup, seconds: float, folder: str) -> None:
    on_gpu = setup.device == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // setup.ranks))
    store = f"file://{folder}/store"
    dist.init_process_group("nccl" if on_gpu else "gloo", init_method=store, rank=rank, world_size=setup.ranks)

    model = setup.model

    def with_bf16_hook() -> nn.Module:
        wrapped = DistributedDataParallel(model(), gradient_as_bucket_view=True)
        wrapped.register_comm_hook(None, bf16_compress_hook)
        return wrapped

    inputs = setup.inputs(seed=rank)
    steps = {
        OURS: _step(BucketedDataParallel(model()), inputs),
        "DDP": _step(DistributedDataParallel(model()), inputs),
        "DDP, bucket views": _step(DistributedDataParallel(model(), gradient_as_bucket_view=True), inputs),
        "DDP, bf16 hook": _step(with_bf16_hook(), inputs),
        f"{OURS}, bf16 wire": _step(BucketedDataParallel(model(), wire_dtype=torch.bfloat16), inputs),
        **{
            name: _step(BucketedDataParallel(model(), algorithm=algorithm), inputs)
            for name, algorithm in algorithms(setup.device).items()
        },
        "no communication": _step(model(), inputs),
    }
    rounds: list[list[float]] = []
    start = time.perf_counter()
    while True:
        turn = len(rounds) % len(steps)
        order = [*range(turn, len(steps)), *range(turn)]
        rounds.append([0.0] * len(steps))
        for side in order:
            rounds[-1][side] = _timed(list(steps.values())[side], on_gpu)
        # Rank 0 decides, because clocks differ.
        go_on = len(rounds) < WARMUP + 5 or (time.perf_counter() - start < seconds and len(rounds) < WARMUP + 100)
        decision = torch.tensor(float(go_on), device=device)
        dist.broadcast(decision, 0)
        if not decision.item():
            break
    slowest = torch.tensor(rounds[WARMUP:], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if rank == 0:
        columns = slowest.cpu().unbind(1)
        torch.save({name: column.tolist() for name, column in zip(steps, columns)}, Path(folder) / "times.pt")
    # Wrappers hold the group; they are freed first on all ranks, so that its threads end before the process does.
    steps.clear()
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def _step(model: nn.Module, inputs: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return step


def _timed(step: Callable[[], None], on_gpu: bool) -> float:
    dist.barrier()
    if on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - start
