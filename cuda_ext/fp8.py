"""Training in FP8: quantisation, and linear layers whose three products are `cuda_ext.scaled_mm`.

    model = ...
    report = cuda_ext.fp8.convert(model, "rowwise")   # nn.Linear layers that are large enough; parameters are the same
    print(report)
    cuda_ext.fp8.revert(model)

An operand is quantised with its scales just before a product, always from its own precision; for the product that
sums over the rows its transpose is quantised, so that scales are constant along the sum. Parameters, gradients,
optimizer and state dicts stay as they are.

Recipes:

- ``"tensorwise"``: one scale for each operand; the gradient of the output in float8_e5m2 (Micikevicius et al., FP8
  Formats for Deep Learning, arXiv 2209.05433).
- ``"rowwise"``: a scale, a power of two, for each row of the left and column of the right operand; all in
  float8_e4m3fn, as torchao's recipe of this name.
- ``"rowwise_with_gw_hp"``: the same, but the gradient of the weight in the precision of the input.
- ``"blockwise"``: a scale, a power of two, for each 128 elements of the input and of gradients, and for each 128 x 128
  of the weight; all in float8_e4m3fn (DeepSeek-V3, arXiv 2412.19437).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import cuda_ext._rules  # noqa: F401
from cuda_ext._gemm import gemm
from cuda_ext._load import ops
from cuda_ext._scaled_mm import scaled_mm
from cuda_ext._toolchain import NAMESPACE

__all__ = ["RECIPES", "Float8Linear", "Report", "convert", "linear", "quantize", "revert"]

# (rows, columns) of a block that shares a scale; 0: all.
_BLOCKS = {"TensorWise": (0, 0), "RowWise": (1, 0), "BlockWise1x128": (1, 128), "BlockWise128x128": (128, 128)}


def quantize(
    input: Tensor,
    scaling: str = "RowWise",
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor]:
    """Converts to FP8 with scales: ``input`` is about ``data * scales``.

    A scale is the largest finite magnitude of its block over the largest number of the format (448, or 57344 of
    float8_e5m2), at least 2**-126, and 1 for a block of zeros. An element is divided by it, as a product with its
    reciprocal in float32, and rounded to nearest even; infinities become the largest number, NaN stays NaN.

    For a product that sums over the rows of a matrix, quantise its transpose: scales must not change along a sum.

    Args:
        input: ``(R, C)``, float32, float16 or bfloat16, any strides.
        scaling: ``"TensorWise"``, ``"RowWise"`` (default), ``"BlockWise1x128"`` or ``"BlockWise128x128"``, as
            `cuda_ext.scaled_mm` reads them.
        dtype: float8_e4m3fn (default) or float8_e5m2.
        power_of_two: whether scales are rounded up to powers of two, so that they add no rounding error. Default False.

    Returns:
        ``data``, ``(R, C)``, and ``scales``, float32, as `cuda_ext.scaled_mm` takes them for the left operand: ``(1,
        1)``, ``(R, 1)``, ``(R, ceil(C / 128))`` or ``(ceil(C / 128), ceil(R / 128))``. They have no gradient. For the
        right operand of a product pass ``data.t()`` and the same scales, which for ``"RowWise"`` may have either shape.

    Raises:
        RuntimeError: wrong shape, dtype or scaling.
    """
    if scaling not in _BLOCKS:
        raise RuntimeError(f"{NAMESPACE}::quantize_fp8: expected scaling of {', '.join(_BLOCKS)}, got {scaling!r}")
    data, scales = ops.quantize_fp8.default(input, dtype, *_BLOCKS[scaling], power_of_two)
    return data, scales.t() if scaling == "BlockWise128x128" else scales


class _Quantized(NamedTuple):
    """An operand of a product, quantised along the sum."""

    data: Tensor  # (lines, K)
    scales: Tensor
    scaling: str

    def transposed(self) -> _Quantized:
        """Of scales of squares, which are the same along both dims."""
        return _Quantized(self.data.t(), self.scales.t(), self.scaling)

    def mm(self, other: _Quantized, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        """(lines, lines of the other)"""
        left, right = (self.scales, self.scaling), (other.scales, other.scaling)
        return scaled_mm(self.data, other.data.t(), *left, *right, bias=bias, output_dtype=dtype)


@dataclasses.dataclass(frozen=True)
class _Recipe:
    tokens: str  # the scaling of the input and of the gradient of the output
    weight: str
    grad_dtype: torch.dtype = torch.float8_e4m3fn
    power_of_two: bool = True
    quantizes_weight_grad: bool = True  # the product that gives the gradient of the weight

    def of_tokens(self, rows: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> _Quantized:
        return _Quantized(*quantize(rows, self.tokens, dtype=dtype, power_of_two=self.power_of_two), self.tokens)

    def of_weight(self, weight: Tensor) -> _Quantized:
        return _Quantized(*quantize(weight, self.weight, power_of_two=self.power_of_two), self.weight)


_RECIPES = {
    "tensorwise": _Recipe("TensorWise", "TensorWise", torch.float8_e5m2, power_of_two=False),
    "rowwise": _Recipe("RowWise", "RowWise"),
    "rowwise_with_gw_hp": _Recipe("RowWise", "RowWise", quantizes_weight_grad=False),
    "blockwise": _Recipe("BlockWise1x128", "BlockWise128x128"),
}
RECIPES = tuple(_RECIPES)


def checked_recipe(name: str) -> str:
    if name not in _RECIPES:
        raise RuntimeError(f"{NAMESPACE}::fp8: expected a recipe of {', '.join(RECIPES)}, got {name!r}")
    return name


class _Linear(torch.autograd.Function):
    """Saves the weight, and the transpose of the input in FP8, which is all that the gradient of the weight needs."""

    @staticmethod
    def forward(
        rows: Tensor, weight: Tensor, bias: Tensor | None, recipe_name: str, dtype: torch.dtype, saves_rows: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        recipe = _RECIPES[recipe_name]
        out = recipe.of_tokens(rows).mm(recipe.of_weight(weight), dtype, bias)
        if saves_rows and recipe.quantizes_weight_grad:
            saved = recipe.of_tokens(rows.t())
            return out, saved.data, saved.scales
        return out, rows.new_empty(0), rows.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        rows, weight, bias, ctx.recipe, _, saves_rows = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        keeps_rows = saves_rows and not _RECIPES[ctx.recipe].quantizes_weight_grad
        ctx.save_for_backward(weight, rows if keeps_rows else None, *output[1:])
        ctx.dtype = rows.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 6
        weight, rows, data, scales = ctx.saved_tensors
        recipe = _RECIPES[ctx.recipe]
        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            by_rows = recipe.weight == "RowWise"
            of_weight = recipe.of_weight(weight.t()) if by_rows else recipe.of_weight(weight).transposed()
            grad_input = recipe.of_tokens(grad, recipe.grad_dtype).mm(of_weight, ctx.dtype)
        if ctx.needs_input_grad[1]:
            if recipe.quantizes_weight_grad:
                of_rows = _Quantized(data, scales, recipe.tokens)
                grad_weight = recipe.of_tokens(grad.t(), recipe.grad_dtype).mm(of_rows, weight.dtype)
            else:
                grad_weight = gemm(grad.to(rows.dtype).t(), rows, out_dtype=weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0, dtype=ctx.bias_dtype)
        return grad_input, grad_weight, grad_bias, None, None, None


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, recipe: str = "rowwise") -> Tensor:
    """``input @ weight.T + bias`` in FP8, forward and backward.

    Args:
        input: ``(..., K)``, float32, float16 or bfloat16.
        weight: ``(N, K)``, one of these dtypes.
        bias: ``(N,)``.
        recipe: how operands are quantised: see the module.

    Returns:
        ``(..., N)``, dtype of `input`, or of autocast where that is enabled. Backward gives first derivatives only.
        It needs the weight and K bytes for each row of the input.

    Raises:
        RuntimeError: wrong shapes, dtypes or recipe, second derivatives.
    """
    checked_recipe(recipe)
    if input.dim() == 0 or weight.dim() != 2 or input.shape[-1] != weight.shape[1]:
        shapes = f"{tuple(input.shape)} and {tuple(weight.shape)}"
        raise RuntimeError(f"{NAMESPACE}::fp8.linear: expected input (..., K) and weight (N, K), got {shapes}")
    device = input.device.type
    autocasts = device != "meta" and torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocasts else input.dtype
    saves_rows = weight.requires_grad and torch.is_grad_enabled()
    rows = input.flatten(0, -2) if input.dim() > 1 else input.unsqueeze(0)
    out = _Linear.apply(rows, weight, bias, recipe, dtype, saves_rows)[0]
    return out.view(*input.shape[:-1], weight.shape[0])


class Float8Linear(nn.Linear):
    """A `torch.nn.Linear` that multiplies in FP8; `convert` makes one of a layer by changing its class."""

    fp8: str | None  # the recipe; None: not in FP8

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        out = super().forward(input) if self.fp8 is None else linear(input, self.weight, self.bias, recipe=self.fp8)
        return out if residual is None else out + residual  # in place of a `cuda_ext.nn.Linear`

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fp8={self.fp8}"


@dataclasses.dataclass
class Report:
    """What `convert` did: the names of converted layers, and of those it kept, with the reason."""

    converted: list[str]
    kept: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{len(self.converted)} linear layers in FP8, {len(self.kept)} kept"]
        return "\n".join(lines + [f"  {name}: {reason}" for name, reason in self.kept.items()])


def _reason_to_keep(name: str, layer: nn.Linear, keep: Callable[[str, nn.Linear], bool], least_features: int) -> str:
    ours = hasattr(layer, "fp8") and type(layer).__module__.startswith(f"{__package__}.")
    if not (type(layer) is nn.Linear or ours) or "forward" in vars(layer):
        return f"a {type(layer).__name__} with a forward of its own"
    if keep(name, layer):
        return "by keep"
    if min(layer.in_features, layer.out_features) < least_features:
        return f"{layer.in_features} x {layer.out_features}: quantising would take longer than FP8 saves"
    return ""


def _keep_none(name: str, layer: nn.Linear) -> bool:
    return False


def convert(
    model: nn.Module,
    recipe: str = "rowwise",
    keep: Callable[[str, nn.Linear], bool] = _keep_none,
    *,
    least_features: int = 1024,
) -> Report:
    """Makes the linear layers of a model multiply in FP8, in place: those of `torch.nn` and of `cuda_ext.nn`, also in
    other modules. Parameters, hooks and state dicts stay.

    Args:
        model: any module; itself a linear layer, it is converted, too.
        recipe: see the module.
        keep: called with the name and the layer; True leaves it as it is. Models usually keep their last layer, whose
            logits need the precision: ``lambda name, layer: name == "lm_head"``.
        least_features: layers with fewer inputs or outputs are kept: converting their operands would take longer than
            FP8 saves. Default 1024, a guess: on GPUs, where conversion is not yet a kernel, few layers gain at all.

    Returns:
        a `Report`; print it.

    Raises:
        RuntimeError: an unknown recipe.
    """
    checked_recipe(recipe)
    report = Report([], {})
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        if reason := _reason_to_keep(name, layer, keep, least_features):
            report.kept[name] = reason
            continue
        if type(layer) is nn.Linear:
            layer.__class__ = Float8Linear
        layer.fp8 = recipe  # type: ignore[assignment]
        report.converted.append(name)
    return report


def revert(model: nn.Module) -> None:
    """Undoes `convert`, in place."""
    for layer in model.modules():
        if type(layer) is Float8Linear:
            del layer.fp8
            layer.__class__ = nn.Linear  # type: ignore[assignment]
        elif isinstance(layer, nn.Linear) and hasattr(layer, "fp8"):  # ours, or sharded by FSDP2, which changes classes
            layer.fp8 = None  # type: ignore[assignment]
