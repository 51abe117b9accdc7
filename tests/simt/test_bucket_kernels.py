"""The bucket kernels on the emulator, against numpy.

Every launch works on one arena: guards surround the bucket and each tensor, outputs are poisoned, and the whole arena
is compared with its expected contents afterwards.
"""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from cost import assert_same_cost
from harness import CSRC, Fault, Library, SyncSite, plain_and_hooked

library, hooked = plain_and_hooked("bucket", [CSRC / "bucket" / "bucket_kernels.cu", "bucket_kernels.cu"])
DTYPES = ("float32", "float16", "bfloat16")
DTYPE_INDEX = {name: i for i, name in enumerate((*DTYPES, "float64"))}  # as in csrc/base/dtype.h
OPS = ("pack", "unpack", "stats", "pack alone")  # "pack alone": without statistics
PAIRS = [(source, target) for source in DTYPES for target in DTYPES]
BLOCK = 16384  # kBlockElements
POISON = 0xA5
ALIGNMENT, GUARD = 64, 64  # bytes
ENTRY = np.dtype({"names": ["data", "begin", "count", "dtype"], "formats": ["u8", "i8", "i8", "u1"], "itemsize": 32})

# The order of float64 additions differs, so the float32 sum of random values may differ by one rounding.
SQUARES_TOLERANCE = 2.0**-23


@pytest.fixture
def rng(seeded: None) -> np.random.Generator:
    return np.random.default_rng(random.getrandbits(64))


@dataclass(frozen=True)
class Tensor:
    count: int
    dtype: str
    gap: int = 0  # elements of the bucket before it
    shift: int = 0  # elements after an aligned address
    in_place: bool = False
    kept: bool = False  # already in the bucket; must not be written


@dataclass(frozen=True)
class Case:
    tensors: Sequence[Tensor]
    bucket: str = "float32"
    shift: int = 0
    end_gap: int = 0
    scale: float = 1.0
    # "whole": small integers, whose squares sum exactly; "normal"; "bits": arbitrary bits.
    values: str = "whole"


