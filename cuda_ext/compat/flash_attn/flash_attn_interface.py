"""The seven attention functions of flash-attn 2.

Differences from flash-attn 2.8:

- They also run on the CPU, and in float32 and float64; head dims may be any, that of `v` another than that of `q` and
  `k`; softcap and dropout can be combined; dimensions may be 0.
- `softmax_lse` is differentiable; flash-attn ignores its gradient. It is `-inf` for a row with no visible key,
  flash-attn's is `+inf`. With ALiBi, `causal` and no window, flash-attn omits the part that is constant in a row, so
  its lse is ours plus `slope * (i + Sk - Sq)`.
- `S_dmask`, which flash-attn returns for its own tests, is None.
- A window's right side of `Sk` or more still hides keys. flash-attn ignores it, and if there are more queries than
  keys, its first rows then see keys outside the window.
- The dropout mask is that of `cuda_ext.flash_attention`.
- `deterministic=False` follows `torch.use_deterministic_algorithms`.
- `flash_attn_with_kvcache` takes pages of any size and never waits for the device. Rows without keys have an lse of
  `+inf` there, as in flash-attn.
- A packed tensor is read in place, but its gradient is stacked from its parts, a copy that flash-attn avoids.

All raise RuntimeError for wrong arguments and NotImplementedError for unsupported ones. Errors of the op call `q`, `k`,
`v`, `window_size` and `softmax_scale` by its own names: `query`, `key`, `value`, `window` and `scale`.
"""

from __future__ import annotations

from torch import Tensor

from cuda_ext.compat._flash_attn_call import attend, refuse, unpack
from cuda_ext.compat._kvcache_call import attend_to_cache, attend_varlen_to_cache

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Result = Tensor | tuple[Tensor, Tensor, None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Multi-head attention over `(batch, seqlen, heads, dim)` tensors; see `cuda_ext.flash_attention` for the formula.

    Args:
        q: `(B, Sq, H, D)`, float16, bfloat16, float32 or float64, any strides.
        k: `(B, Sk, Hk, D)`; `H` must be a multiple of `Hk`.
        v: `(B, Sk, Hk, Dv)`.
        dropout_p: in [0, 1); 0 for evaluation.
        softmax_scale: default `1 / sqrt(D)`.
        causal: hide the keys to the right of the diagonal, which is aligned bottom-right.
        window_size: `(left, right)`, the number of keys that stay visible on each side of the diagonal; -1 is
            unbounded. With `causal`, right counts as 0.
        softcap: in units of logits; 0 for none.
        alibi_slopes: `(H,)` or `(B, H)`, float32; the bias is `-slope * |i + Sk - Sq - j|`.
        deterministic: whether gradients must have the same bits in every run.
        return_attn_probs: return `(out, softmax_lse, None)`.

    Returns:
        `out`, `(B, Sq, H, Dv)`; `softmax_lse`, `(B, H, Sq)`, float32 (float64 for float64). A row with no visible key
        gives zeros.
    """
    result = attend(
        "flash_attn.flash_attn_func",
        *(q, k, v),
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        dropout_p=dropout_p,
        alibi_slopes=alibi_slopes,
    )
    return (*result, None) if return_attn_probs else result[0]


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of the key and the value in `kv`, `(B, Sk, 2, Hk, D)`, which is read in place."""
    k, v = unpack("flash_attn.flash_attn_kvpacked_func", "kv", kv, "(batch, seqlen, 2, heads, dim)")
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of the query, the key and the value in `qkv`, `(B, S, 3, H, D)`, which is read in place."""
    q, k, v = unpack("flash_attn.flash_attn_qkvpacked_func", "qkv", qkv, "(batch, seqlen, 3, heads, dim)")
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """`flash_attn_func` over sequences of different lengths, packed one after the other without padding.

    Args:
        q: `(total_q, H, D)`; sequence `b` is rows `cu_seqlens_q[b]` to `cu_seqlens_q[b + 1]`.
        k: `(total_k, Hk, D)`, divided by `cu_seqlens_k`.
        v: `(total_k, Hk, Dv)`.
        cu_seqlens_q: `(batch + 1,)`, int32, on the device of `q`: 0, then the cumulative lengths.
        cu_seqlens_k: the same for keys.
        max_seqlen_q: at least the length of the longest sequence.
        max_seqlen_k: the same for keys.
        block_table: `(batch, n)`, int32: `k` and `v` are pages, `(pages, page_size, Hk, D)`, as in
            `flash_attn_with_kvcache`, and `cu_seqlens_k` only gives the lengths. Forward only.

    The remaining arguments are those of `flash_attn_func`.

    Returns:
        `out`, `(total_q, H, Dv)`; `softmax_lse`, `(H, total_q)`, as in flash-attn since 2.6.
    """
    function = "flash_attn.flash_attn_varlen_func"
    if block_table is not None:
        if dropout_p != 0.0:
            expected = "0 with block_table, which is for inference"
            refuse(function, "dropout_p", dropout_p, expected=expected, instead="leave it out")
        out, lse = attend_varlen_to_cache(
            function,
            *(q, k, v, cu_seqlens_q, max_seqlen_q),
            cache_seqlens=cu_seqlens_k.diff(),
            block_table=block_table,
            scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
        )
        return (out, lse, None) if return_attn_probs else out
    result = attend(
        function,
        *(q, k, v, (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)),
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        dropout_p=dropout_p,
        alibi_slopes=alibi_slopes,
    )
    return (*result, None) if return_attn_probs else result[0]


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` of the key and the value in `kv`, `(total_k, 2, Hk, D)`, which is read in place."""
    k, v = unpack("flash_attn.flash_attn_varlen_kvpacked_func", "kv", kv, "(total, 2, heads, dim)")
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` of the query, the key and the value in `qkv`, `(total, 3, H, D)`, which is read in
    place; `cu_seqlens` divides all three."""
    q, k, v = unpack("flash_attn.flash_attn_varlen_qkvpacked_func", "qkv", qkv, "(total, 3, heads, dim)")
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention to a cache, into which `k` and `v` are first written: `cuda_ext.flash_attention_with_kvcache`, with the
    names of flash-attn. Forward only.

    Returns:
        `out`, `(B, Sq, H, D)`; with `return_softmax_lse` also `softmax_lse`, `(B, H, Sq)`, which is `+inf` for a row
        without keys, as in flash-attn 2.
    """
    out, lse = attend_to_cache(
        "flash_attn.flash_attn_with_kvcache",
        *(q, k_cache, v_cache),
        key=k,
        value=v,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        block_table=block_table,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        num_splits=num_splits,
    )
    return (out, lse.masked_fill(lse == -float("inf"), float("inf"))) if return_softmax_lse else out
