"""The memory of gradient buckets: one flat buffer for each dtype, taken once and cut into buckets, again if need be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cuda_ext.bucket import aligned_offsets

FLAGS_OF_A_RANK = 4


@dataclass(frozen=True)
class Layout:
    """Where things are in a bucket, in elements: gradients at ``offsets``, flags at ``head``, then zeros.

    There is a flag for each gradient, and `FLAGS_OF_A_RANK` more.

    Every gradient begins at a multiple of 64 bytes. ``size`` is a multiple of the number of ranks, so that each of them
    can own an equal part, and of 128, so that parts begin at whole vectors (as Megatron-LM pads its buckets).
    """

    offsets: list[int]
    head: int
    size: int


def layout(counts: Sequence[int], dtype: torch.dtype, ranks: int) -> Layout:
    """The layout of gradients of ``counts`` elements that travel as ``dtype``."""
    offsets, head = aligned_offsets(counts, dtype)
    return Layout(offsets, head, _round_up(head + len(counts) + FLAGS_OF_A_RANK, math.lcm(ranks, 128)))


@dataclass(frozen=True)
class Room:
    """What the gradients of ``counts`` elements need in up to ``max_buckets`` buckets, whatever their order."""

    counts: list[int]
    ranks: int
    max_buckets: int

    def elements(self, dtype: torch.dtype) -> int:
        head = aligned_offsets(self.counts, dtype)[1]
        padding = math.lcm(self.ranks, 128) - 1
        return head + len(self.counts) + self.max_buckets * (FLAGS_OF_A_RANK + padding)


class Arena:
    """Flat memory that is cut into buckets."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._taken = 0

    def take(self, size: int) -> Tensor:
        """The next ``size`` elements, as a tensor that counts its own writes."""
        begin = self._taken
        self._taken += size
        assert self._taken <= self.memory.numel()
        return self.memory[begin : self._taken].data

    def clear(self) -> None:
        """Takes everything back; what was handed out is cut anew."""
        self._taken = 0


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
