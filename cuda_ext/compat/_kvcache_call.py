"""Shared by both flash-attn interfaces: translates calls with a cache to `cuda_ext.flash_attention_with_kvcache`."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cuda_ext.compat._flash_attn_call import window_of
from cuda_ext.kvcache import flash_attention_with_kvcache


def attend_to_cache(
    function: str, q: Tensor, k_cache: Tensor, v_cache: Tensor, *, window_size: tuple[int, int], **options: Any
) -> tuple[Tensor, Tensor]:
    """(out, lse) of `(batch, seqlen, heads, dim)` queries."""
    window = window_of(function, window_size)
    out, lse = flash_attention_with_kvcache(q, k_cache, v_cache, window=window, return_lse=True, **options)
    return out, lse


def attend_varlen_to_cache(
    function: str, q: Tensor, k_cache: Tensor, v_cache: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int, **options: Any
) -> tuple[Tensor, Tensor]:
    """The same for packed queries, `(total_q, heads, dim)`: `(total_q, heads, dim_v)` and `(heads, total_q)`.

    Each sequence becomes the last rows of `max_seqlen_q` ones, so that its diagonal stays in the bottom-right corner.
    Rows after the last sequence are zeros, and -inf of lse.
    """
    ends = cu_seqlens_q[1:].long()
    rows = torch.arange(max_seqlen_q, device=q.device) - max_seqlen_q + ends.unsqueeze(1)
    padded = q[rows.clamp(min=0)] if len(q) else q.new_empty(len(ends), max_seqlen_q, *q.shape[1:])
    out, lse = attend_to_cache(function, padded, k_cache, v_cache, **options)
    row = torch.arange(len(q), device=q.device)
    sequence = torch.searchsorted(ends, row, right=True)
    place = row - F.pad(ends, (0, 1))[sequence] + (sequence + 1) * max_seqlen_q
    place = torch.where(sequence < len(ends), place, len(ends) * max_seqlen_q)  # else the row that pads both
    out = F.pad(out.flatten(0, 1), (0, 0, 0, 0, 0, 1))
    lse = F.pad(lse.transpose(1, 2).flatten(0, 1), (0, 0, 0, 1), value=-math.inf)
    return out[place], lse[place].T
