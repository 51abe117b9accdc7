"""The experts of a mixture: two grouped products, and the weighted sum of the results of a token's experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from cuda_ext._activations import ACTIVATIONS, NAMES, listed
from cuda_ext._checks import autocasts, dtype_name, expected, is_transformed, shape_of
from cuda_ext._expert_parallel import check_share, on_their_ranks
from cuda_ext._expert_products import both_of_groups, multiply_groups, row_alignment, sum_groups
from cuda_ext._expert_routes import Routes, sort, sum_dtype
from cuda_ext._fp8_recipes import checked_experts_recipe
from cuda_ext._fp8_weights import keeps
from cuda_ext._gemm import gemm
from cuda_ext._grouped_mm import grouped_mm
from cuda_ext._load import ops
from cuda_ext._rules.gemm_fakes import needs_preact
from cuda_ext._shapes import in_shape
from cuda_ext._slot_write import writes_to_slot

__all__ = ["Gate", "mixture_of_experts"]

Gate = Callable[[Tensor], Tensor]


def mixture_of_experts(
    input: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    *,
    activation: str | Gate | None = "silu",
    gated: bool = True,
    experts: int | None = None,
    group: dist.ProcessGroup | None = None,
    fp8: str | None = None,
) -> Tensor:
    """The sum over a token's experts ``e = expert_ids[..., i]`` of ``expert_weights[..., i] * mlp_e(input)``.

    ``mlp_e(x)`` is ``gate(x @ w_up[e].T + b_up[e]) @ w_down[e].T + b_down[e]``, where the gate is, of ``[g, u]``, the
    halves of its argument, ``activation(g) * u``; with ``gated=False`` ``activation`` of all of it (Shazeer et al.,
    arXiv 1701.06538, equation 1). No token is dropped, whatever the numbers of tokens per expert; the host does not
    read them. Same bits on each call.

    Backward keeps `input` and the product with `w_up` only, and computes the rest again, as SonicMoE does
    (arXiv 2512.14080): with a gate, 2 F numbers for a token and expert where PyTorch's operations keep 4 F + 2 K.
    Derivatives of higher order, forward mode and `torch.func` are differentiated operation by operation.

    **Expert parallelism.** With `group`, ids count the `experts` of all its ranks, of which rank r has the r-th of as
    equal parts as possible, the first ones larger (`torch.tensor_split`); weights and biases are those of this rank's
    experts. All ranks call it together, each with tokens of its own, or none. Tokens travel to their experts and back,
    after one exchange of their numbers, which the host reads: calls break a compiled graph. Gradients of weights are
    sums over the tokens of all ranks.

    Args:
        input: ``(..., K)`` of tokens; float32, float16, bfloat16 or float64.
        expert_ids: ``(..., k)``, int32 or int64. Ids outside ``[0, experts)`` add nothing: experts of other ranks. Of
            tokens without experts (k = 0) the sum is 0.
        expert_weights: ``(..., k)``, any floating dtype. Products with them and sums are float32 (float64 for float64).
        w_up: ``(experts, 2 F, K)``, the rows of the gate first; ``(experts, F, K)`` with ``gated=False``. Any strides:
            pass ``weights.mT`` of those stored the other way round. Dtype of `input`, as all that follow.
        w_down: ``(experts, K, F)``.
        b_up, b_down: ``(experts, 2 F)`` or ``(experts, F)``, and ``(experts, K)``.
        activation: a name that `cuda_ext.gemm` takes, None, or a function of PyTorch operations from ``(rows, U)`` to
            ``(rows, F)``, the gate as a whole, which is told nothing of `gated`; all that autograd saves in it is kept.
        experts: of all ranks; default those of `w_up`. Required with `group`.
        group: ranks that share the experts; gloo or NCCL. Default None: all experts are here.
        fp8: ``"blockwise"``: rows, gradients of rows and matrices are converted to float8_e4m3fn, with a power of two
            as a scale for each 128 elements of rows and 128 x 128 of matrices, for all products
            (`cuda_ext.scaled_grouped_mm`). The rows of an expert then begin at a multiple of 128, with zeros between:
            up to 127 rows more for each expert. ``"rowwise_with_gw_hp"``: a scale for each row and each line of a
            matrix; products that give the gradients of matrices are in the dtype of the input. By both, matrices are
            converted from their own dtype, also under autocast; once while `cuda_ext.fp8.unchanged_weights` is entered.
            Not with a function as `activation`; backward gives first derivatives only. Default None: products in the
            dtype of the input.

    Returns:
        ``(..., K)``, dtype of `input`; under autocast that of autocast.

    Raises:
        RuntimeError: wrong shapes or dtypes, an unknown activation or recipe, second derivatives in FP8.
    """
    check_share(w_up, experts, group)
    keeps_fp8 = fp8 is not None and keeps(w_up) and keeps(w_down)
    mlps = _Mlps(activation, gated, fp8, keeps_fp8, w_up, w_down, b_up, b_down)
    _check(input, expert_ids, expert_weights, mlps)
    if not autocasts(input.device):
        return _compute(mlps, input, expert_ids, expert_weights, experts, group)
    dtype = torch.get_autocast_dtype(input.device.type)
    as_is = () if fp8 is None else (w_up, w_down)  # converted to FP8 from their own precision, and kept by parameter
    cast, *tensors = (
        t if t is None or t.dtype == torch.float64 or any(t is each for each in as_is) else t.to(dtype)
        for t in (input, *mlps.tensors())
    )
    with torch.autocast(input.device.type, enabled=False):
        return _compute(mlps.with_tensors(tensors), cast, expert_ids, expert_weights, experts, group)


class _Mlps(NamedTuple):
    """The experts that are here."""

    activation: str | Gate | None
    gated: bool
    fp8: str | None
    keeps_fp8: bool  # the matrices in FP8, if `cuda_ext.fp8.unchanged_weights` is entered
    w_up: Tensor
    w_down: Tensor
    b_up: Tensor | None
    b_down: Tensor | None

    def options(self) -> tuple[Any, ...]:
        return self.activation, self.gated, self.fp8, self.keeps_fp8

    def tensors(self) -> tuple[Any, ...]:
        return self.w_up, self.w_down, self.b_up, self.b_down

    def with_tensors(self, tensors: Sequence[Any]) -> _Mlps:
        return _Mlps(*self.options(), *tensors)

    def multiply(
        self,
        rows: Tensor,
        matrices: Tensor,
        ends: Tensor,
        bias: Tensor | None = None,
        *,
        transposed: bool = False,
        gathered: Tensor | None = None,
        quantized: Any = None,
    ) -> Tensor:
        """The rows of each expert times its transposed matrix, of (experts, N, K); with `transposed` the matrix
        itself; with `gathered` of ``rows[gathered]``, without a derivative. `quantized`: the rows in FP8, if they are
        converted already."""
        if self.fp8 is not None:
            options: dict[str, Any] = {"transposed": transposed, "gathered": gathered, "keeps": self.keeps_fp8}
            of_rows = rows if quantized is None else quantized
            return multiply_groups(of_rows, matrices, ends, bias, recipe=self.fp8, dtype=rows.dtype, **options)
        return grouped_mm(rows, matrices if transposed else matrices.mT, offs=ends, indices=gathered, bias=bias)

    def hidden(
        self, rows: Tensor, ends: Tensor, gathered: Tensor | None = None, *, saves: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """The operand of `w_down`; and, if backward `saves` it, what the gradient of the gate is found from: the
        product with `w_up`, or the operand itself."""
        if callable(self.activation) or self.fp8 is not None:
            product = self.multiply(rows, self.w_up, ends, self.b_up, gathered=gathered)
            return self.gate()(product), product if saves else None
        options: dict[str, Any] = {"activation": self.activation, "gated": self.gated}
        if not saves:
            return grouped_mm(rows, self.w_up.mT, offs=ends, indices=gathered, bias=self.b_up, **options), None
        hidden, product = ops.grouped_mm_forward.default(rows, self.w_up.mT, ends, self.b_up, gathered, **options)
        return hidden, product if needs_preact(self.activation, self.gated) else hidden

    def gate(self) -> Gate:
        """From the product with `w_up` to the operand of `w_down`."""
        if callable(self.activation):
            return self.activation
        function = ACTIVATIONS[self.activation].function

        def gate(product: Tensor) -> Tensor:
            gate, up = product.chunk(2, -1)
            return function(gate) * up

        return gate if self.gated else function


def _compute(
    mlps: _Mlps,
    input: Any,
    expert_ids: Tensor,
    expert_weights: Tensor,
    experts: int | None,
    group: dist.ProcessGroup | None,
) -> Tensor:
    tokens, ids, weights = map(_as_matrix, (input, expert_ids, expert_weights))
    if ids.shape[1] == 0:  # a token without experts is one with an expert that is not here
        ids, weights = F.pad(ids, (0, 1), value=-1), F.pad(weights, (0, 1))
    if group is None or experts is None:
        out = _compute_here(mlps, tokens, ids, weights)
    else:
        out = on_their_ranks(partial(_compute_here, mlps), experts, group, tokens, ids, weights)
    return in_shape(out, input.shape)


def _as_matrix(tensor: Tensor) -> Tensor:
    """(..., C) -> (tokens, C)"""
    return tensor.flatten(0, -2) if tensor.dim() > 1 else tensor.unsqueeze(0)


def _compute_here(mlps: _Mlps, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    routes = sort(ids, experts=len(mlps.w_up), alignment=row_alignment(mlps.fp8))
    if callable(mlps.activation) or is_transformed():
        if mlps.fp8 is not None:
            raise _expected("fp8=None with a function as activation, forward mode or torch.func: FP8 has no derivative")
        return _compose(mlps, routes, tokens, weights)
    inputs = tokens, weights, *mlps.tensors()
    if not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)):
        return _forward(mlps, routes, tokens, weights)[0]
    return _Experts.apply(mlps.options(), routes, tokens, weights, *mlps.tensors())


def _compose(mlps: _Mlps, routes: Routes, tokens: Tensor, weights: Tensor) -> Tensor:
    """The definition, of operations that PyTorch differentiates."""
    hidden, _ = mlps.hidden(routes.gather(tokens), routes.ends)
    results = mlps.multiply(hidden, mlps.w_down, routes.ends, mlps.b_down)
    return routes.sum(results, weights)


def _forward(
    mlps: _Mlps, routes: Routes, tokens: Tensor, weights: Tensor, *, saves: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The same in few passes, without derivatives; and what backward `saves` (_Mlps.hidden)."""
    hidden, product = mlps.hidden(routes.with_zeros(tokens), routes.ends, routes.token_of_rows(), saves=saves)
    results = mlps.multiply(hidden, mlps.w_down, routes.ends, mlps.b_down)
    return routes.combine(results, weights), product


