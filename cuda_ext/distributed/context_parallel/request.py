"""A call of this package's functions of attention: checked, compared between ranks, and computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from cuda_ext._attention_options import op_arguments
from cuda_ext._checks import expected, shape_of
from cuda_ext._group_calls import begin_call
from cuda_ext._load import ops
from cuda_ext.attention import flash_attention, flash_attention_varlen
from cuda_ext.block_mask import BlockMask
from cuda_ext.distributed.context_parallel.attend import Attend, Call, Dropout, Tensors, for_op
from cuda_ext.distributed.context_parallel.exchange import Exchange, NoExchange, group_of_exchanges
from cuda_ext.distributed.context_parallel.heads import HeadSplit, to_heads, to_rows
from cuda_ext.distributed.context_parallel.layout import Layout, layout_of, located, union
from cuda_ext.distributed.context_parallel.masked import MaskedProblem, check_blocks, digest, mask_of_heads
from cuda_ext.distributed.context_parallel.parts import DROPOUT_GROUP, Band, Document, Problem

METHODS = ("all_gather", "p2p")
GATHERED_BYTES = 1 << 28  # of keys and values of all ranks; at least those of one head

Ends = tuple[Tensor, Tensor]  # cu_seqlens of queries and of keys


class Groups(NamedTuple):
    """Rank `r * heads.size() + u` of the call is rank r of `ring` and u of `heads`."""

    ring: dist.ProcessGroup | None
    heads: dist.ProcessGroup | None

    @property
    def sizes(self) -> tuple[int, int]:
        ring, heads = (1 if group is None else group.size() for group in self)
        return ring, heads

    @property
    def place(self) -> tuple[int, int]:
        ring, heads = (0 if group is None else group.rank() for group in self)
        return ring, heads


def check_method(op: str, method: str) -> None:
    if method not in METHODS:
        raise ValueError(f"{op}: expected method {' or '.join(map(repr, METHODS))}, got {method!r}")


class Request(NamedTuple):
    op: str
    query: Tensor
    key: Tensor
    value: Tensor
    layout: str | Layout
    key_layout: str | Layout | None
    method: str

    @torch.compiler.disable
    def run(self, groups: Groups, ends: Ends | None, options: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Output and lse, over more than one rank."""
        tensors, dims = self[1:4], 4 if ends is None else 3
        if any(tensor.dim() != dims for tensor in tensors):  # the error of one rank
            if ends is None:
                return flash_attention(*tensors, return_lse=True, **options)
            return flash_attention_varlen(*tensors, *ends, return_lse=True, **options)
        return _Run(self._with_four_dims(), groups, ends, options).results()

    def _with_four_dims(self) -> Request:
        """Under autocast in its dtype, packed rows with a batch of 1."""
        tensors = [self.query, self.key, self.value]
        device = self.query.device.type
        if torch.is_autocast_enabled(device):
            lower = torch.get_autocast_dtype(device)
            tensors = [t.to(lower) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors]
        query, key, value = (tensor if tensor.dim() == 4 else tensor.unsqueeze(0) for tensor in tensors)
        return self._replace(query=query, key=key, value=value)


