"""The CUDA all-reduce in symmetric memory on the emulator, where blocks of one launch act as the ranks of a group."""

from __future__ import annotations

import ctypes
import math
import random
from dataclasses import dataclass

import pytest
import torch
from harness import CSRC, Fault, Library, SyncSite, plain_and_hooked
from torch import Tensor

library, hooked = plain_and_hooked("symmetric", [CSRC / "bucket" / "symmetric_kernels.cu", "symmetric_kernels.cu"])
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # as in csrc/base/dtype.h
PAD_BYTES, ALIGNMENT, GUARD = 128 << 10, 64, 64


def sum_in_order(values: Tensor) -> Tensor:
    """Sums (..., num_ranks, count) over the ranks, in order."""
    total = torch.full(values.select(-2, 0).shape, -0.0)
    for rank in range(values.shape[-2]):
        total += values.select(-2, rank).float()
    return total.to(values.dtype)


@dataclass
class Group:
    """The segments of all ranks: a bucket between guards, the staging after it, and the slot that it uses."""

    num_ranks: int
    dtype: torch.dtype
    count: int
    slot: int = 0
    one_shot: bool = False

    def __post_init__(self) -> None:
        nbytes = self.count * self.dtype.itemsize
        self.begin = PAD_BYTES + ALIGNMENT
        self.row_bytes = -(-nbytes // ALIGNMENT) * ALIGNMENT + ALIGNMENT if self.one_shot else 0
        self.staging = -(-(self.begin + nbytes + GUARD) // ALIGNMENT) * ALIGNMENT
        size = self.staging + 2 * self.num_ranks * self.row_bytes + GUARD
        memory = torch.zeros(self.num_ranks * size + ALIGNMENT, dtype=torch.uint8)
        memory = memory[-memory.data_ptr() % ALIGNMENT :]
        self.segments = list(memory[: self.num_ranks * size].view(self.num_ranks, size))
        self.buckets = [segment[self.begin : self.begin + nbytes].view(self.dtype) for segment in self.segments]
        self.stats = torch.empty(self.num_ranks, 2)

    def fill(self) -> None:
        """Draws values, and poisons the memory that must not be written."""
        for segment, bucket in zip(self.segments, self.buckets):
            segment[PAD_BYTES:] = 0xA5
            bucket.copy_(torch.randn(self.count))
        self.stats.fill_(math.nan)
        self.expected = sum_in_order(torch.stack(self.buckets))

    def run(self, library: Library, blocks: int = 2, rank: int = -1, values: Tensor | None = None) -> None:
        """One launch of all ranks, or of one.

        `values` (rounds, num_ranks, count) are replaced by their sums over the ranks, one round after the other; no
        rank waits until another has finished its round. Needs blocks=1.
        """
        rounds, pointer = (1, None) if values is None else (len(values), values.data_ptr())
        pointers = (ctypes.c_void_p * self.num_ranks)(*(segment.data_ptr() for segment in self.segments))
        library.call(
            "symmetric_run", pointers, self.num_ranks, rank, self.slot, ctypes.c_int64(self.begin),
            ctypes.c_int64(self.count), DTYPES[self.dtype], ctypes.c_int64(self.staging),
            ctypes.c_int64(self.row_bytes), blocks, rounds, ctypes.c_void_p(pointer),
            ctypes.c_void_p(self.stats.data_ptr()),
        )  # fmt: skip

    def run_rounds(self, library: Library, rounds: int = 4) -> None:
        """Runs and checks several rounds; the last one uses the values of `fill`."""
        values = torch.randn(rounds, self.num_ranks, self.count).to(self.dtype)
        values[-1] = torch.stack(self.buckets)
        expected = sum_in_order(values)
        for bucket in self.buckets:
            bucket.fill_(math.nan)
        self.run(library, blocks=1, values=values)
        assert torch.equal(values, expected.unsqueeze(1).expand_as(values))
        self.check()

    def check(self) -> None:
        end = self.begin + self.count * self.dtype.itemsize
        for segment, bucket in zip(self.segments, self.buckets):
            torch.testing.assert_close(bucket, self.expected, rtol=0, atol=0, equal_nan=True)
            assert bool((segment[PAD_BYTES : self.begin] == 0xA5).all())
            assert bool((segment[end : self.staging] == 0xA5).all())
            assert bool((segment[-GUARD:] == 0xA5).all())
            rows = segment[self.staging : -GUARD].view(2 * self.num_ranks, self.row_bytes)
            assert bool((rows[:, end - self.begin :] == 0xA5).all())
        squares = self.expected.double().square().sum()
        for stats in self.stats:
            torch.testing.assert_close(stats[0].double(), squares, rtol=2**-23, atol=2**-149)
            assert torch.equal(stats, self.stats[0])
            assert stats[1] == float(not self.expected.isfinite().all())


BOTH = pytest.mark.parametrize("one_shot", [False, True], ids=["two-shot", "one-shot"])


@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_sum(library: Library, num_ranks: int, dtype: torch.dtype, one_shot: bool) -> None:
    for count in (0, 1, 7, 64, 5003):
        for blocks in (1, 3):
            group = Group(num_ranks, dtype, count, one_shot=one_shot)
            for _ in range(3):  # each leaves the flags ready for the next one
                group.fill()
                with library.options("lazy", "pct", random.getrandbits(32)):
                    group.run(library, blocks)
                group.check()


@BOTH
def test_values_that_are_not_finite(library: Library, one_shot: bool) -> None:
    group = Group(2, torch.float16, 300, one_shot=one_shot)
    group.fill()
    for bucket in group.buckets:
        bucket[123] = 60000.0
    group.expected[123] = math.inf
    group.run(library)
    for stats in group.stats:
        assert stats.tolist() == [math.inf, 1.0]


def test_slots_keep_to_themselves(library: Library) -> None:
    first = Group(2, torch.float32, 500)
    for slot in (0, 7, 0, 7, 7):
        first.slot = slot
        first.fill()
        first.run(library)
        first.check()


def test_both_take_turns_in_one_slot(library: Library) -> None:
    small, large = (Group(3, torch.float32, 500, one_shot=one_shot) for one_shot in (True, False))
    for group in (small, large, small, small, large, large, small):
        for segment, other in zip(group.segments, (large if group is small else small).segments):
            segment[:PAD_BYTES] = other[:PAD_BYTES]
        group.fill()
        with library.options("lazy", "pct", random.getrandbits(32)):
            group.run(library, random.choice((1, 2, 3)))
        group.check()
        for segment, other in zip(group.segments, (large if group is small else small).segments):
            other[:PAD_BYTES] = segment[:PAD_BYTES]


@BOTH
def test_counters_may_wrap(library: Library, one_shot: bool) -> None:
    """Arrivals are 2 * epoch - 1 and 2 * epoch, which overflow after 2^31 epochs."""
    group = Group(3, torch.float32, 300, one_shot=one_shot)
    for segment in group.segments:
        words = segment[:PAD_BYTES].view(torch.int32)
        words[0] = 2**31 - 3
        words[2 : 2 + 32 * 32] = 2 * (2**31 - 3) - 2**32
    for _ in range(6):
        group.fill()
        with library.options("lazy", "pct", random.getrandbits(32)):
            group.run(library)
        group.check()


@BOTH
def test_kernel_of_one_rank(library: Library, one_shot: bool) -> None:
    """The kernel itself, in a group of one rank."""
    group = Group(1, torch.bfloat16, 100003, one_shot=one_shot)
    group.fill()
    group.run(library, rank=0)
    group.check()


@BOTH
def test_a_missing_rank_is_waited_for(library: Library, one_shot: bool) -> None:
    group = Group(2, torch.float32, 100, one_shot=one_shot)
    group.fill()
    with pytest.raises(Fault, match="wait_reached"):
        group.run(library, rank=0)


def test_the_grid_depends_only_on_the_size(library: Library) -> None:
    num_blocks = library.symbol("symmetric_num_blocks")

    def blocks(*counts: int, row_bytes: int) -> list[int]:
        return [num_blocks(ctypes.c_int64(count), 2, 0, ctypes.c_int64(row_bytes)) for count in counts]

    assert blocks(0, 1, 8192, 8193, 1 << 30, row_bytes=0) == [1, 1, 1, 2, 32]
    assert blocks(1, 1024, 1025, 1 << 15, (1 << 15) + 1, row_bytes=4 << 15) == [1, 1, 2, 32, 5]


@pytest.mark.parametrize(
    ("one_shot", "loaded", "stored"),
    [
        pytest.param(False, 4, 4, id="two-shot"),  # each rank accesses its chunk in all buckets
        pytest.param(True, 4 + 4 * 4, 4 * 4, id="one-shot"),  # own and all buckets; to three stagings and back
    ],
)
def test_every_byte_is_read_once_and_written_once(library: Library, one_shot: bool, loaded: int, stored: int) -> None:
    """Bytes per element of the bucket, for all four ranks; the rest does not depend on the bucket's size."""
    moved = []
    for count in (8192, 2 * 8192):
        group = Group(4, torch.float32, count, one_shot=one_shot)
        group.fill()
        library.reset()
        group.run(library)
        counters = library.counters()
        moved.append((counters["global_load_bytes"], counters["global_store_bytes"]))
    assert moved[1][0] - moved[0][0] == loaded * 8192 * 4
    assert moved[1][1] - moved[0][1] == stored * 8192 * 4


@BOTH
def test_fast_and_slow_ranks(library: Library, one_shot: bool) -> None:
    """Only the protocol prevents a rank from starting the next all-reduce before another has finished the last."""
    for count in (5, 700):
        group = Group(4, torch.float32, count, one_shot=one_shot)
        for _ in range(10):
            group.fill()
            with library.options("lazy", "pct", random.getrandbits(32)):
                group.run_rounds(library, 5)


@pytest.mark.sampled
@BOTH
def test_no_race(hooked: Library, one_shot: bool) -> None:
    for seed in range(4):
        group = Group(3, torch.bfloat16, 4001, one_shot=one_shot)
        for _ in range(3):
            group.fill()
            with hooked.options("lazy", "pct", seed, check_races=True):
                group.run(hooked) if seed % 2 else group.run_rounds(hooked, 3)
            group.check()


def is_caught(library: Library, skip: SyncSite, one_shot: bool) -> bool:
    for seed in range(4):
        group = Group(2, torch.float32, 4001, one_shot=one_shot)
        group.fill()
        with library.options("lazy", "pct", seed, check_races=True, skip=skip):
            try:
                group.run(library) if seed % 2 else group.run_rounds(library, 3)
                group.check()
            except (Fault, AssertionError):
                return True
    return False


@BOTH
def test_removal_of_any_synchronisation_is_detected(hooked: Library, one_shot: bool) -> None:
    hooked.reset()
    group = Group(2, torch.float32, 4001, one_shot=one_shot)
    group.fill()
    group.run(hooked)
    # Synchronisation in the test's kernel replaces the boundaries of kernels.
    sites = [site for site in hooked.sync_sites() if "symmetric_kernels.cu:" not in str(site)]
    waits = [site for site in sites if site.instruction == "wait_reached"]
    assert len(waits) == (1 if one_shot else 2), "one for each arrival"
    assert {site.instruction for site in sites} == {
        "sync_threads",
        "store_release",
        "wait_reached",
        "atomic_add_acq_rel",
    }
    assert [str(site) for site in sites if not is_caught(hooked, site, one_shot)] == []
