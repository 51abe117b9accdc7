"""The emulator detects the bugs planted in planted.cu, and the removal of any synchronisation call."""

from __future__ import annotations

import random

import numpy as np
import pytest
from harness import HERE, Fault, Library, SyncSite, plain_and_hooked

KERNELS = ("pipeline", "last_block")
SEEDS = (1, 2, 3)
# Only the race checker finds these: blocks run one after the other here, and the emulator has no read-only cache.
NEEDS_CHECKER = {"kRelaxedArrival", "kNoBlockBarrierBeforeArrival", "kPlainCounter", "kReadOnlyLoadOfPartials"}
library, hooked = plain_and_hooked("planted", ["planted.cu"])


def kernel_of(library: Library, name: str) -> str:
    return next(kernel for kernel in KERNELS if library.in_bytes(kernel) == library.in_bytes(name))


def inputs(library: Library, kernel: str, rng: np.random.Generator) -> np.ndarray:
    words = library.in_bytes(kernel) // 4
    if kernel == "last_block":
        return rng.integers(0, 2**32, words, dtype=np.uint32)
    values = rng.integers(-8, 9, 2 * words).astype(np.float32)  # small integers: sums are exact
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint32)


def expected(kernel: str, data: np.ndarray) -> np.ndarray:
    if kernel == "last_block":
        return (data.reshape(4, 64) * np.arange(1, 65, dtype=np.uint32)).sum(0, dtype=np.uint32)
    values = (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    a, b = values[: 32 * 128].reshape(32, 128), values[32 * 128 :].reshape(128, 8)
    out = a @ b
    out[16:] += out[:16].sum(0)
    return out.astype(np.float32).view(np.uint32).ravel()


def is_right(library: Library, name: str, data: np.ndarray, kernel: str) -> bool:
    want = expected(kernel, data)
    return np.array_equal(library.run(name, data)[: want.size], want)


def is_caught(library: Library, name: str, skip: SyncSite | None = None, check_races: bool = False) -> list[bool]:
    """For each seed, whether the bug was detected."""
    kernel = kernel_of(library, name)
    data = inputs(library, kernel, np.random.default_rng(0))
    caught = []
    for seed in SEEDS:
        with library.options("lazy", "pct", seed, check_races=check_races, skip=skip):
            try:
                caught.append(not is_right(library, name, data, kernel))
            except Fault:
                caught.append(True)
    return caught


def bugs() -> list[str]:
    source = (HERE / "planted.cu").read_text()
    listed = source[source.index("enum Bug") : source.index("};", source.index("enum Bug"))]
    names = [word.strip(" ,\n").split(" ")[0] for word in listed.split("\n") if word.strip().startswith("k")]
    return [name for name in names if name not in ("kNone", "kNumPipelineBugs", "kNumBugs") and "Num" not in name]


def assert_no_alarm(library: Library, kernel: str, seeds: int, check_races: bool) -> None:
    rng = np.random.default_rng(random.getrandbits(64))
    for seed in range(seeds):
        for mode in ("eager", "lazy"):
            data = inputs(library, kernel, rng)
            with library.options(mode, "pct", seed, check_races=check_races):
                assert is_right(library, kernel, data, kernel), (mode, seed)


@pytest.mark.parametrize("kernel", KERNELS)
def test_correct_kernels_raise_no_alarm(library: Library, hooked: Library, kernel: str) -> None:
    assert_no_alarm(library, kernel, 100, check_races=False)
    assert_no_alarm(hooked, kernel, 100, check_races=True)


def test_every_bug_is_registered(library: Library) -> None:
    assert set(library.index) == {*KERNELS, *bugs(), "kRelaxedArrival"}


@pytest.mark.parametrize("bug", bugs())
def test_planted_bug_is_caught(library: Library, hooked: Library, bug: str) -> None:
    if bug not in NEEDS_CHECKER:
        assert any(is_caught(library, bug)), "no wrong result, fault or deadlock"
    assert all(is_caught(hooked, bug, check_races=True)), "not detected by the race checker"


# Synchronisation calls whose removal is not detected, with the reason.
HARMLESS: dict[str, str] = {}


def test_removal_of_any_synchronisation_is_detected(library: Library, hooked: Library) -> None:
    library.reset()
    for kernel in KERNELS:
        data = inputs(library, kernel, np.random.default_rng(0))
        with library.options("lazy", "pct", 0):
            library.run(kernel, data)
    sites = library.sync_sites()
    assert len(sites) >= 9
    survivors = {
        str(site)
        for site in sites
        if not any(
            any(is_caught(library, kernel, site)) or any(is_caught(hooked, kernel, site, check_races=True))
            for kernel in KERNELS
        )
    }
    assert survivors == set(HARMLESS)


def test_a_read_only_load_of_written_memory_is_reported(hooked: Library) -> None:
    data = inputs(hooked, "last_block", np.random.default_rng(0))
    message = (
        r"load_global at planted.cu:\d+: .* is read through the read-only path, and written .*; see store_global at"
    )
    with hooked.options(check_races=True), pytest.raises(Fault, match=message):
        hooked.run("kReadOnlyLoadOfPartials", data)


def test_a_deadlock_lists_the_waiting_threads(library: Library) -> None:
    data = inputs(library, "pipeline", np.random.default_rng(0))
    with pytest.raises(Fault, match=r"deadlock(.|\n)*warp  1: named_barrier at planted.cu:\d+: barrier 1 has 32 of 64"):
        library.run("kBarrierNobodyElseComesTo", data)


def test_race_names_both_accesses(hooked: Library) -> None:
    data = inputs(hooked, "pipeline", np.random.default_rng(0))
    message = (
        r"pipeline: block \(0, 0, 0\), thread \d+ .*race: this .* of shared address 0x\w+ and the .* by thread \d+"
    )
    with hooked.options(check_races=True), pytest.raises(Fault, match=message):
        hooked.run("kNoBarrierBeforeReading", data)
