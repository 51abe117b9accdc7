"""Training in FP8: quantisation, and linear layers whose three products are `cuda_ext.scaled_mm`.

    model = ...
    report = cuda_ext.fp8.convert(model, "rowwise")   # nn.Linear layers that are large enough; parameters are the same
    print(report)
    cuda_ext.fp8.revert(model)

An operand is quantised with its scales just before a product, always from its own precision; for the product that
sums over the rows its transpose is quantised, so that scales are constant along the sum. Parameters, gradients,
optimizer and state dicts stay as they are. Elements are rounded to nearest; with `stochastic_gradients`, those of
gradients at random.

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

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.weak import WeakIdKeyDictionary

import cuda_ext._rules  # noqa: F401
from cuda_ext._activations import ACTIVATIONS
from cuda_ext._gathered_weights import GatheredWeight, gather, is_gathered, reason_not_to_gather
from cuda_ext._load import ops
from cuda_ext._rules.fp8_vmap import mapped_where_roundings_differ
from cuda_ext._scaled_mm import scaled_mm, scaling_number
from cuda_ext._slot_write import writes_to_slot
from cuda_ext._toolchain import NAMESPACE

__all__ = [
    "RECIPES",
    "Float8Linear",
    "Report",
    "convert",
    "gather_weights",
    "linear",
    "quantize",
    "quantize_both",
    "revert",
    "unchanged_weights",
]


def quantize(
    input: Tensor,
    scaling: str = "RowWise",
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    power_of_two: bool = False,
    stochastic: bool = False,
    activation: str | None = None,
    gated: bool = False,
) -> tuple[Tensor, Tensor]:
    """Converts to FP8 with scales: ``input`` is about ``data * scales``.

    A scale is the largest finite magnitude of its block over the largest number of the format (448, or 57344 of
    float8_e5m2), at least 2**-126, and 1 for a block of zeros. An element is divided by it, as a product with its
    reciprocal in float32, and rounded to nearest even, or with `stochastic` at random so that its mean is right;
    infinities become the largest number, NaN stays NaN.

    For a product that sums over the rows of a matrix, quantise its transpose: scales must not change along a sum.

    Args:
        input: ``(R, C)``, float32, float16 or bfloat16. A matrix that is contiguous along neither dim is copied.
        scaling: ``"TensorWise"``, ``"RowWise"`` (default), ``"BlockWise1x128"`` or ``"BlockWise128x128"``, as
            `cuda_ext.scaled_mm` reads them.
        dtype: float8_e4m3fn (default) or float8_e5m2.
        power_of_two: whether scales are rounded up to powers of two, so that they add no rounding error. Default False.
        stochastic: whether an element between two numbers of the format becomes either of them, each with the
            probability that is its nearness, to 2**-28 of the least number. Numbers of the format stay. The random
            numbers are Philox4x32-10 of a seed and an offset that PyTorch's default generator of the device supplies,
            so that `torch.manual_seed` determines them; they do not depend on strides, and CPUs and GPUs compute the
            same of a seed and an offset. Default False; not with `activation` or `gated`.
        activation: quantises ``activation(input)`` without that matrix in memory: it is computed in float32 and rounded
            to the dtype of the input, so the result is that of quantising what `cuda_ext.linear` or `gated_linear`
            would have stored. A name that `cuda_ext.gemm` takes, or None (default).
        gated: ``input`` is ``(R, 2C)``, and ``activation(input[:, :C]) * input[:, C:]`` is quantised. Default False.

    Returns:
        ``data``, ``(R, C)``, with rows that begin at multiples of 16 bytes, and ``scales``, float32, as
        `cuda_ext.scaled_mm` takes them for the left operand: ``(1, 1)``, ``(R, 1)``, ``(R, ceil(C / 128))`` or
        ``(ceil(C / 128), ceil(R / 128))``. They have no gradient. For the right operand of a product pass ``data.t()``
        and the same scales, which for ``"RowWise"`` may have either shape.

    Raises:
        RuntimeError: wrong shape, dtype or scaling.
        NotImplementedError: `stochastic` for a DTensor: its ranks would draw numbers that differ between replicas, or
            repeat between shards.
    """
    arguments = input, dtype, scaling_number(scaling), power_of_two
    quantized: tuple[Tensor, Tensor] = _quantize(ops.quantize_fp8, arguments, stochastic, activation, gated)
    return quantized


def _quantize(packet: Any, arguments: tuple[Any, ...], stochastic: bool, activation: str | None, gated: bool) -> Any:
    if activation is not None or gated:
        if stochastic:
            raise RuntimeError(
                f"{NAMESPACE}::quantize_fp8: expected stochastic=False with an activation or a gate, got True; "
                "quantise the matrix that cuda_ext.linear or gated_linear returns"
            )
        return packet.activation(*arguments, activation=activation, gated=gated)
    if stochastic:
        return packet.stochastic(mapped_where_roundings_differ(arguments[0]), *arguments[1:])
    return packet.default(*arguments)


def quantize_both(
    input: Tensor,
    scaling: str = "RowWise",
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    power_of_two: bool = False,
    stochastic: bool = False,
    activation: str | None = None,
    gated: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize` of a matrix and of its transpose, each with its own scales, from one read of the matrix (two for
    ``"TensorWise"`` and ``"RowWise"``, whose scales depend on more than a tile).

    Args:
        input, scaling, dtype, power_of_two, stochastic, activation, gated: as `quantize`. The transpose is rounded by
            random numbers of its own.

    Returns:
        ``data``, ``(R, C)``, and its scales, then those of the transpose, ``(C, R)``.

    Raises:
        RuntimeError, NotImplementedError: as `quantize`.
    """
    arguments = input, dtype, scaling_number(scaling), power_of_two
    both: tuple[Tensor, Tensor, Tensor, Tensor] = _quantize(
        ops.quantize_fp8_both, arguments, stochastic, activation, gated
    )
    return both


