"""The Python interface of flash-attn's Hopper package, FlashAttention-3, on top of `cuda_ext.flash_attention`.

Put `cuda_ext.compat.` before `flash_attn_interface` in imports; the rest of a program stays the same. Names, order and
defaults of the arguments are those of `hopper/flash_attn_interface.py` since 2025-08-29, which added
`return_attn_probs`. Before, these functions always returned `(out, softmax_lse)`; now set `return_attn_probs=True`.

Differences from FlashAttention-3:

- They also run on the CPU, and in float32 and float64; head dims may be any; dimensions may be 0.
- `softmax_lse` is differentiable; FlashAttention-3 ignores its gradient.
- `num_splits`, `pack_gqa` and `sm_margin` tune the speed of FlashAttention-3's kernels and have no effect here.
- `q_descale`, `k_descale` and `v_descale` would change the result; values other than None raise NotImplementedError. So
  does `attention_chunk` with a cache; elsewhere it is a `cuda_ext.BlockMask.chunks`.
- `qv` works on every device and with gradients; keys and values are concatenated, in a copy. Not with new keys for a
  cache.
- `flash_attn_with_kvcache` takes no packed new keys, and its `softmax_lse` is all that it returns besides `out`.
- Rows of the output that `seqused_q` excludes are zeros; FlashAttention-3 does not write them.
- `deterministic=False` follows `torch.use_deterministic_algorithms`.
- A packed tensor is read in place, but its gradient is stacked from its parts, a copy that FlashAttention-3 avoids.

Errors are those of `cuda_ext.compat.flash_attn.flash_attn_interface`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from cuda_ext.block_mask import BlockMask
from cuda_ext.compat._flash_attn_call import attend, refuse, unpack
from cuda_ext.compat._kvcache_call import attend_to_cache, attend_varlen_to_cache

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
]

Result = Tensor | tuple[Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """Multi-head attention over `(batch, seqlen, heads, dim)` tensors; see `cuda_ext.flash_attention` for the formula.

    Args:
        q: `(B, Sq, H, D)`, float16, bfloat16, float32 or float64, any strides.
        k: `(B, Sk, Hk, D)`; `H` must be a multiple of `Hk`.
        v: `(B, Sk, Hk, Dv)`; `Dv` may differ from `D`.
        softmax_scale: default `1 / sqrt(D)`, with `qv` `1 / sqrt(D + Dv)`.
        causal: hide the keys to the right of the diagonal, which is aligned bottom-right.
        qv: `(B, Sq, H, Dv)`, added to the logits before the scale as `qv[i] . v[j]` (DeepSeek's MLA, where `v` is the
            latent and `q`, `k` are what is rotated).
        q_descale, k_descale, v_descale: must be None.
        window_size: `(left, right)`, the number of keys that stay visible on each side of the diagonal; -1 is
            unbounded. With `causal`, right counts as 0.
        attention_chunk: 0, or queries see only the keys of their own chunk of so many positions (Llama 4).
        softcap: in units of logits; 0 for none.
        num_splits, pack_gqa, sm_margin: no effect.
        deterministic: whether gradients must have the same bits in every run.
        return_attn_probs: return `(out, softmax_lse)`.

    Returns:
        `out`, `(B, Sq, H, Dv)`; `softmax_lse`, `(B, H, Sq)`, float32 (float64 for float64). A row with no visible key
        gives zeros.
    """
    function = "flash_attn_interface.flash_attn_func"
    _refuse_unsupported(function, q_descale, k_descale, v_descale)
    q, k = _with_qv(function, q, k, v, qv)
    result = attend(
        function,
        *(q, k, v),
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        block_mask=_chunks(function, q, k, attention_chunk),
    )
    return result if return_attn_probs else result[0]


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of the query, the key and the value in `qkv`, which is read in place: `(B, S, 3, H, D)` or,
    with `num_heads_q`, `(B, S, H + 2 Hk, D)`, where the first `H = num_heads_q` heads are the query's."""
    function = "flash_attn_interface.flash_attn_qkvpacked_func"
    _refuse_unsupported(function, q_descale, k_descale, v_descale)
    if qkv.dim() == 4:
        q, k, v = _split_heads(function, qkv, num_heads_q)
    else:
        q, k, v = unpack(function, "qkv", qkv, "(batch, seqlen, 3, heads, dim)")
    result = attend(
        function,
        *(q, k, v),
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        block_mask=_chunks(function, q, k, attention_chunk),
    )
    return result if return_attn_probs else result[0]


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
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
        seqused_q: `(batch,)`, int32: the number of rows at the start of each sequence that are used. Diagonals are
            aligned to the used lengths. The other rows give zeros, an lse of `-inf` and zero gradients. The values are
            checked on the CPU only; on a GPU that would stall the stream.
        seqused_k: the same for keys.

    The remaining arguments are those of `flash_attn_func`.

    Returns:
        `out`, `(total_q, H, Dv)`; `softmax_lse`, `(H, total_q)`.
    """
    function = "flash_attn_interface.flash_attn_varlen_func"
    _refuse_unsupported(function, q_descale, k_descale, v_descale)
    q, k = _with_qv(function, q, k, v, qv)
    if seqused_q is not None or seqused_k is not None:
        used_q = _end_of_used(function, "q", seqused_q, cu_seqlens_q)
        used_k = _end_of_used(function, "k", seqused_k, cu_seqlens_k)
        # Each sequence becomes three: the used rows, the unused queries without keys, the unused keys without queries.
        cu_seqlens_q = _boundaries(cu_seqlens_q, used_q, cu_seqlens_q[1:])
        cu_seqlens_k = _boundaries(cu_seqlens_k, used_k, used_k)
    result = attend(
        function,
        *(q, k, v, (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)),
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        block_mask=_chunks_of_sequences(
            function, (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), attention_chunk
        ),
    )
    return result if return_attn_probs else result[0]


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Result:
    """Attention to a cache, into which `k` and `v` are first written: `cuda_ext.flash_attention_with_kvcache`, with the
    names of FlashAttention-3. Forward only.

    Args:
        q: `(B, Sq, H, D)`; with `cu_seqlens_q` and `max_seqlen_q` packed, `(total_q, H, D)`, without `k`.
        page_table: `(B, n)`, int32: the caches are pages.
        rotary_seqlens: `(B,)`, int32: the position of the first new key and query, instead of `cache_seqlens`.
        qv: as in `flash_attn_func`, without `k`; the caches are concatenated, in a copy.
        q_descale, k_descale, v_descale, cu_seqlens_k_new: must be None; attention_chunk: must be 0.
        scheduler_metadata, pack_gqa, sm_margin: no effect.

    Returns:
        `out`, `(B, Sq, H, Dv)`; with `return_softmax_lse` also `softmax_lse`, `(B, H, Sq)`, `-inf` for a row without
        keys. For packed queries `(total_q, H, Dv)` and `(H, total_q)`.
    """
    function = "flash_attn_interface.flash_attn_with_kvcache"
    _refuse_unsupported(function, q_descale, k_descale, v_descale)
    if attention_chunk != 0:
        instead = "attend to the cache from the first key of the chunk on, by cache_leftpad"
        refuse(function, "attention_chunk", attention_chunk, expected="0 with a cache", instead=instead)
    if qv is not None and k is not None:
        instead = "write the new keys and values into the cache yourself, and pass the new cache_seqlens"
        refuse(function, "k", k, expected="None with qv", instead=instead)
    q, k_cache = _with_qv(function, q, k_cache, v_cache, qv)
    if cu_seqlens_k_new is not None:
        instead = "write packed keys into the cache yourself, and pass k=None and the new cache_seqlens"
        refuse(function, "cu_seqlens_k_new", cu_seqlens_k_new, expected="None", instead=instead)
    options: dict[str, Any] = {
        "cache_seqlens": cache_seqlens,
        "cache_batch_idx": cache_batch_idx,
        "cache_leftpad": cache_leftpad,
        "block_table": page_table,
        "scale": softmax_scale,
        "causal": causal,
        "window_size": window_size,
        "softcap": softcap,
        "num_splits": num_splits,
    }
    if cu_seqlens_q is not None:
        if k is not None:
            instead = "write the new keys and values into the cache yourself, and pass the new cache_seqlens"
            refuse(function, "k", k, expected="None with cu_seqlens_q", instead=instead)
        if max_seqlen_q is None:
            raise RuntimeError(f"cuda_ext.compat.{function}: expected max_seqlen_q with cu_seqlens_q, got None")
        result = attend_varlen_to_cache(function, q, k_cache, v_cache, cu_seqlens_q, max_seqlen_q, **options)
    else:
        options |= {"key": k, "value": v, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin}
        options |= {"rotary_interleaved": rotary_interleaved, "rotary_positions": rotary_seqlens}
        result = attend_to_cache(function, q, k_cache, v_cache, **options)
    return result if return_softmax_lse else result[0]


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Combines attention to parts of the keys, each normalised by its own lse.

    Args:
        out_partial: `(splits, B, S, H, D)` or `(splits, total, H, D)`, float32.
        lse_partial: `(splits, B, S, H)` or `(splits, total, H)`, float32; `-inf` for rows without keys.
        out: where to store the result. out_dtype: its dtype without `out`, default that of `out_partial`.

    Returns:
        `out`, `(B, S, H, D)` or `(total, H, D)`, and `lse`, the shape of one part of `lse_partial`.
    """
    if lse_partial.shape != out_partial.shape[:-1]:
        raise RuntimeError(
            "cuda_ext.compat.flash_attn_interface.flash_attn_combine: expected lse_partial of shape "
            f"{tuple(out_partial.shape[:-1])} to match out_partial, got {tuple(lse_partial.shape)}"
        )
    lse = lse_partial.logsumexp(0)
    shares = torch.where(lse == -torch.inf, 0.0, (lse_partial - lse).exp()).unsqueeze(-1)
    # Parts without keys may have any values.
    combined = torch.where(shares == 0, 0.0, shares * out_partial).sum(0)
    if out is None:
        return combined.to(out_dtype or out_partial.dtype), lse
    return out.copy_(combined), lse


