"""scaled_grouped_mm: sums of FP8 over groups of terms, against their definition; slots, schedules, races, errors."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from cuda_ext import scaled_grouped_mm, testing
from cuda_ext.fp8 import quantize, quantize_both
from cuda_ext.testing.references import scaled_elements

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALINGS = ("TensorWise", "RowWise", "BlockWise1x128", "BlockWise128x128")
SLOT = torch.ops.cuda_ext.scaled_grouped_mm.slot
NUMBERS = {"TensorWise": 0, "RowWise": 1, "BlockWise1x128": 4, "BlockWise128x128": 5}
# Terms of the groups, of which the last need not be whole blocks, and terms of none.
GROUPS = ([128, 0, 384], 70), ([0, 0], 3), ([0, 256, 128, 0, 77], 0), ([300], 0), ([128] * 20, 0), ([0, 33], 0)


def problem(
    terms: list[int], rest: int, m: int, n: int, scalings: tuple[str, str], formats: tuple[torch.dtype, torch.dtype]
) -> list[Any]:
    """What is of no group is NaN, and so are its scales if they are of no group alone."""
    size = sum(terms) + rest
    (a, scale_a), (b, scale_b) = (
        quantize(torch.randn(lines, size), scaling, dtype=dtype)
        for lines, scaling, dtype in zip((m, n), scalings, formats, strict=True)
    )
    first = -(-sum(terms) // 128)
    for data, scales, scaling in ((a, scale_a, scalings[0]), (b, scale_b, scalings[1])):
        data[:, first * 128 :].copy_(torch.tensor(torch.nan))
        if scaling.startswith("BlockWise"):
            (scales.t() if scaling == "BlockWise128x128" else scales)[:, first:] = torch.nan
    return [a, b.t(), scale_a, scalings[0], scale_b, scalings[1]]


def ends_of(terms: list[int]) -> Tensor:
    return torch.tensor(terms).cumsum(0)


def definition(arguments: list[Any], ends: list[int]) -> tuple[Tensor, Tensor]:
    """The result in float64, and the sums of magnitudes."""
    a, b, scale_a, scaling_a, scale_b, scaling_b = arguments
    left, right = scaled_elements(a, scale_a, scaling_a), scaled_elements(b.t(), scale_b, scaling_b).t()
    spans = [slice(*span) for span in itertools.pairwise([0, *ends])]
    return (
        torch.stack([left[:, span] @ right[span] for span in spans]),
        torch.stack([left[:, span].abs() @ right[span].abs() for span in spans]),
    )


def assert_near(found: Tensor, arguments: list[Any], ends: list[int]) -> None:
    expected, magnitude = definition(arguments, ends)
    assert found.shape == expected.shape
    of_sum = 2.0**-11 if found.is_cuda else 2.0**-20  # as in tests/test_scaled_mm.py
    eps, smallest = torch.finfo(found.dtype).eps, torch.finfo(found.dtype).smallest_normal
    assert ((found.double() - expected).abs() <= of_sum * magnitude + eps / 2 * expected.abs() + smallest).all()


@pytest.mark.every_backend
@pytest.mark.parametrize("scalings", [*itertools.product(SCALINGS, repeat=2)], ids=str)
@pytest.mark.parametrize("case", range(6))
def test_random_cases(case: int, scalings: tuple[str, str]) -> None:
    terms, rest = GROUPS[case]
    m, n = random.choice((1, 8, 72, 130, 300)), random.choice((8, 72, 128, 264, 33))
    formats = random.choice(((E4M3, E4M3), (E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)))
    arguments = problem(terms, rest, m, n, scalings, formats)
    if random.random() < 0.3:  # contiguous along M and N
        arguments[0], arguments[1] = arguments[0].t().contiguous().t(), arguments[1].contiguous()
    offs = ends_of(terms).to(random.choice((torch.int32, torch.int64)))
    dtype = random.choice((torch.bfloat16, torch.float16, torch.float32))
    found = scaled_grouped_mm(*arguments, offs=offs, output_dtype=dtype, use_fast_accum=random.random() < 0.3)
    assert found.dtype == dtype
    assert_near(found, arguments, offs.tolist())
    assert not found[torch.tensor(terms) == 0].any()


@pytest.mark.every_backend
def test_gradient_of_matrices_from_rows_and_their_gradients() -> None:
    """What an expert's gradient needs: two transposes of the same padded rows."""
    rows, gradients = torch.randn(512, 96), torch.randn(512, 40)
    rows[100:128] = gradients[100:128] = 0
    offs = torch.tensor([128, 128, 512], dtype=torch.int32)
    *_, left, left_scales = quantize_both(gradients, "BlockWise1x128", power_of_two=True)
    *_, right, right_scales = quantize_both(rows, "BlockWise1x128", power_of_two=True)
    arguments = [left, right.t(), left_scales, "BlockWise1x128", right_scales, "BlockWise1x128"]
    assert_near(scaled_grouped_mm(*arguments, offs=offs), arguments, offs.tolist())


