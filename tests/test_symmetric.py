"""SymmetricArena between processes of this host: sums, statistics, order, and errors if a rank is missing."""

from __future__ import annotations

import gc
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import COLLECTIVE_TIMEOUT, on_ranks
from torch import Tensor

from cuda_ext.distributed import symmetric
from cuda_ext.distributed.symmetric import ALIGNMENT, SymmetricArena, probe_shared_memory

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
COUNTS = (0, 1, 7, 64, 1003, 1000003)
BOTH = pytest.mark.parametrize("one_shot_bytes", [0, 8192], ids=["two-shot", "one-shot"])


def make_arena(nbytes: int, timeout: float | None = None, **options: int) -> SymmetricArena:
    return SymmetricArena(nbytes, dist.group.WORLD, CPU, timeout=timeout, **options)


def gathered(tensor: Tensor) -> list[Tensor]:
    """The tensors of all ranks, sent over sockets, in the order of ranks."""
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor.contiguous())
    return everyone


def sum_in_order(tensors: list[Tensor]) -> Tensor:
    """Sums like the op: in the order of ranks, in float32 or float64, rounded once."""
    compute = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    total = tensors[0].to(compute)
    for tensor in tensors[1:]:
        total = total + tensor.to(compute)
    return total.to(tensors[0].dtype)


def assert_stats(stats: Tensor, stored: Tensor) -> None:
    assert stats.shape == (2,)
    assert stats.dtype == (torch.float64 if stored.dtype == torch.float64 else torch.float32)
    rtol, atol = (2**-23, 2**-149) if stats.dtype == torch.float32 else (1e-13, 0.0)
    squares = stored.double().square().sum().to(stats.dtype)
    torch.testing.assert_close(stats[0], squares, rtol=rtol, atol=atol, equal_nan=True)
    assert stats[1].item() == float(not stored.isfinite().all())


def check_sum(world_size: int, dtype: torch.dtype) -> None:
    """All counts but the last are summed one-shot."""
    rank = dist.get_rank()
    offset = 3 * ALIGNMENT
    arena = make_arena(offset + max(COUNTS) * dtype.itemsize + 100)
    assert 1003 * dtype.itemsize <= arena.one_shot_bytes < 1000003 * dtype.itemsize
    for count in COUNTS:
        end = offset + count * dtype.itemsize
        arena.bytes.fill_(rank + 1)
        bucket = arena.bytes[offset:end].view(dtype)
        values = [
            torch.randn(count) * 10 ** (2 * torch.rand(count) - 1) for _ in range(world_size)
        ]  # the same on all ranks
        bucket.copy_(values[rank])
        expected = sum_in_order([value.to(dtype) for value in values])
        stats = arena.all_reduce(bucket)
        assert torch.equal(bucket, expected)
        assert_stats(stats, expected)
        assert all(torch.equal(stats, other) for other in gathered(stats))
        assert bool((arena.bytes[:offset] == rank + 1).all()), "written before the bucket"
        assert bool((arena.bytes[end:] == rank + 1).all()), "written behind the bucket"