def _with_qv(function: str, q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None) -> tuple[Tensor, Tensor]:
    """Queries and keys whose products are `q . k + qv . v`."""
    if qv is None:
        return q, k
    if qv.shape != (*q.shape[:-1], v.shape[-1]):
        raise RuntimeError(
            f"cuda_ext.compat.{function}: expected qv of shape {(*q.shape[:-1], v.shape[-1])} to match q and v, got "
            f"{tuple(qv.shape)}"
        )
    return torch.cat([q, qv], -1), torch.cat([k, v], -1)


def _refuse_unsupported(
    function: str, q_descale: Tensor | None, k_descale: Tensor | None, v_descale: Tensor | None
) -> None:
    for name, scale in (("q_descale", q_descale), ("k_descale", k_descale), ("v_descale", v_descale)):
        if scale is not None:
            instead = f"scale {name[0]} itself and convert it to bfloat16 or float16"
            refuse(function, name, scale, expected="None, because float8 is not supported", instead=instead)


def _chunks(function: str, q: Tensor, k: Tensor, attention_chunk: int) -> BlockMask | None:
    if attention_chunk == 0 or q.numel() == 0 or k.numel() == 0:
        return None
    _check_chunk(function, attention_chunk)
    return _cached_chunks(q.shape[1], k.shape[1], attention_chunk, q.device)


