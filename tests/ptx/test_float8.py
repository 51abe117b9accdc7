"""nvcc's products of 8-bit floats have the bits of the direct emulation for any elements, infinities and NaNs too."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "simt"))
import conformance_wgmma
import test_conformance as conformance

CASES = (*conformance.FLOAT8_MMA, *conformance_wgmma.FLOAT8)


@pytest.mark.parametrize("name", CASES)
def test_bits_equal_those_of_the_direct_emulation(name: str) -> None:
    direct, nvccs = conformance.load("simt"), conformance.load("ptx_sm_90a")
    rng = np.random.default_rng(random.getrandbits(64))
    for special in (0, 3):  # how many of the elements may be infinities and NaNs
        data = conformance.any_float8(name, direct, rng)
        data.view(np.uint8)[rng.integers(0, 192 * 4, special)] = rng.integers(0, 256, special) | 0x7C
        expected, got = direct.run(name, data), nvccs.run(name, data)
        np.testing.assert_array_equal(got.view(np.float32), expected.view(np.float32))
