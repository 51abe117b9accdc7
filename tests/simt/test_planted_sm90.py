"""The emulator detects bugs with the instructions of sm_90a.

They are planted in the proof kernels; the removal of any of their synchronisation calls is detected too.
"""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from harness import HERE, Fault, Library, SyncSite, plain_and_hooked

SEEDS = (1, 2, 3)
GEMM = (128, 128, 584)  # as in planted_sm90.cu
ATTENTION = (100, 310)
KERNELS = ("gemm", "cluster_gemm", "attention")
# These do not change a result on the emulator; only the race checker detects the missing order.
NEEDS_CHECKER = {
    "kNoBarrierInitFence": "barriers are known to all at once here",
    "kWaitsAtBlockScope": "waits see everything here",
    "kNoBlockSyncAfterInit": "the consumers get their registers only after the first thread has gone on",
    "kNoBarrierAfterQ": "the product begins when the whole warpgroup has come to it",
    "kNoProxyFenceAfterQ": "there is one view of shared memory here",
    "kNoProxyFenceBeforeStore": "there is one view of shared memory here",
}
library, hooked = plain_and_hooked("planted-sm90", ["planted_sm90.cu"])


def to_bits(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).ravel()


def problem(library: Library, name: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Integer inputs for the case, and the exact output."""
    rng = np.random.default_rng(seed)
    if library.in_bytes(name) == library.in_bytes("gemm"):
        m, n, k = GEMM
        a, b = rng.integers(-8, 9, (m, k)), rng.integers(-8, 9, (n, k))
        return np.concatenate([to_bits(a), to_bits(b)]).view(np.uint32), a @ b.T
    queries, keys = ATTENTION
    q, k2 = rng.integers(-1, 2, (queries, 128)), rng.integers(-1, 2, (keys, 128))
    v = rng.integers(-4, 5, (keys, 128))
    return np.concatenate([to_bits(q), to_bits(k2), to_bits(v)]).view(np.uint32), np.maximum(q @ k2.T, 0) @ v


def is_right(library: Library, name: str, seed: int) -> bool:
    data, want = problem(library, name, seed)
    return np.array_equal(library.run(name, data).view(np.float32), want.ravel().astype(np.float32))


def is_caught(library: Library, name: str, seed: int, check_races: bool = False, skip: SyncSite | None = None) -> bool:
    with library.options("lazy", "pct", seed, check_races=check_races, skip=skip):
        try:
            return not is_right(library, name, seed)
        except Fault:
            return True


def bugs() -> list[str]:
    names = []
    for file, enum in (("proof_gemm.cuh", "GemmBug"), ("proof_attention.cuh", "AttentionBug")):
        text = (HERE / file).read_text()
        listed = re.search(rf"enum {enum} {{(.*?)}};", text, re.DOTALL)
        assert listed is not None
        names += re.findall(r"k\w+", listed[1])[1:-1]  # without the first, "none", and the last, their number
    return names


def test_every_bug_is_registered(library: Library) -> None:
    assert set(library.index) == {*KERNELS, *bugs()}


@pytest.mark.sampled
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("check_races", [False, True], ids=["plain", "checked"])
def test_correct_kernels_raise_no_alarm(library: Library, hooked: Library, kernel: str, check_races: bool) -> None:
    first = random.randrange(2**31)
    for seed in range(first, first + 30):
        with (hooked if check_races else library).options("lazy" if seed % 2 else "eager", "pct", seed, check_races):
            assert is_right(hooked if check_races else library, kernel, seed)


@pytest.mark.parametrize("bug", bugs())
def test_planted_bug_is_caught(library: Library, hooked: Library, bug: str) -> None:
    if bug not in NEEDS_CHECKER:
        assert any(is_caught(library, bug, seed) for seed in SEEDS), "no wrong result, fault or deadlock"
    assert all(is_caught(hooked, bug, seed, check_races=True) for seed in SEEDS), "not detected by the race checker"


# Synchronisation calls whose removal is not detected, with the reason.
HARMLESS: dict[str, str] = {}


@pytest.mark.parametrize("kernel", KERNELS)
def test_removal_of_any_synchronisation_is_detected(library: Library, hooked: Library, kernel: str) -> None:
    library.reset()
    with library.options("lazy", "pct", 0):
        assert is_right(library, kernel, 0)
    sites = library.sync_sites()
    assert len(sites) >= 10
    survivors = {
        str(site)
        for site in sites
        if not any(is_caught(library, kernel, seed, skip=site) for seed in SEEDS)
        and not any(is_caught(hooked, kernel, seed, check_races=True, skip=site) for seed in SEEDS)
    }
    assert survivors == {site for site in HARMLESS if site in map(str, sites)}


def message(library: Library, name: str, check_races: bool = False) -> str:
    with library.options("lazy", "pct", SEEDS[0], check_races), pytest.raises(Fault) as caught:
        is_right(library, name, 0)
    return str(caught.value)


def test_a_deadlock_lists_the_missing_arrivals(library: Library) -> None:
    table = message(library, "kAnnouncesTooManyBytes")
    row = r"barrier_wait at proof_gemm.cuh:\d+: barrier 0x\w+ in phase 0, waits for the end of parity 0; "
    assert re.search(row + r"0 of 1 arrivals and 16 bytes are missing \(32 threads\)", table)
    table = message(library, "kReleasesItsOwnBlockOnly")
    assert re.search(r"barrier_wait_cluster at proof_gemm.cuh:\d+: barrier 0x\w+ in phase 0, .*2 of 4 arrivals", table)
    assert re.search(r"cluster_wait at proof_gemm.cuh:\d+: \d+ of 768 threads of the cluster have arrived", table)


def test_race_names_the_engines_and_the_block(hooked: Library) -> None:
    early = (
        r"tma_load at proof_gemm.cuh:\d+: race: this write of shared address 0x\w+ and the read by thread \d+ of this"
    )
    assert re.search(
        early + r" block, wgmma at proof_gemm.cuh:\d+, are not ordered", message(hooked, "kReleasesBeforeTheWait", True)
    )
    remote = r"tma_load_multicast at .*shared address 0x\w+ in block \(0, 0, 0\)"
    assert re.search(remote, message(hooked, "kWaitsAtBlockScope", True))
