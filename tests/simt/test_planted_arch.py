"""The emulator refuses the instructions that the emulated architecture lacks."""

from __future__ import annotations

import numpy as np
import pytest
from harness import Fault, Library

# A case, the instruction that its error names, and architectures without it.
TURING, AMPERE, LATER = (75,), (86,), (86, 89, 100, 103, 120, 121)
LACKING = {
    "cp_async": ("cp_async", TURING),
    "mma_f16_16_deep": ("mma_m16n8k16", TURING),
    "mma_bf16": ("mma_m16n8k16", TURING),
    "mma_tf32": ("mma_m16n8k8_tf32", TURING),
    "mma_float8": ("mma_m16n8k32", TURING + AMPERE),
    "mbarrier": ("barrier_init", TURING),
    "bulk_copy": ("bulk_store", TURING),
    "wgmma": ("wgmma", TURING + LATER),
    "wgmma_float8": ("wgmma", TURING + LATER),
}


@pytest.fixture(scope="session")
def library() -> Library:
    return Library.build("planted-arch", ["planted_arch.cu"])


def test_every_case_is_listed(library: Library) -> None:
    assert set(library.index) == LACKING.keys()


@pytest.mark.parametrize(
    ("name", "capability"), [(name, capability) for name, (_, archs) in LACKING.items() for capability in archs]
)
def test_an_instruction_that_the_device_lacks(library: Library, name: str, capability: int) -> None:
    message = rf"{LACKING[name][0]} at planted_arch.cu:\d+: sm_{capability} has no such instruction"
    with library.options(compute_capability=capability), pytest.raises(Fault, match=message):
        library.run(name, np.zeros(64, np.uint32))


@pytest.mark.parametrize("name", ["cp_async", "mma_f16_16_deep", "mma_bf16", "mma_tf32", "mma_float8"])
def test_one_that_it_has(library: Library, name: str) -> None:
    for capability in {80, *LATER} - {*LACKING[name][1]}:
        with library.options(compute_capability=capability):
            library.run(name, np.zeros(64, np.uint32))
