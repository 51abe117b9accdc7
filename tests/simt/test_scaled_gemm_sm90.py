"""The kernel of scaled products on wgmma: both tile shapes, clusters, several tiles of a block, all epilogues and
scalings; schedules, races, removed synchronisation. tests/test_scaled_mm.py has what every device must do."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from attention_sm90_cases import unnoticed_removals
from scaled_cases import E4M3, E5M2, SCALINGS, assert_near, problem, race_problem, random_epilogue, run
from torch import Tensor

from cuda_ext import testing

# Sizes, numbers of SMs and the tile that is then chosen. One block and clusters of two, an odd number of columns of
# tiles, several items of a cluster, several bands of rows, fewer k tiles than stages and more.
SHAPES = {
    "256 rows": ((500, 500, 700), 4, (256, 128)),
    "128 rows": ((260, 1000, 130), 4, (128, 128)),
    "one column of tiles": ((200, 100, 900), 2, (128, 128)),
    "256 rows, one column of tiles, several items": ((512, 100, 300), 1, (256, 128)),
    "several items": ((520, 120, 300), 1, (128, 128)),
    "several items of a cluster": ((600, 500, 200), 2, (128, 128)),
    "256 rows, several items of a cluster": ((768, 700, 500), 2, (256, 128)),
    "several bands": ((2304, 130, 130), 2, (256, 128)),
    "few rows": ((3, 130, 1400), 4, (128, 64)),
    "64 columns": ((300, 250, 700), 4, (128, 64)),
}


@pytest.mark.sampled(cases=3)
@pytest.mark.parametrize("formats", [*itertools.product((E4M3, E5M2), repeat=2)], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_and_epilogues(shape: str, formats: tuple[torch.dtype, torch.dtype]) -> None:
    sizes, processors, tile = SHAPES[shape]
    _, plan = torch.ops.cuda_ext._scaled_mm_plan(*sizes, 90, processors)
    assert (plan["block_m"], plan["block_n"]) == tile and plan["splits"] == 1
    arguments = problem(*sizes, (random.choice(SCALINGS), random.choice(SCALINGS)), formats)
    m, n, k = sizes
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        options = random_epilogue(m, n, dtype)
        seed = random.randrange(2**31)
        out, counters, _ = run(
            "sm_90a", arguments, options, mode="lazy", schedule="pct", seed=seed, processors=processors
        )
        assert_near(out, arguments, options)
        # 64 rows, all columns of a tile and 32 terms each; rows after the last are not multiplied.
        products = -(-m // 64) * plan["column_groups"] * plan["cluster"] * 4 * -(-k // 128)
        assert counters["wgmma"] == products and counters["mma"] == 0


# As SHAPES, for sums in the tensor cores: tiles of 256 columns, if they leave no SM idle.
FAST = {
    "one tile": ((100, 200, 300), 1),
    "one row block": ((40, 1000, 700), 2),
    "cluster, a k tile more than stages": ((200, 1000, 600), 2),
    "several items of a cluster": ((600, 1000, 200), 2),
    "one column of tiles, several items": ((520, 256, 130), 1),
}


@pytest.mark.parametrize("formats", [*itertools.product((E4M3, E5M2), repeat=2)], ids=str)
@pytest.mark.parametrize("shape", FAST)
def test_sums_in_the_tensor_cores(shape: str, formats: tuple[torch.dtype, torch.dtype]) -> None:
    sizes, processors = FAST[shape]
    _, plan = torch.ops.cuda_ext._scaled_mm_plan(*sizes, 90, processors, 0, True)
    assert (plan["block_m"], plan["block_n"]) == (128, 256)
    arguments = problem(*sizes, (random.choice(SCALINGS[:2]), random.choice(SCALINGS[:2])), formats)
    m, n, k = sizes
    for dtype in (torch.bfloat16, torch.float32):
        options: dict[str, Any] = {"output_dtype": dtype, "use_fast_accum": True}
        if random.random() < 0.5:
            options["bias"] = torch.randn(n)
        if random.random() < 0.5:
            options["input"] = torch.randn(m, n)
        seed = random.randrange(2**31)
        out, counters, _ = run(
            "sm_90a", arguments, options, mode="lazy", schedule="pct", seed=seed, processors=processors
        )
        assert_near(out, arguments, options)
        products = -(-m // 64) * plan["column_groups"] * plan["cluster"] * 4 * -(-k // 128)
        assert counters["wgmma"] == products and counters["mma"] == 0


# Of sm90::kScaledConfigs; the third only if the tensor cores may sum.
CONFIGS = ((256, 128), (128, 128), (128, 256), (128, 64))


def random_split(config: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Sizes, of few rows or of some row blocks, with an end of k that is no multiple of 128; and a plan."""
    splits, split_k_tiles = random.randint(2, 5), random.randint(1, 4)
    k_tiles = splits * split_k_tiles - random.randrange(min(split_k_tiles, 2))  # the last part may be shorter
    k = 128 * k_tiles - random.choice((0, 16, 112))
    m = random.choice((random.randint(1, 17), random.randint(1, 300)))
    n = random.choice((random.randint(1, 17), random.randint(1, 300)))
    return (m, n, k), (config, random.randint(1, 2), splits)


