"""The way of tokens to the rows of the products of experts, and of the results back to the tokens.

`gather` and `sum` are PyTorch's operations, which have derivatives; `token_of_rows` and `combine` do the same where
none are taken.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cuda_ext._load import ops

__all__ = ["Routes", "sort", "sum_dtype"]


class Routes(NamedTuple):
    """Pairs of a token and one of its experts are sorted by experts: the rows of the products. Between experts there
    may be rows of no pair, whose numbers are after that of the last pair."""

    pairs: Tensor  # (rows,): the pair, token * k + i, of each row
    rows: Tensor  # (tokens, k): the row of each pair
    ends: Tensor  # (experts,), int32: the end of the rows of each expert

    def gather(self, tokens: Tensor) -> Tensor:
        """(rows, K): the token of each row.

        It indexes copies that take no memory, each once: so each gets one gradient, and their sum has an order.
        """
        top_k = self.rows.shape[1]
        copies = tokens.unsqueeze(1).expand(-1, top_k, -1)
        return copies[self.token_of_rows(), self.pairs % top_k]

    def token_of_rows(self) -> Tensor:
        """(rows,), int32. That of a row of no pair is the one after the last, of `with_zeros`."""
        tokens = self.pairs.div(self.rows.shape[1], rounding_mode="floor").int()
        return tokens.clamp_(max=self.rows.shape[0]) if self._has_gaps() else tokens

    def with_zeros(self, tokens: Tensor) -> Tensor:
        """`tokens` (tokens, K), and a token of zeros for rows of no pair, if there may be any."""
        return F.pad(tokens, (0, 0, 0, 1)) if self._has_gaps() else tokens

    def of_pairs(self, weights: Tensor) -> Tensor:
        """Weights (tokens, k), as long as the rows: with zeros for those of no pair."""
        return F.pad(weights.reshape(-1), (0, self.pairs.shape[0] - weights.numel())) if self._has_gaps() else weights

    def without_zeros(self, weights: Tensor) -> Tensor:
        """The inverse of `of_pairs`."""
        return weights[: self.rows.numel()].view(self.rows.shape) if self._has_gaps() else weights

    def _has_gaps(self) -> bool:
        tokens, top_k = self.rows.shape
        return self.pairs.shape[0] != tokens * top_k

    def sum(self, results: Tensor, weights: Tensor | None = None) -> Tensor:
        """(tokens, K): the sum of each token's rows, weighted if there are weights (tokens, k), in their order."""
        dtype = sum_dtype(results)
        total: Tensor | None = None
        for i, of_tokens in enumerate(results[self.rows].unbind(1)):
            term = of_tokens.to(dtype)
            if weights is not None:
                term = term * weights[:, i : i + 1].to(dtype)
            # Neither in place nor a conversion that changes nothing: Dynamo makes all of them outputs of a Function,
            # whose gradient then goes to one that is not used.
            total = term if total is None else total + term
        assert total is not None
        return total if dtype == results.dtype else total.to(results.dtype)

    def combine(self, results: Tensor, weights: Tensor | None = None) -> Tensor:
        """`sum` in one pass over the results."""
        combined: Tensor = ops.combine_experts.default(results, self.rows, weights)
        return combined

    def of_experts(self, values: Tensor) -> Tensor:
        """(tokens, k): of `values` (tokens, experts) those of each token's experts; 0 for experts that are not here."""
        experts = torch.bucketize(self.rows, self.ends, right=True)
        is_here = experts < len(self.ends)
        return values.gather(1, experts.where(is_here, 0)).where(is_here, 0.0)


def sort(ids: Tensor, experts: int, alignment: int = 1) -> Routes:
    """`ids`: (tokens, k), of which those outside ``[0, experts)`` are not served. Their rows come last. The rows of an
    expert begin at a multiple of `alignment`."""
    ids = ids.detach()
    in_range = torch.where(ids < 0, experts, ids).reshape(-1)
    by_expert, pairs = torch.sort(in_range, stable=True)
    ends = torch.searchsorted(by_expert, torch.arange(experts, device=ids.device, dtype=ids.dtype), right=True)
    at = torch.arange(pairs.shape[0], device=ids.device)  # of the sorted pairs
    if alignment > 1:
        at, pairs_of_rows, ends = _with_gaps(at, by_expert.clamp(max=experts), pairs, ends, alignment)
    else:
        pairs_of_rows = pairs
    rows = torch.empty_like(pairs).scatter_(0, pairs, at)
    return Routes(pairs_of_rows, rows.view(ids.shape), ends.int())


def _with_gaps(
    at: Tensor, by_expert: Tensor, pairs: Tensor, ends: Tensor, alignment: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of sorted pairs, the pairs of rows, and the ends of experts. The host does not know how many rows there
    are: it takes the most."""
    count, experts = pairs.shape[0], ends.shape[0]
    most = count + (alignment - 1) * min(count, experts)
    size = (most + alignment - 1) // alignment * alignment
    begins = F.pad(ends[:-1], (1, 0))
    new_ends = ((ends - begins + alignment - 1) // alignment * alignment).cumsum(0)
    # What is not served comes after the last expert, as that one after the one before.
    moved = F.pad(new_ends, (1, 0)) - F.pad(ends, (1, 0))
    at = at + moved[by_expert]
    is_gap = torch.ones(size, dtype=pairs.dtype, device=pairs.device).scatter_(0, at, 0)
    pair_of_rows = (is_gap.cumsum(0) + (count - 1)).scatter_(0, at, pairs)
    return at, pair_of_rows, new_ends


def sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
