"""Fake kernels of attention: the shapes, dtypes and strides of the results, and the errors, of the real ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cuda_ext._attention_options import check_numbers
from cuda_ext._checks import (
    broadcasts_to,
    check,
    check_floating,
    check_same_device,
    check_same_dtype,
    check_shape,
    dtype_name,
    has_shape,
    shape_of,
)
from cuda_ext._toolchain import NAMESPACE


def _lse_dtype(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def _check_attention(
    op: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    attn_bias: Tensor | None = None,
    attn_mask: Tensor | None = None,
    block_keys: Tensor | None = None,
    block_queries: Tensor | None = None,
    block_tiles: Tensor | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    bias_is_relative: bool = False,
    dropout_place: Sequence[int] | None = None,
    **scalars: Any,
) -> None:
    varlen = cu_seqlens_q is not None
    _check_tensors(op, query, key, value, varlen)
    if cu_seqlens_q is None:
        batch, seqlen_q, seqlen_k = query.shape[0], query.shape[1], key.shape[1]
        check(
            key.shape[0] == batch,
            op,
            f"expected key of batch {batch} to match query {shape_of(query)}, got {shape_of(key)}",
        )
    else:
        check(cu_seqlens_k is not None, op, "expected cu_seqlens_k with cu_seqlens_q, got None")
        assert cu_seqlens_k is not None
        _check_cu_seqlens(op, query, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        batch = cu_seqlens_q.shape[0] - 1
    check_numbers(op, **scalars)

    heads = query.shape[-2]
    if alibi_slopes is not None:
        check(
            has_shape(alibi_slopes, [heads]) | has_shape(alibi_slopes, [batch, heads]),
            op,
            f"expected alibi_slopes of shape ({heads},) or ({batch}, {heads}), got {shape_of(alibi_slopes)}",
        )
        check_floating(op, "alibi_slopes", alibi_slopes)
    if sinks is not None:
        check_shape(op, "sinks", sinks, [heads])
        check_floating(op, "sinks", sinks)
    check_same_device(op, "query", query, alibi_slopes=alibi_slopes, sinks=sinks)
    full = [batch, heads, max_seqlen_q if varlen else seqlen_q, max_seqlen_k if varlen else seqlen_k]
    if attn_bias is not None:
        name = "relative_bias" if bias_is_relative else "attn_bias"
        if bias_is_relative:
            _check_relative_bias(op, attn_bias, query, full)
        else:
            _check_broadcasts(op, name, attn_bias, query, full, varlen)
        _check_bias_dtype(op, name, attn_bias, query)
    if attn_mask is not None:
        _check_broadcasts(op, "attn_mask", attn_mask, query, full, varlen)
        got = dtype_name(attn_mask.dtype)
        expected = (
            f"expected attn_mask of dtype bool, got {got}; give numbers that are added to the logits as attn_bias="
        )
        check(attn_mask.dtype == torch.bool, op, expected)
    if block_keys is not None and block_queries is not None and block_tiles is not None:
        _check_block_mask(op, block_keys, block_queries, block_tiles, query, full)
    if dropout_place is not None:
        _check_dropout_place(op, dropout_place, (heads, query.shape[0] if varlen else seqlen_q, full[-1]), varlen)


def _check_dropout_place(op: str, place: Sequence[int], own: tuple[Any, Any, Any], varlen: bool) -> None:
    """own: heads, rows and keys of the call; None, a max_seqlen_k that was not given, fits every number."""
    numbers = "(heads, first_head, rows, first_row, keys, first_key)"
    check(len(place) == 6, op, f"expected dropout_place of 6 numbers, {numbers}, got {len(place)}")
    names = ("heads", "packed rows" if varlen else "rows", "keys")
    for name, count, total, first in zip(names, own, place[::2], place[1::2], strict=True):
        expected = (
            f"expected dropout_place where the {count} {name} of the call are among those of the larger one, got "
            f"{total} with the first at {first}"
        )
        check(first >= 0, op, expected)
        check(count is None or first <= total - count, op, expected)
    expected = (
        "expected dropout_place with a first_key that is a multiple of 4, because four keys share a counter, got "
        f"{place[5]}; divide the keys at a multiple of 4"
    )
    check(place[5] % 4 == 0, op, expected)


def _check_rng_state(op: str, rng_state: Tensor, query: Tensor) -> None:
    expected = (
        f"expected rng_state of shape (2,) and dtype int64, as the forward returned it, got {shape_of(rng_state)} and "
        f"dtype {dtype_name(rng_state.dtype)}"
    )
    check(rng_state.numel() == 2 and rng_state.dtype == torch.int64, op, expected)
    check_same_device(op, "query", query, rng_state=rng_state)


def _check_block_mask(
    op: str, block_keys: Tensor, block_queries: Tensor, block_tiles: Tensor, query: Tensor, full: list[Any]
) -> None:
    check_same_device(op, "query", query, block_keys=block_keys, block_queries=block_queries, block_tiles=block_tiles)
    batch, heads, *lengths = full
    for name, lists, length in (("queries", block_keys, lengths[0]), ("keys", block_queries, lengths[1])):
        blocks = lists.shape[2] if length is None else (length + 127) // 128
        expected = (
            f"expected block_mask of batch {batch} or 1, {heads} heads or 1 and {blocks} blocks of {name} (128 rows "
            f"each), got lists of shape {shape_of(lists)}; build it for these lengths"
        )
        for size, wanted in zip(lists.shape[:2], (batch, heads), strict=True):
            check((size == 1) | (size == wanted), op, expected)
        check(lists.shape[2] == blocks, op, expected)


def _check_tensors(op: str, query: Tensor, key: Tensor, value: Tensor, varlen: bool) -> None:
    rank, layout = (3, "(total, heads, dim)") if varlen else (4, "(batch, seq, heads, dim)")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        expected = f"expected {name} of shape {layout}, got {shape_of(tensor)}"
        check(tensor.dim() == rank, op, expected)
    check_floating(op, "query", query)
    check_same_dtype(op, "key", key, "query", query)
    check_same_dtype(op, "value", value, "query", query)
    check_same_device(op, "query", query, key=key, value=value)

    heads, dim = query.shape[-2:]
    heads_kv = key.shape[-2]
    check(
        key.shape[-1] == dim,
        op,
        f"expected key of head dim {dim} to match query {shape_of(query)}, got {shape_of(key)}",
    )
    sizes = ", ".join(map(str, key.shape[:-1]))
    expected = f"expected value of shape ({sizes}, dim_v) to match key {shape_of(key)}, got {shape_of(value)}"
    for size, wanted in zip(value.shape[:-1], key.shape[:-1], strict=True):
        check(size == wanted, op, expected)
    check(
        heads % heads_kv == 0 if heads_kv != 0 else heads == 0,
        op,
        f"expected the heads of query to be a multiple of the heads of key, got {heads} and {heads_kv}",
    )


def _check_cu_seqlens(
    op: str,
    query: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> None:
    for name, cu_seqlens in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        expected = (
            f"expected {name} of shape (batch + 1,) and dtype int32, got {shape_of(cu_seqlens)} and dtype "
            f"{dtype_name(cu_seqlens.dtype)}"
        )
        fits = cu_seqlens.dim() == 1 and cu_seqlens.dtype == torch.int32
        check(fits, op, expected)
        check(cu_seqlens.shape[0] >= 1, op, expected)
        check_same_device(op, "query", query, **{name: cu_seqlens})
    check_shape(op, "cu_seqlens_k", cu_seqlens_k, cu_seqlens_q.shape, " to match cu_seqlens_q")
    most = 2**31 - 1
    for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        expected = f"expected {name} of at most {most}, all that int32 cu_seqlens can hold, got {longest}"
        check(longest is None or longest <= most, op, expected)


def _check_broadcasts(op: str, name: str, tensor: Tensor, query: Tensor, full: list[Any], varlen: bool) -> None:
    """`full`: the sizes to broadcast to; None, a max_seqlen that was not given, fits every size."""
    sizes = list(full)
    for n in range(1, min(tensor.dim(), 4) + 1):
        if sizes[-n] is None:
            sizes[-n] = tensor.shape[-n]
    layout = "max_seqlen_q, max_seqlen_k" if varlen else "seqlen_q, seqlen_k"
    check(
        broadcasts_to(tensor.shape, sizes),
        op,
        f"expected {name} of a shape that broadcasts to (batch, heads, {layout}) = {tuple(full)}, got "
        f"{shape_of(tensor)}; give it these sizes or 1, aligned to the right",
    )
    check_same_device(op, "query", query, **{name: tensor})


def _check_relative_bias(op: str, bias: Tensor, query: Tensor, full: list[Any]) -> None:
    batch, heads, *lengths = full
    expected = (
        f"expected relative_bias of a shape that broadcasts to (batch, heads, 1, distances) = ({batch}, {heads}, 1, "
        f"distances) with an odd number of distances, got {shape_of(bias)}"
    )
    check(broadcasts_to(bias.shape, [batch, heads, 1, bias.shape[-1]]), op, expected)
    check(bias.shape[-1] % 2 == 1, op, expected)
    for length in lengths:
        check(query.dim() == 3 or bias.shape[-1] >= 2 * length - 1, op, expected)
    check_same_device(op, "query", query, relative_bias=bias)


def _check_bias_dtype(op: str, name: str, bias: Tensor, query: Tensor) -> None:
    accumulation = _lse_dtype(query)
    own = "" if query.dtype == accumulation else f"{dtype_name(query.dtype)} or "
    got = dtype_name(bias.dtype)
    remedy = "give a boolean mask as attn_mask=" if bias.dtype == torch.bool else "convert it with .to()"
    check(
        bias.dtype in (query.dtype, accumulation),
        op,
        f"expected {name} of dtype {own}{dtype_name(accumulation)} to match query, got {got}; {remedy}",
    )


def _result_dtype(op: str, name: str, query: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """`dtype`, or that of query if it is None."""
    own, accumulation = query.dtype, _lse_dtype(query)
    if dtype is None:
        return own
    allowed = dtype_name(own) if own == accumulation else f"{dtype_name(own)} or {dtype_name(accumulation)}"
    expected = f"expected {name} to be None, {allowed}, got {dtype_name(dtype)}; convert the result with .to()"
    check(dtype in (own, accumulation), op, expected)
    return dtype


def out_and_lse(query: Tensor, value: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Results for a query of either form."""
    out = query.new_empty([*query.shape[:-1], value.shape[-1]], dtype=dtype)
    lse_shape = [query.shape[1], query.shape[0]] if query.dim() == 3 else [query.shape[n] for n in (0, 2, 1)]
    return out, query.new_empty(lse_shape, dtype=_lse_dtype(query))


