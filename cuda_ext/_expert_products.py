"""The products of mixtures of experts in FP8."""

from __future__ import annotations

import torch
from torch import Tensor

from cuda_ext._fp8_recipes import BY_NAME, EXPERTS_RECIPES, Quantized
from cuda_ext._fp8_weights import multiply
from cuda_ext._load import ops
from cuda_ext._scaled_mm import scaling_number
from cuda_ext._slot_write import writes_to_slot

__all__ = ["both_of_groups", "multiply_groups", "row_alignment", "sum_groups"]


def row_alignment(recipe: str | None) -> int:
    """Of the first row of each expert. So that no block of scales has rows of two, there are zeros between them."""
    return 128 if recipe == "blockwise" else 1


def multiply_groups(
    rows: Tensor | Quantized,
    matrices: Tensor,
    ends: Tensor,
    bias: Tensor | None = None,
    *,
    recipe: str = EXPERTS_RECIPES[0],
    transposed: bool = False,
    gathered: Tensor | None = None,
    keeps: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``grouped_mm(rows, matrices.mT, offs=ends, bias=bias)`` in FP8; rows (T, K), matrices (groups, N, K), or with
    `transposed` (groups, K, N). With `gathered` (T,) of ``rows[gathered]``, each converted once, however often it
    occurs. `keeps`: as `multiply`. `dtype`: of the result; default that of `rows`."""
    of = BY_NAME[recipe]
    of_rows = rows if isinstance(rows, Quantized) else of.of(rows, of.tokens)
    if gathered is not None:
        scales = of_rows.scales.t().index_select(1, gathered).t()
        of_rows = Quantized(ops.gather_fp8.default(of_rows.data, gathered), scales, of_rows.scaling)
    dtype = rows.dtype if isinstance(rows, Tensor) and dtype is None else dtype
    return multiply(of_rows, matrices, recipe, bias, ends, transposed=transposed, keeps=keeps, dtype=dtype)


def both_of_groups(rows: Tensor) -> tuple[Quantized, Quantized]:
    """Rows by "blockwise", for `multiply_groups` and, transposed, for `sum_groups`."""
    return BY_NAME["blockwise"].both_of(rows, BY_NAME["blockwise"].tokens)


def sum_groups(
    input: int, grad: Tensor, transposed_grad: Quantized | None, rows: Tensor, ends: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """(groups, N, K) of grad (T, N), if it is converted transposed_grad, and rows (T, K): the gradient of matrices by
    "blockwise", whose groups begin at multiples of 128. None if it went to the slot of input `input` of the autograd
    function."""
    recipe = BY_NAME["blockwise"]
    left = recipe.of(grad.t(), recipe.tokens) if transposed_grad is None else transposed_grad
    right, number = recipe.of(rows.t(), recipe.tokens), scaling_number(recipe.tokens)
    operands = left.data, right.data.t(), left.scales, number, right.scales, number, ends
    if writes_to_slot(input, grad, ops.scaled_grouped_mm.slot, *operands):
        return None
    gradient: Tensor = ops.scaled_grouped_mm.default(*operands, output_dtype=dtype)
    return gradient
