"""The attention function of `attn_implementation="cuda_ext"`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.utils import logging

from cuda_ext import _sequence_sharding
from cuda_ext._attention_options import NumberOptions
from cuda_ext._sequence_sharding import SequenceSharding
from cuda_ext.attention import (
    flash_attention_varlen,
    heads_first_op,
    mapped_where_masks_differ,
)
from cuda_ext.integrations.transformers.masks import Offsets, Pattern, visible_of
from cuda_ext.integrations.transformers.names import NAME, counter, refuse
from cuda_ext.integrations.transformers.sharding import check_positions

__all__ = ["attention_forward"]

_logger = logging.get_logger(__name__)

# Keywords for other attention functions that change the result, and what to do: they are not ignored.
_REFUSED = {
    # The one place where an op for paged caches would be called.
    "cache": "paged caches (continuous batching) are not supported; choose 'sdpa'",
    "block_indices": "this model selects blocks of keys; choose 'sdpa', for which it makes a mask of them",
    "block_table": "paged caches (continuous batching) are not supported; choose 'sdpa'",
    "indices": "this model selects keys; choose 'sdpa', for which it makes a mask of them",
    "sinks": "sinks that differ between queries are not supported; choose 'eager'",
}
# Keywords with the name and the meaning that they have in `flash_attention`.
_PASSED_ON = frozenset(NumberOptions.__annotations__) - {"window", "scale"}  # those are sliding_window and scaling
_CHECKED = frozenset((*_REFUSED, *_PASSED_ON, "output_attentions", "deterministic"))


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer; called by transformers' models.

    Args:
        module: the layer. Its `is_causal`, by default True, counts if the argument is None.
        query: `(B, H, Sq, D)`, any strides with a dense last dimension.
        key: `(B, Hk, Sk, D)`. `H` must be a multiple of `Hk`.
        value: `(B, Hk, Sk, Dv)`.
        attention_mask: what the function for masks returned, or a mask of the user that broadcasts to
            `(B, H, Sq, Sk)`: boolean, True where visible, or floating-point, added to the logits. Nothing but a mask of
            the user then hides keys.
        dropout: the probability of dropping a weight.
        scaling: of the logits; None for `1 / sqrt(D)`.
        sliding_window: the number of visible keys up to the query's own, and, if not causal, from it on.
        s_aux: `(H,)`, the logits of sinks.
        position_bias: broadcasts to `(B, H, Sq, Sk)`, added to the logits. Differentiable.
        cu_seq_lens_q: `(sequences + 1,)`, the cumulative lengths of packed sequences, as DataCollatorWithFlattening
            makes them; `cu_seq_lens_k` those of the keys.

    Returns:
        `(B, Sq, H, Dv)`, contiguous, and None in place of the weights.

    Raises:
        NotImplementedError: a paged cache, or a keyword that only other implementations honour.
        ValueError: `cu_seq_lens` together with a mask that hides something, or with `position_bias`.
    """
    options: dict[str, Any] = {}  # every argument costs time in small calls
    for name in kwargs:
        if name in _CHECKED:
            _check_keyword(module, name, kwargs[name], options)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if s_aux is not None:
        options["sinks"] = s_aux
    if dropout:
        options["dropout_p"] = dropout
        query = mapped_where_masks_differ("flash_attention", query)
    is_plain = attention_mask is None and position_bias is None and cu_seq_lens_q is None
    if is_plain and _sequence_sharding.active is None:
        counter.served("flash_attention")
        if sliding_window is not None:
            options["window_left"] = options["window_right"] = sliding_window - 1
        return heads_first_op(query, key, value, causal, scaling, **options), None

    given = Pattern(causal, None if sliding_window is None else (sliding_window - 1, sliding_window - 1))
    hidden = _hidden(attention_mask, given, position_bias, query.dtype)
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        hidden = _varlen(hidden, cu_seq_lens_q, cu_seq_lens_k, module)
    sharding = _sharding(attention_mask)
    if sharding is not None:
        if position_bias is not None:
            advice = "in a block of context_parallel, expected no bias by position, which has this rank's keys alone"
            refuse("position_bias", NotImplementedError, advice, module)
        counter.served(hidden.form.replace("flash_attention", sharding.op))
        ids = kwargs.get("position_ids")
        return _run_shared(sharding, module, (query, key, value), hidden, ids, {"scale": scaling, **options}), None
    if hidden.length is not None and hidden.length < key.shape[2]:
        key, value = key[:, :, : hidden.length], value[:, :, : hidden.length]
        if hidden.bias is not None and hidden.bias.shape[-1] > hidden.length:
            hidden = hidden._replace(bias=hidden.bias[..., : hidden.length])
    counter.served(hidden.form)
    return _run(query, key, value, hidden, scaling, options), None


