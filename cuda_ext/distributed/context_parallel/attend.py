"""Attention of a rank's rows to the keys of all ranks, forward and backward.

Forward saves what a call of `flash_attention` saves: this rank's query, key, value, output and lse. Backward transfers
keys and values again, and calls the backward of `flash_attention` with the output and the lse of all keys, so the
gradients of its calls are parts of the gradients, and add up to them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cuda_ext._attention_options import op_arguments
from cuda_ext._load import ops
from cuda_ext._relative_bias import bias_arguments
from cuda_ext._toolchain import NAMESPACE
from cuda_ext.distributed.context_parallel.exchange import Exchange, NoExchange
from cuda_ext.distributed.context_parallel.layout import Range, size
from cuda_ext.distributed.context_parallel.masked import MaskedProblem, mask_of_heads
from cuda_ext.distributed.context_parallel.parts import Part, Problem, Transfers, from_one, gathered, window_of
from cuda_ext.kvcache import weights_of_parts

_forward_op = ops.flash_attention_forward.default
_backward_op = ops.flash_attention_backward.default


class Heads(NamedTuple):
    """Adjacent key heads, and the query heads that read them."""

    keys: slice
    queries: slice


class Step(NamedTuple):
    heads: Heads
    transfers: Transfers  # of the ranks that exchange keys with this one, and its own


class Dropout(NamedTuple):
    """Whose numbers are those of attention on one rank."""

    probability: float
    rng_state: Tensor
    heads: int  # of all ranks
    first_head: int
    longest_key: int


@dataclasses.dataclass
class Call:
    """A call, but for the tensors that have gradients. Tensors have four dims; packed ones have a batch of 1."""

    op: str  # for errors
    problem: Problem
    exchange: Exchange | NoExchange
    from_all: bool  # gathers the keys of all ranks, else gets those of one after the other
    gathered_bytes: int  # of keys and values that are gathered at once, at most, if more than one head
    scale: float | None = None
    softcap: float = 0.0
    deterministic: bool | None = None
    alibi_slopes: Tensor | None = None  # (batch or 1, H)
    mask: Tensor | None = None  # as the bias
    dropout: Dropout | None = None
    masked: MaskedProblem | None = None

    def steps(self, key: Tensor, value: Tensor, group: int, *, of_all_ranks: bool = False) -> list[Step]:
        """group: query heads a key head. of_all_ranks: each step with the transfers of all ranks, for predictions."""
        rank, ranks = self.exchange.rank, range(self.exchange.ranks)
        heads = key.shape[2]
        if not self.from_all:
            every = Heads(slice(0, heads), slice(0, heads * group))
            get = self.masked.from_one if self.masked else functools.partial(from_one, self.problem)
            steps = []
            for distance in ranks:
                readers = ranks if of_all_ranks else {rank, (rank + distance) % len(ranks)}
                steps.append(Step(every, {reader: get(reader, (reader - distance) % len(ranks)) for reader in readers}))
            return steps
        get_all = self.masked.gathered if self.masked else functools.partial(gathered, self.problem)
        of_ranks = {reader: get_all(reader) for reader in ranks}
        # The same on all ranks, so that these take the same steps.
        elements = max(size(transfer.keys) for transfer in of_ranks.values()) * key.shape[0]
        bytes_of_head = elements * (key.shape[3] + value.shape[3]) * key.element_size()
        if len(ranks) == 1:
            return [Step(Heads(slice(0, heads), slice(0, heads * group)), of_ranks)]
        count = max(1, min(-(-heads // 4), self.gathered_bytes // max(1, bytes_of_head)))
        return [
            Step(Heads(slice(first, last), slice(first * group, last * group)), of_ranks)
            for first in range(0, heads, count)
            for last in [min(first + count, heads)]
        ]

    def arguments(
        self, part: Part, heads: Heads, tensors: Tensors, bias: Tensor | None, is_relative: bool
    ) -> tuple[list[Tensor | None], dict[str, Any]]:
        """The arguments of both ops after those that differ between them. bias: from `bias_of`."""
        slopes = self.alibi_slopes if part.first.offset == 0 else None
        options: dict[str, Any] = {
            "window": window_of(self.problem.band, part.first.offset),
            "scale": self.scale,
            "softcap": self.softcap,
            "deterministic": self.deterministic,
            "alibi_slopes": None if slopes is None else for_op(self._of_documents(slopes[:, heads.queries], part)),
            "sinks": None if tensors.sinks is None or not self.from_all else tensors.sinks[heads.queries],
            "attn_bias": bias,
            "bias_is_relative": is_relative,
            "attn_mask": None if self.mask is None else self.slice_of(self.mask, part, heads),
            "block_mask": None if part.mask is None else mask_of_heads(part.mask, heads.queries),
            "dropout_p": self.dropout.probability if self.dropout else 0.0,
        }
        ends: list[Tensor | None] = [None, None]
        if len(part.segments) > 1:
            lengths = [
                tuple(last - first for first, last in of_segments)
                for of_segments in ([s.rows for s in part.segments], [s.keys for s in part.segments])
            ]
            ends = [_ends(of_segments, tensors.query.device) for of_segments in lengths]
            options["max_seqlen_q"], options["max_seqlen_k"] = map(max, lengths)
        op_tensors, scalars = op_arguments(self.op, options)
        if self.dropout:
            scalars["dropout_place"] = self._place(self.dropout, part, heads)
        return [*ends, *op_tensors], scalars

    def _place(self, dropout: Dropout, part: Part, heads: Heads) -> list[int]:
        segment = part.first
        first_key = segment.keys[0] - self.problem.documents[segment.document].keys[0]
        head = dropout.first_head + heads.queries.start
        return [dropout.heads, head, self.problem.queries.length, segment.rows[0], dropout.longest_key, first_key]

    def bias_of(self, part: Part, heads: Heads, tensors: Tensors) -> tuple[Tensor | None, bool]:
        """`attn_bias` of the ops, and whether it is by distance: of `bias`, `table` and, where the op would count
        distances from another diagonal, slopes."""
        offset = part.first.offset
        bias = None if tensors.bias is None else self.slice_of(tensors.bias, part, heads)
        most = max(1, *(last - first for s in part.segments for first, last in (s.rows, s.keys))) - 1
        table = None
        if tensors.table is not None:
            table = _shifted(self._of_documents(_heads_of(tensors.table, heads.queries), part), offset, most)
        if self.alibi_slopes is not None and offset != 0:
            slopes = self._of_documents(self.alibi_slopes[:, heads.queries], part)
            type_ = torch.float64 if tensors.query.dtype == torch.float64 else torch.float32
            distances = torch.arange(-most, most + 1, device=slopes.device) + offset
            penalty = -slopes.to(type_).unsqueeze(-1) * distances.abs()
            table = penalty if table is None else table + penalty
        if table is None:
            return bias, False
        rows, keys = tensors.query[:, slice(*part.rows)], tensors.query.new_empty(1, part.keys[1] - part.keys[0], 1, 0)
        arguments = bias_arguments(self.op, table, bias, rows[:, :, heads.queries], keys)
        return arguments["attn_bias"], arguments.get("bias_is_relative", False)

    def slice_of(self, bias: Tensor, part: Part, heads: Heads) -> Tensor:
        """Of (batch or 1, H or 1, rows or 1, keys or 1): this rank's rows if the problem has one document, else those
        of each document, counted in it. A view, unless the part is of several documents."""
        rows, keys = part.rows, part.first.keys
        if len(self.problem.documents) > 1:
            document = self.problem.documents[part.first.document]
            rows = _counted_from(document.queries[0], part.first.rows)
            keys = _counted_from(document.keys[0], keys)
        bias = _heads_of(self._of_documents(bias, part), heads.queries)
        for dim, (first, last) in ((2, rows), (3, keys)):
            if bias.shape[dim] != 1:
                bias = bias.narrow(dim, first, last - first)
        return bias

    def _of_documents(self, tensor: Tensor, part: Part) -> Tensor:
        """Of (documents or batch, ...), what the sequences of the part need; (1, ...) is for all of them."""
        if len(self.problem.documents) == 1 or tensor.shape[0] == 1:
            return tensor
        if len(part.segments) == 1:
            return tensor[part.first.document :][:1]
        return tensor[[segment.document for segment in part.segments]]


class Tensors(NamedTuple):
    """The tensors of a call that have gradients."""

    query: Tensor  # (B, rows, H, D)
    key: Tensor  # (B, keys, Hk, D)
    value: Tensor  # (B, keys, Hk, Dv)
    sinks: Tensor | None  # (H,)
    bias: Tensor | None  # (batch or 1, H or 1, rows or 1, keys or 1)
    table: Tensor | None  # (batch or 1, H or 1, 2 R + 1): relative_bias


class Attend(torch.autograd.Function):
    """(call, *tensors) -> out (B, rows, H, Dv), lse (B, H, rows)"""

    @staticmethod
    def forward(ctx: Any, call: Call, *given: Tensor | None) -> tuple[Tensor, Tensor]:
        tensors = Tensors(*given)  # type: ignore[arg-type]
        out, lse = _forward(call, tensors)
        ctx.call = call
        ctx.save_for_backward(*tensors, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        *given, out, lse = ctx.saved_tensors
        tensors = Tensors(*given)
        wanted = Tensors(*ctx.needs_input_grad[1:])
        with torch.no_grad():
            grads = _Gradients(ctx.call, tensors, wanted, (out, lse, grad_out, grad_lse)).of_all()
        if torch.is_grad_enabled():
            grads = [None if grad is None else _Once.apply(grad.requires_grad_(), ctx.call.op) for grad in grads]
        return None, *grads


class _Once(torch.autograd.Function):
    """A gradient that cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, op: str) -> Tensor:
        ctx.op = op
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        raise NotImplementedError(
            f"{NAMESPACE}::{ctx.op}: expected to be differentiated once, got a second derivative; compute what needs "
            "it by ulysses_attention, or on one rank"
        )


