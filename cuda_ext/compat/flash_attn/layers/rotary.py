"""Rotary position embeddings (Su et al., arXiv 2104.09864) under flash-attn's names, made of PyTorch's ops.

Differences from flash-attn: they run on every device and for every dtype, and are differentiable to any order, also
with respect to `cos` and `sin`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cuda_ext._tables import KeptTables

__all__ = [
    "RotaryEmbedding",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
]


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotates the first `R` elements of each head by the angles of the token's position, in float32.

    Args:
        x: `(B, S, H, D)`; with `cu_seqlens` packed, `(total, H, D)`.
        cos: `(positions, R / 2)`, `R <= D`. Tokens beyond the table are not rotated.
        sin: the same.
        interleaved: rotate the pairs (0, 1), (2, 3), ... (GPT-J) instead of (i, i + R / 2) (GPT-NeoX, Llama). The
            default is the opposite of `flash_attn_with_kvcache`'s, as in flash-attn.
        inplace: write the result to `x`.
        seqlen_offsets: the position of the first token, for all sequences or `(B,)`.
        cu_seqlens: `(B + 1,)`, int32: sequence `b` is rows `cu_seqlens[b]` to `cu_seqlens[b + 1]`. Rows after the last
            sequence are not rotated.
        max_seqlen: no effect.

    Returns:
        The shape of `x`; `x` itself with `inplace`.

    Raises:
        RuntimeError: shapes that do not match.
    """
    name = "cuda_ext.compat.flash_attn.layers.rotary.apply_rotary_emb"
    if x.dim() != (4 if cu_seqlens is None else 3):
        layout = "(batch, seqlen, heads, dim)" if cu_seqlens is None else "(total, heads, dim), with cu_seqlens"
        raise RuntimeError(f"{name}: expected x of shape {layout}, got {tuple(x.shape)}")
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > x.shape[-1]:
        raise RuntimeError(
            f"{name}: expected cos and sin of shape (positions, rotary_dim / 2) with rotary_dim up to {x.shape[-1]}, "
            f"got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    position = _positions(x, seqlen_offsets, cu_seqlens)
    width = 2 * cos.shape[1]
    part = x[..., :width].float()
    first, second = (part[..., 0::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    if len(cos) == 0:
        c, s = first.new_ones(()), first.new_zeros(())
    else:
        inside = (position < len(cos)).unsqueeze(-1)
        rows = position.clamp(max=len(cos) - 1)
        c = torch.where(inside, cos.float()[rows], 1.0).unsqueeze(-2)
        s = torch.where(inside, sin.float()[rows], 0.0).unsqueeze(-2)
    rotated = (first * c - second * s, first * s + second * c)
    result = (torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)).to(x.dtype)
    if inplace:
        x[..., :width].copy_(result)
        return x
    return torch.cat([result, x[..., width:]], -1)


apply_rotary_emb_func = apply_rotary_emb


def _positions(x: Tensor, offsets: int | Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Of every token: `(S,)` or `(B, S)`; for packed sequences `(total,)`, beyond any table after the last one."""
    if cu_seqlens is None:
        position = torch.arange(x.shape[1], device=x.device)
        return position + offsets.unsqueeze(1) if isinstance(offsets, Tensor) else position + offsets
    position = torch.arange(x.shape[0], device=x.device)
    sequence = torch.searchsorted(cu_seqlens[1:].long(), position, right=True)
    position = (
        position - cu_seqlens[sequence] + (F.pad(offsets, (0, 1))[sequence] if isinstance(offsets, Tensor) else offsets)
    )
    return torch.where(sequence < len(cu_seqlens) - 1, position, torch.iinfo(position.dtype).max)


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotates query and key in `qkv`, in place.

    Args:
        qkv: `(B, S, 3, H, D)`; with `num_heads_q`, `(B, S, H + 2 Hk, D)`, where the first heads are the query's.
        cos_k, sin_k: other tables for the key.

    The remaining arguments are those of `apply_rotary_emb`. Returns `qkv`.
    """
    if qkv.dim() == 5:
        query, key = qkv[:, :, 0], qkv[:, :, 1]
    elif num_heads_q is None:
        raise RuntimeError(
            "cuda_ext.compat.flash_attn.layers.rotary.apply_rotary_emb_qkv_: expected num_heads_q for qkv of shape "
            f"{tuple(qkv.shape)}, got None"
        )
    else:
        heads_k = (qkv.shape[2] - num_heads_q) // 2
        query, key = qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + heads_k]
    apply_rotary_emb(query, cos, sin, interleaved, True, seqlen_offsets)
    cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    apply_rotary_emb(key, cos_k, sin_k, interleaved, True, seqlen_offsets)
    return qkv


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Rotates the key in `kv`, `(B, S, 2, H, D)`, in place. The arguments are those of `apply_rotary_emb`."""
    apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)
    return kv


class RotaryEmbedding(nn.Module):
    """Rotates query and key by angles that it computes.

    Args:
        dim: elements of a head that are rotated.
        base: the angle of pair `i` at position `n` is `n * base ** (-2 i / dim)`.
        interleaved: as in `apply_rotary_emb`.
        scale_base: not None: XPos (Sun et al., arXiv 2212.10554), which also scales query and key by powers that cancel
            but for their distance; 512 is a good value.
    """

    inv_freq: Tensor

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        self.register_buffer("inv_freq", self._frequencies(device), persistent=False)
        self._kept = KeptTables(doubles=scale_base is None)  # scales depend on the length of the table

    def _frequencies(self, device: torch.device | str | None) -> Tensor:
        return self.base ** (-torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim)

    def tables(self, positions: int, like: Tensor) -> tuple[Tensor, ...]:
        """(cos, sin) of query and key or, with XPos, (cos, sin, cos of the key, sin of the key), as ``like`` needs."""

        def compute(positions: int, device: torch.device) -> tuple[Tensor, ...]:
            # Computed in float32 whatever the dtype of the module: positions are large.
            position = torch.arange(positions, device=device, dtype=torch.float32)
            angles = torch.outer(position, self._frequencies(device))
            found: tuple[Tensor, ...] = (angles.cos(), angles.sin())
            if self.scale_base is not None:
                step = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
                power = (position - positions // 2) / self.scale_base
                scale = ((step + 0.4 * self.dim) / (1.4 * self.dim)) ** power.unsqueeze(1)
                found = (found[0] * scale, found[1] * scale, found[0] / scale, found[1] / scale)
            return tuple(table.to(like.dtype) for table in found)

        return self._kept.get(compute, positions, like, like.dtype)

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotates in place.

        Args:
            qkv: as in `apply_rotary_emb_qkv_`; with `kv`, the query alone, `(B, S, H, D)`.
            kv: `(B, S, 2, Hk, D)`.
            seqlen_offset: the position of the first token, for all sequences or `(B,)`; then `max_seqlen` is needed.
            max_seqlen: positions for which tables are computed.

        Returns:
            `qkv`, or `(q, kv)`.
        """
        if max_seqlen is None:
            if isinstance(seqlen_offset, Tensor):
                raise RuntimeError(
                    "cuda_ext.compat.flash_attn.layers.rotary.RotaryEmbedding: expected max_seqlen with a tensor as "
                    "seqlen_offset, got None"
                )
            max_seqlen = qkv.shape[1] + seqlen_offset
        tables = self.tables(max_seqlen, qkv)
        cos, sin = tables[:2]
        cos_k, sin_k = tables[-2:]
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q)
        query = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        return query, apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)
