"""The second status board, which the last rank keeps."""

from __future__ import annotations

import gc
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn

from cuda_ext._status_board import FAILED, StatusBoard, board_at_last_rank
from cuda_ext.distributed import BucketedDataParallel

INTERVAL = 0.05


def boards_of(store: dist.Store, ranks: int) -> list[StatusBoard]:
    boards = [
        board_at_last_rank(store, "secret", rank, ranks, INTERVAL, threading.Event()) for rank in reversed(range(ranks))
    ]
    assert all(boards)
    return boards[::-1]


def held() -> tuple[int, int]:
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, held()
        time.sleep(0.01)


@pytest.fixture
def store() -> dist.Store:
    return dist.PrefixStore("group", dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False))


def test_every_rank_reads_what_the_others_write(store: dist.Store) -> None:
    boards = boards_of(store, 4)
    for rank, board in enumerate(boards[1:], 1):
        board.write(f"{FAILED} pass {rank % 2}")
    for rank, board in enumerate(boards):
        others = {1: f"rank 1 {FAILED} pass 1", 2: f"rank 2 {FAILED} pass 0", 3: f"rank 3 {FAILED} pass 1"}
        if rank not in (1, 3):
            others[1], others[3] = f"each of ranks 1 and 3 {FAILED} pass 1", ""
        said = [others[other] for other in (1, 2, 3) if other != rank and others[other]]
        assert sorted(board.others().split("; ")) == sorted(["rank 0 does not respond"][:rank] + said)


def test_a_rank_that_stops_writing_counts_as_lost(store: dist.Store) -> None:
    boards = boards_of(store, 3)
    for board in boards:
        board.write("waits")
    assert boards[0].read() == [1, 2]
    boards[1].write("still waits")
    assert boards[0].others() == "rank 1 still waits; rank 2 does not respond; its last status: waits"


def test_statuses_read_before_the_board_failed(store: dist.Store) -> None:
    boards = boards_of(store, 3)
    boards[1].write(f"{FAILED} it")
    boards[2].write("waits")
    boards[0].read()
    del boards[2:]
    said = boards[0].others()
    assert f"rank 1 {FAILED} it" in said
    assert "rank 2 has not reported for 0." in said or "rank 2 does not respond" in said
    with pytest.raises(OSError, match=r"refused|closed"):
        boards[1].others()


def test_unknown_clients_are_ignored(store: dist.Store) -> None:
    boards = boards_of(store, 2)
    boards[1].write("waits")
    port = json.loads(store.get("secret/board"))[1]
    for question in (
        b"",
        b"\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"[1, 2]\n",
        b"\xff\xfe\n",
        b"[" * 100000 + b"\n",
        b'["guess", 0, [1, "x"], [1]]\n',
        b'["secret", 7, [1, "x"], [1]]\n',
        b'["secret", "0", [1, "x"], [1]]\n',
    ):
        with socket.create_connection(("localhost", port), timeout=10) as connection:
            connection.sendall(question)
            connection.shutdown(socket.SHUT_WR)
            with connection.makefile("rb") as stream:
                assert stream.read() == b""
    boards[1].write("waits on")
    assert boards[0].others() == "rank 1 does not respond; its last status: waits on"


def test_no_second_board_with_a_file_store(tmp_path: object) -> None:
    assert (
        board_at_last_rank(dist.FileStore(f"{tmp_path}/store", 2), "secret", 0, 2, INTERVAL, threading.Event()) is None
    )


def test_nobody_waits_for_the_last_rank_at_the_end(store: dist.Store) -> None:
    stopped = threading.Event()
    stopped.set()
    assert board_at_last_rank(store, "secret", 0, 2, INTERVAL, stopped) is None


@pytest.mark.sampled
@on_ranks(3)
def test_it_is_freed_with_the_wrapper() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    store = dist.TCPStore("localhost", 0, ranks, True, wait_for_workers=False) if rank == 0 else None
    port = [store.port if store is not None else 0]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    store = store or dist.TCPStore("localhost", port[0], ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    BucketedDataParallel(nn.Linear(3, 2))  # the backend itself opens connections
    dist.barrier()
    before = held()
    model = BucketedDataParallel(nn.Linear(3, 2))
    model(torch.randn(4, 3)).sum().backward()
    watch = weakref.proxy(model._reducer.watch)
    wait_until(lambda: len(watch.boards) == 2)
    dist.barrier()
    del model
    # Threads end by themselves when they have nothing to do; and the store of the first rank may have had
    # connections of the previous wrapper.
    wait_until(lambda: all(now <= then for now, then in zip(held(), before)))
