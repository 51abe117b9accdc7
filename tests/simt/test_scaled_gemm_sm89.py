"""The kernel of scaled products on mma.sync (sm_89 and later): both tile shapes, all formats, scalings and epilogues,
groups of rows; schedules, races, removed synchronisation. tests/test_scaled_mm.py has what every device must do."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from attention_sm90_cases import unnoticed_removals
from scaled_cases import E4M3, E5M2, SCALINGS, assert_near, problem, race_problem, random_epilogue, run
from torch import Tensor

from cuda_ext import gemm_plan, scaled_grouped_mm, scaled_mm, testing

ARCHS = ("sm_89", "sm_100", "sm_120")

# Sizes, numbers of SMs and the rows of the tile that is then chosen on sm_89. Whole tiles and parts of them, fewer k
# tiles than stages and more, k that ends inside a chunk of 16 bytes.
SHAPES = {
    "128 rows, whole": ((256, 128, 512), 1, 128),
    "128 rows": ((200, 300, 700), 4, 128),
    "128 rows, one k tile": ((130, 129, 77), 2, 128),
    "128 rows, odd sizes": ((257, 131, 1001), 1, 128),
    "64 rows, whole": ((64, 128, 1280), 4, 64),
    "64 rows": ((60, 200, 900), 4, 64),
    "64 rows, odd sizes": ((65, 67, 333), 8, 64),
    "one row": ((1, 300, 129), 8, 64),
    "one element": ((1, 1, 1), 1, 64),
}


@pytest.mark.sampled(cases=3)
@pytest.mark.parametrize("formats", [*itertools.product((E4M3, E5M2), repeat=2)], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_and_epilogues(shape: str, formats: tuple[torch.dtype, torch.dtype]) -> None:
    sizes, processors, rows_on_sm89 = SHAPES[shape]
    m, n, k = sizes
    arguments = problem(*sizes, (random.choice(SCALINGS), random.choice(SCALINGS)), formats)
    arch = random.choice(ARCHS[::2])
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        options = random_epilogue(m, n, dtype)
        with testing.emulated(arch, processors=processors):
            plan = gemm_plan(*arguments[:2])
        rows_of_tile = plan.tile[0]
        assert plan.kernel == "sm_89" and plan.tile == (rows_of_tile, rows_of_tile, 128)
        assert rows_of_tile == rows_on_sm89 or arch != "sm_89"
        seed = random.randrange(2**31)
        out, counters, _ = run(arch, arguments, options, mode="lazy", schedule="pct", seed=seed, processors=processors)
        assert_near(out, arguments, options)
        # 16 rows, 8 columns and 32 terms each, of whole tiles.
        tiles = -(-m // rows_of_tile) * -(-n // rows_of_tile)
        assert plan.grid == (tiles, 1)
        assert counters["mma"] == tiles * -(-k // 128) * 4 * rows_of_tile // 16 * rows_of_tile // 8
        assert counters["wgmma"] == 0


@pytest.mark.parametrize("scalings", [*itertools.product(SCALINGS, repeat=2)], ids=str)
def test_every_pair_of_scalings(scalings: tuple[str, str]) -> None:
    m, n, k = (random.randint(1, 280) for _ in range(3))
    k += random.choice((0, 300))
    arguments = problem(m, n, k, scalings, (random.choice((E4M3, E5M2)), E4M3))
    options = {"output_dtype": torch.float32}
    out, counters, _ = run(random.choice(ARCHS), arguments, options, mode="lazy", processors=random.choice((1, 8)))
    assert_near(out, arguments, options)
    assert counters["mma"] > 0


@pytest.mark.parametrize("processors", [1, 16])
def test_integers_are_exact(processors: int) -> None:
    """Also with accumulators of 14 bits, as sums of 128 such products have fewer."""
    a, b = (torch.randint(-3, 4, size).to(E4M3) for size in ((130, 900), (900, 270)))
    one = torch.ones(1)
    arguments = [a, b, one, "TensorWise", one, "TensorWise"]
    out, _, _ = run("sm_89", arguments, {"output_dtype": torch.float32}, processors=processors, float8_sum_bits=14)
    assert out.equal(a.float() @ b.float())


def test_promotion_keeps_what_the_tensor_cores_lose() -> None:
    """With accumulators of 14 bits a sum of 8192 positive terms is off by the truncation of sums of 128."""
    k = 8192
    a, b = (torch.rand(size).add(0.5).to(E4M3) for size in ((64, k), (k, 64)))
    one, exact = torch.ones(1), a.double() @ b.double()
    arguments = [a, b, one, "TensorWise", one, "TensorWise"]
    out, _, _ = run("sm_89", arguments, {"output_dtype": torch.float32}, float8_sum_bits=14)
    error = ((out.double() - exact) / exact).abs().max()
    assert 0 < error < 5e-4, error  # a sum of 128 such terms is cut to 14 bits 4 times, 2**-13 each at most


def inside_nans(matrix: Tensor) -> Tensor:
    """The same values with NaN after each line, up to a multiple of 16 bytes, and in a line before and after."""
    lines, elements = matrix.shape
    around = torch.full((lines + 2, (elements + 31) // 16 * 16), 0x7F, dtype=torch.uint8).view(matrix.dtype)
    inside = around[1:-1, :elements]
    inside.copy_(matrix)
    return inside


@pytest.mark.parametrize("processors", [1, 16])
def test_what_is_around_the_operands_does_not_matter(processors: int) -> None:
    m, n, k = random.choice(((67, 131, 150), (5, 200, 270), (129, 65, 1)))
    a, b, scale_a, _, scale_b, _ = problem(m, n, k, ("BlockWise1x128", "BlockWise1x128"), (E4M3, E5M2))
    inside_a, inside_b = inside_nans(a), inside_nans(b.t()).t()
    scales = [torch.full((lines.shape[0] + 1, lines.shape[1] + 1), torch.nan) for lines in (scale_a, scale_b)]
    for larger, own in zip(scales, (scale_a, scale_b), strict=True):
        larger[:-1, :-1] = own
    block = "BlockWise1x128"
    arguments = [inside_a, inside_b, scales[0][:-1, :-1], block, scales[1][:-1, :-1], block]
    options = {"output_dtype": torch.float32}
    with testing.emulated("sm_89", processors=processors) as device:
        out = scaled_mm(*arguments, **options)
    assert device.counters["mma"] > 0
    assert_near(out, [a, b, scale_a, block, scale_b, block], options)


def test_operands_that_the_kernel_cannot_read_are_copied() -> None:
    a, b = torch.randint(-8, 9, (130, 77)).to(E4M3), torch.randint(-8, 9, (77, 50)).to(E5M2)
    odd = torch.zeros(130 * 79 + 1, dtype=torch.uint8).view(E4M3)[1:].view(130, 79)[:, :77].copy_(a)
    one = torch.ones(1)
    for left, right in ((odd, b), (a.t().contiguous().t(), b.t().contiguous().t())):
        arguments = [left, right, one, "TensorWise", one, "TensorWise"]
        out, counters, _ = run("sm_120", arguments, {"output_dtype": torch.float32})
        assert out.equal(a.float() @ b.float()) and counters["mma"] > 0


# Groups of rows: their numbers of rows, columns, terms and SMs, and the rows of the tile that is then chosen. Groups
# without rows and with parts of tiles.
GROUPS: dict[str, tuple[list[int], int, int, int, int]] = {
    "128 rows": ([256, 300, 30, 0], 264, 200, 1, 128),
    "64 rows": ([10, 0, 60, 1], 136, 300, 8, 64),
    "odd sizes": ([65, 0, 129], 67, 77, 2, 64),
    "no rows": ([0, 0], 40, 16, 2, 64),
}


@pytest.mark.parametrize("a_format", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("groups", GROUPS)
def test_groups(groups: str, a_format: torch.dtype) -> None:
    """Rows of no group are not read; each group has the bits of its own product, wherever its rows are."""
    rows, n, k, processors, rows_of_tile = GROUPS[groups]
    rest = 70
    each = [problem(count, n, k, ("BlockWise1x128", "BlockWise128x128"), (a_format, E4M3)) for count in rows]
    none = torch.full((rest, k), torch.nan).to(a_format)
    a = torch.cat([*(arguments[0] for arguments in each), none])
    scale_a = torch.cat([*(arguments[2] for arguments in each), torch.full((rest, -(-k // 128)), torch.nan)])
    b = torch.stack([arguments[1].t() for arguments in each]).mT
    scale_b, bias = torch.stack([arguments[4] for arguments in each]), torch.randn(len(rows), n)
    offs = torch.tensor(rows).cumsum(0)
    seed = random.randrange(2**31)
    options: dict[str, Any] = {"bias": bias, "output_dtype": torch.float32}
    with testing.emulated("sm_89", mode="lazy", schedule="pct", seed=seed, processors=processors) as device:
        out = scaled_grouped_mm(a, b, scale_a, "BlockWise1x128", scale_b, "BlockWise128x128", offs=offs, **options)
        counters = dict(device.counters)
        parts = [
            scaled_mm(*arguments, bias=bias[group], output_dtype=torch.float32) for group, arguments in enumerate(each)
        ]
    assert out.equal(torch.cat([*parts, torch.zeros(rest, n)]))
    tiles = sum(-(-count // rows_of_tile) for count in rows) * -(-n // rows_of_tile)
    assert counters["mma"] == tiles * -(-k // 128) * 4 * rows_of_tile // 16 * rows_of_tile // 8
    for part, arguments, own_bias in zip(parts, each, bias, strict=True):
        assert_near(part, arguments, {"bias": own_bias})


def test_other_formats_of_groups_have_no_kernel() -> None:
    """As on Hopper: E5M2 is for gradients of outputs, which are the left operand."""
    a, b, one = torch.ones(20, 32).to(E4M3), torch.ones(2, 32, 8).to(E5M2), torch.ones(1)
    with testing.emulated("sm_89") as device:
        out = scaled_grouped_mm(a, b, one, "TensorWise", one, "TensorWise", offs=torch.tensor([3, 20]))
        counts = dict(device.counters)
    assert out.eq(32).all() and counts["mma"] > 0  # of bfloat16


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86"])
def test_devices_without_these_tensor_cores(arch: str) -> None:
    a, b, one = torch.ones(20, 32).to(E4M3), torch.ones(32, 8).to(E4M3), torch.ones(1)
    with testing.emulated(arch):
        plan = gemm_plan(a, b)
        assert scaled_mm(a, b, one, "TensorWise", one, "TensorWise").eq(32).all()
    assert plan.kernel == "composed" and "mma.sync of FP8" in plan.refusal


RACES = [
    ((200, 300, 700), {}, 4),
    ((256, 140, 300), {"input": True}, 1),
    ((60, 130, 1300), {"bias": True}, 4),
    ((64, 64, 900), {"output_dtype": torch.float32}, 2),
    ((130, 130, 600), {"scaling_b": "BlockWise128x128"}, 1),
]


@pytest.mark.sampled(check="races")
@pytest.mark.parametrize(("sizes", "options", "processors"), RACES, ids=str)
def test_no_races(sizes: tuple[int, int, int], options: dict[str, Any], processors: int) -> None:
    arguments, options = race_problem(sizes, options)
    seed = random.randrange(2**31)
    expected, _, _ = run("sm_89", arguments, options, processors=processors, check_races=True)
    assert_near(expected, arguments, options)
    for mode, schedule in (("lazy", "fifo"), ("lazy", "pct"), ("eager", "pct")):
        out, _, _ = run("sm_89", arguments, options, processors=processors, mode=mode, schedule=schedule, seed=seed)
        assert out.equal(expected)


@pytest.mark.sampled(check="races", slow=True)
def test_removal_of_any_synchronisation_is_noticed() -> None:
    def once(arguments: list[Any], options: dict[str, Any], processors: int) -> Any:
        def of(**emulation: Any) -> tuple[list[Tensor], list[Any]]:
            out, _, sites = run("sm_89", arguments, options, processors=processors, **emulation)
            return [out], sites

        return of

    runs = [once(*race_problem(sizes, options), processors) for sizes, options, processors in RACES]
    calls, unnoticed = unnoticed_removals(runs, lambda name: name in ("scaled_gemm_sm89.cuh", "gemm_sm80.cuh"))
    assert calls == 9 and not unnoticed, unnoticed
