"""Flash attention: softmax(scale * query @ key^T) @ value in memory linear in the sequence length, forward and
backward.

The method is FlashAttention (Dao et al., arXiv 2205.14135) with the online softmax of Milakov and Gimelshein (arXiv
1805.02867). The CPU kernels keep one block of logits per thread; gradients are summed in a fixed order, so a run
repeats bit for bit.

DTensors are split by batch and by heads, without dropout; other placements are gathered first.
"""

from __future__ import annotations

from operator import index
from typing import Any

import torch
from torch import Tensor

from cuda_ext._checks import check_constants
from cuda_ext._load import ops
from cuda_ext._rules.attention_vmap import mapped_where_masks_differ
from cuda_ext._toolchain import NAMESPACE

__all__ = ["flash_attention", "flash_attention_varlen"]

_attention = ops.flash_attention.default
_attention_varlen = ops.flash_attention_varlen.default

Window = tuple[int | None, int | None]


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
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Multi-head attention over `(batch, seq, heads, dim)` tensors.

    With `i` a query, `j` a key and `d = j - (i + Sk - Sq)` their distance from the bottom-right diagonal::

        logits = scale * query[i] . key[j];   logits = softcap * tanh(logits / softcap)   if softcap > 0
        logits += -alibi_slopes * |d|;   logits += bias[i, j]
        out[i] = dropout(softmax over the visible j of logits) @ value

    Args:
        query: `(B, Sq, H, D)`, float16 or bfloat16; on the CPU also float32 and float64. On a CUDA device D and Dv are
            multiples of 8 up to 256.
        key: `(B, Sk, Hk, D)`, dtype and device of `query`. `H` is a multiple of `Hk` (GQA, MQA): query head `h` reads
            key head `h // (H // Hk)`.
        value: `(B, Sk, Hk, Dv)`; `Dv` may differ from `D`.
        causal: hide the keys right of the diagonal, which is aligned bottom-right when `Sq != Sk`.
        window: `(left, right)`, how many keys either side of the diagonal stay visible; `None` on a side is unbounded.
            With `causal` the right side is 0 or `None`.
        scale: defaults to `1 / sqrt(D)`.
        softcap: in units of logits; 0 for none (Gemma 2, arXiv 2408.00118).
        alibi_slopes: `(H,)` or `(B, H)`, not differentiable (Press et al., arXiv 2108.12409).
        sinks: `(H,)`, a learnable logit per head that joins every row's softmax with no value behind it; `lse` includes
            it. Differentiable. Attention in parts that `lse` merges has them in one part only.
        bias: up to four dimensions that broadcast to `(B, H, Sq, Sk)`, aligned to the right, with any strides.
            Numbers, in the dtype of `query` or float32, are added to the logits, and `-inf` hides a key; they
            are differentiable. Booleans hide the keys where they are `False`, as `attn_mask` of
            `torch.nn.functional.scaled_dot_product_attention` does. Leave a dimension 1 rather than to `expand` it: the
            gradient is as large as the tensor given. Hide with `-inf`, not with a large number: in a row of nothing but
            -1e30 the logits are lost to rounding.
        dropout_p: in [0, 1). The mask is Philox4x32-10 of a seed and an offset from torch's default generator of the
            device, so `torch.manual_seed` and `torch.cuda.manual_seed` rule, and each replay of a captured CUDA graph
            draws anew. It is made again in backward instead of being stored. The same seed and offset give the same
            mask on every device, but generators of different devices draw different ones.
        deterministic: that backward gives the same bits in every run; `None` follows
            `torch.use_deterministic_algorithms`. On the CPU every call does, for a given number of threads, as does
            forward on a CUDA device. There, blocks then take turns at adding to the gradient of `query`, and that of a
            broadcast `bias` takes a float32 tensor of `(B, H, Sq, Sk)`.
        return_lse: also return `lse`, `(B, H, Sq)`, the logarithm of the sum of exponentials of each row's logits, in
            float32 (float64 for float64). Differentiable.

    Returns:
        `(B, Sq, H, Dv)` in the dtype of `query`, contiguous; with `return_lse` a pair. A row that sees no key, whether
        `causal`, `window` or `bias` hides all or there is none, gives zeros and an `lse` of `-inf`, with zero
        gradients. With sinks, which nothing hides, its `lse` is the sink.

    Any strides are read in place as long as the last dimension is dense; other tensors are made contiguous first.
    Dimensions of size 0 work. Nested tensors of layout `torch.jagged`, `(B, jagged S, H, D)` all three, without
    `bias`: `flash_attention_varlen` on their packed rows, nothing is padded; `lse` is `(B, H, jagged S)`.

    Differentiable to any order and in both modes, and under the transforms of `torch.func`. Only the first derivative
    by `backward` is fused. The others are composed of our products and PyTorch's elementwise ops, through the full
    matrix of scores, `(B, H, Sq, Sk)`. In forward mode and under `torch.func` dropout is that of
    `torch.nn.functional.dropout`.

    Raises:
        RuntimeError: wrong ranks, shapes, dtypes, devices, window, scale, softcap or dropout, naming the argument.
        NotImplementedError: a CUDA tensor where no CUDA kernel is built.
    """
    if query is not None and query.is_nested:
        options: dict[str, Any] = {"causal": causal, "window": window, "scale": scale, "softcap": softcap}
        options |= {
            "alibi_slopes": alibi_slopes,
            "sinks": sinks,
            "dropout_p": dropout_p,
            "deterministic": deterministic,
        }
        return _jagged_attention(query, key, value, bias, return_lse, options)
    has_tensors = alibi_slopes is not None or sinks is not None or bias is not None
    has_numbers = scale is not None or not (type(softcap) is type(dropout_p) is float and softcap == 0.0 == dropout_p)
    if has_tensors or has_numbers or window is not None or deterministic is not None:
        left, right = _window_sides("flash_attention", window)
        check_constants("flash_attention", scale=scale, softcap=softcap, dropout_p=dropout_p)
        if dropout_p > 0:
            query = mapped_where_masks_differ("flash_attention", query)
        out, lse = _attention(
            query,
            key,
            value,
            alibi_slopes,
            sinks,
            bias,
            causal=causal,
            window_left=left,
            window_right=right,
            scale=scale,
            softcap=softcap,
            dropout_p=dropout_p,
            deterministic=deterministic,
        )
    elif causal:
        # Each argument that reaches the dispatcher costs up to a tenth of a small call.
        out, lse = _attention(query, key, value, causal=True)
    else:
        out, lse = _attention(query, key, value)
    return (out, lse) if return_lse else out


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
    dropout_p: float = 0.0,
    deterministic: bool | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attention` over sequences of different lengths, packed one after the other without padding.

    Args:
        query: `(total_q, H, D)`: sequence `b` is rows `cu_seqlens_q[b]` to `cu_seqlens_q[b + 1]`.
        key: `(total_k, Hk, D)`, by `cu_seqlens_k`.
        value: `(total_k, Hk, Dv)`.
        cu_seqlens_q: `(batch + 1,)` int32 on the device of `query`: 0, then the running sums of the lengths, up to
            `total_q`. On the CPU the values are checked; on a GPU that would stall the stream.
        cu_seqlens_k: the same for keys. A sequence may have length 0.
        max_seqlen_q: at least the longest sequence, below 2^31; `None` takes it from `cu_seqlens_q`, for which a GPU
            has to wait.
        max_seqlen_k: the same for keys. It also sets the row pitch of the dropout numbers.

    The remaining arguments are those of `flash_attention`, which alone takes a `bias`; causal and window are aligned to
    each sequence's own bottom-right corner.

    Returns:
        `(total_q, H, Dv)`; with `return_lse` also `lse`, `(H, total_q)`.

    Raises:
        RuntimeError: as `flash_attention`; also `cu_seqlens` that do not start at 0, decrease, or do not end at the
            number of rows.
        NotImplementedError: a CUDA tensor where no CUDA kernel is built.
    """
    left, right = _window_sides("flash_attention_varlen", window)
    check_constants("flash_attention_varlen", scale=scale, softcap=softcap, dropout_p=dropout_p)
    if dropout_p > 0:
        query = mapped_where_masks_differ("flash_attention_varlen", query)
    out, lse = _attention_varlen(
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_k,
        alibi_slopes,
        sinks,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        causal=causal,
        window_left=left,
        window_right=right,
        scale=scale,
        softcap=softcap,
        dropout_p=dropout_p,
        deterministic=deterministic,
    )
    return (out, lse) if return_lse else out


def _jagged_attention(
    query: Any, key: Any, value: Any, bias: Tensor | None, return_lse: bool, options: dict[str, Any]
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attention` of `(batch, jagged seq, heads, dim)`: the packed form, which their memory has already."""
    op = f"{NAMESPACE}::flash_attention"  # not `check`, which torch.compile cannot follow
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
            f"{op}: expected value of the same sequences as key, got offsets of its own; make it with those of key "
            "(torch.nested.nested_tensor_from_jagged)"
        )
    if bias is not None:
        raise RuntimeError(f"{op}: expected bias=None with nested tensors; call it for each sequence")
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


def _window_sides(op: str, window: Window | None) -> Window:
    if window is None:
        return None, None
    try:
        left, right = window
        return _window_side(left), _window_side(right)
    except (TypeError, ValueError):
        raise RuntimeError(
            f"{NAMESPACE}::{op}: expected window to be None or (left, right), each a number of keys or None, "
            f"got {window!r}"
        ) from None


def _window_side(side: Any) -> int | None:
    return side if side is None else index(side)
