"""Predicts what attention costs on a group of ranks by each method, without a group or a GPU.

Transfers and calls are those that `ring_attention` and `ulysses_attention` make, so bytes are exact. Times are a model:

- A call takes 2 (D + Dv) FLOPs a head and visible pair of row and key forward, 2 (3 D + 2 Dv) backward, at the rate
  that is given, with tiles of 128 rows and keys counted whole, and the passes over memory of `costs.Work`.
- In an all-gather of s bytes a rank among P ranks, n on a host, (P - 1) s bytes arrive over the links of the host, and
  (P - n) s / n over each network, as in a ring through all ranks that uses all networks of a host.
- In an all-to-all each rank sends over its own links, and the slowest rank counts.
- Ring: while step k computes, which takes c(k), the keys of step k + 1 arrive, g(k + 1), and in backward the gradients
  of step k - 1 leave, r(k - 1): g(0) + sum over k of max(c(k), g(k + 1) + r(k - 1)) + r(last).
- Ulysses: nothing overlaps.

Sources: Ring Attention (Liu et al., arXiv 2310.01889), DeepSpeed Ulysses (Jacobs et al., arXiv 2309.14509), USP (Fang
and Zhao, arXiv 2405.07719), The Llama 3 Herd of Models (arXiv 2407.21783, section 3.3.2).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cuda_ext.block_mask import BLOCK, BlockMask
from cuda_ext.distributed.bucketing.links import Hop
from cuda_ext.distributed.bucketing.units import byte_size, duration
from cuda_ext.distributed.context_parallel.attend import Call
from cuda_ext.distributed.context_parallel.costs import Cluster, Shape, Work, work_of
from cuda_ext.distributed.context_parallel.heads import HeadSplit
from cuda_ext.distributed.context_parallel.layout import Layout, layout_of, size
from cuda_ext.distributed.context_parallel.masked import MaskedProblem, check_blocks
from cuda_ext.distributed.context_parallel.parts import Band, Document, Problem, Transfers
from cuda_ext.distributed.context_parallel.picture import Cells, cells, drawing, text
from cuda_ext.distributed.context_parallel.request import GATHERED_BYTES

_OP = "plan_context"
METHODS = ("all_gather", "p2p", "ulysses", "2-D")
_MOST_STEPS = 64  # of p2p, each of which has a transfer for each rank
_MOST_RANGES = 8  # of a rank, for p2p without a mask, which makes a call for each pair of ranges


@dataclasses.dataclass(frozen=True)
class MethodPlan:
    """One method on all ranks, for one layer.

    Attributes:
        method: of `METHODS`.
        forward, backward: seconds.
        forward_bytes, backward_bytes: what each rank sends to others.
        memory: bytes of the rank that needs most: what is saved for backward, and the largest exchange.
        balance: the most visible pairs of a rank, relative to the mean.
        refused: why it cannot be or does not pay; then all numbers may be 0.
    """

    method: str
    forward: float = 0.0
    backward: float = 0.0
    forward_bytes: tuple[int, ...] = ()
    backward_bytes: tuple[int, ...] = ()
    memory: int = 0
    balance: float = 1.0
    refused: str = ""

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


@dataclasses.dataclass(frozen=True)
class ContextPlan:
    """What `plan_context` has found.

    Attributes:
        ranks: of the group.
        layout: that of the ring.
        alone: the forward and backward of one rank with the whole sequence.
        methods: each with its prediction or the reason against it.
        best: the name of the fastest one; None if the sequence should not be divided.
        reasons: why, in sentences.
        cells: for `map` and `draw`.
    """

    ranks: int
    layout: Layout
    alone: MethodPlan
    methods: tuple[MethodPlan, ...]
    best: str | None
    reasons: tuple[str, ...]
    cells: Cells

    def map(self) -> str:
        """Which rank computes which rows and keys with the ring: a line for each 64th of the rows."""
        return text(self.cells)

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Writes the same as a picture, an SVG."""
        Path(path).write_text(drawing(self.cells, f"{self.layout.length} rows and keys on {self.ranks} ranks"))

    def method(self, name: str) -> MethodPlan:
        return next(method for method in self.methods if method.method == name)

    def __str__(self) -> str:
        head = ("method", "forward", "backward", "sent forward", "sent backward", "memory", "balance", "efficiency")
        rows: list[tuple[str, ...]] = [head]
        for plan in (self.alone, *self.methods):
            if not plan.seconds:
                continue
            sent = [byte_size(max(of_ranks, default=0)) for of_ranks in (plan.forward_bytes, plan.backward_bytes)]
            part = self.alone.seconds / plan.seconds / (1 if plan is self.alone else self.ranks)
            times = duration(plan.forward), duration(plan.backward)
            rows.append((plan.method, *times, *sent, byte_size(plan.memory), f"{plan.balance:.3f}", f"{part:.1%}"))
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
        return "\n".join([*lines, "", *self.reasons])