# Tile shapes, clusters, several items of a block: terms, M, N, SMs, rows of the tile.
SHAPES = {
    "256 rows": ([256, 384, 0], 512, 264, 4, 256),
    "128 rows": ([128, 0, 200], 100, 136, 4, 128),
    "one column of tiles": ([0, 640, 128], 200, 64, 2, 128),
    "several items": ([128, 256, 0, 0, 384, 128, 1], 120, 392, 2, 128),
    "256 rows, several items": ([128, 0, 1024], 768, 104, 1, 256),
    "no term": ([0, 0, 0], 300, 304, 2, 128),
}


def on_wgmma(shape: str, scalings: tuple[str, str]) -> tuple[list[Any], dict[str, int]]:
    terms, m, n, processors, rows_of_tile = SHAPES[shape]
    plan: dict[str, int]
    size = sum(terms) + 130
    _, plan = torch.ops.cuda_ext._scaled_mm_plan(m, n, size, 90, processors, len(terms), False, True)
    assert plan["block_m"] == rows_of_tile
    return problem(terms, 130, m, n, scalings, (E4M3, E4M3)), plan


@pytest.mark.parametrize("shape", SHAPES)
def test_on_wgmma(shape: str) -> None:
    terms, m, _, processors, _ = SHAPES[shape]
    arguments, plan = on_wgmma(shape, (random.choice(SCALINGS), random.choice(SCALINGS)))
    offs = ends_of(terms)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        seed = random.randrange(2**31)
        with testing.emulated("sm_90a", processors=processors, mode="lazy", schedule="pct", seed=seed) as device:
            found = scaled_grouped_mm(*arguments, offs=offs, output_dtype=dtype)
        # Terms of the last group are followed by those of none, in the same block of 128.
        assert_near(found, arguments, [*offs.tolist()[:-1], -(-sum(terms) // 128) * 128])
        # 64 rows, 128 columns and 32 terms each; a group without terms has a k tile of zeros.
        k_tiles = sum(max(-(-count // 128), 1) for count in terms)
        products = -(-m // 64) * plan["column_groups"] * plan["cluster"] * 4 * k_tiles
        assert device.counters["wgmma"] == products and device.counters["mma"] == 0


@pytest.mark.sampled(check="races")
@pytest.mark.parametrize("shape", SHAPES)
def test_no_races(shape: str) -> None:
    terms, _, _, processors, _ = SHAPES[shape]
    arguments, _ = on_wgmma(shape, ("BlockWise1x128", "BlockWise1x128"))
    found = []
    for options in ({"check_races": True}, {"mode": "lazy"}, {"mode": "lazy", "schedule": "pct"}, {"schedule": "pct"}):
        with testing.emulated("sm_90a", processors=processors, seed=random.randrange(2**31), **options):
            found.append(scaled_grouped_mm(*arguments, offs=ends_of(terms)))
    assert all(each.equal(found[0]) for each in found)


def whole_numbers(terms: int, m: int, n: int) -> tuple[Tensor, Tensor]:
    return torch.randint(-4, 5, (m, terms)).to(E4M3), torch.randint(-4, 5, (terms, n)).to(E4M3)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
@pytest.mark.parametrize("infinite", [False, True])
def test_groups_without_terms_are_zeros(arch: str, infinite: bool) -> None:
    """Whatever the operands and scales of other groups, and the memory of the output."""
    a, b = whole_numbers(128, 70, 64)
    scale = torch.tensor([torch.inf if infinite else 1.0])
    with testing.emulated(arch):
        found = scaled_grouped_mm(a, b, scale, "TensorWise", scale, "TensorWise", offs=torch.tensor([0, 0, 128, 128]))
        assert not found[[0, 1, 3]].any()


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_120"])
def test_kernels_round_ends_up(arch: str) -> None:
    """Also those that are out of range."""
    a, b = whole_numbers(700, 70, 40)
    one, exact = torch.ones(1), a.float().unsqueeze(1) * b.t().float()  # (M, N, T)
    for offs, rounded in (([1, 130, 600], (128, 256, 640)), ([128, 129, 10**6], (128, 256, 700))):
        with testing.emulated(arch):
            found = scaled_grouped_mm(
                a, b, one, "TensorWise", one, "TensorWise", offs=torch.tensor(offs), output_dtype=torch.float32
            )
        for group, (begin, end) in enumerate(itertools.pairwise((0, *rounded))):
            assert found[group].equal(exact[:, :, begin:end].sum(-1))


@pytest.mark.parametrize("beta", [0.0, 1.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [264, 263])
@pytest.mark.parametrize("arch", [None, "sm_80", "sm_90a"])
def test_slots(arch: str | None, n: int, dtype: torch.dtype, beta: float) -> None:
    """Into the slot of a gradient, which TMA adds to if it is of float32 and beta is 1: whole numbers."""
    a, b = whole_numbers(400, 150, n)
    a[:, 384:] = 0
    ends, one = [0, 128, 128, 400], torch.ones(1)
    slot = torch.full((4, 150, n), torch.nan) if beta == 0 else torch.randint(-8, 9, (4, 150, n)).float()
    slot = slot.to(dtype)
    parts = [a[:, begin:end].double() @ b[begin:end].double() for begin, end in itertools.pairwise((0, *ends))]
    exact = 2 * torch.stack(parts) + (beta * slot.double() if beta else 0.0)
    arguments = a, b, one, 0, one, 0, torch.tensor(ends)
    if arch is None:
        SLOT(*arguments, weight_slot=slot, slot_alpha=2.0, slot_beta=beta)
        assert slot.equal(exact.to(dtype))
        return
    with testing.emulated(arch, mode="lazy", schedule="pct", seed=random.randrange(2**31)) as device:
        SLOT(*arguments, weight_slot=slot, slot_alpha=2.0, slot_beta=beta)
    assert slot.equal(exact.to(dtype))
    if arch == "sm_90a":
        assert (device.counters["wgmma"] > 0) == (n % 8 == 0)


def test_nothing_to_sum() -> None:
    one, none = torch.ones(1), torch.zeros(0, dtype=torch.int32)
    a, b = torch.ones(5, 16).to(E4M3), torch.ones(16, 8).to(E4M3)
    for arch in (None, "sm_90a"):
        with testing.emulated(arch) if arch else torch.no_grad():
            out = scaled_grouped_mm(a, b, one, "TensorWise", one, "TensorWise", offs=none)
            assert out.shape == (0, 5, 8)
            for left, right in ((a[:, :0], b[:0]), (a, b)):
                offs = torch.tensor([0, 0])
                out = scaled_grouped_mm(left, right, one, "TensorWise", one, "TensorWise", offs=offs)
                assert out.equal(torch.zeros(2, 5, 8).bfloat16())


def good_arguments() -> dict[str, Any]:
    arguments = problem([128, 256], 4, 24, 40, ("BlockWise1x128", "BlockWise1x128"), (E4M3, E4M3))
    names = ("mat_a", "mat_b", "scale_a", "scale_recipe_a", "scale_b", "scale_recipe_b")
    return dict(zip(names, arguments, strict=True)) | {"offs": torch.tensor([128, 384])}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offs": torch.tensor([128, 0])}, "expected offs to be ends that do not decrease, .* got 0 after 128"),
        ({"offs": torch.tensor([128, 512])}, "from 0 to at most 388, got 512"),
        (
            {"offs": torch.tensor([100, 384])},
            "expected offs of groups of terms to be multiples of 128, or 388, got 100 at index 0; pad each group",
        ),
        ({"offs": torch.tensor([[128]])}, r"expected offs of shape \(groups,\) .* got \(1, 1\)"),
        ({"mat_b": torch.ones(100, 40).to(E4M3)}, r"expected mat_b of shape \(388, N\) .* got \(100, 40\)"),
        ({"mat_b": torch.ones(388, 40)}, "of FP8 to match mat_a .* of float32"),
        ({"scale_a": torch.ones(24, 3)}, r"scaled_grouped_mm: expected scale_a of shape \(24, 4\) .* got \(24, 3\)"),
        ({"scale_b": torch.ones(2, 40)}, r"scaled_grouped_mm: expected scale_b of shape \(40, 4\) .* got \(2, 40\)"),
        ({"bias": torch.ones(2, 40)}, "expected no bias where the groups cut the terms of a sum"),
        ({"scale_a": torch.ones(24, 4, requires_grad=True)}, "expected no tensor that requires grad"),
    ],
    ids=str,
)
def test_errors_name_the_argument(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        scaled_grouped_mm(**good_arguments() | change)


@pytest.mark.parametrize(
    ("slot", "message"),
    [
        (torch.zeros(3, 24, 40), r"expected weight_slot contiguous, of shape \(2, 24, 40\) .* got shape \(3, 24, 40\)"),
        (torch.zeros(2, 40, 24).mT, r"expected weight_slot contiguous, .* with strides \(960, 1, 24\)"),
        (torch.zeros(2, 24, 40).double(), "dtype float32, float16 or bfloat16, .* of float64"),
    ],
    ids=str,
)
def test_bad_slots_are_refused(slot: Tensor, message: str) -> None:
    a, b, scale_a, _, scale_b, _, offs = good_arguments().values()
    with pytest.raises(RuntimeError, match=message):
        SLOT(a, b, scale_a, 4, scale_b, 4, offs, weight_slot=slot, slot_alpha=1.0, slot_beta=0.0)


def test_follows_the_rules_of_pytorch() -> None:
    arguments = good_arguments()
    a, b, scale_a, left, scale_b, right, offs = arguments.values()
    torch.library.opcheck(
        torch.ops.cuda_ext.scaled_grouped_mm.default,
        (a, b, scale_a, NUMBERS[left], scale_b, NUMBERS[right], offs),
        {"output_dtype": torch.float32},
        test_utils=("test_faketensor", "test_aot_dispatch_dynamic"),
    )
    with FlopCounterMode(display=False) as counter:
        out = scaled_grouped_mm(**arguments)
    assert counter.get_total_flops() == 2 * 24 * 388 * 40
    compiled = torch.compile(lambda: scaled_grouped_mm(**arguments), fullgraph=True, backend="aot_eager")
    assert compiled().equal(out)
    each = torch.stack([offs, torch.tensor([0, 256])])
    found = torch.vmap(lambda ends: scaled_grouped_mm(**arguments | {"offs": ends}))(each)
    assert found.equal(torch.stack([scaled_grouped_mm(**arguments | {"offs": ends}) for ends in each]))
