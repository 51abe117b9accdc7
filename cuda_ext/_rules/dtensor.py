"""DTensor sharding rules of the ops: which placements of the arguments give which placements of the results.

DTensor dispatches below autograd, so it sees X, X_forward and X_backward. Each rule describes one dimension of a device
mesh; DTensor combines the rules of several dimensions, and redistributes arguments to the cheapest combination. If no
rule matches, the arguments are gathered. Partial means a sum over ranks: only linear functions can take or return it,
never an activation.

A gated weight has the rows of [gate; up]: Shard(0) would give the gate to some ranks and the rest to others. So no rule
takes it split by rows: it is gathered.

`cuda_ext._rules` imports this module when `torch.distributed.tensor` is imported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement

from cuda_ext._load import ops
from cuda_ext._rules.fp8_fakes import BY_ROWS, ROWWISE, TENSORWISE
from cuda_ext._rules.gemm_fakes import needs_preact
from cuda_ext._toolchain import NAMESPACE

Placements = Sequence[Placement | None]
Rule = tuple[Placements, Placements]  # of results, of arguments

REPLICATE, PARTIAL = Replicate(), Partial()

_dispatcher = DTensor._op_dispatcher
_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def _register(name: str, rule: Callable[..., Iterator[Rule]], overload: str = "default") -> None:
    op = getattr(getattr(ops, name), overload)  # the slot overloads are never called with tensor subclasses
    if "output_mask" in str(op._schema):
        op = _with_hashable_mask(op)
    register_sharding(op)(partial(_placements, op, rule))
    # The arguments by which DTensor caches its choice: all non-tensors, which register_sharding does not ensure.
    arguments = op._schema.arguments
    first_option = next((n for n, each in enumerate(arguments) if "Tensor" not in str(each.type)), len(arguments))
    keywords = [each.name for each in arguments if each.kwarg_only]
    _dispatcher.sharding_propagator.op_to_schema_info[op] = RuntimeSchemaInfo(first_option, keywords, needs_pytree=True)


def _with_hashable_mask(op: Any) -> Any:
    """An op that DTensor calls instead of `op`, with an int as output_mask, bit n for its element n. DTensor's cache
    cannot hash a list among keyword arguments; without the mask in its key it would return the shapes for another mask.
    It is not an overload of `op`, because a new overload changes the packet's hash, the key of the FLOP formulas."""
    before, size_text, after = re.split(r"bool\[(\d+)\] (?=output_mask)", str(op._schema))
    size = int(size_text)
    name, rest = f"{before}int {after}".removeprefix(f"{NAMESPACE}::").split("(", 1)
    name += "_dtensor"

    def call(*args: Any, output_mask: int, **options: Any) -> Any:
        return op(*args, output_mask=_as_list(output_mask, size), **options)

    _library.define(f"{name}({rest}")
    _library.impl(name, call, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", call, lib=_library)
    substitute = getattr(ops, name).default

    def redirect(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mask = sum(wanted << n for n, wanted in enumerate(kwargs["output_mask"]))
        return substitute(*args, **{**kwargs, "output_mask": mask})

    _dispatcher._custom_op_handlers[op] = redirect
    return substitute


def _as_list(mask: int, size: int) -> list[bool]:
    return [bool(mask >> n & 1) for n in range(size)]


def _placements(op: Any, rule: Callable[..., Iterator[Rule]], *args: Any, **options: Any) -> list[Rule]:
    schema = op._schema
    tensors = [each for each in schema.arguments if not each.kwarg_only]
    args = (*args, *(each.default_value for each in tensors[len(args) :]))
    rules = [([REPLICATE] * len(schema.returns), [REPLICATE] * len(args)), *rule(*args, **options)]
    # Only tensors have a placement.
    return [
        (list(results), [place if _is_tensor(given) else None for given, place in zip(args, places, strict=True)])
        for results, places in rules
    ]


def _is_tensor(given: Any) -> bool:
    return hasattr(given, "placements")


def _split_at(tensor: Any, dim: int, rank: int) -> Placement:
    """The placement of a tensor that broadcasts to one with `rank` dims that is split at `dim`: split there too, unless
    it lacks that dim or has size 1 in it."""
    own = dim - (rank - tensor.ndim) if tensor is not None else -1
    return Shard(own) if own >= 0 and tensor.shape[own] != 1 else REPLICATE


def _wanted(places: Sequence[Placement], output_mask: int) -> Placements:
    wanted = _as_list(output_mask, len(places))
    return [place if is_wanted else REPLICATE for place, is_wanted in zip(places, wanted, strict=True)]


# gemm


def _gemm(
    results: int, a: Any, b: Any, c: Any, bias: Any, *, activation: str | None = None, **options: Any
) -> Iterator[Rule]:
    rank = max(a.ndim, b.ndim)
    keeps_preact = needs_preact(activation)

    def out(place: Placement) -> Placements:
        return [place, place if keeps_preact else REPLICATE][:results]

    for dim in range(rank - 2):
        split = Shard(dim)
        yield out(split), [_split_at(a, dim, rank), _split_at(b, dim, rank), _split_at(c, dim, rank), REPLICATE]
    yield out(Shard(rank - 2)), [Shard(a.ndim - 2), REPLICATE, _split_at(c, rank - 2, rank), REPLICATE]
    yield out(Shard(rank - 1)), [REPLICATE, Shard(b.ndim - 1), _split_at(c, rank - 1, rank), Shard(0)]
    if activation is None:
        yield out(PARTIAL), [Shard(a.ndim - 1), Shard(b.ndim - 2), PARTIAL, PARTIAL]


def _gemm_backward(grad: Any, a: Any, b: Any, bias: Any, *, output_mask: int, **options: Any) -> Iterator[Rule]:
    rank = grad.ndim

    def rule(places: Sequence[Placement], grad_place: Placement, grads: Sequence[Placement]) -> Rule:
        return _wanted(grads, output_mask), [grad_place, *places]

    for dim in range(rank - 2):
        places = [_split_at(a, dim, rank), _split_at(b, dim, rank)]
        grads = [PARTIAL if place == REPLICATE else place for place in places]
        yield rule([*places, REPLICATE], Shard(dim), [*grads, Shard(dim), PARTIAL])
    rows, columns = Shard(rank - 2), Shard(rank - 1)
    rows_a, columns_b = Shard(a.ndim - 2), Shard(b.ndim - 1)
    yield rule([rows_a, REPLICATE, REPLICATE], rows, [rows_a, PARTIAL, rows, PARTIAL])
    yield rule([REPLICATE, columns_b, Shard(0)], columns, [PARTIAL, columns_b, columns, Shard(0)])
    inner = [Shard(a.ndim - 1), Shard(b.ndim - 2)]
    yield rule([*inner, REPLICATE], REPLICATE, [*inner, REPLICATE, REPLICATE])
    yield rule([REPLICATE] * 3, PARTIAL, [PARTIAL] * 4)


def _grouped_mm(
    results: int,
    a: Any,
    b: Any,
    offs: Any,
    bias: Any,
    indices: Any,
    *,
    activation: str | None = None,
    gated: bool = False,
    **options: Any,
) -> Iterator[Rule]:
    """Ranks have the same groups: rows of tokens cannot be split, because a rank would need ends of its own."""
    columns = Shard(b.ndim - 1)

    def out(place: Placement) -> Placements:
        return [place, place if needs_preact(activation, gated) else REPLICATE][:results]

    if b.ndim == 2:
        yield out(Shard(1)), [Shard(0), REPLICATE, REPLICATE, REPLICATE, REPLICATE]
        yield out(Shard(2)), [REPLICATE, columns, REPLICATE, REPLICATE, REPLICATE]
    elif not gated:
        yield out(Shard(1)), [REPLICATE, columns, REPLICATE, Shard(1), REPLICATE]
        if activation is None:
            yield out(PARTIAL), [Shard(1), Shard(1), REPLICATE, PARTIAL, REPLICATE]


def _combine_experts(*args: Any) -> Iterator[Rule]:
    """Ranks have the same rows."""
    for place in (Shard(1), PARTIAL):
        yield [place], [place, REPLICATE, REPLICATE]


def _experts_gate_backward(*args: Any, gated: bool, output_mask: int, **options: Any) -> Iterator[Rule]:
    columns = Shard(1)
    if not gated:
        yield _wanted([columns, columns, PARTIAL], output_mask), [columns, columns, REPLICATE, REPLICATE]


# FP8: split by lines, whose scales are of one line each; sums are never split, whose scales would differ


def _scales_at(scales: Any, scaling: int, lines: int) -> Placement | None:
    """The placement of the scales of an operand that is split by its lines; None if they are not of one line each."""
    if scaling == TENSORWISE:
        return REPLICATE
    if scaling not in BY_ROWS:
        return None
    return Shard(next((dim for dim, size in enumerate(scales.shape) if size == lines), 0))


def _scaled_mm(
    a: Any, b: Any, scale_a: Any, scaling_a: int, scale_b: Any, scaling_b: int, bias: Any, input: Any, beta: float,
    **options: Any,
) -> Iterator[Rule]:  # fmt: skip
    rows, columns = _scales_at(scale_a, scaling_a, a.shape[0]), _scales_at(scale_b, scaling_b, b.shape[1])
    if rows is not None:
        places = [Shard(0), REPLICATE, rows, None, REPLICATE, None, REPLICATE, _split_at(input, 0, 2), None]
        yield [Shard(0)], places
    if columns is not None:
        places = [REPLICATE, Shard(1), REPLICATE, None, columns, None, Shard(0), _split_at(input, 1, 2), None]
        yield [Shard(1)], places


def _scaled_grouped_mm(
    a: Any, b: Any, scale_a: Any, scaling_a: int, scale_b: Any, scaling_b: int, *others: Any, **options: Any
) -> Iterator[Rule]:
    """Rows of tokens cannot be split, as in `_grouped_mm`."""
    if b.ndim == 2:  # groups of terms: each has all of them
        rows, columns = _scales_at(scale_a, scaling_a, a.shape[0]), _scales_at(scale_b, scaling_b, b.shape[1])
        if rows is not None:
            yield [Shard(1)], [Shard(0), REPLICATE, rows, None, REPLICATE, None, REPLICATE, REPLICATE]
        if columns is not None:
            yield [Shard(2)], [REPLICATE, Shard(1), REPLICATE, None, columns, None, REPLICATE, REPLICATE]
    elif scaling_b in (TENSORWISE, ROWWISE):
        columns = Shard(1) if scaling_b == ROWWISE else REPLICATE
        yield [Shard(1)], [REPLICATE, Shard(2), REPLICATE, None, columns, None, REPLICATE, Shard(1)]


def _gather_fp8(rows: Any, index: Any) -> Iterator[Rule]:
    yield [Shard(1)], [Shard(1), REPLICATE]
    yield [Shard(0)], [REPLICATE, Shard(0)]


def _quantize_fp8(input: Any, dtype: torch.dtype, scaling: int, power_of_two: bool, **options: Any) -> Iterator[Rule]:
    """Also of an activation."""
    if scaling in BY_ROWS:
        yield [Shard(0), Shard(0)], [Shard(0), None, None, None]


def _quantize_fp8_both(*args: Any, **options: Any) -> Iterator[Rule]:
    """The scales of the transpose are of whole columns."""
    yield from ()


def _refuse_stochastic(*args: Any, **options: Any) -> Iterator[Rule]:
    raise NotImplementedError(
        f"{NAMESPACE}::quantize_fp8: expected stochastic=False for DTensors, got True: ranks would draw numbers that "
        "differ between replicas, or repeat between shards; call it on local tensors (to_local)"
    )
    yield


# linear, gated_linear


def _linear(
    results: int,
    gated: bool,
    input: Any,
    weight: Any,
    bias: Any,
    residual: Any = None,
    *,
    activation: str | None = None,
) -> Iterator[Rule]:
    last = input.ndim - 1
    keeps_preact = needs_preact(activation, gated, residual is not None)

    def rule(place: Placement, places: Sequence[Placement]) -> Rule:
        return [place, place if keeps_preact else REPLICATE][:results], places[: 3 if gated else 4]

    for dim in range(last):
        yield rule(Shard(dim), [Shard(dim), REPLICATE, REPLICATE, _split_at(residual, dim, input.ndim)])
    if not gated:
        yield rule(Shard(last), [REPLICATE, Shard(0), Shard(0), _split_at(residual, last, input.ndim)])
        if activation is None:
            yield rule(PARTIAL, [Shard(last), Shard(1), PARTIAL, PARTIAL])


def _activation_backward(grad: Any, preact: Any, *, gated: bool, **options: Any) -> Iterator[Rule]:
    last = grad.ndim - 1
    for dim in range(last):
        yield [Shard(dim), PARTIAL], [Shard(dim), Shard(dim)]
    if not gated:
        yield [Shard(last), Shard(0)], [Shard(last), Shard(last)]
    yield [PARTIAL, PARTIAL], [PARTIAL, REPLICATE]


def _linear_backward(
    grad: Any, input: Any, weight: Any, bias: Any, *, output_mask: int, **options: Any
) -> Iterator[Rule]:
    last = input.ndim - 1

    def rule(places: Sequence[Placement], grads: Sequence[Placement]) -> Rule:
        return _wanted(grads, output_mask), places

    for dim in range(last):
        split = Shard(dim)
        yield rule([split, split, REPLICATE, REPLICATE], [split, PARTIAL, PARTIAL])
    split = Shard(last)
    yield rule([split, REPLICATE, Shard(0), Shard(0)], [PARTIAL, Shard(0), Shard(0)])
    yield rule([REPLICATE, split, Shard(1), REPLICATE], [split, Shard(1), REPLICATE])
    yield rule([PARTIAL, *[REPLICATE] * 3], [PARTIAL] * 3)


# mlp, gated_mlp


def _mlp(
    results: int, gated: bool, input: Any, w1: Any, w2: Any, b1: Any, b2: Any, residual: Any, **options: Any
) -> Iterator[Rule]:
    last = input.ndim - 1
    for dim in range(last):
        yield [Shard(dim)] * results, [Shard(dim), *[REPLICATE] * 4, _split_at(residual, dim, input.ndim)]
    if not gated:
        yield [PARTIAL, Shard(last)][:results], [REPLICATE, Shard(0), Shard(1), Shard(0), PARTIAL, PARTIAL]


def _mlp_hidden_backward(grad: Any, *more: Any, gated: bool, output_mask: int, **options: Any) -> Iterator[Rule]:
    last = grad.ndim - 1

    def rule(places: Sequence[Placement], grads: Sequence[Placement]) -> Rule:
        return _wanted(grads, output_mask), places

    for dim in range(last):
        split = Shard(dim)
        yield rule([split, REPLICATE, split, REPLICATE, REPLICATE], [split, *[PARTIAL] * 3])
    if not gated:
        hidden = Shard(last)
        yield rule([REPLICATE, Shard(1), hidden, Shard(0), REPLICATE], [hidden, Shard(1), Shard(0), REPLICATE])
    yield rule([PARTIAL, *[REPLICATE] * 4], [PARTIAL] * 4)


# attention: by batch; by heads if every rank gets whole groups of query heads with their key head


def _splits_heads(query: Any, key: Any) -> bool:
    heads, heads_kv, mesh = query.shape[-2], key.shape[-2], query.mesh
    if heads_kv == 0:
        return False
    if mesh.ndim > 1:
        return heads_kv % mesh.size() == 0
    return -(-heads // mesh.size()) == heads // heads_kv * -(-heads_kv // mesh.size())


def _refuse_dropout(dropout_p: float) -> None:
    if dropout_p > 0:
        raise NotImplementedError(
            f"{NAMESPACE}::flash_attention: expected dropout_p=0 for DTensors, got {dropout_p}: ranks would draw "
            "numbers that differ between replicas, or repeat between shards; call it on local tensors (to_local)"
        )


class _Split:
    """The placements of all tensors of attention, split along the batch or the heads."""

    def __init__(self, query: Any, key: Any, by_heads: bool) -> None:
        varlen = query.ndim == 3
        self.by_heads = by_heads
        self.query = Shard(query.ndim - 2) if by_heads else Shard(0)
        self.key = REPLICATE if by_heads and key.shape[-2] == 1 else self.query
        self.lse = Shard(0) if varlen or not by_heads else Shard(1)
        self.sinks = Shard(0) if by_heads else REPLICATE

    def alibi_slopes(self, slopes: Any) -> Placement:
        if slopes is None:
            return REPLICATE
        return Shard(slopes.ndim - 1) if self.by_heads else Shard(0) if slopes.ndim == 2 else REPLICATE

    def bias(self, bias: Any) -> Placement:
        return _split_at(bias, 1 if self.by_heads else 0, 4)

    def block_mask(self, keys: Any, queries: Any, tiles: Any) -> list[Placement]:
        return [self.bias(keys), self.bias(queries), REPLICATE]


def _attention_splits(query: Any, key: Any) -> Iterator[_Split]:
    if query.ndim == 4:
        yield _Split(query, key, by_heads=False)
    if _splits_heads(query, key) or key.shape[-2] == 1:
        yield _Split(query, key, by_heads=True)


def _attention(
    query: Any,
    key: Any,
    value: Any,
    slopes: Any,
    sinks: Any,
    bias: Any,
    mask: Any,
    *block_mask: Any,
    dropout_p: float = 0.0,
    **options: Any,
) -> Iterator[Rule]:
    _refuse_dropout(dropout_p)
    for split in _attention_splits(query, key):
        others = [split.alibi_slopes(slopes), split.sinks, split.bias(bias), split.bias(mask)]
        others += split.block_mask(*block_mask)
        yield [split.query, split.lse], [split.query, split.key, split.key, *others]


def _attention_varlen(
    query: Any, key: Any, value: Any, cu_q: Any, cu_k: Any, *others: Any, **options: Any
) -> Iterator[Rule]:
    for results, (q, k, v, *places) in _attention(query, key, value, *others, **options):
        yield results, [q, k, v, REPLICATE, REPLICATE, *places]


def _attention_forward(*args: Any, **options: Any) -> Iterator[Rule]:
    for results, places in _attention_varlen(*args, **options):
        yield [*results, REPLICATE], places


def _attention_backward(
    grad_out: Any,
    grad_lse: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    lse: Any,
    rng_state: Any,
    needs_grad_bias: bool,
    cu_q: Any,
    cu_k: Any,
    slopes: Any,
    sinks: Any,
    bias: Any,
    mask: Any,
    *block_mask: Any,
    dropout_p: float = 0.0,
    **options: Any,
) -> Iterator[Rule]:
    _refuse_dropout(dropout_p)
    for split in _attention_splits(query, key):
        q, k, at_bias = split.query, split.key, split.bias(bias)
        sums_key = PARTIAL if k == REPLICATE else k
        grad_sinks = REPLICATE if sinks is None else split.sinks if split.by_heads else PARTIAL
        grad_bias = REPLICATE if not needs_grad_bias else PARTIAL if at_bias == REPLICATE else at_bias
        places = [q, split.lse, q, k, k, q, split.lse, REPLICATE, None, REPLICATE, REPLICATE]
        yield (
            [q, sums_key, sums_key, grad_sinks, grad_bias],
            [
                *places,
                *(split.alibi_slopes(slopes), split.sinks, at_bias, split.bias(mask)),
                *split.block_mask(*block_mask),
            ],
        )


# losses: by rows. Those of a weight that is split by rows, cuda_ext/_vocab_parallel.py computes on local tensors


def _logits_by_rows(coefficients: Any) -> list[Placement]:
    """The placements of the first five arguments."""
    of_row = coefficients is not None and coefficients.ndim == 2
    return [Shard(0), REPLICATE, REPLICATE, Shard(0), Shard(0) if of_row else REPLICATE]


def _logit_statistics(
    input: Any, weight: Any, bias: Any, target: Any, coefficients: Any, *, entropy: bool, **options: Any
) -> Iterator[Rule]:
    present = (True, target is not None, coefficients is not None, entropy, True)  # absent values are empty tensors
    yield [Shard(0) if each else REPLICATE for each in present], _logits_by_rows(coefficients)


def _logit_statistics_backward(
    grad_lse: Any,
    grad_nll: Any,
    grad_dot: Any,
    grad_entropy: Any,
    input: Any,
    weight: Any,
    bias: Any,
    target: Any,
    coefficients: Any,
    *statistics: Any,
    output_mask: int,
    **options: Any,
) -> Iterator[Rule]:
    places = [*[Shard(0)] * 4, *_logits_by_rows(coefficients), *[Shard(0)] * 3]
    yield _wanted([Shard(0), PARTIAL, PARTIAL], output_mask), places


def _with_first_argument(op: Any) -> None:
    """DTensor finds the mesh in the first argument, grad_lse, which may be None: then it is zeros."""
    handler = _dispatcher._custom_op_handlers[op]

    def call(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        grad_lse, lse = args[0], args[9]
        return handler(op_call, (torch.zeros_like(lse) if grad_lse is None else grad_lse, *args[1:]), kwargs)

    _dispatcher._custom_op_handlers[op] = call


def _linear_loss(
    input: Any, weight: Any, bias: Any, target: Any, coefficients: Any, *by: Any, **options: Any
) -> Iterator[Rule]:
    yield [PARTIAL], [*_logits_by_rows(coefficients), *[Shard(0)] * 4]


def _linear_loss_forward(*args: Any, output_mask: int, **options: Any) -> Iterator[Rule]:
    for loss, places in _linear_loss(*args, **options):
        yield [*loss, *_wanted([Shard(0), PARTIAL, PARTIAL], output_mask)], places


def _flip(tensor: Any, dims: Sequence[int]) -> list[Rule]:
    """PyTorch's own op, of which relative biases are made; PyTorch has no rule for it that always works."""
    flipped = {dim % tensor.ndim for dim in dims}
    places = [REPLICATE, PARTIAL, *(Shard(dim) for dim in range(tensor.ndim) if dim not in flipped)]
    return [([place], [place, None]) for place in places]


if torch.ops.aten.flip.default not in _dispatcher.sharding_propagator.op_strategy_funcs:
    register_sharding(torch.ops.aten.flip.default)(_flip)
_register("gemm", partial(_gemm, 1))
_register("gemm_forward", partial(_gemm, 2))
_register("gemm_backward", _gemm_backward)
_register("activation_backward", _activation_backward)
_register("grouped_mm", partial(_grouped_mm, 1))
_register("grouped_mm_forward", partial(_grouped_mm, 2))
_register("combine_experts", _combine_experts)
_register("experts_gate_backward", _experts_gate_backward)
_register("gather_fp8", _gather_fp8)
_register("scaled_mm", _scaled_mm)
_register("scaled_grouped_mm", _scaled_grouped_mm)
_register("quantize_fp8", _quantize_fp8)
_register("quantize_fp8_both", _quantize_fp8_both)
_register("quantize_fp8", _quantize_fp8, "activation")
_register("quantize_fp8_both", _quantize_fp8_both, "activation")
_register("quantize_fp8", _refuse_stochastic, "stochastic")
_register("quantize_fp8_both", _refuse_stochastic, "stochastic")
_register("linear_backward", _linear_backward)
_register("mlp_hidden_backward", _mlp_hidden_backward)
for _prefix, _gated in (("", False), ("gated_", True)):
    _register(f"{_prefix}linear", partial(_linear, 1, _gated))
    _register(f"{_prefix}linear_forward", partial(_linear, 2, _gated))
    _register(f"{_prefix}mlp", partial(_mlp, 1, _gated))
    _register(f"{_prefix}mlp_forward", partial(_mlp, 2, _gated))
_register("flash_attention", _attention)
_register("flash_attention_varlen", _attention_varlen)
_register("flash_attention_forward", _attention_forward)
_register("flash_attention_backward", _attention_backward)
_register("logit_statistics", _logit_statistics)
_register("logit_statistics_backward", _logit_statistics_backward)
_with_first_argument(ops.logit_statistics_backward.default)
_register("linear_loss", _linear_loss)
_register("linear_loss_forward", _linear_loss_forward)