class _Attention(NamedTuple):
    """What is computed, on which cluster."""

    shape: Shape
    cluster: Cluster
    length: int
    documents: tuple[Document, ...]
    band: Band  # with a mask, the mask has it
    mask: BlockMask | None

    def problem(self, layout: Layout) -> Problem:
        has_band = self.band != Band(None, None)
        return Problem(layout, layout, self.documents, self.band, by_distance=has_band, aligned=False, packs=True)

    def alone(self) -> MethodPlan:
        works = _Works(self, Layout.contiguous(self.length, 1), from_all=True)
        heads, key_heads = self.shape.heads, self.shape.key_heads
        forward, backward = (
            works.work(0, 0).seconds(self.shape, self.cluster, heads, backward=backward, merges=False)
            for backward in (False, True)
        )
        memory = self.shape.saved_bytes(self.length, heads, key_heads)
        return MethodPlan("one rank", forward, backward, (0,), (0,), memory)


class _Works:
    """The steps of a ring, with the transfers of all ranks, and the work of each rank in them."""

    def __init__(self, attention: _Attention, layout: Layout, *, from_all: bool, key_heads: int = 1) -> None:
        self.layout, self._band = layout, attention.band
        problem = attention.problem(layout)
        masked = None
        self._visited: Tensor | None = None
        if attention.mask is not None:
            masked = MaskedProblem(attention.mask, problem, attention.band, -1, by_position=False)
            self._visited = _visited(attention.mask, layout)
        exchange: Any = _Ranks(0, layout.ranks)
        call = Call(_OP, problem, exchange, from_all, GATHERED_BYTES, masked=masked)
        shape = attention.shape
        key, value = (
            torch.empty(shape.batch, 0, key_heads, dim, dtype=shape.dtype, device="meta")
            for dim in (shape.head_dim, shape.value_dim)
        )
        self.steps = call.steps(key, value, 1, of_all_ranks=True)

    def work(self, step: int, rank: int) -> Work:
        transfers = self.steps[step].transfers
        if self._visited is None:
            return work_of(transfers[rank].parts, self._band)
        sources = [source for source, pieces in enumerate(transfers[rank].pieces) if pieces]
        pairs = float(self._visited[rank, sources].sum()) * BLOCK * BLOCK
        return Work(1, self.layout.rows(rank), pairs)

    def balance(self) -> float:
        """The most pairs of a rank, relative to the mean."""
        pairs = [sum(self.work(step, rank).pairs for step in self.distinct) for rank in range(self.layout.ranks)]
        mean = sum(pairs) / len(pairs)
        return max(pairs) / mean if mean else 1.0

    @property
    def distinct(self) -> range:
        """The steps that differ in more than heads."""
        same = len(self.steps) > 1 and self.steps[0].transfers is self.steps[1].transfers
        return range(1 if same else len(self.steps))


class _Ranks(NamedTuple):
    """What the steps of a call need to know of an exchange."""

    rank: int
    ranks: int


