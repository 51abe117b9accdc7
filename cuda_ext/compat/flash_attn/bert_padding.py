"""From a padded batch to packed sequences and back, as flash-attn's `bert_padding`, here in plain PyTorch.

All functions are differentiable in their tensors of values.
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

    An index may come twice; its gradients are added (flash-attn keeps one of them).
    """
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Rows of zeros, but `values` at `indices`: `(n, ...)` and int64 `(n,)`, each at most once -> `(first_axis_dim,
    ...)`."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy_(0, indices, values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Packs the tokens of a padded batch one after the other.

    Args:
        hidden_states: `(B, S, ...)`.
        attention_mask: `(B, S)`, bool or integer: nonzero where there is a token.
        unused_mask: `(B, S)`, the same for tokens that keep a place without being used: they are packed, but do not
            count in `seqused`.

    Returns:
        five values: the packed tokens `(total, ...)`; `indices`, int64 `(total,)`, where in the flattened `(B * S)`
        they were; `cu_seqlens`, int32 `(B + 1,)`; `max_seqlen`, an int, for which a GPU has to wait; `seqused`,
        int32 `(B,)`, how many tokens `attention_mask` has. (flash-attn before 2.7 returned the first four.)

    Raises:
        RuntimeError: a mask that is not of shape `(B, S)`.
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
    """`unpad_input` where a row of the batch may hold several sequences, one after the other.

    Args:
        hidden_states: `(B, S, ...)`.
        attention_mask_in_length: `(B, S)`, integers: the lengths of a row's sequences, in order, and otherwise 0. So
            `[2, 3, 0, 0, 0, 0]` is a sequence of two tokens, one of three, and a place of padding.

    Returns:
        the packed tokens, `indices`, `cu_seqlens` with an entry more than there are sequences, and `max_seqlen`, as
        `unpad_input` does.

    Raises:
        RuntimeError: a mask that is not of shape `(B, S)`.
    """
    _check_mask(
        "unpad_input_for_concatenated_sequences", "attention_mask_in_length", attention_mask_in_length, hidden_states
    )
    positions = torch.arange(hidden_states.shape[1], device=attention_mask_in_length.device)
    packed = positions < attention_mask_in_length.sum(dim=1, keepdim=True)
    tokens, indices = _select(hidden_states, packed)
    return tokens, indices, *_boundaries(attention_mask_in_length[attention_mask_in_length != 0])


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of `unpad_input`: packed tokens `(total, ...)` and their `indices` -> `(batch, seqlen, ...)`, zeros
    where there is no token."""
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
