"""Tests of the GEMM kernels and the activation gradient that need direct access to the kernels: layouts, alignments,
bytes next to the outputs, schedules, races, removed synchronisation, and counters."""

from __future__ import annotations

import itertools
import random
import re

import numpy as np
import pytest
from cost import assert_same_cost
from gemm_cases import (  # noqa: F401
    ALIGNMENTS,
    ARITHMETIC,
    ARITHMETICS,
    LAYOUT,
    LAYOUTS,
    ON_BOTH,
    TOLERANCE,
    Case,
    assert_exact,
    assert_right_in_any_schedule,
    assert_same_bits,
    build_hooked,
    build_plain,
    emulated_device,
    hooked_library,
    integers,
    operands,
    plain_library,
    run_exactly,
    undetected_removals,
)
from gemm_library import ACTIVATIONS, Expected, Gemm, GemmLibrary, Target, encode, expected, place
from harness import Fault

# m, n, k: 1, a tile, one more and one less, primes, several tiles and a remainder. With the 4 SMs of the emulator they
# use all tile shapes, with and without a split of k.
SHAPES = [
    (1, 1, 1),
    (7, 9, 0),
    (1, 130, 67),
    (63, 65, 33),
    (64, 64, 64),
    (65, 63, 31),
    (128, 128, 32),
    (131, 131, 131),
    (127, 257, 65),
    (129, 520, 129),
    (200, 1032, 104),
    (250, 500, 65),
    (67, 133, 7),
    (5, 3, 2300),
]


@pytest.mark.sampled(cases=12)
@ON_BOTH
@ARITHMETIC
@LAYOUT
def test_any_shape_layout_and_alignment_is_exact(library: GemmLibrary, arithmetic: str, layout: str) -> None:
    for i, (m, n, k) in enumerate(SHAPES):
        alignment = i % 3
        a, b, tf32 = operands(m, n, k, arithmetic, layout, alignment)
        call = Gemm(a, b, Target((m, n), "float32", ALIGNMENTS[alignment][0]), tf32=tf32)
        run_exactly(library, call)


@ON_BOTH
@pytest.mark.parametrize("alignment", range(3))
@ARITHMETIC
def test_alignments_of_one_shape(library: GemmLibrary, arithmetic: str, alignment: int) -> None:
    for layout in LAYOUTS:
        a, b, tf32 = operands(67, 131, 77, arithmetic, layout, alignment)
        call = Gemm(a, b, Target((67, 131), "bfloat16", 1), tf32=tf32)
        run_exactly(library, call)


def test_the_shapes_use_every_tile_and_a_split(library: GemmLibrary) -> None:
    choices = [library.choice(m, n, k, 80, 4) for m, n, k in SHAPES]
    assert {choice[:2] for choice in choices} == {(128, 256), (128, 128), (64, 64)}
    assert any(choice[3] > 1 for choice in choices) and any(choice[3] == 1 for choice in choices)


@ON_BOTH
def test_empty_outputs_launch_nothing(library: GemmLibrary) -> None:
    library.reset()
    for m, n in ((0, 5), (5, 0)):
        library.gemm(
            Gemm(place(integers((m, 3)), "bfloat16"), place(integers((3, n)), "bfloat16"), Target((m, n), "float32"))
        )
    assert library.counters()["blocks"] == 0


@ON_BOTH
@ARITHMETIC
def test_batches_broadcasts_and_single_lines(library: GemmLibrary, arithmetic: str) -> None:
    dtype, tf32 = ARITHMETICS[arithmetic]
    m, n, k = 33, 40, 48
    a = place(integers((3, 2, m, k)), dtype, (1, 0, 2, 3))  # batches in another order in memory
    b = place(integers((2, k, n)), dtype, (0, 2, 1))
    for right in (np.broadcast_to(b, (3, 2, k, n)), np.broadcast_to(b[:1, :, :1], (3, 2, k, n))):
        call = Gemm(a, right, Target((3, 2, m, n), "float32"), tf32=tf32)
        call.c = np.broadcast_to(place(integers((m, 1)), "float16"), (3, 2, m, n))
        call.residual = place(integers((3, 2, m, n)), "bfloat16", (3, 0, 1, 2))
        run_exactly(library, call)
    # The stride of a dim of size 1 is irrelevant.
    column = place(integers((k, 3)), dtype)[:, :1]
    call = Gemm(a[0, 0], column, Target((m, 1), "float32"), tf32=tf32)
    run_exactly(library, call)


