"""The way of tokens to the rows of the products of experts, and of the results back to the tokens.

`gather` and `sum` are PyTorch's operations, which have derivatives; `token_of_rows` and `combine` do the same where
none are taken.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cuda_ext._load import ops

__all__ = ["Routes", "sort", "sum_dtype"]


class Routes(NamedTuple):
    """Pairs of a token and one of its experts are sorted by experts: the rows of the products."""

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
        """(rows,), int32."""
        return self.pairs.div(self.rows.shape[1], rounding_mode="floor").int()

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


def sort(ids: Tensor, experts: int) -> Routes:
    """`ids`: (tokens, k), of which those outside ``[0, experts)`` are not served. Their rows come last."""
    ids = ids.detach()
    in_range = torch.where(ids < 0, experts, ids).reshape(-1)
    by_expert, pairs = torch.sort(in_range, stable=True)
    rows = torch.empty_like(pairs).scatter_(0, pairs, torch.arange(pairs.shape[0], device=ids.device))
    ends = torch.searchsorted(by_expert, torch.arange(experts, device=ids.device, dtype=ids.dtype), right=True)
    return Routes(pairs, rows.view(ids.shape), ends.int())


def sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
