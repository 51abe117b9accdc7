"""A training run with faulty ranks, started by test_distributed_faults.py.

    python faulty_training.py FOLDER RANKS FAULT REDUCTION FAULTY...

REDUCTION is that of `BucketedDataParallel`, or one of LAYERS, whose ranks exchange tensors. Each rank is a process that
writes "ERROR SECONDS MESSAGE", with the seconds since the fault, or "DONE" to FOLDER/RANK.
The program ends when all ranks except the FAULTY ones have ended. Rank 0 owns the store.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from processes import is_alive
from torch import nn

from cuda_ext import _group_calls
from cuda_ext import _status_board as status_board
from cuda_ext.distributed import BucketedDataParallel, all_gather_linear
from cuda_ext.distributed.context_parallel import ring_attention
from cuda_ext.nn import MixtureOfExperts

TIMEOUT = 6.0
STEPS = 3  # before the fault
FOR_GOOD = 3600.0


def main() -> None:
    folder, ranks, fault, algorithm = Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5]
    faulty = list(map(int, sys.argv[5:]))
    listener = socket.create_server(("localhost", 0))
    processes = []
    for rank in range(ranks):
        process = os.fork()  # forked, so that PyTorch is loaded only once
        if process == 0:
            file = os.open(folder / str(rank), os.O_WRONLY | os.O_CREAT)
            os.dup2(file, 1)
            os.dup2(file, 2)
            try:
                store = join_store(listener, rank, ranks)
                run = train_layer if algorithm in LAYERS else train
                run(folder, rank, ranks, store, fault, algorithm, faulty)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        processes.append(process)
    listener.close()
    for rank in set(range(ranks)).difference(faulty):
        os.waitpid(processes[rank], 0)
    for rank in faulty:
        os.kill(processes[rank], signal.SIGKILL)


def join_store(listener: socket.socket, rank: int, ranks: int) -> dist.TCPStore:
    """Connects to the store of rank 0, which inherits its parent's listening socket, so the port stays reserved."""
    port = listener.getsockname()[1]
    if rank == 0:
        return dist.TCPStore("localhost", port, ranks, True, master_listen_fd=listener.detach())
    listener.close()
    return dist.TCPStore("localhost", port, ranks, False)


class Clock:
    """Counts tenths of a second, except those in which this process could not run."""

    TICK = 0.1

    def __init__(self) -> None:
        self.seconds = 0.0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(self.TICK)
            self.seconds += self.TICK


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    time.sleep(FOR_GOOD)


def tell(folder: Path, ranks: int, faulty: list[int], seconds: float, error: RuntimeError) -> None:
    """Writes the error, and waits until the other survivors have, too: a real program would end here, and the other
    ranks must detect it."""
    print(f"ERROR {seconds:.1f} {error}", flush=True)
    while not all("ERROR" in (folder / str(other)).read_text() for other in set(range(ranks)).difference(faulty)):
        time.sleep(0.1)


def part_of_linear(chunks: int) -> Callable[[torch.Tensor], torch.Tensor]:
    weight = torch.randn(8, 16, requires_grad=True)
    return lambda x: all_gather_linear(x, weight, chunks=chunks)


def ring(rows: torch.Tensor) -> torch.Tensor:
    heads = rows.view(1, 6, 2, 8)
    return ring_attention(heads, heads, heads, method="p2p")


# Of (6, 16) on each rank.
LAYERS: dict[str, Callable[[int], Callable[[torch.Tensor], torch.Tensor]]] = {
    "experts": lambda ranks: MixtureOfExperts(16, 8, 2 * ranks, 2, group=dist.group.WORLD),
    "gathered rows": lambda ranks: part_of_linear(1),
    "rows in chunks": part_of_linear,
    "ring": lambda ranks: ring,
}
# Before which exchange a rank is "between two exchanges".
BETWEEN = {"experts": ["the rows for experts"], "ring": ["keys and values"] * 3}


