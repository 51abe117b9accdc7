"""How the ranks of a group share sequences, said once for all layers of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cuda_ext import _sequence_sharding
from cuda_ext.distributed.context_parallel.attention import (
    ring_attention,
    ring_attention_varlen,
    ulysses_attention,
    ulysses_attention_varlen,
)
from cuda_ext.distributed.context_parallel.layout import Layout, layout_of
from cuda_ext.distributed.context_parallel.request import METHODS
from cuda_ext.distributed.context_parallel.sequence import own_rows, unshard_sequence
from cuda_ext.distributed.process_groups import resolve_group

_CALLER = "cuda_ext.distributed.context_parallel.context_parallel"


class SequenceSharding:
    """What `context_parallel` gives; its arguments are those. Copies are the object itself."""

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        layout: str | Layout = "zigzag",
        method: str = "all_gather",
        ulysses_group: dist.ProcessGroup | None = None,
    ) -> None:
        if method not in (*METHODS, "ulysses"):
            names = " or ".join(map(repr, (*METHODS, "ulysses")))
            raise ValueError(f"{_CALLER}: expected method {names}, got {method!r}")
        if method == "ulysses" and ulysses_group is not None:
            raise ValueError(
                f"{_CALLER}: expected no ulysses_group with method 'ulysses', got one; group exchanges heads, then"
            )
        self.group = resolve_group(_CALLER, group)
        self.layout, self.method, self.ulysses_group = layout, method, ulysses_group
        heads, place = (1, 0) if ulysses_group is None else (ulysses_group.size(), ulysses_group.rank())
        self._heads = heads
        self.ranks: int = self.group.size() * heads
        self.rank = self.group.rank() * heads + place
        self._positions: dict[torch.device, tuple[int, Tensor]] = {}
        if isinstance(layout, Layout):
            self.layout_of(layout.length)  # for so many ranks, or an error
        else:
            self.layout_of(self.ranks)

    @property
    def op(self) -> str:
        return "ulysses_attention" if self.method == "ulysses" else "ring_attention"

    def attention(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        """`ring_attention`, or with method ``"ulysses"`` `ulysses_attention`."""
        attend: Any = ulysses_attention if self.method == "ulysses" else ring_attention
        return attend(query, key, value, **self._of_group(), **options)

    def attention_varlen(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        **options: Any,
    ) -> Any:
        """`ring_attention_varlen` or `ulysses_attention_varlen`."""
        attend: Any = ulysses_attention_varlen if self.method == "ulysses" else ring_attention_varlen
        return attend(query, key, value, cu_seqlens_q, cu_seqlens_k, **self._of_group(), **options)

    def _of_group(self) -> dict[str, Any]:
        names = ("group", "layout") if self.method == "ulysses" else ("group", "layout", "method", "ulysses_group")
        return {name: getattr(self, name) for name in names}

    def layout_of(self, length: int) -> Layout:
        """The layout of a sequence of ``length`` rows; ValueError if it is for other ranks or another length."""
        return layout_of(_CALLER, self.layout, self.ranks, length, self._heads)

    def shard(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """This rank's rows of a tensor that all ranks have; see `shard_sequence`.

        Raises:
            ValueError: a length that is not the layout's, or, with a layout by name, that the ranks do not divide.
        """
        length = tensor.shape[dim]
        if isinstance(self.layout, str) and length % self.ranks:
            raise ValueError(
                f"{_CALLER}: expected a sequence whose length is a multiple of {self.ranks} ranks, got {length}; pad "
                f"it, or pass layout=Layout.{self.layout}({length}, {self.ranks}) for sequences of this length"
            )
        return own_rows(tensor, dim, self.layout_of(length), self.rank)

    def unshard(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """The whole sequence, on all ranks; see `unshard_sequence`."""
        if self.ulysses_group is not None:
            raise NotImplementedError(f"{_CALLER}: expected no ulysses_group where ranks gather a sequence, got one")
        return unshard_sequence(tensor, dim, group=self.group, layout=self.layout)

    def positions(self, length: int, *, device: torch.device | str | None = None) -> Tensor:
        """The positions in a sequence of ``length`` rows of this rank's rows, (rows,), int64; see `positions`."""
        return self.layout_of(length).positions(self.rank, device=device)

    def length_of_rows(self, rows: int) -> int:
        """The length of a sequence of which this rank has ``rows`` rows."""
        return self.layout.length if isinstance(self.layout, Layout) else rows * self.ranks

    @torch.compiler.disable
    def positions_of_rows(self, rows: int, device: torch.device) -> Tensor:
        """The positions in that sequence of this rank's rows. Kept, so do not write it."""
        length = self.length_of_rows(rows)
        kept = self._positions.get(device)
        if kept is None or kept[0] != length:
            with torch.inference_mode(False):
                kept = self._positions[device] = length, self.positions(length, device=device)
        return kept[1]

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceSharding:
        return self


@contextlib.contextmanager
def context_parallel(
    group: dist.ProcessGroup | None = None,
    *,
    layout: str | Layout = "zigzag",
    method: str = "all_gather",
    ulysses_group: dist.ProcessGroup | None = None,
) -> Iterator[SequenceSharding]:
    """In a `with` block, the ranks of a group share the sequences of models of transformers.

    The models need ``attn_implementation="cuda_ext"`` and this rank's rows of everything that has the length of the
    sequence; `cuda_ext.integrations.transformers.shard_batch` gives both inputs and labels. docs/context_parallel.md
    has a program. All ranks of the group run the same model on the same batch. Backward may run after the block.

    Args:
        group: the ranks that share a sequence; default: all.
        layout: ``"zigzag"`` (default; balances causal masks), ``"contiguous"``, or a `Layout` for sequences of one
            length, which the ranks then need not divide.
        method: ``"all_gather"`` (default) or ``"p2p"`` as of `ring_attention`, or ``"ulysses"`` for
            `ulysses_attention`.
        ulysses_group: as of `ring_attention`.

    The block is of the whole process, also of other threads; blocks can be nested, and the innermost counts.

    Returns:
        An object with the methods ``shard(tensor, dim=1)``, ``unshard(tensor, dim=1)`` and ``positions(length)``, which
        are `shard_sequence`, `unshard_sequence` and `positions` for these arguments.

    Raises:
        ValueError: an unknown layout or method, or a layout for other ranks.
        RuntimeError: no process group, or one without this rank.

    Example::

        with context_parallel(group):
            loss = model(**cuda_ext.integrations.transformers.shard_batch(batch)).loss
    """
    sharding = SequenceSharding(group, layout=layout, method=method, ulysses_group=ulysses_group)
    outer, _sequence_sharding.active = _sequence_sharding.active, sharding
    try:
        yield sharding
    finally:
        _sequence_sharding.active = outer