@dataclass
class Outcome:
    arena: np.ndarray
    stats: np.ndarray
    workspace: np.ndarray
    blocks: int

    @property
    def partial_sums(self) -> np.ndarray:
        """The float64 sums of the blocks: the last array of the workspace, aligned to 256 bytes."""
        size = 8 * self.blocks
        return self.workspace[: self.workspace.size - GUARD][-(-(-size // 256) * 256) :][:size]


def storage(dtype: str) -> type:
    return np.uint32 if dtype == "float32" else np.uint16


def size_of(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def decode(bits: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float32 if dtype == "float32" else np.float16).astype(np.float32)


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """Rounds to nearest, ties to even."""
    values = np.ascontiguousarray(values, np.float32)
    if dtype != "bfloat16":
        return values.astype(dtype).view(storage(dtype))
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def draw(count: int, dtype: str, values: str, rng: np.random.Generator) -> np.ndarray:
    if values == "bits":
        return rng.integers(0, 2 ** (8 * size_of(dtype)), count, dtype=storage(dtype))
    numbers = rng.integers(-8, 9, count) if values == "whole" else rng.standard_normal(count)
    return encode(numbers.astype(np.float32), dtype)


@dataclass(frozen=True)
class Stretch:
    """A range of numbers in the arena."""

    at: int  # byte
    count: int
    dtype: str

    def of(self, arena: np.ndarray) -> np.ndarray:
        return arena[self.at : self.at + self.count * size_of(self.dtype)].view(storage(self.dtype))

    def part(self, begin: int, count: int) -> Stretch:
        return Stretch(self.at + begin * size_of(self.dtype), count, self.dtype)


def address(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def aligned(size: int) -> np.ndarray:
    """Bytes aligned to 256, like allocations on a device."""
    raw = np.empty(size + 256, np.uint8)
    begin = -raw.ctypes.data % 256
    return raw[begin : begin + size]


class Launch:
    """A case in memory, with the expected result."""

    def __init__(self, op: str, case: Case, rng: np.random.Generator) -> None:
        self.op, self.case = op, case
        self.count = sum(t.gap + t.count for t in case.tensors) + case.end_gap
        cursor = 0

        def place(count: int, dtype: str, shift: int) -> Stretch:
            nonlocal cursor
            at = (cursor + GUARD + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT + shift * size_of(dtype)
            cursor = at + count * size_of(dtype)
            return Stretch(at, count, dtype)

        self.bucket = place(self.count, case.bucket, case.shift)
        self.begins: list[int] = []
        self.tensors: list[Stretch] = []
        position = 0
        for t in case.tensors:
            position += t.gap
            self.begins.append(position)
            here = self.bucket.part(position, t.count)
            self.tensors.append(here if t.in_place or t.kept else place(t.count, t.dtype, t.shift))
            position += t.count
        self.before = np.full(cursor + GUARD, POISON, np.uint8)
        for source in [self.bucket] if op == "unpack" else self.tensors:
            source.of(self.before)[:] = draw(source.count, source.dtype, case.values, rng)
        self._expect()

    def _expect(self) -> None:
        self.expected = self.before.copy()
        self.written: list[Stretch] = []
        self.squares, self.nonfinite = 0.0, False
        if self.op.startswith("pack"):
            self.bucket.of(self.expected)[:] = 0
        for begin, tensor, given in zip(self.begins, self.tensors, self.case.tensors):
            if given.kept:
                tensor.of(self.expected)[:] = tensor.of(self.before)
                continue
            place = self.bucket.part(begin, tensor.count)
            source, target = (place, tensor) if self.op == "unpack" else (tensor, place)
            with np.errstate(all="ignore"):
                values = decode(source.of(self.before), source.dtype)
                if self.op != "stats":
                    bits = encode(values * np.float32(self.case.scale), target.dtype)
                    target.of(self.expected)[:] = bits
                    values = decode(bits, target.dtype)
                    self.written.append(target)
                self.squares += float((values.astype(np.float64) ** 2).sum())
            self.nonfinite |= not np.isfinite(values).all()

    def run(self, library: Library, workspace: np.ndarray | None = None) -> Outcome:
        arena, stats = aligned(self.before.size), aligned(8).view(np.float32)
        arena[:], stats[:] = self.before, -1.0
        entries = np.zeros(len(self.tensors), ENTRY)
        for entry, begin, tensor, given in zip(entries, self.begins, self.tensors, self.case.tensors):
            entry["data"] = 0 if given.kept else arena.ctypes.data + tensor.at
            entry["begin"], entry["count"], entry["dtype"] = begin, tensor.count, DTYPE_INDEX[tensor.dtype]
        workspaces = [] if workspace is None else [workspace]

        @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)
        def allocate(size: int) -> int:
            if not workspaces:
                workspaces.append(aligned(size + GUARD))
                workspaces[0][:] = POISON
            assert workspaces[0].size == size + GUARD
            return int(workspaces[0].ctypes.data)

        bucket = None if self.op == "stats" else ctypes.c_void_p(arena.ctypes.data + self.bucket.at)
        library.call(
            "bucket_run",
            OPS.index(self.op),
            address(entries),
            ctypes.c_int64(len(entries)),
            bucket,
            ctypes.c_int64(self.count),
            DTYPE_INDEX["float32" if self.op == "stats" else self.case.bucket],
            ctypes.c_double(self.case.scale),
            None if self.op == "pack alone" else address(stats),
            allocate,
        )
        entries[:] = 0  # the launch must not use the table after the call
        (workspace,) = workspaces or [np.full(GUARD, POISON, np.uint8)]
        return Outcome(arena, stats, workspace, max(1, -(-self.count // BLOCK)))

    def check(self, outcome: Outcome) -> None:
        expected = self.expected.copy()
        for target in self.written:  # all NaNs are equal
            got, want = target.of(outcome.arena), target.of(expected)
            both = np.isnan(decode(got, target.dtype)) & np.isnan(decode(want, target.dtype))
            want[both] = got[both]
        wrong = np.flatnonzero(outcome.arena != expected)
        assert wrong.size == 0, f"{wrong.size} wrong bytes from {wrong[0]}, the bucket is {self.bucket}"
        assert (outcome.workspace[-GUARD:] == POISON).all(), "wrote after the workspace"
        if self.op == "pack alone":
            return
        assert outcome.stats[1] == self.nonfinite
        if not self.nonfinite:
            with np.errstate(over="ignore"):
                squares = np.float32(self.squares)
            if self.case.values == "whole":
                assert outcome.stats[0] == squares
            else:
                np.testing.assert_allclose(outcome.stats[0], squares, rtol=SQUARES_TOLERANCE)


def check(library: Library, case: Case, rng: np.random.Generator, ops: Sequence[str] = OPS) -> None:
    for op in ops:
        launch = Launch(op, case, rng)
        launch.check(launch.run(library))


def mixed(rng: np.random.Generator, tensors: int, scale: float = 0.3, values: str = "normal") -> Case:
    """A mix of all sizes, dtypes, alignments and gaps."""
    drawn = []
    for _ in range(tensors):
        size = rng.choice([0, 8, 64, 600, 3300, 20000])
        gap = rng.choice([0, 0, 16, 3000])
        drawn.append(
            Tensor(
                count=int(rng.integers(size + 1)),
                dtype=str(rng.choice(DTYPES)),
                gap=int(rng.integers(gap + 1)),
                shift=int(rng.integers(17)),
            )
        )
    return Case(drawn, str(rng.choice(DTYPES)), int(rng.integers(9)), int(rng.integers(3000)), scale, values)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_one_tensor(library: Library, rng: np.random.Generator, source: str, target: str) -> None:
    for count in (0, 1, 7, 255, 256, 257, 2047, 2048, 2049, BLOCK - 1, BLOCK, BLOCK + 1):
        check(library, Case([Tensor(count, source)], target, scale=0.125), rng)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_misaligned_heads_and_tails(library: Library, rng: np.random.Generator, source: str, target: str) -> None:
    for shift in range(18):
        tensors = [Tensor(1003, source, shift=shift), Tensor(300, source, gap=1), Tensor(1, source, shift=3)]
        check(library, Case(tensors, target, shift=shift // 2, scale=-0.5), rng)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_any_bits_are_cast_as_numpy_casts_them(
    library: Library, rng: np.random.Generator, source: str, target: str
) -> None:
    for scale in (1.0, 0.3):
        check(library, Case([Tensor(3001, source, shift=1)], target, scale=scale, values="bits"), rng)


@pytest.mark.parametrize("largest", [1, 2, 16, 70, 300])
def test_thousands_of_small_tensors(library: Library, rng: np.random.Generator, largest: int) -> None:
    tensors = [
        Tensor(
            count=1 if largest == 1 else int(rng.integers(largest + 1)),
            dtype=str(rng.choice(DTYPES)),
            gap=int(rng.integers(largest)) if rng.integers(4) == 0 else 0,
            shift=int(rng.integers(8)),
        )
        for _ in range(3000 if largest == 1 else 1100)
    ]
    check(library, Case(tensors, str(rng.choice(DTYPES)), shift=1, end_gap=5, scale=-0.5), rng)


@pytest.mark.parametrize("count", [125, 126, 127, 1021, 1022, 1023, 2044, 2045])
def test_table_of_any_length(library: Library, rng: np.random.Generator, count: int) -> None:
    check(library, Case([Tensor(2, "float32")] * count, "bfloat16"), rng)


def test_all_sizes_at_once(library: Library, rng: np.random.Generator) -> None:
    for _ in range(12):
        check(library, mixed(rng, 30), rng)


def test_one_large_tensor_among_small_ones(library: Library, rng: np.random.Generator) -> None:
    small = [Tensor(1, "float16")] * 50
    check(library, Case([*small, Tensor(10 * BLOCK + 17, "float32"), *small], "bfloat16", scale=2.0), rng)


@pytest.mark.parametrize("bucket", DTYPES)
def test_nothing(library: Library, rng: np.random.Generator, bucket: str) -> None:
    for case in (
        Case([], bucket),
        Case([], bucket, end_gap=BLOCK + 5),
        Case([Tensor(0, "float32")] * 40, bucket),
        Case([Tensor(0, "float16", gap=3)] * 40, bucket, shift=1, end_gap=9),
        Case([Tensor(3, "float16"), *[Tensor(0, "float32")] * 300, Tensor(5, "float32")], bucket),
    ):
        check(library, case, rng)


@pytest.mark.parametrize("bucket", DTYPES)
def test_tensors_that_live_in_the_bucket(library: Library, rng: np.random.Generator, bucket: str) -> None:
    for scale in (1.0, 0.25):
        tensors = [
            Tensor(5000, bucket, in_place=True),
            Tensor(3, bucket, gap=2, in_place=True),
            Tensor(20, "float16"),
            Tensor(15000, bucket, gap=1, in_place=True),
        ]
        check(library, Case(tensors, bucket, shift=1, scale=scale), rng)


@pytest.mark.parametrize("bucket", DTYPES)
def test_kept_entries_are_left_alone(library: Library, rng: np.random.Generator, bucket: str) -> None:
    """Long and short entries between others, with gaps, across the ends of blocks, with arbitrary bits."""
    sizes = (5000, 3, 1, 0, 200, BLOCK, 1, 1, 300, 2 * BLOCK + 5, 7)
    for round_ in range(4):
        tensors = [
            Tensor(n, bucket if kept else "float16", gap=int(rng.integers(3)), shift=int(rng.integers(4)), kept=kept)
            for n, kept in ((n, bool(rng.integers(2)) or round_ == 0) for n in sizes)
        ]
        case = Case(tensors, bucket, shift=round_, end_gap=round_, scale=0.5)
        launch = Launch("pack", case, rng)
        for tensor in (stretch for stretch, t in zip(launch.tensors, tensors) if t.kept):
            tensor.of(launch.before)[:] = draw(tensor.count, bucket, "bits", rng)
        launch._expect()
        launch.check(launch.run(library))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("at", [0, 255, 700, 17000])
def test_one_value_that_is_not_finite(library: Library, rng: np.random.Generator, value: float, at: int) -> None:
    for op in OPS:
        for dtype in DTYPES:
            launch = Launch(op, Case([Tensor(256, dtype), Tensor(17001, dtype, gap=1)], dtype), rng)
            source = launch.bucket if op == "unpack" else launch.tensors[at >= 256]
            index = at + (at >= 256) if op == "unpack" else at - 256 * (at >= 256)
            source.of(launch.before)[index] = encode(np.array([value]), dtype)[0]
            launch._expect()
            assert launch.nonfinite
            launch.check(launch.run(library))


def test_statistics_are_of_what_is_stored(library: Library, rng: np.random.Generator) -> None:
    """Finite values whose squares or casts are not finite."""
    big = Case([Tensor(3000, "float32")], "float32", scale=1e30)
    overflowing = Case([Tensor(3000, "float32")], "float16", scale=1e5)
    for case, nonfinite in ((big, False), (overflowing, True)):
        launch = Launch("pack", case, rng)
        assert launch.nonfinite == nonfinite
        outcome = launch.run(library)
        launch.check(outcome)
        assert np.isinf(outcome.stats[0])


def test_float64_is_refused(library: Library, rng: np.random.Generator) -> None:
    launch = Launch("pack", Case([Tensor(3, "float32")]), rng)
    launch.case = replace(launch.case, bucket="float64")
    with pytest.raises(Fault, match="bucket_pack: no CUDA kernel for a bucket of float64; use one of"):
        launch.run(library)
    launch = Launch("stats", Case([Tensor(3, "float32")]), rng)
    launch.tensors = [replace(launch.tensors[0], dtype="float64")]
    with pytest.raises(Fault, match="bucket_stats: no CUDA kernel for a tensor of float64; convert it"):
        launch.run(library)


SCHEDULES: list[dict[str, object]] = [
    {},
    {"threads": 2},
    *({"mode": "lazy", "schedule": "pct", "seed": seed} for seed in range(4)),
]


@pytest.mark.parametrize("op", OPS)
def test_no_schedule_changes_a_bit(library: Library, rng: np.random.Generator, op: str) -> None:
    """The output, the norm and the float64 sums have the same bits with every schedule."""
    launch = Launch(op, mixed(rng, 40), rng)
    first = launch.run(library)
    launch.check(first)
    for options in SCHEDULES:
        with library.options(**options):  # type: ignore[arg-type]
            again = launch.run(library)
        for name in ("arena", "stats", "partial_sums"):
            before, now = getattr(first, name), getattr(again, name)
            np.testing.assert_array_equal(now.view(np.uint8), before.view(np.uint8), f"{name} with {options}")


def test_workspace_needs_no_preparation(library: Library, rng: np.random.Generator) -> None:
    """When a captured graph is replayed, the workspace contains the data of an earlier launch."""
    launch = Launch("pack", mixed(rng, 40), rng)
    first = launch.run(library)
    again = launch.run(library, first.workspace)
    launch.check(again)
    np.testing.assert_array_equal(again.stats, first.stats)


def concurrent_case(rng: np.random.Generator) -> Case:
    """Two blocks and all ways to move data, but small enough for the race checker."""
    sizes = (1, 0, 300, 70, 3, 5000, 2, 9000, 40)
    tensors = [Tensor(n, str(rng.choice(DTYPES)), gap=n % 4, shift=n % 7, in_place=n == 5000) for n in sizes]
    tensors = [replace(t, dtype="bfloat16") if t.in_place else t for t in tensors]
    return Case(tensors, "bfloat16", shift=1, end_gap=BLOCK - 12000, scale=0.5)


@pytest.mark.sampled
@pytest.mark.parametrize("op", OPS)
def test_no_race(hooked: Library, rng: np.random.Generator, op: str) -> None:
    for seed in range(3):
        launch = Launch(op, concurrent_case(rng), rng)
        with hooked.options("lazy", "pct", seed, check_races=True):
            launch.check(launch.run(hooked))


# Synchronisation calls whose removal is not detected, with the reason.
HARMLESS: dict[str, str] = {}


def is_caught(library: Library, launch: Launch, skip: SyncSite) -> bool:
    for seed in range(3):
        with library.options("lazy", "pct", seed, check_races=True, skip=skip):
            try:
                launch.check(launch.run(library))
            except (Fault, AssertionError):
                return True
    return False


@pytest.mark.parametrize(("op", "count"), [("pack", 3), ("pack alone", 1)])
def test_removal_of_any_synchronisation_is_detected(
    hooked: Library, rng: np.random.Generator, op: str, count: int
) -> None:
    hooked.reset()
    launch = Launch(op, concurrent_case(rng), rng)
    launch.run(hooked)
    sites = hooked.sync_sites()
    assert {site.instruction for site in sites} <= {"sync_threads", "atomic_add_acq_rel"}
    assert len(sites) == count
    assert {str(site) for site in sites if not is_caught(hooked, launch, site)} == set(HARMLESS)


# Sizes that fill whole sectors for every dtype. The difference of the two gives the cost per element.
SIZES = ((BLOCK + 1008, BLOCK + 2000), (2 * BLOCK + 1008, 2 * BLOCK + 2000))


def measure(
    library: Library, op: str, source: str, bucket: str, sizes: tuple[int, int], rng: np.random.Generator
) -> dict[str, int]:
    launch = Launch(op, Case([Tensor(size, source) for size in sizes], bucket), rng)
    library.reset()
    launch.check(launch.run(library))
    return {name: count for name, count in library.counters().items() if count > 0}


def moved(op: str, tensors: str, bucket: str, count: int) -> tuple[int, int]:
    """Minimal number of bytes read and written."""
    in_tensors, in_bucket = count * size_of(tensors), count * size_of(bucket)
    return {"unpack": (in_bucket, in_tensors), "stats": (in_tensors, 0)}.get(op, (in_tensors, in_bucket))


def test_kept_entries_move_no_byte(library: Library, rng: np.random.Generator) -> None:
    """Packing kept entries costs only the table and the statistics."""
    for bucket, sizes in itertools.product(DTYPES, SIZES):
        cost = measure(library, "pack", bucket, bucket, sizes, rng)
        kept = Launch("pack", Case([Tensor(size, bucket, kept=True) for size in sizes], bucket), rng)
        library.reset()
        kept.check(kept.run(library))
        data = sum(sizes) * size_of(bucket)
        for way in ("load", "store"):
            cost[f"global_{way}_bytes"] -= data
            cost[f"global_{way}_sectors"] -= data // 32
        assert {name: count for name, count in library.counters().items() if count > 0} == cost


def test_every_byte_is_read_once_and_written_once(library: Library, rng: np.random.Generator) -> None:
    measured = {
        f"{op} {tensors} {bucket} of {sum(sizes)}": measure(library, op, tensors, bucket, sizes, rng)
        for op in OPS
        for tensors, bucket in PAIRS
        for sizes in SIZES
    }
    for op, sizes in itertools.product(OPS, SIZES):
        extra = set()
        for tensors, bucket in PAIRS:
            counters = measured[f"{op} {tensors} {bucket} of {sum(sizes)}"]
            loads, stores = moved(op, tensors, bucket, sum(sizes))
            extra.add(
                (
                    counters["global_load_bytes"] - loads,
                    counters["global_store_bytes"] - stores,
                    counters["global_load_sectors"] - loads // 32,
                    counters["global_store_sectors"] - stores // 32,
                )
            )
        # The rest, table and statistics, does not depend on the size of the data.
        assert len(extra) == 1
        load_bytes, store_bytes, load_sectors, store_sectors = extra.pop()
        assert 0 <= store_bytes <= 256
        assert 0 <= store_sectors <= 32
        assert 0 <= load_sectors <= 0.02 * sum(sizes) * 4 / 32
        assert load_bytes >= 0
    assert_same_cost("bucket", measured)