@functools.lru_cache(maxsize=8)  # the layers of a model have the same
def _cached_chunks(seqlen_q: int, seqlen_k: int, size: int, device: torch.device) -> BlockMask:
    return BlockMask.chunks(seqlen_q, seqlen_k, size, device=device)


def _chunks_of_sequences(
    function: str, sequences: tuple[Tensor, Tensor, int, int], attention_chunk: int
) -> BlockMask | None:
    cu_seqlens_q, cu_seqlens_k, longest_q, longest_k = sequences
    if attention_chunk == 0 or longest_q == 0 or longest_k == 0 or len(cu_seqlens_q) < 2:
        return None
    _check_chunk(function, attention_chunk)
    lengths_q, lengths_k = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    return BlockMask.chunks(longest_q, longest_k, attention_chunk, q_lengths=lengths_q, k_lengths=lengths_k)


def _check_chunk(function: str, attention_chunk: int) -> None:
    if type(attention_chunk) is not int or attention_chunk < 0:
        raise RuntimeError(
            f"cuda_ext.compat.{function}: expected attention_chunk to be a number of positions, or 0 for none, got "
            f"{attention_chunk!r}"
        )


def _split_heads(function: str, qkv: Tensor, heads_q: int | None) -> tuple[Tensor, ...]:
    heads = qkv.shape[2]
    if heads_q is None or not 0 <= heads_q <= heads or (heads - heads_q) % 2:
        raise RuntimeError(
            f"cuda_ext.compat.{function}: expected num_heads_q such that an even number of the {heads} heads of qkv "
            f"{tuple(qkv.shape)} remain for key and value, got {heads_q}; without num_heads_q, qkv is "
            "(batch, seqlen, 3, heads, dim)"
        )
    heads_k = (heads - heads_q) // 2
    return qkv.split([heads_q, heads_k, heads_k], dim=2)


def _end_of_used(function: str, which: str, used: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """For each sequence, the packed row after the last used one."""
    if used is None:
        return cu_seqlens[1:]
    lengths = cu_seqlens.diff()
    if used.shape != lengths.shape or used.dtype != torch.int32 or used.device != cu_seqlens.device:
        raise RuntimeError(
            f"cuda_ext.compat.{function}: expected seqused_{which} of shape {tuple(lengths.shape)}, int32, on "
            f"{cu_seqlens.device} to match cu_seqlens_{which}, got {tuple(used.shape)}, {used.dtype}, on {used.device}"
        )
    # Values that are not checked here make cu_seqlens decrease, which the op refuses.
    if used.is_cpu and not torch.compiler.is_compiling() and bool(((used < 0) | (used > lengths)).any()):
        raise RuntimeError(
            f"cuda_ext.compat.{function}: expected seqused_{which} between 0 and the lengths of cu_seqlens_{which}, "
            f"{lengths.tolist()}, got {used.tolist()}"
        )
    return cu_seqlens[:-1] + used


def _boundaries(cu_seqlens: Tensor, first_end: Tensor, second_end: Tensor) -> Tensor:
    """The cu_seqlens after dividing each sequence in three."""
    return torch.cat([cu_seqlens[:1], torch.stack([first_end, second_end, cu_seqlens[1:]], dim=1).flatten()])