def _run(
    query: Tensor, key: Tensor, value: Tensor, hidden: _Hidden, scale: float | None, options: dict[str, Any]
) -> Tensor:
    causal, window = hidden.pattern
    if hidden.offsets is None:
        left, right = (None, None) if window is None else window
        return heads_first_op(
            query, key, value, causal, scale, left, right, attn_bias=hidden.bias, attn_mask=hidden.mask, **options
        )
    batch, q_length, k_length = query.shape[0], query.shape[2], key.shape[2]
    return flash_attention_varlen(
        query.transpose(1, 2).flatten(0, 1),
        key.transpose(1, 2).flatten(0, 1),
        value.transpose(1, 2).flatten(0, 1),
        hidden.offsets.query,
        hidden.offsets.key,
        # Upper bounds, which need not be read from the device.
        max_seqlen_q=q_length,
        max_seqlen_k=k_length,
        causal=causal,
        window=window,
        scale=scale,
        **options,
    ).unflatten(0, (batch, q_length))


@torch.compiler.disable
def _run_shared(
    sharding: SequenceSharding,
    module: torch.nn.Module,
    heads_first: tuple[Tensor, Tensor, Tensor],
    hidden: _Hidden,
    position_ids: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """Attention of a sequence whose rows ranks share."""
    tensors = [tensor.transpose(1, 2) for tensor in heads_first]
    batch, rows = tensors[0].shape[:2]
    causal, window = hidden.pattern
    options |= {"causal": causal, "window": window}
    ends = hidden.offsets
    if ends is not None and batch != 1:
        refuse(f"packed sequences in {batch} rows", ValueError, "expected one row of tokens; flatten the batch", module)
    if position_ids is not None:
        check_positions(sharding, module, position_ids, rows, None if ends is None else ends.query)
    out: Tensor
    if ends is None:
        out = sharding.attention(*tensors, attn_bias=hidden.bias, attn_mask=hidden.mask, **options)
    else:
        q, k, v = (tensor[0] for tensor in tensors)
        out = sharding.attention_varlen(q, k, v, ends.query, ends.key, **options).unsqueeze(0)
    return out


def _sharding(mask: Tensor | None) -> SequenceSharding | None:
    """How ranks share the sequence, from the mask if it knows."""
    visible = None if mask is None or mask.dim() != 2 else visible_of(mask)
    known = None if visible is None else visible.sharding
    return _sequence_sharding.active if known is None else known


class _Hidden(NamedTuple):
    """What hides keys, in the op's terms. `length`: only so many keys are valid. `form`: the name in `calls()`."""

    pattern: Pattern
    mask: Tensor | None
    bias: Tensor | None
    offsets: Offsets | None
    length: int | None
    form: str


def _hidden(mask: Tensor | None, given: Pattern, bias: Tensor | None, dtype: torch.dtype) -> _Hidden:
    """`given`: the pattern that the layer names, for masks that do not know their own."""
    if bias is not None and bias.dtype not in (dtype, torch.float32):
        bias = bias.to(dtype)
    if mask is None:
        return _Hidden(given, None, bias, None, None, "flash_attention")
    if mask.dim() != 2:
        everything = Pattern(False, None)
        if mask.dtype == torch.bool:
            return _Hidden(everything, mask, bias, None, None, "flash_attention: mask")
        mask = mask if mask.dtype == dtype else mask.to(dtype)
        bias = mask if bias is None else mask + bias
        return _Hidden(everything, None, bias, None, None, "flash_attention: additive mask")

    visible = visible_of(mask)
    pattern, hides, offsets = (given, True, None) if visible is None else visible[:3]
    length = mask.shape[1]
    if not hides:
        return _Hidden(pattern, None, bias, None, length, "flash_attention")
    what = "padding" if mask.dtype == torch.bool else "packed sequences"
    if offsets is not None and bias is None:
        return _Hidden(pattern, None, None, offsets, length, f"flash_attention_varlen: {what}")
    # The op counts the positions of a bias from the start of each sequence; the bias of a model, of each row.
    keys = mask[:, None, None, :]
    dense_mask = keys if mask.dtype == torch.bool else mask[:, None, :, None] == keys
    return _Hidden(pattern, dense_mask, bias, None, length, f"flash_attention: {what}")


def _varlen(hidden: _Hidden, cu_seq_lens_q: Tensor, cu_seq_lens_k: Tensor, module: torch.nn.Module) -> _Hidden:
    """The sequences that the caller gave, in place of those that were found in the position ids."""
    if hidden.bias is not None or not hidden.form.endswith(("flash_attention", "packed sequences")):
        refuse(
            "cu_seq_lens with a mask or bias",
            ValueError,
            "expected cu_seq_lens_q and cu_seq_lens_k without padding, without a 4-dimensional attention_mask and "
            "without position_bias; pass one or the other",
            module,
        )
    offsets = Offsets(cu_seq_lens_q.int(), cu_seq_lens_k.int())
    return hidden._replace(mask=None, offsets=offsets, form="flash_attention_varlen: packed sequences")


def _check_keyword(module: torch.nn.Module, name: str, given: Any, options: dict[str, Any]) -> None:
    if name == "deterministic":
        options["deterministic"] = True if given else None
    elif name == "output_attentions":
        if given:
            _logger.warning_once(
                f"The attention implementation {NAME!r} computes no attention weights and returns None for them. "
                "Choose 'eager' to get them."
            )
    elif given is not None and name in _PASSED_ON:
        options[name] = given
    elif given is not None:
        refuse(name, NotImplementedError, _REFUSED[name], module)
