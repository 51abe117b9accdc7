"""Experts that the ranks of a process group share: each row travels to the rank of its expert, and its result back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cuda_ext._checks import expected, shape_of
from cuda_ext._collectives import AllToAll
from cuda_ext._expert_routes import sort, sum_dtype
from cuda_ext._group_calls import begin_call

__all__ = ["check_share", "on_their_ranks", "shares"]

_NAME = "mixture_of_experts"


def shares(experts: int, ranks: int) -> list[int]:
    """How many of the experts each rank has."""
    return [experts // ranks + (rank < experts % ranks) for rank in range(ranks)]


def check_share(w_up: Tensor, experts: int | None, group: dist.ProcessGroup | None) -> None:
    """Whether the experts of `w_up` are those of this rank."""
    if group is None:
        if experts is not None and shape_of(w_up)[:1] != (experts,):
            wanted = f"w_up of all {experts} experts, or a group of ranks that share them"
            raise expected(_NAME, f"{wanted}, got {shape_of(w_up)}")
        return
    if experts is None:
        raise expected(_NAME, "experts, the number of those of all ranks, with group")
    if experts < group.size():  # before a rank without experts raises an error of its own, and others wait for it
        raise expected(_NAME, f"at least one expert for each of {group.size()} ranks, got {experts}")
    own = shares(experts, group.size())[group.rank()]
    if shape_of(w_up)[:1] != (own,):
        where = f"rank {group.rank()} of {group.size()}"
        raise expected(_NAME, f"w_up with {own} of {experts} experts on {where}, got {shape_of(w_up)}")


def _outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """For what compilers cannot follow: the names of exchanges, and who waits for them."""
    return torch.compiler.disable(function) if torch.compiler.is_compiling() else function


def on_their_ranks(
    compute: Callable[[Tensor, Tensor, Tensor], Tensor],
    experts: int,
    group: dist.ProcessGroup,
    tokens: Tensor,
    ids: Tensor,
    weights: Tensor,
) -> Tensor:
    """The weighted sums for `tokens` (tokens, K), of whose experts (tokens, k) each rank has its share.

    `compute`: the same for rows, ids and weights of this rank's experts, whose ids count from 0.
    """
    ranks, own = group.size(), shares(experts, group.size())
    own_count, exchanges = own[group.rank()], _outside_graphs(begin_call)(_NAME, group, tokens.device)
    exchange = _outside_graphs(AllToAll.apply)
    routes = sort(ids, experts)
    counts = routes.ends.diff(prepend=routes.ends.new_zeros(1))
    # (ranks, own_count): how many rows each rank has for each expert of this one
    received = exchange(counts, own, [own_count] * ranks, exchanges, "the numbers of rows").view(ranks, own_count)
    of_ranks = torch.stack([part.sum() for part in counts.split(own)])
    to, of = torch.stack([of_ranks, received.sum(1)]).tolist()
    rows = exchange(routes.gather(tokens)[: sum(to)], to, of, exchanges, "the rows for experts")
    own_ids = torch.arange(own_count, device=ids.device).repeat(ranks)
    own_ids = own_ids.repeat_interleave(received.reshape(-1), output_size=sum(of)).unsqueeze(1)
    results = compute(rows, own_ids, torch.ones_like(own_ids, dtype=sum_dtype(tokens)))
    results = exchange(results, of, to, exchanges, "the results of experts")
    results = torch.cat([results, results.new_zeros(ids.numel() - sum(to), tokens.shape[1])])
    return routes.sum(results, weights)
