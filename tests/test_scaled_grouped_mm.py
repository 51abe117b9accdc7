"""scaled_grouped_mm: products of FP8 for groups of rows, against their definition; schedules, races, errors."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import cuda_ext
from cuda_ext import scaled_grouped_mm, testing
from cuda_ext.fp8 import quantize
from cuda_ext.testing.references import scaled_elements

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TOKENS = ("TensorWise", "RowWise", "BlockWise1x128")
WEIGHTS = ("TensorWise", "RowWise", "BlockWise128x128")
# Rows of the groups, and of none.
GROUPS = ([5, 0, 70], 9), ([0, 0], 3), ([130, 1, 16, 17, 257], 0), ([200], 40), ([3] * 40, 0), ([0, 33], 0)


def quantised_groups(groups: int, n: int, k: int, scaling: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(groups, K, N), as weights of linear layers, and their scales."""
    each = [quantize(torch.randn(n, k), scaling, dtype=dtype) for _ in range(groups)]
    data = torch.stack([data.contiguous() for data, _ in each]).mT
    scales = torch.stack([scales for _, scales in each])
    return data, {"TensorWise": scales.flatten(), "RowWise": scales.squeeze(-1)}.get(scaling, scales)


def problem(
    rows: list[int], rest: int, n: int, k: int, scalings: tuple[str, str], formats: tuple[torch.dtype, torch.dtype]
) -> list[Any]:
    a, scale_a = quantize(torch.randn(sum(rows) + rest, k), scalings[0], dtype=formats[0])
    b, scale_b = quantised_groups(len(rows), n, k, scalings[1], formats[1])
    return [a, b, scale_a, scalings[0], scale_b, scalings[1]]


