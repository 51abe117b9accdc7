"""Flash attention, forward and backward: softmax(scale * query @ key^T) @ value in memory linear in sequence length.

The method is FlashAttention (Dao et al., arXiv 2205.14135) with the online softmax of Milakov and Gimelshein (arXiv
1805.02867). The CPU kernels hold one block of logits per thread and sum gradients in a fixed order, so results repeat
bit for bit.

DTensors are split by batch, by heads and, once `cuda_ext.distributed.context_parallel` is imported, by the sequence of
query, key and value, without dropout; other placements are gathered first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from cuda_ext import _sequence_sharding
from cuda_ext._attention_options import Options, VarlenOptions, Window, op_arguments
from cuda_ext._load import calls, ops
from cuda_ext._relative_bias import bias_arguments
from cuda_ext._rules.attention_vmap import mapped_where_masks_differ as mapped_where_masks_differ
from cuda_ext._toolchain import NAMESPACE
from cuda_ext.block_mask import BlockMask

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["flash_attention", "flash_attention_varlen"]

# For small calls from other libraries' functions of attention: one more Python function would slow them.
attention_op = ops.flash_attention.default
heads_first_op = ops._flash_attention_heads_first.default
_attention_varlen = ops.flash_attention_varlen.default
_is_compiling = torch.compiler.is_compiling  # compilers see the ops alone, and no function of `calls`
_NO_TENSORS = (None,) * 7
_NO_NUMBERS = (None, None, None, 0.0, 0.0, None, False)


@overload
def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[Options]
) -> Tensor: ...
@overload
def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: Literal[True], **options: Unpack[Options]
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: bool, **options: Unpack[Options]
) -> Tensor | tuple[Tensor, Tensor]: ...
def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    attn_bias: Tensor | None = None,
    attn_mask: Tensor | None = None,
    relative_bias: Tensor | None = None,
    block_mask: BlockMask | None = None,
    dropout_p: float = 0.0,
    deterministic: bool | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Multi-head attention over `(batch, seq, heads, dim)` tensors.

    With query `i`, key `j` and their distance `d = j - (i + Sk - Sq)` from the bottom-right diagonal::

        logits = scale * query[i] . key[j];   logits = softcap * tanh(logits / softcap)   if softcap > 0
        logits += -alibi_slopes * |d|;   logits += attn_bias[i, j];   logits += relative_bias[R + clamp(d, -R, R)]
        out[i] = dropout(softmax over the visible j of logits) @ value

    Args:
        query: `(B, Sq, H, D)`, float16, bfloat16, float32 or float64. On a CUDA device float32 is multiplied in tf32 or
            as exactly as float32 is, by `torch.set_float32_matmul_precision`; head dims that are not multiples of 8 are
            padded, in copies. What has no kernel there is composed of products and elementwise ops, slower, in memory
            that grows with Sq + Sk: float64, head dims above 256, and backward in float32 above 128.
        key: `(B, Sk, Hk, D)`, dtype and device of `query`. `H` must be a multiple of `Hk` (GQA, MQA): query head `h`
            reads key head `h // (H // Hk)`.
        value: `(B, Sk, Hk, Dv)`; `Dv` may differ from `D`.
        causal: hide the keys to the right of the diagonal, which is aligned bottom-right if `Sq != Sk`.
        window: `(left, right)`, the number of keys that stay visible on each side of the diagonal; `None` is unbounded.
            With `causal`, right counts as 0, as in flash-attn.
        scale: default `1 / sqrt(D)`.
        softcap: in units of logits; 0 for none (Gemma 2, arXiv 2408.00118).
        alibi_slopes: `(H,)` or `(B, H)`, not differentiable (Press et al., arXiv 2108.12409).
        sinks: `(H,)`, a learnable logit per head that takes part in the softmax of every row but has no value; `lse`
            includes it. Differentiable. If attention is computed in parts that are merged by `lse`, give sinks to one
            part only.
        attn_bias: added to the logits; broadcasts to `(B, H, Sq, Sk)`, in the dtype of `query` or float32, with any
            strides. Differentiable. `-inf` hides a key. To broadcast a dimension, pass size 1 instead of calling
            `expand`: the gradient is as large as the tensor you pass. Hide keys with `-inf` or `attn_mask`, not with a
            large number: in a row where every bias is -1e30, rounding loses the logits. If its last dimension has
            another stride than 1 or 0, it is copied first; so is a mask.
        attn_mask: boolean, `True` where a key takes part; broadcasts like `attn_bias`, any strides. It has the meaning
            of a boolean `attn_mask` of `torch.nn.functional.scaled_dot_product_attention`. On a CUDA device,
            `attn_bias` and `attn_mask` together take a temporary tensor of the shape to which they broadcast.
        relative_bias: added to the logits by distance (T5, Raffel et al., arXiv 1910.10683): `(2 R + 1,)`,
            `(H or 1, 2 R + 1)` or `(B or 1, H or 1, 2 R + 1)` for any `R >= 0`, dtypes of `attn_bias`. Distances beyond
            `R` get the first or the last element. Differentiable, in memory linear in S, which the same values as
            `attn_bias` are not. Together with `attn_bias`, or on a CUDA device with `attn_mask`, it takes a temporary
            tensor of `(B or 1, H, Sq, Sk)`.
        block_mask: a `cuda_ext.BlockMask` for these lengths, whose batch and heads (of queries) may be 1. It hides keys
            in addition to `causal`, `window`, `attn_bias` and `attn_mask`. Forward and backward visit only the blocks
            that it lists. On a CPU what is hidden need not be finite. On a CUDA device NaN in keys or values of a
            listed block reaches rows that do not see it, as with other masks.
        dropout_p: probability of dropping a weight, in [0, 1). The dropout mask is Philox4x32-10 of a seed and an
            offset from torch's default generator of the device, so `torch.manual_seed` and `torch.cuda.manual_seed`
            apply, and each replay of a captured CUDA graph draws new numbers. Backward regenerates the mask instead of
            storing it. The same seed and offset give the same mask on every device, but generators of different devices
            draw different ones.
        deterministic: whether backward must give the same bits in every run; `None` follows
            `torch.use_deterministic_algorithms`. On the CPU every call does, for a given number of threads, and so does
            forward on a CUDA device. Deterministic backward on a CUDA device is slower: blocks add to the gradient of
            `query` in turn, and the gradient of a broadcast `attn_bias` needs a float32 tensor of `(B, H, Sq, Sk)`,
            that of `relative_bias` one of twice this size.
        return_lse: also return `lse`, `(B, H, Sq)`, the log-sum-exp of each row's logits, in float32 (float64 for
            float64). Differentiable.

    Returns:
        `(B, Sq, H, Dv)` in the dtype of `query`, contiguous; with `return_lse` a pair. A row that sees no key gives
        zeros, an `lse` of `-inf`, and zero gradients. With sinks, which nothing hides, its `lse` is the sink.

    Tensors of any strides are read in place if their last dimension is dense; others are made contiguous first.
    Dimensions of size 0 work. Nested tensors of layout `torch.jagged`, `(B, jagged S, H, D)` for query, key and value,
    run through `flash_attention_varlen` without padding; `attn_bias` and `attn_mask` have the shapes described there,
    and `lse` is `(B, H, jagged S)`.

    Differentiable to any order, in reverse and forward mode, and under the transforms of `torch.func`. Only the first
    derivative by `backward` is fused; the others are composed of this package's products and PyTorch's elementwise ops,
    and materialise the scores, `(B, H, Sq, Sk)`. In forward mode and under `torch.func`, dropout is that of
    `torch.nn.functional.dropout`.

    Raises:
        RuntimeError: wrong rank, shape, dtype, device, window, scale, softcap or dropout; the message names the
            argument.
        NotImplementedError: a CUDA tensor, but no CUDA kernel is built.
    """
    is_nested = query is not None and query.is_nested
    has_tensors = not (alibi_slopes is sinks is attn_bias is attn_mask is relative_bias is None and block_mask is None)
    has_numbers = scale is not None or not (type(softcap) is type(dropout_p) is float and softcap == 0.0 == dropout_p)
    if has_tensors or has_numbers or window is not None or deterministic is not None or is_nested:
        options: Options = {
            "causal": causal,
            "window": window,
            "scale": scale,
            "softcap": softcap,
            "alibi_slopes": alibi_slopes,
            "sinks": sinks,
            "attn_bias": attn_bias,
            "attn_mask": attn_mask,
            "relative_bias": relative_bias,
            "block_mask": block_mask,
            "dropout_p": dropout_p,
            "deterministic": deterministic,
        }
        if is_nested:
            return _jagged_attention(query, key, value, return_lse, options)
        pair = None if type(query) is Tensor else _split_attention(query, key, value, options)
        if pair is None:
            pair = _call("flash_attention", attention_op, query, key, value, **options)
    else:
        pair = NotImplemented
        if not _is_compiling():
            pair = calls.flash_attention(query, key, value, *_NO_TENSORS, causal, *_NO_NUMBERS)
        if pair is NotImplemented:
            pair = _split_attention(query, key, value, {"causal": causal})
            if pair is None:
                pair = attention_op(query, key, value, causal=causal)
    out, lse = pair
    return (out, lse) if return_lse else out


