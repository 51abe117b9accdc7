"""Converts padded batches to packed sequences and back, like flash-attn's `bert_padding`, in plain PyTorch.

All functions are differentiable with respect to their floating-point tensors.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "index_first_axis",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """The rows `input[indices]`: `(N, ...)` and int64 `(n,)` -> `(n, ...)`.

    The gradients of a repeated index are added (flash-attn keeps one of them).
    """
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros with `values` at the rows `indices`: `(n, ...)` and int64 `(n,)`, without repeats -> `(first_axis_dim,
    ...)`."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy_(0, indices, values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Packs the tokens of a padded batch one after the other.

    Args:
        hidden_states: `(B, S, ...)`.
        attention_mask: `(B, S)`, bool or integer: nonzero where there is a token.
        unused_mask: `(B, S)`, the same for allocated but unused tokens: they are packed, but not counted in `seqused`.

    Returns:
        five values: the packed tokens `(total, ...)`; `indices`, int64 `(total,)`, their positions in the flattened
        `(B * S)`; `cu_seqlens`, int32 `(B + 1,)`; `max_seqlen`, an int, which waits for the stream on a GPU; `seqused`,
        int32 `(B,)`, the number of tokens in `attention_mask`. (flash-attn before 2.7 returned the first four.)

    Raises:
        RuntimeError: a mask is not of shape `(B, S)`.
    """
    _check_mask("unpad_input", "attention_mask", attention_mask, hidden_states)
    used = attention_mask != 0
    packed = used
    if unused_mask is not None:
        _check_mask("unpad_input", "unused_mask", unused_mask, hidden_states)
        packed = used | (unused_mask != 0)
    tokens, indices = _select(hidden_states, packed)
    return tokens, indices, *_boundaries(packed.sum(dim=1)), used.sum(dim=1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """`unpad_input` for rows that contain several sequences, one after the other.

    Args:
        hidden_states: `(B, S, ...)`.
        attention_mask_in_length: `(B, S)`, integers: the lengths of the row's sequences, in order, then zeros.
            `[2, 3, 0, 0, 0, 0]` is a sequence of two tokens, one of three, and one token of padding.

    Returns:
        the packed tokens, `indices`, `cu_seqlens` (number of sequences + 1) and `max_seqlen`, as `unpad_input` does.

    Raises:
        RuntimeError: the mask is not of shape `(B, S)`.
    """
    _check_mask(
        "unpad_input_for_concatenated_sequences", "attention_mask_in_length", attention_mask_in_length, hidden_states
    )
    positions = torch.arange(hidden_states.shape[1], device=attention_mask_in_length.device)
    packed = positions < attention_mask_in_length.sum(dim=1, keepdim=True)
    tokens, indices = _select(hidden_states, packed)
    return tokens, indices, *_boundaries(attention_mask_in_length[attention_mask_in_length != 0])


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of `unpad_input`: packed tokens `(total, ...)` and their `indices` -> `(batch, seqlen, ...)`, padded
    with zeros."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _check_mask(function: str, name: str, mask: Tensor, hidden_states: Tensor) -> None:
    if hidden_states.dim() < 2 or mask.shape != hidden_states.shape[:2]:
        raise RuntimeError(
            f"cuda_ext.compat.flash_attn.bert_padding.{function}: expected {name} of shape (batch, seqlen) to match "
            f"hidden_states {tuple(hidden_states.shape)}, got {tuple(mask.shape)}"
        )


def _select(hidden_states: Tensor, packed: Tensor) -> tuple[Tensor, Tensor]:
    indices = packed.flatten().nonzero().flatten()
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices


def _boundaries(lengths: Tensor) -> tuple[Tensor, int]:
    """(cu_seqlens, max_seqlen)"""
    return F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)), int(lengths.max()) if lengths.numel() else 0
