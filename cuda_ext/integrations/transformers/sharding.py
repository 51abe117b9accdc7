"""Batches and positions of models whose sequences the ranks of a group share, in a block of `context_parallel`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

from cuda_ext import _sequence_sharding
from cuda_ext._sequence_sharding import SequenceSharding
from cuda_ext.integrations.transformers.names import refuse

__all__ = ["check_positions", "shard_batch"]

IGNORED = -100
_CALLER = "cuda_ext.integrations.transformers.shard_batch"


def shard_batch(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by which a model of transformers computes this rank's part of a batch.

    For a block of `cuda_ext.distributed.context_parallel.context_parallel`, whose arguments it uses. The loss is this
    rank's sum over its labels, times the ranks, divided by the number of labels of the batch: so the mean over ranks of
    losses and of gradients, as DDP, FSDP and `BucketedDataParallel` take it, is that of one rank.

    Args:
        batch: arguments of the model by name, the same on all ranks. ``input_ids`` or ``inputs_embeds`` `(B, S, ...)`;
            optional ``labels`` `(B, S)`, not shifted, as for one rank; ``attention_mask`` `(B, S)`; ``position_ids``
            `(B or 1, S)`, default 0 to S - 1. Packed sequences are one row of tokens, with ``cu_seq_lens_q`` and
            ``cu_seq_lens_k``, or with position ids that begin at 0 in each.

    Returns:
        This rank's rows of all tensors `(B, S, ...)`; ``position_ids``; for packed sequences ``cu_seq_lens_q`` and
        ``cu_seq_lens_k``, of the whole batch; with labels ``labels`` and ``shift_labels``, both shifted before they
        were divided, and ``num_items_in_batch``, their number in the batch divided by the ranks. All else unchanged.

    Raises:
        RuntimeError: outside of a block of `context_parallel`.
        ValueError: a length that the ranks do not divide, position ids of other shapes, packed sequences in several
            rows.
    """
    sharding = _sequence_sharding.active
    if sharding is None:
        raise RuntimeError(f"{_CALLER}: expected to be called in a block of context_parallel, got no block")
    inputs = batch.get("input_ids")
    if inputs is None:
        inputs = batch["inputs_embeds"]
    rows, length = inputs.shape[:2]
    whole = dict(batch)
    ids = whole.setdefault("position_ids", torch.arange(length, device=inputs.device).unsqueeze(0))
    if ids.dim() != 2 or ids.shape[1] != length:
        raise ValueError(f"{_CALLER}: expected position_ids of ({rows} or 1, {length}), got {tuple(ids.shape)}")
    if whole.get("cu_seq_lens_q") is None and whole.get("attention_mask") is None:
        whole |= _packed(ids, rows)
    if whole.get("labels") is not None:
        whole["shift_labels"] = F.pad(whole["labels"], (0, 1), value=IGNORED)[:, 1:]
        whole["labels"] = whole["shift_labels"]  # the model has a loss if there are labels
        whole["num_items_in_batch"] = (whole["shift_labels"] != IGNORED).sum() / sharding.ranks
    return {
        name: sharding.shard(value) if isinstance(value, Tensor) and value.shape[1:2] == (length,) else value
        for name, value in whole.items()
    }


def _packed(position_ids: Tensor, rows: int) -> dict[str, Tensor]:
    """`cu_seqlens` if position ids begin again: those of a row of packed sequences."""
    begins = (position_ids[:, 1:] != position_ids[:, :-1] + 1).nonzero()[:, 1] + 1
    if len(begins) == 0:
        return {}
    if rows != 1:
        raise ValueError(
            f"{_CALLER}: expected packed sequences in one row of tokens, got position_ids that begin again in a batch "
            f"of {rows}; flatten the batch"
        )
    ends = F.pad(F.pad(begins, (1, 0)), (0, 1), value=position_ids.shape[1]).int()
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}


_checked: WeakIdKeyDictionary = WeakIdKeyDictionary()


def check_positions(
    sharding: SequenceSharding, module: torch.nn.Module, position_ids: Tensor, rows: int, ends: Tensor | None
) -> None:
    """Raises unless position ids are those of this rank's rows; `ends`: of packed sequences. Reads them once."""
    state = None if position_ids.is_inference() else (position_ids._version, sharding, ends is None)
    if state is not None and _checked.get(position_ids) == state:
        return
    expected = sharding.positions_of_rows(rows, position_ids.device)
    matters = torch.ones_like(expected, dtype=torch.bool)
    if ends is not None:
        ends = ends.to(expected.dtype)
        matters = expected < ends[-1]
        expected = expected - ends[torch.searchsorted(ends, expected, right=True) - 1]
    if position_ids.dim() != 2 or not bool(((position_ids == expected) | ~matters).all()):
        refuse(
            "position_ids",
            ValueError,
            "in a block of context_parallel, expected the positions of this rank's rows in the whole sequence, and of "
            "packed sequences also cu_seq_lens_q and cu_seq_lens_k of the whole batch; get all from shard_batch",
            module,
        )
    if state is not None:
        _checked[position_ids] = state
