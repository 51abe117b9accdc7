"""Latency of sums in shared memory by size: one-shot, two-shot and gloo's all-reduce, on CPUs.

    python tools/shared_memory_latency.py [--ranks 2] [--repeats 9]

Every rank is a process with one thread. In each repetition all three, one after the other, sum the same number of bytes
many times; the table has the median over the repetitions, in microseconds per sum.
`cuda_ext.distributed.symmetric.default_one_shot_bytes` is chosen where one-shot becomes slower than two-shot.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from cuda_ext.distributed import SymmetricArena
from cuda_ext.distributed.symmetric import default_one_shot_bytes

SIZES = (256, 4 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 1 << 20)  # bytes
SECONDS = 0.02  # duration of consecutive sums, approximately


def measure(rank: int, ranks: int, store: str, repeats: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    group = dist.group.WORLD
    assert group is not None
    arenas = [SymmetricArena(SIZES[-1], group, torch.device("cpu"), one_shot_bytes=most) for most in (SIZES[-1], 0)]
    if rank == 0:
        print(f"{ranks} ranks; default of one_shot_bytes {default_one_shot_bytes(ranks, torch.device('cpu'))}")
        print("   bytes   one-shot, us   two-shot, us       gloo, us")
    for size in SIZES:
        sums: list[Callable[[], object]] = []
        for arena in arenas:
            bucket = arena.bytes[:size].view(torch.float32)
            bucket.zero_()
            sums.append(lambda arena=arena, bucket=bucket: arena.all_reduce(bucket))  # type: ignore[misc]
        zeros = torch.zeros(size // 4)
        sums.append(lambda zeros=zeros: dist.all_reduce(zeros))  # type: ignore[misc]
        times: list[list[float]] = [[] for _ in sums]
        for _ in range(repeats):
            for sum_up, into in zip(sums, times):
                into.append(seconds_of(sum_up))
        if rank == 0:
            print(f"{size:8}" + "".join(f"{1e6 * median(each):15.1f}" for each in times), flush=True)
    dist.destroy_process_group()


def seconds_of(sum_up: Callable[[], object]) -> float:
    """Seconds per sum; all ranks do the same number of sums."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(5):
        sum_up()
    trial = torch.tensor((time.perf_counter() - begin) / 5)
    dist.all_reduce(trial, dist.ReduceOp.MAX)
    count = min(max(int(SECONDS / float(trial)), 5), 500)
    begin = time.perf_counter()
    for _ in range(count):
        sum_up()
    return (time.perf_counter() - begin) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="processes (default: 2)")
    parser.add_argument("--repeats", type=int, default=9, metavar="N", help="repetitions (default: 9)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (options.ranks, os.path.join(folder, "store"), options.repeats), options.ranks)


if __name__ == "__main__":
    main()
