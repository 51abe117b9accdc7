"""`relative_bias` of attention as arguments of its ops, whose bias has one element for each distance that can occur."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cuda_ext._toolchain import NAMESPACE


def bias_arguments(
    op: str,
    table: Tensor,
    attn_bias: Tensor | None,
    query: Tensor,
    key: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> dict[str, Any]:
    """The op's `attn_bias` and `bias_is_relative`: `table` from the keys after the diagonal to those before it."""
    if query.dim() not in (3, 4) or key.dim() != query.dim():
        return {}  # the op's error
    _check(op, table, query)
    varlen = query.dim() == 3
    if varlen and attn_bias is not None:
        raise RuntimeError(
            f"{NAMESPACE}::{op}: expected relative_bias without attn_bias, got both; hide keys with attn_mask "
            "or block_mask"
        )
    lengths = _length(query, max_seqlen_q), _length(key, max_seqlen_k)
    by_distance = _resized(table, max(1, *lengths) - 1).flip(-1)
    if attn_bias is None:
        return {"attn_bias": by_distance.unsqueeze(-2), "bias_is_relative": True}
    queries, keys = (torch.arange(length, device=table.device) for length in lengths)
    distance = queries[:, None] + (lengths[1] - lengths[0]) - keys
    return {"attn_bias": by_distance[..., distance + by_distance.shape[-1] // 2] + attn_bias}


def _length(rows: Tensor, longest: int | None) -> int:
    if rows.dim() != 3:
        return rows.shape[1]
    return rows.shape[0] if longest is None else min(longest, rows.shape[0])


def _check(op: str, table: Any, query: Tensor) -> None:
    """Sizes of the batch are left to the op, which knows it if sequences are packed. Raised directly because
    torch.compile cannot trace `check`."""
    if not isinstance(table, Tensor):
        raise RuntimeError(f"{NAMESPACE}::{op}: expected relative_bias to be a tensor, got {type(table).__name__}")
    heads = query.shape[-2]
    if not (1 <= table.dim() <= 3 and table.shape[-1] % 2 == 1 and (table.dim() < 2 or table.shape[-2] in (1, heads))):
        shapes = f"(2 R + 1,), ({heads} or 1, 2 R + 1) or (batch or 1, {heads} or 1, 2 R + 1)"
        raise RuntimeError(f"{NAMESPACE}::{op}: expected relative_bias of shape {shapes}, got {tuple(table.shape)}")


def _resized(table: Tensor, most: int) -> Tensor:
    """The elements of distances `-most` to `most`; those that the table lacks are its ends."""
    own = table.shape[-1] // 2
    if own >= most:
        return table.narrow(-1, own - most, 2 * most + 1)
    ends = [end.expand(*table.shape[:-1], most - own) for end in (table[..., :1], table[..., -1:])]
    return torch.cat([ends[0], table, ends[1]], -1)
