"""The replacement of the CUDA runtime passes parameters and refuses what a driver would refuse."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "simt"))
from harness import Fault, Library

HERE = Path(__file__).resolve().parent
CUDA_ERROR_INVALID_VALUE = 1

# Accepted cases, and the configuration they request.
GOOD = {
    "shared_64_kib": "grid (1, 1, 1), 32 threads, 65536 bytes",
    "shared_100_kib": "grid (1, 1, 1), 32 threads, 102400 bytes",
    "shared_grows": "grid (1, 1, 1), 32 threads, 102400 bytes",
    "cooperative": "grid (4, 1, 1), 32 threads, 102400 bytes, cooperative",
    "cluster_of_8": "grid (8, 1, 1), 32 threads, 128 bytes, cluster (8, 1, 1)",
    "cluster_of_16": "grid (16, 1, 1), 32 threads, 128 bytes, cluster (16, 1, 1)",
    "programmatic": "grid (1, 1, 1), 32 threads, 128 bytes, programmatic",
}
REFUSED = {
    "shared_228_kib": "shared_228_kib: needs 233472 bytes of shared memory per block, but device 0 has 232448",
    "shared_49_kib_without_asking": "50176 bytes of shared memory; allowed for this kernel are 49152",
    "threads_33": "33 threads a block; the kernel's launch bound is 32",
    "block_of_two_dimensions": r"a block of \(4, 4, 1\) threads",
    "cooperative_too_large": r"a grid of \(16, 1, 1\) blocks; at most 8 are on the device at once",
    "cluster_of_9": r"a cluster of \(9, 1, 1\) blocks; expected 1 to 8, or up to 16",
    "cluster_of_17": r"a cluster of \(17, 1, 1\) blocks; expected 1 to 16",
    "cluster_that_does_not_divide": r"a cluster of \(2, 1, 1\) blocks does not divide the grid of \(7, 1, 1\)",
}
SM90_ONLY = {
    "cluster_of_8": "clusters need a device of compute capability 9.0",
    "programmatic": "programmatic launches need a device of compute capability 9.0",
    "shared_228_kib": "needs 233472 bytes of shared memory per block, but device 0 has 166912",
}
BAD_MAPS = [
    *("map_of_odd_address", "map_of_odd_stride", "map_of_no_size", "map_of_large_box", "map_of_narrow_box"),
    *("map_of_wide_box", "map_of_steps", "map_in_odd_memory"),
]
STOPPED = {
    "wait_for_nobody": r"deadlock(.|\n)*load_acquire at launches\.cu:\d+, launches-sm_90a\.ptx:\d+ \(32 threads\)",
    "gives_up": r"trap at launches\.cu:\d+, .*: the kernel has given up",
    "shared_too_little": r"copy_kernel: .*128 bytes|outside of the block's 64 bytes",
    "loads_past_the_end": r"load_global at launches\.cu:\d+, .*: there is no memory at global address",
}


def library_for(arch: str) -> Library:
    return Library.build_for(f"ptx_{arch}", "launches", [HERE / "launches.cu"])


@pytest.fixture(scope="module")
def library() -> Library:
    return library_for("sm_90a")


@pytest.fixture(scope="module")
def sm80() -> Library:
    return library_for("sm_80")


@pytest.fixture(scope="module")
def sm75() -> Library:
    return library_for("sm_75")


DATA = np.arange(100, 132, dtype=np.uint32)


def data_of(library: Library, name: str) -> np.ndarray:
    return np.resize(DATA, library.in_bytes(name) // 4)


def test_every_case_is_used(library: Library) -> None:
    names = {*GOOD, *REFUSED, *BAD_MAPS, *STOPPED, "map_good", "map_in_a_new_thread", "parameters"}
    names |= {"wait_that_is_over", "divides_by_zero", "plain_race", "fence_of_one_thread", "no_error_is_left"}
    names |= {"stores_that_lanes_skip"}
    assert set(library.index) == names


def test_parameters_arrive(library: Library) -> None:
    out = library.run("parameters", DATA)
    np.testing.assert_array_equal(out, np.where(np.arange(32) < 9, DATA, 0xFFFFFFFF))


@pytest.mark.parametrize("name", GOOD)
def test_accepted_launches(library: Library, name: str) -> None:
    np.testing.assert_array_equal(library.run(name, DATA), DATA[::-1] + 1)
    last_launch = library.symbol("ptx_last_launch")
    last_launch.restype = ctypes.c_char_p
    requested = last_launch().decode()
    assert requested == GOOD[name], f"the launch requests {requested}"


def test_refused_launches_leave_no_error(library: Library) -> None:
    assert library.run("no_error_is_left", DATA)[0] == 0, "an error remains"


@pytest.mark.parametrize("name", REFUSED)
def test_refused_launches(library: Library, name: str) -> None:
    with pytest.raises(Fault, match=REFUSED[name]):
        library.run(name, data_of(library, name))
    np.testing.assert_array_equal(library.run("shared_100_kib", DATA), DATA[::-1] + 1)


@pytest.mark.parametrize("name", SM90_ONLY)
def test_launches_refused_on_sm_80(sm80: Library, name: str) -> None:
    with pytest.raises(Fault, match=SM90_ONLY[name]):
        sm80.run(name, DATA)


def test_a_block_of_sm_75_may_have_all_shared_memory(sm75: Library) -> None:
    """Later devices keep 1 KiB for each block."""
    np.testing.assert_array_equal(sm75.run("shared_64_kib", DATA), DATA[::-1] + 1)
    with pytest.raises(Fault, match="needs 102400 bytes of shared memory per block, but device 0 has 65536"):
        sm75.run("shared_100_kib", DATA)


def test_tensor_maps(library: Library) -> None:
    def answer(name: str) -> int:
        return int(library.run(name, data_of(library, name))[0])

    assert answer("map_good") == 0
    assert {name: answer(name) for name in BAD_MAPS} == dict.fromkeys(BAD_MAPS, CUDA_ERROR_INVALID_VALUE)


def test_a_new_thread_can_make_a_tensor_map(library: Library) -> None:
    """PyTorch's thread of backward has no context of the device until a call of the runtime makes it current."""
    assert library.run("map_in_a_new_thread", data_of(library, "map_in_a_new_thread"))[0] == 0


