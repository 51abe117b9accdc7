"""Products on wgmma whose operands are copied first, because TMA cannot read them where they are."""

from __future__ import annotations

import random

import numpy as np
import pytest
from gemm_cases import (  # noqa: F401
    LAYOUTS,
    build_hooked,
    build_plain,
    hooked_library,
    integers,
    operands,
    place_operands,
    plain_library,
    run_exactly,
)
from gemm_library import Gemm, GemmLibrary, Target, dtype_of, place

CASES = [(arithmetic, layout) for arithmetic in ("bfloat16", "float16", "tf32") for layout in LAYOUTS]
CASE = pytest.mark.parametrize(("arithmetic", "layout"), CASES)


@pytest.fixture(name="device")
def emulated_device() -> int:
    return 90


def run_with_copies(library: GemmLibrary, call: Gemm, copied: str | None = None) -> None:
    with library.restricted(copies=1):
        if copied is not None:
            assert library.copies_sm90(call) == copied
        library.reset()
        run_exactly(library, call)
        assert library.counters()["wgmma"] > 0


@CASE
@pytest.mark.parametrize("alignment", [1, 2])
def test_any_shape_and_alignment(library: GemmLibrary, arithmetic: str, layout: str, alignment: int) -> None:
    for m, n, k in ((1, 1, 1), (7, 9, 3), (67, 131, 77), (130, 65, 129), (33, 300, 522)):
        a, b, tf32 = operands(m, n, k, arithmetic, layout, alignment)
        call = Gemm(a, b, Target((m, n), "float32", 1), tf32=tf32)
        call.bias = place(integers((n,)), "float32")
        run_with_copies(library, call)


@CASE
def test_only_what_tma_cannot_read(library: GemmLibrary, arithmetic: str, layout: str) -> None:
    along_k = "".join(name for name, letter, needed in zip("ab", layout, "nt") if letter != needed)
    aligned, _, tf32 = operands(70, 72, 80, arithmetic, layout)
    other, b, _ = operands(70, 72, 80, arithmetic, layout)
    odd, _, _ = operands(70, 72, 80, arithmetic, layout, 1)
    dtype = dtype_of(b)
    if not (tf32 and along_k):
        assert library.copies_sm90(Gemm(aligned, b, Target((70, 72), dtype), tf32=tf32)) == ""
        run_with_copies(library, Gemm(odd, b, Target((70, 72), dtype), tf32=tf32), "a")
    else:
        run_with_copies(library, Gemm(other, b, Target((70, 72), dtype), tf32=tf32), along_k)


@pytest.mark.parametrize("batch", [(3,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches(library: GemmLibrary, batch: tuple[int, ...], layout: str) -> None:
    m, n, k = 20, 30, 45
    a, b, _ = place_operands(batch, batch[1:], m, n, k, "bfloat16", layout, 1)
    run_with_copies(library, Gemm(a, b, Target((*batch, m, n), "float32")), "ab")


def test_more_batch_dims_than_a_tensor_map_has(library: GemmLibrary) -> None:
    """Which wgmma then does not serve."""
    a, b, _ = place_operands((2, 2, 2, 2), (), 9, 10, 11, "bfloat16", "nt", 1)
    call = Gemm(a, b, Target((2, 2, 2, 2, 9, 10), "float32"))
    with library.restricted(copies=1):
        assert isinstance(library.plan_sm90(call), str)
        run_exactly(library, call)
    library.reset()  # the fixture expects wgmma


def test_strides_of_zero_and_of_many(library: GemmLibrary) -> None:
    column, rows = place(integers((50, 1)), "bfloat16"), place(integers((1, 50)), "bfloat16")
    far = place(integers((50, 100)), "bfloat16")[:, ::2]
    b = place(integers((50, 24)), "bfloat16")
    for a in (np.broadcast_to(column, (50, 50)), np.broadcast_to(rows, (50, 50)), far):
        run_with_copies(library, Gemm(a, b, Target((50, 24), "float32")), "a")


@pytest.mark.parametrize("n", [12, 33, 100])
@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_pairs(library: GemmLibrary, n: int, layout: str) -> None:
    """The second half of b's columns begins anywhere; b is then copied along k."""
    for alignment in (0, 1):
        a, b, _ = operands(40, 2 * n, 72, "bfloat16", layout, alignment)
        call = Gemm(a, b, Target((40, n), "float32"), n=n, gated=True, activation="relu")
        call.preact_out = Target((40, 2 * n), "float32")
        is_read_in_place = alignment == 0 and layout == "nt"
        run_with_copies(library, call, "" if is_read_in_place else "b" if alignment == 0 else "ab")


@pytest.mark.parametrize("gated", [False, True])
def test_backward_epilogue(library: GemmLibrary, gated: bool) -> None:
    for m, n, k in ((70, 75, 41), (130, 40, 9)):
        a, b, _ = operands(m, n, k, "bfloat16", "nn", 1)
        parts = 1 + gated
        call = Gemm(a, b, Target((m, parts * n), "float32", 1), activation="relu", gated=gated, alpha=0.5)
        call.preact = place(integers((m, parts * n)), "bfloat16", offset=1, gap=1)
        call.hidden = Target((m, n), "float16")
        call.bias_grad = Target((parts * n,), "float32", 1)
        run_with_copies(library, call)


PAYS = {
    (4095, 4097, 4093, "nn"): "ab",
    (1023, 1025, 1021, "nn"): "ab",
    (333, 777, 555, "nn"): "ab",
    (4096, 4096, 4095, "nn"): "a",
    (2048, 768, 50257, "nn"): "a",  # gradients of GPT-2's logits
    (1, 4097, 4097, "nt"): "",
    (48, 49, 50, "nt"): "",
}


def of_shape(m: int, n: int, k: int, layout: str) -> Gemm:
    """Without memory for its elements."""
    order_a, order_b = LAYOUTS[layout]
    strides_a = (k * 2, 2) if order_a == (0, 1) else (2, m * 2)
    strides_b = (n * 2, 2) if order_b == (0, 1) else (2, k * 2)
    cell = place(integers((1, 1)), "bfloat16")
    a = np.lib.stride_tricks.as_strided(cell, (m, k), strides_a)
    b = np.lib.stride_tricks.as_strided(cell, (k, n), strides_b)
    return Gemm(a, b, Target((1, 1), "bfloat16"))


@pytest.mark.parametrize("shape", PAYS, ids=lambda shape: "x".join(map(str, shape[:3])))
def test_copies_are_made_where_they_pay(library: GemmLibrary, shape: tuple[int, int, int, str]) -> None:
    with library.options(compute_capability=90, processors=132):
        assert library.copies_sm90(of_shape(*shape)) == PAYS[shape]


def test_bits_of_rows_that_must_not_depend_on_others(library: GemmLibrary) -> None:
    call = of_shape(4095, 4097, 4093, "nn")
    call.batch_invariant = True
    with library.options(compute_capability=90, processors=132):
        assert library.copies_sm90(call) == ""


@pytest.mark.sampled(check="races", slow=True)
@CASE
def test_no_races(hooked: GemmLibrary, arithmetic: str, layout: str) -> None:
    a, b, tf32 = operands(70, 130, 77, arithmetic, layout, 1)
    for seed in (random.randrange(2**31) for _ in range(2)):
        call = Gemm(a, b, Target((70, 130), "float32", 1), tf32=tf32)
        with hooked.options("lazy", "pct", seed, check_races=True), hooked.restricted(copies=1):
            run_exactly(hooked, call)
