"""Bit tiles: the visible elements of a block of 128 queries and 128 keys, one bit each, int32 (128, 4).

Bits are in accumulator order: word t of a row holds the columns 8n + 2t and 8n + 2t + 1 as its bits 2n and 2n + 1, for
n = 0..15. These are the columns that a thread with lane % 4 == t owns in the accumulator of a tensor core.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128
WORDS = 4

_GOLDEN = -0x61C8864680B583EB  # odd; 2^64 / golden ratio as a signed number
_MIX = -0x40A7B892E31B1A47  # odd; the first factor of splitmix64 as a signed number


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(32, dtype=torch.int32, device=device)


def pack_bits(visible: Tensor) -> Tensor:
    """bool (..., 128) to int32 (..., 4)."""
    bits = visible.unflatten(-1, (16, WORDS, 2)).transpose(-3, -2).flatten(-2)  # (..., 4, 32)
    return (bits.to(torch.int32) << _shifts(visible.device)).sum(-1, dtype=torch.int32)


def unpack_bits(words: Tensor) -> Tensor:
    """int32 (..., 4) to bool (..., 128)."""
    bits = ((words.unsqueeze(-1) >> _shifts(words.device)) & 1).bool()  # (..., 4, 32)
    return bits.unflatten(-1, (16, 2)).transpose(-3, -2).flatten(-3)


def prefix_bits(device: torch.device) -> Tensor:
    """int32 (129, 4): row x has the bits of all columns below x. So columns [a, b) are row b without row a."""
    columns = torch.arange(BLOCK, device=device)
    return pack_bits(columns < torch.arange(BLOCK + 1, device=device).unsqueeze(1))


# Exchanging bit k of the row with bit k of the column, for k = 0..6, transposes a tile. In accumulator order bits 0, 3,
# 4, 5, 6 of the column are bits 0..4 of the position in a word, and bits 1 and 2 are the number of the word.
_EXCHANGES = ((0, 1, 0x55555555), (3, 2, 0x33333333), (4, 4, 0x0F0F0F0F), (5, 8, 0x00FF00FF), (6, 16, 0x0000FFFF))


def transpose_tiles(tiles: Tensor) -> Tensor:
    """int32 (T, 128, 4), rows and columns exchanged, without unpacking."""
    words = tiles.clone(memory_format=torch.contiguous_format)
    for row_bit, distance, mask in _EXCHANGES:
        pairs = words.view(-1, BLOCK >> (row_bit + 1), 2, 1 << row_bit, WORDS)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        swapped = ((low >> distance) ^ high) & mask  # the mask also clears what the shift copies of the sign
        high ^= swapped
        low ^= swapped << distance
    return words.view(-1, 16, WORDS, 2, WORDS).transpose(2, 4).reshape(tiles.shape)


def _hashes(rows: Tensor) -> Tensor:
    """int64 (n,) of (n, ...), each a multiple of 8 bytes. Words are mixed before they are added, because a sum alone
    would lose their high bits."""
    words = rows.flatten(1).view(torch.int64) * _GOLDEN
    words ^= words >> 32
    factors = torch.arange(1, words.shape[1] + 1, device=rows.device) * _GOLDEN
    factors = (factors ^ (factors >> 30)) * _MIX
    return (words * ((factors ^ (factors >> 27)) | 1)).sum(1)


def unique_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The different ones of n tiles, or other contiguous rows, in order of their first appearance, and the number of
    each in them, int64 (n,).

    Rows are sorted by a hash, which is much faster than sorting them by 512 words. The result is verified; if two
    different rows share a hash, whole rows are sorted after all.
    """
    count = rows.shape[0]
    numbers = torch.arange(count, device=rows.device)
    if count < 2:
        return rows, numbers
    distinct, inverse = torch.unique(_hashes(rows), return_inverse=True)
    unique, inverse = _by_first(rows, distinct.shape[0], inverse, numbers)
    if not torch.equal(unique.index_select(0, inverse), rows):
        distinct, inverse = torch.unique(rows.flatten(1), dim=0, return_inverse=True)
        unique, inverse = _by_first(rows, distinct.shape[0], inverse, numbers)
    return unique, inverse


def _by_first(rows: Tensor, groups: int, inverse: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    first = numbers.new_full((groups,), rows.shape[0]).scatter_reduce(0, inverse, numbers, "amin")
    first, order = first.sort()
    rank = torch.empty_like(order)
    rank[order] = torch.arange(groups, device=order.device)
    return rows.index_select(0, first), rank[inverse]
