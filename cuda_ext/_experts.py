"""The experts of a mixture: two grouped products, and the weighted sum of the results of a token's experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cuda_ext._activations import ACTIVATIONS, NAMES, listed
from cuda_ext._checks import autocasts, dtype_name, shape_of
from cuda_ext._collectives import AllToAll
from cuda_ext._grouped_mm import grouped_mm
from cuda_ext._toolchain import NAMESPACE

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
        expert_ids: ``(..., k)``, int32 or int64. Ids outside ``[0, experts)`` add nothing: experts of other ranks.
        expert_weights: ``(..., k)``, any floating dtype. Products with them and sums are float32 (float64 for float64).
        w_up: ``(experts, 2 F, K)``, the rows of the gate first; ``(experts, F, K)`` with ``gated=False``. Any strides:
            pass ``weights.mT`` of those stored the other way round. Dtype of `input`, as all that follow.
        w_down: ``(experts, K, F)``.
        b_up, b_down: ``(experts, 2 F)`` or ``(experts, F)``, and ``(experts, K)``.
        activation: a name that `cuda_ext.gemm` takes, None, or a function of PyTorch operations from ``(rows, U)`` to
            ``(rows, F)``, the gate as a whole, which is told nothing of `gated`; all that autograd saves in it is kept.
        experts: of all ranks; default those of `w_up`. Required with `group`.
        group: ranks that share the experts; gloo or NCCL. Default None: all experts are here.

    Returns:
        ``(..., K)``, dtype of `input`; under autocast that of autocast.

    Raises:
        RuntimeError: wrong shapes or dtypes, or an unknown activation.
    """
    _check_share(w_up, experts, group)
    _check(input, expert_ids, expert_weights, w_up, w_down, b_up, b_down, activation, gated)
    mlp = [w_up, w_down, b_up, b_down]
    if not autocasts(input.device):
        return _compute(expert_ids, activation, gated, group, experts, input, expert_weights, *mlp)
    dtype = torch.get_autocast_dtype(input.device.type)
    cast, *mlp = (t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in (input, *mlp))
    with torch.autocast(input.device.type, enabled=False):
        return _compute(expert_ids, activation, gated, group, experts, cast, expert_weights, *mlp)


def _compute(
    expert_ids: Tensor,
    activation: str | Gate | None,
    gated: bool,
    group: dist.ProcessGroup | None,
    experts: int | None,
    input: Any,
    weights: Tensor,
    *mlp: Any,
) -> Tensor:
    tokens, ids = input.reshape(-1, input.shape[-1]), expert_ids.reshape(-1, expert_ids.shape[-1])
    weights = weights.reshape(ids.shape)
    gate = activation if callable(activation) else _named(activation, gated)
    if group is not None and experts is not None:
        out = _of_ranks(activation, gated, group, experts, tokens, ids, weights, *mlp)
    elif callable(activation) or _is_transformed():
        out = _compose(gate, _sort(ids, experts=len(mlp[0])), tokens, weights, *mlp)
    else:
        out = _Experts.apply(activation, gated, _sort(ids, experts=len(mlp[0])), tokens, weights, *mlp)
    return out.reshape(input.shape)


def _of_ranks(
    activation: str | Gate | None,
    gated: bool,
    group: dist.ProcessGroup,
    experts: int,
    tokens: Tensor,
    ids: Tensor,
    weights: Tensor,
    *mlp: Any,
) -> Tensor:
    """Sends the rows of each expert to its rank, and the results back."""
    ranks, own, name = group.size(), len(mlp[0]), group.group_name
    routes = _sort(ids, experts)
    counts = routes.ends.diff(prepend=routes.ends.new_zeros(1))
    # (ranks, own): how many rows each rank has for each expert of this one
    received = AllToAll.apply(counts, shares(experts, ranks), [own] * ranks, name).view(ranks, own)
    of_ranks = torch.stack([part.sum() for part in counts.split(shares(experts, ranks))])
    to, of = torch.stack([of_ranks, received.sum(1)]).tolist()
    rows = AllToAll.apply(_repeated(tokens, routes)[: sum(to)], to, of, name)
    own_ids = torch.arange(own, device=ids.device).repeat(ranks)
    own_ids = own_ids.repeat_interleave(received.reshape(-1), output_size=sum(of)).unsqueeze(1)
    ones = torch.ones_like(own_ids, dtype=_sum_dtype(tokens))
    results = _compute(own_ids, activation, gated, None, None, rows, ones, *mlp)
    results = AllToAll.apply(results, of, to, name)
    results = torch.cat([results, results.new_zeros(ids.numel() - sum(to), tokens.shape[1])])
    return _weighted(results, routes, weights)


