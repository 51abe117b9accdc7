"""What calls of attention and exchanges of ranks take, from numbers that describe a cluster."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cuda_ext.block_mask import BLOCK
from cuda_ext.distributed.bucketing.links import Hop
from cuda_ext.distributed.context_parallel.attend import accumulation_type
from cuda_ext.distributed.context_parallel.layout import size
from cuda_ext.distributed.context_parallel.parts import Band, Part, window_of

# Bytes of memory for each element of a call's rows in backward: the output and its gradient are read, and the gradient
# of query is zeroed, summed and rounded. Fitted to FlashAttention-3 on an H100 with 64 heads of 128, whose 335, 454,
# 517, 556, 588 TFLOP/s at 1, 2, 4, 8 and 16 Ki rows and keys are 620 TFLOP/s with so many bytes at 2.7 TB/s.
_BACKWARD_BYTES = 38.0
_CALL_SECONDS = 30e-6  # of the host, for each call of a kernel; an estimate


class Cluster(NamedTuple):
    """FLOPs and bytes per second of a rank, and its links to ranks of its host (`inside`) and of others (`across`)."""

    forward_rate: float
    backward_rate: float
    memory_rate: float
    inside: Hop
    across: Hop
    ranks_per_node: int

    def gather(self, ranks: int, bytes_of_rank: float) -> float:
        """Seconds of an all-gather in a ring through all ranks, with one line through each network of a host."""
        near = min(ranks, self.ranks_per_node)
        nodes = -(-ranks // near)
        seconds = (ranks - 1) * bytes_of_rank / self.inside.bandwidth if near > 1 else 0.0
        over_network = (ranks - near) * bytes_of_rank / (near * self.across.bandwidth)
        return max(seconds, over_network) + (ranks - nodes) * self.inside.latency + (nodes - 1) * self.across.latency

    def all_to_all(self, sent: Tensor) -> float:
        """Seconds until the last rank has sent and received. sent: (ranks, ranks) bytes, from each row's rank."""
        sent = sent.double()
        host = torch.arange(len(sent)) // self.ranks_per_node
        near = host.unsqueeze(1) == host
        seconds = 0.0
        for here, hop in ((near, self.inside), (~near, self.across)):
            there = (sent * here).fill_diagonal_(0.0)
            most = max(float(there.sum(dim).max()) for dim in (0, 1))
            seconds = max(seconds, hop.latency + most / hop.bandwidth if most else 0.0)
        return seconds


class Shape(NamedTuple):
    """Of the attention of all ranks."""

    batch: int
    heads: int
    key_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def both(self) -> int:
        return self.head_dim + self.value_dim

    @property
    def sum_bytes(self) -> int:
        return accumulation_type(self.dtype).itemsize

    def row_bytes(self, key_heads: int) -> int:
        """Of the keys and values of a row."""
        return self.batch * key_heads * self.both * self.dtype.itemsize

    def saved_bytes(self, rows: int, heads: int, key_heads: int) -> int:
        """Of query, key, value, output and lse."""
        return self.batch * rows * ((heads + key_heads) * self.both * self.dtype.itemsize + heads * self.sum_bytes)


class Work(NamedTuple):
    """Of the calls of a rank: their number, their rows, and the pairs of rows and keys that they visit for a head."""

    calls: int
    rows: int
    pairs: float

    def seconds(self, shape: Shape, cluster: Cluster, heads: int, *, backward: bool, merges: bool) -> float:
        """merges: whether results are added to those of other calls, in the accumulation type."""
        flops = 2 * (3 * shape.head_dim + 2 * shape.value_dim if backward else shape.both)
        multiplied = flops * self.pairs * heads * shape.batch
        item, of_sum = shape.dtype.itemsize, shape.sum_bytes
        if backward:
            dim, passes = shape.head_dim, _BACKWARD_BYTES + item + 2 * (of_sum if merges else item)
        else:  # merging reads and writes the sum twice, and reads the part
            dim, passes = shape.value_dim, item + (1 + 5) * of_sum if merges else 2 * item
        moved = self.rows * heads * shape.batch * dim * passes
        rate = cluster.backward_rate if backward else cluster.forward_rate
        return max(self.calls * _CALL_SECONDS, multiplied / rate + moved / cluster.memory_rate)


def work_of(parts: tuple[Part, ...], band: Band) -> Work:
    pairs = 0.0
    for part in parts:
        for segment in part.segments:
            rows, keys = (end - first for first, end in (segment.rows, segment.keys))
            filled = _filled(rows) * _filled(keys)
            pairs += visible_pairs(rows, keys, window_of(band, segment.offset)) / max(filled, 1e-9)
    return Work(len(parts), size(part.rows for part in parts), pairs)


def visible_pairs(rows: int, keys: int, band: Band) -> int:
    """How many pairs of a call with this window are visible."""
    diagonal = keys - rows
    end = rows * keys if band.right is None else _clamped(rows, keys, diagonal + band.right + 1)
    begin = 0 if band.left is None else _clamped(rows, keys, diagonal - band.left)
    return max(0, end - begin)


def _clamped(rows: int, keys: int, first: int) -> int:
    """The sum over i < rows of first + i, each cut to [0, keys]."""
    low, high = min(max(-first, 0), rows), min(max(keys - first, 0), rows)  # between them nothing is cut
    between = high - low
    return between * first + (low + high - 1) * between // 2 + (rows - high) * keys


def _filled(count: int) -> float:
    """The part of tiles that `count` rows or keys fill."""
    return count / (-(-count // BLOCK) * BLOCK) if count else 0.0