# Among the tensors that _Experts.apply is given.
_UP, _DOWN = 2, 3


class _Experts(torch.autograd.Function):
    """_compose, with little memory."""

    @staticmethod
    def forward(
        ctx: Any,
        options: tuple[str | None, bool, str | None, bool],
        routes: Routes,
        tokens: Tensor,
        weights: Tensor,
        *tensors: Any,
    ) -> Tensor:
        mlps = _Mlps(*options, *tensors)
        out, product = _forward(mlps, routes, tokens, weights, saves=True)
        ctx.options = options
        ctx.save_for_backward(*routes, tokens, weights, *tensors, product)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, product = ctx.saved_tensors
        routes, (tokens, weights, *tensors) = Routes(*saved[:3]), saved[3:]
        mlps, needed = _Mlps(*ctx.options, *tensors), ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():  # gradients of gradients
            if mlps.fp8 is not None:
                raise _expected("fp8=None for second derivatives: FP8 has none")
            gradients = _differentiate(mlps, routes, tokens, weights, needed, grad)
        else:
            gradients = _gradients(mlps, routes, tokens, weights, needed, product, grad)
        return None, None, *gradients


def _differentiate(
    mlps: _Mlps, routes: Routes, tokens: Tensor, weights: Tensor, needed: tuple[bool, ...], grad: Tensor
) -> list[Tensor | None]:
    inputs = tokens, weights, *mlps.tensors()
    wanted = [t for t, is_needed in zip(inputs, needed, strict=True) if is_needed]
    out = _compose(mlps, routes, tokens, weights)
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
    return [next(found) if is_needed else None for is_needed in needed]


