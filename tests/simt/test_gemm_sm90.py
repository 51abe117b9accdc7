"""The GEMM on wgmma under every plan: each tile, cluster and division of k, with each layout and epilogue; its
schedules, races, removed synchronisation, and counters. test_gemm_kernels.py has the tests of what both GEMM kernels
must do."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from cost import assert_same_cost
from gemm_cases import (  # noqa: F401
    LAYOUTS,
    TOLERANCE,
    Case,
    assert_right_in_any_schedule,
    assert_same_bits,
    build_hooked,
    build_plain,
    draw_operands,
    hooked_library,
    integers,
    operands,
    place_operands,
    plain_library,
    run_exactly,
    undetected_removals,
)
from gemm_library import ACTIVATIONS, Gemm, GemmLibrary, Target, dtype_of, encode, expected, place

LINE_BYTES = 128  # of a tile in shared memory
PROCESSORS = 4  # of the emulated device, unless a test chooses


@dataclass(frozen=True)
class Config:
    """An entry of kConfigs in csrc/gemm/plan_sm90.h."""

    index: int
    block_m: int
    block_n: int
    swapped: bool = False
    tma_only: bool = False
    k_blocks: int = 1  # at most


CONFIGS = {
    "cooperative": Config(0, 128, 256),
    "ping_pong_192": Config(1, 128, 192, tma_only=True),
    "ping_pong": Config(2, 128, 128),
    "swapped": Config(3, 64, 64, swapped=True, k_blocks=4),
    "narrow": Config(4, 64, 16, swapped=True, k_blocks=8),
}
CONFIG = pytest.mark.parametrize("config", CONFIGS)
# tf32 operands are K-major.
OPERANDS = [(dtype, layout) for dtype in ("bfloat16", "float16") for layout in LAYOUTS] + [("tf32", "nt")]


@pytest.fixture(name="device")
def emulated_device() -> int:
    return 90


def has_gate_up(call: Gemm) -> bool:
    return call.gated and call.preact is None


def stores_by_tma(call: Gemm) -> bool:
    """Whether TMA can write the outputs, and the epilogue consists of scale, bias, activation, and a gate; or adds to
    the output in place."""
    assert call.out is not None
    out = call.out.storage
    targets = [out] if call.preact_out is None else [out, call.preact_out.storage]
    adds = call.c is out and call.beta == 1 and out.dtype == np.float32 and call.bias is None
    adds &= call.activation == "none" and call.preact_out is None
    return (
        call.residual is None
        and call.preact is None
        and (call.c is None or adds)
        and dtype_of(out) in (dtype_of(call.a), *([] if call.gated else ["float32"]))
        and not (call.gated and call.preact_out is not None and out.dtype == np.float32)  # three slabs do not fit
        and all(target.dtype == out.dtype and target.ctypes.data % 16 == 0 for target in targets)
        and call.params().n * out.itemsize % 16 == 0
    )


def is_legal(config: Config, cluster: int, call: Gemm, k_blocks: int = 1) -> bool:
    params = call.params()
    rows = params.n if config.swapped else params.m
    if cluster > -(-rows // config.block_m) or k_blocks > config.k_blocks or cluster * k_blocks > 8:
        return False
    if config.swapped:
        b_is_k_major = call.b.strides[-2] == call.b.itemsize
        a_has_whole_lines = is_k_major(call.a) or config.block_n * call.a.itemsize >= LINE_BYTES
        return params.m <= config.block_n and a_has_whole_lines and (not has_gate_up(call) or b_is_k_major)
    return not config.tma_only or (stores_by_tma(call) and not has_gate_up(call))


def is_k_major(a: np.ndarray) -> bool:
    return a.strides[-2] != a.itemsize if a.shape[-1] == 1 else a.strides[-1] == a.itemsize


# Epilogues: functions of m, n, k, the arithmetic and the layout.


def product(m: int, n: int, k: int, arithmetic: str, layout: str) -> Gemm:
    a, b, tf32 = operands(m, n, k, arithmetic, layout)
    return Gemm(a, b, Target((m, n), dtype_of(a)), tf32=tf32)


def to_float32(*problem: int | str) -> Gemm:
    call = product(*problem)
    call.out, call.alpha = Target(call.out.storage.shape, "float32"), -0.5
    return call


def to_other_16_bit(*problem: int | str) -> Gemm:
    call = product(*problem)
    call.out = Target(call.out.storage.shape, "float16" if dtype_of(call.a) == "bfloat16" else "bfloat16")
    return call


def misaligned_output(*problem: int | str) -> Gemm:
    call = product(*problem)
    call.out = Target(call.out.storage.shape, "bfloat16", random.choice((1, 2, 4)))
    return call


def odd_columns(m: int, n: int, *problem: int | str) -> Gemm:
    return product(m, n + random.choice((1, 2, 3, 4)), *problem)


def bias_and_activation(m: int, n: int, *problem: int | str) -> Gemm:
    call = product(m, n, *problem)
    call.activation, call.alpha = "relu", 0.5
    call.bias = place(integers((2 * n,)), random.choice(("float32", "float16", "bfloat16")))[:: random.choice((1, 2))][
        :n
    ]
    return call


def added_matrix(m: int, n: int, *problem: int | str) -> Gemm:
    call = to_float32(m, n, *problem)
    call.c, call.beta = place(integers((m, n)), "bfloat16", random.choice(((0, 1), (1, 0))), 1), -2.0
    return call


def in_place(dtype: str, beta: float = -2.0) -> Callable[..., Gemm]:
    def make(m: int, n: int, *problem: int | str) -> Gemm:
        call = product(m, n, *problem)
        call.out = Target((m, n), dtype, random.choice((0, 0, 1)))
        call.out.storage[...] = encode(integers((m, n)), dtype)
        call.c, call.beta, call.alpha = call.out.storage, beta, 0.5
        return call

    return make


def every_term(m: int, n: int, *problem: int | str) -> Gemm:
    call = bias_and_activation(m, n, *problem)
    call.c = np.broadcast_to(place(integers((1, n)), "float16"), (m, n))
    call.residual, call.preact_out = place(integers((m, n)), "float32", gap=1), Target((m, n), "float32")
    return call


def residual(m: int, n: int, *problem: int | str) -> Gemm:
    call = product(m, n, *problem)
    call.residual = place(integers((m, n)), "bfloat16", offset=1)
    return call


def with_preact(*problem: int | str) -> Gemm:
    call = bias_and_activation(*problem)
    call.out, call.preact_out = (Target(call.out.storage.shape, dtype_of(call.a)) for _ in range(2))
    return call


def gated(m: int, n: int, *problem: int | str) -> Gemm:
    call = product(m, 2 * n, *problem)
    call.out, call.n, call.gated, call.activation = Target((m, n), dtype_of(call.a)), n, True, "relu"
    call.bias = place(integers((2 * n,)), "float32")
    return call


def gated_with_preact(*problem: int | str) -> Gemm:
    call = gated(*problem)
    call.preact_out = Target((call.a.shape[0], call.b.shape[1]), dtype_of(call.a))
    return call


def gated_to_other_types(*problem: int | str) -> Gemm:
    call = gated_with_preact(*problem)
    call.out = Target(call.out.storage.shape, "bfloat16" if dtype_of(call.a) == "float32" else "float32")
    return call


def backward(m: int, n: int, *problem: int | str, parts: int = 1) -> Gemm:
    call = product(m, n, *problem)
    call.out, call.activation, call.gated, call.alpha = Target((m, parts * n), "bfloat16"), "relu", parts == 2, 0.5
    call.preact = place(integers((m, parts * n)), "bfloat16", offset=1, gap=1)
    call.hidden, call.bias_grad = Target((m, n), "float16"), Target((parts * n,), "float32", 1)
    return call


def gated_backward(*problem: int | str) -> Gemm:
    return backward(*problem, parts=2)


def batches(m: int, n: int, *problem: int | str, reduced: tuple[int, ...] = ()) -> Gemm:
    """Two dims of batches, b the same along one of them, in another order in memory."""
    a, b, tf32 = place_operands((*reduced, 3, 2), (*reduced, 1, 2), m, n, *problem)
    b = np.broadcast_to(b, (*reduced, 3, 2, *b.shape[-2:]))
    return Gemm(a, b, Target((3, 2, m, n), dtype_of(a)), reduced_dims=len(reduced), tf32=tf32)


def reduced_batches(m: int, n: int, *problem: int | str) -> Gemm:
    return batches(m, n, *problem, reduced=(3,))


EPILOGUES: dict[str, Callable[..., Gemm]] = {
    each.__name__: each
    for each in (
        *(product, to_float32, to_other_16_bit, misaligned_output, odd_columns, bias_and_activation, added_matrix),
        *(every_term, with_preact, residual, gated, gated_with_preact, gated_to_other_types, backward, gated_backward),
        *(batches, reduced_batches),
    )
}
EPILOGUES |= {f"in_place_{dtype}": in_place(dtype) for dtype in ("float32", "float16", "bfloat16")}
EPILOGUES["added_in_place"] = in_place("float32", 1.0)


def sizes(config: Config, parts: int, arithmetic: str, is_large: bool) -> tuple[int, int, int]:
    """Random m, n, k: partial tiles, odd numbers of row tiles, more and fewer tiles than blocks, ends within a k tile,
    and as many k tiles as the parts divide."""
    rows = [1, 7, 16, 33, 64, 128, 129, 250, 300, random.randint(1, 400)]
    m = random.choice([row for row in rows if row <= config.block_n] if config.swapped else rows)
    n = 8 * random.choice((1, 3, 16, random.randint(1, 70))) if is_large else 8 * random.randint(1, 9)
    depth = LINE_BYTES // (4 if arithmetic == "tf32" else 2)
    return m, n, depth * parts * random.randint(1, 4) - random.choice((0, 1, 7, 8, depth - 1))


@pytest.mark.sampled(cases=160)
@pytest.mark.parametrize(("k_blocks", "splits"), [(1, 1), (1, 2), (1, 3), (2, 1), (3, 1), (4, 1), (8, 1)])
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("operand", OPERANDS, ids="-".join)
@pytest.mark.parametrize("epilogue", EPILOGUES)
@CONFIG
def test_every_plan_is_exact(
    library: GemmLibrary, config: str, epilogue: str, operand: tuple[str, str], cluster: int, k_blocks: int, splits: int
) -> None:
    tile = CONFIGS[config]
    m, n, k = sizes(tile, k_blocks * splits, operand[0], "batches" not in epilogue)
    call = EPILOGUES[epilogue](m, n, k, *operand)
    processors, seed = random.choice((2, 3, PROCESSORS, 132)), random.randrange(2**31)
    mode, schedule = random.choice((("eager", "fifo"), ("eager", "pct"), ("lazy", "fifo"), ("lazy", "pct")))
    restricted = library.restricted(tile.index, cluster, k_blocks, splits)
    with library.options(mode, schedule, seed, processors=processors), restricted:
        plan = library.plan_sm90(call)
        if not is_legal(tile, cluster, call, k_blocks):
            assert plan == "no tile shape fits the restriction"
            library.reset()
            return
        assert plan == (tile.index, cluster, k_blocks, splits, stores_by_tma(call) and not tile.swapped)
        run_exactly(library, call)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@CONFIG
def test_activations_of_every_config(library: GemmLibrary, config: str, activation: str) -> None:
    """From registers through TMA, and from rows in shared memory."""
    tile, rng = CONFIGS[config], np.random.default_rng(random.getrandbits(64))
    m, n, k = (tile.block_n - 3 if tile.swapped else 150), 200, 72
    a, b = (place(rng.normal(size=shape), "float16") for shape in ((m, k), (k, n)))
    for has_residual in (False,) if tile.tma_only else (False, True):
        call = Gemm(a, b, Target((m, n), "float32"), activation=activation, alpha=0.3)
        call.bias = place(rng.normal(size=(n,)), "bfloat16")
        call.residual = place(rng.normal(size=(m, n)), "float32") if has_residual else None
        with library.restricted(tile.index):
            assert library.plan_sm90(call).tma_store == (not has_residual and not tile.swapped)
            library.gemm(call)
        want = expected(call).out
        np.testing.assert_allclose(call.out.values(), want, rtol=0, atol=TOLERANCE * np.abs(want).max())


@pytest.mark.parametrize("m", [1, 7, 16, 33])
def test_few_rows_use_a_swapped_tile(library: GemmLibrary, m: int) -> None:
    for epilogue, layout in itertools.product(("product", "every_term", "backward", "gated"), ("nn", "nt")):
        call = EPILOGUES[epilogue](m, 136, 200, "bfloat16", layout)
        plan = library.plan_sm90(call)
        assert not isinstance(plan, str)
        used = next(tile for tile in CONFIGS.values() if tile.index == plan.config)
        assert used.swapped == is_legal(CONFIGS["swapped"], 1, call), (epilogue, layout, plan)
        assert (used.block_n == 16) == (used.swapped and m <= 16)
        run_exactly(library, call)


# The cases that tests repeat. Few blocks, several work items for each, more k tiles than the ring has stages.


def case(config: str, epilogue: str, *problem: int | str, cluster: int = 1, k_blocks: int = 1, splits: int = 1) -> Case:
    plan = {"config": CONFIGS[config].index, "cluster": cluster, "k_blocks": k_blocks, "splits": splits}
    return Case(lambda: EPILOGUES[epilogue](*problem), plan)


CASES: dict[str, Callable[[], Case]] = {
    "cooperative": lambda: case("cooperative", "bias_and_activation", 300, 520, 330, "bfloat16", "nt"),
    "cooperative, cluster": lambda: case("cooperative", "to_float32", 300, 520, 330, "bfloat16", "nn", cluster=2),
    "cooperative, rows": lambda: case("cooperative", "gated_backward", 300, 300, 90, "bfloat16", "tn", cluster=2),
    "ping-pong": lambda: case("ping_pong_192", "bias_and_activation", 300, 520, 330, "float16", "tt", cluster=2),
    "ping-pong, rows": lambda: case("ping_pong", "every_term", 300, 392, 460, "bfloat16", "nn"),
    "ping-pong, cluster": lambda: case("ping_pong", "product", 300, 392, 250, "tf32", "nt", cluster=2),
    "split k": lambda: case("ping_pong", "to_float32", 200, 200, 700, "bfloat16", "nn", cluster=2, splits=3),
    "split k of batches": lambda: case("cooperative", "reduced_batches", 140, 40, 200, "bfloat16", "nt", splits=2),
    "pairs": lambda: case("cooperative", "gated_with_preact", 300, 264, 200, "bfloat16", "nt", cluster=2),
    "in place": lambda: case("ping_pong", "added_in_place", 260, 264, 500, "bfloat16", "tn"),
    "swapped": lambda: case("swapped", "every_term", 33, 400, 1000, "bfloat16", "nn", splits=3),
    "swapped, long k": lambda: case("swapped", "every_term", 33, 400, 1500, "float16", "nt"),
    "swapped backward": lambda: case("swapped", "backward", 20, 600, 200, "bfloat16", "nt", k_blocks=2),
    "swapped, cluster": lambda: case("swapped", "gated", 50, 150, 700, "bfloat16", "nt", cluster=2, k_blocks=2),
    "narrow": lambda: case("narrow", "bias_and_activation", 9, 400, 1500, "bfloat16", "nn"),
    "narrow, k in a cluster": lambda: case("narrow", "every_term", 16, 200, 900, "tf32", "nt", k_blocks=8),
}
CASE = pytest.mark.parametrize("name", CASES)


@CASE
def test_no_schedule_changes_a_result(library: GemmLibrary, name: str) -> None:
    assert_right_in_any_schedule(library, CASES[name](), 5)


@pytest.mark.sampled(check="races", slow=True)
@CASE
def test_no_races(hooked: GemmLibrary, name: str) -> None:
    assert_right_in_any_schedule(hooked, CASES[name](), 2, check_races=True)


@CASE
def test_bits_do_not_depend_on_the_schedule(library: GemmLibrary, name: str) -> None:
    repeated = CASES[name]()
    draw_operands(repeated.call, np.random.default_rng(random.getrandbits(64)))
    assert_same_bits(library, repeated.call, repeated.run)


# Instructions whose removal is not detected, with the reason.
HARMLESS: dict[str, str] = {
    "grid_dependency_wait": "here a kernel begins when the one before it has ended, so there is nothing to wait for",
    "grid_launch_dependents": "here a kernel begins when the one before it has ended, and not earlier",
}


@pytest.mark.sampled(check="races", slow=True)
def test_removal_of_any_synchronisation_is_detected(library: GemmLibrary, hooked: GemmLibrary) -> None:
    survivors, calls = undetected_removals(library, hooked, [make() for make in CASES.values()], HARMLESS)
    assert calls >= 30
    # Few schedules let a lane of the producer lag behind; those of test_grouped_gemm_sm90.py do.
    assert survivors.count("sync_warp") <= 1
    assert [name for name in survivors if name != "sync_warp"] == sorted(HARMLESS)


def counted_products() -> Iterator[tuple[str, str, tuple[int, int, int], tuple[str, str]]]:
    """Name, config, m, n and k, and operands of the products whose counters are recorded, of two depths, which separate
    the cost of a k tile from the rest of a block's cost."""
    for config, operand, k in itertools.product(CONFIGS, OPERANDS, (128, 256)):
        tile, depth = CONFIGS[config], LINE_BYTES // (4 if operand[0] == "tf32" else 2)
        if config != "narrow" or operand[1].startswith("n"):  # a is contiguous along k
            m, n = (tile.block_n, 2 * tile.block_m) if tile.swapped else (2 * tile.block_m, 2 * tile.block_n)
            yield (
                f"{' '.join(operand)} {tile.block_m}x{tile.block_n}x{depth} of {m}x{n}x{k}",
                config,
                (m, n, k),
                operand,
            )