@torch.library.register_fake(f"{NAMESPACE}::flash_attention")
def _(query: Tensor, key: Tensor, value: Tensor, *more: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    _check_attention("flash_attention", query, key, value, None, None, *more, **options)
    return out_and_lse(query, value)


@torch.library.register_fake(f"{NAMESPACE}::flash_attention_varlen")
def _(query: Tensor, key: Tensor, value: Tensor, *more: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    _check_attention("flash_attention_varlen", query, key, value, *more, **options)
    return out_and_lse(query, value)


@torch.library.register_fake(f"{NAMESPACE}::flash_attention_forward")
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None = None,
    *more: Tensor | None,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    op = "flash_attention" if cu_seqlens_q is None else "flash_attention_varlen"
    _check_attention(op, query, key, value, cu_seqlens_q, *more, dropout_p=dropout_p, **options)
    if rng_state is not None and dropout_p != 0:
        _check_rng_state(op, rng_state, query)
    dtype = _result_dtype(op, "out_dtype", query, out_dtype)
    return *out_and_lse(query, value, dtype), query.new_empty([0 if dropout_p == 0 else 2], dtype=torch.int64)


@torch.library.register_fake(f"{NAMESPACE}::draw_attention_rng")
def _(device: torch.device) -> Tensor:
    return torch.empty(2, dtype=torch.int64, device=device)


@torch.library.register_fake(f"{NAMESPACE}::flash_attention_backward")
def _(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    rng_state: Tensor | None,
    needs_grad_bias: bool = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    attn_bias: Tensor | None = None,
    *more: Tensor | None,
    grad_dtype: torch.dtype | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    op = "flash_attention_backward"
    tensors = cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks, attn_bias, *more
    _check_attention(op, query, key, value, *tensors, **options)
    check_same_device(op, "query", query, out=out, lse=lse)
    check_same_dtype(op, "out", out, "query", query)
    for name, grad, other_name, other in (("grad_out", grad_out, "out", out), ("grad_lse", grad_lse, "lse", lse)):
        if grad is not None:
            check_shape(op, name, grad, other.shape, f" to match {other_name}")
            check_same_dtype(op, name, grad, other_name, other)
            check_same_device(op, other_name, other, **{name: grad})
    if rng_state is not None and rng_state.numel() > 0 and query.device.type != "meta":  # else it lives on the CPU
        check(rng_state.device.type != "meta", op, "expected rng_state with values, got one on device meta")
    grad_sinks = lse.new_empty([0]) if sinks is None else sinks.new_empty(sinks.shape)
    grad_bias = (
        attn_bias.new_empty(attn_bias.shape) if attn_bias is not None and needs_grad_bias else lse.new_empty([0])
    )
    dtype = _result_dtype(op, "grad_dtype", query, grad_dtype)
    grad_query, grad_key, grad_value = (t.new_empty(t.shape, dtype=dtype) for t in (query, key, value))
    return grad_query, grad_key, grad_value, grad_sinks, grad_bias