@ARITHMETIC
def test_sums_over_reduced_dims(library: GemmLibrary, arithmetic: str) -> None:
    dtype, tf32 = ARITHMETICS[arithmetic]
    m, n, k = 24, 136, 40
    a = place(integers((3, 2, 5, 2, m, k)), dtype, (2, 0, 1, 3, 5, 4))
    b = place(integers((3, 2, 1, 2, k, n)), dtype)
    call = Gemm(a, np.broadcast_to(b, (3, 2, 5, 2, k, n)), Target((2, m, n), "float32"), reduced_dims=3, tf32=tf32)
    run_exactly(library, call)


@ON_BOTH
def test_a_split_begins_in_the_middle_of_a_product(library: GemmLibrary) -> None:
    a, b = place(integers((5, 4, 20, 136)), "bfloat16"), place(integers((5, 4, 136, 24)), "bfloat16", (1, 0, 2, 3))
    call = Gemm(a, b, Target((20, 24), "float32"), reduced_dims=2)
    library.reset()
    run_exactly(library, call)
    assert library.counters()["blocks"] > 1  # of one tile


@ON_BOTH
@pytest.mark.parametrize("shape", [(70, 72, 40), (130, 260, 33), (20, 20, 2400)])
def test_terms_of_the_forward_epilogue(library: GemmLibrary, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b, _ = operands(m, n, k, "bfloat16", "nt")
    for out_dtype, with_c, with_bias, with_residual in itertools.product(
        ("float32", "float16"), (False, True), (False, True), (False, True)
    ):
        call = Gemm(a, b, Target((m, n), out_dtype, 1), alpha=0.5, beta=-2.0, activation="relu")
        call.preact_out = Target((m, n), "float32")
        if with_c:
            call.c = place(integers((m, n)), "bfloat16", (1, 0), 1)
        if with_bias:
            call.bias = place(integers((n,)), "float16", offset=3)
        if with_residual:
            call.residual = place(integers((m, n)), "float32", gap=1)
        run_exactly(library, call)


@ON_BOTH
@pytest.mark.parametrize("layout", ["nn", "nt"])
@pytest.mark.parametrize("arithmetic", ["bfloat16", "three_tf32"])
def test_gated_product(library: GemmLibrary, arithmetic: str, layout: str) -> None:
    for m, n, k, alignment in ((70, 72, 40, 0), (130, 129, 33, 1), (3, 1, 9, 0), (20, 20, 2400, 2), (257, 300, 16, 0)):
        a, b, tf32 = operands(m, 2 * n, k, arithmetic, layout, alignment)
        call = Gemm(a, b, Target((m, n), "float32"), n=n, gated=True, activation="relu", tf32=tf32)
        call.bias = place(integers((2 * n,)), "float32")
        call.preact_out = Target((m, 2 * n), "bfloat16" if k < 16 else "float32", 1)
        run_exactly(library, call)


@ON_BOTH
@pytest.mark.parametrize("gated", [False, True])
def test_backward_epilogue(library: GemmLibrary, gated: bool) -> None:
    for m, n, k, alignment in ((70, 72, 40, 0), (130, 129, 33, 1), (20, 20, 2400, 2), (257, 300, 16, 0)):
        a, b, _ = operands(m, n, k, "bfloat16", "nn", alignment)
        parts = 2 if gated else 1
        call = Gemm(a, b, Target((m, parts * n), "float32", 1), activation="relu", gated=gated, alpha=0.5)
        call.preact = place(integers((m, parts * n)), "bfloat16", offset=1, gap=1)
        call.hidden = Target((m, n), "float16")
        call.bias_grad = Target((parts * n,), "float32", 1)
        run_exactly(library, call)


@ON_BOTH
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True])
def test_activations_forward_and_backward(library: GemmLibrary, activation: str, gated: bool) -> None:
    m, n, k = 40, 72, 16
    parts = 2 if gated else 1
    rng = np.random.default_rng(random.getrandbits(64))
    a, b = place(rng.normal(size=(m, k)), "float16"), place(rng.normal(size=(k, parts * n)), "float16")
    call = Gemm(a, b, Target((m, n), "float32"), n=n, activation=activation, gated=gated)
    library.gemm(call)
    want = expected(call).out
    np.testing.assert_allclose(call.out.values(), want, rtol=0, atol=TOLERANCE * np.abs(want).max())

    call = Gemm(a, b[:, :n], Target((m, parts * n), "float32"), activation=activation, gated=gated)
    call.preact = place(rng.normal(size=(m, parts * n), scale=3), "float32")
    call.hidden, call.bias_grad = Target((m, n), "float32"), Target((parts * n,), "float32")
    library.gemm(call)
    wanted = expected(call)
    for target, values in ((call.out, wanted.out), (call.hidden, wanted.hidden), (call.bias_grad, wanted.bias_grad)):
        assert target is not None and values is not None
        np.testing.assert_allclose(target.values(), values, rtol=0, atol=2 * TOLERANCE * np.abs(values).max())