def _gradients(
    mlps: _Mlps,
    routes: Routes,
    tokens: Tensor,
    weights: Tensor,
    needed: tuple[bool, ...],
    product: Tensor,
    grad: Tensor,
) -> list[Tensor | None]:
    for_tokens, for_weights, for_up, for_down, for_b_up, for_b_down = needed
    ends = routes.ends
    token_of_rows, weights_of_pairs = routes.token_of_rows(), routes.of_pairs(weights)
    # The gradients of a token's results are that of their sum, but for the weights.
    grad_of_tokens = routes.with_zeros(grad)
    grad_hidden = mlps.multiply(grad_of_tokens, mlps.w_down, ends, transposed=True, gathered=token_of_rows)
    grad_product, weighted_hidden, grad_weights = ops.experts_gate_backward.default(
        grad_hidden,
        product,
        weights_of_pairs,
        routes.pairs,
        activation=mlps.activation,
        gated=mlps.gated,
        output_mask=(for_tokens or for_up or for_b_up, for_down, for_weights),
    )
    del grad_hidden
    gradients: list[Tensor | None] = [None] * 6
    if for_weights:
        grad_weights = routes.without_zeros(grad_weights)
        if mlps.b_down is not None:
            of_bias = gemm(grad, mlps.b_down.to(grad.dtype).t(), out_dtype=sum_dtype(grad))
            grad_weights = grad_weights + routes.of_experts(of_bias)
        gradients[1] = grad_weights.to(weights.dtype)
    if for_down or for_b_down:
        grad_rows = grad_of_tokens.index_select(0, token_of_rows)
        if for_down and mlps.fp8 == "blockwise":
            gradients[3] = sum_groups(_DOWN, grad_rows, None, weighted_hidden, ends, mlps.w_down.dtype)
        elif for_down:
            gradients[3] = _matrices_gradient(grad_rows, weighted_hidden, ends, mlps.w_down, _DOWN)
        if for_b_down:
            gradients[5] = _sums(grad_rows, ends, weights_of_pairs.reshape(-1)[routes.pairs])
        del grad_rows
    del weighted_hidden, grad_of_tokens
    gradients[4] = _sums(grad_product, ends) if for_b_up else None
    of_rows = of_columns = None
    if mlps.fp8 == "blockwise" and for_up and for_tokens:
        of_rows, of_columns = both_of_groups(grad_product)
    if for_up:
        if mlps.fp8 == "blockwise":
            rows = routes.with_zeros(tokens).index_select(0, token_of_rows)
            gradients[2] = sum_groups(_UP, grad_product, of_columns, rows, ends, mlps.w_up.dtype)
            del rows
        else:
            gradients[2] = _matrices_gradient(grad_product, tokens, ends, mlps.w_up, _UP, gathered=token_of_rows)
    if for_tokens:
        gradients[0] = routes.combine(mlps.multiply(grad_product, mlps.w_up, ends, transposed=True, quantized=of_rows))
    return gradients