class _Quantized(NamedTuple):
    """An operand of a product, quantised along the sum."""

    data: Tensor  # (lines, K)
    scales: Tensor
    scaling: str

    def transposed(self) -> _Quantized:
        """Of scalings that are the same along both dims."""
        return _Quantized(self.data.t().contiguous(), self.scales.t(), self.scaling)

    def mm(self, other: _Quantized, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        """(lines, lines of the other)"""
        left, right = (self.scales, self.scaling), (other.scales, other.scaling)
        return scaled_mm(self.data, other.data.t(), *left, *right, bias=bias, output_dtype=dtype)

    def mm_to_slot(self, input: int, grad: Tensor, other: _Quantized) -> bool:
        """The same to the slot of a weight's gradient, if it has one (`writes_to_slot`)."""
        left, right = (self.scales, scaling_number(self.scaling)), (other.scales, scaling_number(other.scaling))
        return writes_to_slot(input, grad, ops.scaled_mm.slot, self.data, other.data.t(), *left, *right)


@dataclasses.dataclass(frozen=True)
class _Recipe:
    tokens: str  # the scaling of the input and of the gradient of the output
    weight: str
    grad_dtype: torch.dtype = torch.float8_e4m3fn
    power_of_two: bool = True
    quantizes_weight_grad: bool = True  # the product that gives the gradient of the weight

    def of(self, matrix: Tensor, scaling: str, **options: Any) -> _Quantized:
        """The matrix for a product that sums along its rows. options: of `quantize`."""
        return _Quantized(*quantize(matrix, scaling, power_of_two=self.power_of_two, **options), scaling)

    def both_of(self, matrix: Tensor, scaling: str, **options: Any) -> tuple[_Quantized, _Quantized]:
        """The same, and its transpose."""
        both = quantize_both(matrix, scaling, power_of_two=self.power_of_two, **options)
        return _Quantized(*both[:2], scaling), _Quantized(*both[2:], scaling)


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


# The recipes of mixtures of experts. A gradient of their matrices is a sum over the rows of an expert, which for FP8 on
# Hopper has to begin at a multiple of 16: by the first recipe these products are in the precision of the input.
EXPERTS_RECIPES = "rowwise_with_gw_hp", "blockwise"


_Kept = TypeVar("_Kept")


class _Weights:
    """Quantised weights, by weight and a name of what is kept of it, while `unchanged_weights` is entered."""

    def __init__(self) -> None:
        self.entered = 0
        self._kept: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def keeps(self, weight: Tensor) -> bool:
        is_own = isinstance(weight, nn.Parameter) and not isinstance(weight, GatheredWeight)
        return self.entered > 0 and is_own and not torch.compiler.is_compiling()

    def get(self, weight: Tensor, name: str, quantized: Callable[[Tensor], _Kept]) -> _Kept | None:
        """``quantized(weight)`` of this name; None if it is not kept."""
        if not self.keeps(weight):
            return None
        inference = torch.is_inference_mode_enabled()  # what it makes cannot be saved for backward
        version = None if weight.is_inference() else weight._version
        key = inference, version, weight.device, weight.dtype
        kept = self._kept.get(weight)
        if kept is None or kept[0] != key:
            kept = self._kept[weight] = key, {}
        if name not in kept[1]:
            kept[1][name] = quantized(weight.detach())
        found: _Kept = kept[1][name]
        return found

    def clear(self) -> None:
        self._kept.clear()


_weights = _Weights()
keeps = _weights.keeps


@contextlib.contextmanager
def unchanged_weights() -> Iterator[None]:
    """While this context is entered, in any thread, no weight changes: each, also of experts, is quantised once, and
    both copies, 2 bytes an element, are kept until it is left.

        for batch in batches:
            with cuda_ext.fp8.unchanged_weights():
                for part in batch:                      # gradient accumulation
                    loss_of(model(part)).backward()
            optimizer.step()

    It saves time if a weight is used more than once between two steps, and the quantisation of its transpose in
    backward. It has no effect on compiled graphs, which quantise in place. A change of the weight that PyTorch counts
    is noticed; one that it does not count (by ``weight.data``, or in memory that FSDP2 gathers) is not.
    """
    _weights.entered += 1
    try:
        yield
    finally:
        _weights.entered -= 1
        if _weights.entered == 0:
            _weights.clear()


_WEIGHT = 1  # among the tensors that _Linear.apply is given


class _LinearOptions(NamedTuple):
    recipe: str
    dtype: torch.dtype  # of the output
    saves_rows: bool  # for the gradient of the weight
    stochastic_gradients: bool
    input_activation: str | None
    input_gated: bool

    @property
    def of_input(self) -> dict[str, Any]:
        """For `quantize`; none without a function of the input."""
        if self.input_activation is None and not self.input_gated:
            return {}
        return {"activation": self.input_activation, "gated": self.input_gated}


class _Linear(torch.autograd.Function):
    """Saves the weight, its transpose in FP8 if that is kept, or the weight in FP8 if that has been gathered; and the
    transpose of the input in FP8, which is all that the gradient of the weight needs. Of a function of the input it
    saves the input, too, for its gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        kept: tuple[_Quantized, _Quantized | None] | None,
        options: _LinearOptions,
    ) -> tuple[Tensor, Tensor, Tensor]:
        recipe = _RECIPES[options.recipe]
        of_weight = recipe.of(weight, recipe.weight) if kept is None else kept[0]
        if options.saves_rows and recipe.quantizes_weight_grad:
            of_rows, saved = recipe.both_of(rows, recipe.tokens, **options.of_input)
            return of_rows.mm(of_weight, options.dtype, bias), saved.data, saved.scales
        out = recipe.of(rows, recipe.tokens, **options.of_input).mm(of_weight, options.dtype, bias)
        return out, rows.new_empty(0), rows.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        rows, weight, bias, kept, options = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        quantizes_weight_grad = _RECIPES[options.recipe].quantizes_weight_grad
        keeps_rows = (options.saves_rows and not quantizes_weight_grad) or bool(options.of_input)
        ctx.saves_transpose = kept is not None and kept[1] is not None
        of_weight = (weight, None) if kept is None else (kept[1] or kept[0])[:2]
        ctx.save_for_backward(*of_weight, rows if keeps_rows else None, *output[1:])
        ctx.options, ctx.dtype, ctx.weight_dtype = options, rows.dtype, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 5
        ctx.creates_graph = torch.is_grad_enabled()
        return _Linear.gradients(ctx, grad)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, weight_scales, rows, data, scales = ctx.saved_tensors
        options = ctx.options
        recipe = _RECIPES[options.recipe]
        of_input, of_weight, of_bias = ctx.needs_input_grad[:3]
        quantizes_both = of_input and of_weight and recipe.quantizes_weight_grad
        rounding = {"dtype": recipe.grad_dtype, "stochastic": options.stochastic_gradients}
        grad_input = grad_weight = grad_bias = transposed = None
        if of_input:
            if quantizes_both:
                of_grad, transposed = recipe.both_of(grad, recipe.tokens, **rounding)
            else:
                of_grad = recipe.of(grad, recipe.tokens, **rounding)
            if weight_scales is None:
                by_columns = recipe.of(weight.t(), recipe.weight)
            else:
                by_columns = _Quantized(weight, weight_scales, recipe.weight)
                by_columns = by_columns if ctx.saves_transpose else by_columns.transposed()
            grad_input = of_grad.mm(by_columns, ctx.dtype)
            if options.of_input:
                grad_input, _ = ops.activation_backward.default(grad_input, rows, **options.of_input, bias_dtype=None)
        if of_weight:
            if recipe.quantizes_weight_grad:
                if transposed is None:
                    transposed = recipe.of(grad.t(), recipe.tokens, **rounding)
                of_rows = _Quantized(data, scales, recipe.tokens)
                if ctx.creates_graph or not transposed.mm_to_slot(_WEIGHT, grad, of_rows):
                    grad_weight = transposed.mm(of_rows, ctx.weight_dtype)
            else:
                low = grad.to(rows.dtype)
                like_weight = rows.new_empty(1).expand(low.shape[1], rows.shape[1])  # only its shape and dtype count
                backward = low, rows, like_weight, None
                if ctx.creates_graph or not writes_to_slot(
                    _WEIGHT, grad, ops.linear_backward.slot, *backward, output_mask=(False, True, False)
                ):
                    # Not by its function: as in `scaled_mm`, of the defaults.
                    grad_weight = ops.gemm.default(low.t(), rows, out_dtype=ctx.weight_dtype)
        if of_bias:
            grad_bias = grad.sum(0, dtype=ctx.bias_dtype)
        return grad_input, grad_weight, grad_bias, None, None


def _has_tangent(tensor: Tensor | None) -> bool:
    # Without a level there are none; the name of the level is PyTorch's own.
    if tensor is None or getattr(forward_ad, "_current_level", 0) < 0:
        return False
    return forward_ad.unpack_dual(tensor).tangent is not None


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    recipe: str = "rowwise",
    stochastic_gradients: bool = False,
    input_activation: str | None = None,
    input_gated: bool = False,
) -> Tensor:
    """``input @ weight.T + bias`` in FP8, forward and backward.

    Args:
        input: ``(..., K)``, float32, float16 or bfloat16.
        weight: ``(N, K)``, one of these dtypes.
        bias: ``(N,)``.
        recipe: how operands are quantised: see the module.
        stochastic_gradients: whether backward rounds the gradient of the output at random, as ``quantize(...,
            stochastic=True)``, so that the sums over it have no bias; input and weight are rounded to nearest all the
            same. Default False.
        input_activation, input_gated: multiplies ``activation(input)``, or with `input_gated` ``activation(input[...,
            :K]) * input[..., K:]`` of an input ``(..., 2K)``, as the second layer of an MLP does. It is converted to
            FP8 where it is computed, and never stored in the precision of the input, except with
            ``"rowwise_with_gw_hp"`` in training. Default None and False.

    Returns:
        ``(..., N)``, dtype of `input`, or of autocast where that is enabled. Backward gives first derivatives only.
        It needs the weight and K bytes for each row of the input; with an activation or a gate the input, too.

    Raises:
        RuntimeError: wrong shapes, dtypes or recipe, second derivatives, forward mode.
    """
    checked_recipe(recipe)
    if input_activation not in ACTIVATIONS:
        known = ", ".join(map(repr, ACTIVATIONS))
        raise RuntimeError(f"{NAMESPACE}::fp8.linear: expected input_activation of {known}, got {input_activation!r}")
    width = 2 if input_gated else 1
    if input.dim() == 0 or weight.dim() != 2 or input.shape[-1] != width * weight.shape[1]:
        expected = f"input (..., {'2K' if input_gated else 'K'}) and weight (N, K)"
        shapes = f"{tuple(input.shape)} and {tuple(weight.shape)}"
        raise RuntimeError(f"{NAMESPACE}::fp8.linear: expected {expected}, got {shapes}")
    if not torch.compiler.is_compiling() and any(map(_has_tangent, (input, weight, bias))):
        raise RuntimeError(
            f"{NAMESPACE}::fp8.linear: expected reverse mode, got a tensor with a tangent of forward mode, which "
            "numbers of FP8 do not have; use torch.nn.functional.linear, or cuda_ext.fp8.revert(model) first"
        )
    device = input.device.type
    autocasts = device != "meta" and torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocasts else input.dtype
    # Exported programs have no backward; and the pitch of a transpose would depend on the size of the batch. For Dynamo
    # `is_exporting` is always true.
    exports = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
    saves_rows = weight.requires_grad and torch.is_grad_enabled() and not exports
    of = _RECIPES[recipe]
    if saves_rows and not of.quantizes_weight_grad and (input_activation is not None or input_gated):
        input = hidden(input, input_activation, input_gated)  # in its precision, for the gradient of the weight
        input_activation, input_gated = None, False
    rows = input.flatten(0, -2) if input.dim() > 1 else input.unsqueeze(0)
    kept: tuple[_Quantized, _Quantized | None] | None
    if isinstance(weight, GatheredWeight) and weight.scaling == of.weight:
        kept = _Quantized(weight.numbers, weight.scales, weight.scaling), None
    else:
        kept = _weights.get(weight, recipe, lambda weight: of.both_of(weight, of.weight))
    options = _LinearOptions(recipe, dtype, saves_rows, stochastic_gradients, input_activation, input_gated)
    out = _Linear.apply(rows, weight, bias, kept, options)[0]
    return out.view(*input.shape[:-1], weight.shape[0])


def hidden(preact: Tensor, activation: str | None, gated: bool) -> Tensor:
    """Between the two layers of an MLP: preact (..., F) or, gated, (..., 2F) -> (..., F)."""
    if not gated:
        return ACTIVATIONS[activation].function(preact)
    gate, up = preact.chunk(2, -1)
    return ACTIVATIONS[activation].function(gate) * up


class Float8Linear(nn.Linear):
    """A `torch.nn.Linear` that multiplies in FP8; `convert` makes one of a layer by changing its class."""

    fp8: str | None  # the recipe; None: not in FP8
    stochastic_gradients: bool = False

    def forward(
        self, input: Tensor, residual: Tensor | None = None, *, input_activation: Any = None, input_gated: bool = False
    ) -> Tensor:
        if self.fp8 is None:
            out = super().forward(hidden(input, input_activation, input_gated))
        else:
            options: dict[str, Any] = {"recipe": self.fp8, "stochastic_gradients": self.stochastic_gradients}
            options |= {"input_activation": input_activation, "input_gated": input_gated}
            out = linear(input, self.weight, self.bias, **options)
        return out if residual is None else out + residual  # in place of a `cuda_ext.nn.Linear`

    def extra_repr(self) -> str:
        stochastic = ", stochastic_gradients=True" * self.stochastic_gradients
        return f"{super().extra_repr()}, fp8={self.fp8}{stochastic}"


class ConvertibleLayer(NamedTuple):
    """What `convert` has to know of a layer that is no linear one; its attribute `fp8` is the recipe, or None."""

    features: tuple[int, int]
    recipes: tuple[str, ...]
    obstacle: str = ""  # why it cannot multiply in FP8
    is_gathered: bool = False  # FSDP2 gathers its weight in FP8


# Tell what a module is for `convert`, None if it is of another kind: of packages that this module cannot import.
convertible_layers: list[Callable[[nn.Module], ConvertibleLayer | None]] = []


@dataclasses.dataclass
class Report:
    """What `convert` did: the names of converted layers, and of those it kept, with the reason."""

    converted: list[str]
    kept: dict[str, str]
    experts: int = 0
    """How many of the converted ones are experts."""

    def __str__(self) -> str:
        experts = f" and {self.experts} layers of experts" if self.experts else ""
        lines = [f"{len(self.converted) - self.experts} linear layers{experts} in FP8, {len(self.kept)} kept"]
        return "\n".join(lines + [f"  {name}: {reason}" for name, reason in self.kept.items()])


def _description(layer: nn.Module) -> ConvertibleLayer | None:
    """None of a module that cannot be converted, as of one that contains layers."""
    if not isinstance(layer, nn.Linear):
        return next((found for describe in convertible_layers if (found := describe(layer)) is not None), None)
    ours = hasattr(layer, "fp8") and type(layer).__module__.startswith(f"{__package__}.")
    has_own = not (type(layer) is nn.Linear or ours) or "forward" in vars(layer)
    obstacle = f"a {type(layer).__name__} with a forward of its own" if has_own else ""
    if any(base.__name__ == "FSDPModule" for base in type(layer).__mro__):
        obstacle = "convert before fully_shard, which changes the class"
    features = layer.in_features, layer.out_features
    return ConvertibleLayer(features, RECIPES, obstacle, is_gathered(layer.weight))


def _reason_to_keep(layer: ConvertibleLayer, recipe: str, by_keep: bool, least_features: int) -> str:
    if layer.is_gathered:
        return "its weight is gathered in FP8"
    if layer.obstacle:
        return layer.obstacle
    if by_keep:
        return "by keep"
    if recipe not in layer.recipes:
        return f"multiplies in FP8 by {' or '.join(map(repr, layer.recipes))} alone, not by {recipe!r}"
    if min(layer.features) < least_features:
        return f"{layer.features[0]} x {layer.features[1]}: quantising would take longer than FP8 saves"
    return ""


def _keep_none(name: str, layer: Any) -> bool:
    return False


def convert(
    model: nn.Module,
    recipe: str = "rowwise",
    keep: Callable[[str, Any], bool] = _keep_none,
    *,
    least_features: int = 2048,
    stochastic_gradients: bool = False,
) -> Report:
    """Makes the linear layers of a model multiply in FP8, in place: those of `torch.nn` and of `cuda_ext.nn`, also in
    other modules; by ``"rowwise_with_gw_hp"`` also experts: of `cuda_ext.nn`, and of models of transformers that
    `cuda_ext.patch` has patched. Parameters, hooks and state dicts stay.

    Args:
        model: any module; itself a linear layer or experts, it is converted, too.
        recipe: see the module.
        keep: called with the name and the layer; True leaves it as it is. Models usually keep their last layer, whose
            logits need the precision: ``lambda name, layer: name == "lm_head"``.
        least_features: layers with fewer inputs or outputs, or hidden features of an expert, are kept: converting their
            operands would take longer than FP8 saves. Default 2048, where by the model of an H200 (docs/model.md) it
            begins to gain.
        stochastic_gradients: of the linear layers, as `linear`; experts round to nearest. Default False.

    Returns:
        a `Report`; print it.

    Raises:
        RuntimeError: an unknown recipe.
    """
    checked_recipe(recipe)
    report = Report([], {})
    for name, layer in model.named_modules():
        described = _description(layer)
        if described is None:
            continue
        by_keep = not described.obstacle and keep(name, layer)
        if reason := _reason_to_keep(described, recipe, by_keep, least_features):
            report.kept[name] = reason
            continue
        if type(layer) is nn.Linear:
            layer.__class__ = Float8Linear
        setattr(layer, "fp8", recipe)  # noqa: B010
        if isinstance(layer, nn.Linear):
            setattr(layer, "stochastic_gradients", stochastic_gradients)  # noqa: B010
        report.converted.append(name)
        report.experts += not isinstance(layer, nn.Linear)
    return report


def gather_weights(model: nn.Module) -> Report:
    """Makes FSDP2 gather the weights of layers in FP8, in place: half of the bytes of bfloat16, and no quantisation of
    whole weights on each rank::

        cuda_ext.fp8.convert(model, "tensorwise")
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        print(cuda_ext.fp8.gather_weights(model))

    Each rank quantises its rows of the parameter, from their own precision, before each gather. Outputs are those of a
    model that is not sharded with the same weights, bit for bit, except that mixed precision no longer rounds weights
    before they are quantised. Recipe ``"tensorwise"`` needs one all-reduce of a number for each gather of a weight;
    ``"blockwise"`` none.

    Call it once, after `fully_shard` and before the first forward. It lasts: sharded models cannot go back.

    Args:
        model: after `convert` and `fully_shard`.

    Returns:
        a `Report` of the linear layers in FP8: those whose weights travel in FP8, and those that travel as they did,
        with the reason: other recipes, whose transposes have scales of their own; rows that the ranks, or blocks of 128
        rows, do not divide; rows of K elements, K no multiple of 16; weights that are offloaded, shared by several
        layers, or sharded by more than FSDP2.
    """
    report = Report([], {})
    layers = list(model.named_modules(remove_duplicate=False))
    users = Counter(id(parameter) for _, layer in layers for parameter in layer.parameters(recurse=False))
    for name, layer in layers:
        recipe = getattr(layer, "fp8", None)
        if recipe is None or not isinstance(layer, nn.Linear) or is_gathered(layer.weight):
            continue
        of = _RECIPES[recipe]
        if reason := reason_not_to_gather(layer.weight, of.weight):
            report.kept[name] = reason
        elif users[id(layer.weight)] > 1:
            report.kept[name] = "shared by several layers"
        else:
            of_weight = functools.partial(quantize, scaling=of.weight, power_of_two=of.power_of_two)
            gather(layer.weight, of.weight, of_weight)
            report.converted.append(name)
    return report


def revert(model: nn.Module) -> None:
    """Undoes `convert`, in place.

    Raises:
        RuntimeError: weights are gathered in FP8 (`gather_weights`).
    """
    for name, layer in model.named_modules():
        if is_gathered(getattr(layer, "weight", None)):
            raise RuntimeError(
                f"{NAMESPACE}::fp8.revert: expected weights that are gathered as they are, got {name!r}, whose weight "
                "FSDP2 gathers in FP8; make the model again, and load its state dict"
            )
    for layer in model.modules():
        if type(layer) is Float8Linear:
            del layer.fp8
            layer.__class__ = nn.Linear  # type: ignore[assignment]
        elif getattr(layer, "fp8", None) is not None and _description(layer) is not None:
            setattr(layer, "fp8", None)  # noqa: B010
        else:
            continue
        vars(layer).pop("stochastic_gradients", None)
