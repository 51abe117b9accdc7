"""A cache of keys and values in pages, for generation with `cuda_ext.nn.SelfAttention`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerCache:
    """What one layer sees of a `KeyValueCache`: its pages, and the lengths and pages of the sequences."""

    keys: Tensor  # (pages, page_size, Hk, D)
    values: Tensor
    seqlens: Tensor  # (B,) int32
    block_table: Tensor  # (B, n) int32
    capacity: int  # positions of the longest sequence


class KeyValueCache:
    """The keys and values of all layers of a model, for a batch of sequences, in pages.

    A sequence gets as many pages as its own longest length needs, so that a batch of short and long ones takes only the
    memory that it uses. Lengths are on the device: a step neither waits for it nor changes its launches with them.

    Args:
        layers: the number of attention layers.
        max_seqlens: the longest length of each sequence, prompt included.
        num_kv_heads: Hk.
        head_dim: D.
        page_size: positions of a page. Default 64.
        device, dtype: of keys and values.

    Use::

        cache = KeyValueCache(len(layers), [600, 520], kv_heads, head_dim, dtype=torch.bfloat16)
        for n, layer in enumerate(layers):
            x = layer(x, cache=cache[n])  # appends the keys of x's tokens, and attends to all
        cache.advance(x.shape[1])         # once for all layers

    Prompts of different lengths are padded on the right and appended together; `advance` then takes their own lengths,
    and the next tokens overwrite the padding.
    """

    def __init__(
        self,
        layers: int,
        max_seqlens: Sequence[int],
        num_kv_heads: int,
        head_dim: int,
        *,
        page_size: int = 64,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"cuda_ext.nn.KeyValueCache: expected page_size above 0, got {page_size}")
        if any(length < 1 for length in max_seqlens):
            raise ValueError(f"cuda_ext.nn.KeyValueCache: expected max_seqlens above 0, got {list(max_seqlens)}")
        needed = [-(-length // page_size) for length in max_seqlens]
        width = max(needed, default=0)
        # Page 0 takes what is appended beyond the pages of a short sequence, such as the padding of its prompt.
        first, rows = 1, []
        for pages in needed:
            rows.append([first + n if n < pages else 0 for n in range(width)])
            first += pages
        shape = (layers, first, page_size, num_kv_heads, head_dim)
        self.keys = torch.empty(shape, device=device, dtype=dtype)
        self.values = torch.empty(shape, device=device, dtype=dtype)
        self.seqlens = torch.zeros(len(needed), dtype=torch.int32, device=device)
        self.block_table = torch.tensor(rows, dtype=torch.int32, device=device).reshape(len(needed), width)
        self.capacity = max(max_seqlens, default=0)

    def __len__(self) -> int:
        return self.keys.shape[0]

    def __getitem__(self, layer: int) -> LayerCache:
        return LayerCache(self.keys[layer], self.values[layer], self.seqlens, self.block_table, self.capacity)

    def advance(self, tokens: int | Tensor) -> None:
        """Counts the tokens that all layers have appended: for all sequences, or `(B,)`."""
        self.seqlens += tokens

    def reset(self) -> None:
        """Makes all sequences empty."""
        self.seqlens.zero_()
