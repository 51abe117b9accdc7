"""Invalid memory accesses and launches raise errors that name the operation and its place."""

from __future__ import annotations

import random

import numpy as np
import pytest
from harness import Fault, Library

BAD = {
    "plain_load": r"load or store at planted_memory.cu:\d+: there is no memory at address 0x\w+",
    "plain_store": r"load or store at planted_memory.cu:\d+: there is no memory at address 0x\w+",
    "load_past_the_end": r"load_global at planted_memory.cu:\d+: there is no memory at global address 0x\w+",
    "store_past_the_end": r"store_global at planted_memory.cu:\d+: there is no memory at global address 0x\w+",
    "atomic_past_the_end": r"atomic at planted_memory.cu:\d+: there is no memory at global address 0x\w+",
    "cp_async_past_the_end": r"cp_async at planted_memory.cu:\d+: there is no memory at global address 0x\w+",
    "bulk_load_past_the_end": r"bulk_load at planted_memory.cu:\d+: there is no memory at global address 0x\w+",
    "deep_recursion": r"local variables do not fit on its stack",
    "cluster_of_17": r"a cluster of \(17, 1, 1\) blocks; expected 1 to 16",
    "cluster_of_9": r"a cluster of \(9, 1, 1\) blocks; expected 1 to 8, or up to 16 with nonportable_cluster",
    "cluster_that_does_not_divide": r"a cluster of \(2, 1, 1\) blocks does not divide the grid of \(7, 1, 1\)",
    "too_much_shared_memory": r"233472 bytes of shared memory; a block has at most 232448",
    "map_of_odd_stride": r"a multiple of 16 below 2\^40 for the stride in bytes of dimension 1, got 40",
    "map_of_large_box": r"1 to 256 for the box's size of dimension 1, got 257",
    "map_of_narrow_swizzle": r"rows of the box as long as the swizzle's 128 bytes, got 32",
    "map_of_nothing": r"1 to 2\^32 for the size of dimension 1, got 0",
    "store_to_ragged_rows": r"expected rows of a multiple of 16 bytes in a tensor that is written, got 60",
}


@pytest.fixture(scope="session")
def library() -> Library:
    return Library.build("planted-memory", ["planted_memory.cu"])


def test_every_case_is_listed(library: Library) -> None:
    assert set(library.index) == {*BAD, "good_kernel"}


@pytest.mark.parametrize("mode", ["eager", "lazy"])
@pytest.mark.parametrize("name", sorted(BAD))
def test_is_refused_by_name_and_line(library: Library, name: str, mode: str) -> None:
    data = np.random.default_rng(random.getrandbits(64)).integers(0, 2**32, 64, dtype=np.uint32)
    with library.options(mode), pytest.raises(Fault, match=BAD[name]):
        library.run(name, data)
    assert np.array_equal(library.run("good_kernel", data), data[:32] + 1), "later launches fail"


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
@pytest.mark.parametrize(
    ("capability", "kib"),
    [(75, 64), (86, 99), (87, 163), (89, 99), (90, 227), (100, 227), (103, 227), (120, 99), (121, 99)],
)
def test_the_shared_memory_of_a_block(library: Library, capability: int, kib: int) -> None:
    message = rf"233472 bytes of shared memory; a block has at most {kib * 1024}$"
    with library.options(compute_capability=capability), pytest.raises(Fault, match=message):
        library.run("too_much_shared_memory", np.zeros(64, np.uint32))