@overload
def flash_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[VarlenOptions],
) -> Tensor: ...
@overload
def flash_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[VarlenOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    return_lse: bool,
    **options: Unpack[VarlenOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
def flash_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    attn_bias: Tensor | None = None,
    attn_mask: Tensor | None = None,
    relative_bias: Tensor | None = None,
    block_mask: BlockMask | None = None,
    dropout_p: float = 0.0,
    deterministic: bool | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attention` over sequences of different lengths, packed one after the other without padding.

    Args:
        query: `(total_q, H, D)`; sequence `b` is rows `cu_seqlens_q[b]` to `cu_seqlens_q[b + 1]`.
        key: `(total_k, Hk, D)`, divided by `cu_seqlens_k`.
        value: `(total_k, Hk, Dv)`.
        cu_seqlens_q: `(B + 1,)`, int32, on the device of `query`: 0, then the cumulative lengths, at most `total_q`.
            The values are checked on the CPU only; on a GPU that would stall the stream.
        cu_seqlens_k: the same for keys. A sequence may have length 0. Rows of any tensor after the last sequence are
            not read; they give zeros, an `lse` of `-inf` and zero gradients.
        max_seqlen_q: at least the length of the longest sequence, below 2^31. `None` computes it from `cu_seqlens_q`,
            which on a GPU waits for the stream.
        max_seqlen_k: the same for keys. It also sets the row pitch of the dropout numbers.
        attn_bias: broadcasts to `(B, H, max_seqlen_q, max_seqlen_k)`; `attn_bias[b, h, i, j]` belongs to query `i` and
            key `j` of sequence `b`, both counted within the sequence. Elements past the end of a sequence are not read,
            and their gradients are 0.
        attn_mask: the same, boolean.
        relative_bias: as in `flash_attention`, by the distance `j - (i + Sk - Sq)` within a sequence. Not together with
            `attn_bias`.
        block_mask: a `cuda_ext.BlockMask` for `max_seqlen_q` queries and `max_seqlen_k` keys, of batch `B` or 1; both
            are counted within their sequence.

    The remaining arguments are those of `flash_attention`; causal and window are aligned to the bottom-right corner of
    each sequence.

    Returns:
        `(total_q, H, Dv)`; with `return_lse` also `lse`, `(H, total_q)`.

    Raises:
        RuntimeError: as `flash_attention`; also for `cu_seqlens` that do not start at 0, decrease, or exceed the number
            of rows.
        NotImplementedError: a CUDA tensor, but no CUDA kernel is built.
    """
    out, lse = _call(
        "flash_attention_varlen",
        _attention_varlen,
        *(query, key, value, cu_seqlens_q, cu_seqlens_k),
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        attn_bias=attn_bias,
        attn_mask=attn_mask,
        relative_bias=relative_bias,
        block_mask=block_mask,
        dropout_p=dropout_p,
        deterministic=deterministic,
    )
    return (out, lse) if return_lse else out


def _split_attention(
    query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]
) -> tuple[Tensor, Tensor] | None:
    """Of DTensors whose sequence is split; None for all else."""
    function = _sequence_sharding.attention_of_dtensors
    return None if function is None else function(query, key, value, options)


def _call(name: str, op: Any, query: Tensor, *more: Tensor, **options: Unpack[VarlenOptions]) -> tuple[Tensor, Tensor]:
    arguments: dict[str, Any] = dict(options)
    if (table := arguments.pop("relative_bias", None)) is not None and query is not None and more[0] is not None:
        longest = (options.get("max_seqlen_q"), options.get("max_seqlen_k"))
        arguments |= bias_arguments(name, table, options.get("attn_bias"), query, more[0], *longest)
    tensors, scalars = op_arguments(name, arguments)
    mask = options.get("block_mask")
    if mask is not None and op is attention_op:
        _check_lengths(name, mask, query, more[0])
    if scalars["dropout_p"] > 0:
        query = mapped_where_masks_differ(name, query)
    out, lse = op(query, *more, *tensors, **scalars)
    return out, lse


def _check_lengths(name: str, mask: BlockMask, query: Tensor, key: Tensor) -> None:
    if query.dim() != 4 or key.dim() != 4 or mask.seq_lengths == (query.shape[1], key.shape[1]):
        return
    raise RuntimeError(
        f"{NAMESPACE}::{name}: expected block_mask for {query.shape[1]} queries and {key.shape[1]} keys, got one for "
        f"{mask.seq_lengths[0]} and {mask.seq_lengths[1]}; build it for these lengths"
    )


def _jagged_attention(
    query: Any, key: Any, value: Any, return_lse: bool, options: Options
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attention` of `(batch, jagged seq, heads, dim)`, whose memory has the packed form already."""
    op = f"{NAMESPACE}::flash_attention"
    # Raised directly because torch.compile cannot trace `check`.
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        is_jagged = tensor.is_nested and tensor.layout == torch.jagged and tensor.dim() == 4
        if not (is_jagged and tensor._ragged_idx == 1 and tensor.lengths() is None):
            layout = tensor.layout if tensor.is_nested else "not nested"
            raise RuntimeError(
                f"{op}: expected query, key and value to be contiguous nested tensors of layout torch.jagged and shape "
                f"(batch, jagged seq, heads, dim), got {name} with {tensor.dim()} dimensions, {layout}"
            )
    if key.shape[1] != value.shape[1]:
        raise RuntimeError(
            f"{op}: expected value with the same offsets as key, got others; create it with those of key "
            "(torch.nested.nested_tensor_from_jagged)"
        )
    offsets = query.offsets()
    result = flash_attention_varlen(
        query.values(),
        key.values(),
        value.values(),
        offsets.int(),
        key.offsets().int(),
        max_seqlen_q=query._maybe_max_seqlen,
        max_seqlen_k=key._maybe_max_seqlen,
        return_lse=True,
        **options,
    )
    known = {"min_seqlen": query._maybe_min_seqlen, "max_seqlen": query._maybe_max_seqlen}
    out = torch.nested.nested_tensor_from_jagged(result[0], offsets, **known)
    if not return_lse:
        return out
    return out, torch.nested.nested_tensor_from_jagged(result[1], offsets, jagged_dim=2, **known)
