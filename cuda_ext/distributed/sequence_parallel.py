"""Tensor parallel layers between which the sequence is divided over ranks (Korthikanti et al. 2022, arXiv 2205.05198).

Outside the layers each rank has a part of the sequence: norms, dropout and residuals are computed once, not on every
rank. Where `all_reduce_gradient` and `all_reduce` (`cuda_ext.distributed.tensor_parallel`) move all rows twice, these
move them once: an all-reduce is a reduce-scatter and an all-gather.

    forward                                     backward
    `all_gather_linear`      gather, product    product, sum and scatter   column-parallel
    `linear_reduce_scatter`  product, sum and scatter    gather, product   row-parallel
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cuda_ext._checks import autocasts, dtype_name, expected, is_floating, shape_of
from cuda_ext._collectives import AllReduceGradient
from cuda_ext._gemm import gemm, linear
from cuda_ext._group_calls import begin_call
from cuda_ext._load import ops
from cuda_ext._slot_write import writes_to_slot
from cuda_ext._toolchain import NAMESPACE
from cuda_ext.distributed.prediction.layers import OPS, plan_sequence_parallel
from cuda_ext.distributed.process_groups import is_on_gloo, resolve_group
from cuda_ext.distributed.row_exchange import (
    GatherRows,
    Parts,
    ScatterSums,
    add_parts,
    finish_gather,
    finish_scatter,
    gather_beside,
    scatter_beside,
    start_gather,
    start_scatter,
)

__all__ = ["all_gather_linear", "linear_reduce_scatter"]

_GATHER, _SCATTER = OPS
_INPUT, _OUTPUT = "the parts of the input", "the terms of the output"
_WEIGHT = 1  # among the tensors that the autograd functions are given


def all_gather_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    chunks: int | None = None,
    keep_gathered: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """``activation(x @ weight.T + bias)``, where x are the `input` of all ranks, one after the other along `dim`.

    A column-parallel layer: each rank has some of the columns of the output, with their weights and biases. Backward
    gives ``sum over ranks of (grad @ weight)``, of which each rank gets its part of the sequence, for `input`, and
    ``grad.T @ x`` for `weight`, with x gathered again. Over it the product for `input` is computed, and the product for
    `weight` over the scatter. Derivatives of higher order are composed of the same functions; no forward mode.

    All ranks of the group call it together, with arguments that are equal but for sizes along `dim` and the columns.
    Ranks compare each combination of shapes, dtypes, options and needed gradients once, through the store of the group:
    a difference raises on all of them. A rank that is late or dead is named in the errors and logs of the others.

    Args:
        input: ``(s, ..., K)``, this rank's part of the sequence; float32, float16, bfloat16 or float64. May be empty.
        weight: ``(N, K)``, dtype of `input`; N may differ between ranks.
        bias: ``(N,)``.
        activation: as in `cuda_ext.linear`; default none.
        dim: of the sequence, not the last. 0, the default, needs no copies: the exchange is of whole rows, and the
            result is stored in this order whatever `dim` is.
        sizes: of the parts of all ranks along `dim`; default: all as that of this rank.
        chunks: the number of products: one for each part of the sequence, or a multiple, each of which starts when its
            rows have arrived, while others are on their way. 1: gather all rows, then one product. Default: on a GPU as
            `plan_sequence_parallel` says of an H100; on a CPU, whose cores would do both, and in a compiled graph 1.
        keep_gathered: whether backward keeps x instead of gathering it again, which takes ``S ... K`` elements.
        group: gloo or NCCL; default the default group.

    Returns:
        ``(S, ..., N)`` with the sum S of `sizes` along `dim`; dtype of `input`; under autocast that of autocast. The
        same bits for all `chunks` if rows do not depend on others (`cuda_ext.batch_invariant`).

    `torch.compile` compiles it with ``fullgraph=True``, to functional collectives, whose ranks are neither compared nor
    named. Where BucketedDataParallel has a slot for the gradient of `weight`, the product is stored there.

    Raises:
        RuntimeError: without a process group; wrong or different shapes, dtypes or options; a rank that is missing.
    """
    group = resolve_group(f"{NAMESPACE}::{_GATHER}", group)
    tensors = _check(_GATHER, input, weight, bias, dim)
    rows = input.shape[dim]
    sizes = (rows,) * group.size() if sizes is None else tuple(sizes)
    if len(sizes) != group.size() or sizes[group.rank()] != rows or min(sizes) < 0:
        wanted = f"sizes of {group.size()} parts with {rows}, that of input along dim {dim}, for rank {group.rank()}"
        raise expected(_GATHER, f"{wanted}, got {sizes}")
    layer = _Layer(_GATHER, activation, bool(keep_gathered))
    return _call(layer, group, sizes, chunks, dim, *tensors)


def linear_reduce_scatter(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    chunks: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """``sum over ranks of (input @ weight.T) + bias``, of which each rank gets its part of the sequence.

    A row-parallel layer: each rank has some of the features of the input and the columns of the weight that they are
    multiplied by; all have the same bias. Backward gathers the gradient; with all of it, G, each rank has
    ``G @ weight`` for `input`, ``G.T @ input`` for `weight`, and for `bias` the sum of all rows, the same on all ranks.

    Terms are sent in the dtype of the product, added in float32 (float64 for float64), with the bias, and rounded once.

    Args:
        input: ``(S, ..., K)`` with this rank's features, which may be fewer than those of others.
        weight: ``(N, K)``, dtype of `input`.
        bias: ``(N,)``, the same on all ranks.
        dim: of the sequence, not the last; default 0.
        sizes: of the parts of the ranks along `dim`, whose sum is S; default: as equal as possible, the first ones
            larger (`torch.tensor_split`).
        chunks: as in `all_gather_linear`: the rows of other ranks are sent as soon as their product is made.
        group: gloo or NCCL; default the default group.

    Returns:
        ``(s, ..., N)``. For the rest see `all_gather_linear`.

    Raises:
        RuntimeError: without a process group; wrong or different shapes, dtypes or options; a rank that is missing.
    """
    group = resolve_group(f"{NAMESPACE}::{_SCATTER}", group)
    tensors = _check(_SCATTER, input, weight, bias, dim)
    rows, ranks = input.shape[dim], group.size()
    if sizes is None:
        sizes = [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]
    sizes = tuple(sizes)
    if len(sizes) != ranks or sum(sizes) != rows or min(sizes) < 0:
        raise expected(_SCATTER, f"sizes of {ranks} parts of {rows}, the size of input along dim {dim}, got {sizes}")
    return _call(_Layer(_SCATTER, None, False), group, sizes, chunks, dim, *tensors)


class _Layer(NamedTuple):
    op: str
    activation: str | None
    keeps: bool
    chunks: int = 0  # of the part of each rank; 0: one product


def _call(
    layer: _Layer,
    group: dist.ProcessGroup,
    sizes: tuple[int, ...],
    chunks: int | None,
    dim: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    ranks, rows, call = group.size(), input.movedim(dim, 0), None
    if chunks is not None and (not isinstance(chunks, int) or chunks < 1 or (chunks > 1 and chunks % ranks)):
        raise expected(layer.op, f"chunks None, 1 or a multiple of the {ranks} ranks, got {chunks!r}")
    if not torch.compiler.is_compiling():
        same = _in_words(layer, sizes, chunks, rows, weight, bias) if ranks > 1 else ""
        features = weight.shape[layer.op == _SCATTER]  # others may have more or fewer
        call = begin_call(layer.op, group, input.device, same=same, own=str(features))
        sends_in_place = rows.is_cpu or not is_on_gloo(group, rows.device)
        if chunks not in (None, 1) and not sends_in_place:
            raise expected(
                layer.op, f"chunks None or 1 on {rows.device} over gloo, whose messages are of a CPU's memory"
            )
        if chunks is None and rows.is_cuda and sends_in_place:
            widest = max(map(int, call.told))
            product = (rows.shape[-1], widest) if layer.op == _GATHER else (widest, weight.shape[0])
            count = sum(sizes) * rows.shape[1:-1].numel()
            chunks = plan_sequence_parallel(count, *product, rows.dtype, ranks, op=layer.op).chunks
        layer = layer._replace(chunks=0 if chunks in (None, 1) else chunks // ranks)
    parts = Parts(sizes, group.rank(), group, call)
    saves = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (input, weight, bias))
    with torch.autocast(input.device.type, enabled=False):
        if layer.op == _GATHER:
            of_gather = parts, layer, rows, weight, bias
            out = _AllGatherLinear.apply(*of_gather) if saves else _gather(*of_gather)[0]
        else:
            out = (_LinearReduceScatter.apply if saves else _scatter)(parts, layer, rows, weight, bias)
    return out.movedim(0, dim)


def _in_words(
    layer: _Layer, sizes: tuple[int, ...], chunks: int | None, rows: Tensor, weight: Tensor, bias: Tensor | None
) -> str:
    """What must be equal on all ranks."""
    of, features = ("input", rows.shape[-1]) if layer.op == _GATHER else ("output", weight.shape[0])
    inputs = {"input": rows, "weight": weight, "bias": bias}
    needed = [name for name, t in inputs.items() if torch.is_grad_enabled() and t is not None and t.requires_grad]
    words = [
        f"{of} of {', '.join(map(str, sizes))} rows of {(*rows.shape[1:-1], features)} {dtype_name(rows.dtype)}",
        f"{chunks or 'predicted'} chunks",
        f"gradients of {', '.join(needed) or 'nothing'}",
    ]
    return "; ".join(words + ["bias"] * (layer.op == _SCATTER and bias is not None) + ["kept"] * layer.keeps)


def _check(
    op: str, input: Tensor, weight: Tensor, bias: Tensor | None, dim: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The tensors, in the dtype of autocast. Raises before a collective, in which other ranks would wait."""
    if autocasts(input.device):
        dtype = torch.get_autocast_dtype(input.device.type)
        cast: Any = [t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in (input, weight, bias)]
        input, weight, bias = cast
    if not is_floating(input.dtype):
        kinds = "float32, float16, bfloat16 or float64"
        raise expected(op, f"input of dtype {kinds}, got {dtype_name(input.dtype)}; convert it with .to()")
    if input.dim() < 2 or not -input.dim() <= dim < input.dim() or dim % input.dim() == input.dim() - 1:
        raise expected(op, f"dim to be one of input's but the last, got {dim} for input {shape_of(input)}")
    features = input.shape[-1]
    if weight.dim() != 2 or weight.shape[1] != features:
        raise expected(op, f"weight of shape (N, {features}) for input {shape_of(input)}, got {shape_of(weight)}")
    if bias is not None and shape_of(bias) != (weight.shape[0],):
        raise expected(op, f"bias of shape ({weight.shape[0]},) for weight {shape_of(weight)}, got {shape_of(bias)}")
    for name, tensor in {"weight": weight, "bias": bias}.items():
        if tensor is not None and (tensor.dtype, tensor.device) != (input.dtype, input.device):
            wanted = f"{name} of dtype {dtype_name(input.dtype)} on {input.device}, as input"
            raise expected(op, f"{wanted}, got {dtype_name(tensor.dtype)} on {tensor.device}; convert it with .to()")
    return input, weight, bias


