"""The Python interface of flash-attn's Hopper package, FlashAttention-3, on `cuda_ext.flash_attention`.

Put `cuda_ext.compat.` before `flash_attn_interface` in an import, and the rest of a program stays. Names, order and
defaults of the arguments are those of `hopper/flash_attn_interface.py` since 2025-08-29, when `return_attn_probs` came;
before, these functions always returned `(out, softmax_lse)`, for which a program now sets it.

Where they differ from FlashAttention-3:

- They also run on the CPU, there in float32 and float64 too; `v` may have any head dim; a dimension may be 0.
- `softmax_lse` is differentiable; FlashAttention-3 ignores its gradient.
- `num_splits`, `pack_gqa` and `sm_margin` tune the speed of its kernels, and have no effect here.
- `qv`, `q_descale`, `k_descale`, `v_descale` and `attention_chunk` would change the result; anything but their
  defaults raises NotImplementedError.
- What `seqused_q` leaves out is zeros here, and not written there.
- `deterministic=False` follows `torch.use_deterministic_algorithms`.
- A packed tensor is read in place, but its gradient is put together from its parts, one copy more than there.

Errors are those of `cuda_ext.compat.flash_attn.flash_attn_interface`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cuda_ext.compat._flash_attn_call import attend, refuse, unpack

__all__ = ["flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func"]

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
        q: `(B, Sq, H, D)`, float16 or bfloat16; on the CPU also float32 and float64. A head dim that is not a multiple
            of 8 is padded with zeros, in copies; otherwise any strides with a dense last dimension are read in place.
        k: `(B, Sk, Hk, D)`; `H` is a multiple of `Hk`.
        v: `(B, Sk, Hk, Dv)`; `Dv` may differ from `D`.
        softmax_scale: None for `1 / sqrt(D)`.
        causal: hide the keys right of the diagonal, which is aligned bottom-right.
        qv, q_descale, k_descale, v_descale: have to be None.
        window_size: `(left, right)`, how many keys either side of the diagonal stay visible; -1 is unbounded. With
            `causal` nothing to the right is visible, whatever `right` is.
        attention_chunk: has to be 0.
        softcap: in units of logits; 0 for none.
        num_splits, pack_gqa, sm_margin: no effect.
        deterministic: True asks for gradients that repeat bit for bit.
        return_attn_probs: return `(out, softmax_lse)`.

    Returns:
        `out`, `(B, Sq, H, Dv)`; `softmax_lse`, `(B, H, Sq)`, float32 (float64 for float64). A row with no visible key
        gives zeros.
    """
    function = "flash_attn_interface.flash_attn_func"
    _refuse_unsupported(function, qv, q_descale, k_descale, v_descale, attention_chunk)
    pair = attend(
        function,
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
    )
    return pair if return_attn_probs else pair[0]


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
    with `num_heads_q`, `(B, S, H + 2 Hk, D)`, in which the first `H = num_heads_q` heads are the query's."""
    function = "flash_attn_interface.flash_attn_qkvpacked_func"
    _refuse_unsupported(function, None, q_descale, k_descale, v_descale, attention_chunk)
    if qkv.dim() == 4:
        q, k, v = _split_heads(function, qkv, num_heads_q)
    else:
        q, k, v = unpack(function, "qkv", qkv, "(batch, seqlen, 3, heads, dim)")
    pair = attend(
        function,
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
    )
    return pair if return_attn_probs else pair[0]


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
        q: `(total_q, H, D)`: sequence `b` is rows `cu_seqlens_q[b]` to `cu_seqlens_q[b + 1]`.
        k: `(total_k, Hk, D)`, by `cu_seqlens_k`.
        v: `(total_k, Hk, Dv)`.
        cu_seqlens_q: `(batch + 1,)` int32 on the device of `q`: 0, then the running sums of the lengths.
        cu_seqlens_k: the same for keys.
        max_seqlen_q: at least the longest sequence.
        max_seqlen_k: the same for keys.
        seqused_q: `(batch,)` int32: only so many rows at the start of each sequence are used. Diagonals go by the used
            lengths. The other rows give zeros, an lse of `-inf` and zero gradients. On the CPU the values are checked;
            on a GPU that would stall the stream.
        seqused_k: the same for keys.

    The remaining arguments are those of `flash_attn_func`.

    Returns:
        `out`, `(total_q, H, Dv)`; `softmax_lse`, `(H, total_q)`.
    """
    function = "flash_attn_interface.flash_attn_varlen_func"
    _refuse_unsupported(function, qv, q_descale, k_descale, v_descale, attention_chunk)
    if seqused_q is not None or seqused_k is not None:
        used_q = _end_of_used(function, "q", seqused_q, cu_seqlens_q)
        used_k = _end_of_used(function, "k", seqused_k, cu_seqlens_k)
        # Each sequence becomes three: what is used, the other queries without keys, the other keys without queries.
        cu_seqlens_q = _boundaries(cu_seqlens_q, used_q, cu_seqlens_q[1:])
        cu_seqlens_k = _boundaries(cu_seqlens_k, used_k, used_k)
    pair = attend(
        function,
        q,
        k,
        v,
        {
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_k": cu_seqlens_k,
            "max_seqlen_q": max_seqlen_q,
            "max_seqlen_k": max_seqlen_k,
        },
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
    )
    return pair if return_attn_probs else pair[0]


def _refuse_unsupported(
    function: str,
    qv: Tensor | None,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    attention_chunk: int,
) -> None:
    if qv is not None:
        instead = "pass torch.cat([q, qv], -1) as q and torch.cat([k, v], -1) as k, which gives the same logits"
        refuse(function, "qv", qv, expected="None", instead=instead)
    for name, scale in (("q_descale", q_descale), ("k_descale", k_descale), ("v_descale", v_descale)):
        if scale is not None:
            instead = f"scale {name[0]} itself and convert it to bfloat16 or float16"
            refuse(function, name, scale, expected="None, as float8 is not supported", instead=instead)
    if attention_chunk != 0:
        instead = "with as many queries as keys, pass each chunk as a sequence of its own to flash_attn_varlen_func"
        refuse(function, "attention_chunk", attention_chunk, expected="0", instead=instead)


def _split_heads(function: str, qkv: Tensor, heads_q: int | None) -> tuple[Tensor, ...]:
    heads = qkv.shape[2]
    if heads_q is None or not 0 <= heads_q <= heads or (heads - heads_q) % 2:
        raise RuntimeError(
            f"cuda_ext.compat.{function}: expected num_heads_q to leave an even number of the {heads} heads of qkv "
            f"{tuple(qkv.shape)} to key and value, got {heads_q}; a qkv without it is (batch, seqlen, 3, heads, dim)"
        )
    heads_k = (heads - heads_q) // 2
    return qkv.split([heads_q, heads_k, heads_k], dim=2)


def _end_of_used(function: str, which: str, used: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """The packed row behind the last that is used, of each sequence."""
    if used is None:
        return cu_seqlens[1:]
    lengths = cu_seqlens.diff()
    if used.shape != lengths.shape or used.dtype != torch.int32 or used.device != cu_seqlens.device:
        raise RuntimeError(
            f"cuda_ext.compat.{function}: expected seqused_{which} of shape {tuple(lengths.shape)}, int32, on "
            f"{cu_seqlens.device} to match cu_seqlens_{which}, got {tuple(used.shape)}, {used.dtype}, on {used.device}"
        )
    # Where nobody looks here, the op finds cu_seqlens that decrease.
    if used.is_cpu and not torch.compiler.is_compiling() and bool(((used < 0) | (used > lengths)).any()):
        raise RuntimeError(
            f"cuda_ext.compat.{function}: expected seqused_{which} between 0 and the lengths of cu_seqlens_{which}, "
            f"{lengths.tolist()}, got {used.tolist()}"
        )
    return cu_seqlens[:-1] + used


def _boundaries(cu_seqlens: Tensor, first_end: Tensor, second_end: Tensor) -> Tensor:
    """The cu_seqlens of sequences that are divided in three."""
    return torch.cat([cu_seqlens[:1], torch.stack([first_end, second_end, cu_seqlens[1:]], dim=1).flatten()])
