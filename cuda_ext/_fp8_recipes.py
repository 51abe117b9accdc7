"""Recipes of training in FP8: how operands are quantised, and their products. `cuda_ext.fp8` describes them."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cuda_ext._load import ops
from cuda_ext._quantize import quantize, quantize_both
from cuda_ext._scaled_mm import scaled_grouped_mm, scaled_mm, scaling_number
from cuda_ext._slot_write import writes_to_slot
from cuda_ext._toolchain import NAMESPACE

__all__ = ["BY_NAME", "EXPERTS_RECIPES", "RECIPES", "Quantized", "Recipe", "checked_recipe"]


class Quantized(NamedTuple):
    """An operand of a product, quantised along the sum."""

    data: Tensor  # (lines, K), or matrices (groups, lines, K)
    scales: Tensor
    scaling: str

    def transposed(self) -> Quantized:
        """Of scalings that are the same along both dims."""
        return Quantized(self.data.t().contiguous(), self.scales.t(), self.scaling)

    def mm(
        self, other: Quantized, dtype: torch.dtype | None, bias: Tensor | None = None, ends: Tensor | None = None
    ) -> Tensor:
        """(lines, lines of the other); of matrices those of each group of lines, of which `ends` has the ends."""
        operands = self.data, other.data.mT, self.scales, self.scaling, other.scales, other.scaling
        if ends is None:
            return scaled_mm(*operands, bias=bias, output_dtype=dtype)
        return scaled_grouped_mm(*operands, bias=bias, offs=ends, output_dtype=dtype)

    def mm_to_slot(self, input: int, grad: Tensor, other: Quantized) -> bool:
        """The same of two dims to the slot of a weight's gradient, if it has one (`writes_to_slot`)."""
        left, right = (self.scales, scaling_number(self.scaling)), (other.scales, scaling_number(other.scaling))
        return writes_to_slot(input, grad, ops.scaled_mm.slot, self.data, other.data.t(), *left, *right)


@dataclasses.dataclass(frozen=True)
class Recipe:
    tokens: str  # the scaling of the input and of the gradient of the output
    weight: str
    grad_dtype: torch.dtype = torch.float8_e4m3fn
    power_of_two: bool = True
    quantizes_weight_grad: bool = True  # the product that gives the gradient of the weight

    def of(self, matrix: Tensor, scaling: str, **options: Any) -> Quantized:
        """The matrix for a product that sums along its rows. options: of `quantize`."""
        return Quantized(*quantize(matrix, scaling, power_of_two=self.power_of_two, **options), scaling)

    def both_of(self, matrix: Tensor, scaling: str, **options: Any) -> tuple[Quantized, Quantized]:
        """The same, and its transpose."""
        both = quantize_both(matrix, scaling, power_of_two=self.power_of_two, **options)
        return Quantized(*both[:2], scaling), Quantized(*both[2:], scaling)

    def of_weight(self, weight: Tensor, *, transposed: bool = False) -> Quantized:
        """A weight (N, K) or (groups, N, K) for a product that sums over K; with `transposed` over N."""
        weight = weight.mT if transposed else weight
        return self.of(weight, self.weight) if weight.dim() == 2 else self._of_groups(weight)

    def _of_groups(self, matrices: Tensor) -> Quantized:
        """With scales as `scaled_grouped_mm` takes those of its right operand."""
        groups, n, k = matrices.shape
        has_squares = self.weight == "BlockWise128x128"
        if has_squares and n % 128 != 0:  # of all matrices as one, squares would have lines of two
            each = [self.of(matrix, self.weight) for matrix in matrices]
            data = torch.stack([one.data.view(torch.uint8) for one in each])  # autocast does not know FP8
            return Quantized(data.view(each[0].data.dtype), torch.stack([one.scales for one in each]), self.weight)
        data, scales, _ = self.of(matrices.reshape(groups * n, k), self.weight)
        by_group = scales.t().unflatten(0, (groups, -1)).mT if has_squares else scales.view(groups, n)
        return Quantized(data.view(groups, n, k), by_group, self.weight)


BY_NAME = {
    "tensorwise": Recipe("TensorWise", "TensorWise", torch.float8_e5m2, power_of_two=False),
    "rowwise": Recipe("RowWise", "RowWise"),
    "rowwise_with_gw_hp": Recipe("RowWise", "RowWise", quantizes_weight_grad=False),
    "blockwise": Recipe("BlockWise1x128", "BlockWise128x128"),
}
RECIPES = tuple(BY_NAME)

# The recipes of mixtures of experts. A gradient of their matrices is a sum over the rows of an expert, which for FP8 on
# Hopper has to begin at a multiple of 16: by the first recipe these products are in the precision of the input.
EXPERTS_RECIPES = "rowwise_with_gw_hp", "blockwise"


def checked_recipe(name: str) -> str:
    if name not in BY_NAME:
        raise RuntimeError(f"{NAMESPACE}::fp8: expected a recipe of {', '.join(RECIPES)}, got {name!r}")
    return name


def checked_experts_recipe(name: str | None) -> str | None:
    if name not in (None, *EXPERTS_RECIPES):
        known = " or ".join(map(repr, EXPERTS_RECIPES))
        raise RuntimeError(
            f"{NAMESPACE}::mixture_of_experts: expected fp8 None or {known}, recipes of experts, got {name!r}"
        )
    return name
