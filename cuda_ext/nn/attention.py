"""Self-attention of Llama-style models: one projection for q, k and v, rotary embedding, grouped heads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cuda_ext._attention_options import NumberOptions, Options
from cuda_ext._sequence_sharding import SequenceSharding
from cuda_ext._tables import KeptTables
from cuda_ext.attention import flash_attention
from cuda_ext.block_mask import BlockMask
from cuda_ext.kvcache import flash_attention_with_kvcache
from cuda_ext.nn.cache import LayerCache
from cuda_ext.nn.joint_weights import join_on_load
from cuda_ext.nn.linear import Linear

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Unpack

    from cuda_ext.distributed.context_parallel.layout import Layout


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys by angles proportional to their positions.

    RoFormer (Su et al., arXiv 2104.09864), section 3.2.2.
    Elements d and d + D/2 of a head form a pair (the "rotate half" order of Llama checkpoints; the paper pairs
    neighbours), which is rotated by ``position * base**(-2 d / D)`` radians. Angles are float32, whatever the dtype of
    the module; products are float32, or float64 for float64. The module has neither parameters nor buffers.

    Args:
        head_dim: D, even.
        base: of the geometric series of wavelengths. Default 10000.

    Shape: input (B, S, H, D) -> the same, for positions 0 to S - 1. With ``cache``, the positions
    of a sequence begin at the length that it has there. With ``positions``, int64 (S,) or (B, S), they are these, below
    ``length``; without ``length`` the host reads them.
    """

    def __init__(self, head_dim: int, *, base: float = 10000.0) -> None:
        super().__init__()
        if head_dim < 1 or head_dim % 2:
            raise ValueError(f"cuda_ext.nn.RotaryEmbedding: expected an even head_dim above 0, got {head_dim}")
        if not 0 < base < math.inf:
            raise ValueError(f"cuda_ext.nn.RotaryEmbedding: expected a finite base above 0, got {base}")
        self.head_dim, self.base = head_dim, base
        self._kept = KeptTables()

    def _tables(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos (length, 1, D) and sin (length, 1, D), negative in the first half."""
        evens = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=device)
        positions = torch.arange(length, dtype=torch.float32, device=device)
        angles = positions[:, None, None] * self.base ** (-evens / self.head_dim)  # (length, 1, D / 2)
        return torch.cat([angles.cos(), angles.cos()], dim=-1), torch.cat([-angles.sin(), angles.sin()], dim=-1)

    def forward(
        self,
        input: Tensor,
        cache: LayerCache | None = None,
        *,
        positions: Tensor | None = None,
        length: int | None = None,
    ) -> Tensor:
        seqlen = input.shape[1]
        if cache is not None:
            length = cache.capacity + seqlen
            positions = cache.seqlens.unsqueeze(1) + torch.arange(seqlen, device=input.device)  # (B, S)
        elif positions is None:
            length = seqlen
        elif length is None:
            length = int(positions.max()) + 1 if positions.numel() else 0
        cos, sin = self._kept.get(self._tables, length, input, torch.float32)
        cos, sin = (table[:seqlen] if positions is None else table[positions] for table in (cos, sin))
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        swapped = x.roll(self.head_dim // 2, dims=-1)
        return torch.addcmul(x * cos, swapped, sin).to(input.dtype)

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, base={self.base:g}"


class SelfAttention(nn.Module):
    """Multi-head self-attention with grouped key/value heads and rotary positions.

    Args:
        features: E, the size of the last dimension of input and output.
        num_heads: H, the number of query heads.
        num_kv_heads: Hk, the number of key/value heads; H is a multiple of it. Default H.
        head_dim: D. Default E / H.
        bias: whether the projections of q, k and v have a bias. Default False.
        out_bias: whether the output projection has one. Default ``bias``.
        causal: whether a position sees only itself and earlier positions. Default True.
        sinks: whether every head has a learnable logit without a value, ``sinks`` (H,), starting at 0. Default False.
        dropout_p: the probability of dropping an attention weight in training, in [0, 1). Default 0.
        rotary_base: see `RotaryEmbedding`; None = no rotary embedding. Default 10000.
        context_group: a `torch.distributed` process group whose ranks share the sequence: the input has this rank's
            rows, see `cuda_ext.distributed.context_parallel`. Default None.
        context_layout, context_method: which rows these are, and how ranks exchange keys, as the arguments ``layout``
            and ``method`` of `context_parallel`. Default ``"zigzag"`` and ``"all_gather"``.
        device, dtype: of the parameters.
        options: ``window``, ``scale`` and the other numbers that change the scores, as in `cuda_ext.flash_attention`.

    Options that `cuda_ext.flash_attention` refuses raise its RuntimeError in the constructor.

    Shape: input (B, S, E) -> (B, S, E). Optional: ``residual`` (B, S, E), added in the epilogue of the output
    projection; ``attn_bias`` (numbers) and ``attn_mask`` (booleans, True = attend), which broadcast to (B, H, S, S),
    and ``relative_bias``, as `cuda_ext.flash_attention` takes them; ``block_mask``, a `cuda_ext.BlockMask` of (S, S),
    such as that of packed documents, whose rotary positions may count on through all of them. ``cache``, a layer of a
    `cuda_ext.nn.KeyValueCache`: for generation, without gradients; the keys of the input are appended to it, in place,
    and the input attends to all keys that it has. With ``context_group``, S is the number of this rank's rows, but a
    bias or mask has all keys, (B, H, S, keys); there is no cache.

    State dict: ``qkv_proj.weight`` ((H + 2 Hk) D, E), the rows of q, k, v in this order, and ``o_proj.weight``
    (E, H D), with ``.bias`` where there is one, and ``sinks``. The separate ``q_proj``, ``k_proj`` and ``v_proj`` of
    Llama-style checkpoints load as well (`cuda_ext.nn.separated` gives them back), and so do the ``in_proj_weight``,
    ``in_proj_bias`` and ``out_proj`` of a `torch.nn.MultiheadAttention`.
    """

    def __init__(
        self,
        features: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        out_bias: bool | None = None,
        causal: bool = True,
        sinks: bool = False,
        dropout_p: float = 0.0,
        rotary_base: float | None = 10000.0,
        context_group: ProcessGroup | None = None,
        context_layout: str | Layout = "zigzag",
        context_method: str = "all_gather",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[NumberOptions],
    ) -> None:
        super().__init__()
        if unknown := options.keys() - NumberOptions.__annotations__.keys():
            raise TypeError(f"cuda_ext.nn.SelfAttention: unexpected keyword arguments: {', '.join(sorted(unknown))}")
        if num_heads < 1:
            raise ValueError(f"cuda_ext.nn.SelfAttention: expected num_heads above 0, got {num_heads}")
        if head_dim is None:
            if features % num_heads:
                raise ValueError(
                    f"cuda_ext.nn.SelfAttention: expected features to be a multiple of num_heads {num_heads}, "
                    f"got {features}"
                )
            head_dim = features // num_heads
        if head_dim < 1:
            raise ValueError(f"cuda_ext.nn.SelfAttention: expected head_dim above 0, got {head_dim}")
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(
                f"cuda_ext.nn.SelfAttention: expected num_heads to be a multiple of num_kv_heads {num_kv_heads}, "
                f"got {num_heads}"
            )
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.causal, self.dropout_p, self.options = causal, dropout_p, options
        self.context: SequenceSharding | None = None
        self._check_options()
        if context_group is not None:
            self.context = _sharding(context_group, context_layout, context_method)
        self.qkv_proj = Linear(features, (num_heads + 2 * num_kv_heads) * head_dim, bias, **factory)
        self.o_proj = Linear(num_heads * head_dim, features, bias if out_bias is None else out_bias, **factory)
        self.rotary = None if rotary_base is None else RotaryEmbedding(head_dim, base=rotary_base)
        self.sinks = nn.Parameter(torch.zeros(num_heads, **factory)) if sinks else None
        rows, kv_rows = num_heads * head_dim, num_kv_heads * head_dim
        aliases = {f"in_proj_{kind}": f"qkv_proj.{kind}" for kind in ("weight", "bias")}
        aliases |= {f"out_proj.{kind}": f"o_proj.{kind}" for kind in ("weight", "bias")}
        join_on_load(self, "qkv_proj", {"q_proj": rows, "k_proj": kv_rows, "v_proj": kv_rows}, aliases)

    def forward(
        self,
        input: Tensor,
        residual: Tensor | None = None,
        *,
        attn_bias: Tensor | None = None,
        attn_mask: Tensor | None = None,
        relative_bias: Tensor | None = None,
        block_mask: BlockMask | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        of_call: Options = {"attn_bias": attn_bias, "attn_mask": attn_mask, "relative_bias": relative_bias}
        of_call["block_mask"] = block_mask
        if cache is not None:
            self._check_cached(of_call)
        qkv = self.qkv_proj(input).unflatten(-1, (-1, self.head_dim))  # (B, S, H + 2 Hk, D)
        query_key, value = qkv.split([self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=2)
        if self.rotary is not None:
            query_key = self.rotary(query_key, cache, **self._positions(input))
        query, key = query_key.split([self.num_heads, self.num_kv_heads], dim=2)
        if cache is None:
            of_call["sinks"] = self.sinks
            out = self._attend(query, key, value, **of_call)
        else:
            out = self._attend_to_cache(query, key, value, cache)
        return self.o_proj(out.flatten(2), residual)

    def _check_options(self) -> None:
        """Calls the op on empty tensors, so that the constructor raises what `forward` would raise. Draws no random
        number."""
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        query_key_value = (torch.empty(0, 0, h, self.head_dim, device="cpu", dtype=torch.float32) for h in heads)
        with torch.random.fork_rng(devices=()):
            self._attend(*query_key_value)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, **tensors: Unpack[Options]) -> Tensor:
        dropout_p = self.dropout_p if self.training else 0.0
        options: Options = {"causal": self.causal, "dropout_p": dropout_p, **self.options, **tensors}
        if self.context is not None:
            out: Tensor = self.context.attention(query, key, value, **options)
            return out
        return flash_attention(query, key, value, **options)

    def _positions(self, input: Tensor) -> dict[str, Any]:
        """Those of the input's rows, where ranks share the sequence."""
        if self.context is None:
            return {}
        rows = input.shape[1]
        positions = self.context.positions_of_rows(rows, input.device)
        return {"positions": positions, "length": self.context.length_of_rows(rows)}

    def _check_cached(self, of_call: Options) -> None:
        if self.context is not None:
            raise RuntimeError(
                "cuda_ext.nn.SelfAttention: expected no cache with context_group, got one; load the state dict into a "
                "module without context_group to generate"
            )
        given = [name for name, value in of_call.items() if value is not None]
        given += [f"dropout_p={self.dropout_p}"] * (self.training and self.dropout_p > 0)
        if given:
            raise RuntimeError(
                f"cuda_ext.nn.SelfAttention: expected no {', '.join(of_call)} or dropout with cache, got "
                f"{' and '.join(given)}; hide keys by window or by the lengths, and call eval()"
            )

    def _attend_to_cache(self, query: Tensor, key: Tensor, value: Tensor, cache: LayerCache) -> Tensor:
        return flash_attention_with_kvcache(
            query,
            cache.keys,
            cache.values,
            key,
            value,
            cache_seqlens=cache.seqlens,
            block_table=cache.block_table,
            causal=self.causal,
            sinks=self.sinks,
            **self.options,
        )

    def extra_repr(self) -> str:
        always = {name: getattr(self, name) for name in ("num_heads", "num_kv_heads", "head_dim", "causal")}
        options = {**self.options, "dropout_p": self.dropout_p}
        given = {name: value for name, value in options.items() if value not in (None, 0.0)}
        return ", ".join(f"{name}={value}" for name, value in {**always, **given}.items())


def _sharding(group: ProcessGroup, layout: str | Layout, method: str) -> SequenceSharding:
    from cuda_ext.distributed.context_parallel.sharding import SequenceSharding

    return SequenceSharding(group, layout=layout, method=method)
