"""Time and memory for wrapping a module: BucketedDataParallel and torch's DistributedDataParallel, on CPUs.

    python tools/wrapping.py [--ranks 2] [--repeats 7] [--what time memory]

Time: the ranks wrap new modules with each wrapper alternately, in the same processes. Shown is the median of all rounds
but the first, of wall time on the slowest rank and of CPU time on the rank with most. Memory: each wrapper wraps one
module in separate processes. Shown is the proportional set size, in which shared memory counts divided by the number of
processes, minus that before wrapping, on the rank with most: the peak while wrapping, the value afterwards, and after 4
steps (including the pages of gradients). The modules have parameters and hardly any arithmetic: 1000 small ones, and
those of ResNet-50.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from peak_memory import Peak, proportional_set_size
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.suites.bench_train import Parameters
from cuda_ext.distributed import BucketedDataParallel
from cuda_ext.distributed.prediction.presets import PRESETS

WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "auto": BucketedDataParallel,
    "float32": partial(BucketedDataParallel, algorithm="float32"),
    "all_reduce": partial(BucketedDataParallel, algorithm="all_reduce"),
    "DDP": DistributedDataParallel,
    "DDP, bucket views": partial(DistributedDataParallel, gradient_as_bucket_view=True),
}
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "1000 small": [(16, 16) if n % 2 else (16,) for n in range(1000)],
    "ResNet-50": [parameter.shape for parameter in PRESETS["resnet-50"].parameters()],
}


def join(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    dist.all_reduce(torch.zeros(1 << 20))  # creates connections and the backend's own memory


def leave() -> None:
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def time_wrappers(rank: int, options: argparse.Namespace, shapes: str, folder: str) -> None:
    join(rank, options.ranks, folder)
    turns: list[list[tuple[float, float]]] = []
    for _ in range(options.repeats + 1):
        turns.append([])
        for wrap in WRAPPERS.values():
            module = Parameters(SHAPES[shapes])
            dist.barrier()
            begin, begin_busy = time.perf_counter(), time.process_time()
            wrapped = wrap(module)
            turns[-1].append((time.perf_counter() - begin, time.process_time() - begin_busy))
            del wrapped, module
            gc.collect()
    seconds = torch.tensor(turns)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    if rank == 0:
        Path(folder, "result").write_text(json.dumps(seconds[1:].median(dim=0).values.tolist()))
    leave()


def weigh_wrapper(rank: int, options: argparse.Namespace, shapes: str, name: str, folder: str) -> None:
    join(rank, options.ranks, folder)
    small = WRAPPERS[name](Parameters(SHAPES["1000 small"][:10]))  # loads the code itself
    for _ in range(2):
        small().backward()
    module = Parameters(SHAPES[shapes])
    gc.collect()
    dist.barrier()
    before = proportional_set_size()
    with Peak() as peak:
        wrapped = WRAPPERS[name](module)
    gc.collect()
    dist.barrier()
    after = proportional_set_size()
    dist.barrier()
    for _ in range(4):
        wrapped.zero_grad()
        wrapped().backward()
    gc.collect()
    dist.barrier()
    more = torch.tensor([float(size - before) for size in (peak.bytes, after, proportional_set_size())])
    dist.all_reduce(more, dist.ReduceOp.MAX)
    if rank == 0:
        Path(folder, "result").write_text(json.dumps(more.tolist()))
    del small, wrapped
    leave()


def on_ranks(options: argparse.Namespace, function: Callable[..., None], *arguments: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(function, args=(options, *arguments, folder), nprocs=options.ranks)
        return json.loads(Path(folder, "result").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--what", nargs="+", choices=("time", "memory"), default=("time", "memory"))
    options = parser.parse_args()
    for shapes in SHAPES if "time" in options.what else ():
        print(f"{shapes:32} wall, CPU")
        for name, (wall, busy) in zip(WRAPPERS, on_ranks(options, time_wrappers, shapes), strict=True):
            print(f"    {name:20} {1e3 * wall:6.0f} ms {1e3 * busy:6.0f} ms", flush=True)
    if "memory" in options.what:
        print(f"{'ResNet-50':24} while wrapping, afterwards, after 4 steps")
        for name in WRAPPERS:
            sizes = on_ranks(options, weigh_wrapper, "ResNet-50", name)
            print(f"    {name:20}", *(f"{size / 2**20:6.0f} MiB" for size in sizes), flush=True)


if __name__ == "__main__":
    main()