def train_layer(
    folder: Path, rank: int, ranks: int, store: dist.TCPStore, fault: str, algorithm: str, faulty: list[int]
) -> None:
    torch.set_num_threads(1)
    if fault.startswith(("hangs", "is late")):  # as in `train`
        status_board.PATIENCE = FOR_GOOD
    timeout = TIMEOUT * (2 if fault == "is late" else 1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout))
    layer = LAYERS[algorithm](ranks)
    dist.barrier()
    for _ in range(0 if "first" in fault else STEPS):
        layer(torch.randn(6, 16, requires_grad=True)).square().sum().backward()
    dist.barrier()
    clock = Clock()
    is_faulty = rank in faulty
    act = die if fault.startswith("dies") else hang if fault.startswith("hangs") else lambda: time.sleep(TIMEOUT * 1.6)
    if is_faulty and "between" in fault:
        named, awaited = _group_calls.GroupCall.named, list(BETWEEN[algorithm])

        def act_between(self: _group_calls.GroupCall, what: str, **options: Any) -> Any:
            if what in awaited:
                awaited.remove(what)
                if not awaited:
                    act()
            return named(self, what, **options)

        _group_calls.GroupCall.named = act_between  # type: ignore[method-assign]
    elif is_faulty and "backward" not in fault:
        act()
    try:
        out = layer(torch.randn(6, 16, requires_grad=True))
        if is_faulty and "backward" in fault:
            out.register_hook(lambda _: act())
        out.square().sum().backward()
    except RuntimeError as error:
        seconds = clock.seconds
        try:
            layer(torch.randn(6, 16))
        except RuntimeError as again:
            assert str(error) in str(again)
        tell(folder, ranks, faulty, seconds, error)
    else:
        print("DONE", flush=True)
    os._exit(0)


def train(
    folder: Path, rank: int, ranks: int, store: dist.TCPStore, fault: str, algorithm: str, faulty: list[int]
) -> None:
    torch.set_num_threads(1)
    if fault.startswith("hangs"):  # no rank dies, and none should seem dead on a busy machine
        status_board.PATIENCE = FOR_GOOD
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    dist.barrier()  # start together
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(5, 40), nn.Linear(40, 30), nn.Linear(30, 2))
    model = BucketedDataParallel(layers, process_group=group, bucket_cap_mb=1e-3, algorithm=algorithm)
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
    while len(model._reducer.watch.boards) < 2:  # they are created during the first steps
        time.sleep(0.01)
    processes: list[int] = [0] * ranks
    dist.all_gather_object(processes, os.getpid())
    dist.barrier()
    clock = Clock()
    faults: dict[str, Callable[[], object]] = {
        "dies": die,
        "dies in backward": lambda: layers[1].weight.register_hook(lambda _: die()),
        "dies before the norm": lambda: setattr(model, "clip_grad_norm_", lambda _: die()),
        "dies before the mean of the loss": lambda: setattr(model, "collective", lambda _: die()),
        "hangs": hang,
        "hangs after forward": lambda: (model(torch.randn(4, 5)), hang()),
        "hangs in backward": lambda: layers[1].weight.register_hook(lambda _: hang()),
        "stops": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    }
    if rank in faulty:
        faults[fault]()
    elif fault == "dies" and len(faulty) > 1:  # together: none lives to hear that another is dead
        while any(is_alive(processes[other]) for other in faulty):
            time.sleep(0.01)
    try:
        for _ in range(3):
            step(torch.randn(4, 5))
    except RuntimeError as error:
        seconds = clock.seconds
        assert all(parameter.grad is None for parameter in model.parameters())
        # If a rank did not take part in a step, no rank applies it.
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before))
        try:
            step(torch.randn(4, 5))
        except RuntimeError as again:
            assert str(error) in str(again)
        tell(folder, ranks, faulty, seconds, error)
    else:
        print("DONE", flush=True)
    os._exit(0)  # threads of the broken group would block a normal exit


if __name__ == "__main__":
    main()