def _matrices_gradient(
    grad: Tensor, rows: Tensor, ends: Tensor, matrices: Tensor, input: int, *, gathered: Tensor | None = None
) -> Tensor | None:
    """(experts, N, K) of grad (rows, N) and rows (rows, K), or ``rows[gathered]``, in the dtype of the matrices, which
    are input `input` of the autograd function; None if it went to their slot."""
    if writes_to_slot(input, grad, ops.grouped_mm.slot, grad.t(), rows, ends, gathered):
        return None
    dtype = None if matrices.dtype == rows.dtype else matrices.dtype
    return grouped_mm(grad.t(), rows, offs=ends, indices=gathered, out_dtype=dtype)


def _sums(rows: Tensor, ends: Tensor, weights: Tensor | None = None) -> Tensor:
    """(experts, N): the sum of the rows of each expert, weighted if there are weights (rows,)."""
    left = rows.new_ones(1, len(rows)) if weights is None else weights.to(rows.dtype).unsqueeze(0)
    return grouped_mm(left, rows, offs=ends).squeeze(1)


def _check(input: Tensor, expert_ids: Tensor, expert_weights: Tensor, mlps: _Mlps) -> None:
    activation, gated, fp8, _, w_up, w_down, b_up, b_down = mlps
    checked_experts_recipe(fp8)
    if fp8 is not None and input.dtype == torch.float64:
        raise _expected("input of float32, float16 or bfloat16 with fp8, got float64")
    if not callable(activation) and activation not in ACTIVATIONS:
        raise _expected(f"activation {listed(NAMES, 'or')}, None or a function, got {activation!r}")
    if w_up.dim() != 3 or w_up.shape[0] == 0:
        raise _expected(f"w_up of shape (experts, U, K) with at least one expert, got {shape_of(w_up)}")
    experts, up, k = w_up.shape
    if input.dim() == 0 or input.shape[-1] != k:
        raise _expected(f"input of shape (..., {k}) for w_up {shape_of(w_up)}, got {shape_of(input)}")
    has_own_gate, hidden = callable(activation), w_down.shape[-1] if w_down.dim() else 0
    if shape_of(w_down) != (experts, k, hidden) or not (has_own_gate or up == (2 if gated else 1) * hidden):
        width, why = ("F", "") if has_own_gate else (up / 2, " with a gate") if gated else (up, " without a gate")
        width = width if isinstance(width, str) else f"{width:g}"
        raise _expected(
            f"w_down of shape ({experts}, {k}, {width}) for w_up {shape_of(w_up)}{why}, got {shape_of(w_down)}"
        )
    for tensor in (expert_ids, expert_weights):
        of_tokens = tensor.dim() == input.dim() and tensor.shape[:-1] == input.shape[:-1]
        if not of_tokens or tensor.shape != expert_ids.shape:
            tokens = ", ".join([*map(str, input.shape[:-1]), "k"])
            raise _expected(
                f"expert_ids and expert_weights of shape ({tokens}) for input {shape_of(input)}, got "
                f"{shape_of(expert_ids)} and {shape_of(expert_weights)}"
            )
    if expert_ids.dtype not in (torch.int32, torch.int64):
        raise _expected(f"expert_ids of dtype int32 or int64, got {dtype_name(expert_ids.dtype)}")
    if not expert_weights.is_floating_point():
        raise _expected(f"expert_weights of a floating dtype, got {dtype_name(expert_weights.dtype)}")
    for name, bias, width in (("b_up", b_up, up), ("b_down", b_down, k)):
        if bias is not None and shape_of(bias) != (experts, width):
            raise _expected(f"{name} of shape ({experts}, {width}), got {shape_of(bias)}")


def _expected(what: str) -> RuntimeError:
    return expected("mixture_of_experts", what)