@ON_BOTH
@pytest.mark.parametrize("shape", [(70, 133, 40), (1, 7, 65), (250, 500, 65), (20, 20, 2400)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_accumulates_into_the_output_itself(library: GemmLibrary, dtype: str, shape: tuple[int, int, int]) -> None:
    """Tests every width of loads and stores, and a split of k."""
    m, n, k = shape
    a, b, _ = operands(m, n, k, "bfloat16", "tn")
    for offset in range(3):
        out = Target((m, n), dtype, offset)
        out.storage[...] = encode(integers((m, n)), dtype)
        call = Gemm(a, b, out, c=out.storage, alpha=0.5, beta=-2.0)
        run_exactly(library, call)


def test_three_tf32_products_are_as_good_as_float32(library: GemmLibrary) -> None:
    m, n, k = 64, 64, 512
    rng = np.random.default_rng(random.getrandbits(64))
    a, b = place(rng.normal(size=(m, k)), "float32"), place(rng.normal(size=(k, n)), "float32")
    in_float32 = np.zeros((m, n), np.float32)
    for i in range(k):
        in_float32 += a[:, i, None] * b[i]
    errors = []
    for tf32 in (False, True):
        call = Gemm(a, b, Target((m, n), "float32"), tf32=tf32)
        library.gemm(call)
        errors.append(np.abs(call.out.values() - expected(call).out).max())
    # Three times as many additions, and products with an error of 2^-22 instead of 2^-24 (tf32: 2^-12).
    float32_error = np.abs(in_float32 - expected(call).out).max()
    assert errors[0] < 4 * float32_error
    assert 20 * float32_error < errors[1] < 2000 * float32_error


def float32_product(library: GemmLibrary, a: np.ndarray, b: np.ndarray, tf32: bool = False) -> np.ndarray:
    call = Gemm(place(a, "float32"), place(b, "float32"), Target((a.shape[0], b.shape[1]), "float32"), tf32=tf32)
    library.gemm(call)
    return call.out.values()


@pytest.mark.parametrize("k", [1, 2, 3, 4, 8, 9, 40])
def test_three_tf32_products_of_a_short_sum(library: GemmLibrary, k: int) -> None:
    """The bound in units in the last place is half a unit per term; beyond 8 terms, 4 plus half a unit per 8 terms."""
    rng = np.random.default_rng(random.getrandbits(64))
    a, b = rng.normal(size=(70, k)).astype(np.float32), rng.normal(size=(k, 72)).astype(np.float32)
    out, exact = float32_product(library, a, b), a.astype(np.float64) @ b.astype(np.float64)
    if k == 1:
        np.testing.assert_array_equal(out, a * b)
    bound = 0.5 * k if k <= 8 else 4.0 + 0.5 * k / 8
    assert (np.abs(out - exact) <= bound * 2.0**-23 * (np.abs(a).astype(np.float64) @ np.abs(b))).all()


@pytest.mark.parametrize("size", [1e-34, 1e-36, 1e-37])
def test_three_tf32_products_of_tiny_numbers(library: GemmLibrary, size: float) -> None:
    rng = np.random.default_rng(random.getrandbits(64))
    a, b = (size * rng.uniform(1, 2, (40, 24))).astype(np.float32), rng.uniform(1, 2, (24, 40)).astype(np.float32)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    for out in (float32_product(library, a, b), float32_product(library, b.T, a.T).T):
        np.testing.assert_allclose(out, exact, rtol=2.0**-21)


SPECIAL = [0.0, 1.0, -0.5, np.inf, -np.inf, np.nan, 3.4028234e38, -3.4028234e38, 1.2345678e38, 2.0, 1e-40, 1e-45]


@pytest.mark.parametrize("k", [1, 9, 40])
def test_special_float32_numbers(library: GemmLibrary, k: int) -> None:
    """All pairs, each alone in its sum, give the float32 product, including overflow and all bits of subnormals."""
    a, b = np.zeros((len(SPECIAL), k), np.float32), np.zeros((k, len(SPECIAL)), np.float32)
    a[:, k // 2] = b[k // 2] = SPECIAL
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        want = np.multiply.outer(a[:, k // 2], b[k // 2])
    finite = np.isfinite(want)
    out = float32_product(library, a, b)
    np.testing.assert_array_equal(out[~finite], want[~finite])
    larger = np.maximum.outer(np.abs(a[:, k // 2]), np.abs(b[k // 2])).astype(np.float64)
    error = np.abs(out[finite].astype(np.float64) - want[finite])
    assert (error <= 2.0**-21 * np.abs(want[finite]) + 2.0**-149 * (1 + larger[finite])).all()
    once = float32_product(library, a, np.eye(k, dtype=np.float32), tf32=True)[:, k // 2]
    assert np.isfinite(once[np.isfinite(a[:, k // 2])]).all(), "rounding to tf32 made an infinity of a finite number"


@LAYOUT
def test_three_tf32_products_next_to_an_infinity(library: GemmLibrary, layout: str) -> None:
    """The kernel recomputes sums that are not finite, and the other sums of the same thread: in every tile, with a
    split of k, a gate, batches and reduced dims."""
    with np.errstate(invalid="ignore"):
        for m, n, k in ((130, 260, 33), (70, 72, 40), (5, 3, 2300)):
            for gated in (False, True):
                a, b, _ = operands(m, 2 * n if gated else n, k, "three_tf32", layout, 1)
                a[m // 2, k // 3], b[k // 2, n // 2] = np.inf, -np.inf
                call = Gemm(a, b, Target((m, n), "float32"), n=n, gated=gated)
                run_exactly(library, call)
        a = place(integers((3, 2, 5, 2, 24, 40)), "float32", (2, 0, 1, 3, 5, 4))
        b = place(integers((3, 2, 5, 2, 40, 36)), "float32")
        a[1, 1, 3, 0, 5, 7], b[0, 0, 2, 1, 3, 9] = np.inf, np.inf
        call = Gemm(a, b, Target((2, 24, 36), "float32"), reduced_dims=3)
        run_exactly(library, call)


def test_small_workspaces_and_unsupported_strides_are_refused(library: GemmLibrary) -> None:
    a, b, _ = operands(5, 3, 2300, "bfloat16", "nn")
    with pytest.raises(Fault, match=r"gemm_sm80: expected a workspace of \d+ bytes, got 16"):
        library.gemm(Gemm(a, b, Target((5, 3), "float32"), workspace_bytes=16))
    every_second = place(integers((8, 16)), "bfloat16")[:, ::2]
    with pytest.raises(Fault, match="expected a row or column stride of 1 in a, got 16 and 2"):
        library.gemm(Gemm(every_second, place(integers((8, 8)), "bfloat16"), Target((8, 8), "float32")))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ["none", "relu", "relu2"])
def test_activation_grad_is_exact(library: GemmLibrary, activation: str, gated: bool) -> None:
    parts = 2 if gated else 1
    for rows, n, dtype, offset in (
        (1, 1, "float32", 0),
        (37, 131, "bfloat16", 1),
        (64, 256, "float16", 0),
        (200, 5, "bfloat16", 2),
    ):
        grad_out = place(integers((rows, n)), dtype, offset=offset, gap=offset)
        preact = place(integers((rows, parts * n)), "bfloat16", offset=offset)
        # The reference is the backward epilogue of a product with the identity.
        call = Gemm(grad_out, place(np.eye(n), dtype), None, activation=activation, gated=gated, preact=preact)
        want = expected(call)
        call.out, call.bias_grad = Target((rows, parts * n), "float32", 1), Target((parts * n,), "float32", 1)
        library.activation_grad(grad_out, preact, call.out, call.bias_grad, activation, gated)
        assert_exact(call, want)


def test_activation_grad_of_only_a_bias_is_a_sum(library: GemmLibrary) -> None:
    for rows, n in ((0, 7), (1, 1), (300, 133)):
        grad_out, sums = place(integers((rows, n)), "float16", (1, 0)), Target((n,), "bfloat16")
        library.activation_grad(grad_out, None, None, sums)
        assert_exact(
            Gemm(grad_out, grad_out.T, None, bias_grad=sums),
            Expected(np.zeros(0), bias_grad=grad_out.astype(np.float64).sum(0)),
        )


def test_activation_grad_sums_do_not_depend_on_the_schedule(library: GemmLibrary) -> None:
    grad_out = place(np.random.default_rng(random.getrandbits(64)).normal(size=(500, 70)), "float32")
    seen = set()
    for seed in range(3):
        sums = Target((70,), "float32")
        with library.options("lazy", "pct", seed):
            library.activation_grad(grad_out, None, None, sums)
        seen.add(sums.storage.tobytes())
    assert len(seen) == 1


def large_tile() -> Gemm:
    """128 x 256 tiles, more than 2 * stages k tiles, partial tiles of rows and columns."""
    a, b, _ = operands(250, 500, 260, "bfloat16", "nt")
    return Gemm(a, b, Target((250, 500), "float32"))


def middle_tile() -> Gemm:
    a, b, _ = operands(120, 390, 230, "float16", "tn")
    return Gemm(a, b, Target((120, 390), "float32"))


def split_k() -> Gemm:
    a, b, _ = operands(20, 20, 2400, "bfloat16", "nn")
    return Gemm(a, b, Target((20, 20), "float32"))


def backward() -> Gemm:
    a, b, _ = operands(130, 72, 330, "bfloat16", "nn")
    call = Gemm(a, b, Target((130, 144), "float32"), activation="relu", gated=True)
    call.preact, call.hidden = place(integers((130, 144)), "bfloat16"), Target((130, 72), "float16")
    call.bias_grad = Target((144,), "float32")
    return call


def three_tf32() -> Gemm:
    a, b, tf32 = operands(130, 140, 150, "three_tf32", "nn")
    return Gemm(a, b, Target((130, 140), "float32"), tf32=tf32)


CALLS = {call.__name__: call for call in (large_tile, middle_tile, split_k, backward, three_tf32)}
CALL = pytest.mark.parametrize("name", CALLS)


def test_the_calls_use_the_kernels_they_are_named_after(library: GemmLibrary) -> None:
    assert library.choice(250, 500, 260, 80, 4) == (128, 256, 32, 1)
    assert library.choice(120, 390, 230, 80, 4) == (128, 128, 32, 1)
    assert library.choice(20, 20, 2400, 80, 4)[3] > 1


@ON_BOTH
@CALL
def test_no_schedule_changes_a_result(library: GemmLibrary, name: str) -> None:
    assert_right_in_any_schedule(library, Case(CALLS[name]), 5)


@pytest.mark.sampled(check="races")
@ON_BOTH
@CALL
def test_no_races(hooked: GemmLibrary, name: str) -> None:
    assert_right_in_any_schedule(hooked, Case(CALLS[name]), 2, check_races=True)


@pytest.mark.sampled(check="races")
def test_activation_grad_has_no_races(hooked: GemmLibrary) -> None:
    grad_out, preact = place(integers((100, 140)), "bfloat16"), place(integers((100, 280)), "bfloat16")
    grad_preact, sums = Target((100, 280), "bfloat16"), Target((280,), "float32")
    for seed in range(3):
        with hooked.options("lazy", "pct", seed, check_races=True):
            hooked.activation_grad(grad_out, preact, grad_preact, sums, "silu", True)


@ON_BOTH
@pytest.mark.parametrize("shape", [(20, 24, 2400), (250, 504, 72)])
def test_bits_do_not_depend_on_the_schedule(library: GemmLibrary, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    rng = np.random.default_rng(random.getrandbits(64))
    a, b = place(rng.normal(size=(m, k)), "bfloat16"), place(rng.normal(size=(k, n)), "bfloat16")
    call = Gemm(a, b, Target((m, n), "float32"), preact=place(rng.normal(size=(m, n)), "float32"), activation="silu")
    call.bias_grad = Target((n,), "float32")
    assert_same_bits(library, call, lambda library: library.gemm(call))


# Synchronisation calls whose removal is not detected, with the reason. None: every call is needed.
HARMLESS: dict[str, str] = {}


@pytest.mark.sampled(check="races", slow=True)
def test_removal_of_any_synchronisation_is_detected(library: GemmLibrary, hooked: GemmLibrary) -> None:
    survivors, calls = undetected_removals(library, hooked, [Case(call) for call in CALLS.values()])
    assert calls >= 15
    assert survivors == sorted(HARMLESS)


# Tiles for 16-bit elements (half as deep for 4-byte ones), and an output size for which the heuristic chooses them on
# the emulated device. Three products of tf32 have no 128 x 256 tile.
TILES = [((128, 256, 32), (256, 512)), ((128, 128, 32), (256, 256)), ((64, 64, 64), (64, 64))]
# Two depths, which separate the cost of a k tile from the rest of a block's cost (benchmarks/model uses this).
DEPTHS = (128, 256)


@pytest.fixture(scope="module")
def counted(built: GemmLibrary) -> dict[str, dict[str, int]]:
    """Counters of the kernels, the same on every machine."""
    costs = {}

    def count(name: str, m: int, n: int, k: int, arithmetic: str, layout: str) -> dict[str, int]:
        a, b, tf32 = operands(m, n, k, arithmetic, layout)
        built.reset()
        built.gemm(Gemm(a, b, Target((m, n), ARITHMETICS[arithmetic][0]), tf32=tf32))
        costs[name] = built.counters()
        return costs[name]

    for arithmetic, layout, (tile, (m, n)), k in itertools.product(ARITHMETICS, LAYOUTS, TILES, DEPTHS):
        if arithmetic == "three_tf32" and tile[1] == 256:
            continue
        block_m, block_n, block_k = tile[0], tile[1], tile[2] // (2 if "tf32" in arithmetic else 1)
        name = f"{arithmetic} {layout} {block_m}x{block_n}x{block_k} of {m}x{n}x{k}"
        cost = count(name, m, n, k, arithmetic, layout)
        assert cost["blocks"] == m // block_m * (n // block_n) and cost["atomic"] == 0, f"another tile: {name}"
    cost = count("bfloat16 nn 64x64x64 of 64x64x2048 in 4", 64, 64, 2048, "bfloat16", "nn")
    assert cost["blocks"] == 4 + 1 and cost["atomic"] == 4, "not split in 4, with a block that clears the arrivals"
    built.reset()
    built.gemm(split_k())
    costs["split k"] = built.counters()
    built.reset()
    grad_out, preact = place(integers((256, 256)), "bfloat16"), place(integers((256, 256)), "bfloat16")
    built.activation_grad(grad_out, preact, Target((256, 256), "bfloat16"), Target((256,), "float32"), "relu")
    costs["activation_grad 256x256"] = built.counters()
    return {name: {key: value for key, value in cost.items() if value} for name, cost in costs.items()}


def test_counters_equal_the_recorded_ones(counted: dict[str, dict[str, int]]) -> None:
    assert_same_cost("gemm", counted)


def test_no_bank_conflicts_and_no_byte_too_many(counted: dict[str, dict[str, int]]) -> None:
    exact = re.compile(r"(\w+) \w+ (\d+)x(\d+)x\d+ of (\d+)x(\d+)x(\d+)$")
    for name, cost in counted.items():
        assert cost["shared_wavefronts"] == cost["shared_ideal_wavefronts"], name
        assert cost.get("matrix_wavefronts") == cost.get("matrix_ideal_wavefronts"), name
        if match := exact.match(name):
            block_m, block_n, m, n, k = map(int, match.groups()[1:])
            size = 4 if "tf32" in match[1] else 2
            ideal = (m // block_m) * (n // block_n) * (block_m + block_n) * k * size
            assert cost["global_load_bytes"] <= 1.05 * ideal, name
            assert cost["global_load_sectors"] * 32 <= 1.05 * ideal, name
            assert cost["global_store_sectors"] * 32 == cost["global_store_bytes"] == m * n * size, name
    assert sum(exact.match(name) is not None for name in counted) == (3 * 3 + 2) * len(LAYOUTS) * len(DEPTHS)
    cost = counted["activation_grad 256x256"]
    sums = 256 // 32 * 256 * 4  # per 32 rows at this size; written and read back
    assert cost["global_load_bytes"] == 2 * 256 * 256 * 2 + sums
    assert cost["global_store_bytes"] == 256 * 256 * 2 + sums + 256 * 4


CHOICES = [  # compute capability, SMs, (m, n, k), (block_m, block_n), whether k is split
    (80, 108, (8192, 8192, 8192), (128, 256), False),
    (90, 132, (8192, 8192, 8192), (128, 256), False),
    (90, 132, (4096, 4096, 64), None, False),
    (90, 132, (2048, 2048, 2048), (128, 256), False),
    (80, 108, (2304, 2304, 4096), (128, 128), False),
    (89, 128, (1024, 2048, 1024), (128, 128), False),
    (90, 132, (64, 4096, 4096), (64, 64), True),
    (90, 132, (1, 4096, 4096), (64, 64), True),
    (80, 108, (256, 256, 65536), None, True),
    (90, 132, (64, 64, 128), (64, 64), False),
]


@pytest.mark.parametrize("choice", CHOICES)
def test_choice_of_tile_and_split(
    library: GemmLibrary, choice: tuple[int, int, tuple[int, int, int], tuple[int, int] | None, bool]
) -> None:
    capability, processors, shape, tile, is_split = choice
    block_m, block_n, _, splits = library.choice(*shape, capability, processors)
    assert tile is None or (block_m, block_n) == tile
    assert (splits > 1) == is_split
