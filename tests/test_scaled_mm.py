"""scaled_mm and fp8.quantize: every scaling, format and layout against their definitions, limits, errors."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import cuda_ext
from cuda_ext import scaled_mm, testing
from cuda_ext.fp8 import quantize, quantize_both
from cuda_ext.testing import reference_scaled_mm
from cuda_ext.testing.references import scaled_elements

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALINGS = ("TensorWise", "RowWise", "BlockWise1x128", "BlockWise128x128")
MOST = {E4M3: 448.0, E5M2: 57344.0}
# Of a sum in float32 of K terms in any order, relative to the sum of their magnitudes.
SUM_ERROR = 2.0**-20
# The same where the tensor cores of FP8 first sum 128 terms: four steps, each of which cuts to 14 bits; on later GPUs
# and Ada eight, of 22 bits.
SUM_ERROR_HOPPER, SUM_ERROR_MMA_SYNC = 2.0**-11, 2.0**-18
HALF_ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def random_fp8(*size: int, dtype: torch.dtype) -> Tensor:
    """Any finite numbers of the format, of random bits."""
    numbers = torch.randint(0, 256, size, dtype=torch.uint8).view(dtype)
    return torch.where(numbers.float().isfinite(), numbers.float(), 0.0).to(dtype)


def with_random_strides(matrix: Tensor) -> Tensor:
    """The same values in either order of memory, with gaps or without."""
    rows, columns = matrix.shape
    gap = random.choice((0, 0, 1, 16))
    if random.random() < 0.5:
        return matrix.new_zeros(columns, rows + gap)[:, :rows].t().copy_(matrix)
    return matrix.new_zeros(rows, columns + gap)[:, :columns].copy_(matrix)


def sum_error(tensor: Tensor) -> float:
    capability = torch.cuda.get_device_capability(tensor.device) if tensor.is_cuda else (0, 0)
    if capability[0] == 9:
        return SUM_ERROR_HOPPER
    return SUM_ERROR_MMA_SYNC if capability >= (8, 9) else SUM_ERROR


def blocks(size: int) -> int:
    return -(-size // 128)


def random_scales(lines: int, k: int, scaling: str) -> Tensor:
    """Of the left operand, in any order of memory, or all of a line or block the same by a stride of 0."""
    shape = {
        "TensorWise": (1, 1),
        "RowWise": (lines, 1),
        "BlockWise1x128": (lines, blocks(k)),
        "BlockWise128x128": (blocks(k), blocks(lines)),
    }[scaling]
    kept = random.choice(((), (), (), (0,), (1,), (0, 1)))  # dims of stride 0
    drawn = torch.rand([1 if dim in kept else size for dim, size in enumerate(shape)])
    scales = drawn * 2.0 ** random.randint(-20, 10) + 0.01
    return scales.expand(shape) if kept else with_random_strides(scales)


def assert_matches_definition(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scaling_a: str,
    scale_b: Tensor,
    scaling_b: str,
    **options: Any,
) -> None:
    exact_a = scaled_elements(a, scale_a, scaling_a)
    exact_b = scaled_elements(b.t(), scale_b, scaling_b).t()
    expected, magnitude = exact_a @ exact_b, exact_a.abs() @ exact_b.abs()
    for term in (options.get("bias"), options.get("input")):
        if term is not None:
            factor = options.get("beta", 1.0) if term is options.get("input") else 1.0
            expected = expected + factor * term.double()
            magnitude = magnitude + (factor * term.double()).abs()
    found = scaled_mm(a, b, scale_a, scaling_a, scale_b, scaling_b, **options)
    dtype = options.get("output_dtype", torch.bfloat16)
    assert found.dtype == dtype and found.shape == expected.shape and found.is_contiguous()
    tiny = torch.finfo(dtype).smallest_normal
    of_sum = sum_error(a)
    if a.is_cuda and options.get("use_fast_accum", False):  # each 32 terms are cut to 14 bits
        of_sum = max(of_sum, a.shape[1] / 32 * 2.0**-13)
    bound = of_sum * magnitude + HALF_ULP[dtype] * expected.abs() + tiny
    limit = torch.finfo(dtype).max
    inside = expected.abs() < limit * 0.99
    assert ((found.double() - expected).abs() <= bound)[inside].all()
    assert found[expected.abs() > limit * 1.01].isinf().all()


SIZES = (1, 2, 7, 16, 33, 64, 127, 128, 130, 250)


@pytest.mark.every_backend
@pytest.mark.sampled(cases=30)
@pytest.mark.parametrize("scaling_b", SCALINGS)
@pytest.mark.parametrize("scaling_a", SCALINGS)
@pytest.mark.parametrize("case", range(26))
def test_random_cases(case: int, scaling_a: str, scaling_b: str) -> None:
    m, n = random.choice(SIZES), random.choice(SIZES)
    k = random.choice((*SIZES, 112, 144, 240, 272, 384, 1000))
    a = with_random_strides(random_fp8(m, k, dtype=random.choice((E4M3, E5M2))))
    b = with_random_strides(random_fp8(k, n, dtype=random.choice((E4M3, E5M2))))
    options: dict[str, Any] = {"output_dtype": random.choice(tuple(HALF_ULP))}
    if random.random() < 0.5:
        options["bias"] = torch.randn(n, dtype=random.choice(tuple(HALF_ULP)))
    if random.random() < 0.3:
        options["input"] = torch.randn(random.choice(((m, n), (n,), (m, 1))), dtype=random.choice(tuple(HALF_ULP)))
        options["beta"] = random.choice((1.0, -0.5))
    options["use_fast_accum"] = random.random() < 0.3
    scale_a, scale_b = random_scales(m, k, scaling_a), random_scales(n, k, scaling_b)
    if scaling_b == "RowWise" and random.random() < 0.5:
        scale_b = scale_b.t()
    assert_matches_definition(a, b, scale_a, scaling_a, scale_b, scaling_b, **options)


@pytest.mark.every_backend
@pytest.mark.parametrize("scaling", SCALINGS)
def test_sums_of_integers_are_exact(scaling: str) -> None:
    """Scales are powers of two, so that no order of the operations rounds."""
    m, n, k = 37, 50, 300
    a, b = (torch.randint(-8, 9, size).to(E4M3) for size in ((m, k), (k, n)))
    scale_a, scale_b = (2.0 ** random_scales(lines, k, scaling).log2().round().clamp(-4, 4) for lines in (m, n))
    expected = reference_scaled_mm(a, b, scale_a, scaling, scale_b, scaling)
    found = scaled_mm(a, b, scale_a, scaling, scale_b, scaling, output_dtype=torch.float32)
    assert found.double().equal(expected)


@pytest.mark.every_backend
@pytest.mark.parametrize("scaling", ["RowWise", "BlockWise1x128"])
def test_a_long_sum_of_positive_terms(scaling: str) -> None:
    """Accumulators of FP8 tensor cores keep about 14 bits of such a sum, if nothing is done about it."""
    k = 8192
    a, b = (torch.rand(size).add(0.5).to(E4M3) for size in ((20, k), (k, 24)))
    scale_a, scale_b = random_scales(20, k, scaling), random_scales(24, k, scaling)
    expected = reference_scaled_mm(a, b, scale_a, scaling, scale_b, scaling)
    found = scaled_mm(a, b, scale_a, scaling, scale_b, scaling, output_dtype=torch.float32)
    torch.testing.assert_close(found.double(), expected, rtol=max(1e-5, sum_error(a)), atol=0)


@pytest.mark.every_backend
@pytest.mark.parametrize("scale", [0.0, 1e-39, torch.inf, torch.nan])
def test_extreme_scales_multiply_the_sum(scale: float) -> None:
    a, b = (torch.randint(-8, 9, size).to(E4M3) for size in ((9, 40), (40, 10)))
    scale_a, scale_b = torch.ones(9, 1), torch.full((1, 10), 3.0)
    scale_a[4] = scale
    found = scaled_mm(a, b, scale_a, "RowWise", scale_b, "RowWise", output_dtype=torch.float32)
    torch.testing.assert_close(found, a.float() @ b.float() * scale_a * scale_b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.every_backend
def test_nan_and_infinite_operands() -> None:
    a, b = torch.ones(5, 200).to(E5M2), torch.ones(200, 6).to(E4M3)
    a[1, 3], a[2, 150], b[7, 4] = torch.nan, torch.inf, torch.nan
    one = torch.ones(1)
    found = scaled_mm(a, b, one, "TensorWise", one, "TensorWise")
    assert found[1].isnan().all() and found[:, 4].isnan().all() and found[2, :4].eq(torch.inf).all()
    assert found[[0, 3, 4]][:, [0, 1, 2, 3, 5]].eq(200).all()


@pytest.mark.parametrize("emulated", [False, True])
@pytest.mark.parametrize("m, n, k", [(0, 5, 7), (5, 0, 7), (5, 6, 0), (0, 0, 0)])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_empty_products(scaling: str, m: int, n: int, k: int, emulated: bool) -> None:
    a, b = torch.empty(m, k).to(E4M3), torch.empty(k, n).to(E4M3)
    scale_a, scale_b = random_scales(m, k, scaling), random_scales(n, k, scaling)
    if scaling == "TensorWise":
        scale_a = torch.tensor(-torch.inf)  # a sum of no terms is 0
    bias = torch.randn(n)
    with testing.emulated(random.choice(("sm_89", "sm_90a"))) if emulated else contextlib.nullcontext():
        found = scaled_mm(a, b, scale_a, scaling, scale_b, scaling, bias=bias, output_dtype=torch.float32)
    assert found.equal(bias.expand(m, n))


def test_beta_of_zero_leaves_input_out() -> None:
    a, b, one = torch.ones(3, 4).to(E4M3), torch.ones(4, 5).to(E4M3), torch.ones(1)
    nans = torch.full((3, 5), torch.nan)
    assert scaled_mm(a, b, one, "TensorWise", one, "TensorWise", input=nans, beta=0.0).eq(4).all()


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_outputs_in_fp8_saturate(dtype: torch.dtype) -> None:
    a, b, one = torch.tensor([[1.0, 448.0]]).to(E4M3), torch.tensor([[3.0, 0.0], [448.0, 0.5]]).to(E4M3), torch.ones(1)
    found = scaled_mm(a, b, one, "TensorWise", one * 1e3, "TensorWise", output_dtype=dtype)
    assert found.dtype == dtype and found.float().tolist() == [[MOST[dtype], min(MOST[dtype], 224e3)]]


def test_equals_pytorch_where_it_has_the_product() -> None:
    """In PyTorch 2.11 that is `_scaled_mm` with one scale; later ones have `scaled_mm` with scales of rows."""
    a, b = (random_fp8(*size, dtype=E4M3).clone() for size in ((48, 160), (160, 32)))
    scales = torch.tensor(0.03), torch.tensor(0.5)
    expected = torch._scaled_mm(a, b, *scales, out_dtype=torch.float32)
    found = scaled_mm(a, b, scales[0], "TensorWise", scales[1], "TensorWise", output_dtype=torch.float32)
    magnitude = (a.float() * scales[0]).abs() @ (b.float() * scales[1]).abs()
    assert ((found - expected).abs() <= 2 * SUM_ERROR * magnitude).all()


def test_pytorchs_own_arguments() -> None:
    """In their order, as enumerations and lists of one; scales of blocks padded and ordered as its kernels want."""
    kinds = torch.nn.functional.ScalingType
    a, b = random_fp8(130, 300, dtype=E4M3), random_fp8(300, 140, dtype=E4M3)
    scale_a = random_scales(130, 300, "BlockWise1x128").t().contiguous().t()
    scale_b = random_scales(140, 300, "BlockWise128x128")
    padded = torch.full((4, 2), torch.nan)
    padded[:3] = scale_b
    no_swizzle = torch.nn.functional.SwizzleType.NO_SWIZZLE
    found = scaled_mm(
        a, b, [scale_a], [kinds.BlockWise1x128], padded, kinds.BlockWise128x128, no_swizzle, [no_swizzle], None,
        torch.float16, (1, 0), True,
    )  # fmt: skip
    assert found.equal(scaled_mm(a, b, scale_a, SCALINGS[2], scale_b, SCALINGS[3], output_dtype=torch.float16))


def good_arguments() -> dict[str, Any]:
    a, b = random_fp8(5, 200, dtype=E4M3), random_fp8(200, 7, dtype=E4M3)
    return {
        "mat_a": a,
        "mat_b": b,
        "scale_a": torch.ones(5, 2),
        "scale_recipe_a": "BlockWise1x128",
        "scale_b": torch.ones(2, 1),
        "scale_recipe_b": "BlockWise128x128",
    }


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    "change, message",
    [
        ({"mat_a": torch.ones(5, 200)}, r"expected mat_a of two dims and dtype float8_e4m3fn .* cuda_ext.fp8.quantize"),
        ({"mat_b": torch.ones(3, 7).to(E4M3)}, r"expected mat_b of shape \(200, N\) to match mat_a \(5, 200\), got"),
        (
            {"scale_a": torch.ones(5, 3)},
            r"expected scale_a of shape \(5, 2\) for mat_a .* scaling BlockWise1x128, got \(5, 3\)",
        ),
        ({"scale_b": torch.ones(2, 2)}, r"expected scale_b of shape \(2, 1\) for mat_b"),
        ({"scale_a": torch.ones(5, 2).double()}, r"expected scale_a of dtype float32, got float64"),
        ({"scale_recipe_a": "TensorWise"}, r"expected scale_a of one element for scaling TensorWise, got \(5, 2\)"),
        (
            {"scale_recipe_b": "RowWise"},
            r"expected scale_b of shape \(1, 7\) for mat_b \(200, 7\) with scaling RowWise",
        ),
        ({"scale_recipe_b": "BlockWise1x32"}, r"expected scale_recipe_b of TensorWise, .* got 'BlockWise1x32'"),
        ({"bias": torch.ones(6)}, r"expected bias of shape \(7,\)"),
        ({"input": torch.ones(5, 7).double()}, r"expected input of dtype"),
        ({"output_dtype": torch.float64}, r"expected output_dtype float32, float16 or bfloat16, got float64"),
        ({"contraction_dim": (0, 1)}, r"expected contraction_dim"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_errors_name_the_argument(change: dict[str, Any], message: str, device: str) -> None:
    arguments = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in (good_arguments() | change).items()
    }
    with pytest.raises(RuntimeError, match=f"scaled_mm: {message}"):
        scaled_mm(**arguments)


def test_has_no_derivative_and_says_what_has() -> None:
    arguments = good_arguments()
    with pytest.raises(RuntimeError, match=r"expected no tensor that requires grad.*cuda_ext\.fp8\.linear"):
        scaled_mm(**arguments, bias=torch.ones(7, requires_grad=True))
    with torch.no_grad():
        scaled_mm(**arguments, bias=torch.ones(7, requires_grad=True))


def test_ops_follow_the_rules_of_pytorch() -> None:
    arguments = good_arguments()
    a, b, scale_a, scale_b = (arguments[name] for name in ("mat_a", "mat_b", "scale_a", "scale_b"))
    checks = ("test_faketensor", "test_aot_dispatch_dynamic")  # test_schema multiplies arguments, which FP8 cannot
    torch.library.opcheck(
        torch.ops.cuda_ext.scaled_mm.default,
        (a, b, scale_a, 4, scale_b, 5),
        {"output_dtype": torch.float32},
        test_utils=checks,
    )
    for scaling in (0, 1, 4, 5):
        for op in (torch.ops.cuda_ext.quantize_fp8.default, torch.ops.cuda_ext.quantize_fp8_both.default):
            torch.library.opcheck(op, (torch.randn(5, 300), E4M3, scaling, True))


def test_one_graph_with_sizes_that_change() -> None:
    def product(a: Tensor, b: Tensor) -> Tensor:
        left, right = quantize(a, "BlockWise1x128"), quantize(b.t(), "BlockWise128x128")
        return scaled_mm(left[0], right[0].t(), left[1], "BlockWise1x128", right[1], "BlockWise128x128")

    compiled = torch.compile(product, fullgraph=True, dynamic=True, backend="aot_eager")
    for m, k in ((5, 130), (9, 300)):
        a, b = torch.randn(m, k), torch.randn(k, 7)
        assert compiled(a, b).equal(product(a, b))


# Quantisation


def definition(x: Tensor, scaling: str, dtype: torch.dtype, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Block by block."""
    rows, columns = x.shape
    height, width = {"TensorWise": (rows, columns), "RowWise": (1, columns), "BlockWise1x128": (1, 128)}.get(
        scaling, (128, 128)
    )
    data = torch.empty(rows, columns, dtype=torch.float32)
    scales = torch.empty(-(-rows // height), -(-columns // width))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
            block = x[at].float()
            finite = block[block.isfinite()].abs()
            most = finite.max() if len(finite) else torch.tensor(0.0)
            scale = torch.maximum(most / MOST[dtype], torch.tensor(2.0**-126)) if most > 0 else torch.tensor(1.0)
            if power_of_two:
                mantissa, exponent = torch.frexp(scale)
                scale = torch.ldexp(torch.tensor(1.0), exponent - (mantissa == 0.5).int())
            scales[i, j] = scale
            data[at] = (block * (1 / scale)).clamp(-MOST[dtype], MOST[dtype])
    return data.to(dtype), scales.t() if scaling == "BlockWise128x128" else scales


def assert_quantised(x: Tensor, scaling: str, dtype: torch.dtype, power_of_two: bool) -> None:
    """By the kernel for CPUs, and by those for CUDA: the matrix, its transpose, and both at once."""
    options: dict[str, Any] = {"dtype": dtype, "power_of_two": power_of_two}
    expected = definition(x, scaling, dtype, power_of_two)
    expected_transposed = definition(x.t(), scaling, dtype, power_of_two)
    for emulated in (False, True):
        with testing.emulated(random.choice(("sm_80", "sm_90a"))) if emulated else contextlib.nullcontext():
            assert_equal_fp8(quantize(x, scaling, **options), expected)
            assert_equal_fp8(quantize(x.t(), scaling, **options), expected_transposed)
            both = quantize_both(x, scaling, **options)
        assert_equal_fp8(both[:2], expected)
        assert_equal_fp8(both[2:], expected_transposed)


def assert_equal_fp8(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    (data, scales), (expected, expected_scales) = found, wanted
    assert data.dtype == expected.dtype and scales.dtype == torch.float32 and scales.equal(expected_scales)
    assert data.float().isnan().equal(expected.float().isnan())
    same = data.view(torch.uint8).eq(expected.view(torch.uint8)) | data.float().isnan()
    assert same.all(), (data.float()[~same], expected.float()[~same])


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("case", range(6))
def test_quantised_numbers_are_those_of_the_definition(
    case: int, scaling: str, dtype: torch.dtype, power_of_two: bool
) -> None:
    kind = random.choice((torch.float32, torch.bfloat16, torch.float16))
    shape = random.choice(((1, 1), (3, 127), (130, 300), (257, 128), (2, 1000)))
    x = torch.randn(shape).mul(2.0 ** torch.randint(-30, 8, shape)).to(kind)
    holes = torch.rand(shape)
    x[holes < 0.1] = 0.0
    for value, least in ((torch.nan, 0.98), (torch.inf, 0.96), (-torch.inf, 0.95), (-0.0, 0.9)):
        if random.random() < 0.5:
            x[holes > least] = value
    assert_quantised(with_random_strides(x), scaling, dtype, power_of_two)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_every_number_of_16_bits(dtype: torch.dtype, kind: torch.dtype) -> None:
    """In rows of one power of two each, so that every number of FP8, subnormal ones too, and every tie is met."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(kind)
    assert_quantised(every.view(256, 256), "RowWise", dtype, False)
    assert_quantised(every.view(256, 256), "RowWise", dtype, True)
    assert_quantised(every.view(256, 256), "TensorWise", dtype, True)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_numbers_next_to_every_tie(dtype: torch.dtype) -> None:
    """In float32 a tie and its neighbours are rounded three ways; the largest of a row makes the scale 1."""
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    numbers = numbers[numbers.isfinite()].abs().unique()
    ties = (numbers[1:] + numbers[:-1]) / 2
    around = torch.cat([ties, ties.nextafter(torch.tensor(torch.inf)), ties.nextafter(torch.tensor(0.0)), numbers])
    x = torch.cat([around, -around, numbers.max()[None]])[None]
    data, scales = quantize(x, dtype=dtype)
    assert scales.eq(1).all() and data.view(torch.uint8).equal(x.to(dtype).view(torch.uint8))


def test_numbers_above_the_largest_saturate() -> None:
    """Casts do not in PyTorch 2.11, where 465 becomes NaN; 448 is the largest finite number of the row."""
    x = torch.tensor([[448.0, torch.inf, -torch.inf, torch.nan, 1.0]])
    data, scales = quantize(x)
    assert scales.item() == 1 and data.float()[0, :3].tolist() == [448, 448, -448] and data.float()[0, 3].isnan()


@pytest.mark.every_backend
@pytest.mark.parametrize("scaling", SCALINGS)
def test_products_of_what_was_quantised(scaling: str) -> None:
    x, weight = torch.randn(70, 300), torch.randn(50, 300)
    dtype, power_of_two = random.choice((E4M3, E5M2)), random.random() < 0.5
    assert_quantised(x, scaling, dtype, power_of_two)
    (a, scale_a), (b, scale_b) = (
        quantize(each, scaling, dtype=dtype, power_of_two=power_of_two) for each in (x, weight)
    )
    assert_matches_definition(a, b.t(), scale_a, scaling, scale_b, scaling, output_dtype=torch.float32)
    exact = x.double() @ weight.double().t()
    found = scaled_mm(a, b.t(), scale_a, scaling, scale_b, scaling, output_dtype=torch.float32)
    # Elements have 4 or 3 bits: a rounding of at most 2^-4 or 2^-3 of each, independent in sign; 3500 sums.
    allowed = (2.0**-4 if dtype == E4M3 else 2.0**-3) * 300**0.5 * 4
    assert (found - exact).abs().max() < allowed


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_nothing_to_quantise(scaling: str, shape: tuple[int, int]) -> None:
    data, scales, transposed, its_scales = quantize_both(torch.empty(shape), scaling)
    assert data.shape == shape and transposed.shape == shape[::-1] and scales.eq(1).all() and its_scales.eq(1).all()
    assert scales.numel() == 1 or scaling != "TensorWise"
    assert quantize(torch.empty(shape), scaling)[1].shape == scales.shape


def test_rows_begin_at_multiples_of_16_bytes() -> None:
    """As TMA reads them, so that `scaled_mm` does not copy."""
    for emulated in (False, True):
        with testing.emulated("sm_90a") if emulated else contextlib.nullcontext():
            data, _, transposed, _ = quantize_both(torch.randn(5, 33))
        assert data.stride() == (48, 1) and transposed.stride() == (16, 1)


def test_what_is_quantised_has_no_gradient() -> None:
    data, scales = quantize(torch.randn(4, 8, requires_grad=True))
    assert not data.requires_grad and not scales.requires_grad


def test_errors_of_quantize() -> None:
    with pytest.raises(RuntimeError, match=r"quantize_fp8: expected scaling of TensorWise, .* got 'rows'"):
        quantize(torch.ones(2, 3), "rows")
    with pytest.raises(RuntimeError, match=r"quantize_fp8: expected input of two dims .* got \(2,\)"):
        quantize(torch.ones(2))
    with pytest.raises(RuntimeError, match=r"quantize_fp8: expected dtype float8_e4m3fn or float8_e5m2, got float16"):
        quantize(torch.ones(2, 3), dtype=torch.float16)


def test_public_name() -> None:
    assert cuda_ext.scaled_mm is scaled_mm and cuda_ext.fp8.quantize is quantize