def _transferred(call: Call, tensors: Tensors, what: str) -> Iterator[tuple[Step, Tensor, Tensor]]:
    """Each step with its keys and values; the next step's are on their way meanwhile."""
    steps = call.steps(tensors.key, tensors.value, tensors.query.shape[2] // max(1, tensors.key.shape[2]))

    def start(step: Step) -> Callable[[], list[Tensor]]:
        heads = step.heads.keys
        rows_first = [tensor[:, :, heads].transpose(0, 1) for tensor in (tensors.key, tensors.value)]
        return call.exchange.start(step.transfers, rows_first, what)

    waits = [start(steps[0])] if steps else []
    for number, step in enumerate(steps):
        keys, values = (rows.transpose(0, 1) for rows in waits.pop()())
        if number + 1 < len(steps):
            waits.append(start(steps[number + 1]))
        yield step, keys, values


def _forward(call: Call, tensors: Tensors) -> tuple[Tensor, Tensor]:
    query, value = tensors.query, tensors.value
    batch, rows, heads, _ = query.shape
    type_ = accumulation_type(query.dtype)
    out = query.new_zeros(batch, rows, heads, value.shape[3], dtype=query.dtype if call.from_all else type_)
    lse = query.new_full((batch, heads, rows), -torch.inf, dtype=type_)
    for step, keys, values in _transferred(call, tensors, "keys and values"):
        for part in step.transfers[call.exchange.rank].parts:
            part_out, part_lse = _attend(call, tensors, part, step.heads, keys, values)
            there = slice(*part.rows)
            own_out, own_lse = out[:, there, step.heads.queries], lse[:, step.heads.queries, there]
            if call.from_all:
                own_out.copy_(part_out)
            else:
                weight, part_weight, part_lse = weights_of_parts(own_lse, part_lse)
                own_out.mul_(weight).addcmul_(part_out, part_weight)
            own_lse.copy_(part_lse)
            del part_out, part_lse
        del keys, values
    if not call.from_all:
        if tensors.sinks is not None:
            end = call.problem.rows_in_documents(call.exchange.rank)  # those after the last one have no sink
            out[:, :end], lse[:, :, :end] = _with_sinks(out[:, :end], lse[:, :, :end], tensors.sinks)
        out = out.to(query.dtype)
    return out, lse


def _attend(
    call: Call, tensors: Tensors, part: Part, heads: Heads, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    bias, is_relative = call.bias_of(part, heads, tensors)
    options, scalars = call.arguments(part, heads, tensors, bias, is_relative)
    if call.dropout:
        scalars["rng_state"] = call.dropout.rng_state
    if not call.from_all:
        scalars["out_dtype"] = accumulation_type(keys.dtype)
    query = _of_part(tensors.query[:, slice(*part.rows), heads.queries], part)
    out, lse, _ = _forward_op(
        query, *(_of_part(t[:, slice(*part.keys)], part) for t in (keys, values)), *options, **scalars
    )
    return (out.unsqueeze(0), lse.unsqueeze(0)) if len(part.segments) > 1 else (out, lse)


class _Gradients:
    """The gradients of a call, and what they are computed from."""

    def __init__(self, call: Call, tensors: Tensors, wanted: Tensors, results: tuple[Tensor, ...]) -> None:
        self.call, self.tensors, self.wanted = call, tensors, wanted
        self.out, self.lse, self.grad_out, self.grad_lse = results
        type_ = accumulation_type(tensors.query.dtype)
        # Gradients of keys and values travel on all ranks if they do on one. If the keys of all are there, a query is
        # in one call, and the sums of keys are those of one step.
        types = [tensors.query.dtype if call.from_all else type_] * 3 + [type_] * 3
        needed = [True, True, True, *wanted[3:]]
        self.sums = Tensors(
            *(
                None if tensor is None or not needs else tensor.new_zeros(tensor.shape, dtype=dtype)
                for tensor, needs, dtype in zip(tensors, needed, types)
            )  # type: ignore[arg-type]
        )
        if self.sums.sinks is not None and not call.from_all:
            self.sums.sinks.copy_(self._of_sinks())

    def of_all(self) -> list[Tensor | None]:
        finish = _nothing
        for step, keys, values in _transferred(self.call, self.tensors, "keys and values for backward"):
            of_keys: list[Tensor] = []
            # The part with the most keys first: if it has all of them, no other sums are needed than its gradients.
            # Beside it, those of the step before come, so that the other parts find their memory free.
            parts = step.transfers[self.call.exchange.rank].parts
            for part in sorted(parts, key=lambda part: part.keys[0] - part.keys[1]):
                self._add(part, step.heads, keys, values, of_keys)
                finish()
                finish = _nothing
            of_keys = of_keys or _zeros(keys, values)
            del keys, values
            finish()
            finish = self._give_back(step, of_keys)
            del of_keys
        finish()
        return [
            None if tensor is None or total is None or not wants else total.to(tensor.dtype)
            for tensor, total, wants in zip(self.tensors, self.sums, self.wanted)
        ]

    def _give_back(self, step: Step, of_keys: list[Tensor]) -> Callable[[], None]:
        """Sends gradients to the ranks of their keys; the result waits, and adds those of this rank's."""
        of_own = [total[:, :, step.heads.keys].transpose(0, 1) for total in (self.sums.key, self.sums.value)]
        totals = of_own
        if of_own[0].dtype != of_keys[0].dtype:  # the only step of these heads: rounded after it
            totals = [torch.zeros(own.shape, dtype=of_keys[0].dtype, device=own.device) for own in of_own]
        rows_first = [grad.transpose(0, 1) for grad in of_keys]
        what = "the gradients of keys and values"
        finish = self.call.exchange.give_back(step.transfers, rows_first, totals, self.tensors.key.dtype, what)

        def store() -> None:
            finish()
            if totals is not of_own:
                for own, total in zip(of_own, totals):
                    own.copy_(total)

        return store

    def _add(self, part: Part, heads: Heads, keys: Tensor, values: Tensor, of_keys: list[Tensor]) -> None:
        """of_keys: the sums of the gradients of keys and values, none before the first part."""
        call, sums = self.call, self.sums
        leaves = self.tensors
        if self.tensors.table is not None:
            leaves = leaves._replace(bias=_leaf(leaves.bias), table=_leaf(leaves.table))
        with torch.enable_grad():
            bias, is_relative = call.bias_of(part, heads, leaves)
        options, scalars = call.arguments(part, heads, self.tensors, bias, is_relative)
        wants_bias = bias is not None and not (sums.bias is None and sums.table is None)

        def rows_of(tensor: Tensor) -> Tensor:
            return _of_part(tensor[:, slice(*part.rows), heads.queries], part)

        def lse_of(tensor: Tensor) -> Tensor:
            return _of_part(tensor[:, heads.queries, slice(*part.rows)], part)

        of_query, of_key, of_value, of_sinks, of_bias = _backward_op(
            rows_of(self.grad_out),
            None if self.grad_lse is None else lse_of(self.grad_lse),
            rows_of(self.tensors.query),
            *(_of_part(tensor[:, slice(*part.keys)], part) for tensor in (keys, values)),
            rows_of(self.out),
            lse_of(self.lse),
            call.dropout.rng_state if call.dropout else None,
            wants_bias,
            *options,
            **scalars,
            grad_dtype=accumulation_type(keys.dtype),
        )
        rows_of(sums.query).add_(of_query)
        if not of_keys and part.keys == (0, keys.shape[1]):
            of_keys += [grad.view(tensor.shape) for grad, tensor in ((of_key, keys), (of_value, values))]
        else:
            if not of_keys:
                of_keys += _zeros(keys, values)
            for total, grad in zip(of_keys, (of_key, of_value)):
                _of_part(total[:, slice(*part.keys)], part).add_(grad)
        if sums.sinks is not None and call.from_all:
            sums.sinks[heads.queries].add_(of_sinks)
        if bias is None or not wants_bias:
            return
        if self.tensors.table is None and sums.bias is not None:
            call.slice_of(sums.bias, part, heads).add_(of_bias)
            return
        wanted = [(leaf, sum) for leaf, sum in zip(leaves[4:], sums[4:]) if leaf is not None and sum is not None]
        grads = torch.autograd.grad(bias, [leaf for leaf, _ in wanted], of_bias.to(bias.dtype), allow_unused=True)
        for (_, total), grad in zip(wanted, grads):
            if grad is not None:
                total.add_(grad)

    def _of_sinks(self) -> Tensor:
        """(H,): a sink has the probability exp(sink - lse) in each row, and no value."""
        rows_first = self.lse.transpose(1, 2)
        slope = -(self.grad_out.to(self.lse.dtype) * self.out).sum(-1)
        if self.grad_lse is not None:
            slope += self.grad_lse.transpose(1, 2)
        assert self.tensors.sinks is not None
        share = (self.tensors.sinks - rows_first).exp()
        return torch.where(rows_first == -torch.inf, 0.0, share * slope).sum((0, 1))


def _nothing() -> None:
    pass


def for_op(slopes: Tensor) -> Tensor:
    """Slopes (1, H) of all batches as the ops take them."""
    return slopes[0] if slopes.shape[0] == 1 else slopes


def _zeros(*tensors: Tensor) -> list[Tensor]:
    return [torch.zeros(t.shape, dtype=accumulation_type(t.dtype), device=t.device) for t in tensors]


def accumulation_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """out (B, S, H, Dv) and lse (B, H, S) of all keys, with one more logit a head, which has no value."""
    with_sink = torch.logaddexp(lse, sinks.to(lse.dtype).view(-1, 1))
    share = torch.where(lse == -torch.inf, 0.0, (lse - with_sink).exp())
    return out * share.transpose(1, 2).unsqueeze(-1), with_sink


def _leaf(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().requires_grad_()


def _of_part(tensor: Tensor, part: Part) -> Tensor:
    """Without the batch of 1 if the part is of packed sequences."""
    return tensor[0] if len(part.segments) > 1 else tensor


def _heads_of(tensor: Tensor, heads: slice) -> Tensor:
    """Of (.., H or 1, ..), heads in dim 1."""
    return tensor if tensor.shape[1] == 1 else tensor[:, heads]


def _shifted(table: Tensor, offset: int, most: int) -> Tensor:
    """A relative bias for distances from -most to most, in which they count from another diagonal."""
    if offset == 0:
        return table
    reach = table.shape[-1] // 2
    distances = torch.arange(-most, most + 1, device=table.device) + offset
    return table[..., distances.clamp(-reach, reach) + reach]


def _counted_from(begin: int, rows: Range) -> Range:
    return rows[0] - begin, rows[1] - begin


@functools.lru_cache(maxsize=256)
def _ends(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """cu_seqlens of packed sequences."""
    with torch.inference_mode(False):
        return torch.tensor((0, *lengths)).cumsum(0).to(device, torch.int32)
