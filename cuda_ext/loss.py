"""The loss of a language model without its logits: product with the vocabulary, softmax and cross entropy as one op.

Logits ``z = softcap * tanh(scale * (input @ linear_weight.T + linear_bias) / softcap)`` are formed in tiles that are
reduced and dropped: there is never a tensor (M, V). Everything after the product is float32 (float64 for float64), also
for float16 and bfloat16 operands, and so are the results.

Backward has two methods. ``"recompute"`` keeps the log-sum-exp of each row and forms the tiles again: four products,
and little memory. ``"forward"`` forms the gradients during forward, while the logits of a row are complete: three
products, but only for a loss that is a number, and the gradients are there from then on. It is the method of PyTorch's
and Liger's chunked losses. ``"auto"`` takes it if enough complete rows fit into ``memory_limit`` that the products are
efficient, but not in batch-invariant mode, nor for float16, whose gradients a GradScaler must scale before they are
rounded.

Deterministic. Derivatives of higher order and in forward mode, and those under the transforms of `torch.func`, are
composed of differentiable ops, which make all logits.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, TypedDict, overload

import torch
from torch import Tensor

import cuda_ext._rules  # noqa: F401
from cuda_ext._checks import (
    check,
    check_constants,
    check_floating,
    check_same_device,
    check_shape,
    dtype_name,
    has_shape,
    is_finite,
    number_text,
    shape_of,
)
from cuda_ext._load import ops
from cuda_ext._vocab_parallel import Vocabulary, takes_sharded_weight, vocabulary_of

if TYPE_CHECKING:
    import torch.distributed as dist
    from typing_extensions import Unpack

__all__ = ["linear_cross_entropy", "linear_log_prob"]

MEMORY_LIMIT = {"cpu": 64 * 2**20, "cuda": 2**30}  # bytes of a tile
_METHODS = ("auto", "forward", "recompute")


class _LogitOptions(TypedDict, total=False):
    linear_bias: Tensor | None
    ignore_index: int
    softcap: float
    scale: float
    memory_limit: int | None
    filter_gradients: bool
    vocab_group: dist.ProcessGroup | None


class _LossOptions(_LogitOptions, total=False):
    weight: Tensor | None
    reduction: str
    label_smoothing: float
    z_loss: float
    method: str


def _check_tensors(op: str, input: Tensor, optional: dict[str, Tensor | None], **required: Tensor) -> None:
    """Shapes, devices and layouts. The ops check dtypes, after autocast."""
    for name, tensor in {"input": input, **required}.items():
        check(isinstance(tensor, Tensor), op, f"expected {name} to be a tensor, got {tensor!r}")
    given = {**required, **{name: tensor for name, tensor in optional.items() if tensor is not None}}
    for tensor in (input, *given.values()):
        message = f"expected dense tensors of layout torch.strided, got {tensor.layout}; convert it with .to_dense()"
        check(tensor.layout == torch.strided, op, message)
    check_same_device(op, "input", input, **given)
    check_floating(op, "input", input)
    check(input.dim() >= 1, op, "expected input of shape (..., K), got a 0-dim tensor")
    weight, target = required["linear_weight"], required["target"]
    fits = weight.dim() == 2 and weight.shape[1] == input.shape[-1]
    check(fits, op, f"expected linear_weight of shape (V, {input.shape[-1]}), got {shape_of(weight)}")
    leading, classes = tuple(input.shape[:-1]), weight.shape[0]
    for name in ("linear_bias", "weight"):
        if (vector := optional.get(name)) is not None:
            check_shape(op, name, vector, (classes,))
            check_floating(op, name, vector)
    if target.is_floating_point():
        what = "target probabilities"
        check(
            has_shape(target, (*leading, classes)), op, f"expected {what} {(*leading, classes)}, got {shape_of(target)}"
        )
        has_gradient = target.requires_grad and torch.is_grad_enabled()
        check(not has_gradient, op, f"expected {what} without a gradient, got requires_grad=True; use target.detach()")
    else:
        is_index = target.dtype == torch.int64 and has_shape(target, leading)
        got = f"{dtype_name(target.dtype)} and {shape_of(target)}"
        check(is_index, op, f"expected target of dtype int64 and shape {leading}, got {got}")


def _check_numbers(op: str, **numbers: float) -> None:
    check_constants(op, **numbers)
    for name, number in numbers.items():
        check(is_finite(number), op, f"expected {name} to be finite, got {number_text(number)}")
    softcap = numbers["softcap"]
    check(softcap >= 0, op, f"expected softcap to be 0 (none) or more, got {number_text(softcap)}")


def _check_options(op: str, reduction: str, method: str, label_smoothing: float, of_number: bool) -> None:
    smooths = f"expected label_smoothing in [0, 1], got {number_text(label_smoothing)}"
    check(0.0 <= label_smoothing <= 1.0, op, smooths)
    check(reduction in ("mean", "sum", "none"), op, f"expected reduction 'mean', 'sum' or 'none', got {reduction!r}")
    check(method in _METHODS, op, f"expected method 'auto', 'forward' or 'recompute', got {method!r}")
    cases = "reduction 'none', returned values and vocab_group"
    check(method != "forward" or of_number, op, f"expected method 'auto' or 'recompute' for {cases}, got 'forward'")


def _flatten(input: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """input (M, K), target (M,) or, probabilities, (M, V)."""
    rows = math.prod(input.shape[:-1])  # not numel(), which sizes that are symbols do not have
    return input.reshape(rows, input.shape[-1]), target.reshape(rows, *target.shape[input.dim() - 1 :])


@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    return_lse: Literal[False] = False,
    return_entropy: Literal[False] = False,
    **options: Unpack[_LossOptions],
) -> Tensor: ...
@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    return_lse: Literal[True],
    return_entropy: bool = False,
    **options: Unpack[_LossOptions],
) -> tuple[Tensor, ...]: ...
@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    return_lse: bool = False,
    return_entropy: bool = False,
    **options: Unpack[_LossOptions],
) -> Tensor | tuple[Tensor, ...]: ...
@takes_sharded_weight
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
    scale: float = 1.0,
    z_loss: float = 0.0,
    return_lse: bool = False,
    return_entropy: bool = False,
    method: str = "auto",
    memory_limit: int | None = None,
    filter_gradients: bool = False,
    vocab_group: dist.ProcessGroup | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """``F.cross_entropy(z, target, ...) + z_loss * lse ** 2``, with the logits z of the module.

    The arguments up to ``label_smoothing`` are those of `torch.nn.functional.linear_cross_entropy` (PyTorch 2.13).

    Args:
        input: ``(..., K)``; M rows.
        linear_weight: ``(V, K)``, as in `torch.nn.Linear`; dtype of ``input``.
        target: ``(...)`` of dtype int64, classes in ``[0, V)`` or ``ignore_index``; or floating ``(..., V)``,
            probabilities, which are read, but have no gradient.
        linear_bias: ``(V,)``; dtype of ``input``.
        weight: ``(V,)``, a weight of each class, as in `torch.nn.functional.cross_entropy`; no gradient.
        reduction: ``"mean"`` (over the weights of the targets; with probabilities over M), ``"sum"`` or ``"none"``.
        ignore_index: rows with this target count for nothing.
        label_smoothing: in [0, 1]: this much of each target is spread evenly over all classes.
        softcap: default 0: none (Gemma 2 has 30).
        scale: factor of the product and its bias; an inverse temperature.
        z_loss: factor of ``lse ** 2``, which keeps logits from drifting (Chowdhery et al., PaLM, arXiv 2204.02311,
            section 5). Added to each target that is not ignored; under ``"mean"`` its mean over these, unweighted.
        return_lse, return_entropy: also return these values of each row, float32 ``(...)``, with gradients: the
            logarithm of the sum of exponentials of z, and the entropy of softmax(z) in natural units.
        method: how backward gets its gradients: ``"auto"``, ``"forward"`` or ``"recompute"``; see the module.
        memory_limit: bytes for logits and their gradients, and for float32 sums of the weight's gradient; default
            64 MiB on a CPU, 1 GiB on a GPU. Beside them, "recompute" has float32 sums of a 16-bit ``input``'s gradient
            if a tile does not have all classes, and one tile has at least 128 rows or all of them, or is one row.
        filter_gradients: leave out of the products of backward the classes whose logits have, in a tile of at most
            1024 rows, no gradient above eps / 32 of ``input``'s dtype, relative to the largest factor of softmax -
            target: 2^-12 in bfloat16 (Wijmans et al., Cut Your Losses, arXiv 2411.09009, section 4.3). Faster where
            softmax is concentrated on a few classes, as in trained models. What is left out is not random, and sums of
            many tokens may miss it: weights of rare classes stop shrinking. On a GPU the host waits for each tile,
            which a CUDA graph cannot capture.
        vocab_group: the ranks over which the vocabulary is sharded, in rank order, some of whose sizes may differ;
            default None: it is not. ``linear_weight``, ``linear_bias``, ``weight`` and probabilities are this rank's;
            ``input``, ``target`` (in the whole vocabulary) and options are the same on all ranks, and so are results
            and the gradient of ``input``. Each rank sends 3 floats a row, 1 more for each of label smoothing, class
            weights, probabilities and ``return_entropy``, and that gradient. Without method ``"forward"``, forward mode
            and the transforms of `torch.func`. A DTensor ``linear_weight`` that is Shard(0) on a mesh of one dimension
            needs no ``vocab_group``.

    Returns:
        The loss, float32 (float64 for float64): a number, or ``(...)`` for ``"none"``; if asked for, a tuple
        ``(loss, lse, entropy)`` of it and the others. The mean over no target is NaN.

    Raises:
        RuntimeError: wrong shapes, dtypes, devices or options. IndexError: a target that is no class, on a CPU; on a
        GPU it makes the loss NaN.
    """
    op = "linear_cross_entropy"
    of_number = reduction != "none" and not return_lse and not return_entropy and vocab_group is None
    if not torch.compiler.is_compiling():
        _check_numbers(op, softcap=softcap, scale=scale, z_loss=z_loss, label_smoothing=label_smoothing)
        _check_options(op, reduction, method, label_smoothing, of_number)
        optional = {"linear_bias": linear_bias, "weight": weight}
        _check_tensors(op, input, optional, linear_weight=linear_weight, target=target)
    rows, targets = _flatten(input, target)
    vocabulary = vocabulary_of(op, vocab_group, linear_weight, targets, ignore_index)
    terms = _terms(rows, targets, vocabulary, weight, ignore_index, label_smoothing, z_loss)
    limit = MEMORY_LIMIT["cpu" if input.device.type == "cpu" else "cuda"] if memory_limit is None else memory_limit
    options = {"scale": scale, "softcap": softcap, "ignore_index": ignore_index, "memory_limit": limit}
    options["filter_gradients"] = filter_gradients
    logits = (rows, linear_weight, linear_bias, terms.target, terms.coefficients)
    if of_number:
        loss: Tensor = ops.linear_loss(*logits, *terms.weighted(reduction), **options, method=method)
        return loss + terms.of_nothing(reduction)
    lse, nll, dot, entropy, _ = vocabulary.statistics(*logits, **options, entropy=return_entropy)
    losses = terms.losses(lse, nll, dot, reduction)
    loss = losses.view(input.shape[:-1]) if reduction == "none" else losses.sum() + terms.of_nothing(reduction)
    if not (return_lse or return_entropy):
        return loss
    more = [value.view(input.shape[:-1]) for value, wanted in ((lse, return_lse), (entropy, return_entropy)) if wanted]
    return loss, *more


def _share(by: Tensor | None, total: Tensor) -> Tensor | None:
    """Of nothing, nothing: rows that do not count have no gradient, even if the mean is NaN."""
    return None if by is None else torch.where(by == 0, 0.0, by / total)


class _Terms:
    """The loss of a row, ``by_lse * lse + by_nll * nll + by_dot * dot + by_square * lse ** 2``, of which `lse`, `nll`
    and `dot` are outputs of `logit_statistics`."""

    def __init__(
        self,
        valid: Tensor | None,
        target: Tensor | None,
        coefficients: Tensor | None,
        by: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
        total: Tensor,
        count: Tensor,
    ) -> None:
        self.valid, self.target, self.coefficients = valid, target, coefficients
        self.by, self.total, self.count = by, total, count

    def weighted(self, reduction: str) -> tuple[Tensor | None, ...]:
        """The factors, with those of the reduction."""
        if reduction != "mean":
            return self.by
        *by, square = self.by
        return (*(_share(b, self.total) for b in by), _share(square, self.count))

    def of_nothing(self, reduction: str) -> Tensor | float:
        """NaN if a mean is over no target, else 0."""
        return torch.where(self.total == 0, torch.nan, 0.0) if reduction == "mean" else 0.0

    def losses(self, lse: Tensor, nll: Tensor, dot: Tensor, reduction: str) -> Tensor:
        by_lse, by_nll, by_dot, by_square = self.weighted(reduction)
        losses = torch.zeros_like(lse)
        for by, value in ((by_lse, lse), (by_nll, nll), (by_dot, dot)):
            if by is not None:
                losses = losses + by * value
        if by_square is not None:
            losses = losses + by_square * lse.square()
        return losses if self.valid is None else torch.where(self.valid, losses, 0.0)


def _terms(
    rows: Tensor,
    target: Tensor,
    vocabulary: Vocabulary,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> _Terms:
    dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
    weight = None if weight is None else weight.detach().to(dtype)
    spread = vocabulary.share(label_smoothing)
    count = rows.shape[0]
    if target.is_floating_point():
        coefficients = target.detach()
        if label_smoothing:
            coefficients = coefficients.to(dtype) * (1.0 - label_smoothing) + spread
        if weight is not None:
            coefficients = coefficients.to(dtype) * weight
        of_row = vocabulary.sum(coefficients.sum(1, dtype=dtype))
        ones = torch.ones_like(of_row)
        square = z_loss * ones if z_loss else None
        total = of_row.new_full((), count)
        return _Terms(None, None, coefficients, (of_row, None, -ones, square), total, total)
    valid = target != ignore_index
    mask = valid.to(dtype)
    own = mask if weight is None else vocabulary.pick(weight, target, valid) * mask
    by_nll = (1.0 - label_smoothing) * own
    by_lse: Tensor | None = None
    by_dot: Tensor | None = None
    of_classes: Tensor | None = None
    if label_smoothing:
        of_classes = rows.new_ones(vocabulary.own, dtype=dtype) if weight is None else weight
        by_lse = (label_smoothing if weight is None else spread * vocabulary.sum(weight.sum())) * mask
        by_dot = -spread * mask
    square = z_loss * mask if z_loss else None
    by = (by_lse, by_nll, by_dot, square)
    return _Terms(valid, target, of_classes, by, own.sum(), mask.sum())


@overload
def linear_log_prob(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    return_entropy: Literal[False] = False,
    **options: Unpack[_LogitOptions],
) -> Tensor: ...
@overload
def linear_log_prob(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    return_entropy: Literal[True],
    **options: Unpack[_LogitOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def linear_log_prob(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, return_entropy: bool, **options: Unpack[_LogitOptions]
) -> Tensor | tuple[Tensor, Tensor]: ...
@takes_sharded_weight
def linear_log_prob(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    softcap: float = 0.0,
    scale: float = 1.0,
    ignore_index: int = -100,
    return_entropy: bool = False,
    memory_limit: int | None = None,
    filter_gradients: bool = False,
    vocab_group: dist.ProcessGroup | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``log_softmax(z)`` at the targets, and the entropy of ``softmax(z)``, with gradients through both: for
    reinforcement learning and preferences (GRPO, PPO, DPO). The logits z and the arguments are those of
    `linear_cross_entropy`.

    Args:
        target: ``(...)`` of dtype int64. Rows of ``ignore_index`` give 0.

    Returns:
        ``(...)``, float32 (float64 for float64); with ``return_entropy`` a tuple ``(log_prob, entropy)`` of two.

    Raises: as `linear_cross_entropy`.
    """
    if not torch.compiler.is_compiling():
        op = "linear_log_prob"
        _check_numbers(op, softcap=softcap, scale=scale)
        _check_tensors(op, input, {"linear_bias": linear_bias}, linear_weight=linear_weight, target=target)
        check(not target.is_floating_point(), op, f"expected target of dtype int64, got {dtype_name(target.dtype)}")
    rows, targets = _flatten(input, target)
    limit = MEMORY_LIMIT["cpu" if input.device.type == "cpu" else "cuda"] if memory_limit is None else memory_limit
    vocabulary = vocabulary_of("linear_log_prob", vocab_group, linear_weight, targets, ignore_index)
    _, nll, _, entropy, _ = vocabulary.statistics(
        rows,
        linear_weight,
        linear_bias,
        targets,
        None,
        scale=scale,
        softcap=softcap,
        ignore_index=ignore_index,
        memory_limit=limit,
        filter_gradients=filter_gradients,
        entropy=return_entropy,
    )
    log_prob = -nll.view(target.shape)
    return (log_prob, entropy.view(target.shape)) if return_entropy else log_prob
