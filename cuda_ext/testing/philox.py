"""The random numbers of dropout, in plain PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["dropout_mask", "philox4x32_10", "philox_uint32"]

_MASK32 = 0xFFFFFFFF


def philox_uint32(seed: int, offset: int, elements: Tensor) -> Tensor:
    """The 32 random bits of each element, as int64 in [0, 2**32), in the shape of ``elements`` (int64, >= 0).

    Philox4x32-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011). The key is the two halves of
    ``seed``; the counter is the two halves of ``elements >> 2`` followed by the two halves of ``offset``; ``elements
    & 3`` selects one of the four output words.
    """
    block = elements >> 2
    words = philox4x32_10(
        (
            block & _MASK32,
            (block >> 32) & _MASK32,
            torch.full_like(elements, offset & _MASK32),
            torch.full_like(elements, (offset >> 32) & _MASK32),
        ),
        (seed & _MASK32, (seed >> 32) & _MASK32),
    )
    return torch.stack(words, dim=-1).gather(-1, (elements & 3).unsqueeze(-1)).squeeze(-1)


def philox4x32_10(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply_32x32(0xD2511F53, c0)
        high1, low1 = _multiply_32x32(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return c0, c1, c2, c3


def _multiply_32x32(factor: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """The high and low 32 bits of a product, computed in 16-bit halves: int64 cannot hold 64 unsigned bits."""
    upper, lower = factor * (x >> 16), factor * (x & 0xFFFF)
    return (upper + (lower >> 16)) >> 16, (((upper & 0xFFFF) << 16) + lower) & _MASK32


def dropout_mask(
    dropout_p: float, seed: int, offset: int, row: Tensor, num_keys: int, max_num_keys: int | None = None
) -> Tensor:
    """Which attention probabilities dropout keeps: bool `(*row.shape, num_keys)`.

    ``row`` (int64, any shape) numbers the rows of scores: ``(b * H + h) * Sq + i`` in a dense batch, ``h * total_q +
    i`` in a packed one, where i counts all queries of the batch. Key j of a row is element ``row * pitch + j`` of
    `philox_uint32`, where pitch is ``max_num_keys`` (default: ``num_keys``) rounded up to a multiple of 4. The
    element is kept if its 32 bits are at least ``floor(dropout_p * 2**32)``.
    """
    pitch = -(-(num_keys if max_num_keys is None else max_num_keys) // 4) * 4
    elements = row.unsqueeze(-1) * pitch + torch.arange(num_keys, device=row.device)
    return philox_uint32(seed, offset, elements) >= math.floor(dropout_p * 2**32)
