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

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from cuda_ext._activations import ACTIVATIONS
from cuda_ext._fp8_recipes import BY_NAME, EXPERTS_RECIPES, RECIPES, Quantized, checked_recipe
from cuda_ext._fp8_weights import exports, keeps, multiply, unchanged_weights
from cuda_ext._gathered_weights import GatheredWeight, gather, is_gathered, reason_not_to_gather
from cuda_ext._load import ops
from cuda_ext._quantize import quantize, quantize_both
from cuda_ext._shapes import in_shape
from cuda_ext._slot_write import writes_to_slot
from cuda_ext._toolchain import NAMESPACE

__all__ = [
    "EXPERTS_RECIPES",
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


_WEIGHT = 1  # among the tensors that _Linear.apply is given


class _LinearOptions(NamedTuple):
    recipe: str
    dtype: torch.dtype  # of the output
    saves_rows: bool  # for the gradient of the weight
    keeps: bool  # the weight in FP8, if `unchanged_weights` is entered
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
    """Saves the weight, or the weight in FP8 if that has been gathered; and the transpose of the input in FP8, which is
    all that the gradient of the weight needs. Of a function of the input it saves the input, too, for its gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        rows: Tensor, weight: Tensor, bias: Tensor | None, gathered: Quantized | None, options: _LinearOptions
    ) -> tuple[Tensor, Tensor, Tensor]:
        recipe = BY_NAME[options.recipe]
        saved = None
        if options.saves_rows and recipe.quantizes_weight_grad:
            of_rows, saved = recipe.both_of(rows, recipe.tokens, **options.of_input)
        else:
            of_rows = recipe.of(rows, recipe.tokens, **options.of_input)
        if gathered is None:
            out = multiply(of_rows, weight, options.recipe, bias, keeps=options.keeps, dtype=options.dtype)
        else:
            out = of_rows.mm(gathered, options.dtype, bias)
        data, scales = (rows.new_empty(0), rows.new_empty(0)) if saved is None else saved[:2]
        return out, data, scales

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        rows, weight, bias, gathered, options = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        quantizes_weight_grad = BY_NAME[options.recipe].quantizes_weight_grad
        keeps_rows = (options.saves_rows and not quantizes_weight_grad) or bool(options.of_input)
        of_weight = (weight, None) if gathered is None else gathered[:2]
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
        recipe = BY_NAME[options.recipe]
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
                kept = {"transposed": True, "keeps": options.keeps}
                grad_input = multiply(of_grad, weight, options.recipe, dtype=ctx.dtype, **kept)
            else:
                gathered = Quantized(weight, weight_scales, recipe.weight)
                grad_input = of_grad.mm(gathered.transposed(), ctx.dtype)
        if options.of_input:
            needs_hidden = of_weight and not recipe.quantizes_weight_grad
            grad_input, rows = _through_function(grad_input, rows, needs_hidden, **options.of_input)
        if of_weight:
            if recipe.quantizes_weight_grad:
                if transposed is None:
                    transposed = recipe.of(grad.t(), recipe.tokens, **rounding)
                of_rows = Quantized(data, scales, recipe.tokens)
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


def _through_function(
    grad_hidden: Tensor | None, preact: Tensor, needs_hidden: bool, *, activation: str | None, gated: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradient of preact (rows, F) or, gated, (rows, 2F), if there is one of the hidden tensor (rows, F); and that
    tensor, if it is needed, from the same read, and rounded once."""
    options: dict[str, Any] = {"activation": activation, "gated": gated}
    if not needs_hidden:
        if grad_hidden is None:
            return None, None
        return ops.activation_backward.default(grad_hidden, preact, **options, bias_dtype=None)[0], None
    count, features = preact.shape[0], preact.shape[1] // (1 + gated)
    mask = grad_hidden is not None, True, False
    if grad_hidden is None:
        grad_hidden = preact.new_zeros(1, 1).expand(count, features)
    weights, pairs = preact.new_ones(count), preact.new_zeros(count, dtype=torch.int64)  # each row has the first weight
    operands = grad_hidden, preact, weights, pairs
    grad, operand, _ = ops.experts_gate_backward.default(*operands, **options, output_mask=mask)
    return grad if mask[0] else None, operand


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
        input: ``(..., K)``, float32, float16 or bfloat16; or nested, of layout `torch.jagged`.
        weight: ``(N, K)``, one of these dtypes.
        bias: ``(N,)``.
        recipe: how operands are quantised: see the module.
        stochastic_gradients: whether backward rounds the gradient of the output at random, as ``quantize(...,
            stochastic=True)``, so that the sums over it have no bias; input and weight are rounded to nearest all the
            same. Default False.
        input_activation, input_gated: multiplies ``activation(input)``, or with `input_gated` ``activation(input[...,
            :K]) * input[..., K:]`` of an input ``(..., 2K)``, as the second layer of an MLP does. It is converted to
            FP8 where it is computed, and not stored in the precision of the input; with ``"rowwise_with_gw_hp"``
            backward computes it once more. Default None and False.

    Returns:
        ``(..., N)``, dtype of `input`, or of autocast where that is enabled. Backward gives first derivatives only.
        It needs the weight and K bytes for each row of the input; with an activation or a gate the input, too.

    Raises:
        RuntimeError: wrong shapes, dtypes or recipe, second derivatives, forward mode.
    """
    checked_recipe(recipe)
    if input.is_nested:
        given: dict[str, Any] = {"recipe": recipe, "stochastic_gradients": stochastic_gradients}
        given |= {"input_activation": input_activation, "input_gated": input_gated}
        return _jagged_linear(input, weight, bias, given)
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
    # Exported programs have no backward; and the pitch of a transpose would depend on the size of the batch.
    saves_rows = weight.requires_grad and torch.is_grad_enabled() and not exports()
    rows = input.flatten(0, -2) if input.dim() > 1 else input.unsqueeze(0)
    gathered = None
    if isinstance(weight, GatheredWeight) and weight.scaling == BY_NAME[recipe].weight:
        gathered = Quantized(weight.numbers, weight.scales, weight.scaling)
    of_input = input_activation, input_gated
    options = _LinearOptions(recipe, dtype, saves_rows, keeps(weight), stochastic_gradients, *of_input)
    out = _Linear.apply(rows, weight, bias, gathered, options)[0]
    return in_shape(out, (*input.shape[:-1], weight.shape[0]))


def _jagged_linear(input: Any, weight: Tensor, bias: Tensor | None, options: dict[str, Any]) -> Tensor:
    """Of the packed rows."""
    packed = input.layout == torch.jagged and input.lengths() is None and input._ragged_idx < input.dim() - 1
    if not packed:
        raise RuntimeError(
            f"{NAMESPACE}::fp8.linear: expected a nested input of layout torch.jagged, contiguous, and jagged in a "
            f"dimension before the last, got {input.dim()} dimensions, {input.layout}; call contiguous(), or create it "
            "with torch.nested.nested_tensor_from_jagged"
        )
    known = {"min_seqlen": input._maybe_min_seqlen, "max_seqlen": input._maybe_max_seqlen}
    known["jagged_dim"] = input._ragged_idx
    rows = linear(input.values(), weight, bias, **options)
    return torch.nested.nested_tensor_from_jagged(rows, input.offsets(), **known)


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
        of = BY_NAME[recipe]
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
