"""A training step with BucketedDataParallel against torch's DistributedDataParallel, on the CPU over gloo.

Both wrap the same model in the same processes and take turns, A B A B, so that what else the machine does hits both. A
step is zero_grad, forward, backward with its all-reduce, and an SGD update; it takes as long as its slowest rank.
Medians are compared. A step without communication is shown for scale.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cuda_ext.distributed import BucketedDataParallel

WIDTHS = (64, 96, 1024, 33, 256, 512, 768, 128, 384, 640)


def make_model(layers: int) -> nn.Module:
    """A chain of linear layers, weights of 2 thousand to 790 thousand elements and their biases."""
    torch.manual_seed(0)
    widths = [WIDTHS[i % len(WIDTHS)] for i in range(layers + 1)]
    return nn.Sequential(*(nn.Sequential(nn.Linear(k, n), nn.GELU()) for k, n in zip(widths, widths[1:])))


def make_step(model: nn.Module, inputs: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return step


def run(rank: int, args: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=args.ranks)
    bucketed_model = BucketedDataParallel(make_model(args.layers), bucket_mb=args.bucket_mb)
    inputs = torch.randn(args.batch, WIDTHS[0], generator=torch.Generator().manual_seed(rank))
    steps = {
        "DistributedDataParallel": make_step(DistributedDataParallel(make_model(args.layers)), inputs),
        "DistributedDataParallel, bucket views": make_step(
            DistributedDataParallel(make_model(args.layers), gradient_as_bucket_view=True), inputs
        ),
        "BucketedDataParallel": make_step(bucketed_model, inputs),
        "no communication": make_step(make_model(args.layers), inputs),
    }
    times = torch.zeros(len(steps), args.steps, dtype=torch.float64)
    for n in range(-args.warmup, args.steps):
        for row, step in enumerate(steps.values()):
            dist.barrier()
            start = time.perf_counter()
            step()
            if n >= 0:
                times[row, n] = time.perf_counter() - start
    dist.all_reduce(times, dist.ReduceOp.MAX)
    if rank == 0:
        print(
            f"{args.ranks} gloo processes of {args.threads} thread, {args.batch} rows each, {args.steps} steps a side"
        )
        print(bucketed_model.describe())
        medians = {name: statistics.median(row.tolist()) for name, row in zip(steps, times, strict=True)}
        ours = medians["BucketedDataParallel"]
        for name, median in medians.items():
            print(f"{name:<44} {median * 1e3:8.2f} ms   BucketedDataParallel is {ours / median:.3f} of it")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes")
    parser.add_argument("--threads", type=int, default=1, help="threads of each process")
    parser.add_argument("--layers", type=int, default=30, help="linear layers, of two parameters each")
    parser.add_argument("--batch", type=int, default=32, help="rows of input on each rank")
    parser.add_argument("--steps", type=int, default=40, help="timed steps of each side")
    parser.add_argument("--warmup", type=int, default=5, help="steps before the timed ones")
    parser.add_argument(
        "--bucket-mb",
        type=lambda text: text if text == "auto" else float(text),
        default="auto",
        help="capacity of a bucket in MiB",
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(args, str(Path(folder) / "store")), nprocs=args.ranks)


if __name__ == "__main__":
    main()
