"""Attention over a cache of keys and values, for generation, and the merge of attention that was computed in parts.

Method: FlashAttention with the keys of a sequence split among blocks (Dao et al., "Flash-Decoding", 2023), over caches
in pages (Kwon et al., arXiv 2309.06180).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

import cuda_ext._rules  # noqa: F401
from cuda_ext._attention_options import LogitOptions, Window, op_arguments
from cuda_ext._load import ops
from cuda_ext._toolchain import NAMESPACE

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["flash_attention_with_kvcache", "merge_attention"]

_cached = ops.flash_attention_cached.default
_with_kvcache = ops.flash_attention_with_kvcache.default


class _Options(LogitOptions, total=False):
    """The other keyword arguments, for type checkers."""

    cache_seqlens: Tensor | int | None
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None
    block_table: Tensor | None
    tree_mask: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    rotary_interleaved: bool
    rotary_positions: Tensor | None
    num_splits: int


@overload
def flash_attention_with_kvcache(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_Options],
) -> Tensor: ...
@overload
def flash_attention_with_kvcache(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attention_with_kvcache(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    return_lse: bool,
    **options: Unpack[_Options],
) -> Tensor | tuple[Tensor, Tensor]: ...
def flash_attention_with_kvcache(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    tree_mask: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = True,
    rotary_positions: Tensor | None = None,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    num_splits: int = 0,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the newest queries of each sequence to a cache of its keys and values. Forward only.

    With `key` and `value`, these are first written into the cache, in place, after the `cache_seqlens[b]` rows that it
    has; then the queries attend to all of it. With `rotary_cos` and `rotary_sin`, new keys and queries are rotated on
    the way (RoPE, Su et al., arXiv 2104.09864): the cache then has rotated keys.

    Args:
        query: `(B, Sq, H, D)`, float16, bfloat16, float32 or float64. On a CUDA device float64 is composed of other
            ops, as are head dims above 256: these read `cache_seqlens` on the host, so that no graph can capture them.
            There a cache of float64 is not appended to.
        key_cache: `(Bc, Sc, Hk, D)`, or with `block_table` pages, `(pages, page_size, Hk, D)`. `H` must be a multiple
            of `Hk`. It is read and written in place, with any strides whose last is 1 (so `(B, Hk, Sc, D)` works
            transposed); on a CUDA device rows that are aligned to 16 bytes are fastest. Pages of any size work;
            multiples of 16 are fastest.
        value_cache: the same with `Dv`.
        key: `(B, Sn, Hk, D)`, the new keys; `Sn` may differ from `Sq`. None: nothing is appended.
        value: `(B, Sn, Hk, Dv)`.
        cache_seqlens: `(B,)`, int32, on the device of `query`, or a number: rows of each sequence before the append.
            None: the whole cache, without `key`. A GPU's values stay on the device and are never read by the host:
            what would be written past the end of the cache is dropped, and lengths beyond it end there. On the CPU
            both are errors.
        cache_batch_idx: `(B,)`, int32: which sequence of the cache each sequence of the batch uses. Not with
            `block_table`. With `key`, each may appear only once.
        cache_leftpad: `(B,)`, int32: rows at the start of a sequence that are not keys. They count in `cache_seqlens`.
        block_table: `(B, n)`, int32: row `r` of sequence `b` is row `r % page_size` of page
            `block_table[b, r // page_size]`. Entries beyond the sequence may have any value.
        tree_mask: `(Sq, Sq)` or `(B, Sq, Sq)`, bool, any strides, for speculative decoding (SpecInfer, arXiv
            2305.09781). The newest `Sq` keys of the cache, new ones included, are those of the queries themselves:
            query `i` sees the `j`-th of them if element `(i, j)` is True, and earlier keys as without it. Where a
            sequence has fewer keys, the first columns stand for none. `window` hides keys in addition, by their
            distance in rows of the cache, which is not that in the tree; `alibi_slopes` counts rows, too. Not with
            `causal`. `BlockMask.tree(parents).to_dense()[0, 0]` makes one from the parent of each token.
        rotary_cos: `(positions, R / 2)`, dtype of `query`, with `R` a multiple of 16 up to `D`: the first `R` elements
            of a row are rotated. It needs as many positions as the cache has rows. Only with `key`.
        rotary_sin: the same.
        rotary_interleaved: rotate the pairs (0, 1), (2, 3), ... (GPT-J) or else (i, i + R / 2) (GPT-NeoX, Llama).
        rotary_positions: `(B,)`, int32: the position of the first new key and the first query, default
            `cache_seqlens`. Beyond the table nothing is rotated. Query `i` is `i` positions further with `causal`, a
            window or `tree_mask`; else all queries have the same position. New key `i` always is, so rotate the
            branches of a tree yourself, by their depth.
        causal: hide the keys to the right of the diagonal, which is aligned bottom-right: the last query sees all.
        window: `(left, right)`, as in `flash_attention`; also `scale`, `softcap`, `alibi_slopes` and `sinks`.
        num_splits: into how many parts to split the keys of each sequence on a CUDA device, at most. 0 chooses by the
            length of the sequence alone, so that its results have the same bits in every batch.
        return_lse: also return the log-sum-exp of each row's logits, `(B, H, Sq)`, float32 (float64 for float64).

    Returns:
        `(B, Sq, H, Dv)` in the dtype of `query`; with `return_lse` a pair. A row without keys gives zeros and an lse of
        `-inf`.

    The launch depends on the shapes only, so a captured CUDA graph serves growing lengths.

    Raises:
        RuntimeError: wrong rank, shape, dtype, device or option, a full cache; the message names the argument. The
            cache is then unchanged.
        NotImplementedError: a CUDA tensor, but no CUDA kernel is built.
    """
    op = "flash_attention_with_kvcache"
    options: LogitOptions = {
        "causal": causal,
        "window": window,
        "scale": scale,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
    }
    (slopes, own_sinks, *_), scalars = op_arguments(op, options)
    scalars["num_splits"] = num_splits
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((query.shape[0],), cache_seqlens, dtype=torch.int32, device=query.device)
    where = (cache_seqlens, cache_batch_idx, cache_leftpad, block_table, tree_mask)
    if key is None:
        if value is not None:
            raise RuntimeError(f"{NAMESPACE}::{op}: expected key with value, got key=None")
        if rotary_cos is not None or rotary_sin is not None or rotary_positions is not None:
            raise RuntimeError(
                f"{NAMESPACE}::{op}: expected rotary_cos, rotary_sin and rotary_positions only with key, got key=None; "
                "rotate query yourself"
            )
        out, lse = _cached(query, key_cache, value_cache, *where, slopes, own_sinks, **scalars)
    else:
        if value is None:
            raise RuntimeError(f"{NAMESPACE}::{op}: expected value with key, got value=None")
        rotary = (rotary_cos, rotary_sin, rotary_positions)
        out, lse = _with_kvcache(
            *(query, key_cache, value_cache, key, value, *where, *rotary, slopes, own_sinks),
            rotary_interleaved=rotary_interleaved,
            **scalars,
        )
    return (out, lse) if return_lse else out


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to two disjoint sets of keys, from the results for each: for prefixes that sequences share, and for
    attention in parts, on one device or around a ring of them (Liu et al., arXiv 2310.01889).

    With `lse = log(exp(lse_a) + exp(lse_b))`::

        out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b

    Args:
        out_a: `(B, S, H, Dv)`, or packed `(total, H, Dv)`: an output of `flash_attention` or one of its relatives.
        lse_a: `(B, H, S)` or `(H, total)`: the lse that came with it, in natural logarithms; `-inf` for rows without
            keys.
        out_b: shape and dtype of `out_a`: for other keys of the same queries. If there are sinks, give them to one of
            the two only.
        lse_b: shape of `lse_a`.

    Returns:
        `(out, lse)` with the shapes and dtypes of the arguments. Rows without keys in both give zeros and `-inf`.

    Differentiable with respect to all arguments, to any order. The order of the arguments does not matter, and merging
    three or more parts one after the other is exact up to rounding.

    Raises:
        RuntimeError: shapes or dtypes that do not match.
    """
    op = "merge_attention"
    heads_last = lse_a.transpose(-1, -2) if lse_a.dim() >= 2 else lse_a
    for name, got, expected, why in (
        ("out_b", out_b.shape, out_a.shape, "to match out_a"),
        ("lse_b", lse_b.shape, lse_a.shape, "to match lse_a"),
        ("lse_a", heads_last.shape, out_a.shape[:-1], "with the last two dimensions swapped, to match out_a"),
    ):
        if got != expected:
            raise RuntimeError(f"{NAMESPACE}::{op}: expected {name} of shape {tuple(expected)} {why}, got {tuple(got)}")
    if out_b.dtype != out_a.dtype:
        wanted = f"expected out_b of dtype {out_a.dtype} to match out_a"
        raise RuntimeError(f"{NAMESPACE}::{op}: {wanted}, got {out_b.dtype}")
    weight_a, weight_b, lse = weights_of_parts(lse_a, lse_b)
    return (weight_a * out_a + weight_b * out_b).to(out_a.dtype), lse


def weights_of_parts(lse_a: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What `merge_attention` multiplies the outputs by, each `(B, S, H, 1)` or `(total, H, 1)`, and the lse of both."""
    # A shift of 0 for rows without keys, and a sum of 1, keep NaN out of values and gradients.
    largest = torch.maximum(lse_a, lse_b).detach()
    shift = torch.where(largest == -torch.inf, 0.0, largest)
    share_a, share_b = (lse_a - shift).exp(), (lse_b - shift).exp()
    total = share_a + share_b
    is_empty = total == 0
    total = torch.where(is_empty, 1.0, total)
    weight_a, weight_b = ((share / total).transpose(-1, -2).unsqueeze(-1) for share in (share_a, share_b))
    return weight_a, weight_b, torch.where(is_empty, -torch.inf, shift + total.log())
