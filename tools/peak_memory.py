"""Peak memory of data-parallel training: BucketedDataParallel and torch's DistributedDataParallel, on CPUs.

    python tools/peak_memory.py [--ranks 2] [--layers 24] [--width 1024] [--rows 64] [--steps 6]

Each wrapper trains the same layers in separate processes. A thread queries the proportional set size of its process
every few milliseconds, in which shared memory counts divided by the number of processes. The result is its maximum over
all steps, minus its value before the model was built, summed over the ranks, in units of the gradients' bytes. Each
process trains a small model first, so that the memory of the code itself is not counted. The C library is configured to
return freed memory at once; otherwise it keeps up to a third of the gradients with either wrapper.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cuda_ext.nn
from cuda_ext.distributed import BucketedDataParallel

WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "cuda_ext": BucketedDataParallel,
    "cuda_ext, over sockets": lambda module: BucketedDataParallel(module, algorithm="all_reduce"),
    "DDP": DistributedDataParallel,
    "DDP, bucket views": lambda module: DistributedDataParallel(module, gradient_as_bucket_view=True),
}


def make_model(kind: str, layers: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    made: list[nn.Module] = []
    for _ in range(layers):
        ours = kind == "cuda_ext.nn.Linear"
        made += [cuda_ext.nn.Linear(width, width, activation="gelu")] if ours else [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*made)


def proportional_set_size() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("expected Pss in /proc/self/smaps_rollup, got none; Linux 4.14 or later is needed")


class Peak:
    """A context manager that records the peak memory of this process."""

    def __enter__(self) -> Peak:
        self.bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.is_set():
            self.bytes = max(self.bytes, proportional_set_size())
            time.sleep(0.002)

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()


def run_steps(wrapper: str, kind: str, layers: int, width: int, rows: int, steps: int) -> None:
    model = WRAPPERS[wrapper](make_model(kind, layers, width))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(rows, width)
    for _ in range(steps):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def train(rank: int, options: argparse.Namespace, wrapper: str, kind: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=options.ranks)
    dist.all_reduce(torch.zeros(1 << 20))  # allocates the backend's own memory
    run_steps(wrapper, kind, layers=2, width=512, rows=options.rows, steps=options.steps)
    gc.collect()
    dist.barrier()
    before = proportional_set_size()
    with Peak() as peak:
        run_steps(wrapper, kind, options.layers, options.width, options.rows, options.steps)
    total = torch.tensor(float(peak.bytes - before))
    dist.all_reduce(total)
    if rank == 0:
        Path(folder, "peak").write_text(str(total.item()))
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=64, help="of each rank's batch")
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}  # glibc, in the ranks
    gradients = 4 * options.layers * options.width * (options.width + 1) * options.ranks
    print(
        f"{options.ranks} ranks, {gradients / options.ranks / 2**20:.0f} MiB of gradients each; peaks in units of that"
    )
    for kind in ("nn.Linear", "cuda_ext.nn.Linear"):
        for wrapper in WRAPPERS:
            with tempfile.TemporaryDirectory() as folder:
                mp.spawn(train, args=(options, wrapper, kind, folder), nprocs=options.ranks)
                peak = float(Path(folder, "peak").read_text())
            print(f"{kind:20} {wrapper:24} {peak / gradients:.2f}", flush=True)


if __name__ == "__main__":
    main()
