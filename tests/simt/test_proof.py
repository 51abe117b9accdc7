"""The Hopper proof kernels on the emulator give exact results for integers in every mode.

test_planted_sm90.py tests that they have no races.
"""

from __future__ import annotations

import functools
import random
import time

import numpy as np
import pytest
from harness import Library
from test_conformance import MODES

GEMMS = ("gemm_f16_128x128", "gemm_bf16_128x256", "gemm_bf16_128x128_cluster", "gemm_f16_128x256_cluster")
# (M, N, K): one element, less than a tile, one tile, more than one, more than 2 * stages K tiles, many tiles.
SIZES = ((1, 1, 8), (127, 65, 56), (128, 256, 64), (129, 257, 72), (64, 128, 584), (300, 520, 136))


# nvcc's code is only for the architecture of the kernels.
every_build = pytest.mark.parametrize(
    "library",
    [pytest.param(kind, marks=getattr(pytest.mark, kind.partition("_")[0])) for kind in ("simt", "ptx_sm_90a")],
    indirect=True,
    scope="session",
)


@functools.cache  # the fixture is set up again whenever pytest changes to another kind
def load(kind: str) -> Library:
    return Library.build_for(kind, "proof", ["proof_gemm.cu", "proof_attention.cu"])


@pytest.fixture(scope="session")
def library(request: pytest.FixtureRequest) -> Library:
    return load(getattr(request, "param", "simt"))


def encode(values: np.ndarray, float16: bool) -> np.ndarray:
    """Integers as 16-bit floats, in bytes padded to a multiple of 256."""
    if float16:
        bits = values.astype(np.float16).view(np.uint16)
    else:
        bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return np.pad(bits.ravel().view(np.uint8), (0, -bits.nbytes % 256))


def pack(sizes: tuple[int, ...], float16: bool, *matrices: np.ndarray) -> np.ndarray:
    head = np.zeros(64, np.int32)
    head[: len(sizes)] = sizes
    return np.concatenate([head.view(np.uint8), *(encode(m, float16) for m in matrices)])


def check_gemm(library: Library, name: str, size: tuple[int, int, int], rng: np.random.Generator) -> None:
    m, n, k = size
    a = rng.integers(-8, 9, (m, k)).astype(np.float32)
    b = rng.integers(-8, 9, (n, k)).astype(np.float32)
    out = library.run(name, pack(size, "_f16" in name, a, b), out_bytes=m * n * 4)
    np.testing.assert_array_equal(out.view(np.float32).reshape(m, n), a @ b.T)


@pytest.mark.sampled(cases="every value")
@pytest.mark.parametrize("options", MODES, ids=lambda o: "-".join(map(str, o.values())))
@pytest.mark.parametrize("name", GEMMS)
@every_build
def test_gemm_is_exact(library: Library, name: str, options: dict[str, object]) -> None:
    rng = np.random.default_rng(random.getrandbits(64))
    for size in SIZES:
        with library.options(**options):  # type: ignore[arg-type]
            check_gemm(library, name, size, rng)


def check_attention(library: Library, sizes: tuple[int, int], rng: np.random.Generator) -> None:
    queries, keys = sizes
    q = rng.integers(-1, 2, (queries, 128)).astype(np.float32)
    k = rng.integers(-1, 2, (keys, 128)).astype(np.float32)
    v = rng.integers(-4, 5, (keys, 128)).astype(np.float32)
    out = library.run("attention", pack(sizes, False, q, k, v), out_bytes=queries * 128 * 4)
    np.testing.assert_array_equal(out.view(np.float32).reshape(queries, 128), np.maximum(q @ k.T, 0) @ v)


@pytest.mark.parametrize("options", MODES, ids=lambda o: "-".join(map(str, o.values())))
@every_build
def test_attention_is_exact(library: Library, options: dict[str, object]) -> None:
    rng = np.random.default_rng(random.getrandbits(64))
    for sizes in ((1, 1), (64, 64), (128, 65), (130, 63), (200, 320)):
        with library.options(**options):  # type: ignore[arg-type]
            check_attention(library, sizes, rng)


def test_gemm_is_fast(library: Library) -> None:
    """An emulated 512^3 takes about 0.02 s on one core; ten times that would make tests of real kernels too slow."""
    best = 1e9
    data = pack((512, 512, 512), False, np.ones((512, 512)), np.ones((512, 512)))
    for _ in range(3):
        start = time.process_time()
        library.run("gemm_bf16_128x256", data, out_bytes=512 * 512 * 4)
        best = min(best, time.process_time() - start)
    assert best < 0.4, f"512^3 took {best:.3f} s"
