"""A training run in which the last rank does something wrong: what test_distributed_faults.py starts.

    python faulty_training.py FOLDER RANKS FAULT

Each rank is a process that prints what it gets for it to FOLDER/RANK, as "ERROR SECONDS MESSAGE", seconds being those
since the fault, or "DONE". Ends with all ranks but the last.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from cuda_ext.distributed import BucketedDataParallel

TIMEOUT = 6.0
STEPS = 3  # before the fault


def main() -> None:
    folder, ranks, fault = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    processes = []
    for rank in range(ranks):
        process = os.fork()  # PyTorch is loaded once for all, which is most of the work
        if process == 0:
            file = os.open(folder / str(rank), os.O_WRONLY | os.O_CREAT)
            os.dup2(file, 1)
            os.dup2(file, 2)
            try:
                train(folder, rank, ranks, fault)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        processes.append(process)
    for process in processes[:-1]:
        os.waitpid(process, 0)
    os.kill(processes[-1], signal.SIGKILL)


def train(folder: Path, rank: int, ranks: int, fault: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
    )
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    dist.barrier()  # however long it took them to come here
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(5, 40), nn.Linear(40, 30), nn.Linear(30, 2))
    # In shared memory the norm comes with the sum.
    reduction = "all_reduce" if fault == "dies before the norm" else "auto"
    model = BucketedDataParallel(layers, process_group=group, bucket_mb=1e-3, reduction=reduction)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        with model.collective("the mean of the loss"):
            dist.all_reduce(loss.detach(), group=group)
        model.clip_grad_norm_(1.0)
        optimizer.step()

    for _ in range(STEPS):
        step(torch.randn(4, 5))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    dist.barrier()
    start = time.monotonic()
    faults: dict[str, Callable[[], object]] = {
        "dies": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "dies in backward": lambda: layers[1].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL)),
        "dies before the norm": lambda: setattr(
            model, "clip_grad_norm_", lambda _: os.kill(os.getpid(), signal.SIGKILL)
        ),
        "dies before the mean of the loss": lambda: setattr(
            model, "collective", lambda _: os.kill(os.getpid(), signal.SIGKILL)
        ),
        "hangs": lambda: time.sleep(3 * TIMEOUT),
        "hangs in backward": lambda: layers[1].weight.register_hook(lambda _: time.sleep(3 * TIMEOUT)),
        "stops": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    }
    if rank == ranks - 1:
        faults[fault]()
    try:
        for _ in range(3):
            step(torch.randn(4, 5))
    except RuntimeError as error:
        seconds = time.monotonic() - start
        assert all(parameter.grad is None for parameter in model.parameters())
        # A step that some rank was not part of is applied by none.
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before))
        try:
            step(torch.randn(4, 5))
        except RuntimeError as again:
            assert str(error) in str(again)
        print(f"ERROR {seconds:.1f} {error}", flush=True)
        # A real program ends here; the others are to find out by themselves.
        while not all("ERROR" in (folder / str(other)).read_text() for other in range(ranks - 1)):
            time.sleep(0.1)
    else:
        print("DONE", flush=True)
    os._exit(0)  # the group is broken, and its threads would wait


if __name__ == "__main__":
    main()