@pytest.mark.parametrize("dtype", DTYPES)
@on_ranks(2)
def test_sum_on_2_ranks(dtype: torch.dtype) -> None:
    check_sum(2, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@on_ranks(3)
def test_sum_on_3_ranks(dtype: torch.dtype) -> None:
    check_sum(3, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@on_ranks(4)
def test_sum_on_4_ranks(dtype: torch.dtype) -> None:
    check_sum(4, dtype)


@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
@on_ranks(3)
def test_whole_numbers_are_summed_exactly(dtype: torch.dtype, one_shot_bytes: int) -> None:
    arena = make_arena(5000 * dtype.itemsize, one_shot_bytes=5 * one_shot_bytes)
    values = torch.randint(-40, 41, (3, 5000))
    bucket = arena.bytes.view(dtype)
    bucket.copy_(values[dist.get_rank()])
    arena.all_reduce(bucket)
    assert torch.equal(bucket.long(), values.sum(dim=0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@on_ranks(4)
def test_16_bits_are_summed_in_float32(dtype: torch.dtype) -> None:
    """The error is at most half an ulp, plus earlier rounding in float32, which may decide a near tie."""
    values = torch.randn(4, 100000).to(dtype)
    arena = make_arena(values[0].nbytes)
    bucket = arena.bytes.view(dtype)
    bucket.copy_(values[dist.get_rank()])
    arena.all_reduce(bucket)
    exact = values.double().sum(dim=0)
    ulp = torch.finfo(dtype).eps * torch.exp2(exact.abs().log2().floor()).clamp(min=torch.finfo(dtype).tiny)
    in_float32 = 3 * 2**-24 * values.double().abs().sum(dim=0)
    error = (bucket.double() - exact).abs()
    assert bool((error <= ulp / 2 + in_float32).all())
    in_dtype = values[0].clone()
    for value in values[1:]:
        in_dtype += value
    assert error.square().mean() < 0.7 * (in_dtype.double() - exact).square().mean()


@on_ranks(2)
def test_statistics_of_values_that_are_not_finite() -> None:
    for dtype, values in (
        (torch.float32, (math.inf, 1.0)),
        (torch.float32, (math.inf, -math.inf)),
        (torch.bfloat16, (1.0, math.nan)),
        (torch.float16, (60000.0, 60000.0)),  # the sum is infinite
        (torch.float16, (60000.0, -60000.0)),
        (torch.float64, (1e200, 1e200)),  # the sum is finite, its square is not
    ):
        arena = make_arena(1000 * dtype.itemsize)
        bucket = arena.bytes.view(dtype)
        bucket.fill_(0.5)
        bucket[777] = values[dist.get_rank()]
        stats = arena.all_reduce(bucket)
        expected = torch.ones(1000, dtype=dtype)
        expected[777] = torch.tensor(values[0], dtype=dtype) + torch.tensor(values[1], dtype=dtype)
        torch.testing.assert_close(bucket, expected, rtol=0, atol=0, equal_nan=True)
        assert_stats(stats, bucket)


# order


@on_ranks(3)
def test_buckets_in_flight_on_a_thread() -> None:
    """Slices of one arena: this thread packs the next ones while another waits for ranks that are late at random."""
    rng = random.Random(dist.get_rank())
    sizes = (100, 5000, 1, 70000, 16)
    begins = [n * 300000 // ALIGNMENT * ALIGNMENT for n in range(len(sizes))]
    arena = make_arena(300000 * len(sizes))
    buckets = [arena.bytes[begin:][: 4 * size].view(torch.float32) for begin, size in zip(begins, sizes)]
    with ThreadPoolExecutor(1) as worker:
        for step in range(30):
            values = [torch.randn(3, size) for size in sizes]
            pending = []
            for bucket, value in zip(buckets, values):
                time.sleep(rng.choice((0, 0, 0.002)))
                bucket.copy_(value[dist.get_rank()])
                pending.append(worker.submit(arena.all_reduce, bucket))
            for bucket, value, stats in zip(buckets, values, pending):
                assert_stats(stats.result(), bucket)
                assert torch.equal(bucket, sum_in_order(list(value))), step


@on_ranks(2)
def test_slots_are_independent() -> None:
    """Two threads, each with its slot, one of them one-shot; the ranks start them in opposite order."""
    arena = make_arena(1 << 20, slots=2)
    large, small = arena.bytes.view(torch.float32).chunk(2)
    buckets = (large, small[:300])
    values = torch.randn(40, 2, 2, large.numel())  # step, thread, rank

    def run(slot: int) -> None:
        bucket = buckets[slot]
        for step in range(40):
            ours = values[step, slot, :, : bucket.numel()]
            bucket.copy_(ours[dist.get_rank()])
            arena.all_reduce(bucket, slot=slot)
            assert torch.equal(bucket, sum_in_order(list(ours)))

    order = (0, 1) if dist.get_rank() == 0 else (1, 0)
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(run, slot) for slot in order]:
            done.result()


@BOTH
@on_ranks(2)
def test_a_rank_may_go_ahead(one_shot_bytes: int) -> None:
    """Rank 0 does nothing between all-reduces; rank 1 is always late, and must not read the next values."""
    arena = make_arena(256, one_shot_bytes=one_shot_bytes)
    bucket = arena.bytes.view(torch.float32)
    for step in range(50):
        bucket.fill_(step + dist.get_rank())
        if dist.get_rank() == 1:
            time.sleep(0.001)
        stats = arena.all_reduce(bucket)
        assert bool((bucket == 2 * step + 1).all())
        assert stats[0].item() == 64 * (2 * step + 1) ** 2


@on_ranks(2)
def test_other_threads_run_meanwhile() -> None:
    """Rank 1 arrives after a barrier that rank 0 only reaches if its waiting thread releases the GIL."""
    arena = make_arena(64, timeout=10)
    bucket = arena.bytes.view(torch.float32)
    bucket.fill_(1)
    if dist.get_rank() == 0:
        with ThreadPoolExecutor(1) as worker:
            pending = worker.submit(arena.all_reduce, bucket)
            time.sleep(0.05)
            dist.barrier()
            pending.result()
    else:
        dist.barrier()
        arena.all_reduce(bucket)
    assert bool((bucket == 2).all())


@on_ranks(1)
def test_one_rank_alone() -> None:
    arena = make_arena(400)
    assert arena.timeout == COLLECTIVE_TIMEOUT
    assert bool((arena.bytes == 0).all())
    bucket = arena.bytes.view(torch.float32)
    values = torch.randn(100)
    bucket.copy_(values)
    assert_stats(arena.all_reduce(bucket), values)
    assert torch.equal(bucket, values)


# what goes wrong


def failure_of(call: Callable[[], object]) -> str:
    with pytest.raises(RuntimeError) as raised:
        call()
    return str(raised.value).splitlines()[0]


@BOTH
@on_ranks(4)
def test_ranks_that_do_not_come_are_named(one_shot_bytes: int) -> None:
    arena = make_arena(64, timeout=0.5, one_shot_bytes=one_shot_bytes)
    bucket = arena.bytes.view(torch.float32)
    late = dist.get_rank() in (1, 3)
    if late:
        dist.barrier()
    begin = time.monotonic()
    failure = failure_of(lambda: arena.all_reduce(bucket))
    took = time.monotonic() - begin
    if not late:
        dist.barrier()
    everyone: list[str] = [""] * 4
    dist.all_gather_object(everyone, failure)
    timed_out = [text for text in everyone if "ranks 1, 3 to pack this bucket within 0.5 s" in text]
    assert timed_out, everyone
    assert all(text.startswith("cuda_ext::symmetric_all_reduce: expected ") for text in everyone)
    for rank in (1, 3):  # or the second of the first two ranks
        assert re.search(r"rank [02] gave up when it had waited for ranks 1, 3", everyone[rank]), everyone
        assert not late or took < 0.3
    assert "gave up" in failure_of(lambda: arena.all_reduce(bucket))  # from now on


@on_ranks(3)
def test_abort_wakes_waiting_ranks() -> None:
    arena = make_arena(64)
    if dist.get_rank() == 1:
        time.sleep(0.1)
        arena.abort()
    begin = time.monotonic()
    assert "memory that rank 1 gave up;" in failure_of(lambda: arena.all_reduce(arena.bytes.view(torch.float32)))
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("one_shot_bytes", [0, 1000, 8192], ids=["two-shot", "both", "one-shot"])
@on_ranks(3)
def test_ranks_that_reduce_different_buckets_are_named(one_shot_bytes: int) -> None:
    arena = make_arena(6400, one_shot_bytes=one_shot_bytes)
    count = 200 if dist.get_rank() == 2 else 300
    bucket = arena.bytes[640:].view(torch.float32)[:count]
    bucket.fill_(7)
    everyone: list[str] = [""] * 3
    dist.all_gather_object(everyone, failure_of(lambda: arena.all_reduce(bucket)))
    named = [
        text
        for text in everyone
        if "200 elements of float32 at byte 640" in text
        and "300 elements of float32 at byte 640" in text
        and "rank 2" in text
    ]
    # The ranks on the other path wait for an arrival that never happens; those that see the reason tell them.
    assert named and all(text in named or "memory that all ranks still use" in text for text in everyone), everyone
    assert bool((bucket == 7).all())


@on_ranks(1)
def test_refusals() -> None:
    arena = make_arena(6400)
    floats = arena.bytes.view(torch.float32)
    for bucket, slot, message in (
        (arena.bytes, 0, "expected bucket of dtype float32, float16, bfloat16 or float64, got"),
        (floats[::2], 0, "expected bucket of shape (N,) and contiguous"),
        (floats[1:], 0, "expected bucket to begin at a multiple of 64 bytes, got byte 4"),
        (torch.zeros(16), 0, "expected bucket to be a view of segments[0] after its first 131072 bytes"),
    ):
        assert message in failure_of(lambda bucket=bucket, slot=slot: arena.all_reduce(bucket, slot=slot))
    with pytest.raises(ValueError, match="expected slot from 0 to 0, got 1; pass a larger slots to SymmetricArena"):
        arena.all_reduce(floats, slot=1)
    for nbytes, options, message in (
        (-1, {}, "expected nbytes >= 0, got -1"),
        (1, {"timeout": 0}, "expected a timeout of more than 0 seconds, got 0"),
        (1, {"slots": 9}, "expected slots from 1 to 8, got 9"),
        (1, {"one_shot_bytes": -1}, "expected one_shot_bytes >= 0, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            make_arena(nbytes, **options)
    assert_stats(arena.all_reduce(floats), floats)  # the arena still works


@on_ranks(2)
def test_too_little_memory() -> None:
    layouts = "(nbytes, slots, one_shot_bytes): (100, 1, 65536), (101, 1, 65536)"
    for nbytes, message in (
        (1 << 50, "bytes of shared memory ([Errno 12] Cannot allocate memory)"),
        (100 + dist.get_rank(), f"arenas of different {layouts}"),
    ):
        assert message in failure_of(lambda nbytes=nbytes: make_arena(nbytes))
    with pytest.raises(ValueError, match=r"expected nbytes >= 0, got None on rank 1$"):
        make_arena(None if dist.get_rank() == 1 else 100)


# the probe


def open_segments() -> set[str]:
    """The names of the memory that this process has open; other tests may have left some, in objects that they keep."""
    gc.collect()  # objects that an exception keeps alive
    folder = "/proc/self/fd"
    paths = {os.path.realpath(f"{folder}/{file}") for file in os.listdir(folder)}
    return {path for path in paths if "memfd:cuda_ext" in path}


@pytest.mark.sampled
@on_ranks(3)
def test_probe_of_one_host() -> None:
    before = open_segments()
    arena = make_arena(1)
    assert len(open_segments() - before) == 3
    del arena
    assert probe_shared_memory(dist.group.WORLD, CPU) is None
    assert open_segments() <= before
    assert "devices of type meta" in str(probe_shared_memory(dist.group.WORLD, torch.device("meta")))


@pytest.mark.sampled
@on_ranks(3)
def test_probe_where_one_rank_does_not_reach_the_others() -> None:
    """As if rank 2 were in a separate container, whose processes do not see those of the others."""
    before = open_segments()
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as empty:
        if dist.get_rank() == 2:
            patch.setattr(symmetric, "_PROCESSES", Path(empty))
        reason = probe_shared_memory(dist.group.WORLD, CPU)
        failure = failure_of(lambda: make_arena(100))
    assert reason is not None
    assert reason.startswith("rank 2 does not reach the memory of rank 0 ([Errno 2] No such file or directory")
    everyone: list[str | None] = [None] * 3
    dist.all_gather_object(everyone, reason)
    assert everyone == [reason] * 3
    assert failure.startswith("cuda_ext.distributed.SymmetricArena: expected ranks that share memory of 100 bytes each")
    assert "rank 2 does not reach the memory of rank 0" in failure
    assert open_segments() <= before


# Separate processes, which may be killed or run in namespaces.


def start_ranks(folder: Path, task: str, prefixes: Sequence[Sequence[str]]) -> list[subprocess.Popen[str]]:
    """Runs the task below in a process for each rank; ``prefixes`` are commands that run them."""
    return [
        subprocess.Popen(
            [*prefix, sys.executable, __file__, task, str(rank), str(len(prefixes)), str(folder / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
        )
        for rank, prefix in enumerate(prefixes)
    ]


def outputs(processes: Sequence[subprocess.Popen[str]]) -> list[str]:
    try:
        return [process.communicate(timeout=60)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


def _be_killed() -> None:
    """Rank 1 kills itself; the others print how long it took them to notice, and how."""
    arena = make_arena(1 << 20)
    bucket = arena.bytes.view(torch.float32)
    arena.all_reduce(bucket)
    if dist.get_rank() == 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    failure = failure_of(lambda: arena.all_reduce(bucket))
    print(f"{time.monotonic() - begin:.3f} {failure}", flush=True)
    os._exit(0)


def _print_probe() -> None:
    print(probe_shared_memory(dist.group.WORLD, CPU), flush=True)


@pytest.mark.sampled
def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    first, killed, third = start_ranks(tmp_path, "_be_killed", [[], [], []])
    survivors = outputs([first, third])
    assert killed.wait() == -signal.SIGKILL
    for text in survivors:
        seconds, _, failure = text.strip().splitlines()[-1].partition(" ")
        assert float(seconds) < 2, text
        assert "rank 1" in failure, text
    assert any(
        "expected rank 1 to pack this bucket, got the end of the process or of its arena" in text for text in survivors
    )


@pytest.fixture(scope="module")
def namespace() -> Sequence[str]:
    """The command that runs a process in separate namespaces, like a container; empty if that is not allowed."""
    command = ("unshare", "--mount", "--pid", "--fork", "--mount-proc")
    allowed = shutil.which("unshare") and subprocess.run([*command, "true"], capture_output=True).returncode == 0
    return command if allowed else ()


@pytest.mark.sampled
def test_probe_of_namespaces(tmp_path: Path, namespace: Sequence[str]) -> None:
    """Ranks that do not see each other's processes do not share memory, whatever host names say."""
    answers = [
        text.strip().splitlines()[-1] for text in outputs(start_ranks(tmp_path, "_print_probe", [[], namespace]))
    ]
    assert answers[0] == answers[1]
    assert ("does not reach the memory of rank" in answers[0]) if namespace else answers[0] == "None"


if __name__ == "__main__":
    _, _task, _rank, _size, _store = sys.argv
    dist.init_process_group("gloo", init_method=f"file://{_store}", rank=int(_rank), world_size=int(_size))
    globals()[_task]()
    dist.destroy_process_group()  # otherwise its threads may still run when the process exits, which aborts it