def shares(experts: int, ranks: int) -> list[int]:
    """How many of the experts each rank has."""
    return [experts // ranks + (rank < experts % ranks) for rank in range(ranks)]


def _named(activation: str | None, gated: bool) -> Gate:
    function = ACTIVATIONS[activation].function

    def gate(product: Tensor) -> Tensor:
        gate, up = product.chunk(2, -1)
        return function(gate) * up

    return gate if gated else function


class _Routes(NamedTuple):
    """Pairs of a token and one of its experts are sorted by experts: the rows of the products."""

    pairs: Tensor  # (rows,): the pair, token * k + i, of each row
    rows: Tensor  # (tokens, k): the row of each pair
    ends: Tensor  # (experts,), int32: the end of the rows of each expert

    def expert_of_rows(self) -> Tensor:
        """For rows that are not served, the last expert."""
        experts = torch.bucketize(torch.arange(len(self.pairs), device=self.pairs.device), self.ends, right=True)
        return experts.clamp_(max=len(self.ends) - 1)

    def are_served(self) -> Tensor:
        """Of rows: whether their expert is here."""
        return torch.arange(len(self.pairs), device=self.pairs.device) < self.ends[-1]


def _sort(ids: Tensor, experts: int) -> _Routes:
    ids = ids.detach()
    in_range = torch.where(ids < 0, experts, ids).reshape(-1)
    by_expert, pairs = torch.sort(in_range, stable=True)
    rows = torch.empty_like(pairs).scatter_(0, pairs, torch.arange(len(pairs), device=ids.device))
    ends = torch.searchsorted(by_expert, torch.arange(experts, device=ids.device, dtype=ids.dtype), right=True)
    return _Routes(pairs, rows.view(ids.shape), ends.int())


def _compose(
    gate: Gate,
    routes: _Routes,
    tokens: Tensor,
    weights: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None,
    b_down: Tensor | None,
) -> Tensor:
    """The definition, of operations that PyTorch differentiates."""
    hidden = gate(grouped_mm(_repeated(tokens, routes), w_up.mT, offs=routes.ends, bias=b_up))
    return _weighted(grouped_mm(hidden, w_down.mT, offs=routes.ends, bias=b_down), routes, weights)


def _repeated(tokens: Tensor, routes: _Routes) -> Tensor:
    """The rows, by a permutation of copies: each gets one gradient, so that their sum has an order."""
    count, top_k = routes.rows.shape
    return tokens.unsqueeze(1).expand(-1, top_k, -1).reshape(count * top_k, tokens.shape[1])[routes.pairs]


def _weighted(results: Tensor, routes: _Routes, weights: Tensor) -> Tensor:
    of_tokens = results[routes.rows.reshape(-1)].view(*routes.rows.shape, results.shape[1])
    return (of_tokens * weights.to(_sum_dtype(results)).unsqueeze(-1)).sum(1).to(results.dtype)


class _Experts(torch.autograd.Function):
    """_compose, with little memory."""

    @staticmethod
    def forward(
        ctx: Any,
        activation: str | None,
        gated: bool,
        routes: _Routes,
        tokens: Tensor,
        weights: Tensor,
        w_up: Tensor,
        w_down: Tensor,
        b_up: Tensor | None,
        b_down: Tensor | None,
    ) -> Tensor:
        product = grouped_mm(_rows_of(tokens, routes), w_up.mT, offs=routes.ends, bias=b_up)
        hidden = _named(activation, gated)(product)
        results = grouped_mm(hidden, w_down.mT, offs=routes.ends, bias=b_down)
        ctx.gate = activation, gated
        ctx.save_for_backward(*routes, tokens, weights, w_up, w_down, b_up, b_down, product)
        return _sum_of_rows(results, routes, weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, product = ctx.saved_tensors
        routes, inputs, needed = _Routes(*saved[:3]), saved[3:], ctx.needs_input_grad[3:]
        gate = _named(*ctx.gate)
        if torch.is_grad_enabled():  # gradients of gradients
            gradients = _differentiate(gate, routes, inputs, needed, grad)
        else:
            gradients = _gradients(gate, routes, inputs, needed, product, grad)
        return None, None, None, *gradients


def _differentiate(
    gate: Gate, routes: _Routes, inputs: list[Any], needed: tuple[bool, ...], grad: Tensor
) -> list[Tensor | None]:
    wanted = [t for t, is_needed in zip(inputs, needed, strict=True) if is_needed]
    found = iter(torch.autograd.grad(_compose(gate, routes, *inputs), wanted, grad, create_graph=True))
    return [next(found) if is_needed else None for is_needed in needed]


def _gradients(
    gate: Gate, routes: _Routes, inputs: list[Any], needed: tuple[bool, ...], product: Tensor, grad: Tensor
) -> list[Tensor | None]:
    tokens, weights, w_up, w_down, _, b_down = inputs
    for_tokens, for_weights, for_up, for_down, for_b_up, for_b_down = needed
    ends = routes.ends
    grad_rows = _rows_of(grad, routes)  # of the results, but for the weights
    weight_of_rows = weights.reshape(-1)[routes.pairs].unsqueeze(1)
    hidden, gate_gradient = torch.func.vjp(gate, product)  # type: ignore[misc]
    grad_hidden = grouped_mm(grad_rows, w_down, offs=ends)  # but for the weights
    gradients: list[Tensor | None] = [None] * 6
    if for_weights:
        of_rows = _dot(grad_hidden, hidden)
        if b_down is not None:
            of_bias = _dot(grad_rows, b_down[routes.expert_of_rows()])
            of_rows = of_rows + of_bias.where(routes.are_served(), 0.0)
        gradients[1] = of_rows[routes.rows].to(weights.dtype)
    if for_down or for_b_down:
        weighted = (grad_rows * weight_of_rows).to(grad.dtype)
        gradients[3] = grouped_mm(weighted.t(), hidden, offs=ends) if for_down else None
        gradients[5] = _sums(weighted, ends) if for_b_down else None
        del weighted
    del hidden, grad_rows
    (grad_product,) = gate_gradient((grad_hidden * weight_of_rows).to(grad.dtype))
    del grad_hidden, gate_gradient
    gradients[4] = _sums(grad_product, ends) if for_b_up else None
    if for_up:
        gradients[2] = grouped_mm(grad_product.t(), _rows_of(tokens, routes), offs=ends)
    if for_tokens:
        gradients[0] = _sum_of_rows(grouped_mm(grad_product, w_up, offs=ends), routes)
    return gradients


def _rows_of(tokens: Tensor, routes: _Routes) -> Tensor:
    return tokens[routes.pairs.div(routes.rows.shape[1], rounding_mode="floor")]


def _sum_of_rows(results: Tensor, routes: _Routes, weights: Tensor | None = None) -> Tensor:
    """(tokens, K): the sum of each token's rows, in their order."""
    dtype = _sum_dtype(results)
    total: Tensor | None = None
    for i in range(routes.rows.shape[1]):
        of_tokens = results[routes.rows[:, i]].to(dtype)
        if weights is not None:
            of_tokens = of_tokens * weights[:, i : i + 1].to(dtype)
        # Neither in place nor a conversion that changes nothing: Dynamo makes all of them outputs of the Function, and
        # its gradient then goes to one that is not used.
        total = of_tokens if total is None else total + of_tokens
    if total is None:
        return results.new_zeros(len(routes.rows), results.shape[1])
    return total if dtype == results.dtype else total.to(results.dtype)


def _sums(rows: Tensor, ends: Tensor) -> Tensor:
    """(experts, N): the sum of the rows of each expert."""
    return grouped_mm(rows.new_ones(1, len(rows)), rows, offs=ends).squeeze(1)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a.to(_sum_dtype(a)) * b).sum(1)


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _is_transformed() -> bool:
    """Whether torch.func or forward mode differentiates what is computed now."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def _check(
    input: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None,
    b_down: Tensor | None,
    activation: str | Gate | None,
    gated: bool,
) -> None:
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


def _check_share(w_up: Tensor, experts: int | None, group: dist.ProcessGroup | None) -> None:
    if group is None:
        if experts is not None and shape_of(w_up)[:1] != (experts,):
            raise _expected(f"w_up of all {experts} experts, or a group of ranks that share them, got {shape_of(w_up)}")
        return
    if experts is None:
        raise _expected("experts, the number of those of all ranks, with group")
    if experts < group.size():  # before a rank without experts raises an error of its own, and others wait for it
        raise _expected(f"at least one expert for each of {group.size()} ranks, got {experts}")
    own = shares(experts, group.size())[group.rank()]
    if shape_of(w_up)[:1] != (own,):
        where = f"rank {group.rank()} of {group.size()}"
        raise _expected(f"w_up with {own} of {experts} experts on {where}, got {shape_of(w_up)}")


def _expected(what: str) -> RuntimeError:
    return RuntimeError(f"{NAMESPACE}::mixture_of_experts: expected {what}")
