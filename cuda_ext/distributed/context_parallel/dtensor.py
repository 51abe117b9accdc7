"""`flash_attention` of DTensors whose sequence is split: a ring over that dimension of the mesh.

Without it DTensor would gather them. `cuda_ext.attention` calls it once this module is imported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cuda_ext import _sequence_sharding
from cuda_ext.distributed.context_parallel.attention import ring_attention
from cuda_ext.distributed.context_parallel.layout import Layout

# Of a tensor among the options: its dims, and which of them are the query's dims 0 (batch), 1 (rows) and 2 (heads).
_DIMS: dict[str, tuple[int, dict[int, int]]] = {
    "sinks": (1, {2: 0}),
    "alibi_slopes": (2, {0: 0, 2: 1}),
    "relative_bias": (3, {0: 0, 2: 1}),
    "attn_bias": (4, {0: 0, 1: 2, 2: 1}),
    "attn_mask": (4, {0: 0, 1: 2, 2: 1}),
}


def attention_of_dtensors(query: Any, key: Any, value: Any, options: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Output and lse, or None if DTensor's rules, or its errors, serve the call."""
    from torch.distributed.tensor import DTensor, Replicate, Shard  # slow to import, and few need it

    tensors = [query, key, value, *(options.get(name) for name in _DIMS)]
    if not all(each is None or isinstance(each, DTensor) for each in tensors) or any(t is None for t in tensors[:3]):
        return None
    mesh, places = query.device_mesh, query.placements
    if any(each.ndim != 4 or each.device_mesh != mesh or each.placements != places for each in (query, key, value)):
        return None
    by_rows = [number for number, place in enumerate(places) if place == Shard(1)]
    by_heads = [mesh.size(number) for number, place in enumerate(places) if place == Shard(2)]
    if len(by_rows) != 1 or any(place not in (Replicate(), *map(Shard, range(3))) for place in places):
        return None
    if key.shape[2] % math.prod(by_heads) or options.get("block_mask") is not None or options.get("dropout_p"):
        return None

    ranks = mesh.size(by_rows[0])
    given = dict(options)
    for name in _DIMS:
        if given.get(name) is not None:
            given[name] = _local(given[name], name, places)
    out, lse = ring_attention(
        *(each.to_local() for each in (query, key, value)),
        group=mesh.get_group(by_rows[0]),
        layout=_layout(query.shape[1], ranks),
        key_layout=_layout(key.shape[1], ranks),
        return_lse=True,
        **given,
    )
    batch, rows, heads, _ = query.shape
    of_lse = [Shard({0: 0, 1: 2, 2: 1}[place.dim]) if isinstance(place, Shard) else place for place in places]

    def whole(local: Tensor, placements: Any, *shape: int) -> Tensor:
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)

    return whole(out, places, batch, rows, heads, value.shape[3]), whole(lse, of_lse, batch, heads, rows)


def _layout(length: int, ranks: int) -> Layout:
    """As DTensor divides: chunks of one size, the last ones shorter or empty."""
    ends = [min(rank * -(-length // ranks), length) for rank in range(ranks + 1)]
    return Layout(length, tuple((pair,) for pair in zip(ends, ends[1:])))


def _local(tensor: Any, name: str, places: Any) -> Tensor:
    """This rank's part of an option. Where it is whole, its gradient is the sum over ranks with other queries."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    dims, at = _DIMS[name]
    own, of_grad = [], []
    for place in places:
        dim = at.get(place.dim, -dims) - (dims - tensor.ndim) if isinstance(place, Shard) else -1
        split = dim >= 0 and tensor.shape[dim] != 1
        own.append(Shard(dim) if split else Replicate())
        of_grad.append(own[-1] if split or not isinstance(place, Shard) else Partial())
    local: Tensor = tensor.redistribute(placements=own).to_local(grad_placements=of_grad)
    return local


_sequence_sharding.attention_of_dtensors = attention_of_dtensors