@pytest.fixture(scope="module")
def counted(built: GemmLibrary) -> dict[str, dict[str, int]]:
    """Counters of the kernel, the same on every machine."""
    costs = {}

    def count(name: str, one: Case) -> None:
        with built.device(90):
            built.reset()
            one.run(built)
            costs[name] = {key: value for key, value in built.counters().items() if value}

    for name, config, sizes, operand in counted_products():
        count(name, case(config, "product", *sizes, *operand))
    others = ("cooperative, cluster", "cooperative, rows", "split k", "pairs", "swapped backward", "swapped, cluster")
    for name in others:
        count(name, CASES[name]())
    return costs


def test_counters_equal_the_recorded_ones(counted: dict[str, dict[str, int]]) -> None:
    assert_same_cost("gemm_sm90", counted)


def test_no_bank_conflicts_and_no_byte_too_many(counted: dict[str, dict[str, int]]) -> None:
    for name, cost in counted.items():
        for kind in ("shared", "matrix"):
            assert cost.get(f"{kind}_wavefronts") == cost.get(f"{kind}_ideal_wavefronts"), name
    for name, config, (m, n, k), operand in counted_products():
        tile, size = CONFIGS[config], 4 if operand[0] == "tf32" else 2
        cost, tiles = counted[name], 2 if tile.swapped else 4
        assert cost["blocks"] == tiles and "atomic" not in cost, name
        assert cost["tma_load_bytes"] == tiles * (tile.block_m + tile.block_n) * k * size, name
        assert cost["wgmma"] == tiles * (tile.block_m // 64) * k * size // 32, name
        if tile.swapped:
            assert cost["global_store_sectors"] * 32 == cost["global_store_bytes"] == m * n * size, name
        else:
            assert cost["tma_store_bytes"] == m * n * size and "global_store_bytes" not in cost, name
