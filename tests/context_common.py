"""Attention over a sequence that ranks share, compared with one rank. For bodies of tests that run on ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cuda_ext import flash_attention, flash_attention_varlen
from cuda_ext.distributed.context_parallel import Layout
from cuda_ext.distributed.context_parallel.exchange import Exchange

DIFFERENTIABLE = ("sinks", "attn_bias", "relative_bias")
EXACT = 1e-12  # relative to the largest element, in float64


class Case(NamedTuple):
    """lengths: of queries and keys, or of those of each packed sequence. A shape among the options is a tensor's."""

    heads: int
    key_heads: int
    lengths: Any
    options: Mapping[str, Any] = MappingProxyType({})
    rest: int = 0  # packed rows after the last sequence
    dims: tuple[int, int] = (8, 12)  # of a head of keys and of values
    batch: int = 2  # if not packed

    @property
    def packed(self) -> bool:
        return not isinstance(self.lengths[0], int)

    @property
    def rows(self) -> tuple[int, int]:
        if not self.packed:
            return self.lengths
        queries, keys = (sum(lengths) + self.rest for lengths in zip(*self.lengths))
        return queries, keys


class Whole(NamedTuple):
    """What one rank has."""

    tensors: list[Tensor]
    ends: tuple[Tensor, ...]
    options: dict[str, Any]

    def attend(self) -> tuple[Tensor, Tensor]:
        query, key, value = self.tensors
        if self.ends:
            return flash_attention_varlen(query, key, value, *self.ends, return_lse=True, **self.options)
        return flash_attention(query, key, value, return_lse=True, **self.options)

    def in_float64(self) -> Whole:
        """The same numbers."""

        def convert(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            return value.detach().double().requires_grad_(value.requires_grad)

        options = {name: convert(value) for name, value in self.options.items()}
        return Whole(list(map(convert, self.tensors)), self.ends, options)


def draw(case: Case, dtype: torch.dtype = torch.float64) -> Whole:
    queries, keys = case.rows
    dim, value_dim = case.dims
    shapes = [(queries, case.heads, dim), (keys, case.key_heads, dim), (keys, case.key_heads, value_dim)]
    batch = () if case.packed else (case.batch,)
    tensors = [torch.randn(*batch, *shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]
    ends: tuple[Tensor, ...] = ()
    if case.packed:
        ends = tuple(torch.tensor([0, *lengths]).cumsum(0).int() for lengths in zip(*case.lengths))
    # Not in 16 bits: ranks have parts of their gradients, which would be rounded before they are summed.
    of_options = torch.float64 if dtype == torch.float64 else torch.float32
    return Whole(tensors, ends, {name: _option(name, value, of_options) for name, value in case.options.items()})


def _option(name: str, value: Any, dtype: torch.dtype) -> Any:
    if name == "window" or not isinstance(value, tuple):
        return value
    if name == "attn_mask":
        return torch.rand(value) < 0.7
    tensor = (torch.rand if name == "alibi_slopes" else torch.randn)(value, dtype=torch.float64)
    return tensor.to(dtype).requires_grad_() if name in DIFFERENTIABLE else tensor.to(dtype)


def layouts_of(kind: str, case: Case, ranks: int) -> list[Layout]:
    """Of queries and of keys."""
    made = []
    for length in case.rows:
        if kind == "uneven":  # ranges of random lengths on random ranks, of which some may have none
            ends = sorted([0, length, *torch.randint(length + 1, (3 * ranks,)).tolist()])
            owners = torch.randint(ranks, (len(ends),)).tolist()
            ranges = [[r for r, owner in zip(zip(ends, ends[1:]), owners) if owner == rank] for rank in range(ranks)]
            made.append(Layout(length, tuple(map(tuple, ranges))))
        else:
            made.append(getattr(Layout, kind)(length, ranks))
    return made


def own_rows(tensor: Tensor, layout: Layout, dim: int) -> Tensor:
    return tensor.index_select(dim, layout.positions(dist.get_rank()))


class Check:
    """One call, forward and backward, on this rank and on one rank."""

    def __init__(
        self,
        case: Case,
        kind: str,
        dtype: torch.dtype = torch.float64,
        layouts: Any = None,
        whole: Whole | None = None,
    ) -> None:
        self.case = case
        self.whole = whole or draw(case, dtype)
        self.layouts = layouts or layouts_of(kind, case, dist.get_world_size())
        self.row_dim = 0 if case.packed else 1
        self.of_tensors = [self.layouts[0], self.layouts[1], self.layouts[1]]
        self.own = [
            own_rows(tensor, layout, self.row_dim).detach().requires_grad_()
            for tensor, layout in zip(self.whole.tensors, self.of_tensors)
        ]
        self.options = {name: self._own_option(name, value) for name, value in self.whole.options.items()}
        self.names = [name for name in DIFFERENTIABLE if name in self.options]

    def _has_rows(self, name: str, tensor: Tensor) -> bool:
        rows = name in ("attn_bias", "attn_mask") and not self.case.packed and tensor.dim() > 1
        return rows and tensor.shape[-2] > 1

    def _own_option(self, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        own = (own_rows(value, self.layouts[0], -2) if self._has_rows(name, value) else value).detach()
        return own.requires_grad_() if name in DIFFERENTIABLE else own

    def call(self, function: Callable[..., Any], **arguments: Any) -> tuple[Tensor, Tensor]:
        given: Any = {"layout": self.layouts[0], "key_layout": self.layouts[1], "return_lse": True, **self.options}
        result: tuple[Tensor, Tensor] = function(*self.own, *self.whole.ends, **given | arguments)
        return result

    def run(
        self, function: Callable[..., Any], bound: float = EXACT, same_state: bool = False, **arguments: Any
    ) -> None:
        """same_state: the call on one rank begins with the random state that this rank's has begun with."""
        state = torch.get_rng_state()
        results = self.call(function, **arguments)
        weights = self.weights()
        if same_state:
            torch.set_rng_state(state)
        actual, wanted = self.found(results, weights), self.expected(self.whole, weights)
        for name in wanted:
            what = name if name in ("out", "lse") else f"gradient of {name}"
            self.compare(what, actual[name], wanted[name], bound)

    def weights(self) -> list[Tensor]:
        """Random gradients of the output and the lse of one rank."""
        query, value = self.whole.tensors[0], self.whole.tensors[2]
        out = torch.randn(*query.shape[:-1], value.shape[-1], dtype=torch.float64)
        lse = torch.randn_like(out[..., 0]).transpose(-1, -2)
        return [out.to(query.dtype), lse.to(torch.float64 if query.dtype == torch.float64 else torch.float32)]

    def expected(self, whole: Whole, weights: list[Tensor]) -> dict[str, Tensor]:
        """This rank's part of the results and gradients of one rank."""
        results = whole.attend()
        leaves = [*whole.tensors, *(whole.options[name] for name in self.names)]
        converted = [weight.to(result.dtype) for weight, result in zip(weights, results)]
        grads = torch.autograd.grad(loss_of(results, converted), leaves)
        out, lse = (result.detach() for result in results)
        named = dict(zip(["out", "q", "k", "v"], [out, *grads]))
        of_rows = zip(named.items(), [self.layouts[0], *self.of_tensors])
        parts = {name: own_rows(tensor, layout, self.row_dim) for (name, tensor), layout in of_rows}
        parts["lse"] = own_rows(lse, self.layouts[0], -1)
        for name, grad in zip(self.names, grads[3:]):
            parts[name] = own_rows(grad, self.layouts[0], -2) if self._has_rows(name, grad) else grad
        return parts

    def found(self, results: tuple[Tensor, Tensor], weights: list[Tensor]) -> dict[str, Tensor]:
        """The same of the call whose results these are."""
        own = [own_rows(weights[0], self.layouts[0], self.row_dim), own_rows(weights[1], self.layouts[0], -1)]
        grads = torch.autograd.grad(loss_of(results, own), [*self.own, *(self.options[name] for name in self.names)])
        found = [*(result.detach() for result in results), *grads]
        parts = dict(zip(["out", "lse", "q", "k", "v", *self.names], found))
        for name in self.names:
            if not self._has_rows(name, self.whole.options[name]):
                total = parts[name].clone()
                dist.all_reduce(total)
                parts[name] = total
        return parts

    @staticmethod
    def compare(what: str, actual: Tensor, wanted: Tensor, bound: float) -> None:
        finite = wanted[wanted.isfinite()]
        largest = float(finite.abs().max()) if finite.numel() else 0.0
        torch.testing.assert_close(
            actual, wanted, rtol=bound, atol=bound * largest, msg=lambda text: f"{what}, rank {dist.get_rank()}: {text}"
        )


def loss_of(results: tuple[Tensor, Tensor], weights: list[Tensor]) -> Tensor:
    """Rows without keys have an lse of -inf, and no gradient."""
    out, lse = results
    return (out * weights[0]).sum() + (torch.where(lse.isfinite(), lse, 0.0) * weights[1]).sum()


class Bytes:
    """Counts the bytes that exchanges of this rank send to other ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent = 0
        all_to_all, gather = Exchange._all_to_all, Exchange._gather

        def counted(exchange: Exchange, rows: Tensor, to: list[int], of: list[int]) -> Any:
            self.sent += (sum(to) - to[exchange.rank]) * rows[:1].numel() * rows.element_size()
            return all_to_all(exchange, rows, to, of)

        def gathered(exchange: Exchange, rows: Tensor) -> Any:
            most = max(map(exchange._layout.rows, range(exchange.ranks)))  # shorter shards are padded
            self.sent += (exchange.ranks - 1) * most * rows[:1].numel() * rows.element_size()
            return gather(exchange, rows)

        monkeypatch.setattr(Exchange, "_all_to_all", counted)
        monkeypatch.setattr(Exchange, "_gather", gathered)


def groups_of_two() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Ring and heads, of four ranks: rank 2r + u is rank r of its ring, and u of those that exchange heads."""
    rings = [dist.new_group([place, place + 2]) for place in (0, 1)]
    heads = [dist.new_group([first, first + 1]) for first in (0, 2)]
    rank = dist.get_rank()
    return rings[rank % 2], heads[rank // 2]