@pytest.mark.parametrize("name", STOPPED)
def test_the_emulator_stops_faulty_kernels(library: Library, name: str) -> None:
    with pytest.raises(Fault, match=STOPPED[name]):
        library.run(name, data_of(library, name))


def test_a_wait_for_the_current_value_returns(library: Library) -> None:
    assert (library.run("wait_that_is_over", DATA) == DATA[0]).all()


def test_a_division_by_zero_is_found(library: Library) -> None:
    data = DATA.copy()
    data[2] = 1
    with pytest.raises(Fault, match=r"div at launches\.cu:\d+, .*: a division by zero"):
        library.run("divides_by_zero", data)


def test_accesses_are_counted_by_instruction(library: Library) -> None:
    """Counted by source line, as in the direct emulation, the lanes' first stores would be one access of 8 sectors."""
    library.reset()
    out = library.run("stores_that_lanes_skip", DATA).reshape(4, 32)
    skipped = np.arange(4)[:, None] == np.arange(32) % 4
    np.testing.assert_array_equal(out, np.where(skipped, 0xFFFFFFFF, DATA))
    assert library.counters()["global_store_sectors"] == 4 * 4


@pytest.mark.parametrize("name", ["plain_race", "fence_of_one_thread"])
def test_races_of_plain_accesses_are_found(library: Library, name: str) -> None:
    """The direct emulation needs a compiler's hooks for this."""
    with (
        library.options(mode="lazy", schedule="pct", seed=1, check_races=True),
        pytest.raises(Fault, match=r"race: this (write|read) of .* are not ordered"),
    ):
        library.run(name, data_of(library, name))