@pytest.mark.sampled(cases=12)
@pytest.mark.parametrize("config", range(4))
@pytest.mark.parametrize("case", range(8))
def test_splits_of_k(case: int, config: int) -> None:
    """The blocks that divide k add their sums in the same order, whatever the schedule."""
    fast = CONFIGS[config][1] == 256
    sizes, plan = random_split(config)
    scalings = random.choices(SCALINGS[:2] if fast else SCALINGS, k=2)
    arguments = problem(*sizes, (scalings[0], scalings[1]), (random.choice((E4M3, E5M2)), random.choice((E4M3, E5M2))))
    options = random_epilogue(*sizes[:2], random.choice((torch.bfloat16, torch.float16, torch.float32)))
    if fast:
        options["use_fast_accum"] = True
    first, counters, _ = run("sm_90a", arguments, options, plan, processors=random.choice((2, 5)))
    assert_near(first, arguments, options)
    (m, n, k), (block_m, block_n), (_, cluster, splits) = sizes, CONFIGS[config], plan
    columns, row_blocks = -(-n // block_n), -(-m // 64)
    columns += cluster == 2 and columns % 2 == 1 and columns > 1
    assert counters["wgmma"] == row_blocks * columns * 4 * -(-k // 128)
    # Each consumer that has rows of a tile arrives for each part of its k.
    arrivals = sum(min(2, -(-min(block_m, m - row) // 64)) for row in range(0, m, block_m))
    assert counters["atomic"] == splits * columns * arrivals
    again, _, _ = run(
        "sm_90a", arguments, options, plan, processors=3, mode="lazy", schedule="pct", seed=random.randrange(2**31)
    )
    assert again.equal(first)


def test_integers_are_exact() -> None:
    a, b = (torch.randint(-8, 9, size).to(E4M3) for size in ((300, 900), (900, 270)))
    one = torch.ones(1)
    out, _, _ = run("sm_90a", [a, b, one, "TensorWise", one, "TensorWise"], {"output_dtype": torch.float32})
    assert out.equal(a.float() @ b.float())


def test_operands_that_tma_cannot_read_are_copied() -> None:
    a, b = torch.randint(-8, 9, (130, 77)).to(E4M3), torch.randint(-8, 9, (77, 50)).to(E5M2)
    odd = torch.zeros(130 * 79 + 1, dtype=torch.uint8).view(E4M3)[1:].view(130, 79)[:, :77].copy_(a)
    one = torch.ones(1)
    for left, right in ((odd, b), (a.t().contiguous().t(), b.t().contiguous().t())):
        out, counters, _ = run(
            "sm_90a", [left, right, one, "TensorWise", one, "TensorWise"], {"output_dtype": torch.float32}
        )
        assert out.equal(a.float() @ b.float()) and counters["wgmma"] > 0


def test_promotion_keeps_what_the_tensor_cores_lose() -> None:
    """With accumulators of 14 bits a sum of 8192 positive terms is off by the truncation of sums of 128."""
    k = 8192
    a, b = (torch.rand(size).add(0.5).to(E4M3) for size in ((64, k), (k, 256)))
    one, exact = torch.ones(1), a.double() @ b.double()
    arguments = [a, b, one, "TensorWise", one, "TensorWise"]
    out, _, _ = run("sm_90a", arguments, {"output_dtype": torch.float32}, float8_sum_bits=14)
    error = ((out.double() - exact) / exact).abs().max()
    assert 0 < error < 5e-4, error  # a sum of 128 such terms is cut to 14 bits 4 times, 2**-13 each at most
    options = {"output_dtype": torch.float32, "use_fast_accum": True}
    fast, _, _ = run("sm_90a", arguments, options, float8_sum_bits=14, processors=1)
    assert ((fast.double() - exact) / exact).abs().max() >= 1e-3


RACES = [
    ((256, 300, 700), {}, 4),
    ((300, 140, 300), {"input": True}, 1),
    ((520, 260, 800), {"bias": True}, 2),
    ((200, 100, 900), {"output_dtype": torch.float32}, 2),
    ((768, 700, 500), {"scaling_b": "BlockWise128x128"}, 2),
    ((512, 100, 500), {"scaling_b": "BlockWise128x128"}, 1),
    ((300, 300, 300), {"scaling_b": "RowWise"}, 1),
    ((200, 1000, 700), {"scalings": ("RowWise", "RowWise"), "use_fast_accum": True, "bias": True}, 2),
    ((300, 256, 300), {"scalings": ("TensorWise", "RowWise"), "use_fast_accum": True}, 1),
    # The parts of a tile's k in different blocks.
    ((17, 140, 600), {"bias": True, "plan": (3, 2, 3)}, 12),
    ((130, 100, 500), {"scalings": ("TensorWise", "RowWise"), "input": True, "plan": (1, 1, 2)}, 4),
]


@pytest.mark.sampled(check="races")
@pytest.mark.parametrize(("sizes", "options", "processors"), RACES, ids=str)
def test_no_races(sizes: tuple[int, int, int], options: dict[str, Any], processors: int) -> None:
    plan = options.get("plan")
    arguments, options = race_problem(sizes, options)
    seed = random.randrange(2**31)
    expected, _, _ = run("sm_90a", arguments, options, plan, processors, check_races=True)
    for mode, schedule in (("lazy", "fifo"), ("lazy", "pct"), ("eager", "pct")):
        out, _, _ = run("sm_90a", arguments, options, plan, processors, mode=mode, schedule=schedule, seed=seed)
        assert out.equal(expected)


# Calls whose removal nothing notices, with the reason.
HARMLESS = {
    "arch::grid_dependency_wait();": "here no kernel runs before it in the same stream",
    "arch::grid_launch_dependents();": "lets the next kernel begin sooner",
}


@pytest.mark.sampled(check="races", slow=True)
def test_removal_of_any_synchronisation_is_noticed() -> None:
    def once(arguments: list[Any], options: dict[str, Any], plan: Any, processors: int) -> Any:
        def of(**emulation: Any) -> tuple[list[Tensor], list[Any]]:
            out, _, sites = run("sm_90a", arguments, options, plan, processors, **emulation)
            return [out], sites

        return of

    def runs(splits: bool) -> list[Any]:
        chosen = [race for race in RACES if ("plan" in race[1]) == splits]
        return [once(*race_problem(sizes, options), options.get("plan"), count) for sizes, options, count in chosen]

    # Without waiting for a stage, a split may be any number, and its place in the workspace outside of it.
    of_splits, of_splits_unnoticed = unnoticed_removals(runs(True), lambda name: name.startswith("split_k_sm90"))
    assert of_splits >= 2 and not of_splits_unnoticed, of_splits_unnoticed
    calls, unnoticed = unnoticed_removals(runs(False), lambda name: name.startswith("scaled_gemm_sm90"))
    assert calls >= 8
    assert len(unnoticed) == len(HARMLESS), unnoticed
    assert all(any(code in line for line in unnoticed) for code in HARMLESS), unnoticed


@pytest.mark.parametrize("beta", [0.0, 1.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [264, 263])
def test_sums_in_place(n: int, dtype: torch.dtype, beta: float) -> None:
    """Into the slot of a gradient, which TMA adds to if it is of float32 and beta is 1: whole numbers."""
    a, b = torch.randint(-4, 5, (150, 300)).to(E4M3), torch.randint(-4, 5, (300, n)).to(E4M3)
    one, slot = torch.ones(1), torch.randint(-8, 9, (150, n)).to(dtype) if beta else torch.full((150, n), torch.nan)
    slot = slot.to(dtype)
    exact = 2 * (a.double() @ b.double()) + (beta * slot.double() if beta else 0.0)
    with testing.emulated("sm_90a", processors=2, mode="lazy", schedule="pct", seed=random.randrange(2**31)) as device:
        torch.ops.cuda_ext.scaled_mm.slot(a, b, one, 0, one, 0, weight_slot=slot, slot_alpha=2.0, slot_beta=beta)
    assert slot.equal(exact.to(dtype)) and device.counters["wgmma"] > 0
    by_tma = n % 8 == 0 and (beta == 0 or (beta == 1 and dtype == torch.float32))
    assert (device.counters["tma_store_bytes"] > 0) == by_tma
