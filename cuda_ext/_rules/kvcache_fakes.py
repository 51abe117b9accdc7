"""Fake kernels of attention over a cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cuda_ext._checks import check, check_same_device, check_same_dtype, check_shape, dtype_name, has_shape, shape_of
from cuda_ext._rules.attention_fakes import out_and_lse
from cuda_ext._toolchain import NAMESPACE

_OP = "flash_attention_with_kvcache"


def _check_cache(
    query: Tensor, keys: Tensor, values: Tensor, seqlens: Tensor | None, block_table: Tensor | None
) -> None:
    for name, tensor in (("query", query), ("key_cache", keys), ("value_cache", values)):
        check(tensor.dim() == 4, _OP, f"expected {name} of 4 dimensions, got {shape_of(tensor)}")
        check_same_dtype(_OP, name, tensor, "query", query)
    check_same_device(_OP, "query", query, key_cache=keys, value_cache=values)
    check_shape(_OP, "value_cache", values, (*keys.shape[:3], values.shape[3]), " to match key_cache")
    dim = query.shape[3]
    check(keys.shape[3] == dim, _OP, f"expected key_cache of head dim {dim} to match query, got {shape_of(keys)}")
    heads, heads_kv = query.shape[2], keys.shape[2]
    check(
        heads_kv > 0 and heads % heads_kv == 0,
        _OP,
        f"expected the heads of query to be a multiple of the heads of key_cache, got {heads} and {heads_kv}",
    )
    for name, indices, rank in (("cache_seqlens", seqlens, 1), ("block_table", block_table, 2)):
        if indices is not None:
            is_right = indices.dtype == torch.int32 and indices.dim() == rank and indices.shape[0] == query.shape[0]
            wanted = f"expected {name} of {rank} dimensions, batch {query.shape[0]} and dtype int32"
            check(is_right, _OP, f"{wanted}, got {shape_of(indices)} and dtype {indices.dtype}")


def _check_tree_mask(query: Tensor, tree_mask: Tensor | None, options: dict[str, Any]) -> None:
    if tree_mask is None:
        return
    check(tree_mask.dtype == torch.bool, _OP, f"expected tree_mask of dtype bool, got {dtype_name(tree_mask.dtype)}")
    batch, count = query.shape[:2]
    wanted = f"expected tree_mask of shape ({count}, {count}) or ({batch}, {count}, {count})"
    fits = any(has_shape(tree_mask, shape) for shape in ((count, count), (batch, count, count)))
    check(fits, _OP, f"{wanted}, queries and their own keys, got {shape_of(tree_mask)}")
    check_same_device(_OP, "query", query, tree_mask=tree_mask)
    check(not options.get("causal"), _OP, "expected causal=False with tree_mask, got True")


@torch.library.register_fake(f"{NAMESPACE}::flash_attention_cached")
def _(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cache_seqlens: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    tree_mask: Tensor | None = None,
    *more: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    _check_cache(query, key_cache, value_cache, cache_seqlens, block_table)
    _check_tree_mask(query, tree_mask, options)
    return out_and_lse(query, value_cache)


@torch.library.register_fake(f"{NAMESPACE}::flash_attention_with_kvcache")
def _(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor,
    value: Tensor,
    cache_seqlens: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    tree_mask: Tensor | None = None,
    *more: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    _check_cache(query, key_cache, value_cache, cache_seqlens, block_table)
    _check_tree_mask(query, tree_mask, options)
    check(cache_seqlens is not None, _OP, "expected cache_seqlens with key, because new rows follow them, got None")
    for name, tensor, cache in (("key", key, key_cache), ("value", value, value_cache)):
        expected = (query.shape[0], key.shape[1], cache.shape[2], cache.shape[3])
        check_shape(_OP, name, tensor, expected, " to match query and the cache")
        check_same_dtype(_OP, name, tensor, "query", query)
    return out_and_lse(query, value_cache)
