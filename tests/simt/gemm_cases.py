"""The products that the tests of the GEMM kernels compute, and how they compare results."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from gemm_library import POISON, Expected, Gemm, GemmLibrary, decode, dtype_of, encode, expected, place
from harness import Fault, SyncSite

ARITHMETICS = {"float16": ("float16", False), "bfloat16": ("bfloat16", False)}
ARITHMETICS |= {"tf32": ("float32", True), "three_tf32": ("float32", False)}
ARITHMETIC = pytest.mark.parametrize("arithmetic", ARITHMETICS)
LAYOUTS = {"nn": ((0, 1), (0, 1)), "nt": ((0, 1), (1, 0)), "tn": ((1, 0), (0, 1)), "tt": ((1, 0), (1, 0))}
LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)
# Offset of the first element and gap between lines, for alignments of 16, 4 and 2 bytes (float32: 16, 4, 4).
ALIGNMENTS = [(0, 8), (2, 2), (1, 1)]


# The emulated devices. Tests on the second one must use wgmma.
ON_BOTH = pytest.mark.parametrize("device", [80, 90], ids=["sm_80", "sm_90a"], indirect=True)


@pytest.fixture(name="device")
def emulated_device(request: pytest.FixtureRequest) -> int:
    """Compute capability of the emulated device."""
    return int(getattr(request, "param", 80))


@pytest.fixture(scope="session", name="built")
def build_plain() -> GemmLibrary:
    return GemmLibrary.make()


@pytest.fixture(scope="session", name="built_with_hooks")
def build_hooked() -> GemmLibrary:
    return GemmLibrary.make(hooks=True)


@pytest.fixture(name="library")
def plain_library(built: GemmLibrary, device: int, request: pytest.FixtureRequest) -> Iterator[GemmLibrary]:
    yield from on_device(built, device, request)


@pytest.fixture(name="hooked")
def hooked_library(built_with_hooks: GemmLibrary, device: int, request: pytest.FixtureRequest) -> Iterator[GemmLibrary]:
    """The same with hooks for plain loads and stores, which the race checker needs."""
    yield from on_device(built_with_hooks, device, request)


def on_device(library: GemmLibrary, device: int, request: pytest.FixtureRequest) -> Iterator[GemmLibrary]:
    library.reset()
    with library.device(device):
        yield library
    counters = library.counters()
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if device == 90 and counters["blocks"] > 0 and can_use_wgmma(parameters):
        assert counters["wgmma"] > 0, "only the kernel on mma.sync ran"


def can_use_wgmma(parameters: Mapping[str, Any]) -> bool:
    """Whether operands with these parameters of a test are what TMA and wgmma can read."""
    is_k_major = parameters.get("arithmetic") != "tf32" or parameters.get("layout", "nt") == "nt"
    return is_k_major and parameters.get("alignment", 0) == 0 and "three_tf32" not in parameters.values()


def integers(shape: tuple[int, ...], largest: int = 3) -> np.ndarray:
    """Integers so small that every sum here is exact in float32."""
    return np.random.default_rng(random.getrandbits(64)).integers(-largest, largest + 1, shape).astype(np.float32)


def aligned_gap(inner: int, alignment: int) -> int:
    """The gap after lines of `inner` elements that aligns each line."""
    return {0: -inner % 8, 1: inner % 2, 2: 1 - inner % 2}[alignment]


def operands(
    m: int, n: int, k: int, arithmetic: str, layout: str, alignment: int = 0
) -> tuple[np.ndarray, np.ndarray, bool]:
    return place_operands((), (), m, n, k, arithmetic, layout, alignment)


def place_operands(
    batch_a: tuple[int, ...], batch_b: tuple[int, ...], m: int, n: int, k: int, arithmetic: str, layout: str,
    alignment: int = 0,
) -> tuple[np.ndarray, np.ndarray, bool]:  # fmt: skip
    """a (*batch_a, m, k) and b (*batch_b, k, n), batches in reverse order in memory; and whether to round to tf32."""
    dtype, tf32 = ARITHMETICS[arithmetic]

    def one(batch: tuple[int, ...], shape: tuple[int, int], order: tuple[int, int]) -> np.ndarray:
        dims = [*range(len(batch))[::-1], *(len(batch) + i for i in order)]
        gap = aligned_gap(shape[order[1]], alignment)
        return place(integers((*batch, *shape)), dtype, dims, ALIGNMENTS[alignment][0], gap)

    order_a, order_b = LAYOUTS[layout]
    return one(batch_a, (m, k), order_a), one(batch_b, (k, n), order_b), tf32


def assert_exact(call: Gemm, want: Expected | None = None) -> None:
    """Asserts that every output is the exact result, rounded, and that nothing else was written."""
    want = expected(call) if want is None else want
    pairs = [(call.out, want.out), (call.preact_out, want.preact), (call.hidden, want.hidden)]
    pairs.append((call.bias_grad, want.bias_grad))
    for target, values in pairs:
        if target is None:
            continue
        assert values is not None
        with np.errstate(over="ignore"):  # infinite in float16
            rounded = encode(values, dtype_of(target.storage))
        np.testing.assert_array_equal(target.values(), decode(rounded))  # equal numbers, so -0 and 0 are the same


def run_exactly(library: GemmLibrary, call: Gemm) -> None:
    want = expected(call)  # before the launch overwrites what it accumulates into
    library.gemm(call)
    assert_exact(call, want)


def assert_right_in_any_schedule(library: GemmLibrary, case: Case, runs: int, check_races: bool = False) -> None:
    first = random.randrange(2**31)
    for seed in range(first, first + runs):
        with library.options("lazy", "pct", seed, check_races=check_races):
            assert case.is_right(library), seed


def bits_of_outputs(call: Gemm) -> bytes:
    targets = (call.out, call.preact_out, call.hidden, call.bias_grad)
    return b"".join(target.storage.tobytes() for target in targets if target is not None)


def draw_operands(call: Gemm, rng: np.random.Generator) -> None:
    for operand in (call.a, call.b):
        if operand.flags.writeable:  # b of batches is a broadcast array
            operand[...] = encode(rng.normal(size=operand.shape), dtype_of(operand))


def assert_same_bits(library: GemmLibrary, call: Gemm, run: Callable[[GemmLibrary], None]) -> None:
    seen = set()
    for seed, mode, threads in ((0, "eager", 1), (0, "eager", 2), (1, "lazy", 1), (2, "lazy", 2), (3, "lazy", 1)):
        with library.options(mode, "pct" if seed else "fifo", seed, threads=threads):
            run(library)
        seen.add(bits_of_outputs(call))
    assert len(seen) == 1


# The kernels round to float32 after every step; 1e-6 of the largest term is 8 units in its last place.
TOLERANCE = 1e-6


@dataclass
class Case:
    """A product to run again and again, and the plan for wgmma that it must have."""

    make: Callable[[], Gemm]
    plan: dict[str, Any] = field(default_factory=dict)  # arguments of GemmLibrary.restricted

    def __post_init__(self) -> None:
        self.call = self.make()
        self.want = expected(self.call)
        self.added = self.call.c.copy() if self.call.c is not None else None  # c may be the output itself

    def run(self, library: GemmLibrary) -> None:
        for target in (self.call.out, self.call.hidden, self.call.bias_grad):
            if target is not None:
                target.storage.view(np.uint8)[...] = POISON
        if self.call.out is not None and self.call.c is self.call.out.storage:
            self.call.c[...] = self.added
        with library.restricted(**self.plan):
            library.gemm(self.call)

    def is_right(self, library: GemmLibrary) -> bool:
        self.run(library)
        try:
            assert_exact(self.call, self.want)
        except AssertionError:
            return False
        return True


def is_caught(library: GemmLibrary, case: Case, skip: SyncSite, check_races: bool, seeds: Sequence[int]) -> bool:
    """Whether any of the seeds detects the removal of `skip`."""
    for seed in seeds:
        with library.options("lazy", "pct", seed, check_races=check_races, skip=skip):
            try:
                if not case.is_right(library):
                    return True
            except Fault:
                return True
    return False


def undetected_removals(
    library: GemmLibrary, hooked: GemmLibrary, cases: Sequence[Case], harmless: Collection[str] = ()
) -> tuple[list[str], int]:
    """The instructions of the synchronisation calls whose removal no case detects, and how many calls there are.
    Of three seeds; for instructions in `harmless` of one, because a removal that is not detected takes longest."""
    reached: dict[SyncSite, list[Case]] = {}
    for case in cases:
        library.reset()
        with library.options("lazy", "pct", 0):
            case.run(library)
        for site in library.sync_sites():
            reached.setdefault(site, []).append(case)
    survivors = []
    for site, cases_with in reached.items():
        seeds = (1,) if site.instruction in harmless else (1, 2, 3)
        if not any(
            is_caught(built, case, site, check_races, seeds)
            for built, check_races in ((library, False), (hooked, True))
            for case in cases_with
        ):
            survivors.append(site.instruction)
    return sorted(survivors), len(reached)
