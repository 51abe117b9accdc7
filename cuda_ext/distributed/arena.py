"""The memory of gradient buckets: one flat buffer per dtype, allocated once, and divided as often as buckets change."""

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
    """The layout of a bucket, in elements: gradients at ``offsets``, flags at ``head``, then padding up to ``size``.

    There is one flag per gradient, and `FLAGS_OF_A_RANK` more ([Note 2] in reducer.py). Every gradient begins at a
    multiple of 64 bytes. ``size`` is a multiple of the number of ranks, so that each can own an equal part, and of 128,
    so that parts begin at whole vectors (as Megatron-LM pads its buckets).
    """

    offsets: list[int]
    head: int
    size: int


def layout(counts: Sequence[int], dtype: torch.dtype, ranks: int) -> Layout:
    """The layout of gradients of ``counts`` elements that travel as ``dtype``."""
    offsets, head = aligned_offsets(counts, dtype)
    return Layout(offsets, head, _round_up(head + len(counts) + FLAGS_OF_A_RANK, math.lcm(ranks, 128)))


def elements_needed(counts: Sequence[int], dtype: torch.dtype, ranks: int, max_buckets: int) -> int:
    """The size of an arena for gradients of ``counts`` elements in up to ``max_buckets`` buckets, in any order."""
    head = aligned_offsets(counts, dtype)[1]
    padding = math.lcm(ranks, 128) - 1
    return head + len(counts) + max_buckets * (FLAGS_OF_A_RANK + padding)


class Arena:
    """Flat memory that is divided into buckets."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._used = 0

    def allocate(self, size: int) -> Tensor:
        """The next ``size`` elements, as a tensor with its own version counter."""
        begin = self._used
        self._used += size
        assert self._used <= self.memory.numel()
        return self.memory[begin : self._used].data

    def clear(self) -> None:
        """Frees everything; later allocations reuse the memory."""
        self._used = 0


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