def _visited(mask: BlockMask, layout: Layout) -> Tensor:
    """(ranks, ranks): how many blocks the rows of a rank visit among the keys of another, mean of batch and heads."""
    entries = mask._entries
    owner = torch.empty(entries.grid.rows, dtype=torch.int64)
    for rank, ranges in enumerate(layout.ranges):
        for first, end in ranges:
            owner[first // BLOCK : -(-end // BLOCK)] = rank
    pairs = owner[(entries.line % entries.grid.rows).cpu()] * layout.ranks + owner[entries.column.cpu()]
    counts = torch.bincount(pairs, minlength=layout.ranks**2).view(layout.ranks, layout.ranks)
    return counts / (mask.shape[0] * mask.shape[1])


def _sent(layout: Layout, transfers: Transfers) -> Tensor:
    """(ranks, ranks): the rows that each rank sends to each other one."""
    found = torch.zeros(layout.ranks, layout.ranks, dtype=torch.int64)
    for rank, transfer in transfers.items():
        for source, pieces in enumerate(transfer.pieces):
            if pieces and source != rank:
                found[source, rank] = size(pieces)
    return found


def _ring(attention: _Attention, layout: Layout, method: str, heads: tuple[int, int]) -> MethodPlan:
    """heads: query and key heads of each rank."""
    shape, cluster, ranks = attention.shape, attention.cluster, layout.ranks
    works = _Works(attention, layout, from_all=method == "all_gather", key_heads=heads[1])
    group, merges = heads[0] // heads[1], method == "p2p"
    most = max(layout.rows(rank) for rank in range(ranks))
    gathers, returns = [], []
    computes: tuple[list[float], list[float]] = ([], [])
    sent = torch.zeros(2, ranks, dtype=torch.int64)
    largest = 0
    for number, step in enumerate(works.steps):
        if number in works.distinct:
            rows = _sent(layout, step.transfers)
            work = [works.work(number, rank) for rank in range(ranks)]
            everywhere = all(transfer.keys == ((0, layout.length),) for transfer in step.transfers.values())
            most_keys = max(size(transfer.keys) for transfer in step.transfers.values())
        count = step.heads.keys.stop - step.heads.keys.start
        row_bytes = shape.row_bytes(count)
        largest = max(largest, most_keys * row_bytes)
        keys_sent = torch.full((ranks,), (ranks - 1) * most) if everywhere else rows.sum(1)
        sent += torch.stack((keys_sent, keys_sent + rows.sum(0))) * row_bytes
        gathers.append(cluster.gather(ranks, most * row_bytes) if everywhere else cluster.all_to_all(rows * row_bytes))
        returns.append(cluster.all_to_all(rows.t() * row_bytes))
        for backward in (False, True):
            every = (w.seconds(shape, cluster, count * group, backward=backward, merges=merges) for w in work)
            computes[backward].append(max(every))
    # Backward has a step's keys, the next one's, the sums of gradients, and the last step's, sent and received.
    memory = shape.saved_bytes(most, *heads) + int(largest * (4 + shape.sum_bytes / shape.dtype.itemsize))
    if merges:
        memory += shape.batch * most * sum(heads) * shape.both * shape.sum_bytes
    return MethodPlan(
        method,
        _overlapped(gathers, [0.0] * len(gathers), computes[False]),
        _overlapped(gathers, returns, computes[True]),
        tuple(sent[0].tolist()),
        tuple(sent[1].tolist()),
        memory,
        works.balance(),
    )


def _overlapped(gathers: Sequence[float], returns: Sequence[float], computes: Sequence[float]) -> float:
    seconds = gathers[0] + returns[-1]
    for step, compute in enumerate(computes):
        after = gathers[step + 1] if step + 1 < len(gathers) else 0.0
        before = returns[step - 1] if step else 0.0
        seconds += max(compute, after + before)
    return seconds


class _Swaps:
    """The exchanges of heads for rows, forward and backward, among ranks with so many rows."""

    def __init__(self, shape: Shape, rows_of_ranks: Sequence[int]) -> None:
        self.split = HeadSplit(shape.heads, shape.key_heads, len(rows_of_ranks))
        rows = torch.tensor(rows_of_ranks)
        queries, keys = (
            torch.tensor([end - first for first, end in heads]) for heads in (self.split.queries, self.split.keys)
        )
        item = shape.batch * shape.dtype.itemsize
        # Bytes of a row, for the heads of each rank.
        operands = item * (queries * shape.head_dim + keys * shape.both)
        out, lse = item * queries * shape.value_dim, shape.batch * shape.sum_bytes * queries
        self.sent = (
            [torch.outer(rows, operands), torch.outer(out, rows), torch.outer(lse, rows)],
            [torch.outer(rows, out), torch.outer(operands, rows)],
        )
        self.memory = 2 * int(rows.sum()) * int((operands + out).max())

    def heads(self, rank: int) -> tuple[int, int]:
        """Query and key heads that a rank attends with."""
        queries, keys = (last - first for first, last in (self.split.queries[rank], self.split.keys[rank]))
        return queries, keys if self.split.readers(rank) is None else queries

    def seconds(self, cluster: Cluster) -> tuple[float, float]:
        forward, backward = (sum(map(cluster.all_to_all, sent)) for sent in self.sent)
        return forward, backward

    def bytes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        forward, backward = (tuple(torch.stack(sent).sum(0).fill_diagonal_(0).sum(1).tolist()) for sent in self.sent)
        return forward, backward


def _ulysses(attention: _Attention, ranks: int) -> MethodPlan:
    shape, cluster = attention.shape, attention.cluster
    rows = [Layout.contiguous(attention.length, ranks).rows(rank) for rank in range(ranks)]
    swaps = _Swaps(shape, rows)
    most, key_heads = max(swaps.heads(rank) for rank in range(ranks))
    work = _Works(attention, Layout.contiguous(attention.length, 1), from_all=True).work(0, 0)
    forward, backward = (
        work.seconds(shape, cluster, most, backward=backward, merges=False) + swapped
        for backward, swapped in zip((False, True), swaps.seconds(cluster))
    )
    memory = shape.saved_bytes(attention.length, most, key_heads) + swaps.memory
    return MethodPlan("ulysses", forward, backward, *swaps.bytes(), memory, most * ranks / shape.heads)


def _two_dimensions(attention: _Attention, outer: Layout) -> MethodPlan:
    """Heads inside of hosts, keys between ranks of the same place on all hosts, by an all-gather."""
    cluster, inside = attention.cluster, attention.cluster.ranks_per_node
    layout = outer.divided(inside)
    by_host = [[layout.rows(host * inside + rank) for rank in range(inside)] for host in range(outer.ranks)]
    swaps = [_Swaps(attention.shape, rows) for rows in by_host]
    between = attention._replace(cluster=cluster._replace(ranks_per_node=1))
    rings = {heads: _ring(between, outer, "all_gather", heads) for heads in map(swaps[0].heads, range(inside))}
    slowest = max(rings.values(), key=lambda ring: ring.seconds)
    forward, backward = (max(of_hosts) for of_hosts in zip(*(swap.seconds(cluster) for swap in swaps)))
    of_ranks: tuple[list[int], list[int]] = ([], [])
    for host, swap in enumerate(swaps):
        for rank, swapped in enumerate(zip(*swap.bytes())):
            ring = rings[swap.heads(rank)]
            for total, own, of_ring in zip(of_ranks, swapped, (ring.forward_bytes, ring.backward_bytes)):
                total.append(own + of_ring[host])
    return MethodPlan(
        "2-D",
        forward + slowest.forward,
        backward + slowest.backward,
        tuple(of_ranks[0]),
        tuple(of_ranks[1]),
        slowest.memory + max(swap.memory for swap in swaps),
        slowest.balance * max(swaps[0].heads(rank)[0] for rank in range(inside)) * inside / attention.shape.heads,
    )


def plan_context(
    length: int,
    ranks: int,
    *,
    heads: int,
    key_heads: int | None = None,
    head_dim: int = 128,
    value_dim: int | None = None,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    causal: bool | None = None,
    window: tuple[int | None, int | None] | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    block_mask: BlockMask | None = None,
    layout: str | Layout | None = None,
    rate: float,
    backward_rate: float | None = None,
    bandwidth: float,
    latency: float = 5e-6,
    ranks_per_node: int = 8,
    node_bandwidth: float = 370e9,
    node_latency: float = 3.4e-6,
    memory_bandwidth: float = 2.7e12,
    memory: float | None = None,
) -> ContextPlan:
    """Predicts the attention of one layer on `ranks` ranks by each method of this package, and names the fastest.

    Args:
        length: rows of the whole sequence, as many as keys.
        heads, key_heads, head_dim, value_dim, batch, dtype: of attention; `key_heads` is by default `heads`, and
            `value_dim` `head_dim`.
        causal, window: as of `flash_attention`; causal is by default True, with `block_mask` False.
        cu_seqlens: of packed documents that end at `length`. block_mask: instead, of the whole sequence, square.
        layout: of the ring; default: of documents and masks the balanced one, else ``"zigzag"`` if causal, else
            ``"contiguous"``.
        rate, backward_rate: FLOP/s that a rank reaches in long calls of attention, without what is hidden; backward's
            default: 0.91 of forward, as FlashAttention-3 on an H100.
        bandwidth, latency: bytes per second of each rank's network in each direction, and the seconds of a message.
        ranks_per_node, node_bandwidth, node_latency: the same inside of a host; defaults: what NCCL reaches on 8 H100.
        memory_bandwidth: bytes per second of a rank's memory; default that of an H100.
        memory: bytes that a rank has for one layer's attention; default: no bound.

    Returns:
        A `ContextPlan`, which prints as a table. It has reasons against methods that cannot be, and against dividing
        the sequence where ranges are shorter than a tile of 128 rows, or where one rank is as fast.

    Raises:
        ValueError: sizes below 1, a mask or documents of another length, or a layout for other ranks.
    """
    numbers = {"length": length, "ranks": ranks, "heads": heads, "batch": batch, "ranks_per_node": ranks_per_node}
    for name, number in {**numbers, "rate": rate, "bandwidth": bandwidth}.items():
        if not number > 0:
            raise ValueError(f"{_OP}: expected {name} above 0, got {number}")
    key_heads = heads if key_heads is None else key_heads
    if key_heads < 1 or heads % key_heads:
        raise ValueError(f"{_OP}: expected key_heads that divide the {heads} heads, got {key_heads}")
    inside, across = Hop(node_latency, node_bandwidth), Hop(latency, bandwidth)
    rates = rate, backward_rate or 0.91 * rate, memory_bandwidth
    left, right = window or (None, None)
    band = Band(left, 0 if causal or (causal is None and block_mask is None) else right)
    documents = _documents(length, cu_seqlens, block_mask)
    if block_mask is not None and band != Band(None, None):
        block_mask = block_mask & BlockMask.window(length, length, *band, device=block_mask.device)
        band = Band(None, None)
    attention = _Attention(
        Shape(batch, heads, key_heads, head_dim, value_dim or head_dim, dtype),
        Cluster(*rates, inside, across, ranks_per_node),
        length,
        documents,
        band,
        block_mask,
    )
    default = _default_layout(attention, ranks) if layout is None else layout_of(_OP, layout, ranks, length)
    if block_mask is not None:
        check_blocks(_OP, "layout", default)
    return _chosen(attention, default, memory)


def _documents(length: int, cu_seqlens: Tensor | Sequence[int] | None, mask: BlockMask | None) -> tuple[Document, ...]:
    if mask is not None and (cu_seqlens is not None or mask.seq_lengths != (length, length)):
        what = f"block_mask of {length} rows and keys, without cu_seqlens"
        raise ValueError(f"{_OP}: expected {what}, got one of {mask.seq_lengths}")
    ends = [0, length] if cu_seqlens is None else [int(end) for end in cu_seqlens]
    if ends[0] != 0 or ends[-1] != length or ends != sorted(ends):
        raise ValueError(
            f"{_OP}: expected cu_seqlens from 0 to the length {length}, rising, got {ends[:3]} ... {ends[-1]}"
        )
    return tuple(Document(of, of) for of in zip(ends, ends[1:]))


def _default_layout(attention: _Attention, ranks: int) -> Layout:
    length, causal = attention.length, attention.band.right == 0
    if attention.mask is not None:
        return Layout.balanced(attention.mask, ranks)
    if len(attention.documents) > 1:
        ends = [0, *(document.queries[1] for document in attention.documents)]
        return Layout.of_documents(ends, ranks, causal=causal)
    return Layout.zigzag(length, ranks) if causal else Layout.contiguous(length, ranks)


def _methods(attention: _Attention, layout: Layout) -> list[MethodPlan]:
    """Each with a prediction, or refused."""
    ranks, shape, inside = layout.ranks, attention.shape, attention.cluster.ranks_per_node
    heads = shape.heads, shape.key_heads
    rows = attention.length // ranks
    short = f"{rows} rows a rank are fewer than the {BLOCK} of a tile" if rows < BLOCK else ""
    pieces = max(map(len, layout.ranges))
    often = f"predicted for up to {_MOST_STEPS} ranks" if ranks > _MOST_STEPS else ""
    if attention.mask is None and pieces > _MOST_RANGES:
        often = f"up to {pieces} ranges of a rank meet those of each other rank in a call each"
    few = f"{shape.heads} query heads are fewer than the {ranks} ranks" if shape.heads < ranks else ""
    flat = ""
    if ranks <= inside or ranks % inside or inside == 1:
        flat = f"{ranks} ranks are no hosts of {inside}"
    elif shape.heads < inside:
        flat = f"{shape.heads} query heads are fewer than the {inside} ranks of a host"
    against = dict(zip(METHODS, (short, short or often, short or few, short or flat)))

    def predict(method: str) -> MethodPlan:
        if method == "ulysses":
            return _ulysses(attention, ranks)
        if method == "2-D":
            return _two_dimensions(attention, _default_layout(attention, ranks // inside))
        return _ring(attention, layout, method, heads)

    return [MethodPlan(name, refused=why) if why else predict(name) for name, why in against.items()]


def _chosen(attention: _Attention, layout: Layout, memory: float | None) -> ContextPlan:
    alone, methods = attention.alone(), _methods(attention, layout)
    for number, plan in enumerate(methods):
        if memory is not None and not plan.refused and plan.memory > memory:
            refused = f"a rank needs {byte_size(plan.memory)}, more than {byte_size(memory)}"
            methods[number] = dataclasses.replace(plan, refused=refused)
    possible = sorted((plan for plan in methods if not plan.refused), key=lambda plan: plan.seconds)
    reasons = [f"not {plan.method}: {plan.refused}" for plan in methods if plan.refused]
    fits = memory is None or alone.memory <= memory
    best = None
    if layout.ranks == 1:
        reasons = ["one rank: nothing to divide"]
    elif possible and (possible[0].seconds < alone.seconds or not fits):
        best = possible[0].method
        others = [f"{plan.method} {duration(plan.seconds)}" for plan in possible[1:]]
        after = f", before {', '.join(others)}" if others else ""
        reasons.insert(0, f"{best}: {duration(possible[0].seconds)} forward and backward{after}")
    else:
        fastest = f"{possible[0].method} with {duration(possible[0].seconds)}" if possible else "no method"
        why = f"too short: one rank takes {duration(alone.seconds)}, {layout.ranks} ranks {fastest}"
        reasons.insert(0, f"do not divide it, {why}")
    map_of = cells(layout, attention.documents, attention.band, attention.mask)
    return ContextPlan(layout.ranks, layout, alone, tuple(methods), best, tuple(reasons), map_of)
