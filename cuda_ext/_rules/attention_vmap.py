"""vmap rules of attention: the mapped dimension joins the batch, whose entries have dropout masks of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cuda_ext._load import ops
from cuda_ext._rules.randomness import draws_the_same, mapped_where_numbers_differ, numbers_of_element
from cuda_ext._toolchain import NAMESPACE

_attention = ops.flash_attention.default
_attention_varlen = ops.flash_attention_varlen.default
_DROPS = "dropout_p > 0"


def mapped_where_masks_differ(op: str, query: Tensor) -> Tensor:
    return mapped_where_numbers_differ(op, _DROPS, query)


def _needs_one_mask(op: str, info: Any, options: dict[str, Any]) -> bool:
    return options.get("dropout_p", 0.0) > 0.0 and draws_the_same(op, _DROPS, info)


@torch.library.register_vmap(f"{NAMESPACE}::flash_attention")
def _(
    info: Any,
    in_dims: tuple[int | None, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    *bias_and_mask: Tensor | None,
    **options: Any,
) -> Any:
    one_mask = _needs_one_mask("flash_attention", info, options)
    has_bias_or_mask = any(tensor is not None for tensor in bias_and_mask)
    if one_mask or has_bias_or_mask or any(dim is not None for dim in in_dims[3:]):
        tensors = query, key, value, alibi_slopes, sinks, *bias_and_mask
        return _one_call_per_element(_attention, info, in_dims, *tensors, one_mask=one_mask, **options)
    size = info.batch_size
    mapped = [
        tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip((query, key, value), in_dims, strict=False)
    ]
    if alibi_slopes is not None and alibi_slopes.dim() == 2:
        alibi_slopes = alibi_slopes.repeat(size, 1)
    out, lse = _attention(*(tensor.flatten(0, 1) for tensor in mapped), alibi_slopes, sinks, **options)
    batch = mapped[0].shape[1]
    return (out.unflatten(0, (size, batch)), lse.unflatten(0, (size, batch))), (0, 0)


@torch.library.register_vmap(f"{NAMESPACE}::flash_attention_varlen")
def _(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor | None, **options: Any) -> Any:
    one_mask = _needs_one_mask("flash_attention_varlen", info, options)
    return _one_call_per_element(_attention_varlen, info, in_dims, *tensors, one_mask=one_mask, **options)


def _one_call_per_element(
    op: Any, info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor | None, one_mask: bool, **options: Any
) -> Any:
    query = tensors[0]
    assert query is not None
    calls = []
    for n in range(info.batch_size):
        of_n = (t if t is None or dim is None else t.select(dim, n) for t, dim in zip(tensors, in_dims, strict=False))
        with numbers_of_element(n, info, query.device, same=one_mask):
            calls.append(op(*of_n, **options))
    return (torch.stack([out for out, _ in calls]), torch.stack([lse for _, lse in calls])), (0, 0)
