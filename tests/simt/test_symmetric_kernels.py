"""The CUDA all-reduce in symmetric memory on the emulator: the blocks of one launch are the ranks of a group."""

from __future__ import annotations

import ctypes
import math
import random
from dataclasses import dataclass

import pytest
import torch
from harness import CSRC, Fault, Library, SyncSite

SOURCES = [CSRC / "bucket" / "symmetric_kernels.cu", "symmetric_kernels.cu"]
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # as in csrc/base/dtype.h
PAD_BYTES, ALIGNMENT, GUARD = 128 << 10, 64, 64


@pytest.fixture(scope="session")
def library() -> Library:
    return Library.build("symmetric", SOURCES)


@pytest.fixture(scope="session")
def hooked() -> Library:
    """The same with plain loads and stores seen, as the race checker needs."""
    return Library.build("symmetric-hooks", SOURCES, hooks=True)


@dataclass
class Group:
    """The segments of all ranks, with one bucket between guards, and the slot that serves it."""

    num_ranks: int
    dtype: torch.dtype
    count: int
    slot: int = 0

    def __post_init__(self) -> None:
        nbytes = self.count * self.dtype.itemsize
        self.begin = PAD_BYTES + ALIGNMENT
        size = -(-(self.begin + nbytes + GUARD) // ALIGNMENT) * ALIGNMENT
        memory = torch.zeros(self.num_ranks * size + ALIGNMENT, dtype=torch.uint8)
        memory = memory[-memory.data_ptr() % ALIGNMENT :]
        self.segments = list(memory[: self.num_ranks * size].view(self.num_ranks, size))
        self.buckets = [segment[self.begin : self.begin + nbytes].view(self.dtype) for segment in self.segments]
        self.stats = torch.empty(self.num_ranks, 2)

    def fill(self) -> None:
        """Draws values, and poisons what is not to be written."""
        for segment, bucket in zip(self.segments, self.buckets):
            segment[PAD_BYTES:] = 0xA5
            bucket.copy_(torch.randn(self.count))
        self.stats.fill_(math.nan)
        total = torch.full((self.count,), -0.0)
        for bucket in self.buckets:
            total += bucket.float()
        self.expected = total.to(self.dtype)

    def run(self, library: Library, blocks: int = 2, rank: int = -1, pack: bool = False) -> None:
        """One launch of all ranks, or of one; it packs the buckets itself with `pack`, which needs blocks=1."""
        values = torch.stack(self.buckets)
        packed = ctypes.c_void_p(values.data_ptr() if pack else None)
        if pack:
            for bucket in self.buckets:
                bucket.fill_(math.nan)
        pointers = (ctypes.c_void_p * self.num_ranks)(*(segment.data_ptr() for segment in self.segments))
        library.call(
            "symmetric_run", pointers, self.num_ranks, rank, self.slot, ctypes.c_int64(self.begin),
            ctypes.c_int64(self.count), DTYPES[self.dtype], blocks, packed,
            ctypes.c_void_p(self.stats.data_ptr()),
        )  # fmt: skip

    def check(self) -> None:
        end = self.begin + self.count * self.dtype.itemsize
        for segment, bucket in zip(self.segments, self.buckets):
            torch.testing.assert_close(bucket, self.expected, rtol=0, atol=0, equal_nan=True)
            assert bool((segment[PAD_BYTES : self.begin] == 0xA5).all())
            assert bool((segment[end:] == 0xA5).all())
        squares = self.expected.double().square().sum()
        for stats in self.stats:
            torch.testing.assert_close(stats[0].double(), squares, rtol=2**-23, atol=2**-149)
            assert torch.equal(stats, self.stats[0])
            assert stats[1] == float(not self.expected.isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_sum(library: Library, num_ranks: int, dtype: torch.dtype) -> None:
    for count in (0, 1, 7, 64, 5003):
        for blocks in (1, 3):
            group = Group(num_ranks, dtype, count)
            for _ in range(2):  # the pad is ready for the next one
                group.fill()
                with library.options("lazy", "pct", random.getrandbits(32)):
                    group.run(library, blocks)
                group.check()


def test_values_that_are_not_finite(library: Library) -> None:
    group = Group(2, torch.float16, 300)
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


def test_counters_may_wrap(library: Library) -> None:
    """Arrivals are 2 * epoch - 1 and 2 * epoch: around 2^31 epochs they begin anew."""
    group = Group(3, torch.float32, 300)
    for segment in group.segments:
        words = segment[:PAD_BYTES].view(torch.int32)
        words[0] = 2**31 - 3
        words[2 : 2 + 32 * 32] = 2 * (2**31 - 3) - 2**32
    for _ in range(6):
        group.fill()
        with library.options("lazy", "pct", random.getrandbits(32)):
            group.run(library)
        group.check()


def test_kernel_of_one_rank(library: Library) -> None:
    """The kernel as it is launched, on a group that has no other rank."""
    group = Group(1, torch.bfloat16, 100003)
    group.fill()
    group.run(library, rank=0)
    group.check()


def test_a_rank_that_does_not_come_is_waited_for(library: Library) -> None:
    group = Group(2, torch.float32, 100)
    group.fill()
    with pytest.raises(Fault, match="wait_reached"):
        group.run(library, rank=0)


def test_grid_depends_on_size_alone(library: Library) -> None:
    num_blocks = library.symbol("symmetric_num_blocks")
    sizes = [num_blocks(ctypes.c_int64(count), 2, 0) for count in (0, 1, 8192, 8193, 1 << 30)]
    assert sizes == [1, 1, 1, 2, 32]


def test_every_byte_is_read_once_and_written_once(library: Library) -> None:
    """By each rank, of its chunk in all buckets; what else is moved does not grow with the bucket."""
    moved = []
    for count in (8192, 2 * 8192):
        group = Group(4, torch.float32, count)
        group.fill()
        library.reset()
        group.run(library)
        counters = library.counters()
        moved.append((counters["global_load_bytes"], counters["global_store_bytes"]))
    assert moved[1][0] - moved[0][0] == 4 * 8192 * 4
    assert moved[1][1] - moved[0][1] == 4 * 8192 * 4


def test_no_race(hooked: Library) -> None:
    for seed, pack in ((0, False), (1, True), (2, False), (3, True)):
        group = Group(3, torch.bfloat16, 4001)
        for _ in range(2):
            group.fill()
            with hooked.options("lazy", "pct", seed, check_races=True):
                group.run(hooked, blocks=1 if pack else 2, pack=pack)
            group.check()


def is_caught(library: Library, skip: SyncSite) -> bool:
    for seed, pack in ((0, False), (1, True), (2, False), (3, True)):
        group = Group(2, torch.float32, 4001)
        group.fill()
        with library.options("lazy", "pct", seed, check_races=True, skip=skip):
            try:
                group.run(library, blocks=1 if pack else 2, pack=pack)
                group.check()
            except (Fault, AssertionError):
                return True
    return False


def test_loss_of_any_synchronisation_is_noticed(hooked: Library) -> None:
    hooked.reset()
    group = Group(2, torch.float32, 4001)
    group.fill()
    group.run(hooked)
    sites = hooked.sync_sites()
    waits = [site for site in sites if site.instruction == "wait_reached"]
    assert len(waits) == 2, "one for each arrival"
    assert {site.instruction for site in sites} == {
        "sync_threads",
        "store_release",
        "wait_reached",
        "atomic_add_acq_rel",
    }
    assert [str(site) for site in sites if not is_caught(hooked, site)] == []