def definition(arguments: list[Any], offs: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The result in float64, and the sums of magnitudes."""
    a, b, scale_a, scaling_a, scale_b, scaling_b = arguments
    exact = scaled_elements(a, scale_a, scaling_a)
    out, magnitude = torch.zeros(2, len(a), b.shape[2], dtype=torch.float64)
    begin = 0
    for group, end in enumerate(offs.tolist()):
        scales = scale_b[group].reshape(-1, 1) if scaling_b == "RowWise" else scale_b[group]
        matrix = scaled_elements(b[group].t(), scales, scaling_b).t()
        out[begin:end] = exact[begin:end] @ matrix
        magnitude[begin:end] = exact[begin:end].abs() @ matrix.abs()
        if bias is not None:
            out[begin:end] += bias[group].double()
            magnitude[begin:end] += bias[group].double().abs()
        begin = end
    return out, magnitude


def check(arguments: list[Any], offs: Tensor, **options: Any) -> None:
    found = scaled_grouped_mm(*arguments, offs=offs, **options)
    expected, magnitude = definition(arguments, offs, options.get("bias"))
    dtype = options.get("output_dtype", torch.bfloat16)
    assert found.dtype == dtype and found.shape == expected.shape
    of_sum = 2.0**-11 if found.is_cuda else 2.0**-20  # as in tests/test_scaled_mm.py
    if found.is_cuda and options.get("use_fast_accum", False):  # each 32 terms are cut to 14 bits
        of_sum = arguments[0].shape[1] / 32 * 2.0**-13
    bound = of_sum * magnitude + torch.finfo(dtype).eps / 2 * expected.abs() + torch.finfo(dtype).smallest_normal
    assert ((found.double() - expected).abs() <= bound).all()
    assert not found[int(offs[-1]) :].any()


@pytest.mark.every_backend
@pytest.mark.parametrize("scalings", [(left, right) for left in TOKENS for right in WEIGHTS], ids=str)
@pytest.mark.parametrize("case", range(6))
def test_random_cases(case: int, scalings: tuple[str, str]) -> None:
    rows, rest = GROUPS[case]
    n, k = random.choice((8, 72, 128, 264, 33)), random.choice((16, 112, 128, 144, 300))
    formats = random.choice(((E4M3, E4M3), (E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)))
    arguments = problem(rows, rest, n, k, scalings, formats)
    if random.random() < 0.3:  # contiguous along N
        arguments[1] = arguments[1].contiguous()
    offs = torch.tensor(rows).cumsum(0).to(random.choice((torch.int32, torch.int64)))
    options: dict[str, Any] = {"output_dtype": random.choice((torch.bfloat16, torch.float16, torch.float32))}
    if random.random() < 0.5:
        options["bias"] = torch.randn(len(rows), n)
    options["use_fast_accum"] = random.random() < 0.3
    check(arguments, offs, **options)


# All tile shapes, clusters, several items of a block: rows, N, K, SMs, and whether the tensor cores may keep the sums.
SHAPES = {
    "256 rows": ([256, 500, 30], 264, 200, 4, False),
    "128 rows": ([100, 60, 129], 136, 300, 4, False),
    "one column of tiles": ([100, 0, 300], 64, 144, 2, False),
    "several items": ([1, 15, 16, 17, 130, 127], 392, 130, 2, False),
    "sums in the tensor cores": ([200, 0, 64, 65, 3, 128], 1000, 300, 2, True),
    "sums in the tensor cores, one column of tiles": ([120, 30, 130], 256, 700, 1, True),
}


def on_wgmma(shape: str, scalings: tuple[str, str], formats: tuple[torch.dtype, torch.dtype]) -> tuple[list[Any], Any]:
    rows, n, k, processors, fast = SHAPES[shape]
    _, plan = torch.ops.cuda_ext._scaled_mm_plan(sum(rows) + 5, n, k, 90, processors, len(rows), fast)
    assert (plan["block_n"] == 256) == fast
    return problem(rows, 5, n, k, scalings, formats), plan


@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3)], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("arch", ["sm_89", "sm_90a", "sm_120"])
def test_on_tensor_cores_of_fp8(arch: str, shape: str, formats: tuple[torch.dtype, torch.dtype]) -> None:
    rows, n, k, processors, fast = SHAPES[shape]
    scalings = random.choice(TOKENS[:2] if fast else TOKENS), random.choice(WEIGHTS[:2] if fast else WEIGHTS)
    arguments, plan = on_wgmma(shape, scalings, formats)
    offs = torch.tensor(rows).cumsum(0)
    seed = random.randrange(2**31)
    with testing.emulated(arch, processors=processors, mode="lazy", schedule="pct", seed=seed) as device:
        bias = torch.randn(len(rows), n) if random.random() < 0.5 else None
        check(arguments, offs, bias=bias, use_fast_accum=fast)
    if arch != "sm_90a":
        assert device.counters["mma"] > 0 and device.counters["wgmma"] == 0
        return
    # 64 rows, a tile's columns and 32 terms each; rows of other groups are not multiplied.
    columns = plan["column_groups"] * plan["cluster"]
    products = sum(-(-count // 64) for count in rows) * columns * 4 * -(-k // 128)
    assert device.counters["wgmma"] == products and device.counters["mma"] == 0


@pytest.mark.sampled(check="races")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("arch", ["sm_89", "sm_90a"])
def test_no_races(arch: str, shape: str) -> None:
    rows, _, _, processors, fast = SHAPES[shape]
    scalings = ("RowWise", "RowWise") if fast else ("BlockWise1x128", "BlockWise128x128")
    arguments, _ = on_wgmma(shape, scalings, (E4M3, E4M3))
    offs = torch.tensor(rows).cumsum(0)
    found = []
    for options in ({"check_races": True}, {"mode": "lazy"}, {"mode": "lazy", "schedule": "pct"}, {"schedule": "pct"}):
        with testing.emulated(arch, processors=processors, seed=random.randrange(2**31), **options):
            found.append(scaled_grouped_mm(*arguments, offs=offs, use_fast_accum=fast))
    assert all(each.equal(found[0]) for each in found)


def test_nothing_to_multiply() -> None:
    one, none = torch.ones(1), torch.zeros(0, dtype=torch.int32)
    a, b = torch.ones(5, 16).to(E4M3), torch.empty(0, 16, 8).to(E4M3)
    assert scaled_grouped_mm(a, b, one, "TensorWise", one, "TensorWise", offs=none).equal(torch.zeros(5, 8).bfloat16())
    offs = torch.tensor([2, 5])
    out = scaled_grouped_mm(a[:, :0], b.new_empty(2, 0, 8), one, "TensorWise", one, "TensorWise", offs=offs)
    assert out.equal(torch.zeros(5, 8).bfloat16())


def good_arguments() -> dict[str, Any]:
    arguments = problem([5, 70], 4, 40, 200, ("RowWise", "RowWise"), (E4M3, E4M3))
    names = ("mat_a", "mat_b", "scale_a", "scale_recipe_a", "scale_b", "scale_recipe_b")
    return dict(zip(names, arguments, strict=True)) | {"offs": torch.tensor([5, 75])}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offs": None}, "expected offs, the ends of the groups, got None; without groups call scaled_mm"),
        ({"offs": torch.tensor([5, 4])}, "expected offs to be ends that do not decrease, .* got 4 after 5"),
        ({"offs": torch.tensor([5, 80])}, "from 0 to at most 79, got 80"),
        ({"offs": torch.tensor([5])}, r"expected offs of shape \(2,\) and dtype int32 or int64, got \(1,\)"),
        (
            {"mat_b": torch.ones(2, 100, 40).to(E4M3)},
            r"expected mat_b of shape \(groups, 200, N\) .* got \(2, 100, 40\)",
        ),
        ({"mat_b": torch.ones(2, 200, 40)}, "of FP8 to match mat_a .* of float32"),
        ({"scale_recipe_b": "BlockWise1x128"}, "expected scaling TensorWise, RowWise or BlockWise128x128 for scale_b"),
        ({"scale_recipe_a": "BlockWise128x128"}, "expected scaling TensorWise, RowWise or BlockWise1x128 for scale_a"),
        ({"scale_b": torch.ones(3, 40)}, r"expected scale_b of shape \(2, ...\), those of each group, got \(3, 40\)"),
        ({"bias": torch.ones(40)}, r"expected bias of shape \(2, 40\)"),
        ({"output_dtype": torch.float64}, "expected output_dtype float32, float16 or bfloat16, got float64"),
        ({"bias": torch.ones(2, 40, requires_grad=True)}, "expected no tensor that requires grad"),
    ],
    ids=str,
)
def test_errors_name_the_argument(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        scaled_grouped_mm(**good_arguments() | change)


def test_follows_the_rules_of_pytorch() -> None:
    arguments = good_arguments()
    tensors = [arguments[name] for name in ("mat_a", "mat_b", "scale_a", "scale_b", "offs")]
    a, b, scale_a, scale_b, offs = tensors
    torch.library.opcheck(
        torch.ops.cuda_ext.scaled_grouped_mm.default,
        (a, b, scale_a, 1, scale_b, 1, offs),
        {"output_dtype": torch.float32},
        test_utils=("test_faketensor", "test_aot_dispatch_dynamic"),
    )
    with FlopCounterMode(display=False) as counter:
        out = scaled_grouped_mm(**arguments)
    assert counter.get_total_flops() == 2 * 79 * 200 * 40
    compiled = torch.compile(lambda: scaled_grouped_mm(**arguments), fullgraph=True, backend="aot_eager")
    assert compiled().equal(out) and cuda_ext.scaled_grouped_mm is scaled_grouped_mm