class _Options(NamedTuple):
    """The options of a call; tensors have four dims, or as many as is said."""

    band: Band
    scale: float | None
    softcap: float
    deterministic: bool | None
    dropout_p: float
    longest_key: int | None
    alibi_slopes: Tensor | None  # (batch or 1, H)
    sinks: Tensor | None  # (H,)
    bias: Tensor | None  # (batch or 1, H or 1, rows or 1, keys or 1)
    mask: Tensor | None  # the same
    table: Tensor | None  # (batch or 1, H or 1, 2 R + 1)
    block_mask: BlockMask | None

    @classmethod
    def of(cls, op: str, options: Mapping[str, Any]) -> _Options:
        given = dict(options)
        block_mask = given.get("block_mask")
        causal, table = given.pop("causal", False), given.pop("relative_bias", None)
        given.pop("max_seqlen_q", None)
        longest_key = given.pop("max_seqlen_k", None)
        tensors, scalars = op_arguments(op, given)
        slopes, sinks, bias, mask = tensors[:4]
        band = Band(scalars.pop("window_left"), 0 if causal else scalars["window_right"])
        del scalars["window_right"]
        known = {"scale": None, "softcap": 0.0, "deterministic": None, "dropout_p": 0.0, **scalars}
        if unknown := known.keys() - cls._fields:
            raise TypeError(f"{op}() got unexpected keyword arguments: {', '.join(sorted(unknown))}")
        return cls(
            band,
            **known,
            longest_key=longest_key,
            alibi_slopes=_with_dims(slopes, 2),
            sinks=sinks,
            bias=_with_dims(bias, 4),
            mask=_with_dims(mask, 4),
            table=_with_dims(table, 3),
            block_mask=block_mask,
        )

    @property
    def depends_on_positions(self) -> bool:
        """Apart from which keys are visible."""
        without_tensors = self.alibi_slopes is self.bias is self.mask is self.table is None
        return not without_tensors or self.dropout_p > 0

    def of_heads(self, heads: slice) -> _Options:
        def part(tensor: Tensor | None) -> Tensor | None:
            return tensor if tensor is None or tensor.shape[1] == 1 else tensor[:, heads]

        return self._replace(
            alibi_slopes=part(self.alibi_slopes),
            sinks=None if self.sinks is None else self.sinks[heads],
            table=part(self.table),
            block_mask=None if self.block_mask is None else mask_of_heads(self.block_mask, heads),
        )

    def text(self) -> str:
        """What must be equal on all ranks."""
        shapes = [
            f"{name} {(*value.shape[:2], value.shape[3]) if name in ('bias', 'mask') else tuple(value.shape)}"
            if isinstance(value, Tensor)
            else f"{name} {value}"
            for name, value in self._asdict().items()
            if value is not None and name != "block_mask"
        ]
        if self.block_mask is not None:
            shapes.append(f"block_mask {self.block_mask.shape} {digest(self.block_mask)}")
        return ", ".join(shapes)


