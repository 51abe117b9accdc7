"""nvcc's code of the GEMM on wgmma, under the plans of tests/simt/test_gemm_sm90.py: exact, without races, and with the
bits of the direct emulation; bfloat16 in every layout, float16 and tf32 along k. With --full."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ptx import build, kernels

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "simt"))
from gemm_cases import LAYOUTS, TOLERANCE, Case, bits_of_outputs, draw_operands, operands
from gemm_library import Gemm, GemmLibrary, Target, expected, place
from test_gemm_sm90 import CONFIGS, EPILOGUES, is_legal, sizes

pytestmark = pytest.mark.sampled(full=True)  # needs kernels for sm_90a


@pytest.fixture(scope="module")
def direct() -> Iterator[GemmLibrary]:
    library = GemmLibrary.make()
    with library.device(90):
        yield library


@pytest.fixture(scope="module")
def compiled() -> Iterator[GemmLibrary]:
    if build.find_toolkit() is None:
        pytest.skip(build.NO_NVCC)
    sources = [path for path in kernels.sources(False, "sm_90a") if "gemm" in path.parts]
    sources += [
        kernels._emulator.CSRC / "gemm/instantiations" / f"gemm_sm90_{dtype}_kk.cu" for dtype in ("f16", "tf32")
    ]
    others = [(kernels.SIMT / name, ()) for name in ("library.cpp", "gemm_kernels.cu")]
    library = GemmLibrary(build.build_library("gemm-sm_90a", sources, others, arch="sm_90a", stubs=True))
    with library.device(90):
        yield library


def random_plan(config: str, epilogue: str) -> tuple[Gemm, dict[str, int]]:
    """A legal product, and the plan it must have."""
    tile = CONFIGS[config]
    while True:
        cluster, k_blocks = random.choice((1, 2)), random.randint(1, tile.k_blocks)
        splits = random.choice((1, 2, 3)) if k_blocks == 1 else 1
        m, n, k = sizes(tile, k_blocks * splits, "bfloat16", False)
        call = EPILOGUES[epilogue](m, n, k, "bfloat16", random.choice(tuple(LAYOUTS)))
        if is_legal(tile, cluster, call, k_blocks):
            return call, {"config": tile.index, "cluster": cluster, "k_blocks": k_blocks, "splits": splits}


def outputs(library: GemmLibrary, case: Case) -> bytes:
    case.run(library)
    return bits_of_outputs(case.call)


# The tile that leaves registers only for the epilogue through TMA has no others.
THROUGH_TMA = ("product", "to_float32", "bias_and_activation", "with_preact", "batches", "reduced_batches")
TESTED = [(c, e) for c in CONFIGS for e in EPILOGUES if e in THROUGH_TMA or not CONFIGS[c].tma_only]


@pytest.mark.parametrize(("config", "epilogue"), TESTED)
def test_exact_without_races_and_with_the_same_bits(
    compiled: GemmLibrary, direct: GemmLibrary, config: str, epilogue: str
) -> None:
    call, plan = random_plan(config, epilogue)
    case, seed = Case(lambda: call, plan), random.randrange(2**31)
    for mode, schedule in (("eager", "fifo"), ("lazy", "pct")):
        with compiled.options(mode, schedule, seed, check_races=True):
            assert case.is_right(compiled), (mode, plan)
    draw_operands(call, np.random.default_rng(seed))
    expected = outputs(direct, case)
    for mode, schedule in (("eager", "fifo"), ("lazy", "pct")):
        with compiled.options(mode, schedule, seed):
            assert outputs(compiled, case) == expected, (mode, plan)


@pytest.mark.parametrize("arithmetic", ["float16", "tf32"])
@pytest.mark.parametrize("config", CONFIGS)
def test_activations_without_races(compiled: GemmLibrary, config: str, arithmetic: str) -> None:
    """Of other dtypes; nvcc's erf and exp differ from the direct emulation's in the last bit."""
    tile = CONFIGS[config]
    m = random.randint(1, tile.block_n) if tile.swapped else random.randint(1, 150)
    a, b, tf32 = operands(m, 72, 8 * random.randint(2, 40), arithmetic, "nt")
    bias = place(np.random.default_rng(random.getrandbits(64)).normal(size=(72,)), "float32")
    with compiled.options("lazy", "pct", random.randrange(2**31), check_races=True):
        for activation in ("gelu", "silu"):
            call = Gemm(a, b, Target((m, 72), "float32"), tf32=tf32, activation=activation, alpha=0.0123, bias=bias)
            with compiled.restricted(tile.index, k_blocks=min(2, tile.k_blocks)):
                compiled.gemm(call)
            want = expected(call).out
            np.testing.assert_allclose(call.out.values(), want, rtol=0, atol=TOLERANCE * np.abs(want).max())
