"""Caches filled at random, and attention over them in plain PyTorch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Cache:
    """Keys and values of sequences of different lengths; every row that no sequence has is NaN."""

    keys: Tensor  # (batch of the cache, rows, heads, dim), or (pages, page_size, heads, dim)
    values: Tensor
    arguments: dict[str, Tensor]  # cache_seqlens, and cache_batch_idx, cache_leftpad or block_table
    page_size: int = 0
    rows: int = 0  # of a sequence

    @property
    def lengths(self) -> list[int]:
        return self.arguments["cache_seqlens"].tolist()

    def begin(self, b: int) -> int:
        return int(self.arguments["cache_leftpad"][b]) if "cache_leftpad" in self.arguments else 0

    def rows_of(self, cache: Tensor, b: int, end: int) -> Tensor:
        """Rows [begin, end) of sequence b, (keys, heads, dim)."""
        at = torch.arange(self.begin(b), end)
        if self.page_size:
            return cache[self.arguments["block_table"][b].long()[at // self.page_size], at % self.page_size]
        row = int(self.arguments["cache_batch_idx"][b]) if "cache_batch_idx" in self.arguments else b
        return cache[row, at]

    def clone(self) -> Cache:
        return Cache(self.keys.clone(), self.values.clone(), self.arguments, self.page_size, self.rows)


def make_cache(
    lengths: list[int],
    rows: int,
    heads: int,
    dim: int,
    dim_v: int,
    dtype: torch.dtype,
    *,
    page_size: int = 0,
    heads_first: bool = False,
    leftpad: bool = False,
    batch_idx: bool = False,
    new_rows: int = 0,
) -> Cache:
    """A cache of `rows` rows for each sequence, of which `lengths` are used.

    heads_first: (batch, heads, rows, dim) in memory. new_rows: rows after `lengths` for which there are pages.
    """
    batch = len(lengths)
    arguments = {"cache_seqlens": torch.tensor(lengths, dtype=torch.int32)}
    if page_size:
        width = -(-rows // page_size)
        pages = 3 * batch * width + 1  # three times as many as needed, in random order
        table = torch.randperm(pages)[: batch * width].reshape(batch, width).int()
        for b, length in enumerate(lengths):
            table[b, -(-(length + new_rows) // page_size) :] = -1
        arguments["block_table"] = table
        shape = [pages, page_size]
    else:
        shape = [batch + 3 if batch_idx else batch, rows]
        if batch_idx:
            arguments["cache_batch_idx"] = torch.randperm(batch + 3)[:batch].int()
    if leftpad:
        arguments["cache_leftpad"] = torch.tensor([int(torch.randint(0, n + 1, ())) for n in lengths]).int()

    def filled(width: int) -> Tensor:
        if heads_first:
            return torch.full((shape[0], heads, shape[1], width), torch.nan, dtype=dtype).transpose(1, 2)
        return torch.full((*shape, heads, width), torch.nan, dtype=dtype)

    cache = Cache(filled(dim), filled(dim_v), arguments, page_size, rows)
    for b, length in enumerate(lengths):
        at = torch.arange(cache.begin(b), length)
        for tensor in (cache.keys, cache.values):
            new = torch.randn(len(at), heads, tensor.shape[-1]).to(dtype)
            if page_size:
                tensor[arguments["block_table"][b].long()[at // page_size], at % page_size] = new
            else:
                tensor[int(arguments["cache_batch_idx"][b]) if batch_idx else b, at] = new
    return cache


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """x (rows, heads, dim), of which the first 2 * cos.shape[1] elements are rotated, in float32; positions beyond the
    table are not."""
    last = len(cos) - 1
    inside = (positions <= last).view(-1, 1, 1)
    c = torch.where(inside, cos.float()[positions.clamp(max=last)].unsqueeze(1), 1.0)
    s = torch.where(inside, sin.float()[positions.clamp(max=last)].unsqueeze(1), 0.0)
    width = 2 * cos.shape[1]
    turned, rest = x[..., :width].float(), x[..., width:]
    first, second = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    pair = (first * c - second * s, first * s + second * c)
    joined = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([joined.to(x.dtype), rest], -1)


@dataclass
class Expected:
    """The results of one call, in the precision of `precision`."""

    outs: list[Tensor] = field(default_factory=list)
    lses: list[Tensor] = field(default_factory=list)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, precision: torch.dtype, **options: Any
) -> tuple[Tensor, Tensor]:
    """Attention of one sequence: query (Sq, H, D), keys (Sk, Hk, D), values (Sk, Hk, Dv); (Sq, H, Dv) and (H, Sq)."""
    queries, heads, dim = query.shape
    group = heads // keys.shape[1]
    q, k, v = query.to(precision), keys.to(precision), values.to(precision)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = options.get("scale")
    logits = torch.einsum("qhd,khd->hqk", q, k).to(precision) * (dim**-0.5 if scale is None else scale)
    if softcap := options.get("softcap", 0.0):
        logits = softcap * torch.tanh(logits / softcap)
    distance = torch.arange(len(k)) - (torch.arange(queries).unsqueeze(1) + len(k) - queries)
    if (slopes := options.get("alibi_slopes")) is not None:
        logits = logits - slopes.to(precision).view(-1, 1, 1) * distance.abs()
    left, right = options.get("window") or (None, None)
    right = 0 if options.get("causal") else right
    hidden = torch.zeros(queries, len(k), dtype=torch.bool)
    if left is not None:
        hidden |= distance < -left
    if right is not None:
        hidden |= distance > right
    if (tree := options.get("tree_mask")) is not None:
        newest = min(queries, len(k))
        hidden[:, len(k) - newest :] |= ~tree[:, queries - newest :]
    logits = logits.masked_fill(hidden, -math.inf)
    if (sinks := options.get("sinks")) is not None:
        logits = torch.cat([sinks.to(precision).view(-1, 1, 1).expand(-1, queries, 1), logits], -1)
        v = torch.cat([torch.zeros_like(v[:1]) if len(v) else v.new_zeros(1, *v.shape[1:]), v])
    lse = logits.logsumexp(-1) if logits.shape[-1] else logits.new_full(logits.shape[:-1], -math.inf)
    weights = torch.where(lse.unsqueeze(-1) == -math.inf, 0.0, (logits - lse.unsqueeze(-1)).exp())
    return torch.einsum("hqk,khd->qhd", weights.to(precision), v), lse


def expected(
    query: Tensor, cache: Cache, keys: Tensor | None, values: Tensor | None, precision: torch.dtype, **options: Any
) -> tuple[Tensor, Tensor]:
    """What the op returns; `cache` is changed as the op changes it."""
    outs, lses = [], []
    rotary = {name: options.pop(f"rotary_{name}", None) for name in ("cos", "sin", "interleaved", "positions")}
    interleaved = rotary["interleaved"] is not False
    sides = options.get("window") or ()
    moves = options.get("causal") or options.get("tree_mask") is not None or any(side is not None for side in sides)
    for b, length in enumerate(cache.lengths):
        q, end = query[b], length
        first = length if rotary["positions"] is None else int(rotary["positions"][b])
        if keys is not None and values is not None:
            end += keys.shape[1]
            k, at = keys[b], torch.arange(keys.shape[1])
            if rotary["cos"] is not None:
                k = rotate(k, rotary["cos"], rotary["sin"], first + at, interleaved)
                steps = torch.arange(len(q)) if moves else torch.zeros(len(q), dtype=torch.long)
                q = rotate(q, rotary["cos"], rotary["sin"], first + steps, interleaved)
            for tensor, new in ((cache.keys, k), (cache.values, values[b])):
                if cache.page_size:
                    table = cache.arguments["block_table"][b].long()
                    tensor[table[(length + at) // cache.page_size], (length + at) % cache.page_size] = new
                else:
                    row = int(cache.arguments["cache_batch_idx"][b]) if "cache_batch_idx" in cache.arguments else b
                    tensor[row, length + at] = new
        own = dict(options)
        for name, shared_dims in (("alibi_slopes", 1), ("tree_mask", 2)):
            if (tensor := options.get(name)) is not None and tensor.dim() > shared_dims:
                own[name] = tensor[b]
        out, lse = attend(q, cache.rows_of(cache.keys, b, end), cache.rows_of(cache.values, b, end), precision, **own)
        outs.append(out)
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)