# all_gather_linear


def _gather(
    parts: Parts, layer: _Layer, input: Tensor, weight: Tensor, bias: Tensor | None, *, saves: bool = False
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The output; what the gradient of the activation is found from, if it `saves`; and the input of all ranks."""
    saves = saves and layer.activation is not None

    def multiply(rows: Tensor) -> tuple[Tensor, Tensor | None]:
        if not saves:
            return linear(rows, weight, bias, activation=layer.activation), None
        out, preact = ops.linear_forward.default(rows, weight, bias, None, activation=layer.activation)
        return out, preact if preact.dim() == out.dim() else out  # the output serves

    if not layer.chunks:
        gathered = finish_gather(start_gather(input, parts, _INPUT), parts, _INPUT)
        return *multiply(gathered), gathered
    out = input.new_empty(sum(parts.sizes), *input.shape[1:-1], weight.shape[0])
    preact = out if saves else None

    def use(rows: Tensor, place: slice) -> None:
        nonlocal preact
        product, before = multiply(rows)
        out[place] = product
        if before is not None and before is not product:
            preact = torch.empty_like(out) if preact is None or preact is out else preact
            preact[place] = before

    gathered = gather_beside(input, parts, layer.chunks, use, _INPUT)
    return out, preact, gathered


class _AllGatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Parts, layer: _Layer, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out, preact, gathered = _gather(parts, layer, input, weight, bias, saves=True)
        ctx.parts, ctx.layer = parts, layer
        ctx.save_for_backward(input, weight, bias, preact, gathered if layer.keeps else None)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, preact, gathered = ctx.saved_tensors
        parts, layer, needed = ctx.parts, ctx.layer, ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():  # gradients of gradients
            out = linear(GatherRows.apply(input, parts, _INPUT), weight, bias, activation=layer.activation)
            return None, None, *_differentiate(out, (input, weight, bias), needed, grad)
        for_input, for_weight, for_bias = needed
        if for_weight and gathered is None:
            started = start_gather(input, parts, _INPUT)  # again, during the next two products
        of_input = of_weight = of_bias = None
        if layer.activation is not None:
            options = {"activation": layer.activation, "gated": False, "bias_dtype": weight.dtype if for_bias else None}
            grad, of_bias = ops.activation_backward.default(grad, preact, **options)
        elif for_bias:
            of_bias = _bias_gradient(grad)
        what = f"the gradients of {_INPUT}"
        terms = gemm(grad, weight) if for_input else None
        if for_weight and gathered is None:
            gathered = finish_gather(started, parts, _INPUT)
        if terms is not None:
            started = start_scatter(terms, parts, what)  # during the last product
        if for_weight:
            of_weight = _weight_gradient(grad, gathered, weight)
        if terms is not None:
            of_input = add_parts(finish_scatter(started, parts, what))
        return None, None, of_input, of_weight, of_bias if for_bias else None


# linear_reduce_scatter


def _scatter(parts: Parts, layer: _Layer, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if layer.chunks:
        width = weight.shape[0]
        terms = scatter_beside(lambda rows: linear(input[rows], weight), input, width, parts, layer.chunks, _OUTPUT)
    else:
        terms = finish_scatter(start_scatter(linear(input, weight), parts, _OUTPUT), parts, _OUTPUT)
    return add_parts(terms, bias)


class _LinearReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Parts, layer: _Layer, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.parts, ctx.layer = parts, layer
        ctx.save_for_backward(input, weight, bias)
        return _scatter(parts, layer, input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias = ctx.saved_tensors
        parts, layer, needed = ctx.parts, ctx.layer, ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():  # gradients of gradients
            out = ScatterSums.apply(linear(input, weight), parts, _OUTPUT)
            if bias is not None:
                out = out + AllReduceGradient.apply(bias, parts.group.group_name)
            return None, None, *_differentiate(out, (input, weight, bias), needed, grad)
        for_input, for_weight, for_bias = needed
        what = "the gradients of the parts of the output"
        of_input: Tensor | None = None
        if layer.chunks and for_input:
            of_input = products = torch.empty_like(input, memory_format=torch.contiguous_format)

            def use(rows: Tensor, place: slice) -> None:
                products[place] = gemm(rows, weight)

            grad = gather_beside(grad, parts, layer.chunks, use, what)
        else:
            grad = finish_gather(start_gather(grad, parts, what), parts, what)
            of_input = gemm(grad, weight) if for_input else None
        of_weight = _weight_gradient(grad, input, weight) if for_weight else None
        return None, None, of_input, of_weight, _bias_gradient(grad) if for_bias else None


def _weight_gradient(grad: Tensor, input: Tensor, weight: Tensor) -> Tensor | None:
    """(N, K); None if it went to the slot of the weight."""
    wanted = {"output_mask": [False, True, False]}
    if writes_to_slot(_WEIGHT, grad, ops.linear_backward.slot, grad, input, weight, None, **wanted):
        return None
    return ops.linear_backward.default(grad, input, weight, None, **wanted)[1]


def _bias_gradient(grad: Tensor) -> Tensor:
    return grad.flatten(0, -2).sum(0)


def _differentiate(
    out: Tensor, inputs: Sequence[Tensor | None], needed: Sequence[bool], grad: Tensor
) -> list[Tensor | None]:
    wanted = [t for t, is_needed in zip(inputs, needed, strict=True) if is_needed and t is not None]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
    return [next(found) if is_needed else None for is_needed in needed]
