"""Criteria by which other libraries test their FP8, rebuilt for ours: TransformerEngine, DeepGEMM and PyTorch.

Each test says which file it rebuilds. Where a criterion cannot hold as it is, the test says what holds instead.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_scaled_mm import blocks, sum_error
from torch import Tensor

from cuda_ext import grouped_mm, scaled_grouped_mm, scaled_mm
from cuda_ext.fp8 import quantize, quantize_both

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = [(left, right) for left in (E4M3, E5M2) for right in (E4M3, E5M2)]
OUTPUTS = [torch.bfloat16, torch.float32]
TILES = {"BlockWise1x128": (1, 128), "BlockWise128x128": (128, 128)}
OPERANDS = {
    "1Dx2D": ("BlockWise1x128", "BlockWise128x128"),
    "1Dx1D": ("BlockWise1x128", "BlockWise1x128"),
    "2Dx1D": ("BlockWise128x128", "BlockWise1x128"),
}


# TransformerEngine, tests/pytorch/test_float8_blockwise_scaling_exact.py: quantised numbers, bit for bit


def ramps(rows: int, columns: int, tile: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Each tile rises from 0 to an end of its own, up to 8192 of either sign, so that no two scales need be alike."""
    height, width = tile
    ends = torch.rand(-(-rows // height), -(-columns // width)).mul(2).sub(1) * 8192
    steps = torch.arange(height * width).view(tile) / (height * width)
    grid = ends[:, None, :, None] * steps[None, :, None, :]
    return grid.flatten(2).flatten(0, 1)[:rows, :columns].to(dtype).contiguous()


def plainly_quantised(x: Tensor, tile: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The matrix, and (tiles of rows, tiles of columns) powers of two, of one expression for all tiles."""
    (rows, columns), (height, width) = x.shape, tile
    padded = F.pad(x.float(), (0, -columns % width, 0, -rows % height))
    tiled = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))
    largest, most = tiled.abs().amax((1, 3)), torch.finfo(dtype).max
    scales = torch.where(largest > 0, torch.exp2(torch.ceil(torch.log2(largest.double() / most))), 1.0).float()
    data = tiled.div(scales[:, None, :, None]).clamp(-most, most).flatten(2).flatten(0, 1)[:rows, :columns]
    return data.to(dtype), scales


def assert_same_numbers(found: tuple[Tensor, Tensor], x: Tensor, scaling: str, dtype: torch.dtype) -> None:
    data, scales = plainly_quantised(x, TILES[scaling], dtype)
    assert found[0].view(torch.uint8).equal(data.view(torch.uint8))
    assert found[1].equal(scales.t() if scaling == "BlockWise128x128" else scales)


PADDED_SHAPES = [(128, 128), (256, 256), (256, 272), (303, 300), (305, 256)]
LARGE_SHAPES = [(256, 1024), (1024, 256), (2000, 2000), (2048, 2000), (2000, 1024), (2048, 1024)]


def check_quantised(shape: tuple[int, int], scaling: str, dtype: torch.dtype, of: torch.dtype) -> None:
    x = ramps(*shape, TILES[scaling], of)
    assert_same_numbers(quantize(x, scaling, dtype=dtype, power_of_two=True), x, scaling, dtype)
    both = quantize_both(x, scaling, dtype=dtype, power_of_two=True)
    assert_same_numbers(both[:2], x, scaling, dtype)
    assert_same_numbers(both[2:], x.t(), scaling, dtype)


@pytest.mark.every_backend
@pytest.mark.sampled(cases=12)
@pytest.mark.parametrize("of", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("scaling", TILES)
@pytest.mark.parametrize("shape", PADDED_SHAPES, ids=str)
def test_te_quantization_block_tiling(
    shape: tuple[int, int], scaling: str, dtype: torch.dtype, of: torch.dtype
) -> None:
    """TransformerEngine test_quantization_block_tiling_versus_reference: zero tolerance, both copies."""
    check_quantised(shape, scaling, dtype, of)


@pytest.mark.sampled(cases=6)
@pytest.mark.parametrize("of", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("scaling", TILES)
@pytest.mark.parametrize("shape", LARGE_SHAPES, ids=str)
def test_te_quantization_of_large_matrices(
    shape: tuple[int, int], scaling: str, dtype: torch.dtype, of: torch.dtype
) -> None:
    """The same test's larger shapes."""
    check_quantised(shape, scaling, dtype, of)


@pytest.mark.every_backend
@pytest.mark.parametrize("value", ["zeros", "maxes"])
@pytest.mark.parametrize("of", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_te_quantization_extrema(dtype: torch.dtype, of: torch.dtype, value: str) -> None:
    """TransformerEngine test_quantization_block_tiling_extrema_versus_reference: a tile of one value."""
    x = torch.full((128, 128), torch.finfo(of).max if value == "maxes" else 0.0, dtype=of)
    found = quantize(x, "BlockWise128x128", dtype=dtype, power_of_two=True)
    assert_same_numbers(found, x, "BlockWise128x128", dtype)
    if value == "zeros":
        assert found[1].item() == 1 and not found[0].float().any()


# TransformerEngine, tests/pytorch/test_float8_blockwise_gemm_exact.py: products, against sums block by block


def scale_of_lines(scales: Tensor, scaling: str, lines: int) -> Tensor:
    """(lines, blocks of K)"""
    if scaling == "BlockWise1x128":
        return scales
    return scales.t().repeat_interleave(128, 0)[:lines]


def sum_of_blocks(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor) -> Tensor:
    """In float32: each block of K is summed, scaled and added to what came before; b is (N, K). With scales that are
    powers of two the fused multiply-add of TransformerEngine's reference rounds as this addition."""
    out = torch.zeros(len(a), len(b))
    for block in range(blocks(a.shape[1])):
        at = slice(128 * block, 128 * (block + 1))
        part = a[:, at].float() @ b[:, at].float().t()
        out = out + part * scale_a[:, block, None] * scale_b[:, block]
    return out


def of_integers(lines: int, k: int) -> Tensor:
    """From -3 to 3, times a power of two for each 128 along K: sums of a block fit into 14 bits, in any order."""
    powers = torch.exp2(torch.randint(-8, 9, (blocks(k),)).float()).repeat_interleave(128)[:k]
    return torch.randint(-3, 4, (lines, k)) * powers


def quantised(x: Tensor, scaling: str, dtype: torch.dtype, columnwise: bool) -> tuple[Tensor, Tensor]:
    """From the matrix, or from its transpose in memory, as that of a backward pass."""
    if columnwise:
        return quantize_both(x.t().contiguous(), scaling, dtype=dtype, power_of_two=True)[2:]
    return quantize(x, scaling, dtype=dtype, power_of_two=True)


def check_product(
    x: Tensor,
    w: Tensor,
    operands: str,
    formats: tuple[torch.dtype, torch.dtype],
    output: torch.dtype,
    *,
    bias: bool = False,
    accumulate: bool = False,
    columnwise: tuple[bool, bool] = (False, False),
    exact: bool = False,
) -> None:
    """TransformerEngine allows no difference. Its reference multiplies blocks by the same instruction; ours by a sum in
    another order, so that equality is asked for where order does not matter, else what two orders can differ by."""
    scalings = OPERANDS[operands]
    a, scale_a = quantised(x, scalings[0], formats[0], columnwise[0])
    b, scale_b = quantised(w, scalings[1], formats[1], columnwise[1])
    options: dict[str, Tensor] = {"bias": torch.randn(len(w), dtype=torch.bfloat16)} if bias else {}
    if accumulate:
        options["input"] = (torch.randn(len(x), len(w)) * x.abs().max()).to(output)
    found = scaled_mm(a, b.t(), scale_a, scalings[0], scale_b, scalings[1], output_dtype=output, **options)
    lines_a, lines_b = scale_of_lines(scale_a, scalings[0], len(x)), scale_of_lines(scale_b, scalings[1], len(w))
    expected = sum_of_blocks(a, lines_a, b, lines_b)
    magnitude = sum_of_blocks(a.float().abs(), lines_a, b.float().abs(), lines_b).double()
    for term in options.values():  # theirs rounds to the output first; ours once, after all terms
        expected, magnitude = expected + term.float(), magnitude + term.double().abs()
    assert found.dtype == output
    if exact:
        assert found.equal(expected.to(output))
    else:
        rounding = torch.finfo(output).eps * expected.double().abs() + torch.finfo(torch.float32).smallest_normal
        bound = 2 * sum_error(a) * magnitude + rounding
        assert ((found.double() - expected.double()).abs() <= bound).all()


@pytest.mark.every_backend
@pytest.mark.sampled(cases=24)
@pytest.mark.parametrize("exact", [False, True], ids=["normal", "integers"])
@pytest.mark.parametrize("output", OUTPUTS, ids=str)
@pytest.mark.parametrize("formats", FORMATS, ids=str)
@pytest.mark.parametrize("operands", OPERANDS)
@pytest.mark.parametrize(
    "shape",
    [(128, 128, 128), (256, 128, 256), (320, 128, 336), (320, 64, 336), (256, 256, 256), (320, 256, 336)],
    ids=str,
)
def test_te_blockwise_gemm_shapes(
    shape: tuple[int, int, int], operands: str, formats: Any, output: torch.dtype, exact: bool
) -> None:
    """TransformerEngine test_cublas_gemm_fp8_blockwise_shape_varying; also E5M2 times E5M2, which it skips."""
    m, k, n = shape
    x, w = (of_integers(lines, k) if exact else torch.randn(lines, k) for lines in (m, n))
    check_product(x, w, operands, formats, output, exact=exact)


@pytest.mark.parametrize("operands", OPERANDS)
def test_te_blockwise_gemm_long_sum(operands: str) -> None:
    """Its longest sum, (1024, 4096, 1024), of fewer rows and columns."""
    for exact in (False, True):
        x, w = (of_integers(lines, 4096) if exact else torch.randn(lines, 4096) for lines in (130, 136))
        check_product(x, w, operands, random.choice(FORMATS), random.choice(OUTPUTS), exact=exact)


@pytest.mark.every_backend
@pytest.mark.sampled(cases=16)
@pytest.mark.parametrize("accumulate", [False, True], ids=["no_accumulate", "accumulate"])
@pytest.mark.parametrize("magnitude", [1e-28, 1.0, 1e3])
@pytest.mark.parametrize("noise", ["normal", "uniform"])
@pytest.mark.parametrize("output", OUTPUTS, ids=str)
@pytest.mark.parametrize("operands", OPERANDS)
@pytest.mark.parametrize("shape", [(256, 128, 256), (320, 256, 336)], ids=str)
def test_te_blockwise_gemm_magnitudes_and_accumulation(
    shape: tuple[int, int, int], operands: str, output: torch.dtype, noise: str, magnitude: float, accumulate: bool
) -> None:
    """TransformerEngine test_cublas_gemm_fp8_blockwise_accumulate_magnitude_varying."""
    m, k, n = shape
    draw = torch.randn if noise == "normal" else lambda *size: torch.rand(*size).mul(2).sub(1)
    check_product(draw(m, k) * magnitude, draw(n, k), operands, random.choice(FORMATS), output, accumulate=accumulate)


@pytest.mark.every_backend
@pytest.mark.sampled(cases=12)
@pytest.mark.parametrize("accumulate", [False, True], ids=["no_accumulate", "accumulate"])
@pytest.mark.parametrize("output", OUTPUTS, ids=str)
@pytest.mark.parametrize("operands", OPERANDS)
@pytest.mark.parametrize("shape", [(256, 128, 256), (320, 64, 336), (256, 256, 256)], ids=str)
def test_te_blockwise_gemm_bias(
    shape: tuple[int, int, int], operands: str, output: torch.dtype, accumulate: bool
) -> None:
    """TransformerEngine test_cublas_gemm_fp8_blockwise_bias."""
    m, k, n = shape
    x, w, formats = torch.randn(m, k) * 1e-3, torch.randn(n, k), random.choice(FORMATS)
    check_product(x, w, operands, formats, output, bias=True, accumulate=accumulate)


@pytest.mark.every_backend
@pytest.mark.sampled(cases=12)
@pytest.mark.parametrize("accumulate", [False, True], ids=["no_accumulate", "accumulate"])
@pytest.mark.parametrize("columnwise", [(True, False), (True, True), (False, True)], ids=str)
@pytest.mark.parametrize("operands", OPERANDS)
@pytest.mark.parametrize("shape", [(256, 128, 256), (16, 128, 128), (320, 64, 336), (400, 128, 400)], ids=str)
def test_te_blockwise_gemm_of_transposed_copies(
    shape: tuple[int, int, int], operands: str, columnwise: tuple[bool, bool], accumulate: bool
) -> None:
    """TransformerEngine test_cublas_gemm_fp8_blockwise_columnwise."""
    m, k, n = shape
    options: dict[str, Any] = {"columnwise": columnwise, "accumulate": accumulate}
    formats, output = random.choice(FORMATS), random.choice(OUTPUTS)
    check_product(torch.randn(m, k), torch.randn(n, k), operands, formats, output, **options)


@pytest.mark.every_backend
@pytest.mark.parametrize("shape", [(255, 128, 256), (256, 120, 256), (256, 128, 252)], ids=str)
@pytest.mark.parametrize("operands", OPERANDS)
def test_te_unaligned_shapes(operands: str, shape: tuple[int, int, int]) -> None:
    """TransformerEngine test_unaligned_shapes: cuBLAS refuses most of these; here sizes are free."""
    m, k, n = shape
    check_product(of_integers(m, k), of_integers(n, k), operands, (E4M3, E4M3), torch.bfloat16, exact=True)


def test_te_two_dims_by_two_dims() -> None:
    """TransformerEngine test_illegal_2D_by_2D_enforced: cuBLAS has no such product; here it is one as any other."""
    x, w = of_integers(256, 300), of_integers(140, 300)
    scaling = "BlockWise128x128"
    (a, scale_a), (b, scale_b) = (quantize(each, scaling, power_of_two=True) for each in (x, w))
    found = scaled_mm(a, b.t(), scale_a, scaling, scale_b, scaling, output_dtype=torch.float32)
    lines = scale_of_lines(scale_a, scaling, 256), scale_of_lines(scale_b, scaling, 140)
    assert found.equal(sum_of_blocks(a, lines[0], b, lines[1]))


# DeepGEMM, tests/test_fp8.py and generators.py: the difference to the product before quantisation


def calc_diff(x: Tensor, y: Tensor) -> float:
    """1 - 2 <x, y> / (<x, x> + <y, y>)"""
    x, y = x.double(), y.double()
    total = (x * x + y * y).sum()
    return float(1 - 2 * (x * y).sum() / total) if total > 0 else 0.0


# Its (N, K), of DeepSeek-V3, divided by 16.
DEEPSEEK_SIZES = [(132, 448), (36, 448), (1536, 96), (2048, 32), (448, 1024), (256, 448), (448, 128)]


@pytest.mark.every_backend
@pytest.mark.sampled(cases=8)
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("size", DEEPSEEK_SIZES, ids=str)
@pytest.mark.parametrize("m", [1, 8, 256])
def test_deepgemm_dense(m: int, size: tuple[int, int], power_of_two: bool) -> None:
    """DeepGEMM test_gemm, forward and, of many rows, the gradient of the input: below 0.001. Of few rows N is as large
    as there: the criterion is a mean over outputs, 0.0007 with E4M3, which few of them miss by chance."""
    for n, k in [size, size[::-1]] if m == 256 else [(16 * size[0], size[1])]:
        x, w = torch.randn(m, k, dtype=torch.bfloat16), torch.randn(n, k, dtype=torch.bfloat16)
        a, scale_a = quantize(x, "BlockWise1x128", power_of_two=power_of_two)
        b, scale_b = quantize(w, "BlockWise128x128", power_of_two=power_of_two)
        out = scaled_mm(a, b.t(), scale_a, "BlockWise1x128", scale_b, "BlockWise128x128")
        assert calc_diff(out, x.double() @ w.double().t()) < 0.001


@pytest.mark.every_backend
@pytest.mark.sampled(cases=4)
@pytest.mark.parametrize("size", DEEPSEEK_SIZES[:2] + DEEPSEEK_SIZES[5:], ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
def test_deepgemm_weight_gradient(accumulate: bool, size: tuple[int, int]) -> None:
    """DeepGEMM test_gemm, the gradient of the weight: 1x128 both, added to a float32 matrix."""
    n, k = size
    rows = 256  # the sum
    grad, x = torch.randn(rows, n, dtype=torch.bfloat16), torch.randn(rows, k, dtype=torch.bfloat16)
    a, scale_a = quantize_both(grad, "BlockWise1x128")[2:]
    b, scale_b = quantize_both(x, "BlockWise1x128")[2:]
    before = torch.randn(n, k) * 32 if accumulate else None
    scalings = scale_a, "BlockWise1x128", scale_b, "BlockWise1x128"
    out = scaled_mm(a, b.t(), *scalings, input=before, output_dtype=torch.float32)
    expected = grad.double().t() @ x.double() + (0.0 if before is None else before.double())
    assert calc_diff(out, expected) < 0.001


@pytest.mark.every_backend
@pytest.mark.sampled(cases=6)
@pytest.mark.parametrize("alignment", [128, 1])
@pytest.mark.parametrize("groups, rows", [(4, 128), (8, 64), (32, 3)])
@pytest.mark.parametrize("size", [(384, 448), (448, 192), (256, 256), (256, 128)], ids=str)
def test_deepgemm_m_grouped_contiguous(size: tuple[int, int], groups: int, rows: int, alignment: int) -> None:
    """DeepGEMM test_m_grouped_gemm_contiguous; groups may begin anywhere here, also within a tile."""
    n, k = size
    real = torch.tensor([int(rows * random.uniform(0.7, 1.3)) for _ in range(groups)])
    aligned = (real + alignment - 1) // alignment * alignment
    offs = aligned.cumsum(0)
    x, w = torch.randn(int(offs[-1]), k, dtype=torch.bfloat16), torch.randn(groups, n, k, dtype=torch.bfloat16)
    a, scale_a = quantize(x, "BlockWise1x128")
    each = [quantize(matrix, "BlockWise128x128") for matrix in w]
    b, scale_b = torch.stack([data.contiguous() for data, _ in each]), torch.stack([scales for _, scales in each])
    out = scaled_grouped_mm(a, b.mT, scale_a, "BlockWise1x128", scale_b, "BlockWise128x128", offs=offs)
    expected, used = torch.zeros(len(x), n, dtype=torch.float64), torch.zeros(len(x), 1, dtype=torch.bool)
    for group, (end, size_of_group) in enumerate(zip(offs.tolist(), real.tolist(), strict=True)):
        span = slice(end - int(aligned[group]), end - int(aligned[group]) + size_of_group)
        expected[span], used[span] = x[span].double() @ w[group].double().t(), True
    assert calc_diff(out.where(used, 0.0), expected) < 0.001


# PyTorch, test/test_scaled_matmul_cuda.py and test/test_matmul_cuda.py


def saturated(x: Tensor, scale: Tensor, dtype: torch.dtype = E4M3) -> Tensor:
    most = torch.finfo(dtype).max
    return (x * scale).clamp(-most, most).to(dtype)


def scale_for(x: Tensor, dim: int | None = None) -> Tensor:
    largest = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
    return 448 / largest.float().clamp(min=1e-12)


def emulated(x: Tensor, x_scale: Tensor, y: Tensor, y_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Of operands that were multiplied by their scales."""
    out = (x.float() / x_scale) @ (y.float() / y_scale)
    return out if bias is None else out + bias.float()


def assert_as_emulated(x: Tensor, y: Tensor, scaling: str, bias: Tensor | None = None, tight: float = 3e-3) -> None:
    by_row = scaling == "RowWise"
    x_scale, y_scale = scale_for(x, 1 if by_row else None), scale_for(y, 0 if by_row else None)
    a, b = saturated(x, x_scale), saturated(y, y_scale)
    scales = x_scale.reciprocal(), scaling, y_scale.reciprocal(), scaling
    found = scaled_mm(a, b, *scales, bias=bias, output_dtype=x.dtype)
    expected = emulated(a, x_scale, b, y_scale, bias).to(x.dtype)
    tolerance = tight if x.dtype == torch.float32 else 7e-2
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    assert F.cosine_similarity(found.flatten().float(), expected.flatten().float(), dim=0) >= 0.999


BASES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.every_backend
@pytest.mark.parametrize("y_contiguous", [False, True])
@pytest.mark.parametrize("x_contiguous", [False, True])
@pytest.mark.parametrize("base", BASES, ids=str)
def test_torch_scaled_mm_vs_emulated(base: torch.dtype, x_contiguous: bool, y_contiguous: bool) -> None:
    """PyTorch test_scaled_mm_vs_emulated: all layouts, of which its Hopper kernels take one."""
    m, n, k = 16, 32, 16
    x = torch.randn(m, k, dtype=base) if x_contiguous else torch.randn(k, m, dtype=base).t()
    y = torch.randn(k, n, dtype=base) if y_contiguous else torch.randn(n, k, dtype=base).t()
    assert_as_emulated(x, y, "TensorWise")


@pytest.mark.every_backend
@pytest.mark.parametrize("base", BASES, ids=str)
def test_torch_scaled_mm_change_stride(base: torch.dtype) -> None:
    """PyTorch test_scaled_mm_change_stride: columns that are further apart than they are long."""
    x = torch.empty_strided((16, 16), (16, 1), dtype=base).normal_()
    y = torch.empty_strided((16, 32), (1, 64), dtype=base).normal_()
    assert_as_emulated(x, y, "TensorWise")


@pytest.mark.every_backend
@pytest.mark.parametrize("base", BASES, ids=str)
def test_torch_scaled_mm_vs_emulated_row_wise(base: torch.dtype) -> None:
    """PyTorch test_scaled_mm_vs_emulated_row_wise, with a bias; its kernels have none in float32."""
    x, y = torch.randn(128, 512, dtype=base), torch.randn(256, 512, dtype=base).t()
    assert_as_emulated(x, y, "RowWise", torch.randn(256, dtype=base), tight=2e-3)


@pytest.mark.every_backend
@pytest.mark.sampled(cases=8)
@pytest.mark.parametrize("output", OUTPUTS, ids=str)
@pytest.mark.parametrize("case", ["eye", "ones", "a scale of 4", "random scales", "random"])
@pytest.mark.parametrize("operands", OPERANDS)
@pytest.mark.parametrize("shape", [(256, 192, 256), (384, 128, 640), (256, 256, 256)], ids=str)
def test_torch_scaled_mm_block_wise_numerics(
    shape: tuple[int, int, int], operands: str, case: str, output: torch.dtype
) -> None:
    """PyTorch test_scaled_mm_block_wise_numerics, with 128x128 scales padded to four blocks, as its kernels ask."""
    m, n, k = shape
    scalings = OPERANDS[operands]

    def operand(lines: int, scaling: str, last: bool) -> tuple[Tensor, Tensor, Tensor]:
        """The matrix, and its numbers and scales."""
        x = {"eye": torch.eye(lines, k), "random": torch.randn(lines, k)}.get(case, torch.ones(lines, k))
        if case in ("eye", "random", "ones"):
            return x, *quantize(x, scaling)
        shape = (blocks(k), blocks(lines)) if scaling == "BlockWise128x128" else (lines, blocks(k))
        scales = torch.ones(shape)
        if case == "random scales":
            scales, x = torch.rand(shape) + 0.5, torch.randint(0, 255, (lines, k)).float()
        else:
            scales[(-1, -1) if last else (0, 0)] = 0.25
        data = x.div(expanded(scales, scaling, lines, k)).clamp(max=448).to(E4M3)
        return x, data, scales

    (x, a, scale_a), (y, b, scale_b) = operand(m, scalings[0], False), operand(n, scalings[1], True)
    given = [padded_to_four(scales, scaling) for scales, scaling in zip((scale_a, scale_b), scalings, strict=True)]
    found = scaled_mm(a, b.t(), given[0], scalings[0], given[1], scalings[1], output_dtype=output)
    exact = [
        each.double() * expanded(scales, scaling, len(each), k)
        for each, scales, scaling in zip((a, b), (scale_a, scale_b), scalings, strict=True)
    ]
    expected = exact[0] @ exact[1].t()
    torch.testing.assert_close(found.double(), expected, atol=1e-3 if case == "eye" else 0.6, rtol=7e-2)
    for reference in (expected, x.double() @ y.double().t()):  # the second: that the scales are not trivial
        assert F.cosine_similarity(found.flatten().double(), reference.flatten(), dim=0) >= 0.999


def expanded(scales: Tensor, scaling: str, lines: int, k: int) -> Tensor:
    """(lines, K)"""
    return scale_of_lines(scales, scaling, lines).repeat_interleave(128, 1)[:, :k]


def padded_to_four(scales: Tensor, scaling: str) -> Tensor:
    """In the order of memory, and with the padding, of PyTorch's kernels; what pads is not read."""
    if scaling == "BlockWise128x128":
        scales = F.pad(scales, (0, 0, 0, -len(scales) % 4), value=torch.nan)
    return scales.t().contiguous().t()


@pytest.mark.every_backend
@pytest.mark.parametrize("output", [*BASES, E4M3], ids=str)
@pytest.mark.parametrize("formats", FORMATS, ids=str)
def test_torch_float8_basics(formats: tuple[torch.dtype, torch.dtype], output: torch.dtype) -> None:
    """PyTorch test_float8_basics: times the unit matrix, in every layout."""
    size = random.choice((16, 32, 48, 64, 80, 96))
    x, one = torch.rand(size, size).to(formats[0]), torch.ones(1)
    unit = torch.eye(size).to(formats[1])
    left, right = x if random.random() < 0.5 else x.t(), unit if random.random() < 0.5 else unit.t()
    found = scaled_mm(left, right, one, "TensorWise", one, "TensorWise", output_dtype=output)
    assert found.float().equal(left.float().to(output).float())


@pytest.mark.every_backend
@pytest.mark.parametrize("fast", [False, True])
def test_torch_float8_scale_and_bias(fast: bool) -> None:
    """PyTorch test_float8_scale, test_float8_scale_fast_accum, test_float8_bias and test_float8_bias_relu_edgecase."""
    one = torch.ones(())
    x, y = torch.full((16, 16), 0.5).to(E4M3), torch.full((16, 16), 0.5).to(E5M2).t()
    for scales in ((one, one), (torch.tensor(1.5), torch.tensor(0.66))):
        out = scaled_mm(x, y, scales[0], "TensorWise", scales[1], "TensorWise", use_fast_accum=fast)
        # 4 * 0.99 in FP8 is 4, which is what PyTorch compares.
        torch.testing.assert_close(out.float(), 4.0 * (scales[0] * scales[1]).expand(16, 16), rtol=2**-8, atol=0)
        out = scaled_mm(x, y, scales[0], "TensorWise", scales[1], "TensorWise", output_dtype=E4M3, use_fast_accum=fast)
        assert out.float().eq(4).all()
    x, y = torch.ones(16, 48).to(E4M3), torch.full((32, 48), 0.25).to(E4M3).t()
    for bias in (4.0, -3.0):
        left = x if bias > 0 else torch.zeros(16, 48).to(E4M3)
        out = scaled_mm(left, y, one, "TensorWise", one, "TensorWise", bias=torch.full((32,), bias).bfloat16())
        assert out.float().eq(12.0 + bias if bias > 0 else bias).all()


@pytest.mark.every_backend
@pytest.mark.parametrize("fast", [False, True])
def test_torch_rowwise_scaling_sanity(fast: bool) -> None:
    """PyTorch test_float8_rowwise_scaling_sanity, and that scales of rows that are all alike are one scale."""
    m, k, n = 100, 512, 200
    a, b = torch.full((m, k), 0.5).to(E4M3), torch.full((n, k), 0.5).to(E4M3).t()
    by_row = scaled_mm(a, b, torch.ones(m, 1), "RowWise", torch.ones(1, n), "RowWise", use_fast_accum=fast)
    assert by_row.float().eq(k * 0.25).all()
    a, b = (torch.randint(-8, 9, size).to(E4M3) for size in ((m, k), (k, n)))
    scales = torch.full((m, 1), 0.375), torch.full((1, n), 1.5)
    by_row = scaled_mm(a, b, scales[0], "RowWise", scales[1], "RowWise", output_dtype=torch.float32)
    of_all = scaled_mm(a, b, scales[0][0], "TensorWise", scales[1][0, :1], "TensorWise", output_dtype=torch.float32)
    assert by_row.equal(of_all)


@pytest.mark.every_backend
@pytest.mark.parametrize("bias", [False, True])
def test_torch_non_divisible_leading_dim(bias: bool) -> None:
    """PyTorch test_non_divisible_leading_dim, whose result it does not compare."""
    a, b = torch.randint(-8, 9, (17, 16)).to(E4M3), torch.randint(-8, 9, (16, 16)).to(E4M3).t()
    addend = torch.randint(-8, 9, (16,)).bfloat16() if bias else None
    one = torch.ones(())
    found = scaled_mm(a, b, one, "TensorWise", one, "TensorWise", bias=addend, output_dtype=torch.float32)
    assert found.equal(a.float() @ b.float() + (0.0 if addend is None else addend.float()))


def test_torch_float32_output_has_a_bias() -> None:
    """PyTorch test_float32_output_errors_with_bias: its kernels have none; ours is added before the one rounding."""
    a, b, one = torch.ones(16, 48).to(E4M3), torch.full((32, 48), 0.25).to(E4M3).t(), torch.ones(())
    bias = torch.full((32,), 2.0**-8 + 2.0**-10).bfloat16()
    found = scaled_mm(a, b, one, "TensorWise", one, "TensorWise", bias=bias, output_dtype=torch.float32)
    assert found.eq(12.0 + bias.float()).all()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("zero", ["m", "k", "n"])
def test_torch_zero_dim_tensorwise(zero: str, compiled: bool) -> None:
    """PyTorch test_zero_dim_tensorwise."""
    m, k, n = (0 if name == zero else 32 for name in "mkn")
    a, b, one = torch.zeros(m, k).to(E4M3), torch.zeros(n, k).to(E4M3).t(), torch.ones(())

    def product(a: Tensor, b: Tensor) -> Tensor:
        return scaled_mm(a, b, one, "TensorWise", one, "TensorWise")

    run = torch.compile(product, backend="aot_eager", fullgraph=True) if compiled else product
    assert run(a, b).equal(torch.zeros(m, n, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("scalings", "shapes", "message"),
    [
        ("TensorWise", ((1, 1), (1, 2)), r"expected scale_b of one element for scaling TensorWise, got \(1, 2\)"),
        ("RowWise", ((8, 1), (1, 13)), r"expected scale_b of shape \(1, 12\) .* got \(1, 13\)"),
        ("BlockWise1x128", ((8, 2), (12, 3)), r"expected scale_b of shape \(12, 2\) .* got \(12, 3\)"),
        ("BlockWise128x128", ((2, 1), (3, 1)), r"expected scale_b of shape \(2, 1\) .* got \(3, 1\)"),
    ],
)
def test_torch_float8_error_messages(scalings: str, shapes: Any, message: str) -> None:
    """PyTorch test_float8_error_messages: the conditions of which the wrong number of scales is one for us, too."""
    a, b = torch.ones(8, 256).to(E4M3), torch.ones(12, 256).to(E4M3).t()
    with pytest.raises(RuntimeError, match=message):
        scaled_mm(a, b, torch.ones(shapes[0]), scalings, torch.ones(shapes[1]), scalings)


@pytest.mark.every_backend
def test_torch_what_its_kernels_refuse() -> None:
    """The other conditions of that test: scales of one dim, with gaps, and E5M2 on the right; here they are served."""
    a, b = torch.full((8, 256), 0.5).to(E4M3), torch.full((12, 256), 0.5).to(E5M2).t()
    scales_b = torch.ones(1, 24)
    scales_b[:, 1::2] = torch.nan
    out = scaled_mm(a, b, torch.ones(8), "RowWise", scales_b[:, ::2], "RowWise")
    assert out.float().eq(64).all()


# PyTorch, grouped products: test_grouped_gemm_2d_2d, _2d_3d, _3d_2d, _3d_3d and their FP8 forms


def strided(*size: int, rows_first: bool, gaps: bool, dtype: torch.dtype) -> Tensor:
    """The last two dims in either order of memory, with gaps between lines and matrices or without."""
    *groups, rows, columns = size
    if not rows_first:
        rows, columns = columns, rows
    if gaps:
        memory = torch.randn(*(2 * group for group in groups), rows, 2 * columns, dtype=dtype)[..., :columns]
        memory = memory[::2] if groups else memory
    else:
        memory = torch.randn(*groups, rows, columns, dtype=dtype)
    return memory if rows_first else memory.mT


def ends(size: int, groups: int, *, empty: bool, aligned: int = 1) -> Tensor:
    """Of groups that fill all; some without elements."""
    found = torch.randint(0, size // aligned + 1, (groups,)).mul(aligned).sort().values
    if empty:
        found[0], found[1] = 0, found[2]
    found[-1] = size
    return found.to(torch.int32)


def loop_of_mm(a: Tensor, b: Tensor, offs: Tensor | None) -> Tensor:
    """What PyTorch's tests compare with: a product for each group."""
    if offs is None:
        return torch.stack([x @ y for x, y in zip(a, b, strict=True)])
    spans = [slice(begin, end) for begin, end in zip([0, *offs.tolist()], offs.tolist())]
    if a.dim() == 2 and b.dim() == 3:
        return torch.cat([a[span] @ b[group] for group, span in enumerate(spans)])
    if a.dim() == 3:
        return torch.cat([a[group] @ b[:, span] for group, span in enumerate(spans)], dim=1)
    return torch.stack([a[:, span] @ b[span] for span in spans])


FORMS = {  # groups, M, K, N
    "2d x 3d": lambda g, m, k, n: ((g * m, k), (g, k, n)),
    "2d x 2d": lambda g, m, k, n: ((m, g * k), (g * k, n)),
    "3d x 2d": lambda g, m, k, n: ((g, m, k), (k, g * n)),
    "3d x 3d": lambda g, m, k, n: ((g, m, k), (g, k, n)),
}


@pytest.mark.every_backend
@pytest.mark.sampled(cases=24)
@pytest.mark.parametrize("empty", [False, True], ids=["", "empty groups"])
@pytest.mark.parametrize("gaps", [False, True], ids=["", "strided"])
@pytest.mark.parametrize("a_rows", [False, True])
@pytest.mark.parametrize("b_rows", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_torch_grouped_gemm(form: str, dtype: torch.dtype, b_rows: bool, a_rows: bool, gaps: bool, empty: bool) -> None:
    """PyTorch test_grouped_gemm_*: values and gradients, to the tolerance that assertEqual has for the dtype."""
    shapes = FORMS[form](4, 16, 64, 32)
    a = strided(*shapes[0], rows_first=a_rows, gaps=gaps, dtype=dtype).requires_grad_()
    b = strided(*shapes[1], rows_first=b_rows, gaps=gaps, dtype=dtype).requires_grad_()
    size = {"2d x 3d": shapes[0][0], "2d x 2d": shapes[0][-1], "3d x 2d": shapes[1][-1]}.get(form)
    offs = None if size is None else ends(size, 4, empty=empty, aligned=random.choice((1, 8, 16)))
    out = grouped_mm(a, b, offs=offs)
    expected = loop_of_mm(a.double(), b.double(), offs)
    grad = torch.randn_like(out)
    found = (out, *torch.autograd.grad(out, (a, b), grad))
    wanted = (expected, *torch.autograd.grad(expected, (a, b), grad.double()))
    rtol = {torch.bfloat16: 1.6e-2, torch.float16: 1e-3, torch.float32: 1.3e-6}[dtype]
    for mine, theirs in zip(found, wanted, strict=True):
        # Below the largest element, roundings of terms that cancel: assertEqual's 1e-5 is for sums in the same order.
        atol = max(1e-5, torch.finfo(dtype).eps) * float(theirs.detach().abs().max())
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=rtol, atol=atol)


@pytest.mark.every_backend
@pytest.mark.sampled(cases=10)
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("empty", [False, True], ids=["", "empty groups"])
@pytest.mark.parametrize("gaps", [False, True], ids=["", "strided"])
@pytest.mark.parametrize("aligned", [1, 16])
@pytest.mark.parametrize("scaling", ["RowWise", "TensorWise"])
def test_torch_scaled_grouped_gemm_2d_3d(scaling: str, aligned: int, gaps: bool, empty: bool, fast: bool) -> None:
    """PyTorch test_scaled_grouped_gemm_2d_3d: each group is the product that scaled_mm gives of it."""
    m, n, k, groups = 16, 32, 64, 4
    a = strided(m * groups, k, rows_first=True, gaps=gaps, dtype=torch.float32).to(E4M3)
    b = strided(groups, n, k, rows_first=True, gaps=gaps, dtype=torch.float32).to(E4M3).mT
    by_row = scaling == "RowWise"
    scale_a, scale_b = torch.rand(m * groups if by_row else 1, 1), torch.rand((groups, n) if by_row else (groups,))
    offs = ends(m * groups, groups, empty=empty, aligned=aligned)
    scales = scale_a, scaling, scale_b, scaling
    found = scaled_grouped_mm(a, b, *scales, offs=offs, use_fast_accum=fast)
    begin = 0
    for group, end in enumerate(offs.tolist()):
        of_rows = scale_a[begin:end] if by_row else scale_a
        of_columns = scale_b[group][None] if by_row else scale_b[group]
        alone = scaled_mm(a[begin:end], b[group], of_rows, scaling, of_columns, scaling)
        torch.testing.assert_close(found[begin:end], alone, atol=1e-5, rtol=1.6e-2)
        begin = end


@pytest.mark.parametrize("form", ["3d x 2d", "3d x 3d"])
def test_torch_scaled_grouped_gemm_other_forms(form: str) -> None:
    """PyTorch has FP8 forms of all four; here these are refused, and the message says the forms that are not."""
    shapes = FORMS[form](4, 16, 64, 32)
    a, b, one = torch.ones(shapes[0]).to(E4M3), torch.ones(shapes[1]).to(E4M3), torch.ones(1)
    offs = torch.tensor([16, 32, 48, 64])
    with pytest.raises(RuntimeError, match=r"scaled(_grouped)?_mm: expected mat_[ab] of (two dims|shape \(groups, )"):
        scaled_grouped_mm(a, b, one, "TensorWise", one, "TensorWise", offs=offs)