class _Run:
    """A call over more than one rank."""

    def __init__(self, request: Request, groups: Groups, ends: Ends | None, options: Mapping[str, Any]) -> None:
        self.request, self.groups, self.ends, self.packed = request, groups, ends, ends is not None
        self.op, self.device = request.op, request.query.device
        key_layout = request.layout if request.key_layout is None else request.key_layout
        self.whole = [
            self._layout(name, layout, tensor)
            for name, layout, tensor in (
                ("layout", request.layout, request.query),
                ("key_layout", key_layout, request.key),
            )
        ]
        self.outer = [_over_ring(layout, groups.sizes[1]) for layout in self.whole]
        lengths = [layout.length for layout in self.whole]
        self.documents = (Document((0, lengths[0]), (0, lengths[1])),) if ends is None else _documents(*ends)
        self.options = _Options.of(self.op, options)
        check_method(self.op, request.method)
        self.exchanges = self._begin()
        self._check()

    def _layout(self, name: str, layout: str | Layout, tensor: Tensor) -> Layout:
        ring, heads = self.groups.sizes
        length = layout.length if isinstance(layout, Layout) else tensor.shape[1] * ring * heads
        return layout_of(self.op, layout, ring * heads, length, heads, name=name)

    def _begin(self) -> list[Exchange | NoExchange]:
        """The exchanges of keys and of heads, after the ranks have compared their arguments."""
        query, key, value, layout, key_layout, method = self.request[1:]
        shapes = [(tensor.shape[0], *tensor.shape[2:]) for tensor in (query, key, value)]
        rows = [_rows_text(*pair, self._rank) for pair in zip(self.whole, (query, key))]
        layouts = [f"{name} of {whole.length} rows" for name, whole in zip((layout, key_layout), self.whole)]
        if not self.packed:
            biases = [bias for bias in (self.options.bias, self.options.mask) if bias is not None]
            rows += [_rows_text(self.whole[0], bias.transpose(1, 2), self._rank, or_one=True) for bias in biases]
        same = f"{shapes}, {query.dtype}, {layouts}, {rows}, {method}, {self.options.text()}"
        if self.packed:
            same += f", {len(self.documents)} sequences {hash(self.documents):x}"
        found: list[Exchange | NoExchange] = []
        for group, layout in zip(self.groups, (self.outer[1], self.outer[1])):
            if group is None or group.size() == 1:
                found.append(NoExchange())
                continue
            call = begin_call(self.op, group, self.device, same=same)
            found.append(Exchange(call, group_of_exchanges(group, self.device), layout))
        return found

    @property
    def _rank(self) -> int:
        ring, heads = self.groups.place
        return ring * self.groups.sizes[1] + heads

    def _check(self) -> None:
        """Each error is one of all ranks, as they have compared what it depends on."""
        query, key, value = self.request[1:4]
        for name, layout, tensor in (("query", self.whole[0], query), ("key", self.whole[1], key)):
            if tensor.shape[1] != layout.rows(self._rank):
                raise expected(
                    self.op,
                    f"{name} with the {layout.rows(self._rank)} rows that its layout gives rank {self._rank}, got "
                    f"{tensor.shape[1]}; layouts by name are for equal shards, so pass the Layout that divided them",
                )
        if value.shape[:3] != key.shape[:3]:
            raise expected(self.op, f"value of the rows and heads of key {shape_of(key)}, got {shape_of(value)}")
        heads, key_heads = query.shape[2], key.shape[2]
        if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3] or key_heads == 0 or heads % key_heads:
            what = "the batch and head dim of query, and heads that divide its heads"
            raise expected(self.op, f"key with {what} {shape_of(query)}, got {shape_of(key)}")
        ranks = self.groups.sizes[1]
        if heads < ranks:
            raise ValueError(
                f"{self.op}: expected at least as many heads as the {ranks} ranks that exchange them, got {heads}; use "
                "ring_attention, with a smaller ulysses_group or none"
            )
        last = [max((document[side][1] for document in self.documents), default=0) for side in (0, 1)]
        if any(end > layout.length for end, layout in zip(last, self.whole)):
            lengths = [layout.length for layout in self.whole]
            raise expected(self.op, f"cu_seqlens that end at most at the numbers of rows {lengths}, got {last}")
        sizes = (query.shape[1], self.whole[1].length)
        if self.packed:
            sizes = self._longest()
        for name, bias in (("attn_bias", self.options.bias), ("attn_mask", self.options.mask)):
            if bias is None:
                continue
            for dim, most in zip((2, 3), sizes):
                if bias.shape[dim] != 1 and (bias.shape[dim] < most if self.packed else bias.shape[dim] != most):
                    rows = "rows and keys of the longest sequences" if self.packed else "this rank's rows and all keys"
                    raise expected(self.op, f"{name} of (batch, heads, *{sizes}), {rows}, got {shape_of(bias)}")
        if self.options.block_mask is not None:
            self._check_block_mask(self.options.block_mask)

    def _check_block_mask(self, mask: BlockMask) -> None:
        if self.packed:
            raise expected(
                self.op,
                "no block_mask with packed sequences, got one; call the function without varlen for one sequence of "
                "all rows, with BlockMask.documents(cu_seqlens) & block_mask",
            )
        batch, heads = self.request.query.shape[0], self.request.query.shape[2]
        lengths = tuple(layout.length for layout in self.whole)
        if mask.seq_lengths != lengths or mask.shape[0] not in (1, batch) or mask.shape[1] not in (1, heads):
            what = "block_mask of the whole sequence, (batch or 1, heads or 1, queries, keys)"
            raise expected(self.op, f"{what} {(batch, heads, *lengths)}, got {mask.shape}")
        if isinstance(self.exchanges[0], Exchange):
            check_blocks(self.op, "layout", self.outer[0])
            if self.request.method == "p2p":
                check_blocks(self.op, "key_layout", self.outer[1])

    def _longest(self) -> tuple[int, int]:
        queries, keys = (max((d[side][1] - d[side][0] for d in self.documents), default=0) for side in (0, 1))
        return queries, keys

    def results(self) -> tuple[Tensor, Tensor]:
        query, key, value = self.request[1:4]
        heads = query.shape[2]
        if self.groups.sizes[1] == 1:
            out, lse = self._attended((query, key, value), self.options, (heads, 0))
        else:
            out, lse = self._with_heads(query, key, value)
        return (out[0], lse[0]) if self.packed else (out, lse)

    def _with_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        exchange = self.exchanges[1]
        assert isinstance(exchange, Exchange)
        split = HeadSplit(query.shape[2], key.shape[2], exchange.ranks)
        inner = [_inside(*pair, self.groups) for pair in zip(self.whole, self.outer)]
        tensors = [(query, inner[0], split.queries), (key, inner[1], split.keys), (value, inner[1], split.keys)]
        query, key, value = to_heads(exchange, tensors, "heads of queries, keys and values")
        readers = split.readers(exchange.rank)
        if readers is not None:
            key, value = (tensor[:, :, readers] for tensor in (key, value))
        first, end = split.queries[exchange.rank]
        options = self.options.of_heads(slice(first, end))
        options = options._replace(
            bias=self._rows_of_heads(options.bias, inner[0], split),
            mask=self._rows_of_heads(options.mask, inner[0], split),
        )
        out, lse = self._attended((query, key, value), options, (split.queries[-1][1], first))
        out = to_rows(exchange, out, inner[0], split.queries, "heads of results")
        lse = to_rows(exchange, lse.transpose(1, 2).unsqueeze(-1), inner[0], split.queries, "heads of lse")
        return out, lse.squeeze(-1).transpose(1, 2)

    def _rows_of_heads(self, bias: Tensor | None, layout: Layout, split: HeadSplit) -> Tensor | None:
        """Of a bias of this rank's rows, all rows that its heads have now."""
        exchange = self.exchanges[1]
        assert isinstance(exchange, Exchange)
        first, end = split.queries[exchange.rank]
        if bias is None:
            return None
        if self.packed or not self._differs_by_row(bias, layout, exchange):
            return bias if bias.shape[1] == 1 else bias[:, first:end]
        heads = split.queries if bias.shape[1] > 1 else [(0, 1)] * exchange.ranks
        is_bool = bias.dtype == torch.bool
        rows = bias.transpose(1, 2)
        (whole,) = to_heads(exchange, [(rows.byte() if is_bool else rows, layout, heads)], "rows of the bias")
        return whole.transpose(1, 2).bool() if is_bool else whole.transpose(1, 2)

    @staticmethod
    def _differs_by_row(bias: Tensor, layout: Layout, exchange: Exchange) -> bool:
        """Equal on all ranks, of which one with a single row cannot tell by itself."""
        has_rows = bias.shape[2] != 1
        counts = [layout.rows(rank) for rank in range(exchange.ranks)]
        if 1 not in counts or set(counts) == {1}:
            return has_rows or set(counts) == {1}
        own = bias.new_full((exchange.ranks,), has_rows, dtype=torch.uint8)
        ones = [1] * exchange.ranks
        return bool(exchange.swap(own, ones, ones, "whether the bias has rows").any())

    def _attended(
        self, tensors: tuple[Tensor, Tensor, Tensor], options: _Options, heads: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        """heads: how many query heads all ranks have, and the first of this rank."""
        if isinstance(self.exchanges[0], NoExchange) and options.dropout_p == 0:
            return self._on_one_rank(tensors, options)
        has_distances = not (options.alibi_slopes is options.table is None and options.band == Band(None, None))
        mask = options.block_mask
        problem = Problem(
            self.outer[0],
            self.outer[1],
            self.documents,
            options.band if mask is None else Band(None, None),
            by_distance=has_distances,
            aligned=options.dropout_p > 0,
            packs=options.bias is options.mask is None,
        )
        masked = dropout = None
        if mask is not None:
            masked = MaskedProblem(
                mask, problem, options.band, self.exchanges[0].rank, by_position=options.depends_on_positions
            )
        if options.dropout_p > 0:
            longest = options.longest_key or self._longest()[1]
            state = ops.draw_attention_rng(self.device)
            dropout = Dropout(options.dropout_p, state, heads[0], heads[1], longest)
        call = Call(
            self.op,
            problem,
            self.exchanges[0],
            from_all=self.request.method == "all_gather" or (dropout is not None and not _begin_aligned(problem)),
            gathered_bytes=GATHERED_BYTES,
            scale=options.scale,
            softcap=options.softcap,
            deterministic=options.deterministic,
            alibi_slopes=options.alibi_slopes,
            mask=options.mask,
            dropout=dropout,
            masked=masked,
        )
        result: tuple[Tensor, Tensor] = Attend.apply(
            call, *Tensors(*tensors, options.sinks, options.bias, options.table)
        )
        return result

    def _on_one_rank(self, tensors: tuple[Tensor, Tensor, Tensor], options: _Options) -> tuple[Tensor, Tensor]:
        """For all rows, which are in order here."""
        arguments: Any = {
            "window": options.band,
            "scale": options.scale,
            "softcap": options.softcap,
            "deterministic": options.deterministic,
            "alibi_slopes": None if options.alibi_slopes is None else for_op(options.alibi_slopes),
            "sinks": options.sinks,
            "attn_bias": options.bias,
            "attn_mask": options.mask,
            "relative_bias": options.table,
            "block_mask": options.block_mask,
        }
        if self.ends is None:
            return flash_attention(*tensors, return_lse=True, **arguments)
        arguments["max_seqlen_q"], arguments["max_seqlen_k"] = self._longest()
        query, key, value = (tensor[0] for tensor in tensors)
        out, lse = flash_attention_varlen(query, key, value, *self.ends, return_lse=True, **arguments)
        return out.unsqueeze(0), lse.unsqueeze(0)


def _with_dims(tensor: Tensor | None, dims: int) -> Tensor | None:
    if not isinstance(tensor, Tensor) or tensor.dim() >= dims:
        return tensor
    return tensor.view((1,) * (dims - tensor.dim()) + tuple(tensor.shape))


def _rows_text(layout: Layout, tensor: Tensor, rank: int, *, or_one: bool = False) -> str:
    """or_one: of a bias, whose single row may be for all rows."""
    rows, given = layout.rows(rank), tensor.shape[1]
    is_right = given == rows or (or_one and given == 1)
    return "its rows" if is_right else f"{given} rows where the layout has {rows}"


def _over_ring(layout: Layout, heads: int) -> Layout:
    """Of a layout over all ranks, that of the ranks that exchange heads, together."""
    if heads == 1:
        return layout
    parts = [layout.ranges[first : first + heads] for first in range(0, layout.ranks, heads)]
    return Layout(layout.length, tuple(union(rows for of_rank in part for rows in of_rank) for part in parts))


def _inside(whole: Layout, outer: Layout, groups: Groups) -> Layout:
    """Of the ranks that exchange heads, the rows that they have together, counted from 0."""
    ring, heads = groups.place[0], groups.sizes[1]
    rows = outer.ranges[ring]
    parts = whole.ranges[ring * heads : (ring + 1) * heads]
    return Layout(outer.rows(ring), tuple(tuple(place for _, place in located(rows, part)) for part in parts))


def _begin_aligned(problem: Problem) -> bool:
    """Whether each rank's range of keys begins at a multiple of `DROPOUT_GROUP` of a document."""
    return all(
        max(first, document.keys[0]) % DROPOUT_GROUP == document.keys[0] % DROPOUT_GROUP
        for ranges in problem.keys.ranges
        for first, end in ranges
        for document in problem.documents
        if first < document.keys[1] and end > document.keys[0]
    )


_read: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _documents(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> tuple[Document, ...]:
    """Reads the values, once for each tensor unless it is written."""
    ends = []
    for tensor in (cu_seqlens_q, cu_seqlens_k):
        if tensor.is_inference():  # has no version
            ends.append(tensor.tolist())
            continue
        found = _read.get(tensor)
        if found is None or found[0] != tensor._version:
            found = _read[tensor] = tensor._version, tensor.tolist()
        ends.append(found[1])
    queries, keys = (list(zip(of, of[1:])) for of in ends)
    return tuple(Document(*pair) for pair in zip(queries, keys, strict=True))
