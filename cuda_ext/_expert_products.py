"""The products of mixtures of experts in FP8."""

from __future__ import annotations

import torch
from torch import Tensor

from cuda_ext._load import ops
from cuda_ext._scaled_mm import scaled_grouped_mm, scaling_number
from cuda_ext._slot_write import writes_to_slot
from cuda_ext.fp8 import _RECIPES, EXPERTS_RECIPES, _Quantized, _Recipe, _weights

__all__ = ["both_of_groups", "multiply_groups", "row_alignment", "sum_groups"]


def _of_groups(recipe: _Recipe, matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (groups, N, K), and their scales as `scaled_grouped_mm` takes those of its right operand."""
    groups, n, k = matrices.shape
    has_squares = recipe.weight == "BlockWise128x128"
    if has_squares and n % 128 != 0:  # of all matrices as one, squares would have lines of two
        each = [recipe.of(matrix, recipe.weight) for matrix in matrices]
        data = torch.stack([one.data.view(torch.uint8) for one in each])  # autocast does not know FP8
        return data.view(each[0].data.dtype), torch.stack([one.scales for one in each])
    data, scales, _ = recipe.of(matrices.reshape(groups * n, k), recipe.weight)
    by_group = scales.t().unflatten(0, (groups, -1)).mT if has_squares else scales.view(groups, n)
    return data.view(groups, n, k), by_group


def row_alignment(recipe: str | None) -> int:
    """Of the first row of each expert. So that no block of scales has rows of two, there are zeros between them."""
    return 128 if recipe == "blockwise" else 1


def multiply_groups(
    rows: Tensor | _Quantized,
    matrices: Tensor,
    ends: Tensor,
    bias: Tensor | None = None,
    *,
    recipe: str = EXPERTS_RECIPES[0],
    transposed: bool = False,
    gathered: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``grouped_mm(rows, matrices.mT, offs=ends, bias=bias)`` in FP8; rows (T, K), matrices (groups, N, K), or with
    `transposed` (groups, K, N). With `gathered` (T,) of ``rows[gathered]``, each converted once, however often it
    occurs. `dtype`: of the result; default that of `rows`."""
    of = _RECIPES[recipe]
    data, scales, scaling = rows if isinstance(rows, _Quantized) else of.of(rows, of.tokens)
    if gathered is not None:
        data, scales = ops.gather_fp8.default(data, gathered), scales.t().index_select(1, gathered).t()
    name = f"{recipe}, {'transposed' if transposed else 'as it is'}"

    def quantized(matrices: Tensor) -> tuple[Tensor, Tensor]:
        return _of_groups(of, matrices.mT if transposed else matrices)

    kept = _weights.get(matrices, name, quantized)
    of_matrices, scales_of_matrices = quantized(matrices) if kept is None else kept
    return scaled_grouped_mm(
        data,
        of_matrices.mT,
        scales,
        scaling,
        scales_of_matrices,
        of.weight,
        bias=bias,
        offs=ends,
        output_dtype=rows.dtype if isinstance(rows, Tensor) and dtype is None else dtype,
    )


def both_of_groups(rows: Tensor) -> tuple[_Quantized, _Quantized]:
    """Rows by "blockwise", for `multiply_groups` and, transposed, for `sum_groups`."""
    return _RECIPES["blockwise"].both_of(rows, _RECIPES["blockwise"].tokens)


def sum_groups(
    input: int, grad: Tensor, transposed_grad: _Quantized | None, rows: Tensor, ends: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """(groups, N, K) of grad (T, N), if it is converted transposed_grad, and rows (T, K): the gradient of matrices by
    "blockwise", whose groups begin at multiples of 128. None if it went to the slot of input `input` of the autograd
    function."""
    recipe = _RECIPES["blockwise"]
    left = recipe.of(grad.t(), recipe.tokens) if transposed_grad is None else transposed_grad
    right, number = recipe.of(rows.t(), recipe.tokens), scaling_number(recipe.tokens)
    operands = left.data, right.data.t(), left.scales, number, right.scales, number, ends
    if writes_to_slot(input, grad, ops.scaled_grouped_mm.slot, *operands):
        return None
    gradient: Tensor = ops.scaled_grouped_mm.default(*operands, output_dtype=dtype)
    return gradient
